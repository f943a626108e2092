# SPDX-License-Identifier: Apache-2.0
"""Optimizes a small model with the installed stof, runs original and result in ONNX Runtime, and compares them.

For an environment that holds nothing but a wheel and its dependencies: run it there, away from the sources.
"""

from __future__ import annotations

import platform
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort

import stof

MODEL = """
<ir_version: 8, opset_import: ["": 18]>
g (float[1,4,S,8] q, float[1,4,S,8] k, float[1,4,S,8] v) => (float[1,4,S,8] out) {
    at2 = Constant <value = int64 {2}> ()
    zero = Constant <value = int64 {0}> ()
    one = Constant <value = int64 {1}> ()
    five = Constant <value = int64 {5}> ()
    shape = Shape (q)
    s = Gather (shape, at2)
    columns = Range (zero, s, one)
    last = Constant <value = int64[1] {1}> ()
    rows = Unsqueeze (columns, last)
    distance = Sub (rows, columns)
    far = Abs (distance)
    w = Less (far, five)
    kt = Transpose <perm = [0, 1, 3, 2]> (k)
    s1 = MatMul (q, kt)
    low = Constant <value = float {-inf}> ()
    s2 = Where (w, s1, low)
    p = Softmax (s2)
    out = MatMul (p, v)
}
"""


def main() -> int:
    """Ends with an error where something is wrong."""
    prefix = Path(sys.prefix)
    assert Path(stof.get_library_path()).is_relative_to(prefix), f"{stof.get_library_path()} is not in {prefix}"
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "model.onnx", Path(folder) / "model.stof.onnx"
        onnx.save(onnx.parser.parse_model(MODEL), source)
        # By -m, as in emulators: they run this interpreter, and no script that names it.
        subprocess.run([sys.executable, "-m", "stof", source], check=True, stdout=subprocess.DEVNULL)
        kinds = [n.op_type for n in onnx.load(target).graph.node]
        assert kinds == ["StofAttention"], kinds
        options = ort.SessionOptions()
        stof.register(options)
        rng = np.random.default_rng(0)
        feeds = {name: rng.standard_normal((1, 4, 300, 8), np.float32) for name in "qkv"}
        wanted, found = (
            ort.InferenceSession(path, options, providers=["CPUExecutionProvider"]).run(None, feeds)[0]
            for path in (source, target)
        )
        np.testing.assert_allclose(found, wanted, atol=2e-6)
    version = ".".join(map(str, sys.version_info[:3]))
    machine = f"{platform.system()} {platform.machine()}, {stof.build_info()['cpu_isa']}"
    print(f"Python {version}, ONNX Runtime {ort.__version__}, {machine}: optimized, ran, outputs are the same")
    return 0


if __name__ == "__main__":
    sys.exit(main())
