# SPDX-License-Identifier: Apache-2.0
"""fp16 variants of a stored graph: as exported, after ONNX Runtime's tool, with MultiHeadAttention by hand, after stof-optimize.

``prepare`` needs a CPU only and writes graphs without their large weights; ``assemble`` fills those in again, the same ones for
every variant, where the models are timed.
"""

from __future__ import annotations

import importlib.util
import re
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from stof.bench.runner import Unavailable, require

LABELS = {
    "exported": "as exported",
    "tool": "transformers tool",
    "mha": "MHA + bias by hand",
    "attention": "attention only",
    "chains": "chains only",
    "stof": "stof-optimize",
    "tool-stof": "the tool, then stof-optimize",
}
_CAPABILITY = 90  # that the variants are made for, wherever that is
_LARGE = 1 << 16  # elements of a weight that is left out of a prepared graph
_WEIGHTS = "weights.bin"
_LOWEST = -65504.0
_LOCAL = re.compile(r"abs\(q - k\) <= (\d+)")


def values(name: str, shape: Sequence[int]) -> np.ndarray:
    """The fp16 values of a large weight, from its name."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    found = rng.standard_normal(tuple(shape), np.float32)
    found *= np.float32(0.7 / np.sqrt(min(shape)))
    # Smaller than the least fp16 number, a converter would write that.
    return np.where(np.abs(found) < 1e-6, np.float32(0), found).astype(np.float16)


def prepare(name: str, shape: tuple[int, int], folder: Path, kinds: Sequence[str] = tuple(LABELS)) -> dict[str, str]:
    """Writes ``folder/<kind>.onnx`` for inputs of a fixed shape [batch, length]; gives what could not be made, and why."""
    folder.mkdir(parents=True, exist_ok=True)
    converter = require("onnxruntime.transformers.float16")
    model = _module("models/build.py").load_graph(name)
    for tensor in model.graph.initializer:
        if tensor.data_location == TensorProto.EXTERNAL:
            _fill(tensor, values(tensor.name, tensor.dims).astype(np.float32))
    exported = converter.convert_float_to_float16(model, disable_shape_infer=True, keep_io_types=False)
    for tensor in exported.graph.initializer:
        if _large(tensor):
            _fill(tensor, values(tensor.name, tensor.dims))
    made: dict[str, onnx.ModelProto] = {"exported": exported}
    missing: dict[str, str] = {}
    steps: dict[str, Callable[[], onnx.ModelProto]] = {
        "tool": lambda: _tool(made["exported"]),
        "attention": lambda: _stof(made["exported"], folder, shape, chains="off"),
        "chains": lambda: _stof(made["exported"], folder, shape, skip=("*",)),
        "stof": lambda: _stof(made["exported"], folder, shape),
        "tool-stof": lambda: _stof(made["tool"], folder, shape),
        "mha": lambda: _by_hand(made["attention"]),
    }
    for kind, step in steps.items():
        try:
            made[kind] = step()
        except Exception as failure:
            missing[kind] = f"{type(failure).__name__}: {' '.join(str(failure).split())[:200]}"
    for kind in kinds:
        if kind in made:
            found = onnx.ModelProto()
            found.CopyFrom(made[kind])
            _fix(found, shape)
            _strip(found, kind)
            (folder / f"{kind}.onnx").write_bytes(found.SerializeToString())
    return missing


def assemble(folder: Path, output: Path) -> list[str]:
    """Fills the prepared graphs of a folder; gives their kinds. The weights are written once, for all of them."""
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
                    data = values(tensor.name, tensor.dims).tobytes()
                    file.write(b"\0" * (-file.tell() % 4096))
                    places[tensor.name] = (file.tell(), len(data))
                    file.write(data)
                place = places[tensor.name]
                _external(tensor, location=_WEIGHTS, offset=str(place[0]), length=str(place[1]))
            (output / f"{kind}.onnx").write_bytes(model.SerializeToString())
            found.append(kind)
    return found


def _module(path: str) -> Any:
    spec = importlib.util.spec_from_file_location("stof_models_build", path)
    if spec is None or spec.loader is None or not Path(path).is_file():
        raise ValueError(f"there is no {path} here: run this in a checkout of the repository")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
    """Takes out weights that ``values`` gives again.

    Raises:
        ValueError: when a step has changed one of them.
    """
    for tensor in model.graph.initializer:
        if not _large(tensor):
            continue
        if not np.array_equal(numpy_helper.to_array(tensor), values(tensor.name, tensor.dims)):
            raise ValueError(f"{kind}: weight {tensor.name!r} is not what it was in the exported model")
        _external(tensor, location="stripped")


def _fix(model: onnx.ModelProto, shape: tuple[int, int]) -> None:
    for value in model.graph.input:
        for dim, size in zip(value.type.tensor_type.shape.dim, shape, strict=True):
            dim.ClearField("dim_param")
            dim.dim_value = size
    for value in model.graph.output:
        value.type.tensor_type.ClearField("shape")
    chained = {o for n in model.graph.node if n.op_type == "StofChain" for o in n.output}
    kept = [v for v in model.graph.value_info if v.name in chained]  # runtimes learn their types nowhere else
    for value in kept:
        value.type.tensor_type.ClearField("shape")
    del model.graph.value_info[:]
    model.graph.value_info.extend(kept)


def _tool(exported: onnx.ModelProto) -> onnx.ModelProto:
    """What onnxruntime.transformers.optimizer makes of it. It fails on norms without a bias, so they get one of zeros."""
    optimizer = require("onnxruntime.transformers.optimizer")
    model = onnx.ModelProto()
    model.CopyFrom(exported)
    weights = {t.name: t.dims[0] for t in model.graph.initializer if len(t.dims) == 1}
    sizes = set()
    for node in model.graph.node:
        if node.op_type == "LayerNormalization" and len(node.input) == 2:
            size = weights[node.input[1]]
            node.input.append(f"no_bias_{size}")
            sizes.add(size)
    for size in sizes:
        model.graph.initializer.append(numpy_helper.from_array(np.zeros(size, np.float16), f"no_bias_{size}"))
    hidden = max(sizes or weights.values())
    heads = hidden // 64
    found: onnx.ModelProto = optimizer.optimize_model(
        model, model_type="bert", num_heads=heads, hidden_size=hidden, opt_level=0, use_gpu=True
    ).model
    return found


def _stof(model: onnx.ModelProto, folder: Path, shape: tuple[int, int], **options: Any) -> onnx.ModelProto:
    """What stof-optimize makes of it for CUDA and this shape."""
    from stof.options import Options
    from stof.pipeline import optimize

    given, made = folder / "given.tmp.onnx", folder / "made.tmp.onnx"
    try:
        given.write_bytes(model.SerializeToString())
        # Outputs are compared where the models are timed.
        shapes = {}
        for value in model.graph.input:
            for dim, size in zip(value.type.tensor_type.shape.dim, shape, strict=True):
                if dim.dim_param:
                    shapes[dim.dim_param] = (size, size)
        optimize(given, made, Options(verify=False, target="cuda", capability=_CAPABILITY, shapes=shapes, **options))
        if not made.is_file():
            raise Unavailable("stof-optimize found nothing to replace")
        return onnx.load(str(made))
    finally:
        given.unlink(missing_ok=True)
        made.unlink(missing_ok=True)


def _by_hand(optimized: onnx.ModelProto) -> onnx.ModelProto:
    """com.microsoft MultiHeadAttention with attention_bias in the place of every StofAttention.

    A bias is computed once for all layers that share a mask.

    Raises:
        ValueError: for a mask other than padding with or without a window, or another operand.
    """
    model = onnx.ModelProto()
    model.CopyFrom(optimized)
    del model.functions[:]
    nodes: list[onnx.NodeProto] = []
    biases: dict[tuple[str, str], str] = {}
    for node in model.graph.node:
        if node.op_type != "StofAttention":
            nodes.append(node)
            continue
        given = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        words = {k: v.decode() if isinstance(v, bytes) else v for k, v in given.items()}
        if words["operands"] != "pad":
            raise ValueError(f"{node.name}: operands {words['operands']!r}, expected pad")
        key = (str(words["mask"]), node.input[3])
        if key not in biases:
            biases[key] = f"bias_by_hand_{len(biases)}"
            nodes += _bias(key[0], key[1], biases[key])
        layouts = str(words["layout"]).split()
        layouts *= 4 // len(layouts)
        parts = []
        for name, layout in zip(node.input[:3], layouts, strict=False):
            parts.append(_packed(nodes, f"{node.name}/{name}", name, layout))
        output = node.output[0] if layouts[3] == "BSN" else f"{node.name}/bsn"
        nodes.append(
            helper.make_node(
                "MultiHeadAttention",
                [*parts, "", "", biases[key]],
                [output],
                f"{node.name}/by_hand",
                domain="com.microsoft",
                num_heads=int(words["num_heads"]),
                scale=float(words["scale"]),
            )
        )
        if layouts[3] != "BSN":
            raise ValueError(f"{node.name}: output of layout {layouts[3]}, expected BSN")
    copies = [onnx.NodeProto.FromString(n.SerializeToString()) for n in nodes]
    del model.graph.node[:]
    model.graph.node.extend(copies)
    kept = [o for o in model.opset_import if o.domain not in ("stof", "com.microsoft")]
    del model.opset_import[:]
    model.opset_import.extend([*kept, helper.make_opsetid("com.microsoft", 1)])
    return model


def _packed(nodes: list[onnx.NodeProto], prefix: str, name: str, layout: str) -> str:
    """The tensor as [B, S, N]."""
    if layout == "BSN":
        return name
    if layout == "BHSD":
        nodes.append(
            helper.make_node("Transpose", [name], [f"{prefix}/bshd"], f"{prefix}/transpose", perm=[0, 2, 1, 3])
        )
        name = f"{prefix}/bshd"
    shape = f"{prefix}/shape"
    nodes.append(helper.make_node("Constant", [], [shape], f"{shape}_node", value_ints=[0, 0, -1]))
    nodes.append(helper.make_node("Reshape", [name, shape], [f"{prefix}/bsn"], f"{prefix}/reshape"))
    return f"{prefix}/bsn"


def _bias(mask: str, pad: str, output: str) -> list[onnx.NodeProto]:
    """[B, 1, S, T] of 0 and the lowest fp16 number, from padding [B, T] of any type."""
    terms = [t for t in mask.split(" and ") if t != "pad[b, k]"]
    windows = [_LOCAL.fullmatch(t) for t in terms]
    if not all(windows):
        raise ValueError(f"no bias by hand for the mask {mask!r}")

    def node(kind: str, inputs: list[str], name: str, **attributes: Any) -> onnx.NodeProto:
        return helper.make_node(kind, inputs, [f"{output}/{name}"], f"{output}/{name}_node", **attributes)

    def constant(name: str, value: Any) -> onnx.NodeProto:
        return node("Constant", [], name, value=numpy_helper.from_array(value))

    at = f"{output}/"
    found = [
        constant("axes", np.array([1, 2], np.int64)),
        constant("zero_index", np.array(0, np.int64)),
        constant("one_index", np.array(1, np.int64)),
        constant("allowed_value", np.array(0, np.float16)),
        constant("forbidden_value", np.array(_LOWEST, np.float16)),
        node("Cast", [pad], "real", to=TensorProto.BOOL),
        node("Unsqueeze", [at + "real", at + "axes"], "keys"),
        node("Shape", [pad], "shape"),
        node("Gather", [at + "shape", at + "one_index"], "length"),
        node("Range", [at + "zero_index", at + "length", at + "one_index"], "positions"),
        constant("column_axis", np.array([1], np.int64)),
        node("Unsqueeze", [at + "positions", at + "column_axis"], "queries"),
        node("Sub", [at + "queries", at + "positions"], "distance"),
        node("Abs", [at + "distance"], "away"),
    ]
    for i, window in enumerate([w for w in windows if w] or [None]):
        # Without a window the comparison is with what no distance exceeds.
        width = int(window[1]) if window else 1 << 40
        found += [
            constant(f"width{i}", np.array(width, np.int64)),
            node("LessOrEqual", [at + "away", at + f"width{i}"], f"near{i}"),
            node("And", [at + (f"and{i - 1}" if i else "keys"), at + f"near{i}"], f"and{i}"),
        ]
    last = f"{at}and{max(1, len(terms)) - 1}"
    found.append(
        helper.make_node("Where", [last, at + "allowed_value", at + "forbidden_value"], [output], f"{output}_node")
    )
    return found
