# SPDX-License-Identifier: Apache-2.0
# stof_plugin_library(TARGET EXPORTS): what libraries that other programs load have in common on each system. They export the
# symbols of the version script EXPORTS and nothing else: templates of std:: could replace those of the host program. They
# need no C++ library of the host, which may be older. `install` puts them beside the Python package.
function(stof_plugin_library target exports)
  if(WIN32)
    # __declspec(dllexport) names the exports. The name has no prefix, as of other plugins there.
    set_target_properties(${target} PROPERTIES PREFIX "")
  elseif(APPLE)
    # Symbols are hidden but for those declared visible: plugins/core/host/allocation_macos.cc hides those of libc++.
    set_target_properties(${target} PROPERTIES SUFFIX .dylib INSTALL_NAME_DIR "@rpath" BUILD_WITH_INSTALL_NAME_DIR ON)
  else()
    set(script ${PROJECT_SOURCE_DIR}/${exports})
    target_link_options(${target} PRIVATE -Wl,--version-script=${script})
    set_target_properties(${target} PROPERTIES LINK_DEPENDS ${script})
  endif()
  if(NOT STOF_SANITIZE)
    if(NOT APPLE)
      target_link_options(${target} PRIVATE -static-libstdc++ -static-libgcc)
    endif()
    if(NOT APPLE AND NOT WIN32)
      target_link_options(${target} PRIVATE -Wl,-z,defs)
    endif()
    target_link_options(${target} PRIVATE $<$<CONFIG:Release>:-s>)
  endif()
  install(TARGETS ${target} LIBRARY DESTINATION stof/lib RUNTIME DESTINATION stof/lib)
endfunction()
