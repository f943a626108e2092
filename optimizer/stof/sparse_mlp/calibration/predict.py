# SPDX-License-Identifier: Apache-2.0
"""Predicts the neurons of a model's MLPs as --sparse-mlp says: from calibration prompts, or from files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import onnx

from stof.errors import ArgumentError, UnsupportedError
from stof.execution.session_process import has_onnxruntime
from stof.op_rewrite import Job
from stof.sparse_mlp.calibration.activation_runs import ActivationRuns, SiteSamples
from stof.sparse_mlp.calibration.fit import (
    NeuronPrediction,
    activity_threshold,
    check_predictor,
    check_sizes,
    count_selected,
    fit_selector,
    fit_threshold,
    measure_selector,
)
from stof.sparse_mlp.calibration.prompt_sets import CalibrationPrompts
from stof.sparse_mlp.calibration.spec import DEFAULT_ACTIVE, OPTION, MlpClause, MlpSpec
from stof.sparse_mlp.constants import Constants
from stof.sparse_mlp.predictors.predictor_files import PredictorFile, read_predictor_file
from stof.sparse_mlp.site import MlpSite
from stof.sparse_mlp.stored_selector import make_stored_arrays

_HELD_OUT_SHARE = 4  # one held-out token for so many that are fitted on


def predict_sites(
    job: Job,
    model: onnx.ModelProto,
    sites: Mapping[int, MlpSite],
    count: int,
    spec: MlpSpec,
    prompts: CalibrationPrompts,
) -> dict[str, NeuronPrediction]:
    """How the neurons of MLPs are predicted, by the names of the sites that have a clause.

    Args:
        job: the optimization.
        model: that the sites were found in.
        sites: by the number of their layer.
        count: of layers.
        spec: says how.
        prompts: of the specification.

    Raises:
        ArgumentError: when the specification or a file does not fit the model, or the model does not run on a prompt.
    """
    clauses = {s.name: c for i, s in sites.items() if (c := spec.clause_of(i, count)) is not None}
    predicted = {i: s for i, s in sites.items() if s.name in clauses}
    from_files = _read_files(job, model, predicted, clauses, count)
    sets = [p for p in (prompts.fitted, prompts.held_out) if p is not None]
    if not sets:
        return {s.name: _predict_unmeasured(s, from_files[s.name]) for s in predicted.values()}
    if not has_onnxruntime():
        raise ArgumentError(f"{OPTION} needs onnxruntime to calibrate, which is not installed: pip install onnxruntime")
    assert job.inputs is not None
    runs = ActivationRuns(model, job.source.parent.resolve(), job.inputs().maker, job.options.verify_memory)
    sizes = {id(prompts.fitted): spec.tokens, id(prompts.held_out): max(1, spec.tokens // _HELD_OUT_SHARE)}
    constants = Constants(model.graph, job.source.parent)
    predictions: dict[str, NeuronPrediction] = {}
    for site, samples in runs.samples(list(predicted.values()), sets, [sizes[id(p)] for p in sets]):
        clause = clauses[site.name]
        try:
            predictions[site.name] = _predict(site, clause, from_files.get(site.name), samples, constants)
        except UnsupportedError as error:
            predictions[site.name] = NeuronPrediction(clause.kind, None, str(error))
        except ArgumentError as error:
            raise ArgumentError(f"{OPTION}: MLP {site.name!r}: {error}") from error
    return predictions


def _predict(
    site: MlpSite,
    clause: MlpClause,
    from_file: NeuronPrediction | None,
    samples: Sequence[SiteSamples],
    constants: Constants,
) -> NeuronPrediction:
    """Fits, or takes a file's selector, and measures it on the last set of samples, which are the held-out ones."""
    if from_file is not None and from_file.selector is None:
        return from_file
    if from_file is None or from_file.selector is None:
        selector = fit_selector(site, clause, samples[0], constants)
    elif clause.is_fitted:
        selector = fit_threshold(site, clause, from_file.selector, samples[0])
    else:
        selector = from_file.selector
    threshold = activity_threshold(site, clause, samples[0].activated)
    measured = measure_selector(site, clause.kind, selector, samples[-1], threshold, constants)
    return replace(measured, counts=count_selected(site, selector, samples))


def _predict_unmeasured(site: MlpSite, from_file: NeuronPrediction) -> NeuronPrediction:
    """A file's selector where there are no prompts."""
    if from_file.selector is None:
        return from_file
    try:
        make_stored_arrays(replace(site, selector=from_file.selector))
    except UnsupportedError as error:
        return NeuronPrediction(from_file.kind, None, str(error))
    return from_file


def _read_files(
    job: Job, model: onnx.ModelProto, sites: Mapping[int, MlpSite], clauses: Mapping[str, MlpClause], count: int
) -> dict[str, NeuronPrediction]:
    """What files have for sites, by their names; nothing for those that are calibrated.

    Raises:
        ArgumentError: when a file cannot be read, or is for MLPs of other sizes or another number of them.
    """
    predictions: dict[str, NeuronPrediction] = {}
    read: dict[MlpClause, PredictorFile] = {}
    for layer, site in sites.items():
        clause = clauses[site.name]
        if clause.file is None:
            continue
        if clause not in read:
            read[clause] = _read_file(clause.kind, clause.file, job, model, clause.active, count)
        try:
            selector = read[clause].selector_of(layer, site)
            check_sizes(site, selector, str(clause.file))
            if selector.has_predictor:
                check_predictor(site)
            predictions[site.name] = NeuronPrediction(clause.kind, selector)
        except UnsupportedError as error:
            predictions[site.name] = NeuronPrediction(clause.kind, None, str(error))
    return predictions


def _read_file(
    kind: str, path: Path, job: Job, model: onnx.ModelProto, active: float | None, count: int
) -> PredictorFile:
    file = read_predictor_file(kind, path, model, job.source.parent, DEFAULT_ACTIVE if active is None else active)
    if file.layers != count:
        raise ArgumentError(
            f"{OPTION}: {path} is for {file.layers} layers, and the model has {count} MLPs; give the file of this model"
        )
    return file
