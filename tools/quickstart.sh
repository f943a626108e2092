#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Usage: quickstart.sh [PYTHON]
# Installs stof into .venv, fills an exported ModernBERT-base with random weights, optimizes it and times both.
# Needs Python 3.11 or later with venv, a C++17 compiler, 4 GB of memory and 1.5 GB of disk. Nothing outside this folder
# is changed.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-python3}
name=modernbert-base.dynamo.sdpa
length=2048
work=build/quickstart
# What a developer's shell may have set would replace the library or the package that is installed here.
unset STOF_LIBRARY PYTHONPATH PYTHONHOME

fail() {
  echo "quickstart: $1" >&2
  exit 1
}
began=$SECONDS
step() { printf '\n== %s (%d s so far)\n' "$1" $((SECONDS - began)); }

command -v "$python" >/dev/null || fail "no $python; install Python 3.11 or later, or run make quickstart PYTHON=..."
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  fail "$("$python" --version) is too old; run make quickstart PYTHON=... with Python 3.11 or later"
"$python" -c 'import ensurepip, venv' 2>/dev/null || fail "$python has no venv; on Debian: apt-get install python3-venv"
found=
for compiler in ${CXX:+"$CXX"} c++ g++ clang++; do
  if command -v "$compiler" >/dev/null; then found=$compiler && break; fi
done
[ -n "$found" ] || fail "no C++ compiler; on Debian: apt-get install g++, or set CXX"

step "1/4 installing stof with ONNX Runtime into .venv"
"$python" -m venv .venv
.venv/bin/python -m pip install -q --disable-pip-version-check '.[cpu]'
.venv/bin/stof-optimize --version

step "2/4 filling the exported graph of ModernBERT-base with random weights"
mkdir -p "$work"
.venv/bin/python models/build.py "$name" -o "$work"

step "3/4 optimizing it: stof-optimize $work/$name.onnx"
.venv/bin/stof-optimize "$work/$name.onnx"

step "4/4 timing both at S = $length"
.venv/bin/python tools/compare.py "$work/$name.onnx" "$work/$name.stof.onnx" --length "$length" --rounds 3

printf '\nAll of it took %d s. Now yours: .venv/bin/stof-optimize model.onnx; README.md shows how to run the result.\n' \
  $((SECONDS - began))
