# SPDX-License-Identifier: Apache-2.0
"""Numbers for tensors that are computed alike, so that a mask that every layer makes anew is checked once."""

from __future__ import annotations

from collections.abc import Mapping

from stof.graph.index import GraphIndex, is_standard, subgraphs
from stof.symbolic import Symbolic


class SubgraphHashes:
    """Gives equal numbers to tensors that equal operators make of equal tensors."""

    def __init__(self, index: GraphIndex, symbolic: Symbolic) -> None:
        self.index = index
        self.symbolic = symbolic
        self._tensors: dict[str, int] = {}
        self._numbers: dict[tuple[object, ...], int] = {}

    def of(self, tensor: str) -> int:
        """The number of a tensor."""
        number = self._tensors.get(tensor)
        if number is None:
            number = self._numbers.setdefault(self._key(tensor), len(self._numbers))
            self._tensors[tensor] = number
        return number

    def of_cut(self, tensor: str, cut: Mapping[str, object]) -> int:
        """The number of a tensor with others, by name, as if they were equal where they have equal keys."""
        hashes = SubgraphHashes(self.index, self.symbolic)
        hashes._numbers = self._numbers
        for name, key in cut.items():
            hashes._tensors[name] = self._numbers.setdefault(("cut", key), len(self._numbers))
        return hashes.of(tensor)

    def _key(self, tensor: str) -> tuple[object, ...]:
        node = self.index.producer(tensor)
        if node is None or subgraphs(node):
            return ("named", tensor)
        attributes = tuple(sorted(a.SerializeToString(deterministic=True) for a in node.attribute))
        if node.op_type == "Shape" and is_standard(node):
            shape = self.symbolic.shape(node.input[0])
            # A shape is the same whatever tensor has it.
            return ("named", tensor) if shape is None else ("shape", shape, attributes)
        inputs = tuple(self.of(n) if n else -1 for n in node.input)
        return (node.domain, node.op_type, attributes, inputs, list(node.output).index(tensor))
