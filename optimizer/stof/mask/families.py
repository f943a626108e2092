# SPDX-License-Identifier: Apache-2.0
"""Names and pictures of masks, for the report."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from stof.mask.expression import PADDING, MaskExpression
from stof.mask.expression_nodes import Binary, Call, Constant, K, Q
from stof.runtime.library import Mask

_TILES = 16  # rows and columns of a picture
_DISTANCE = Call("abs", (Binary("-", Q, K),))


def describe(expression: MaskExpression) -> str:
    """The family's name: "dense", "causal", "window(64, 64)", "causal window(511, 0)", "table", "general"."""
    return _family(expression) + (" + padding" if PADDING.root in expression.conjuncts else "")


def _family(expression: MaskExpression) -> str:
    window = expression.window()
    if window == (-1, -1):
        return "dense"
    if window == (-1, 0):
        return "causal"
    if window is not None:
        return f"{'causal ' if window[1] == 0 else ''}window({window[0]}, {window[1]})"
    if expression.vectors & {"segment_q", "segment_k"}:
        return "documents"
    if expression.tables:
        return "table"
    if _DISTANCE in expression.nodes and _has_global_tokens(expression):
        return "window + global"
    return "general"


def _has_global_tokens(expression: MaskExpression) -> bool:
    """Whether the first queries or keys are compared with a constant."""
    return any(
        isinstance(n, Binary) and n.symbol == "<=" and n.left in (Q, K) and isinstance(n.right, Constant)
        for n in expression.nodes
    )


def picture(expression: MaskExpression, tables: Mapping[str, np.ndarray] | None = None, length: int = 0) -> list[str]:
    """A small picture of the mask, one text line per row of tiles; padding is left out.

    ``#`` is a tile of which every pair may attend, ``+`` some, ``.`` none. ``length`` is S = T; by default one that shows
    a window at its proportions.

    Raises:
        LibraryError: when the mask cannot be evaluated at this length, or reads run-time operands.
    """
    shown = expression.without_padding()
    length = length or min(4096, max(64, 4 * max(shown.literals, default=16)))
    step = -(-length // _TILES)
    rows = []
    allowed = Mask(shown.text, tables).evaluate(1, 1, length, length)[0, 0]
    for i in range(0, length, step):
        row = [allowed[i : i + step, j : j + step] for j in range(0, length, step)]
        rows.append("".join("#" if t.all() else "+" if t.any() else "." for t in row))
    return rows
