# SPDX-License-Identifier: Apache-2.0
"""Checkpoints without an ONNX model: which folders and names are taken for one, and errors; exports: tests/optimum."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

import pytest
from tests.command.test_cli import refused

import stof
from stof.api import checkpoints

FILES = {"config.json": json.dumps({"model_type": "bert"}), "model.safetensors": "", "vocab.txt": "a\n"}


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["config.json", "model.safetensors"], True),
        (["config.json", "pytorch_model.bin", "1_Pooling/config.json"], True),
        (["config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"], True),
        (["config.json", "model.safetensors", "onnx/model.onnx"], False),
        (["config.json", "tokenizer.json"], False),
        (["config.json", "parts/model.safetensors"], False),
        (["model.safetensors"], False),
        ([], False),
    ],
)
def test_what_is_a_checkpoint(names: list[str], expected: bool) -> None:
    assert checkpoints.is_checkpoint([Path(name) for name in names]) == expected


def test_what_is_an_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    assert checkpoints.is_hub_id("owner/name-v1.5")
    for text in (
        "name",
        "models/bert",
        "owner/name/part",
        "/owner/name",
        "../owner",
        "owner/model.onnx",
        "-o/name",
        "",
    ):
        assert not checkpoints.is_hub_id(text), text


@pytest.fixture
def _no_exporter(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(checkpoints, "version", version)


@pytest.mark.usefixtures("_no_exporter")
def test_without_an_exporter_the_error_says_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = write(tmp_path / "bert", FILES)
    out = tmp_path / "out"
    refused(
        [folder, "-o", out],
        1,
        "a checkpoint without an .onnx file; to export it: pip install optimum-onnx",
        tmp_path,
        capsys,
    )
    refused(
        ["owner/bert", "-o", out], 1, "owner/bert is no file or folder; to export a model of the hub", tmp_path, capsys
    )
    with pytest.raises(stof.ArgumentError, match="pip install optimum-onnx"):
        stof.optimize_folder(folder, dry_run=True)
    refused([folder, "-o", folder / "out"], 1, "lies in the folder that is read", tmp_path, capsys)
    refused(["owner/bert"], 1, "owner/bert does not exist", tmp_path, capsys)  # nothing is downloaded without -o


def test_an_export_that_fails_names_the_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exporter's process ends here for want of Optimum, as for any other error."""
    monkeypatch.setattr(checkpoints, "version", lambda _: "9.9")
    monkeypatch.setattr(
        checkpoints, "_SCRIPT", write(tmp_path, {"script.py": "raise ValueError('no such task\\nmore')"}) / "script.py"
    )
    folder = write(tmp_path / "bert", FILES)
    message = "optimum-onnx 9.9 cannot export it: ValueError: no such task; export it by optimum-cli export onnx"
    refused([folder, "-o", tmp_path / "out"], 1, message, tmp_path, capsys)


def test_reasons() -> None:
    assert (
        checkpoints._find_reason("Traceback:\n  x\nhub.errors.NotFoundError: gone\nTry again.\n")
        == "hub.errors.NotFoundError: gone"
    )
    assert checkpoints._find_reason("killed\n\n") == "killed"
    assert checkpoints._find_reason("") == ""
