# SPDX-License-Identifier: Apache-2.0
"""The prompts that --sparse-mlp calibrates on, and those on which it is measured. They are apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from stof.errors import ArgumentError
from stof.op_rewrite import Job
from stof.prompts.files import PromptSet, check_vocabulary, read_prompts
from stof.sparse_mlp.calibration.spec import OPTION, MlpSpec

_ONE_IN = 5  # prompts, or tokens, are held out


@dataclass(frozen=True, eq=False)
class CalibrationPrompts:
    """Prompts of one optimization.

    Attributes:
        fitted: thresholds and predictors are fitted on them; None: there are none.
        held_out: their quality and the loss are measured on them; None: there are none.
    """

    fitted: PromptSet | None
    held_out: PromptSet | None


def read_calibration_prompts(job: Job, spec: MlpSpec) -> CalibrationPrompts:
    """The prompts of a specification. Those of --prompts are held out; without them, a fifth of the file is.

    Raises:
        ArgumentError: for a file that cannot be read, without enough tokens, with ids beyond the vocabulary, or that is also
            the file of --prompts.
    """
    if spec.prompts is None:
        return CalibrationPrompts(None, job.prompts)
    prompts = read_prompts(spec.prompts, [job.source.parent], OPTION)
    check_vocabulary(spec.prompts, prompts, job.model.graph, OPTION)
    prompts_file = job.options.prompts
    if prompts_file is not None and _is_same(prompts_file, spec.prompts):
        raise ArgumentError(
            f"{OPTION} and --prompts both name {prompts_file}: held-out prompts have to be others; leave --prompts out to hold "
            "out a fifth of the file"
        )
    if prompts_file is not None:
        return CalibrationPrompts(PromptSet(f"{OPTION} {spec.prompts}", tuple(prompts)), job.prompts)
    fitted, held = _split(prompts)
    if not held:
        sizes = ", ".join(str(len(p)) for p in prompts)
        raise ArgumentError(
            f"{OPTION} {spec.prompts} has prompts of {sizes} tokens, expected {_ONE_IN} prompts or one of {_ONE_IN} tokens, as a "
            "fifth is held out; give more, or held-out prompts by --prompts"
        )
    return CalibrationPrompts(
        PromptSet(f"{OPTION} {spec.prompts}", tuple(fitted)),
        PromptSet(f"the held-out fifth of {spec.prompts}", tuple(held)),
    )


def _split(prompts: Sequence[np.ndarray]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Prompts to fit on, and those that are held out: every fifth one, or of few prompts the last fifth of each."""
    if len(prompts) >= _ONE_IN:
        held = list(prompts[_ONE_IN - 1 :: _ONE_IN])
        return [p for i, p in enumerate(prompts) if i % _ONE_IN != _ONE_IN - 1], held
    cuts = [len(p) - len(p) // _ONE_IN for p in prompts]
    ends = [p[cut:] for p, cut in zip(prompts, cuts, strict=True)]
    return [p[:cut] for p, cut in zip(prompts, cuts, strict=True)], [e for e in ends if len(e)]


def _is_same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return one == other
