# SPDX-License-Identifier: Apache-2.0
"""What TensorRT's parser needs of a graph beside what the standard asks for. Other runtimes read the same graph."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence

import numpy as np
import onnx
from onnx import AttributeProto

from stof.site import LiftedMask

_FIRST_OPERAND = 3


def constants(mask: LiftedMask, slots: Sequence[str]) -> dict[str, str]:
    """The tables of a mask as the attribute ``constants`` (docs/guide/tensorrt.md), since plugins see no values of inputs.

    Entries "INPUT TYPE SHAPE DATA" joined by ";". DATA is base64 of the elements, row-major, little-endian; booleans are
    packed, element i in bit i % 8 of byte i // 8.
    """
    entries = []
    for name, kind, shape, data in mask.tables:
        array = np.frombuffer(data, np.dtype(kind))
        if array.dtype == np.bool_:
            array = np.packbits(array, bitorder="little")
        text = base64.b64encode(array.astype(array.dtype.newbyteorder("<")).tobytes()).decode()
        place = _FIRST_OPERAND + list(slots).index(name)
        entries.append(f"{place} {np.dtype(kind).name} {'x'.join(str(n) for n in shape)} {text}")
    return {"constants": ";".join(entries)} if entries else {}


def name_nodes(model: onnx.ModelProto) -> None:
    """Gives nodes of the main graph and its subgraphs a name of their own where they have none or another's.

    TensorRT tells layers, and the engine's report, apart by them.
    """
    nodes = list(_nodes(model.graph))
    taken = {n.name for n in nodes}
    seen: set[str] = set()
    for node in nodes:
        if not node.name or node.name in seen:
            wanted = node.name or f"{node.op_type}_{node.output[0] if node.output else ''}"
            number = 0
            while (name := f"{wanted}_{number}" if number else wanted) in taken:
                number += 1
            node.name = name
            taken.add(name)
        seen.add(node.name)


def _nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.type == AttributeProto.GRAPH:
                yield from _nodes(attribute.g)
            for inner in attribute.graphs:
                yield from _nodes(inner)
