# SPDX-License-Identifier: Apache-2.0
"""ONNX files and graphs: loading, looking around, saving.

GraphSurgeon edits; what it loses (metadata, doc strings, local functions, annotations, inputs that are also initializers)
is put back by transplanting its result into a copy of the original model.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import defaultdict
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError
from onnx import TensorProto

from stof.errors import ArgumentError, ModelError

LARGEST_OPSET = 26
SMALLEST_OPSET = 13
DOMAIN = "stof"
_KNOWN_DOMAINS = frozenset({"", "ai.onnx", "ai.onnx.ml", "com.microsoft", "ai.onnx.preview.training", DOMAIN})


class GraphIndex:
    """Producers and consumers of a graph's tensors."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self.graph = graph
        self.outputs = {o.name for o in graph.output}
        self.inputs = {i.name for i in graph.input}
        self._producer = {o: n for n in graph.node for o in n.output if o}
        self._consumers: dict[str, list[onnx.NodeProto]] = defaultdict(list)
        for node in graph.node:
            for name in dict.fromkeys(node.input):
                if name:
                    self._consumers[name].append(node)
        # Subgraphs of If and Loop read outer tensors without naming them as inputs.
        self.captured = {name for node in graph.node for name in _captures(node)}

    def producer(self, tensor: str) -> onnx.NodeProto | None:
        """The node that writes a tensor."""
        return self._producer.get(tensor)

    def consumers(self, tensor: str) -> list[onnx.NodeProto]:
        """The nodes that read a tensor, each once."""
        return self._consumers.get(tensor, [])


def _captures(node: onnx.NodeProto) -> set[str]:
    found: set[str] = set()
    for attribute in node.attribute:
        for graph in [attribute.g, *attribute.graphs] if attribute.HasField("g") or attribute.graphs else []:
            for inner in graph.node:
                found.update(inner.input)
                found.update(_captures(inner))
    return found


def load(path: Path) -> onnx.ModelProto:
    """Reads a model without its external data.

    Raises:
        ModelError: when it is no ONNX model or one that cannot be optimized, with what was found.
    """
    try:
        model = onnx.load(str(path), load_external_data=False)
    except FileNotFoundError:
        raise ArgumentError(f"{path} does not exist") from None
    except IsADirectoryError:
        raise ArgumentError(f"{path} is a folder, expected an .onnx file") from None
    except (DecodeError, ValueError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} is no ONNX model, or a truncated one: {error}") from None
    except OSError as error:
        raise ArgumentError(f"{path} cannot be read: {error.strerror or error}") from None
    if not model.HasField("graph") or not model.opset_import:
        raise ModelError(f"{path} is no ONNX model: it has no graph or no opset import")
    _check_opsets(path, model)
    _check_external(path, model)
    return model


def _check_opsets(path: Path, model: onnx.ModelProto) -> None:
    local = {f.domain for f in model.functions}
    for entry in model.opset_import:
        if entry.domain in ("", "ai.onnx") and not SMALLEST_OPSET <= entry.version <= LARGEST_OPSET:
            raise ModelError(
                f"{path} has opset {entry.version}, expected {SMALLEST_OPSET} to {LARGEST_OPSET}; "
                "convert it with onnx.version_converter or export it again"
            )
    if not any(e.domain in ("", "ai.onnx") for e in model.opset_import):
        raise ModelError(f"{path} imports no opset of the standard domain, expected {SMALLEST_OPSET} to {LARGEST_OPSET}")
    unknown = sorted({n.domain for n in model.graph.node} - _KNOWN_DOMAINS - local)
    if unknown and not {e.domain for e in model.opset_import} >= set(unknown):
        raise ModelError(f"{path} has nodes of domain {unknown[0]!r}, which it does not import")


def external_files(model: onnx.ModelProto) -> set[str]:
    """The locations of a model's external data."""
    found = set()
    for tensor in model.graph.initializer:
        if tensor.data_location == TensorProto.EXTERNAL:
            found.update(e.value for e in tensor.external_data if e.key == "location")
    return found


def _check_external(path: Path, model: onnx.ModelProto) -> None:
    for tensor in model.graph.initializer:
        if tensor.data_location != TensorProto.EXTERNAL:
            continue
        entries = {e.key: e.value for e in tensor.external_data}
        location = entries.get("location", "")
        file = path.parent / location
        if not location or os.path.isabs(location) or ".." in Path(location).parts:
            raise ModelError(f"{path}: initializer {tensor.name!r} has external data at {location!r}, outside its folder")
        if not file.is_file():
            raise ModelError(
                f"{path}: external data {location!r} of initializer {tensor.name!r} is missing; "
                "put it beside the model"
            )
        try:
            end = int(entries.get("offset", "0")) + int(entries.get("length", "0"))
        except ValueError:
            raise ModelError(f"{path}: initializer {tensor.name!r} has a malformed offset or length") from None
        if end > file.stat().st_size:
            raise ModelError(
                f"{path}: external data {location!r} has {file.stat().st_size} bytes, but initializer "
                f"{tensor.name!r} ends at {end}; the file is truncated"
            )


def save(model: onnx.ModelProto, path: Path, source: Path) -> None:
    """Writes a model whole or not at all. External data stays where it is; for another folder it is linked or copied.

    Raises:
        ArgumentError: when the output cannot be written, or is the input.
    """
    if path.exists() and source.exists() and path.samefile(source):
        raise ArgumentError(f"the output {path} is the input; choose another file with -o")
    if not path.parent.is_dir():
        raise ArgumentError(f"the folder {path.parent} does not exist; make it, or choose another output with -o")
    temporary = None
    try:
        if path.parent.resolve() != source.parent.resolve():
            for location in sorted(external_files(model)):
                _bring(source.parent / location, path.parent / location)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            temporary = Path(file.name)
            file.write(model.SerializeToString(deterministic=True))
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
        temporary = None
    except OSError as error:
        raise ArgumentError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def _bring(source: Path, target: Path) -> None:
    """External data beside the new model; loaders refuse paths out of the model's folder and symbolic links."""
    if target.exists():
        if target.samefile(source) or target.stat().st_size == source.stat().st_size:
            return
        raise ArgumentError(f"{target} exists and is not the input's external data; choose another folder with -o")
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.part")
    try:
        shutil.copyfile(source, partial)
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def opset_of(model: onnx.ModelProto) -> int:
    """The version of the standard domain."""
    return next(e.version for e in model.opset_import if e.domain in ("", "ai.onnx"))
