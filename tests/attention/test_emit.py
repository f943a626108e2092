# SPDX-License-Identifier: Apache-2.0
"""The emitted graph: sites are replaced, everything else stays as it was."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import pytest
from attention_forms import PACKED, PLAIN, assert_equivalent, feeds, model, rewrite, run
from onnx import TensorProto, helper, numpy_helper

from stof.attention.emit import Rewrite, emit
from stof.attention.find import find_sites
from stof.errors import UnsupportedError
from stof.mask.lift import lift
from stof.mask.site import EmptyRows
from stof.result_shapes import ResultRules, declare_results
from stof.symbolic import Symbolic

SIZES = ({"B": 2, "S": 19}, {"B": 1, "S": 3})
CORE = "%kt\n%window\n%added\ns1 = MatMul (q, kt)\ns2 = Add (s1, added)\np = Softmax (s2)\n"


def nodes(graph: onnx.ModelProto) -> dict[str, onnx.NodeProto]:
    return {n.output[0]: n for n in graph.graph.node}


def annotated() -> onnx.ModelProto:
    """A model with everything in it that a rewrite may lose."""
    graph = model(
        PACKED + ", float[32,32] w1",
        "float[B,S,32] final, float[e] sum",
        """%heads
        %kt
        %window
        %added
        s1 = MatMul (q, kt)
        s2 = Add (s1, added)
        p = Softmax (s2)
        o = MatMul (p, v)
        %merge
        gone = MatMul (out, w1)
        r = Constant <value = float[1] {2.0}> ()
        scaled = Mul (gone, r)
        final = Identity (scaled)
        unread = Neg (final)""",
    )
    graph.doc_string = "a model"
    graph.producer_name, graph.producer_version = "somebody", "3.1"
    graph.domain, graph.model_version = "org.example", 7
    entry = graph.metadata_props.add()
    entry.key, entry.value = "language", "en"
    body = graph.graph
    body.doc_string = "its graph"
    body.name = "main"
    # An initializer that the caller may override.
    w1 = np.random.default_rng(5).standard_normal((32, 32)).astype(np.float32)
    body.initializer.append(numpy_helper.from_array(w1, "w1"))
    body.initializer.append(numpy_helper.from_array(np.zeros(3, np.float32), "nobody_reads_this"))
    # A node whose first output is left out and one with an empty list of numbers.
    rnn = helper.make_node("GRU", ["seq", "wx", "wh"], ["", "state"], hidden_size=3, name="rnn")
    rnn.attribute.append(onnx.AttributeProto(name="activation_alpha", type=onnx.AttributeProto.FLOATS))
    body.node.append(rnn)
    for name, shape in (("seq", (5, 1, 2)), ("wx", (1, 9, 2)), ("wh", (1, 9, 3))):
        body.initializer.append(numpy_helper.from_array(np.full(shape, 0.1, np.float32), name))
    body.node.append(helper.make_node("Relu", ["state"], ["positive"], name="relu"))
    body.node.append(helper.make_node("Flatten", ["positive"], ["flat2"], axis=0))
    body.node.append(helper.make_node("ReduceSum", ["flat2"], ["sum"], keepdims=0, name="total"))
    del body.output[1].type.tensor_type.shape.dim[:]
    for i, node in enumerate(body.node):
        node.doc_string = f"line {i}"
        prop = node.metadata_props.add()
        prop.key, prop.value = "pkg.torch.onnx.stack_trace", f"frame {i}"
    info = body.value_info.add()
    info.CopyFrom(helper.make_tensor_value_info("gone", TensorProto.FLOAT, ["B", "S", 32]))
    info.doc_string = "a hidden state"
    body.value_info.add().CopyFrom(helper.make_tensor_value_info("s2", TensorProto.FLOAT, ["B", 4, "S", "S"]))
    annotation = body.quantization_annotation.add(tensor_name="gone")
    annotation.quant_parameter_tensor_names.add(key="SCALE_TENSOR", value="nobody_reads_this")
    twice = helper.make_function(
        "local", "Twice", ["a"], ["b"], [helper.make_node("Add", ["a", "a"], ["b"])], [helper.make_opsetid("", 18)]
    )
    twice.doc_string = "doubles"
    graph.functions.append(twice)
    graph.opset_import.append(helper.make_opsetid("local", 1))
    body.node[-5].CopyFrom(helper.make_node("Neg", ["final"], ["unread"], name="dead"))
    final = next(n for n in body.node if n.output[0] == "final")
    final.op_type, final.domain = "Twice", "local"
    return graph


def test_what_the_rewrite_does_not_concern_survives() -> None:
    before = annotated()
    onnx.checker.check_model(before)
    after = assert_equivalent(before, *SIZES, tolerance=5e-5)  # of values around 30
    for field in ("doc_string", "producer_name", "producer_version", "domain", "model_version", "ir_version"):
        assert getattr(after, field) == getattr(before, field)
    assert {(e.key, e.value) for e in before.metadata_props} < {(e.key, e.value) for e in after.metadata_props}
    assert "stof_version" in {e.key for e in after.metadata_props}
    assert [(e.domain, e.version) for e in after.opset_import][:3] == [
        (e.domain, e.version) for e in before.opset_import
    ]
    assert ("stof", 1) in {(e.domain, e.version) for e in after.opset_import}
    assert list(after.functions)[:1] == list(before.functions)
    for field in ("name", "doc_string"):
        assert getattr(after.graph, field) == getattr(before.graph, field)
    for field in ("input", "output", "quantization_annotation"):
        assert list(getattr(after.graph, field)) == list(getattr(before.graph, field))
    originals = [n.SerializeToString() for n in before.graph.node]
    kept = [n for n in after.graph.node if n.op_type != "StofAttention"]
    assert kept
    assert all(n.SerializeToString() in originals for n in kept)
    assert {"rnn", "dead", "relu", "total"} <= {n.name for n in kept}
    declare_results(after, ResultRules(), in_functions=False)  # as the pipeline does it
    infos = {v.name: v for v in after.graph.value_info}
    assert infos["gone"].doc_string == "a hidden state"
    assert "s2" not in infos
    assert [d.dim_param or d.dim_value for d in infos["out"].type.tensor_type.shape.dim] == ["B", "S", 32]
    initializers = {t.name: t for t in after.graph.initializer}
    assert {"w1", "nobody_reads_this"} <= set(initializers)
    onnx.shape_inference.infer_shapes(after, strict_mode=True)


def test_the_input_is_not_changed_and_the_result_is_the_same_every_time() -> None:
    before = annotated()
    copy = before.SerializeToString(deterministic=True)
    first, _ = rewrite(before)
    second, _ = rewrite(before)
    assert before.SerializeToString(deterministic=True) == copy
    assert first.SerializeToString(deterministic=True) == second.SerializeToString(deterministic=True)


def test_a_rewritten_model_has_nothing_left_to_find() -> None:
    before = model(PLAIN, "float[a,b,c,d] out", CORE + "out = MatMul (p, v)")
    after, rewrites = rewrite(before)
    assert find_sites(after, Symbolic(after)) == ([], [])
    with pytest.raises(UnsupportedError, match="already holds"):
        emit(after, Symbolic(after), rewrites)
    assert emit(after, Symbolic(after), []) == after


def test_names_say_where_the_node_comes_from() -> None:
    before = model(PLAIN, "float[a,b,c,d] out", CORE + "out = MatMul (p, v)")
    next(n for n in before.graph.node if n.op_type == "Softmax").name = "/layers.3/attn/Softmax"
    after, _ = rewrite(before)
    node = nodes(after)["out"]
    assert node.name == "/layers.3/attn/StofAttention"
    assert not any(a.name == "overload" for a in node.attribute)
    assert node.overload == ""
    values = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    assert values["plugin_namespace"] == b"stof"
    assert values["num_heads"] == values["kv_num_heads"] == 4


def test_two_sites_share_function_operands_and_tables() -> None:
    table = np.random.default_rng(3).random((19, 19)) < 0.4
    table[:, 0] = True
    before = model(
        PLAIN.replace("S", "19") + ", int64[B,19] am",
        "float[a,b,c,d] first, float[e,f,g,h] second, float[i,j,k,l] third",
        """%kt
        s1 = MatMul (q, kt)
        least = Constant <value = float {-1e9}> ()
        s2 = Where (table, s1, least)
        p2 = Softmax (s2)
        first = MatMul (p2, v)
        axes12 = Constant <value = int64[2] {1, 2}> ()
        am4 = Unsqueeze (am, axes12)
        amb = Cast <to = 9> (am4)
        s3 = Where (amb, s1, least)
        p3 = Softmax (s3)
        second = MatMul (p3, v)
        s4 = Where (table, s3, least)
        p4 = Softmax (s4)
        third = MatMul (p4, v)""",
    )
    before.graph.initializer.append(numpy_helper.from_array(table, "table"))
    after = assert_equivalent(before, {"B": 2})
    calls = [nodes(after)[n] for n in ("first", "second", "third")]
    assert len({len(c.input) for c in calls}) == 1
    assert len(after.functions) == 1
    assert len(after.functions[0].input) == len(calls[0].input)
    assert all(name for c in calls for name in c.input)
    roles = [next(a.s.decode() for a in c.attribute if a.name == "operands") for c in calls]
    assert roles == ["unused table0", "pad unused", "pad table0"]
    assert calls[0].input[4] == calls[2].input[4]
    assert [next(a.i for a in c.attribute if a.name == "mask_id") for c in calls] == [0, 1, 2]


def test_sites_of_unlike_shapes_and_types_share_one_function() -> None:
    """Fixed sizes: a runtime infers shapes in every branch, also in those that a call does not take."""
    before = model(
        "float[2,5,32] x, float[2,7,32] y, float[2,7,32] z, float[2,3,6,20] q9, float[2,1,6,20] k9, float16[2,2,9,16] q7",
        "float[a,b,c] out, float[d,e,f,g] out9, float16[h,i,j,k] out7",
        """%heads
        %kt
        s1 = MatMul (q, kt)
        p = Softmax (s1)
        o = MatMul (p, v)
        %merge
        kt9 = Transpose <perm = [0, 1, 3, 2]> (k9)
        s9 = MatMul (q9, kt9)
        p9 = Softmax (s9)
        out9 = MatMul (p9, k9)
        kt7 = Transpose <perm = [0, 1, 3, 2]> (q7)
        s7 = MatMul (q7, kt7)
        p7 = Softmax (s7)
        out7 = MatMul (p7, q7)""",
    )
    after = assert_equivalent(before, {}, tolerance=4e-3)
    given = feeds(before, {})
    assert abs(run(after, given)[0] - run(before, given)[0]).max() < 2e-6
    assert abs(run(after, given)[1] - run(before, given)[1]).max() < 2e-6


@pytest.mark.parametrize("policy", EmptyRows)
def test_empty_rows_of_the_body_are_the_library_s(policy: EmptyRows) -> None:
    before = model(
        PLAIN + ", int64[B,S] am",
        "float[a,b,c,d] out",
        """%kt
        %window
        axes12 = Constant <value = int64[2] {1, 2}> ()
        am4 = Unsqueeze (am, axes12)
        amb = Cast <to = 9> (am4)
        both = And (amb, w)
        least = Constant <value = float {-inf}> ()
        s1 = MatMul (q, kt)
        s2 = Where (both, s1, least)
        p = Softmax (s2)
        out = MatMul (p, v)""",
    )
    symbolic = Symbolic(before)
    (site,), _ = find_sites(before, symbolic)
    mask = lift(symbolic, site)
    assert mask.empty_rows is EmptyRows.NAN
    after = emit(before, symbolic, [Rewrite(site, replace(mask, empty_rows=policy))])
    given = feeds(before, {"B": 2, "S": 17})
    given["am"][0, :9] = 0
    (body,), (library,), (original,) = run(after, given), run(after, given, library=True), run(before, given)
    np.testing.assert_allclose(body, library, atol=2e-6)
    empty = np.isnan(original).all(-1)
    assert empty.any()
    np.testing.assert_allclose(body[~empty], original[~empty], atol=2e-6)
    rows = body[empty]
    if policy is EmptyRows.NAN:
        assert np.isnan(rows).all()
    elif policy is EmptyRows.ZERO:
        assert not rows.any()
    elif policy is EmptyRows.MEAN:
        mean = np.broadcast_to(given["v"].mean(2, keepdims=True), body.shape)
        np.testing.assert_allclose(rows, mean[empty], atol=2e-6)
    else:
        assert np.isfinite(rows).all()
        assert rows.any()


def test_a_shape_of_a_removed_tensor_comes_from_the_graph_inputs() -> None:
    before = model(
        PLAIN,
        "float[a,b,c,d] out, int64[4] sizes, int64[4] more",
        CORE + "o = MatMul (p, v)\nsizes = Shape (s2)\nshape = Shape (o)\nout = Reshape (o, shape)\n"
        "unrelated = Exp (q)\nmore = Shape (unrelated)",
    )
    after = assert_equivalent(before, *SIZES)
    kinds = [n.op_type for n in after.graph.node]
    assert kinds.count("StofAttention") == 1
    assert "MatMul" not in kinds
    # What the rewrite does not concern stays, though nothing but its shape is read.
    assert kinds.count("Exp") == 1
    assert nodes(after)["more"].op_type == "Shape"


def test_sizes_that_no_input_has_come_from_the_query() -> None:
    """As behind a convolution that shortens the sequence: only value_info knows its length, by name."""
    before = model(
        "float[1,4,S,8] x, float[6,4,3,1] w",
        "float[a,b,c,d] out",
        """c = Conv <kernel_shape = [3, 1], strides = [2, 1]> (x, w)
        q = Relu (c)
        k = Neg (q)
        v = Sigmoid (q)
        %kt
        s1 = MatMul (q, kt)
        p = Softmax (s1)
        o = MatMul (p, v)
        shape = Shape (o)
        two = Constant <value = int64 {2}> ()
        last = Gather <axis = 0> (shape, two)
        o3 = Transpose <perm = [0, 2, 1, 3]> (o)
        big = Cast <to = 1> (last)
        out = Mul (o3, big)""",
    )
    before.graph.value_info.append(helper.make_tensor_value_info("c", TensorProto.FLOAT, [1, 6, "frames", 8]))
    after = assert_equivalent(before, {"S": 25}, tolerance=1e-5)
    assert not any(n.op_type == "MatMul" for n in after.graph.node)
    concat = nodes(after)["shape"]
    assert concat.op_type == "Concat"
    assert nodes(after)[nodes(after)[concat.input[2]].input[0]].input[0] == "q"


def test_a_tensor_that_a_subgraph_reads_stays() -> None:
    before = model(
        PLAIN + ", bool flag",
        "float[a,b,c,d] result, float[e,f,g,h] out",
        CORE + "o = MatMul (p, v)\nout = Transpose <perm = [0, 2, 1, 3]> (o)\n",
    )
    then = helper.make_graph(
        [helper.make_node("Neg", ["o"], ["yes"])],
        "then",
        [],
        [helper.make_tensor_value_info("yes", TensorProto.FLOAT, None)],
    )
    other = helper.make_graph(
        [helper.make_node("Abs", ["q"], ["no"])],
        "else",
        [],
        [helper.make_tensor_value_info("no", TensorProto.FLOAT, None)],
    )
    before.graph.node.append(helper.make_node("If", ["flag"], ["result"], then_branch=then, else_branch=other))
    after, rewrites = rewrite(before)
    assert rewrites[0].site.output == "o"
    for flag in (True, False):
        given = {**feeds(before, {"B": 2, "S": 9}), "flag": np.array(flag)}
        for a, b in zip(run(before, given), run(after, given, library=True), strict=True):
            np.testing.assert_allclose(a, b, atol=2e-6)


def test_dead_readers_of_what_goes_go_too() -> None:
    before = model(PLAIN, "float[a,b,c,d] out", CORE + "out = MatMul (p, v)\ndead = Neg (w2)\n".replace("w2", "added"))
    before.graph.node[-1].name = "dead"
    after = assert_equivalent(before, *SIZES)
    assert [n.op_type for n in after.graph.node] == ["StofAttention"]


def test_tables_of_different_types_share_a_slot() -> None:
    """A runtime infers types in every branch of the function body, also in those that a call does not take."""
    rng = np.random.default_rng(4)
    allowed, first = rng.random((19, 19)) < 0.5, rng.integers(0, 9, 19)
    allowed[:, 0], first[0] = True, 0
    before = model(
        PLAIN.replace("S", "19"),
        "float[a,b,c,d] one, float[e,f,g,h] other",
        """%kt
        s1 = MatMul (q, kt)
        least = Constant <value = float {-1e9}> ()
        s2 = Where (allowed, s1, least)
        p2 = Softmax (s2)
        one = MatMul (p2, v)
        columns = Constant <value = int64[19] {0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18}> ()
        late = LessOrEqual (first, columns)
        s3 = Where (late, s1, least)
        p3 = Softmax (s3)
        other = MatMul (p3, v)""",
    )
    before.graph.initializer.append(numpy_helper.from_array(allowed, "allowed"))
    before.graph.initializer.append(numpy_helper.from_array(first.reshape(19, 1), "first"))
    after = assert_equivalent(before, {"B": 2})
    tables = [n for n in nodes(after)["one"].input if "table" in n] + [
        n for n in nodes(after)["other"].input if "table" in n
    ]
    kinds = {i.name: i.data_type for i in after.graph.initializer}
    assert len({kinds[name] for name in tables}) == 2
