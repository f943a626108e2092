#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Optimized models in old and new versions of ONNX Runtime: runtimes.sh PYTHON LIBRARY VERSION...
# The models are made with the current environment's stof; every version gets an environment of its own.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=$1
library=$(realpath "$2")
shift 2
work=build/runtimes
rm -rf $work/models
STOF_LIBRARY=$library PYTHONPATH=optimizer "$python" tests/runtimes/prepare.py $work/models
for version in "$@"; do
  venv=$work/venv-$version
  [ -x $venv/bin/python ] || "$python" -m venv $venv
  # Wheels before 1.19 were built for NumPy 1.
  case $version in 1.1[0-8].*) numpy='numpy<2' ;; *) numpy='numpy' ;; esac
  $venv/bin/python -m pip install -q "$numpy" "onnxruntime==$version"
  $venv/bin/python tests/runtimes/check.py $work/models "$library" "$version"
done
