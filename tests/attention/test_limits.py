# SPDX-License-Identifier: Apache-2.0
"""The limits of StofAttention: one declaration in the library, the same numbers without it, and who asks for them."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import onnx
import pytest
from onnx import TensorProto, parser

from stof.attention import limits
from stof.attention.decide import cost_cpu, cost_cuda, cost_tensorrt
from stof.attention.describe.site_problem import SiteProblem
from stof.attention.find import find_sites
from stof.attention.op_inputs import NEUTRAL
from stof.mask.expression import MaskExpression
from stof.mask.site import AttentionSite, Layout, LiftedMask, MaskTerm, Operand, RuntimeOperand, TermKind
from stof.runtime.library import LibraryError, op_limits
from stof.symbolic import Symbolic

FP32, FP16, BF16 = int(TensorProto.FLOAT), int(TensorProto.FLOAT16), int(TensorProto.BFLOAT16)
MASK = LiftedMask(MaskExpression.parse("k <= q"))


def site(**settings: Any) -> AttentionSite:
    q, k, v = (Operand(n, Layout.BHSD) for n in "qkv")
    usual = {"head_size": 64, "value_head_size": 64, "dtype": FP16, "num_heads": 4, "kv_num_heads": 4, "scale": 0.125}
    return AttentionSite("a", 0, "softmax", q, k, v, "out", Layout.BHSD, **{**usual, **settings})


def problem(mask: LiftedMask = MASK, **settings: Any) -> SiteProblem:
    return SiteProblem.of(site(**settings), mask)


def model(size: int) -> onnx.ModelProto:
    return parser.parse_model(
        f"""<ir_version: 8, opset_import: ["" : 18]>
        g (float[1,2,S,{size}] q, float[1,2,{size},S] k, float[1,2,S,{size}] v) => (float[a,b,c,d] out) {{
            s = MatMul (q, k)
            p = Softmax <axis = -1> (s)
            out = MatMul (p, v)
        }}"""
    )


def found(size: int) -> list[str]:
    """The findings of a model with one attention; none where it is found."""
    plain = model(size)
    sites, findings = find_sites(plain, Symbolic(plain))
    assert len(sites) + len(findings) == 1
    return [f.reason for f in findings]


@pytest.fixture
def without_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise LibraryError("there is no library")

    monkeypatch.setattr("stof.runtime.library.library", missing)
    assert op_limits() == {}


def answer(monkeypatch: pytest.MonkeyPatch, **numbers: int) -> None:
    """Has the library answer with other numbers, for every target and type."""
    given = copy.deepcopy(op_limits())
    for target in given["StofAttention"]["targets"].values():
        for one in target["types"].values():
            one.update(numbers)
    monkeypatch.setattr(limits, "op_limits", lambda: given)


def test_the_library_answers_with_the_fallback() -> None:
    operators = {"StofAttention", "StofCachedAttention", "StofChain", "StofGemm", "StofPagedAttention", "StofSparseMLP"}
    assert set(op_limits()) == operators
    assert set(op_limits()["StofAttention"]["targets"]) == set(limits.FALLBACK)
    for target, expected in limits.FALLBACK.items():
        assert limits.limits_of(target) == expected, target
        assert list(limits.limits_of(target)) == list(expected), "messages name types in this order"
    assert limits.operand_roles() == limits.FALLBACK_ROLES == {*NEUTRAL, "unused"}
    assert limits.element_types() == {FP32, FP16, BF16}
    assert limits.largest_head_size() == 256


def test_other_operators_tell_their_types() -> None:
    gemm = op_limits()["StofGemm"]["targets"]
    assert {t: sorted(map(int, gemm[t]["types"])) for t in gemm} == {
        "cpu": [FP32, FP16, BF16],
        "cuda": [FP16, BF16],
        "tensorrt": [FP16, BF16],
    }
    assert op_limits()["StofChain"]["targets"] == {"cpu": {}, "cuda": {}, "tensorrt": {}}  # types as the chain says


@pytest.mark.parametrize("symbols", [{}, {"stof_op_limits": None}])
def test_a_library_that_cannot_be_asked(symbols: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stof.runtime.library.library", lambda: SimpleNamespace(**symbols))
    assert limits.limits_of("cuda") is limits.FALLBACK["cuda"]
    assert limits.operand_roles() is limits.FALLBACK_ROLES


def test_nothing_needs_the_library(without_library: None) -> None:
    assert found(256) == []
    assert found(257) == ["head size 257, at most 256 is supported"]
    assert cost_cpu.refusals(problem()) == cost_cuda.refusals(problem()) == cost_tensorrt.refusals(problem()) == []


@pytest.mark.parametrize("library", [True, False])
def test_refusals(library: bool, request: pytest.FixtureRequest) -> None:
    if not library:
        request.getfixturevalue("without_library")
    assert found(257) == ["head size 257, at most 256 is supported"]
    assert cost_cpu.refusals(problem(head_size=0)) == ["head size 0 / 64, expected 1 to 256"]
    assert cost_cpu.refusals(problem(value_head_size=257)) == ["head size 64 / 257, expected 1 to 256"]
    assert cost_cpu.refusals(problem(dtype=11)) == ["element type 11, expected fp32, fp16 or bf16"]
    tables = tuple((f"table{i}", "bool", (1,), b"\1") for i in range(12))
    many = LiftedMask(MASK.expression, (RuntimeOperand("pad", "p"),), tables=tables)
    assert cost_cpu.refusals(problem(mask=many)) == []
    more = LiftedMask(MASK.expression, many.operands, tables=tables, bias=(MaskTerm(TermKind.ADD, "bias"),))
    assert cost_cpu.refusals(problem(mask=more)) == ["more than 13 operands"]
    expected = "head size 20 / 64, expected multiples of 8 in fp16 and bf16 on CUDA"
    assert (
        cost_cuda.refusals(problem(head_size=20)) == cost_cuda.refusals(problem(head_size=20, dtype=BF16)) == [expected]
    )
    assert cost_cuda.refusals(problem(head_size=20, dtype=FP32)) == []
    expected = "head size 20 / 64, expected multiples of 8 up to 256 on a GPU"
    assert cost_tensorrt.refusals(problem(head_size=20)) == [expected]
    expected = "head size 257 / 64, expected at most 256 on a GPU"
    assert cost_tensorrt.refusals(problem(head_size=257, dtype=FP32)) == [expected]


def test_what_the_library_says_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, largest_head_size=512, most_operands=1)
    assert found(512) == []
    assert found(513) == ["head size 513, at most 512 is supported"]
    assert cost_cpu.refusals(problem(head_size=512)) == []
    two = LiftedMask(MASK.expression, (RuntimeOperand("pad", "p"),), bias=(MaskTerm(TermKind.ADD, "bias"),))
    assert cost_cpu.refusals(problem(head_size=513, mask=two)) == [
        "head size 513 / 64, expected 1 to 512",
        "more than 1 operands",
    ]
    answer(monkeypatch, largest_head_size=32, head_size_multiple_of=16)
    assert cost_cuda.refusals(problem(head_size=24)) == [
        "head size 24 / 64, expected multiples of 16 in fp32, fp16 and bf16 on CUDA",
        "head size 24 / 64, expected at most 32 on CUDA",
    ]
    assert cost_tensorrt.refusals(problem()) == ["head size 64 / 64, expected multiples of 16 up to 32 on a GPU"]
