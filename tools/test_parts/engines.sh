#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Parse and build optimized models with TensorRT for RTX, which needs no GPU: engines.sh PYTHON LIBRARY TRT_LIBRARY.
# LIBRARY is libstof_ort.so, TRT_LIBRARY libstof_trt.so; both are made by the current build.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=$1
library=$(realpath "$2")
plugin=$(realpath "$3")
version=1.7.1.116
venv=${STOF_TRT_ENVIRONMENTS:-$PWD}/.venv-trt-models
# There are wheels for Linux on x86-64 only.
if [ "$(uname -sm)" != 'Linux x86_64' ]; then
  echo "TensorRT for RTX has no wheel for $(uname -sm): engines are not built here" >&2
  exit 0
fi
if [ ! -e "$venv/complete" ]; then
  rm -rf "$venv"
  "$python" -m venv "$venv"
  "$venv/bin/python" -m pip install -q --upgrade 'pip>=25.1'
  "$venv/bin/python" -m pip install -q "tensorrt_rtx_cu13_libs==$version" "tensorrt_rtx_cu13_bindings==$version" --group tests
  touch "$venv/complete"
fi
# The wheel lacks the name by which the parser loads the library; without it the process ends at the first plugin.
libs=$("$venv/bin/python" -c 'import importlib.util as u; print(u.find_spec("tensorrt_rtx_libs").submodule_search_locations[0])')
ln -sfn libtensorrt_rtx.so.1 "$libs/libtensorrt_rtx.so"
STOF_TEST_TENSORRT=1 STOF_LIBRARY=$library STOF_TRT_LIBRARY=$plugin "$venv/bin/python" -m pytest -q tests/tensorrt
