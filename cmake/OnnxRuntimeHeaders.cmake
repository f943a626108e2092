# SPDX-License-Identifier: Apache-2.0
# Sets STOF_ORT_INCLUDE_DIR to a folder that holds onnxruntime_c_api.h. No header is committed, and pip's wheels carry
# none, so they are looked for in this order: the variable ONNXRUNTIME_INCLUDE_DIR (CMake's or the environment's), an
# installed onnxruntime, the official release archive, Debian's libonnxruntime-dev unpacked without installing it.

set(STOF_ORT_RELEASE 1.20.1)
set(STOF_ORT_RELEASE_SHA256 67db4dc1561f1e3fd42e619575c82c601ef89849afc7ea85a003abbac1a1a105)

function(stof_use_ort_headers dir how)
  find_path(found onnxruntime_c_api.h PATHS ${dir} PATH_SUFFIXES include include/onnxruntime include/onnxruntime/core/session
            usr/include/onnxruntime NO_DEFAULT_PATH NO_CACHE)
  if(found)
    message(STATUS "ONNX Runtime headers: ${found} (${how})")
    set(STOF_ORT_INCLUDE_DIR ${found} PARENT_SCOPE)
  endif()
endfunction()

set(STOF_ORT_INCLUDE_DIR "")
set(given "${ONNXRUNTIME_INCLUDE_DIR}")
if(NOT given)
  set(given "$ENV{ONNXRUNTIME_INCLUDE_DIR}")
endif()
if(given)
  stof_use_ort_headers(${given} "ONNXRUNTIME_INCLUDE_DIR")
  if(NOT STOF_ORT_INCLUDE_DIR)
    message(FATAL_ERROR "ONNXRUNTIME_INCLUDE_DIR is ${given}, but there is no onnxruntime_c_api.h in it")
  endif()
endif()

if(NOT STOF_ORT_INCLUDE_DIR)
  find_path(installed onnxruntime_c_api.h PATH_SUFFIXES onnxruntime onnxruntime/core/session NO_CACHE)
  if(installed)
    stof_use_ort_headers(${installed} "installed")
  endif()
endif()

set(unpacked ${PROJECT_BINARY_DIR}/onnxruntime-headers)
if(NOT STOF_ORT_INCLUDE_DIR)
  stof_use_ort_headers(${unpacked} "fetched before")
endif()

if(NOT STOF_ORT_INCLUDE_DIR AND STOF_FETCH_RELEASE_HEADERS)
  # The hash is compared afterwards: with EXPECTED_HASH a network that cannot reach the archive would end the
  # configuration instead of going on to the next source.
  set(archive ${PROJECT_BINARY_DIR}/onnxruntime-release.tgz)
  file(DOWNLOAD
    https://github.com/microsoft/onnxruntime/releases/download/v${STOF_ORT_RELEASE}/onnxruntime-linux-x64-${STOF_ORT_RELEASE}.tgz
    ${archive} STATUS status TIMEOUT 60 INACTIVITY_TIMEOUT 5)
  list(GET status 0 code)
  if(code EQUAL 0)
    file(SHA256 ${archive} hash)
    if(hash STREQUAL STOF_ORT_RELEASE_SHA256)
      file(ARCHIVE_EXTRACT INPUT ${archive} DESTINATION ${unpacked} PATTERNS */include/*)
      stof_use_ort_headers(${unpacked}/onnxruntime-linux-x64-${STOF_ORT_RELEASE} "release archive")
    else()
      message(WARNING "The release archive has SHA-256 ${hash}, expected ${STOF_ORT_RELEASE_SHA256}: not used")
    endif()
  endif()
  file(REMOVE ${archive})
endif()

if(NOT STOF_ORT_INCLUDE_DIR)
  execute_process(COMMAND bash ${CMAKE_CURRENT_LIST_DIR}/fetch_debian_headers.sh ${unpacked}
                  RESULT_VARIABLE code OUTPUT_VARIABLE log ERROR_VARIABLE log TIMEOUT 120)
  stof_use_ort_headers(${unpacked} "Debian's libonnxruntime-dev")
endif()

if(NOT STOF_ORT_INCLUDE_DIR)
  message(FATAL_ERROR
    "No ONNX Runtime headers found. Do one of these and configure again (for pip: in CMAKE_ARGS, a variable "
    "of the environment):\n"
    "  -DONNXRUNTIME_INCLUDE_DIR=DIR, where DIR holds onnxruntime_c_api.h (any release from 1.18 on)\n"
    "  apt-get install libonnxruntime-dev (Debian 13 and later)\n"
    "  -DSTOF_ORT=OFF, to build without the ONNX Runtime plugin\n"
    "The last attempt said: ${log}")
endif()
