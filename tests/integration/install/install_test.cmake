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
foreach(file share/weightbroker/weightbroker.protoset share/weightbroker/protos/weightbroker/v1/types.proto
    share/doc/weightbroker/keeper.md etc/weightbroker.json.example etc/weightbroker/sets.json.example share/man/man1/weightbroker.1
    share/bash-completion/completions/weightbroker)
  if(NOT EXISTS ${PREFIX}/${file})
    message(FATAL_ERROR "${file} is not installed")
  endif()
endforeach()

# Each unit starts a program that is there, and says where its document and its configuration are.
foreach(unit weightbroker:weightbrokerd weightbrokerd@:weightbrokerd weightbroker-keeper:weightbrokerd weightbroker-broker:weightbroker-broker)
  string(REPLACE ":" ";" unit ${unit})
  list(GET unit 1 program)
  list(GET unit 0 unit)
  file(READ ${PREFIX}/lib/systemd/system/${unit}.service text)
  if(NOT text MATCHES "\nExecStart=${PREFIX}/bin/${program} " OR text MATCHES "@[A-Z_]+@")
    message(FATAL_ERROR "${unit}.service does not start ${PREFIX}/bin/${program}:\n${text}")
  endif()
  if(NOT text MATCHES "\nDocumentation=file://${PREFIX}/share/doc/weightbroker/keeper.md\n")
    message(FATAL_ERROR "${unit}.service names another document than the one installed:\n${text}")
  endif()
endforeach()
file(READ ${PREFIX}/lib/systemd/system/weightbroker.service text)
if(NOT text MATCHES " --config_file=${PREFIX}/etc/weightbroker.json ")
  message(FATAL_ERROR "weightbroker.service does not read ${PREFIX}/etc/weightbroker.json:\n${text}")
endif()
find_program(SYSTEMD_ANALYZE systemd-analyze)
if(SYSTEMD_ANALYZE)
  run(${SYSTEMD_ANALYZE} verify --man=no --recursive-errors=no ${PREFIX}/lib/systemd/system/weightbroker.service
    ${PREFIX}/lib/systemd/system/weightbroker-keeper.service ${PREFIX}/lib/systemd/system/weightbroker-broker.service
    ${PREFIX}/lib/systemd/system/weightbrokerd@.service)
endif()
file(REMOVE_RECURSE ${WORK_DIR})
