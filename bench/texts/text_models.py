# SPDX-License-Identifier: Apache-2.0
"""Models that embed and rerank texts, of random weights, and the files that their candidates run."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx

from bench.core.candidate import require
from bench.core.clone import load_module
from bench.core.point import describe_failure
from stof.options import Options
from stof.pipeline import optimize

PRECISIONS = ("fp32", "int8")  # on a CPU
DIMENSIONS = ("batch", "sequence")  # names of the sizes of inputs
EXPORTED, TRANSFORMERS, PADDED, UNPADDED = "exported", "transformers", "padded", "unpadded"
KINDS = (EXPORTED, TRANSFORMERS, PADDED, UNPADDED)


@dataclass(frozen=True)
class TextModel:
    """A stored graph with its pooling.

    Attributes:
        name: in results and options.
        heads: of an attention.
        hidden: the width of a token.
        vocabulary: how many tokens there are.
        lengths: the distributions of lengths that it is timed with.
        inputs: of the graph.
    """

    name: str
    heads: int
    hidden: int
    vocabulary: int
    lengths: tuple[str, ...] = ("padded-256", "longest")
    inputs: tuple[str, ...] = ("input_ids", "attention_mask", "token_type_ids")

    @property
    def graph(self) -> str:
        """Its name under models/graphs."""
        return f"texts/{self.name}.torchscript.eager"


MODELS = {
    model.name: model
    for model in (
        TextModel("minilm-l6", 12, 384, 30522),
        TextModel("e5-small", 12, 384, 250037),
        TextModel("reranker", 12, 384, 30522, ("pairs",)),
        TextModel("bert-base", 12, 768, 30522),
        TextModel("modernbert-base", 12, 768, 50368, inputs=("input_ids", "attention_mask")),
        TextModel("tiny", 4, 64, 96, ("padded-256", "longest", "pairs")),
    )
}
DEFAULT_MODELS = ("minilm-l6", "reranker")  # the others take longer than ten minutes


@dataclass
class TextFiles:
    """The files of a model in one precision.

    Attributes:
        fp32: the exported model before it is quantized.
        paths: by kind.
        missing: kinds that could not be made, and why.
        facts: what was done to the model, for the record.
    """

    fp32: Path
    paths: dict[str, Path] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)


def write_files(model: TextModel, precision: str, folder: Path, kinds: Collection[str]) -> TextFiles:
    """Writes the exported model and the kinds of it that are asked for.

    int8 is :func:`onnxruntime.quantization.quantize_dynamic` with its defaults. It quantizes what the transformers optimizer
    gives, and stof takes what it gives: each in the order of its documentation.
    """
    fp32 = write_fp32(model, folder)
    files = TextFiles(fp32)
    exported = fp32
    if precision == "int8":
        exported = folder / "int8.onnx"
        _quantize(fp32, exported)
    files.paths[EXPORTED] = exported
    makers: dict[str, Callable[[Path], dict[str, Any]]] = {
        TRANSFORMERS: lambda path: _optimize_by_transformers(model, fp32, path, precision == "int8"),
        PADDED: lambda path: _optimize(exported, path, unpad="off"),
        UNPADDED: lambda path: _optimize(exported, path, unpad="auto"),
    }
    make_kinds(files, makers, kinds, folder / precision)
    return files


def write_fp32(model: TextModel, folder: Path) -> Path:
    """Writes the exported model with random weights, where it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "fp32.onnx"
    if not path.is_file():
        load_module("models/build.py").write(model.graph, path)
    return path


def make_kinds(
    files: TextFiles, makers: Mapping[str, Callable[[Path], dict[str, Any]]], kinds: Collection[str], stem: Path
) -> None:
    """Makes the kinds that are asked for, in the order of their makers; of those that cannot be made, the reason is kept."""
    for kind, make in makers.items():
        if kind not in kinds:
            continue
        path = stem.with_name(f"{stem.name}.{kind}.onnx")
        try:
            files.facts[kind] = make(path)
        except Exception as failure:  # the tools raise types of their own
            files.missing[kind] = describe_failure(failure)
        else:
            files.paths[kind] = path


def _quantize(path: Path, output: Path, is_optimized: bool = False) -> None:
    """Dynamic int8 with the defaults; it asks for the type of tensors that ONNX Runtime's own operators give."""
    quantization = require("onnxruntime.quantization")
    types = {"DefaultTensorType": onnx.TensorProto.FLOAT} if is_optimized else {}
    with silence():
        quantization.quantize_dynamic(str(path), str(output), extra_options=types)


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Drops the advice of ONNX Runtime's tools, which they log or print."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(before)


def _optimize_by_transformers(model: TextModel, path: Path, output: Path, is_quantized: bool) -> dict[str, Any]:
    """onnxruntime.transformers.optimizer; what it fused.

    Its basic optimizations of a session need torch, for no reason but a version: they are made here.
    """
    optimizer = require("onnxruntime.transformers.optimizer")
    basic = write_basic(path, output.with_suffix(".basic.onnx"))
    with silence():
        made = optimizer.optimize_model(
            str(basic), model_type="bert", num_heads=model.heads, hidden_size=model.hidden, opt_level=0
        )
    fused = count_fused(made)
    if not is_quantized:
        made.save_model_to_file(str(output))
    else:
        made.save_model_to_file(str(basic))
        _quantize(basic, output, is_optimized=True)
    basic.unlink()
    return {"fused": fused}


def write_basic(path: Path, output: Path) -> Path:
    """Writes the model after the basic optimizations of a session on the CPU."""
    ort = require("onnxruntime")
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(output)
    options.log_severity_level = 3
    ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return output


def count_fused(made: Any) -> dict[str, int]:
    """What the transformers optimizer fused, by operator."""
    return {kind: int(count) for kind, count in made.get_fused_operator_statistics().items() if count}


def _optimize(path: Path, output: Path, unpad: str) -> dict[str, Any]:
    return optimize_texts(path, output, Options(unpad=unpad, verify=False))


def optimize_texts(path: Path, output: Path, options: Options) -> dict[str, Any]:
    """stof-optimize, whose result is checked with the batches that are timed; what became of the padding."""
    report = optimize(path, output, options)
    rows = report.rows("unpadding")
    facts: dict[str, Any] = {"operators": _count_operators(output)}
    if options.unpad != "off":
        facts["unpadded_nodes"] = sum(row.nodes for row in rows)
        facts["unpadded_attentions"] = sum(row.attentions for row in rows)
        if kept := [row.reason for row in rows if not row.replaced]:
            facts["padded_because"] = kept
    return facts


def _count_operators(path: Path) -> dict[str, int]:
    model = onnx.load(str(path), load_external_data=False)
    found: dict[str, int] = {}
    for node in model.graph.node:
        if node.domain == "stof":
            found[node.op_type] = found.get(node.op_type, 0) + 1
    return found
