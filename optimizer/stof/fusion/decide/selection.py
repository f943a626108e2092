# SPDX-License-Identifier: Apache-2.0
"""The user's decisions about chains: --only and --skip with ``chain:`` before a name, number or pattern, and plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stof.errors import ArgumentError
from stof.fusion.decide.decision import ChainDecision
from stof.fusion.plan_entry import ChainPlan
from stof.selection import CandidateNames, NamedCandidate, Selection, UserChoice, list_candidates

NAMES = CandidateNames("chain", "chain:")
_ALL = Selection(NAMES)


@dataclass(frozen=True)
class ChainSelection:
    """Which chains may be replaced, and what a plan decides. ``planned`` is None where no plan decides about chains."""

    named: Selection = _ALL
    planned: tuple[ChainPlan, ...] | None = None

    def check(self, names: Sequence[str], words: Sequence[str]) -> None:
        """Refuses patterns and plans that name no chain of the model.

        Args:
            names: the names of all chains, in order.
            words: the operators of each chain.

        Raises:
            ArgumentError: naming the option or the entry of the plan.
        """
        candidates = [NamedCandidate(name, i) for i, name in enumerate(names)]
        self.named.check(candidates)
        operators = dict(zip(names, words, strict=True))
        for entry in self.planned or ():
            if entry.chain not in operators:
                raise ArgumentError(
                    f"the plan has chain {entry.chain!r}, which the model does not have: the plan is of another model or "
                    f"made by another version; save it again; {list_candidates(NAMES, candidates)}"
                )
            if entry.operators != operators[entry.chain]:
                raise ArgumentError(
                    f"the plan's chain {entry.chain!r} is of {entry.operators}, in the model it is of "
                    f"{operators[entry.chain]}: the plan is of another model or made by another version; save it again"
                )
            if any(end > len(entry.op_types) for _, end in entry.segments):
                raise ArgumentError(f"the plan's chain {entry.chain!r} has segments beyond its operators")

    def of_chain(self, number: int, name: str) -> ChainDecision | None:
        """The user's decision about a chain; None where there is none."""
        entries = None if self.planned is None else {e.chain: e for e in reversed(self.planned)}
        if reason := UserChoice(self.named, entries).reason_left_out(NamedCandidate(name, number)):
            return ChainDecision((), reason)
        return None if entries is None else ChainDecision(entries[name].segments)
