# SPDX-License-Identifier: Apache-2.0
"""What becomes of each described site with ``--emit standard``: by the user's choice, the operator's meaning and estimates."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from stof.attention.decide.kernels import AttentionKernels
from stof.attention.decide.site_decider import Choice, SiteDecider, keep_site
from stof.attention.describe.site_describer import DescribedSite
from stof.attention.emit import Rewrite
from stof.attention.plan_entry import SitePlan
from stof.attention.report import Step
from stof.attention.standard.cost import LEAST_GAIN, estimate_gain
from stof.attention.standard.form import StandardForm, choose_form, find_lengths, with_biases
from stof.attention.standard.fused import reason_to_leave_fused
from stof.attention.standard.runtime import AttentionRuntime
from stof.attention.subgraphs import Scope
from stof.errors import UnsupportedError
from stof.graph.index import opset_of
from stof.mask.check.checker import MaskChecker
from stof.mask.empty_rows.row_prover import RowProver
from stof.mask.site import EmptyRows, LiftedMask
from stof.options import Options
from stof.selection import NamedCandidate, UserChoice

_NAN_ROWS = "a row whose scores are all -inf gives 0, not NaN"


@dataclass(frozen=True)
class StandardRewrite(Rewrite):
    """A site that becomes one ``Attention`` node of ONNX."""

    form: StandardForm = field(default_factory=lambda: StandardForm(4))


class StandardDecider(SiteDecider):
    """Decides about the sites of one scope.

    Args:
        options: of the optimization.
        scope: the main graph or a subgraph.
        choice: of the user.
        runtime: in which the model has to run.
        folder: where its external data lies.
    """

    def __init__(
        self, options: Options, scope: Scope, choice: UserChoice, runtime: AttentionRuntime, folder: Path
    ) -> None:
        super().__init__(options, AttentionKernels(options, ""), choice)
        self.scope, self.runtime = scope, runtime
        self.prover = RowProver(MaskChecker(scope.working.model, scope.symbolic), folder)

    def decide(self, described: DescribedSite) -> Choice:
        site, problem, mask = described.site, described.problem, described.mask
        reason, step = described.reason, described.step
        form: StandardForm | None = None
        estimates = []
        if problem is not None and mask is not None:
            mask = with_biases(mask)
            try:
                form = self._form(described, mask)
                step = Step.COST
                estimates = [estimate_gain(site, problem, form, n) for n in self.lengths_of(site)]
                reason = "" if described.entry else self._reason_to_leave(described, [e.gain for e in estimates])
            except UnsupportedError as error:
                reason = str(error)
        reason = self.choice.reason_kept(NamedCandidate(site.name, site.index), reason)
        if reason or form is None or mask is None:
            return keep_site(described.row, step, reason)
        worst = min(estimates, key=lambda e: e.gain)
        notes = described.row.notes
        if mask.empty_rows is EmptyRows.NAN:
            notes = (*notes, _NAN_ROWS)
        row = replace(
            described.row,
            replaced=True,
            reason="replaced",
            step=Step.DONE,
            empty_rows=mask.empty_rows.value,
            kernel=str(form),
            predicted_gain=worst.gain,
            length=worst.length,
            notes=notes,
        )
        plan = SitePlan(site.name, True, mask.expression.text, mask.empty_rows.value, (), round(worst.gain, 3))
        rewrite = StandardRewrite(site, mask, ignores_empty_rows=described.ignores_rows, form=form)
        return Choice(row, plan, rewrite)

    def _form(self, described: DescribedSite, mask: LiftedMask) -> StandardForm:
        """The form of the node.

        Raises:
            UnsupportedError: when there is none, or the graph around the site has no place for it.
        """
        site = described.site
        if self.scope.path:
            raise UnsupportedError(
                f"it is in {self.scope.description}; --emit standard writes into the main graph alone"
            )
        if reason := reason_to_leave_fused(self.scope.working, site, self.runtime):
            raise UnsupportedError(reason)
        return choose_form(
            site,
            mask,
            find_lengths(site, mask, self.scope.symbolic.shape),
            every_row_has_key=described.ignores_rows or self.prover.has_key_in_every_row(site, mask),
            bias_bound=self.prover.bias_bound(mask),
            has_windows=self.runtime.has_windows and opset_of(self.scope.working.base) >= 25,
        )

    def _reason_to_leave(self, described: DescribedSite, gains: list[float]) -> str:
        """Why the nodes stay; empty where a gain is estimated, or nothing runs them."""
        worst = min(gains)
        if worst >= LEAST_GAIN or described.problem is None or described.problem.replaces_fused_node:
            return ""
        length = self.lengths_of(described.site)[gains.index(worst)]
        return (
            f"ONNX Runtime's Attention gains nothing over its nodes at S = {length}: {worst:.2f}x estimated. --shape states the "
            "lengths in use; a plan with replace: true replaces it"
        )
