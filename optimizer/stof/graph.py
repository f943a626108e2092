# SPDX-License-Identifier: Apache-2.0
"""ONNX files and graphs: loading, looking around, saving."""

from __future__ import annotations

import filecmp
import heapq
import math
import os
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError, EncodeError  # type: ignore[import-untyped]
from onnx import TensorProto

from stof.errors import ArgumentError, ModelError
from stof.model_text import check_text

LARGEST_OPSET = 26
SMALLEST_OPSET = 13
DOMAIN = "stof"
_IR_OF_DEFAULTS = 4  # since which initializers need not be inputs, and those that are can be overridden
_SMALL_CONSTANT, _LARGEST_TABLE, _MOST_READ = 1 << 10, 1 << 26, 1 << 28  # bytes
_WHOLE = frozenset({int(TensorProto.BOOL), int(TensorProto.INT32), int(TensorProto.INT64)})
ITEM_SIZES = {
    int(TensorProto.BOOL): 1,
    int(TensorProto.UINT8): 1,
    int(TensorProto.INT8): 1,
    int(TensorProto.FLOAT16): 2,
    int(TensorProto.BFLOAT16): 2,
    int(TensorProto.FLOAT): 4,
    int(TensorProto.INT32): 4,
    int(TensorProto.INT64): 8,
    int(TensorProto.DOUBLE): 8,
}
_GRAPH = int(onnx.AttributeProto.GRAPH)
_KNOWN_DOMAINS = frozenset({"", "ai.onnx", "ai.onnx.ml", "com.microsoft", "ai.onnx.preview.training", DOMAIN})


# Element types with one element in each slot of their data field; complex, string and sub-byte types have others.
_PLAIN_TYPES = frozenset(
    [TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.BOOL]
    + [TensorProto.INT8, TensorProto.INT16, TensorProto.INT32, TensorProto.INT64]
    + [TensorProto.UINT8, TensorProto.UINT16, TensorProto.UINT32, TensorProto.UINT64]
)


class GraphIndex:
    """Producers and consumers of a graph's tensors."""

    def __init__(
        self, graph: onnx.GraphProto, fixed: frozenset[str] = frozenset(), groups: Mapping[str, int] | None = None
    ) -> None:
        self.graph = graph
        self.groups = groups or {}  # of tensors that nodes in place of a fused one write: which one
        self.fixed = fixed  # tensors that are written in any case: no reading goes behind them
        self.outputs = {o.name for o in graph.output}
        self.inputs = {i.name for i in graph.input}
        self._producer = {o: n for n in graph.node for o in n.output if o}
        self._consumers: dict[str, list[onnx.NodeProto]] = defaultdict(list)
        for node in graph.node:
            for name in dict.fromkeys(node.input):
                if name:
                    self._consumers[name].append(node)
        # Subgraphs of If and Loop read outer tensors without naming them as inputs.
        self.captured = {name for node in graph.node if node.attribute for name in _captures(node)}

    def producer(self, tensor: str) -> onnx.NodeProto | None:
        """The node that writes a tensor."""
        return self._producer.get(tensor)

    def consumers(self, tensor: str) -> list[onnx.NodeProto]:
        """The nodes that read a tensor, each once."""
        return self._consumers.get(tensor, [])


def subgraphs(node: onnx.NodeProto) -> list[onnx.GraphProto]:
    """The graphs in a node's attributes."""
    attributes = node.attribute
    if not attributes:
        return []
    found = [a.g for a in attributes if a.type == _GRAPH]
    return found + [g for a in attributes for g in a.graphs]


def all_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Nodes with those of their subgraphs."""
    for node in nodes:
        yield node
        for graph in subgraphs(node):
            yield from all_nodes(graph.node)


def _captures(node: onnx.NodeProto) -> set[str]:
    """What the subgraphs of a node read, names of their own among it."""
    found: set[str] = set()
    for graph in subgraphs(node):
        found.update(o.name for o in graph.output)
        for inner in graph.node:
            found.update(inner.input)
            found |= _captures(inner)
    return found


def node_tensors(node: onnx.NodeProto) -> set[str]:
    """All tensor names in a node and its subgraphs."""
    found = {*node.input, *node.output}
    for graph in subgraphs(node):
        found.update(o.name for o in graph.output)
        for inner in graph.node:
            found |= node_tensors(inner)
    return found


def load(path: Path) -> onnx.ModelProto:
    """Reads a model without its external data.

    Raises:
        ArgumentError: when there is no such file.
        ModelError: when it is no ONNX model or one that cannot be optimized, with what was found.
    """
    try:
        model = onnx.load(str(path), format="protobuf", load_external_data=False)
    except FileNotFoundError:
        raise ArgumentError(f"{path} does not exist") from None
    except IsADirectoryError:
        raise ArgumentError(f"{path} is a folder, expected an .onnx file") from None
    except (DecodeError, ValueError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} is no ONNX model, or a truncated one: {error}") from None
    except OSError as error:
        raise ArgumentError(f"{path} cannot be read: {error.strerror or error}") from None
    check_text(path, model)
    if not model.HasField("graph") or not model.opset_import:
        raise ModelError(f"{path} is no ONNX model, or a truncated one: it has no graph or no opset import")
    if not model.graph.node:
        raise ModelError(f"{path} has a graph without nodes; export the model again")
    _check_opsets(path, model)
    _check_arities(path, model)
    _check_tensors(path, model.graph)
    _only_constants(model)
    _check_edges(path, model.graph)
    _check_external(path, model)
    return model


def _only_constants(model: onnx.ModelProto) -> None:
    """Takes initializers off the inputs where they have to be among them and are constants: before version 4 of the format.

    From version 4 on, an initializer that is an input is a default, which a caller may override.
    """
    constants = {t.name for t in model.graph.initializer}
    inputs = [i for i in model.graph.input if i.name not in constants]
    if model.ir_version < _IR_OF_DEFAULTS and len(inputs) < len(model.graph.input):
        kept = [onnx.ValueInfoProto.FromString(i.SerializeToString()) for i in inputs]
        del model.graph.input[:]
        model.graph.input.extend(kept)
        model.ir_version = _IR_OF_DEFAULTS  # which says the same without them


def _check_opsets(path: Path, model: onnx.ModelProto) -> None:
    expected = f"{SMALLEST_OPSET} to {LARGEST_OPSET}"
    standard = [e.version for e in model.opset_import if e.domain in ("", "ai.onnx")]
    if not standard:
        raise ModelError(f"{path} imports no opset of the standard domain, expected {expected}")
    for version in standard:
        if not SMALLEST_OPSET <= version <= LARGEST_OPSET:
            raise ModelError(
                f"{path} has opset {version}, expected {expected}; "
                "convert it with onnx.version_converter or export it again"
            )
    known = _KNOWN_DOMAINS | {f.domain for f in model.functions} | {e.domain for e in model.opset_import}
    for node in model.graph.node:
        if node.domain not in known:
            raise ModelError(f"{path}: {describe(node)} is of domain {node.domain!r}, which the model does not import")


@dataclass(frozen=True)
class _Arity:
    """What an operator takes: least and most inputs and outputs, and attributes that have to be there."""

    inputs: tuple[int, int]
    outputs: tuple[int, int]
    required: tuple[str, ...]


def _arity(kind: str, opset: int) -> _Arity | None:
    """That of an operator of the standard domain; None of one that is newer than the onnx package, or a runtime's own."""
    try:
        schema = onnx.defs.get_schema(kind, opset, "")
    except onnx.defs.SchemaError:
        return None
    required = tuple(name for name, attribute in schema.attributes.items() if attribute.required)
    return _Arity((schema.min_input, schema.max_input), (schema.min_output, schema.max_output), required)


def _check_arities(path: Path, model: onnx.ModelProto) -> None:
    """Nodes of the standard domain have as many inputs and outputs as the operator takes."""
    opset = opset_of(model)
    known: dict[str, _Arity | None] = {}  # asking onnx takes as long as checking many nodes
    for node in model.graph.node:
        if node.domain not in ("", "ai.onnx"):
            continue
        kind = node.op_type
        if kind not in known:
            known[kind] = _arity(kind, opset)
        arity = known[kind]
        if arity is None:
            continue
        for words, count, (least, most) in (
            ("inputs", len(node.input), arity.inputs),
            ("outputs", len(node.output), arity.outputs),
        ):
            if not least <= count <= most:
                expected = (
                    str(least) if least == most else f"{least} to {most}" if most < 1 << 20 else f"{least} or more"
                )
                raise ModelError(
                    f"{path}: {describe(node)} has {count} {words}, but {node.op_type} of opset {opset} has {expected}"
                )
        given = {a.name for a in node.attribute}
        for name in arity.required:
            if name not in given:
                raise ModelError(f"{path}: {describe(node)} has no attribute {name!r}, which {node.op_type} needs")


def _check_tensors(path: Path, graph: onnx.GraphProto) -> None:
    """Constants hold as many bytes or numbers as their shape says."""
    for tensor in _tensors(graph):
        if any(d < 0 for d in tensor.dims):
            raise ModelError(f"{path}: constant {tensor.name!r} has shape {list(tensor.dims)}")
        if tensor.data_location == TensorProto.EXTERNAL or tensor.data_type not in _PLAIN_TYPES:
            continue
        count = math.prod(tensor.dims)
        if tensor.HasField("raw_data"):
            held = len(tensor.raw_data) / onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
        else:
            held = max(
                len(field)
                for field in (
                    tensor.float_data,
                    tensor.int32_data,
                    tensor.int64_data,
                    tensor.double_data,
                    tensor.uint64_data,
                )
            )
        if held != count:
            raise ModelError(
                f"{path}: constant {tensor.name!r} of shape {list(tensor.dims)} holds {held:.17g} elements, expected {count}"
            )


def _check_edges(path: Path, graph: onnx.GraphProto) -> None:
    """Every tensor is written once and before it is read; nodes in another order, which runtimes accept, are sorted."""
    given = {i.name for i in graph.input} | {t.name for t in graph.initializer} | {""}
    given |= {t.values.name for t in graph.sparse_initializer}
    writers: dict[str, int] = {}
    for place, node in enumerate(graph.node):
        for name in node.output:
            if name and (name in given or name in writers):
                raise ModelError(f"{path}: {describe(node)} writes {name!r}, which is written already")
            writers[name] = place
    ordered = True
    for place, node in enumerate(graph.node):
        for name in node.input:
            if name not in given and name not in writers:
                raise ModelError(f"{path}: {describe(node)} reads {name!r}, which nothing writes")
            ordered = ordered and (name in given or writers[name] < place)
    for output in graph.output:
        if output.name not in given and output.name not in writers:
            raise ModelError(f"{path}: output {output.name!r} is written by no node")
    if not ordered:
        _sort(path, graph, writers)


def _sort(path: Path, graph: onnx.GraphProto, writers: dict[str, int]) -> None:
    """Puts writers before readers, otherwise in the order of the file."""
    needs = [{writers[n] for n in {*node.input, *_captures(node)} if n and n in writers} for node in graph.node]
    readers: dict[int, list[int]] = defaultdict(list)
    for place, before in enumerate(needs):
        for other in before:
            readers[other].append(place)
    ready = [place for place, before in enumerate(needs) if not before]
    order: list[int] = []
    while ready:
        place = heapq.heappop(ready)
        order.append(place)
        for reader in readers[place]:
            needs[reader].discard(place)
            if not needs[reader]:
                heapq.heappush(ready, reader)
    if len(order) != len(graph.node):
        stuck = next(graph.node[i] for i, before in enumerate(needs) if before)
        raise ModelError(f"{path}: {describe(stuck)} is part of a cycle or waits for one")
    nodes = [graph.node[i] for i in order]
    copies = [onnx.NodeProto.FromString(n.SerializeToString()) for n in nodes]
    del graph.node[:]
    graph.node.extend(copies)


def _tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    """The constants of a graph and its subgraphs."""
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
        for inner in subgraphs(node):
            yield from _tensors(inner)


def external_files(model: onnx.ModelProto) -> set[str]:
    """The locations of a model's external data."""
    found: set[str] = set()
    for tensor in _tensors(model.graph):
        if tensor.data_location == TensorProto.EXTERNAL:
            found.update(e.value for e in tensor.external_data if e.key == "location")
    return found


def _check_external(path: Path, model: onnx.ModelProto) -> None:
    sizes: dict[str, int | None] = {}
    for tensor in _tensors(model.graph):
        if tensor.data_location != TensorProto.EXTERNAL:
            continue
        entries = {e.key: e.value for e in tensor.external_data}
        location = entries.get("location", "")
        if not location or Path(location).is_absolute() or ".." in Path(location).parts:
            raise ModelError(f"{path}: constant {tensor.name!r} has external data at {location!r}, outside its folder")
        if location not in sizes:
            file = path.parent / location
            sizes[location] = file.stat().st_size if file.is_file() else None
        held = sizes[location]
        if held is None:
            raise ModelError(
                f"{path}: external data {location!r} of constant {tensor.name!r} is missing; put it beside the model"
            )
        try:
            offset, length = int(entries.get("offset", "0")), int(entries.get("length", "0"))
            if min(offset, length) < 0:
                raise ValueError
            end = offset + length
        except ValueError:
            raise ModelError(f"{path}: constant {tensor.name!r} has a malformed offset or length") from None
        if end > held:
            raise ModelError(
                f"{path}: external data {location!r} has {held} bytes, but constant {tensor.name!r} ends at {end}; "
                "the file is truncated"
            )


def read_constants(path: Path, model: onnx.ModelProto) -> None:
    """Reads external data that the graph cannot be understood without: axes, sizes, scalars, tables of masks. Weights stay.

    Raises:
        ModelError: when the file ends before.
    """
    budget = _MOST_READ
    for tensor in _tensors(model.graph):
        size = _bytes(tensor)
        if tensor.data_location != TensorProto.EXTERNAL or not _is_constant(tensor, size) or size > budget:
            continue
        budget -= size
        # onnx's own reader refuses links, which runtimes follow beside a linked model.
        entries = {e.key: e.value for e in tensor.external_data}
        with (path.parent / entries["location"]).open("rb") as file:
            file.seek(int(entries.get("offset", "0")))
            tensor.raw_data = file.read(size)
        if len(tensor.raw_data) != size:
            raise ModelError(
                f"{path}: constant {tensor.name!r} of {size} bytes ends beyond its external data; truncated?"
            )
        del tensor.external_data[:]
        tensor.data_location = TensorProto.DEFAULT


def _is_constant(tensor: onnx.TensorProto, size: int) -> bool:
    """Whether the graph is read with it: small ones; integers and booleans, which are no weights; masks of all batches."""
    if tensor.data_type in _WHOLE or (len(tensor.dims) >= 3 and tensor.dims[0] == 1):
        return 0 <= size <= _LARGEST_TABLE
    return 0 <= size <= _SMALL_CONSTANT


def _bytes(tensor: onnx.TensorProto) -> int:
    """The size of external data, -1 for types whose elements share bytes."""
    if tensor.data_type not in ITEM_SIZES:
        return -1
    return int(math.prod(tensor.dims) * ITEM_SIZES[tensor.data_type])


def save(model: onnx.ModelProto, path: Path, source: Path) -> None:
    """Writes a model whole or not at all. External data stays where it is; for another folder it is copied.

    Raises:
        ArgumentError: when the output cannot be written, or is the input.
    """
    if path.exists() and source.exists() and path.samefile(source):
        raise ArgumentError(f"the output {path} is the input; choose another file with -o")
    if path.is_dir():
        raise ArgumentError(f"the output {path} is a folder; name a file with -o")
    if not path.parent.is_dir():
        raise ArgumentError(f"the folder {path.parent} does not exist; make it, or choose another output with -o")
    brought: list[Path] = []
    temporary = None
    try:
        if path.parent.resolve() != source.parent.resolve():
            for location in sorted(external_files(model)):
                if _bring(source.parent / location, path.parent / location):
                    brought.append(path.parent / location)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            temporary = Path(file.name)
            file.write(model.SerializeToString(deterministic=True))
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(path)
        temporary = None
        brought.clear()
    except OSError as error:
        raise ArgumentError(f"{path} cannot be written: {error.strerror or error}") from error
    except (EncodeError, ValueError) as error:
        raise ModelError(f"{path} would exceed the 2 GB of a protobuf: store the weights as external data") from error
    finally:
        for leftover in (*brought, temporary):
            if leftover is not None:
                leftover.unlink(missing_ok=True)


def check_room(model: onnx.ModelProto, path: Path, source: Path) -> None:
    """Whether external data can be used by a new model, or brought beside it: other models' data of the same name stays.

    Raises:
        ArgumentError: naming the file that is in the way.
    """
    for location in sorted(external_files(model)):
        data = source.parent / location
        if path.parent.resolve() != source.parent.resolve():
            _lies_there(data, path.parent / location)
        elif not data.resolve().is_relative_to(source.parent.resolve()):
            # As in the cache of Hugging Face's hub, where the model is a link into the same folder.
            raise ArgumentError(
                f"external data {data} is a link to another folder, which runtimes follow only from a linked model; "
                "write the output to another folder with -o"
            )


def _lies_there(source: Path, target: Path) -> bool:
    if not target.exists():
        return False
    if target.samefile(source) or (target.is_file() and filecmp.cmp(source, target, shallow=False)):
        return True
    raise ArgumentError(f"{target} exists and differs from {source}; move it, or choose another folder with -o")


def _bring(source: Path, target: Path) -> bool:
    """Copies external data beside the new model: loaders refuse other folders and links. False where it lies there."""
    if _lies_there(source, target):
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.part")
    try:
        shutil.copyfile(source, partial)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    return True


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def with_nodes(model: onnx.ModelProto, nodes: Iterable[onnx.NodeProto]) -> onnx.ModelProto:
    """A copy of a model with other nodes, which may be its own."""
    copies = [onnx.NodeProto.FromString(n.SerializeToString()) for n in nodes]
    found = onnx.ModelProto()
    found.CopyFrom(model)
    del found.graph.node[:]
    found.graph.node.extend(copies)
    return found


def domain_of(node: onnx.NodeProto) -> str:
    """A node's domain, the standard one by its short name."""
    return "" if node.domain == "ai.onnx" else str(node.domain)


def describe(node: onnx.NodeProto) -> str:
    """A node in words: its operator and name. It may be one of a broken model, without outputs."""
    operator = f"{node.domain}::{node.op_type}" if node.domain not in ("", "ai.onnx") else node.op_type
    if node.name:
        return f"{operator} node {node.name!r}"
    return f"the {operator} node that writes {node.output[0]!r}" if node.output else f"a nameless {operator} node"


def opset_of(model: onnx.ModelProto) -> int:
    """The version of the standard domain."""
    return int(next(e.version for e in model.opset_import if e.domain in ("", "ai.onnx")))
