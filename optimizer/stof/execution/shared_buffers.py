# SPDX-License-Identifier: Apache-2.0
"""Inputs and outputs that have to be one buffer: ONNX Runtime's SparseAttention refuses other caches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import onnx

from stof.graph.index import DOMAIN, all_nodes, domain_of

_PAST, _PRESENT = (3, 4), (1, 2)  # inputs and outputs of SparseAttention and StofCachedAttention
Pairs = tuple[tuple[str, str], ...]


def find_shared_buffers(model: onnx.ModelProto) -> Pairs:
    """Pairs of a model input, the past of a SparseAttention, and a model output, its present.

    Calls of local functions that hold such nodes count, too. A pair that shares a name with an earlier one is left out: one
    buffer cannot be two outputs.
    """
    bodies = {(f.domain, f.name): f for f in model.functions}
    function_pairs: dict[tuple[str, str], Pairs] = {}
    inputs, outputs = ({i.name for i in field} for field in (model.graph.input, model.graph.output))
    pairs = []
    for past, present in _pairs(model.graph.node, bodies, function_pairs):
        if past in inputs and present in outputs:
            inputs.remove(past)
            outputs.remove(present)
            pairs.append((past, present))
    return tuple(pairs)


def _pairs(
    nodes: Iterable[onnx.NodeProto],
    bodies: dict[tuple[str, str], onnx.FunctionProto],
    function_pairs: dict[tuple[str, str], Pairs],
) -> Iterator[tuple[str, str]]:
    """Pasts and presents of nodes and calls; ``function_pairs`` gets those of functions, by their own names."""
    for node in nodes:
        body = bodies.get((node.domain, node.op_type))
        if _is_sparse(node) or (body is not None and _is_cached_attention(body)):
            for past, present in zip(_PAST, _PRESENT, strict=True):
                if past < len(node.input) and present < len(node.output):
                    yield node.input[past], node.output[present]
        elif body is not None:
            key = body.domain, body.name
            if key not in function_pairs:
                function_pairs[key] = ()  # a function that calls itself, which runtimes refuse
                function_pairs[key] = tuple(_pairs(body.node, bodies, function_pairs))
            operands = dict(zip(body.input, node.input, strict=False))
            results = dict(zip(body.output, node.output, strict=False))
            yield from ((operands[a], results[b]) for a, b in function_pairs[key] if a in operands and b in results)


def _is_sparse(node: onnx.NodeProto) -> bool:
    return (domain_of(node), node.op_type) == ("com.microsoft", "SparseAttention")


def _is_cached_attention(body: onnx.FunctionProto) -> bool:
    """Whether a function is the operator in place of SparseAttention nodes, which may lie in branches."""
    return (body.domain, body.name) == (DOMAIN, "StofCachedAttention") and any(
        _is_sparse(n) for n in all_nodes(body.node)
    )
