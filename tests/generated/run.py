# SPDX-License-Identifier: Apache-2.0
"""Runs many cases on a few processes and counts what became of them."""

from __future__ import annotations

import multiprocessing
import random
import re
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice

import onnx.printer

from .families import FAMILIES
from .far import far_plans, far_spec, judge_far
from .forms import FORMS
from .judge import Fault, Verdict, judge
from .schedule import Plan, Spec, plans, spec
from .shrink import shrink
from .styles import STYLES

BODY, OPTIMIZE = 5, 7  # every so many cases the function body runs, or ONNX Runtime's optimizer


@dataclass(frozen=True)
class Outcome:
    """One case: a verdict or a fault."""

    plan: Plan
    verdict: Verdict | None
    fault: str = ""
    seconds: float = 0.0


@dataclass
class Result:
    """All cases of a run."""

    seed: int
    outcomes: list[Outcome] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def faults(self) -> list[Outcome]:
        """The cases in which stof is wrong."""
        return [o for o in self.outcomes if o.fault]

    @property
    def lifted(self) -> list[Outcome]:
        """The cases with an expression that is not empty."""
        return [o for o in self.outcomes if o.verdict is not None and o.verdict.lifted]

    @property
    def refused(self) -> list[Outcome]:
        """The cases that were left alone."""
        return [o for o in self.outcomes if o.verdict is not None and o.verdict.lifted is None]

    @property
    def caught(self) -> list[Outcome]:
        """The cases of a lifted mask that the check by execution had to catch."""
        return [o for o in self.refused if o.verdict is not None and o.verdict.caught]

    @property
    def trivial(self) -> list[Outcome]:
        """The cases that were replaced, but with the mask as a bias."""
        return [o for o in self.outcomes if o.verdict is not None and o.verdict.lifted == ""]


def try_spec(one: Spec) -> Verdict:
    """Builds and judges a case.

    Raises:
        Fault: stof is wrong.
    """
    rng = random.Random(f"{one.plan.seed}/{one.plan.number}/values")
    body = one.plan.number % BODY == 0
    return judge(one.case(), one.mask, rng, body=body, optimize=one.plan.number % OPTIMIZE == 0)


def run_one(plan: Plan) -> Outcome:
    """One case; a failing one is made smaller and told as ONNX text."""
    return _outcome(spec(plan), try_spec, "")


def run_far_one(plan: Plan) -> Outcome:
    """The same for a case with large constants."""
    return _outcome(far_spec(plan), judge_far, "--far 1")


def _outcome(one: Spec, judged: Callable[[Spec], Verdict], how: str) -> Outcome:
    start = time.monotonic()
    try:
        verdict = judged(one)
    except Exception as error:
        return Outcome(one.plan, None, _told(one, error, judged, how), time.monotonic() - start)
    return Outcome(one.plan, verdict, "", time.monotonic() - start)


def _told(one: Spec, error: Exception, judged: Callable[[Spec], Verdict], how: str) -> str:
    small, last = shrink(one, error, judged)
    words = str(last) if isinstance(last, Fault) else "".join(traceback.format_exception(last)[-4:])
    plan = one.plan
    try:
        text = onnx.printer.to_text(small.case().model)
    except Exception as broken:
        text = f"(no model: {broken})"
    return (
        f"{words}\nfamily {plan.family!r}, style {plan.style!r}, form {plan.form!r}\n"
        f"mask {one.mask.expr}; made smaller: {small.mask.expr}, fill {small.fill}, {small.form}\n"
        f"repeat: python -m tests.generated --seed {plan.seed} --first {plan.number} {how or '--cases 1'}\n{text}"
    )


def run_cases(seed: int, count: int, *, first: int = 0, minutes: float | None = None, workers: int = 2) -> Result:
    """Runs ``count`` cases; with ``minutes``, as many as go into that time."""
    result = Result(seed)
    start = time.monotonic()

    def todo() -> Iterator[Plan]:
        for plan in islice(plans(seed), first, None if minutes else first + count):
            if minutes and time.monotonic() - start > 60 * minutes:
                return
            yield plan

    if workers <= 1:
        result.outcomes = [run_one(p) for p in todo()]
    else:
        with multiprocessing.get_context("spawn").Pool(workers) as pool:
            if minutes:  # in batches: a pool takes all that it can get at once
                source = todo()
                while batch := list(islice(source, 64 * workers)):
                    result.outcomes += pool.map(run_one, batch, chunksize=4)
            else:
                result.outcomes = list(pool.imap(run_one, todo(), chunksize=8))
    result.seconds = time.monotonic() - start
    return result


def run_far(seed: int, count: int, *, first: int = 0, workers: int = 2) -> Result:
    """Runs ``count`` cases with large constants."""
    result = Result(seed)
    start = time.monotonic()
    todo = far_plans(seed, count, first)
    if workers <= 1:
        result.outcomes = [run_far_one(p) for p in todo]
    else:
        with multiprocessing.get_context("spawn").Pool(workers) as pool:
            result.outcomes = list(pool.imap(run_far_one, todo, chunksize=4))
    result.seconds = time.monotonic() - start
    return result


def far_report(result: Result) -> str:
    """Counts by family, what was refused, and the faults."""
    lengths = [n for o in result.outcomes if o.verdict is not None for n, _, _ in o.verdict.lengths]
    lines = [
        f"far: {len(result.outcomes)} cases in {result.seconds:.0f} s, judged at lengths up to {max(lengths, default=0)}, "
        f"{len(result.lifted)} lifted, {len(result.trivial)} left as a bias, {len(result.refused)} refused, "
        f"{len(result.faults)} faults"
    ]
    for name in dict.fromkeys(o.plan.family for o in result.outcomes):
        some = [
            sum(o.plan.family == name for o in x)
            for x in (result.outcomes, result.lifted, result.trivial, result.refused)
        ]
        lines.append("  {:22} {:5} {:6} {:4} {:7}".format(name, *some))
    told = Counter(_general(o.verdict.reason) for o in result.refused + result.trivial if o.verdict is not None)
    lines += [f"{n:5} × {words}" for words, n in told.most_common(10)]
    lines += [f"---- fault\n{o.fault}" for o in result.faults[:5]]
    return "\n".join(lines)


def report(result: Result, *, reasons: int = 25) -> str:
    """Counts by family, style and form, the reasons of what was refused, and the faults."""
    lines = [
        f"seed {result.seed}: {len(result.outcomes)} cases in {result.seconds:.0f} s, {len(result.lifted)} lifted, "
        f"{len(result.trivial)} left as a bias, {len(result.refused)} refused, {len(result.faults)} faults"
    ]
    kinds = (result.lifted, result.trivial, result.refused)
    for title, names in (("family", FAMILIES), ("style", STYLES), ("form", FORMS)):
        lines.append(f"{title:24} cases lifted bias refused")
        for name in names:
            own = sum(getattr(o.plan, title) == name for o in result.outcomes)
            lifted, bias, refused = (sum(getattr(o.plan, title) == name for o in some) for some in kinds)
            lines.append(f"  {name:22} {own:5} {lifted:6} {bias:4} {refused:7}")
    pairs = [
        {(o.plan.family, o.plan.style) for o in result.outcomes},
        {(o.plan.style, o.plan.form) for o in result.outcomes},
    ]
    lines.append(
        f"pairs drawn: family and style {len(pairs[0])} of {len(FAMILIES) * len(STYLES)}, "
        f"style and form {len(pairs[1])} of {len(STYLES) * len(FORMS)}"
    )
    told: Counter[str] = Counter()
    example: dict[str, Plan] = {}
    for o in result.refused + result.trivial:
        assert o.verdict is not None
        words = ("caught: " if o.verdict.caught else "") + _general(o.verdict.reason)
        told[words] += 1
        example.setdefault(words, o.plan)
    lines += [f"{n:5} × {w}  ({example[w].number})" for w, n in told.most_common(reasons)]
    lines += [f"---- fault\n{o.fault}" for o in result.faults[:5]]
    if len(result.faults) > 5:
        lines += [f"{len(result.faults) - 5} more faults: " + ", ".join(str(o.plan.number) for o in result.faults[5:])]
        lines += [o.fault.splitlines()[0] for o in result.faults[5:40]]
    return "\n".join(lines)


def _general(reason: str) -> str:
    """A reason without names and numbers."""
    return re.sub(r"\d+", "#", re.sub(r"'[^']*'", "'…'", reason))[:160]
