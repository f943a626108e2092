# SPDX-License-Identifier: Apache-2.0
"""GroupQueryAttention nodes with a cache as models, and random steps of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

import stof
from stof.cached_attention.checks.oracle import CacheStep

INPUTS = ("query", "key", "value", "past_key", "past_value", "seqlens_k", "total", "cos", "sin", "position_ids", "bias",
          "sink", "k_scale", "v_scale", "q_norm", "k_norm")  # fmt: skip
TYPES = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16,
         "int8": TensorProto.INT8, "float8": TensorProto.FLOAT8E4M3FN}  # fmt: skip
TABLE_ROWS = 512


@dataclass(frozen=True)
class Shape:
    """A node: heads H on G of size D, and what it does; ``other`` are further attributes.

    ``cache`` is the type of quantized caches, empty where they are not; ``channels`` says whether keys and values have a scale
    for each channel.
    """

    H: int = 4
    G: int = 2
    D: int = 16
    packed: bool = False
    window: int = 0
    sliding: bool = False
    softcap: float = 0.0
    scale: float = 0.0
    rotary: int = 0  # elements of a head
    interleaved: bool = False
    positions: bool = False
    bias: tuple[int, int] = (0, 0)  # its first two axes; 0: none
    sink: bool = False
    smooth: bool = False
    norms: bool = False
    dtype: str = "float32"
    cache: str = ""
    channels: tuple[bool, bool] = (False, False)
    other: dict[str, Any] = field(default_factory=dict)

    @property
    def given(self) -> list[str]:
        """The inputs that the node has."""
        absent = set() if self.cache else {"k_scale", "v_scale"}
        absent |= {"key", "value"} if self.packed else set()
        absent |= set() if self.rotary else {"cos", "sin"}
        absent |= set() if self.positions else {"position_ids"}
        absent |= set() if self.bias[0] else {"bias"}
        absent |= set() if self.sink else {"sink"}
        absent |= set() if self.norms else {"q_norm", "k_norm"}
        return [n for n in INPUTS if n not in absent]

    def scale_shape(self, i: int) -> list[int]:
        """The shape of k_scale (0) or v_scale (1)."""
        return [1, self.G, 1, self.D] if self.channels[i] else [1]

    @property
    def attributes(self) -> dict[str, Any]:
        found: dict[str, Any] = {"num_heads": self.H, "kv_num_heads": self.G}
        found |= {"local_window_size": self.window} if self.window else {}
        found |= {"sliding_window_cache": 1} if self.sliding else {}
        found |= {"softcap": self.softcap} if self.softcap else {}
        found |= {"scale": self.scale} if self.scale else {}
        found |= {"do_rotary": 1} if self.rotary else {}
        found |= {"rotary_interleaved": 1} if self.interleaved else {}
        found |= {"smooth_softmax": 1} if self.smooth else {}
        if self.cache:
            kinds = ["PER_CHANNEL" if own else "PER_TENSOR" for own in self.channels]
            found |= {"k_quant_type": kinds[0], "v_quant_type": kinds[1], "kv_cache_bit_width": 8}
        return found | self.other


def node_of(
    shape: Shape, prefix: str = "", outputs: tuple[str, ...] = ("output", "present_key", "present_value")
) -> Any:
    """The node, whose tensors have names with a prefix; lengths are shared by all."""
    names = [_name(n, prefix) if n in shape.given else "" for n in INPUTS]
    while not names[-1]:
        names.pop()
    outs = [f"{prefix}{o}" if o else "" for o in outputs]
    return helper.make_node(
        "GroupQueryAttention", names, outs, name=f"{prefix}node", domain="com.microsoft", **shape.attributes
    )


def _name(name: str, prefix: str) -> str:
    return name if name in ("seqlens_k", "total", "position_ids") else f"{prefix}{name}"


def model_of(*shapes: Shape, capacity: int | str = "C", masks: bool = False, opset: int = 18) -> onnx.ModelProto:
    """Nodes beside each other. ``masks``: lengths are counted in an attention mask, as onnxruntime-genai's graphs do."""
    infos: dict[str, onnx.ValueInfoProto] = {}
    outputs = []
    nodes = []
    for i, s in enumerate(shapes):
        prefix = f"layer{i}/" if len(shapes) > 1 else ""
        T = TYPES[s.dtype]
        stored = TYPES[s.cache or s.dtype]
        width = (s.H + 2 * s.G) * s.D if s.packed else s.H * s.D
        dims: dict[str, tuple[int, list[int | str]]] = {
            "query": (T, ["B", "S", width]),
            "key": (T, ["B", "S", s.G * s.D]),
            "value": (T, ["B", "S", s.G * s.D]),
            "past_key": (stored, ["B", s.G, capacity, s.D]),
            "past_value": (stored, ["B", s.G, capacity, s.D]),
            "k_scale": (TensorProto.FLOAT, list(s.scale_shape(0))),
            "v_scale": (TensorProto.FLOAT, list(s.scale_shape(1))),
            "seqlens_k": (TensorProto.INT32, ["B"]),
            "total": (TensorProto.INT32, []),
            "cos": (T, [TABLE_ROWS, s.rotary // 2]),
            "sin": (T, [TABLE_ROWS, s.rotary // 2]),
            "position_ids": (TensorProto.INT64, ["B", "S"]),
            "bias": (T, ["B" if s.bias[0] > 1 else 1, s.bias[1], "S", "T"]),
            "sink": (T, [s.H]),
            "q_norm": (T, [s.D]),
            "k_norm": (T, [s.D]),
        }
        for n in s.given:
            if not (masks and n in ("seqlens_k", "total")):
                infos.setdefault(_name(n, prefix), helper.make_tensor_value_info(_name(n, prefix), *dims[n]))
        nodes.append(node_of(s, prefix))
        outputs.append(helper.make_tensor_value_info(f"{prefix}output", T, ["B", "S", s.H * s.D]))
        present = ["B", s.G, "present", s.D]
        outputs += [helper.make_tensor_value_info(f"{prefix}present_{x}", stored, present) for x in ("key", "value")]
    if masks:
        infos["attention_mask"] = helper.make_tensor_value_info("attention_mask", TensorProto.INT64, ["B", "T"])
        nodes = [*_length_nodes(), *nodes]
    graph = helper.make_graph(nodes, "decoder", list(infos.values()), outputs)
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def _length_nodes() -> list[onnx.NodeProto]:
    def constant(name: str, value: Any) -> onnx.NodeProto:
        kind = "value_ints" if isinstance(value, list) else "value_int"
        return helper.make_node("Constant", [], [name], **{kind: value})

    return [
        constant("one", [1]),
        constant("index", 1),
        helper.make_node("ReduceSum", ["attention_mask", "one"], ["count"], keepdims=0),
        helper.make_node("Sub", ["count", "one"], ["last"]),
        helper.make_node("Cast", ["last"], ["seqlens_k"], to=TensorProto.INT32),
        helper.make_node("Shape", ["attention_mask"], ["mask_shape"]),
        helper.make_node("Gather", ["mask_shape", "index"], ["length"], axis=0),
        helper.make_node("Cast", ["length"], ["total"], to=TensorProto.INT32),
    ]


def draw_step(shape: Shape, lengths: list[int], queries: int, capacity: int, seed: int = 0) -> CacheStep:
    """A random step: ``lengths`` are the valid keys after it; the longest is the total, S where it is a first prompt."""
    rng = np.random.default_rng(seed)
    dtype = helper.tensor_dtype_to_np_dtype(TYPES[shape.dtype])
    B, total = len(lengths), max(max(lengths), queries)

    def normal(*dims: int) -> np.ndarray:
        return rng.standard_normal(dims).astype(dtype)

    def draw_cache() -> np.ndarray:
        numbers = normal(B, shape.G, capacity, shape.D)
        if not shape.cache:
            return numbers
        stored = helper.tensor_dtype_to_np_dtype(TYPES[shape.cache])
        return np.clip(np.rint(40 * numbers.astype(np.float32)), -128, 127).astype(stored)

    def draw_scale(i: int) -> np.ndarray | None:
        return rng.uniform(0.01, 0.05, shape.scale_shape(i)).astype(np.float32) if shape.cache else None

    width = (shape.H + 2 * shape.G if shape.packed else shape.H) * shape.D
    angles = np.arange(TABLE_ROWS)[:, None] * 0.7 / (1 + np.arange(shape.rotary // 2)) if shape.rotary else None
    before = np.array(lengths) - queries if total != queries else np.zeros(B, np.int64)
    rows, heads = shape.bias
    return CacheStep(
        query=normal(B, queries, width),
        key=None if shape.packed else normal(B, queries, shape.G * shape.D),
        value=None if shape.packed else normal(B, queries, shape.G * shape.D),
        past_key=draw_cache(),
        past_value=draw_cache(),
        lengths=np.array(lengths, np.int64),
        total=total,
        num_heads=shape.H,
        kv_num_heads=shape.G,
        window=shape.window,
        sliding=shape.sliding,
        scale=shape.scale,
        softcap=shape.softcap,
        cos=None if angles is None else np.cos(angles).astype(dtype),
        sin=None if angles is None else np.sin(angles).astype(dtype),
        interleaved=shape.interleaved,
        position_ids=before[:, None] + np.arange(queries) if shape.positions else None,
        bias=normal(B if rows > 1 else 1, heads, queries, total) if rows else None,
        sink=normal(shape.H) if shape.sink else np.zeros(shape.H, dtype) if shape.smooth else None,
        query_norm=(1 + 0.3 * normal(shape.D)).astype(dtype) if shape.norms else None,
        key_norm=(1 + 0.3 * normal(shape.D)).astype(dtype) if shape.norms else None,
        key_scale=draw_scale(0),
        value_scale=draw_scale(1),
    )


def feeds_of(shape: Shape, step: CacheStep, prefix: str = "") -> dict[str, np.ndarray]:
    """The step as inputs of a model whose lengths are inputs."""
    arrays = {
        "query": step.query, "key": step.key, "value": step.value, "past_key": step.past_key,
        "past_value": step.past_value, "seqlens_k": (step.lengths - 1).astype(np.int32),
        "total": np.array(step.total, np.int32), "cos": step.cos, "sin": step.sin, "position_ids": step.position_ids,
        "bias": step.bias, "sink": step.sink, "q_norm": step.query_norm, "k_norm": step.key_norm,
        "k_scale": step.key_scale, "v_scale": step.value_scale,
    }  # fmt: skip
    return {_name(n, prefix): a for n in shape.given if (a := arrays[n]) is not None}


def session(model: onnx.ModelProto, *, library: bool, optimized: bool = True) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    if not optimized:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    if library:
        stof.register(options)
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def run_shared(made: ort.InferenceSession, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    """The outputs where past and present are one buffer; asserts that they are."""
    binding = made.io_binding()
    values = {n: ort.OrtValue.ortvalue_from_numpy(a.copy()) for n, a in feeds.items()}
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    names = [o.name for o in made.get_outputs()]
    for name in names:
        if "present_" in name:
            binding.bind_ortvalue_output(name, values[name.replace("present_", "past_")])
        else:
            binding.bind_output(name, "cpu")
    made.run_with_iobinding(binding)
    found = dict(zip(names, binding.get_outputs(), strict=True))
    for name in names:
        if "present_" in name:
            assert found[name].data_ptr() == values[name.replace("present_", "past_")].data_ptr()
    return [found[n].numpy().copy() for n in names]
