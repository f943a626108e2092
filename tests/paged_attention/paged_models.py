# SPDX-License-Identifier: Apache-2.0
"""PagedAttention nodes as models, and random steps of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

import stof
from stof.cached_attention.find import find_candidates
from stof.cached_attention.paged.emit import emit_pages
from stof.cached_attention.paged.oracle import PagedStep
from stof.cached_attention.paged.site import PagedSite
from stof.symbolic import Symbolic

INPUTS = ("query", "key", "value", "key_cache", "value_cache", "cumulative", "past", "table", "cos", "sin", "slots",
          "sink", "q_norm", "k_norm", "k_scale", "v_scale", "metadata")  # fmt: skip
TYPES = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}
TABLE_ROWS = 900
_SHARED = ("cumulative", "past", "table", "slots", "metadata")


@dataclass(frozen=True)
class Shape:
    """A node: heads H on G of size D, and what it does; ``other`` are further attributes."""

    H: int = 4
    G: int = 2
    D: int = 16
    block: int = 16
    packed: bool = False
    window: int = 0
    softcap: float = 0.0
    scale: float = 0.0
    rotary: int = 0  # elements of a head
    rotary_offset: int = 0
    interleaved: bool = False
    slots: bool = False
    sink: bool = False
    norms: bool = False
    metadata: bool = False
    dtype: str = "float32"
    other: dict[str, Any] = field(default_factory=dict)

    @property
    def given(self) -> list[str]:
        """The inputs that the node has."""
        absent = {"k_scale", "v_scale"}
        absent |= {"key", "value"} if self.packed else set()
        absent |= set() if self.rotary else {"cos", "sin"}
        absent |= set() if self.slots else {"slots"}
        absent |= set() if self.sink else {"sink"}
        absent |= set() if self.norms else {"q_norm", "k_norm"}
        absent |= set() if self.metadata else {"metadata"}
        return [n for n in INPUTS if n not in absent]

    @property
    def attributes(self) -> dict[str, Any]:
        found: dict[str, Any] = {"num_heads": self.H, "kv_num_heads": self.G}
        found |= {"local_window_size": self.window} if self.window else {}
        found |= {"softcap": self.softcap} if self.softcap else {}
        found |= {"scale": self.scale} if self.scale else {}
        found |= {"do_rotary": 1} if self.rotary else {}
        found |= {"rotary_offset": self.rotary_offset} if self.rotary_offset else {}
        found |= {"rotary_interleaved": 1} if self.interleaved else {}
        return found | self.other


def _name(name: str, prefix: str) -> str:
    return name if name in _SHARED else f"{prefix}{name}"


def node_of(shape: Shape, prefix: str = "") -> onnx.NodeProto:
    """The node, whose tensors have names with a prefix; lengths, tables and slots are shared by all."""
    names = [_name(n, prefix) if n in shape.given else "" for n in INPUTS]
    while not names[-1]:
        names.pop()
    outputs = [f"{prefix}{o}" for o in ("output", "key_out", "value_out")]
    return helper.make_node(
        "PagedAttention", names, outputs, name=f"{prefix}node", domain="com.microsoft", **shape.attributes
    )


def model_of(*shapes: Shape, opset: int = 18) -> onnx.ModelProto:
    """Nodes beside each other."""
    infos: dict[str, onnx.ValueInfoProto] = {}
    outputs = []
    nodes = []
    for i, s in enumerate(shapes):
        prefix = f"layer{i}/" if len(shapes) > 1 else ""
        T = TYPES[s.dtype]
        cache = ["blocks", s.block, s.G, s.D]
        dims: dict[str, tuple[int, list[int | str]]] = {
            "query": (T, ["N", (s.H + 2 * s.G if s.packed else s.H) * s.D]),
            "key": (T, ["N", s.G * s.D]),
            "value": (T, ["N", s.G * s.D]),
            "key_cache": (T, cache),
            "value_cache": (T, cache),
            "cumulative": (TensorProto.INT32, ["B_1"]),
            "past": (TensorProto.INT32, ["B"]),
            "table": (TensorProto.INT32, ["B", "columns"]),
            "cos": (T, [TABLE_ROWS, s.rotary // 2]),
            "sin": (T, [TABLE_ROWS, s.rotary // 2]),
            "slots": (TensorProto.INT32, ["N"]),
            "sink": (T, [s.H]),
            "q_norm": (T, [s.D]),
            "k_norm": (T, [s.D]),
            "metadata": (TensorProto.INT32, [3]),
        }
        for n in s.given:
            infos.setdefault(_name(n, prefix), helper.make_tensor_value_info(_name(n, prefix), *dims[n]))
        nodes.append(node_of(s, prefix))
        outputs.append(helper.make_tensor_value_info(f"{prefix}output", T, ["N", s.H * s.D]))
        outputs += [helper.make_tensor_value_info(f"{prefix}{x}_out", T, cache) for x in ("key", "value")]
    graph = helper.make_graph(nodes, "decoder", list(infos.values()), outputs)
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def draw_step(shape: Shape, past: list[int], tokens: list[int], seed: int = 0, padding: int = 0) -> PagedStep:
    """A random step of sequences with so many keys before it and so many new tokens; blocks lie in random order."""
    rng = np.random.default_rng(seed)
    dtype = helper.tensor_dtype_to_np_dtype(TYPES[shape.dtype])

    def normal(*dims: int) -> np.ndarray:
        return rng.standard_normal(dims).astype(dtype)

    total = sum(tokens) + padding
    columns = max(-(-(p + n) // shape.block) for p, n in zip(past, tokens, strict=True)) + 1
    blocks = len(past) * columns + 2
    angles = np.arange(TABLE_ROWS)[:, None] * 0.7 / (1 + np.arange(shape.rotary // 2)) if shape.rotary else None
    width = (shape.H + 2 * shape.G if shape.packed else shape.H) * shape.D
    return PagedStep(
        query=normal(total, width),
        key=None if shape.packed else normal(total, shape.G * shape.D),
        value=None if shape.packed else normal(total, shape.G * shape.D),
        key_cache=normal(blocks, shape.block, shape.G, shape.D),
        value_cache=normal(blocks, shape.block, shape.G, shape.D),
        cumulative=np.concatenate([[0], np.cumsum(tokens)]).astype(np.int32),
        past=np.array(past, np.int32),
        table=rng.permutation(blocks)[: len(past) * columns].reshape(len(past), columns).astype(np.int32),
        num_heads=shape.H,
        kv_num_heads=shape.G,
        window=shape.window,
        scale=shape.scale,
        softcap=shape.softcap,
        cos=None if angles is None else np.cos(angles).astype(dtype),
        sin=None if angles is None else np.sin(angles).astype(dtype),
        interleaved=shape.interleaved,
        rotary_offset=shape.rotary_offset,
        sink=normal(shape.H) if shape.sink else None,
        query_norm=(1 + 0.3 * normal(shape.D)).astype(dtype) if shape.norms else None,
        key_norm=(1 + 0.3 * normal(shape.D)).astype(dtype) if shape.norms else None,
    )


def feeds_of(shape: Shape, step: PagedStep, prefix: str = "") -> dict[str, np.ndarray]:
    """The step as inputs of a model."""
    slots = np.full(len(step.query), -1, np.int32)
    for b, before in enumerate(step.past):
        begin, end = int(step.cumulative[b]), int(step.cumulative[b + 1])
        slots[begin:end] = step.rows_of(b, int(before) + end - begin)[int(before) :]
    new = np.diff(step.cumulative)
    arrays = {
        "query": step.query, "key": step.key, "value": step.value, "key_cache": step.key_cache,
        "value_cache": step.value_cache, "cumulative": step.cumulative, "past": step.past, "table": step.table,
        "cos": step.cos, "sin": step.sin, "slots": slots, "sink": step.sink, "q_norm": step.query_norm,
        "k_norm": step.key_norm, "metadata": np.array([new.max(), (new + step.past).max(), 0], np.int32),
    }  # fmt: skip
    return {_name(n, prefix): a for n in shape.given if (a := arrays[n]) is not None}


def session(model: onnx.ModelProto, *, library: bool) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    if library:
        stof.register(options)
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def run_shared(made: ort.InferenceSession, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    """The outputs where caches are updated in place; asserts that they are."""
    binding = made.io_binding()
    values = {n: ort.OrtValue.ortvalue_from_numpy(a.copy()) for n, a in feeds.items()}
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    names = [o.name for o in made.get_outputs()]
    for name in names:
        if name.endswith("_out"):
            binding.bind_ortvalue_output(name, values[f"{name.removesuffix('_out')}_cache"])
        else:
            binding.bind_output(name, "cpu")
    made.run_with_iobinding(binding)
    found = dict(zip(names, binding.get_outputs(), strict=True))
    for name in names:
        if name.endswith("_out"):
            assert found[name].data_ptr() == values[f"{name.removesuffix('_out')}_cache"].data_ptr()
    return [found[n].numpy().copy() for n in names]


def run_operator(shape: Shape, step: PagedStep, **thresholds: float | None) -> np.ndarray:
    """The output of the StofPagedAttention that takes a node's place, with further attributes where they are not None."""
    model = model_of(shape)
    (candidate,) = find_candidates(model, Symbolic(model), "cpu")
    assert isinstance(candidate.site, PagedSite), candidate.reason
    made = emit_pages(model, [candidate.site])
    for name, threshold in thresholds.items():
        if threshold is not None:
            made.graph.node[0].attribute.append(helper.make_attribute(name, threshold))
    return np.asarray(session(made, library=True).run(None, feeds_of(shape, step))[0])
