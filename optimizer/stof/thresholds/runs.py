# SPDX-License-Identifier: Apache-2.0
"""Runs of an optimized model with one threshold, compared with the same model without."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import onnx

from stof.arguments.threshold_kinds import ThresholdSite
from stof.execution.ort_sessions import Sessions
from stof.execution.session_process import take_skip_counts
from stof.graph.protobuf import copy_model
from stof.prompts.loss import LossMeter
from stof.thresholds.calibrate import Trial
from stof.thresholds.layers import add_lse_outputs, put_thresholds

Feed = Mapping[str, np.ndarray]
_MOST_BYTES = 1 << 30  # of the exact model's outputs that are kept; beyond it they are computed again


class Meter(Protocol):
    """Compares outputs of two models on several sets of inputs."""

    def add(self, original: Sequence[np.ndarray], result: Sequence[np.ndarray], feed: Feed) -> None:
        """Adds the outputs of one set of inputs."""

    def loss(self) -> float:
        """The loss of all of them."""


class KlMeter:
    """The mean KL divergence of logits [1, S, V] over positions, in nats."""

    def __init__(self) -> None:
        self._meter = LossMeter()

    def add(self, original: Sequence[np.ndarray], result: Sequence[np.ndarray], feed: Feed) -> None:
        one, other = original[0], result[0]
        one, other = (x.reshape(-1, x.shape[-1]) for x in (one, other))
        self._meter.add(one, other, np.arange(len(one)))

    def loss(self) -> float:
        return self._meter.loss().kl


@dataclass(frozen=True)
class LayerTrial(Trial):
    """What runs found in which one layer leaves out keys, in one way.

    Attributes:
        mass_kept: the mean share of the softmax's mass that it computed; None: the layer cannot tell.
    """

    mass_kept: float | None


class ThresholdRuns:
    """Runs over sets of inputs, with the exact model as the reference.

    Args:
        sessions: makes sessions.
        exact: the optimized model, which leaves out nothing.
        layers: the names of attentions that may leave out keys.
        feeds: gives each set of inputs.
        outputs: those that are compared.
        new_meter: compares them.
        say: is told before each run.

    Attributes:
        count: of runs over all sets. A threshold that ran before is not run again.
    """

    def __init__(
        self,
        sessions: Sessions,
        exact: onnx.ModelProto,
        layers: Sequence[str],
        feeds: Sequence[Callable[[], Feed]],
        outputs: Sequence[str],
        new_meter: Callable[[], Meter],
        say: Callable[[int], None] = lambda run: None,
    ) -> None:
        self._sessions = sessions
        self._exact = exact
        self._feeds = feeds
        self._outputs = tuple(outputs)
        self._new_meter = new_meter
        self._say = say
        self._kept: dict[int, list[np.ndarray]] = {}
        reference = copy_model(exact)
        self._lse_outputs = add_lse_outputs(reference, layers)
        self._reference = sessions.make(reference, optimized=True, library=True)
        self._trials: dict[tuple[ThresholdSite, float], LayerTrial] = {}
        self.count = 0

    def run(self, site: ThresholdSite, threshold: float) -> LayerTrial:
        """Runs with one threshold alone."""
        if (site, threshold) not in self._trials:
            self._trials[site, threshold] = self._run(site, threshold)
        return self._trials[site, threshold]

    def _run(self, site: ThresholdSite, threshold: float) -> LayerTrial:
        self.count += 1
        self._say(self.count)
        layer = site.name
        model = put_thresholds(self._exact, {site: threshold})
        lse_outputs = list(add_lse_outputs(model, [layer]).values()) if layer in self._lse_outputs else []
        session = self._sessions.make(model, optimized=True, library=True)
        take_skip_counts()  # none of what ran before
        meter = self._new_meter()
        masses: list[np.ndarray] = []
        for i, feed in enumerate(self._feeds):
            exact = self._exact_outputs(i)
            arrays = feed()
            found = session.run([*self._outputs, *lse_outputs], arrays)
            meter.add(exact[: len(self._outputs)], found[: len(self._outputs)], arrays)
            if lse_outputs:
                place = len(self._outputs) + list(self._lse_outputs).index(layer)
                masses.append(_mass_kept(exact[place], found[-1]))
        counts = take_skip_counts()
        mass = np.concatenate(masses) if masses else np.zeros(0)
        share = 0.0 if counts is None else counts.share
        return LayerTrial(meter.loss(), share, float(mass.mean()) if mass.size else None)

    def _exact_outputs(self, index: int) -> list[np.ndarray]:
        """The exact model's outputs that are compared, then the log-sum-exp of its layers."""
        if index in self._kept:
            return self._kept[index]
        names = [*self._outputs, *self._lse_outputs.values()]
        outputs: list[np.ndarray] = self._reference.run(names, self._feeds[index]())
        kept_bytes = sum(x.nbytes for found in self._kept.values() for x in found)
        if kept_bytes + sum(x.nbytes for x in outputs) <= _MOST_BYTES:
            self._kept[index] = outputs
        return outputs


def _mass_kept(exact: np.ndarray, skipped: np.ndarray) -> np.ndarray:
    """The share of each row's mass that was computed, by the log-sum-exp of all weights and of the computed ones."""
    one, other = (x.astype(np.float64).ravel() for x in (exact, skipped))
    finite = np.isfinite(one) & np.isfinite(other)
    return np.asarray(np.exp(other[finite] - one[finite]).clip(0.0, 1.0))
