# SPDX-License-Identifier: Apache-2.0
"""Loads and saves ONNX models. Loading checks all that later steps rely on, and says what is wrong with the file."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError, EncodeError  # type: ignore[import-untyped]
from onnx import TensorProto

from stof.errors import ArgumentError, ModelError
from stof.files import open_regular, temporary_file
from stof.graph.check_text import check_text
from stof.graph.data_copies import DataCopier, data_to_copy
from stof.graph.derived_data import data_name, data_pieces, find_derived, remove_old_data, with_derived
from stof.graph.external_data import all_tensors, check_external, external_files, is_external, use_forward_slashes
from stof.graph.file_formats import HEAD_BYTES, describe_format
from stof.graph.index import DOMAIN, STANDARD_DOMAINS, describe, is_standard, opset_of, topological_order
from stof.graph.old_opsets import OLDEST_CONVERTED, convert_opset
from stof.graph.protobuf import replace_nodes

LARGEST_OPSET = 26
SMALLEST_OPSET = 13  # older ones are converted to it
_IR_OF_DEFAULTS = 4  # first IR version in which an initializer need not be an input
_LARGEST_FILE = (1 << 31) - 1  # bytes of a protobuf
_KNOWN_DOMAINS = frozenset({*STANDARD_DOMAINS, "ai.onnx.ml", "com.microsoft", "ai.onnx.preview.training", DOMAIN})
# Types whose data field has one slot an element. Complex, string and sub-byte types pack theirs differently.
_PLAIN_TYPES = frozenset(
    [TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.BOOL]
    + [TensorProto.INT8, TensorProto.INT16, TensorProto.INT32, TensorProto.INT64]
    + [TensorProto.UINT8, TensorProto.UINT16, TensorProto.UINT32, TensorProto.UINT64]
)


def load(path: Path) -> onnx.ModelProto:
    """Reads a model without its external data. One of an old opset is converted.

    Raises:
        ArgumentError: when there is no such file.
        ModelError: when it is no ONNX model or one that cannot be optimized, with what was found.
    """
    return load_with_opset(path)[0]


def load_with_opset(path: Path) -> tuple[onnx.ModelProto, int]:
    """The model as :func:`load` gives it, and the opset of the standard domain in the file, before it was converted."""
    head, size = b"", 0
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(HEAD_BYTES)
            if size > _LARGEST_FILE:
                other = describe_format(path, head, size)
                raise ModelError(
                    f"{path} {other or f'has {size} bytes, expected an .onnx file, which has at most 2 GB'}"
                )
            model: onnx.ModelProto = onnx.ModelProto.FromString(head + file.read(size))
    except FileNotFoundError:
        raise ArgumentError(f"{path} does not exist") from None
    except IsADirectoryError:
        raise ArgumentError(f"{path} is a folder, expected an .onnx file") from None
    except OSError as error:
        raise ArgumentError(f"{path} cannot be read: {error.strerror or error}") from None
    except (DecodeError, ValueError) as error:
        other = describe_format(path, head, size)
        raise ModelError(f"{path} {other or f'is no ONNX model, or a truncated one: {error}'}") from None
    if not model.HasField("graph") or not model.opset_import:
        other = describe_format(path, head, size)
        raise ModelError(
            f"{path} {other or 'is no ONNX model, or a truncated one: it has no graph or no opset import'}"
        )
    check_text(path, model)
    if sys.platform == "win32":
        use_forward_slashes(model)
    if not model.graph.node:
        raise ModelError(f"{path} has a graph without nodes; export the model again")
    _check_opsets(path, model)
    _check_arities(path, model)
    _check_tensors(path, model)
    _drop_constant_inputs(model)
    _check_edges(path, model.graph)
    check_external(path, model)
    opset = opset_of(model)
    return (convert_opset(path, model, SMALLEST_OPSET) if opset < SMALLEST_OPSET else model), opset


def _drop_constant_inputs(model: onnx.ModelProto) -> None:
    """Removes initializers from the graph's inputs in models of an IR version below 4, where they are constants.

    From version 4 on, an initializer that is an input is a default, which a caller may override.
    """
    constants = {t.name for t in model.graph.initializer}
    inputs = [i for i in model.graph.input if i.name not in constants]
    if model.ir_version < _IR_OF_DEFAULTS and len(inputs) < len(model.graph.input):
        kept = [onnx.ValueInfoProto.FromString(i.SerializeToString()) for i in inputs]
        del model.graph.input[:]
        model.graph.input.extend(kept)
        model.ir_version = _IR_OF_DEFAULTS  # the model means the same without these inputs


def _check_opsets(path: Path, model: onnx.ModelProto) -> None:
    expected = f"{OLDEST_CONVERTED} to {LARGEST_OPSET}"
    standard = [e.version for e in model.opset_import if e.domain in STANDARD_DOMAINS]
    if not standard:
        raise ModelError(f"{path} imports no opset of the standard domain, expected {expected}")
    for version in standard:
        if not OLDEST_CONVERTED <= version <= LARGEST_OPSET:
            raise ModelError(f"{path} has opset {version}, expected {expected}; export it again")
    domains = _KNOWN_DOMAINS | {f.domain for f in model.functions} | {e.domain for e in model.opset_import}
    for node in model.graph.node:
        if node.domain not in domains:
            raise ModelError(f"{path}: {describe(node)} is of domain {node.domain!r}, which the model does not import")


@dataclass(frozen=True)
class _Arity:
    """Least and most inputs and outputs of an operator, and its required attributes."""

    inputs: tuple[int, int]
    outputs: tuple[int, int]
    required: tuple[str, ...]


def _find_arity(kind: str, opset: int) -> _Arity | None:
    """The arity of a standard operator; None where the onnx package does not know the operator."""
    try:
        schema = onnx.defs.get_schema(kind, opset, "")
    except onnx.defs.SchemaError:
        return None
    required = tuple(name for name, attribute in schema.attributes.items() if attribute.required)
    return _Arity((schema.min_input, schema.max_input), (schema.min_output, schema.max_output), required)


def _check_arities(path: Path, model: onnx.ModelProto) -> None:
    """Standard nodes have the inputs, outputs and attributes that their operator requires."""
    opset = opset_of(model)
    arity_by_op: dict[str, _Arity | None] = {}  # a schema look-up is slow
    for node in model.graph.node:
        if not is_standard(node):
            continue
        kind = node.op_type
        if kind not in arity_by_op:
            arity_by_op[kind] = _find_arity(kind, opset)
        arity = arity_by_op[kind]
        if arity is None:
            continue
        for what, count, (least, most) in (
            ("inputs", len(node.input), arity.inputs),
            ("outputs", len(node.output), arity.outputs),
        ):
            if not least <= count <= most:
                expected = (
                    str(least) if least == most else f"{least} to {most}" if most < 1 << 20 else f"{least} or more"
                )
                raise ModelError(
                    f"{path}: {describe(node)} has {count} {what}, but {node.op_type} of opset {opset} has {expected}"
                )
        attribute_names = {a.name for a in node.attribute}
        for name in arity.required:
            if name not in attribute_names:
                raise ModelError(f"{path}: {describe(node)} has no attribute {name!r}, which {node.op_type} needs")


def _check_tensors(path: Path, model: onnx.ModelProto) -> None:
    """Every constant holds as many elements as its shape has."""
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
    """Every tensor is written once and before it is read. Runtimes accept nodes in any order; they are sorted here."""
    available = {i.name for i in graph.input} | {t.name for t in graph.initializer} | {""}
    available |= {t.values.name for t in graph.sparse_initializer}
    writers: dict[str, int] = {}
    for i, node in enumerate(graph.node):
        for name in node.output:
            if name and (name in available or name in writers):
                raise ModelError(f"{path}: {describe(node)} writes {name!r}, which is written already")
            writers[name] = i
    is_sorted = True
    for i, node in enumerate(graph.node):
        for name in node.input:
            if name not in available and name not in writers:
                raise ModelError(f"{path}: {describe(node)} reads {name!r}, which nothing writes")
            is_sorted = is_sorted and (name in available or writers[name] < i)
    for output in graph.output:
        if output.name not in available and output.name not in writers:
            raise ModelError(f"{path}: output {output.name!r} is written by no node")
    if not is_sorted:
        _sort(path, graph)


def _sort(path: Path, graph: onnx.GraphProto) -> None:
    """Puts writers before readers, otherwise in the order of the file."""
    order = topological_order(graph.node)
    if len(order) != len(graph.node):
        stuck = graph.node[min(set(range(len(graph.node))) - set(order))]
        raise ModelError(f"{path}: {describe(stuck)} is part of a cycle or waits for one")
    replace_nodes(graph, [graph.node[i] for i in order])


def save(model: onnx.ModelProto, path: Path, source: Path) -> set[str]:
    """Writes a model completely or not at all. External data is copied when the output is in another folder.

    Weights in another layout than the original's go into a file of external data of their own
    (:mod:`stof.graph.derived_data`).

    Returns:
        The files of its external data, relative to its folder.

    Raises:
        ArgumentError: when the output cannot be written, or is the input.
        ModelError: when the model does not fit into a file, or its external data is not as long as it was.
    """
    derived = find_derived(model)
    data = None if derived else _serialize(model, path)  # a model that is too large is found before anything is written
    with _check_writing(path, source), temporary_file(path.parent) as new, DataCopier(new) as copier:
        derived_file = ""
        if data is None:
            derived_file = copier.stage_new(path.parent, data_pieces(derived, source.parent), partial(data_name, path))
            model = with_derived(model, derived, derived_file)
            data = _serialize(model, path)
        for copy in data_to_copy(model, path, source):
            if copy.location != derived_file:
                copier.stage(copy)
        new.write(data)
        copier.publish()
        check_external(path, model)
        new.replace(path)
        files = external_files(model)
        remove_old_data(path, files)
        return files


def _serialize(model: onnx.ModelProto, path: Path) -> bytes:
    try:
        return bytes(model.SerializeToString(deterministic=True))
    except (EncodeError, ValueError) as error:
        raise ModelError(f"{path} would exceed the 2 GB of a protobuf: store the weights as external data") from error


def copy_model(model: onnx.ModelProto, path: Path, source: Path) -> None:
    """Copies a model's file byte by byte, completely or not at all, and its external data as :func:`save` does.

    Args:
        model: the model as it was read from ``source``.
        path: the new file.
        source: the model's file.

    Raises:
        ArgumentError: when the output cannot be written, is the input, or the input changes meanwhile.
        ModelError: when the model's external data is not as long as it was.
    """
    with _check_writing(path, source), temporary_file(path.parent) as new, DataCopier(new) as copier:
        for copy in data_to_copy(model, path, source):
            copier.stage(copy)
        new.copy(source)
        copier.publish()
        check_external(path, model)
        new.replace(path)


@contextmanager
def _check_writing(path: Path, source: Path) -> Iterator[None]:
    """Checks an output, and says of what fails in the block that it cannot be written."""
    if path.exists() and source.exists() and path.samefile(source):
        raise ArgumentError(f"the output {path} is the input; choose another file with -o")
    if path.is_dir():
        raise ArgumentError(f"the output {path} is a folder; name a file with -o")
    if not path.parent.is_dir():
        raise ArgumentError(f"the folder {path.parent} does not exist; make it, or choose another output with -o")
    try:
        yield
    except OSError as error:
        raise ArgumentError(f"{path} cannot be written: {error.strerror or error}") from error
