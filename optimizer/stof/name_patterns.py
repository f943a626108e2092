# SPDX-License-Identifier: Apache-2.0
"""Patterns by which options name candidates: ``--only``, ``--skip`` and ``--explain``."""

from __future__ import annotations

from fnmatch import fnmatchcase


def matches(pattern: str, name: str, index: int | None) -> bool:
    """Whether a pattern names a candidate: by its name, its number, or a shell pattern over either."""
    labels = [name] if index is None else [name, str(index)]
    return pattern in labels or any(fnmatchcase(label, pattern) for label in labels)
