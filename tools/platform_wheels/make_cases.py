# SPDX-License-Identifier: Apache-2.0
"""Writes optimized models with inputs and the outputs that run_on_windows.cc compares: ``make_cases.py FOLDER``.

Run it in an environment that has stof, in the sources. Each folder of FOLDER is a case: ``model.onnx``, the optimized one,
``case.txt``, and a file of raw values for each tensor. Outputs are those of the original model in ONNX Runtime here. A line of
``case.txt`` is ``input|output NAME f32|i64 DIM..``.
"""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort

ROOT = Path(__file__).resolve().parents[2]
TYPES = {"float32": "f32", "int64": "i64"}


def write_case(
    folder: Path, source: Path, feeds: dict[str, np.ndarray], options: list[str], expected: set[str]
) -> None:
    """One case of the model file ``source``. Raises where the result lacks operators of stof that are ``expected``."""
    target = folder / "model.onnx"
    command = [sys.executable, "-m", "stof", source, "-o", target, *options]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    kinds = {node.op_type for node in onnx.load(target).graph.node if node.domain == "stof"}
    if not expected <= kinds:
        raise ValueError(f"{source.name} has the operators {sorted(kinds)} after stof, expected {sorted(expected)}")
    session = ort.InferenceSession(source, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    outputs = dict(zip(names, session.run(names, feeds), strict=True))
    lines = []
    for role, tensors in (("input", feeds), ("output", outputs)):
        for name, array in tensors.items():
            lines.append(" ".join([role, name, TYPES[array.dtype.name], *map(str, array.shape)]))
            array.tofile(folder / f"{name}.bin")
    (folder / "case.txt").write_text("\n".join(lines) + "\n")


def main() -> int:
    """The cases: attention alone, and an encoder with chains."""
    parent = Path(sys.argv[1])
    rng = np.random.default_rng(0)
    for name in ("attention", "encoder"):
        (parent / name).mkdir(parents=True, exist_ok=True)

    check = runpy.run_path(str(ROOT / "tools/check_wheel.py"))
    source = parent / "attention.onnx"
    onnx.save(onnx.parser.parse_model(check["MODEL"]), source)
    feeds = {letter: rng.standard_normal((1, 4, 300, 8), np.float32) for letter in "qkv"}
    write_case(parent / "attention", source, feeds, [], {"StofAttention"})

    sys.path.insert(0, str(ROOT / "models"))
    build = __import__("build")
    source = build.write("narrow/modernbert.dynamo.eager", parent / "encoder.onnx")
    tokens = rng.integers(0, 90, (2, 200))
    padded = np.ones((2, 200), np.int64)
    padded[1, 150:] = 0
    feeds = {"input_ids": tokens.astype(np.int64), "attention_mask": padded}
    write_case(parent / "encoder", source, feeds, ["--chains", "on"], {"StofAttention", "StofChain"})
    return 0


if __name__ == "__main__":
    sys.exit(main())
