#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Usage: release_check.sh [PYTHON]
# Whether what is here can be released: the source distribution and the wheels of all platforms in dist/, which are built where
# they are missing, and what tools/release_facts.py asks of the project's files. A wheel of other sources is a fault: `make wheels`
# builds it again. Uploads nothing.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-python3}
tools=.venv-wheels
[ -x $tools/bin/python ] || "$python" -m venv $tools
$tools/bin/python -m pip install -q --disable-pip-version-check --upgrade 'pip>=25.1'
$tools/bin/python -m pip install -q --disable-pip-version-check --group wheels

version=$($tools/bin/python tools/release_facts.py --version)
mapfile -t platforms < <($tools/bin/python tools/platform_wheels/platforms.py)
wheels=()
for platform in "${platforms[@]}"; do
  wheels+=("dist/stof_onnx-$version-py3-none-${platform#* }.whl")
  [ -e "${wheels[-1]}" ] || bash tools/wheels.sh "$python" "${platform% *}"
done
rm -f dist/stof_onnx-*.tar.gz
$tools/bin/python -m build --sdist --no-isolation --outdir dist . >/dev/null
$tools/bin/python tools/platform_wheels/contents.py "${wheels[@]}"
$tools/bin/python -m twine check --strict "${wheels[@]}" "dist/stof_onnx-$version.tar.gz"
$tools/bin/python tools/release_facts.py "dist/stof_onnx-$version.tar.gz"
