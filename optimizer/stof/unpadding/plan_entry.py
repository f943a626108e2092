# SPDX-License-Identifier: Apache-2.0
"""A key padding mask's entry in a plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stof.errors import ArgumentError
from stof.options import MOST_TOKENS
from stof.plan import Fields


@dataclass(frozen=True)
class UnpadPlan:
    """The decision for the batch of one key padding mask. ``reason`` informs; ``capacity`` 0: none is fixed."""

    batch: str
    replace: bool
    reason: str = ""
    capacity: int = 0

    @property
    def name(self) -> str:
        """The tensor of the mask."""
        return self.batch

    def to_json(self) -> dict[str, Any]:
        """The entry as a JSON object; :func:`read_unpad_plan` reads it back."""
        data: dict[str, Any] = {"batch": self.batch, "replace": self.replace}
        if self.capacity:
            data["capacity"] = self.capacity
        return data | {"reason": self.reason} if self.reason else data


def read_unpad_plan(where: str, location: str, entry: object) -> UnpadPlan:
    """An entry from its JSON value; :class:`stof.plan.Fields` says what it raises."""
    fields = Fields(where, location, entry, {"batch", "replace", "capacity", "reason"})
    capacity = fields.take("capacity", int, 0)
    if not 0 <= capacity <= MOST_TOKENS:
        raise ArgumentError(f"{fields.where} has capacity {capacity}, expected 0 to {MOST_TOKENS}")
    replace = fields.take("replace", bool, None)
    return UnpadPlan(fields.text("batch", None), replace, fields.text("reason", ""), capacity)
