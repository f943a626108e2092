# SPDX-License-Identifier: Apache-2.0
"""Proofs that no row is fully masked, which save kernels the search for such rows.

Kernels cannot know before a run that no row of a bias is all -inf, or that padding leaves each query a key. Where fully masked
rows take all keys (``mean``, ``all``), kernels search for them, on CUDA with a second launch for each node. Where mask and biases
leave every row a key, a row can only be all -inf by its scores. The graph's softmax gives NaN for it.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np

from stof.mask.check.checker import MaskChecker
from stof.mask.empty_rows.key_proof import leaves_a_key
from stof.mask.empty_rows.value_bounds import ValueBounds
from stof.mask.site import AttentionSite, EmptyRows, LiftedMask, NoteReason, TermKind
from stof.mask.strength import FLOOR


class RowProver:
    """Proves for the sites of one model that no row is fully masked.

    Args:
        checker: of the model's masks.
        folder: where the model's external data lies.
    """

    def __init__(self, checker: MaskChecker, folder: Path | None = None) -> None:
        self.bounds = ValueBounds(checker.index, checker.symbolic, folder)
        self._proven: dict[tuple[object, ...], bool] = {}  # layers share their masks

    def simplify_empty_rows(self, site: AttentionSite, mask: LiftedMask) -> LiftedMask:
        """The mask with the cheaper policy ``zero`` or ``nan`` where it is proven that no row is fully masked."""
        # Kernels see from a static mask alone which rows are fully masked.
        is_static = not (mask.bias or mask.relative or mask.operands)
        # Under a floor a row of -inf becomes one of equal scores.
        if is_static or site.floored or mask.empty_rows not in (EmptyRows.MEAN, EmptyRows.ALL):
            return mask
        if not self.has_key_in_every_row(site, mask):
            return mask
        notes = tuple(n for n in mask.notes if n.reason is not NoteReason.BIAS_MAY_FORBID)
        return replace(mask, empty_rows=EmptyRows.ZERO if site.nan_guard else EmptyRows.NAN, notes=notes)

    def has_key_in_every_row(self, site: AttentionSite, mask: LiftedMask) -> bool:
        """Whether it is proven that mask and biases leave every row a key."""
        key = (mask, site.dims, site.query_offset)
        if key not in self._proven:
            self._proven[key] = self._has_finite_biases(mask) and leaves_a_key(site, mask)
        return self._proven[key]

    def _has_finite_biases(self, mask: LiftedMask) -> bool:
        """Whether the biases of a mask and their sum, which is fp32 where there are several, are finite everywhere."""
        return self.bias_bound(mask) <= -FLOOR

    def bias_bound(self, mask: LiftedMask) -> float:
        """The largest absolute value of the sum of a mask's biases; infinite where nothing is known."""
        total = 0.0
        for term in mask.bias:
            if term.kind is not TermKind.ADD:  # a selection becomes -inf
                return math.inf
            total += self.bounds.of(term.tensor) * abs(term.scale)
        if mask.relative is not None:
            table = np.frombuffer(mask.relative.data, np.float32)
            total += float(np.abs(table).max(initial=0.0))
        return math.inf if math.isnan(total) else total
