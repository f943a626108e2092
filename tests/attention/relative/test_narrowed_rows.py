# SPDX-License-Identifier: Apache-2.0
"""Some rows of a computed table: copies of nodes that work row by row give the rows that the graph's own nodes give."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, parser

from stof.attention.relative_terms.narrowed_rows import narrow_rows
from stof.attention.relative_terms.row_axes import Cut
from stof.graph.editor import Editor
from stof.symbolic import Symbolic

# The nodes of a table of x [B, S, 8], w [8, 8] and names of constants; the axes of rows and of batches; the most rows made.
TABLES = {
    "MatMul by weights": ("m = MatMul (x, w) r = Identity (m)", 1, 0),
    "rows on the right": ("xt = Transpose <perm = [0, 2, 1]> (x) m = MatMul (w, xt) r = Identity (m)", 2, 0),
    "heads": ("m = MatMul (x, w) f = Reshape (m, heads) r = Transpose <perm = [0, 2, 3, 1]> (f)", 3, 0),
    "broadcast sums": ("s = Add (x, line) c = Mul (two, s) r = Where (flag, c, s)", 1, 0),
    "sines": ("s = Sin (x) c = Cos (x) j = Concat <axis = -1> (s, c) r = MatMul (j, tall)", 1, 0),
    "norm": ("n = LayerNormalization <axis = -1> (x, line) r = Relu (n)", 1, 0),
    "sum of two tables": ("a = MatMul (x, w) b = Exp (x) r = Sub (a, b)", 1, 0),
    "Einsum": ("m = Einsum <equation = \"bsi,ij->bjs\"> (x, w) r = Neg (m)", 2, 0),
    "Gemm": ("f = Gather (x, zero) g = Gemm <transB = 1> (f, w, line) r = Unsqueeze (g, zeros)", 1, 0),
    "columns": ("c = Slice (x, zeros, twos, lasts) r = Tanh (c)", 1, 0),
    "rows of rows": (
        "m = MatMul (x, w) d = Shape <start = 1, end = 2> (x) c = Slice (m, ones, d, ones) r = Sqrt (c)", 1, 0,
    ),
    "Expand over batches": (
        "f = Gather (x, zero) m = MatMul (f, w) n = Shape (x) e = Expand (m, n) r = Sigmoid (e)", 1, 0,
    ),
    "embeddings": (
        "i = Shape (x) n = Gather (i, one) z = Range (zero, n, one) g = Gather (many, z) r = Unsqueeze (g, zeros)", 1, 0,
    ),
    "softmax along rows": ("m = Softmax <axis = 1> (x) r = Relu (m)", 1, 0),
}  # fmt: skip


def model_of(body: str) -> onnx.ModelProto:
    text = f"""<ir_version: 8, opset_import: ["" : 17]>
    g (float[B,S,8] x) => (float[N,M,K] r) {{ {body} }}"""
    model: onnx.ModelProto = parser.parse_model(text)
    rng = np.random.default_rng(4)
    constants = {
        "w": rng.standard_normal((8, 8)).astype(np.float32),
        "tall": rng.standard_normal((16, 8)).astype(np.float32),
        "line": rng.standard_normal(8).astype(np.float32),
        "many": rng.standard_normal((500, 8)).astype(np.float32),
        "two": np.float32(2),
        "flag": np.array([[[True, False] * 4]]),
        "heads": np.array([0, 0, 2, 4]),
        "zero": np.array(0),
        "one": np.array(1),
        "zeros": np.array([0]),
        "ones": np.array([1]),
        "twos": np.array([2]),
        "lasts": np.array([2]),
    }
    read = {i for n in model.graph.node for i in n.input}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(a, n) for n, a in constants.items() if n in read)
    return model


def run(model: onnx.ModelProto, names: list[str], feed: dict[str, np.ndarray]) -> list[np.ndarray]:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    outputs: list[np.ndarray] = session.run(names, feed)
    return outputs


@pytest.mark.parametrize("name", TABLES)
def test_rows_are_those_of_the_table(name: str) -> None:
    body, row, batch = TABLES[name]
    model = model_of(body)
    symbolic = Symbolic(model)
    editor = Editor(model)
    extra: list[gs.Node] = []
    first, end = (gs.Variable(n, np.int64, [1]) for n in ("first", "end"))
    for limit in (first, end):
        editor.tensors[limit.name] = limit
        editor.graph.inputs.append(limit)
    cut = Cut(row, frozenset({batch}))
    narrowed = narrow_rows(editor, symbolic, "r", cut, (first, end), extra)
    editor.graph.nodes.extend(extra)
    edited = editor.finish()
    edited.graph.input.extend(helper.make_tensor_value_info(n, TensorProto.INT64, [1]) for n in ("first", "end"))
    edited.graph.output.append(helper.make_tensor_value_info(narrowed.name, TensorProto.FLOAT, None))
    made = [o.name for n in extra for o in n.outputs]
    edited.graph.output.extend(
        helper.make_empty_tensor_value_info(n) for n in made if n not in {o.name for o in edited.graph.output}
    )
    rng = np.random.default_rng(7)
    for batches, length, limits in ((1, 40, (3, 9)), (3, 40, (0, 6)), (2, 40, (20, 26)), (2, 5, (1, 4))):
        x = np.abs(rng.standard_normal((batches, length, 8))).astype(np.float32)
        x[...] = x[:1]  # what batches share
        feed = {"x": x, "first": np.array([limits[0]]), "end": np.array([limits[1]])}
        whole, some, *others = run(edited, ["r", narrowed.name, *made], feed)
        wanted = np.take(np.take(whole, range(*limits), row), [0], batch)
        np.testing.assert_allclose(some, wanted, rtol=1e-5, atol=1e-6, equal_nan=True)
        if "softmax" not in name and length == 40:  # which needs all rows
            assert not any(length in a.shape or length - 1 in a.shape for a in others)
            assert not any(
                n.op == "Slice" and n.inputs[0].name in ("m", "g", "c") for n in extra
            )  # but of their sources


def test_batches_that_share_rows_have_them_once() -> None:
    """All rows of the first batch, without those of the others: an Expand goes, and a Reshape finds the number of rows."""
    body = """f = Gather (x, zero) n = Shape (x) e = Expand (f, n) m = MatMul (e, w) h = Reshape (m, heads)
    r = Transpose <perm = [0, 2, 1, 3]> (h)"""
    model = model_of(body)
    editor = Editor(model)
    extra: list[gs.Node] = []
    narrowed = narrow_rows(editor, Symbolic(model), "r", Cut(None, frozenset({0})), None, extra)
    editor.graph.nodes.extend(extra)
    edited = editor.finish()
    made = [o.name for n in extra for o in n.outputs]
    edited.graph.output.extend(helper.make_empty_tensor_value_info(n) for n in made)
    x = np.random.default_rng(1).standard_normal((5, 9, 8)).astype(np.float32)
    whole, some, *others = run(edited, ["r", narrowed.name, *made], {"x": x})
    assert whole.shape == (5, 2, 9, 4)
    np.testing.assert_allclose(some, whole[:1], rtol=1e-5, atol=1e-6)
    assert not any(5 in a.shape for a in others)


def test_a_softmax_along_rows_is_read_after_it() -> None:
    """No rows of its input give rows of its result."""
    model = model_of(TABLES["softmax along rows"][0])
    editor = Editor(model)
    extra: list[gs.Node] = []
    limits = (editor.initializer("a", np.array([1])), editor.initializer("b", np.array([3])))
    narrow_rows(editor, Symbolic(model), "r", Cut(1, frozenset({0})), limits, extra)
    assert [n.op for n in extra if n.op in ("Slice", "Relu", "Softmax")] == ["Slice", "Relu"]
