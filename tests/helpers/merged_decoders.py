# SPDX-License-Identifier: Apache-2.0
"""Small decoders whose If chooses between a prompt and a step behind a cache, with stored tables of positions."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

V, N, H, D = 40, 32, 2, 16  # words, hidden size, heads, head size
POSITIONS = 64  # rows of the stored tables
LOOKUPS = ("gather", "gather_nd", "gather_elements", "slice", "buffer", "rotary")


class GraphBuilder:
    """Nodes and constants of one graph, which are named as they come.

    Args:
        prefix: of all names.
        seed: of the weights.
    """

    def __init__(self, prefix: str = "", seed: int = 0) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self.prefix = prefix
        self._rng = np.random.default_rng(seed)

    def constant(self, value: object) -> str:
        name = f"{self.prefix}c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def weight(self, *shape: int) -> str:
        return self.constant((self._rng.standard_normal(shape) * 0.3).astype(np.float32))

    def add(self, op: str, *inputs: object, outputs: int = 1, **attributes: object) -> str:
        """Adds a node; operands that are no names become constants. Gives the name of its first output."""
        names = [f"{self.prefix}v{len(self.nodes)}" + (f"_{i}" if i else "") for i in range(outputs)]
        operands = [x if isinstance(x, str) else self.constant(x) for x in inputs]
        self.nodes.append(
            helper.make_node(op, operands, names, name=f"{self.prefix}{op}{len(self.nodes)}", **attributes)
        )
        return names[0]

    def size(self, tensor: str, axis: int) -> str:
        """The size of an axis, [1]."""
        return self.add("Shape", tensor, start=axis, end=axis + 1)


def make_merged_decoder(
    lookup: str = "gather", layers: int = 2, mask_length: str = "past_sequence + 1"
) -> onnx.ModelProto:
    """A decoder with inputs input_ids, attention_mask, past keys and values, and use_cache_branch.

    Args:
        lookup: how positions read a table of ``POSITIONS`` rows, one of ``LOOKUPS``.
        layers: of each branch, each of which is one site.
        mask_length: the name of the mask's length.
    """
    past = [f"past.{i}.{kind}" for i in range(layers) for kind in ("key", "value")]
    present = [f"present.{i}.{kind}" for i in range(layers) for kind in ("key", "value")]
    branches = [_make_branch(lookup, layers, past, has_past) for has_past in (True, False)]
    outputs = ["logits", *present]
    choice = helper.make_node(
        "If", ["use_cache_branch"], outputs, name="choice", then_branch=branches[0], else_branch=branches[1]
    )
    inputs = [
        helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "sequence"]),
        helper.make_tensor_value_info("attention_mask", TensorProto.INT64, ["batch", mask_length]),
        *(helper.make_tensor_value_info(n, TensorProto.FLOAT, ["batch", H, "past_sequence", D]) for n in past),
        helper.make_tensor_value_info("use_cache_branch", TensorProto.BOOL, [1]),
    ]
    results = [
        helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", "sequence", V]),
        *(helper.make_tensor_value_info(n, TensorProto.FLOAT, ["batch", H, "total", D]) for n in present),
    ]
    graph = helper.make_graph([choice], "merged", inputs, results)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def _make_branch(lookup: str, layers: int, past: list[str], has_past: bool) -> onnx.GraphProto:
    g = GraphBuilder("then_" if has_past else "else_")
    new = g.size("input_ids", 1)
    before = g.size(past[0], 2) if has_past else g.constant(np.array([0]))
    total = g.add("Add", before, new)
    scalars = [g.add("Squeeze", x) for x in (before, total)]
    positions = g.add("Range", *scalars, np.int64(1))
    x = g.add("Gather", g.weight(V, N), "input_ids")
    x = _add_positions(g, lookup, x, positions, before, total)
    allowed = _allowed_pairs(g, lookup, positions, before, total, scalars[1])
    padding = g.add("Cast", g.add("Unsqueeze", "attention_mask", np.array([1, 2])), to=TensorProto.BOOL)
    bias = g.add("Where", g.add("And", allowed, padding), np.float32(0), np.float32(-1e9))
    presents = []
    for layer in range(layers):
        heads = [
            g.add(
                "Transpose",
                g.add("Reshape", g.add("MatMul", x, g.weight(N, N)), np.array([0, 0, H, D])),
                perm=[0, 2, 1, 3],
            )
            for _ in range(3)
        ]
        query, keys, values = heads
        if lookup == "rotary":
            query, keys = (_rotate(g, y, before, total) for y in (query, keys))
        if has_past:
            keys, values = (g.add("Concat", past[2 * layer + i], y, axis=2) for i, y in enumerate((keys, values)))
        presents += [g.add("Identity", keys), g.add("Identity", values)]
        scores = g.add("Mul", g.add("MatMul", query, g.add("Transpose", keys, perm=[0, 1, 3, 2])), np.float32(0.25))
        weights = g.add("Softmax", g.add("Add", scores, bias), axis=-1)
        mixed = g.add("Transpose", g.add("MatMul", weights, values), perm=[0, 2, 1, 3])
        x = g.add("Add", x, g.add("MatMul", g.add("Reshape", mixed, np.array([0, 0, N])), g.weight(N, N)))
    names = [g.add("MatMul", x, g.weight(N, V)), *presents]
    return helper.make_graph(
        g.nodes,
        g.prefix + "branch",
        [],
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in names],
        g.constants,
    )


def _add_positions(g: GraphBuilder, lookup: str, x: str, positions: str, before: str, total: str) -> str:
    table = g.weight(POSITIONS, N)
    if lookup == "gather":
        rows = g.add("Gather", table, positions)
    elif lookup == "gather_nd":
        rows = g.add("GatherND", table, g.add("Unsqueeze", positions, np.array([1])))
    elif lookup == "gather_elements":
        wide = g.add("Concat", g.add("Shape", positions), np.array([N]), axis=0)
        rows = g.add(
            "GatherElements", table, g.add("Expand", g.add("Unsqueeze", positions, np.array([1])), wide), axis=0
        )
    elif lookup == "slice":
        rows = g.add("Slice", table, before, total, np.array([0]))
    else:
        return x
    return g.add("Add", x, rows)


def _allowed_pairs(g: GraphBuilder, lookup: str, positions: str, before: str, total: str, end: str) -> str:
    """[1, 1, S, T]: causal, from a stored buffer or by comparing positions."""
    if lookup == "buffer":
        buffer = g.constant(np.tril(np.ones((1, 1, POSITIONS, POSITIONS), bool)))
        rows = g.add("Slice", buffer, before, total, np.array([2]))
        return g.add("Slice", rows, np.array([0]), total, np.array([3]))
    keys = g.add("Range", np.int64(0), end, np.int64(1))
    pairs = g.add("LessOrEqual", g.add("Unsqueeze", keys, np.array([0])), g.add("Unsqueeze", positions, np.array([1])))
    return g.add("Unsqueeze", pairs, np.array([0, 1]))


def _rotate(g: GraphBuilder, x: str, before: str, total: str) -> str:
    angles = np.arange(POSITIONS)[:, None] / 100.0 ** (np.arange(D // 2) / (D // 2))
    angles = np.concatenate([angles, angles], 1).astype(np.float32)
    cos, sin = (g.add("Slice", g.constant(f(angles)), before, total, np.array([0])) for f in (np.cos, np.sin))
    half = [g.add("Slice", x, np.array([a]), np.array([b]), np.array([3])) for a, b in ((0, D // 2), (D // 2, D))]
    turned = g.add("Concat", g.add("Neg", half[1]), half[0], axis=3)
    return g.add("Add", g.add("Mul", x, cos), g.add("Mul", turned, sin))
