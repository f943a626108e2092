# SPDX-License-Identifier: Apache-2.0
"""The user's choice of candidates: ``--only``, ``--skip`` and ``--explain``, each for the op whose prefix it has, and plans."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from stof.errors import ArgumentError, ModelError
from stof.options import Options
from stof.plan import Plan, PlanEntry

EVERY_ATTENTION = "*"  # the pattern of ``--explain`` without one
_MOST_NAMES = 4  # that a message lists


@dataclass(frozen=True)
class CandidateNames:
    """How options and messages name the candidates of an op.

    Attributes:
        kind: what messages call a candidate, ``site`` for instance.
        prefix: what options write before a candidate's name or number. It ends with a colon; one op may have none.
        listed_by: the options that list all of them; empty: ``--explain`` with a pattern for all.
    """

    kind: str
    prefix: str = ""
    listed_by: str = ""


@dataclass(frozen=True)
class NamedCandidate:
    """What options may name: by its name or, where it has one, by its number."""

    name: str
    index: int | None = None

    def matches(self, pattern: str) -> bool:
        """Whether a pattern without prefix names it: by its name, its number, or a shell pattern over either."""
        labels = [self.name] if self.index is None else [self.name, str(self.index)]
        return pattern in labels or any(fnmatchcase(label, pattern) for label in labels)


@dataclass(frozen=True)
class Selection:
    """The patterns that options have for one op, without its prefix.

    Attributes:
        names: of the op's candidates.
        only: patterns of which one must match; none where all candidates may be replaced.
        skip: patterns of candidates that stay as they are.
        explain: patterns of candidates that the report explains.
        others: how the other ops' candidates are named.
    """

    names: CandidateNames
    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    explain: tuple[str, ...] = ()
    others: tuple[CandidateNames, ...] = ()

    def reason_left_out(self, candidate: NamedCandidate) -> str:
        """Why a candidate stays as it is; empty where the options say nothing against it."""
        if self.only and not any(candidate.matches(p) for p in self.only):
            return "not among --only"
        if any(candidate.matches(p) for p in self.skip):
            return "left out by --skip"
        return ""

    def check(self, candidates: Iterable[NamedCandidate]) -> None:
        """Refuses patterns that name no candidate: a misspelt ``--skip`` must not be lost.

        Raises:
            ArgumentError: naming the option and the candidates that there are.
        """
        named = list(candidates)
        for option, pattern in self._list_patterns():
            if not any(c.matches(pattern) for c in named):
                others = "".join(f"; {o.prefix}NAME names one {o.kind}" for o in self.others if o.prefix)
                raise ArgumentError(
                    f"{option} {self.names.prefix + pattern!r} names no {self.names.kind} of the model; "
                    f"{list_candidates(self.names, named)}{others}"
                )

    def refuse_all(self, reason: str) -> None:
        """Refuses every pattern, where the op looks for no candidates.

        Args:
            reason: what leaves the op out.

        Raises:
            ArgumentError: naming the option.
        """
        for option, pattern in self._list_patterns():
            kind = self.names.kind
            raise ArgumentError(
                f"{option} {self.names.prefix + pattern!r} names a {kind}, but no {kind} is looked for here; {reason}"
            )

    def _list_patterns(self) -> list[tuple[str, str]]:
        by_option = (("--only", self.only), ("--skip", self.skip), ("--explain", self.explain))
        return [(option, pattern) for option, patterns in by_option for pattern in patterns]


@dataclass(frozen=True)
class UserChoice:
    """What the user decides about the candidates of one op: by options, and by a plan.

    Attributes:
        selection: of the options.
        planned: the plan's entries by the names of candidates; None: no plan decides about this op.
    """

    selection: Selection
    planned: Mapping[str, PlanEntry] | None = None

    @classmethod
    def of(cls, selection: Selection, plan: Plan | None, key: str) -> UserChoice:
        """The choice by a plan that may have entries of the op with this key."""
        if plan is None or key not in plan.entries:
            return cls(selection)
        return cls(selection, {e.name: e for e in reversed(plan.entries[key])})

    def entry_of(self, name: str) -> PlanEntry | None:
        """The plan's decision about a candidate."""
        return None if self.planned is None else self.planned.get(name)

    def reason_left_out(self, candidate: NamedCandidate) -> str:
        """Why the user leaves a candidate as it is; empty where nothing is said against it."""
        if left_out := self.selection.reason_left_out(candidate):
            return left_out
        if self.planned is None:
            return ""
        entry = self.planned.get(candidate.name)
        if entry is None:
            return "not in the plan"
        return "" if entry.replace else entry.reason or "left as it is by the plan"

    def reason_kept(self, candidate: NamedCandidate, reason: str) -> str:
        """Why a candidate stays as it is: by the user's choice, or for a reason of the op.

        Args:
            candidate: the candidate.
            reason: why the op cannot replace it, or does not gain by it; empty where it can.

        Returns:
            The reason; empty where the candidate is replaced.

        Raises:
            ModelError: when the plan replaces what the op cannot replace.
        """
        if left_out := self.reason_left_out(candidate):
            return left_out
        if reason and self.planned is not None:
            raise ModelError(
                f"the plan replaces {self.selection.names.kind} {candidate.name!r}, which cannot be: {reason}; "
                "set its replace to false"
            )
        return reason


def owner_of(pattern: str, names: Iterable[CandidateNames]) -> CandidateNames | None:
    """The op that a pattern is for, by its names: that of the longest prefix that it has; None where there is none."""
    return max((n for n in names if pattern.startswith(n.prefix)), key=lambda n: len(n.prefix), default=None)


def select(options: Options, names: Sequence[CandidateNames]) -> list[Selection]:
    """What the options select of each op's candidates, by the names of all ops.

    Raises:
        ArgumentError: when a pattern is for no op.
    """
    explained = () if options.explain in (None, EVERY_ATTENTION) else (str(options.explain),)
    patterns_of: dict[tuple[str, CandidateNames], list[str]] = {}
    for option, patterns in (("--only", options.only), ("--skip", options.skip), ("--explain", explained)):
        for pattern in patterns:
            owner = owner_of(pattern, names)
            if owner is None:
                forms = ", ".join(f"{n.prefix}NAME for a {n.kind}" for n in names)
                raise ArgumentError(f"{option} {pattern!r} names nothing that is replaced; there is {forms}")
            patterns_of.setdefault((option, owner), []).append(pattern.removeprefix(owner.prefix))
    return [
        Selection(
            n,
            only=tuple(patterns_of.get(("--only", n), ())),
            skip=tuple(patterns_of.get(("--skip", n), ())),
            explain=tuple(patterns_of.get(("--explain", n), ())),
            others=tuple(o for o in names if o is not n),
        )
        for n in names
    ]


def list_candidates(names: CandidateNames, candidates: Iterable[NamedCandidate]) -> str:
    """The candidates of a model for a message about one that it does not have."""
    numbered = [c for c in candidates if c.index is not None]
    if not numbered:
        return f"it has no {names.kind}"
    shown = ", ".join(f"{c.index} {c.name!r}" for c in numbered[:_MOST_NAMES])
    more = ", ..." if len(numbered) > _MOST_NAMES else ""
    listing = names.listed_by or (f"--explain '{names.prefix}*'" if names.prefix else "--explain")
    return f"its {names.kind}s are {shown}{more} ({listing} lists them)"
