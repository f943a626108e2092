# SPDX-License-Identifier: Apache-2.0
"""Which cases are drawn: every pair (family, style) and (style, form) first, then any; seed and number give a case."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from .attention import LOWEST, Case, build
from .expr import PADK, PADQ, H, Mask, make
from .families import FAMILIES, draw
from .forms import FORMS, Form, legal, vary
from .styles import STYLES, Style


@dataclass(frozen=True)
class Plan:
    """One case to be drawn."""

    seed: int
    number: int
    family: str
    style: str
    form: str

    @property
    def rng(self) -> random.Random:
        """The case's own numbers."""
        return random.Random(f"{self.seed}/{self.number}")


def plans(seed: int) -> Iterator[Plan]:
    """Endless. The first ones cover the pairs; a style occurs about as often as any other."""
    rng = random.Random(seed)
    first = [(f, s) for f in FAMILIES for s in STYLES]
    second = [(s, f) for s in STYLES for f in FORMS]
    rng.shuffle(first)
    rng.shuffle(second)
    by_style: dict[str, list[str]] = {s: [] for s in STYLES}
    for style, form in second:
        by_style[style].append(form)
    number = 0
    for family, style in first:
        form = by_style[style].pop() if by_style[style] else rng.choice(list(FORMS))
        yield Plan(seed, number, family, style, form)
        number += 1
    for style, forms in by_style.items():
        for form in forms:
            yield Plan(seed, number, rng.choice(list(FAMILIES)), style, form)
            number += 1
    while True:
        yield Plan(seed, number, *(rng.choice(list(x)) for x in (FAMILIES, STYLES, FORMS)))
        number += 1


@dataclass(frozen=True)
class Spec:
    """Everything that makes a case, so that it can be made smaller piece by piece."""

    plan: Plan
    mask: Mask
    style: Style
    form: Form
    opset: int
    heads: int
    sizes: dict[str, int]
    fill: float
    pad_kind: str
    plain: bool = False

    def case(self) -> Case:
        """The model."""
        rng = random.Random(f"{self.plan.seed}/{self.plan.number}/nodes")
        return build(
            rng, self.mask, self.style, legal(self.form, self.mask, self.style), opset=self.opset, heads=self.heads,
            sizes=self.sizes, fill=self.fill, pad_kind=self.pad_kind, plain=self.plain,
        )  # fmt: skip


def spec(plan: Plan) -> Spec:
    """The case of a plan."""
    rng = plan.rng
    mask, style = draw(plan.family, rng), STYLES[plan.style]
    form = legal(vary(FORMS[plan.form], rng), mask, style)
    if form.lengths == "cross":
        mask = replace(mask, expr=without_padq(mask))
    S = mask.length or rng.randint(3, 16)
    P = rng.randint(1, 6) if form.lengths == "past" else 0
    T = rng.randint(3, 16) if form.lengths == "cross" else P + S
    lowest = LOWEST[10 if form.half and not form.widened else 1]
    fills = [lowest, lowest, float("-inf"), -1e4 if form.half else -1e9, -1e4]
    if form.apply in ("keep", "drop") or form.node == "bool":
        fills = [lowest, float("-inf")]
    if form.apply == "multiply":
        fills = [float("-inf"), float("-inf"), -1e4]
    if form.guard == "nan":
        fills = [float("-inf")]
    if form.apply == "guarded":
        fills = [lowest, float("-inf")]
    return Spec(
        plan,
        mask,
        style,
        form,
        opset=23 if form.node in ("bool", "float") else rng.randint(14, 23),
        heads=2 if reads_heads(mask) else rng.choice([2, 4]),
        sizes={"S": S, "T": T, "P": P},
        fill=rng.choice(fills),
        pad_kind=rng.choice(["i", "i", "i", "b", "b", "f"]),
    )


def reads_heads(mask: Mask) -> bool:
    return any(a == H for e in mask.expr.walk() if e.kind == "btable" for a in e.args)


def without_padq(mask: Mask):  # type: ignore[no-untyped-def]
    """Queries of another sequence have no padding of their own here."""
    expr = mask.expr
    if expr.kind == "and" and PADQ in expr.args:
        rest = [a for a in expr.args if a != PADQ]
        return make("and", *rest) if len(rest) > 1 else rest[0]
    return expr


__all__ = ["PADK", "Plan", "Spec", "plans", "reads_heads", "spec", "without_padq"]
