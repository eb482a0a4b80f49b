# Run by `cmake --install`: writes the unit files with the folders of the prefix that is installed into, which may be
# another than the one that was configured, and an example of the configuration that they read.
#
# Needs BIN_DIR, DOC_DIR, SYSCONF_DIR and UNIT_DIR, relative to the prefix or absolute, and WORK_DIR.

foreach(dir BIN_DIR DOC_DIR UNIT_DIR)
  cmake_path(ABSOLUTE_PATH ${dir} BASE_DIRECTORY ${CMAKE_INSTALL_PREFIX})
endforeach()
# As GNUInstallDirs has it: what is installed into /usr is configured in /etc.
if(CMAKE_INSTALL_PREFIX STREQUAL "/usr" AND SYSCONF_DIR STREQUAL "etc")
  set(CONFIG_DIR /etc)
else()
  cmake_path(ABSOLUTE_PATH SYSCONF_DIR BASE_DIRECTORY ${CMAKE_INSTALL_PREFIX} OUTPUT_VARIABLE CONFIG_DIR)
endif()

file(READ ${CMAKE_CURRENT_LIST_DIR}/hardening.conf HARDENING)
foreach(unit weightbroker weightbroker-keeper weightbroker-broker weightbrokerd@)
  configure_file(${CMAKE_CURRENT_LIST_DIR}/${unit}.service.in ${WORK_DIR}/${unit}.service @ONLY)
  file(INSTALL ${WORK_DIR}/${unit}.service DESTINATION ${UNIT_DIR})
endforeach()
file(INSTALL ${CMAKE_CURRENT_LIST_DIR}/weightbroker.json.example DESTINATION ${CONFIG_DIR})
file(INSTALL ${CMAKE_CURRENT_LIST_DIR}/../desired/sets.json.example DESTINATION ${CONFIG_DIR}/weightbroker)
