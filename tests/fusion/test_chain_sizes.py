# SPDX-License-Identifier: Apache-2.0
"""Function bodies of StofChain and StofGemm beside the library and the original, with sizes of 0 and 1."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from chain_graphs import CHAINS, HALF, Builder, N, activations, means
from test_gemm_cuda import CASES as GEMMS
from test_gemm_cuda import whole

import stof
from stof.execution.case import Case, Padding
from stof.execution.inputs import InputMaker
from stof.fusion.emit import emit_chains
from stof.fusion.fusion_graph import FusionGraph
from stof.fusion.regions import find_chains, retranslate_chains
from stof.symbolic import Symbolic

SIZES = list(itertools.product((0, 1, 2), (0, 1, 3)))  # of B and S


def session(model: onnx.ModelProto, *, library: bool = False, optimized: bool = True) -> Any:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    if not optimized:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    if library:
        stof.register(options)
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def feeds_of(model: onnx.ModelProto, B: int, S: int) -> dict[str, np.ndarray]:
    """Inputs with two axes of sizes that differ, cut to those asked for."""
    drawn = InputMaker(model, Symbolic(model), frozenset()).draw(Case(4, 9, Padding.NONE), np.random.default_rng(5))
    feeds = {}
    for value in model.graph.input:
        dims = [d.dim_param for d in value.type.tensor_type.shape.dim]
        cut = tuple(slice({"B": B, "S": S}.get(d)) for d in dims)
        feeds[value.name] = np.ascontiguousarray(drawn[value.name][cut])
    return feeds


def fixed(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> onnx.ModelProto:
    """The model with inputs of these sizes, whose shapes a runtime computes as it loads it."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    del result.graph.value_info[:]
    for value in result.graph.input:
        for dim, size in zip(value.type.tensor_type.shape.dim, feeds[value.name].shape, strict=True):
            dim.dim_value = size
    return result


def several_ranks(b: Builder) -> onnx.ModelProto:
    """Three chains of tensors of other ranks: heads of one tensor that are split again, and rows as an image."""
    packed = b.add("Add", activations(b, 3 * N), b.weight(3 * N))
    five = b.add("Transpose", b.add("Reshape", packed, b.ints(0, -1, 3, 4, N // 4)), perm=[2, 0, 3, 1, 4])
    given = b.add("MatMul", five, b.weight(N // 4, N // 4))
    q, k, v = (b.add("Squeeze", x, b.ints(0)) for x in b.add("Split", given, b.ints(1, 1, 1), outputs=3, axis=0))
    scores = b.add("MatMul", b.add("Mul", q, b.number(0.3)), b.add("Transpose", k, perm=[0, 1, 3, 2]))
    mixed = b.add("MatMul", b.add("Softmax", b.add("Mul", scores, b.number(0.5)), axis=-1), v)
    rows = b.add("Reshape", b.add("Transpose", mixed, perm=[0, 2, 1, 3]), b.ints(0, -1, N))
    image = b.add("Add", b.add("MatMul", rows, b.weight(N, N)), b.weight(N))
    return b.model(b.add("Transpose", image, perm=[0, 2, 1]))


def emitted(model: onnx.ModelProto, tensorrt: bool) -> onnx.ModelProto:
    graph = FusionGraph(model, Symbolic(model))
    chains = retranslate_chains(graph, find_chains(graph)[0])
    assert chains
    shapes = {t: o for c in chains for t, o in graph.shape_substitutes(c.region.node_indices).items()}
    return emit_chains(model, graph.symbolic, chains, shapes, tensorrt)


def compare(
    model: onnx.ModelProto,
    after: onnx.ModelProto,
    tolerance: float,
    sizes: Sequence[tuple[int, int]] = SIZES,
    library: bool = True,
) -> int:
    """Runs all sizes that the original runs with; their number."""
    original, body = session(model, optimized=False), session(after)
    plain, kernels = session(after, optimized=False), session(after, library=True) if library else None
    count = 0
    for B, S in sizes:
        feeds = feeds_of(model, B, S)
        try:
            wanted = original.run(None, feeds)
        except ort.capi.onnxruntime_pybind11_state.Fail:  # a Reshape to -1 beside a length of 0
            assert 0 in (B, S)
            continue
        count += 1
        ways = {"body": body, "body, not optimized": plain}
        if 0 not in (B, S):  # of products with fixed sizes of 0 ONNX Runtime itself makes other shapes
            ways["fixed sizes"] = session(fixed(after, feeds))
        if kernels is not None:
            ways["library"] = kernels
        for how, way in ways.items():
            for own, other in zip(way.run(None, feeds), wanted, strict=True):
                assert own.shape == other.shape, f"{how}, B {B}, S {S}"
                np.testing.assert_allclose(
                    own.astype(float),
                    other.astype(float),
                    rtol=tolerance,
                    atol=tolerance,
                    err_msg=f"{how}, B {B}, S {S}",
                )
    return count


@pytest.mark.parametrize("tensorrt", [False, True], ids=["", "tensorrt"])
@pytest.mark.parametrize("make", [*CHAINS, several_ranks], ids=lambda m: m.__name__)
def test_chains(make: Callable[[Builder], onnx.ModelProto], tensorrt: bool) -> None:
    model = make(Builder())
    after = emitted(model, tensorrt)
    # ONNX Runtime's ReduceSum keeps the axis that it removes where there is nothing to sum.
    sizes = [s for s in SIZES if 0 not in s] if make is means else SIZES
    assert compare(model, after, 2e-5, sizes) >= 4
    (function,) = after.functions
    # For TensorRT one more, which hides the ranks of inputs from the branches of other chains.
    choices = [n.op_type for n in function.node].count("If")
    assert choices == ((2 if tensorrt else 1) if make is several_ranks else 0)


@pytest.mark.parametrize("make", GEMMS, ids=lambda m: m.__name__)
def test_gemms(make: Callable[[Builder], onnx.ModelProto]) -> None:
    model = make(Builder(HALF))
    graph, matmul = whole(model)
    after = emit_chains(model, graph.symbolic, [matmul])
    assert [n.op_type for n in after.graph.node] == ["StofGemm"]
    assert compare(model, after, 2e-2, library=False) >= 4
