# SPDX-License-Identifier: Apache-2.0
"""--allow-bf16 and sparse MLPs: whose weights are rounded, their errors, gates, plans, and what they compute."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from gemm_layers import run_model
from mlp_models import VOCABULARY, MlpForm, make_mlp_model
from onnx import TensorProto, helper, numpy_helper
from precision_runs import run

from helpers.int8_attention import relative_rms
from stof.arguments.precisions import BF16
from stof.attention_precision import mlp_nodes
from stof.attention_precision.mlp_nodes import METADATA, sparse_mlps_of
from stof.runtime.bf16_kernel import cpu_bf16_kernel
from stof.sparse_mlp.checks import site_checks
from stof.sparse_mlp.checks.oracle import MlpWeights

pytestmark = pytest.mark.usefixtures("small_mlps_gain")

FORMS = [
    MlpForm(),
    MlpForm("relu2", gated=True),
    MlpForm(gated=True, bias=False, packed="gate_up"),
    MlpForm("relu2", gemm=True),
]


def put(folder: Path, form: MlpForm, *, rounds: bool = False) -> Path:
    """A decoder of two layers. rounds: up and down weights are rounded to bf16, the gate's are not."""
    model = make_mlp_model(form, 2)
    for tensor in model.graph.initializer if rounds else ():
        array = numpy_helper.to_array(tensor)
        if array.ndim == 2 and ("down" in tensor.name or (form.gated and ".up" in tensor.name)):
            tensor.CopyFrom(numpy_helper.from_array(BF16.round(array), tensor.name))
    path = folder / ("rounded.onnx" if rounds else "model.onnx")
    onnx.save(model, path)
    return path


def flags_of(path: Path) -> list[int]:
    """The attribute of each sparse MLP."""
    found = sparse_mlps_of(onnx.load(path).graph.node)
    return [next((a.i for a in n.attribute if a.name == BF16.attribute), 0) for n in found]


def has_kernel() -> bool:
    """Whether this machine multiplies many tokens in bf16."""
    return cpu_bf16_kernel() in ("avx512_bf16", "amx_bf16")


def outputs_of(path: Path, form: MlpForm, tokens: int, *, library: bool) -> np.ndarray:
    """The logits of a prompt behind three cached tokens."""
    rng = np.random.default_rng(tokens)
    past = rng.standard_normal((1, 3, form.size)).astype(np.float32)
    feed = {"input_ids": rng.integers(0, VOCABULARY, (1, tokens)), "past": past}
    return run_model(path, feed, library=library).astype(np.float64)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_weights_are_rounded(form: MlpForm, tmp_path: Path) -> None:
    """The model computes what the original computes with rounded weights; without the library, what the original does."""
    model = put(tmp_path, form)
    status, target, report = run(tmp_path, model, "--allow-bf16")
    assert status == 0
    found = report["attention_precision"]["mlps"]
    assert [row["reduced"] for row in found["rows"]] == [True, True]
    assert all(1e-4 < row["relative_rms"] < 0.01 for row in found["rows"])
    assert {row["neurons"] for row in found["rows"]} == {form.neurons}
    assert flags_of(target) == [1, 1]
    (entry,) = [p.value for p in onnx.load(target).metadata_props if p.key == METADATA]
    assert entry.startswith("outputs change; bf16: ")
    rounded = model if form.packed else put(tmp_path, form, rounds=True)
    for tokens in (1, 5, 40):
        original = outputs_of(model, form, tokens, library=False)
        mine = outputs_of(target, form, tokens, library=True)
        assert 1e-5 < relative_rms(mine, original) < 0.01
        assert relative_rms(outputs_of(target, form, tokens, library=False), original) < 1e-5
        if not form.packed:  # up shares its weight with the gate, which is not rounded
            away = relative_rms(mine, outputs_of(rounded, form, tokens, library=False))
            # From 16 tokens on, kernels in bf16 round tokens and hidden values, too.
            assert 1e-5 < away < 0.005 if tokens == 40 and has_kernel() else away < 1e-5


def test_the_report_says_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, put(tmp_path, MlpForm()), "--allow-bf16")[0] == 0
    text = capsys.readouterr().out
    first = text.splitlines()[0]
    assert "OUTPUTS CHANGE: --allow-bf16 lets 2 of 2 sparse MLPs round weights, and many tokens, to bf16" in first
    assert (
        "weights, and many tokens, rounded to bf16 in 2 sparse MLPs of 160 neurons; relative RMS error up to 0.00"
        in text
    )
    assert (
        "errors of sparse MLPs: relative RMS against fp64, on 48 tokens of a set at most, 2 sets of drawn inputs"
        in text
    )


def test_errors_beyond_the_bound_keep_weights(tmp_path: Path) -> None:
    """A bound of 0 admits nothing; one between the errors admits one."""
    model = put(tmp_path, MlpForm("relu2", gated=True))
    status, target, report = run(tmp_path, model, "--allow-bf16", "--max-error", "0")
    assert status == 0
    assert flags_of(target) == [0, 0]
    rows = report["attention_precision"]["mlps"]["rows"]
    assert all("--max-error allows 0" in row["reason"] for row in rows)
    middle = str(sum(row["relative_rms"] for row in rows) / 2)
    assert sum(flags_of(run(tmp_path, model, "--allow-bf16", "--max-error", middle)[1])) == 1


def test_a_kernel_that_computes_something_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated: the definition leaves the weights as they are."""
    monkeypatch.setattr(MlpWeights, "rounded", lambda self, precision: self)
    _, target, report = run(tmp_path, put(tmp_path, MlpForm()), "--allow-bf16")
    assert flags_of(target) == [0, 0]
    for row in report["attention_precision"]["mlps"]["rows"]:
        assert "it differs from the definition that rounds as its kernels do: " in row["reason"]


def drop_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Definitions round weights, and neither tokens nor hidden values."""
    compute = site_checks.compute_mlp
    monkeypatch.setattr(
        site_checks, "compute_mlp", lambda *args, **given: compute(*args, **{**given, "factor_type": None})
    )


def test_a_kernel_that_rounds_tokens_is_held_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated: no definition rounds tokens. It is the right one where no kernel does."""
    drop_factors(monkeypatch)
    _, target, report = run(tmp_path, put(tmp_path, MlpForm("relu2", gated=True)), "--allow-bf16")
    assert flags_of(target) == ([0, 0] if has_kernel() else [1, 1])
    for row in report["attention_precision"]["mlps"]["rows"]:
        assert row["reduced"] or "it differs from the definition that rounds as its kernels do: " in row["reason"]


def test_errors_have_rounded_tokens_in_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where so few tokens are compared that no kernel rounds them."""
    monkeypatch.setattr(site_checks, "MOST_TOKENS", 8)
    model = put(tmp_path, MlpForm("relu2", gated=True))

    def errors() -> list[float]:
        rows = run(tmp_path, model, "--allow-bf16")[2]["attention_precision"]["mlps"]["rows"]
        return [row["relative_rms"] for row in rows]

    whole = errors()
    drop_factors(monkeypatch)
    assert all(1.1 * weights < both for weights, both in zip(errors(), whole, strict=True))


def test_numbers_beyond_bf16_keep_weights(tmp_path: Path) -> None:
    """A weight that becomes infinite takes a finite result away."""
    model = make_mlp_model(MlpForm(bias=False), 2)
    stored = {tensor.name: tensor for tensor in model.graph.initializer}

    def change(name: str, at: tuple[object, ...], factor: float, value: float | None = None) -> None:
        array = numpy_helper.to_array(stored[name]).copy()
        array[at] = factor * array[at] if value is None else value
        stored[name].CopyFrom(numpy_helper.from_array(array, name))

    change("layers.1.gate.weight", (slice(None), 0), 1e-3)
    change("layers.1.down.weight", (0, 0), 1.0, 3.4e38)
    onnx.save(model, tmp_path / "model.onnx")
    _, target, report = run(tmp_path, tmp_path / "model.onnx", "--allow-bf16", "--no-verify", "--force")
    assert flags_of(target) == [1, 1]
    _, target, report = run(tmp_path, tmp_path / "model.onnx", "--allow-bf16")
    assert flags_of(target) == [1, 0], report["attention_precision"]["mlps"]


def test_unknown_errors_need_force(tmp_path: Path) -> None:
    model = put(tmp_path, MlpForm())
    _, target, report = run(tmp_path, model, "--allow-bf16", "--no-verify")
    assert flags_of(target) == [0, 0]
    assert "--force allows it all the same" in report["attention_precision"]["mlps"]["rows"][0]["reason"]
    assert flags_of(run(tmp_path, model, "--allow-bf16", "--no-verify", "--force")[1]) == [1, 1]


def test_gates_take_them_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    form, inputs = MlpForm(), tmp_path / "inputs.npz"
    rng = np.random.default_rng(0)
    past = rng.standard_normal((1, 3, form.size)).astype(np.float32)
    np.savez(inputs, input_ids=rng.integers(0, VOCABULARY, (1, 30)), past=past)
    given = ["--allow-bf16", "--inputs", str(inputs)]
    status, target, report = run(tmp_path, put(tmp_path, form), *given)
    assert status == 0
    assert flags_of(target) == [1, 1]
    worst = 1 - min(report["attention_precision"]["cosines"].values())
    assert 1e-8 < worst < 1e-4
    assert run(tmp_path, put(tmp_path, form), *given, "--min-cosine", str(1 - worst / 2))[0] == 2
    assert "--allow-bf16 changes outputs too much" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["magnitude", "svd"])
def test_selected_neurons_and_their_loss(kind: str, tmp_path: Path) -> None:
    """Both change outputs: prompts measure the loss of a model with both."""
    prompts = tmp_path / "p.npz"
    rng = np.random.default_rng(0)
    np.savez(prompts, *[rng.integers(0, VOCABULARY, 20) for _ in range(10)])
    model = put(tmp_path, MlpForm("silu", gated=True))
    given = ["--sparse-mlp", f"{prompts},kind={kind},max_error=3", "--max-kl", "100"]
    status, target, report = run(tmp_path, model, *given, "--allow-bf16")
    assert status == 0
    assert flags_of(target) == [1, 1]
    rows = report["attention_precision"]["mlps"]["rows"]
    assert all(1e-4 < row["relative_rms"] < 0.01 for row in rows)
    assert report["attention_precision"]["loss"]["kl"] > 0
    mine = outputs_of(target, MlpForm(), 9, library=True)
    assert 1e-5 < relative_rms(mine, outputs_of(run(tmp_path, model, *given)[1], MlpForm(), 9, library=True)) < 0.1


def test_prompts_measure_a_model_of_sparse_mlps_alone(tmp_path: Path) -> None:
    prompts = tmp_path / "p.npz"
    rng = np.random.default_rng(0)
    np.savez(prompts, *[rng.integers(0, VOCABULARY, 20) for _ in range(3)])
    status, target, report = run(tmp_path, put(tmp_path, MlpForm()), "--allow-bf16", "--prompts", str(prompts))
    assert status == 0
    assert flags_of(target) == [1, 1]
    assert 0 < report["attention_precision"]["loss"]["kl"] < 1e-3


def test_plans_keep_the_choice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, plan = put(tmp_path, MlpForm()), tmp_path / "plan.json"
    assert run(tmp_path, model, "--allow-bf16", "--save-plan", str(plan))[0] == 0
    data = json.loads(plan.read_text())
    names = list(data["mlp_precision"])
    assert len(names) == 2
    data["mlp_precision"] = {names[1]: "bf16"}
    plan.write_text(json.dumps(data))
    status, target, report = run(tmp_path, model, "--allow-bf16", "--plan", str(plan), "--no-verify")
    assert status == 0
    assert flags_of(target) == [0, 1]
    assert [row["reason"] for row in report["attention_precision"]["mlps"]["rows"]] == ["the plan says so", ""]
    assert run(tmp_path, model, "--plan", str(plan))[0] == 1
    assert "computes sparse MLPs in bf16" in capsys.readouterr().err
    data["mlp_precision"] = {"other": "bf16"}
    plan.write_text(json.dumps(data))
    assert run(tmp_path, model, "--allow-bf16", "--plan", str(plan))[0] == 1
    assert "the optimized model has no such sparse MLP" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        (MlpForm(dtype=TensorProto.FLOAT16), "its weights are not fp32"),
        (MlpForm(bits=4, size=64, accuracy_level=4), "its weights are quantized, with fewer bits"),
    ],
)
def test_other_weights_stay(form: MlpForm, reason: str, tmp_path: Path) -> None:
    status, target, report = run(tmp_path, put(tmp_path, form), "--allow-bf16")
    assert status == 0
    assert flags_of(target) == [0, 0]
    assert [row["reason"] for row in report["attention_precision"]["mlps"]["rows"]] == [reason, reason]


def test_a_library_without_the_attribute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlp_nodes, "takes_attribute", lambda op, attribute: False)
    _, target, report = run(tmp_path, put(tmp_path, MlpForm()), "--allow-bf16")
    assert flags_of(target) == [0, 0]
    rows = report["attention_precision"]["mlps"]["rows"]
    assert all("of the plugin library has no attribute allow_bf16" in row["reason"] for row in rows)


def test_nothing_changes_without_the_option(tmp_path: Path) -> None:
    status, target, report = run(tmp_path, put(tmp_path, MlpForm()))
    assert status == 0
    assert flags_of(target) == [0, 0]
    assert report["attention_precision"] is None


def test_weights_that_are_computed_in_the_run_are_not_rounded(tmp_path: Path) -> None:
    """The attribute is a permission for constants."""
    target = run(tmp_path, put(tmp_path, MlpForm()), "--allow-bf16")[1]
    model = onnx.load(target)
    node = sparse_mlps_of(model.graph.node)[0]
    down = node.input[4]
    model.graph.node.insert(0, helper.make_node("Mul", [down, "factor"], ["computed"], name="computed"))
    model.graph.input.append(helper.make_tensor_value_info("factor", TensorProto.FLOAT, [1]))
    node.input[4] = "computed"
    plain = tmp_path / "plain.onnx"
    found = []
    for path, keeps in ((tmp_path / "with.onnx", True), (plain, False)):
        if not keeps:
            for n in sparse_mlps_of(model.graph.node)[:1]:
                n.attribute.remove(next(a for a in n.attribute if a.name == BF16.attribute))
        onnx.save(model, path)
        feed = {
            "input_ids": np.arange(5)[None],
            "past": np.ones((1, 3, 48), np.float32),
            "factor": np.ones(1, np.float32),
        }
        found.append(run_model(path, feed, library=True))
    np.testing.assert_array_equal(found[0], found[1])
