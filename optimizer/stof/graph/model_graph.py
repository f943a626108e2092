# SPDX-License-Identifier: Apache-2.0
"""ONNX files and graphs: loading, looking around, saving."""

from __future__ import annotations

import heapq
import math
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError, EncodeError  # type: ignore[import-untyped]
from onnx import TensorProto

from stof.errors import ArgumentError, ModelError
from stof.files import open_regular, temporary_file
from stof.graph.check_text import check_text
from stof.graph.external_data import Bringing, all_tensors, check_external, copied_data, is_external

LARGEST_OPSET = 26
SMALLEST_OPSET = 13
DOMAIN = "stof"
_IR_OF_DEFAULTS = 4  # since which initializers need not be inputs, and those that are can be overridden
_LARGEST_FILE = (1 << 31) - 1  # bytes of a protobuf
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
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > _LARGEST_FILE:
                raise ModelError(f"{path} has {size} bytes, expected an .onnx file, which has at most 2 GB")
            model: onnx.ModelProto = onnx.ModelProto.FromString(file.read(size))
    except FileNotFoundError:
        raise ArgumentError(f"{path} does not exist") from None
    except IsADirectoryError:
        raise ArgumentError(f"{path} is a folder, expected an .onnx file") from None
    except OSError as error:
        raise ArgumentError(f"{path} cannot be read: {error.strerror or error}") from None
    except (DecodeError, ValueError) as error:
        raise ModelError(f"{path} is no ONNX model, or a truncated one: {error}") from None
    check_text(path, model)
    if not model.HasField("graph") or not model.opset_import:
        raise ModelError(f"{path} is no ONNX model, or a truncated one: it has no graph or no opset import")
    if not model.graph.node:
        raise ModelError(f"{path} has a graph without nodes; export the model again")
    _check_opsets(path, model)
    _check_arities(path, model)
    _check_tensors(path, model)
    _only_constants(model)
    _check_edges(path, model.graph)
    check_external(path, model)
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


def _check_tensors(path: Path, model: onnx.ModelProto) -> None:
    """Constants hold as many bytes or numbers as their shape says."""
    for tensor in all_tensors(model):
        if any(d < 0 for d in tensor.dims):
            raise ModelError(f"{path}: constant {tensor.name!r} has shape {list(tensor.dims)}")
        if is_external(tensor) or tensor.data_type not in _PLAIN_TYPES:
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


def save(model: onnx.ModelProto, path: Path, source: Path) -> None:
    """Writes a model whole or not at all. External data stays where it is; for another folder it is copied.

    Raises:
        ArgumentError: when the output cannot be written, or is the input.
        ModelError: when the model does not fit into a file, or its external data is not as long as it was.
    """
    if path.exists() and source.exists() and path.samefile(source):
        raise ArgumentError(f"the output {path} is the input; choose another file with -o")
    if path.is_dir():
        raise ArgumentError(f"the output {path} is a folder; name a file with -o")
    if not path.parent.is_dir():
        raise ArgumentError(f"the folder {path.parent} does not exist; make it, or choose another output with -o")
    try:
        data = model.SerializeToString(deterministic=True)
    except (EncodeError, ValueError) as error:
        raise ModelError(f"{path} would exceed the 2 GB of a protobuf: store the weights as external data") from error
    try:
        with temporary_file(path.parent) as new, Bringing(new) as bringing:
            for copy in copied_data(model, path, source):
                bringing.stage(copy)
            new.write(data)
            bringing.publish()
            check_external(path, model)
            new.replace(path)
    except OSError as error:
        raise ArgumentError(f"{path} cannot be written: {error.strerror or error}") from error


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
