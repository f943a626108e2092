# SPDX-License-Identifier: Apache-2.0
# Says at the end of the configuration and of an install which parts this build leaves out, why, and which command builds
# them. left_out.json keeps the reasons beside the libraries, for stof/installation.py.

set(left_out "")  # members of a JSON object; a reason has no semicolon, since CMake's lists do
set(left_out_lines "")

# Without an option no command builds the part on this system.
function(stof_leave_out part name reason option)
  list(APPEND left_out "\"${part}\": \"${reason}\"")
  set(line "Not built: ${name} (${reason}).")
  if(option)
    # Every version of pip passes the environment on; its option -C came with 23.1.
    string(APPEND line " To build: CMAKE_ARGS=-D${option}=ON pip install .")
  endif()
  list(APPEND left_out_lines "${line}")
  set(left_out "${left_out}" PARENT_SCOPE)
  set(left_out_lines "${left_out_lines}" PARENT_SCOPE)
endfunction()

if(NOT CMAKE_SYSTEM_NAME STREQUAL "Linux")
  stof_leave_out(cuda "CUDA kernels" "stof has them on Linux alone" "")
elseif(CMAKE_CROSSCOMPILING AND NOT STOF_CUDA)
  stof_leave_out(cuda "CUDA kernels" "they take long to compile and are built where asked for" STOF_CUDA)
elseif(NOT STOF_CUDA)
  find_package(CUDAToolkit QUIET)
  if(NOT CUDAToolkit_FOUND)
    set(toolkit "no CUDA toolkit was found and 12.5 or later is needed")
  elseif(CUDAToolkit_VERSION VERSION_LESS 12.5)
    set(toolkit "CUDA toolkit ${CUDAToolkit_VERSION} was found and 12.5 or later is needed")
  else()
    set(toolkit "CUDA toolkit ${CUDAToolkit_VERSION} was found")
  endif()
  stof_leave_out(cuda "CUDA kernels" "they take long to compile and are built where asked for, ${toolkit}" STOF_CUDA)
endif()
if(NOT CMAKE_SYSTEM_NAME STREQUAL "Linux")
  stof_leave_out(tensorrt "TensorRT plugin" "stof has it on Linux alone" "")
elseif(NOT STOF_TENSORRT)
  stof_leave_out(tensorrt "TensorRT plugin" "STOF_TENSORRT is OFF" STOF_TENSORRT)
elseif(NOT STOF_TRT_MAJOR)
  stof_leave_out(tensorrt "TensorRT plugin" "TensorRT's headers were neither found nor fetched" STOF_TENSORRT)
endif()

list(JOIN left_out ", " left_out)
file(WRITE ${PROJECT_BINARY_DIR}/left_out.json "{${left_out}}\n")
install(FILES ${PROJECT_BINARY_DIR}/left_out.json DESTINATION stof/lib)
foreach(line IN LISTS left_out_lines)
  message(STATUS "${line}")
  install(CODE "message(STATUS [[${line}]])")
endforeach()
