# SPDX-License-Identifier: Apache-2.0
"""Names of the mask families, recognized over the canonical expression, for the report."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

_SYMMETRIC = re.compile(r"abs\(q - k\) <= (\d+)")
_LEFT = re.compile(r"q - k <= (\d+)")
_RIGHT = re.compile(r"k - q <= (\d+)")
_PICTURE = 16


def window(expression: str) -> tuple[int, int] | None:
    """(left_window_size, right_window_size) in the terms of ONNX Attention-25, -1 for unbounded; None if no window."""
    parts = [p for p in expression.split(" and ") if not p.startswith("pad[")]
    if not parts:
        return (-1, -1)
    left = right = -1
    for part in parts:
        if match := _SYMMETRIC.fullmatch(part):
            left = right = int(match[1])
        elif match := _LEFT.fullmatch(part):
            left = int(match[1])
        elif match := _RIGHT.fullmatch(part):
            right = int(match[1])
        elif part == "k <= q":
            right = 0
        elif part == "q <= k":
            left = 0
        elif part == "q == k":
            left = right = 0
        else:
            return None
    return (left, right)


def describe(expression: str) -> str:
    """The family's name: "dense", "causal", "window(64, 64)", "causal window(511, 0)", "table", "general"."""
    padded = " + padding" if re.search(r"(^|and )pad\[b, k\]", expression) else ""
    found = window(expression) if " or " not in expression else None
    if expression == "" or found == (-1, -1):
        return "dense" + padded
    if found is not None:
        if found == (-1, 0):
            return "causal" + padded
        return f"{'causal ' if found[1] == 0 else ''}window({found[0]}, {found[1]})" + padded
    if "segment_" in expression:
        return "documents" + padded
    if "table" in expression:
        return "table" + padded
    if "abs(q - k)" in expression and re.search(r"\b[qk] <= \d", expression):
        return "window + global" + padded
    return "general" + padded


def picture(expression: str, tables: Mapping[str, np.ndarray] | None = None, length: int = 0) -> list[str]:
    """A small picture of the mask, one text line per row of tiles; padding is left out.

    ``#`` is a tile of which every pair may attend, ``+`` some, ``.`` none. ``length`` is S = T; by default one that shows
    a window at its proportions.
    """
    from stof.runtime.library import Mask

    shown = " and ".join(p for p in expression.split(" and ") if not p.startswith(("pad[", "not pad["))) or "True"
    numbers = [int(n) for n in re.findall(r"\d+", shown)]
    length = length or min(4096, max(64, 4 * max(numbers, default=16)))
    mask = Mask(shown, tables)
    step = -(-length // _PICTURE)
    rows = []
    allowed = mask.evaluate(1, 1, length, length)[0, 0]
    for i in range(0, length, step):
        row = [allowed[i : i + step, j : j + step] for j in range(0, length, step)]
        rows.append("".join("#" if t.all() else "+" if t.any() else "." for t in row))
    return rows
