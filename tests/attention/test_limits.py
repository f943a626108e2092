# SPDX-License-Identifier: Apache-2.0
"""The limits of StofAttention: one declaration in the library, and who asks for them."""

from __future__ import annotations

import copy
from dataclasses import replace
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
from stof.runtime.library import LibraryError, op_limits, type_limits
from stof.symbolic import LONGEST, Symbolic
from stof.targets import CPU, CUDA

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


def answer(monkeypatch: pytest.MonkeyPatch, **numbers: int) -> None:
    """Has the library answer with other numbers, for every target and type."""
    given = copy.deepcopy(op_limits())
    for target in given["StofAttention"]["targets"].values():
        for one in target["types"].values():
            one.update(numbers)
    monkeypatch.setattr("stof.runtime.library.op_limits", lambda: given)


def test_what_the_library_answers() -> None:
    attentions = {"StofAttention", "StofCachedAttention", "StofPagedAttention", "StofQuantizedAttention"}
    assert set(op_limits()) == {*attentions, "StofChain", "StofGemm", "StofSparseMLP"}
    assert set(op_limits()["StofAttention"]["targets"]) == {"cpu", "cuda", "tensorrt"}
    for target in ("cpu", "cuda", "tensorrt"):
        found = limits.limits_of(target)
        assert list(found) == [FP32, FP16, BF16], "messages name types in this order"
        for dtype, one in found.items():
            unit = 8 if target != "cpu" and dtype != FP32 else 1
            assert one == limits.AttentionLimits(256, unit, 65536, 4194304, 18)
    # Packed sequences have no operand that changes nothing: nodes with and without them are other nodes.
    sequences = {"cumulative_sequence_length", "cumulative_key_length", "first_position"}
    assert limits.operand_roles() == {*NEUTRAL, *sequences, "unused"}
    assert limits.element_types() == {FP32, FP16, BF16}
    assert limits.largest_head_size() == 256
    assert limits.most_heads() == 65536


def test_the_longest_sequence_of_proofs_is_the_library_s() -> None:
    assert limits.most_length() == LONGEST


def test_other_operators_tell_their_types() -> None:
    gemm = op_limits()["StofGemm"]["targets"]
    assert {t: sorted(map(int, gemm[t]["types"])) for t in gemm} == {
        "cpu": [FP32, FP16, BF16],
        "cuda": [FP16, BF16],
        "tensorrt": [FP16, BF16],
    }
    assert op_limits()["StofChain"]["targets"] == {"cpu": {}, "cuda": {}, "tensorrt": {}}  # types as the chain says


EARLIER = "it is of an earlier version than this package; install both of one version"


def test_a_library_that_cannot_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stof.runtime.library.library", SimpleNamespace)
    for ask in (lambda: found(64), limits.operand_roles, limits.most_length):
        with pytest.raises(LibraryError, match=rf"does not state its limits \(stof_op_limits\): {EARLIER}"):
            ask()


def test_a_library_that_lacks_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    earlier = copy.deepcopy(op_limits())
    del earlier["StofAttention"]["targets"]["cuda"]["types"]["10"]["most_heads"]
    del earlier["StofCachedAttention"]
    monkeypatch.setattr("stof.runtime.library.op_limits", lambda: earlier)
    assert limits.limits_of("cpu")
    with pytest.raises(LibraryError, match=f"does not state most_heads of StofAttention: {EARLIER}"):
        limits.limits_of("cuda")
    with pytest.raises(LibraryError, match=f"has no StofCachedAttention: {EARLIER}"):
        type_limits("StofCachedAttention", "cpu", limits.AttentionLimits)


def test_refusals() -> None:
    assert found(257) == ["head size 257, at most 256 is supported"]
    assert cost_cpu.refusals(problem(head_size=0)) == ["head size 0 / 64, expected 1 to 256"]
    assert cost_cpu.refusals(problem(value_head_size=257)) == ["head size 64 / 257, expected 1 to 256"]
    assert cost_cpu.refusals(problem(dtype=11)) == ["element type 11, expected fp32, fp16 or bf16"]
    tables = tuple((f"table{i}", "bool", (1,), b"\1") for i in range(17))
    many = LiftedMask(MASK.expression, (RuntimeOperand("pad", "p"),), tables=tables)
    assert cost_cpu.refusals(problem(mask=many)) == []
    more = LiftedMask(MASK.expression, many.operands, tables=tables, bias=(MaskTerm(TermKind.ADD, "bias"),))
    assert cost_cpu.refusals(problem(mask=more)) == ["more than 18 operands"]
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


def test_relative_tables_of_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as the library states for a target; an earlier one does not say, and takes them on the CPU alone."""
    own = copy.deepcopy(op_limits())
    targets = own["StofAttention"]["targets"]
    for target, tables in (("cpu", 4), ("cuda", 3)):
        for one in targets[target]["types"].values():
            one["relative_tables"] = tables
    monkeypatch.setattr("stof.attention.limits.op_limits", lambda: own)
    of_scores = {"relative_key", "relative_key1", "relative_query", "relative_bias_factor"}
    assert limits.relative_roles_on(CPU) == {*of_scores, "relative_value"}
    assert limits.relative_roles_on(CUDA) == of_scores
    term = replace(problem(), relative_terms=(("relative_query", "k - q", 1, False),))
    factor = replace(problem(), has_relative_factor=True)
    value = replace(problem(), relative_terms=(("relative_value", "k - q", 1, False),))
    assert cost_cuda.refusals(term) == cost_cuda.refusals(factor) == []
    assert cost_cuda.refusals(value) == ["no kernel on CUDA takes relative_value"]
    for one in (*targets["cpu"]["types"].values(), *targets["cuda"]["types"].values()):
        del one["relative_tables"]
    assert limits.relative_roles_on(CPU) == {*of_scores, "relative_value"}
    assert limits.relative_roles_on(CUDA) == frozenset()
    assert cost_cuda.refusals(term) == ["no kernel on CUDA takes relative_query"]
    assert cost_cuda.refusals(factor) == ["no kernel on CUDA takes relative_bias_factor"]


def test_terms_cost_time_on_cuda() -> None:
    """Over long sequences the kernel with a term is slower than that without by more than the runtime is."""
    term = replace(problem(), relative_terms=(("relative_key", "k - q", 1, False),))
    plain, own = (cost_cuda.estimate_gain(p, 8192, cost_cuda.device_of(90)).gain for p in (problem(), term))
    assert 1 < own < plain
