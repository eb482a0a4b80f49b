# Run by `cmake --install`: has the tool that was built write its man page and its completion for bash, and installs them.
#
# Needs TOOL, MAN_DIR, DATA_DIR, the latter two relative to the prefix or absolute, and WORK_DIR.

foreach(dir MAN_DIR DATA_DIR)
  cmake_path(ABSOLUTE_PATH ${dir} BASE_DIRECTORY ${CMAKE_INSTALL_PREFIX})
endforeach()
file(MAKE_DIRECTORY ${WORK_DIR})

# The file's name is what man and bash look for.
function(install_page command name folder)
  execute_process(COMMAND ${TOOL} ${command} OUTPUT_FILE ${WORK_DIR}/${name} COMMAND_ERROR_IS_FATAL ANY)
  file(INSTALL ${WORK_DIR}/${name} DESTINATION ${folder})
endfunction()

install_page(man weightbroker.1 ${MAN_DIR}/man1)
install_page(completion weightbroker ${DATA_DIR}/bash-completion/completions)
