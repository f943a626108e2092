# SPDX-License-Identifier: Apache-2.0
"""Chains for --target cuda: what is estimated without a device, beside what ONNX Runtime fuses by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from chain_graphs import HALF, Builder, N, activations, split_gate
from fused import fuse_chains

from stof.fusion.decide.estimated import LEAST_ESTIMATED, EstimatedDecider
from stof.fusion.decide.measured import MeasuredDecider, make_chain_decider
from stof.fusion.gemm import FusedGemm
from stof.fusion.policy import ChainPolicy
from stof.fusion.search.cost import MachineModel
from stof.fusion.search.measure_cuda import repeat_model
from stof.fusion.search.ort_baseline import ort_baseline_seconds
from stof.fusion.translate import FusedChain
from stof.options import Options
from stof.pipeline import optimize
from stof.tuning_cache import Cache

MACHINE = MachineModel.cuda(2.6e12)


def norm(b: Builder, *, read_again: bool) -> onnx.ModelProto:
    total = b.add("Add", activations(b), b.input("residual", ["B", "S", N]))
    y = b.add("LayerNormalization", total, b.weight(N), b.weight(N), axis=-1)
    return b.model(y, total) if read_again else b.model(y)


def reasons(model: onnx.ModelProto) -> list[str]:
    made = fuse_chains(model, EstimatedDecider(Options(target="cuda"), MACHINE))
    return [r.reason for r in made.reports if r.operators and (r.replaced or r.gain is not None)]


def test_what_the_runtime_fuses_gains_nothing() -> None:
    (reason,) = reasons(norm(Builder(HALF), read_again=False))
    assert reason.startswith("estimated")
    assert "ONNX Runtime" in reason


def test_what_the_runtime_leaves_apart_is_taken() -> None:
    assert reasons(norm(Builder(HALF), read_again=True)) == ["replaced"]
    assert reasons(split_gate(Builder(HALF))) == ["replaced"]


def test_a_bias_behind_a_matmul_costs_the_runtime_more_than_a_chain() -> None:
    """MatMul and Add become Gemm in the runtime, which writes the bias to all rows first: a chain takes it with what follows."""
    b = Builder(HALF)
    assert reasons(b.model(b.add("Gelu", b.add("Add", activations(b), b.weight(N))))) == ["replaced"]


def test_gains_are_of_the_baseline_and_the_chain() -> None:
    from stof.fusion.fusion_graph import FusionGraph
    from stof.fusion.regions import find_chains, retranslate_chains
    from stof.fusion.search.cost import AnalyticalCost, SegmentedRegion
    from stof.symbolic import Symbolic

    graph = FusionGraph((model := norm(Builder(HALF), read_again=True)), Symbolic(model))
    (chain,) = retranslate_chains(graph, find_chains(graph)[0])
    sizes = {"B": 8, "S": 512}
    baseline = ort_baseline_seconds(graph, chain.region.node_indices, sizes, MACHINE)
    own = AnalyticalCost(SegmentedRegion(graph, chain.region.node_indices), sizes, MACHINE)((0, 2))
    assert baseline > 2 * MACHINE.launch  # two kernels
    assert baseline / own > LEAST_ESTIMATED


def test_a_model_for_cuda_has_chains_without_a_measurement(narrow: Callable[[str], Path]) -> None:
    report = optimize(narrow("modernbert.dynamo.sdpa"), options=Options(target="cuda"))
    assert report.output is not None
    replaced = [c for c in report.chains if c.replaced]
    assert len(replaced) >= 5
    assert not any(c.measured for c in report.chains)
    assert all(c.gain is not None and c.gain >= LEAST_ESTIMATED for c in replaced)
    assert report.verification is not None
    assert not report.verification.failures
    made = onnx.load(report.output)
    assert sum(n.op_type == "StofChain" for n in made.graph.node) == len(replaced)
    assert not [n.op_type for n in made.graph.node if n.op_type in ("Split", "Transpose", "Concat", "Neg")]


@pytest.mark.parametrize("chains", ["off", "auto"])
def test_targets_without_chains(chains: str, tmp_path: Path) -> None:
    assert (make_chain_decider(Options(target="cuda", chains=chains), {}) is None) == (chains == "off")
    assert (make_chain_decider(Options(target="tensorrt", chains=chains), {}) is None) == (chains == "off")


def test_copies_for_a_measurement_compute_the_same() -> None:
    b = Builder()
    model = split_gate(b)
    for info in model.graph.output:
        info.type.tensor_type.elem_type = b.dtype
    many = repeat_model(model, 3)
    assert len(many.graph.node) == 3 * len(model.graph.node)
    rng = np.random.default_rng(0)
    feeds = [rng.standard_normal((1, 4, 8), np.float32) for _ in range(3)]

    def run(m: onnx.ModelProto, given: dict[str, np.ndarray]) -> list[np.ndarray]:
        return list(ort.InferenceSession(m.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, given))

    together = run(many, {f"input/copy{i}": x for i, x in enumerate(feeds)})
    for x, own in zip(feeds, together, strict=True):
        np.testing.assert_array_equal(own, run(model, {"input": x})[0])
    assert {a.name for a in many.graph.initializer} == {a.name for a in model.graph.initializer}


def normed_matmul() -> onnx.ModelProto:
    b = Builder(HALF)
    matmul = b.add("MatMul", b.input("input", ["B", "S", 768]), b.weight(768, 768))
    total = b.add("Add", matmul, b.input("residual", ["B", "S", 768]))
    normed = b.add("LayerNormalization", total, b.weight(768), b.weight(768), axis=-1)
    return b.model(b.add("MatMul", normed, b.weight(768, 768)), total)


LONG = Options(target="cuda", shapes={"B": (16, 16), "S": (2048, 2048)})


def test_a_norm_behind_a_matmul_that_takes_the_sum_is_a_chain_alone() -> None:
    """The runtime's norm reaches half of a chain's rate, and nothing is left to fuse with it."""
    found = fuse_chains(
        normed_matmul(),
        EstimatedDecider(LONG, MachineModel.cuda(2.6e12, 620e12)),
        ChainPolicy(epilogue_forms=_takes_all),
    )
    assert [n.op_type for n in found.model.graph.node] == ["StofGemm", "StofChain", "MatMul"]


@pytest.mark.parametrize("target", ["cuda", "cpu"])
@pytest.mark.parametrize(("norm_gains", "sum_gains"), [(True, True), (True, False), (False, True), (False, False)])
def test_norms_alone_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, norm_gains: bool, sum_gains: bool, target: str
) -> None:
    """Each operator takes a second, an epilogue nothing, a norm that gains half a second."""

    def seconds(self: object, places: Sequence[int], chains: Sequence[FusedChain], outputs: object) -> float:
        total = float(len(places))
        for chain in chains:
            if len(chain.region.node_indices) == 1:
                total -= 0.5 if norm_gains else -0.1
            elif len(chain.region.node_indices) == 2 and isinstance(chain, FusedGemm):
                total -= 1.0 if sum_gains else -0.1
            else:
                total += 2.0
        return total

    def turns(
        self: object, places: Sequence[int], candidates: Sequence[Sequence[FusedChain]], outputs: object, over: object
    ) -> list[float]:
        return [seconds(self, places, chains, outputs) for chains in candidates]

    monkeypatch.setattr("stof.fusion.decide.measured.Timer.seconds", seconds)
    monkeypatch.setattr("stof.fusion.decide.measured.Timer.measure_interleaved", turns)
    options = replace(LONG, target=target, tune=60.0)
    cache = Cache(tmp_path / "cache.sqlite", "device", "build")
    found = []
    for deadline in (60.0, 0.0):  # measured, then from the cache
        decider = MeasuredDecider(options, cache, deadline, clock=lambda: 0.0)
        made = fuse_chains(normed_matmul(), decider, ChainPolicy(epilogue_forms=_takes_all))
        found.append([n.op_type for n in made.model.graph.node])
    norm_taken = norm_gains and target == "cuda"
    wanted = ["StofGemm"] if sum_gains else ["MatMul", "Add"]
    wanted += ["StofChain" if norm_taken else "LayerNormalization", "MatMul"]
    assert found == [wanted, wanted]


def test_a_short_norm_alone_stays() -> None:
    b = Builder(HALF)
    normed = b.add("LayerNormalization", activations(b), b.weight(N), b.weight(N), axis=-1)
    found = fuse_chains(
        b.model(normed), EstimatedDecider(Options(target="cuda"), MACHINE), ChainPolicy(epilogue_forms=_takes_all)
    )
    assert "StofChain" not in [n.op_type for n in found.model.graph.node]


def _takes_all(text: str, pair: int) -> tuple[str, str]:
    return "residual", ""
