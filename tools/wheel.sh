#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Usage: wheel.sh [PYTHON [PIP_OPTION..]]
# Runs what a plain `pip install .` installs in an empty environment. Then builds the CPU wheel into dist/, and runs it in an
# empty environment of each Python from 3.11 on that is found. auditwheel gives the wheel the manylinux tag of the oldest
# glibc that its libraries run with.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
python=${1:-python3}
build_options=("${@:2}")
. tools/wheel_lib.sh

# The headers go, too: pip's build has to fetch them itself.
rm -rf dist .venv-plain .venv-wheel build/wheel-raw build/wheel/tensorrt-headers
"$python" -m venv .venv-plain
.venv-plain/bin/python -m pip install -q --disable-pip-version-check "${build_options[@]}" .
check_installation .venv-plain

# The same build in build/wheel again, of which little is left to do.
build_wheel .
wheel=$(echo dist/*.whl)
for name in "$python" python3.11 python3.12 python3.13 python3.14; do
  if ! "$name" -c '' 2>/dev/null; then
    echo "$name: not found, the wheel was not tried with it"
    continue
  fi
  rm -rf .venv-wheel
  "$name" -m venv .venv-wheel
  .venv-wheel/bin/python -m pip install -q --disable-pip-version-check --only-binary :all: "$wheel[cpu]"
  check_installation .venv-wheel
  run_model .venv-wheel
done
echo "$wheel"
