# SPDX-License-Identifier: Apache-2.0
"""Embeds, reranks and tags texts by sentence-transformers and Optimum, before and after stof-optimize.

``PYTHONPATH=optimizer python tests/texts/check_texts.py``: a line for each check, and status 1 when one fails. Models have random
weights. The blocks of docs/guide/texts.md run as they are printed, and what they give is compared with PyTorch. Then each export
is optimized with ``--unpad auto`` and ``on``, as a folder and as a file, and compared with PyTorch and with the exported model.
Runs in an environment with tests/texts/requirements.txt.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shlex
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import torch
from optimum.exporters.onnx import main_export
from optimum.onnxruntime import (
    ORTModelForCustomTasks,
    ORTModelForFeatureExtraction,
    ORTModelForSequenceClassification,
    ORTModelForTokenClassification,
)
from sentence_transformers import CrossEncoder, SentenceTransformer
from text_models import LAYERS, draw_texts, make_embedder, make_reranker, make_tagger
from transformers import AutoTokenizer, BertForTokenClassification

import stof

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/guide/texts.md"
POOLINGS = ("mean", "cls", "lasttoken", "max", "mean_sqrt_len_tokens", "weightedmean")
_NOTE = re.compile(r"^<!-- not run: [^\n]*tests/texts/check_texts\.py runs it -->\n```(\w*)\n(.*?)^```$", re.M | re.S)
_TOLERANCE = 2e-5
TEXTS = draw_texts(40)
PAIRS = list(zip(draw_texts(40, seed=1), draw_texts(40, seed=2), strict=True))


# ---- runs ----
def run(*command: str, **environment: str) -> str:
    """What a command prints.

    Raises:
        RuntimeError: with it, where the command fails.
    """
    # Optimum's command and stof-optimize are those of this environment and of this folder.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    variables = {**os.environ, "PYTHONPATH": str(ROOT / "optimizer"), "PATH": path, **environment}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stdout}{done.stderr}")
    return done.stdout


def optimize(*arguments: object) -> str:
    """Runs stof-optimize, and gives its report."""
    return run(sys.executable, "-m", "stof.cli", *map(str, arguments))


def session_options(with_library: bool = True) -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    if with_library:
        stof.register(options)
    return options


def settings(with_library: bool = True, **others: Any) -> dict[str, Any]:
    """What sentence-transformers hands to Optimum."""
    return {"provider": "CPUExecutionProvider", "session_options": session_options(with_library), **others}


def count_unpadded(model: Path) -> int:
    """How many attentions of a model run on real tokens alone.

    Raises:
        AssertionError: where an attention was not replaced.
    """
    nodes = [n for n in onnx.load(str(model), load_external_data=False).graph.node if n.op_type == "StofAttention"]
    assert len(nodes) == LAYERS, f"{len(nodes)} of {LAYERS} attentions of {model} were replaced"
    operands = [next(a.s.decode() for a in n.attribute if a.name == "operands").split() for n in nodes]
    return sum("cumulative_sequence_length" in roles for roles in operands)


def check_close(found: Any, wanted: Any, what: str) -> None:
    """Fails where arrays differ by more than rounding of fp32."""
    one, other = np.asarray(found), np.asarray(wanted)
    assert one.shape == other.shape, f"{what}: {one.shape}, expected {other.shape}"
    worst = float(np.abs(one - other).max())
    assert worst <= _TOLERANCE * max(1.0, float(np.abs(other).max())), f"{what}: they differ by {worst:.1e}"


def normalize(vectors: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(vectors, dim=1)


# ---- the page ----
def check_page(folder: Path) -> None:
    """The blocks of the page that need these libraries run in order, and give what PyTorch gives."""
    make_embedder(folder / "minilm", "mean")
    make_reranker(folder / "reranker")
    names: dict[str, Any] = {"texts": TEXTS, "pairs": PAIRS}
    blocks = _NOTE.findall(PAGE.read_text())
    with contextlib.chdir(folder):
        for language, text in blocks:
            if language == "python":
                exec(compile(text, str(PAGE), "exec"), names)
            else:
                for line in text.splitlines():
                    name, *arguments = shlex.split(line)
                    optimize(*arguments) if name == "stof-optimize" else run(name, *arguments)
        assert len(blocks) == 12, f"{len(blocks)} blocks of the page ran"
        wanted = SentenceTransformer("minilm", device="cpu").encode(TEXTS)
        scores = CrossEncoder("reranker", device="cpu").predict(PAIRS)
    check_close(names["embeddings"], wanted, "sentence-transformers")
    check_close(normalize(names["mean"]), wanted, "ORTModelForFeatureExtraction")
    check_close(names["vectors"], wanted, "ORTModelForCustomTasks")
    check_close(names["scores"], scores, "CrossEncoder")
    check_close(torch.sigmoid(names["logits"][:, 0]), scores, "ORTModelForSequenceClassification")
    for name, file in (
        ("fast", "onnx/model.onnx"),
        ("fast-reranker", "onnx/model.onnx"),
        ("fast-classifier", "model.onnx"),
        ("fast-features", "model.onnx"),
        ("fast-pooled", "model.onnx"),
    ):
        assert count_unpadded(folder / name / file) == LAYERS, f"{name} computes padding"


# ---- sentence-transformers ----
def check_sentence_transformers(folder: Path) -> None:
    """Each pooling of its own export, which has a row for each token; as a folder and as a file, in batches of several sizes."""
    for pooling in POOLINGS:
        source, exported = folder / pooling, folder / f"{pooling}-exported"
        make_embedder(source, pooling)
        model = SentenceTransformer(str(source), backend="onnx", model_kwargs=settings(False))
        model.save_pretrained(str(exported))
        wanted = SentenceTransformer(str(source), device="cpu").encode(TEXTS)
        check_close(model.encode(TEXTS), wanted, f"{pooling}: the exported model")
        assert np.linalg.matrix_rank(wanted) > 8, "the embeddings are all alike, which says nothing"
        for unpad in ("auto", "on"):
            result = folder / f"{pooling}-{unpad}"
            report = optimize(exported, "-o", result, "--unpad", unpad)
            assert ("ROWS OF PADDING BECOME 0 in last_hidden_state" in report) == (unpad == "on")
            assert count_unpadded(result / "onnx/model.onnx") == (LAYERS if unpad == "on" else 0)
            for size in (1, 7, 40):
                fast = SentenceTransformer(str(result), backend="onnx", model_kwargs=settings())
                check_close(fast.encode(TEXTS, batch_size=size), wanted, f"{pooling}, --unpad {unpad}, {size} texts")
    optimize(exported / "onnx/model.onnx", "--unpad", "on")
    for options in (settings(file_name="onnx/model.stof.onnx"), settings(False, file_name="onnx/model.stof.onnx")):
        fast = SentenceTransformer(str(exported), backend="onnx", model_kwargs=options)
        assert "StofAttention" in _operators(fast), "another file was loaded"
        check_close(fast.encode(TEXTS), wanted, "the file beside the original, with the library and without")


def _operators(model: SentenceTransformer) -> set[str]:
    path = model[0].auto_model.path
    return {node.op_type for node in onnx.load(str(path), load_external_data=False).graph.node}


def check_cross_encoder(folder: Path) -> None:
    """A reranker has scores alone: its padding is left out without an option."""
    source, exported = folder / "reranker", folder / "reranker-exported"
    make_reranker(source)
    model = CrossEncoder(str(source), backend="onnx", model_kwargs=settings(False))
    model.save_pretrained(str(exported))
    wanted = CrossEncoder(str(source), device="cpu").predict(PAIRS)
    assert np.ptp(wanted) > 0.05, "the scores are all alike, which says nothing"
    check_close(model.predict(PAIRS), wanted, "the exported model")
    for unpad in ("auto", "on"):
        result = folder / f"reranker-{unpad}"
        assert "ROWS OF PADDING" not in optimize(exported, "-o", result, "--unpad", unpad)
        assert count_unpadded(result / "onnx/model.onnx") == LAYERS
        for size in (1, 7, 40):
            fast = CrossEncoder(str(result), backend="onnx", model_kwargs=settings())
            check_close(fast.predict(PAIRS, batch_size=size), wanted, f"--unpad {unpad}, {size} pairs")
            ranks = fast.rank(PAIRS[0][0], [document for _, document in PAIRS[:9]])
            assert sorted(rank["corpus_id"] for rank in ranks) == list(range(9))


# ---- Optimum ----
def export_by_optimum(source: Path, task: str, library: str) -> Path:
    exported = source.with_name(f"{source.name}-{library}")
    main_export(str(source), exported, task=task, library_name=library, do_validation=False)
    return exported


def optimized(exported: Path) -> Iterator[tuple[str, Path]]:
    """The folder by each value of ``--unpad``; that of ``auto`` leaves padding in where an output has a row for each token."""
    outputs = onnx.load(str(exported / "model.onnx"), load_external_data=False).graph.output
    has_rows = any(len(output.type.tensor_type.shape.dim) == 3 for output in outputs)
    for unpad in ("auto", "on"):
        result = exported.with_name(f"{exported.name}-{unpad}")
        optimize(exported, "-o", result, "--unpad", unpad)
        report = optimize(exported, "--unpad", unpad, "--explain", "unpad:*")
        assert ("has a row for every position" in report) == (has_rows and unpad == "auto"), report
        assert count_unpadded(result / "model.onnx") == (0 if has_rows and unpad == "auto" else LAYERS), unpad
        yield unpad, result


def check_optimum_pooled(folder: Path) -> None:
    """Poolings in the graph: it has rows of tokens as an output, too, so ``on`` leaves padding out."""
    for pooling in ("mean", "cls", "lasttoken"):
        source = folder / pooling
        make_embedder(source, pooling)
        exported = export_by_optimum(source, "feature-extraction", "sentence_transformers")
        wanted = SentenceTransformer(str(source), device="cpu").encode(TEXTS)
        for side in ("right", "left") if pooling != "lasttoken" else ("right",):
            inputs = _tokenize(exported, TEXTS, side)
            plain = ORTModelForCustomTasks.from_pretrained(exported, session_options=session_options(False))
            original = plain(**inputs)["sentence_embedding"]
            if side == "right":  # BERT's positions count padding on the left
                check_close(original, wanted, f"{pooling}: the exported model")
            for unpad, result in optimized(exported) if side == "right" else _written(exported):
                fast = ORTModelForCustomTasks.from_pretrained(result, session_options=session_options())
                check_close(fast(**inputs)["sentence_embedding"], original, f"{pooling}, --unpad {unpad}, {side}")
    _check_that_it_fails(lambda: ORTModelForFeatureExtraction.from_pretrained(exported)(**inputs))
    _check_that_it_fails(lambda: SentenceTransformer(str(exported), backend="onnx").encode(TEXTS))


def _check_that_it_fails(call: Callable[[], object]) -> None:
    """Fails unless a class looks for an output that the export does not have: the page says so, for the original."""
    message = ""
    try:
        call()
    except KeyError as error:
        message = str(error)
    assert "last_hidden_state" in message, "a class runs the file that the page says it cannot"


def _written(exported: Path) -> Iterator[tuple[str, Path]]:
    return ((unpad, exported.with_name(f"{exported.name}-{unpad}")) for unpad in ("auto", "on"))


def _tokenize(folder: Path, texts: list[Any], side: str = "right") -> dict[str, torch.Tensor]:
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side=side)
    return dict(tokenizer(texts, padding=True, truncation=True, return_tensors="pt"))


def check_optimum_classes(folder: Path) -> None:
    """Rows of tokens, scores and tags: equal at real tokens, and 0 at padding with ``on``."""
    make_embedder(folder / "texts", "mean")
    make_reranker(folder / "reranker")
    make_tagger(folder / "tagger")
    for name, task, kind, key, given in (
        ("texts", "feature-extraction", ORTModelForFeatureExtraction, "last_hidden_state", TEXTS),
        ("reranker", "text-classification", ORTModelForSequenceClassification, "logits", PAIRS),
        ("tagger", "token-classification", ORTModelForTokenClassification, "logits", TEXTS),
    ):
        exported = export_by_optimum(folder / name, task, "transformers")
        inputs = _tokenize(exported, given)
        is_real = inputs["attention_mask"].bool().numpy()
        wanted = _by_pytorch(folder / name, task, inputs)
        plain = kind.from_pretrained(exported, session_options=session_options(False))(**inputs)[key].numpy()
        has_rows = plain.ndim == 3
        check_close(
            *((plain[is_real], wanted[is_real]) if has_rows else (plain, wanted)), f"{name}: the exported model"
        )
        for unpad, result in optimized(exported):
            found = kind.from_pretrained(result, session_options=session_options())(**inputs)[key].numpy()
            label = f"{name}, --unpad {unpad}"
            check_close(*((found[is_real], plain[is_real]) if has_rows else (found, plain)), label)
            if has_rows:
                assert found[~is_real].any() == (unpad == "auto"), f"{label}: rows of padding"


def _by_pytorch(source: Path, task: str, inputs: dict[str, torch.Tensor]) -> np.ndarray:
    with torch.inference_mode():
        if task == "feature-extraction":
            return np.asarray(SentenceTransformer(str(source), device="cpu")[0].auto_model(**inputs).last_hidden_state)
        if task == "text-classification":
            return np.asarray(CrossEncoder(str(source), device="cpu").model(**inputs).logits)
        return np.asarray(BertForTokenClassification.from_pretrained(source)(**inputs).logits)


CHECKS: dict[str, Callable[[Path], None]] = {
    "blocks of the page": check_page,
    "sentence-transformers: embeddings": check_sentence_transformers,
    "sentence-transformers: scores": check_cross_encoder,
    "Optimum: pooling in the graph": check_optimum_pooled,
    "Optimum: rows, scores, tags": check_optimum_classes,
}


def main() -> int:
    warnings.simplefilter("ignore")  # of tracing
    logging.disable(logging.WARNING)
    failed = 0
    for name, check in CHECKS.items():
        with tempfile.TemporaryDirectory() as folder:
            try:
                check(Path(folder))
            except (AssertionError, RuntimeError) as error:
                print(f"{name}: {error}", flush=True)
                failed += 1
            else:
                print(f"{name}: the same", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
