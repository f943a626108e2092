#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Usage: wheel_cuda.sh [PYTHON]
# Builds the wheel of the distribution stof-onnx-cuda13 into dist/, and runs it on the CPU in an empty environment;
# tools/check_gpu.sh tests kernels. Needs nvcc of CUDA 13, and long: it compiles all kernels. CUDA's runtime is linked in; the
# driver, cuBLASLt and NVRTC are found at run time.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
python=${1:-python3}
build_options=()
. tools/wheel_lib.sh

major=$("$python" -c 'import sys; sys.path.insert(0, "tools"); import cuda_project; print(cuda_project.CUDA_MAJOR)')
command -v nvcc >/dev/null || { echo "wheel_cuda.sh: no nvcc; install the CUDA toolkit $major" >&2; exit 1; }
nvcc --version | grep -q "release $major\." || { echo "wheel_cuda.sh: nvcc is not of CUDA $major" >&2; exit 1; }

# A copy of the sources, in which pyproject.toml has the other name.
source=build/wheel-cuda$major-source
rm -rf "$source"
mkdir -p "$source" dist
git ls-files -z | tar --null --files-from=- -cf - | tar -xf - -C "$source"
"$python" tools/cuda_project.py pyproject.toml >"$source/pyproject.toml"
rm -f dist/stof_onnx_cuda"$major"-*.whl
build_wheel "$source" --exclude libcuda.so.1

rm -rf .venv-wheel
"$python" -m venv .venv-wheel
.venv-wheel/bin/python -m pip install -q --disable-pip-version-check --only-binary :all: "$(echo dist/stof_onnx_cuda"$major"-*.whl)[gpu]"
check_installation .venv-wheel '^CUDA kernels: [0-9]'
run_model .venv-wheel
echo dist/stof_onnx_cuda"$major"-*.whl
