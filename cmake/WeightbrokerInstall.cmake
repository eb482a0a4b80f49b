# Install rules: find_package(weightbroker) gives weightbroker::client, weightbroker::proto and weightbroker::redeem.
#
#   bin/                     every program
#   lib/                     the libraries, static; lib/cmake/weightbroker/ the package
#   include/weightbroker/    the client's public headers and redeem.h; v1/ the generated messages and stub
#   share/weightbroker/      protos/ the API's .proto files; weightbroker.protoset the descriptor set
#   share/doc/weightbroker/  the documents
#   lib/systemd/system/      the unit files, with the paths of the prefix; etc/weightbroker.json.example and
#                            etc/weightbroker/sets.json.example what they read

include(CMakePackageConfigHelpers)

set(PACKAGE_FOLDER ${CMAKE_INSTALL_LIBDIR}/cmake/weightbroker)

# What engines link to, and the static libraries behind it: CMake refuses to generate if one is missing here.
set(INSTALLED_LIBRARIES
  client architecture base checkpoint convert cuda digest file gpu_inventory gpu_load gpu_memory group identity internal_proto json
  kernels load_engine memory plan process publish quant socket_path)
# Hidden in whatever they are linked into, but for what WEIGHTBROKER_EXPORT marks: an engine's shared object must not offer
# our names to torch and others in the same process. The stub's stay visible, as any generated code's.
foreach(name ${INSTALLED_LIBRARIES})
  set_target_properties(weightbroker_${name} PROPERTIES CXX_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON)
endforeach()
foreach(name ${INSTALLED_LIBRARIES} proto redeem)
  set_target_properties(weightbroker_${name} PROPERTIES EXPORT_NAME ${name})
  install(TARGETS weightbroker_${name} EXPORT weightbroker ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
endforeach()
install(EXPORT weightbroker NAMESPACE weightbroker:: FILE weightbrokerTargets.cmake DESTINATION ${PACKAGE_FOLDER})

configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/weightbrokerConfig.cmake.in
  ${PROJECT_BINARY_DIR}/weightbrokerConfig.cmake INSTALL_DESTINATION ${PACKAGE_FOLDER})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/weightbrokerConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/weightbrokerConfig.cmake ${PROJECT_BINARY_DIR}/weightbrokerConfigVersion.cmake
  ${PROJECT_SOURCE_DIR}/cmake/Findliburing.cmake
  DESTINATION ${PACKAGE_FOLDER})

install(DIRECTORY ${PROJECT_SOURCE_DIR}/client/include/weightbroker DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(DIRECTORY ${PROJECT_BINARY_DIR}/protos/weightbroker/v1 DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/weightbroker
  FILES_MATCHING PATTERN "*.pb.h")
install(DIRECTORY ${PROJECT_SOURCE_DIR}/protos/weightbroker/v1
  DESTINATION ${CMAKE_INSTALL_DATADIR}/weightbroker/protos/weightbroker FILES_MATCHING PATTERN "*.proto")
install(FILES ${PROJECT_BINARY_DIR}/protos/weightbroker.protoset DESTINATION ${CMAKE_INSTALL_DATADIR}/weightbroker)

if(PROJECT_IS_TOP_LEVEL)
  set(WEIGHTBROKER_UNIT_DIR lib/systemd/system CACHE STRING "Where systemd's unit files go, relative to the prefix or absolute")
  install(DIRECTORY ${PROJECT_SOURCE_DIR}/docs/ DESTINATION ${CMAKE_INSTALL_DOCDIR} FILES_MATCHING PATTERN "*.md")
  install(CODE "
    set(BIN_DIR ${CMAKE_INSTALL_BINDIR})
    set(DOC_DIR ${CMAKE_INSTALL_DOCDIR})
    set(SYSCONF_DIR ${CMAKE_INSTALL_SYSCONFDIR})
    set(UNIT_DIR ${WEIGHTBROKER_UNIT_DIR})
    set(WORK_DIR ${PROJECT_BINARY_DIR}/systemd)
    include(${PROJECT_SOURCE_DIR}/deploy/systemd/install_units.cmake)")
  install(CODE "
    set(TOOL ${PROJECT_BINARY_DIR}/bin/weightbroker)
    set(MAN_DIR ${CMAKE_INSTALL_MANDIR})
    set(DATA_DIR ${CMAKE_INSTALL_DATADIR})
    set(WORK_DIR ${PROJECT_BINARY_DIR}/tool_pages)
    include(${PROJECT_SOURCE_DIR}/cmake/install_tool_pages.cmake)")
endif()
