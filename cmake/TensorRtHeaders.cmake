# SPDX-License-Identifier: Apache-2.0
# Sets STOF_TRT_INCLUDE_DIR to a folder that holds NvInferRuntime.h of TensorRT 10.3 or later, and STOF_TRT_MAJOR to its
# major version. No header is committed. Looked for in this order: the variable TENSORRT_INCLUDE_DIR (CMake's or the
# environment's), an installed TensorRT, the headers that cmake/fetch_tensorrt_headers.sh gets. Where there are none,
# STOF_TENSORRT=ON is an error, and with AUTO STOF_TRT_MAJOR stays empty.
# TENSORRT11_INCLUDE_DIR may name headers of another major version, for its self-registering library alone.

# The major version of the headers in a folder; empty: there are none.
function(stof_tensorrt_major dir result)
  set(${result} "" PARENT_SCOPE)
  if(EXISTS ${dir}/NvInferRuntime.h AND EXISTS ${dir}/NvInferVersion.h)
    file(STRINGS ${dir}/NvInferVersion.h line REGEX "define (TRT_MAJOR_ENTERPRISE|NV_TENSORRT_MAJOR) +[0-9]+")
    if(line MATCHES " ([0-9]+)")
      set(${result} ${CMAKE_MATCH_1} PARENT_SCOPE)
    endif()
  endif()
endfunction()

set(STOF_TRT_INCLUDE_DIR "${TENSORRT_INCLUDE_DIR}")
if(NOT STOF_TRT_INCLUDE_DIR)
  set(STOF_TRT_INCLUDE_DIR "$ENV{TENSORRT_INCLUDE_DIR}")
endif()
set(how "TENSORRT_INCLUDE_DIR")
if(NOT STOF_TRT_INCLUDE_DIR)
  find_path(installed NvInferRuntime.h HINTS $ENV{TENSORRT_ROOT} PATH_SUFFIXES include NO_CACHE)
  set(how "installed")
  if(installed)
    set(STOF_TRT_INCLUDE_DIR ${installed})
  endif()
endif()
set(log "")
if(NOT STOF_TRT_INCLUDE_DIR)
  set(STOF_TRT_INCLUDE_DIR ${PROJECT_BINARY_DIR}/tensorrt-headers)
  set(how "from the wheel kernel-lens")
  if(NOT EXISTS ${STOF_TRT_INCLUDE_DIR}/NvInferRuntime.h)
    find_package(Python3 COMPONENTS Interpreter)
    execute_process(COMMAND bash ${CMAKE_CURRENT_LIST_DIR}/fetch_tensorrt_headers.sh ${STOF_TRT_INCLUDE_DIR}
                            ${Python3_EXECUTABLE}
                    OUTPUT_VARIABLE log ERROR_VARIABLE log TIMEOUT 180)
  endif()
endif()
stof_tensorrt_major(${STOF_TRT_INCLUDE_DIR} STOF_TRT_MAJOR)
if(NOT STOF_TRT_MAJOR OR STOF_TRT_MAJOR LESS 10)
  if(STOF_TENSORRT STREQUAL "AUTO")
    set(STOF_TRT_MAJOR "")
    message(STATUS "TensorRT headers: none found (-DTENSORRT_INCLUDE_DIR=DIR names them)")
    return()
  endif()
  message(FATAL_ERROR
    "No headers of TensorRT 10 or 11 in ${STOF_TRT_INCLUDE_DIR}. Do one of these and configure again (for pip: in CMAKE_ARGS, "
    "a variable of the environment):\n"
    "  -DTENSORRT_INCLUDE_DIR=DIR, where DIR holds NvInferRuntime.h: include/ of a TensorRT or of the sources at "
    "github.com/NVIDIA/TensorRT\n"
    "  -DSTOF_TENSORRT=OFF, to build without the TensorRT plugin\n"
    "The last attempt said: ${log}")
endif()
message(STATUS "TensorRT headers: ${STOF_TRT_INCLUDE_DIR} (${STOF_TRT_MAJOR}, ${how})")
set(STOF_TRT11_INCLUDE_DIR "${TENSORRT11_INCLUDE_DIR}")
if(NOT STOF_TRT11_INCLUDE_DIR)
  set(STOF_TRT11_INCLUDE_DIR "$ENV{TENSORRT11_INCLUDE_DIR}")
endif()
