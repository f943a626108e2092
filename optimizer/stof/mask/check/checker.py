# SPDX-License-Identifier: Apache-2.0
"""The check by execution: a mask's tensors are run at several sizes, and compared with the lifted expression by element."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import onnx

from stof.errors import GuardError, UnsupportedError
from stof.execution.inputs import Case, InputMaker, Padding
from stof.mask.check.run_masks import DoesNotRun, MaskRunner, read_by, score_sizes
from stof.mask.check.sizes import counted, lengths, numbers_of, ordinary, short, uneven, without_past
from stof.mask.check.subgraph_hash import Signatures
from stof.mask.evaluate import allowed_by, check_no_bias, kept_by
from stof.mask.relative_bias.distance_table import spread
from stof.site import AttentionSite, LiftedMask, MaskTerm, TermKind
from stof.symbolic import Symbolic
from stof.symbolic.facts import dtype_kind

_ENOUGH = 3  # lengths that a mask must be compared at


class MaskChecker:
    """Checks the masks of one model. Results are kept per distinct (terms, expression)."""

    def __init__(self, model: onnx.ModelProto, symbolic: Symbolic) -> None:
        self.model = model
        self.symbolic = symbolic
        self.runner = MaskRunner(model, symbolic)
        self.index = self.runner.index
        self.signatures = Signatures(self.index, symbolic)
        self.passed: set[tuple[object, ...]] = set()
        self.rows: set[tuple[object, ...]] = set()  # masks of which rows without a key were compared
        self.relatives: dict[tuple[object, ...], LiftedMask] = {}  # masks, their biases as tables where they can be
        self.assumed: dict[tuple[object, ...], list[str]] = {}  # inputs of which a mask takes 0 and 1 for granted
        self.seen: set[int] = set()  # lengths at which masks were compared

    def key(self, site: AttentionSite, mask: LiftedMask) -> tuple[object, ...]:
        """Equal for sites of the same sizes with the same mask, made of tensors that are computed alike."""
        known = [(t, self.symbolic.value(t.tensor) is not None) for t in site.terms]
        return (
            # What has no value may depend on the whole network before it.
            tuple(
                (
                    t.kind,
                    t.fill,
                    t.scale,
                    t.merged,
                    t.windows,
                    t.groups,
                    self.signatures.of(t.tensor) if own else t.tensor,
                )
                for t, own in known
            ),
            tuple(t in mask.bias for t in site.terms),
            None if mask.relative is None else replace(mask.relative, terms=()),
            mask.expression,
            mask.tables,
            tuple((o.role, o.view, self.signatures.of(o.tensor)) for o in mask.operands),
            None if site.row_guard is None else self.signatures.of(site.row_guard),
            mask.empty_rows,
            site.dims,
            site.query_offset,
            site.nan_guard,
            site.zeroed,
            site.pair_guard,
            site.floored,
            site.sink is not None,
        )

    def check(self, site: AttentionSite, mask: LiftedMask, *, stated: bool = False) -> None:
        """Compares at several sizes.

        Terms that stay a bias may forbid pairs themselves: a lifted mask may leave those to them or forbid them too, a
        stated one must forbid them.

        Raises:
            UnsupportedError: naming the first element at which graph and expression differ.
        """
        # A bias that cannot be evaluated may depend on the whole network before it; it was lifted as one that allows all.
        terms = [t for t in site.terms if stated or t not in mask.bias or self.symbolic.value(t.tensor) is not None]
        key = (*self.key(site, mask), len(terms), stated)
        if (not terms and site.row_guard is None) or key in self.passed:
            return
        # The graph's own numbers count too: a stated mask may leave out a window.
        behind = self.runner.behind(site)
        numbers = {int(n) for n in re.findall(r"\d+", mask.expression)} | numbers_of(self.symbolic, behind)
        if mask.relative is not None:
            numbers.add(mask.relative.size // 2 + 1)
        chosen = lengths(" ".join(map(str, numbers)))
        cases = ordinary(site, mask, chosen, numbers)
        compared, limit = 0, math.inf
        failure: DoesNotRun | None = None
        known: set[tuple[object, ...]] = set()
        of_shapes = not mask.operands and not behind & self.runner.inputs

        def compare(case: Case, seed: int) -> None:
            # Padding may show in a guard of rows, which is not among the masks.
            padding = None if site.row_guard is None else case.padding
            own = (*sorted(self.runner.sizes(case).items()), padding) if of_shapes else ()
            if own and own in known:
                return  # where sizes are numbers, what reads no input is the same again
            self._compare(site, mask, terms, case, seed, stated)
            known.add(own)

        for number, case in enumerate([*cases, *short(chosen)]):
            if case.length >= limit or (number >= len(cases) and compared >= _ENOUGH):
                continue
            try:
                compare(case, number)
                compared += 1
            except DoesNotRun as error:
                # Beyond a stored mask nothing runs; below the size of a block, longer inputs may.
                failure, limit = error, case.length if compared else limit
        if failure is not None and compared < _ENOUGH:
            raise failure
        middle = chosen[len(chosen) // 2]
        for case in [*uneven(site, middle), *without_past(site, middle), *counted(mask, 3, (middle,))]:
            # Names that differ may be equal in every valid run, and what else reads numbers of keys may take no others.
            with contextlib.suppress(DoesNotRun):
                compare(case, 0)
        self.passed.add(key)

    def assumes(self, site: AttentionSite, mask: LiftedMask) -> list[str]:
        """The whole-number inputs behind a site's padding that the graph computes with, so that 0 and 1 alone are padding.

        Found by running the mask on others. Empty where it does what the lifted mask says for these, too.
        """
        key = self.key(site, mask)
        if key not in self.assumed:
            read = InputMaker(self.model, self.symbolic, *read_by([(site, mask)]), index=self.index).pads
            found = sorted(n for n in read if dtype_kind(self.symbolic.dtype(n)) == "i")
            terms = [t for t in site.terms if t not in mask.bias]
            try:
                if found and terms:
                    for number, case in enumerate([Case(2, 29, Padding.NONE), Case(3, 11, Padding.NONE)]):
                        self._compare(site, mask, terms, case, number, stated=False, numbers=frozenset(found))
                        self._multiply(site, mask, case, number, frozenset(found))
                found = []
            except UnsupportedError:
                pass
            self.assumed[key] = found
        return self.assumed[key]

    def _multiply(self, site: AttentionSite, mask: LiftedMask, case: Case, seed: int, numbers: frozenset[str]) -> None:
        """Runs what weights are multiplied with after the softmax on inputs that hold more than 0 and 1.

        Raises:
            UnsupportedError: when it is more than 0 and 1 then.
        """
        guard = site.pair_guard
        if guard is None or guard.fill is not None:
            return
        feeds, sizes = self.runner.draw(site, mask, case, seed)
        (value,) = self.runner.run([guard.tensor], _with_numbers(feeds, numbers, seed), sizes)
        if not np.isin(value, (0, 1)).all():
            raise UnsupportedError(f"{guard.tensor!r} multiplies the attention weights by more than 0 and 1")

    def fills(self, site: AttentionSite, mask: LiftedMask) -> list[float]:
        """The values of forbidden entries, of terms that could not be lifted: found by running them once.

        Raises:
            UnsupportedError: when a mask tensor cannot be run.
        """
        chosen = [t for t in site.terms if t.kind is not TermKind.ADD and not t.zeroes]
        found = [-math.inf if t.fill is None else t.fill for t in chosen]
        added = [t for t in site.terms if t.kind is TermKind.ADD]
        if not added:
            return found
        feeds, sizes = self.runner.draw(site, mask, Case(2, lengths(mask.expression)[-1], Padding.LEFT), seed=0)
        for term, value in zip(added, self.runner.values(site, added, feeds, sizes), strict=True):
            kept = kept_by(term, value, self.symbolic.dtype(term.tensor))
            found += np.unique(value.astype(np.float64)[~kept] * term.scale).tolist()
        return found

    def added(
        self, site: AttentionSite, mask: LiftedMask, terms: Sequence[MaskTerm], case: Case, seed: int = 0
    ) -> tuple[np.ndarray, np.ndarray, int]:
        """What additive terms add to the scores, fp64 [B, H, S, T], the pairs that the mask allows, and the past length P.

        Raises:
            UnsupportedError: when the terms cannot be run at these sizes.
        """
        feeds, sizes = self.runner.draw(site, mask, case, seed)
        B, H, S, T = score_sizes(site, sizes)
        total = np.zeros((B, H, S, T))
        feeds = self.runner.with_computed(mask, feeds, sizes)
        allowed, past = allowed_by(site, mask, feeds, (B, H, S, T))
        for term, value in zip(terms, self.runner.values(site, terms, feeds, sizes), strict=True):
            if not _broadcasts(value, total.shape):
                raise DoesNotRun(f"{term.tensor!r} has shape {value.shape} at {case}, of {total.shape}")
            total += np.broadcast_to(value.astype(np.float64) * term.scale, total.shape)
        return total, allowed, past

    def terms(
        self, site: AttentionSite, mask: LiftedMask, terms: Sequence[MaskTerm], case: Case, seed: int
    ) -> tuple[list[np.ndarray], np.ndarray]:
        """Mask tensors of a site, and the pairs [B, H, S, T] that the lifted mask allows.

        Raises:
            UnsupportedError: when they cannot be run at these sizes.
        """
        feeds, sizes = self.runner.draw(site, mask, case, seed)
        B, H, S, T = score_sizes(site, sizes)
        allowed, _ = allowed_by(site, mask, self.runner.with_computed(mask, feeds, sizes), (B, H, S, T))
        return self.runner.values(site, terms, feeds, sizes), allowed

    def _compare(
        self,
        site: AttentionSite,
        mask: LiftedMask,
        terms: list[MaskTerm],
        case: Case,
        seed: int,
        stated: bool,
        numbers: frozenset[str] = frozenset(),
    ) -> None:
        self.seen.add(case.length)
        feeds, sizes = self.runner.draw(site, mask, case, seed)
        feeds = _with_numbers(feeds, numbers, seed)
        if not terms:
            raise GuardError(f"{site.row_guard!r} zeroes rows by a mask that depends on more than shapes and inputs")
        scores = score_sizes(site, sizes)
        values = self.runner.values(site, terms, feeds, sizes)
        for term, value in zip(terms, values, strict=True):
            if not _broadcasts(value, scores):
                raise DoesNotRun(f"mask tensor {term.tensor!r} has shape {value.shape} at {case}, of {scores}")
        shape = _, _, S, T = scores if site.row_guard or mask.relative else _differing(mask, values, scores)
        wanted = np.ones(shape, bool)
        left = np.ones(shape, bool)  # by terms that stay a bias
        nulled = np.zeros(shape, bool)  # by multiplied masks
        reached = np.ones(shape, bool)  # where no bias is -inf
        for term, value in zip(terms, values, strict=True):
            kept = kept_by(term, value, self.symbolic.dtype(term.tensor))
            if term in mask.bias and not stated:
                left &= kept
                # A selection becomes a bias of -inf.
                added = term.kind is TermKind.ADD
                reached &= ~np.isneginf(value.astype(np.float64) * term.scale) if added else kept
                continue
            if term not in mask.bias and not (mask.relative is not None and term in mask.relative.terms):
                check_no_bias(term, value, kept, case)
            if term.zeroes:
                nulled |= ~kept
            else:
                wanted &= kept
        if (nulled & wanted & left).any():
            raise UnsupportedError(
                f"a mask that scores are multiplied with leaves zeros that nothing forbids at {case}"
            )
        found, P = allowed_by(site, mask, self.runner.with_computed(mask, feeds, sizes), shape)
        if mask.relative is not None:
            total, _, _ = self.added(site, mask, mask.relative.terms, case, seed)
            table = np.broadcast_to(spread(mask.relative, S, T, P), total.shape)
            if not np.allclose(total[found], table[found], rtol=1e-6, atol=0.0):
                raise UnsupportedError(f"the bias is no function of the distance of key and query at {case}")
        if site.row_guard is not None:
            (zeroed,) = self.runner.run([site.row_guard], feeds, sizes)
            # What the operator takes for empty: a bias counts where it is -inf, not where it is merely low.
            empty = ~(found & reached).any(axis=-1, keepdims=True)
            if not np.array_equal(np.broadcast_to(zeroed.astype(bool), empty.shape), empty):
                raise GuardError(f"{site.row_guard!r} zeroes other rows than those without a key, at {case}")
        wrong = (found & ~wanted) | (~found & wanted & left)
        if wrong.any():
            where = tuple(int(i) for i in np.argwhere(wrong)[0])
            raise UnsupportedError(
                f"mask {mask.expression!r} differs from the graph at {case}, scores of {list(scores)}: (b, h, q, k) = {where} is "
                f"{'allowed' if wanted[where] else 'forbidden'} there"
            )


def _with_numbers(feeds: dict[str, np.ndarray], numbers: frozenset[str], seed: int) -> dict[str, np.ndarray]:
    """Inputs, some of which hold numbers beside 0 and 1."""
    drawn = dict(feeds)
    for name in numbers & set(feeds):
        low = -2 if feeds[name].dtype.kind == "i" else 0
        drawn[name] = np.random.default_rng(seed).integers(low, 4, feeds[name].shape).astype(feeds[name].dtype)
    return drawn


def _differing(
    mask: LiftedMask, values: Sequence[np.ndarray], scores: tuple[int, int, int, int]
) -> tuple[int, int, int, int]:
    """The shape of scores with 1 for batches, and for heads, that all have the same mask: what is large may be compared once."""
    read = set(re.findall(r"\w+", mask.expression))
    shapes = [(1, 1, 1, 1)[: 4 - v.ndim] + v.shape for v in values]
    batches = mask.operands or "b" in read or any(s[0] != 1 for s in shapes)
    heads = "h" in read or any(s[1] != 1 for s in shapes)
    B, H, S, T = scores
    return B if batches else min(B, 1), H if heads else min(H, 1), S, T


def _broadcasts(value: np.ndarray, target: tuple[int, ...]) -> bool:
    try:
        return np.broadcast_shapes(value.shape, target) == target
    except ValueError:
        return False
