# SPDX-License-Identifier: Apache-2.0
"""fastembed: vectors and scores of optimized models are those of PyTorch; its sessions run stof's operators, not their bodies."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastembed import TextEmbedding
from fastembed.common.model_description import ModelSource, PoolingType
from fastembed.rerank.cross_encoder import TextCrossEncoder
from guide_pages import read_blocks
from sentence_transformers import CrossEncoder, SentenceTransformer
from text_models import WIDTH, draw_texts
from tool_folders import ROOT, assert_close, damage, run_program

from stof.integrations.fastembed import add_custom_model, add_custom_reranker

TEXTS = draw_texts(40)
DOCUMENTS = draw_texts(12, seed=3)
QUERY = "kalo miten"
SOURCE: Any = {"sources": ModelSource(hf="none/none"), "model_file": "model.onnx"}
ENCODER: Any = {"pooling": PoolingType.MEAN, "normalization": True, "dim": WIDTH, **SOURCE}


def embed(model: str, folder: Path, **options: Any) -> np.ndarray:
    return np.array(list(TextEmbedding(model, specific_model_path=str(folder)).embed(TEXTS, **options)))


def rerank(model: str, folder: Path, **options: Any) -> np.ndarray:
    encoder = TextCrossEncoder(model, specific_model_path=str(folder))
    return np.array(list(encoder.rerank(QUERY, DOCUMENTS, **options)))


def scores_of_pytorch(folders: Path) -> np.ndarray:
    model = CrossEncoder(str(folders / "reranker"), device="cpu")
    scores = np.asarray(model.predict([(QUERY, document) for document in DOCUMENTS]), np.float64)
    return np.log(scores / (1 - scores))  # fastembed gives logits


def test_page(folders: Path) -> None:
    """The blocks of the page run in order, and give what PyTorch gives."""
    names: dict[str, Any] = {"texts": TEXTS, "documents": DOCUMENTS}
    blocks = [block for block in read_blocks(ROOT / "docs/guide/fastembed.md") if block.language == "python"]
    assert len(blocks) == 2
    with contextlib.chdir(folders):
        for block in blocks:
            exec(compile(block.text, block.place, "exec"), names)
    assert_close(names["vectors"], SentenceTransformer(str(folders / "minilm"), device="cpu").encode(TEXTS), "vectors")
    assert_close(names["scores"], scores_of_pytorch(folders), "scores")


@pytest.mark.parametrize("options", [{"batch_size": 1}, {"batch_size": 7}, {"batch_size": 8, "parallel": 2}])
def test_vectors_are_those_of_pytorch(folders: Path, options: dict[str, int]) -> None:
    name = f"vectors-{options}"
    add_custom_model(name, **ENCODER)
    wanted = SentenceTransformer(str(folders / "minilm"), device="cpu").encode(TEXTS)
    assert_close(embed(name, folders / "fast-features", **options), wanted, name)


def test_scores_of_several_processes(folders: Path) -> None:
    add_custom_reranker("scores", **SOURCE)
    found = rerank("scores", folders / "fast-classifier", batch_size=4, parallel=2)
    assert_close(found, scores_of_pytorch(folders), "scores")


@pytest.mark.parametrize("parallel", [None, 2])
def test_sessions_run_the_operators(folders: Path, tmp_path: Path, parallel: int | None) -> None:
    """The operators of a damaged file give other vectors. Its bodies, which run without the library, give the right ones."""
    damaged = damage(folders / "fast-features", tmp_path / "damaged")
    add_custom_model(f"damaged-{parallel}", **ENCODER)
    TextEmbedding.add_custom_model(f"bodies-{parallel}", **ENCODER)
    wanted = SentenceTransformer(str(folders / "minilm"), device="cpu").encode(TEXTS)
    assert_close(embed(f"bodies-{parallel}", damaged, batch_size=8, parallel=parallel), wanted, "bodies")
    assert np.abs(embed(f"damaged-{parallel}", damaged, batch_size=8, parallel=parallel) - wanted).max() > 1e-2


def test_reranker_sessions_run_the_operators(folders: Path, tmp_path: Path) -> None:
    damaged = damage(folders / "fast-classifier", tmp_path / "damaged")
    add_custom_reranker("damaged-reranker", **SOURCE)
    assert np.abs(rerank("damaged-reranker", damaged) - scores_of_pytorch(folders)).max() > 1e-2


def test_a_name_that_is_taken_is_refused() -> None:
    add_custom_model("taken", **ENCODER)
    add_custom_reranker("taken", **SOURCE)
    with pytest.raises(ValueError, match="fastembed has a model named 'Taken'"):
        add_custom_model("Taken", **ENCODER)
    with pytest.raises(ValueError, match="fastembed has a model named 'taken'"):
        add_custom_reranker("taken", **SOURCE)
    with pytest.raises(ValueError, match="already registered"):
        TextEmbedding.add_custom_model("taken", **ENCODER)


def test_example(folders: Path, tmp_path: Path) -> None:
    program = ROOT / "examples/fastembed_texts.py"
    printed = run_program("python", program, folders / "features", tmp_path / "fast", "--processes", 2)
    assert "32 vectors of 64 elements" in printed
