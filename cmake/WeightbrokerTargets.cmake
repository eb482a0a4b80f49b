# One function declares a library, one a program, one a test. Each folder's CMakeLists.txt is a list of them.

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
if(PROJECT_IS_TOP_LEVEL)
  set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/bin)
endif()

find_program(WEIGHTBROKER_CCACHE ccache)
if(WEIGHTBROKER_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  # Paths relative to this clone and no working directory in the hash: every clone on a machine shares what was compiled.
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env
    CCACHE_BASEDIR=${PROJECT_SOURCE_DIR} CCACHE_NOHASHDIR=1
    CCACHE_SLOPPINESS=include_file_ctime,include_file_mtime,time_macros,pch_defines ${WEIGHTBROKER_CCACHE})
endif()

# Options of our own code only; never of generated or third-party code.
add_library(weightbroker_options INTERFACE)
target_compile_options(weightbroker_options INTERFACE
  -Wall -Wextra -Werror -Wshadow -Wnon-virtual-dtor -Woverloaded-virtual -Wimplicit-fallthrough)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  target_compile_options(weightbroker_options INTERFACE -Wno-restrict)  # false in std::string operator+ (GCC PR105651)
endif()
target_include_directories(weightbroker_options INTERFACE ${PROJECT_SOURCE_DIR})

if(WEIGHTBROKER_SANITIZE)
  add_compile_options(-fsanitize=${WEIGHTBROKER_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all)
  add_link_options(-fsanitize=${WEIGHTBROKER_SANITIZE})
endif()

# weightbroker_library(<name> SOURCES ... [DEPS ...] [PRIVATE_DEPS ...])  ->  target weightbroker_<name>, alias weightbroker::<name>
function(weightbroker_library name)
  cmake_parse_arguments(ARG "" "" "SOURCES;DEPS;PRIVATE_DEPS" ${ARGN})
  add_library(weightbroker_${name} STATIC ${ARG_SOURCES})
  add_library(weightbroker::${name} ALIAS weightbroker_${name})
  target_link_libraries(weightbroker_${name} PUBLIC ${ARG_DEPS} PRIVATE $<BUILD_INTERFACE:weightbroker_options> ${ARG_PRIVATE_DEPS})
  target_include_directories(weightbroker_${name} PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}>)
endfunction()

# weightbroker_embed_files(<variable> FUNCTION <name> FILES ...)  ->  in the variable, a source with that function
function(weightbroker_embed_files variable)
  cmake_parse_arguments(ARG "" "FUNCTION" "FILES" ${ARGN})
  string(REPLACE ";" "|" files "${ARG_FILES}")
  set(output ${CMAKE_CURRENT_BINARY_DIR}/${ARG_FUNCTION}.cc)
  add_custom_command(OUTPUT ${output}
    COMMAND ${CMAKE_COMMAND} "-DFILES=${files}" -DFUNCTION=${ARG_FUNCTION} -DOUTPUT=${output}
            -P ${PROJECT_SOURCE_DIR}/cmake/EmbedFiles.cmake
    DEPENDS ${ARG_FILES} ${PROJECT_SOURCE_DIR}/cmake/EmbedFiles.cmake
    VERBATIM)
  set(${variable} ${output} PARENT_SCOPE)
endfunction()

# weightbroker_program(<file name> SOURCES ... [DEPS ...])  ->  ${PROJECT_BINARY_DIR}/bin/<file name>
function(weightbroker_program name)
  cmake_parse_arguments(ARG "NO_INSTALL" "" "SOURCES;DEPS" ${ARGN})
  add_executable(${name} ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE weightbroker_options ${ARG_DEPS})
  if(NOT ARG_NO_INSTALL)
    install(TARGETS ${name} RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
  endif()
endfunction()

# weightbroker_static_program(<file name> SOURCES ... PARTS ... DEPS ... [SHARED ...])  ->  ${PROJECT_BINARY_DIR}/bin/<file name>
# A program that links everything but libc statically: PARTS are our libraries without what they link, all of which DEPS
# must name (imported targets). Each shared library costs a process resident pages and time to start: a small program may
# have few of the former, and one that is waited for none of the latter. What SHARED names has no archive on the systems
# that we know; it comes with libstdc++, which is then shared, too, so that exceptions pass between the two.
# Where a static library is missing, or under a sanitizer, it links as other programs do.
function(weightbroker_static_program name)
  cmake_parse_arguments(ARG "" "" "SOURCES;PARTS;DEPS;SHARED" ${ARGN})
  weightbroker_find_static(libraries missing ${ARG_DEPS})
  if(missing OR WEIGHTBROKER_SANITIZE)
    list(TRANSFORM ARG_PARTS PREPEND weightbroker_)
    weightbroker_program(${name} SOURCES ${ARG_SOURCES} DEPS ${ARG_PARTS})
    return()
  endif()
  foreach(part ${ARG_PARTS})
    list(APPEND ARG_SOURCES $<TARGET_OBJECTS:weightbroker_${part}>)
  endforeach()
  weightbroker_program(${name} SOURCES ${ARG_SOURCES}
    DEPS -Wl,--start-group ${libraries} -Wl,--end-group ${ARG_SHARED} Threads::Threads ${CMAKE_DL_LIBS})
  foreach(part ${ARG_PARTS})
    add_dependencies(${name} weightbroker_${part})
    target_include_directories(${name} SYSTEM PRIVATE $<TARGET_PROPERTY:weightbroker_${part},INTERFACE_INCLUDE_DIRECTORIES>)
  endforeach()
  target_link_options(${name} PRIVATE -Wl,--gc-sections)
  if(NOT ARG_SHARED)
    target_link_options(${name} PRIVATE -static-libstdc++ -static-libgcc)
  endif()
endfunction()

# The static libraries of imported targets and of all that they link, and those of them that are not there.
function(weightbroker_find_static libraries_out missing_out)
  set(open ${ARGN})
  while(open)
    list(POP_FRONT open dep)
    if(dep MATCHES "^-l(re2)$")  # the one that pkg-config found
      find_library(WEIGHTBROKER_ARCHIVE_${CMAKE_MATCH_1} lib${CMAKE_MATCH_1}.a)
      mark_as_advanced(WEIGHTBROKER_ARCHIVE_${CMAKE_MATCH_1})
      if(WEIGHTBROKER_ARCHIVE_${CMAKE_MATCH_1})
        list(APPEND libraries ${WEIGHTBROKER_ARCHIVE_${CMAKE_MATCH_1}})
      else()
        list(APPEND missing ${dep})
      endif()
    endif()
    if(NOT TARGET ${dep} OR dep IN_LIST seen)
      continue()
    endif()
    list(APPEND seen ${dep})
    get_target_property(links ${dep} INTERFACE_LINK_LIBRARIES)
    if(links)
      list(APPEND open ${links})
    endif()
    get_target_property(location ${dep} LOCATION)
    if(NOT location MATCHES "^(.*/lib[^/]*)\\.(so|a)[.0-9]*$")
      continue()  # headers only
    endif()
    set(archive ${CMAKE_MATCH_1}.a)
    if(EXISTS ${archive})
      list(APPEND libraries ${archive})
    else()
      list(APPEND missing ${archive})
    endif()
  endwhile()
  set(${libraries_out} ${libraries} PARENT_SCOPE)
  set(${missing_out} ${missing} PARENT_SCOPE)
endfunction()

# weightbroker_test(<name> SOURCES ... [DEPS ...] [LABELS unit|integration|...])  ->  a GoogleTest program, one ctest entry
function(weightbroker_test name)
  cmake_parse_arguments(ARG "" "TIMEOUT" "SOURCES;DEPS;LABELS" ${ARGN})
  add_executable(${name} ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE weightbroker_options ${ARG_DEPS} GTest::gmock GTest::gtest_main)
  # What is under test is optimized; the matchers that test it cost more to optimize than to run.
  if(WEIGHTBROKER_SANITIZE)
    target_compile_options(${name} PRIVATE -O0)
    target_compile_definitions(${name} PRIVATE WEIGHTBROKER_SANITIZED)  # whose memory is not as in a release
  else()
    target_compile_options(${name} PRIVATE -O1)
  endif()
  target_compile_definitions(${name} PRIVATE
    WEIGHTBROKER_TEST_DATA="${PROJECT_SOURCE_DIR}/tests/data"
    WEIGHTBROKER_BIN_DIR="${PROJECT_BINARY_DIR}/bin")
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/tests)
  add_test(NAME ${name} COMMAND ${name})
  if(NOT ARG_LABELS)
    set(ARG_LABELS unit)
  endif()
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 120)
  endif()
  set_tests_properties(${name} PROPERTIES LABELS "${ARG_LABELS}" TIMEOUT ${ARG_TIMEOUT})
endfunction()
