# SPDX-License-Identifier: Apache-2.0
"""Exported graphs without weights, and seeded random weights to fill them with. Needs numpy and onnx only.

``python models/build.py NAME -o DIR [--seed N]`` writes ``DIR/NAME.onnx``; above 1.8 GB the weights go to ``NAME.onnx.data``.
``python models/build.py --list`` lists the names.
"""

from __future__ import annotations

import argparse
import json
import lzma
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto

ROOT = Path(__file__).resolve().parent
GRAPHS = ROOT / "graphs"
PLACEHOLDER = "stripped"  # the external location that marks a weight without data
_INLINE_LIMIT = 1_800_000_000
_BLOCK = 1 << 22


def manifest() -> dict[str, dict[str, Any]]:
    """What each graph is: configuration, exporter, versions, node hash, expected masks."""
    found = json.loads((ROOT / "manifest.json").read_text(encoding="utf-8"))
    assert isinstance(found, dict)
    return found


def names(narrow: bool | None = None) -> list[str]:
    """The stored graphs; narrow ones are called ``narrow/...``."""
    return sorted(n for n in manifest() if narrow is None or n.startswith("narrow/") == narrow)


def load_graph(name: str) -> onnx.ModelProto:
    """A stored graph; its weights are external tensors at the location ``stripped``."""
    path = GRAPHS / f"{name}.onnx.xz"
    if not path.is_file():
        raise SystemExit(f"no graph {name!r}; --list shows the names")
    return onnx.load_model_from_string(lzma.decompress(path.read_bytes()))


def _stripped(tensor: onnx.TensorProto) -> bool:
    return tensor.data_location == TensorProto.EXTERNAL and any(e.value == PLACEHOLDER for e in tensor.external_data)


def constants(model: onnx.ModelProto) -> list[onnx.TensorProto]:
    """The values of the main graph's Constant nodes."""
    nodes = (node for node in model.graph.node if node.op_type == "Constant")
    return [a.t for node in nodes for a in node.attribute if a.type == onnx.AttributeProto.TENSOR]


def is_norm(tensor: onnx.TensorProto) -> bool:
    """Whether a weight is what a norm multiplies by, which is about one."""
    return len(tensor.dims) == 1 and tensor.name.endswith("weight")


def _uniform_vector(tensor: onnx.TensorProto) -> bool:
    """A norm's weight or a bias as it is initialized: a vector of ones or zeros."""
    if tensor.data_type != TensorProto.FLOAT or len(tensor.dims) != 1 or tensor.dims[0] < 8:
        return False
    array = onnx.numpy_helper.to_array(tensor)
    return bool(np.all(array == array[0])) and float(array[0]) in (0.0, 1.0)


def _weights(model: onnx.ModelProto, seed: int) -> Iterator[tuple[onnx.TensorProto, np.ndarray]]:
    """Every tensor to fill, with its values: Linear and embedding scaled by their narrow side, norms 1 ± 0.02."""
    tables = [tensor for tensor in constants(model) if _stripped(tensor)]
    for i, tensor in enumerate([*model.graph.initializer, *tables]):
        rng = np.random.default_rng([seed, i])
        if _stripped(tensor):
            shape = tuple(tensor.dims)
            flat = np.empty(int(np.prod(shape)), np.float32)
            for start in range(0, flat.size, _BLOCK):
                rng.standard_normal(dtype=np.float32, out=flat[start : start + _BLOCK])
            flat *= np.float32(0.7 / np.sqrt(min(shape)))
            flat += np.float32(is_norm(tensor))
            yield tensor, flat.reshape(shape).astype(onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type))
        elif tensor.data_location != TensorProto.EXTERNAL and _uniform_vector(tensor):
            array = onnx.numpy_helper.to_array(tensor)
            yield tensor, (array + 0.02 * rng.standard_normal(array.shape, np.float32)).astype(np.float32)


def fill(model: onnx.ModelProto, seed: int = 0) -> onnx.ModelProto:
    """A copy with seeded random weights inline."""
    filled = onnx.ModelProto()
    filled.CopyFrom(model)
    for tensor, array in _weights(filled, seed):
        _set_inline(tensor, array)
    return filled


def _set_inline(tensor: onnx.TensorProto, array: np.ndarray) -> None:
    del tensor.external_data[:]
    tensor.data_location = TensorProto.DEFAULT
    tensor.ClearField("float_data")
    tensor.raw_data = array.tobytes()


def parameters(model: onnx.ModelProto) -> int:
    """The number of stripped parameters."""
    return sum(int(np.prod(t.dims)) for t in model.graph.initializer if _stripped(t))


def write(name: str, path: Path, seed: int = 0, external: bool | None = None) -> Path:
    """Writes a filled model; with ``external`` (default: above 1.8 GB) the weights stream to ``<path>.data``."""
    model = load_graph(name)
    if external is None:
        external = 4 * parameters(model) > _INLINE_LIMIT
    if not external:
        path.write_bytes(fill(model, seed).SerializeToString())
        return path
    data = path.with_name(path.name + ".data")
    with data.open("wb") as file:
        for tensor, array in _weights(model, seed):
            if not _stripped(tensor):
                _set_inline(tensor, array)
                continue
            offset = file.tell()
            file.write(memoryview(array).cast("B"))
            del tensor.external_data[:]
            for key, value in (("location", data.name), ("offset", offset), ("length", array.nbytes)):
                tensor.external_data.append(onnx.StringStringEntryProto(key=key, value=str(value)))
    path.write_bytes(model.SerializeToString())
    return path


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="Fills an exported graph with seeded random weights.")
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("-o", "--output", type=Path, default=Path(), metavar="DIR")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--external", action="store_true", help="weights in a file of their own, whatever their size")
    parser.add_argument("--list", action="store_true")
    arguments = parser.parse_args()
    if arguments.list or not arguments.names:
        for name in names():
            print(name)
        return 0
    arguments.output.mkdir(parents=True, exist_ok=True)
    for name in arguments.names:
        path = arguments.output / f"{name.replace('/', '-')}.onnx"
        print(write(name, path, arguments.seed, True if arguments.external else None))
    return 0


if __name__ == "__main__":
    sys.exit(main())
