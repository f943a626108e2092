#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Usage: wheels.sh [PYTHON [PLATFORM..]]
# Builds the CPU wheels of all platforms into dist/ on one Linux machine, by zig (cmake/toolchains), checks what is in them, and
# runs them: on Linux x86-64 as a user would, on Linux aarch64 in QEMU, and on Windows in Wine with the real ONNX Runtime.
# Nothing runs a wheel of macOS. A platform whose emulator is missing is built and not run, which the table says; with
# STOF_TEST_ALL=1 that is an error. PLATFORMs are the names that tools/platform_wheels/platforms.py prints; without any, all are
# built, and other wheels of stof-onnx leave dist/.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
python=${1:-python3}
all=()
declare -A tags
while read -r platform tag; do
  all+=("$platform")
  tags[$platform]=$tag
done < <("$python" tools/platform_wheels/platforms.py)
[ ${#all[@]} -gt 0 ] || exit 1  # the Python has said why
wanted=("${@:2}")
[ ${#wanted[@]} -gt 0 ] || wanted=("${all[@]}")
. tools/wheel_lib.sh

for platform in "${wanted[@]}"; do
  [ -n "${tags[$platform]:-}" ] || { echo "wheels.sh: no platform $platform; there are ${all[*]}" >&2; exit 2; }
done
# In the order of the list. The wheel of Linux x86-64 writes the models that the library of Windows runs.
platforms=()
for platform in "${all[@]}"; do
  if [[ " ${wanted[*]} " == *" $platform "* || ($platform = linux-x86_64 && " ${wanted[*]} " == *" windows-x86_64 "*) ]]; then
    platforms+=("$platform")
  fi
done

work=$root/build/wheels
tools=$root/.venv-wheels
mkdir -p "$work" dist
[ $# -gt 1 ] || rm -f dist/stof_onnx-*.whl
[ -x "$tools/bin/python" ] || "$python" -m venv "$tools"
"$tools/bin/python" -m pip install -q --disable-pip-version-check --upgrade 'pip>=25.1'
"$tools/bin/python" -m pip install -q --disable-pip-version-check --group wheels
export PATH=$tools/bin:$PATH
STOF_ZIG=${STOF_ZIG:-$(python -c 'import pathlib, ziglang; print(pathlib.Path(ziglang.__file__).parent / "zig")')}
export STOF_ZIG
# The compiler is a script, whose name does not say that it is clang.
export CCACHE_BASEDIR=$root CCACHE_NOHASHDIR=1 CCACHE_DEPEND=1 CCACHE_COMPILERTYPE=clang

# The headers of all platforms are the same: fetched once.
if [ -z "${ONNXRUNTIME_INCLUDE_DIR:-}" ]; then
  cmake -DPROJECT_BINARY_DIR="$work" -DSTOF_FETCH_RELEASE_HEADERS=ON -P cmake/OnnxRuntimeHeaders.cmake | tee "$work/headers.log"
  ONNXRUNTIME_INCLUDE_DIR=$(sed -n 's/^-- ONNX Runtime headers: \(.*\) (.*)$/\1/p' "$work/headers.log")
fi
TENSORRT_INCLUDE_DIR=$work/tensorrt-headers
[ -e "$TENSORRT_INCLUDE_DIR/NvInferRuntime.h" ] || bash cmake/fetch_tensorrt_headers.sh "$TENSORRT_INCLUDE_DIR" "$tools/bin/python"
export ONNXRUNTIME_INCLUDE_DIR TENSORRT_INCLUDE_DIR

# wheel_of PLATFORM: its file.
wheel_of() { echo dist/stof_onnx-*-py3-none-"${tags[$1]}".whl; }

build_platform() {
  local started
  started=$(date +%s)
  rm -f dist/stof_onnx-*-py3-none-"${tags[$1]}".whl
  # Of the script's text only this matters; other clones have zig in another folder.
  export CCACHE_COMPILERCHECK="string:zig $("$STOF_ZIG" version) $1"
  # Not stripped by CMake, whose strip is that of this machine: the linker leaves nothing for debuggers.
  python -m pip wheel -q --disable-pip-version-check --no-deps --no-build-isolation -w dist \
    -C "build-dir=$work/$1" -C install.strip=false -C "wheel.tags=py3-none-${tags[$1]}" \
    -C "cmake.define.CMAKE_TOOLCHAIN_FILE=$root/cmake/toolchains/$1.cmake" .
  echo "$1: built in $(($(date +%s) - started)) s"
}

declare -A ran
for platform in "${platforms[@]}"; do
  build_platform "$platform"
  ran[$platform]='built, not run'
done
rows() { for platform in "${platforms[@]}"; do echo "$(wheel_of "$platform")=${ran[$platform]}"; done; }
mapfile -t arguments < <(rows)
python tools/platform_wheels/contents.py "${arguments[@]}"

# missing PLATFORM WHAT REMEDY: an error where everything has to run.
missing() {
  ran[$1]="built, not run: no $2"
  echo "wheels.sh: $1 is not run, since there is no $2: $3"
  [ "${STOF_TEST_ALL:-0}" != 1 ] || exit 1
}

machine=$(uname -sm)
for platform in "${platforms[@]}"; do
  started=$(date +%s)
  case $platform in
    linux-x86_64)
      [ "$machine" = "Linux x86_64" ] || { missing $platform 'x86-64 machine with Linux' 'run it on another machine'; continue; }
      rm -rf .venv-wheel
      "$python" -m venv .venv-wheel
      .venv-wheel/bin/python -m pip install -q --disable-pip-version-check --only-binary :all: "$(wheel_of $platform)[cpu]"
      check_installation .venv-wheel
      run_model .venv-wheel
      ran[$platform]="run, in $(($(date +%s) - started)) s with its installation"
      ;;
    linux-aarch64)
      command -v qemu-aarch64-static >/dev/null || { missing $platform qemu-aarch64-static 'apt-get install qemu-user-static on Debian'; continue; }
      bash tools/platform_wheels/run_on_aarch64.sh "$work/aarch64" "$(wheel_of $platform)" "$tools/bin/python"
      ran[$platform]="run in QEMU, $(($(date +%s) - started)) s"
      ;;
    windows-x86_64)
      # The wheel of Linux x86-64 writes its models.
      [ "$machine" = "Linux x86_64" ] || { missing $platform 'x86-64 machine with Linux' 'run it on another machine'; continue; }
      command -v wine >/dev/null || { missing $platform wine 'apt-get install wine wine64 on Debian'; continue; }
      bash tools/platform_wheels/run_on_windows.sh "$work/windows" "$(wheel_of $platform)" .venv-wheel/bin/python
      ran[$platform]="run in Wine, $(($(date +%s) - started)) s"
      ;;
  esac
done
mapfile -t arguments < <(rows)
python tools/platform_wheels/contents.py "${arguments[@]}"
