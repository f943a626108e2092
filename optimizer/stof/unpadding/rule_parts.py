# SPDX-License-Identifier: Apache-2.0
"""What rules of several operators share."""

from __future__ import annotations

from collections.abc import Callable

from stof.symbolic.algebra.terms import integer
from stof.unpadding.token_axes import Context, RowWise

Rule = Callable[[Context], RowWise | None]
_ONE = integer(1)


def rank_of(context: Context, i: int = 0) -> int | None:
    """The number of axes of an input; None: it is not known."""
    shape = context.shape(i)
    return None if shape is None else len(shape)


def along(context: Context, first: int | None, outputs: int = 1) -> RowWise | None:
    """Over axis ``first`` and all behind it, which must hold no tokens; further inputs are the same for all tokens."""
    own, rank = context.axes_of(0), rank_of(context)
    if own is None or rank is None or first is None or any(a >= first % rank for a in own.axes):
        return None
    if any(context.axes_of(i) is not None for i in range(1, len(context.node.input))):
        return None
    return RowWise((own, *(None for _ in range(outputs - 1))), {0: own})


def is_same_before(context: Context, i: int, behind: int) -> bool:
    """Whether an input is absent, or has a size other than 1 in its last ``behind`` axes alone."""
    shape = context.shape(i)
    if shape is None:
        return not context.has(i)
    return all(n == _ONE for n in shape[: max(0, len(shape) - behind)])
