# SPDX-License-Identifier: Apache-2.0
"""Where a chain rounds as the graph does, and slices whose stated sizes may be wrong."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from chain_graphs import FLOAT, HALF, Builder, N, activations
from onnx import TensorProto, helper

from stof.fusion.check import check_chain
from stof.fusion.description.evaluate import evaluate_chain
from stof.fusion.emit import emit_chains
from stof.fusion.fusion_graph import FusionGraph
from stof.fusion.regions import find_chains, retranslate_chains
from stof.fusion.translate import FusedChain
from stof.symbolic import Symbolic

BFLOAT = int(TensorProto.BFLOAT16)


def found(model: onnx.ModelProto) -> tuple[FusionGraph, list[FusedChain]]:
    graph = FusionGraph(model, Symbolic(model))
    chains, _ = find_chains(graph)
    return graph, retranslate_chains(graph, chains)


def test_what_a_sine_is_taken_of_is_rounded_as_in_the_graph() -> None:
    """Positions times frequencies in fp16 are off by whole turns; the sine of the exact product is another number."""
    b = Builder(HALF)
    name = activations(b)
    angles = b.add("Add", b.add("Mul", name, b.input("positions", ["B", "S", 1])), b.weight(N))
    graph, (chain,) = found(b.model(b.add("Neg", b.add("Sin", angles)), b.add("Cos", angles)))
    check_chain(chain, graph.nodes, graph.symbolic, 20)
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (2, 5, N)).astype(np.float16)
    positions = rng.uniform(1000, 4000, (2, 5, 1)).astype(np.float16)
    bias = rng.standard_normal(N).astype(np.float16)
    named = {name: x, "positions": positions}
    given = [named.get(n, bias) for n in chain.inputs]
    angle = (x * positions + bias).astype(np.float64)
    own = evaluate_chain(chain.description, given)
    np.testing.assert_allclose(own[0], -np.sin(angle), atol=1e-12)
    np.testing.assert_allclose(own[1], np.cos(angle), atol=1e-12)
    assert np.abs(np.sin(x.astype(float) * positions.astype(float) + bias) - np.sin(angle)).max() > 0.1


@pytest.mark.parametrize("narrow", [HALF, BFLOAT], ids=["f16", "bf16"])
def test_a_cast_that_narrows_rounds(narrow: int) -> None:
    b = Builder(FLOAT)
    half = b.add("Cast", b.add("Mul", activations(b), b.weight(N)), to=narrow)
    b.add("Sub", b.add("Cast", half, to=FLOAT), b.input("r", ["B", "S", N]))
    _, (chain,) = found(b.model(b.nodes[-1].output[0]))
    assert chain.description.text.count("f16(") == 1
    rng = np.random.default_rng(0)
    x, r = (rng.standard_normal((2, 3, N), np.float32) for _ in range(2))
    w = rng.standard_normal(N, np.float32)
    given = [r if n == "r" else x if i == 0 else w for i, n in enumerate(chain.inputs)]
    matmul = (x * w).astype(np.float64)
    rounded = matmul.astype(helper.tensor_dtype_to_np_dtype(narrow)).astype(np.float64)
    exact = (x.astype(np.float64) * w).astype(helper.tensor_dtype_to_np_dtype(narrow)).astype(np.float64)
    own = evaluate_chain(chain.description, given)[0]
    assert np.abs(own - (exact - r)).max() < 1e-12
    assert np.abs(rounded - exact).max() < 0.1  # the same but for ties


def test_between_halves_values_stay_fp32() -> None:
    b = Builder(HALF)
    _, (chain,) = found(b.model(b.add("Gelu", b.add("Mul", b.add("Cast", activations(b), to=HALF), b.weight(N)))))
    assert "f16(" not in chain.description.text


@pytest.mark.parametrize(
    ("start", "end", "taken"),
    [(0, 5, False), (2, 1 << 40, False), (-5, 1 << 40, False), (0, -3, False), (1, 1 << 40, True), (0, 1, True), (0, -1, True)],
)  # fmt: skip
def test_slices_by_numbers_beyond_an_axis(start: int, end: int, taken: bool) -> None:
    """S may be 1: then [:, :5] is of size 1, and a chain that says 5 would read what is not there."""
    b = Builder(FLOAT)
    part = b.add("Slice", activations(b), b.ints(start), b.ints(end), b.ints(1))
    moved = b.add("MatMul", part, b.weight(N, 4))
    graph, chains = found(b.model(b.add("Gelu", b.add("Add", moved, b.weight(4)))))
    assert bool(chains) == taken
    if not taken:
        assert "slice by numbers" in find_chains(graph)[1][0].reason
        assert not emit_chains(graph.model, graph.symbolic, chains).functions
