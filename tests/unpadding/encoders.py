# SPDX-License-Identifier: Apache-2.0
"""Small encoders, written node by node, and runs of them before and after unpadding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

import stof
from stof.options import Options
from stof.report import Report
from stof.unpadding.report import KEY, UnpadReport, UnpadSection

WIDTH, HEADS, WORDS, LONGEST = 16, 2, 30, 80
INT64, INT32, FLOAT, BOOL = TensorProto.INT64, TensorProto.INT32, TensorProto.FLOAT, TensorProto.BOOL


@dataclass
class Graph:
    """A graph that grows; names of tensors are its strings."""

    opset: int = 18
    batch: int | str = "batch"
    length: int | str = "sequence"
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    inputs: list[onnx.ValueInfoProto] = field(default_factory=list)
    outputs: list[onnx.ValueInfoProto] = field(default_factory=list)
    initializers: list[onnx.TensorProto] = field(default_factory=list)
    seed: int = 0

    def input(self, name: str, dtype: int = INT64, dims: tuple[int | str, ...] | None = None) -> str:
        self.inputs.append(helper.make_tensor_value_info(name, dtype, dims or (self.batch, self.length)))
        return name

    def add(self, op: str, *names: str, outputs: int = 1, domain: str = "", **attributes: Any) -> Any:
        found = [f"t{len(self.nodes)}_{i}" if outputs > 1 else f"t{len(self.nodes)}" for i in range(outputs)]
        self.nodes.append(
            helper.make_node(op, list(names), found, name=f"n{len(self.nodes)}", domain=domain, **attributes)
        )
        return found[0] if outputs == 1 else found

    def constant(self, value: object, dtype: Any = np.int64) -> str:
        name = f"c{len(self.initializers)}"
        self.initializers.append(numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def weight(self, *shape: int, scale: float = 0.5) -> str:
        self.seed += 1
        return self.constant(np.random.default_rng(self.seed).uniform(-scale, scale, shape), np.float32)

    def output(self, tensor: str, name: str, dtype: int = FLOAT, rank: int | None = None) -> str:
        self.nodes.append(helper.make_node("Identity", [tensor], [name], name=f"out_{name}"))
        self.mark_output(name, dtype, rank)
        return name

    def mark_output(self, name: str, dtype: int = FLOAT, rank: int | None = None) -> None:
        dims = None if rank is None else [None] * rank
        self.outputs.append(helper.make_tensor_value_info(name, dtype, dims))

    def model(self) -> onnx.ModelProto:
        graph = helper.make_graph(self.nodes, "g", self.inputs, self.outputs, self.initializers)
        imports = [helper.make_opsetid("", self.opset), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, ir_version=8, opset_imports=imports)

    # ---- operators with other forms in other opsets ----
    def unsqueeze(self, x: str, *axes: int) -> str:
        if self.opset < 13:
            return str(self.add("Unsqueeze", x, axes=list(axes)))
        return str(self.add("Unsqueeze", x, self.constant(list(axes))))

    def reduce(self, op: str, x: str, axis: int, keepdims: int = 0) -> str:
        if self.opset < (13 if op == "ReduceSum" else 18):
            return str(self.add(op, x, axes=[axis], keepdims=keepdims))
        return str(self.add(op, x, self.constant([axis]), keepdims=keepdims))

    # ---- layers ----
    def dense(self, x: str, inner: int = WIDTH, outer: int = WIDTH) -> str:
        return str(self.add("Add", self.add("MatMul", x, self.weight(inner, outer)), self.weight(outer)))

    def norm(self, x: str) -> str:
        if self.opset >= 17:
            return str(self.add("LayerNormalization", x, self.weight(WIDTH, scale=1.0), self.weight(WIDTH), axis=-1))
        centered = self.add("Sub", x, self.reduce("ReduceMean", x, -1, 1))
        variance = self.reduce("ReduceMean", self.add("Mul", centered, centered), -1, 1)
        root = self.add("Sqrt", self.add("Add", variance, self.constant(1e-5, np.float32)))
        return str(self.add("Div", centered, root))

    def heads(self, x: str) -> str:
        """[B, H, S, D] of [B, S, N]."""
        size = WIDTH // HEADS
        return str(self.add("Transpose", self.add("Reshape", x, self.constant([0, 0, HEADS, size])), perm=[0, 2, 1, 3]))

    def attend(self, q: str, k: str, v: str, bias: str, apply: str = "add", second: str = "") -> str:
        """Scores with a mask, softmax and the sum of values: [B, H, S, D]."""
        scores = self.add("MatMul", q, self.add("Transpose", k, perm=[0, 1, 3, 2]))
        scores = self.add("Mul", scores, self.constant((WIDTH // HEADS) ** -0.5, np.float32))
        if apply == "add":
            scores = self.add("Add", scores, bias)
        else:
            scores = self.add("Where", bias, scores, self.constant(np.finfo(np.float32).min, np.float32))
        if second:
            scores = self.add("Add", scores, second)
        p = self.add("Softmax", scores, axis=3 if self.opset < 13 else -1)
        return str(self.add("MatMul", p, v))

    def merge_heads(self, x: str) -> str:
        x = self.add("Transpose", x, perm=[0, 2, 1, 3])
        return str(self.add("Reshape", x, self.constant([0, 0, WIDTH])))

    def self_attention(self, x: str, bias: str, apply: str = "add", second: str = "", keys: str = "") -> str:
        """With a residual and a norm."""
        q, k, v = (self.heads(self.dense(y)) for y in (x, keys or x, keys or x))
        y = self.dense(self.merge_heads(self.attend(q, k, v, bias, apply, second)))
        return self.norm(self.add("Add", x, y))

    def feed_forward(self, x: str) -> str:
        y = self.dense(x, WIDTH, 2 * WIDTH)
        y = self.add("Mul", y, self.add("Sigmoid", y))
        return self.norm(self.add("Add", x, self.dense(y, 2 * WIDTH, WIDTH)))

    def layer(self, x: str, bias: str, apply: str = "add", second: str = "") -> str:
        return self.feed_forward(self.self_attention(x, bias, apply, second))

    # ---- masks ----
    def bias(self, mask: str, dtype: int = INT64, inverted: bool = False) -> str:
        """What exporters add to scores: 0, or the lowest number at padding; [B, 1, 1, S]."""
        wide = self.unsqueeze(mask, 1, 2)
        number = wide if dtype == FLOAT else self.add("Cast", wide, to=FLOAT)
        if not inverted:
            number = self.add("Sub", self.constant(1.0, np.float32), number)
        return str(self.add("Mul", number, self.constant(np.finfo(np.float32).min, np.float32)))

    def allowed(self, mask: str, dtype: int = INT64, inverted: bool = False) -> str:
        """[B, 1, 1, S], true where a key may be attended."""
        wide = self.unsqueeze(mask, 1, 2)
        real = wide if dtype == BOOL else self.add("Cast", wide, to=BOOL)
        return str(self.add("Not", real) if inverted else real)

    # ---- before and behind the layers ----
    def embed(self, ids: str, positions: str = "table", mask: str = "", types: str = "") -> str:
        x = self.add("Gather", self.weight(WORDS, WIDTH, scale=1.0), ids)
        table = self.weight(LONGEST + 2, WIDTH, scale=1.0)
        if positions == "table":
            length = self.add("Gather", self.add("Shape", ids), self.constant([1]))
            rows = self.add("Slice", table, self.constant([0]), length, self.constant([0]))
            x = self.add("Add", x, rows)
        elif positions == "cumsum":  # RoBERTa's
            count = self.add("CumSum", mask, self.constant(1))
            at = self.add("Add", self.add("Mul", count, mask), self.constant(1))
            x = self.add("Add", x, self.add("Gather", table, at))
        elif positions:
            x = self.add("Add", x, self.add("Gather", table, positions))
        if types:
            x = self.add("Add", x, self.add("Gather", self.weight(2, WIDTH), types))
        return self.norm(x)

    def pool(self, x: str, kind: str, mask: str, dtype: int = INT64, inverted: bool = False, axis: int = 1) -> str:
        if kind == "first":
            return str(self.add("Gather", x, self.constant(0), axis=axis))
        if kind == "last":
            return str(self.add("Gather", x, self.constant(-1), axis=axis))
        if kind == "last slice":
            end = self.constant([np.iinfo(np.int64).max])
            return str(self.add("Slice", x, self.constant([-1]), end, self.constant([axis])))
        if kind == "middle":
            return str(self.add("Slice", x, self.constant([2]), self.constant([3]), self.constant([axis])))
        if kind == "all":
            return x
        real = mask if dtype == BOOL else self.add("Cast", mask, to=BOOL)
        if inverted:
            real = self.add("Not", real)
        if kind == "mean":
            weight = self.unsqueeze(self.add("Cast", real, to=FLOAT), 2)
            total = self.reduce("ReduceSum", self.add("Mul", x, weight), axis)
            count = self.add("Clip", self.reduce("ReduceSum", weight, axis), self.constant(1e-6, np.float32))
            return str(self.add("Div", total, count))
        if kind == "max":
            masked = self.add("Where", self.unsqueeze(real, 2), x, self.constant(-1e9, np.float32))
            return self.reduce("ReduceMax", masked, axis)
        if kind in ("highest id", "highest id, flat"):  # CLIP's end of the text
            at = self.add("ArgMax", "input_ids", axis=1, keepdims=0)
            sizes = self.add("Shape", "input_ids")
            batch, length = (self.add("Gather", sizes, self.constant(i)) for i in (0, 1))
            row = self.add("Range", self.constant(0), batch, self.constant(1))
            if kind == "highest id":
                return str(
                    self.add("GatherND", x, self.add("Concat", self.unsqueeze(row, 1), self.unsqueeze(at, 1), axis=1))
                )
            flat = self.add("Reshape", x, self.constant([-1, WIDTH]))
            return str(self.add("Gather", flat, self.add("Add", self.add("Mul", row, length), at)))
        if kind in ("first real, elements", "highest id, elements"):  # torch.gather
            at = self.add("ArgMax", self.add("Cast", real, to=FLOAT) if "real" in kind else "input_ids", axis=1)
            width = self.add("Slice", self.add("Shape", x), self.constant([2]), self.constant([3]))
            sizes = self.add("Concat", self.constant([1, 1]), width, axis=0)
            indices = self.add("Expand", self.unsqueeze(at, 2), sizes)
            return str(self.add("Squeeze", self.add("GatherElements", x, indices, axis=1), self.constant([1])))
        assert kind == "last real"
        number = self.add("Cast", real, to=INT64)
        at = self.add("Sub", self.reduce("ReduceSum", number, 1, 1), self.constant(1))
        return str(self.add("GatherND", x, at, batch_dims=1))


POOLINGS = (
    *("mean", "first", "last", "last slice", "middle", "max", "last real", "highest id", "highest id, flat"),
    *("first real, elements", "highest id, elements"),
)


def encoder(
    *poolings: str,
    layers: int = 2,
    dtype: int = INT64,
    inverted: bool = False,
    apply: str = "add",
    positions: str = "table",
    types: bool = False,
    **graph: Any,
) -> onnx.ModelProto:
    """An encoder of texts with an output for each pooling."""
    g = Graph(**graph)
    ids, mask = g.input("input_ids"), g.input("attention_mask", dtype)
    token_types = g.input("token_type_ids") if types else ""
    if positions == "input":
        positions = g.input("position_ids")
    x = g.embed(ids, positions, mask, token_types)
    bias = g.bias(mask, dtype, inverted) if apply == "add" else g.allowed(mask, dtype, inverted)
    for _ in range(layers):
        x = g.layer(x, bias, apply)
    for kind in poolings:
        rank = 3 if kind in ("all", "last slice", "middle") else 2
        g.output(g.pool(x, kind, mask, dtype, inverted), kind.replace(" ", "_").replace(",", ""), rank=rank)
    return g.model()


# ---- runs ----
def unpadded(model: onnx.ModelProto, unpad: str = "auto", **options: Any) -> tuple[onnx.ModelProto, Report]:
    """The model without padding, and the report; nothing was verified."""
    settings: dict[str, Any] = {"chains": "off", "verify": False, "unpad": unpad} | options
    written, report = stof.optimize(model, options=Options(**settings), return_report=True)
    return written, report


def rows_of(report: Report) -> list[UnpadReport]:
    section = report.sections.get(KEY)
    return section.rows if isinstance(section, UnpadSection) else []


def session(model: onnx.ModelProto, with_library: bool = True) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    if with_library:
        stof.register(options)
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def masks(batch: int = 5, length: int = 7) -> dict[str, np.ndarray]:
    """Masks [batch, length] that a batch of texts may have, by what is in them."""
    rng = np.random.default_rng(3)
    lengths = rng.integers(1, length + 1, batch)
    columns = np.arange(length)
    right = (columns < lengths[:, None]).astype(np.int64)
    left = right[:, ::-1].copy()
    holes = (rng.random((batch, length)) < 0.5).astype(np.int64)
    mixed = right.copy()
    mixed[0], mixed[-1] = 0, 1
    mixed[batch // 2] = left[batch // 2]
    one = np.zeros_like(right)
    one[np.arange(batch), rng.integers(0, length, batch)] = 1
    return {
        "right": right,
        "left": left,
        "holes": holes,
        "with empty rows": mixed,
        "length 1": one,
        "full": np.ones_like(right),
        "all empty": np.zeros_like(right),
        "B = 1": right[:1],
        "B = 1, empty": np.zeros_like(right[:1]),
        "S = 3": right[:, :3],
    }


TYPES = {
    INT64: np.int64,
    INT32: np.int32,
    FLOAT: np.float32,
    TensorProto.FLOAT16: np.float16,
    BOOL: np.bool_,
}


def feeds_for(model: onnx.ModelProto, mask: np.ndarray, inverted: bool = False, seed: int = 0) -> dict[str, np.ndarray]:
    """Inputs of an encoder for a batch with this mask."""
    rng = np.random.default_rng(seed)
    batch, length = mask.shape
    found: dict[str, np.ndarray] = {}
    for value in model.graph.input:
        dtype = TYPES[value.type.tensor_type.elem_type]
        if "mask" in value.name:
            found[value.name] = (1 - mask if inverted else mask).astype(dtype)
        elif value.name.startswith("position"):
            found[value.name] = np.tile(np.arange(length), (batch, 1)).astype(dtype)
        elif "type" in value.name:
            found[value.name] = rng.integers(0, 2, mask.shape).astype(dtype)
        elif dtype == np.float32:
            found[value.name] = rng.uniform(-1, 1, (batch, length, WIDTH)).astype(dtype)
        else:
            found[value.name] = rng.integers(0, WORDS, mask.shape).astype(dtype)
    return found


def check_same(
    original: onnx.ModelProto,
    result: onnx.ModelProto,
    batches: Mapping[str, np.ndarray] | None = None,
    inverted: bool = False,
    zero_rows: tuple[str, ...] = (),
    extra: Mapping[str, np.ndarray] | None = None,
    rtol: float = 2e-4,
) -> None:
    """Fails where the result computes something else than the original, in ONNX Runtime with the library and without.

    Args:
        original: the model.
        result: what stof wrote.
        batches: masks, by what is in them; by default all of ``masks``.
        inverted: the masks of the model are 1 at padding.
        zero_rows: outputs [B, S, ...] that are compared at real tokens, and are 0 at padding.
        extra: further inputs, or others than those that are drawn.
        rtol: how far outputs may differ, relative to them; a tenth of it absolutely.
    """
    names = [o.name for o in original.graph.output]
    oracle = session(original, False)
    for with_library in (True, False):
        found = session(result, with_library)
        for label, mask in (masks() if batches is None else batches).items():
            feeds = feeds_for(original, mask, inverted) | dict(extra or {})
            for name, one, other in zip(names, oracle.run(None, feeds), found.run(None, feeds), strict=True):
                where = f"{name}, {label}, {'with' if with_library else 'without'} library"
                assert one.shape == other.shape, where
                if name in zero_rows:
                    _check_zero_rows(one, other, mask, where, rtol)
                else:
                    np.testing.assert_allclose(other, one, rtol=rtol, atol=rtol / 10, err_msg=where)


def _check_zero_rows(one: np.ndarray, other: np.ndarray, mask: np.ndarray, where: str, rtol: float) -> None:
    for b, row in enumerate(mask):
        if not row.any():
            np.testing.assert_allclose(other[b], one[b], rtol=rtol, atol=rtol / 10, err_msg=where)
            continue
        real = np.flatnonzero(row)
        np.testing.assert_allclose(other[b, real], one[b, real], rtol=rtol, atol=rtol / 10, err_msg=where)
        np.testing.assert_array_equal(other[b, row == 0], 0, err_msg=where)


def attentions(model: onnx.ModelProto) -> Iterator[tuple[onnx.NodeProto, list[str]]]:
    """The StofAttention nodes with their operands."""
    for node in model.graph.node:
        if node.op_type == "StofAttention":
            yield node, next(a.s.decode() for a in node.attribute if a.name == "operands").split()


def check_unpadded(model: onnx.ModelProto, all_of: int) -> None:
    """Fails unless so many attentions are between tokens without padding, and no others."""
    kinds = [roles for _, roles in attentions(model)]
    assert len(kinds) == all_of
    assert all("cumulative_sequence_length" in roles for roles in kinds)


def count_tokens(exact: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> int:
    """The number of tokens of the largest region, in a model without a capacity."""
    model = onnx.ModelProto()
    model.CopyFrom(exact)
    found = {node.input[3 + roles.index(r)] for node, roles in attentions(exact) for r in roles if "cumulative" in r}
    for name in found:
        model.graph.output.append(helper.make_tensor_value_info(name, TensorProto.INT32, None))
    return max(int(ends[-1]) for ends in session(model).run(sorted(found), dict(feeds)))
