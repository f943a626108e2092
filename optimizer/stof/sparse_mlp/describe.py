# SPDX-License-Identifier: Apache-2.0
"""Describes MLPs: which neurons are needed, by counts or by predictions, and the problem that follows for kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import onnx

from stof.op_rewrite import Job
from stof.selection import NamedCandidate, UserChoice
from stof.sparse_mlp.calibration.prompt_sets import CalibrationPrompts
from stof.sparse_mlp.calibration.settings import MlpSettings
from stof.sparse_mlp.calibration.spec import OPTION
from stof.sparse_mlp.decide.reasons import reason_no_operator
from stof.sparse_mlp.density import NeuronCounts, count_neurons
from stof.sparse_mlp.find import MlpCandidate, has_cache
from stof.sparse_mlp.problem import MlpProblem
from stof.sparse_mlp.run_tokens import RunTokens, tokens_of_runs
from stof.sparse_mlp.site import MlpSite
from stof.symbolic import Symbolic

if TYPE_CHECKING:
    from stof.sparse_mlp.calibration.fit import NeuronPrediction


@dataclass(frozen=True, eq=False)
class MlpModel:
    """A model with its candidates.

    Attributes:
        model: the model.
        symbolic: its facts; None where there is no candidate.
        candidates: in the order of the graph.
        settings: what --sparse-mlp asks for; None: nothing.
    """

    model: onnx.ModelProto
    symbolic: Symbolic | None = None
    candidates: tuple[MlpCandidate, ...] = ()
    settings: MlpSettings | None = None


@dataclass(frozen=True, eq=False)
class DescribedMlp:
    """A candidate with its problem.

    Attributes:
        candidate: the candidate.
        site: with a selector where its neurons are predicted; None where it cannot be replaced.
        problem: None likewise.
        tokens: of a run; None where neurons are predicted.
        prediction: of its neurons; None: there is none.
        density: the share of neurons that are computed for a token; None: not measured.
        reason: why it cannot be replaced; empty where it can.
    """

    candidate: MlpCandidate
    site: MlpSite | None = None
    problem: MlpProblem | None = None
    tokens: RunTokens | None = None
    prediction: NeuronPrediction | None = None
    density: float | None = None
    reason: str = ""


@dataclass(frozen=True, eq=False)
class DescribedMlps:
    """A model with a description of each candidate.

    Attributes:
        mlp_model: the model.
        mlps: in the order of the graph.
        counts: of needed neurons by the name of a site, where they were measured.
        prompts: on which neurons were predicted; None: they were not.
    """

    mlp_model: MlpModel
    mlps: tuple[DescribedMlp, ...] = ()
    counts: Mapping[str, NeuronCounts] = field(default_factory=dict)
    prompts: CalibrationPrompts | None = None


def describe_mlps(job: Job, mlp_model: MlpModel, choice: UserChoice) -> DescribedMlps:
    """The candidates with their problems.

    Raises:
        ArgumentError: as :func:`predict_sites`, and when options name an MLP that the model does not have.
    """
    if not mlp_model.candidates:
        return DescribedMlps(mlp_model)
    has_operator = not reason_no_operator(job)
    is_predicted = mlp_model.settings is not None and has_operator
    predictions = (
        _predict(job, mlp_model, mlp_model.settings, choice) if mlp_model.settings is not None and has_operator else {}
    )
    sites = [c.site for c in mlp_model.candidates if c.site is not None and c.site.has_zeros]
    exact = [s for s in sites if s.name not in predictions]
    counts: dict[str, NeuronCounts] = {}
    if exact and has_operator:
        with job.step("neurons"):
            counts = count_neurons(job, mlp_model.model, exact)
    mlps = tuple(
        _describe(job, mlp_model, c, predictions.get(c.name), counts.get(c.name)) for c in mlp_model.candidates
    )
    selected = {name: p.counts for name, p in predictions.items() if p.counts is not None}
    prompts = mlp_model.settings.prompts if is_predicted and mlp_model.settings is not None else None
    return DescribedMlps(mlp_model, mlps, {**counts, **selected}, prompts)


def _predict(job: Job, mlp_model: MlpModel, settings: MlpSettings, choice: UserChoice) -> dict[str, NeuronPrediction]:
    """A prediction for each site that --sparse-mlp is for and that options and plan do not leave out, by its name."""
    # Much of this is imported for calibration alone.
    from stof.sparse_mlp.calibration.predict import predict_sites

    named = [NamedCandidate(c.name, i) for i, c in enumerate(mlp_model.candidates)]
    choice.selection.check(named)  # calibration takes long
    sites = {i: c.site for i, c in enumerate(mlp_model.candidates) if c.site is not None}
    kept = {i: s for i, s in sites.items() if not choice.reason_left_out(named[i])}
    with job.step("calibrate"):
        return predict_sites(job, mlp_model.model, kept, len(mlp_model.candidates), settings.spec, settings.prompts)


def _describe(
    job: Job,
    mlp_model: MlpModel,
    candidate: MlpCandidate,
    prediction: NeuronPrediction | None,
    counts: NeuronCounts | None,
) -> DescribedMlp:
    site = candidate.site
    if site is None:
        density = None if counts is None else counts.density
        return DescribedMlp(candidate, density=density, reason=candidate.reason)
    if prediction is not None:
        quality, selector = prediction.quality, prediction.selector
        density = None if quality is None else quality.selected_share
        if selector is None:
            return DescribedMlp(candidate, prediction=prediction, density=density, reason=prediction.reason)
        site = replace(site, selector=selector)
        return DescribedMlp(candidate, site, MlpProblem.of(site, density), None, prediction, density)
    density = None if counts is None else counts.density
    assert mlp_model.symbolic is not None
    tokens = tokens_of_runs(job.options, mlp_model.symbolic, site, counts, has_cache(mlp_model.model))
    reason = "" if site.has_zeros else f"{OPTION} is for other layers"
    return DescribedMlp(candidate, site, MlpProblem.of(site, density), tokens, None, density, reason)
