# Installs into a new prefix, builds a project against what is there, and runs it and the programs.
#   cmake -DBUILD_DIR=... -DSOURCE_DIR=... -DWORK_DIR=... -DCXX_COMPILER=... -DCXX_FLAGS=... -DPROGRAMS=a,b -P install_test.cmake

function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE code OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT code EQUAL 0)
    list(JOIN ARGN " " command)
    message(FATAL_ERROR "${command}\nexits with ${code}:\n${output}")
  endif()
  set(output "${output}" PARENT_SCOPE)
endfunction()

file(REMOVE_RECURSE ${WORK_DIR})
set(PREFIX ${WORK_DIR}/prefix)
run(${CMAKE_COMMAND} --install ${BUILD_DIR} --prefix ${PREFIX})

run(${CMAKE_COMMAND} -S ${SOURCE_DIR} -B ${WORK_DIR}/build -G Ninja -DCMAKE_PREFIX_PATH=${PREFIX}
  -DCMAKE_CXX_COMPILER=${CXX_COMPILER} -DCMAKE_CXX_FLAGS=${CXX_FLAGS})
run(${CMAKE_COMMAND} --build ${WORK_DIR}/build)
run(${WORK_DIR}/build/with_library)
run(${WORK_DIR}/build/with_stub)

# What a shared object that holds the library shows of it: the public classes and the generated code, nothing behind them;
# and no descriptor of google.rpc or of the health service, which torch and others in the process register too.
run(nm --dynamic --demangle --defined-only ${WORK_DIR}/build/libplugin.so)
if(NOT output MATCHES "weightbroker::Client::Attach")
  message(FATAL_ERROR "the public classes are hidden")
endif()
if(output MATCHES "[TWVDBu] (vtable for |typeinfo for )?weightbroker::(client::|internal::v1::|HostSlab|MakeError|WireReader)[^\n]*")
  message(FATAL_ERROR "visible but not public: ${CMAKE_MATCH_0}")
endif()
file(STRINGS ${WORK_DIR}/build/libplugin.so descriptors REGEX "google/rpc/|grpc/health/")
if(descriptors)
  message(FATAL_ERROR "registers a descriptor that is not ours: ${descriptors}")
endif()

string(REPLACE "," ";" PROGRAMS "${PROGRAMS}")
foreach(program ${PROGRAMS})
  run(${PREFIX}/bin/${program} --help)
endforeach()
foreach(file share/weightbroker/weightbroker.protoset share/weightbroker/protos/weightbroker/v1/types.proto)
  if(NOT EXISTS ${PREFIX}/${file})
    message(FATAL_ERROR "${file} is not installed")
  endif()
endforeach()
file(REMOVE_RECURSE ${WORK_DIR})
