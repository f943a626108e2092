# SPDX-License-Identifier: Apache-2.0
"""Checkpoints without an ONNX model: which folders and names are taken for one, and errors; exports: tests/optimum."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path, PureWindowsPath

import pytest
from tests.command.test_cli import refused

import stof
from stof.api import checkpoints
from stof.files import is_hub_id

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
    assert is_hub_id(Path("owner/name-v1.5"))
    assert is_hub_id(PureWindowsPath("owner/name-v1.5"))  # whose text has a backslash
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
        assert not is_hub_id(Path(text)), text


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
    refused(
        ["owner/bert"],
        1,
        "; if it is a model of the hub, name a new folder: stof-optimize owner/bert -o FOLDER",
        tmp_path,
        capsys,
    )  # nothing is downloaded without -o


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


@pytest.mark.parametrize("place", ["modules.json", "part/modules.json", "Modules.JSON"])
def test_code_of_a_checkpoint_never_runs(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """sentence-transformers before 6 imports classes of a local folder: no exporter begins."""
    monkeypatch.setattr(checkpoints, "version", lambda _: "9.9")
    script = write(tmp_path, {"script.py": "raise ValueError('it began')"}) / "script.py"
    monkeypatch.setattr(checkpoints, "_SCRIPT", script)

    def refused_for(modules: object, message: str) -> None:
        folder = write(tmp_path / "texts", {**FILES, place: json.dumps(modules), "evil.py": "class Evil: ..."})
        refused([folder, "-o", tmp_path / "out"], 1, message, tmp_path, capsys)

    own = {"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"}
    for kind in ("evil.Evil", "sentence_transformers", "sentence_transformers_evil.Evil"):
        message = f"names the module class {kind!r} of the checkpoint itself, which is not run"
        refused_for([own, {**own, "type": kind}], message)
    refused_for([own, {"path": ""}], "has a module without a type")
    refused_for({"0": own}, "holds no list")
    refused_for([own], "it began")


@pytest.mark.parametrize("kind", ["evil.Evil", "sentence_transformers.models.Pooling"])
def test_code_of_a_model_on_the_hub_never_runs(kind: str, tmp_path: Path) -> None:
    """The script asks for the file before Optimum sees the name; modules stand in for the hub's client and Optimum."""
    listed = write(tmp_path, {"hub.json": json.dumps([{"type": kind}])}) / "hub.json"
    write(
        tmp_path / "stand_ins",
        {
            "huggingface_hub/__init__.py": f"def hf_hub_download(model, name): return {str(listed)!r}",
            "huggingface_hub/errors.py": "class EntryNotFoundError(Exception): ...",
            "optimum/exporters/onnx.py": "main_export = None",
            "optimum/exporters/tasks.py": """
class TasksManager:
    @staticmethod
    def infer_library_from_model(model):
        raise ValueError("it began")
""",
        },
    )
    done = subprocess.run(
        [sys.executable, "-P", str(checkpoints._SCRIPT), "owner/name", str(tmp_path / "out")],
        env={**os.environ, "PYTHONPATH": str(tmp_path / "stand_ins")},
        cwd=tmp_path,
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode
    message = "ValueError: owner/name/modules.json names the module class 'evil.Evil' of the checkpoint itself"
    assert checkpoints._find_reason(done.stderr).startswith(message if kind == "evil.Evil" else "ValueError: it began")


def test_what_an_exporter_prints_may_be_any_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exporter's Python writes UTF-8; its libraries may write anything."""
    monkeypatch.setattr(checkpoints, "version", lambda _: "9.9")
    monkeypatch.setenv("PYTHONIOENCODING", "latin-1")
    script = "import os\nos.write(2, b'\\xff\\n')\nraise ValueError('Größe')"
    (tmp_path / "script.py").write_text(script, encoding="utf-8")
    monkeypatch.setattr(checkpoints, "_SCRIPT", tmp_path / "script.py")
    folder = write(tmp_path / "bert", FILES)
    refused([folder, "-o", tmp_path / "out"], 1, "cannot export it: ValueError: Größe", tmp_path, capsys)


def test_reasons() -> None:
    assert (
        checkpoints._find_reason("Traceback:\n  x\nhub.errors.NotFoundError: gone\nTry again.\n")
        == "hub.errors.NotFoundError: gone"
    )
    assert checkpoints._find_reason("killed\n\n") == "killed"
    assert checkpoints._find_reason("") == ""
