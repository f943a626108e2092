# SPDX-License-Identifier: Apache-2.0
"""Decoders inside ONNX Runtime's GreedySearch, BeamSearch and Sampling, whose tensors are called like the model's own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from fused_attention_nodes import forced, run
from onnx import TensorProto, helper, numpy_helper

from stof.graph.index import all_nodes

D, H, VOCABULARY = 32, 2, 50
INT32, FLOAT = TensorProto.INT32, TensorProto.FLOAT
KINDS = ("GreedySearch", "BeamSearch", "Sampling")


def _weights() -> list[onnx.TensorProto]:
    rng = np.random.default_rng(0)
    shapes = {
        "words": (VOCABULARY, D),
        "places": (256, D),
        "w": (D, 3 * D),
        "bias": (3 * D,),
        "head": (D, VOCABULARY),
    }
    return [
        numpy_helper.from_array((rng.standard_normal(s) * 0.5).astype(np.float32), name) for name, s in shapes.items()
    ]


def _decoder(weights: list[onnx.TensorProto], ids: str = "input_ids") -> onnx.GraphProto:
    value, node = helper.make_tensor_value_info, helper.make_node
    nodes = [
        node("Gather", ["words", ids], ["e0"]),
        node("Gather", ["places", "position_ids"], ["e1"]),
        node("Add", ["e0", "e1"], ["h"]),
        node(
            "Attention",
            ["h", "w", "bias", "attention_mask", "past_0"],
            ["a", "present_0"],
            "attention",
            domain="com.microsoft",
            num_heads=H,
            unidirectional=1,
        ),
        node("Add", ["h", "a"], ["h1"]),
        node("MatMul", ["h1", "head"], ["logits"]),
    ]
    inputs = [
        value(ids, INT32, ["b", "s"]),
        value("position_ids", INT32, ["b", "s"]),
        value("attention_mask", INT32, ["b", "t"]),
        value("past_0", FLOAT, [2, "b", H, "p", D // H]),
    ]
    outputs = [value("logits", FLOAT, ["b", "s", VOCABULARY]), value("present_0", FLOAT, [2, "b", H, "t", D // H])]
    return helper.make_graph(nodes, "decoder", inputs, outputs, weights)


def _model(kind: str, *, weights_outside: bool = False) -> onnx.ModelProto:
    value = helper.make_tensor_value_info
    numbers = {"most": np.int32(40), "least": np.int32(1)}
    given = ["input_ids", "most", "least", "", "", "", "attention_mask"]
    if kind == "BeamSearch":
        numbers |= {"beams": np.int32(2), "results": np.int32(1), "one": np.float32(1.0)}
        given = ["input_ids", "most", "least", "beams", "results", "one", "one", "", "", "attention_mask"]
    stored = [numpy_helper.from_array(np.array([x]), name) for name, x in numbers.items()]
    weights = _weights()
    search = helper.make_node(
        kind,
        given,
        ["sequences"],
        "search",
        domain="com.microsoft",
        eos_token_id=49,
        pad_token_id=0,
        model_type=0,
        decoder=_decoder([] if weights_outside else weights),
        **({"top_p": 1e-4} if kind == "Sampling" else {}),
    )
    inputs = [value("input_ids", INT32, ["B", "S"]), value("attention_mask", INT32, ["B", "S"])]
    result = [value("sequences", INT32, ["B", "R", "M"] if kind == "BeamSearch" else ["B", "M"])]
    graph = helper.make_graph([search], "g", inputs, result, [*stored, *(weights if weights_outside else [])])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


@pytest.mark.parametrize("weights_outside", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_decoder_of_a_search_is_replaced(kind: str, weights_outside: bool, tmp_path: Path) -> None:
    original = _model(kind, weights_outside=weights_outside)
    report, target = forced(original, tmp_path)
    assert [(s.site, s.replaced, s.mask) for s in report.sites] == [("attention", True, "k <= q")]
    assert report.verification is not None
    assert {c.site for c in report.verification.comparisons if c.site} == {"attention"}
    written = onnx.load(target)
    assert [n.op_type for n in all_nodes(written.graph.node)].count("StofAttention") == 1
    rng = np.random.default_rng(3)
    for shape in ((1, 7), (2, 5)):
        ids = rng.integers(1, 48, shape).astype(np.int32)
        feed = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
        for library in (True, False):
            np.testing.assert_array_equal(run(target, feed, library=library)[0], run(original, feed)[0])


def _hidden(kind: str) -> onnx.ModelProto:
    """A choice whose branch calls a tensor ``x`` that is not the model's, while a node outside that it needs reads that one."""
    text = """<ir_version: 9, opset_import: ["" : 18]>
    g (float[B, 2, S, 8] x, float[B, 2, S, 8] v, bool[1] c) => (float[B, 2, S, 8] out) {
        q = Neg (x)
        out = If (c) <
            then_branch = yes () => (float[B, 2, S, 8] y) {
                NAME = Transpose <perm = [0, 1, 3, 2]> (q)
                s = MatMul (q, NAME)
                [inside] p = Softmax <axis = -1> (s)
                y = MatMul (p, v)
            },
            else_branch = no () => (float[B, 2, S, 8] z) { z = Identity (v) }
        >
    }"""
    return onnx.parser.parse_model(text.replace("NAME", kind))


def test_a_name_that_hides_an_outer_tensor_it_depends_on_keeps_the_site() -> None:
    from stof.attention.expand.expanders import make_working_copy
    from stof.attention.subgraphs import find_scopes

    (_, inside) = find_scopes(make_working_copy(_hidden("kt")))
    assert [s.name for s in inside.sites] == ["inside"]
    (_, inside) = find_scopes(make_working_copy(_hidden("x")))
    assert not inside.sites
    assert "has a tensor 'x', as a graph around it has" in inside.findings[0].reason
