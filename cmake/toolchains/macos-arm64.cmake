# SPDX-License-Identifier: Apache-2.0
# macOS 11 or later on Apple silicon.
set(STOF_ZIG_TARGET aarch64-macos.11.0)
set(CMAKE_SYSTEM_NAME Darwin)
set(CMAKE_SYSTEM_PROCESSOR arm64)
include(${CMAKE_CURRENT_LIST_DIR}/zig.cmake)
