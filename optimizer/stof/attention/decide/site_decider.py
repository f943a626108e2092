# SPDX-License-Identifier: Apache-2.0
"""What becomes of each site: the user's choice, its mask, the check, the kernels, the estimate, in this order."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import onnx

from stof.attention.decide.cost_cpu import GainEstimate
from stof.attention.decide.kernels import AttentionKernels, Use
from stof.attention.emit import Rewrite
from stof.attention.plan_entry import SitePlan
from stof.attention.report import KEY, NAMES, SiteReport, Step
from stof.attention.split_mask_sums import split_terms
from stof.errors import ArgumentError, GuardError, ModelError, UnsupportedError
from stof.mask.accept import accept, with_or_without_guard
from stof.mask.check.checker import MaskChecker
from stof.mask.empty_rows.check_empty_rows import check_empty_rows
from stof.mask.empty_rows.row_prover import RowProver
from stof.mask.equal_strength import find_equal_strength
from stof.mask.expression import MaskExpression
from stof.mask.expression_parser import MaskSyntaxError
from stof.mask.lift import lift, weaker_terms
from stof.mask.relative_bias.lift import with_relative_bias
from stof.mask.site import AttentionSite, EmptyRows, Finding, Layout, LiftedMask, MaskTerm, NoteReason, Operand
from stof.mask.stated_masks import state
from stof.options import Options
from stof.plan import Plan
from stof.selection import NamedCandidate, Selection, list_candidates
from stof.symbolic import Int, Symbolic
from stof.symbolic.algebra.sizes import evaluate

REPORT_LENGTH = 2048
_RANGE = (128, 8192)
_CURVE = (128, 256, 512, 1024, 2048, 4096, 8192)  # lengths of the report's chart, where they are in use
# Above this length the share of tiles and with it the estimate hardly change, but the block mask of a dense pattern
# grows with the square of it.
_LONGEST = 32768


@dataclass(frozen=True)
class Choice:
    """The outcome for one site: a row of the report, an entry of the plan, and the rewrite where it is replaced.

    ``curve``: estimated gains at several lengths, for the report's page alone.
    """

    report: SiteReport
    plan: SitePlan
    rewrite: Rewrite | None = None
    curve: tuple[tuple[int, float], ...] = ()


def candidates_of(sites: Sequence[AttentionSite], findings: Sequence[Finding]) -> tuple[NamedCandidate, ...]:
    """What options may name: sites by name and number, and by name each softmax that is no attention."""
    return (*(NamedCandidate(s.name, s.index) for s in sites), *(NamedCandidate(f.site) for f in findings))


def check_masks(options: Options, sites: Sequence[AttentionSite]) -> None:
    """Refuses ``--mask`` for sites that the model does not have.

    Raises:
        ArgumentError: naming the site and those that there are.
    """
    for name in options.masks:
        if not any(name in (s.name, str(s.index)) for s in sites):
            raise ArgumentError(f"--mask {name!r} names no attention site of the model; {_known(sites)}")


def check_shapes(options: Options, model: onnx.ModelProto) -> None:
    """Refuses ``--shape`` for dimensions that no input of the model has.

    Raises:
        ArgumentError: naming the dimension and those that there are.
    """
    dims = [d.dim_param for i in model.graph.input for d in i.type.tensor_type.shape.dim if d.dim_param]
    for name in options.shapes:
        if name not in dims:
            named = ", ".join(dict.fromkeys(dims)) or "none, all sizes are fixed"
            raise ArgumentError(f"--shape {name!r} is no symbolic dimension of the model's inputs; these are: {named}")


def _known(sites: Sequence[AttentionSite]) -> str:
    return list_candidates(NAMES, candidates_of(sites, ()))


class SiteDecider:
    """Decides about the sites of one graph.

    Args:
        model: with the graph.
        symbolic: its facts.
        options: of the optimization.
        plan: whose entries are followed; None: there is none.
        kernels: of the target.
        folder: where its external data lies.
        selection: the sites that are left out.
        ignored_rows: names of sites whose fully masked rows may differ, as those of all may by ``options``.
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        symbolic: Symbolic,
        options: Options,
        plan: Plan | None,
        kernels: AttentionKernels,
        folder: Path | None = None,
        selection: Selection | None = None,
        ignored_rows: frozenset[str] = frozenset(),
    ) -> None:
        self.symbolic = symbolic
        self.ignored_rows = ignored_rows
        self.selection = selection or Selection(NAMES)
        self.options = options
        self.plan = plan
        self.kernels = kernels
        self.checker = MaskChecker(model, symbolic)
        self.prover = RowProver(self.checker, folder)
        # Of sites that differ in no more than their place in the graph, and by whether fully masked rows may differ.
        self.lifted: dict[tuple[AttentionSite, bool], LiftedMask] = {}
        self.estimates: dict[tuple[object, ...], list[GainEstimate]] = {}
        self.curves: dict[tuple[object, ...], tuple[tuple[int, float], ...]] = {}

    def decide(self, site: AttentionSite) -> Choice:
        """The outcome for a site.

        Raises:
            ArgumentError: for a stated mask that cannot be read.
            VerifyError: for a stated mask that is not the graph's.
            ModelError: when the plan replaces a site that cannot be.
        """
        return with_or_without_guard(site, self._decide)

    def _decide(self, site: AttentionSite) -> Choice:
        entry = self._entry(site)
        row = SiteReport(
            site.name, False, "", site.form, index=site.index, heads=_heads(site), head_size=site.head_size
        )
        if reason := self._left_out(site, entry):
            return _kept(row, Step.CHOICE, reason)
        step = Step.MATCH
        try:
            if any(d.constant == 0 for d in site.dims):
                raise UnsupportedError(f"its scores have the fixed shape {list(site.scores_shape)}: nothing to compute")
            step = Step.LIFT
            site = split_terms(self.checker.index, self.symbolic, site)
            mask = with_relative_bias(self.checker, site, self._mask(site, entry))
            if entry is None or not entry.empty_rows:
                mask = self.prover.simplify_empty_rows(site, mask)
            notes = tuple(map(str, mask.notes))
            row = replace(row, mask=mask.expression.text, family=mask.family, notes=notes)
            step = Step.CHECK
            accept(self.checker, site, mask, ignore_empty_rows=self._ignores_rows(site))
            row = replace(row, notes=(*notes, *_assumption_notes(self.checker.find_binary_inputs(site, mask))))
            step = Step.KERNEL
            if reasons := self.kernels.why_not(site, mask):
                raise UnsupportedError("no kernel: " + "; ".join(reasons))
            step = Step.COST
            *within, shown = self._estimate_gains(site, mask)
            if entry is None and (reason := self.kernels.leave(site, mask, within)):
                raise UnsupportedError(reason)
        except UnsupportedError as error:
            if isinstance(error, GuardError) and site.unguarded is not None:
                raise
            if entry is not None:
                raise ModelError(
                    f"the plan replaces site {site.name!r}, which cannot be: {error}; set its replace to false"
                ) from error
            return _kept(row, step, str(error))
        gain = shown.gain if self.options.tuned_for.estimates_gains else None
        planned = dict(entry.hints).get("kernel", "") if entry else None
        kernel, hint = self.kernels.kernel(site, mask, Use(self._batch(site), self._lengths(site), planned))
        hints = entry.hints if entry else (("kernel", hint),) if hint else ()
        row = replace(
            row,
            replaced=True,
            reason="replaced",
            step=Step.DONE,
            empty_rows=mask.empty_rows.value,
            kernel=kernel,
            tile_density=shown.tile_density,
            predicted_gain=gain,
            length=shown.length,
        )
        plan = SitePlan(site.name, True, mask.expression.text, mask.empty_rows.value, hints, gain and round(gain, 3))
        tensorrt = self.options.tuned_for.keeps_plugins
        rewrite = Rewrite(site, mask, hints, tensorrt, self.options.allow_tf32, self._ignores_rows(site))
        return Choice(row, plan, rewrite, () if self.options.report is None else self._curve(site, mask))

    def _ignores_rows(self, site: AttentionSite) -> bool:
        """Whether fully masked rows of a site may differ from the graph's."""
        return self.options.ignore_empty_rows or site.name in self.ignored_rows

    def _entry(self, site: AttentionSite) -> SitePlan | None:
        entry = self.plan.of(KEY, site.name) if self.plan else None
        return entry if isinstance(entry, SitePlan) else None

    def _left_out(self, site: AttentionSite, entry: SitePlan | None) -> str:
        """Why a site is left out by the user's choice; empty when it is not."""
        if reason := self.selection.reason_left_out(NamedCandidate(site.name, site.index)):
            return reason
        if self.plan is not None and entry is None:
            return "not in the plan"
        if entry is not None and not entry.replace:
            return entry.reason or "left as it is by the plan"
        return ""

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
        found: LiftedMask | None = None
        for way in ways:
            with contextlib.suppress(UnsupportedError):
                found = way()
                check_empty_rows(self.checker, site, found)
                return found
        return found

    def _mask_of_plan(self, site: AttentionSite, entry: SitePlan) -> LiftedMask:
        try:
            mask = self._lift_once(site)
        except UnsupportedError:
            mask = None
        # A mask that was edited, or stated when the plan was made, counts as stated.
        if mask is None or not _is_text_of(entry.mask, mask.expression):
            return state(self.symbolic, site, entry.mask, self.checker)
        return mask

    def _estimate_gains(self, site: AttentionSite, mask: LiftedMask) -> list[GainEstimate]:
        lengths = self._lengths(site)
        key = (mask.expression, mask.tables, site.num_heads, site.head_size, site.value_head_size, lengths)
        if key not in self.estimates:
            shown = min(max(lengths[0], REPORT_LENGTH), lengths[-1])
            self.estimates[key] = [self.kernels.estimate_gain(site, mask, n) for n in (*lengths, shown)]
        return self.estimates[key]

    def _curve(self, site: AttentionSite, mask: LiftedMask) -> tuple[tuple[int, float], ...]:
        """Estimated gains at the ends of the lengths in use, and at lengths between them."""
        lengths = self._lengths(site)
        least, most = lengths[0], lengths[-1]
        if not self.options.tuned_for.estimates_gains or least == most:
            return ()
        key = (mask.expression, mask.tables, site.num_heads, site.head_size, site.value_head_size, least, most)
        if key not in self.curves:
            between = (n for n in _CURVE if least < n < most)
            self.curves[key] = tuple(
                (n, self.kernels.estimate_gain(site, mask, n).gain) for n in (least, *between, most)
            )
        return self.curves[key]

    def _batch(self, site: AttentionSite) -> int:
        """The largest batch in use: the fixed one, or that of ``--shape``, or 1."""
        names = {str(a.args[0]) for a in site.dims[0].atoms() if a.kind == "size"}
        try:
            return max(1, evaluate(site.dims[0], {n: self.options.shapes.get(n, (1, 1))[1] for n in names}))
        except UnsupportedError:
            return 1

    def _lengths(self, site: AttentionSite) -> tuple[int, ...]:
        """The lengths at which a site must not lose: the fixed one, or the range of ``--shape``, or the usual one."""
        least, most = (_length(site.dims[3], self.options, i) for i in (0, 1))
        return tuple(sorted({least, max(least, (least + most) // 4), most}))


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
        site, name="", index=0, softmax="", query=none, key=none, value=none, output="", nodes=(), unguarded=None
    )  # fmt: skip


def _length(size: Int, options: Options, end: int) -> int:
    names = {str(a.args[0]) for a in size.atoms() if a.kind == "size"}
    try:
        found = evaluate(size, {n: options.shapes.get(n, _RANGE)[end] for n in names})
    except UnsupportedError:  # a length that is computed in the graph
        found = _RANGE[end]
    return max(1, min(found, _LONGEST))


def _assumption_notes(inputs: Sequence[str]) -> list[str]:
    return [f"{name} is taken to hold 0 and 1 only: the graph computes with it" for name in inputs]


def _kept(row: SiteReport, step: Step, reason: str) -> Choice:
    return Choice(replace(row, reason=reason, step=step), SitePlan(row.site, False, reason=reason))


def _heads(site: AttentionSite) -> str:
    return f"{site.num_heads} heads" + (f" on {site.kv_num_heads}" if site.kv_num_heads != site.num_heads else "")
