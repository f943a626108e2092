# SPDX-License-Identifier: Apache-2.0
"""The user's decisions about chains: --only and --skip with ``chain:`` before a name, number or pattern, and plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stof.errors import ArgumentError
from stof.fusion.decide.decision import ChainDecision
from stof.fusion.plan_entry import ChainPlan
from stof.name_patterns import matches
from stof.options import CHAIN, Options


@dataclass(frozen=True)
class Selection:
    """Which chains may be replaced, and what a plan decides. ``planned`` is None where no plan decides about chains."""

    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    planned: tuple[ChainPlan, ...] | None = None

    @staticmethod
    def of(options: Options, planned: Sequence[ChainPlan] | None) -> Selection:
        """The selection of a run."""
        only, skip = (
            tuple(p.removeprefix(CHAIN) for p in given if p.startswith(CHAIN)) for given in (options.only, options.skip)
        )
        return Selection(only, skip, None if planned is None else tuple(planned))

    def check(self, names: Sequence[str], words: Sequence[str]) -> None:
        """Refuses patterns and plans that name no chain of the model.

        Args:
            names: the names of all chains, in order.
            words: the operators of each chain.

        Raises:
            ArgumentError: naming the option or the entry of the plan.
        """
        for option, patterns in (("--only", self.only), ("--skip", self.skip)):
            for pattern in patterns:
                if not any(matches(pattern, name, i) for i, name in enumerate(names)):
                    raise ArgumentError(
                        f"{option} {CHAIN + pattern!r} names no chain of the model; {_list_names(names)}"
                    )
        own = dict(zip(names, words, strict=True))
        for entry in self.planned or ():
            if entry.chain not in own:
                raise ArgumentError(
                    f"the plan has chain {entry.chain!r}, which the model does not have: the plan is of another model or "
                    f"made by another version; save it again; {_list_names(names)}"
                )
            if entry.operators != own[entry.chain]:
                raise ArgumentError(
                    f"the plan's chain {entry.chain!r} is of {entry.operators}, in the model it is of {own[entry.chain]}: the "
                    "plan is of another model or made by another version; save it again"
                )
            if any(end > len(entry.operators.split()) for _, end in entry.segments):
                raise ArgumentError(f"the plan's chain {entry.chain!r} has segments beyond its operators")

    def of_chain(self, number: int, name: str) -> ChainDecision | None:
        """The user's decision about a chain; None where there is none."""
        if self.only and not any(matches(p, name, number) for p in self.only):
            return ChainDecision((), "not among --only")
        if any(matches(p, name, number) for p in self.skip):
            return ChainDecision((), "left out by --skip")
        if self.planned is None:
            return None
        entry = next((e for e in self.planned if e.chain == name), None)
        if entry is None:
            return ChainDecision((), "not in the plan")
        return ChainDecision(entry.segments, "" if entry.replace else entry.reason or "left as it is by the plan")


def _list_names(names: Sequence[str]) -> str:
    if not names:
        return "it has none"
    shown = ", ".join(f"{i} {name!r}" for i, name in list(enumerate(names))[:4])
    return f"there are {shown}{', ...' if len(names) > 4 else ''}"
