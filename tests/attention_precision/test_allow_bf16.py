# SPDX-License-Identifier: Apache-2.0
"""--allow-bf16 through the whole optimizer: which operators get it, errors, gates, plans and refusals.

Tests whose numbers need bf16 instructions are in test_bf16_kernels.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from precision_runs import HAS_KERNEL, flags_of, run, simulate_attribute

import stof
from stof.arguments.precisions import BF16
from stof.attention.decide.cost_cpu import estimate_precision_gain
from stof.attention_precision import layers
from stof.attention_precision.layers import METADATA

# isort: split
import skip_models
import test_prompts
from skip_runs import inputs_options, texts, thresholds_of


@pytest.fixture(name="known", autouse=True)
def simulated_attribute(monkeypatch: pytest.MonkeyPatch) -> None:
    simulate_attribute(monkeypatch)


def test_nothing_changes_without_the_option(tmp_path: Path) -> None:
    status, target, report = run(tmp_path, skip_models.encoder(tmp_path / "model.onnx"))
    assert status == 0
    assert set(flags_of(target).values()) == {0}
    assert report["attention_precision"] is None
    assert not any(p.key == METADATA for p in onnx.load(target).metadata_props)


def test_operators_get_the_attribute(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With verification, and errors on the inputs that it draws."""
    model = skip_models.encoder(tmp_path / "model.onnx")
    status, target, report = run(tmp_path, model, "--allow-bf16")
    assert status == 0
    assert list(flags_of(target).values()) == [1, 1]
    found = report["attention_precision"]
    assert found["precision"] == "bf16"
    assert found["max_error"] == 0.01
    assert [row["node"] for row in found["layers"]] == list(flags_of(target))
    assert all(row["reduced"] and 0 <= row["relative_rms"] < 0.01 for row in found["layers"])
    assert found["measured_on"] == "2 sets of drawn inputs"
    assert found["loss"] is None
    assert found["cosines"] is None
    assert report["verification"]["ok"]
    assert "--allow-bf16" in report["run"]["command"]
    (entry,) = [p for p in onnx.load(target).metadata_props if p.key == METADATA]
    assert entry.value == f"outputs change; bf16: {'; '.join(flags_of(target))}"
    text = capsys.readouterr().out
    assert "OUTPUTS CHANGE: --allow-bf16 lets 2 of 2 attentions compute matmuls in bf16" in text.splitlines()[0]
    if HAS_KERNEL:
        assert (
            "verification compares outputs in full precision; 2 of 2 attentions in bf16 are held to the definition"
            in text
        )
    else:
        assert "no attention in bf16 was compared with its definition: this machine has no bf16 kernel" in text
    assert "loss: not measured; --prompts FILE or --inputs FILE measures it" in text


def test_the_page_says_it_first(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    options = ["--allow-bf16", "--force", "--no-verify", "--report", str(page)]
    assert run(tmp_path, skip_models.encoder(tmp_path / "model.onnx"), *options)[0] == 0
    text = page.read_text()
    assert "OUTPUTS CHANGE: --allow-bf16 lets 2 of 2" in text
    assert text.index("OUTPUTS CHANGE") < text.index("Attention sites")


def test_an_error_beyond_the_bound_keeps_full_precision(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """fp32 has an error against fp64, too: a bound of 0 admits nothing."""
    model = skip_models.encoder(tmp_path / "model.onnx")
    status, target, report = run(tmp_path, model, "--allow-bf16", "--max-error", "0", *inputs_options(tmp_path, 2, 300))
    assert status == 0
    assert set(flags_of(target).values()) == {0}
    for row in report["attention_precision"]["layers"]:
        assert not row["reduced"]
        assert row["relative_rms"] > 0
        assert "--max-error allows 0" in row["reason"]
    assert report["attention_precision"]["cosines"] is None
    assert "--allow-bf16 changes nothing" in capsys.readouterr().out.splitlines()[0]
    assert not any(p.key == METADATA for p in onnx.load(target).metadata_props)


def test_a_node_that_computes_something_else_keeps_full_precision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulated: with the attribute, a kernel takes half the scale."""
    from stof.attention_precision import errors

    def put(model: onnx.ModelProto, *others: object) -> onnx.ModelProto:
        copy = layers.put_precision(model, *others)  # type: ignore[arg-type]
        node = next(n for n in copy.graph.node if any(a.name == BF16.attribute for a in n.attribute))
        next(a for a in node.attribute if a.name == "scale").f /= 2
        return copy

    monkeypatch.setattr(errors, "put_precision", put)
    options = ["--allow-bf16", "--no-verify", *inputs_options(tmp_path, 2, 300)]
    status, target, report = run(tmp_path, skip_models.encoder(tmp_path / "model.onnx"), *options)
    assert status == 0
    assert list(flags_of(target).values()) == [0, 1]
    first, second = report["attention_precision"]["layers"]
    assert "it differs from the definition that rounds as its kernels do" in first["reason"]
    assert second["reduced"]


def test_errors_that_cannot_be_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On drawn inputs attention keeps full precision; on inputs of the user's the run ends, as with any gate."""
    from stof.attention_precision import errors
    from stof.execution.run_limits import MemoryLimit

    def fail(*others: object) -> None:
        raise MemoryLimit("too little memory")

    monkeypatch.setattr(errors._Capture, "run", fail)
    model = skip_models.encoder(tmp_path / "model.onnx")
    status, target, report = run(tmp_path, model, "--allow-bf16")
    assert status == 0
    assert set(flags_of(target).values()) == {0}
    found = report["attention_precision"]
    assert [row["relative_rms"] for row in found["layers"]] == [None, None]
    assert all(
        row["reason"].startswith("its error is not known: ") and "too little memory" in row["reason"]
        for row in found["layers"]
    )
    assert found["warnings"] == []
    _, target, report = run(tmp_path, model, "--allow-bf16", "--force")
    assert set(flags_of(target).values()) == {1}
    assert any(
        w.startswith("the error of 2 attentions is not known: ") for w in report["attention_precision"]["warnings"]
    )
    status, target, _ = run(tmp_path, model, "--allow-bf16", *inputs_options(tmp_path, 1, 300))
    assert status == 2
    assert not target.exists()
    assert "the errors of attentions in bf16 could not be measured: too little memory" in capsys.readouterr().err


def test_nothing_to_measure_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without verification and inputs no error is known: attention keeps full precision, unless --force allows bf16."""
    model = skip_models.encoder(tmp_path / "model.onnx")
    status, target, report = run(tmp_path, model, "--allow-bf16", "--no-verify")
    assert status == 0
    assert set(flags_of(target).values()) == {0}
    for row in report["attention_precision"]["layers"]:
        assert not row["reduced"]
        assert row["reason"] == (
            "its error is not known: there is nothing to measure it on; give --inputs or --prompts; "
            "--force allows bf16 all the same"
        )
    assert "--allow-bf16 changes nothing" in capsys.readouterr().out.splitlines()[0]
    _, target, report = run(tmp_path, model, "--allow-bf16", "--no-verify", "--force")
    assert set(flags_of(target).values()) == {1}
    assert "the error of 2 attentions is not known: there is nothing" in "".join(
        report["attention_precision"]["warnings"]
    )
    text = capsys.readouterr().out
    assert "held to the definition" not in text
    assert "compared with its definition" not in text


def test_the_cosine_is_measured_and_gated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of all sets of inputs, in the model that is written."""
    model = skip_models.encoder(tmp_path / "model.onnx")
    options = ["--allow-bf16", "--no-verify", *inputs_options(tmp_path, 3, 300)]
    status, target, report = run(tmp_path, model, *options)
    assert status == 0
    cosines = report["attention_precision"]["cosines"]
    assert set(cosines) == {"hidden", "pooled"}
    assert all(0.999 < cosine <= 1 for cosine in cosines.values())
    assert "loss on 3 sets of inputs: 1 - cosine of output" in capsys.readouterr().out
    status, target, report = run(tmp_path, model, *options, "--min-cosine", "1")
    assert status == 2
    assert not target.exists()
    message = capsys.readouterr().err
    assert "--allow-bf16 changes outputs too much: the cosine of output" in message
    assert "choose a smaller --max-error" in message
    assert run(tmp_path, model, *options, "--min-cosine", "1", "--force")[0] == 0
    assert set(flags_of(target).values()) == {1}


def test_padding_alone_has_no_cosine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No row counts, and the gate would pass whatever the model computes."""
    model = skip_models.encoder(tmp_path / "model.onnx", padding=True)
    onnx.utils.extract_model(str(model), str(model), ["input_ids", "attention_mask"], ["hidden"])
    ids = texts(1, 40)[0][None]
    for mask, status in ((np.zeros_like(ids), 1), (np.ones_like(ids), 0)):
        np.savez(tmp_path / "feed.npz", input_ids=ids, attention_mask=mask)
        assert run(tmp_path, model, "--allow-bf16", "--no-verify", "--inputs", str(tmp_path / "feed.npz"))[0] == status
    assert "feed.npz: the outputs have no row that counts" in capsys.readouterr().err


def prompts_of(folder: Path) -> list[str]:
    return ["--prompts", str(test_prompts.put(folder / "prompts.npy", test_prompts.IDS))]


def test_decoders_with_a_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """StofCachedAttention: its error on prompts, the loss of prompts and of steps, and the gate."""
    path = test_prompts.decoder(tmp_path, strength=0.1)
    status, target, report = run(tmp_path, path, "--allow-bf16", *prompts_of(tmp_path))
    assert status == 0
    assert list(flags_of(target).values()) == [1]
    found = report["attention_precision"]
    assert [row["op"] for row in found["layers"]] == ["StofCachedAttention"]
    assert 0 < found["layers"][0]["relative_rms"] < 0.01
    assert found["loss"]["tokens"] == 600
    assert 0 <= found["loss"]["kl"] < 1e-3
    assert found["decode_loss"]["tokens"] == 32
    text = capsys.readouterr().out
    assert "loss of decoding on 2 prompts, 32 tokens: KL divergence" in text
    assert "; prompts alone, decode steps stay fp32" in text
    status, target, _ = run(tmp_path, path, "--allow-bf16", "--no-verify", "--max-kl", "0", *prompts_of(tmp_path))
    assert status == 2
    assert not target.exists()
    message = capsys.readouterr().err
    assert "--allow-bf16 changes outputs too much: KL divergence" in message
    assert (
        "Nothing was written; choose a smaller --max-error, raise --max-kl, or write it anyway with --force" in message
    )


def test_long_prompts_count_with_their_first_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As many as there is memory for, in errors alone: the loss is that of all tokens."""
    from stof.attention_precision import errors

    path = test_prompts.decoder(tmp_path, strength=0.1)
    options = ["--allow-bf16", "--no-verify", *prompts_of(tmp_path)]
    monkeypatch.setattr(errors, "_MOST_TOKENS", 200)
    _, _, report = run(tmp_path, path, *options)
    assert report["attention_precision"]["measured_on"].startswith("the first 200 tokens of 2 prompts of --prompts ")
    assert report["attention_precision"]["loss"]["tokens"] == 600
    monkeypatch.setattr(errors, "_MOST_BYTES", 1)
    _, _, report = run(tmp_path, path, *options)
    assert "on the first 128 tokens of 2 prompts" in capsys.readouterr().out
    assert 0 < report["attention_precision"]["layers"][0]["relative_rms"] < 0.01


def test_models_of_a_fixed_length(tmp_path: Path) -> None:
    """Whose prompts cannot be shortened."""
    path = test_prompts.decoder(tmp_path, strength=0.1, fixed=300)
    status, _, report = run(tmp_path, path, "--allow-bf16", "--no-verify", *prompts_of(tmp_path))
    assert status == 0
    found = report["attention_precision"]
    assert found["measured_on"].startswith("2 prompts of")
    assert found["layers"][0]["relative_rms"] > 0


def test_beside_a_pattern(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One loss of both, which the message of the gate names together."""
    path = test_prompts.decoder(tmp_path)
    options = ["--allow-bf16", "--sparsify", "window=2", "--no-verify", *prompts_of(tmp_path)]
    status, _, report = run(tmp_path, path, *options)
    assert status == 2
    assert "--sparsify with --allow-bf16 changes outputs too much" in capsys.readouterr().err
    assert report["sparsify"]["loss"] == report["attention_precision"]["loss"]


def test_beside_thresholds(tmp_path: Path) -> None:
    spec = ["--sparsify", "skip-scores(threshold=0.1)"]
    model = skip_models.encoder(tmp_path / "model.onnx")
    status, target, report = run(tmp_path, model, "--allow-bf16", *spec, *inputs_options(tmp_path, 2))
    assert status == 0
    assert set(flags_of(target).values()) == {1}
    assert set(thresholds_of(target).values()) == {np.float32(0.1)}
    assert report["sparsify"]["skip_scores"]["cosines"] is not None
    assert report["attention_precision"]["cosines"] is not None


def test_a_plan_is_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The plan says which, whatever an error would be, and where none is known."""
    model, plan = skip_models.encoder(tmp_path / "model.onnx"), tmp_path / "plan.json"
    options = ["--allow-bf16", "--no-verify"]
    status, target, _ = run(tmp_path, model, *options, "--force", "--save-plan", str(plan))
    assert status == 0
    saved = json.loads(plan.read_text())
    assert saved["attention_precision"] == dict.fromkeys(flags_of(target), "bf16")

    first = next(iter(saved["attention_precision"]))
    del saved["attention_precision"][first]
    plan.write_text(json.dumps(saved))
    again = tmp_path / "again.json"
    options += ["--plan", str(plan), "--save-plan", str(again), "--max-error", "0"]
    status, target, report = run(tmp_path, model, *options)
    assert status == 0
    assert sum(flags_of(target).values()) == 1
    status, target, report = run(tmp_path, model, *options, *inputs_options(tmp_path, 1, 300))
    assert status == 0
    assert [flags_of(target)[first], sum(flags_of(target).values())] == [0, 1]
    assert report["attention_precision"]["layers"][0]["reason"] == "the plan says so"
    assert json.loads(again.read_text()) == saved

    assert run(tmp_path, model, "--no-verify", "--plan", str(plan))[0] == 1
    message = capsys.readouterr().err
    assert "the plan computes attention in bf16, that of" in message
    assert "--allow-bf16 is not given; give it, or take attention_precision out of the plan" in message


def test_a_plan_without_precisions_leaves_the_choice(tmp_path: Path) -> None:
    """As one that was saved without the option, or in a dry run, where errors are not known."""
    model, plan = skip_models.encoder(tmp_path / "model.onnx"), tmp_path / "plan.json"
    status, target, report = run(tmp_path, model, "--allow-bf16", "--dry-run", "--save-plan", str(plan))
    assert status == 0
    assert not target.exists()
    assert all(row["reduced"] for row in report["attention_precision"]["layers"])
    assert report["attention_precision"]["measured_on"] == ""
    assert "attention_precision" not in json.loads(plan.read_text())
    status, target, _ = run(tmp_path, model, "--allow-bf16", "--no-verify", "--force", "--plan", str(plan))
    assert status == 0
    assert set(flags_of(target).values()) == {1}


@pytest.mark.parametrize(
    ("precisions", "message"),
    [
        (
            {"none/StofAttention": "bf16"},
            "the plan computes 'none/StofAttention' in bf16, and the optimized model has no",
        ),
        ({"none/StofAttention": "fp4"}, 'has attention_precision[\'none/StofAttention\'] "fp4", expected "bf16"'),
        (["bf16"], "has attention_precision"),
    ],
)
def test_wrong_plans(precisions: object, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, plan = skip_models.encoder(tmp_path / "model.onnx"), tmp_path / "plan.json"
    assert run(tmp_path, model, "--no-verify", "--save-plan", str(plan))[0] == 0
    plan.write_text(json.dumps({**json.loads(plan.read_text()), "attention_precision": precisions}))
    status, target, _ = run(tmp_path, model, "--no-verify", "--allow-bf16", "--plan", str(plan))
    assert status == 1
    assert message in capsys.readouterr().err
    assert not target.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--allow-bf16", "--target", "cuda"], "allow_bf16 is for target 'cpu', not 'cuda'"),
        (["--allow-bf16", "--target", "tensorrt"], "allow_bf16 is for target 'cpu', not 'tensorrt'"),
        (["--allow-bf16", "--emit", "standard"], "emit is 'standard', and allow_bf16 needs emit 'stof'"),
        (["--max-error", "0.1"], "--max-error is for --allow-bf16 and --attention-precision, of which none is given"),
        (["--allow-bf16", "--max-error", "-1"], "number from 0 on"),
        (["--allow-bf16", "--min-cosine", "0.9"], "--min-cosine is for --inputs with"),
        (
            ["--allow-bf16", "--min-cosine", "0.9", "--inputs", "i.npz", "--prompts", "p.npy"],
            "--min-cosine is for --inputs, and --prompts decide with --allow-bf16; leave one of them out",
        ),
        (
            ["--allow-bf16", "--dequantize-attention"],
            "--allow-bf16 and --dequantize-attention both change outputs, and their losses cannot be separated; give one",
        ),
        (
            ["--dequantize-attention", "--sparsify", "skip-scores"],
            "--sparsify and --dequantize-attention both change outputs",
        ),
        (["--allow-bf16", "--max-kl", "0.9"], "--max-kl is for --prompts and --sparse-mlp, of which none is given"),
        (["--prompts", "p.npy"], "--prompts is for --sparsify, --sparse-mlp, --allow-bf16 and"),
    ],
)
def test_refusals(options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, target, _ = run(tmp_path, skip_models.encoder(tmp_path / "model.onnx"), *options)
    assert status == 1
    assert message in capsys.readouterr().err
    assert not target.exists()


def test_prompts_need_logits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = skip_models.encoder(tmp_path / "model.onnx")
    assert run(tmp_path, model, "--allow-bf16", "--no-verify", *prompts_of(tmp_path))[0] == 1
    assert (
        "needs a model with output 'logits', which this one has not; --inputs FILE measures" in capsys.readouterr().err
    )


def test_a_library_without_the_attribute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(layers, "takes_attribute", lambda op, attribute: False)
    assert run(tmp_path, skip_models.encoder(tmp_path / "model.onnx"), "--allow-bf16")[0] == 1
    assert "--allow-bf16: the operators of the plugin library have no attribute allow_bf16" in capsys.readouterr().err


def test_a_model_that_was_optimized_before(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = skip_models.encoder(tmp_path / "model.onnx")
    status, target, _ = run(tmp_path, model, "--no-verify")
    assert status == 0
    once = target.rename(tmp_path / "once.onnx")
    assert run(tmp_path, once, "--allow-bf16")[0] == 1
    assert "--allow-bf16 is for operators that are written in the same run" in capsys.readouterr().err


def test_from_python(tmp_path: Path) -> None:
    """In memory, and a folder of models."""
    model = onnx.load(skip_models.encoder(tmp_path / "model.onnx"))
    optimized = stof.optimize(model, allow_bf16=True, max_error=0.02, verify=False, force=True)
    flags = [a.i for n in optimized.graph.node for a in n.attribute if a.name == BF16.attribute]
    assert flags == [1, 1]
    folder = tmp_path / "models"
    folder.mkdir()
    skip_models.encoder(folder / "model.onnx")
    stof.optimize_folder(folder, tmp_path / "optimized", allow_bf16=True, verify=False, force=True)
    assert list(flags_of(tmp_path / "optimized" / "model.onnx").values()) == [1, 1]
    with pytest.raises(stof.ArgumentError, match="max_error is -1"):
        stof.optimize(model, allow_bf16=True, max_error=-1)
    with pytest.raises(stof.ArgumentError, match="allow_bf16 and dequantize_attention both change outputs"):
        stof.Options(allow_bf16=True, dequantize_attention=True)


def test_a_model_without_attention(tmp_path: Path) -> None:
    """Nothing to do: the option is no error."""
    model = tmp_path / "model.onnx"
    info = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Relu", ["x"], ["y"])],
        "g",
        [info("x", onnx.TensorProto.FLOAT, [3])],
        [info("y", onnx.TensorProto.FLOAT, [3])],
    )
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=9), model)
    status, target, report = run(tmp_path, model, "--allow-bf16")
    assert status == 0
    assert report["attention_precision"]["layers"] == []
    assert report["copied"]
    assert target.exists()


def test_estimates(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Wider heads gain more; heads of a few elements lose; of instructions that were not timed nothing is estimated."""
    gains = [estimate_precision_gain(size, "avx512_bf16") or 0.0 for size in (4, 64, 128)]
    assert 0 < gains[0] < 1 < gains[1] < gains[2]
    assert [estimate_precision_gain(size, "amx_bf16") for size in (64, 128)] == [
        pytest.approx(2.19, 0.03),
        pytest.approx(3.44, 0.03),
    ]
    assert estimate_precision_gain(64, "neon_bf16") is None
    monkeypatch.setattr(layers, "kernel_in_precision", lambda op, attribute: "avx512_bf16")
    monkeypatch.setattr(layers, "_head_size", lambda facts, node: 4)
    model = skip_models.encoder(tmp_path / "model.onnx")
    status, target, report = run(tmp_path, model, "--allow-bf16", "--no-verify")
    assert status == 0
    assert set(flags_of(target).values()) == {0}
    assert report["attention_precision"]["layers"][0]["reason"].startswith("a loss is estimated: 0.")
    monkeypatch.setattr(layers, "kernel_in_precision", lambda op, attribute: "neon_bf16")
    _, target, report = run(tmp_path, model, "--allow-bf16", "--no-verify", "--force")
    assert set(flags_of(target).values()) == {1}
    assert report["attention_precision"]["layers"][0]["predicted_gain"] is None
    assert "kernel neon_bf16, not timed" in capsys.readouterr().out
