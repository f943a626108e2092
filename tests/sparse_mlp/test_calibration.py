# SPDX-License-Identifier: Apache-2.0
"""Calibration of predicted MLPs: which tokens are kept, what is captured of them, and how well selections are measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
import pytest
from mlp_models import VOCABULARY, MlpForm, make_mlp_model
from onnx import TensorProto, helper

from stof.errors import ArgumentError, UnsupportedError
from stof.execution.inputs import InputMaker
from stof.prompts.files import PromptSet
from stof.sparse_mlp.calibration import activation_runs
from stof.sparse_mlp.calibration.activation_runs import ActivationRuns, SiteSamples
from stof.sparse_mlp.calibration.fit import activity_threshold, find_active_neurons, fit_selector, measure_selector
from stof.sparse_mlp.calibration.prompt_sets import _split
from stof.sparse_mlp.calibration.spec import MlpClause
from stof.sparse_mlp.constants import Constants
from stof.sparse_mlp.find import find_mlps
from stof.sparse_mlp.predictors.selector import NeuronSelector
from stof.sparse_mlp.site import MlpSite
from stof.symbolic import Symbolic

Array = npt.NDArray[Any]
FORM = MlpForm("silu", gated=True)


def sites_of(model: onnx.ModelProto) -> list[MlpSite]:
    found = find_mlps(model, Symbolic(model), any_activation=True)
    return [c.site for c in found if c.site is not None]


def runs_of(model: onnx.ModelProto, folder: Path) -> ActivationRuns:
    symbolic = Symbolic(model)
    return ActivationRuns(model, folder, InputMaker(model, symbolic, frozenset()), 0)


def prompts(*lengths: int, seed: int = 0) -> PromptSet:
    rng = np.random.default_rng(seed)
    return PromptSet("test", tuple(rng.integers(0, VOCABULARY, n) for n in lengths))


def direct(model: onnx.ModelProto, form: MlpForm, ids: Array, tensors: list[str]) -> list[Array]:
    """The tensors [S, size] of a prompt without a past."""
    shown = onnx.ModelProto()
    shown.CopyFrom(model)
    shown.graph.output.extend(helper.make_tensor_value_info(t, form.dtype, None) for t in tensors)
    past = np.zeros((1, 0, form.size), helper.tensor_dtype_to_np_dtype(form.dtype))
    session = ort.InferenceSession(shown.SerializeToString(), providers=["CPUExecutionProvider"])
    found = session.run(tensors, {"input_ids": ids[None], "past": past})
    return [x.reshape(-1, x.shape[-1]).astype(np.float32) for x in found]


@pytest.mark.parametrize("form", [FORM, MlpForm("gelu", gemm=True, dtype=TensorProto.FLOAT16)], ids=str)
def test_samples_are_the_tensors_of_the_model(form: MlpForm, tmp_path: Path) -> None:
    model = make_mlp_model(form, layers=2)
    sites, given = sites_of(model), prompts(7, 11)
    found = list(runs_of(model, tmp_path).samples(sites, [given], [1000]))
    assert [s.name for s, _ in found] == [s.name for s in sites]
    for site, (samples,) in found:
        wanted = [direct(model, form, ids, [site.gate_input, site.activated]) for ids in given.prompts]
        assert samples.inputs is not None
        np.testing.assert_allclose(samples.inputs, np.concatenate([w[0] for w in wanted]), rtol=1e-2, atol=1e-3)
        np.testing.assert_allclose(samples.activated, np.concatenate([w[1] for w in wanted]), rtol=1e-2, atol=1e-2)


def test_samples_of_a_bounded_number_of_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are spread over the prompts; samples that do not fit in memory together are made by further runs."""
    model = make_mlp_model(FORM, layers=3)
    sites, given = sites_of(model), prompts(9, 1, 30)
    every = dict(runs_of(model, tmp_path).samples(sites, [given], [1000]))
    monkeypatch.setattr(activation_runs, "_GROUP_BYTES", 4 * 10 * (160 + 48) * 2)
    counts: list[int] = []
    run = ActivationRuns._run_prompt

    def counted(self, *args):  # type: ignore[no-untyped-def]
        counts.append(len(args[-1]))
        return run(self, *args)

    monkeypatch.setattr(ActivationRuns, "_run_prompt", counted)
    kept = np.unique(np.linspace(0, 39, 10).astype(int))
    for site, (samples,) in runs_of(model, tmp_path).samples(sites, [given], [10]):
        np.testing.assert_allclose(samples.activated, every[site][0].activated[kept], rtol=1e-5, atol=1e-6)
    assert set(counts) <= {2, 4}  # tensors of one or two sites
    assert len(counts) in (4, 6)  # two groups of sites, two or three prompts with tokens that are kept


def test_samples_of_an_mlp_with_fewer_tokens_than_the_prompt(tmp_path: Path) -> None:
    """One that reads a single vector for each prompt, as those behind a slice of the last token do."""
    model = make_mlp_model(FORM)
    for node in model.graph.node:
        if node.op_type == "MatMul" and node.input[0] == "mixed":
            node.input[0] = "mean"
    place = next(i for i, n in enumerate(model.graph.node) if "mixed" in n.output)
    model.graph.node.insert(place + 1, helper.make_node("ReduceMean", ["mixed", "middle"], ["mean"]))
    (site,) = sites_of(model)
    given = prompts(7, 11)
    ((_, (samples,)),) = runs_of(model, tmp_path).samples([site], [given], [1000])
    wanted = [direct(model, FORM, ids, [site.gate_input, site.activated]) for ids in given.prompts]
    counts = [len(ids) for ids in given.prompts]
    assert samples.inputs is not None
    for i, found in enumerate((samples.inputs, samples.activated)):
        rows = np.concatenate([w[i].repeat(n, 0) for w, n in zip(wanted, counts, strict=True)])
        np.testing.assert_allclose(found, rows, rtol=1e-4, atol=1e-4)


def test_long_prompts_are_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_runs, "_LONGEST", 8)
    model = make_mlp_model(FORM)
    ((_, (samples,)),) = runs_of(model, tmp_path).samples(sites_of(model), [prompts(30)], [1000])
    assert len(samples.activated) == 8


def test_prompt_that_the_model_refuses_is_named(tmp_path: Path) -> None:
    model = make_mlp_model(FORM)
    given = PromptSet("--sparse-mlp p.npz", (np.array([1, 2]), np.array([3, VOCABULARY])))
    with pytest.raises(ArgumentError, match=r"--sparse-mlp p.npz: the model does not run on prompt 1 of 2 tokens"):
        list(runs_of(model, tmp_path).samples(sites_of(model), [given], [100]))


def test_split_of_many_prompts_takes_whole_ones() -> None:
    given = [np.full(3, i) for i in range(11)]
    fitted, held = _split(given)
    assert [int(p[0]) for p in held] == [4, 9]
    assert [int(p[0]) for p in fitted] == [0, 1, 2, 3, 5, 6, 7, 8, 10]


def test_split_of_few_prompts_takes_their_ends() -> None:
    fitted, held = _split([np.arange(10), np.arange(3)])
    assert [list(p) for p in fitted] == [list(range(8)), [0, 1, 2]]
    assert [list(p) for p in held] == [[8, 9]]


def random_samples(site: MlpSite, tokens: int = 200, seed: int = 1) -> SiteSamples:
    """Correlated tokens, and the neurons that the site's own gate gives for them."""
    rng = np.random.default_rng(seed)
    assert site.gate_weight is not None
    basis = np.random.default_rng(0).standard_normal((12, site.gate_weight.inner))
    inputs = (rng.standard_normal((tokens, 12)) @ basis).astype(np.float32)
    return SiteSamples(np.zeros((tokens, site.neurons), np.float32), inputs / 3)


def activated(site: MlpSite, model: onnx.ModelProto, inputs: Array) -> npt.NDArray[np.float32]:
    stored = {t.name: onnx.numpy_helper.to_array(t).astype(np.float64) for t in model.graph.initializer}
    assert site.gate_weight is not None
    gate = inputs.astype(np.float64) @ stored[site.gate_weight.tensor] + stored[site.gate_weight.bias]
    found = np.maximum(gate, 0) if site.activation == "relu" else gate / (1 + np.exp(-gate))
    return np.asarray(found, np.float32)


@pytest.fixture(name="gated")
def make_gated() -> tuple[MlpSite, onnx.ModelProto]:
    model = make_mlp_model(FORM)
    return sites_of(model)[0], model


@pytest.mark.parametrize(
    ("clause", "recall"),
    [
        (MlpClause("magnitude", active=0.3), 1.0),
        (MlpClause("magnitude", active=0.3, by_neuron=True), 0.6),
        (MlpClause("svd", active=0.3, rank=12), 0.8),
        (MlpClause("svd", active=0.3, recall=0.95, rank=12), 0.9),
        (MlpClause("trained", active=0.3, rank=12), 0.8),
    ],
    ids=str,
)
def test_quality_on_held_out_tokens(clause: MlpClause, recall: float, gated: tuple[MlpSite, onnx.ModelProto]) -> None:
    site, model = gated
    constants = Constants(model.graph, Path())
    fitted, held = random_samples(site), random_samples(site, 300, seed=2)
    fitted, held = (replace(s, activated=activated(site, model, s.inputs)) for s in (fitted, held))  # type: ignore[arg-type]
    selector = fit_selector(site, clause, fitted, constants)
    threshold = activity_threshold(site, clause, fitted.activated)
    found = measure_selector(site, clause.kind, selector, held, threshold, constants)
    assert found.quality is not None
    assert found.quality.active_share == pytest.approx(0.3, abs=0.05)
    if clause.recall is None:
        assert found.quality.selected_share == pytest.approx(0.3, abs=0.06)
    assert found.quality.recall >= recall
    # The same by hand in fp64: outputs of selected neurons beside those of all.
    stored = {t.name: onnx.numpy_helper.to_array(t).astype(np.float64) for t in model.graph.initializer}
    assert site.up is not None
    assert held.inputs is not None
    hidden = held.activated * (held.inputs @ stored[site.up.tensor] + stored[site.up.bias])
    selected = selector.select(held.inputs, held.activated)
    dense, sparse = (h @ stored[site.down.tensor] + stored[site.down.bias] for h in (hidden, hidden * selected))
    assert found.output_error == pytest.approx(np.linalg.norm(sparse - dense) / np.linalg.norm(dense), rel=1e-3)


def test_neurons_that_count_as_active() -> None:
    model = make_mlp_model(MlpForm("relu"))
    site = sites_of(model)[0]
    values = np.array([[0.0, 1e-9, np.nan, -2.0]], np.float32)
    assert find_active_neurons(site, values, activity_threshold(site, MlpClause("svd"), values)).tolist() == [
        [False, True, True, True]
    ]


def test_tokens_that_are_not_finite_are_left_out_of_a_fit(gated: tuple[MlpSite, onnx.ModelProto]) -> None:
    site, model = gated
    samples = random_samples(site)
    assert samples.inputs is not None
    samples = replace(samples, activated=activated(site, model, samples.inputs))
    broken = replace(samples, inputs=samples.inputs.copy(), activated=samples.activated.copy())
    assert broken.inputs is not None
    broken.inputs[::7, 3] = np.inf
    broken.activated[::7] = np.nan
    kept = np.arange(200) % 7 != 0
    clean = SiteSamples(samples.activated[kept], samples.inputs[kept])
    clause, constants = MlpClause("svd", active=0.3, rank=8), Constants(model.graph, Path())
    one, other = (fit_selector(site, clause, s, constants) for s in (broken, clean))
    np.testing.assert_array_equal(one.threshold, other.threshold)
    broken.inputs[:] = np.nan
    with pytest.raises(UnsupportedError, match="no calibration token enters it with finite numbers"):
        fit_selector(site, clause, broken, constants)


def test_nan_is_selected_and_leaves_no_error(gated: tuple[MlpSite, onnx.ModelProto]) -> None:
    site, model = gated
    samples = random_samples(site, 20)
    assert samples.inputs is not None
    samples = replace(samples, activated=activated(site, model, samples.inputs))
    samples.activated[3, 5] = np.nan
    found = measure_selector(
        site, "magnitude", NeuronSelector(np.array([1e9], np.float32)), samples, 0.1, Constants(model.graph, Path())
    )
    assert found.quality is not None
    assert found.quality.selected_share == pytest.approx(1 / (20 * site.neurons))
    assert found.output_error is not None  # of the other tokens
    assert np.isfinite(found.output_error)


def test_predictor_where_the_operator_lacks_the_activation() -> None:
    model = make_mlp_model(MlpForm("quick_gelu", gated=True))
    site = sites_of(model)[0]
    samples = SiteSamples(np.ones((4, site.neurons), np.float32), np.ones((4, 48), np.float32))
    with pytest.raises(UnsupportedError, match=r"it takes no predictor: .* kind=magnitude needs none"):
        fit_selector(site, MlpClause("svd"), samples, Constants(model.graph, Path()))
