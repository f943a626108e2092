# SPDX-License-Identifier: Apache-2.0
"""The sizes, paddings and numbers of keys at which a mask is compared with its graph."""

from __future__ import annotations

from collections.abc import Iterable

from stof.execution.case import Case, Counts, Padding
from stof.mask.site import AttentionSite, LiftedMask
from stof.symbolic import Symbolic

_LONGEST = 1200
_LARGEST = 4200  # windows up to here are run once above their length, at batch 1: [S, S] of int64 is 140 MB then
_SHORT = (3, 5, 10, 13)
_STORED = 40  # the length at which a stored mask is compared


def choose_lengths(numbers: Iterable[int]) -> list[int]:
    """Lengths that show a mask of these constants: below, at and above them, odd ones among them."""
    most = max((n for n in numbers if 0 < n <= _LONGEST), default=16)
    return sorted({2, 7, most, most + 1, min(_LONGEST, most + most // 2 + 3)})


def constants_of(symbolic: Symbolic, tensors: Iterable[str]) -> set[int]:
    """The whole numbers among tensors that are constants."""
    constants: set[int] = set()
    for name in tensors:
        array = symbolic.constant(name)
        if array is not None and array.size == 1 and array.dtype.kind in "iuf":
            value = float(array.reshape(-1)[0])
            if 0 < abs(value) <= _LARGEST and value == int(value):
                constants.add(abs(int(value)))
        elif array is not None and array.ndim > 1 and array.shape[-1] > 1:
            constants.add(min(int(array.shape[-1]), _STORED))  # its windows are no numbers of the graph
    return constants


def cases_of_lengths(site: AttentionSite, mask: LiftedMask, chosen: list[int], numbers: Iterable[int]) -> list[Case]:
    """Cases of the chosen lengths, padded on either side or not at all. Longer windows get a case above their length."""
    batch = 2 if site.row_guard is None else 3  # the third row is padded to one key, which the guard zeroes
    cases = [
        Case(batch, length, (Padding.NONE, Padding.LEFT, Padding.RIGHT)[number % 3])
        for number, length in enumerate(chosen)
    ]
    if mask.operands:  # its last row is all padding
        cases.append(Case(4, chosen[1], Padding.RIGHT))
    return cases + [Case(1, n + 2, Padding.NONE) for n in sorted(numbers) if _LONGEST < n <= _LARGEST]


def short_cases(chosen: list[int]) -> list[Case]:
    """Cases of other lengths, for masks that do not run at the chosen ones.

    A mask that is cut out of a stored table runs up to the table's length, so that only short inputs show it. One that is put
    together from pieces runs from the length of the pieces on.
    """
    return [Case(2, length, Padding.RIGHT) for length in _SHORT if length not in chosen]


def cases_of_cross_attention(site: AttentionSite, length: int) -> list[Case]:
    """Cases of cross-attention with more and with fewer queries than keys; none where one length gives the other."""
    rows, columns = (d.atom for d in site.dims[2:])
    if rows is None or columns is None or rows == columns or {rows.kind, columns.kind} != {"size"}:
        return []
    name = str(rows.args[0])
    return [Case(2, length, Padding.RIGHT, ((name, n),)) for n in (2 * length + 5, max(1, length // 2))]


def cases_without_past(site: AttentionSite, length: int) -> list[Case]:
    """A case without a past, where the past has a size of its own."""
    rows, columns = site.dims[2:]
    names = {str(a.args[0]) for a in (columns - rows).atoms() if a.kind == "size"}
    names -= {str(a.args[0]) for a in rows.atoms() if a.kind == "size"}
    return [Case(2, length, Padding.LEFT, tuple((n, 0) for n in sorted(names)))] if site.query_offset and names else []


def cases_of_counts(mask: LiftedMask, batch: int, lengths: Iterable[int]) -> list[Case]:
    """Cases of numbers of keys beyond 1 to all, and of flags that are off; none where the mask reads no such input."""
    if not any(o.role == "lengths" for o in mask.operands):
        return []
    kinds = (Counts.NONE, Counts.NEGATIVE, Counts.BEYOND)
    sides = (Padding.LEFT, Padding.RIGHT)
    return [Case(batch, n, side, counts=kind) for n in lengths for kind in kinds for side in sides]
