# SPDX-License-Identifier: Apache-2.0
"""The two ways in which attention kernels leave out keys at run time, each by a threshold of an attention operator."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class ThresholdKind:
    """A way to leave out keys at run time.

    Attributes:
        clause: of ``--sparsify`` that asks for it.
        attribute: of the attention operators, that has the threshold c; 0: nothing is left out.
        limit: of ``stof_op_limits``, that says of a target whether its kernels do it.
        key: of its object in a report.
        plan_key: of its thresholds in a plan.
        metadata: of a model that does it.
        verb: what an attention does: "skip by score".
        third_person: "skips by score".
        unit: what is left out: "key tile".
        most: the largest threshold. The least is the smallest normal fp32 number.
        ladder: the thresholds that calibration tries, ascending.
        spare: steps of the ladder that calibration stays below the largest threshold that fits. Where c is no bound, other inputs
            may lose much more than those that it was found on.
        bounds_mass: whether c bounds the mass that a row leaves out, by c / (1 + c).
        example: a threshold that loses little, for messages.
    """

    clause: str
    attribute: str
    limit: str
    key: str
    plan_key: str
    metadata: str
    verb: str
    third_person: str
    unit: str
    most: float
    ladder: tuple[float, ...]
    spare: int
    bounds_mass: bool
    example: str

    def allows(self, threshold: float) -> bool:
        """Whether an operator takes it, and leaves something out with it."""
        return LEAST_THRESHOLD <= threshold <= self.most

    @property
    def range_words(self) -> str:
        """The thresholds that ``allows`` takes, for messages."""
        return f"a number from {LEAST_THRESHOLD:.2g} to {int(self.most)}"

    def mass_bound(self, threshold: float) -> float | None:
        """The share of a row's mass that is left out at most; None: there is no such bound."""
        return threshold / (1 + threshold) if self.bounds_mass else None


@dataclass(frozen=True)
class ThresholdSite:
    """What one threshold is for.

    Attributes:
        kind: skip by score or choose blocks.
        name: of the attention's operator.
    """

    kind: ThresholdKind
    name: str


LEAST_THRESHOLD = 2.0**-126
# Estimates of sharp heads differ by tens of nats, those of others by a few: steps grow with the distance.
_BLOCK_EXPONENTS = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 56, 64, 80, 96, 120)

SKIP_SCORES = ThresholdKind(
    clause="skip-scores",
    attribute="skip_threshold",
    limit="skips_scores",
    key="skip_scores",
    plan_key="skip_thresholds",
    metadata="stof_skip_scores",
    verb="skip by score",
    third_person="skips by score",
    unit="key tile",
    most=math.ldexp(1.0, 22),
    ladder=tuple(2.0**e for e in range(-6, 15)),
    spare=0,
    bounds_mass=True,
    example="0.1",
)
CHOOSE_BLOCKS = ThresholdKind(
    clause="choose-blocks",
    attribute="block_threshold",
    limit="chooses_blocks",
    key="choose_blocks",
    plan_key="block_thresholds",
    metadata="stof_choose_blocks",
    verb="choose blocks",
    third_person="chooses blocks",
    unit="key block",
    most=1.0,
    ladder=tuple(2.0**-e for e in reversed(_BLOCK_EXPONENTS)),
    spare=2,
    bounds_mass=False,
    example="0.0002",
)
KINDS = (SKIP_SCORES, CHOOSE_BLOCKS)
