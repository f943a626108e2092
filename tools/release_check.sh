#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Usage: release_check.sh [PYTHON]
# Whether what is here can be released: the source distribution and the wheels of all platforms in dist/, which are built where
# they are missing, and what tools/release_facts.py asks of the project's files. Uploads nothing.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-python3}
tools=.venv-wheels
[ -x $tools/bin/python ] || "$python" -m venv $tools
$tools/bin/python -m pip install -q --disable-pip-version-check --upgrade 'pip>=25.1'
$tools/bin/python -m pip install -q --disable-pip-version-check --group wheels

version=$($tools/bin/python tools/release_facts.py --version)
for platform in linux-x86_64:manylinux_2_28_x86_64 linux-aarch64:manylinux_2_28_aarch64 macos-arm64:macosx_11_0_arm64 windows-x86_64:win_amd64; do
  [ -e "dist/stof_onnx-$version-py3-none-${platform#*:}.whl" ] || bash tools/wheels.sh "$python" "${platform%:*}"
done
rm -f dist/stof_onnx-*.tar.gz
$tools/bin/python -m build --sdist --no-isolation --outdir dist . >/dev/null
$tools/bin/python tools/platform_wheels/contents.py "dist/stof_onnx-$version"-*.whl
$tools/bin/python -m twine check --strict "dist/stof_onnx-$version"*
$tools/bin/python tools/release_facts.py "dist/stof_onnx-$version.tar.gz"
