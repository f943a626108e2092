# SPDX-License-Identifier: Apache-2.0
"""MLPs as an op of the pipeline: those whose activation gives zeros, and those whose neurons are predicted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import onnx

from stof.errors import ArgumentError
from stof.graph.index import DOMAIN, all_nodes
from stof.graph.names import FreshNames
from stof.op_rewrite import Decisions, Job, OpRewrite
from stof.plan import EntryFormat
from stof.prompts.files import PromptSet
from stof.prompts.loss import has_logits
from stof.runtime.library import op_limits
from stof.selection import NamedCandidate
from stof.sparse_mlp.calibration.prompt_sets import CalibrationPrompts, read_calibration_prompts
from stof.sparse_mlp.calibration.spec import OPTION, MlpSpec, parse_mlp_spec
from stof.sparse_mlp.cost import UNKNOWN_DENSITY, estimate_gain, estimate_gain_by_bytes, reason_slow_on_cpu
from stof.sparse_mlp.density import NeuronCounts, count_neurons
from stof.sparse_mlp.dequantize_linear import with_dequantized_tokens
from stof.sparse_mlp.emit import emit_mlps, without_selection
from stof.sparse_mlp.find import MlpCandidate, find_mlps, has_cache
from stof.sparse_mlp.fused_activations import is_fused_activation, with_separate_activations
from stof.sparse_mlp.model_room import ModelRoom
from stof.sparse_mlp.neuron_order import with_orders
from stof.sparse_mlp.plan_entry import SELECTIONS, MlpPlan, read_mlp_plan
from stof.sparse_mlp.report import KEY, NAMES, MlpReport, MlpSection, PredictionReport
from stof.sparse_mlp.run_tokens import RunTokens, tokens_of_runs
from stof.sparse_mlp.site import ACTIVATIONS, OP, MlpSite
from stof.symbolic import Symbolic

if TYPE_CHECKING:
    from stof.sparse_mlp.calibration.fit import NeuronPrediction
    from stof.sparse_mlp.checks.site_checks import MlpChecks

_LEAST_GAIN_BY_BYTES = 1.1  # below, a call costs as much as it saves
_MOST_ACTIVE_ON_CUDA = (
    0.4  # above, the kernels for one token are no faster than a dense GEMV (docs/lab/cuda-experiments.md)
)
# The largest share of active neurons at which runs of many tokens are faster than the dense MLP, by (has an up matmul, has
# quantized weights). Many tokens together read every weight and save multiplications alone (docs/lab/cpu-experiments.md).
_MOST_ACTIVE_OF_MANY_TOKENS = {(False, False): 0.03, (True, False): 0.07, (False, True): 0.1, (True, True): 0.25}
_MOST_ERROR = 0.2  # relative output error of an MLP, in models without logits, whose loss cannot be measured


@dataclass(frozen=True, eq=False)
class MlpModel:
    """A model with its candidates.

    Attributes:
        model: the model.
        symbolic: its facts; None where there is no candidate.
        candidates: in the order of the graph.
        counts: of active neurons by the name of a site, where they were measured.
        predictions: how neurons are predicted, by the name of a site that --sparse-mlp is for.
        spec: what --sparse-mlp asks for; None: nothing.
        prompts: of ``spec``.
    """

    model: onnx.ModelProto
    symbolic: Symbolic | None = None
    candidates: tuple[MlpCandidate, ...] = ()
    counts: Mapping[str, NeuronCounts] = field(default_factory=dict)
    predictions: Mapping[str, NeuronPrediction] = field(default_factory=dict)
    spec: MlpSpec | None = None
    prompts: CalibrationPrompts | None = None


@dataclass(frozen=True, eq=False)
class MlpDecisions(Decisions):
    """The decision for each candidate of a model."""

    found: MlpModel
    mlps: MlpSection
    sites: tuple[MlpSite, ...] = ()

    @property
    def section(self) -> MlpSection:
        return self.mlps

    @property
    def plan(self) -> tuple[MlpPlan, ...]:
        return tuple(
            MlpPlan(
                r.mlp,
                r.replaced,
                r.density,
                "" if r.replaced else r.reason,
                r.selection if r.replaced else SELECTIONS[0],
            )
            for r in self.mlps.rows
        )

    @property
    def candidates(self) -> tuple[NamedCandidate, ...]:
        return tuple(NamedCandidate(r.mlp, r.index) for r in self.mlps.rows)

    @property
    def has_replaced(self) -> bool:
        return bool(self.sites)

    @property
    def held_out(self) -> PromptSet | None:
        return None if self.found.prompts is None else self.found.prompts.held_out

    def undo(self, reason: str) -> MlpDecisions:
        return replace(self, mlps=self.mlps.without(reason), sites=())


class SparseMlpRewrite(OpRewrite[MlpModel, MlpDecisions]):
    """Replaces MLPs with zeros in models that decode token by token, and those whose neurons --sparse-mlp predicts.

    Runs with many active neurons stay as fast as before.
    """

    key = KEY
    op_types = frozenset({OP})
    names = NAMES
    plan_format = EntryFormat("mlp", read_mlp_plan)

    def read_options(self, job: Job) -> Mapping[str, Path]:
        if not job.options.sparse_mlp:
            for entry in job.plan.entries.get(KEY, ()) if job.plan is not None else ():
                if isinstance(entry, MlpPlan) and entry.replace and entry.selection != SELECTIONS[0]:
                    raise ArgumentError(
                        f"the plan selects neurons of MLP {entry.name!r} by {entry.selection}; give the {OPTION} that it was "
                        "saved with"
                    )
            return {}
        spec = parse_mlp_spec(job.options.sparse_mlp)
        read_calibration_prompts(job, spec)
        return spec.files

    def find(self, job: Job, model: Callable[[], onnx.ModelProto]) -> MlpModel:
        spec = parse_mlp_spec(job.options.sparse_mlp) if job.options.sparse_mlp else None
        if spec is None and not _may_have_zeros(job.model):
            return MlpModel(job.model)
        before = with_separate_activations(with_dequantized_tokens(model()))
        with job.step("mlps"):
            symbolic = Symbolic(before)
            candidates = tuple(find_mlps(before, symbolic, any_activation=spec is not None))
        found = MlpModel(before, symbolic if candidates else None, candidates, spec=spec)
        if spec is not None and candidates and not _reason_no_operator(job):
            found = self._predict(job, found, spec)
        sites = [c.site for c in candidates if c.site is not None and c.site.has_zeros]
        exact = [s for s in sites if s.name not in found.predictions]
        if exact and not _reason_no_operator(job):
            with job.step("neurons"):
                found = replace(found, counts=count_neurons(job, before, exact))
        return found

    def _predict(self, job: Job, found: MlpModel, spec: MlpSpec) -> MlpModel:
        """The model with a prediction for each site that --sparse-mlp is for and that options and plan do not leave out.

        Raises:
            ArgumentError: as :func:`predict_sites`, and when options name an MLP that the model does not have.
        """
        # Much of this is imported for calibration alone.
        from stof.sparse_mlp.calibration.predict import predict_sites

        named = [NamedCandidate(c.name, i) for i, c in enumerate(found.candidates)]
        job.selections[KEY].check(named)  # calibration takes long
        sites = {i: c.site for i, c in enumerate(found.candidates) if c.site is not None}
        kept = {i: s for i, s in sites.items() if not job.selections[KEY].reason_left_out(named[i])}
        if job.plan is not None and KEY in job.plan.entries:
            planned = {e.name for e in job.plan.entries[KEY] if e.replace}
            kept = {i: s for i, s in kept.items() if s.name in planned}
        prompts = read_calibration_prompts(job, spec)
        with job.step("calibrate"):
            predictions = predict_sites(job, found.model, kept, len(found.candidates), spec, prompts)
        return replace(found, predictions=predictions, prompts=prompts)

    def decide(self, job: Job, found: MlpModel) -> MlpDecisions:
        rows: list[MlpReport] = []
        sites: list[MlpSite] = []
        self.check_plan(job, [NamedCandidate(c.name, i) for i, c in enumerate(found.candidates)])
        if found.spec is None and not found.candidates:
            job.selections[KEY].refuse_all(f"no activation of the model gives zeros, and {OPTION} is not given")
        room = ModelRoom(found.model) if found.candidates else None
        for index, candidate in enumerate(found.candidates):
            row, site, reason, reason_slow = _describe(job, found, candidate, index)
            if not reason and not self.is_replaced_by_plan(job, candidate.name):
                reason = reason_slow
            reason = self.reason_kept(job, NamedCandidate(candidate.name, index), reason)
            if site is not None and room is not None and not reason:
                reason = room.take(site)
            if reason or site is None:
                rows.append(replace(row, predicted_gain=None, reason=reason))
                continue
            self._check_selection(job, site)
            rows.append(replace(row, replaced=True, reason="replaced"))
            sites.append(site)
        selected = {name: p.counts for name, p in found.predictions.items() if p.counts is not None}
        sites = with_orders(found.model, sites, {**found.counts, **selected})
        return MlpDecisions(found, _section(job, found, _with_idle(rows, sites)), tuple(sites))

    def _check_selection(self, job: Job, site: MlpSite) -> None:
        """Refuses a plan that was made with another --sparse-mlp.

        Raises:
            ArgumentError: naming the MLP.
        """
        entry = None if job.plan is None else job.plan.of(KEY, site.name)
        if isinstance(entry, MlpPlan) and entry.selection != site.selection:
            raise ArgumentError(
                f"the plan selects neurons of MLP {site.name!r} by {entry.selection}, and {OPTION} by {site.selection}; give the "
                f"{OPTION} that it was saved with"
            )

    def verifiable_form(self, model: onnx.ModelProto) -> onnx.ModelProto:
        return without_selection(model)

    def emit(self, job: Job, model: onnx.ModelProto, decided: MlpDecisions) -> onnx.ModelProto:
        with job.step("emit"):
            return emit_mlps(decided.found.model, decided.sites, job.source.parent)

    def empty_section(self) -> MlpSection:
        return MlpSection()

    def find_earlier_result(self, job: Job) -> MlpDecisions | None:
        done = [n for n in all_nodes(job.model.graph.node) if n.domain == DOMAIN and n.op_type == OP]
        if not done:
            return None
        names = FreshNames()
        rows = [MlpReport(names.make(n.name or OP), i, False, f"is {OP} already") for i, n in enumerate(done)]
        return MlpDecisions(MlpModel(job.model), MlpSection(rows))

    def site_checks(self, job: Job, decided: MlpDecisions) -> MlpChecks | None:
        if not decided.sites:
            return None
        from stof.sparse_mlp.checks.site_checks import MlpChecks

        found = decided.found
        assert found.symbolic is not None
        return MlpChecks(found.model, found.symbolic, decided.sites, job.source.parent)


def _may_have_zeros(model: onnx.ModelProto) -> bool:
    return any(n.op_type in ("QuantizeLinear", "Relu") or is_fused_activation(n) for n in model.graph.node)


def _with_idle(rows: Sequence[MlpReport], sites: Sequence[MlpSite]) -> list[MlpReport]:
    """The rows with the share of neurons that were sorted behind the others."""
    idle = {s.name: 1 - s.order.hot / s.neurons for s in sites if s.order is not None}
    return [replace(r, idle=idle[r.mlp]) if r.mlp in idle else r for r in rows]


def _section(job: Job, found: MlpModel, rows: list[MlpReport]) -> MlpSection:
    fitted, held = (None, None) if found.prompts is None else (found.prompts.fitted, found.prompts.held_out)
    return MlpSection(
        rows,
        job.options.sparse_mlp,
        "" if fitted is None or found.spec is None else str(found.spec.prompts),
        "" if held is None else held.source,
        has_logits(job.model),
    )


def _describe(
    job: Job, found: MlpModel, candidate: MlpCandidate, index: int
) -> tuple[MlpReport, MlpSite | None, str, str]:
    """The row of a candidate, its site with a selector where it has one, and two reasons, each empty where not so: why it cannot
    be replaced, and why the dense MLP is faster.
    """
    site, prediction = candidate.site, found.predictions.get(candidate.name)
    counts = found.counts.get(candidate.name)
    density = None if counts is None else counts.density
    row = MlpReport(candidate.name, index, False, "", density=density)
    if site is None:
        return row, None, candidate.reason, ""
    row = replace(row, activation=site.activation, sizes=site.sizes)
    if prediction is None:
        reason = _reason_no_operator(job, site) or ("" if site.has_zeros else f"{OPTION} is for other layers")
        assert found.symbolic is not None
        tokens = tokens_of_runs(job.options, found.symbolic, site, counts, has_cache(found.model))
        if tokens.is_many:
            return row, site, reason, _reason_slow_for_many_tokens(job, site, density, tokens)
        if tokens.count > 1:
            return row, site, reason, _reason_slow_for_few_tokens(job, site, density, tokens)
        reason_slow = _reason_slow_for_one_token(job, site, density, "active on the given inputs")
        gain = estimate_gain(site, density, job.target)  # one token's
        return replace(row, predicted_gain=round(gain, 3)), site, reason, reason_slow
    quality, selector = prediction.quality, prediction.selector
    report = PredictionReport(
        prediction.kind,
        0 if selector is None else selector.rank,
        None if quality is None else round(quality.precision, 4),
        None if quality is None else round(quality.recall, 4),
        prediction.output_error,
        prediction.tokens,
    )
    row = replace(row, prediction=report, density=None if quality is None else quality.selected_share)
    if selector is None:
        return row, None, prediction.reason, ""
    site = replace(site, selector=selector)
    reason = _reason_no_operator(job, site) or _reason_inexact(job, found, prediction)
    reason_slow = _reason_slow_for_one_token(job, site, row.density, "computed on held-out prompts")
    gain = estimate_gain(site, row.density, job.target)
    return replace(row, selection=site.selection, predicted_gain=round(gain, 3)), site, reason, reason_slow


def _reason_inexact(job: Job, found: MlpModel, prediction: NeuronPrediction) -> str:
    """Why the output error of an MLP keeps it dense; empty where it does not."""
    most = None if found.spec is None else found.spec.max_error
    if most is None and not has_logits(job.model):
        most = _MOST_ERROR
    error = prediction.output_error
    if most is None or error is None or error <= most or job.options.force:
        return ""
    return (
        f"its output error on held-out prompts is {error:.3g}, max_error allows {most:g}; compute more neurons, raise max_error "
        "or use --force"
    )


def _reason_no_operator(job: Job, site: MlpSite | None = None) -> str:
    """Why no node can be written, or not that of a site; empty where it can."""
    if (limits := op_limits().get(OP)) is None:
        return f"the plugin library has no {OP}; install one of this version"
    if not limits["targets"][job.target.name]["types"]:
        what = "TensorRT plugin" if job.target.keeps_plugins else f"kernels for --target {job.target.name}"
        return f"{OP} has no {what}"
    if site is not None and site.activation not in limits.get("activations", ACTIVATIONS):
        return f"{OP} of the plugin library has no {site.activation}; install one of this version"
    return ""


def _reason_slow_for_many_tokens(job: Job, site: MlpSite, density: float | None, tokens: RunTokens) -> str:
    """Why an MLP whose runs have many tokens is faster dense; empty where it is not."""
    why = f"{tokens.source}, so its runs have many tokens"
    if tokens.count:
        why = f"its runs have {tokens.count} tokens by {tokens.source}"
    if job.target.uses_gpu:
        return f"{why}, for which a GPU computes all neurons"
    most = _MOST_ACTIVE_OF_MANY_TOKENS[site.up is not None, site.quantization is not None]
    gains = f"an MLP of this form gains where at most {100 * most:.0f} % of its neurons are active"
    if density is None:
        return f"{why}: {gains}, which was not measured: give --inputs"
    return "" if density <= most else f"{why}: {gains}, and {100 * density:.3g} % are on the given inputs"


def _reason_slow_for_few_tokens(job: Job, site: MlpSite, density: float | None, tokens: RunTokens) -> str:
    """Why the dense MLP is faster for a few tokens, which read the weights of all neurons that one of them needs; else empty."""
    each = UNKNOWN_DENSITY if density is None else density
    share = tokens.share_active(each)
    reason = _reason_slow_for_one_token(job, site, share, "active for one of them", "for them together")
    if not reason:
        return ""
    measured = "not measured: give --inputs" if density is None else "on the given inputs"
    return (
        f"its runs have {tokens.count} tokens by {tokens.source}, which need {100 * share:.3g} % of its neurons together where "
        f"each needs {100 * each:.3g} % ({measured}): {reason}"
    )


def _reason_slow_for_one_token(
    job: Job, site: MlpSite, density: float | None, what: str, whom: str = "for one token"
) -> str:
    """Why the dense MLP is faster for a token, or for a few together; empty where it is not.

    Args:
        job: the optimization.
        site: the MLP.
        density: the share of neurons that are needed; None: not measured.
        what: the neurons that the density is of.
        whom: the tokens.
    """
    gain = estimate_gain_by_bytes(site, density)
    if gain >= _LEAST_GAIN_BY_BYTES:
        return _reason_slow_on_target(job, site, density, whom)
    active = "" if density is None else f"{100 * density:.0f} % of its neurons are {what}: "
    return f"{active}{gain:.2f}x is estimated {whom} by bytes of weights, less than {_LEAST_GAIN_BY_BYTES}x"


def _reason_slow_on_target(job: Job, site: MlpSite, density: float | None, whom: str) -> str:
    """Why the target computes the dense MLP faster for these tokens; empty where it does not."""
    if not job.target.uses_gpu:
        return reason_slow_on_cpu(site, density, whom)
    if density is not None and density <= _MOST_ACTIVE_ON_CUDA:
        return ""
    most = f"{100 * _MOST_ACTIVE_ON_CUDA:.0f} %"
    if density is None:
        return f"a GPU gains where at most {most} of the neurons are active, which was not measured: give --inputs"
    return f"{100 * density:.0f} % of its neurons are computed: a GPU gains where at most {most} are"


SPARSE_MLP = SparseMlpRewrite()
