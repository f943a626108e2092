#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Usage: run_on_windows.sh FOLDER WHEEL PYTHON
# Runs the library of a Windows wheel in Wine: the C ABI, and optimized models in the onnxruntime.dll of the package for Windows.
# PYTHON has stof and onnxruntime for this machine; it writes the models and the expected outputs. FOLDER keeps what is made.
set -euo pipefail
cd "$(dirname "$0")/../.."
mkdir -p "$1"
folder=$(cd "$1" && pwd)
wheel=$2 python=$3
: "${STOF_ZIG:?names no zig: run tools/wheels.sh}" "${ONNXRUNTIME_INCLUDE_DIR:?names no folder: run tools/wheels.sh}"
runtime=$("$python" -c 'import onnxruntime; print(onnxruntime.__version__)')
if [ ! -e "$folder/onnxruntime-$runtime/onnxruntime.dll" ]; then
  rm -rf "$folder/download"
  "$python" -m pip download -q --disable-pip-version-check --no-deps --only-binary :all: --platform win_amd64 --python-version 3.11 \
    -d "$folder/download" "onnxruntime==$runtime"
  "$python" -m zipfile -e "$folder"/download/onnxruntime-*.whl "$folder/download"
  mkdir -p "$folder/onnxruntime-$runtime"
  mv "$folder"/download/onnxruntime/capi/onnxruntime*.dll "$folder/onnxruntime-$runtime"
fi
rm -rf "$folder/wheel" "$folder/cases"
"$python" -m zipfile -e "$wheel" "$folder/wheel"
"$python" tools/platform_wheels/make_cases.py "$folder/cases"
"$STOF_ZIG" c++ -target x86_64-windows-gnu -std=c++17 -O1 -Wall -Wextra -Werror -I. -isystem "$ONNXRUNTIME_INCLUDE_DIR" \
  tools/platform_wheels/run_on_windows.cc -o "$folder/run_on_windows.exe"
# Outside of the sources: Wine's drive Z is a link to all files of this machine, which tools that walk the folder would follow.
WINEPREFIX=$(mktemp -d)
export WINEPREFIX WINEDEBUG=-all
trap 'wineserver -k 2>/dev/null || true; rm -rf "$WINEPREFIX"' EXIT
for isa in portable avx2 ''; do
  STOF_CPU_ISA=$isa wine "$folder/run_on_windows.exe" "$folder/onnxruntime-$runtime/onnxruntime.dll" "$folder/wheel/stof/lib/stof_ort.dll" \
    "$folder/cases/attention" "$folder/cases/encoder"
done
