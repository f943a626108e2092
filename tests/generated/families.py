# SPDX-License-Identifier: Apache-2.0
"""Mask families: each draws an expression with small constants, in one of the ways in which people write it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from .expr import PADK, PADQ, Expr, H, K, Mask, Q, make

LONGEST = 64  # lengths up to here are drawn; tables of masks of any length reach so far


def _causal_text(rng: random.Random) -> Expr:
    return rng.choice(
        [
            make("le", K, Q),
            make("ge", Q, K),
            make("lt", K, make("add", Q, 1)),
            make("not", make("gt", K, Q)),
            make("ge", make("sub", Q, K), 0),
            make("not", make("lt", Q, K)),
            make("le", make("sub", K, Q), 0),
        ]
    )


def _left(rng: random.Random, width: int) -> Expr:
    """Q - k <= width."""
    return rng.choice(
        [
            make("le", make("sub", Q, K), width),
            make("lt", make("sub", Q, K), width + 1),
            make("gt", K, make("sub", Q, width + 1)),
            make("ge", make("add", K, width), Q),
            make("not", make("gt", make("sub", Q, K), width)),
        ]
    )


def _right(rng: random.Random, width: int) -> Expr:
    """K - q <= width."""
    return rng.choice(
        [
            make("le", make("sub", K, Q), width),
            make("lt", K, make("add", Q, width + 1)),
            make("not", make("ge", make("sub", K, Q), width + 1)),
            make("ge", make("sub", Q, K), -width),
        ]
    )


def _near(rng: random.Random, width: int) -> Expr:
    return rng.choice(
        [
            make("le", make("abs", make("sub", Q, K)), width),
            make("lt", make("abs", make("sub", K, Q)), width + 1),
            make("not", make("gt", make("abs", make("sub", Q, K)), width)),
            make("and", _left(rng, width), _right(rng, width)),
        ]
    )


def _joined(rng: random.Random, kind: str, *parts: Expr) -> Expr:
    order = list(parts)
    rng.shuffle(order)
    return make(kind, *order)


def causal(rng: random.Random) -> Mask:
    return Mask(_causal_text(rng))


def window(rng: random.Random) -> Mask:
    return Mask(_near(rng, rng.randint(1, 6)))


def window_uneven(rng: random.Random) -> Mask:
    return Mask(_joined(rng, "and", _left(rng, rng.randint(0, 6)), _right(rng, rng.randint(1, 7))))


def window_one_sided(rng: random.Random) -> Mask:
    return Mask(_left(rng, rng.randint(0, 6)) if rng.random() < 0.5 else _right(rng, rng.randint(1, 6)))


def window_causal(rng: random.Random) -> Mask:
    return Mask(_joined(rng, "and", _causal_text(rng), _left(rng, rng.randint(1, 6))))


def dilated(rng: random.Random) -> Mask:
    step, width = rng.randint(2, 3), rng.randint(1, 4)
    distance = make("sub", Q, K) if rng.random() < 0.5 else make("abs", make("sub", Q, K))
    parts = [make("eq", make("mod", distance, step), 0), _near(rng, width * step)]
    if rng.random() < 0.4:
        parts.append(_causal_text(rng))
    return Mask(_joined(rng, "and", *parts))


def global_local(rng: random.Random) -> Mask:
    parts = [_near(rng, rng.randint(1, 5))]
    tables: dict[str, np.ndarray] = {}
    if rng.random() < 0.6:
        count = rng.randint(1, 3)
        parts += [make("lt", K, count), make("lt", Q, count)]
    else:
        chosen = np.zeros(LONGEST, bool)
        chosen[rng.sample(range(12), 3)] = True
        tables["tokens"] = chosen
        parts += [make("btable", "tokens", K), make("btable", "tokens", Q)]
    expr = _joined(rng, "or", *parts)
    if rng.random() < 0.25:
        expr = _joined(rng, "and", expr, _causal_text(rng))
    return Mask(expr, tables)


def bigbird(rng: random.Random) -> Mask:
    block = rng.choice([2, 3, 4])
    count = -(-LONGEST // block)
    heads = rng.random() < 0.3
    draw = np.random.default_rng(rng.getrandbits(32))
    table = draw.random((2, count, count) if heads else (count, count)) < 0.2
    rows, columns = make("div", Q, block), make("div", K, block)
    look = make("btable", "blocks", *([H] if heads else []), rows, columns)
    near = make("le", make("abs", make("sub", rows, columns)), 1)
    parts = [look, near, make("eq", rows, 0), make("lt", columns, 1)]
    return Mask(_joined(rng, "or", *parts), {"blocks": table})


def strided(rng: random.Random) -> Mask:
    """S2: local, and a vertical stride whose offset is the head's."""
    step = rng.randint(2, 4)
    stripe = rng.choice(
        [make("eq", make("mod", make("add", K, H), step), 0), make("eq", make("mod", K, step), make("mod", H, step))]
    )
    near = _left(rng, rng.randint(1, 4))
    return Mask(make("and", _causal_text(rng), _joined(rng, "or", near, stripe)))


def prefix(rng: random.Random) -> Mask:
    return Mask(_joined(rng, "or", _causal_text(rng), make("lt", K, rng.randint(1, 6))))


def documents(rng: random.Random) -> Mask:
    tables: dict[str, np.ndarray] = {}
    if rng.random() < 0.5:
        size = rng.randint(2, 6)
        same = make("eq", make("div", Q, size), make("div", K, size))
    else:
        draw = np.random.default_rng(rng.getrandbits(32))
        tables["ids"] = np.cumsum(draw.random(LONGEST) < 0.25)
        same = make("eq", make("itable", "ids", Q), make("itable", "ids", K))
    return Mask(_joined(rng, "and", same, _causal_text(rng)) if rng.random() < 0.5 else same, tables)


def segments(rng: random.Random) -> Mask:
    same = make("eq", Expr("segq"), Expr("segk"))
    return Mask(_joined(rng, "and", same, _causal_text(rng)) if rng.random() < 0.5 else same)


def lengths(rng: random.Random) -> Mask:
    """Numbers of keys, or of keys that all queries see, from an input."""
    count = Expr("len")
    valid = rng.choice([make("lt", K, count), make("gt", count, K), make("not", make("ge", K, count))])
    if rng.random() < 0.4:
        return Mask(_joined(rng, "or", valid, _causal_text(rng)))
    return Mask(_joined(rng, "and", valid, _near(rng, rng.randint(1, 5))) if rng.random() < 0.5 else valid)


def block_table(rng: random.Random) -> Mask:
    block = rng.choice([2, 3, 5])
    count = -(-LONGEST // block)
    draw = np.random.default_rng(rng.getrandbits(32))
    table = (draw.random((count, count)) < 0.4) | np.eye(count, dtype=bool)
    return Mask(make("btable", "blocks", make("div", Q, block), make("div", K, block)), {"blocks": table})


def arbitrary(rng: random.Random) -> Mask:
    length = rng.randint(6, 17)
    draw = np.random.default_rng(rng.getrandbits(32))
    heads = rng.random() < 0.25
    table = draw.random((2, length, length) if heads else (length, length)) < 0.5
    if rng.random() < 0.7:
        table |= np.eye(length, dtype=bool)
    return Mask(make("btable", "pairs", *([H] if heads else []), Q, K), {"pairs": table}, length=length)


def chunked(rng: random.Random) -> Mask:
    size = rng.randint(2, 6)
    same = rng.choice(
        [
            make("eq", make("div", Q, size), make("div", K, size)),
            make("ge", K, make("mul", make("div", Q, size), size)),
            make("ge", K, make("sub", Q, make("mod", Q, size))),
        ]
    )
    return Mask(_joined(rng, "and", same, _causal_text(rng)))


def anything(rng: random.Random) -> Mask:
    """And, Or and Not of conditions of the other families."""

    def leaf() -> Expr:
        return rng.choice(
            [
                lambda: _causal_text(rng),
                lambda: _near(rng, rng.randint(0, 5)),
                lambda: _left(rng, rng.randint(0, 5)),
                lambda: _right(rng, rng.randint(0, 5)),
                lambda: make("lt", K, rng.randint(1, 5)),
                lambda: make("ge", Q, rng.randint(1, 5)),
                lambda: make("eq", make("mod", K, rng.randint(2, 4)), rng.randint(0, 1)),
                lambda: make("ne", make("mod", make("add", Q, K), rng.randint(2, 3)), 0),
                lambda: make("eq", make("div", Q, 3), make("div", K, 3)),
                lambda: make("le", make("max", Q, K), rng.randint(2, 9)),
                lambda: make("gt", make("add", Q, K), rng.randint(1, 9)),
                lambda: make("eq", H, rng.randint(0, 1)),
            ]
        )()

    def tree(depth: int) -> Expr:
        if depth == 0 or rng.random() < 0.2:
            return leaf()
        if rng.random() < 0.2:
            return make("not", tree(depth - 1))
        return make(rng.choice(["and", "or"]), *(tree(depth - 1) for _ in range(rng.randint(2, 3))))

    return Mask(tree(rng.randint(1, 3)))


def image(rng: random.Random) -> Mask:
    """Neighbours in an image whose rows follow each other, or its rows and columns."""
    width = rng.randint(3, 5)
    parts = []
    for kind in ("div", "mod"):
        distance = make("sub", make(kind, Q, width), make(kind, K, width))
        near = rng.randint(0, 1)
        parts.append(make("le", make("abs", distance), near) if near else make("eq", distance, 0))
    return Mask(_joined(rng, rng.choice(["and", "or"]), *parts))


def squared(rng: random.Random) -> Mask:
    """A window by the square of the distance."""
    distance = make("sub", Q, K) if rng.random() < 0.5 else make("sub", K, Q)
    near = make("lt", make("mul", distance, distance), rng.randint(2, 40))
    return Mask(_joined(rng, "and", near, _causal_text(rng)) if rng.random() < 0.5 else near)


FAMILIES: dict[str, Callable[[random.Random], Mask]] = {
    "causal": causal,
    "window": window,
    "window, uneven": window_uneven,
    "window, one side": window_one_sided,
    "window, causal": window_causal,
    "dilated": dilated,
    "global + local": global_local,
    "BigBird": bigbird,
    "S2 stride": strided,
    "prefix": prefix,
    "documents": documents,
    "segment ids": segments,
    "lengths": lengths,
    "block table": block_table,
    "arbitrary": arbitrary,
    "chunked": chunked,
    "image": image,
    "window, squared": squared,
    "and/or/not": anything,
}


def draw(family: str, rng: random.Random) -> Mask:
    """A mask of a family, with or without padding of keys, seldom also of queries."""
    mask = FAMILIES[family](rng)
    kind = rng.random()
    if kind < 0.5:
        return mask
    if family == "and/or/not" and kind < 0.7:
        return replace(mask, expr=make("or", make("and", mask.expr, PADK), make("eq", Q, K)))
    pads = [PADK] if kind < 0.95 else [PADQ, PADK]
    return replace(mask, expr=_joined(rng, "and", mask.expr, *pads))
