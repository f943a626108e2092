# SPDX-License-Identifier: Apache-2.0
"""An MLP site's entry in a plan."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from stof.errors import ArgumentError
from stof.files.strict_json import quoted
from stof.plan import Fields

SELECTIONS = ("nonzero", "magnitude", "predictor")


@dataclass(frozen=True)
class MlpPlan:
    """The decision for one MLP. ``density`` and ``reason`` inform.

    Attributes:
        selection: ``nonzero``, or ``magnitude`` and ``predictor``, whose thresholds --sparse-mlp makes again.
    """

    mlp: str
    replace: bool
    density: float | None = None
    reason: str = ""
    selection: str = SELECTIONS[0]

    @property
    def name(self) -> str:
        """The node's name."""
        return self.mlp

    def to_json(self) -> dict[str, Any]:
        """The entry as a JSON object; :func:`read_mlp_plan` reads it back."""
        data: dict[str, Any] = {"mlp": self.mlp, "replace": self.replace}
        if self.density is not None:
            data["density"] = round(self.density, 4)
        if self.selection != SELECTIONS[0]:
            data["selection"] = self.selection
        if self.reason:
            data["reason"] = self.reason
        return data


def read_mlp_plan(where: str, location: str, entry: object) -> MlpPlan:
    """An entry from its JSON value; :class:`stof.plan.Fields` says what it raises."""
    fields = Fields(where, location, entry, {"mlp", "replace", "density", "reason", "selection"})
    density = fields.take("density", (int, float), 0.0)
    if not (math.isfinite(density) and 0 <= density <= 1):
        raise ArgumentError(f"{fields.where} has density {quoted(density)}, expected a number from 0 to 1")
    return MlpPlan(
        mlp=fields.text("mlp", None),
        replace=fields.take("replace", bool, None),
        density=float(density) if "density" in fields.data else None,
        reason=fields.text("reason", ""),
        selection=fields.text("selection", SELECTIONS[0], SELECTIONS),
    )
