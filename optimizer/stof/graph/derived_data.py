# SPDX-License-Identifier: Apache-2.0
"""External data of a new model: weights in another layout than the original's.

While a model is verified, such a weight is computed by nodes from the original's external data (:mod:`stof.graph.weight_layout`),
or is an initializer in the model. What is written holds it in a file of external data, which runtimes map, so that rows that are
never read take no memory. The file's name ends with a digest of its bytes: a model that another run writes under the same name
never meets data of the run before.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx

from stof.graph.external_data import (
    ITEM_SIZES,
    DataLocation,
    external_files,
    is_external,
    map_array,
    set_location,
    tensor_bytes,
)
from stof.graph.index import DOMAIN, all_nodes, captured_tensors
from stof.graph.protobuf import copy_with_nodes, remove_named
from stof.graph.weight_layout import LAYOUT_MARK, LAYOUT_OPS, LayoutReader, WeightLayout

_ALIGNMENT = 4096  # a page: runtimes map whole ones
_LEAST = 1 << 20  # bytes of an initializer that is worth a place in the file
_LARGE = 1 << 30  # bytes of constants in a model
_DIGEST_DIGITS = 16


@dataclass(frozen=True)
class DerivedTensor:
    """A weight in its new layout.

    Attributes:
        name: of the tensor.
        source: the initializer that holds its values.
        layout: what is taken of the source, and how it lies; None: all, as it is stored in the model.
        nodes: what computes it, with the last one first.
    """

    name: str
    source: onnx.TensorProto
    layout: WeightLayout | None = None
    nodes: tuple[onnx.NodeProto, ...] = ()

    @property
    def dims(self) -> list[int]:
        """The shape in the new layout."""
        return [int(d) for d in self.source.dims] if self.layout is None else self.layout.dims(self.source.dims)

    @property
    def size(self) -> int:
        """Bytes."""
        if self.layout is None:
            return len(self.source.raw_data)
        return math.prod(self.dims) * ITEM_SIZES[self.source.data_type]

    def pieces(self, folder: Path) -> Iterator[bytes]:
        """The bytes in order.

        Args:
            folder: where the source's external data lies.

        Raises:
            OSError: when it cannot be read.
        """
        if self.layout is None:
            yield self.source.raw_data
            return
        for piece in self.layout.pieces(map_array(self.source, folder)):
            yield piece.tobytes()


def find_derived(model: onnx.ModelProto) -> list[DerivedTensor]:
    """The weights in another layout; none where the model has no external data and at most 1 GiB of constants.

    They are those that operators of stof alone read, and those whose node is marked.
    """
    if not external_files(model) and not _is_large(model):
        return []
    reader = LayoutReader(model.graph)
    others = {t for n in model.graph.node for t in captured_tensors(n)} | {o.name for o in model.graph.output}
    others |= {i.name for i in model.graph.input}
    operands: dict[str, None] = {}
    for node in model.graph.node:
        if node.domain == DOMAIN:
            operands |= dict.fromkeys(t for t in node.input if t)
        else:
            others.update(node.input)
    derived = []
    for node in model.graph.node:
        if node.op_type not in LAYOUT_OPS or len(node.output) != 1:
            continue
        name = node.output[0]
        is_marked = node.doc_string == LAYOUT_MARK
        if not is_marked and (name in others or name not in operands):
            continue
        read = reader.read(name)
        if read is None or not is_external(read.source) or read.source.data_type not in ITEM_SIZES:
            continue
        if math.prod(read.source.dims):
            derived.append(DerivedTensor(name, read.source, read.layout, tuple(read.nodes)))
    for name in operands:
        tensor = reader.stored.get(name)
        if tensor is not None and name not in others and len(tensor.raw_data) >= _LEAST and not is_external(tensor):
            derived.append(DerivedTensor(name, tensor))
    return derived


def _is_large(model: onnx.ModelProto) -> bool:
    """Whether constants exceed 1 GiB.

    Such a model may pass protobuf's limit of 2 GB when its weights are transposed, so these go into a data file.
    """
    return sum(tensor_bytes(t) or 0 for t in model.graph.initializer) > _LARGE


def data_pieces(tensors: Sequence[DerivedTensor], folder: Path) -> Iterator[bytes]:
    """The bytes of the file: the tensors in order, each from a new page on."""
    at = 0
    for tensor in tensors:
        yield bytes(-at % _ALIGNMENT)
        at += -at % _ALIGNMENT
        for piece in tensor.pieces(folder):
            yield piece
            at += len(piece)


def with_derived(model: onnx.ModelProto, tensors: Sequence[DerivedTensor], location: str) -> onnx.ModelProto:
    """A copy of a model that reads the tensors from the file."""
    outputs = {o.name for o in model.graph.output}
    removed = {t.name for t in tensors}
    nodes = [n for n in model.graph.node if not removed.intersection(n.output)]
    # Nodes in front of the last one of a layout, and constants, go where nothing else reads them.
    inner = {o for t in tensors for n in t.nodes[1:] for o in n.output}
    while True:
        still_read = {t for n in all_nodes(nodes) for t in n.input} | outputs
        still_read |= {t for n in nodes for t in captured_tensors(n)}
        kept = [n for n in nodes if not (inner.intersection(n.output) and still_read.isdisjoint(n.output))]
        if len(kept) == len(nodes):
            break
        nodes = kept
    result = copy_with_nodes(model, nodes)
    sources = {t for derived in tensors for n in derived.nodes for t in n.input} - still_read
    remove_named(result.graph.initializer, removed | sources)
    at = 0
    for tensor in tensors:
        at += -at % _ALIGNMENT
        kept_tensor = onnx.TensorProto(name=tensor.name, dims=tensor.dims, data_type=tensor.source.data_type)
        set_location(kept_tensor, DataLocation(location, at, tensor.size))
        result.graph.initializer.append(kept_tensor)
        at += tensor.size
    return result


def data_name(model: Path, digest: str) -> str:
    """The name of the file beside a model, from a digest of its bytes in hexadecimal digits."""
    return f"{model.name}.{digest[:_DIGEST_DIGITS]}.data"


def remove_old_data(model: Path, kept: Collection[str]) -> None:
    """Removes the files of earlier models under this name, but those that the model reads."""
    pattern = re.compile(re.escape(model.name) + rf"\.[0-9a-f]{{{_DIGEST_DIGITS}}}\.data")
    with contextlib.suppress(OSError):
        for path in model.parent.iterdir():
            if pattern.fullmatch(path.name) and path.name not in kept and path.is_file() and not path.is_symlink():
                path.unlink()
