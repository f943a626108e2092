# SPDX-License-Identifier: Apache-2.0
"""External data of a new model: weights in another layout than the original's.

While a model is verified, such a weight is a Transpose of the original's external data, or an initializer in the model. What is
written holds it in a file of external data, which runtimes map, so that rows that are never read take no memory. The file's name
ends with a digest of its bytes: a model that another run writes under the same name never meets data of the run before.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto

from stof.graph.external_data import external_files, is_external, map_array, tensor_bytes
from stof.graph.index import DOMAIN, all_nodes, captured_tensors
from stof.graph.protobuf import copy_with_nodes, remove_named

_ALIGNMENT = 4096  # a page: runtimes map whole ones
_LEAST = 1 << 20  # bytes of an initializer that is worth a place in the file
_PIECE = 1 << 25  # bytes that are transposed together
_DIGEST_DIGITS = 16


@dataclass(frozen=True)
class DerivedTensor:
    """A weight in its new layout.

    Attributes:
        name: of the tensor.
        source: the initializer that holds its values.
        is_transposed: whether the source is transposed.
    """

    name: str
    source: onnx.TensorProto
    is_transposed: bool

    @property
    def dims(self) -> list[int]:
        """The shape in the new layout."""
        dims = [int(d) for d in self.source.dims]
        return dims[::-1] if self.is_transposed else dims

    def pieces(self, folder: Path) -> Iterator[bytes]:
        """The bytes in order.

        Args:
            folder: where the source's external data lies.

        Raises:
            OSError: when it cannot be read.
        """
        if not self.is_transposed:
            yield self.source.raw_data
            return
        values = map_array(self.source, folder)
        rows = max(1, _PIECE // max(1, values.shape[0] * values.itemsize))
        for start in range(0, values.shape[1], rows):
            yield np.ascontiguousarray(values[:, start : start + rows].T).tobytes()


def find_derived(model: onnx.ModelProto) -> list[DerivedTensor]:
    """The weights in another layout, which operators of stof alone read; none where the model has no external data."""
    if not external_files(model):
        return []
    stored = {t.name: t for t in model.graph.initializer}
    others = {t for n in model.graph.node for t in captured_tensors(n)} | {o.name for o in model.graph.output}
    others |= {i.name for i in model.graph.input}
    own: dict[str, None] = {}
    for node in model.graph.node:
        if node.domain == DOMAIN:
            own |= dict.fromkeys(t for t in node.input if t)
        else:
            others.update(node.input)
    found = []
    for node in model.graph.node:
        source = stored.get(node.input[0]) if node.op_type == "Transpose" and not node.domain else None
        if source is None or not is_external(source) or node.output[0] in others or node.output[0] not in own:
            continue
        if len(source.dims) == 2 and [list(a.ints) for a in node.attribute] == [[1, 0]] and tensor_bytes(source):
            found.append(DerivedTensor(node.output[0], source, True))
    for name in own:
        tensor = stored.get(name)
        if tensor is not None and name not in others and len(tensor.raw_data) >= _LEAST and not is_external(tensor):
            found.append(DerivedTensor(name, tensor, False))
    return found


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
    names = {t.name for t in tensors}
    nodes = [n for n in model.graph.node if not names.intersection(n.output)]
    found = copy_with_nodes(model, nodes)
    still_read = {t for n in all_nodes(nodes) for t in n.input} | {o.name for o in model.graph.output}
    still_read |= {t for n in nodes for t in captured_tensors(n)}
    sources = {t.source.name for t in tensors if t.is_transposed} - still_read
    remove_named(found.graph.initializer, names | sources)
    at = 0
    for tensor in tensors:
        at += -at % _ALIGNMENT
        size = tensor_bytes(tensor.source) or len(tensor.source.raw_data)
        kept = onnx.TensorProto(name=tensor.name, dims=tensor.dims, data_type=tensor.source.data_type)
        kept.data_location = TensorProto.EXTERNAL
        for key, value in (("location", location), ("offset", at), ("length", size)):
            kept.external_data.append(onnx.StringStringEntryProto(key=key, value=str(value)))
        found.graph.initializer.append(kept)
        at += size
    return found


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
