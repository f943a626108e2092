# SPDX-License-Identifier: Apache-2.0
"""Chains of every kind: found whole, described as they compute, and the same through the function body."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from chain_graphs import CHAINS, FLOAT, HALF, Builder, N, activations
from fused import fuse_chains
from onnx import helper

from stof.errors import UnsupportedError
from stof.execution.case import Case, Padding
from stof.execution.inputs import InputMaker
from stof.fusion import check as chain_check
from stof.fusion.check import check_chain
from stof.fusion.decide.measured import take_all
from stof.fusion.describe import region_problems
from stof.fusion.description.chain_description import ChainDescription
from stof.fusion.description.evaluate import evaluate_chain
from stof.fusion.emit import emit_chains
from stof.fusion.fusion_graph import FusionGraph
from stof.fusion.regions import find_chains, retranslate_chains
from stof.fusion.translate import FusedChain
from stof.graph.index import opset_of
from stof.runtime.library import Op
from stof.symbolic import Symbolic

ACTIVATIONS = {
    "Abs": {}, "Celu": {"alpha": 0.7}, "Cos": {}, "Elu": {"alpha": 0.6}, "Erf": {}, "Exp": {}, "Floor": {}, "Gelu": {},
    "HardSigmoid": {"alpha": 0.3}, "HardSwish": {}, "LeakyRelu": {"alpha": 0.2}, "Mish": {}, "Neg": {}, "Relu": {},
    "Round": {}, "Selu": {}, "Sigmoid": {}, "Sin": {}, "Softplus": {}, "Softsign": {}, "Tanh": {},
    "ThresholdedRelu": {"alpha": 0.4},
}  # fmt: skip


def found(model: onnx.ModelProto) -> tuple[FusionGraph, list[FusedChain]]:
    graph = FusionGraph(model, Symbolic(model))
    chains, _ = find_chains(graph)
    return graph, retranslate_chains(graph, chains)


def run(model: onnx.ModelProto, feeds: dict[str, np.ndarray], optimized: bool) -> list[np.ndarray]:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    if not optimized:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return list(session.run(None, feeds))


def same_through_body(graph: FusionGraph, chains: list[FusedChain], tolerance: float = 1e-5) -> onnx.ModelProto:
    """The emitted model without the library gives what the original gives."""
    shapes = {t: o for c in chains for t, o in graph.shape_substitutes(c.region.node_indices).items()}
    emitted = emit_chains(graph.model, graph.symbolic, chains, shapes)
    maker = InputMaker(graph.model, graph.symbolic, frozenset())
    for case in (Case(2, 9, Padding.NONE), Case(1, 4, Padding.NONE)):
        feeds = maker.draw(case, np.random.default_rng(case.length))
        for optimized in (False, True):
            for own, wanted in zip(run(emitted, feeds, optimized), run(graph.model, feeds, False), strict=True):
                assert own.dtype == wanted.dtype
                np.testing.assert_allclose(own.astype(float), wanted.astype(float), rtol=tolerance, atol=tolerance)
    return emitted


@pytest.mark.parametrize("make", CHAINS, ids=lambda m: m.__name__)
@pytest.mark.parametrize("dtype", [FLOAT, HALF], ids=["f32", "f16"])
def test_a_chain_is_one_and_computes_what_it_replaces(make: Callable[[Builder], onnx.ModelProto], dtype: int) -> None:
    graph, chains = found(make(Builder(dtype)))
    assert len(chains) == 1
    check_chain(chains[0], graph.nodes, graph.symbolic, opset_of(graph.model))
    emitted = same_through_body(graph, chains, 1e-5 if dtype == FLOAT else 2e-2)
    assert [n.op_type for n in emitted.graph.node].count("StofChain") == 1
    left = {n.op_type for n in emitted.graph.node} - {"StofChain", "MatMul", "Gemm", "Shape", "Concat", "Reshape"}
    assert not left


@pytest.mark.parametrize("op", ACTIVATIONS)
def test_every_activation(op: str) -> None:
    b = Builder()
    y = b.add(op, b.add("Add", activations(b), b.weight(N)), **ACTIVATIONS[op])
    graph, (chain,) = found(b.model(y))
    check_chain(chain, graph.nodes, graph.symbolic, 20)
    same_through_body(graph, [chain])


def test_chains_of_many_shapes_share_a_function() -> None:
    """A runtime infers the shapes of every branch for every call: those of others must not fit by chance alone."""
    b = Builder()
    x = b.add("Add", activations(b), b.weight(N))
    gate = b.add("Mul", b.add("Sigmoid", x), x)
    narrow = b.add("MatMul", gate, b.weight(N, 5))
    y = b.add("Softmax", b.add("Add", narrow, b.weight(5)), axis=-1)
    turned = b.add(
        "Transpose", b.add("Reshape", b.add("MatMul", y, b.weight(5, 12)), b.ints(0, 0, 3, 4)), perm=[0, 2, 1, 3]
    )
    graph, chains = found(b.model(b.add("Exp", turned)))
    assert len(chains) == 3
    emitted = same_through_body(graph, chains)
    (function,) = emitted.functions
    calls = [n for n in emitted.graph.node if n.op_type == "StofChain"]
    assert {len(c.input) for c in calls} == {len(function.input)}
    assert sorted(helper.get_attribute_value(a) for c in calls for a in c.attribute if a.name == "chain_id") == [
        0,
        1,
        2,
    ]


def test_a_branch_transposes_what_other_calls_give_with_other_axes() -> None:
    """A call gives its first input for those that its chain has not: of three axes here, where another chain has four."""
    b = Builder()
    x = activations(b)
    split = b.add("Reshape", b.add("Mul", x, b.weight(N)), b.ints(0, 0, 4, N // 4))
    heads = b.add("Transpose", split, perm=[0, 2, 1, 3])
    matmul = b.add("MatMul", heads, b.weight(N // 4, N // 4))
    merged = b.add("Reshape", b.add("Transpose", matmul, perm=[0, 2, 1, 3]), b.ints(0, 0, N))
    normed = b.add("LayerNormalization", b.add("Add", x, merged), b.weight(N), b.weight(N))
    graph, chains = found(b.model(b.add("Transpose", normed, perm=[0, 2, 1])))
    assert len(chains) == 2
    same_through_body(graph, chains)


def test_equal_chains_share_a_branch() -> None:
    b = Builder()
    x = activations(b)
    for _ in range(3):
        x = b.add("MatMul", b.add("Relu", b.add("Add", x, b.weight(N))), b.weight(N, N))
    graph, chains = found(b.model(x))
    assert len(chains) == 3
    emitted = same_through_body(graph, chains)
    assert not any(n.op_type == "If" for n in emitted.functions[0].node)


def test_a_value_that_others_read_becomes_an_output() -> None:
    b = Builder()
    x = b.add("Add", activations(b), b.weight(N))
    y = b.add("Tanh", x)
    z = b.add("MatMul", x, b.weight(N, N))
    graph, (chain,) = found(b.model(y, z))
    assert chain.region.outputs == (x, y)
    same_through_body(graph, [chain])


def test_a_path_out_and_back_is_not_closed() -> None:
    """X + b is read by a MatMul whose result is added to what follows of x + b."""
    b = Builder()
    x = b.add("Add", activations(b), b.weight(N))
    scaled = b.add("Mul", b.add("Sigmoid", x), b.number(2.0))
    back = b.add("MatMul", x, b.weight(N, N))
    y = b.add("Tanh", b.add("Add", scaled, back))
    graph, chains = found(b.model(y))
    last = {n.op_type: i for i, n in enumerate(graph.nodes)}["Tanh"]
    first = next(i for i, n in enumerate(graph.nodes) if n.op_type == "Add")
    assert not any({first, last} <= set(c.region.node_indices) for c in chains)
    same_through_body(graph, chains)


def test_sizes_that_may_differ_are_not_taken_for_equal() -> None:
    b = Builder()
    x = b.add("Add", activations(b), b.input("other", ["A", "S", N]))  # A may be 1
    _, chains = found(b.model(b.add("Tanh", x)))
    assert not chains


def test_integers_and_other_axes_stay() -> None:
    b = Builder()
    whole = b.add("Cast", b.input("numbers", ["B", "S", N], int(onnx.TensorProto.INT64)), to=FLOAT)
    summed = b.add("ReduceMean", b.add("Mul", whole, b.number(0.5)), b.ints(1), keepdims=1)
    graph, chains = found(b.model(b.add("Softmax", b.add("Tanh", summed), axis=1)))
    assert all(graph.nodes[p].op_type in ("Mul", "Tanh") for c in chains for p in c.region.node_indices)


def outputs_of(
    graph: FusionGraph, chains: list[FusedChain], x: np.ndarray
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """What the descriptions of chains without inputs but x give in fp64, and what the model gives."""
    (chain,) = chains
    return evaluate_chain(chain.description, [x]), run(graph.model, {graph.model.graph.input[0].name: x}, False)


def test_a_cast_to_bool_makes_1_or_0() -> None:
    b = Builder()
    x = b.input("x", ["B", "S", N])
    true = b.add("Cast", x, to=int(onnx.TensorProto.BOOL))
    both = b.add("And", b.add("Less", x, b.number(0.5)), true)
    one = b.add("Xor", b.add("Less", x, b.number(0.25)), true)
    y = b.add("Add", b.add("Cast", true, to=FLOAT), b.add("Where", one, b.number(3.0), b.number(5.0)))
    graph, chains = found(b.model(b.add("Where", both, y, b.add("Neg", y))))
    check_chain(chains[0], graph.nodes, graph.symbolic, opset_of(graph.model))
    values = np.resize(np.array([np.inf, -np.inf, np.nan, 0.0, -0.0, 2.0, -3.0, 0.3], np.float32), (1, 2, N))
    (own,), (wanted,) = outputs_of(graph, chains, values)
    np.testing.assert_allclose(own, wanted, rtol=1e-6)


@pytest.mark.parametrize("value", [np.inf, -np.inf])
def test_log_sum_exp_of_a_row_that_is_not_finite(value: float) -> None:
    b = Builder()
    x = b.add("Neg", b.input("x", ["B", "S", N]))
    graph, chains = found(b.model(b.add("Add", b.add("ReduceLogSumExp", x, b.ints(-1), keepdims=1), x)))
    values = np.zeros((1, 2, N), np.float32)
    values[0, 0] = value
    values[0, 1, 3] = value
    (own,), (wanted,) = outputs_of(graph, chains, values)
    np.testing.assert_allclose(own, wanted, rtol=1e-5)


@pytest.mark.parametrize("bounds", [(), (0.0,), (None, 1.0), (0.0, 6.0)], ids=["none", "min", "max", "both"])
@pytest.mark.parametrize("dtype", [FLOAT, HALF, int(onnx.TensorProto.BFLOAT16)], ids=["f32", "f16", "bf16"])
def test_a_bound_that_a_clip_has_not_is_finite(dtype: int, bounds: tuple[float | None, ...]) -> None:
    b = Builder(dtype)
    x = b.add("Neg", b.input("x", ["B", "S", N]))
    x = b.add("Clip", x, *("" if bound is None else b.number(bound) for bound in bounds))
    graph, chains = found(b.model(b.add("Mul", x, b.number(0.5))))
    kind = onnx.helper.tensor_dtype_to_np_dtype(dtype)
    values = np.resize(np.array([np.inf, -np.inf, np.nan, 0.0, -3.0, 2.0, 1e4], kind), (1, 2, N))
    (own,) = evaluate_chain(chains[0].description, [values])
    most = float(ml_dtypes.finfo(kind).max)
    low, high = (*bounds, None, None)[:2]
    wanted = np.clip(-values.astype(float), -most if low is None else low, most if high is None else high) / 2
    np.testing.assert_allclose(own, wanted, rtol=1e-6)
    if dtype == FLOAT:  # of other types, the runtime computes nodes without a kernel, and those beside them, in fp32
        np.testing.assert_array_equal(own.astype(kind), run(graph.model, {"x": values}, False)[0])
    assert "e+38" not in chains[0].description.text or None in bounds or len(bounds) < 2  # nothing more than is needed


@pytest.mark.parametrize("op", ["max_of", "min_of"])
@pytest.mark.parametrize("place", [0, 3, 36])
def test_the_most_and_least_of_a_row_with_nan_are_nan(op: str, place: int) -> None:
    values = np.arange(74, dtype=np.float32).reshape(2, 37)
    values[0, place] = np.nan
    text = f"axes b = x0.0, n = x0.1\nout y0 f32 [b, 1] = {op}(x0[b, n])"
    written = np.zeros((2, 1), np.float32)
    Op("StofChain", {"chain": text, "chain_id": 0}).run([values], [written], threads=1)
    (own,) = evaluate_chain(ChainDescription.parse(text), [values])
    for y in (own, written):
        assert np.isnan(y[0, 0])
        assert y[1, 0] == (73 if op == "max_of" else 37)


def test_a_squeeze_of_whatever_is_1_has_no_known_shape() -> None:
    b = Builder()
    x = b.add("Squeeze", b.input("x", [2, "S", 1]))
    _, chains = found(b.model(b.add("Tanh", b.add("Neg", x))))
    assert not chains


def test_what_nothing_reads_does_not_keep_chains_out() -> None:
    b = Builder()
    x = b.add("Neg", activations(b))
    top = b.add("ReduceMax", x, b.ints(-1), keepdims=1)
    b.add("Div", x, top)  # read by nothing
    graph, chains = found(b.model(b.add("Exp", b.add("Sub", x, top))))
    assert len(chains) == 1
    same_through_body(graph, chains)


def test_what_would_be_printed_again_and_again_is_left() -> None:
    """Sides of a select have no names: each level of halves that change places would double the text."""
    b = Builder()
    x = b.input("x", ["B", "S", 8])
    for _ in range(24):
        left, right = b.add("Split", x, outputs=2, axis=-1, num_outputs=2)
        x = b.add("Add", b.add("Concat", b.add("Neg", right), left, axis=-1), x)
    _, chains = found(b.model(x))
    assert chains
    assert all(len(c.description.text) <= 16 << 10 for c in chains)


def test_more_axes_than_the_format_has() -> None:
    b = Builder()
    x = b.input("x", list("ABCDEFG"))
    graph = FusionGraph(model := b.model(b.add("Exp", b.add("Neg", x))), Symbolic(model))
    chains, left = find_chains(graph)
    assert not chains
    assert "at most 6 axes" in left[0].reason


@pytest.mark.parametrize(
    ("ratio", "training", "drops"), [(1e-6, True, True), (None, True, True), (0.0, True, False), (0.5, False, False)]
)
def test_a_dropout_that_drops_stays(ratio: float | None, training: bool, drops: bool) -> None:
    b = Builder()
    x = b.add("Neg", activations(b))
    x = b.add("Dropout", x, "" if ratio is None else b.number(ratio), b.array(np.array(training)), seed=3)
    graph, chains = found(b.model(b.add("Tanh", x)))
    assert drops != any(graph.nodes[p].op_type == "Dropout" for c in chains for p in c.region.node_indices)


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ([*[1] * 10, "N"], r"size .* of an axis is no input's"),
        (["B", (1 << 32) + 2], "axis n of size 4294967298, expected at most 2147483648"),
    ],
)
def test_sizes_that_the_format_cannot_state_are_refused(shape: list[int | str], reason: str) -> None:
    b = Builder()
    model = b.model(b.add("Mul", b.add("Tanh", b.input("x", shape)), b.number(0.5)))
    (report,) = fuse_chains(model, take_all).reports
    assert not report.replaced
    assert re.fullmatch(reason, report.reason)


def test_a_description_that_says_something_else_is_refused() -> None:
    b = Builder()
    graph, (chain,) = found(b.model(b.add("Mul", b.add("Tanh", activations(b)), b.number(0.5))))
    wrong = ChainDescription.parse(chain.description.text.replace("0.5", "0.501"))
    assert wrong != chain.description
    with pytest.raises(UnsupportedError, match="differs from its operators"):
        check_chain(replace(chain, description=wrong), graph.nodes, graph.symbolic, 20)


def test_many_rows_of_fixed_size_are_checked_by_a_few(monkeypatch: pytest.MonkeyPatch) -> None:
    b = Builder()
    x = b.input("x", [16, 2048, 1536])  # 50 million elements
    graph, (chain,) = found(b.model(b.add("Mul", b.add("Gelu", b.add("Add", x, b.weight(1536))), b.number(0.5))))
    drawn: list[int] = []
    draw = chain_check._random_array

    def small(rng: np.random.Generator, shape: Sequence[int]) -> np.ndarray:
        drawn.append(int(np.prod(shape)))
        return draw(rng, shape)

    monkeypatch.setattr(chain_check, "_random_array", small)
    check_chain(chain, graph.nodes, graph.symbolic, 20)
    assert 1536 <= max(drawn) < 1 << 16
    wrong = ChainDescription.parse(chain.description.text.replace("0.5", "0.501"))
    assert wrong != chain.description
    with pytest.raises(UnsupportedError, match="too large to check"):
        check_chain(replace(chain, description=wrong), graph.nodes, graph.symbolic, 20)


def test_rows_that_a_description_counts_are_checked_as_they_are() -> None:
    parsed = ChainDescription.parse("axes a = 4096, n = 512\nout y0 f32 [a, n] = x0[4095 - a, n]")
    chain: Any = None  # nothing of it is asked for
    shapes = [[4096, 512]]
    backwards = chain_check._Check(chain, parsed, ["x"], lambda given: [given["x"][::-1]])
    assert not backwards.passes_small(shapes, 0)
    backwards.compare(shapes, 0)
    forwards = chain_check._Check(chain, parsed, ["x"], lambda given: [given["x"]])
    assert not forwards.passes_small(shapes, 0)
    with pytest.raises(UnsupportedError, match="differs from its operators"):
        forwards.compare(shapes, 0)


def _rolled(b: Builder) -> str:
    x = b.input("x", [1024, 1536])
    return str(b.add("Tanh", b.add("Concat", _rows(b, x, 512, 1024), _rows(b, x, 0, 512), axis=0)))


def _halves(b: Builder) -> str:
    x = b.input("x", [1024, 1536])
    return str(b.add("Concat", b.add("Tanh", _rows(b, x, 0, 512)), b.add("Exp", _rows(b, x, 512, 1024)), axis=0))


def _last(b: Builder) -> str:
    x, z = b.input("x", [1024, 1536]), b.input("z", [512, 1536])
    return str(b.add("Tanh", b.add("Add", _rows(b, x, -512, 1 << 40), z)))


def _rows(b: Builder, x: str, start: int, end: int) -> str:
    return str(b.add("Slice", x, b.ints(start), b.ints(end), b.ints(0)))


@pytest.mark.parametrize(
    ("make", "right", "wrong"),
    [
        (_rolled, "select(a < 512, x0[a + 512, n], x0[a - 512, n])", "x0[a, n]"),
        (_halves, "exp(t0)", "exp(3 * t0)"),
        (_last, "x0[a + 512, n]", "x0[a, n]"),
    ],
    ids=["rolled", "halves", "last"],
)
def test_rows_that_operators_count_are_checked_as_they_are(
    make: Callable[[Builder], str], right: str, wrong: str
) -> None:
    b = Builder()
    graph, (chain,) = found(b.model(make(b)))
    check_chain(chain, graph.nodes, graph.symbolic, 20)
    assert right in chain.description.text
    other = ChainDescription.parse(chain.description.text.replace(right, wrong))
    with pytest.raises(UnsupportedError):
        check_chain(replace(chain, description=other), graph.nodes, graph.symbolic, 20)


def test_sizes_of_columns_and_matrices_stay() -> None:
    assert chain_check._shrink_rows([[16, 2048, 768], [768, 3072], [3072], [16, 2048, 3072]]) == {16: 3, 2048: 5}
    assert chain_check._shrink_rows([[4096, 768], [768, 4096], [1, 768]]) == {}
    assert chain_check._shrink_rows([[2, 12, 512, 512]]) == {12: 5}


@pytest.mark.parametrize(
    "name", ["bert.dynamo.sdpa", "modernbert.dynamo.sdpa", "gemma3.torchscript.eager", "mistral.dynamo.eager"]
)
def test_exports_run_through_the_body(narrow: Callable[[str], Path], name: str) -> None:
    graph, chains = found(onnx.load(str(narrow(name))))
    for chain in chains:
        check_chain(chain, graph.nodes, graph.symbolic, opset_of(graph.model))
    emitted = same_through_body(graph, chains, 2e-4)
    assert len(emitted.graph.node) < 0.6 * len(graph.nodes)


def test_the_evaluator_beside_numpy() -> None:
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((2, 3, 8)), rng.standard_normal(8)
    text = (
        "axes b = x0.0, s = x0.1, n = x0.2\nlet c = x0[b, s, n] - mean(x0[b, s, n])\n"
        "out y0 f32 [s, b, n] = c * rsqrt(mean(c * c) + 1e-5) * x1[n]; out y1 f32 [(b s)] = max_of(c)"
    )
    centered = x - x.mean(-1, keepdims=True)
    wanted = centered / np.sqrt((centered**2).mean(-1, keepdims=True) + 1e-5) * w
    first, second = evaluate_chain(ChainDescription.parse(text), [x, w])
    np.testing.assert_allclose(first, wanted.transpose(1, 0, 2), rtol=1e-12)
    np.testing.assert_allclose(second, centered.max(-1).reshape(-1), rtol=1e-12)


def test_infinities_are_compared_by_sign() -> None:
    from stof.fusion.check import compare_output

    own = np.array([1.0, -np.inf, np.nan], np.float32)
    compare_output(0, own, np.array([1.0, -np.inf, np.nan]))
    for exact in ([1.0, np.inf, np.nan], [1.0, -np.inf, 0.0], [1.1, -np.inf, np.nan], [-np.inf, -np.inf, np.nan]):
        with pytest.raises(UnsupportedError):
            compare_output(0, own, np.array(exact))


def test_a_fault_in_finding_chains_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("of no account")

    monkeypatch.setattr(region_problems, "find_chains", broken)
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 18]> g (float[B,8] x) => (float[B,8] y) { a = Exp(x) y = Neg(a) }'
    )
    result = fuse_chains(model, lambda *_: None)  # type: ignore[arg-type, return-value]
    assert result.model is model
    assert "ZeroDivisionError: of no account" in result.reports[0].reason
