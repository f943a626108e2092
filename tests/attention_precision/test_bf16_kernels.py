# SPDX-License-Identifier: Apache-2.0
"""--allow-bf16 where the processor has bf16 instructions: errors, the accuracy of trained models, other instruction sets.

Texts of the trained models have 2048 bytes, and 4096 with STOF_TEST_ALL=1. ``models/README.md`` says what the models are.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from precision_runs import REAL, flags_of, leave_gemms, run

# isort: split
import gqa_models
import paged_models
import skip_models
from skip_runs import inputs_options
from trained_runs import ALL, LENGTH, NAMES, check_accuracy, measured_options, texts_of, write_model

# isort: split
import stof
from stof.arguments.precisions import BF16
from stof.attention.checks.reference import Problem, random_problem, reference
from stof.attention_precision.layers import METADATA
from stof.cached_attention.checks.oracle import compute_step
from stof.cached_attention.checks.site_checks import compare_cache_site, run_step
from stof.cached_attention.emit import emit_caches
from stof.cached_attention.find import find_candidates
from stof.cached_attention.paged.checks import compare_paged_site, run_paged_step
from stof.cached_attention.paged.emit import emit_pages
from stof.cached_attention.paged.oracle import compute_paged_step
from stof.graph.node_fields import plain_attributes_of
from stof.runtime.library import Op
from stof.symbolic import Symbolic
from stof.verification.array_distance import relative_rms

pytestmark = REAL


def attended(problem: Problem, **attributes: int) -> np.ndarray:
    out = np.zeros(problem.shape, problem.q.dtype)
    Op("StofAttention", {**problem.attributes(), **attributes}).run(problem.inputs(), [out], 2)
    return out


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("mask", ["", "k <= q", "abs(q - k) <= 40"])
def test_the_operator_rounds_operands(dtype: str, mask: str) -> None:
    """Its distance from fp64 is that of 8 bits; from what fp64 makes of rounded tensors, that of the weights alone."""
    kind = onnx.helper.tensor_dtype_to_np_dtype(
        {"float32": onnx.TensorProto.FLOAT, "float16": onnx.TensorProto.FLOAT16}.get(dtype, onnx.TensorProto.BFLOAT16)
    )
    problem = random_problem(np.random.default_rng(0), 2, 4, 150, 64, G=2, mask=mask, dtype=kind)
    found, exact = attended(problem, allow_bf16=1), reference(problem)
    whole = relative_rms(attended(problem), exact)
    error = relative_rms(found, exact)
    assert error is not None
    assert whole is not None
    assert 1e-3 < error < 8e-3
    assert error > 1.2 * whole
    rounded = reference(replace(problem, q=BF16.round(problem.q), k=BF16.round(problem.k), v=BF16.round(problem.v)))
    assert (relative_rms(found, rounded) or 0) < 5e-3


def test_zero_is_the_same_as_no_attribute() -> None:
    problem = random_problem(np.random.default_rng(0), 1, 2, 100, 32, mask="k <= q")
    np.testing.assert_array_equal(attended(problem, allow_bf16=0), attended(problem))


def test_caches_and_pages() -> None:
    """Prompts are rounded, and single tokens are not."""
    shape = gqa_models.Shape(H=4, G=2, D=64, rotary=16)
    model = gqa_models.model_of(shape)
    (candidate,) = find_candidates(model, Symbolic(model), "cpu")
    (node,) = [n for n in emit_caches(model, [candidate.site]).graph.node if n.domain == "stof"]  # type: ignore[list-item]
    attributes = {**plain_attributes_of(node), BF16.attribute: 1}
    errors = []
    for lengths, queries in (([200, 170], 200), ([200, 170], 1)):
        step = gqa_models.draw_step(shape, lengths, queries, 256)
        rows = ~step.padded
        errors.append(relative_rms(run_step(attributes, step).output[rows], compute_step(step).output[rows]))
    assert 1e-3 < (errors[0] or 0) < 8e-3
    assert (errors[1] or 1) < 1e-5

    pages = paged_models.Shape(H=4, G=2, D=64)
    model = paged_models.model_of(pages)
    (candidate,) = find_candidates(model, Symbolic(model), "cpu")
    (node,) = emit_pages(model, [candidate.site]).graph.node  # type: ignore[list-item]
    paged = paged_models.draw_step(pages, [0, 30], [100, 90])
    found = run_paged_step({**plain_attributes_of(node), BF16.attribute: 1}, paged).output
    assert 1e-3 < (relative_rms(found, compute_paged_step(paged).output) or 0) < 8e-3


@pytest.mark.parametrize("seed", range(24))
def test_random_steps_are_near_the_definition(seed: int) -> None:
    """Caches of each type, also quantized ones, and pages: what kernels compute is what verification holds them to."""
    rng = np.random.default_rng(seed)
    given: dict[str, Any] = {
        "H": 4,
        "G": 2,
        "D": int(rng.choice([16, 24, 32, 64, 80])),
        "dtype": str(rng.choice(["float32", "float16", "bfloat16"])),
        "scale": float(rng.choice([0.0, 0.3, 0.9])),
        "rotary": int(rng.choice([0, 16])),
        "norms": bool(rng.random() < 0.3),
        "window": int(rng.choice([0, 20])),
    }
    if seed % 2:
        pages = paged_models.Shape(**given)
        model = paged_models.model_of(pages)
        (candidate,) = find_candidates(model, Symbolic(model), "cpu")
        (node,) = emit_pages(model, [candidate.site]).graph.node  # type: ignore[list-item]
        step = paged_models.draw_step(pages, [20, 0, int(rng.integers(0, 60))], [40, 70, 3], seed=seed)
        compare: Any = compare_paged_site
    else:
        is_quantized = rng.random() < 0.4
        shape = gqa_models.Shape(**given, cache="int8" if is_quantized else "", channels=(rng.random() < 0.5, False))
        model = gqa_models.model_of(shape)
        (candidate,) = find_candidates(model, Symbolic(model), "cpu")
        (node,) = [n for n in emit_caches(model, [candidate.site]).graph.node if n.domain == "stof"]  # type: ignore[list-item]
        step = gqa_models.draw_step(shape, [*(int(n) for n in rng.integers(1, 90, 2)), 90], 90, 120, seed=seed)
        compare = compare_cache_site
    found = compare(candidate.site, {**plain_attributes_of(node), BF16.attribute: 1}, step, None)
    assert found.ok, found.message()
    assert found.relative_rms > 5e-4


def test_the_report_names_the_kernel(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = skip_models.encoder(tmp_path / "model.onnx")
    status, target, report = run(tmp_path, model, "--allow-bf16", *inputs_options(tmp_path, 2, 300))
    assert status == 0
    assert set(flags_of(target).values()) == {1}
    found = report["attention_precision"]
    assert found["warnings"] == []
    for row in found["layers"]:
        assert row["kernel"].endswith("bf16")
        assert row["predicted_gain"] > 1
        assert 2e-4 < row["relative_rms"] < 0.01
    assert min(found["cosines"].values()) < 1 - 1e-9
    text = capsys.readouterr().out
    assert f"bf16 in layer 0 to 1: kernel {found['layers'][0]['kernel']}, estimated" in text
    assert "relative RMS error" in text


@pytest.mark.parametrize("name", NAMES)
def test_trained_models_find_records(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At long range: attentions are sharp there, and the error of each is stated. With GEMMs: test_bf16_gemms.py."""
    leave_gemms(monkeypatch)
    path = write_model(tmp_path, name)
    given = texts_of(name, LENGTH, 8 if ALL else 2, seed=1)
    status, target, report = run(tmp_path, path, "--allow-bf16", *measured_options(tmp_path, name, given))
    assert status == 0
    found = report["attention_precision"]
    assert all(row["relative_rms"] is not None for row in found["layers"])
    assert any(row["reduced"] for row in found["layers"])
    assert all(row["relative_rms"] <= 0.01 for row in found["layers"] if row["reduced"])
    if name == "prompts":
        assert 1e-10 < found["loss"]["kl"] < 1e-2
        assert found["loss"]["agreement"] > 0.99
    else:
        assert found["cosines"]["logits"] > 0.9999
    check_accuracy(path, target, name)


def test_a_bound_between_the_layers(tmp_path: Path) -> None:
    """Attentions whose error is above it keep full precision, others do not."""
    path = write_model(tmp_path, "documents")
    options = [
        "--no-verify",
        "--allow-bf16",
        *measured_options(tmp_path, "documents", texts_of("documents", 1024, 1, 1)),
    ]
    _, _, report = run(tmp_path, path, *options)
    errors = sorted(row["relative_rms"] for row in report["attention_precision"]["layers"])
    assert errors[0] < errors[1]
    status, target, report = run(tmp_path, path, *options, "--max-error", str((errors[0] + errors[1]) / 2))
    assert status == 0
    assert sum(flags_of(target).values()) == 1
    (kept,) = [row for row in report["attention_precision"]["layers"] if not row["reduced"]]
    assert kept["relative_rms"] == pytest.approx(errors[1], rel=1e-6)
    assert "--max-error allows" in kept["reason"]


def outputs_under(isa: str, model: Path, feed: Path) -> list[np.ndarray]:
    """The outputs of a model in a process whose instruction set is limited."""
    program = (
        "import sys, numpy as np, onnxruntime as ort, stof; o = ort.SessionOptions(); stof.register(o);"
        "s = ort.InferenceSession(sys.argv[1], o, providers=['CPUExecutionProvider']);"
        "np.savez(sys.argv[3], *s.run(None, dict(np.load(sys.argv[2]))))"
    )
    result = model.with_suffix(f".{isa}.npz")
    environment = {**os.environ, "STOF_CPU_ISA": isa, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", program, model, feed, result], check=True, env=environment)
    with np.load(result) as arrays:
        return [arrays[n] for n in arrays.files]


def test_machines_without_the_instructions(tmp_path: Path) -> None:
    """The file computes there what one without the option does, bit by bit. A plan is replayed, and the report warns."""
    model, plan = skip_models.encoder(tmp_path / "model.onnx"), tmp_path / "plan.json"
    feed = inputs_options(tmp_path, 1, 300)
    status, target, _ = run(tmp_path, model, "--allow-bf16", "--no-verify", *feed, "--save-plan", str(plan))
    assert status == 0
    plain = tmp_path / "plain.onnx"
    stof.optimize(model, plain, verify=False)
    found, wanted, here = (
        outputs_under(isa, path, Path(feed[1])) for isa, path in (("avx2", target), ("avx2", plain), ("", target))
    )
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one, other)
    assert any((one != other).any() for one, other in zip(here, wanted, strict=True))

    again = tmp_path / "again.onnx"
    words = [sys.executable, "-m", "stof", model, "-o", again, "--allow-bf16", "--plan", plan, *feed]
    environment = {**os.environ, "STOF_CPU_ISA": "avx2", "PYTHONPATH": os.pathsep.join(sys.path)}
    report = tmp_path / "again.json"
    subprocess.run([*map(str, words), "--json", str(report)], check=True, env=environment, capture_output=True)
    assert flags_of(again) == flags_of(target)
    layers = json.loads(report.read_text())["attention_precision"]
    assert [(row["kernel"], row["predicted_gain"]) for row in layers["layers"]] == [("", None)] * 2
    assert any("this machine has no bf16 kernel" in words for words in layers["warnings"])


def test_without_the_library(tmp_path: Path) -> None:
    """Function bodies compute in the model's own type."""
    model = skip_models.encoder(tmp_path / "model.onnx")
    options = inputs_options(tmp_path, 1, 300)
    status, target, _ = run(tmp_path, model, "--allow-bf16", "--no-verify", *options)
    assert status == 0
    assert any(p.key == METADATA for p in onnx.load(target).metadata_props)
    with np.load(options[1]) as arrays:
        feed: dict[str, Any] = dict(arrays)
    one, other = (
        ort.InferenceSession(str(p), providers=["CPUExecutionProvider"]).run(None, feed) for p in (model, target)
    )
    for wanted, found in zip(one, other, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
