# SPDX-License-Identifier: Apache-2.0
"""A cache site's entry in a plan."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from stof.errors import ArgumentError
from stof.files.strict_json import quoted
from stof.plan import Fields


@dataclass(frozen=True)
class CachePlan:
    """The decision for one GroupQueryAttention with a cache. ``predicted_gain`` and ``reason`` inform."""

    cache: str
    replace: bool
    predicted_gain: float | None = None
    reason: str = ""

    @property
    def name(self) -> str:
        """The node's name."""
        return self.cache

    def to_json(self) -> dict[str, Any]:
        """The entry as a JSON object; :func:`read_cache_plan` reads it back."""
        data: dict[str, Any] = {"cache": self.cache, "replace": self.replace}
        if self.replace and self.predicted_gain is not None and math.isfinite(self.predicted_gain):
            data["predicted_gain"] = round(self.predicted_gain, 3)
        if self.reason:
            data["reason"] = self.reason
        return data


def read_cache_plan(where: str, location: str, entry: object) -> CachePlan:
    """An entry from its JSON value; :class:`stof.plan.Fields` says what it raises."""
    fields = Fields(where, location, entry, {"cache", "replace", "predicted_gain", "reason"})
    gain = fields.take("predicted_gain", (int, float), 0.0)
    if not abs(gain) < 1e300:  # JSON has integers of any length, and Python reads 1e999 as infinity
        raise ArgumentError(f"{fields.where} has predicted_gain {quoted(gain)}, expected a number below 1e300")
    return CachePlan(
        cache=fields.text("cache", None),
        replace=fields.take("replace", bool, None),
        predicted_gain=float(gain) if "predicted_gain" in fields.data else None,
        reason=fields.text("reason", ""),
    )
