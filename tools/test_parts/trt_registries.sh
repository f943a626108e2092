#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Usage: trt_registries.sh PYTHON BUILD_DIR
# The one plugin library of BUILD_DIR in the registries of TensorRT 10, 11 and TensorRT for RTX, each in an environment of
# its own from the Python package index (90 to 190 MB; no GPU and no driver is needed). STOF_TRT_ENVIRONMENTS names a
# folder to keep them in.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=$1
build=$2
environments=${STOF_TRT_ENVIRONMENTS:-$PWD}
for runtime in lean==10.16.1.11 lean==11.4.0.106 rtx==1.7.1.116; do
  kind=${runtime%%==*}
  version=${runtime##*==}
  environment=$environments/.venv-trt-$kind-$version
  if ! [ -e "$environment/complete" ]; then
    rm -rf "$environment"
    "$python" -m venv "$environment"
    "$environment/bin/python" -m pip install -q --no-deps --disable-pip-version-check \
      "tensorrt_${kind}_cu13_libs==$version" "tensorrt_${kind}_cu13_bindings==$version"
    touch "$environment/complete"
  fi
  "$environment/bin/python" tests/trt/check_registry.py "$build/libstof_trt.so" "$build"/libstof_trt_autoreg*.so
done
