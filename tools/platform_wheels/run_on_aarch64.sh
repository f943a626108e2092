#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Usage: run_on_aarch64.sh FOLDER WHEEL PYTHON
# Installs a wheel of Linux aarch64 into an environment in FOLDER that QEMU runs, optimizes a small model there, runs it, and runs
# tests of the operators with the wheel's library. PYTHON is one of this machine, with pip.
set -euo pipefail
cd "$(dirname "$0")/../.."
folder=$1 wheel=$2 python=$3
bash tools/platform_wheels/make_aarch64_python.sh "$folder"
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
"$python" - >"$folder/packages.txt" <<'END'
import tomllib

groups = tomllib.load(open("pyproject.toml", "rb"))["dependency-groups"]
print(*(package for name in ("onnx", "tests") for package in groups[name] if isinstance(package, str)), sep="\n")
END
# What packages.done has is installed.
if ! cmp -s "$folder/packages.txt" "$folder/packages.done"; then
  install -r "$folder/packages.txt"
  cp "$folder/packages.txt" "$folder/packages.done"
fi
rm -rf "$site"/stof "$site"/stof_onnx-*
install --no-deps "$wheel"
check=$PWD/tools/check_wheel.py
(cd "$(mktemp -d)" && "$arm" "$check")
# Operators against fp64 references, without child processes.
STOF_LIBRARY=$site/stof/lib/libstof_ort.so "$arm" -m pytest -q -p no:cacheprovider -o pythonpath="$site" $(sed 's/#.*//' tools/platform_wheels/aarch64_tests.txt)
