# SPDX-License-Identifier: Apache-2.0
"""Inputs and outputs that have to be one buffer: ONNX Runtime's SparseAttention refuses other caches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import onnx

_PAST, _PRESENT = (3, 4), (1, 2)  # inputs and outputs of SparseAttention, and of calls that hold one
_SPARSE = ("com.microsoft", "SparseAttention")


def find_shared_buffers(model: onnx.ModelProto) -> tuple[tuple[str, str], ...]:
    """Pairs of a model input, the past of a SparseAttention, and a model output, its present.

    Calls of local functions with such a node count, too: their inputs and outputs have the same indices. Pairs that share a
    name with an earlier one are left out, as one buffer cannot be two outputs.
    """
    holders = {(f.domain, f.name) for f in model.functions if any(_is_sparse(n) for n in _all_nodes(f.node))}
    inputs, outputs = ({i.name for i in field} for field in (model.graph.input, model.graph.output))
    found: list[tuple[str, str]] = []
    for node in model.graph.node:
        if not _is_sparse(node) and (node.domain, node.op_type) not in holders:
            continue
        for past, present in zip(_PAST, _PRESENT, strict=True):
            if past < len(node.input) and present < len(node.output):
                pair = node.input[past], node.output[present]
                if pair[0] in inputs and pair[1] in outputs:
                    inputs.remove(pair[0])
                    outputs.remove(pair[1])
                    found.append(pair)
    return tuple(found)


def _is_sparse(node: onnx.NodeProto) -> bool:
    return (node.domain, node.op_type) == _SPARSE


def _all_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    for node in nodes:
        yield node
        for attribute in node.attribute:
            yield from _all_nodes(attribute.g.node)
