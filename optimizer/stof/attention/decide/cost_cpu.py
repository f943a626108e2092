# SPDX-License-Identifier: Apache-2.0
"""An analytical estimate for attention on the CPU, in relative terms.

Times are per head and query-key pair, in units of one fp32 FMA at full rate; docs/design/attention-cpu.md has the
measurements that the constants come from. Only ratios are used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from stof.attention.decide import quantized
from stof.attention.describe.site_problem import SiteProblem
from stof.attention.limits import limits_of, operand_roles, type_names
from stof.mask.expression import MaskExpression
from stof.mask.relative_roles import RELATIVE_BIAS_FACTOR
from stof.runtime.library import LibraryError, Mask

# Our kernel: about 0.75 of the FMA rate on full tiles, a little less where tiles are partial.
_OWN_RATE = 0.72
# The runtime's unfused path: two GEMMs at about 0.8 of the FMA rate, and scores that are written and read by MatMul, Add,
# Softmax and the guard; each pass over a score costs about as much as 12 FMAs once they no longer fit the cache.
_DENSE_RATE = 0.8
_PASS = 12.0
_PASSES_CACHED = 2.0
_PASSES = 6.0
_CACHE_SCORES = 512 * 512
_TILE = (48, 64)  # query rows × keys
# The FMA rate of matmuls alone, and the softmax of a score in FMAs.
_MATMUL_RATE, _SOFTMAX = 0.9, 20.0
# By instructions: FMAs in the time of one of fp32, the multiple that head sizes are padded to, and the softmax of a score with
# rounded weights, in FMAs of fp32. They follow from times by `python -m bench bf16-attention`: at D = 16 and 32 on an AMD EPYC
# of Zen 5, at D = 64 and 128 on a Xeon (family 6, model 207). Others were not timed.
_IN_PRECISION = {"avx512_bf16": (2.0, 2, 27.0), "amx_bf16": (9.8, 32, 60.0)}


@dataclass(frozen=True)
class GainEstimate:
    """At one length: the share of tiles that are computed and the estimated speed-up of the problem."""

    length: int
    tile_density: float
    gain: float


def tile_density(problem: SiteProblem, length: int, tile: tuple[int, int] = _TILE) -> float:
    """The share of tiles (query rows × keys) that a mask leaves to compute, at S = T = ``length``.

    Run-time operands forbid nothing, but for ``lengths``.
    """
    if problem.mask.allows_all:
        return 1.0
    # A cache is empty before a prompt of S = T tokens and full after it: ``lengths`` may mean either.
    counts = (0, length) if "lengths" in problem.mask.reads else (0,)
    masks = [problem.mask.with_lengths(n) for n in counts]
    densities = [mask_tile_density(mask, problem.table_arrays, problem.num_heads, length, tile) for mask in masks]
    return min((density for density in densities if density > 0), default=1.0)


def mask_tile_density(
    mask: MaskExpression,
    tables: Mapping[str, np.ndarray],
    heads: int,
    length: int,
    tile: tuple[int, int],
    first: int = 0,
) -> float:
    """The share of tiles that a mask of static conjuncts leaves of the query rows from ``first`` on, at S = T = ``length``."""
    try:
        return Mask(mask.text, tables).block_mask(1, heads, length, length, *tile).tile_density(length, first)
    except LibraryError:  # tables of fixed size do not stretch to every length: nothing is known there
        return 1.0


def estimate_gain(problem: SiteProblem, length: int, isa: str = "") -> GainEstimate:
    """The estimated gain over the runtime's own nodes at S = T = ``length``; ``isa``: the library's instruction set."""
    density = tile_density(problem, length)
    if problem.roundings:
        return GainEstimate(length, density, quantized.estimate_gain(problem, density, isa))
    work = 2.0 * problem.head_size + 2.0 * problem.value_head_size
    # Each product of a table costs what query times key does; the runtime multiplies about twice as many rows as there are keys,
    # and moves the result to pairs.
    products = len(problem.relative_terms)
    own_work = work + 2.0 * products * problem.head_size
    operator_time = max(density, 1e-6) * own_work / 2 / _OWN_RATE  # a mask may allow nothing at a length
    passes = _PASSES if length * length > _CACHE_SCORES else _PASSES_CACHED
    runtime_work = work + 4.0 * products * problem.head_size
    runtime_time = runtime_work / 2 / _DENSE_RATE + (1 + products) * passes * _PASS
    return GainEstimate(length, density, runtime_time / operator_time)


def estimate_precision_gain(head_size: int, kernel: str) -> float | None:
    """The time of the operator in fp32 over that in reduced precision, where runs have many queries; None: not timed.

    Args:
        head_size: of queries and values.
        kernel: the instructions, as the library names them.
    """
    if kernel not in _IN_PRECISION:
        return None
    rate, multiple, softmax = _IN_PRECISION[kernel]
    padded = -(-head_size // multiple) * multiple
    whole = 2.0 * head_size / _MATMUL_RATE + _SOFTMAX
    return whole / ((padded + head_size) / (_MATMUL_RATE * rate) + softmax)


def refusals(problem: SiteProblem) -> list[str]:
    """The reasons against running a problem on this build's kernels; empty when there are none."""
    types = limits_of("cpu")
    limits = types.get(problem.dtype, next(iter(types.values())))
    sizes, largest = (problem.head_size, problem.value_head_size), limits.largest_head_size
    reasons = []
    if not all(1 <= size <= largest for size in sizes):
        reasons.append(f"head size {sizes[0]} / {sizes[1]}, expected 1 to {largest}")
    if problem.dtype not in types:
        reasons.append(f"element type {problem.dtype}, expected {type_names(types, 'or')}")
    roles = {role for role, *_ in problem.relative_terms} | (
        {RELATIVE_BIAS_FACTOR} if problem.has_relative_factor else set()
    )
    if missing := sorted(roles - operand_roles()):
        reasons.append(f"the plugin library takes no {', '.join(missing)}")
    added = problem.has_bias + problem.has_relative_factor + len(problem.relative_terms)
    if len(problem.tables) + len(problem.operands) + added > limits.most_operands:
        reasons.append(f"more than {limits.most_operands} operands")
    return reasons
