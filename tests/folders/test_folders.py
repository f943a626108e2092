# SPDX-License-Identifier: Apache-2.0
"""A folder of models becomes another one: each model optimized or copied, each other file copied, or nothing written."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import numpy_helper
from tests.cached_attention.gqa_models import Shape, model_of
from tests.command.test_cli import ATTENTION, WINDOW, refused, snapshot, text

import stof
from stof import cli
from stof.errors import ArgumentError, ModelError
from stof.files import TemporaryFile
from stof.runtime.library import LIBRARY

PLAIN = "kt = Add (q, k)\nout = Add (kt, v)"
WIDTH = 200


def put(path: Path, body: str = WINDOW + ATTENTION, data: str = "", size: str = "S", seed: int = 0) -> Path:
    """Writes a model with a weight of 6 KB behind ``out``, in external data where that is named."""
    model = text(body, size)
    weight = np.random.default_rng(seed).standard_normal((8, WIDTH)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(weight, "weight"))
    model.graph.node.append(onnx.helper.make_node("MatMul", ["out", "weight"], ["projected"]))
    model.graph.output[0].name = "projected"
    path.parent.mkdir(parents=True, exist_ok=True)
    if data:
        onnx.save(model, path, save_as_external_data=True, location=data, size_threshold=0)
    else:
        onnx.save(model, path)
    return path


def write(folder: Path, **files: str) -> None:
    for name, content in files.items():
        path = folder / name.replace("__", "/").replace("_json", ".json")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def optimum(folder: Path) -> Path:
    """As Optimum exports an encoder and a decoder: side by side, with the files of the tokenizer."""
    put(folder / "encoder_model.onnx")
    put(folder / "decoder_model.onnx", PLAIN)
    write(folder, config_json="{}", tokenizer_json='{"a": 1}', vocab="words")
    return folder


def sentence_transformers(folder: Path) -> Path:
    """As sentence-transformers keeps them: the model in a folder of its own, modules beside it."""
    put(folder / "onnx" / "model.onnx", data="model.onnx_data")
    write(folder, modules_json="[]", **{"1_Pooling__config_json": "{}"}, README="text")
    return folder


def genai(folder: Path) -> Path:
    """As ONNX Runtime GenAI reads them: one file of weights for two models, and a configuration that names them."""
    put(folder / "model.onnx", data="model.onnx.data")
    put(folder / "embedding.onnx", PLAIN)
    embedding = onnx.load(folder / "embedding.onnx")
    shared = onnx.load(folder / "model.onnx", load_external_data=False)
    embedding.graph.initializer[0].CopyFrom(shared.graph.initializer[0])
    onnx.save(embedding, folder / "embedding.onnx")
    write(folder, genai_config_json='{"model": {"decoder": {"filename": "model.onnx"}}}')
    return folder


STYLES = [optimum, sentence_transformers, genai]
ATTENTION_IN = {"optimum": "encoder_model.onnx", "sentence_transformers": "onnx/model.onnx", "genai": "model.onnx"}
LIBRARY_IN = {style: str(Path(model).parent / LIBRARY) for style, model in ATTENTION_IN.items()}


def names(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}


def outputs(path: Path) -> np.ndarray:
    options = ort.SessionOptions()
    stof.register(options)
    rng = np.random.default_rng(1)
    feeds = {n: rng.standard_normal((1, 4, 33, 8), np.float32) for n in "qkv"}
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    found: np.ndarray = session.run(None, feeds)[0]
    return found


@pytest.mark.parametrize("make", STYLES)
def test_a_folder_becomes_another_one(make: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target, report = make(tmp_path / "in"), tmp_path / "out", tmp_path / "report.json"
    before = snapshot(source)
    assert cli.main([str(source), "-o", str(target), "--json", str(report), "--verify-budget", "1"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert snapshot(source) == before
    library = LIBRARY_IN[make.__name__]
    assert names(target) == names(source) | {library}
    assert (target / library).read_bytes() == stof.library_path().read_bytes()
    changed = {n for n in names(source) if (source / n).read_bytes() != (target / n).read_bytes()}
    optimized = ATTENTION_IN[make.__name__]
    assert changed == ({optimized, "genai_config.json"} if make is genai else {optimized})
    assert "StofAttention" in [n.op_type for n in onnx.load(target / optimized).graph.node]
    for name in (n for n in names(source) if n.endswith(".onnx")):
        np.testing.assert_allclose(outputs(target / name), outputs(source / name), atol=1e-4)
    lines = printed.out.splitlines()
    models = sorted(n for n in names(source) if n.endswith(".onnx"))
    assert [line.partition(":")[0] for line in lines[: len(models)]] == models
    assert f"{optimized}: 1 softmax, 1 attention sites replaced; verified" in lines
    assert sum(
        "nothing to do: the graph has no Softmax node" in line and line.endswith("; copied") for line in lines
    ) == (len(models) - 1)
    assert lines[-1] == f"written: {target}"
    data = json.loads(report.read_text())
    assert (data["folder"], data["output"], data["exit_status"]) == (str(source), str(target), 0)
    assert sorted(data["files"]) == models
    assert data["libraries"] == [library]
    assert data["files"][optimized]["output"] == str(target / optimized)
    assert data["files"][optimized]["sites"][0]["replaced"] is True
    assert sorted(data["others"]) == sorted(n for n in names(source) if not n.endswith((".onnx", "data")))
    assert {p.name for p in tmp_path.iterdir() if p.name != "own-cache"} == {"in", "out", "report.json"}


def test_external_data_that_no_result_needs_stays_behind(tmp_path: Path) -> None:
    """What analysis reads becomes part of the model, so that its file is not needed any more."""
    model = text(WINDOW + ATTENTION)
    model.graph.initializer.append(numpy_helper.from_array(np.float32([[0.5]]), "half"))
    model.graph.node.append(onnx.helper.make_node("Mul", ["out", "half"], ["scaled"]))
    model.graph.output[0].name = "scaled"
    (tmp_path / "in").mkdir()
    onnx.save(model, tmp_path / "in" / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=0)
    put(tmp_path / "in" / "n.onnx", PLAIN, data="n.data")
    report = stof.optimize_folder(tmp_path / "in", tmp_path / "out", stof.Options(verify=False))
    assert report.exit_code == 0
    assert names(tmp_path / "out") == {"m.onnx", "n.onnx", "n.data", LIBRARY}


def test_links_of_a_cache_become_files(tmp_path: Path) -> None:
    """The Hugging Face hub's cache is a folder of links into another one."""
    blobs = optimum(tmp_path / "blobs")
    source = tmp_path / "snapshot"
    (source / "sub").mkdir(parents=True)
    for path in blobs.iterdir():
        (source / path.name).symlink_to(path)
    (source / "more").symlink_to(sentence_transformers(tmp_path / "other"))
    stof.optimize_folder(source, tmp_path / "out", stof.Options(verify=False))
    found = list((tmp_path / "out").rglob("*"))
    assert not any(p.is_symlink() for p in found)
    models = names(blobs) | {f"more/{n}" for n in names(tmp_path / "other")}
    assert names(tmp_path / "out") == models | {LIBRARY, f"more/onnx/{LIBRARY}"}


def test_modes_are_kept_and_hidden_files_copied(tmp_path: Path) -> None:
    source = optimum(tmp_path / "in")
    (source / ".gitattributes").write_text("*.onnx filter=lfs")
    (source / "vocab").chmod(0o755)
    stof.optimize_folder(source, tmp_path / "out", stof.Options(verify=False))
    assert (tmp_path / "out" / "vocab").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "out" / ".gitattributes").read_text() == "*.onnx filter=lfs"


def test_an_empty_folder_is_taken_and_a_link_to_one(tmp_path: Path) -> None:
    source = optimum(tmp_path / "in")
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    report = stof.optimize_folder(source, tmp_path / "link", stof.Options(verify=False))
    assert report.output == str(tmp_path / "empty")
    assert names(tmp_path / "empty") == names(source) | {LIBRARY}
    assert (tmp_path / "link").is_symlink()


# ---- whole or not at all ----
def test_one_model_that_fails_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = optimum(tmp_path / "in")
    (source / "broken.onnx").write_bytes(b"no model")
    put(source / "sub" / "cut.onnx", data="cut.data")
    (source / "sub" / "cut.data").write_bytes(b"x")
    report = tmp_path / "report.json"
    before = snapshot(source)
    arguments = [str(source), "-o", str(tmp_path / "out"), "--no-verify", "--json", str(report)]
    assert cli.main(arguments) == 3
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert lines[0].startswith("broken.onnx: failed: ")
    assert lines[0].partition("failed: ")[2].startswith(f"{source}/broken.onnx is no ONNX model")
    assert lines[1].startswith("decoder_model.onnx: nothing to do: ")
    assert lines[2] == "encoder_model.onnx: 1 softmax, 1 attention sites replaced; not verified"
    assert "the file is truncated" in lines[3]
    assert lines[-1] == "2 of 4 models failed; nothing was written"
    assert printed.err == "stof-optimize: 2 of 4 models failed; nothing was written\n"
    assert snapshot(source) == before
    assert {p.name for p in tmp_path.iterdir() if p.name != "own-cache"} == {"in", "report.json"}
    data = json.loads(report.read_text())
    assert [f["output"] for f in data["files"].values()] == [None] * 4
    assert not any(f.get("copied") for f in data["files"].values())
    assert (data["output"], data["exit_status"], data["files"]["broken.onnx"]["exit_status"]) == (None, 3, 3)
    assert "is no ONNX model" in data["files"]["broken.onnx"]["error"]


def test_the_worst_status_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from stof.api import folder
    from stof.errors import VerifyError

    source = optimum(tmp_path / "in")
    failures = iter([VerifyError("differs"), ArgumentError("wrong")])

    def fail(*_: Any, **__: Any) -> None:
        raise next(failures)

    monkeypatch.setattr(folder, "run", fail)
    report = stof.optimize_folder(source, tmp_path / "out")
    assert report.exit_code == 2
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_copy_that_fails_leaves_nothing(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = optimum(tmp_path / "in")
    copy = TemporaryFile.copy

    def full(self: TemporaryFile, path: Path) -> None:
        if path.name == "vocab":
            raise error
        copy(self, path)

    monkeypatch.setattr(TemporaryFile, "copy", full)
    expected = ArgumentError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(expected, match="No space left" if expected is ArgumentError else None):
        stof.optimize_folder(source, tmp_path / "out", stof.Options(verify=False))
    assert {p.name for p in tmp_path.iterdir() if p.name != "own-cache"} == {"in"}


def test_a_folder_that_fills_meanwhile_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = optimum(tmp_path / "in")
    copy = TemporaryFile.copy

    def meanwhile(self: TemporaryFile, path: Path) -> None:
        write(tmp_path / "out", other="new")
        copy(self, path)

    monkeypatch.setattr(TemporaryFile, "copy", meanwhile)
    with pytest.raises(ArgumentError, match="cannot be written: Directory not empty"):
        stof.optimize_folder(source, tmp_path / "out", stof.Options(verify=False))
    assert names(tmp_path / "out") == {"other"}


# ---- what is refused ----
def test_folders_that_cannot_be_the_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = optimum(tmp_path / "in")
    (tmp_path / "link").symlink_to(source)
    write(tmp_path, full__file="x", file="x")
    (source / "empty").mkdir()
    for output, words in (
        (source, "is the folder that is read"),
        (tmp_path / "link", "is the folder that is read"),
        (source / "new", "lies in the folder that is read"),
        (tmp_path / "link" / "new", "lies in the folder that is read"),
        (source / "empty", "lies in the folder that is read"),
        (tmp_path, "is not empty"),
        (tmp_path / "full", "is not empty"),
        (tmp_path / "file", "is a file; of a folder it has to be a folder"),
        (tmp_path / "none" / "out", "does not exist"),
        (Path("/proc/out"), "cannot be written"),
    ):
        refused([source, "-o", output], 1, words, tmp_path, capsys)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--only", "0"], "--only is for one model"),
        (["--skip", "0"], "--skip is for one model"),
        (["--mask", "0=k <= q"], "--mask is for one model"),
        (["--plan", "plan.json"], "--plan is for one model"),
        (["--save-plan", "plan.json"], "--save-plan is for one model"),
        (["--explain", "nothing"], "--explain 'nothing' names no site of the models in"),
        (["--explain", "cache:0"], "--explain 'cache:0' names no cache of the models in"),
        (["--shape", "length=4"], "--shape 'length' is no symbolic dimension of the models' inputs; these are: S"),
        (["--json", "IN/config.json"], "is the input config.json"),
        (["--json", "OUT/report.json"], "of the report does not exist"),
    ],
)
def test_options_of_one_model(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = optimum(tmp_path / "in")
    given = [a.replace("IN", str(source)).replace("OUT", str(tmp_path / "out")) for a in arguments]
    refused([source, "-o", tmp_path / "out", *given], 1, words, tmp_path, capsys)


def test_folders_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = optimum(tmp_path / "in")
    refused([source], 1, "is a folder, expected an .onnx file; name a new folder with -o", tmp_path, capsys)
    (source / "round").symlink_to(source)
    refused([source, "-o", tmp_path / "out"], 1, "round is a link to a folder above it", tmp_path, capsys)
    (source / "round").unlink()
    (source / "gone").symlink_to(tmp_path / "nowhere")
    refused([source, "-o", tmp_path / "out"], 1, "gone is no regular file, or a broken link", tmp_path, capsys)
    (source / "gone").unlink()
    os.mkfifo(source / "pipe")
    refused([source, "-o", tmp_path / "out"], 1, "pipe is no regular file", tmp_path, capsys)
    (tmp_path / "empty").mkdir()
    refused([tmp_path / "empty", "-o", tmp_path / "out"], 1, "holds no .onnx file", tmp_path, capsys)
    with pytest.raises((ArgumentError, ModelError), match=r"is a folder, expected an \.onnx file"):
        stof.optimize(source)


@pytest.mark.parametrize("kind", ["one file", "several files", "genai"])
def test_a_folder_that_was_optimized_before_says_so(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Optimizing an optimized folder again said that it has no Softmax."""
    first, second, third = (tmp_path / n for n in ("first", "second", "third"))
    held = {"model.onnx": "1 StofAttention"}
    put(first / "model.onnx")
    if kind == "several files":
        put(first / "other.onnx", seed=1)
        put(first / "plain.onnx", PLAIN)
        held["other.onnx"] = "1 StofAttention"
    if kind == "genai":
        onnx.save(model_of(Shape()), first / "model.onnx")
        held["model.onnx"] = "1 StofCachedAttention"
        (first / "genai_config.json").write_text('{"model": {"decoder": {"filename": "model.onnx"}}}')
    stof.optimize_folder(first, second, stof.Options(verify=False))
    before = snapshot(second)
    assert cli.main([str(second), "-o", str(third), "--json", str(tmp_path / "report.json")]) == 0
    assert snapshot(second) == before
    lines = capsys.readouterr().out.splitlines()
    data = json.loads((tmp_path / "report.json").read_text())
    for name, operators in held.items():
        reason = f"the model was optimized before (it has {operators}); give the one that it was made from"
        assert f"{name}: nothing to do: {reason}; copied" in lines
        assert (second / name).read_bytes() == (third / name).read_bytes()
        count, op = operators.split()
        assert data["files"][name]["optimized_before"] == {op: int(count)}
    assert sum("no Softmax" in line for line in lines) == (kind == "several files")


# ---- reports alone ----
@pytest.mark.parametrize("option", ["--dry-run", "--explain"])
@pytest.mark.parametrize("has_output", [False, True])
def test_reports_alone_write_nothing(
    option: str, has_output: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = optimum(tmp_path / "in")
    before = snapshot(tmp_path)
    assert cli.main([str(source), option, *(["-o", str(tmp_path / "out")] if has_output else [])]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^encoder_model\.onnx: 1 softmax, 1 attention sites [a-z ]+$", out, re.MULTILINE)
    assert "dry run: no file was written" in out
    assert ("site 0  attention_0" in out) == (option == "--explain")
    assert snapshot(tmp_path) == before
    assert not (tmp_path / "out").exists()


def test_explain_takes_a_pattern(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A pattern may name a site of some models: the others are left out. Both places of the option are taken."""
    source = optimum(tmp_path / "in")
    for arguments in ([str(source), "--explain", "attention_*"], [str(source), "--explain", "0"]):
        assert cli.main(arguments) == 0
        out = capsys.readouterr().out
        assert "\nencoder_model.onnx:\nsite 0  attention_0\n" in out
        assert "\ndecoder_model.onnx:\n" not in out
    assert cli.main(["--explain", str(source)]) == 0
    assert "\nencoder_model.onnx:\nsite 0  attention_0\n" in capsys.readouterr().out


def test_explain_where_a_model_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The pattern may name a site of the model that failed: its error is reported, not the pattern."""
    source = optimum(tmp_path / "in")
    (source / "broken.onnx").write_bytes(b"none")
    assert cli.main([str(source), "--explain", "nothing"]) == 3
    captured = capsys.readouterr()
    assert "broken.onnx: failed: " in captured.out
    assert "names no site" not in captured.err


def test_shapes_are_for_the_models_that_have_them(tmp_path: Path) -> None:
    source = tmp_path / "in"
    put(source / "a.onnx")
    put(source / "b.onnx", size="length")
    options = stof.Options(dry_run=True, shapes={"S": (64, 64), "length": (300, 300)})
    report = stof.optimize_folder(source, options=options)
    assert report.exit_code == 0
    assert [r.sites[0].length for r in report.reports.values()] == [64, 300]
