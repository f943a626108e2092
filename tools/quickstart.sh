#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs stof into .venv, fills an exported ModernBERT-base with random weights, optimizes it and times both.
set -euo pipefail
cd "$(dirname "$0")/.."
"${1:-python3}" -m venv .venv
.venv/bin/python -m pip install -q --upgrade pip
.venv/bin/python -m pip install -q --config-settings=cmake.define.STOF_CUDA=OFF '.[cpu]'
mkdir -p build/quickstart
.venv/bin/python models/build.py modernbert-base.dynamo.sdpa -o build/quickstart
.venv/bin/stof-optimize build/quickstart/modernbert-base.dynamo.sdpa.onnx
.venv/bin/python tools/compare.py build/quickstart/modernbert-base.dynamo.sdpa.onnx \
  build/quickstart/modernbert-base.dynamo.sdpa.stof.onnx --length 2048 --rounds 3
