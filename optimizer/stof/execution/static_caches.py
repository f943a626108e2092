# SPDX-License-Identifier: Apache-2.0
"""Static KV caches in a graph: buffers of fixed capacity, into which each step writes its new keys or values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import onnx

from stof.execution.input_uses import find_source
from stof.graph.index import GraphIndex, domain_of
from stof.symbolic import Symbolic
from stof.symbolic.algebra.terms import Int

_NONPAD = 6  # the input nonpad_kv_seqlen of Attention


@dataclass(frozen=True)
class StaticCache:
    """One buffer and what a step writes to it.

    Attributes:
        buffer: the buffer before the step.
        output: the buffer after it.
        capacity: how many positions it has room for.
        new: how many positions a step writes.
        first: the tensor of the first position that is written; empty: it is 0.
    """

    buffer: str
    output: str
    capacity: Int
    new: Int
    first: str


def find_static_caches(index: GraphIndex, symbolic: Symbolic, inputs: set[str]) -> list[StaticCache]:
    """The static caches that are model inputs, written to by nodes of the main graph."""
    caches = [_read_write(node, symbolic) for node in index.graph.node if node.input]
    return [c for c in caches if c is not None and find_source(index, c.buffer) in inputs]


def _read_write(node: onnx.NodeProto, symbolic: Symbolic) -> StaticCache | None:
    if domain_of(node) or node.op_type not in ("TensorScatter", "ScatterElements", "ScatterND"):
        return None
    data = symbolic.shape(node.input[0])
    axis = next((a.i for a in node.attribute if a.name == "axis"), -2 if node.op_type == "TensorScatter" else 0)
    axis = 0 if node.op_type == "ScatterND" else axis
    written = symbolic.shape(node.input[1])
    if (
        not data
        or len(data) < 3
        or not written
        or not -len(data) <= axis < len(data)
        or not -len(written) <= axis < len(written)
    ):
        return None
    if node.op_type == "TensorScatter":
        first = node.input[2] if len(node.input) > 2 else ""
        return StaticCache(node.input[0], node.output[0], data[axis], written[axis], first)
    # Rows of the first axis by a list of their numbers [n, 1]; or as many numbers as elements.
    if node.op_type == "ScatterND" and (len(written) != 2 or written[1].constant != 1):
        return None
    return StaticCache(node.input[0], node.output[0], data[axis], written[axis], node.input[1])


def find_filled_lengths(index: GraphIndex, symbolic: Symbolic, inputs: set[str]) -> dict[str, StaticCache]:
    """The model inputs that state how many keys caches hold after a step: ``nonpad_kv_seqlen`` of Attention.

    Returns:
        For each of them its cache, whose ``first`` is an input, too.
    """
    writes = {c.output: c for c in find_static_caches(index, symbolic, inputs)}
    filled: dict[str, StaticCache] = {}
    for node in _attention_nodes(index):
        cache = writes.get(find_source(index, node.input[1]))
        lengths = find_source(index, node.input[_NONPAD])
        first = "" if cache is None or not cache.first else find_source(index, cache.first)
        if cache is not None and lengths in inputs and (first in inputs or not cache.first) and first != lengths:
            filled[lengths] = replace(cache, first=first)
    return filled


def _attention_nodes(index: GraphIndex) -> Iterator[onnx.NodeProto]:
    for node in index.graph.node:
        if not domain_of(node) and node.op_type == "Attention" and len(node.input) > _NONPAD and node.input[_NONPAD]:
            yield node
