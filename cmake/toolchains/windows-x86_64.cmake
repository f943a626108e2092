# SPDX-License-Identifier: Apache-2.0
# Windows on x86-64, with the ABI of MinGW for C++ and that of all compilers for C.
set(STOF_ZIG_TARGET x86_64-windows-gnu)
set(CMAKE_SYSTEM_NAME Windows)
set(CMAKE_SYSTEM_PROCESSOR AMD64)
include(${CMAKE_CURRENT_LIST_DIR}/zig.cmake)
