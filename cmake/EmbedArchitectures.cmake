# cmake -DFILES=a.json|b.json -DOUTPUT=embedded.cc -P EmbedArchitectures.cmake
# Writes a source file that has the contents of each file as a string, by the file's name.
string(REPLACE "|" ";" FILES "${FILES}")
set(source "#include \"common/plan/embedded_architectures.h\"\n\nnamespace weightbroker {\n\n")
string(APPEND source "std::span<const EmbeddedArchitecture> EmbeddedArchitectures() {\n")
string(APPEND source "  static constexpr EmbeddedArchitecture kFiles[] = {\n")
foreach(file ${FILES})
  get_filename_component(label ${file} NAME)
  file(READ ${file} text)
  string(APPEND source "      {\"${label}\", R\"json(${text})json\"},\n")
endforeach()
string(APPEND source "  };\n  return kFiles;\n}\n\n}  // namespace weightbroker\n")
file(WRITE ${OUTPUT} "${source}")
