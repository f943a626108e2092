# SPDX-License-Identifier: Apache-2.0
"""What stof's operators take besides inputs and outputs, as the library says it and as a run shows it."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from run_node import measure_node

from stof.memory.operator_workspace import count_threads
from stof.memory.run_estimate import MemoryEstimate
from stof.runtime.library import LibraryError, Op, shape_of, tensor_of
from stof.symbolic import Symbolic

_HEADS, _SIZE = 8, 64
_FLOAT = int(onnx.TensorProto.FLOAT)


def _attention(
    mask: str, length: int, batch: int = 1, operands: str = ""
) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    shape = (batch, length, _HEADS * _SIZE)
    feed = {name: rng.standard_normal(shape).astype(np.float32) for name in ("q", "k", "v")}
    if operands:
        pad = np.ones((batch, length), bool)
        pad[:, length // 2 :] = rng.random((batch, length - length // 2)) < 0.5
        feed["pad"] = pad
    attributes = {"mask": mask, "layout": "BSN", "num_heads": _HEADS, "kv_num_heads": _HEADS, "operands": operands}
    node = helper.make_node("StofAttention", list(feed), ["y"], domain="stof", **attributes)
    inputs = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape) for n, a in feed.items()
    ]
    graph = helper.make_graph([node], "g", inputs, [helper.make_tensor_value_info("y", _FLOAT, shape)])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("stof", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9), feed


@pytest.mark.parametrize(
    ("mask", "batch", "length", "operands"),
    [("", 1, 4096, ""), ("", 4, 1500, ""), ("pad[b, k]", 2, 3001, "pad"), ("abs(q - k) <= 64", 1, 16384, "")],
)
def test_a_run_takes_what_the_library_says(mask: str, batch: int, length: int, operands: str) -> None:
    model, feed = _attention(mask, length, batch, operands)
    estimated = MemoryEstimate(model, Symbolic(model), is_strict=True).run({}).peak
    measured = measure_node(model, feed)
    assert abs(estimated - measured) <= max(4 << 20, 0.06 * measured), (estimated, measured)


def _workspace(mask: str, length: int, threads: int = 1, **more: str) -> int | None:
    attributes = {"mask": mask, "layout": "BSN", "num_heads": _HEADS, "kv_num_heads": _HEADS, **more}
    tensors = [shape_of(_FLOAT, (1, length, _HEADS * _SIZE))] * 3
    return Op("StofAttention", attributes).workspace(tensors, threads)


def test_keys_are_packed_but_for_windows() -> None:
    keys = 4096 * _HEADS * _SIZE * 4
    dense, window = _workspace("", 4096), _workspace("abs(q - k) <= 64", 4096)
    assert dense is not None
    assert window is not None
    assert 2 * keys <= dense <= 2 * keys + (4 << 20)  # values, too: rows of a head are not dense
    assert window < keys / 2
    two = _workspace("", 4096, 2)
    assert two is not None
    assert dense < two


def test_what_the_library_cannot_say(monkeypatch: pytest.MonkeyPatch) -> None:
    op = Op("StofAttention", {"mask": "", "layout": "BSN", "num_heads": _HEADS, "kv_num_heads": _HEADS})
    with pytest.raises(LibraryError, match="threads must be 1 to 64"):
        op.workspace([shape_of(_FLOAT, (1, 8, 512))] * 3, 65)
    with pytest.raises(LibraryError, match="has 1 inputs, expected 3"):
        op.workspace([shape_of(_FLOAT, (1, 8, 512))])
    with pytest.raises(ValueError, match="rank 9"):
        shape_of(_FLOAT, (1,) * 9)
    monkeypatch.setattr("stof.runtime.library.library", lambda: object())  # of an earlier version
    assert op.workspace([shape_of(_FLOAT, (1, 8, 512))] * 3) is None
    monkeypatch.undo()


def test_what_only_a_run_knows_counts_with_keys_and_values(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = _attention("", 2048)

    def refuse(*_: object) -> None:
        raise LibraryError("only a run knows the lengths of packed sequences")

    monkeypatch.setattr("stof.runtime.library.Op.workspace", refuse)
    tensor = 2048 * _HEADS * _SIZE * 4
    assert (
        MemoryEstimate(model, Symbolic(model), is_strict=True).run({}).peak == 3 * tensor
    )  # of these one is the output


def _node_model(
    node: onnx.NodeProto, feed: dict[str, np.ndarray], shapes: list[tuple[int, ...]], **stored: np.ndarray
) -> onnx.ModelProto:
    """A model of one node; ``shapes`` are those of its outputs."""
    inputs = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape) for n, a in feed.items()
    ]
    weights = [numpy_helper.from_array(a, n) for n, a in stored.items()]
    outputs = [helper.make_tensor_value_info(n, _FLOAT, shape) for n, shape in zip(node.output, shapes, strict=True)]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("stof", 1)]
    graph = helper.make_graph([node], "g", inputs, outputs, weights)
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def _floats(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).standard_normal(shape).astype(np.float32)


def _compare(model: onnx.ModelProto, feed: dict[str, np.ndarray], least: int) -> None:
    """That a run takes what is estimated; ``least``: of these, bytes that are neither inputs nor outputs."""
    estimate = MemoryEstimate(model, Symbolic(model), is_strict=True)
    working = max(m.working for m in estimate.moments(estimate.tensor_sizes({})))
    assert working >= least
    measured = measure_node(model, feed)
    estimated = estimate.run({}).peak
    assert abs(estimated - measured) <= max(4 << 20, 0.06 * measured), (estimated, measured)


@pytest.mark.parametrize("body", ["tanh(x0[m, n]) * x1[m, n]", "gelu(x0[m, n]) * x1[m, n]"], ids=["products", "fused"])
def test_products_of_gemms(body: str) -> None:
    """An epilogue that is applied in the cache needs no products in memory."""
    rows, columns = 64, 1 << 16
    text = f"axes m = x0.0, n = x0.1; out y0 f32 [m, n] = {body}"
    node = helper.make_node("StofGemm", ["a", "b", "b1"], ["y"], domain="stof", epilogue=text, pair=2)
    feed = {"a": _floats(rows, 8)}
    is_fused = body.startswith("gelu")
    model = _node_model(node, feed, [(rows, columns)], b=_floats(8, columns), b1=_floats(8, columns))
    _compare(model, feed, 0 if is_fused else 2 * 4 * rows * columns)


def _cached(total: str) -> onnx.NodeProto:
    inputs = ["q", "k", "v", "past_key", "past_value", "seqlens", total]
    attributes = {"num_heads": _HEADS, "kv_num_heads": _HEADS, "mask": ""}
    return helper.make_node(
        "StofCachedAttention", inputs, ["y", "present_key", "present_value"], domain="stof", **attributes
    )


def test_keys_of_caches_are_packed() -> None:
    past, new = 16320, 64
    width = _HEADS * _SIZE
    feed = {name: _floats(1, new, width) for name in ("q", "k", "v")}
    feed |= {name: _floats(1, _HEADS, past, _SIZE) for name in ("past_key", "past_value")}
    feed |= {"seqlens": np.array([past + new - 1], np.int32), "total": np.array([past + new], np.int32)}
    cache = (1, _HEADS, past + new, _SIZE)
    model = _node_model(_cached("total"), feed, [(1, new, width), cache, cache])
    _compare(model, feed, 4 * (past + new) * width)


def test_lengths_that_follow_from_shapes_count() -> None:
    """A cache with rows to spare: the number of keys is that of a mask's columns."""
    capacity, new = 4096, 16
    shapes = dict.fromkeys(("q", "k", "v"), (1, new, _HEADS * _SIZE))
    shapes |= dict.fromkeys(("past_key", "past_value"), (1, _HEADS, capacity, _SIZE))
    inputs = [helper.make_tensor_value_info(n, _FLOAT, s) for n, s in shapes.items()]
    inputs.append(helper.make_tensor_value_info("seqlens", onnx.TensorProto.INT32, (1,)))
    inputs.append(helper.make_tensor_value_info("mask", onnx.TensorProto.INT64, (1, "keys")))
    nodes = [
        helper.make_node("Shape", ["mask"], ["sizes"], start=1, end=2),
        helper.make_node("Cast", ["sizes"], ["total"], to=onnx.TensorProto.INT32),
        _cached("total"),
    ]
    results = {"y": shapes["q"], "present_key": shapes["past_key"], "present_value": shapes["past_value"]}
    outputs = [helper.make_tensor_value_info(n, _FLOAT, s) for n, s in results.items()]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("stof", 1)]
    model = helper.make_model(helper.make_graph(nodes, "g", inputs, outputs), opset_imports=opsets, ir_version=9)
    estimate = MemoryEstimate(model, Symbolic(model), is_strict=True)
    working = {
        keys: max(m.working for m in estimate.moments(estimate.tensor_sizes({"keys": keys}))) for keys in (512, 4096)
    }
    op = Op("StofCachedAttention", {"num_heads": _HEADS, "kv_num_heads": _HEADS, "mask": ""})
    tensors = [shape_of(_FLOAT, shape) for shape in shapes.values()]
    tensors.append(shape_of(onnx.TensorProto.INT32, (1,)))
    for keys, found in working.items():
        total = np.array([keys], np.int32)
        assert found == op.workspace([*tensors, tensor_of(total)], count_threads())
    assert working[512] < working[4096]
