# SPDX-License-Identifier: Apache-2.0
"""Chains whose rows are in no tensor: their work is bounded in the library, in the oracle and where chains are written."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

import stof
from stof import cli
from stof.errors import ModelError, UnsupportedError
from stof.fusion.description.chain_description import ChainDescription
from stof.fusion.description.evaluate import evaluate_chain
from stof.fusion.work_bound import check_any_run
from stof.runtime.library import LibraryError, Op

PAIRS = "axes b = x0.0, n = x1.0; out y0 f32 [b] = sum(x0[b] * x1[n])"
# Text, sizes of the inputs, whether the library runs it at these sizes.
RUNS = [
    ("axes m = 8, n = 2147483648; out y0 f32 [m] = sum(n * x0[0])", [(1,)], False),
    ("axes m = 1, n = 2147483648; out y0 f32 [m] = max_of(n)", [(1,)], False),
    ("axes m = x0.0, n = 268435457; out y0 f32 [m] = sum(n * x0[m])", [(1,)], False),
    ("axes m = x0.0, n = 4096; out y0 f32 [m] = sum(n * x0[m])", [(7,)], True),
    (PAIRS, [(300,), (500,)], True),
    (PAIRS, [(20_000,), (20_000,)], False),
]


@pytest.mark.parametrize(("text", "shapes", "fits"), RUNS)
def test_the_library_and_the_oracle_agree_on_what_is_too_much(
    text: str, shapes: list[tuple[int, ...]], fits: bool
) -> None:
    rng = np.random.default_rng(0)
    inputs = [rng.standard_normal(s, np.float32) for s in shapes]
    words = r"only \d+ elements to read and write; expected at most 4 positions for each element"
    found = np.full(shapes[0] if "x0.0" in text else int(text[9]), np.nan, np.float32)
    if not fits:
        with pytest.raises(LibraryError, match=words):
            Op("StofChain", {"chain": text}).run(inputs, [found], threads=2)
        with pytest.raises(ModelError, match=words):
            evaluate_chain(ChainDescription.parse(text), inputs)
        return
    Op("StofChain", {"chain": text}).run(inputs, [found], threads=2)
    (exact,) = evaluate_chain(ChainDescription.parse(text), inputs)
    np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-5 * float(np.abs(exact).max()))


def test_a_session_refuses_it_at_once() -> None:
    text = "axes m = 1073741824, n = 1073741823; out y0 f32 [m] = sum(n * x0[0])"
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("x", [1]), ("y", None)))
    graph = helper.make_graph(
        [helper.make_node("StofChain", ["x"], ["y"], "endless", domain="stof", chain=text)], "g", [x], [y]
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("stof", 1)]
    options = ort.SessionOptions()
    options.log_severity_level = 4
    stof.register(options)
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString()
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    with pytest.raises(Exception, match="endless: chain, line 1: found axes whose product is"):
        session.run(None, {"x": np.ones(1, np.float32)})


ANY = [
    ("axes b = x0.0, n = x0.1; out y0 f32 [b, n] = x0[b, n] - mean(x0[b, n])", True),
    ("axes b = x0.0, n = x0.1; out y0 f32 [b] = mean(x0[b, n])", True),
    ("axes b = x0.0, n = x0.1; out y0 f32 [n, b] = x1[n] + 0 * x0[0, 0]", True),
    ("axes b = x0.0, h = 4, n = x0.1; out y0 f32 [b, h] = sum(x0[b, n] * h)", True),
    ("axes b = x0.0, h = 5, n = x0.1; out y0 f32 [b, h] = sum(x0[b, n] * h)", False),
    ("axes b = x0.0, h = 12, n = 64; out y0 f32 [b, h] = sum(x0[b, 64 * h + n])", True),
    ("axes b = x0.0, h = 12, n = 64; out y0 f32 [b, h] = sum(x0[b, 63 * h + n])", False),
    ("axes b = x0.0, h = x1.0, n = x1.1; out y0 f32 [b, h] = sum(x0[b, h + n])", False),
    ("axes b = x0.0, n = x0.1; out y0 f32 [b] = sum(x0[b, (n) % 8])", False),
    ("axes b = x0.0, n = x0.1; out y0 f32 [b] = sum(select(n < 1, x0[b, n], 0))", False),
    (PAIRS, False),
    ("axes m = 1024, n = 1024; out y0 f32 [m] = sum(x0[m] * x1[n])", True),
    ("axes m = 65536, n = 65536; out y0 f32 [m] = sum(x0[m] * x1[n])", False),
]


@pytest.mark.parametrize(("text", "bounded"), ANY)
def test_what_is_written_runs_at_any_size(text: str, bounded: bool) -> None:
    if bounded:
        check_any_run(ChainDescription.parse(text))
    else:
        with pytest.raises(UnsupportedError, match="reduces rows that no input has as a whole"):
            check_any_run(ChainDescription.parse(text))


def pairs(sizes: tuple[int | str, int | str], path: Any) -> Any:
    """Sums over all pairs of two vectors, behind a chain of operators, as a region that reads no row of pairs."""
    nodes = [
        helper.make_node("Mul", ["a", "b"], ["product"]),
        helper.make_node("Sigmoid", ["product"], ["weight"]),
        helper.make_node("Mul", ["product", "weight"], ["silu"]),
        helper.make_node("ReduceMean", ["silu"], ["y"], axes=[-1]),
    ]
    inputs = [
        helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("a", [sizes[0], 1]), ("b", [sizes[1]]))
    ]
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph(nodes, "pairs", inputs, [output])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


@pytest.mark.parametrize(("sizes", "replaced"), [(("N", "M"), False), ((64, 48), True), ((16384, 16400), False)])
def test_the_optimizer_leaves_rows_whose_length_is_not_bounded(
    sizes: tuple[int | str, int | str], replaced: bool, tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    path = pairs(sizes, tmp_path / "m.onnx")
    assert cli.main([str(path), "--chains", "on", "--no-verify"]) == 0
    out = capsys.readouterr().out
    assert ("1 x chain of Mul Sigmoid Mul ReduceMean" in out) == replaced, out
    assert ("kept  1 x Mul Sigmoid Mul ReduceMean: it reduces rows that no input has" in out) != replaced
    assert (tmp_path / "m.stof.onnx").exists() == replaced
