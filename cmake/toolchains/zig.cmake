# SPDX-License-Identifier: Apache-2.0
# Cross builds with zig, which brings a clang, linkers, C libraries and a static libc++ for all platforms. The file of a
# platform sets STOF_ZIG_TARGET and what CMake calls the system, and includes this. zig is the program that the environment
# variable STOF_ZIG names, or the one of PATH (`pip install ziglang` brings it, tools/wheels.sh does so).

set(wrappers ${CMAKE_CURRENT_LIST_DIR}/../../build/zig/${STOF_ZIG_TARGET})
cmake_path(NORMAL_PATH wrappers)
if(DEFINED ENV{STOF_ZIG})
  set(zig $ENV{STOF_ZIG})
else()
  find_program(zig zig NO_CACHE)
endif()
if(zig)
  execute_process(COMMAND ${zig} version OUTPUT_VARIABLE version OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE code)
  if(NOT code EQUAL 0)
    message(FATAL_ERROR "`${zig} version` fails (${code}): STOF_ZIG has to name the program zig")
  endif()
  # CMake takes one program for a compiler. ccache compares the text of the scripts, and thereby the version.
  foreach(tool c++ ar ranlib rc)
    set(target "")
    if(tool STREQUAL "c++")
      set(target " -target ${STOF_ZIG_TARGET}")
    endif()
    file(CONFIGURE OUTPUT ${wrappers}/${tool} @ONLY CONTENT "#!/bin/sh\n# zig @version@\nexec '@zig@' @tool@@target@ \"$@\"\n")
    file(CHMOD ${wrappers}/${tool} PERMISSIONS OWNER_READ OWNER_WRITE OWNER_EXECUTE GROUP_READ GROUP_EXECUTE WORLD_READ WORLD_EXECUTE)
  endforeach()
elseif(NOT EXISTS ${wrappers}/c++)
  message(FATAL_ERROR "no zig was found: pip install ziglang, and set STOF_ZIG to the program zig in its folder")
endif()

set(CMAKE_CXX_COMPILER ${wrappers}/c++)
set(CMAKE_AR ${wrappers}/ar)
set(CMAKE_RANLIB ${wrappers}/ranlib)
set(CMAKE_RC_COMPILER ${wrappers}/rc)
# zig compiles libc++ for each way to link. CMake's checks need no program, and the libraries that are built share one libc++.
set(CMAKE_TRY_COMPILE_TARGET_TYPE STATIC_LIBRARY)
# Programs of this machine help to build; its libraries are of another platform. Headers of ONNX Runtime and TensorRT are the same.
set(CMAKE_FIND_ROOT_PATH ${wrappers})
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE ONLY)
