# SPDX-License-Identifier: Apache-2.0
"""Small MLPs, whose weights lie in the caches, stay dense on a CPU where the operator would be slower."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from mlp_models import VOCABULARY, MlpForm, make_mlp_model
from onnx import TensorProto

import stof
from stof.options import Options
from stof.sparse_mlp.cost import estimate_cpu_gain, reason_slow_on_cpu
from stof.sparse_mlp.predictors.selector import NeuronSelector
from stof.sparse_mlp.report import MlpReport, MlpSection
from stof.sparse_mlp.site import MlpSite, MlpWeight, Quantization


def make_site(size: int, *, gated: bool = False, bits: int = 0, level: int = 4, predicted: bool = False) -> MlpSite:
    """The sizes of ``stof-bench sparse-mlp``: 4 K neurons, gated 8 K / 3."""
    neurons = round(8 * size / 3 / 32) * 32 if gated else 4 * size
    quantization = Quantization(bits, 32, "scales", accuracy_level=level) if bits else None
    inner = MlpWeight("w", size, neurons, False, quantization=quantization)
    down = MlpWeight("d", neurons, size, True, quantization=quantization)
    site = MlpSite("mlp", "g", "relu", "a", down, "y", neurons, size, TensorProto.FLOAT, input_size=size)
    if gated:
        site = replace(site, up=inner, input="x")
    if not predicted:
        return site
    rank = round(0.04 * neurons)
    factors = np.zeros((rank, size), np.float32), np.zeros((neurons, rank), np.float32)
    selector = NeuronSelector(np.zeros(1, np.float32), *factors)
    return replace(site, gate_input="x", gate_weight=inner, selector=selector)


# Measured: docs/results/xeon/sparse-mlp-cpu.json.
@pytest.mark.parametrize(
    ("size", "form", "slower", "faster"),
    [
        (128, {}, 0.5, 0.1),
        (128, {"gated": True}, 1.0, 0.1),
        (256, {}, 1.0, 0.25),
        (256, {"gated": True}, 1.0, 0.25),
        (512, {}, 1.0, 0.5),
        (512, {"gated": True}, 1.0, 0.5),
        (256, {"bits": 4}, 0.25, 0.05),
        (256, {"gated": True, "bits": 4}, 0.5, 0.1),
        (512, {"bits": 4}, 0.5, 0.1),
        (512, {"gated": True, "bits": 4}, 0.5, 0.1),
        (512, {"gated": True, "bits": 4, "predicted": True}, 0.25, 0.05),
        (768, {"gated": True, "bits": 4, "predicted": True}, 0.5, 0.1),
        (256, {"gated": True, "predicted": True}, 1.0, 0.25),
    ],
    ids=str,
)
def test_limit_of_each_form(size: int, form: dict[str, int], slower: float, faster: float) -> None:
    site = make_site(size, **form)
    assert reason_slow_on_cpu(site, slower)
    assert not reason_slow_on_cpu(site, faster)
    assert estimate_cpu_gain(site, slower) < 1 < estimate_cpu_gain(site, faster)


# As docs/reference/mlp-forms.md has them, in percent, of plain, gated and predicted MLPs; 0: none is replaced.
_LIMITS = {
    128: {0: (23, 27, 8), 4: (0, 2, 0)},
    256: {0: (46, 48, 33), 4: (14, 18, 0)},
    512: {0: (63, 65, 54), 4: (31, 36, 15)},
    768: {0: (81, 86, 86), 4: (41, 46, 28)},
    1024: {0: (81, 86, 86), 4: (48, 53, 37)},
}


@pytest.mark.parametrize("size", _LIMITS)
@pytest.mark.parametrize("bits", [0, 4])
def test_limits_are_those_of_the_docs(size: int, bits: int) -> None:
    forms: tuple[dict[str, bool], ...] = ({}, {"gated": True}, {"gated": True, "predicted": True})
    for form, limit in zip(forms, _LIMITS[size][bits], strict=True):
        site = make_site(size, bits=bits, **form)
        shares = [p / 100 for p in range(1, 101)]
        gains = [p for p in shares if site.share_read(p) <= 1 / 1.1 and not reason_slow_on_cpu(site, p)]
        assert gains == shares[:limit], form


@pytest.mark.parametrize("share", [0.05, 0.1])
@pytest.mark.parametrize("form", [{}, {"gated": True, "predicted": True}], ids=str)
def test_tiny_quantized_mlps_never_gain(share: float, form: dict[str, bool]) -> None:
    assert reason_slow_on_cpu(make_site(128, bits=4, **form), share)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("bits", [0, 4])
def test_large_mlps_are_judged_by_their_bytes(bits: int, gated: bool) -> None:
    """From 16 MiB on, calls and rows hide behind the bytes that come from memory."""
    for share in (None, 0.5, 0.8):
        assert not reason_slow_on_cpu(make_site(2048, gated=gated, bits=bits), share)
    assert reason_slow_on_cpu(make_site(1024 if bits else 512, gated=gated, bits=bits), 0.8)


def test_dequantized_weights_gain_with_few_active_neurons() -> None:
    """Without accuracy_level 4, the operator multiplies in fp32: the time is that of multiplications, whatever the size."""
    for size in (1024, 3072):
        site = make_site(size, bits=4, level=0)
        assert not reason_slow_on_cpu(site, 0.3)
        assert "and no accuracy_level 4, it gains up to 30 %" in reason_slow_on_cpu(site, 0.31)
        assert "not measured: give --inputs" in reason_slow_on_cpu(site, None)
        assert not reason_slow_on_cpu(make_site(size, bits=4), 0.31)


def test_reason_names_size_density_and_estimate() -> None:
    reason = reason_slow_on_cpu(make_site(256, bits=4), 0.5)
    assert reason.startswith("0.31 MiB of weights (plain, 1024 neurons, int4), 50 % active neurons: 0.")
    assert reason.endswith("x is estimated for one token with weights in the caches, less than 1.05x")
    assert "50 % active neurons (not measured: give --inputs): 0." in reason_slow_on_cpu(make_site(256, bits=4), None)


def rows_of(source: Path, options: Options | None = None) -> list[MlpReport]:
    section = stof.optimize(source, source.with_name("out.onnx"), options or Options()).sections["mlps"]
    assert isinstance(section, MlpSection)
    return list(section.rows)


@pytest.mark.parametrize(("neurons", "is_replaced"), [(160, False), (6144, True)])
def test_models(neurons: int, is_replaced: bool, tmp_path: Path) -> None:
    """The same form with a tenth of the neurons active, below and above the limit."""
    form = MlpForm(gated=True, size=48 if not is_replaced else 192, neurons=neurons, shift=1.4)
    onnx.save(make_mlp_model(form), str(tmp_path / "model.onnx"))
    past = np.zeros((1, 3, form.size), np.float32)
    ids = np.random.default_rng(0).integers(0, VOCABULARY, (1, 9))
    np.savez(tmp_path / "inputs.npz", input_ids=ids, past=past)
    (row,) = rows_of(tmp_path / "model.onnx", Options(inputs=(str(tmp_path / "inputs.npz"),)))
    assert row.replaced == is_replaced, row.reason
    assert row.density is not None
    if not is_replaced:
        assert f"{100 * row.density:.3g} % active neurons: 0." in row.reason
        assert row.predicted_gain is None


def test_unmeasured_model_stays_dense(tmp_path: Path) -> None:
    onnx.save(make_mlp_model(MlpForm()), str(tmp_path / "model.onnx"))
    (row,) = rows_of(tmp_path / "model.onnx")
    assert not row.replaced
    assert "0.06 MiB of weights (plain, 160 neurons), 50 % active neurons (not measured: give --inputs)" in row.reason


def test_plan_takes_the_place_of_the_estimate(tmp_path: Path) -> None:
    source = tmp_path / "model.onnx"
    onnx.save(make_mlp_model(MlpForm(), 2), str(source))
    rows_of(source, Options(save_plan=tmp_path / "plan.json"))
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert [e["replace"] for e in plan["mlps"]] == [False, False]
    plan["mlps"][1]["replace"] = True
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    rows = rows_of(source, Options(plan=tmp_path / "plan.json"))
    assert [r.replaced for r in rows] == [False, True]
    assert "MiB of weights" in rows[0].reason
