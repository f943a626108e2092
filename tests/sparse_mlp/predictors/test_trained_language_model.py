# SPDX-License-Identifier: Apache-2.0
"""A trained ReLU language model keeps its loss: to 4 digits where nothing is predicted, within bounds where neurons are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from tests.sparse_mlp.predictors.relu_language_model import (
    LAYERS,
    NEURONS,
    SIZE,
    Array,
    LanguageModel,
    RandomText,
    cross_entropy,
    to_onnx,
    train,
)

import stof
from stof.options import Options
from stof.report import Report
from stof.sparse_mlp.predictors.magnitude import fit_magnitude_selector
from stof.sparse_mlp.predictors.selector import NeuronSelector
from stof.sparse_mlp.predictors.svd import fit_svd_selector
from stof.sparse_mlp.predictors.trained import train_selector
from stof.sparse_mlp.report import MlpSection
from stof.sparse_mlp.site import OP

pytestmark = pytest.mark.usefixtures("small_mlps_gain")

RANK = 16


@dataclass(frozen=True)
class Trained:
    """A trained model, its loss on new text, and what its MLPs compute on calibration text.

    Attributes:
        model: in fp32 NumPy.
        text: what it was trained on.
        new: tokens [B, S] that it has not seen.
        loss: on them, with weights in fp64.
        inputs: tokens [T, K] of each MLP.
        activations: likewise [T, F].
    """

    model: LanguageModel
    text: RandomText
    new: Array
    loss: float
    inputs: list[Array]
    activations: list[Array]


@pytest.fixture(name="trained", scope="module")
def train_model() -> Trained:
    text = RandomText()
    model = LanguageModel(train(text))
    rng = np.random.default_rng(100)
    new, known = text.draw(60, rng), text.draw(80, rng)
    wide = LanguageModel({n: w.astype(np.float64) for n, w in model.weights.items()})
    saved: dict[str, Array] = {}
    model.logits(known[:, :-1], None, saved)
    inputs = [saved[f"{i}.g"].reshape(-1, SIZE) for i in range(LAYERS)]
    return Trained(
        model, text, new, wide.loss(new), inputs, [saved[f"{i}.a"].reshape(-1, NEURONS) for i in range(LAYERS)]
    )


def loss_of(trained: Trained, selectors: list[NeuronSelector]) -> tuple[float, float]:
    """The loss with selected neurons, and the share of neurons that were selected."""
    shares = []

    def select(layer: int, tokens: Array, activations: Array) -> Array:
        selected = selectors[layer].select(tokens, activations)
        shares.append(selected.mean())
        return selected

    return trained.model.loss(trained.new, select), float(np.mean(shares))


def test_the_model_has_learned(trained: Trained) -> None:
    entropy = -(trained.text.next * np.log(trained.text.next)).sum(-1).mean()
    active = [float((a > 0).mean()) for a in trained.activations]
    print(f"loss {trained.loss:.4f}, active {active[0]:.1%} and {active[1]:.1%}, entropy of the text {entropy:.4f}")
    assert trained.loss < entropy + 0.35  # 3.5 without training; the first tokens do not tell the topic
    assert all(0.03 < a < 0.2 for a in active)


def test_all_nonzero_neurons_keep_the_loss(trained: Trained) -> None:
    exact = [NeuronSelector(np.zeros(1, np.float32))] * LAYERS
    loss, share = loss_of(trained, exact)
    assert loss == pytest.approx(trained.loss, abs=1e-5)
    assert share < 0.2


def test_predictors_keep_the_loss_within_bounds(trained: Trained) -> None:
    """Rank 16 of 64, selected by recall; nats beyond the dense model's loss."""
    w, limits = trained.model.weights, {0.9: 0.01, 0.98: 0.003, 0.995: 0.002}
    for recall, limit in limits.items():
        found, started = [], []
        for i in range(LAYERS):
            inputs, active = trained.inputs[i], trained.activations[i] > 0
            weight, bias = np.ascontiguousarray(w[f"{i}.fc1"].T), w[f"{i}.fc1_bias"]
            found.append(fit_svd_selector(weight, bias, inputs, active, RANK, recall=recall))
            started.append(train_selector(inputs, active, RANK, epochs=5, start=found[i], recall=recall))
        shares = []
        for kind, selectors in (("svd", found), ("trained", started)):
            loss, share = loss_of(trained, selectors)
            print(f"recall {recall}, {kind}: {share:.1%} of the neurons, loss {loss - trained.loss:+.5f}")
            assert loss - trained.loss < limit
            shares.append(share)
        assert shares[1] < shares[0] < 0.6  # training pays


def test_magnitude_thresholds_keep_the_loss_within_bounds(trained: Trained) -> None:
    for share, limit in ((0.03, 0.1), (0.05, 0.02)):
        loss, found = loss_of(trained, [fit_magnitude_selector(a, share) for a in trained.activations])
        assert found == pytest.approx(share, rel=0.2)
        assert loss - trained.loss < limit


def onnx_losses(path: Path, tokens: Array, library: bool) -> tuple[float, float]:
    """The loss of whole sequences, and that of the tokens behind the first eight, decoded one by one over the cache."""
    options = ort.SessionOptions()
    if library:
        stof.register(options)
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [o.name for o in session.get_outputs()]
    pasts = [i.name for i in session.get_inputs() if i.name.startswith("past.")]

    def run(ids: Array, caches: dict[str, Array]) -> tuple[Array, dict[str, Array]]:
        found = dict(zip(names, session.run(names, {"input_ids": ids, **caches}), strict=True))
        return found["logits"], {p: found[p.replace("past.", "present.")] for p in pasts}

    empty = {p: np.zeros((len(tokens), 0, SIZE), np.float32) for p in pasts}
    whole = cross_entropy(run(tokens[:, :-1], empty)[0], tokens[:, 1:])
    _, caches = run(tokens[:, :8], empty)
    decoded = []
    for i in range(8, tokens.shape[1] - 1):
        logits, caches = run(tokens[:, i : i + 1], caches)
        decoded.append(cross_entropy(logits, tokens[:, i + 1 : i + 2]))
    return whole, float(np.mean(decoded))


def mlps(report: Report) -> MlpSection:
    section = report.sections["mlps"]
    assert isinstance(section, MlpSection)
    return section


def written_selections(path: Path) -> list[bytes]:
    nodes = [n for n in onnx.load(str(path)).graph.node if n.op_type == OP]
    return [a.s for n in nodes for a in n.attribute if a.name == "selection"]


def test_exact_mode_keeps_the_loss_to_four_digits(trained: Trained, tmp_path: Path) -> None:
    source, target = tmp_path / "model.onnx", tmp_path / "out.onnx"
    onnx.save(to_onnx(trained.model.weights), str(source))
    report = stof.optimize(source, target)
    assert mlps(report).replaced == LAYERS, [r.reason for r in mlps(report).rows]
    before, after = onnx_losses(source, trained.new, False), onnx_losses(target, trained.new, True)
    assert before[0] == pytest.approx(trained.loss, abs=1e-5)  # the graph is the trained model
    assert after == pytest.approx(before, abs=5e-5)


@pytest.mark.parametrize(
    ("fields", "selection", "limit"),
    [
        ("kind=svd,rank=16,recall=0.99", b"predictor", 0.02),
        ("kind=trained,rank=16,recall=0.99", b"predictor", 0.02),
        ("kind=magnitude,active=0.05", b"magnitude", 0.02),
    ],
)
def test_predicted_mode_keeps_the_loss(
    fields: str, selection: bytes, limit: float, trained: Trained, tmp_path: Path
) -> None:
    """The loss of the written model, and the quality gate's KL divergence, on text that calibration has not seen."""
    source, target, prompts = tmp_path / "model.onnx", tmp_path / "out.onnx", tmp_path / "prompts.npz"
    onnx.save(to_onnx(trained.model.weights), str(source))
    np.savez(prompts, *trained.text.draw(60, np.random.default_rng(200)))
    report = stof.optimize(source, target, Options(sparse_mlp=f"{prompts},{fields}", max_kl=limit))
    assert mlps(report).replaced == LAYERS, [r.reason for r in mlps(report).rows]
    assert written_selections(target) == [selection] * LAYERS
    before, after = onnx_losses(source, trained.new, False), onnx_losses(target, trained.new, True)
    for one, other in zip(before, after, strict=True):
        assert one != other
        assert other - one < limit
    measured = mlps(report).loss
    assert measured is not None
    assert 0 < measured.whole.kl < limit
