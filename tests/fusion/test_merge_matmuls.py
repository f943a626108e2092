# SPDX-License-Identifier: Apache-2.0
"""Matmuls and their biases on a GPU: Gemm split and rejoined, three matmuls of one tensor merged."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from chain_graphs import FLOAT, HALF, Builder, N
from fused import FusedModel, fuse_chains

from stof.fusion.decide.estimated import EstimatedDecider
from stof.fusion.merge_matmuls import MergedMatmuls, merge_matmuls
from stof.fusion.policy import ChainPolicy
from stof.fusion.search.cost import MachineModel
from stof.fusion.split_gemm_bias import rejoin_gemm_bias, split_gemm_bias
from stof.options import Options
from stof.symbolic import Symbolic

MACHINE = MachineModel.cuda(2.6e12, 620e12)
K = 16


def _gemm(b: Builder, flat: bool, **attributes: float) -> onnx.ModelProto:
    x = b.input("input", ["B", "S", K] if flat else ["R", K])
    rows = b.add("Reshape", x, b.ints(-1, K)) if flat else x
    y = b.add("Gemm", rows, b.weight(K, N), b.weight(N), **attributes)
    if flat:
        shape = b.add("Concat", b.add("Shape", x, start=0, end=2), b.ints(N), axis=0)
        y = b.add("Reshape", y, shape)
    return b.model(b.add("Gelu", y))


def _ops(model: onnx.ModelProto) -> Counter[str]:
    return Counter(n.op_type for n in model.graph.node)


def _run(model: onnx.ModelProto, shape: tuple[int, ...]) -> np.ndarray:
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    found: np.ndarray = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(
        None, {"input": x}
    )[0]
    return found


@pytest.mark.parametrize("flat", [False, True])
def test_a_bias_is_taken_apart_and_computes_the_same(flat: bool) -> None:
    model = _gemm(Builder(FLOAT), flat)
    apart, gemms = split_gemm_bias(model, Symbolic(model))
    assert len(gemms) == 1
    assert _ops(apart)["MatMul"] == _ops(apart)["Add"] == 1
    assert not _ops(apart)["Gemm"]
    (gemm,) = gemms.values()
    assert len(gemm) == 1 + flat  # with what restores the rows
    shape = (2, 5, K) if flat else (7, K)
    np.testing.assert_allclose(_run(apart, shape), _run(model, shape), rtol=1e-5, atol=1e-5)
    again = rejoin_gemm_bias(apart, gemms)
    np.testing.assert_allclose(_run(again, shape), _run(model, shape), rtol=1e-5, atol=1e-5)
    if not flat:
        assert [n.SerializeToString() for n in again.graph.node] == [n.SerializeToString() for n in model.graph.node]
    else:
        assert not [n for n in again.graph.node if n.op_type == "Reshape"]


def test_rows_of_heads_are_joined_before_the_matmul() -> None:
    b = Builder(FLOAT)
    x = b.input("input", ["B", "S", 4, K // 4])
    y = b.add("Gemm", b.add("Reshape", x, b.ints(-1, K)), b.weight(K, N), b.weight(N))
    shape = b.add("Concat", b.add("Shape", x, start=0, end=2), b.ints(N), axis=0)
    model = b.model(b.add("Reshape", y, shape))
    apart, gemms = split_gemm_bias(model, Symbolic(model))
    assert len(gemms) == 1
    found, expected = (_run(m, (2, 3, 4, K // 4)) for m in (rejoin_gemm_bias(apart, gemms), model))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("attributes", [{"alpha": 2.0}, {"transB": 1}, {"beta": 0.5}])
def test_other_gemms_stay(attributes: dict[str, float]) -> None:
    b = Builder(FLOAT)
    y = b.add("Gemm", b.input("input", ["R", N]), b.weight(N, N), b.weight(N), **attributes)
    model = b.model(y)
    assert split_gemm_bias(model, Symbolic(model)) == (model, {})


def test_a_gemm_of_another_domain_stays() -> None:
    b = Builder(FLOAT)
    model = b.model(b.add("Gemm", b.input("input", ["R", N]), b.weight(N, N), b.weight(N)))
    model.graph.node[-1].domain = "elsewhere"
    assert split_gemm_bias(model, Symbolic(model)) == (model, {})


@pytest.mark.parametrize("bias", [(2, N), (2, 1), (1, N)])
def test_a_bias_of_rows_stays_with_rows_as_they_are_counted(bias: tuple[int, ...]) -> None:
    b = Builder(FLOAT)
    x = b.input("input", [2, 1, K])
    y = b.add("Gemm", b.add("Reshape", x, b.ints(-1, K)), b.weight(K, N), b.weight(*bias))
    model = b.model(b.add("Gelu", b.add("Reshape", y, b.ints(2, 1, N))))
    apart, gemms = split_gemm_bias(model, Symbolic(model))
    (own,) = gemms.values()
    assert len(own) == (2 if bias[0] == 1 else 1)
    for made in (apart, rejoin_gemm_bias(apart, gemms)):
        np.testing.assert_allclose(_run(made, (2, 1, K)), _run(model, (2, 1, K)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("read", ["rows", "product"])
def test_what_a_branch_reads_stays(read: str) -> None:
    model = _gemm(Builder(FLOAT), flat=True)
    (gemm,) = (n for n in model.graph.node if n.op_type == "Gemm")
    name = gemm.input[0] if read == "rows" else gemm.output[0]
    result = onnx.ValueInfoProto(name="branch")
    branch = onnx.helper.make_graph(
        [onnx.helper.make_node("ReduceSum", [name], ["branch"], keepdims=0)], "branch", [], [result]
    )
    model.graph.node.append(
        onnx.helper.make_node("If", ["always"], ["sum"], then_branch=branch, else_branch=branch, name="if")
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(True), "always"))
    model.graph.node.append(onnx.helper.make_node("Add", [model.graph.output[0].name, "sum"], ["all"], name="all"))
    model.graph.output[0].name = "all"
    apart, gemms = split_gemm_bias(model, Symbolic(model))
    assert gemms
    for made in (apart, rejoin_gemm_bias(apart, gemms)):
        np.testing.assert_allclose(_run(made, (2, 5, K)), _run(model, (2, 5, K)), rtol=1e-4, atol=1e-4)


def _three(b: Builder, *, biased: bool = True) -> onnx.ModelProto:
    x = b.input("input", ["B", "S", K])
    found = [b.add("MatMul", x, b.weight(K, N, seed=i)) for i in range(3)]
    return b.model(*(b.add("Add", y, b.weight(N, seed=i + 3)) if biased else y for i, y in enumerate(found)))


def test_three_matmuls_of_one_tensor() -> None:
    model = _three(Builder(FLOAT))
    # In fp16 and bf16 alone it is worth it.
    assert merge_matmuls(model, Symbolic(model), lambda *_: True) == MergedMatmuls(model)
    half = _three(Builder(HALF))
    merged = merge_matmuls(half, Symbolic(half), lambda *_: True)
    together, splits = merged.model, merged.splits
    assert len(splits) == 1
    assert _ops(together) == {"Concat": 1, "MatMul": 1, "Constant": 1, "Split": 1, "Add": 3}
    run = [ort.InferenceSession(m.SerializeToString(), providers=["CPUExecutionProvider"]) for m in (half, together)]
    x = np.random.default_rng(0).standard_normal((2, 3, K)).astype(np.float16)
    for one, other in zip(*(s.run(None, {"input": x}) for s in run), strict=True):
        np.testing.assert_allclose(one.astype(np.float32), other.astype(np.float32), rtol=2e-3, atol=2e-3)
    assert merge_matmuls(half, Symbolic(half), lambda *_: False) == MergedMatmuls(half)
    bare = _three(Builder(HALF), biased=False)
    # Nothing behind them that a chain would have to take.
    assert merge_matmuls(bare, Symbolic(bare), lambda *_: True).splits == frozenset()


def _fuse(model: onnx.ModelProto, size: tuple[int, int]) -> FusedModel:
    shapes = {n: (v, v) for n, v in zip("BS", size, strict=True)}
    decider = EstimatedDecider(Options(target="cuda", shapes=shapes, products=False), MACHINE)
    return fuse_chains(model, decider, ChainPolicy(splits_gemm_bias=True, merge_decider=decider.should_merge))


def test_short_inputs_merge_and_bare_matmuls_of_long_ones_do_not() -> None:
    made = _fuse(_three(Builder(HALF)), (1, 128))
    assert (_ops(made.model)["MatMul"], _ops(made.model)["StofChain"], _ops(made.model)["Split"]) == (1, 1, 0)
    bare = _three(Builder(HALF), biased=False)
    assert _merges(bare, (1, 128))
    assert not _merges(bare, (64, 4096))


def _merges(model: onnx.ModelProto, size: tuple[int, int]) -> bool:
    shapes = {n: (v, v) for n, v in zip("BS", size, strict=True)}
    decider = EstimatedDecider(Options(target="cuda", shapes=shapes, products=False), MACHINE)
    return decider.should_merge(model, Symbolic(model), [n for n in model.graph.node if n.op_type == "MatMul"])


@pytest.mark.parametrize("dtype", [FLOAT, HALF])
def test_what_sizes_decide_is_left_to_the_runtime(dtype: int) -> None:
    """In fp16 it has no kernels to compute it once."""
    b = Builder(dtype)
    x = b.input("input", ["B", "S", N])
    length = b.add("Squeeze", b.add("Shape", x, start=1, end=2))
    at = b.add("Range", b.array(np.array(0)), length, b.array(np.array(1)))
    column = b.add("Unsqueeze", b.add("Cast", at, to=dtype), b.ints(1))
    table = b.add("Cos", b.add("Mul", column, b.weight(1, N)))
    model = b.model(table, b.add("Gelu", b.add("Mul", x, b.weight(N))))

    def left(most: int) -> bool:
        shapes = {"B": (8, 8), "S": (128, most)}
        found = fuse_chains(model, EstimatedDecider(Options(target="cuda", shapes=shapes), MACHINE))
        return any(r.reason.startswith("sizes decide all of it") for r in found.reports)

    assert left(128) == (dtype == FLOAT)
    assert not left(512)
