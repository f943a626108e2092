# SPDX-License-Identifier: Apache-2.0
"""Models whose attention has a known part that hardly counts: all rows attend the first token, whose scores are far above."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

WORDS, H, D = 32, 4, 16
WIDTH = H * D
MARK = 0  # the token that every row attends; it stands first in each text


def encoder(path: Path, gaps: tuple[float, ...] = (9.0, 9.0), *, padding: bool = False) -> Path:
    """Tokens [B, S] -> layers of attention with residual connections -> ``hidden`` [B, S, N] and ``pooled`` [B, N].

    In layer i every query scores the mark about ``gaps[i]`` above all others. ``padding``: keys are masked by
    ``attention_mask`` [B, S].
    """
    rng = np.random.default_rng(4)
    table = rng.standard_normal((WORDS, WIDTH)) * 0.25
    table[:, 0] = 0.0
    table[:, 1] = 1.0  # read by queries
    table[MARK, 0] = 1.0  # read by keys
    weights: dict[str, np.ndarray] = {"table": table}
    make = helper.make_node
    nodes = [make("Gather", ["table", "input_ids"], ["x0"])]
    if padding:
        nodes += [
            make("Cast", ["attention_mask"], ["real"], to=TensorProto.BOOL),
            make("Unsqueeze", ["real", "axes"], ["real4"]),
            make("Where", ["real4", "nought", "low"], ["added"]),
        ]
    for i, gap in enumerate(gaps):
        q, k, v = (rng.standard_normal((WIDTH, WIDTH)) * 0.1 for _ in range(3))
        for matrix in (q, k):  # the first column of each head meets the mark alone
            matrix[:, ::D] = 0.0
            matrix[:2, :] = 0.0
        q[1, ::D], k[0, ::D] = gap, np.sqrt(D)
        v[:, :2] = 0.0  # the residual stream keeps what queries and keys read
        weights |= {f"q{i}": q, f"k{i}": k, f"v{i}": v}
        for name in "qkv":
            nodes += [
                make("MatMul", [f"x{i}", f"{name}{i}"], [f"{name}{i}_flat"]),
                make("Reshape", [f"{name}{i}_flat", "split"], [f"{name}{i}_split"]),
                make("Transpose", [f"{name}{i}_split"], [f"{name}{i}_heads"], perm=[0, 2, 3, 1] if name == "k" else [0, 2, 1, 3]),
            ]  # fmt: skip
        scores = f"scores{i}"
        nodes += [
            make("MatMul", [f"q{i}_heads", f"k{i}_heads"], [f"products{i}"]),
            make("Mul", [f"products{i}", "scale"], [scores]),
        ]
        if padding:
            nodes.append(make("Add", [scores, "added"], [f"{scores}_masked"]))
            scores = f"{scores}_masked"
        nodes += [
            make("Softmax", [scores], [f"weights{i}"], axis=-1, name=f"layer{i}/Softmax"),
            make("MatMul", [f"weights{i}", f"v{i}_heads"], [f"mixed{i}"]),
            make("Transpose", [f"mixed{i}"], [f"mixed{i}_rows"], perm=[0, 2, 1, 3]),
            make("Reshape", [f"mixed{i}_rows", "join"], [f"mixed{i}_flat"]),
            make("Add", [f"x{i}", f"mixed{i}_flat"], [f"x{i + 1}"]),
        ]
    nodes += [
        make("Identity", [f"x{len(gaps)}"], ["hidden"]),
        make("ReduceMean", ["hidden", "one"], ["pooled"], keepdims=0),
    ]
    numbers = {
        "split": np.array([0, 0, H, D]), "join": np.array([0, 0, WIDTH]), "axes": np.array([1, 2]), "one": np.array([1])
    }  # fmt: skip
    floats = {"scale": 1 / np.sqrt(D), "nought": 0.0, "low": -1e9}
    stored = [numpy_helper.from_array(a.astype(np.float32), n) for n, a in weights.items()]
    stored += [numpy_helper.from_array(np.float32(a), n) for n, a in floats.items()]
    stored += [numpy_helper.from_array(a.astype(np.int64), n) for n, a in numbers.items()]
    info = helper.make_tensor_value_info
    inputs = [info("input_ids", TensorProto.INT64, ["B", "S"])]
    inputs += [info("attention_mask", TensorProto.INT64, ["B", "S"])] if padding else []
    outputs = [info("hidden", TensorProto.FLOAT, ["B", "S", WIDTH]), info("pooled", TensorProto.FLOAT, ["B", WIDTH])]
    graph = helper.make_graph(nodes, "encoder", inputs, outputs, stored)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), path)
    return path


def texts(count: int, length: int, seed: int = 0) -> np.ndarray:
    """Token ids [count, length] behind the mark."""
    ids = np.random.default_rng(seed).integers(1, WORDS, (count, length))
    ids[:, 0] = MARK
    return ids
