# SPDX-License-Identifier: Apache-2.0
"""SparseAttention nodes as models, their layouts, and random steps of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from gqa_models import TABLE_ROWS, TYPES, Shape, draw_step
from onnx import TensorProto, helper, numpy_helper

from stof.cached_attention.checks.oracle import CacheStep
from stof.cached_attention.find import CacheCandidate, find_candidates
from stof.symbolic import Symbolic


def strided(blocks: int, local: int, stride: int, layouts: int, step: int = 1, offset: int = 1) -> np.ndarray:
    """Local blocks and a vertical stride that moves by a step for each layout, bool [layouts, blocks, blocks]."""
    i, j = np.indices((blocks, blocks))
    layout = np.arange(layouts)[:, None, None]
    return (i >= j) & ((i - j < local) | ((j + layout * step + offset) % stride == 0))


def random_layouts(blocks: int, layouts: int, seed: int = 0) -> np.ndarray:
    """Blocks without a pattern; every row has its diagonal or another block."""
    rng = np.random.default_rng(seed)
    found = np.tril(rng.random((layouts, blocks, blocks)) < 0.4)
    empty = ~found.any(2)
    found[:, np.arange(blocks), np.arange(blocks)] |= empty
    return found


def csr(allowed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows [layouts, blocks + 1] and columns [layouts, most], padded with -1."""
    counts = allowed.sum(2)
    rows = np.concatenate([np.zeros((len(allowed), 1), int), counts.cumsum(1)], axis=1)
    columns = np.full((len(allowed), rows[:, -1].max()), -1)
    for i, layout in enumerate(allowed):
        found = np.nonzero(layout)[1]
        columns[i, : len(found)] = found
    return rows.astype(np.int32), columns.astype(np.int32)


@dataclass(frozen=True)
class SparseShape:
    """A node: heads H on G of size D, its layouts, and what it does; ``other`` are further attributes."""

    layout: np.ndarray
    block: int = 16
    H: int = 4
    G: int = 2
    D: int = 16
    packed: bool = False
    scale: float = 0.0
    rotary: int = 0
    interleaved: bool = False
    dtype: str = "float32"
    other: dict[str, Any] = field(default_factory=dict)

    @property
    def plain(self) -> Shape:
        """The node as a GroupQueryAttention without layouts."""
        return Shape(
            H=self.H, G=self.G, D=self.D, packed=self.packed, scale=self.scale, rotary=self.rotary,
            interleaved=self.interleaved, dtype=self.dtype,
        )  # fmt: skip

    @property
    def length(self) -> int:
        return int(self.layout.shape[1]) * self.block


def sparse_model(
    *shapes: SparseShape, capacity: int | str = "C", masks: bool = False, **changed: Any
) -> onnx.ModelProto:
    """Nodes beside each other, each with layouts of its own; ``changed`` replaces arrays ``rows`` and ``columns``.

    ``masks``: lengths are counted in an attention mask, as onnxruntime-genai's graphs do.
    """
    infos: dict[str, onnx.ValueInfoProto] = {}
    outputs, nodes, stored = [], [], []
    for i, s in enumerate(shapes):
        prefix = f"layer{i}/" if len(shapes) > 1 else ""
        T = TYPES[s.dtype]
        dims: dict[str, list[int | str]] = {
            "query": ["B", "S", ((s.H + 2 * s.G) if s.packed else s.H) * s.D],
            "key": ["B", "S", s.G * s.D],
            "value": ["B", "S", s.G * s.D],
            "past_key": ["B", s.G, capacity, s.D],
            "past_value": ["B", s.G, capacity, s.D],
            "cos": [TABLE_ROWS, s.rotary // 2],
            "sin": [TABLE_ROWS, s.rotary // 2],
        }
        absent = ({"key", "value"} if s.packed else set()) | (set() if s.rotary else {"cos", "sin"})
        names = {n: "" if n in absent else f"{prefix}{n}" for n in dims}
        for n, shape in dims.items():
            if names[n]:
                infos[names[n]] = helper.make_tensor_value_info(names[n], T, shape)
        rows, columns = csr(s.layout)
        for n, array in (("rows", changed.get("rows", rows)), ("columns", changed.get("columns", columns))):
            stored.append(numpy_helper.from_array(array, f"{prefix}{n}"))
        inputs = [names[n] for n in ("query", "key", "value", "past_key", "past_value")]
        inputs += [f"{prefix}rows", f"{prefix}columns", "total", "lengths", names["cos"], names["sin"]]
        attributes: dict[str, Any] = {"num_heads": s.H, "kv_num_heads": s.G, "sparse_block_size": s.block}
        attributes |= {"scale": s.scale} if s.scale else {}
        attributes |= {"do_rotary": 1} if s.rotary else {}
        attributes |= {"rotary_interleaved": 1} if s.interleaved else {}
        outs = [f"{prefix}{n}" for n in ("output", "present_key", "present_value")]
        made = helper.make_node(
            "SparseAttention", inputs, outs, name=f"{prefix}node", domain="com.microsoft", **(attributes | s.other)
        )
        nodes.append(made)
        outputs.append(helper.make_tensor_value_info(outs[0], T, ["B", "S", s.H * s.D]))
        outputs += [helper.make_tensor_value_info(o, T, ["B", s.G, capacity, s.D]) for o in outs[1:]]
    if masks:
        infos["attention_mask"] = helper.make_tensor_value_info("attention_mask", TensorProto.INT64, ["B", "T"])
        nodes = [*_length_nodes(), *nodes]
    else:
        infos["lengths"] = helper.make_tensor_value_info("lengths", TensorProto.INT32, ["B"])
        infos["total"] = helper.make_tensor_value_info("total", TensorProto.INT32, [1])
    graph = helper.make_graph(nodes, "decoder", list(infos.values()), outputs, stored)
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def _length_nodes() -> list[onnx.NodeProto]:
    return [
        helper.make_node("Constant", [], ["one"], value_ints=[1]),
        helper.make_node("Constant", [], ["index"], value_int=1),
        helper.make_node("ReduceSum", ["attention_mask", "one"], ["count"], keepdims=0),
        helper.make_node("Cast", ["count"], ["lengths"], to=TensorProto.INT32),
        helper.make_node("Shape", ["attention_mask"], ["mask_shape"]),
        helper.make_node("Gather", ["mask_shape", "index"], ["length"], axis=0),
        helper.make_node("Cast", ["length"], ["total"], to=TensorProto.INT32),
    ]


def draw_sparse_step(shape: SparseShape, lengths: list[int], queries: int, capacity: int, seed: int = 0) -> CacheStep:
    """A random step; ``lengths`` are the valid keys after it."""
    step = draw_step(shape.plain, lengths, queries, capacity, seed)
    return CacheStep(**{**vars(step), "layout": shape.layout, "block_size": shape.block})


def sparse_feeds(shape: SparseShape, step: CacheStep) -> dict[str, np.ndarray]:
    """The step as inputs of a model whose lengths are inputs."""
    arrays = {
        "query": step.query, "key": step.key, "value": step.value, "past_key": step.past_key, "cos": step.cos,
        "past_value": step.past_value, "sin": step.sin, "lengths": step.lengths.astype(np.int32),
        "total": np.array([step.total], np.int32),
    }  # fmt: skip
    return {n: a for n, a in arrays.items() if a is not None}


def candidates_of(model: onnx.ModelProto) -> list[CacheCandidate]:
    return find_candidates(model, Symbolic(model), "cpu")


STRIDED = SparseShape(strided(8, 2, 4, 4), packed=True, rotary=16)
