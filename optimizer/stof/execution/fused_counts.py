# SPDX-License-Identifier: Apache-2.0
"""Numbers of keys that ONNX Runtime's fused nodes take: it refuses others, or reads and writes outside of its tensors."""

from __future__ import annotations

import onnx

from stof.execution.input_uses import find_inputs_behind, find_source
from stof.graph.index import GraphIndex, all_nodes, domain_of, node_tensors
from stof.symbolic import Symbolic

# Where fused nodes read numbers of keys, and which they take: from the first one on, to all keys and the second one.
_TAKEN: dict[tuple[str, str, int], tuple[int, int | None]] = {
    ("", "Attention", 6): (0, 0),
    ("com.microsoft", "Attention", 3): (0, None),
    ("com.microsoft", "GroupQueryAttention", 5): (0, -1),  # of the last key, not of keys
    ("com.microsoft", "MultiHeadAttention", 4): (0, None),
}


def find_fused_counts(
    graph: onnx.GraphProto, symbolic: Symbolic, inputs: frozenset[str]
) -> dict[str, tuple[int, int | None]]:
    """The numbers of keys that fused nodes take, by input: from the first one to all keys and the second one, if any.

    Of inputs that lead to other numbers of fused nodes, from one key to all are taken.
    """
    index = GraphIndex(graph)
    key_ranges: dict[str, tuple[int, int | None]] = {}

    def restrict(name: str, least: int, most: int | None) -> None:
        low, high = key_ranges.get(name, (least, most))
        key_ranges[name] = max(low, least), most if high is None else high if most is None else min(high, most)

    for node in graph.node:
        for part in all_nodes([node]):
            if not domain_of(part) and part.op_type != "Attention":
                continue
            if part is not node:  # in a subgraph, whose own tensors have no values here
                for name in find_inputs_behind(index, frozenset(node_tensors(node)), set(inputs)):
                    restrict(name, 1, 0)
                continue
            for input_index, operand in enumerate(node.input):
                if symbolic.dtype(operand) not in (0, onnx.TensorProto.INT32, onnx.TensorProto.INT64):
                    continue
                taken = _TAKEN.get((domain_of(node), node.op_type, input_index))
                source = find_source(index, operand)
                if taken is not None and source in inputs:
                    restrict(source, *taken)
                    continue
                for name in find_inputs_behind(index, frozenset({operand}), set(inputs)):
                    restrict(name, 1, 0)
    return key_ranges
