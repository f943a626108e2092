# SPDX-License-Identifier: Apache-2.0
"""Rows that are proven to have a key: what a row without one gives need not be prepared for.

Kernels cannot know before a run that a bias is -inf nowhere in a row, or that padding leaves each query a key: where such rows
take all keys (``mean``, ``all``) they look for them, on CUDA with a second launch for each node. Where mask and biases are
proven to leave every row a key, the scores alone can take it: all of them are -inf then, of which the graph's softmax makes NaN.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np

from stof.mask.check.checker import MaskChecker
from stof.mask.empty_rows.key_proof import leaves_a_key
from stof.mask.empty_rows.value_bounds import Magnitudes
from stof.mask.lift import FLOOR, MAY_FORBID
from stof.site import AttentionSite, EmptyRows, LiftedMask, TermKind


class RowProver:
    """Proves it for the sites of one model.

    Args:
        checker: of the model's masks.
        folder: where the model's external data lies.
    """

    def __init__(self, checker: MaskChecker, folder: Path | None = None) -> None:
        self.magnitudes = Magnitudes(checker.index, checker.symbolic, folder)
        self.proven: dict[tuple[object, ...], bool] = {}  # layers share their masks

    def settled(self, site: AttentionSite, mask: LiftedMask) -> LiftedMask:
        """The mask; with what the graph makes of a row of -inf for its empty rows where no other can be one."""
        told = not (mask.bias or mask.relative or mask.operands)  # the kernels see it themselves
        # Below a floor a row of -inf is one of equal scores, and stays that.
        if told or site.floored or mask.empty_rows not in (EmptyRows.MEAN, EmptyRows.ALL):
            return mask
        key = (mask, site.dims, site.query_offset)
        if key not in self.proven:
            self.proven[key] = self._finite(mask) and leaves_a_key(site, mask)
        if not self.proven[key]:
            return mask
        notes = tuple(n for n in mask.notes if n != MAY_FORBID)
        return replace(mask, empty_rows=EmptyRows.ZERO if site.nan_guard else EmptyRows.NAN, notes=notes)

    def _finite(self, mask: LiftedMask) -> bool:
        """Whether the biases of a mask and their sum, which is fp32 where there are several, are finite everywhere."""
        total = 0.0
        for term in mask.bias:
            if term.kind is not TermKind.ADD:  # a selection becomes -inf
                return False
            total += self.magnitudes.of(term.tensor) * abs(term.scale)
        if mask.relative is not None:
            table = np.frombuffer(mask.relative.data, np.float32)
            total += float(np.abs(table).max(initial=0.0))
        return not math.isnan(total) and total <= -FLOOR
