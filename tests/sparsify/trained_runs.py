# SPDX-License-Identifier: Apache-2.0
"""Runs of the trained models of ``models/trained`` on texts of theirs: right answers, and the share of pairs left out.

Texts have 2048 bytes, and 4096 with STOF_TEST_ALL=1.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort

import stof

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "models" / "trained"))
from retrieval_models import build_model
from retrieval_numpy import DRAW, right_answers
from retrieval_texts import Texts

ALL = os.environ.get("STOF_TEST_ALL", "0") == "1"
LENGTH, COUNT = (4096, 200) if ALL else (2048, 24)
NAMES = ("prompts", "documents")


def session(model: Path | onnx.ModelProto) -> ort.InferenceSession:
    options = ort.SessionOptions()
    stof.register(options)
    source = str(model) if isinstance(model, Path) else model.SerializeToString()
    return ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def texts_of(name: str, length: int, count: int, seed: int) -> list[Texts]:
    """One text a batch."""
    rng = np.random.default_rng(seed)
    return [DRAW[name](rng, 1, length) for _ in range(count)]


def feed_of(texts: Texts, name: str) -> dict[str, np.ndarray]:
    return {"input_ids": texts.ids} | ({} if name == "prompts" else {"attention_mask": np.ones_like(texts.ids)})


def evaluate(model: Path | onnx.ModelProto, name: str, texts: Sequence[Texts]) -> tuple[float, float]:
    """The share of right answers, and of the pairs that were skipped."""
    made = session(model)
    stof.reset_skip_counts()
    right = [right_answers(made.run(["logits"], feed_of(t, name))[0][0], t, name == "prompts") for t in texts]
    counts = stof.skip_counts()
    return float(np.concatenate(right).mean()), counts.share if counts.scored else 0.0


def check_accuracy(model: Path, changed: Path, name: str) -> None:
    """Whether a changed model answers as well as the optimized one, but for half a point."""
    texts = texts_of(name, LENGTH, COUNT, seed=5)
    dense = changed.with_name("dense.onnx")
    stof.optimize(model, dense, verify=False)
    exact, accuracy = evaluate(dense, name, texts)[0], evaluate(changed, name, texts)[0]
    assert exact >= 0.98
    assert accuracy >= exact - 0.005


def write_model(folder: Path, name: str) -> Path:
    path = folder / f"{name}.onnx"
    onnx.save(build_model(name), path)
    return path


def measured_options(folder: Path, name: str, texts: Sequence[Texts]) -> list[str]:
    """``--prompts`` or ``--inputs`` with texts."""
    if name == "prompts":
        np.save(folder / "texts.npy", np.concatenate([t.ids for t in texts]))
        return ["--prompts", str(folder / "texts.npy")]
    sets = folder / "sets"
    sets.mkdir(exist_ok=True)
    for i, t in enumerate(texts):
        np.savez(sets / f"{i}.npz", **feed_of(t, name))
    return ["--inputs", str(sets)]
