#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Usage: run_on_aarch64.sh FOLDER WHEEL PYTHON
# Installs a wheel of Linux aarch64 into an environment in FOLDER that QEMU runs, optimizes a small model there, runs it, and runs
# tests of the operators with the wheel's library. PYTHON is one of this machine.
set -euo pipefail
cd "$(dirname "$0")/../.."
folder=$1 wheel=$2 python=$3
bash tools/platform_wheels/make_aarch64_python.sh "$folder" "$python"
folder=$(cd "$folder" && pwd)
arm=$folder/env/bin/python
site=$(echo "$folder"/env/lib/python3.*/site-packages)
version=$(basename "$(dirname "$site")")
# install PIP_OPTION..: puts packages into the emulated environment; its own pip would take minutes to start.
install() {
  local tags=()
  for tag in manylinux_2_28 manylinux_2_27 manylinux_2_26 manylinux_2_24 manylinux_2_17 manylinux2014; do tags+=(--platform "${tag}_aarch64"); done
  "$python" -m pip install -q --disable-pip-version-check --target "$site" --upgrade --only-binary :all: \
    --python-version "${version#python}" --implementation cp "${tags[@]}" "$@"
}
if [ ! -e "$folder/packages.done" ]; then
  "$python" -c 'import tomllib; print(*(p for p in tomllib.load(open("pyproject.toml", "rb"))["dependency-groups"]["onnx"]), sep="\n")' >"$folder/packages.txt"
  "$python" -c 'import tomllib; print(*(p for p in tomllib.load(open("pyproject.toml", "rb"))["dependency-groups"]["tests"] if isinstance(p, str)), sep="\n")' >>"$folder/packages.txt"
  install -r "$folder/packages.txt"
  touch "$folder/packages.done"
fi
rm -rf "$site"/stof "$site"/stof_onnx-*
install --no-deps "$wheel"
check=$PWD/tools/check_wheel.py tests=$PWD/tests
(cd "$(mktemp -d)" && "$arm" "$check")
# Operators against fp64 references, without child processes.
STOF_LIBRARY=$site/stof/lib/libstof_ort.so "$arm" -m pytest -q -p no:cacheprovider -o pythonpath="$site" $(sed 's/#.*//' tools/platform_wheels/aarch64_tests.txt)
