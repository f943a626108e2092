# SPDX-License-Identifier: Apache-2.0
"""The part of the generated tests that CI runs; ``python -m tests.generated`` runs any other."""

from __future__ import annotations

import os

from .families import FAMILIES
from .forms import FORMS
from .run import far_report, report, run_cases, run_far
from .styles import STYLES

CASES = 2000
FAR = 512
SEED = int(os.environ.get("STOF_GENERATED_SEED", "20250"))


def test_drawn_masks_are_lifted_and_computed_exactly() -> None:
    result = run_cases(SEED, CASES)
    text = report(result)
    print(text)
    assert not result.faults, text
    assert len(result.outcomes) == CASES
    assert {(o.plan.family, o.plan.style) for o in result.outcomes} >= {(f, s) for f in FAMILIES for s in STYLES}
    assert {(o.plan.style, o.plan.form) for o in result.outcomes} >= {(s, f) for s in STYLES for f in FORMS}
    # A mask that the check by execution had to catch was lifted wrongly.
    assert not result.caught, text
    assert len(result.lifted) > 0.85 * CASES, text
    for names, which in ((FAMILIES, "family"), (STYLES, "style"), (FORMS, "form")):
        for name in names:
            own = [o for o in result.outcomes if getattr(o.plan, which) == name]
            lifted = sum(getattr(o.plan, which) == name for o in result.lifted)
            assert lifted > len(own) / 2, f"of {which} {name!r} only {lifted} of {len(own)} are lifted\n{text}"


def test_masks_of_hundreds_of_positions_are_lifted_exactly() -> None:
    result = run_far(SEED, FAR)
    text = far_report(result)
    print(text)
    assert not result.faults, text
    assert {o.plan.style for o in result.outcomes} == set(STYLES)
    assert {o.plan.family for o in result.outcomes} == set(FAMILIES) - {"arbitrary"}
    assert len(result.lifted) > 0.85 * FAR, text
