#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Everything that CI runs, from an empty environment: lint, types, build, C++ tests, Python tests, sanitizers, wheel.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-python3}
table=()
begin() { part=$1; started=$(date +%s); echo "== $part"; }
end() { table+=("$(printf '%-22s %5.1f min' "$part" "$(echo "($(date +%s) - $started) / 60" | bc -l 2>/dev/null || echo 0)")"); }

begin setup
[ -x .venv-test/bin/python ] || "$python" -m venv .venv-test
bin=$PWD/.venv-test/bin
"$bin/python" -m pip install -q --upgrade pip
"$bin/python" -m pip install -q 'numpy>=1.24' 'onnx==1.23.2' 'onnx-graphsurgeon==0.6.1' 'onnxruntime==1.31.1' \
  'ml_dtypes' 'pytest>=8' 'hypothesis>=6' 'mypy==2.4.1' 'ruff==0.17.5' 'clang-format==23.1.5' cmake ninja
export PATH=$bin:$PATH
end

begin lint
ruff check optimizer models tests tools
ruff format --check optimizer models tests tools
git ls-files -z '*.cc' '*.h' | xargs -0 clang-format --dry-run --Werror
mypy
end

begin build
cmake --preset dev
cmake --build --preset dev
end

begin 'unit (C++)'
ctest --preset dev
end

begin 'unit (Python)'
STOF_LIBRARY=$PWD/build/dev/libstof_ort.so python -m pytest -q
end

begin 'old runtimes'
bash tools/test_runtimes.sh "$bin/python" build/dev/libstof_ort.so 1.18.1 1.22.1 1.23.2 1.31.1
end

begin sanitizers
for preset in asan tsan; do
  cmake --preset $preset
  cmake --build --preset $preset
  ctest --preset $preset
done
end

begin wheel
bash tools/wheel.sh "$python"
end

printf '%s\n' "${table[@]}"
echo "all parts passed"
STOF_LIBRARY=$PWD/build/dev/libstof_ort.so python -m pytest -q tests/test_runtime.py
