# SPDX-License-Identifier: Apache-2.0
"""StofQuantizedAttention: what it takes, and how fast it is beside the runtime's own nodes on the CPU."""

from __future__ import annotations

from dataclasses import dataclass

from stof.attention.describe.site_problem import WEIGHT_BY_RANGE, SiteProblem
from stof.attention.quantized.function_body import QUANTIZED_OP
from stof.mask.roundings import ROLES
from stof.mask.site import EmptyRows
from stof.runtime.library import EARLIER, LibraryError, op_limits, type_limits


@dataclass(frozen=True)
class IsaTimes:
    """Times of an instruction set, in ns on a core; only ratios are used.

    Attributes:
        multiply: of the operator, for a multiplication of codes.
        own_pass: of the operator, for all else that it does to a pair of query and key.
        runtime_multiply: of the runtime's int8 matmuls, by the instructions that they issue.
    """

    multiply: float
    own_pass: float
    runtime_multiply: float


# Of the operator: bench_quantized_attention and tools/time_quantized_attention.py at S = 128 to 2048, on Zen 5, amx_int8 on a
# Xeon of family 6, model 207. No runtime can be limited to a lesser set there, so that its passes have their time with AVX-512,
# which is the least.
_TIMES = {
    "portable": IsaTimes(0.15, 45.0, 0.02),
    "avx2": IsaTimes(0.0063, 1.05, 0.010),
    "avx_vnni": IsaTimes(0.0040, 0.75, 0.004),
    "avx512": IsaTimes(0.0031, 0.70, 0.0055),
    "avx512_vnni": IsaTimes(0.0020, 0.50, 0.002),
    "avx512_vbmi": IsaTimes(0.0020, 0.37, 0.002),
    "amx_int8": IsaTimes(0.0009, 0.38, 0.001),
}
# Not measured: runtime_multiply below VNNI, which follows from issue counts; AArch64, which takes the times of avx512_vnni.
_OTHERS = _TIMES["avx512_vnni"]
# The sets that earlier libraries name, which have no kernels of their own for it.
_LIKE_VBMI = ("avx512_bf16", "amx_bf16")
_RUNTIME_PASSES = 1.25
# Weights rounded by their range: the operator computes scores twice, the runtime passes over scores and weights in fp32.
_OWN_BY_RANGE = 1.6
_RUNTIME_PASSES_BY_RANGE = 2.75


@dataclass(frozen=True)
class QuantizedLimits:
    """The limits of a node whose query, key and value are codes.

    Attributes:
        largest_head_size: the most elements of a head.
        most_heads: query heads.
        most_length: queries, keys and batches.
        most_quantized_operands: inputs behind query, key and value.
    """

    largest_head_size: int
    most_heads: int
    most_length: int
    most_quantized_operands: int


def refusals(problem: SiteProblem, target: str) -> list[str]:
    """The reasons against running a problem whose query, key and value are codes; empty when there are none."""
    try:
        if QUANTIZED_OP not in op_limits():
            return [f"the plugin library has no {QUANTIZED_OP}: {EARLIER}"]
        types = type_limits(QUANTIZED_OP, target, QuantizedLimits)
    except LibraryError as error:
        return [str(error)]
    limits = types.get(problem.dtype)
    if limits is None:
        return [f"attention is rounded to 8 bits, and target {target} has no kernels for that"]
    reasons = []
    if WEIGHT_BY_RANGE in problem.roundings and "weight_range" not in op_limits()[QUANTIZED_OP]["attributes"]:
        reasons.append(f"the plugin library takes no weight_range: {EARLIER}")
    largest = max(problem.head_size, problem.value_head_size)
    if largest > limits.largest_head_size:
        reasons.append(f"head size {largest}, expected 1 to {limits.largest_head_size}")
    if len(problem.tables) + len(problem.operands) + problem.has_bias + 2 * len(ROLES) > limits.most_quantized_operands:
        reasons.append(f"more than {limits.most_quantized_operands} operands")
    if problem.softcap or problem.has_sink:
        reasons.append("a soft cap or a sink beside roundings to 8 bits")
    if problem.has_relative_bias or problem.has_relative_factor or problem.relative_terms:
        reasons.append("relative positions beside roundings to 8 bits")
    if "biased_score" in problem.roundings and problem.empty_rows is EmptyRows.ALL:
        reasons.append("fully masked rows attend all keys by scores, which a rounding behind the mask makes equal")
    return reasons


def estimate_gain(problem: SiteProblem, density: float, isa: str) -> float:
    """The estimated gain over the runtime's own nodes, where a share of tiles is computed by an instruction set."""
    times = _TIMES.get("avx512_vbmi" if isa in _LIKE_VBMI else isa, _OTHERS)
    work = problem.head_size + problem.value_head_size
    own = max(density, 1e-6) * (work * times.multiply + times.own_pass)
    passes = _RUNTIME_PASSES
    if WEIGHT_BY_RANGE in problem.roundings:
        own, passes = own * _OWN_BY_RANGE, _RUNTIME_PASSES_BY_RANGE
    return (work * times.runtime_multiply + passes) / own
