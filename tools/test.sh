#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Everything that CI runs, from an empty environment: test.sh [PYTHON] [PART...]. Without PARTs: all parts but the long ones, and
# these, too, with STOF_TEST_ALL=1. Parts that need the library build it. Any part alone: tools/test.sh lint
set -euo pipefail
cd "$(dirname "$0")/.."

parts=(lint build cuda unit zoo generated runtimes sanitizers registries levels aarch64 engines wheel wheels packages genai pytorch optimum
  texts integrations docs ended exports)
# Other optimization levels, AArch64 under an emulator, wheels of all platforms, and what takes long or needs torch (2 GB environments
# of their own): that the stored graphs are what it exports, that ONNX Runtime GenAI generates the same tokens.
long_parts=(levels aarch64 wheels packages genai pytorch optimum texts integrations docs ended exports)
library_parts=(unit zoo generated runtimes registries engines packages genai pytorch optimum texts integrations docs ended)

contains() { [[ " ${*:2} " == *" $1 "* ]]; } # contains WORD WORDS..
python=python3
if [ $# -gt 0 ] && ! contains "$1" "${parts[@]}" && command -v "$1" >/dev/null; then
  python=$1
  shift
fi
chosen=()
for part in "$@"; do
  if ! contains "$part" "${parts[@]}"; then
    printf 'no part and no Python: %s\nparts: %s\n' "$part" "${parts[*]}" >&2
    exit 2
  fi
  chosen+=("$part")
  contains "$part" "${library_parts[@]}" && chosen+=(build)
done
wants() { # wants PART: whether this run has it
  if [ ${#chosen[@]} -gt 0 ]; then
    contains "$1" "${chosen[@]}"
  elif [ "$1" = cuda ]; then
    command -v nvcc >/dev/null
  else
    [ "${STOF_TEST_ALL:-0}" = 1 ] || ! contains "$1" "${long_parts[@]}"
  fi
}

trap wait EXIT # what runs beside a part that failed ends, too
table=()
begin() { part=$1; started=$(date +%s); echo "== $part"; }
row() { awk -v part="$1" -v s=$(($(date +%s) - $2)) 'BEGIN {printf "%-22s %5.1f min", part, s / 60}'; }
end() { table+=("$(row "$part" "$started")"); }
# beside TITLE COMMAND..: runs what keeps at most one core busy beside the next parts. join prints it and adds its row.
beside() {
  mkdir -p build/beside
  local log="build/beside/$1.log" started
  started=$(date +%s)
  { "${@:2}" >"$log" 2>&1 && row "$1" "$started" >"$log.row"; } &
  beside_part=$1 beside_pid=$!
}
beside_pid=
join() {
  [ -n "$beside_pid" ] || return 0
  local log="build/beside/$beside_part.log" status=0
  wait "$beside_pid" || status=$?
  beside_pid=
  echo "== $beside_part"
  cat "$log"
  [ $status = 0 ] || exit $status
  table+=("$(cat "$log.row")")
}

begin setup
# environment FOLDER PIP_ARGUMENTS..: an environment with what pip finds for the arguments. --group needs pip 25.1.
environment() {
  [ -x "$1/bin/python" ] || "$python" -m venv "$1"
  "$1/bin/python" -m pip install -q --upgrade 'pip>=25.1'
  "$1/bin/python" -m pip install -q "${@:2}"
}
environment .venv-test --group dev
bin=$PWD/.venv-test/bin
export PATH=$bin:$PATH
# Builds of other presets, of the wheel and of other clones of this repository share the objects that are the same.
export CCACHE_BASEDIR=${CCACHE_BASEDIR:-$PWD} CCACHE_NOHASHDIR=1 CCACHE_DEPEND=1
library=$PWD/build/dev/libstof_ort.so
# Tests look at the report's page in a browser and on paper. Where these programs are not there and cannot be installed, they
# are skipped.
if wants unit; then
  browser=true
  if ! { command -v chromium google-chrome && command -v pdftoppm; } >/dev/null && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    browser='timeout 60 apt-get update -q && timeout 180 apt-get install -yq --no-install-recommends chromium poppler-utils'
  fi
  bash -c "$browser" >/dev/null 2>&1 &
  browser=$!
fi
end

if wants lint; then
  begin lint
  # The package for each system; after `if sys.platform` returns, the rest of a function is unreachable on that system.
  (
    mypy
    for system in win32 darwin; do
      mypy --platform $system --no-warn-unreachable --cache-dir .mypy_cache/$system optimizer/stof
    done
  ) &
  types=$!
  ruff check bench optimizer models tests tools examples
  ruff format --check bench optimizer models tests tools examples
  git ls-files -z '*.cc' '*.h' '*.cu' '*.cuh' | xargs -0 -n 100 -P 2 clang-format --dry-run --Werror
  # Before a build, whose library the tests' conftest needs.
  python -m pytest -q --noconftest tests/tools/test_checkout.py
  wait $types
  end
fi

if wants build; then
  begin build
  cmake --preset dev
  cmake --build --preset dev
  end
fi

# The kernels run only where there is a GPU; that they compile shows wherever nvcc is: most for one of two architectures, and all
# for both with STOF_TEST_ALL=1.
if wants cuda; then
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

if wants unit; then
  begin 'unit (C++)'
  ctest --preset dev -j 2
  end

  begin 'unit (Python)'
  wait $browser || echo 'no browser could be installed: its tests are skipped'
  STOF_LIBRARY=$library python -m pytest -q --timeout 900 -n auto --maxprocesses 4 --dist worksteal --ignore tests/generated \
    --ignore tests/zoo/test_zoo.py
  end
fi

if wants zoo; then
  begin zoo
  STOF_LIBRARY=$library python -m pytest -q --timeout 900 -n auto --maxprocesses 4 --dist worksteal tests/zoo/test_zoo.py
  end
fi

if wants generated; then
  begin generated
  STOF_LIBRARY=$library python -m pytest -q -s --timeout 1800 tests/generated
  if [ "${STOF_TEST_ALL:-0}" = 1 ]; then # other seeds, for half an hour
    STOF_LIBRARY=$library PYTHONPATH=optimizer python -m tests.generated --minutes 28 --mutants 400
  fi
  end
fi

# These two wait for downloads most of the time.
if wants runtimes; then
  runtimes=(1.18.1)
  [ "${STOF_TEST_ALL:-0}" = 1 ] && runtimes+=(1.22.1 1.23.2 1.31.1 1.32.0)
  beside 'old runtimes' bash tools/test_parts/runtimes.sh "$bin/python" "$library" "${runtimes[@]}"
fi

if wants sanitizers; then
  begin sanitizers
  avx512=ON # what a processor cannot run is compiled by the other builds
  [ "$(uname -m)" = x86_64 ] && ! grep -qw avx512f /proc/cpuinfo && avx512=OFF
  for preset in asan tsan; do
    cmake --preset $preset -DSTOF_AVX512=$avx512
    cmake --build --preset $preset --target stof_tests stof_trt_tests
  done
fi
join
# The plugin library in real plugin registries; its life without TensorRT is among the C++ tests.
if wants registries; then
  beside 'TensorRT registries' bash tools/test_parts/trt_registries.sh "$bin/python" build/dev
fi
if wants sanitizers; then
  # Side by side: the parts of either end one after the other.
  ctest --preset asan -j 2 > build/asan/ctest.log 2>&1 &
  asan=$! failed=0
  ctest --preset tsan -j 2 || failed=1
  wait $asan || failed=1
  cat build/asan/ctest.log
  [ $failed = 0 ]
  end
fi
join

# What the compiler inlines must not change results.
if wants levels; then
  begin 'optimization levels'
  for preset in o2 o0; do
    cmake --preset $preset
    cmake --build --preset $preset --target stof_tests
    ctest --preset $preset
  done
  end
fi

# The kernels of NEON, by a cross compiler and QEMU.
if wants aarch64; then
  begin AArch64
  bash tools/test_parts/aarch64.sh
  end
fi

# Optimized models, built by TensorRT for RTX with the plugin library and without.
if wants engines; then
  beside 'TensorRT engines' bash tools/test_parts/engines.sh "$bin/python" "$library" build/dev/libstof_trt.so
fi

# Compiled as in the first build, so that ccache has the objects.
if wants wheel; then
  begin wheel
  bash tools/wheel.sh "$python" --config-settings=cmake.define.STOF_WERROR=ON
  end
fi
join

# Wheels of all platforms by another compiler, loaded where an emulator is.
if wants wheels; then
  begin 'wheels (all platforms)'
  bash tools/wheels.sh "$python"
  if [ "$(uname -sm)" = 'Linux x86_64' ]; then # the optimizer, with the wheel's library, in a Python of Windows
    bash tools/windows/python.sh "$python"
    STOF_LIBRARY="Z:${PWD//\//\\}\\build\\wheels\\windows\\wheel\\stof\\lib\\stof_ort.dll" \
      build/windows/python tests/portability/check_windows.py build/wheels/windows/cases/encoder.onnx
  fi
  end
fi

# Files with trained weights out of published packages, as a new user would optimize them.
if wants packages; then
  begin packages
  STOF_LIBRARY=$library PYTHONPATH=optimizer python tests/packages/check.py
  end
fi

# Model folders with random weights: ONNX Runtime GenAI gives the tokens that it gave before.
if wants genai; then
  begin 'tokens (GenAI)'
  environment .venv-genai -r tests/genai/requirements.txt
  export STOF_LIBRARY=$library
  .venv-genai/bin/python tests/genai/check_tokens.py
  PYTHONPATH=optimizer .venv-genai/bin/python tests/genai/check_trained_pattern.py
  PYTHONPATH=optimizer:. .venv-genai/bin/python -m pytest -q tests/folders/test_genai_folders.py
  rm -rf build/genai-example
  .venv-genai/bin/python models/genai.py -o build/genai-example llama-fp32
  PYTHONPATH=optimizer .venv-genai/bin/python examples/genai_folder.py build/genai-example/llama-fp32 build/genai-example/fast
  unset STOF_LIBRARY
  end
fi

# In the same environment. Without PyTorch nothing is collected, which is an error.
if wants pytorch; then
  begin PyTorch
  environment .venv-genai -r tests/genai/requirements.txt
  export STOF_LIBRARY=$library
  .venv-genai/bin/python -m pytest -q tests/pytorch
  PYTHONPATH=optimizer .venv-genai/bin/python examples/pytorch_s2.py
  unset STOF_LIBRARY
  end
fi

# Folders that Optimum exports, of random weights, likewise. This part and the next two share an environment.
if wants optimum; then
  begin 'tokens (Optimum)'
  environment .venv-integrations -r tests/optimum/requirements.txt
  STOF_LIBRARY=$library PYTHONPATH=optimizer .venv-integrations/bin/python tests/optimum/check_generation.py
  end
fi

# Embeddings and scores of sentence-transformers and Optimum, of random weights, likewise.
if wants texts; then
  begin 'texts'
  environment .venv-integrations -r tests/texts/requirements.txt
  STOF_LIBRARY=$library PYTHONPATH=optimizer .venv-integrations/bin/python tests/texts/check_texts.py
  end
fi

# Optimized models in fastembed, Olive, Ray Data, Node.js; examples of sentence-transformers and Optimum.
if wants integrations; then
  begin integrations
  environment .venv-integrations -r tests/integrations/requirements.txt
  # Without the tools nothing is collected, which is an error.
  STOF_LIBRARY=$library .venv-integrations/bin/python -m pytest -q tests/integrations
  end
fi

# The site of the documentation, whose links are checked, and the notebook of examples/, which is run.
if wants docs; then
  begin docs
  bash tools/docs.sh "$python"
  .venv-docs/bin/python tests/docs/check_site.py
  environment .venv-docs --group notebook
  STOF_LIBRARY=$library PYTHONPATH=$PWD/optimizer .venv-docs/bin/python tests/docs/check_notebook.py
  end
fi

# Runs that end at random moments, by SIGKILL and SIGTERM.
if wants ended; then
  begin 'ended runs'
  STOF_LIBRARY=$library PYTHONPATH=optimizer python tests/command/end_at_random.py
  end
fi

if wants exports; then
  begin exports
  environment .venv-export --group export
  .venv-export/bin/python models/export.py --check --narrow
  end
fi

printf '%s\n' "${table[@]}"
echo "all parts passed"
