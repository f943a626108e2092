# SPDX-License-Identifier: Apache-2.0
"""StofQuantizedAttention: what it takes, and how fast it is beside the runtime's own nodes on the CPU."""

from __future__ import annotations

from dataclasses import dataclass

from stof.attention.describe.site_problem import WEIGHT_BY_RANGE, SiteProblem
from stof.attention.quantized.function_body import QUANTIZED_OP
from stof.mask.roundings import ROLES
from stof.mask.site import EmptyRows
from stof.runtime.library import EARLIER, LibraryError, op_limits, type_limits

# Per query, key and head, in units of one multiplication of codes at the runtime's own rate of int8 matmuls. Both roundings and
# the softmax are passes over scores: the runtime writes and reads them in memory, the operator a strip in the cache.
_PASS = 24.0
_PASSES = 6.0
_OWN_PASS = 20.0
_OWN_PASSES = 2.0


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


def estimate_gain(problem: SiteProblem, length: int, density: float) -> float:
    """The estimated gain over the runtime's own nodes at S = T = ``length``, of which a share of tiles is computed."""
    work = problem.head_size + problem.value_head_size
    own = max(density, 1e-6) * (work + _OWN_PASSES * _OWN_PASS)
    return (work + _PASSES * _PASS) / own
