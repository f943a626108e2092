# SPDX-License-Identifier: Apache-2.0
"""What becomes of each described site: by the user's choice, the kernels and the estimates, in this order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import onnx

from stof.attention.decide.cost_cpu import GainEstimate
from stof.attention.decide.kernels import AttentionKernels, Use
from stof.attention.describe.site_describer import DescribedSite
from stof.attention.describe.site_problem import SiteProblem
from stof.attention.emit import Rewrite
from stof.attention.plan_entry import SitePlan
from stof.attention.report import NAMES, SiteReport, Step
from stof.errors import ArgumentError, UnsupportedError
from stof.mask.site import AttentionSite, Finding, LiftedMask
from stof.options import Options
from stof.selection import NamedCandidate, Selection, UserChoice, list_candidates
from stof.symbolic import Int
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
            raise ArgumentError(f"--mask {name!r} names no attention site of the model; {_list_sites(sites)}")


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


def _list_sites(sites: Sequence[AttentionSite]) -> str:
    return list_candidates(NAMES, candidates_of(sites, ()))


class SiteDecider:
    """Decides about sites.

    Args:
        options: of the optimization.
        kernels: of the target.
        choice: of the user.
    """

    def __init__(
        self,
        options: Options,
        kernels: AttentionKernels,
        choice: UserChoice | None = None,
    ) -> None:
        self.options = options
        self.kernels = kernels
        self.choice = choice or UserChoice(Selection(NAMES))
        self.estimates: dict[tuple[SiteProblem, tuple[int, ...]], list[GainEstimate]] = {}
        self.curves: dict[tuple[SiteProblem, int, int], tuple[tuple[int, float], ...]] = {}

    def decide(self, described: DescribedSite) -> Choice:
        """The outcome for a site.

        Raises:
            ModelError: when the plan replaces a site that cannot be.
        """
        site, problem, mask = described.site, described.problem, described.mask
        reason, step = described.reason, described.step
        estimates: list[GainEstimate] = []
        if problem is not None:
            if refusals := self.kernels.refusals(problem):
                reason = "no kernel: " + "; ".join(refusals)
            else:
                step = Step.COST
                estimates = self._estimate_gains(site, problem)
                reason = "" if described.entry else self.kernels.reason_to_leave(problem, estimates[:-1])
        reason = self.choice.reason_kept(NamedCandidate(site.name, site.index), reason)
        if reason or problem is None or mask is None:
            return keep_site(described.row, step, reason)
        return self._replace(described, problem, mask, estimates[-1])

    def _replace(self, described: DescribedSite, problem: SiteProblem, mask: LiftedMask, shown: GainEstimate) -> Choice:
        """The outcome for a site that is replaced; ``shown``: the estimate for the report."""
        site, entry = described.site, described.entry
        gain = shown.gain if self.options.tuned_for.estimates_gains else None
        planned = dict(entry.hints).get("kernel", "") if entry else None
        kernel, hint = self.kernels.kernel(problem, Use(self._batch(site), self.lengths_of(site), planned))
        hints = entry.hints if entry else (("kernel", hint),) if hint else ()
        row = replace(
            described.row,
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
        rewrite = Rewrite(site, mask, hints, tensorrt, self.options.allow_tf32, described.ignores_rows)
        return Choice(row, plan, rewrite, () if self.options.report is None else self._curve(site, problem))

    def _estimate_gains(self, site: AttentionSite, problem: SiteProblem) -> list[GainEstimate]:
        """The estimates at the lengths in use, and at last the one that the report shows."""
        lengths = self.lengths_of(site)
        key = problem, lengths
        if key not in self.estimates:
            shown = min(max(lengths[0], REPORT_LENGTH), lengths[-1])
            self.estimates[key] = [self.kernels.estimate_gain(problem, n) for n in (*lengths, shown)]
        return self.estimates[key]

    def _curve(self, site: AttentionSite, problem: SiteProblem) -> tuple[tuple[int, float], ...]:
        """Estimated gains at the ends of the lengths in use, and at lengths between them."""
        lengths = self.lengths_of(site)
        least, most = lengths[0], lengths[-1]
        if not self.options.tuned_for.estimates_gains or least == most:
            return ()
        key = problem, least, most
        if key not in self.curves:
            between = (n for n in _CURVE if least < n < most)
            self.curves[key] = tuple((n, self.kernels.estimate_gain(problem, n).gain) for n in (least, *between, most))
        return self.curves[key]

    def _batch(self, site: AttentionSite) -> int:
        """The largest batch in use: the fixed one, or that of ``--shape``, or 1."""
        names = {str(a.args[0]) for a in site.dims[0].atoms() if a.kind == "size"}
        try:
            return max(1, evaluate(site.dims[0], {n: self.options.shapes.get(n, (1, 1))[1] for n in names}))
        except UnsupportedError:
            return 1

    def lengths_of(self, site: AttentionSite) -> tuple[int, ...]:
        """The lengths at which a site must not lose: the fixed one, or the range of ``--shape``, or the usual one."""
        least, most = (_length(site.dims[3], self.options, i) for i in (0, 1))
        return tuple(sorted({least, max(least, (least + most) // 4), most}))


def _length(size: Int, options: Options, end: int) -> int:
    names = {str(a.args[0]) for a in size.atoms() if a.kind == "size"}
    try:
        length = evaluate(size, {n: options.shapes.get(n, _RANGE)[end] for n in names})
    except UnsupportedError:  # a length that is computed in the graph
        length = _RANGE[end]
    return max(1, min(length, _LONGEST))


def keep_site(row: SiteReport, step: Step, reason: str) -> Choice:
    """The outcome for a site that stays as it is."""
    return Choice(replace(row, reason=reason, step=step), SitePlan(row.site, False, reason=reason))
