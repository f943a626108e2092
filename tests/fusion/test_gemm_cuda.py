# SPDX-License-Identifier: Apache-2.0
"""Products with their epilogues as StofGemm: found by the search, described as they compute, run through the body."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from chain_graphs import FLOAT, HALF, Builder, N
from fused import FusedModel, fuse_chains
from onnx import TensorProto

from stof import cli
from stof.execution.case import Case, Padding
from stof.execution.inputs import InputMaker
from stof.fusion.check import check_chain
from stof.fusion.decide.estimated import LEAST_WITH_MATMULS, EstimatedDecider
from stof.fusion.fusion_graph import FusionGraph
from stof.fusion.gemm import FusedGemm
from stof.fusion.policy import ChainPolicy
from stof.fusion.regions import build_chain
from stof.fusion.search.cost import MachineModel
from stof.fusion.translate import RefusedRegion
from stof.options import Options
from stof.symbolic import Symbolic

BFLOAT = int(TensorProto.BFLOAT16)
MACHINE = MachineModel.cuda(2.6e12, 620e12)
K = 8


def forms(text: str, pair: int) -> tuple[str, str]:
    """A library that has every epilogue."""
    return f"form of {len(text)} {pair}", ""


def _input(b: Builder) -> str:
    return b.input("input", ["B", "S", K])


def bias_gelu(b: Builder) -> onnx.ModelProto:
    return b.model(b.add("Gelu", b.add("Add", b.add("MatMul", _input(b), b.weight(K, N)), b.weight(N))))


def bias_residual(b: Builder) -> onnx.ModelProto:
    x = b.add("Add", b.weight(1, 1, N), b.add("MatMul", _input(b), b.weight(K, N)))
    return b.model(b.add("Add", b.input("residual", ["B", "S", N]), x))


def packed_gate(b: Builder) -> onnx.ModelProto:
    one, other = b.add("Split", b.add("MatMul", _input(b), b.weight(K, 2 * N)), outputs=2, axis=-1, num_outputs=2)
    return b.model(b.add("Mul", b.add("Gelu", one), other))


def two_weights(b: Builder) -> onnx.ModelProto:
    x = _input(b)
    gate, up = b.add("MatMul", x, b.weight(K, N)), b.add("MatMul", x, b.weight(K, N, seed=1))
    return b.model(b.add("Mul", b.add("Mul", gate, b.add("Sigmoid", gate)), up))


def rows_and_numbers(b: Builder) -> onnx.ModelProto:
    x = b.add("Mul", b.add("MatMul", _input(b), b.weight(K, N)), b.input("row", ["B", "S", 1]))
    return b.model(b.add("Mul", b.add("Relu", x), b.number(0.5)))


def gemm(b: Builder) -> onnx.ModelProto:
    y = b.add("Gemm", b.input("input", ["B", K]), b.weight(K, N), b.weight(N))
    return b.model(b.add("Mul", b.add("Tanh", y), b.number(2.0)))


CASES: dict[Callable[[Builder], onnx.ModelProto], tuple[int, tuple[str, ...], str]] = {
    bias_gelu: (0, ("n",), "gelu(x0[m, n] + x1[n])"),
    bias_residual: (0, ("mn", "n"), "x1[m, n] + (x2[n] + x0[m, n])"),
    packed_gate: (1, (), "gelu(x0[m, n]) * x1[m, n]"),
    two_weights: (2, (), "silu(x0[m, n]) * x1[m, n]"),
    rows_and_numbers: (0, ("m",), "relu(x0[m, n] * x1[m]) * 0.5"),
    gemm: (0, ("n",), "tanh(x0[m, n] + x1[n]) * 2"),
}


def whole(model: onnx.ModelProto) -> tuple[FusionGraph, FusedGemm | RefusedRegion]:
    graph = FusionGraph(model, Symbolic(model), ChainPolicy(epilogue_forms=forms))
    found = build_chain(graph, range(len(graph.nodes)))
    assert isinstance(found, (FusedGemm, RefusedRegion))
    return graph, found


def emitted(model: onnx.ModelProto) -> FusedModel:
    return fuse_chains(model, EstimatedDecider(Options(target="cuda"), MACHINE), ChainPolicy(epilogue_forms=forms))


def run(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return list(session.run(None, feeds))


def same(before: onnx.ModelProto, after: onnx.ModelProto, tolerance: float) -> None:
    maker = InputMaker(before, Symbolic(before), frozenset())
    for case in (Case(2, 9, Padding.NONE), Case(1, 4, Padding.NONE)):
        feeds = maker.draw(case, np.random.default_rng(case.length))
        for own, wanted in zip(run(after, feeds), run(before, feeds), strict=True):
            np.testing.assert_allclose(own.astype(float), wanted.astype(float), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("make", CASES, ids=lambda m: m.__name__)
@pytest.mark.parametrize("dtype", [HALF, BFLOAT], ids=["f16", "bf16"])
def test_a_matmul_and_its_epilogue(make: Callable[[Builder], onnx.ModelProto], dtype: int) -> None:
    graph, found = whole(make(Builder(dtype)))
    assert isinstance(found, FusedGemm), found
    pair, reads, text = CASES[make]
    assert (found.pair, tuple(sorted(found.reads))) == (pair, reads)
    assert found.description.text.splitlines()[0] == "axes m = x0.0, n = x0.1"
    assert text in found.description.text.replace("t0", "x0[m, n]")
    check_chain(found, graph.nodes, graph.symbolic, 20)


@pytest.mark.parametrize("make", [bias_gelu, packed_gate, two_weights, bias_residual], ids=lambda m: m.__name__)
def test_the_search_takes_what_saves_a_pass(make: Callable[[Builder], onnx.ModelProto]) -> None:
    model = make(Builder(HALF))
    made = emitted(model)
    calls = [n for n in made.model.graph.node if n.domain == "stof"]
    assert [n.op_type for n in calls] == ["StofGemm"], made.reports
    assert len(made.model.graph.node) == 1
    same(model, made.model, 2e-2)


def test_gemms_and_chains_in_one_model() -> None:
    """A residual goes to the matmul or to the norm's chain; calls of several epilogues share a function."""
    b = Builder(HALF)
    x = b.input("input", ["B", "S", N])
    for i in range(2):
        gate = b.add("MatMul", x, b.weight(N, 2 * N))
        one, other = b.add("Split", gate, outputs=2, axis=-1, num_outputs=2)
        down = b.add("MatMul", b.add("Mul", b.add("Gelu", one), other), b.weight(N, N, seed=i))
        total = b.add("Add", x, down)
        x = b.add("LayerNormalization", total, b.weight(N), axis=-1)
    last = b.add("Relu", b.add("Add", b.add("MatMul", x, b.weight(N, N)), b.weight(N)))
    model = b.model(last, total)
    made = emitted(model)
    operators = [n.op_type for n in made.model.graph.node]
    assert operators.count("StofGemm") >= 3
    assert not {"Split", "Gelu", "Relu"} & set(operators)
    (function,) = [f for f in made.model.functions if f.name == "StofGemm"]
    ids = {a.i for n in made.model.graph.node for a in n.attribute if a.name == "gemm_id"}
    assert len(ids) >= 2
    assert len({len(n.input) for n in made.model.graph.node if n.op_type == "StofGemm"} | {len(function.input)}) == 1
    same(model, made.model, 3e-2)


def test_what_is_said_of_the_gain() -> None:
    made = fuse_chains(
        packed_gate(Builder(HALF)), EstimatedDecider(Options(target="cuda"), MACHINE), ChainPolicy(epilogue_forms=forms)
    )
    (report,) = made.reports
    assert report.operators == "MatMul Split Gelu Mul"
    assert report.gain is not None
    assert LEAST_WITH_MATMULS < report.gain < 10
    (plan,) = made.plans
    assert plan.segments == ((0, 4),)


def test_without_a_library_that_has_it() -> None:
    model = packed_gate(Builder(HALF))
    plain = fuse_chains(model, EstimatedDecider(Options(target="cuda"), MACHINE))
    assert [n.op_type for n in plain.model.graph.node] == ["MatMul", "StofChain"]
    refused = fuse_chains(
        model,
        EstimatedDecider(Options(target="cuda"), MACHINE),
        ChainPolicy(epilogue_forms=lambda text, pair: ("", "CUDA: not this one")),
    )
    assert [n.op_type for n in refused.model.graph.node] == ["MatMul", "StofChain"]


def _transposed(b: Builder) -> onnx.ModelProto:
    y = b.add("MatMul", _input(b), b.weight(K, K))
    return b.model(b.add("Add", y, b.add("Transpose", b.input("o", ["B", K, "S"]), perm=[0, 2, 1])))


def _normalized(b: Builder) -> onnx.ModelProto:
    y = b.add("MatMul", _input(b), b.weight(K, N))
    return b.model(b.add("LayerNormalization", b.add("Relu", y), b.weight(N), axis=-1))


def _read_twice(b: Builder) -> onnx.ModelProto:
    y = b.add("MatMul", _input(b), b.weight(K, N))
    return b.model(b.add("Relu", y), y)


def _of_batches(b: Builder) -> onnx.ModelProto:
    y = b.add("MatMul", _input(b), b.weight(K, N))
    return b.model(b.add("Add", y, b.input("o", ["B", 1, N])))


def _other_sides(b: Builder) -> onnx.ModelProto:
    x, y = _input(b), b.input("o", ["B", "S", K])
    return b.model(b.add("Mul", b.add("MatMul", x, b.weight(K, N)), b.add("MatMul", y, b.weight(K, N, seed=1))))


def _alone(b: Builder) -> onnx.ModelProto:
    return b.model(b.add("Identity", b.add("MatMul", _input(b), b.weight(K, N))))


def _wide(b: Builder) -> onnx.ModelProto:
    return bias_gelu(Builder(FLOAT))


def _odd(b: Builder) -> onnx.ModelProto:
    return b.model(b.add("Relu", b.add("MatMul", _input(b), b.weight(K, 7))))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (_wide, "stay with the runtime"),
        (_odd, "weights of 8 by 7"),
        (_transposed, "neither rows nor columns"),
        (_normalized, "neither element-wise nor moves"),
        (_read_twice, "2 outputs"),
        (_of_batches, "neither rows nor columns"),
        (_other_sides, "different left operands"),
        (_alone, "nothing to fuse"),
    ],
)
def test_what_no_epilogue_says(make: Callable[[Builder], onnx.ModelProto], words: str) -> None:
    _, found = whole(make(Builder(HALF)))
    assert isinstance(found, RefusedRegion)
    assert words in found.reason


@pytest.mark.parametrize(("asked", "some"), [((), True), (("--products", "off"), False)])
def test_the_command_leaves_matmuls_to_the_runtime_if_asked(tmp_path: Path, asked: tuple[str, ...], some: bool) -> None:
    b = Builder(HALF)
    x = b.add("MatMul", b.input("input", ["B", "S", 768]), b.weight(768, 3072))
    path = tmp_path / "model.onnx"
    onnx.save(b.model(b.add("Relu", b.add("Add", x, b.weight(3072)))), path)
    assert cli.main([str(path), "--target", "cuda", "--no-verify", *asked]) == 0
    made = onnx.load(tmp_path / "model.stof.onnx") if (tmp_path / "model.stof.onnx").exists() else onnx.load(path)
    assert any(n.op_type == "StofGemm" for n in made.graph.node) == some
