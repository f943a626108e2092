# SPDX-License-Identifier: Apache-2.0
"""Estimates how long ONNX Runtime's CPU kernel of ``Attention`` takes, beside the nodes that it replaces.

Times are shares of what two matmuls and a softmax take at D = 64 without a mask; docs/lab/standard-attention.md has them.
Neither side skips what a mask forbids: the gain is in passes over the scores.
"""

from __future__ import annotations

from stof.attention.decide.cost_cpu import GainEstimate, tile_density
from stof.attention.describe.site_problem import SiteProblem
from stof.attention.standard.form import StandardForm
from stof.mask.site import AttentionSite, TermKind

LEAST_GAIN = 1.02  # below it the nodes stay
# Of the graph's nodes: a pass that adds, one that chooses, IsNaN and Where behind the softmax, key heads that are repeated.
_ADD, _CHOOSE, _GUARD, _REPEAT = 0.2, 0.45, 0.6, 0.03
# Of the kernel: the attribute, lengths, a mask with few forbidden pairs, and what all forbidden pairs add to it.
_CAUSAL, _LENGTHS, _MASK, _FORBIDDEN = 0.17, 0.03, 0.05, 0.4
_REAL = 0.75  # of the keys, where a mask reads padding or lengths at run time
_CAP = 0.28  # on both sides
_MATMULS = 0.78  # of the whole at D = 64


def estimate_gain(site: AttentionSite, problem: SiteProblem, form: StandardForm, length: int) -> GainEstimate:
    """The estimated gain over the site's own nodes at S = T = ``length``."""
    density = tile_density(problem, length)
    both = 1 - _MATMULS + _MATMULS * (problem.head_size + problem.value_head_size) / 128
    both += _CAP if problem.softcap else 0.0
    nodes = sum(_ADD if t.kind is TermKind.ADD else _CHOOSE for t in site.terms)
    nodes += _GUARD if site.nan_guard or site.zeroed or site.pair_guard is not None else 0.0
    nodes += _REPEAT if problem.num_heads != problem.kv_num_heads else 0.0
    kernel = _CAUSAL if form.is_causal else 0.0
    kernel += _LENGTHS if form.lengths is not None else 0.0
    if form.has_mask or form.window != (-1, -1):
        usual = _REAL if form.mask.vectors else 1.0
        kernel += _MASK + _FORBIDDEN * (1 - density * usual)
    return GainEstimate(length, density, (both + nodes) / (both + kernel))
