# SPDX-License-Identifier: Apache-2.0
"""The fp16 files of a model for ONNX Runtime's CUDA provider: as exported, after its tools, and after stof-optimize."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from bench.core.candidate import Unavailable, require
from bench.texts.text_models import (
    DIMENSIONS,
    EXPORTED,
    PADDED,
    TRANSFORMERS,
    UNPADDED,
    TextFiles,
    TextModel,
    count_fused,
    make_kinds,
    optimize_texts,
    silence,
    write_basic,
    write_fp32,
)
from stof.options import Options

CUDA_PRECISIONS = ("float16",)
PACKED, CAPACITY = "packed", "capacity"
CUDA_KINDS = (EXPORTED, TRANSFORMERS, PACKED, PADDED, UNPADDED, CAPACITY)
_PACKED_OPERATORS = ("PackedAttention", "PackedMultiHeadAttention")
_CAPACITY_STEP = 128  # tokens

Shapes = Mapping[str, tuple[int, int]]


def write_cuda_files(
    model: TextModel, folder: Path, kinds: Collection[str], shapes: Shapes, capability: int = 0
) -> TextFiles:
    """Writes the exported model in fp16 and the kinds of it that are asked for, but for that of a captured graph.

    The transformers optimizer takes the fp32 model and converts what it made, as its documentation says.

    Args:
        model: what is written.
        folder: for the files.
        kinds: which.
        shapes: ranges of the sizes that are timed, by name.
        capability: of the CUDA device; 0: of the one at hand.
    """
    fp32 = write_fp32(model, folder)
    files = TextFiles(fp32, {EXPORTED: folder / "float16.onnx"})
    exported = files.paths[EXPORTED]
    _convert(fp32, exported)
    makers: dict[str, Callable[[Path], dict[str, Any]]] = {
        TRANSFORMERS: lambda path: _optimize_by_transformers(model, fp32, path),
        PACKED: lambda path: _pack(files.paths[TRANSFORMERS], path),
        PADDED: lambda path: optimize_texts(exported, path, _options("off", shapes, capability)),
        UNPADDED: lambda path: optimize_texts(exported, path, _options("on", shapes, capability)),
    }
    needed = {TRANSFORMERS} if PACKED in kinds else set()
    make_kinds(files, makers, {*kinds, *needed}, folder / "float16")
    if PACKED in files.missing and TRANSFORMERS in files.missing:
        files.missing[PACKED] = files.missing[TRANSFORMERS]
    return files


def write_capacity_file(
    files: TextFiles, folder: Path, kinds: Collection[str], tokens: int, shapes: Shapes, capability: int = 0
) -> TextFiles:
    """The files, and one for a captured graph that holds so many tokens of a batch, where it is asked for."""
    found = replace(files, paths=dict(files.paths), missing=dict(files.missing), facts=dict(files.facts))

    def make(path: Path) -> dict[str, Any]:
        options = replace(_options("auto", shapes, capability), unpad_capacity=tokens)
        return optimize_texts(files.paths[EXPORTED], path, options)

    make_kinds(found, {CAPACITY: make}, kinds, folder / f"float16.{tokens}")
    return found


def choose_capacity(batches: Sequence[Mapping[str, np.ndarray]]) -> int:
    """The tokens of the batch with the most real ones, as a multiple of 128."""
    most = max(int(feeds["attention_mask"].sum()) for feeds in batches)
    return _CAPACITY_STEP * math.ceil(most / _CAPACITY_STEP)


def _options(unpad: str, shapes: Shapes, capability: int) -> Options:
    return Options(unpad=unpad, verify=False, target="cuda", capability=capability, shapes=dict(shapes))


def shape_ranges(batches: Sequence[int], longest: int) -> Shapes:
    """The ranges of the sizes of inputs: batches of so many texts, each of one token to the longest."""
    return dict(zip(DIMENSIONS, ((min(batches), max(batches)), (1, longest)), strict=True))


def _convert(path: Path, output: Path) -> None:
    converter = require("onnxruntime.transformers.float16")
    with silence():
        made = converter.convert_float_to_float16(onnx.load(str(path)), disable_shape_infer=True, keep_io_types=False)
    onnx.save(made, str(output))


def _optimize_by_transformers(model: TextModel, path: Path, output: Path) -> dict[str, Any]:
    """onnxruntime.transformers.optimizer, then its conversion to fp16; what it fused.

    Its inference of symbolic shapes fails on these graphs. Without it, skip connections are fused unasked.
    """
    optimizer = require("onnxruntime.transformers.optimizer")
    options = require("onnxruntime.transformers.fusion_options").FusionOptions("bert")
    options.enable_shape_inference = False
    basic = write_basic(path, output.with_suffix(".basic.onnx"))
    with silence():
        made = optimizer.optimize_model(
            str(basic), model_type="bert", num_heads=model.heads, hidden_size=model.hidden, opt_level=0, use_gpu=True,
            optimization_options=options,
        )  # fmt: skip
        fused = count_fused(made)
        made.convert_float_to_float16(use_symbolic_shape_infer=False, disable_shape_infer=True, keep_io_types=False)
    basic.unlink()
    made.save_model_to_file(str(output))
    return {"fused": fused}


def _pack(path: Path, output: Path) -> dict[str, Any]:
    """The packing mode of the transformers optimizer, which takes what that one wrote.

    Raises:
        Unavailable: where it packs nothing.
    """
    tool, models = (require(f"onnxruntime.transformers.{n}") for n in ("convert_to_packing_mode", "onnx_model"))
    with silence():
        packing = tool.PackingMode(models.OnnxModel(onnx.load(str(path))))
        packing.convert(use_symbolic_shape_infer=False)
    packed = sum(node.op_type in _PACKED_OPERATORS for node in packing.model.model.graph.node)
    if not packed:
        raise Unavailable("packing mode finds no attention that it can pack")
    packing.model.save_model_to_file(str(output))
    return {"packed_attentions": packed}
