# SPDX-License-Identifier: Apache-2.0
"""The specifications of docs/guide/sparsify.md are legal; tests/guide runs its commands."""

from __future__ import annotations

import re
from pathlib import Path

from stof.sparsify.spec import parse_spec

GUIDE = (Path(__file__).resolve().parents[2] / "docs/guide/sparsify.md").read_text()


def test_specifications_are_legal() -> None:
    """Those with numbers; letters stand for numbers in a table."""
    found = re.findall(r"`((?:s2:|window=|mask=)[^`]*)`", GUIDE)
    specs = [re.sub(r"=[LVWN]\b", "=9", spec) for spec in found]
    assert len(specs) >= 4
    for spec in specs:
        parse_spec(spec)
