# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in folders and in the hub's cache become optimized folders, which give what PyTorch gives."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from sentence_transformers import CrossEncoder, SentenceTransformer
from text_models import draw_texts
from tool_folders import assert_close, run_program
from transformers import AutoTokenizer

import stof

TEXTS = draw_texts(20)
PAIRS = list(zip(draw_texts(20, seed=1), draw_texts(20, seed=2), strict=True))
_REVISION = "0123456789" * 4


def run_model(folder: Path, texts: list[str] | list[tuple[str, str]]) -> dict[str, np.ndarray]:
    """The outputs of a folder's model for texts, which its own tokenizer splits."""
    session = ort.InferenceSession(
        str(folder / "model.onnx"), stof.session_options(), providers=["CPUExecutionProvider"]
    )
    tokens = AutoTokenizer.from_pretrained(folder)(texts, padding=True, truncation=True, return_tensors="np")
    names = [node.name for node in session.get_outputs()]
    return dict(
        zip(names, session.run(None, {node.name: tokens[node.name] for node in session.get_inputs()}), strict=True)
    )


def logit(scores: np.ndarray) -> np.ndarray:
    wide = np.asarray(scores, np.float64)
    return np.log(wide / (1 - wide))


def test_folders(folders: Path, tmp_path: Path) -> None:
    """The pooling of sentence-transformers is in the graph."""
    stof.optimize_folder(folders / "minilm", tmp_path / "minilm", unpad="on")
    vectors = run_model(tmp_path / "minilm", TEXTS)["sentence_embedding"]
    wanted = SentenceTransformer(str(folders / "minilm"), device="cpu").encode(TEXTS)
    assert_close(vectors, wanted, "sentence_embedding")
    report = stof.optimize_folder(folders / "reranker", tmp_path / "reranker")
    assert report.folder == str(folders / "reranker")
    assert "for the task text-classification" in report.to_text()
    assert str(tmp_path / "reranker") not in str(report.reports["model.onnx"].model)
    scores = CrossEncoder(str(folders / "reranker"), device="cpu").predict(PAIRS)
    assert_close(run_model(tmp_path / "reranker", PAIRS)["logits"][:, 0], logit(scores), "logits")
    assert not list(tmp_path.glob(".*")), "temporary folders stay"


@pytest.fixture
def _cached(folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's cache holds ``owner/reranker``, as huggingface_hub writes it; programs see no network."""
    folder = tmp_path / "hf/hub/models--owner--reranker"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs/main").write_text(_REVISION)
    shutil.copytree(folders / "reranker", folder / "snapshots" / _REVISION)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.mark.usefixtures("_cached")
def test_ids_of_the_hub(folders: Path, tmp_path: Path) -> None:
    printed = run_program("python", "-m", "stof.cli", "owner/reranker", "-o", "fast", cwd=tmp_path)
    assert "3 attention sites replaced" in printed
    scores = CrossEncoder(str(folders / "reranker"), device="cpu").predict(PAIRS)
    assert_close(run_model(tmp_path / "fast", PAIRS)["logits"][:, 0], logit(scores), "logits")


@pytest.mark.usefixtures("_cached")
def test_a_model_that_cannot_be_reached_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(
        AssertionError, match=r"owner/none is no file or folder, and optimum-onnx .* cannot export it: .*Error"
    ):
        run_program("python", "-m", "stof.cli", "owner/none", "-o", "fast", cwd=tmp_path)
    assert not (tmp_path / "fast").exists()


def test_what_cannot_be_exported(folders: Path, tmp_path: Path) -> None:
    shutil.copytree(folders / "reranker", tmp_path / "unknown")
    (tmp_path / "unknown/config.json").write_text('{"model_type": "bert", "architectures": ["NoSuchModel"]}')
    with pytest.raises(stof.ArgumentError, match=r"ValueError: config.json names the architectures \['NoSuchModel'\]"):
        stof.optimize_folder(tmp_path / "unknown", tmp_path / "fast")
    assert not (tmp_path / "fast").exists()
