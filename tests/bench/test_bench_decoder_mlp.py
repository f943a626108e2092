# SPDX-License-Identifier: Apache-2.0
"""The bench of decoders with sparse MLPs: its graphs against NumPy, active and idle shares, bytes, records, refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy_decoder import read_weights, run_decoder

from bench.cli import main
from bench.decoder import mlp_decoder, mlp_memory, mlp_models
from bench.decoder.build_decoder import build_decoder
from bench.decoder.devices import HostDevice
from bench.decoder.graph import DecoderShape
from bench.decoder.mlp_bytes import bounds, idle_bytes
from bench.decoder.mlp_form import IDLE_BIAS, MlpForm, gate_bias
from bench.decoder.mlp_models import MODELS, VARIANTS, MlpDecoderModel, shape_of
from bench.decoder.steps import Caches, DecoderStep, DecoderTensors
from bench.decoder.variants import write_weights

SHAPE = DecoderShape(64, 4, 2, 16, 96, 24, 2, 64, "float32")
FORMS = {
    "relu gated": MlpForm("relu", active=0.1),
    "relu plain": MlpForm("relu", is_gated=False, active=0.3),
    "relu2 gated": MlpForm("relu2", active=0.2),
    "relu2 plain": MlpForm("relu2", is_gated=False, active=0.1),
    "silu gated": MlpForm("silu"),
    "silu plain": MlpForm("silu", is_gated=False),
    "gelu_tanh, top-k": MlpForm("gelu_tanh", active=0.05, has_top_k=True),
    "relu gated, idle": MlpForm("relu", active=0.1, idle=0.4),
    "relu gated, a half": MlpForm("relu"),
}


@pytest.mark.parametrize("block", [0, 32])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_graph_is_the_decoder_that_numpy_computes(form: MlpForm, block: int, tmp_path: Path) -> None:
    """fp32, and int4 whose tokens stay fp32."""
    shape = replace(SHAPE, mlp=form, block_size=block)
    decoder = build_decoder(shape)
    device = HostDevice(1)
    write_weights(decoder, device, tmp_path)
    (tmp_path / "original.onnx").write_bytes(decoder.model.SerializeToString())
    session = device.session(str(tmp_path / "original.onnx"), stof=False)
    step = DecoderStep(2, 9, 9, 9)
    tensors = DecoderTensors(device, shape, step, Caches(device, shape, int(np.prod(shape.cache_shape(2, 9)))))
    ids = np.random.default_rng(9).integers(0, shape.vocabulary, (2, 9))
    tensors._given["input_ids"][:] = ids
    device.run(session, tensors.bind(session))
    expected, _ = run_decoder(shape, read_weights(decoder, tmp_path), ids)
    np.testing.assert_allclose(tensors.logits()[:, 0], expected, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("block", [0, 32])
@pytest.mark.parametrize("name", [n for n, f in FORMS.items() if f.active is not None])
def test_stated_share_of_neurons_is_active(name: str, block: int, tmp_path: Path) -> None:
    """Within 2 % of the neurons, in every layer; idle neurons are not active for any token."""
    form = FORMS[name]
    assert form.active is not None
    shape = replace(SHAPE, hidden=256, inner=1024, vocabulary=200, mlp=form, block_size=block)
    decoder = build_decoder(shape)
    write_weights(decoder, HostDevice(1), tmp_path)
    ids = np.random.default_rng(4).integers(0, shape.vocabulary, (3, 40))
    weights = read_weights(decoder, tmp_path)
    _, activated = run_decoder(shape, weights, ids)
    assert len(activated) == shape.layers
    for hidden in activated:
        assert abs((hidden != 0).mean() - form.active) <= 0.02
    if form.idle:
        biases = [weights[f"/model/layers.{i}/mlp/fc1.bias"] for i in range(shape.layers)]
        places = [np.flatnonzero(bias == IDLE_BIAS) for bias in biases]
        assert [len(p) for p in places] == [410, 410]
        assert set(places[0]) != set(places[1])
        assert np.diff(places[0]).max() < 20  # scattered over all neurons
        assert not any(hidden[..., p].any() for hidden, p in zip(activated, places, strict=True))


def test_gate_bias_is_that_of_a_normal_distribution() -> None:
    assert MlpForm("relu", active=0.5).shift == 0
    # P(x > 1.2816) = 0.1 for a standard normal x; gates deviate by 0.7 · sqrt(1.01).
    assert MlpForm("relu", active=0.1).shift == pytest.approx(-1.2816 * 0.7 * 1.01**0.5, rel=1e-4)
    # A sixth of the neurons that are not idle: P(x > 0.9674) = 1 / 6.
    assert MlpForm("relu", active=0.1, idle=0.4).shift == pytest.approx(-0.9674 * 0.7 * 1.01**0.5, rel=1e-4)
    values, counts = np.unique(gate_bias(MlpForm("relu", active=0.1, idle=0.4), 1000, 3), return_counts=True)
    assert values[0] == IDLE_BIAS
    assert counts.tolist() == [400, 600]


def test_unknown_activations_are_errors() -> None:
    with pytest.raises(ValueError, match="the activation is 'mish', expected one of silu, relu, relu2, gelu_tanh"):
        MlpForm("mish")


def test_bounds_count_the_bytes_that_a_token_reads() -> None:
    N, F, V, T, layers = 64, 96, 24, 10, 2
    attention = N * (4 + 2 * 2) * 16 + 4 * 16 * N
    for form, matrices in ((MlpForm("relu", active=0.25), 3), (MlpForm("relu", is_gated=False, active=0.25), 2)):
        shape = replace(SHAPE, mlp=form)
        weights = layers * (attention + matrices * N * F + F + 2 * N) + N + N * V
        dense = 4 * (weights + 2 * layers * 2 * 16 * T)
        found = bounds(shape, build_decoder(shape), {"exact": 0.25, "predicted": 0.5}, T, 1e6)
        exact = dense - 4 * layers * (matrices - 1) * 0.75 * N * F
        predicted = dense - 4 * layers * (matrices * 0.5 * N * F - 0.04 * F * (N + F))
        assert found["dense_us"] == dense
        assert found["exact"] == pytest.approx(dense / exact, abs=1e-4)
        assert found["predicted"] == pytest.approx(dense / predicted, abs=1e-4)


def test_bounds_of_int4_count_scales_and_predictors_of_a_byte() -> None:
    N, F, V, T, layers = 64, 96, 24, 10, 2
    shape = replace(SHAPE, mlp=MlpForm("relu", active=0.25), block_size=32)
    value = 0.5 + 4 / 32
    values = layers * (N * (4 + 2 * 2) * 16 + 4 * 16 * N + 3 * N * F) + N * V
    dense = value * values + 4 * (layers * (F + 2 * N) + N + 2 * layers * 2 * 16 * T)
    found = bounds(shape, build_decoder(shape), {"exact": 0.25, "predicted": 0.5}, T, 1e6)
    assert found["dense_us"] == dense
    assert found["exact"] == pytest.approx(dense / (dense - value * layers * 2 * 0.75 * N * F), abs=1e-4)
    predicted = dense - layers * (value * 3 * 0.5 * N * F - 0.04 * F * (N + F))
    assert found["predicted"] == pytest.approx(dense / predicted, abs=1e-4)


def test_bytes_of_idle_neurons_are_rows_that_a_variant_leaves_out() -> None:
    row = 4 * 64
    gated = replace(SHAPE, inner=100, mlp=MlpForm("relu", active=0.1, idle=0.4))
    assert idle_bytes(gated, "exact") == 2 * 2 * 40 * row
    assert idle_bytes(gated, "predicted") == 2 * 3 * 40 * row
    plain = replace(SHAPE, inner=100, mlp=MlpForm("relu", is_gated=False, active=0.1, idle=0.4))
    assert (idle_bytes(plain, "exact"), idle_bytes(plain, "predicted")) == (2 * 40 * row, 2 * 2 * 40 * row)
    assert idle_bytes(SHAPE, "exact") == 0


def test_models_have_a_share_that_is_possible() -> None:
    for name, model in MODELS.items():
        shape = shape_of(name)
        assert shape.mlp.active == (None if model.form.activation == "silu" else model.active)
        assert shape_of(name, 0.3, "int4a8").accuracy_level == 4
        assert shape_of(name, 0.3, "int4").block_size == 32
        assert shape_of(name, 0.3, "float16").dtype == "float16"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read rate that nothing is measured for, short prompts, and models that run at once."""
    monkeypatch.setattr(HostDevice, "read_rate", lambda self: 1e9)
    monkeypatch.setattr(mlp_decoder, "PROMPTS", (16,))
    monkeypatch.setattr(mlp_decoder, "CONTEXT", 20)
    shape = DecoderShape(32, 2, 1, 16, 256, 40, 1, 64, "float32")
    monkeypatch.setitem(MODELS, "tiny", MlpDecoderModel(shape, MlpForm("relu"), 0.1))
    monkeypatch.setitem(MODELS, "tiny-silu", MlpDecoderModel(shape, MlpForm("silu"), 0.25))


FIELDS = {
    *(
        "key",
        "grid",
        "model",
        "precision",
        "shape",
        "batch",
        "stated_active",
        "stated_idle",
        "active",
        "steps",
        "memory",
    ),
    *("weight_bytes", "bound_times_faster", "missing", "machine", "seconds"),
}


def run_command(folder: Path, *arguments: str) -> tuple[int, list[dict[str, Any]]]:
    given = ["decoder-mlp", "--rounds", "1", "--threads", "1", "--results", str(folder), *arguments]
    status = main(given)
    path = folder / "decoder-mlp-cpu.json"
    return status, json.loads(path.read_text()) if path.exists() else []


@pytest.mark.usefixtures("small", "small_mlps_gain")
def test_records_have_every_field(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, (record,) = run_command(tmp_path, "--models", "tiny", "--idle", "0.4")
    assert status == 0
    assert set(record) == {*FIELDS, "run"}
    names = [v.name for v in VARIANTS]
    assert record["key"] == ["tiny", "float32", 1, 0.1, 0.4, 1]
    assert not record["missing"]
    assert (record["stated_active"], record["stated_idle"]) == (0.1, 0.4)
    assert set(record["active"]) == {"exact", "predicted"}
    assert abs(record["active"]["exact"] - 0.1) < 0.03
    assert set(record["steps"]) == {"token 20", "prompt 16"}
    for step in record["steps"].values():
        for field in ("us", "spread_us", "differs"):
            assert set(step[field]) == set(names)
        assert max(step["differs"][n] for n in ("dense", "exact")) < 1e-5
        assert set(step["times_faster"]) == {"original", "dense"}
        for name, us in step["us"].items():
            assert step["times_faster"]["dense"][name] == pytest.approx(step["us"]["dense"] / us, rel=0.05)
            assert us == step["spread_us"][name][0]  # of a CPU the least time counts
    memory = record["memory"]
    assert set(memory["resident_bytes"]) == set(memory["mapped_bytes"]) == set(names)
    assert memory["idle_bytes"] == {"exact": 2 * 102 * 4 * 32, "predicted": 3 * 102 * 4 * 32}
    assert memory["predictor_bytes"] == {"predicted": round(4 * 0.04 * 256 * (32 + 256))}
    for name in ("exact", "predicted"):
        saved = memory["resident_bytes"]["dense"] - memory["resident_bytes"][name]
        assert memory["saved_bytes"][name] == saved
        assert memory["saved_of_idle"][name] == pytest.approx(saved / memory["idle_bytes"][name], abs=1e-3)
    text = capsys.readouterr().out
    assert "active 10 % stated, computed: exact " in text
    assert "of 0 MB of idle neurons" in text


@pytest.mark.usefixtures("small")
def test_missing_variants_say_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """SiLU has no zeros, so that nothing is left out exactly."""
    asked = ("--models", "tiny-silu", "--variants", "original", "exact", "--no-memory")
    status, (record,) = run_command(tmp_path, *asked)
    assert status == 3
    assert set(record["steps"]["token 20"]["us"]) == {"original"}
    assert record["memory"] == {}
    assert record["missing"] == {"exact": "no MLP is replaced"}
    assert "missing: exact: no MLP is replaced" in capsys.readouterr().out


@pytest.mark.usefixtures("small")
def test_variant_that_cannot_be_written_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("stof.pipeline.optimize", refuse)
    asked = ("--models", "tiny", "--variants", "original", "exact", "--no-memory", "--no-times")
    status, (record,) = run_command(tmp_path, *asked)
    assert status == 3
    assert record["steps"] == {}
    assert record["missing"] == {"exact": "OSError: no space left"}


def test_process_that_fails_is_noted(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"x")
    variants = [v for v in VARIANTS if v.name in ("original", "exact")]
    absent = dict.fromkeys(("original", "exact"), tmp_path / "absent.onnx")
    files: Any = SimpleNamespace(paths=absent, weights=[tmp_path / "weights.bin"], missing={})
    memory = mlp_memory.measure_memory(files, variants, SHAPE)
    assert memory["resident_bytes"] == {}
    assert memory["saved_of_idle"] == {}
    assert set(files.missing) == {"memory of original", "memory of exact"}
    assert "absent.onnx" in files.missing["memory of original"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--models", "tiny", "--variants", "sparse"],
            "no variant sparse; there are original, dense, exact, predicted",
        ),
        (
            ["--models", "tiny", "--active", "0"],
            "tiny: the share of active neurons is 0, expected more than 0 and less",
        ),
        (
            ["--models", "tiny", "--active", "1"],
            "tiny: the share of active neurons is 1, expected more than 0 and less",
        ),
        (["--models", "tiny", "--active", "nan"], "tiny: the share of active neurons is nan, expected"),
        (
            ["--models", "tiny", "--idle", "0.95"],
            "tiny: the share of idle neurons is 0.95, expected 0 or more, and less",
        ),
        (["--models", "tiny", "--idle", "-1"], "tiny: the share of idle neurons is -1, expected"),
        (
            ["--models", "llama-3b-silu", "--idle", "0.4"],
            "llama-3b-silu: neurons with silu are never idle for all tokens",
        ),
        (["--models", "gemma-3n-e2b", "--idle", "0.4"], "neurons with the threshold of Gemma 3n are never idle"),
        (["--models", "gpt-9"], "invalid choice: 'gpt-9'"),
        (["--models", "tiny", "--precisions", "int3"], "invalid choice: 'int3'"),
    ],
)
@pytest.mark.usefixtures("small")
def test_command_refuses(arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(["decoder-mlp", "--threads", "1", "--results", str(tmp_path), *arguments])
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else -1
    assert status == 1
    assert words in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_precisions_are_those_of_the_command() -> None:
    assert mlp_models.PRECISIONS == ("float32", "float16", "int4", "int4a8")
