# SPDX-License-Identifier: Apache-2.0
"""One node on padded tensors and on their real tokens, gathered by NumPy where a rule says that they lie."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper, numpy_helper

from stof.symbolic import Symbolic
from stof.unpadding.rules import find_row_wise
from stof.unpadding.token_axes import Context, RowWise, TokenAxes

BATCH, LENGTH = 3, 5
FIRST, LAST = (1, 0, 4), (3, 4, 4)  # of each sequence: padding on both sides, none, and a single token on the right
SEQUENCES = np.array([b for b in range(BATCH) for _ in range(FIRST[b], LAST[b] + 1)])
POSITIONS = np.array([s for b in range(BATCH) for s in range(FIRST[b], LAST[b] + 1)])
TYPES = {"f": np.float32, "i": np.int64, "b": np.bool_, "u8": np.uint8, "i8": np.int8, "i32": np.int32}
_SIZES = {
    "B": BATCH,
    "S": LENGTH,
    "BS": BATCH * LENGTH,
    "SB": BATCH * LENGTH,
    "turned": BATCH * LENGTH,
    "B*2": BATCH * 2,
}


@dataclass(frozen=True)
class Operand:
    """An input of a node.

    Attributes:
        shape: its sizes in words: "B S 4"; "BS" is batch times positions, "turned" positions times batch, "B*2" two heads of each
            sequence.
        dtype: a key of TYPES.
        has_tokens: whether its axes B and S are those of tokens; else a rule must find them by itself.
        array: a constant; the shape is the array's.
        is_zero: it is 0 in all rows of padding.
        is_true: it holds in all rows of padding.
        high: where integers end.
        source: how to make its elements from NumPy's generator and the shape.
    """

    shape: str = ""
    dtype: str = "f"
    has_tokens: bool = True
    array: np.ndarray | None = None
    is_zero: bool = False
    is_true: bool = False
    high: int = 4
    source: Callable[[np.random.Generator, tuple[int, ...]], np.ndarray] | None = None

    @property
    def words(self) -> list[str]:
        return self.shape.split()

    def sizes(self) -> tuple[int, ...]:
        return tuple(_SIZES.get(w) or int(w) for w in self.words)

    def axes(self) -> TokenAxes | None:
        words = self.words
        if not self.has_tokens or self.array is not None:
            return None
        if "BS" in words:
            return TokenAxes(None, words.index("BS"), True)
        if "turned" in words:
            return TokenAxes(None, words.index("turned"), True, is_position_major=True)
        if {"B*2", "S"} <= set(words):
            return TokenAxes(words.index("B*2"), words.index("S"), heads_per_sequence=2)
        return TokenAxes(words.index("B"), words.index("S")) if {"B", "S"} <= set(words) else None

    def draw(self, rng: np.random.Generator) -> np.ndarray:
        shape = self.sizes()
        if self.source is not None:
            return self.source(rng, shape)
        if self.dtype == "f":
            return rng.uniform(0.2, 2.0, shape).astype(np.float32)
        if self.dtype == "b":
            return rng.random(shape) < 0.5
        return rng.integers(0, self.high, shape).astype(TYPES[self.dtype])


def tokens(shape: str, dtype: str = "f", **rest: Any) -> Operand:
    """A tensor with tokens."""
    return Operand(shape, dtype, **rest)


def plain(shape: str, dtype: str = "f", **rest: Any) -> Operand:
    """A tensor of which no one said that it has tokens."""
    return Operand(shape, dtype, has_tokens=False, **rest)


def fixed(values: object, dtype: str = "f") -> Operand:
    """A constant."""
    array = np.asarray(values, TYPES[dtype])
    return Operand(" ".join(map(str, array.shape)), dtype, array=array)


def weight(*shape: int, dtype: str = "f", seed: int = 5) -> Operand:
    """A constant of random numbers."""
    rng = np.random.default_rng(seed)
    if dtype == "f":
        return fixed(rng.uniform(-1, 1, shape))
    return fixed(rng.integers(0, 9, shape), dtype)


ABSENT = Operand("", "")


@dataclass(frozen=True)
class NodeCase:
    """A node, with what it reads.

    Attributes:
        op: its type.
        operands: its inputs.
        opset: of the standard domain.
        outputs: how many results it has.
        domain: of the operator.
        attributes: of the node.
        is_static: the model has numbers for both sizes of the batch.
    """

    op: str
    operands: Sequence[Operand]
    opset: int = 18
    outputs: int = 1
    domain: str = ""
    attributes: dict[str, Any] = field(default_factory=dict)
    is_static: bool = False

    def model(self) -> onnx.ModelProto:
        inputs, initializers, names = [], [], []
        for i, operand in enumerate(self.operands):
            if operand is ABSENT:
                names.append("")
                continue
            names.append(f"x{i}")
            if operand.array is not None:
                initializers.append(numpy_helper.from_array(operand.array, f"x{i}"))
                continue
            dims = operand.sizes() if self.is_static else [_declared(w) for w in operand.words]
            inputs.append(
                helper.make_tensor_value_info(
                    f"x{i}", helper.np_dtype_to_tensor_dtype(np.dtype(TYPES[operand.dtype])), dims
                )
            )
        results = [f"y{i}" for i in range(self.outputs)]
        node = helper.make_node(self.op, names, results, domain=self.domain, name="node", **self.attributes)
        outputs = [helper.make_empty_tensor_value_info(n) for n in results]
        graph = helper.make_graph([node], "g", inputs, outputs, initializers)
        imports = [helper.make_opsetid("", self.opset)]
        if self.domain:
            imports.append(helper.make_opsetid(self.domain, 1))
        return helper.make_model(graph, ir_version=8, opset_imports=imports)

    def row_wise(self) -> RowWise | None:
        """What the rule says."""
        model = self.model()
        own = {f"x{i}": a for i, o in enumerate(self.operands) if (a := o.axes()) is not None}
        zero = {f"x{i}" for i, o in enumerate(self.operands) if o.is_zero}
        true = {f"x{i}" for i, o in enumerate(self.operands) if o.is_true}
        return find_row_wise(Context(model.graph.node[0], own, zero, true, Symbolic(model), self.opset))


def _declared(word: str) -> str | int:
    return {"BS": "B*S", "turned": "B*S"}.get(word, word) if not word.isdigit() else int(word)


def is_padding(axes: TokenAxes, shape: Sequence[int]) -> np.ndarray:
    """Which elements lie in rows of padding."""
    real = np.zeros((BATCH, LENGTH), bool)
    real[SEQUENCES, POSITIONS] = True
    if axes.merged:
        assert axes.position is not None
        view = [1] * len(shape)
        view[axes.position] = BATCH * LENGTH
        return np.broadcast_to(~real.reshape(view), shape)
    assert axes.batch is not None
    assert axes.position is not None
    view = [1] * len(shape)
    view[axes.batch], view[axes.position] = BATCH, LENGTH
    padding = ~real if axes.batch < axes.position else ~real.T
    return np.broadcast_to(padding.reshape(view), shape)


def gather(array: np.ndarray, axes: TokenAxes, result: TokenAxes | None, rank: int) -> np.ndarray:
    """The real tokens of a padded array: the axis of the batch becomes 1, that of positions their number.

    Args:
        array: the array.
        axes: where its tokens lie.
        result: where they lie in the result of the node, with which it broadcasts.
        rank: of that result.
    """
    if axes.merged:
        rows = POSITIONS * BATCH + SEQUENCES if axes.is_position_major else SEQUENCES * LENGTH + POSITIONS
        return np.take(array, rows, axis=axes.position)
    if axes.heads_per_sequence > 1:
        assert axes.batch is not None
        assert axes.position is not None
        shape, behind = list(array.shape), axes.batch + 1
        split = array.reshape(*shape[: axes.batch], BATCH, axes.heads_per_sequence, *shape[behind:])
        position = axes.position + (axes.position > axes.batch)
        rows = gather(split, TokenAxes(axes.batch, position), None, split.ndim)
        return rows.reshape(*rows.shape[: axes.batch], axes.heads_per_sequence, *rows.shape[behind + 1 :])
    if axes.batch is None:
        return np.take(array, POSITIONS, axis=axes.position)
    if axes.position is not None:
        rows = np.stack(
            [
                np.take(np.take(array, b, axes.batch), s, axes.position - (axes.position > axes.batch))
                for b, s in zip(SEQUENCES, POSITIONS, strict=True)
            ]
        )
        low, high = sorted((axes.batch, axes.position))
        rows = np.expand_dims(rows, 1)  # tokens, 1, the rest
        order = list(range(2, rows.ndim))
        order.insert(low, 1 if low == axes.batch else 0)
        order.insert(high, 0 if high == axes.position else 1)
        return rows.transpose(order)
    wide = array.reshape((1,) * (rank - array.ndim) + array.shape)
    assert result is not None
    assert result.batch is not None
    assert result.position is not None
    assert wide.shape[result.position] == 1
    rows = np.take(wide, SEQUENCES, axis=result.batch)
    return np.swapaxes(rows, result.batch, result.position)


def run(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    """The results in ONNX Runtime as the model is written."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, feeds)


def unpad(
    case: NodeCase, row_wise: RowWise, feeds: dict[str, np.ndarray]
) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """The node on real tokens alone: what a rule says, carried out by NumPy."""
    model = case.model()
    shape = Symbolic(model).shape("y0")
    assert shape is not None
    result = row_wise.outputs[0]
    node = model.graph.node[0]
    constants = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    values = constants | feeds
    for i, axes in row_wise.inputs.items():
        values[f"x{i}"] = gather(values[f"x{i}"], axes, result, len(shape))
    if row_wise.shape is not None:
        at, sizes = row_wise.shape
        while len(node.input) <= at:
            node.input.append("")
        node.input[at] = f"x{at}"
        values[f"x{at}"] = np.array(sizes, np.int64)
        kept = [a for a in node.attribute if a.name != "allowzero"]
        del node.attribute[:]
        node.attribute.extend(kept)
    del model.graph.input[:]
    del model.graph.initializer[:]
    for name, array in values.items():
        if name in feeds:
            dtype = helper.np_dtype_to_tensor_dtype(array.dtype)
            model.graph.input.append(helper.make_tensor_value_info(name, dtype, array.shape))
        else:
            model.graph.initializer.append(numpy_helper.from_array(array, name))
    return model, {n: values[n] for n in feeds}


def check_row_wise(case: NodeCase, row_wise: RowWise) -> None:
    """Fails where what a rule says of a node is not so."""
    model = case.model()
    rng = np.random.default_rng(zlib.crc32(repr((case.op, [o.shape for o in case.operands])).encode()))
    feeds = {f"x{i}": o.draw(rng) for i, o in enumerate(case.operands) if o is not ABSENT and o.array is None}
    for i, operand in enumerate(case.operands):
        axes = operand.axes()
        if axes is not None and (operand.is_zero or operand.is_true):
            feeds[f"x{i}"] = np.where(is_padding(axes, feeds[f"x{i}"].shape), operand.is_true, feeds[f"x{i}"]).astype(
                TYPES[operand.dtype]
            )
    padded = run(model, feeds)
    unpadded_model, unpadded_feeds = unpad(case, row_wise, feeds)
    results = run(unpadded_model, unpadded_feeds)
    # A node with more results than the rule names has results of which nothing is known: readers would find other shapes.
    assert len(row_wise.outputs) == len(padded), f"{len(padded)} results, and the rule knows of {len(row_wise.outputs)}"
    for axes, wanted, found in zip(row_wise.outputs, padded, results, strict=True):
        expected = wanted if axes is None else gather(wanted, axes, axes, wanted.ndim)
        assert found.shape == expected.shape
        np.testing.assert_allclose(found.astype(np.float64), expected.astype(np.float64), rtol=1e-5, atol=1e-6)
    for i in row_wise.ignored:
        _check_ignored(case, i, feeds, padded)


def _check_ignored(case: NodeCase, i: int, feeds: dict[str, np.ndarray], padded: list[np.ndarray]) -> None:
    """Other numbers in the rows of padding of an input change no result."""
    axes = case.operands[i].axes()
    if axes is None:
        return
    x = feeds[f"x{i}"]
    values = (
        [1e30, np.nan, -np.inf]
        if x.dtype == np.float32 and case.op == "Where"
        else [1e30]
        if x.dtype == np.float32
        else [1]
    )
    for value in values:
        changed = np.where(is_padding(axes, x.shape), np.asarray(value).astype(x.dtype), x)
        for one, other in zip(run(case.model(), feeds | {f"x{i}": changed}), padded, strict=True):
            np.testing.assert_array_equal(one, other)
