# SPDX-License-Identifier: Apache-2.0
"""One output of the optimized model beside the original's, with what its inputs say about rows that are not defined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from stof.execution.case import Case, Padding
from stof.verification.compare import compare_outputs
from stof.verification.model_inputs import ModelInputs
from stof.verification.result import Comparison


def compare_output(
    inputs: ModelInputs,
    case: Case,
    feed: Mapping[str, np.ndarray],
    floor: float,
    name: str,
    plain: np.ndarray,
    legal: Sequence[np.ndarray],
    optimized: np.ndarray,
    expanded: Sequence[np.ndarray] = (),
    *,
    has_faults: bool = False,
) -> Comparison:
    """The optimized model's output beside the original's own runs, without rows of KV caches that hold no key.

    Args:
        inputs: say which rows hold keys, and which queries are padding.
        case: the sizes of the inputs.
        feed: the inputs.
        floor: what is allowed anyway, of the output's range.
        name: of the output.
        plain: the original's, without graph optimizations.
        legal: its other runs.
        optimized: the optimized model's.
        expanded: runs of another graph that means the same.
        has_faults: sites differ, so outputs at padded queries count.
    """
    undefined = inputs.may_carry_nan and case.padding in (Padding.LEFT, Padding.RIGHT, Padding.HOLES)
    held = inputs.cache_rows(name, feed, plain.shape)
    padded = None if held is not None or has_faults else inputs.padded_queries(case, feed)
    return compare_outputs(
        case, floor, name, plain, legal, optimized, expanded, undefined=undefined, padded=padded, held=held
    )
