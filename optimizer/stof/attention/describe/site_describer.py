# SPDX-License-Identifier: Apache-2.0
"""Describes sites: the user's choice, the mask of each and its check by running the graph, and the problem for kernels."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import onnx

from stof.attention.describe.site_problem import SiteProblem
from stof.attention.limits import relative_roles, relative_roles_on
from stof.attention.plan_entry import SitePlan
from stof.attention.quantized.rounded_masks import check_rounded_mask
from stof.attention.report import NAMES, SiteReport, Step
from stof.attention.split_mask_sums import split_filled_terms, split_terms
from stof.errors import GuardError, UnsupportedError
from stof.mask.accept import accept, with_or_without_guard
from stof.mask.check.checker import MaskChecker
from stof.mask.empty_rows.check_empty_rows import check_empty_rows
from stof.mask.empty_rows.row_prover import RowProver
from stof.mask.equal_strength import find_equal_strength
from stof.mask.expression import MaskExpression
from stof.mask.expression_parser import MaskSyntaxError
from stof.mask.lift import lift, weaker_terms
from stof.mask.relative_bias.lift import with_relative_bias
from stof.mask.relative_roles import RELATIVE_BIAS_FACTOR
from stof.mask.relative_terms.factor import with_factor
from stof.mask.relative_terms.lift import with_relative_terms, without_relative_terms
from stof.mask.relative_terms.narrow import narrow_tables
from stof.mask.relative_terms.values import with_relative_values
from stof.mask.site import AttentionSite, EmptyRows, Layout, LiftedMask, MaskTerm, NoteReason, Operand
from stof.mask.stated_masks import state
from stof.options import Options
from stof.selection import NamedCandidate, Selection, UserChoice
from stof.symbolic import Symbolic


@dataclass(frozen=True)
class DescribedSite:
    """A site with its problem, or with what stands against it so far.

    Attributes:
        site: what is replaced; without its row guard where that stays in the graph.
        row: of the report, with what is known of the mask.
        entry: of a plan that replaces it; None: there is none.
        mask: as it was lifted and checked; None where that failed.
        problem: what it asks of kernels; None likewise.
        reason: why it has no problem; empty where it has one.
        step: how far it got.
        ignores_rows: its fully masked rows may differ from the graph's.
    """

    site: AttentionSite
    row: SiteReport
    entry: SitePlan | None = None
    mask: LiftedMask | None = None
    problem: SiteProblem | None = None
    reason: str = ""
    step: Step = Step.KERNEL
    ignores_rows: bool = False


class SiteDescriber:
    """Describes the sites of one graph.

    Args:
        model: with the graph.
        symbolic: its facts.
        options: of the optimization.
        choice: of the user.
        folder: where its external data lies.
        ignored_rows: names of sites whose fully masked rows may differ, as those of all may by ``options``.
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        symbolic: Symbolic,
        options: Options,
        choice: UserChoice | None = None,
        folder: Path | None = None,
        ignored_rows: frozenset[str] = frozenset(),
    ) -> None:
        self.symbolic = symbolic
        self.ignored_rows = ignored_rows
        self.choice = choice or UserChoice(Selection(NAMES))
        self.options = options
        self.checker = MaskChecker(model, symbolic)
        self.prover = RowProver(self.checker, folder)
        # Of sites that differ in no more than their place in the graph, and by whether fully masked rows may differ.
        self.lifted: dict[tuple[AttentionSite, bool], LiftedMask] = {}

    def describe(self, site: AttentionSite) -> DescribedSite:
        """The site with its problem.

        Raises:
            ArgumentError: for a stated mask that cannot be read.
            VerifyError: for a stated mask that is not the graph's.
        """
        return with_or_without_guard(site, self._describe)

    def _describe(self, site: AttentionSite) -> DescribedSite:
        row = SiteReport(
            site.name, False, "", site.form, index=site.index, heads=_heads(site), head_size=site.head_size
        )
        if reason := self.choice.reason_left_out(NamedCandidate(site.name, site.index)):
            return DescribedSite(site, row, reason=reason, step=Step.CHOICE)
        planned = self.choice.entry_of(site.name)
        entry = planned if isinstance(planned, SitePlan) else None
        step = Step.MATCH
        try:
            if any(d.constant == 0 for d in site.dims):
                raise UnsupportedError(f"its scores have the fixed shape {list(site.scores_shape)}: nothing to compute")
            step = Step.LIFT
            site = split_terms(self.checker.index, self.symbolic, site)
            mask = self._mask(site, entry)
            if site.roundings is not None:
                check_rounded_mask(site, mask)
            else:
                mask = with_relative_bias(self.checker, site, mask)
                site, mask = self._with_relative_terms(site, entry, mask)
                mask = with_relative_values(self.checker, site, mask, self._roles())
            masked = without_relative_terms(site, mask)
            if entry is None or not entry.empty_rows:
                mask = self.prover.simplify_empty_rows(masked, mask)
            notes = tuple(map(str, mask.notes))
            row = replace(row, mask=mask.expression.text, family=mask.family, notes=notes)
            step = Step.CHECK
            accept(self.checker, masked, mask, ignore_empty_rows=self._ignores_rows(site))
            row = replace(row, notes=(*notes, *_assumption_notes(self.checker.find_binary_inputs(masked, mask))))
        except UnsupportedError as error:
            if isinstance(error, GuardError) and site.unguarded is not None:
                raise
            return DescribedSite(site, row, entry, reason=str(error), step=step)
        mask = narrow_tables(self.symbolic, site, mask)
        problem = SiteProblem.of(site, mask)
        return DescribedSite(site, row, entry, mask, problem, ignores_rows=self._ignores_rows(site))

    def _with_relative_terms(
        self, site: AttentionSite, entry: SitePlan | None, mask: LiftedMask
    ) -> tuple[AttentionSite, LiftedMask]:
        """The site and its mask with products with tables by relative position, where the target's kernels take them.

        A term that a mask fills is split for it. The site and mask as they are, where the masks do not hold with these products.
        """
        roles = self._roles()
        if not roles or not mask.bias:
            return site, mask
        split = split_filled_terms(self.checker.index, self.symbolic, site, mask.bias)
        ways = [split, site] if split != site and self._may_split(split, entry) else [site]
        for way in ways:
            try:
                before = mask if way == site else with_relative_bias(self.checker, way, self._mask(way, entry))
                lifted = with_relative_terms(self.checker, way, before, roles)
                lifted = with_factor(self.checker, way, lifted) if RELATIVE_BIAS_FACTOR in roles else lifted
                if lifted.relative_terms or lifted.relative_factor is not None:
                    rest = without_relative_terms(way, lifted)
                    accept(self.checker, rest, lifted, ignore_empty_rows=self._ignores_rows(way))
                    return way, lifted
                mask = replace(mask, notes=lifted.notes) if way == site else mask  # with what stood against it
            except UnsupportedError:
                continue
        return site, mask

    def _roles(self) -> frozenset[str]:
        """The roles of relative terms that the target's kernels take."""
        target = self.options.tuned_for
        return relative_roles() & relative_roles_on(target) if target.takes_relative_terms else frozenset()

    def _may_split(self, split: AttentionSite, entry: SitePlan | None) -> bool:
        """Whether no one states a mask for a site, or the one that a plan has is that of its split terms."""
        if split.name in self.options.masks or str(split.index) in self.options.masks:
            return False
        try:
            return entry is None or _is_text_of(entry.mask, self._lift_once(split).expression)
        except UnsupportedError:
            return False

    def _ignores_rows(self, site: AttentionSite) -> bool:
        """Whether fully masked rows of a site may differ from the graph's."""
        return self.options.ignore_empty_rows or site.name in self.ignored_rows

    def _mask(self, site: AttentionSite, entry: SitePlan | None) -> LiftedMask:
        stated = self.options.masks.get(site.name, self.options.masks.get(str(site.index)))
        if stated is not None:
            mask = state(self.symbolic, site, stated, self.checker)
        elif entry is not None:
            mask = self._mask_of_plan(site, entry)
        else:
            mask = self._lift_once(site)
        if entry is not None and entry.empty_rows:
            mask = replace(mask, empty_rows=EmptyRows(entry.empty_rows))
        if self._ignores_rows(site) and mask.empty_rows is not EmptyRows.NAN:
            mask = replace(mask, empty_rows=EmptyRows.ZERO)
        return mask

    def _lift_once(self, site: AttentionSite) -> LiftedMask:
        key = _mask_key(site), self._ignores_rows(site)
        if key not in self.lifted:
            self.lifted[key] = self._lift(site)
        return self.lifted[key]

    def _lift(self, site: AttentionSite) -> LiftedMask:
        mask = lift(self.symbolic, site)
        if self._ignores_rows(site):
            return mask
        if equals := find_equal_strength(self.symbolic, site, mask):
            return lift(self.symbolic, site, equals)
        as_bias = weaker_terms(self.symbolic, site)
        if not as_bias and not any(n.reason is NoteReason.DIFFERENT_STRENGTHS for n in mask.notes):
            return mask
        try:
            check_empty_rows(self.checker, site, mask)
        except UnsupportedError:
            return self._lift_with_levels(site, as_bias) or mask
        return mask

    def _lift_with_levels(self, site: AttentionSite, as_bias: Sequence[MaskTerm]) -> LiftedMask | None:
        """The mask with what fully masked rows attend: by a bias that all queries share, by weaker masks, by any bias."""
        shapes = [self.symbolic.shape(t.tensor) or () for t in as_bias]
        is_shared = all(d.constant == 1 for shape in shapes for d in shape[-2:-1])
        ways: list[Callable[[], LiftedMask]] = [lambda: lift(self.symbolic, site, with_weaker=True)]
        if as_bias:
            ways.insert(0 if is_shared else 1, lambda: lift(self.symbolic, site, as_bias))
        mask: LiftedMask | None = None
        for way in ways:
            with contextlib.suppress(UnsupportedError):
                mask = way()
                check_empty_rows(self.checker, site, mask)
                return mask
        return mask

    def _mask_of_plan(self, site: AttentionSite, entry: SitePlan) -> LiftedMask:
        try:
            mask = self._lift_once(site)
        except UnsupportedError:
            mask = None
        if mask is not None and _is_text_of(entry.mask, mask.expression):
            return mask
        if mask is not None and mask.bias and self._roles():
            # The plan may have the mask of the split terms, which relative terms need and are looked for later.
            split = split_filled_terms(self.checker.index, self.symbolic, site, mask.bias)
            if split != site and self._may_split(split, entry):
                return mask
        # A mask that was edited, or stated when the plan was made, counts as stated.
        return state(self.symbolic, site, entry.mask, self.checker)


def _is_text_of(text: str, expression: MaskExpression) -> bool:
    try:
        return MaskExpression.parse(text) == expression
    except MaskSyntaxError:
        return False


_NO_OPERAND = Operand("", Layout.BHSD)


def _mask_key(site: AttentionSite) -> AttentionSite:
    """What a site's mask is made of: layers share the tensors of their masks, and differ in all that is left out here."""
    none = _NO_OPERAND
    return replace(
        site, name="", index=0, softmax="", query=none, key=none, value=none, output="", nodes=(), unguarded=None,
        added_values=None, roundings=None,
    )  # fmt: skip


def _assumption_notes(inputs: Sequence[str]) -> list[str]:
    return [f"{name} is taken to hold 0 and 1 only: the graph computes with it" for name in inputs]


def _heads(site: AttentionSite) -> str:
    return f"{site.num_heads} heads" + (f" on {site.kv_num_heads}" if site.kv_num_heads != site.num_heads else "")
