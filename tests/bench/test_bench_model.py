# SPDX-License-Identifier: Apache-2.0
"""``stof-bench model FILE``: models of all kinds on inputs that verification draws, and gains by length.

The kind: on models that ``stof-optimize`` handles it ended with "internal error ... please report it": token ids beyond the
vocabulary, and 128 for every dimension of an image.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from onnxruntime.quantization import quantize_dynamic

import build
from stof.bench import cli, measure
from stof.bench.drawn_feeds import ModelFeeds, draw_static_feeds
from stof.bench.model import compare, describe_gains
from stof.errors import ArgumentError, ModelError
from stof.runtime.bf16_kernel import cpu_bf16_gemm_kernel
from stof.verification.model_inputs import ModelInputs

_FEW = ("--threads", "1", "--rounds", "1", "--without", "openvino", "memory")
_GAIN = re.compile(r"^ +[\d.]+ ms -> +[\d.]+ ms +[\d.]+x  (.*)$", re.MULTILINE)


def _make(name: str, folder: Path) -> Path:
    path = folder / f"{name.replace('/', '-')}.onnx"
    build.write(name, path)
    return path


Run = Callable[..., str]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """The command on a file of the folder that it runs in; gives what it says."""
    monkeypatch.setattr(measure, "rates", lambda threads: {"fma_gflops": 1.0, "read_gbps": 1.0})
    monkeypatch.chdir(tmp_path)

    def run_command(path: Path, *options: str) -> str:
        status = cli.main(["model", path.name, *_FEW, *options])
        said = capsys.readouterr()
        assert status == 0, said.err
        return said.out

    return run_command


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("narrow/modernbert.dynamo.sdpa", ["batch 1, sequence 24", "batch 1, sequence 100"]),  # a vocabulary of 96
        ("zoo/modernbert-fixed.dynamo.eager", ["input_ids, attention_mask [2, 48]"]),
        ("zoo/bart.dynamo.eager", ["batch 1, sequence 24, target 24", "batch 1, sequence 100, target 100"]),
        ("zoo/mistral-fp16.dynamo.eager", ["batch 1, sequence 24", "batch 1, sequence 100"]),
    ],
)
def test_lengths_of_models(name: str, words: list[str], tmp_path: Path, run: Run) -> None:
    said = run(_make(name, tmp_path), "--lengths", "24", "100", "--results", "found")
    assert _GAIN.findall(said) == words
    records = json.loads((tmp_path / "found/models-cpu.json").read_text())
    assert sorted(r["inputs"] for r in records) == sorted(words)
    assert all(r["seconds"]["original"] > 0 < r["seconds"]["optimized"] for r in records)
    assert all(r["error"]["optimized"] <= 1e-2 for r in records)
    # A user's file is measured anywhere, and leaves nothing else there.
    assert not (tmp_path / "docs").exists()


def test_images_have_sizes_by_name(tmp_path: Path, run: Run) -> None:
    said = run(_make("zoo/vit-features.optimum.sdpa", tmp_path), "--lengths", "128")
    (words,) = _GAIN.findall(said)
    assert "num_channels 3" in words
    assert "height 128" not in words


def test_decoders_have_one_token_behind_the_others(tmp_path: Path, run: Run) -> None:
    said = run(_make("zoo/gpt2-generates.optimum.sdpa", tmp_path), "--lengths", "24")
    prompt, token = _GAIN.findall(said)
    assert "sequence_length 24" in prompt
    assert token.startswith("one token, ")
    assert "past_sequence_length 23" in token


def test_a_quantized_model_whose_steps_differ(tmp_path: Path, run: Run) -> None:
    plain = _make("narrow/bert.torchscript.sdpa", tmp_path)
    quantize_dynamic(plain, tmp_path / "quantized.onnx")
    said = run(tmp_path / "quantized.onnx", "--lengths", "64")
    assert len(_GAIN.findall(said)) == 1


def test_sizes_and_inputs_of_the_user(narrow: Callable[[str], Path], tmp_path: Path) -> None:
    path = narrow("modernbert.dynamo.sdpa")
    (drawn,) = ModelFeeds(path, {"sequence": (40, 40)}).draw([100], batch=3)
    assert drawn.feeds["input_ids"].shape == (3, 40)
    assert (drawn.batch, drawn.scores) == (3, (40, 40))
    with pytest.raises(ArgumentError, match="--shape 'length' is no symbolic dimension"):
        ModelFeeds(path, {"length": (40, 40)})
    given = {"input_ids": np.full((1, 7), 5), "attention_mask": np.ones((1, 7), np.int64)}
    np.savez(tmp_path / "own.npz", **given)
    (own,) = ModelFeeds(path, {}, (tmp_path / "own.npz",)).draw([100], batch=None)
    np.testing.assert_array_equal(own.feeds["input_ids"], given["input_ids"])
    assert "sequence 7" in own.words
    np.savez(tmp_path / "own.npz", **{**given, "input_ids": np.full((1, 7), 5000)})
    with pytest.raises(ArgumentError, match=r"inputs .*own\.npz.*the model does not run on them"):
        ModelFeeds(path, {}, (tmp_path / "own.npz",)).draw(None, batch=None)


def test_without_lengths_those_are_drawn_that_run_fast_enough(narrow: Callable[[str], Path]) -> None:
    found = ModelFeeds(narrow("modernbert.dynamo.sdpa"), {}).draw(None, batch=None)
    lengths = [f.feeds["input_ids"].shape[1] for f in found]
    assert lengths == sorted(set(lengths))
    assert len(lengths) > 1
    assert [f.length for f in found] == lengths


_SQUARES = """<ir_version: 9, opset_import: ["": 18]>
squares (int64[1, S] i) => (float[1, S] y) {
    s = Mul(i, i)
    y = OP(table, s)
}"""


def _squares(path: Path, op: str = "Gather") -> Path:
    """A model of a table of 50 rows, in which the squares of its inputs are looked up."""
    model = onnx.parser.parse_model(_SQUARES.replace("OP", op))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(50, np.float32), "table"))
    onnx.save(model, path)
    return path


def test_inputs_that_the_original_refuses_are_drawn_again(tmp_path: Path) -> None:
    (drawn,) = ModelFeeds(_squares(tmp_path / "m.onnx"), {}).draw([100], batch=None)
    assert drawn.feeds["i"].shape == (1, 100)
    assert (drawn.feeds["i"] ** 2).max() < 50
    assert "S 100" in drawn.words


def test_a_model_that_cannot_be_timed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has operators without a kernel, as bf16 on a CPU; or no inputs are found that it takes."""
    path = _squares(tmp_path / "m.onnx", "com.example.Unknown")
    model = onnx.load(path)
    model.opset_import.append(onnx.helper.make_opsetid("com.example", 1))
    onnx.save(model, path)
    with pytest.raises(
        ModelError, match=r"m\.onnx cannot be timed, because ONNX Runtime's CPU provider cannot load it"
    ):
        ModelFeeds(path, {}).draw([10], batch=None)
    monkeypatch.setattr(ModelInputs, "narrow", lambda *_: False)
    with pytest.raises(ArgumentError, match=r"does not run on the inputs .*S 100.*--inputs FILE"):
        ModelFeeds(_squares(path), {}).draw([100], batch=None)


def test_other_outputs_are_a_fault(narrow: Callable[[str], Path]) -> None:
    path = narrow("modernbert.dynamo.sdpa")
    drawn = ModelFeeds(path, {})
    (timed,) = drawn.draw([16], batch=None)
    expected = [
        np.random.default_rng(0).standard_normal((1, 16, 96)).astype(np.float32) for _ in drawn.model.graph.output
    ]
    (same, *_) = compare(drawn, timed, (expected, expected))
    assert same.ok
    (other, *_) = compare(drawn, timed, (expected, [x + np.float32(0.1) for x in expected]))
    assert not other.ok
    (shape, *_) = compare(drawn, timed, (expected, [x[:, :8] for x in expected]))
    assert not shape.ok


def test_static_inputs_need_no_run(tmp_path: Path) -> None:
    path = _make("zoo/modernbert-fixed.dynamo.eager", tmp_path)
    feeds = draw_static_feeds(path)
    assert feeds["input_ids"].shape == (2, 48)
    assert feeds["attention_mask"].all()


def test_gains() -> None:
    record = {
        "model": "m",
        "inputs": "batch 1",
        "machine": {"threads": 2},
        "seconds": {"original": 0.3, "optimized": 0.2},
    }
    head, first, second = describe_gains([record, {**record, "model": "m, one token"}])
    assert head == "2 thread(s): original -> optimized"
    assert _GAIN.findall(first) == ["batch 1"]
    assert "1.50x" in first
    assert _GAIN.findall(second) == ["one token, batch 1"]
    assert describe_gains([]) == []


@pytest.mark.skipif(not cpu_bf16_gemm_kernel(), reason="this machine has no bf16 instructions, or no kernel of them")
def test_bf16_is_a_variant_of_its_own(tmp_path: Path, run: Run) -> None:
    """Beside the original and the optimized model, with an error that fp32 does not have."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "attention_precision"))
    from gemm_layers import bert_layer

    model = bert_layer(tmp_path / "model.onnx")
    said = run(model, "--lengths", "40", "--allow-bf16", "--results", "found")
    assert "OUTPUTS CHANGE: --allow-bf16 lets 1 of 1 attentions and 6 of 6 GEMMs compute matmuls in bf16" in said
    (record,) = json.loads((tmp_path / "found/models-cpu.json").read_text())
    assert set(record["seconds"]) == {"original", "optimized", "bf16"}
    assert record["error"]["optimized"] < 1e-5 < record["error"]["bf16"] < 5e-2
