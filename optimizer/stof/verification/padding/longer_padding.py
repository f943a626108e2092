# SPDX-License-Identifier: Apache-2.0
"""Runs of a dynamically quantized original with longer padding: legal runs of it where the result leaves padding out.

Dynamic quantization has one scale for all rows of a tensor, so rows of padding decide how real ones are rounded. The original's
own outputs move when its padding grows; those of the result, whose scales are of real tokens, may be as far from them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from stof.execution.case import Padding
from stof.execution.run_limits import LimitReached
from stof.execution.session_process import RuntimeFailure
from stof.verification.array_distance import largest_number
from stof.verification.padding.padded_batch import Feed, PaddedBatch, find_padding_value, find_real_value
from stof.verification.reference_runs import CaseSession, ReferenceRuns
from stof.verification.result import PaddingMove, Verification
from stof.verification.verified_models import VerifiedModels

if TYPE_CHECKING:
    from stof.verification.verifier import Verifier

_DRAWS = 2  # runs of each case, with other tokens as padding: a draw may move no scale by chance
# Positions that are added, as a share of those that there are, and of a few where there are fewer; smaller ones where the
# model does not run. With 0, padding has other tokens.
_SHARES, _LEAST = (0.5, 0.25, 0.1, 0.0), 16
_STEADY = 0.25  # of what the original moves by: an output that the result moves by more depends on padding itself


@dataclass(frozen=True)
class _LongerRun:
    """A run of the original with longer padding.

    Attributes:
        share: of its positions by which the case is longer, as that of ``_SHARES``.
        arrays: the outputs at the positions that the case has, those of its padding as they were.
        sizes: the numbers of positions that the case has, each with that of this run.
    """

    share: float
    arrays: list[np.ndarray]
    sizes: Mapping[int, int]


class LongerPadding:
    """What longer padding does to the outputs of the original.

    Args:
        verifier: has the batches, and draws inputs.
        models: what is run.
        reference: what the original computes.
        result: gets how far outputs move.
    """

    def __init__(
        self, verifier: Verifier, models: VerifiedModels, reference: ReferenceRuns, result: Verification
    ) -> None:
        self._batches = list({b.dimensions or b.mask: b for b in verifier.padded_batches if b.is_quantized}.values())
        self._inputs = verifier.inputs
        self._names = verifier.output_names
        self._cases = [verifier.cases[i] for i in reference.ran]
        self._models = models
        self._reference = reference
        self._result = result
        self._runs: dict[int, list[_LongerRun]] = {}
        self._outputs: frozenset[int] = frozenset()  # those that longer padding moves by scales alone
        self._moves: dict[tuple[int, int], PaddingMove] = {}

    def add_runs(self, legal: Sequence[list[list[np.ndarray]]], cases: Sequence[int], until: float) -> None:
        """Adds runs with longer padding to the legal runs of cases that are padded.

        Args:
            legal: the runs of the original, by case.
            cases: the cases for which there are some.
            until: the moment at which the last one has to be over.
        """
        if not self._batches:
            return
        try:
            reason = self._run(cases, until)
        except LimitReached:
            reason = "no time or memory was left"
        self._result.padding_not_measured = reason
        if reason:
            self._runs = {}
        for i, runs in self._runs.items():
            plain = self._reference.plain[i]
            legal[i] += [[x if k in self._outputs else plain[k] for k, x in enumerate(r.arrays)] for r in runs]

    def note(self, i: int, optimized: Sequence[np.ndarray]) -> None:
        """Notes how far the outputs of the optimized model are from the original's in a case."""
        for k, array in enumerate(optimized):
            plain = self._reference.plain[i][k]
            if i not in self._runs or k not in self._outputs or plain.dtype.kind != "f" or array.shape != plain.shape:
                continue
            rows = self._real_rows(i, plain.shape)
            moved = max(_distance(plain[rows], run.arrays[k][rows]) for run in self._runs[i])
            length, longer = max(self._runs[i][-1].sizes.items())
            case = str(self._inputs.name_sizes(self._cases[i], self._reference.feeds[i]))
            apart, largest = _distance(plain[rows], array[rows]), largest_number(plain[rows])
            self._moves[i, k] = PaddingMove(case, self._names[k], length, longer, moved, apart, largest)
        self._result.padding_moves = [self._moves[key] for key in sorted(self._moves)]

    def _run(self, cases: Sequence[int], until: float) -> str:
        """Runs the original, and the optimized model once; why that says nothing, or empty."""
        padded = [
            i for i in cases if any(x is not None and x.any() for x in self._find_padding(i, self._reference.feeds[i]))
        ]
        if not padded:
            return "no inputs have padding"
        session = CaseSession(
            partial(self._models.sessions.make, self._models.reference, optimized=False, library=False)
        )
        for seed in range(_DRAWS):
            for i in padded:
                if time.monotonic() >= until:
                    break
                if (run := self._run_longer(session, i, seed, until)) is not None:
                    self._runs.setdefault(i, []).append(run)
        del session
        if not self._runs:
            return "no time was left" if time.monotonic() >= until else "the original does not run with other padding"
        return self._find_outputs(until)

    def _run_longer(self, session: CaseSession, i: int, seed: int, until: float) -> _LongerRun | None:
        """A run with padding as much longer as the model takes: stored positions may end."""
        for share in _SHARES:
            feed, sizes = self._lengthen(i, self._reference.feeds[i], share, seed)
            try:
                outputs = session.run(None, feed, until)
            except RuntimeFailure:
                continue
            plain = self._reference.plain[i]
            arrays = [self._take_real(i, x, y, sizes) for x, y in zip(plain, outputs, strict=True)]
            return _LongerRun(share, arrays, sizes)
        return None

    def _lengthen(self, i: int, given: Feed, share: float, seed: int) -> tuple[Feed, dict[int, int]]:
        """Inputs with longer padding on the right, and the old sizes with the new ones; as long, with other tokens as padding."""
        feed = dict(given)
        rng = np.random.default_rng(seed)
        sizes: dict[int, int] = {}
        for batch, padding in zip(self._batches, self._find_padding(i, given), strict=True):
            axes = {name: axes for name, axes in batch.axes.items() if name in feed}
            size = next((feed[name].shape[found[0]] for name, found in axes.items()), 0)
            if not size:
                continue
            more = self._limit(batch, size, round(share * max(_LEAST, size)))
            sizes[size] = size + more
            # Tokens of the text itself: what is looked up by them stays inside its tables.
            others = rng.integers(0, size, more or size)
            for name, found in axes.items():
                mask = find_padding_value(batch, self._inputs.maker, name)
                if more:
                    feed[name] = _append(feed[name], found, np.concatenate([np.arange(size), others]), mask)
                elif mask is None and padding is not None and feed[name].shape[:2] == padding.shape:
                    feed[name] = feed[name].copy()
                    feed[name][padding] = feed[name][:, others][padding]
        return feed, sizes

    def _limit(self, batch: PaddedBatch, size: int, more: int) -> int:
        """So many positions, within the sizes in use that the user states; 0 where their number is fixed."""
        stated = [self._inputs.shapes[n][1] - size for n in batch.dimensions if n in self._inputs.shapes]
        return max(0, min([more, *stated])) if batch.dimensions else 0

    def _find_padding(self, i: int, feed: Feed) -> list[np.ndarray | None]:
        """Which positions [B, S] of each batch are padding in inputs of a case; None where that is not known."""
        return [batch.find_padding(self._inputs, self._cases[i], feed) for batch in self._batches]

    def _real_rows(self, i: int, shape: Sequence[int]) -> np.ndarray | slice:
        """The rows of an output that count: those of real tokens, or all where it has no row for each token."""
        padding = [
            x for x in self._find_padding(i, self._reference.feeds[i]) if x is not None and x.shape == tuple(shape[:2])
        ]
        return ~padding[0] if padding else slice(None)

    def _take_real(self, i: int, plain: np.ndarray, longer: np.ndarray, sizes: Mapping[int, int]) -> np.ndarray:
        """An output of a longer run in the shape of the case's; that one itself where the shapes do not correspond."""
        is_longer = longer.ndim == plain.ndim and all(
            new in (old, sizes.get(old)) for old, new in zip(plain.shape, longer.shape, strict=True)
        )
        if not is_longer:
            return plain
        rows, taken = self._real_rows(i, plain.shape), plain.copy()
        taken[rows] = longer[tuple(map(slice, plain.shape))][rows]
        return taken

    def _find_outputs(self, until: float) -> str:
        """Finds the outputs that move by scales alone: those of the optimized model stay where its padding grows.

        Texts of which a row of padding is read by position are computed in full. Those that are padded on the right tell most.
        """
        session = CaseSession(partial(self._models.sessions.make, self._models.final, optimized=True, library=True))
        found: set[int] = set()
        for i in sorted(self._runs, key=lambda n: self._cases[n].padding is not Padding.RIGHT):
            if len(found) < len(self._names):
                found |= self._find_steady_outputs(session, i, until)
        self._outputs = frozenset(found)
        return "" if found else "outputs of the result move with its padding, too"

    def _fill_texts(self, i: int) -> Feed:
        """Inputs of a case in which texts without a token are full ones: their padding is computed in any case."""
        feed = dict(self._reference.feeds[i])
        for batch, padding in zip(self._batches, self._find_padding(i, feed), strict=True):
            for name in batch.axes.keys() & feed.keys() if padding is not None else ():
                mask = find_padding_value(batch, self._inputs.maker, name)
                if mask is not None and padding is not None and len(feed[name]) == len(padding):
                    feed[name] = feed[name].copy()
                    feed[name][padding.all(1)] = find_real_value(mask)
        return feed

    def _find_steady_outputs(self, session: CaseSession, i: int, until: float) -> set[int]:
        """The outputs of the optimized model that stay as they are where the padding of a case grows."""
        run = self._runs[i][0]
        feed = self._fill_texts(i)
        feeds = feed, self._lengthen(i, feed, run.share, 0)[0]
        first, second = (session.run(None, f, until) for f in feeds)
        found = set()
        for k, (array, longer) in enumerate(zip(first, second, strict=True)):
            most = max(
                _distance(self._reference.plain[n][k], r.arrays[k]) for n, runs in self._runs.items() for r in runs
            )
            allowed = max(_STEADY * most, self._models.floor * largest_number(array))
            if _distance(array, self._take_real(i, array, longer, run.sizes)) <= allowed:
                found.add(k)
        return found


def _append(array: np.ndarray, axes: Sequence[int], columns: np.ndarray, padding: float | None) -> np.ndarray:
    """An input with these positions along each of its axes; ``padding``: what a mask holds at those that are new."""
    size = array.shape[axes[-1]]
    for axis in axes:
        array = np.take(array, columns, axis)
    if padding is not None:
        np.moveaxis(array, axes[-1], 0)[size:] = padding
    return array


def _distance(one: np.ndarray, other: np.ndarray) -> float:
    """The largest difference of finite numbers; of whole numbers, how many differ."""
    if one.dtype.kind != "f":
        return float(np.count_nonzero(one != other))
    difference = np.abs(one.astype(np.float64) - other)
    return float(np.max(difference, initial=0.0, where=np.isfinite(difference)))
