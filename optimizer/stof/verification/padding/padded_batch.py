# SPDX-License-Identifier: Apache-2.0
"""Padded batches of texts whose padding the result leaves out: which rows are padding in a run, and what quantizes them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from stof.execution.case import Case, Padding
from stof.execution.inputs import InputMaker

if TYPE_CHECKING:
    from stof.verification.model_inputs import ModelInputs

Feed = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class PaddedBatch:
    """Texts that the original computes with their padding, and the result without.

    Attributes:
        mask: the tensor of the key padding mask.
        number: elements of the mask with this number are padding.
        dimensions: the names of the dimension that counts positions; empty: their number cannot grow.
        axes: of each input of the model, the axes that are as long as that.
        is_quantized: whether nodes quantize these rows with one scale, which padding counts in.
        bound: elements of the mask of at most this number are padding, too; None: no others are.
    """

    mask: str
    number: float
    dimensions: frozenset[str]
    axes: Mapping[str, tuple[int, ...]]
    is_quantized: bool
    bound: float | None = None

    def find_padding(self, inputs: ModelInputs, case: Case, feed: Feed) -> np.ndarray | None:
        """Which positions [B, S] are padding in a run; None where that is not known."""
        mask = feed.get(self.mask)
        if mask is not None and mask.ndim > 1 and mask.size == len(mask) * mask.shape[-1]:
            flat = mask.reshape(len(mask), -1)
            return np.asarray(flat == self.number if self.bound is None else flat <= self.bound)
        return inputs.padded_queries(case, feed)


def find_padding_value(batch: PaddedBatch, maker: InputMaker, name: str) -> float | None:
    """What an input of the model holds at padding of a batch; None: it is no mask."""
    if name == batch.mask:
        return batch.number
    if name not in maker.pads | set(maker.switches):
        return None
    return int(name in maker.forbidding or maker.switches.get(name, False))


def find_real_value(padding: float) -> int:
    """What an input holds at real tokens, where it holds some number at padding."""
    return 0 if padding else 1


def measure_padding(batches: Iterable[PaddedBatch], inputs: ModelInputs, case: Case, feed: Feed) -> float | None:
    """The share of rows that are padding in a run, 0 to 1; None where that is not known."""
    if case.padding is Padding.NONE:
        return 0.0
    found = [padding for b in batches if (padding := b.find_padding(inputs, case, feed)) is not None]
    rows = sum(p.size for p in found)
    return sum(int(p.sum()) for p in found) / rows if rows else None
