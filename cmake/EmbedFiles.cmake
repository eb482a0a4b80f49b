# cmake -DFILES=a.json|b.json -DFUNCTION=EmbeddedModels -DOUTPUT=embedded.cc -P EmbedFiles.cmake
# Writes a source file with a function that gives the contents of each file as a string, by the file's name. Its
# declaration stands in a header of the library:  std::span<const EmbeddedFile> EmbeddedModels();
string(REPLACE "|" ";" FILES "${FILES}")
set(source "#include <span>\n\n#include \"common/base/embedded_file.h\"\n\nnamespace weightbroker {\n\n")
string(APPEND source "std::span<const EmbeddedFile> ${FUNCTION}();\n\n")
string(APPEND source "std::span<const EmbeddedFile> ${FUNCTION}() {\n")
string(APPEND source "  static constexpr EmbeddedFile kFiles[] = {\n")
foreach(file ${FILES})
  get_filename_component(label ${file} NAME)
  file(READ ${file} text)
  string(APPEND source "      {\"${label}\", R\"embedded(${text})embedded\"},\n")
endforeach()
string(APPEND source "  };\n  return kFiles;\n}\n\n}  // namespace weightbroker\n")
file(WRITE ${OUTPUT} "${source}")
