# SPDX-License-Identifier: Apache-2.0
"""What an Einsum of ONNX Runtime copies: operands in other orders of axes, the product, and that in the result's order.

Each operand is brought into one order of all labels. Two operands become a batched matrix product: labels of both that stay
come first, then those of the left one, then those that are summed, then those of the right one. An axis of size 1 counts as
the right operand's, whatever it is called; so a batch of 1 moves axes, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from stof.graph.einsum import split_equation

Shape = tuple[int, ...]


def einsum_copies(equation: str, shapes: Sequence[Shape], result: Shape) -> list[int]:
    """Elements of each tensor that an Einsum makes besides its result, all alive at once.

    Args:
        equation: of explicit or implicit form; ellipses are taken for axes in place.
        shapes: of the operands.
        result: the result's shape.
    """
    operands, letters = split_equation(equation)
    terms = [_with_ellipsis(t, len(s)) for t, s in zip(operands, shapes, strict=False)]
    output = _implicit_output(terms) if letters is None else _with_ellipsis(letters, len(result))
    if len(terms) != len(shapes) or any(len(t) != len(s) for t, s in zip(terms, shapes, strict=True)):
        return []
    order = sorted(dict.fromkeys("".join(terms)), key=lambda c: (not c.isdigit(), "".join(terms).index(c)))
    sizes = [dict(zip(t, s, strict=True)) for t, s in zip(terms, shapes, strict=True)]
    copies = [
        math.prod(s)
        for t, s in zip(terms, shapes, strict=True)
        if [order.index(c) for c in t] != sorted(map(order.index, t))
    ]
    if len(terms) == 1:
        kept = [c for c in order if c in output]
        return [*copies, math.prod(result)] if "".join(kept) != output else copies
    product = sizes[0]
    for i, other in enumerate(sizes[1:], 2):
        needed = {*output, *"".join(terms[i:])}
        product, made = _product_copies(order, product, other, needed, output if i == len(terms) else "")
        copies += made
    return copies


def _product_copies(
    order: Sequence[str], left: dict[str, int], right: dict[str, int], needed: set[str], output: str
) -> tuple[dict[str, int], list[int]]:
    """The sizes of a product by label, and elements of what is made for it. ``output``: of the last product."""
    sizes = {c: (left.get(c, 1), right.get(c, 1)) for c in order}
    summed = [c for c in order if c not in needed]
    kept = [c for c in order if c in needed]
    shared = [c for c in kept if min(sizes[c]) > 1]
    of_left = [c for c in kept if sizes[c][0] > 1 and sizes[c][1] == 1]
    of_right = [c for c in kept if sizes[c][0] == 1]
    copies = []
    for labels, side in (
        ([*shared, *of_left, *summed, *of_right], left),
        ([*shared, *summed, *of_right, *of_left], right),
    ):
        if labels != list(order):
            copies.append(math.prod(side.values()))
    product = {c: max(sizes[c]) for c in kept}
    size = math.prod(product.values())
    copies.append(size)
    made = [c for c in (*shared, *of_left, *of_right) if not output or c in output]
    if made != (list(output) if output else kept):
        copies.append(size)
    return product, copies


def _with_ellipsis(term: str, rank: int) -> str:
    """A term whose ellipsis is digits, one for each of its axes."""
    count = rank - len(term.replace("...", ""))
    return term.replace("...", "".join(map(str, range(max(0, min(count, 9))))))


def _implicit_output(terms: Sequence[str]) -> str:
    letters = "".join(terms)
    return "".join(sorted(c for c in set(letters) if letters.count(c) == 1 or c.isdigit()))
