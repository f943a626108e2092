# SPDX-License-Identifier: Apache-2.0
"""Small MLPs, whose weights lie in the caches, stay dense on a CPU where the operator would be slower."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from mlp_models import VOCABULARY, MlpForm, make_mlp_model
from onnx import TensorProto

import stof
from bench.cpu.sparse_mlp import SMALL_SIZES, rank, sizes_of
from stof.bench.results import read
from stof.options import Options
from stof.sparse_mlp.decide.cpu import (
    estimate_gain_by_bytes,
    estimate_gain_in_caches,
    reason_slow_on_cpu,
)
from stof.sparse_mlp.decide.reasons import estimate_gain
from stof.sparse_mlp.predictors.selector import NeuronSelector
from stof.sparse_mlp.problem import MlpProblem
from stof.sparse_mlp.report import MlpReport, MlpSection
from stof.sparse_mlp.site import MlpSite, MlpWeight, Quantization
from stof.targets import CPU, CUDA

ROOT = Path(__file__).resolve().parents[2]
FORMS: dict[str, dict[str, bool]] = {
    "plain": {}, "gated": {"gated": True}, "predicted": {"gated": True, "predicted": True}
}  # fmt: skip


def make_site(size: int, *, gated: bool = False, bits: int = 0, level: int = 4, predicted: bool = False) -> MlpSite:
    """A site with as many neurons as ``python -m bench sparse-mlp`` has: 4 K, gated 8 K / 3."""
    neurons = round(8 * size / 3 / 32) * 32 if gated else 4 * size
    quantization = Quantization(bits, 32, "scales", accuracy_level=level) if bits else None
    inner = MlpWeight("w", size, neurons, False, quantization=quantization)
    down = MlpWeight("d", neurons, size, True, quantization=quantization)
    site = MlpSite("mlp", "g", "relu", "a", down, "y", neurons, size, TensorProto.FLOAT, input_size=size)
    if gated:
        site = replace(site, up=inner, input="x")
    if not predicted:
        return site
    factors = np.zeros((rank(neurons), size), np.float32), np.zeros((neurons, rank(neurons)), np.float32)
    selector = NeuronSelector(np.zeros(1, np.float32), *factors)
    return replace(site, gate_input="x", gate_weight=inner, selector=selector)


def is_replaced(site: MlpSite, share: float) -> bool:
    """Whether the optimizer for a CPU replaces an MLP with a KV cache."""
    return estimate_gain_by_bytes(MlpProblem.of(site, share)) >= 1.1 and not reason_slow_on_cpu(
        MlpProblem.of(site, share)
    )


# A point that is timed again may differ by a few percent. Estimates need not tell gains of less than 15 % from none.
SURELY_SLOWER, SURELY_FASTER = 0.95, 1.15


def measured_points() -> list[dict[str, Any]]:
    """Timed points of small MLPs with one token and one thread."""
    records = read(ROOT / "docs/results/xeon/sparse-mlp-cpu.json")
    return [r for r in records if r["key"][0] in SMALL_SIZES and r["key"][3] == 1 and r["key"][5] == 1]


def test_decisions_are_those_that_times_ask_for() -> None:
    """Points that are clearly slower than the dense MLP stay dense, and clearly faster ones are replaced."""
    kept, replaced = 0, 0
    for record in measured_points():
        shape, mode, precision = record["key"][:3]
        site = make_site(SMALL_SIZES[shape], bits=0 if precision == "fp32" else 4, **FORMS[mode])
        assert (site.input_size, site.neurons) == sizes_of(shape, mode) == (record["shape"]["K"], record["shape"]["F"])
        if record["speedup"] < SURELY_SLOWER:
            assert not is_replaced(site, record["density"]), record["key"]
            kept += 1
        if record["speedup"] > SURELY_FASTER:
            assert is_replaced(site, record["density"]), record["key"]
            replaced += 1
    assert kept >= 15
    assert replaced >= 40


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
def test_estimate_on_both_sides_of_the_limit(size: int, form: dict[str, int], slower: float, faster: float) -> None:
    site = make_site(size, **form)
    assert reason_slow_on_cpu(MlpProblem.of(site, slower))
    assert not reason_slow_on_cpu(MlpProblem.of(site, faster))
    assert (
        estimate_gain_in_caches(MlpProblem.of(site, slower)) < 1 < estimate_gain_in_caches(MlpProblem.of(site, faster))
    )


def limits_of_the_docs() -> dict[int, dict[int, list[int]]]:
    """Percents by K and bits, of plain, gated and predicted MLPs, from docs/reference/mlp-forms.md; 0: none is replaced."""
    limits = {}
    for line in (ROOT / "docs/reference/mlp-forms.md").read_text().split("\n"):
        if row := re.fullmatch(r"\| (\d+), \d+, \d+ \|(.+)\|", line):
            cells = [cell.strip().removesuffix(", not timed") for cell in row[2].split("|")]
            percents = [0 if cell == "none" else int(cell.removesuffix(" %")) for cell in cells]
            limits[int(row[1])] = {0: percents[:3], 4: percents[3:]}
    return limits


@pytest.mark.parametrize("bits", [0, 4])
def test_limits_are_those_of_the_docs(bits: int) -> None:
    limits = limits_of_the_docs()
    assert list(limits) == list(SMALL_SIZES.values())
    for size, limits_of_bits in limits.items():
        for form, limit in zip(FORMS.values(), limits_of_bits[bits], strict=True):
            site = make_site(size, bits=bits, **form)
            shares = [p / 100 for p in range(1, 101)]
            assert [p for p in shares if is_replaced(site, p)] == shares[:limit], (size, form)


def test_docs_say_which_limits_were_not_timed() -> None:
    timed = {(r["key"][0], r["key"][1]) for r in measured_points()}
    not_timed = {(shape, mode) for shape in SMALL_SIZES for mode in FORMS} - timed
    rows = (ROOT / "docs/reference/mlp-forms.md").read_text().split("\n")
    for shape, size in SMALL_SIZES.items():
        (row,) = (r for r in rows if r.startswith(f"| {size}, "))
        cells = row.strip("| ").split(" | ")[1:]
        said = {(shape, mode) for mode, cell in zip([*FORMS, *FORMS], cells, strict=True) if "not timed" in cell}
        assert said == {pair for pair in not_timed if pair[0] == shape}


@pytest.mark.parametrize("share", [0.05, 0.1])
@pytest.mark.parametrize("form", [{}, {"gated": True, "predicted": True}], ids=str)
def test_tiny_quantized_mlps_never_gain(share: float, form: dict[str, bool]) -> None:
    assert reason_slow_on_cpu(MlpProblem.of(make_site(128, bits=4, **form), share))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("bits", [0, 4])
def test_large_mlps_are_judged_by_their_bytes(bits: int, gated: bool) -> None:
    """From 16 MiB on, calls and rows hide behind the bytes that come from memory."""
    site = make_site(2048, gated=gated, bits=bits)
    for share in (None, 0.5, 0.8):
        assert not reason_slow_on_cpu(MlpProblem.of(site, share))
        assert estimate_gain(MlpProblem.of(site, share), CPU) == estimate_gain_by_bytes(MlpProblem.of(site, share))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("bits", [0, 4])
def test_small_mlps_are_judged_by_rows_and_calls_too(bits: int, gated: bool) -> None:
    site = make_site(1024 if bits else 512, gated=gated, bits=bits)
    problem = MlpProblem.of(site, 0.8)
    assert reason_slow_on_cpu(problem)
    assert estimate_gain(problem, CPU) == estimate_gain_in_caches(problem) < estimate_gain_by_bytes(problem)
    assert estimate_gain(problem, CUDA) == estimate_gain_by_bytes(problem)


def test_dequantized_weights_gain_with_few_active_neurons() -> None:
    """Without accuracy_level 4, the operator multiplies in fp32: the time is that of multiplications, whatever the size."""
    for size in (1024, 3072):
        site = make_site(size, bits=4, level=0)
        assert not reason_slow_on_cpu(MlpProblem.of(site, 0.3))
        assert reason_slow_on_cpu(MlpProblem.of(site, 0.31)) == (
            "31 % active neurons: quantized weights without accuracy_level 4 are dequantized, which is faster only where at most "
            "30 % are active"
        )
        assert not reason_slow_on_cpu(MlpProblem.of(make_site(size, bits=4), 0.31))
    assert not reason_slow_on_cpu(MlpProblem.of(make_site(3072, bits=4, level=0), None))  # each call may have few


def test_reason_names_size_density_and_estimate() -> None:
    reason = reason_slow_on_cpu(MlpProblem.of(make_site(256, bits=4), 0.5))
    start = "0.31 MiB of weights as ONNX Runtime holds them (plain, 1024 neurons, int4), 50 % active neurons: 0."
    assert reason.startswith(start)
    half = replace(make_site(256), dtype=TensorProto.FLOAT16)  # ONNX Runtime computes it in fp32
    assert reason_slow_on_cpu(MlpProblem.of(half, 0.9)) == reason_slow_on_cpu(MlpProblem.of(make_site(256), 0.9)) != ""
    assert reason.endswith("x is estimated for one token by bytes, rows and the call in the caches, less than 1.05x")
    assert "50 % active neurons (not measured: give --inputs): 0." in reason_slow_on_cpu(
        MlpProblem.of(make_site(256, bits=4), None)
    )


def rows_of(source: Path, options: Options | None = None) -> list[MlpReport]:
    section = stof.optimize(source, source.with_name("out.onnx"), options or Options()).sections["mlps"]
    assert isinstance(section, MlpSection)
    return list(section.rows)


def write(folder: Path, form: MlpForm) -> Path:
    onnx.save(make_mlp_model(form), str(folder / "model.onnx"))
    return folder / "model.onnx"


def count_on_inputs(folder: Path, form: MlpForm) -> Options:
    """Options that count active neurons in a run of nine tokens."""
    ids = np.random.default_rng(0).integers(0, VOCABULARY, (1, 9))
    np.savez(folder / "inputs.npz", input_ids=ids, past=np.zeros((1, 3, form.size), np.float32))
    return Options(inputs=(str(folder / "inputs.npz"),))


@pytest.mark.parametrize(("size", "neurons", "is_replaced"), [(48, 160, False), (192, 6144, True)])
def test_models(size: int, neurons: int, is_replaced: bool, tmp_path: Path) -> None:
    """The same form with a tenth of the neurons active, below and above the limit."""
    form = MlpForm(gated=True, size=size, neurons=neurons, shift=1.4)
    (row,) = rows_of(write(tmp_path, form), count_on_inputs(tmp_path, form))
    assert row.replaced == is_replaced, row.reason
    assert row.density is not None
    assert 0.05 < row.density < 0.15
    if is_replaced:
        site = replace(make_site(size, gated=True), neurons=neurons)
        assert row.predicted_gain == pytest.approx(estimate_gain_in_caches(MlpProblem.of(site, row.density)), rel=1e-3)
    else:
        assert f"{100 * row.density:.3g} % active neurons: 0." in row.reason
        assert row.predicted_gain is None


@pytest.mark.usefixtures("small_mlps_gain")
@pytest.mark.parametrize(
    ("shift", "level", "least", "most", "is_replaced"),
    [(0.7, 0, 0.2, 0.3, True), (0.4, 0, 0.3, 0.4, False), (0.4, 4, 0.3, 0.4, True)],
)
def test_quantized_models_on_both_sides_of_30_percent(
    shift: float, level: int, least: float, most: float, is_replaced: bool, tmp_path: Path
) -> None:
    """More than 30 % of the neurons may be active with accuracy_level 4 alone."""
    form = MlpForm(gated=True, bits=4, size=64, neurons=512, accuracy_level=level, shift=shift)
    (row,) = rows_of(write(tmp_path, form), count_on_inputs(tmp_path, form))
    assert row.density is not None
    assert least < row.density < most
    assert row.replaced == is_replaced, row.reason
    if not is_replaced:
        assert "are dequantized, which is faster only where at most 30 % are active" in row.reason


def test_unmeasured_model_stays_dense(tmp_path: Path) -> None:
    (row,) = rows_of(write(tmp_path, MlpForm()))
    assert not row.replaced
    start = (
        "0.06 MiB of weights as ONNX Runtime holds them (plain, 160 neurons), 50 % active neurons (not measured: give "
    )
    assert row.reason.startswith(start + "--inputs): 0.")


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
