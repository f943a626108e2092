# SPDX-License-Identifier: Apache-2.0
# Linux on 64-bit Arm with glibc 2.28 or later.
set(STOF_ZIG_TARGET aarch64-linux-gnu.2.28)
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
include(${CMAKE_CURRENT_LIST_DIR}/zig.cmake)
