# SPDX-License-Identifier: Apache-2.0
"""ONNX's Attention in ONNX Runtime's CPU provider beside the nodes that it replaces: ``python -m bench.cpu.standard_attention``.

Both alternate on one thread, and the least processor time of each counts, so that other load hardly does. Masks are inputs:
layers share them. It prints the table of docs/lab/standard-attention.md, from which the constants of
``stof.attention.standard.cost`` are.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

_H, _D = 12, 64
_LENGTHS = (128, 512, 2048)


@dataclass(frozen=True)
class TimedAttention:
    """One way to compute an attention.

    Attributes:
        name: in the table.
        mask: the pairs that are allowed: "", "causal", "padding" or "window".
        form: of the nodes "add", "where", each also with " guard"; of the operator "is_causal", "lengths", "bool", "float".
        is_operator: it is one Attention.
    """

    name: str
    mask: str
    form: str
    is_operator: bool = False

    def model(self, rank: int, dtype: int = TensorProto.FLOAT) -> onnx.ModelProto:
        """The graph, of query, key and value of rank 3 or 4."""
        shape: list[int | str | None] = [1, "S", _H * _D] if rank == 3 else [1, _H, "S", _D]
        inputs = [helper.make_tensor_value_info(n, dtype, shape) for n in "qkv"]
        kind = TensorProto.BOOL if self.form.split(" ")[0] in ("where", "bool") else dtype
        kind = TensorProto.INT64 if self.form == "lengths" else kind
        if self.form and self.form != "is_causal" and self.form != "guard":
            inputs.append(helper.make_tensor_value_info("m", kind, None))
        nodes, stored = self._operator(rank) if self.is_operator else self._nodes(rank, dtype)
        outputs = [helper.make_tensor_value_info("y", dtype, shape)]
        graph = helper.make_graph(nodes, "attention", inputs, outputs, stored)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=10)

    def _operator(self, rank: int) -> tuple[list[onnx.NodeProto], list[onnx.TensorProto]]:
        names = ["q", "k", "v"]
        names += {"bool": ["m"], "float": ["m"], "lengths": ["", "", "", "m"]}.get(self.form, [])
        attributes: dict[str, Any] = {"q_num_heads": _H, "kv_num_heads": _H} if rank == 3 else {}
        attributes |= {"is_causal": 1} if self.form == "is_causal" else {}
        return [helper.make_node("Attention", names, ["y"], **attributes)], []

    def _nodes(self, rank: int, dtype: int) -> tuple[list[onnx.NodeProto], list[onnx.TensorProto]]:
        numbers = helper.tensor_dtype_to_np_dtype(dtype)
        stored = {
            "scale": np.array(_D**-0.5, numbers),
            "none": np.array(-np.inf, numbers),
            "zero": np.array(0, numbers),
        }
        nodes = []
        if rank == 3:
            stored |= {"split": np.array([0, 0, _H, _D]), "merge": np.array([0, 0, _H * _D])}
            for n in "qkv":
                nodes.append(helper.make_node("Reshape", [n, "split"], [f"{n}4"]))
                perm = [0, 2, 3, 1] if n == "k" else [0, 2, 1, 3]
                nodes.append(helper.make_node("Transpose", [f"{n}4"], [f"{n}t"], perm=perm))
            heads = ("qt", "kt", "vt")
        else:
            nodes.append(helper.make_node("Transpose", ["k"], ["kt"], perm=[0, 1, 3, 2]))
            heads = ("q", "kt", "v")
        nodes.append(helper.make_node("MatMul", list(heads[:2]), ["s0"]))
        nodes.append(helper.make_node("Mul", ["s0", "scale"], ["s"]))
        word = self.form.split(" ")[0]
        if word == "add":
            nodes.append(helper.make_node("Add", ["s", "m"], ["masked"]))
        elif word == "where":
            nodes.append(helper.make_node("Where", ["m", "s", "none"], ["masked"]))
        scores = "masked" if word in ("add", "where") else "s"
        nodes.append(helper.make_node("Softmax", [scores], ["p"], axis=-1))
        weights = "p"
        if "guard" in self.form:
            nodes.append(helper.make_node("IsNaN", ["p"], ["nan"]))
            nodes.append(helper.make_node("Where", ["nan", "zero", "p"], ["guarded"]))
            weights = "guarded"
        nodes.append(helper.make_node("MatMul", [weights, heads[2]], ["o" if rank == 3 else "y"]))
        if rank == 3:
            nodes.append(helper.make_node("Transpose", ["o"], ["ot"], perm=[0, 2, 1, 3]))
            nodes.append(helper.make_node("Reshape", ["ot", "merge"], ["y"]))
        return nodes, [numpy_helper.from_array(a, n) for n, a in stored.items()]

    def feed(self, length: int, dtype: type) -> dict[str, np.ndarray]:
        """The mask as this way reads it."""
        row = np.arange(length)
        allowed = {
            "causal": row <= row[:, None],
            "padding": np.broadcast_to(row < length * 3 // 4, (length, length)),
            "window": abs(row - row[:, None]) <= 64,
        }.get(self.mask)
        word = self.form.split(" ")[0]
        if allowed is None or word in ("is_causal", "guard"):
            return {}
        if word == "lengths":
            return {"m": np.array([length * 3 // 4])}
        if self.mask == "padding" and not self.is_operator:
            allowed = allowed[:1]  # nodes broadcast it
        whole = np.ascontiguousarray(allowed[None, None])
        return {"m": whole if word in ("where", "bool") else np.where(whole, 0, -np.inf).astype(dtype)}


CANDIDATES = (
    TimedAttention("nodes, no mask", "", ""),
    TimedAttention("nodes, no mask, guard", "", "guard"),
    TimedAttention("Attention, no mask", "", "", True),
    TimedAttention("nodes, causal, Add", "causal", "add"),
    TimedAttention("nodes, causal, Add, guard", "causal", "add guard"),
    TimedAttention("Attention, is_causal", "causal", "is_causal", True),
    TimedAttention("Attention, causal, boolean mask", "causal", "bool", True),
    TimedAttention("nodes, padding, Add", "padding", "add"),
    TimedAttention("Attention, padding, boolean mask", "padding", "bool", True),
    TimedAttention("Attention, padding, float mask", "padding", "float", True),
    TimedAttention("Attention, nonpad_kv_seqlen", "padding", "lengths", True),
    TimedAttention("nodes, window of 129, Add", "window", "add"),
    TimedAttention("nodes, window of 129, Where", "window", "where"),
    TimedAttention("Attention, window, boolean mask", "window", "bool", True),
    TimedAttention("Attention, window, float mask", "window", "float", True),
)


def measure(length: int, rank: int, seconds: float, dtype: type = np.float32) -> dict[str, float]:
    """The least processor time of each candidate, in seconds, after so many seconds of turns."""
    rng = np.random.default_rng(0)
    shape = (1, length, _H * _D) if rank == 3 else (1, _H, length, _D)
    heads: dict[str, np.ndarray] = {n: rng.standard_normal(shape).astype(dtype) for n in "qkv"}
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    runs = []
    for candidate in CANDIDATES:
        model = candidate.model(rank, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))
        session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        runs.append((candidate.name, session, heads | candidate.feed(length, dtype)))
    best = {candidate.name: float("inf") for candidate in CANDIDATES}
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for name, session, feed in runs:
            start = time.process_time()
            session.run(None, feed)
            best[name] = min(best[name], time.process_time() - start)
    return best


def main(arguments: Sequence[str] | None = None) -> None:
    """The command: prints the table in milliseconds."""
    parser = argparse.ArgumentParser(description=__doc__.split(":", maxsplit=1)[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=60.0, help="of turns at the longest inputs (60)")
    parser.add_argument("--half", action="store_true", help="in fp16")
    given = parser.parse_args(arguments)
    columns = {}
    for length in _LENGTHS:
        for rank in (3, 4):
            seconds = max(5.0, given.seconds * length / _LENGTHS[-1])
            columns[f"{length}, rank {rank}"] = measure(length, rank, seconds, np.float16 if given.half else np.float32)
    print("| ms |" + "|".join(f" {name} " for name in columns) + "|")
    print("|---" * (len(columns) + 1) + "|")
    for candidate in CANDIDATES:
        times = "|".join(f" {1e3 * column[candidate.name]:.3g} " for column in columns.values())
        print(f"| {candidate.name} |{times}|")


if __name__ == "__main__":
    main()
