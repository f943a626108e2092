# SPDX-License-Identifier: Apache-2.0
"""--attention-precision through the whole optimizer: which operators get the attribute, errors, gates, plans and refusals."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from eight_bit_models import Layer, texts, write_model
from onnx import TensorProto

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "paged_attention"))
import paged_models

# isort: split

import stof
from stof import cli
from stof.attention.checks import eight_bit_error
from stof.attention.checks.eight_bit_model import KeyValueHead, Scheme
from stof.attention_precision import eight_bits, layers
from stof.attention_precision.layers import METADATA
from stof.graph.index import DOMAIN, all_nodes
from stof.runtime.cuda import DeviceInfo
from stof.thresholds.layers import OPS

LENGTH = 150


def run(
    folder: Path, model: Path, precision: str, *options: str, verify: bool = False
) -> tuple[int, Path, dict[str, Any]]:
    """Status, the file that is written, and the report."""
    target, report = folder / "out.onnx", folder / "report.json"
    for file in (target, report):
        file.unlink(missing_ok=True)
    words = [
        str(model),
        "-o",
        str(target),
        "--json",
        str(report),
        "--target",
        "cuda",
        "--attention-precision",
        precision,
    ]
    status = cli.main([*words, *([] if verify else ["--no-verify"]), *options])
    return status, target, json.loads(report.read_text()) if report.exists() else {}


def precisions_of(path: Path) -> list[str]:
    """The attribute of each of stof's attentions."""
    nodes = [n for n in all_nodes(onnx.load(path).graph.node) if n.domain == DOMAIN and n.op_type in OPS]
    return [next((a.s.decode() for a in n.attribute if a.name == "precision"), "") for n in nodes]


def simulate_gains(monkeypatch: pytest.MonkeyPatch, int8: float, int8_fp8: float) -> None:
    """Short sequences gain as long ones do."""
    monkeypatch.setattr(eight_bits, "estimate_gain", lambda sizes, p: int8_fp8 if p.has_fp8 else int8)


def test_nothing_is_written_by_default(tmp_path: Path) -> None:
    status, target, report = run(tmp_path, write_model(tmp_path / "model.onnx", (Layer(),)), "fp16")
    assert status == 0
    assert precisions_of(target) == [""]
    assert report["attention_precision"] is None


@pytest.mark.parametrize(("option", "attribute", "bound"), [("int8", "int8", 0.015), ("fp8", "int8_fp8", 0.045)])
def test_operators_get_the_attribute(
    option: str, attribute: str, bound: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_model(tmp_path / "model.onnx", (Layer(), Layer(size=128, is_causal=True)))
    status, target, report = run(tmp_path, model, option, *texts(tmp_path, 2, LENGTH))
    assert status == 0
    assert precisions_of(target) == [attribute, attribute]
    found = report["attention_precision"]
    assert found["precision"] == option
    for row in found["layers"]:
        assert row["reduced"]
        assert row["precision"] == attribute
        assert bound / 10 < row["relative_rms"] < bound
        assert row["errors"] == {attribute: row["relative_rms"]}
        assert 0 < row["predicted_gain"] < 1
    assert found["measured_rows"] == found["all_rows"] == 2 * 2 * 2 * LENGTH
    assert 1e-9 < 1 - found["cosines"]["hidden"] < 1e-3
    (entry,) = [p for p in onnx.load(target).metadata_props if p.key == METADATA]
    names = "; ".join(row["node"] for row in found["layers"])
    assert entry.value == f"outputs change; {attribute}: {names}"
    text = capsys.readouterr().out
    assert (
        f"OUTPUTS CHANGE: --attention-precision {option} lets 2 of 2 attentions compute in 8 bits"
        in text.splitlines()[0]
    )
    assert "no kernel with 8-bit operands ran" in text
    assert "loss on 2 sets of inputs: 1 - cosine of output 'hidden'" in text
    assert f"--attention-precision {option}" in report["run"]["command"]


@pytest.mark.parametrize("dtype", [TensorProto.FLOAT16, TensorProto.BFLOAT16])
def test_the_loss_is_that_of_rounded_attention(dtype: int, tmp_path: Path) -> None:
    """More bits are lost with e4m3: cosines of the same inputs say so."""
    model = write_model(tmp_path / "model.onnx", (Layer(), Layer()), dtype)
    losses = []
    for option in ("int8", "fp8"):
        _, _, report = run(tmp_path, model, option, *texts(tmp_path, 1, LENGTH))
        losses.append(1 - report["attention_precision"]["cosines"]["hidden"])
    assert 0 < 3 * losses[0] < losses[1]


def test_with_verification_and_drawn_inputs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_model(tmp_path / "model.onnx", (Layer(),))
    status, target, report = run(tmp_path, model, "int8", "--verify-budget", "5", verify=True)
    assert status == 0
    assert precisions_of(target) == ["int8"]
    assert report["verification"]["ok"]
    found = report["attention_precision"]
    assert found["measured_on"] == "2 sets of drawn inputs"
    assert found["layers"][0]["relative_rms"] > 0
    assert "loss: not measured; --prompts FILE or --inputs FILE measures it" in capsys.readouterr().out


REASONS = [
    (Layer(size=32), TensorProto.FLOAT16, "its head size is 32 / 32, expected 64 or 128"),
    (Layer(bias=True), TensorProto.FLOAT16, "its scores have terms besides products of queries and keys (bias)"),
    (Layer(scale=-0.1), TensorProto.FLOAT16, "its scores have the scale -0.09"),
    (Layer(), TensorProto.FLOAT, "its inputs are fp32, expected fp16 or bf16"),
]


@pytest.mark.parametrize(("layer", "dtype", "reason"), REASONS)
def test_attentions_that_kernels_do_not_take(layer: Layer, dtype: int, reason: str, tmp_path: Path) -> None:
    """They stay as they are, and another one gets the attribute where its type allows it."""
    model = write_model(tmp_path / "model.onnx", (layer, Layer()), dtype)
    status, target, report = run(tmp_path, model, "int8")
    assert status == 0
    first, second = report["attention_precision"]["layers"]
    assert reason in first["reason"]
    assert second["reduced"] == (dtype == TensorProto.FLOAT16)
    assert precisions_of(target) == ["", "int8" if second["reduced"] else ""]


def test_attentions_that_leave_out_keys(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model.onnx", (Layer(),))
    options = ["--sparsify", "skip-scores(threshold=0.1)", *texts(tmp_path, 1, LENGTH)]
    status, target, report = run(tmp_path, model, "int8", *options)
    assert status == 0
    assert precisions_of(target) == [""]
    assert report["attention_precision"]["layers"][0]["reason"] == "it skips by score"


def test_attention_over_pages(tmp_path: Path) -> None:
    model = paged_models.model_of(paged_models.Shape(dtype="float16", D=64))
    onnx.save(model, tmp_path / "model.onnx")
    status, target, report = run(tmp_path, tmp_path / "model.onnx", "int8")
    assert status == 0
    (row,) = report["attention_precision"]["layers"]
    assert row["reason"] == "no kernel of StofPagedAttention has 8-bit operands"
    assert precisions_of(target) == [""]


@pytest.mark.parametrize("most", [1 << 22, 1 << 15])
def test_rows_of_long_sequences_are_drawn(most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of some rows is near that of all."""
    monkeypatch.setattr(eight_bit_error, "_MOST_SCORES", most)
    model = write_model(tmp_path / "model.onnx", (Layer(is_causal=True),))
    _, _, report = run(tmp_path, model, "int8", *texts(tmp_path, 1, 400))
    found = report["attention_precision"]
    assert found["all_rows"] == 800
    assert found["measured_rows"] == (800 if most == 1 << 22 else 2 * 40)
    assert found["layers"][0]["relative_rms"] == pytest.approx(0.0075, rel=0.2)


def test_padding_is_left_out_of_the_mean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys that ``attention_mask`` forbids are zeros to the model of the kernels, as they are to these."""
    seen: list[int] = []

    class Watched(KeyValueHead):
        @classmethod
        def of(cls, key: np.ndarray, value: np.ndarray, scheme: Scheme, real: np.ndarray | None = None) -> KeyValueHead:
            assert real is not None
            seen.append(int(real.sum()))
            return KeyValueHead.of(key, value, scheme, real)

    monkeypatch.setattr(eight_bit_error, "KeyValueHead", Watched)
    model = write_model(tmp_path / "model.onnx", (Layer(has_padding=True),))
    ids = np.random.default_rng(0).integers(0, 64, (2, LENGTH))
    real = (np.arange(LENGTH) < np.array([[90], [140]])).astype(np.int64)
    np.savez(tmp_path / "feed.npz", input_ids=ids, attention_mask=real)
    status, _, report = run(tmp_path, model, "int8", "--inputs", str(tmp_path / "feed.npz"), "--unpad", "off")
    assert status == 0
    assert set(seen) == {90, 140}
    assert 0.002 < report["attention_precision"]["layers"][0]["relative_rms"] < 0.015


def test_few_queries(tmp_path: Path) -> None:
    """Decode kernels compute them, where the model fixes their number."""
    model = onnx.load(write_model(tmp_path / "model.onnx", (Layer(),)))
    for value in (model.graph.input[0], model.graph.output[0]):
        value.type.tensor_type.shape.dim[1].dim_value = 16
    onnx.save(model, tmp_path / "few.onnx")
    status, target, report = run(tmp_path, tmp_path / "few.onnx", "int8")
    assert status == 0
    assert set(precisions_of(target)) <= {""}
    rows = report["attention_precision"]["layers"]
    assert all("it has 16 queries, which decode kernels compute" in row["reason"] for row in rows)
    assert rows


def test_auto_takes_the_faster_one_within_its_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sharp attention is beyond both bounds."""
    model = write_model(tmp_path / "model.onnx", (Layer(), Layer(gain=40.0)))
    simulate_gains(monkeypatch, 1.2, 1.4)
    status, target, report = run(tmp_path, model, "auto", *texts(tmp_path, 1, LENGTH))
    assert status == 0
    first, second = report["attention_precision"]["layers"]
    assert first["precision"] == "int8_fp8"
    assert set(first["errors"]) == {"int8", "int8_fp8"}
    assert second["errors"]["int8"] > 0.015
    assert "its relative RMS error is" in second["reason"]
    assert precisions_of(target) == ["int8_fp8", ""]
    simulate_gains(monkeypatch, 1.4, 1.2)
    assert precisions_of(run(tmp_path, model, "auto", *texts(tmp_path, 1, LENGTH))[1]) == ["int8", ""]


def test_auto_leaves_what_loses_time(tmp_path: Path) -> None:
    """Short sequences read a key tile too rarely for its quantization."""
    model = write_model(tmp_path / "model.onnx", (Layer(),))
    status, target, report = run(tmp_path, model, "auto", *texts(tmp_path, 1, LENGTH))
    assert status == 0
    assert precisions_of(target) == [""]
    assert f"no gain is estimated at {LENGTH} keys: 0." in report["attention_precision"]["layers"][0]["reason"]


def test_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--max-error takes the place of both of auto's, and bounds int8 and fp8, which take any error without it."""
    simulate_gains(monkeypatch, 1.2, 1.4)
    model = write_model(tmp_path / "model.onnx", (Layer(), Layer(gain=40.0)))
    inputs = texts(tmp_path, 1, LENGTH)
    assert precisions_of(run(tmp_path, model, "auto", *inputs, "--max-error", "0.02")[1]) == ["int8", ""]
    assert precisions_of(run(tmp_path, model, "auto", *inputs, "--max-error", "10")[1]) == ["int8_fp8", "int8_fp8"]
    assert precisions_of(run(tmp_path, model, "fp8", *inputs, "--max-error", "0.02")[1]) == ["", ""]
    _, target, report = run(tmp_path, model, "int8", *inputs)
    assert precisions_of(target) == ["int8", "int8"]
    assert any(
        "the error of 1 attention in int8 is above 0.015" in w for w in report["attention_precision"]["warnings"]
    )


def test_unknown_errors(tmp_path: Path) -> None:
    """int8 takes them with a warning; beside --max-error full precision stays, unless --force says otherwise."""
    model = write_model(tmp_path / "model.onnx", (Layer(),))
    _, target, report = run(tmp_path, model, "int8")
    assert precisions_of(target) == ["int8"]
    assert report["attention_precision"]["warnings"] == [
        "the error of 1 attention is not known: there is nothing to measure it on; give --inputs or --prompts"
    ]
    _, target, report = run(tmp_path, model, "int8", "--max-error", "0.1")
    assert precisions_of(target) == [""]
    assert report["attention_precision"]["layers"][0]["reason"].startswith("its error is not known: ")
    assert precisions_of(run(tmp_path, model, "int8", "--max-error", "0.1", "--force")[1]) == ["int8"]


def test_the_gate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_model(tmp_path / "model.onnx", (Layer(),))
    status, target, _ = run(tmp_path, model, "fp8", *texts(tmp_path, 1, LENGTH), "--min-cosine", "1")
    assert status == 2
    assert not target.exists()
    assert (
        "--attention-precision fp8 changes outputs too much: the cosine of output 'hidden'" in capsys.readouterr().err
    )
    assert run(tmp_path, model, "fp8", *texts(tmp_path, 1, LENGTH), "--min-cosine", "1", "--force")[0] == 0


@pytest.mark.parametrize("dtype", [TensorProto.FLOAT16, TensorProto.BFLOAT16])
def test_the_loss_on_prompts(dtype: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Next tokens of the whole model change, and the gate holds them. The CPU provider has no matmuls in bf16: fp32 runs."""
    model = write_model(tmp_path / "model.onnx", (Layer(is_causal=True),), dtype, logits=True)
    np.save(tmp_path / "prompts.npy", np.random.default_rng(0).integers(0, 64, (2, LENGTH)))
    prompts = ["--prompts", str(tmp_path / "prompts.npy")]
    status, target, report = run(tmp_path, model, "fp8", *prompts)
    assert status == 0
    assert precisions_of(target) == ["int8_fp8"]
    assert 1e-8 < report["attention_precision"]["loss"]["kl"] < 0.1
    assert "loss on 2 prompts" in capsys.readouterr().out
    status, target, _ = run(tmp_path, model, "fp8", *prompts, "--max-kl", "0")
    assert status == 2
    assert not target.exists()
    assert "--attention-precision fp8 changes outputs too much: KL divergence" in capsys.readouterr().err


def test_a_loss_that_does_not_fit_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The report says why; a gate that the user asks for is refused."""

    def fail(*given: object, **settings: object) -> None:
        raise stof.VerifyError("the loss could not be measured: too little memory")

    monkeypatch.setattr(eight_bits, "measure_cosines", fail)
    model = write_model(tmp_path / "model.onnx", (Layer(),))
    status, target, report = run(tmp_path, model, "int8", *texts(tmp_path, 1, LENGTH))
    assert status == 0
    assert precisions_of(target) == ["int8"]
    assert report["attention_precision"]["cosines"] is None
    assert "loss: not measured; the loss could not be measured: too little memory" in capsys.readouterr().out
    status, target, _ = run(tmp_path, model, "int8", *texts(tmp_path, 1, LENGTH), "--min-cosine", "0.9")
    assert status == 2
    assert not target.exists()


def test_a_plan_is_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With each attention's own precision, whatever errors and estimates say."""
    model, plan = write_model(tmp_path / "model.onnx", (Layer(), Layer(), Layer())), tmp_path / "plan.json"
    assert run(tmp_path, model, "int8", "--save-plan", str(plan))[0] == 0
    saved = json.loads(plan.read_text())
    names = list(saved["attention_precision"])
    assert saved["attention_precision"] == dict.fromkeys(names, "int8")
    saved["attention_precision"] = {names[0]: "int8", names[2]: "int8_fp8"}
    plan.write_text(json.dumps(saved))
    again = tmp_path / "again.json"
    status, target, report = run(tmp_path, model, "auto", "--plan", str(plan), "--save-plan", str(again))
    assert status == 0
    assert precisions_of(target) == ["int8", "", "int8_fp8"]
    assert report["attention_precision"]["layers"][1]["reason"] == "the plan says so"
    assert json.loads(again.read_text()) == saved

    assert run(tmp_path, model, "int8", "--plan", str(plan))[0] == 1
    message = capsys.readouterr().err
    assert "the plan computes attention in int8_fp8" in message
    assert "--attention-precision auto is not given" in message
    assert run(tmp_path, model, "fp16", "--plan", str(plan))[0] == 1
    assert "--attention-precision auto is not given" in capsys.readouterr().err
    plan.write_text(json.dumps({**saved, "attention_precision": {names[0]: "int8"}}))
    assert run(tmp_path, model, "fp16", "--plan", str(plan))[0] == 1
    assert "--attention-precision int8 is not given" in capsys.readouterr().err
    plan.write_text(json.dumps({**saved, "attention_precision": {"other": "int8"}}))
    assert run(tmp_path, model, "auto", "--plan", str(plan))[0] == 1
    assert "the plan computes 'other' in int8, and the optimized model has no such attention" in capsys.readouterr().err
    del saved["attention_precision"]
    plan.write_text(json.dumps(saved))
    assert run(tmp_path, model, "auto", "--plan", str(plan))[0] == 1
    assert "chooses by the errors of attentions, and there is nothing to measure it on" in capsys.readouterr().err


REFUSALS = [
    (["int8", "--target", "cpu"], "attention_precision is 'int8', which is for target 'cuda', not 'cpu'"),
    (["int8", "--target", "tensorrt"], "attention_precision is 'int8', which is for target 'cuda', not 'tensorrt'"),
    (["auto"], "attention_precision is 'auto', which chooses by the errors of attentions on inputs or prompts"),
    (["int8", "--dequantize-attention"], "--attention-precision and --dequantize-attention both change outputs"),
    (
        ["fp16", "--max-error", "0.1"],
        "--max-error is for --allow-bf16 and --attention-precision, of which none is given",
    ),
    (["int8", "--max-kl", "0.1"], "--max-kl is for --prompts and --sparse-mlp, of which none is given"),
]


@pytest.mark.parametrize(("options", "message"), REFUSALS)
def test_refusals(options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, target, _ = run(tmp_path, write_model(tmp_path / "model.onnx", (Layer(),)), *options)
    assert status == 1
    assert message in capsys.readouterr().err
    assert not target.exists()


def test_a_library_without_the_attribute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(layers, "takes_attribute", lambda op, attribute: False)
    assert run(tmp_path, write_model(tmp_path / "model.onnx", (Layer(),)), "int8")[0] == 1
    assert "the operators of the plugin library have no attribute precision" in capsys.readouterr().err


def test_a_model_that_was_optimized_before(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, target, _ = run(tmp_path, write_model(tmp_path / "model.onnx", (Layer(),)), "fp16")
    assert run(tmp_path, target.rename(tmp_path / "once.onnx"), "int8")[0] == 1
    assert "--attention-precision is for operators that are written in the same run" in capsys.readouterr().err


def test_other_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device at hand decides with auto; int8 and fp8 write for any, unless the caller states another one."""
    simulate_gains(monkeypatch, 1.2, 1.4)
    model, inputs = write_model(tmp_path / "model.onnx", (Layer(),)), texts(tmp_path, 1, LENGTH)
    monkeypatch.setattr(eight_bits, "device_info", lambda: DeviceInfo("other", 86))
    _, target, report = run(tmp_path, model, "auto", *inputs)
    assert precisions_of(target) == [""]
    (row,) = report["attention_precision"]["layers"]
    assert row["reason"] == "gains are estimated for compute capability 9.0 alone, the device has 8.6"
    assert precisions_of(run(tmp_path, model, "int8")[1]) == ["int8"]
    monkeypatch.setattr(eight_bits, "device_info", lambda: DeviceInfo("H200", 90))
    _, target, report = run(tmp_path, model, "auto", *inputs)
    assert precisions_of(target) == ["int8_fp8"]
    assert report["attention_precision"]["layers"][0]["kernel"] == "sm90"
    loaded = onnx.load(model)

    def written(precision: str, capability: int) -> list[bytes]:
        made = stof.optimize(loaded, target="cuda", attention_precision=precision, capability=capability, verify=False)
        return [a.s for n in made.graph.node for a in n.attribute if a.name == "precision"]

    assert [written("int8", capability) for capability in (75, 80, 89, 90)] == [[], [b"int8"], [b"int8"], [b"int8"]]
    assert [written("fp8", capability) for capability in (80, 90)] == [[], [b"int8_fp8"]]


def test_from_python_and_dry_runs(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model.onnx", (Layer(),))
    made = stof.optimize(onnx.load(model), target="cuda", attention_precision="fp8", verify=False)
    assert [a.s for n in made.graph.node for a in n.attribute if a.name == "precision"] == [b"int8_fp8"]
    with pytest.raises(stof.ArgumentError, match="did you mean 'fp8'"):
        stof.Options(target="cuda", attention_precision="int8_fp8")
    status, target, report = run(tmp_path, model, "auto", "--dry-run", *texts(tmp_path, 1, LENGTH))
    assert status == 0
    assert not target.exists()
    assert report["attention_precision"]["layers"][0]["reduced"]
    assert report["attention_precision"]["measured_on"] == ""
