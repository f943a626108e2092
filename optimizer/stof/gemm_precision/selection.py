# SPDX-License-Identifier: Apache-2.0
"""The user's choice among the GEMMs of --allow-bf16: ``--only gemm:NAME`` and ``--skip gemm:NAME``."""

from __future__ import annotations

from collections.abc import Sequence

from stof.errors import ArgumentError
from stof.options import Options
from stof.selection import CandidateNames, NamedCandidate, Selection

GEMM_SELECTION = "gemms"  # of the selection, beside those of ops
GEMM_NAMES = CandidateNames("GEMM", "gemm:", listed_by="--allow-bf16 --dry-run --json FILE")


def check_gemm_options(selection: Selection, options: Options) -> None:
    """Refuses patterns for GEMMs where none are looked for, and those of ``--explain``, before the model is read.

    Raises:
        ArgumentError: naming the option and the pattern.
    """
    for pattern in selection.explain:
        raise ArgumentError(
            f"--explain {GEMM_NAMES.prefix + pattern!r} names a {GEMM_NAMES.kind}, and these have one reason each: "
            f"{GEMM_NAMES.listed_by} has it under attention_precision.gemms"
        )
    if not options.allow_bf16:
        selection.refuse_all("--allow-bf16 alone looks for them")


def reasons_left_out(selection: Selection | None, names: Sequence[str]) -> list[str]:
    """For each GEMM why the user leaves it out; empty where nothing is said against it.

    Args:
        selection: of the options; None: there is none.
        names: of all GEMMs of a model, in the order of their numbers.

    Raises:
        ArgumentError: when a pattern names none of them.
    """
    if selection is None:
        return [""] * len(names)
    candidates = [NamedCandidate(name, i) for i, name in enumerate(names)]
    selection.check(candidates)
    return [selection.reason_left_out(candidate) for candidate in candidates]
