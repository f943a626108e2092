# SPDX-License-Identifier: Apache-2.0
"""Emitted models load with and without the library after other tools have changed them (docs/guide/other-tools.md)."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import numpy as np
import onnx
import onnx.inliner
import onnx.version_converter
import pytest
from attention_forms import PACKED, PLAIN, model, rewrite, run
from onnxruntime.transformers.float16 import convert_float_to_float16

from stof.graph.index import all_nodes

SCORES = "%kt\n%scale\ns1 = MatMul (q, kt)\ns2 = Mul (s1, scale)\n"
PADDED = (
    "middle = Constant <value = int64[2] {1, 2}> ()\nkept = Cast <to = 9> (mask)\nreal = Unsqueeze (kept, middle)\n"
    "least = Constant <value = float {-10000.0}> ()\n"
)
# name: (inputs, outputs, body)
MODELS = {
    "dense": (PACKED, "float[a,b,c] out", "%heads\n" + SCORES + "p = Softmax (s2)\no = MatMul (p, v)\n%merge\n"),
    "a causal window": (
        PACKED,
        "float[a,b,c] out",
        "%heads\n" + SCORES + "%window\n%added\ns3 = Add (s2, added)\np = Softmax (s3)\no = MatMul (p, v)\n%merge\n",
    ),
    "padding": (
        f"{PLAIN}, int64[B,S] mask",
        "float[a,b,c,d] out",
        PADDED + SCORES + "s3 = Where (real, s2, least)\np = Softmax (s3)\nout = MatMul (p, v)",
    ),
    "a bias": (
        f"{PLAIN}, float[1,4,S,S] bias",
        "float[a,b,c,d] out",
        SCORES + "s3 = Add (s2, bias)\np = Softmax (s3)\nout = MatMul (p, v)",
    ),
    "two masks in one function": (
        f"{PLAIN}, int64[B,S] mask",
        "float[a,b,c,d] out",
        PADDED + SCORES + "s3 = Where (real, s2, least)\np = Softmax (s3)\no1 = MatMul (p, v)\n"
        "%window\n%added\ns4 = Add (s2, added)\np4 = Softmax (s4)\no2 = MatMul (p4, v)\nout = Add (o1, o2)",
    ),
}


def _slim(graph: onnx.ModelProto) -> onnx.ModelProto:
    return cast("onnx.ModelProto", pytest.importorskip("onnxslim").slim(graph))


def _simplify(graph: onnx.ModelProto) -> onnx.ModelProto:
    return cast("onnx.ModelProto", pytest.importorskip("onnxsim").simplify(graph)[0])


def _optimize(graph: onnx.ModelProto) -> onnx.ModelProto:
    return cast("onnx.ModelProto", pytest.importorskip("onnxscript.optimizer").optimize(graph))


def _half(graph: onnx.ModelProto) -> onnx.ModelProto:
    return cast("onnx.ModelProto", convert_float_to_float16(graph, keep_io_types=True))


def _half_inputs(graph: onnx.ModelProto) -> onnx.ModelProto:
    return cast("onnx.ModelProto", convert_float_to_float16(graph))


Tool = Callable[[onnx.ModelProto], onnx.ModelProto]
# Tools that keep the operator and its function, that replace it by its body, and that lose the function.
KEEPING: dict[str, Tool] = {
    "fp16": _half,
    "fp16 with inputs": _half_inputs,
    "onnxslim": _slim,
    "onnxsim": _simplify,
    "shape inference": lambda m: onnx.shape_inference.infer_shapes(m),
}
INLINING: dict[str, Tool] = {"inliner": onnx.inliner.inline_local_functions, "onnxscript": _optimize}


def _emitted(name: str) -> tuple[onnx.ModelProto, dict[str, np.ndarray], np.ndarray]:
    graph = model(*MODELS[name])
    result, _ = rewrite(graph)
    onnx.checker.check_model(result)
    rng = np.random.default_rng(0)
    feed: dict[str, np.ndarray] = {}
    for value in graph.graph.input:
        shape = [d.dim_value or {"B": 2, "S": 19}[d.dim_param] for d in value.type.tensor_type.shape.dim]
        feed[value.name] = rng.standard_normal(shape).astype(np.float32)
    if "mask" in feed:
        feed["mask"] = (np.arange(19) < np.array([[19], [7]])).astype(np.int64)
    return result, feed, run(graph, feed)[0]


def _count(graph: onnx.ModelProto) -> int:
    return sum(n.op_type == "StofAttention" for n in all_nodes(graph.graph.node))


def _check_run(changed: onnx.ModelProto, feed: dict[str, np.ndarray], want: np.ndarray, library: bool) -> None:
    half = {i.name for i in changed.graph.input if i.type.tensor_type.elem_type == onnx.TensorProto.FLOAT16}
    given = {n: a.astype(np.float16) if n in half else a for n, a in feed.items()}
    is_half = any(t == onnx.TensorProto.FLOAT16 for t in _types(changed))
    (got,) = run(changed, given, library=library)
    np.testing.assert_allclose(got, want, atol=1e-2 if is_half else 5e-6)


def _types(graph: onnx.ModelProto) -> set[int]:
    values = (*graph.graph.input, *graph.graph.output)
    casts = {a.i for n in graph.graph.node if n.op_type == "Cast" for a in n.attribute if a.name == "to"}
    return {v.type.tensor_type.elem_type for v in values} | casts


@pytest.mark.parametrize("tool", KEEPING)
@pytest.mark.parametrize("name", MODELS)
def test_a_changed_model_loads_with_and_without_the_library(name: str, tool: str) -> None:
    result, feed, want = _emitted(name)
    before = _count(result)
    changed = KEEPING[tool](result)
    assert _count(changed) == before
    for library in (True, False):
        _check_run(changed, feed, want, library)


@pytest.mark.parametrize("tool", INLINING)
@pytest.mark.parametrize("name", ["a causal window", "two masks in one function"])
def test_an_inlined_model_computes_the_same_without_the_operator(name: str, tool: str) -> None:
    result, feed, want = _emitted(name)
    changed = INLINING[tool](result)
    assert not _count(changed)
    for library in (True, False):
        _check_run(changed, feed, want, library)


def test_the_version_converter_loses_the_function_and_the_model_needs_the_library() -> None:
    result, feed, want = _emitted("padding")
    changed = onnx.version_converter.convert_version(result, 21)
    assert _count(changed) == 1
    assert not changed.functions
    _check_run(changed, feed, want, True)
    with pytest.raises(Exception, match="StofAttention"):
        run(changed, feed)


def test_bodies_below_opset_15_have_no_cast_to_the_type_of_the_query() -> None:
    graph = model(*MODELS["dense"], opset=13)
    result, _ = rewrite(graph)
    (function,) = result.functions
    assert not any(n.op_type == "CastLike" for n in function.node)
    rng = np.random.default_rng(0)
    feed = {n: rng.standard_normal((2, 19, 32)).astype(np.float32) for n in "xyz"}
    for library in (True, False):
        np.testing.assert_allclose(run(result, feed, library=library)[0], run(graph, feed)[0], atol=5e-6)
