# SPDX-License-Identifier: Apache-2.0
"""What the report says of any option that lets operators compute in reduced precision."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, field
from typing import Any

from stof.arguments.precisions import Precision
from stof.prompts.loss import Loss
from stof.sparsify.threshold_report import OutputCosines


@dataclass(frozen=True)
class PrecisionRow:
    """An attention that became an operator.

    Attributes:
        node: the operator's name.
        layer: its index among the attentions that are operators, in the order of the graph.
        op: the operator.
        reduced: whether it may compute its matmuls in the precision.
        reason: why it may not.
        kernel: that runs it in the precision on this machine; empty: none, it computes as without the option.
        predicted_gain: the estimated time of the operator without the option over that with it, here; None: no such kernel, one
            that was not timed, or a head size that is not known.
        relative_rms: the root mean square error of its output over that of fp64, the largest of all sets; None: not measured.
    """

    node: str
    layer: int
    op: str
    reduced: bool
    reason: str = ""
    kernel: str = ""
    predicted_gain: float | None = None
    relative_rms: float | None = None


@dataclass
class ReducedPrecisionReport(ABC):
    """What an option did that lets attentions compute in reduced precision.

    Attributes:
        rows: one for each attention that became an operator.
        measured_on: what errors were measured on; empty where they were not.
        loss: of the whole model on prompts; None: not measured.
        decode_loss: of single tokens over the cache; None: not measured.
        cosines: of outputs on ``--inputs``; None: not measured.
        warnings: reasons why errors or loss may not be those of the target machine, or are not known.
        is_decided: whether the rows are those of a model that was written.
    """

    rows: list[PrecisionRow] = field(default_factory=list)
    measured_on: str = ""
    loss: Loss | None = None
    decode_loss: Loss | None = None
    cosines: OutputCosines | None = None
    warnings: list[str] = field(default_factory=list)
    is_decided: bool = False

    @property
    def reduced(self) -> tuple[str, ...]:
        """The names of attentions that may compute in the precision."""
        return tuple(row.node for row in self.rows if row.reduced)

    @property
    def changes_outputs(self) -> bool:
        """Whether any operator may compute in the precision."""
        return bool(self.reduced)

    @property
    def adds_operators(self) -> bool:
        """Whether the option alone adds operators (StofGemm)."""
        return False

    @abstractmethod
    def by_plan(self) -> dict[str, Precision] | None:
        """The precisions of attentions as a plan has them; None where no model was written, which errors may yet decide."""

    def gemms_by_plan(self) -> dict[str, Precision] | None:
        """The same of GEMMs; None where the option says nothing of them."""
        return None

    def mlps_by_plan(self) -> dict[str, Precision] | None:
        """The same of sparse MLPs."""
        return None

    @property
    @abstractmethod
    def option(self) -> str:
        """What the user gave."""

    @property
    @abstractmethod
    def headline(self) -> str:
        """For the report's first line."""

    @abstractmethod
    def lines(self) -> list[str]:
        """A line for each kind of row, the error where it is the largest, and the loss."""

    @property
    def loss_headlines(self) -> list[str]:
        """A line for each loss that was measured."""
        return [*(lines[0] for lines in self._losses()), *([] if self.cosines is None else [self.cosines.line()])]

    def _losses(self) -> list[list[str]]:
        losses = (("loss", self.loss), ("loss of decoding", self.decode_loss))
        return [loss.lines(what) for what, loss in losses if loss is not None]

    def _loss_lines(self, unmeasured: str) -> list[str]:
        """The loss that was measured, or why there is none."""
        measured = [line for found in self._losses() for line in found]
        measured += [] if self.cosines is None else [self.cosines.line()]
        return measured or [f"loss: not measured; {unmeasured}"]

    def to_json(self) -> dict[str, Any]:
        """Every fact by its key."""
        return {
            "layers": [asdict(row) for row in self.rows],
            "measured_on": self.measured_on,
            "loss": None if self.loss is None else asdict(self.loss),
            "decode_loss": None if self.decode_loss is None else asdict(self.decode_loss),
            "cosines": None if self.cosines is None else dict(self.cosines.outputs),
            "warnings": list(self.warnings),
        }
