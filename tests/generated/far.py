# SPDX-License-Identifier: Apache-2.0
"""Masks as large as real ones: windows and blocks of hundreds, judged where all of them end.

Only the mask's nodes run, and nothing but lifting is judged: the check by execution, which would look at such lengths itself,
is left out. What is wrong only far from the diagonal, or behind the largest constant, shows here.
"""

from __future__ import annotations

import random
from dataclasses import replace

import onnx

from stof.attention.expand.expanders import make_working_copy
from stof.attention.find import find_sites
from stof.errors import UnsupportedError
from stof.mask.lift import lift
from stof.symbolic import Symbolic

from .attention import Case
from .expr import Expr, Mask, evaluate, num
from .families import FAMILIES, draw
from .judge import Fault, Verdict, check_lifted, check_terms, computed, feeds_of, session, values_of, with_terms
from .schedule import Plan, Spec, reads_heads, spec, without_padq
from .styles import STYLES

_FORMS = ("4-D, Mul", "Where keeps", "Where drops", "scores - mask", "[B*H, S, T]", "cross", "past")
_ROWS = 64  # queries at the end of the keys, where there is a past
_SHORTEST, _LONGEST = 300, 1200
_FACTORS = (90, 100, 117)


def far_plans(seed: int, count: int, first: int = 0) -> list[Plan]:
    """Every style and every family in turn, in pairs that differ from seed to seed."""
    rng = random.Random(f"{seed}/far")
    families = [f for f in FAMILIES if f != "arbitrary"]  # which is of one short length
    styles = list(STYLES)
    rng.shuffle(families)
    rng.shuffle(styles)
    found = []
    for number in range(first + count):
        style = styles[number % len(styles)]
        family = families[(number + number // len(styles)) % len(families)]
        found.append(Plan(seed, number, family, style, rng.choice(_FORMS)))
    return found[first:]


def far_spec(plan: Plan) -> Spec:
    """The case of a plan: its family's mask with constants some hundred times as large."""
    one = spec(plan)
    rng = random.Random(f"{plan.seed}/{plan.number}/far")
    drawn = draw(plan.family, rng)
    factor = rng.choice(_FACTORS)
    expr = _stretched(drawn.expr, factor, rng)
    most = max((e.args[0] for e in expr.walk() if e.kind == "num"), default=0)
    length = min(max(most + 37, _SHORTEST), _LONGEST)
    mask = Mask(expr, drawn.tables, longest=length + 40)
    one = replace(one, heads=2 if reads_heads(mask) else one.heads)
    if one.form.lengths == "past":
        return replace(one, mask=mask, sizes={"S": _ROWS, "T": length, "P": length - _ROWS})
    if one.form.lengths == "cross":
        mask = replace(mask, expr=without_padq(mask))
        return replace(one, mask=mask, sizes={"S": length, "T": length + 19, "P": 0})
    return replace(one, mask=mask, sizes={"S": length, "T": length, "P": 0})


def _stretched(e: Expr, factor: int, rng: random.Random) -> Expr:
    """An expression of the same form with larger constants; 0 and 1 stay, and what remainders are compared with."""
    if e.kind == "num":
        value = e.args[0]
        return num(value if value in (0, 1) else value * factor + rng.randint(0, 9))
    if e.kind == "mod":
        return Expr("mod", (_stretched(e.args[0], factor, rng), num(e.args[1].args[0] * 7 + rng.randint(0, 5))))
    if e.kind == "div":
        return Expr("div", (e.args[0], num(e.args[1].args[0] * factor)))
    if e.kind in ("itable", "btable"):  # tables are short: one entry for many positions
        name, *places = e.args
        wide = [Expr("div", (p, num(factor))) if p.kind in ("q", "k") else _stretched(p, factor, rng) for p in places]
        return Expr(e.kind, (name, *wide))
    return Expr(e.kind, tuple(_stretched(a, factor, rng) if isinstance(a, Expr) else a for a in e.args))


def judge_far(one: Spec) -> Verdict:
    """Lifts a case and compares with the graph's mask, run once.

    Raises:
        Fault: the lifted mask is another.
        GeneratorFault: the case is not what was drawn.
    """
    verdict = Verdict()
    case = one.case()
    rng = random.Random(f"{one.plan.seed}/{one.plan.number}/values")
    working = make_working_copy(case.model)
    symbolic = Symbolic(working.model)
    sites, findings = find_sites(working.model, symbolic, working.materialized)
    sizes = {"B": 1, "H": case.heads, **one.sizes}
    feeds = feeds_of(case, sizes, one.plan.number % 3, rng)
    drawn = evaluate(one.mask, values_of(case, sizes, feeds))
    model = _mask_alone(case)
    wanted = {i.name for i in model.graph.input}
    names = [name for name, _ in case.terms]
    check_terms(case, drawn, session(model).run(names, {n: x for n, x in feeds.items() if n in wanted}))
    if not sites:
        verdict.reason = findings[0].reason if findings else ""
        if not verdict.reason:
            raise Fault("no finding", "the softmax was neither matched nor reported")
        return verdict
    try:
        mask = lift(symbolic, sites[0])
    except UnsupportedError as error:
        verdict.reason = str(error)
        return verdict
    past = sizes["P"] if sites[0].query_offset else 0
    check_lifted(mask, drawn, {**sizes, "P": past}, {**feeds, **computed(case, mask, feeds)})
    verdict.lifted = mask.expression.text
    verdict.lengths.append((sizes["S"], sizes["T"], sizes["P"]))
    if mask.bias and mask.expression.allows_all:
        verdict.reason = f"bias: {'; '.join(map(str, mask.notes))}"
    return verdict


def _mask_alone(case: Case) -> onnx.ModelProto:
    """The model without what its mask does not need."""
    model = with_terms(case)
    graph = model.graph
    needed = {name for name, _ in case.terms}
    kept = []
    for node in reversed(graph.node):
        if needed & set(node.output):
            kept.insert(0, node)
            needed |= set(node.input)
    names = {name for name, _ in case.terms}
    outputs = [o for o in graph.output if o.name in names]
    for field, items in (("node", kept), ("output", outputs)):
        copies = [type(i).FromString(i.SerializeToString()) for i in items]
        del getattr(graph, field)[:]
        getattr(graph, field).extend(copies)
    for field in ("input", "initializer"):
        items = [i for i in getattr(graph, field) if i.name in needed]
        copies = [type(i).FromString(i.SerializeToString()) for i in items]
        del getattr(graph, field)[:]
        getattr(graph, field).extend(copies)
    return model
