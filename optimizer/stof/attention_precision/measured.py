# SPDX-License-Identifier: Apache-2.0
"""Sets of inputs that the errors of attentions in reduced precision are measured on."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from stof.op_rewrite import Job
from stof.prompt_runs.switched_off import draw_unpadded
from stof.stages import Stage, find_model_inputs
from stof.thresholds.measured_sets import MeasuredSets

_MOST_SETS = 4  # whose errors are measured: the longest
_MOST_DRAWN = 2


def draw_sets(job: Job, stages: Sequence[Stage]) -> MeasuredSets | None:
    """Drawn inputs, for models without any of the user's; None without verification, which draws as well."""
    if not job.options.verify:
        return None
    feeds = tuple(islice(draw_unpadded(find_model_inputs(job, stages)), _MOST_DRAWN))
    return MeasuredSets("drawn inputs", "set", len(feeds), (), (), inputs=feeds) if feeds else None


def longest_sets(sets: MeasuredSets) -> list[int]:
    """The indices of the sets that count, the longest first."""
    return sorted(range(sets.count), key=lambda i: -sets.lengths[i] if sets.lengths else i)[:_MOST_SETS]
