# SPDX-License-Identifier: Apache-2.0
"""``--sparsify choose-pages`` in the optimizer: inputs and outputs, the function body, the loss of decoding, refusals."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto

import stof
from stof import cli

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "sparsify"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cached_attention"))
from gqa_models import Shape, model_of
from test_prompts import WORDS, D, G, H, decoder, put

PAST, PRESENT = "past_key_page_bounds", "present_key_page_bounds"


def run(folder: Path, model: Path, spec: str, *options: str) -> tuple[int, Path, dict[str, Any]]:
    """Status, the file that is written, and ``sparsify`` of the report."""
    target, report = folder / "out.onnx", folder / "report.json"
    words = [str(model), "-o", str(target), "--json", str(report), "--sparsify", spec, *options]
    status = cli.main(words)
    return status, target, json.loads(report.read_text())["sparsify"] if report.exists() else {}


def session(path: Path, *, library: bool = True) -> ort.InferenceSession:
    options = ort.SessionOptions()
    if library:
        stof.register(options)
    else:
        options.log_severity_level = 3
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def decode(made: ort.InferenceSession, ids: np.ndarray, prompt: int, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Logits [tokens, words] of a prompt and single tokens behind it, and the key bounds after the last one."""
    rng = np.random.default_rng(0)
    feed = {n: rng.standard_normal((1, G, capacity, D)).astype(np.float32) for n in ("past_key", "past_value")}
    names = [o.name for o in made.get_outputs()]
    feed |= {PAST: np.zeros((1, G, 0, 2, D), np.float32)} if PRESENT in names else {}
    logits = []
    for a, b in [(0, prompt), *((t, t + 1) for t in range(prompt, len(ids)))]:
        step = {"input_ids": ids[None, a:b], "attention_mask": np.ones((1, b), np.int64), **feed}
        found = dict(zip(names, made.run(None, step), strict=True))
        logits.append(found["logits"][0])
        feed = {n: found[n.replace("past", "present")] for n in feed}
    return np.concatenate(logits), feed.get(PAST, np.zeros(0))


def test_a_decoder_with_bounds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = decoder(tmp_path)
    status, target, report = run(tmp_path, model, "choose-pages(pages=1,rows=16)")
    assert status == 0
    out = capsys.readouterr().out
    assert "OUTPUTS CHANGE: --sparsify chooses pages in 1 of 1 attentions over a KV cache" in out
    assert "attend the best 1 pages of 16 rows" in out
    (row,) = report["choose_pages"]["sites"]
    assert (row["past"], row["present"], row["pages"], row["rows"]) == (PAST, PRESENT, 1, 16)
    written = onnx.load(target)
    dims = {v.name: v.type.tensor_type for v in (*written.graph.input, *written.graph.output)}
    for name in (PAST, PRESENT):
        assert dims[name].elem_type == TensorProto.FLOAT
        batch, heads, pages, two, size = (d.dim_value or d.dim_param for d in dims[name].shape.dim)
        assert (batch, heads, two, size) == ("B", G, 2, D)
        assert str(pages).endswith("past_pages_16" if name == PAST else "present_pages_16")
    assert {p.key: p.value.split(";")[0] for p in written.metadata_props}["stof_choose_pages"] == "outputs change"

    ids = np.random.default_rng(1).integers(0, WORDS, 300)
    exact, _ = decode(session(model), ids, 260, 320)
    chosen, bounds = decode(session(target), ids, 260, 320)
    plain, same = decode(session(target, library=False), ids, 260, 320)
    np.testing.assert_allclose(plain, exact, rtol=1e-4, atol=1e-4)  # the function body attends all pages
    np.testing.assert_allclose(chosen[:260], exact[:260], rtol=1e-4, atol=1e-4)  # as prompts do
    assert np.abs(chosen[260:] - exact[260:]).max() > 1e-3
    np.testing.assert_allclose(bounds[:, :, :19], same[:, :, :19], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rows", [16, 32, 64, 128])
def test_all_pages_are_exact(rows: int, tmp_path: Path) -> None:
    model = decoder(tmp_path)
    status, target, _ = run(tmp_path, model, f"choose-pages(pages=4096,rows={rows})")
    assert status == 0
    ids = np.random.default_rng(1).integers(0, WORDS, 290)
    exact, _ = decode(session(model), ids, 280, 300)
    np.testing.assert_allclose(decode(session(target), ids, 280, 300)[0], exact, rtol=1e-4, atol=1e-4)
    found, bounds = decode(session(target, library=False), ids, 280, 300)
    np.testing.assert_allclose(found, exact, rtol=1e-4, atol=1e-4)
    assert bounds.shape == (1, G, -(-300 // rows), 2, D)
    assert np.isfinite(bounds).all()


def test_layers_and_other_clauses(tmp_path: Path) -> None:
    shapes = [Shape(H=4, G=2, D=16), Shape(H=4, G=2, D=16), Shape(H=4, G=2, D=16)]
    onnx.save(model_of(*shapes), tmp_path / "layers.onnx")
    spec = "choose-pages(pages=2,rows=32,layers=1:);skip-scores(threshold=0.1,layers=0)"
    status, target, report = run(tmp_path, tmp_path / "layers.onnx", spec)
    assert status == 0
    assert [r["chooses"] for r in report["choose_pages"]["sites"]] == [False, True, True]
    assert report["choose_pages"]["sites"][0]["reason"] == "--sparsify leaves it dense"
    written = onnx.load(target)
    nodes = [n for n in written.graph.node if n.op_type == "StofCachedAttention"]
    assert [bool(n.output[3]) for n in nodes] == [False, True, True]
    assert session(target, library=False).get_inputs()  # the function body of calls with key bounds and without
    names = {i.name for i in written.graph.input}
    assert {"layer1/past_key_page_bounds", "layer2/past_key_page_bounds"} <= names
    assert "layer0/past_key_page_bounds" not in names


def test_the_loss_of_decoding_passes_the_gate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = decoder(tmp_path, strength=3.0)
    prompts = put(tmp_path / "prompts.npy", np.random.default_rng(2).integers(0, WORDS, (2, 300)))
    status, target, report = run(tmp_path, model, "choose-pages(pages=1,rows=16)", "--prompts", str(prompts), "--force")
    assert status == 0
    assert target.exists()
    assert report["loss"]["kl"] < 1e-6  # whole prompts attend all pages
    assert report["decode_loss"]["kl"] > 1e-3
    assert "loss of decoding on 2 prompts" in capsys.readouterr().out
    target.unlink()
    allowed = ["--max-kl", f"{report['decode_loss']['kl'] / 2:.6g}"]
    status, target, _ = run(tmp_path, model, "choose-pages(pages=1,rows=16)", "--prompts", str(prompts), *allowed)
    assert status == 2
    assert not target.exists()
    assert "--sparsify changes outputs too much: KL divergence" in capsys.readouterr().err
    status, target, report = run(tmp_path, model, "choose-pages(pages=40,rows=16)", "--prompts", str(prompts))
    assert status == 0
    assert report["decode_loss"]["kl"] < 1e-6


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("choose-pages", "has no pages, expected an integer from 1"),
        ("choose-pages(pages=0)", "has pages=0, expected an integer from 1"),
        ("choose-pages(pages=4,rows=48)", "has rows=48, expected 16, 32, 64 or 128"),
        ("choose-pages(pages=4,block=64)", "has key 'block', expected pages, rows, layers, dense_layers"),
        ("choose-pages(pages=4,layers=3)", "layers"),
        ("choose-pages(pages=4);choose-pages(pages=8)", "two choose-pages clauses are for layer 0"),
    ],
)
def test_wrong_clauses(spec: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, target, _ = run(tmp_path, decoder(tmp_path), spec)
    assert status == 1
    assert not target.exists()
    assert message in capsys.readouterr().err


def test_attention_that_cannot_choose(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sliding = Shape(H=4, G=2, D=16, window=24, sliding=True) if "sliding" in Shape.__annotations__ else None
    cases = [("its cache is quantized", Shape(H=4, G=2, D=16, cache="int8"))]
    cases += [("its cache slides", sliding)] if sliding is not None else []
    for reason, shape in cases:
        onnx.save(model_of(shape), tmp_path / "model.onnx")
        status, target, _ = run(tmp_path, tmp_path / "model.onnx", "choose-pages(pages=4)", "--no-verify")
        assert status == 1
        assert not target.exists()
        assert f"no attention can choose pages: {reason}" in capsys.readouterr().err
    status, _, _ = run(tmp_path, decoder(tmp_path), "choose-pages(pages=4)", "--target", "tensorrt")
    assert status == 1
    assert "no attention kernel of this library chooses pages for --target tensorrt" in capsys.readouterr().err


def test_models_without_a_cache_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from skip_models import encoder

    status, _, _ = run(tmp_path, encoder(tmp_path / "encoder.onnx"), "choose-pages(pages=4)", "--no-verify")
    assert status == 1
    assert "pages are those of a KV cache" in capsys.readouterr().err


def test_folders_of_genai_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    decoder(folder)
    config = {"model": {"type": "llama", "decoder": {"filename": "model.onnx", "session_options": {}}}}
    (folder / "genai_config.json").write_text(json.dumps(config))
    words = [str(folder), "-o", str(tmp_path / "new"), "--sparsify", "choose-pages(pages=4)"]
    assert cli.main(words) == 1
    err = capsys.readouterr().err
    assert "genai_config.json has no names for such a state; skip-scores needs none" in err
    assert not (tmp_path / "new").exists()


def test_names_of_bounds_that_the_model_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = decoder(tmp_path)
    proto = onnx.load(model)
    proto.graph.node.append(onnx.helper.make_node("Identity", ["input_ids"], [PAST]))
    onnx.save(proto, model)
    status, target, _ = run(tmp_path, model, "choose-pages(pages=1)")
    assert status == 1
    assert not target.exists()
    assert f"the model has a tensor {PAST!r}, the name of its bounds" in capsys.readouterr().err


def test_prompts_need_logits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Pages have no other measure: a loss that cannot be measured is an error, not a line that says so."""
    model = decoder(tmp_path)
    proto = onnx.load(model)
    for node in proto.graph.node:
        node.output[:] = ["scores" if t == "logits" else t for t in node.output]
        node.input[:] = ["scores" if t == "logits" else t for t in node.input]
    next(o for o in proto.graph.output if o.name == "logits").name = "scores"
    onnx.save(proto, model)
    np.save(tmp_path / "prompts.npy", np.random.default_rng(0).integers(0, WORDS, (2, 300)))
    status, target, _ = run(tmp_path, model, "choose-pages(pages=1)", "--prompts", str(tmp_path / "prompts.npy"))
    assert status != 0
    assert not target.exists()
    assert "needs a model with output 'logits'" in capsys.readouterr().err


def test_times_are_not_taken(tmp_path: Path) -> None:
    model = decoder(tmp_path)
    report = tmp_path / "report.json"
    words = [
        str(model),
        "-o",
        str(tmp_path / "out.onnx"),
        "--json",
        str(report),
        "--sparsify",
        "choose-pages(pages=1)",
        "--time",
    ]
    assert cli.main(words) == 0
    assert any("makes no bounds of pages" in note for note in json.loads(report.read_text())["notes"])


@pytest.mark.parametrize("opset", [13, 14])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_function_body_of_old_opsets(opset: int, dtype: str, tmp_path: Path) -> None:
    """Without the library, bounds have the type of the cache: CastLike is of opset 15."""
    shape = Shape(H=H, G=G, D=D, dtype=dtype)
    model, numbers = tmp_path / "model.onnx", np.dtype(dtype)
    onnx.save(model_of(shape, opset=opset), model)
    status, target, _ = run(tmp_path, model, "choose-pages(pages=1,rows=16)")
    assert status == 0
    written = onnx.load(target)
    onnx.checker.check_model(written, full_check=True)
    assert {o.version for f in written.functions for o in f.opset_import if o.domain == ""} == {opset}
    rng = np.random.default_rng(3)
    shapes = {"query": H, "key": G, "value": G}
    feed = {n: rng.standard_normal((1, 1, heads * D)).astype(numbers) for n, heads in shapes.items()}
    feed |= {n: rng.standard_normal((1, G, 50, D)).astype(numbers) for n in ("past_key", "past_value")}
    feed |= {"seqlens_k": np.array([40], np.int32), "total": np.array(41, np.int32)}
    expected = session(model, library=False).run(None, feed)[0]
    made = session(target, library=False)
    names = [o.name for o in made.get_outputs()]
    found = dict(zip(names, made.run(None, feed | {PAST: np.zeros((1, G, 0, 2, D), numbers)}), strict=True))
    np.testing.assert_allclose(found["output"], expected, rtol=1e-4, atol=1e-4 if dtype == "float32" else 2e-3)
    assert found[PRESENT].dtype == numbers
    keys = found["present_key"][0, :, :32].reshape(G, 2, 16, D)
    bounds = np.stack([keys.min(2), keys.max(2)], 2)
    np.testing.assert_array_equal(found[PRESENT][0, :, :2], bounds)
    np.testing.assert_array_equal(found[PRESENT][0, :, 2, 0], found["present_key"][0, :, 32:41].min(1))
