# SPDX-License-Identifier: Apache-2.0
"""Fits the selector of one MLP on calibration tokens, and measures it on held-out ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from stof.errors import ArgumentError, UnsupportedError
from stof.sparse_mlp.calibration.activation_runs import SiteSamples
from stof.sparse_mlp.calibration.spec import DEFAULT_ACTIVE, OPTION, MlpClause
from stof.sparse_mlp.constants import Constants, read_bias, read_rows
from stof.sparse_mlp.density import NeuronCounts
from stof.sparse_mlp.predictors.magnitude import fit_magnitude_selector
from stof.sparse_mlp.predictors.quality import SelectionQuality, measure_selection, relative_output_error
from stof.sparse_mlp.predictors.selection_target import fit_margin_threshold
from stof.sparse_mlp.predictors.selector import NeuronSelector
from stof.sparse_mlp.predictors.svd import fit_svd_selector
from stof.sparse_mlp.predictors.trained import train_selector
from stof.sparse_mlp.site import MlpSite, MlpWeight
from stof.sparse_mlp.stored_selector import round_selector

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class NeuronPrediction:
    """How the neurons of one MLP are predicted, and how well.

    Attributes:
        kind: of the clause: ``magnitude``, ``svd`` and others.
        selector: selects the neurons; None: there is none for this MLP.
        reason: why there is none.
        quality: on held-out tokens; None: not measured.
        output_error: of the MLP's output on held-out tokens, relative to its size; None: not measured.
        tokens: of the held-out prompts that were measured.
        counts: how often each neuron is selected, on all prompts; None: not measured.
    """

    kind: str
    selector: NeuronSelector | None
    reason: str = ""
    quality: SelectionQuality | None = None
    output_error: float | None = None
    tokens: int = 0
    counts: NeuronCounts | None = None


def fit_selector(site: MlpSite, clause: MlpClause, samples: SiteSamples, constants: Constants) -> NeuronSelector:
    """The selector of a site, fitted on samples.

    Args:
        site: the site.
        clause: says how; it names no file.
        samples: of calibration tokens.
        constants: of the model that the site was found in.

    Raises:
        UnsupportedError: when the site cannot have such a selector.
        ArgumentError: when the clause does not fit it.
    """
    if clause.kind == "magnitude":
        active_share = DEFAULT_ACTIVE if clause.active is None else clause.active
        return fit_magnitude_selector(samples.activated, active_share, bool(clause.by_neuron))
    check_predictor(site)
    assert site.gate_weight is not None
    assert samples.inputs is not None
    finite = np.isfinite(samples.inputs).all(1)
    if not finite.any():
        raise UnsupportedError("no calibration token enters it with finite numbers")
    inputs, activated = samples.inputs[finite], samples.activated[finite]
    active = find_active_neurons(site, activated, activity_threshold(site, clause, activated))
    share = _share_to_select(site, clause)
    rank = clause.rank_of(site.neurons, site.gate_weight.inner)
    weight = read_rows(site.gate_weight, constants).astype(np.float32)
    bias = read_bias(site.gate_weight, constants)
    bias = None if bias is None else bias.astype(np.float32)
    by_neuron = clause.by_neuron is not False
    selector = fit_svd_selector(weight, bias, inputs, active, rank, share, clause.recall, by_neuron)
    if clause.kind == "trained":
        selector = train_selector(
            inputs, active, rank, clause.seed, start=selector, active_share=share, recall=clause.recall
        )
    return selector


def _share_to_select(site: MlpSite, clause: MlpClause) -> float | None:
    """The share of neurons that a predictor selects; None where it selects by recall."""
    if clause.recall is not None or (clause.active is None and site.has_zeros):
        return None
    return DEFAULT_ACTIVE if clause.active is None else clause.active


def fit_threshold(site: MlpSite, clause: MlpClause, selector: NeuronSelector, samples: SiteSamples) -> NeuronSelector:
    """A file's predictor with one threshold, fitted on samples to the share or the recall of the clause.

    Raises:
        UnsupportedError: when no sample is finite.
    """
    assert samples.inputs is not None
    finite = np.isfinite(samples.inputs).all(1)
    if not finite.any():
        raise UnsupportedError("no calibration token enters it with finite numbers")
    activated = samples.activated[finite]
    active = find_active_neurons(site, activated, activity_threshold(site, clause, activated))
    scores = selector.scores(samples.inputs[finite])
    share = clause.active if clause.recall is None else None
    threshold = fit_margin_threshold(lambda: [(scores, active)], share, clause.recall)
    return replace(selector, threshold=np.array([threshold], np.float32))


def check_predictor(site: MlpSite) -> None:
    """Refuses a site whose gate a predictor cannot stand for.

    Raises:
        UnsupportedError: with the reason.
    """
    if reason := site.reason_no_predictor():
        raise UnsupportedError(f"it takes no predictor: {reason}; kind=magnitude needs none")
    if site.activation == "none":
        raise UnsupportedError(
            f"it takes no predictor: StofSparseMLP does not compute the activation that gives {site.activated!r}; "
            "kind=magnitude needs none"
        )


def activity_threshold(site: MlpSite, clause: MlpClause, activated: np.ndarray) -> float:
    """The magnitude above which neurons count as active: 0 where the activation has zeros, else that of a share of them."""
    if site.has_zeros:
        return 0.0
    share = DEFAULT_ACTIVE if clause.active is None else clause.active
    return float(fit_magnitude_selector(activated, share).threshold[0])


def find_active_neurons(site: MlpSite, activated: np.ndarray, threshold: float) -> Flags:
    """Which neurons count as active, [T, F]; a NaN does."""
    return np.asarray(~(np.abs(activated) <= threshold))


def measure_selector(
    site: MlpSite, kind: str, selector: NeuronSelector, samples: SiteSamples, threshold: float, constants: Constants
) -> NeuronPrediction:
    """A selector on held-out samples, with the numbers that the operator will hold.

    Args:
        site: the site.
        kind: of the clause.
        selector: for the site.
        samples: of held-out tokens.
        threshold: the magnitude above which neurons count as active.
        constants: of the model that the site was found in.

    Raises:
        UnsupportedError: when a number does not fit the site's type.
    """
    held = round_selector(replace(site, selector=selector))
    selected = held.select(
        np.zeros((0, 1), np.float32) if samples.inputs is None else samples.inputs, samples.activated
    )
    quality = measure_selection(selected, find_active_neurons(site, samples.activated, threshold))
    hidden = samples.activated
    if site.up is not None:
        assert samples.inputs is not None
        hidden = hidden * (samples.inputs @ _floats(site.up, constants).T + _bias(site.up, constants))
    down, bias = _floats(site.down, constants, is_down=True), _bias(site.down, constants)
    dense, sparse = hidden @ down + bias, np.where(selected, hidden, np.float32(0)) @ down + bias
    finite = np.isfinite(dense).all(1)
    error = relative_output_error(dense[finite], sparse[finite]) if finite.any() else None
    return NeuronPrediction(kind, selector, "", quality, error, len(dense))


def count_selected(site: MlpSite, selector: NeuronSelector, samples: Sequence[SiteSamples]) -> NeuronCounts:
    """How often the operator will select each neuron, on all sets of samples."""
    held = round_selector(replace(site, selector=selector))
    selected, tokens = np.zeros(site.neurons, np.int64), 0
    for each in samples:
        inputs = np.zeros((0, 1), np.float32) if each.inputs is None else each.inputs
        selected += np.count_nonzero(held.select(inputs, each.activated), axis=0)
        tokens += len(each.activated)
    return NeuronCounts(selected, tokens)


def _floats(weight: MlpWeight, constants: Constants, is_down: bool = False) -> np.ndarray:
    return np.asarray(read_rows(weight, constants, is_down).astype(np.float32))


def _bias(weight: MlpWeight, constants: Constants) -> np.ndarray:
    bias = read_bias(weight, constants)
    return np.zeros(1, np.float32) if bias is None else bias.astype(np.float32)


def check_sizes(site: MlpSite, selector: NeuronSelector, source: str) -> None:
    """Refuses a selector of a file that is for an MLP of another size.

    Raises:
        ArgumentError: naming the file, the MLP and the sizes.
    """
    where = f"{OPTION}: {source} for MLP {site.name!r}"
    if selector.threshold.size not in (1, site.neurons):
        raise ArgumentError(f"{where} has {selector.threshold.size} thresholds, expected 1 or {site.neurons}")
    if selector.predictor_up is None or selector.predictor_down is None:
        return
    size = site.gate_weight.inner if site.gate_weight is not None else site.input_size
    sizes = selector.predictor_up.shape[0], selector.predictor_down.shape[1]
    if sizes != (site.neurons, size):
        raise ArgumentError(
            f"{where} has a predictor of {sizes[0]} neurons from tokens of {sizes[1]} elements, expected {site.neurons} "
            f"neurons and {size} elements"
        )
