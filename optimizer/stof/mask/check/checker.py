# SPDX-License-Identifier: Apache-2.0
"""The check by execution: runs a site's mask tensors at several sizes, and compares them with the lifted mask by element."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import onnx

from stof.errors import GuardError, UnsupportedError
from stof.execution.case import Case, Padding
from stof.execution.inputs import InputMaker
from stof.mask.check.run_masks import DoesNotRunError, MaskRunner, score_sizes, tensors_by_role
from stof.mask.check.sizes import (
    cases_of_counts,
    cases_of_cross_attention,
    cases_of_lengths,
    cases_without_past,
    choose_lengths,
    constants_of,
    short_cases,
)
from stof.mask.check.subgraph_hash import SubgraphHashes
from stof.mask.evaluate import check_no_bias, evaluate_mask, evaluate_term
from stof.mask.relative_bias.distance_table import spread
from stof.mask.site import AttentionSite, LiftedMask, MaskTerm, TermKind
from stof.mask.strength import LOWEST
from stof.symbolic import Symbolic
from stof.symbolic.facts import dtype_kind
from stof.symbolic.trace import Trace

_MIN_LENGTHS = 3  # at which a mask must be compared


class MaskMismatchError(UnsupportedError):
    """The lifted mask allows a pair that the graph forbids, or the other way round."""


class MaskChecker:
    """Checks the masks of one model. Results are kept per distinct (terms, expression)."""

    def __init__(self, model: onnx.ModelProto, symbolic: Symbolic) -> None:
        self.model = model
        self.symbolic = symbolic
        self.runner = MaskRunner(model, symbolic)
        self.index = self.runner.index
        self.hashes = SubgraphHashes(self.index, symbolic)
        self.trace = Trace(symbolic, self.index)
        self.checked_rows: set[tuple[object, ...]] = set()  # masks whose fully masked rows were compared
        self.relatives: dict[
            tuple[object, ...], LiftedMask
        ] = {}  # masks with their biases as tables, where they can be
        self.row_runs: dict[
            tuple[object, ...], object
        ] = {}  # what runs showed of rows of relative tables, by relative_terms
        self.compared_lengths: set[int] = set()
        self._passed: set[tuple[object, ...]] = set()
        self._binary_inputs: dict[tuple[object, ...], list[str]] = {}

    def key(self, site: AttentionSite, mask: LiftedMask) -> tuple[object, ...]:
        """Equal for sites of the same sizes with the same mask, made of tensors that are computed alike."""
        terms = [(t, self.symbolic.value(t.tensor) is not None) for t in site.terms]
        return (
            # A tensor without a symbolic value may depend on the whole network before it: its name stands for it.
            tuple(
                (
                    t.kind,
                    t.fill,
                    t.scale,
                    t.view,
                    self.hashes.of(t.tensor) if is_known else t.tensor,
                )
                for t, is_known in terms
            ),
            tuple(t in mask.bias for t in site.terms),
            None if mask.relative is None else replace(mask.relative, terms=()),
            mask.expression,
            mask.tables,
            tuple((o.role, o.view, self.hashes.of(o.tensor)) for o in mask.operands),
            None if site.row_guard is None else self.hashes.of(site.row_guard),
            mask.empty_rows,
            mask.weaker,
            site.dims,
            site.query_offset,
            site.nan_guard,
            site.zeroed,
            site.pair_guard,
            site.floored,
            site.sink is not None,
        )

    def check(self, site: AttentionSite, mask: LiftedMask, *, is_stated: bool = False) -> None:
        """Compares at several sizes.

        Terms that stay a bias may forbid pairs. A lifted mask may leave these pairs to them, a stated one must forbid them.

        Raises:
            UnsupportedError: naming the first element at which graph and expression differ.
        """
        # A bias that cannot be evaluated may depend on the whole network before it; it was lifted as one that allows all.
        terms = [t for t in site.terms if is_stated or t not in mask.bias or self.symbolic.value(t.tensor) is not None]
        key = (*self.key(site, mask), len(terms), is_stated)
        if (not terms and site.row_guard is None) or key in self._passed:
            return
        # The graph's numbers count too: a stated mask may leave out a window.
        sources = self.runner.sources_of(site)
        numbers = mask.expression.literals | constants_of(self.symbolic, sources)
        if mask.relative is not None:
            numbers |= {mask.relative.size // 2 + 1}
        # Where all terms stay biases, runs show only that they fit the scores: at few lengths, the graph's own ones last.
        lifts_nothing = not is_stated and self._lifts_nothing(site, mask, terms)
        chosen = choose_lengths(() if lifts_nothing else numbers)
        cases = cases_of_lengths(site, mask, chosen, () if lifts_nothing else numbers)
        further = [*short_cases(chosen), *(cases_of_lengths(site, mask, choose_lengths(numbers), ()) * lifts_nothing)]
        certain = 0 if lifts_nothing else len(cases)  # these are compared whatever the others show
        compared: set[tuple[object, ...]] = set()
        ran: set[tuple[int, ...]] = set()
        is_static = not mask.operands and not sources & self.runner.inputs

        def compare(case: Case, seed: int) -> None:
            # Padding may show in a guard of rows, which is not among the masks.
            padding = None if site.row_guard is None else case.padding
            size_key = (*sorted(self.runner.sizes(case).items()), padding) if is_static else ()
            if size_key and size_key in compared:
                return  # equal sizes give the same mask again
            self._compare(site, mask, terms, case, seed, is_stated)
            compared.add(size_key)
            ran.add(self.runner.lengths(site, case))

        with self.runner.keep_sizes():
            refused = self._compare_lengths([*cases, *further], certain, compare)
            while refused is not None:
                # The graph refuses what was drawn. Sizes are narrowed as those of verification are.
                case, seed, failure = refused
                if not self.runner.narrow(site, mask, case, seed, failure.refused):
                    raise failure
                ran.clear()
                refused = self._compare_lengths([*cases, *further], certain, compare)
                if refused is None and len(ran) < _MIN_LENGTHS:  # what one length shows may not hold at others
                    raise failure
        middle = chosen[len(chosen) // 2]
        others = [*cases_of_cross_attention(site, middle), *cases_without_past(site, middle)]
        for case in [*others, *cases_of_counts(mask, 3, (middle,))]:
            # Such sizes may be invalid: dimensions of two names may be equal in every valid run.
            with contextlib.suppress(DoesNotRunError):
                compare(case, 0)
        self._passed.add(key)

    @staticmethod
    def _compare_lengths(
        cases: Sequence[Case], certain: int, compare: Callable[[Case, int], None]
    ) -> tuple[Case, int, DoesNotRunError] | None:
        """Compares at several lengths, the first ``certain`` ones in any case.

        Returns:
            Where too few lengths run, the last case that does not, its number and its error.
        """
        compared, limit = 0, math.inf
        refused: tuple[Case, int, DoesNotRunError] | None = None
        for number, case in enumerate(cases):
            if case.length >= limit or (number >= certain and compared >= _MIN_LENGTHS):
                continue
            try:
                compare(case, number)
                compared += 1
            except DoesNotRunError as error:
                # Beyond a stored mask nothing runs; below the size of a block, longer inputs may.
                refused, limit = (case, number, error), case.length if compared else limit
        return refused if compared < _MIN_LENGTHS else None

    @staticmethod
    def _lifts_nothing(site: AttentionSite, mask: LiftedMask, terms: Sequence[MaskTerm]) -> bool:
        """Whether the operator computes nothing of a mask itself: every term is handed to it as a bias."""
        handed = all(t in mask.bias for t in terms)
        return handed and mask.expression.allows_all and mask.relative is None and site.row_guard is None

    def find_binary_inputs(self, site: AttentionSite, mask: LiftedMask) -> list[str]:
        """The integer inputs behind a site's padding that must hold 0 and 1 only, because the graph computes with them.

        Found by running the mask on other numbers. Empty where graph and lifted mask agree on these, too.
        """
        key = self.key(site, mask)
        if key not in self._binary_inputs:
            read = InputMaker(self.model, self.symbolic, *tensors_by_role([(site, mask)]), index=self.index).pads
            # A vector that is compared with numbers, as padding is with 0.
            if "segment_q" not in mask.expression.vectors:
                read |= {o.tensor for o in mask.operands if o.role == "segment_k"} & self.runner.inputs
            binary_inputs = sorted(n for n in read if dtype_kind(self.symbolic.dtype(n)) == "i")
            terms = [t for t in site.terms if t not in mask.bias]
            try:
                if binary_inputs and terms:
                    for number, case in enumerate([Case(2, 29, Padding.NONE), Case(3, 11, Padding.NONE)]):
                        self._compare(
                            site, mask, terms, case, number, is_stated=False, numbers=frozenset(binary_inputs)
                        )
                        self._check_factors(site, mask, case, number, frozenset(binary_inputs))
                binary_inputs = []
            except UnsupportedError:
                pass
            self._binary_inputs[key] = binary_inputs
        return self._binary_inputs[key]

    def _check_factors(
        self, site: AttentionSite, mask: LiftedMask, case: Case, seed: int, numbers: frozenset[str]
    ) -> None:
        """Runs what scores, and weights behind the softmax, are multiplied by on inputs that hold more than 0 and 1.

        Raises:
            UnsupportedError: when it is more than 0 and 1 then.
        """
        # A selection that is no condition is a factor of the scores.
        factors = [t for t in site.terms if t.kind is not TermKind.ADD and self.symbolic.dtype(t.tensor) in LOWEST]
        names = {t.tensor: "scores" for t in factors}
        if site.pair_guard is not None and site.pair_guard.fill is None:
            names[site.pair_guard.tensor] = "attention weights"
        if not names:
            return
        feeds, sizes = self.runner.draw(site, mask, case, seed)
        values = self.runner.run(list(names), _with_numbers(feeds, numbers, seed), sizes)
        for (name, what), value in zip(names.items(), values, strict=True):
            if not np.isin(value, (0, 1)).all():
                raise UnsupportedError(f"{name!r} multiplies the {what} by more than 0 and 1")

    def fills(self, site: AttentionSite, mask: LiftedMask) -> list[float]:
        """The values of forbidden entries, found by running the terms once; for terms that could not be lifted.

        Raises:
            UnsupportedError: when a mask tensor cannot be run.
        """
        chosen = [t for t in site.terms if t.kind is not TermKind.ADD and not t.zeroes]
        fills = [-math.inf if t.fill is None else t.fill for t in chosen]
        added = [t for t in site.terms if t.kind is TermKind.ADD]
        if not added:
            return fills
        feeds, sizes = self.runner.draw(
            site, mask, Case(2, choose_lengths(mask.expression.literals)[-1], Padding.LEFT), seed=0
        )
        for term, value in zip(added, self.runner.values(site, added, feeds, sizes), strict=True):
            allowed = evaluate_term(term, value, self.symbolic.dtype(term.tensor))
            fills += np.unique(value.astype(np.float64)[~allowed] * term.scale).tolist()
        return fills

    def run_bias(
        self, site: AttentionSite, mask: LiftedMask, terms: Sequence[MaskTerm], case: Case, seed: int = 0
    ) -> tuple[np.ndarray, np.ndarray, int]:
        """The sum of additive terms, fp64 [B, H, S, T], the pairs that the mask allows, and the past length P.

        Raises:
            UnsupportedError: when the terms cannot be run at these sizes.
        """
        feeds, sizes = self.runner.draw(site, mask, case, seed)
        B, H, S, T = score_sizes(site, sizes)
        total = np.zeros((B, H, S, T))
        feeds = self.runner.with_computed(mask, feeds, sizes)
        allowed, past = evaluate_mask(site, mask, feeds, (B, H, S, T))
        for term, value in zip(terms, self.runner.values(site, terms, feeds, sizes), strict=True):
            if not _broadcasts(value, total.shape):
                words = f"{term.tensor!r} has shape {value.shape} at {case}, of {total.shape}"
                raise DoesNotRunError.of_shapes(words, value.shape, total.shape)
            total += np.broadcast_to(value.astype(np.float64) * term.scale, total.shape)
        return total, allowed, past

    def run_terms(
        self,
        site: AttentionSite,
        mask: LiftedMask,
        terms: Sequence[MaskTerm],
        case: Case,
        seed: int,
        drawn_for: LiftedMask | None = None,
    ) -> tuple[list[np.ndarray], np.ndarray]:
        """The tensors of terms as they broadcast to [B, H, S, T], and the pairs that the lifted mask allows.

        B and H are 1 where batches and heads share their masks. ``drawn_for`` is a mask whose padding is drawn, where it is
        not that of ``mask``.

        Raises:
            UnsupportedError: when they cannot be run at these sizes.
        """
        feeds, sizes = self.runner.draw(site, drawn_for or mask, case, seed)
        values = self.runner.values(site, terms, feeds, sizes)
        shape = _distinct_shape(mask, values, score_sizes(site, sizes))
        allowed, _ = evaluate_mask(site, mask, self.runner.with_computed(mask, feeds, sizes), shape)
        return values, allowed

    def _compare(
        self,
        site: AttentionSite,
        mask: LiftedMask,
        terms: list[MaskTerm],
        case: Case,
        seed: int,
        is_stated: bool,
        numbers: frozenset[str] = frozenset(),
    ) -> None:
        self.compared_lengths.add(case.length)
        feeds, sizes = self.runner.draw(site, mask, case, seed)
        feeds = _with_numbers(feeds, numbers, seed)
        if not terms:
            raise GuardError(f"{site.row_guard!r} zeroes rows by a mask that depends on more than shapes and inputs")
        scores = score_sizes(site, sizes)
        values = self.runner.values(site, terms, feeds, sizes)
        _check_broadcasts(terms, values, scores, case)
        shape = _, _, S, T = scores if site.row_guard or mask.relative else _distinct_shape(mask, values, scores)
        wanted = np.ones(shape, bool)
        allowed_by_bias = np.ones(shape, bool)  # terms that stay a bias
        zeroed = np.zeros(shape, bool)  # scores that are multiplied by 0
        finite = np.ones(shape, bool)  # no bias is -inf
        for term, value in zip(terms, values, strict=True):
            allowed = evaluate_term(term, value, self.symbolic.dtype(term.tensor))
            if term in mask.bias and not is_stated:
                allowed_by_bias &= allowed
                # A selection becomes a bias of -inf.
                added = term.kind is TermKind.ADD
                finite &= ~np.isneginf(value.astype(np.float64) * term.scale) if added else allowed
                continue
            if term not in mask.bias and not (mask.relative is not None and term in mask.relative.terms):
                check_no_bias(term, value, allowed, case)
            if term.zeroes:
                zeroed |= ~allowed
            else:
                wanted &= allowed
        if (zeroed & wanted & allowed_by_bias).any():
            raise UnsupportedError(
                f"a mask that scores are multiplied with leaves zeros that nothing forbids at {case}"
            )
        expression_pairs, P = evaluate_mask(site, mask, self.runner.with_computed(mask, feeds, sizes), shape)
        if mask.relative is not None:
            total, _, _ = self.run_bias(site, mask, mask.relative.terms, case, seed)
            table = np.broadcast_to(spread(mask.relative, S, T, P), total.shape)
            if not np.allclose(total[expression_pairs], table[expression_pairs], rtol=1e-6, atol=0.0):
                raise UnsupportedError(f"the bias is no function of the distance of key and query at {case}")
        if site.row_guard is not None:
            (guard,) = self.runner.run([site.row_guard], feeds, sizes)
            # For the operator a bias forbids where it is -inf, not where it is merely low.
            empty = ~(expression_pairs & finite).any(axis=-1, keepdims=True)
            if not np.array_equal(np.broadcast_to(guard.astype(bool), empty.shape), empty):
                raise GuardError(f"{site.row_guard!r} zeroes other rows than those without a key, at {case}")
        wrong = (expression_pairs & ~wanted) | (~expression_pairs & wanted & allowed_by_bias)
        if wrong.any():
            where = tuple(int(i) for i in np.argwhere(wrong)[0])
            raise MaskMismatchError(
                f"mask '{mask.expression}' differs from the graph at {case}, scores of {list(scores)}: (b, h, q, k) = {where} is "
                f"{'allowed' if wanted[where] else 'forbidden'} there"
            )


def _with_numbers(feeds: dict[str, np.ndarray], numbers: frozenset[str], seed: int) -> dict[str, np.ndarray]:
    """The inputs, with small numbers beside 0 and 1 in those that are named."""
    drawn = dict(feeds)
    for name in numbers & set(feeds):
        low = -2 if feeds[name].dtype.kind == "i" else 0
        drawn[name] = np.random.default_rng(seed).integers(low, 4, feeds[name].shape).astype(feeds[name].dtype)
    return drawn


def _distinct_shape(
    mask: LiftedMask, values: Sequence[np.ndarray], scores: tuple[int, int, int, int]
) -> tuple[int, int, int, int]:
    """The shape of scores with 1 for batches and heads that share one mask, so that large masks are compared once."""
    read = mask.expression.reads
    shapes = [(1, 1, 1, 1)[: 4 - v.ndim] + v.shape for v in values]
    differ_by_batch = mask.operands or "b" in read or any(s[0] != 1 for s in shapes)
    differ_by_head = "h" in read or any(s[1] != 1 for s in shapes)
    B, H, S, T = scores
    return B if differ_by_batch else min(B, 1), H if differ_by_head else min(H, 1), S, T


def _check_broadcasts(
    terms: Sequence[MaskTerm], values: Sequence[np.ndarray], scores: tuple[int, ...], case: Case
) -> None:
    for term, value in zip(terms, values, strict=True):
        if not _broadcasts(value, scores):
            words = f"mask tensor {term.tensor!r} has shape {value.shape} at {case}, of {scores}"
            raise DoesNotRunError.of_shapes(words, value.shape, scores)


def _broadcasts(value: np.ndarray, target: tuple[int, ...]) -> bool:
    try:
        return np.broadcast_shapes(value.shape, target) == target
    except ValueError:
        return False
