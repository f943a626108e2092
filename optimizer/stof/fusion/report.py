# SPDX-License-Identifier: Apache-2.0
"""What the report says of fused chains."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass, field
from typing import Any

from stof.fusion.apply import ChainReport
from stof.report import Section

KEY = "chains"


@dataclass
class ChainSection(Section):
    """The chains of a model, and operators that are left out of chains."""

    rows: list[ChainReport] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {KEY: [asdict(row) for row in self.rows]}

    def lines(self) -> list[str]:
        groups: dict[tuple[Any, ...], list[ChainReport]] = defaultdict(list)
        for c in self.rows:
            groups[(c.replaced, c.operators, c.reason, c.gain, c.description)].append(c)
        lines = []
        for group in groups.values():
            first = group[0]
            if first.replaced:
                how = "measured" if first.measured else "predicted"
                gain = "" if first.gain is None else f", {how} {first.gain:.2f}x"
                lines.append(f"  {len(group):3d} x chain of {first.operators}{gain}")
            else:
                lines.append(f"  kept  {len(group)} x {first.operators}: {first.reason}")
        return lines
