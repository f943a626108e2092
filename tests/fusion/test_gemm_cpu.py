# SPDX-License-Identifier: Apache-2.0
"""Products in fp32 by constants as StofGemm on the CPU: found, measured, chosen, and the same in ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from chain_graphs import FLOAT, HALF, Builder, N
from test_gemm_cuda import bias_gelu, bias_residual, forms, packed_gate, rows_and_numbers, two_weights

from stof.errors import UnsupportedError
from stof.fusion.check import check_chain
from stof.fusion.fusion_graph import FusionGraph
from stof.fusion.gemm import FusedGemm
from stof.fusion.policy import ChainPolicy
from stof.fusion.regions import build_chain
from stof.fusion.search.measure import Timer
from stof.fusion.translate import RefusedRegion
from stof.options import Options
from stof.pipeline import optimize
from stof.runtime import library as runtime
from stof.symbolic import Symbolic

K = 8
Make = Callable[[Builder], onnx.ModelProto]


def _input(b: Builder) -> str:
    return b.input("input", ["B", "S", K])


def alone(b: Builder) -> onnx.ModelProto:
    return b.model(b.add("MatMul", _input(b), b.weight(K, N)))


def found_in(model: onnx.ModelProto) -> tuple[FusionGraph, FusedGemm | RefusedRegion]:
    graph = FusionGraph(model, Symbolic(model), ChainPolicy(epilogue_forms=forms, has_cpu_gemm=True))
    found = build_chain(graph, range(len(graph.nodes)))
    assert isinstance(found, (FusedGemm, RefusedRegion))
    return graph, found


@pytest.mark.parametrize("make", [alone, bias_gelu, bias_residual, packed_gate, two_weights, rows_and_numbers])
def test_matmuls_by_constants_are_fused(make: Make) -> None:
    graph, found = found_in(make(Builder(FLOAT)))
    assert isinstance(found, FusedGemm), found
    check_chain(found, graph.nodes, graph.symbolic, 20)


def _halves(b: Builder) -> onnx.ModelProto:
    return bias_gelu(Builder(HALF))


def _no_constant(b: Builder) -> onnx.ModelProto:
    return b.model(b.add("Relu", b.add("MatMul", _input(b), b.input("w", [K, N]))))


def _narrow(b: Builder) -> onnx.ModelProto:
    return b.model(b.add("Relu", b.add("MatMul", _input(b), b.weight(K, N - 1))))


@pytest.mark.parametrize(
    ("make", "words"),
    [(_halves, "matmuls in fp16 and bf16"), (_no_constant, "is not constant"), (_narrow, "expected 24 columns")],
)
def test_what_stays_with_the_runtime(make: Make, words: str) -> None:
    _, found = found_in(make(Builder(FLOAT)))
    assert isinstance(found, RefusedRegion)
    assert words in found.reason


def test_what_the_library_says_of_epilogues() -> None:
    text = "axes m = x0.0, n = x0.1; out y0 f32 [m, n] = "
    assert runtime.has_cpu_gemm()
    assert runtime.cpu_gemm_form(text + "gelu(x0[m, n] + x1[n])", 0) == ("bias0 gelu", "")
    form, reason = runtime.cpu_gemm_form(text + "tanh(x0[m, n])", 0)
    assert not form
    assert "as a chain would" in reason
    assert "CUDA" not in reason
    assert runtime.cpu_gemm_form("nonsense", 0)[0] == ""


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many operators each measurement had; a matmul of the library saves half of one."""
    asked: list[int] = []

    def seconds(self: object, places: Sequence[int], chains: Sequence[object], outputs: object) -> float:
        asked.append(len(places))
        return 1e-3 * (len(places) - sum(isinstance(c, FusedGemm) for c in chains) / 2)

    def in_turns(
        self: object, places: Sequence[int], candidates: Sequence[Sequence[object]], outputs: object, over: object
    ) -> object:
        return [seconds(self, places, chains, outputs) for chains in candidates]

    monkeypatch.setattr("stof.fusion.decide.measured.Timer.seconds", seconds)
    monkeypatch.setattr("stof.fusion.decide.measured.Timer.measure_interleaved", in_turns)
    return asked


def layers(path: Path) -> onnx.ModelProto:
    """Two layers whose last matmuls differ in their weights alone, and another matmul."""
    b = Builder(FLOAT)
    x = b.input("input", ["B", "S", N])
    for _ in range(2):
        wide = b.add("Gelu", b.add("Add", b.add("MatMul", x, b.weight(N, 4 * N)), b.weight(4 * N)))
        x = b.add("Add", b.add("MatMul", wide, b.weight(4 * N, N)), x)
        x = b.add("LayerNormalization", x, b.weight(N), axis=-1)
        x = b.add("LayerNormalization", b.add("Add", b.add("MatMul", x, b.weight(N, N)), x), b.weight(N), axis=-1)
    model = b.model(x)
    onnx.save(model, path)
    return model


def _run(path: Path, feeds: dict[str, np.ndarray], threads: int, library: bool) -> np.ndarray:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    if library:
        runtime.register(options)
    found = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"]).run(None, feeds)
    return np.asarray(found[0])


def test_measurements_choose_them_and_the_model_computes_the_same(tmp_path: Path, timed: list[int]) -> None:
    path = tmp_path / "model.onnx"
    layers(path)
    report = optimize(path, options=Options(tune=60.0))
    assert report.verification is not None
    assert not report.verification.failures
    assert report.output is not None
    made = onnx.load(report.output)
    assert sum(n.op_type == "StofGemm" for n in made.graph.node) == 6
    assert not [n for n in made.graph.node if n.op_type == "MatMul"]
    known = len(timed)
    again = optimize(path, options=Options())
    assert len(timed) == known
    assert [(c.chain, c.replaced) for c in again.chains] == [(c.chain, c.replaced) for c in report.chains]
    rng = np.random.default_rng(3)
    for batch, length in ((1, 1), (1, 7), (2, 65), (3, 128)):
        feeds = {"input": rng.standard_normal((batch, length, N), np.float32)}
        wanted = _run(path, feeds, 1, library=False)
        for threads in (1, 2):
            for library in (True, False):  # the function body serves without it
                found = _run(Path(report.output), feeds, threads, library)
                np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-5)


def test_matmuls_of_other_sizes_are_measured_separately(tmp_path: Path) -> None:
    model = layers(tmp_path / "model.onnx")
    graph = FusionGraph(model, Symbolic(model), ChainPolicy(epilogue_forms=forms, has_cpu_gemm=True))
    matmuls = [i for i, n in enumerate(graph.nodes) if n.op_type == "MatMul"]
    assert graph.weight_shapes(matmuls[:3]) == (f"{N} x {4 * N}", f"{4 * N} x {N}", f"{N} x {N}")
    assert FusionGraph(model, Symbolic(model), ChainPolicy(epilogue_forms=forms)).weight_shapes(matmuls) == ()


@pytest.mark.parametrize("options", [Options(tune=60.0, products=False), Options(chains="on")])
def test_they_stay_where_nothing_was_measured_or_asked(tmp_path: Path, timed: list[int], options: Options) -> None:
    path = tmp_path / "model.onnx"
    layers(path)
    report = optimize(path, options=options)
    made = onnx.load(report.output) if report.output is not None else onnx.load(path)
    assert not [n for n in made.graph.node if n.op_type == "StofGemm"]


def test_a_plan_gives_the_same_gemms_again(tmp_path: Path, timed: list[int]) -> None:
    path, plan = tmp_path / "model.onnx", tmp_path / "plan.json"
    layers(path)
    first = optimize(path, options=Options(tune=60.0, save_plan=plan))
    again = optimize(path, options=Options(plan=plan, output=tmp_path / "again.onnx"))
    assert first.output is not None
    assert again.output is not None
    operators = [[n.op_type for n in onnx.load(r.output).graph.node] for r in (first, again) if r.output is not None]
    assert operators[0] == operators[1]
    assert operators[0].count("StofGemm") == 6


class Clock:
    """Stands still but for runs of sessions, of which each takes as long as its session is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_candidates_run_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many turns for each as go into the time, each candidate's own least time, and five turns where there is none."""
    monkeypatch.setattr("stof.fusion.search.measure._INTERLEAVED_SECONDS", 3.0)
    model = bias_gelu(Builder(FLOAT))
    graph, matmul = found_in(model)
    assert isinstance(matmul, FusedGemm)
    clock = Clock()
    timer = Timer(graph, {"B": 1, "S": 5}, clock=clock)
    places, outputs = range(len(graph.nodes)), [o.name for o in model.graph.output]
    order: list[int] = []  # sessions by number, as they run
    known: dict[object, int] = {}
    session = ort.InferenceSession.run

    def run(self: ort.InferenceSession, *given: object) -> object:
        order.append(known.setdefault(self, len(known)))
        slow = 2.0 if len(order) == 3 else 1.0  # the first timed run; later ones of its session are faster
        clock.now += slow * (0.25, 0.125)[order[-1]]
        return session(self, *given)

    monkeypatch.setattr(ort.InferenceSession, "run", run)
    assert timer.measure_interleaved(places, [[], [matmul]], outputs) == [0.25, 0.125]
    # Both are warmed up; a turn takes 0.375 s, the first one 0.625: eight of them go into three seconds.
    assert order == [0, 1] + 4 * [0, 1, 1, 0]
    order.clear()
    known.clear()
    assert timer.measure_interleaved(places, [[], [matmul]], outputs, lambda: True) == [0.25, 0.125]
    assert order == [0, 1] + 2 * [0, 1, 1, 0] + [0, 1]
    monkeypatch.setattr("stof.fusion.search.measure._LARGEST", 64)
    with pytest.raises(UnsupportedError, match="inputs and constants have"):
        timer.measure_interleaved(places, [[], [matmul]], outputs)


@pytest.mark.parametrize("in_turns", [True, False])
def test_what_is_near_to_the_original_has_to_have_taken_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_turns: bool
) -> None:
    def seconds(self: object, places: Sequence[int], chains: Sequence[object], outputs: object) -> float:
        return 1.0 if chains else 1.02

    def turns(
        self: object, places: Sequence[int], candidates: Sequence[Sequence[object]], outputs: object, over: object
    ) -> list[float]:
        if not in_turns:
            raise UnsupportedError("one of them cannot be run")
        return [seconds(self, places, chains, outputs) for chains in candidates]

    monkeypatch.setattr("stof.fusion.decide.measured.Timer.seconds", seconds)
    monkeypatch.setattr("stof.fusion.decide.measured.Timer.measure_interleaved", turns)
    model = bias_gelu(Builder(FLOAT))
    onnx.save(model, tmp_path / "model.onnx")
    report = optimize(tmp_path / "model.onnx", options=Options(tune=60.0, verify=False))
    assert bool(report.output) == in_turns
