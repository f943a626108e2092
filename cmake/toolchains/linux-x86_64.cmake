# SPDX-License-Identifier: Apache-2.0
# Linux on x86-64 with glibc 2.28 or later.
set(STOF_ZIG_TARGET x86_64-linux-gnu.2.28)
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR x86_64)
include(${CMAKE_CURRENT_LIST_DIR}/zig.cmake)
