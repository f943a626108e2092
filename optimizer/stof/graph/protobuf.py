# SPDX-License-Identifier: Apache-2.0
"""Copies and edits of ONNX protobufs in place, for the editor and for passes that work without it."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import onnx


def copy_model(model: onnx.ModelProto) -> onnx.ModelProto:
    """A deep copy of a model."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    return copy


def copy_node(node: onnx.NodeProto) -> onnx.NodeProto:
    """A deep copy of a node."""
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    return copy


def replace_nodes(graph: onnx.GraphProto, nodes: Iterable[onnx.NodeProto]) -> None:
    """Gives a graph other nodes, which may be its own in another order."""
    copies = [copy_node(n) for n in nodes]
    del graph.node[:]
    graph.node.extend(copies)


def copy_with_nodes(model: onnx.ModelProto, nodes: Iterable[onnx.NodeProto]) -> onnx.ModelProto:
    """A copy of a model with other nodes, which may be its own."""
    copies = [copy_node(n) for n in nodes]
    copy = copy_model(model)
    del copy.graph.node[:]
    copy.graph.node.extend(copies)
    return copy


def remove_named(entries: Any, names: Collection[str]) -> None:
    """Deletes the entries of a repeated field that have one of these names, in place: a copy would double the weights."""
    for i in reversed(range(len(entries))):
        if entries[i].name in names:
            del entries[i]
