# SPDX-License-Identifier: Apache-2.0
"""An attention site's entry in a plan."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from stof.errors import ArgumentError
from stof.files.strict_json import quoted
from stof.mask.site import EmptyRows
from stof.plan import Fields

_HINTS = ("kernel", "tile")


@dataclass(frozen=True)
class SitePlan:
    """The decision for one site.

    ``mask`` and ``empty_rows`` are what the operator gets where the site is replaced; ``hints`` are its optional attributes
    ``kernel`` and ``tile``. ``predicted_gain`` (original's time over ours at S = 2048, or at the model's fixed length) and
    ``reason`` inform; nothing is decided by them when a plan is applied.
    """

    site: str
    replace: bool
    mask: str = ""
    empty_rows: str = ""  # "": what the graph gives
    hints: tuple[tuple[str, str], ...] = ()
    predicted_gain: float | None = None
    reason: str = ""

    @property
    def name(self) -> str:
        """The site's name."""
        return self.site

    def to_json(self) -> dict[str, Any]:
        """The entry as a JSON object; :func:`read_site_plan` reads it back."""
        data: dict[str, Any] = {"site": self.site, "replace": self.replace}
        if self.replace:
            data |= {
                "mask": self.mask,
                **({"empty_rows": self.empty_rows} if self.empty_rows else {}),
                **dict(self.hints),
            }
            if self.predicted_gain is not None and math.isfinite(self.predicted_gain):
                data["predicted_gain"] = round(self.predicted_gain, 3)
        if self.reason:
            data["reason"] = self.reason
        return data


def read_site_plan(where: str, path: str, entry: object) -> SitePlan:
    """An entry from its JSON value; :class:`stof.plan.Fields` says what it raises."""
    keys = {"site", "replace", "mask", "empty_rows", "predicted_gain", "reason", *_HINTS}
    fields = Fields(where, path, entry, keys)
    gain = fields.take("predicted_gain", (int, float), 0.0)
    if not abs(gain) < 1e300:  # JSON has integers of any length, and Python reads 1e999 as infinity
        raise ArgumentError(f"{fields.where} has predicted_gain {quoted(gain)}, expected a number below 1e300")
    return SitePlan(
        site=fields.text("site", None),
        replace=fields.take("replace", bool, None),
        mask=fields.text("mask", ""),
        empty_rows=fields.text("empty_rows", None, tuple(e.value for e in EmptyRows))
        if "empty_rows" in fields.data
        else "",
        hints=tuple((h, fields.text(h, "")) for h in _HINTS if h in fields.data),
        predicted_gain=float(gain) if "predicted_gain" in fields.data else None,
        reason=fields.text("reason", ""),
    )
