# SPDX-License-Identifier: Apache-2.0
"""A fused chain's entry in a plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stof.errors import ArgumentError
from stof.files.strict_json import quoted
from stof.plan import Fields


@dataclass(frozen=True)
class ChainPlan:
    """The decision for one region of operators (docs/design/fusion-search.md).

    ``segments`` are the parts of it that are chains, as ranges of its operators; there is none where it is not replaced.
    """

    chain: str
    operators: str
    segments: tuple[tuple[int, int], ...] = ()
    reason: str = ""

    @property
    def replace(self) -> bool:
        """Whether any of it is replaced."""
        return bool(self.segments)

    @property
    def op_types(self) -> tuple[str, ...]:
        """The operators one by one."""
        return tuple(self.operators.split())

    @property
    def name(self) -> str:
        """The region's name."""
        return self.chain

    def to_json(self) -> dict[str, Any]:
        """The entry as a JSON object; :func:`read_chain_plan` reads it back."""
        data: dict[str, Any] = {"chain": self.chain, "operators": self.operators, "replace": self.replace}
        if self.replace:
            data["segments"] = [list(s) for s in self.segments]
        if self.reason:
            data["reason"] = self.reason
        return data


def read_chain_plan(where: str, position: str, entry: object) -> ChainPlan:
    """An entry from its JSON value; :class:`stof.plan.Fields` says what it raises."""
    fields = Fields(where, position, entry, {"chain", "operators", "replace", "segments", "reason"})
    segments: list[tuple[int, int]] = []
    for part in fields.take("segments", list, ()):
        if not isinstance(part, list) or len(part) != 2 or any(type(x) is not int for x in part):
            raise ArgumentError(f"{fields.where} has segments {quoted(part)}, expected pairs of integers")
        if not (segments[-1][1] if segments else 0) <= part[0] < part[1]:
            raise ArgumentError(
                f"{fields.where} has segment {quoted(part)}, expected it after the one before, and not empty"
            )
        segments.append((part[0], part[1]))
    if bool(segments) != fields.take("replace", bool, None):
        raise ArgumentError(f"{fields.where}: expected segments where replace is true, and only there")
    return ChainPlan(
        fields.text("chain", None), fields.text("operators", None), tuple(segments), fields.text("reason", "")
    )
