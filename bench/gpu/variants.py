# SPDX-License-Identifier: Apache-2.0
"""fp16 variants of a stored graph: as exported, after ONNX Runtime's tool, with MultiHeadAttention by hand, after stof-optimize.

``prepare`` needs a CPU only and writes graphs without their large weights; ``assemble`` fills those in again, the same ones for
every variant, where the models are timed.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from bench.core.candidate import Unavailable, require
from bench.core.clone import load_module
from bench.gpu.multi_head_by_hand import by_hand
from stof.files import temporary_folder, write_bytes

LABELS = {
    "exported": "as exported",
    "tool": "transformers tool",
    "mha": "MHA + bias by hand",
    "attention": "attention only",
    "chains": "chains only",
    "plain": "stof-optimize without StofGemm",
    "stof": "stof-optimize",
    "tool-stof": "the tool, then stof-optimize",
}
_CAPABILITY = 90  # that the variants are made for, wherever that is
_LARGE = 1 << 16  # elements of a weight that is left out of a prepared graph
_WEIGHTS = "weights.bin"
_STRIPPED = "stripped"
_MODEL_TYPES = ("gpt2", "t5", "vit")  # of the tool, where a name says so; else that of BERT
_OWN = ("StofChain", "StofGemm")


def weight_values(name: str, shape: Sequence[int]) -> np.ndarray:
    """The fp16 values of a large weight, from its name."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    found = rng.standard_normal(tuple(shape), np.float32)
    found *= np.float32(0.7 / np.sqrt(min(shape)))
    # Smaller than the least fp16 number, a converter would write that.
    return np.where(np.abs(found) < 1e-6, np.float32(0), found).astype(np.float16)


def prepare(name: str, shape: tuple[int, int], folder: Path, kinds: Sequence[str] = tuple(LABELS)) -> dict[str, str]:
    """Writes ``folder/<kind>.onnx`` for inputs of shape [batch, length]; returns the kinds that failed, with reasons."""
    folder.mkdir(parents=True, exist_ok=True)
    made: dict[str, onnx.ModelProto] = {"exported": _load_fp16_graph(name, shape[1])}
    missing: dict[str, str] = {}
    steps: dict[str, Callable[[], onnx.ModelProto]] = {
        "tool": lambda: _tool(made["exported"], name),
        "attention": lambda: _stof(made["exported"], shape, chains="off"),
        "chains": lambda: _stof(made["exported"], shape, skip=("*",)),
        "plain": lambda: _stof(made["exported"], shape, products=False),
        "stof": lambda: _stof(made["exported"], shape),
        "tool-stof": lambda: _stof(made["tool"], shape),
        "mha": lambda: by_hand(made["attention"]),
    }
    needs = {"tool-stof": "tool", "mha": "attention"}
    wanted = {*kinds, *(needs[k] for k in kinds if k in needs)}
    for kind, step in steps.items():
        if kind not in wanted:
            continue
        try:
            made[kind] = step()
            _strip(made[kind], kind)
        except Exception as failure:  # converters of other packages may fail in any way; the table says which and why
            missing[kind] = f"{type(failure).__name__}: {' '.join(str(failure).split())[:200]}"
            made.pop(kind, None)
    for kind in kinds:
        if kind in made:
            found = onnx.ModelProto()
            found.CopyFrom(made[kind])
            _fix(found, shape)
            write_bytes("model", folder / f"{kind}.onnx", found.SerializeToString())
    return missing


def _load_fp16_graph(name: str, length: int) -> onnx.ModelProto:
    """A stored graph in fp16 without its large weights, with the mask of this length where it has one."""
    converter = require("onnxruntime.transformers.float16")
    model = load_module("models/build.py").load_graph(name)
    if any(d.dim_param for i in model.graph.input for d in i.type.tensor_type.shape.dim[1:]):
        load_module("models/bigbird.py").set_length(model, length)
    for tensor in model.graph.initializer:
        if tensor.data_location == TensorProto.EXTERNAL:
            count = int(np.prod(tensor.dims))
            _fill(tensor, np.zeros(tensor.dims, np.float32) if count >= _LARGE else _small(tensor))
    found: onnx.ModelProto = converter.convert_float_to_float16(model, disable_shape_infer=True, keep_io_types=False)
    for tensor in found.graph.initializer:
        if _large(tensor):
            _external(tensor, location=_STRIPPED)
    return found


def _small(tensor: onnx.TensorProto) -> np.ndarray:
    around = np.float32(load_module("models/build.py").is_norm(tensor))
    found: np.ndarray = weight_values(tensor.name, tensor.dims).astype(np.float32) + around
    return found


def assemble(folder: Path, output: Path) -> list[str]:
    """Fills the prepared graphs of a folder with weights, which all share one file; returns their kinds."""
    output.mkdir(parents=True, exist_ok=True)
    places: dict[str, tuple[int, int]] = {}
    found = []
    with (output / _WEIGHTS).open("wb") as file:
        for kind in LABELS:
            path = folder / f"{kind}.onnx"
            if not path.is_file():
                continue
            model = onnx.load(str(path), load_external_data=False)
            for tensor in model.graph.initializer:
                if tensor.data_location != TensorProto.EXTERNAL:
                    continue
                if tensor.name not in places:
                    data = weight_values(tensor.name, tensor.dims).tobytes()
                    file.write(b"\0" * (-file.tell() % 4096))
                    places[tensor.name] = (file.tell(), len(data))
                    file.write(data)
                place = places[tensor.name]
                _external(tensor, location=_WEIGHTS, offset=str(place[0]), length=str(place[1]))
            (output / f"{kind}.onnx").write_bytes(model.SerializeToString())
            found.append(kind)
    return found


def _large(tensor: onnx.TensorProto) -> bool:
    return tensor.data_type == TensorProto.FLOAT16 and len(tensor.dims) > 1 and int(np.prod(tensor.dims)) >= _LARGE


def _fill(tensor: onnx.TensorProto, array: np.ndarray) -> None:
    del tensor.external_data[:]
    tensor.ClearField("data_location")
    tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(array), tensor.name))


def _external(tensor: onnx.TensorProto, **entries: str) -> None:
    tensor.ClearField("raw_data")
    del tensor.external_data[:]
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.extend(onnx.StringStringEntryProto(key=k, value=v) for k, v in entries.items())


def _strip(model: onnx.ModelProto, kind: str) -> None:
    """Removes the weights that :func:`weight_values` gives again.

    Raises:
        ValueError: when a step has changed one of them.
    """
    for tensor in model.graph.initializer:
        if tensor.data_location == TensorProto.EXTERNAL:
            _external(tensor, location=_STRIPPED)
        elif _large(tensor):
            if not np.array_equal(numpy_helper.to_array(tensor), weight_values(tensor.name, tensor.dims)):
                raise ValueError(f"{kind}: weight {tensor.name!r} is not what it was in the exported model")
            _external(tensor, location=_STRIPPED)


def _fix(model: onnx.ModelProto, shape: tuple[int, int]) -> None:
    for value in [*model.graph.input, *model.graph.output]:
        for place, dim in enumerate(value.type.tensor_type.shape.dim):
            if not dim.HasField("dim_value"):
                dim.ClearField("dim_param")
                dim.dim_value = shape[min(place, 1)]
    chained = {o for n in model.graph.node if n.op_type in _OWN for o in n.output}
    kept = [v for v in model.graph.value_info if v.name in chained]  # runtimes learn their types nowhere else
    for value in kept:
        value.type.tensor_type.ClearField("shape")
    del model.graph.value_info[:]
    model.graph.value_info.extend(kept)


def _tool(exported: onnx.ModelProto, name: str) -> onnx.ModelProto:
    """The model after onnxruntime.transformers.optimizer. It fails on norms without a bias: they get one of zeros."""
    optimizer = require("onnxruntime.transformers.optimizer")
    model = onnx.ModelProto()
    model.CopyFrom(exported)
    for tensor in model.graph.initializer:
        if tensor.data_location == TensorProto.EXTERNAL:
            _fill(tensor, weight_values(tensor.name, tensor.dims))
    weights = {t.name: t.dims[0] for t in model.graph.initializer if len(t.dims) == 1}
    sizes = set()
    for node in model.graph.node:
        if node.op_type == "LayerNormalization" and len(node.input) == 2:
            size = weights[node.input[1]]
            node.input.append(f"no_bias_{size}")
            sizes.add(size)
    for size in sizes:
        model.graph.initializer.append(numpy_helper.from_array(np.zeros(size, np.float16), f"no_bias_{size}"))
    hidden = model.graph.output[0].type.tensor_type.shape.dim[-1].dim_value or max(sizes or weights.values())
    kind = next((k for k in _MODEL_TYPES if k in name), "bert")
    found: onnx.ModelProto = optimizer.optimize_model(
        model, model_type=kind, num_heads=hidden // 64, hidden_size=hidden, opt_level=0, use_gpu=True
    ).model
    return found


def _stof(model: onnx.ModelProto, shape: tuple[int, int], **options: Any) -> onnx.ModelProto:
    """The model after stof-optimize for CUDA and this shape; the weights are a sparse file."""
    from stof.options import Options
    from stof.pipeline import optimize

    given = onnx.ModelProto()
    given.CopyFrom(model)
    read: dict[int, np.ndarray] = {}  # values that may be a table of a mask
    end = 0
    for tensor in given.graph.initializer:
        if tensor.data_location == TensorProto.EXTERNAL:
            length = 2 * int(np.prod(tensor.dims))
            _external(tensor, location=_WEIGHTS, offset=str(end), length=str(length))
            if len(tensor.dims) > 2:
                read[end] = weight_values(tensor.name, tensor.dims)
            end += length
    # Outputs are compared where the models are timed.
    shapes = {}
    for value in given.graph.input:
        for place, dim in enumerate(value.type.tensor_type.shape.dim):
            if dim.dim_param:
                shapes[dim.dim_param] = (shape[min(place, 1)],) * 2
    with temporary_folder() as folder:
        source, made = folder / "given.onnx", folder / "made.onnx"
        with (folder / _WEIGHTS).open("wb") as file:
            file.truncate(end)
            for place, array in read.items():
                file.seek(place)
                file.write(array.tobytes())
        source.write_bytes(given.SerializeToString())
        optimize(source, made, Options(verify=False, target="cuda", capability=_CAPABILITY, shapes=shapes, **options))
        if not made.is_file():
            raise Unavailable("stof-optimize found nothing to replace")
        return onnx.load(str(made), load_external_data=False)
