# SPDX-License-Identifier: Apache-2.0
"""StofQuantizedAttention: what it takes, and how fast it is beside the runtime's own nodes on the CPU."""

from __future__ import annotations

from stof.attention.describe.site_problem import SiteProblem
from stof.attention.quantized.function_body import QUANTIZED_OP
from stof.mask.site import EmptyRows
from stof.runtime.library import LibraryError, op_limits

# Per query, key and head, in units of one multiplication of codes at the runtime's own rate of int8 matmuls. Both roundings and
# the softmax are passes over scores: the runtime writes and reads them in memory, the operator a strip in the cache.
_PASS = 24.0
_PASSES = 6.0
_OWN_PASS = 20.0
_OWN_PASSES = 2.0


def refusals(problem: SiteProblem, target: str) -> list[str]:
    """The reasons against running a problem whose query, key and value are codes; empty when there are none."""
    try:
        limits = op_limits().get(QUANTIZED_OP, {}).get("targets", {}).get(target)
    except LibraryError as error:
        return [str(error)]
    if limits is None:
        return [f"the plugin library has no {QUANTIZED_OP} for target {target}"]
    reasons = []
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
