# SPDX-License-Identifier: Apache-2.0
"""Quantized attention in the branches of If and the bodies of Loop, in every form that is replaced in the main graph."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import TensorProto, compose, helper
from quantized_models import Numbers, draw_codes, quantized_attention, run

import stof
from stof.options import Options

OPERATOR = """
<ir_version: 8, opset_import: ["": 18, "com.microsoft": 1]>
g (int8[B,4,S,8] q, int8[B,4,S,8] k, int8[B,4,S,8] v) => (float[a,b,c,d] out)
<float query_s = {0.02}, int8 query_z = {3}, float key_s = {0.03}, int8 key_z = {-5}, float value_s = {0.05}, int8 value_z = {7},
 float score_s = {0.07}, int8 score_z = {1}, float weight_s = {0.00392156862745}, int8 weight_z = {-128}, float result_s = {0.03},
 int8 result_z = {2}> {
kt = Transpose <perm = [0, 1, 3, 2]> (k)
score_q = QLinearMatMul (q, query_s, query_z, kt, key_s, key_z, score_s, score_z)
score_d = DequantizeLinear (score_q, score_s, score_z)
factor = Constant <value = float {0.35}> ()
scaled = Mul (score_d, factor)
weights = Softmax <axis = -1> (scaled)
weight_q = QuantizeLinear (weights, weight_s, weight_z)
result_q = QLinearMatMul (weight_q, weight_s, weight_z, v, value_s, value_z, result_s, result_z)
out = DequantizeLinear (result_q, result_s, result_z)
}"""
CODED = OPERATOR.replace(
    "weights = Softmax <axis = -1> (scaled)\nweight_q = QuantizeLinear (weights,",
    (
        "scaled_q = QuantizeLinear (scaled, scaled_s, scaled_z)\n"
        "weight_q = com.microsoft.QLinearSoftmax <axis = -1, opset = 18> (scaled_q, scaled_s, scaled_z,"
    ),
).replace("<float query_s", "<float scaled_s = {0.0245}, int8 scaled_z = {1}, float query_s")
BY_RANGE = """
<ir_version: 8, opset_import: ["": 18]>
g (float[B,4,S,8] q, float[B,4,S,8] k, float[B,4,S,8] v) => (float[a,b,c,d] out) {
kt = Transpose <perm = [0, 1, 3, 2]> (k)
q_c, q_s, q_z = DynamicQuantizeLinear (q)
k_c, k_s, k_z = DynamicQuantizeLinear (kt)
qk_i = MatMulInteger (q_c, k_c, q_z, k_z)
qk_f = Cast <to = 1> (qk_i)
qk_s = Mul (q_s, k_s)
qk = Mul (qk_f, qk_s)
factor = Constant <value = float {0.35}> ()
scaled = Mul (qk, factor)
weights = Softmax <axis = -1> (scaled)
w_c, w_s, w_z = DynamicQuantizeLinear (weights)
v_c, v_s, v_z = DynamicQuantizeLinear (v)
wv_i = MatMulInteger (w_c, v_c, w_z, v_z)
wv_f = Cast <to = 1> (wv_i)
wv_s = Mul (w_s, v_s)
out = Mul (wv_f, wv_s)
}"""
MASKED = quantized_attention(Numbers(biased_score=(1.3344e36, 127)), mask="rounded pad")
FORMS = {
    "qdq": quantized_attention(),
    "rounded mask": MASKED,
    "operator": onnx.parser.parse_model(OPERATOR),
    "coded softmax": onnx.parser.parse_model(CODED),
    "by range": onnx.parser.parse_model(BY_RANGE),
}


def share_of(form: str) -> float:
    """QLinearSoftmax divides integers: its weights may differ from those of the formula by a code."""
    return 0.3 if form == "coded softmax" else 0.01


def branch(model: onnx.ModelProto, prefix: str, *, own_constants: bool) -> onnx.GraphProto:
    """The graph as a branch that reads the inputs of the graph around it, and perhaps its constants."""
    outer = {i.name for i in model.graph.input}
    outer |= set() if own_constants else {t.name for t in model.graph.initializer}
    graph = onnx.GraphProto()
    graph.CopyFrom(compose.add_prefix_graph(model.graph, prefix))
    for node in graph.node:
        for i, name in enumerate(node.input):
            if name.removeprefix(prefix) in outer:
                node.input[i] = name.removeprefix(prefix)
    del graph.input[:]
    if not own_constants:
        del graph.initializer[:]
    return graph


def in_if(model: onnx.ModelProto) -> onnx.ModelProto:
    """The graph in both branches of an If; one has constants of its own."""
    then, other = branch(model, "t_", own_constants=False), branch(model, "e_", own_constants=True)
    node = helper.make_node("If", ["flag"], ["out"], name="choice", then_branch=then, else_branch=other)
    inputs = [*model.graph.input, helper.make_tensor_value_info("flag", TensorProto.BOOL, [])]
    graph = helper.make_graph([node], "outer", inputs, list(model.graph.output), list(model.graph.initializer))
    return helper.make_model(graph, ir_version=8, opset_imports=model.opset_import)


def in_loop(model: onnx.ModelProto) -> onnx.ModelProto:
    """The graph in a Loop of two steps, whose result is the last step's."""
    body = branch(model, "b_", own_constants=True)
    body.input.extend(
        [
            helper.make_tensor_value_info("step", TensorProto.INT64, []),
            helper.make_tensor_value_info("goes_on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("before", TensorProto.FLOAT, ["B", 4, "S", 8]),
        ]
    )
    body.node.append(helper.make_node("Identity", ["goes_on"], ["goes_on_out"]))
    body.output.insert(0, helper.make_tensor_value_info("goes_on_out", TensorProto.BOOL, []))
    nodes = [
        helper.make_node("Cast", ["q"], ["first"], to=TensorProto.FLOAT),
        helper.make_node("Loop", ["count", "", "first"], ["out"], name="steps", body=body),
    ]
    count = helper.make_tensor("count", TensorProto.INT64, [], [2])
    graph = helper.make_graph(
        nodes, "outer", list(model.graph.input), list(model.graph.output), [*model.graph.initializer, count]
    )
    return helper.make_model(graph, ir_version=8, opset_imports=model.opset_import)


def check(
    model: onnx.ModelProto, sites: int, folder: Path, feeds: list[dict[str, np.ndarray]], share: float = 0.01
) -> None:
    """Optimizes and runs a model; share: of outputs that may be away by a few steps of 0.03."""
    source, written = folder / "model.onnx", folder / "written.onnx"
    onnx.save(model, source)
    report = stof.optimize(source, written, Options(verify_budget=5))
    assert [s.replaced for s in report.sites] == [True] * sites, report.sites
    onnx.checker.check_model(onnx.load(written))
    for feed in feeds:
        (wanted,), (body,), (mine,) = run(model, feed), run(written, feed), run(written, feed, library=True)
        assert np.isfinite(wanted).all()
        for found in (body, mine):
            # A number in the middle between two codes may round either way, by a step of the result in QOperator form.
            away = np.abs(wanted - found)
            assert (away > 1e-5 * np.abs(wanted).max()).mean() <= share
            assert away.max() <= (0.061 if share == 0.01 else 0.25)


@pytest.mark.parametrize("form", FORMS)
def test_both_branches_of_an_if(form: str, tmp_path: Path) -> None:
    model = in_if(FORMS[form])
    feeds = [
        {**draw_codes(FORMS[form], 2, length, seed=length), "flag": np.array(flag)}
        for length in (7, 70)
        for flag in (False, True)
    ]
    check(model, 2, tmp_path, feeds, share_of(form))


@pytest.mark.parametrize("form", FORMS)
def test_the_body_of_a_loop(form: str, tmp_path: Path) -> None:
    check(in_loop(FORMS[form]), 1, tmp_path, [draw_codes(FORMS[form], 2, 33, seed=3)], share_of(form))


def test_beside_the_main_graph(tmp_path: Path) -> None:
    """Names of new tensors in a branch are none of the main graph's."""
    model = FORMS["operator"]
    outer = in_if(model)
    main = compose.add_prefix_graph(model.graph, "m_")
    for node in main.node:
        for i, name in enumerate(node.input):
            if name.removeprefix("m_") in {v.name for v in model.graph.input}:
                node.input[i] = name.removeprefix("m_")
    outer.graph.node.extend(main.node)
    outer.graph.initializer.extend(main.initializer)
    outer.graph.node.append(helper.make_node("Add", ["out", "m_out"], ["both"]))
    outer.graph.output[0].name = "both"
    check(outer, 3, tmp_path, [{**draw_codes(model, 2, 33), "flag": np.array(True)}])
