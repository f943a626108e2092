# SPDX-License-Identifier: Apache-2.0
"""Counts the attention of a graph by running it, with nothing of stof's matcher.

A softmax counts when its output reaches a product with a value, when the way back to the product of query and key, or to
several where the scores are assembled of parts, is free of other activations, and when whatever is added to the scores,
multiplied with them or selects them is the same for other tokens, pixels or samples: then it depends on shapes, constants,
padding, positions or segments alone.

``python tests/zoo/count_sites.py [NAME ...]`` prints each softmax with what was found.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import onnx
from zoo_inputs import feeds, filled, names, runnable, session

_PRODUCTS = frozenset({"MatMul", "Einsum", "FusedMatMul"})
_FUSED = {"Attention": 3, "MultiHeadAttention": 5, "GroupQueryAttention": 10}  # with the place of their mask
_MOVES = {"Reshape", "Transpose", "Squeeze", "Unsqueeze", "Slice", "Split", "Flatten", "Pad", "Gather", "Expand"}
_CONTINUE = frozenset(_MOVES | {"Cast", "Identity", "Dropout", "Where", "Mul"})
_ASSEMBLES = frozenset({"Concat", "ScatterND", "ScatterElements", "Where"})  # scores that are computed in parts
_FARTHEST = 400


@dataclass(frozen=True)
class Counted:
    """One softmax or fused node: whether it counts, and in words why not."""

    name: str  # of the node
    output: str
    counts: bool
    words: str


class Counter:
    """Counts in one graph, of which two runs are compared that differ in content alone."""

    def __init__(self, name: str, length: int = 41) -> None:
        model = runnable(filled(name))
        self.nodes = {o: n for n in model.graph.node for o in n.output if o}
        self.users: dict[str, list[onnx.NodeProto]] = {}
        for node in model.graph.node:
            for tensor in node.input:
                self.users.setdefault(tensor, []).append(node)
        self.model = model
        self.parts: dict[str, tuple[bool, str]] = {}
        self.fixed = {t.name for t in model.graph.initializer}
        self.varies = self._compare(name, length)

    def _compare(self, name: str, length: int) -> set[str]:
        """The tensors that differ between two runs."""
        probed = onnx.ModelProto()
        probed.CopyFrom(self.model)
        outputs = [o for o in self.nodes if o not in {v.name for v in probed.graph.output}]
        probed.graph.output.extend(onnx.ValueInfoProto(name=o) for o in outputs)
        runner = session(probed, optimized=False)
        given = [feeds(name, self.model, 2, length, "left", seed) for seed in (1, 2)]
        produced = [o.name for o in runner.get_outputs()]
        first, second = (dict(zip(produced, runner.run(None, f), strict=True)) | f for f in given)
        return {n for n, a in first.items() if isinstance(a, np.ndarray) and not _same(a, second[n])}

    def count(self) -> list[Counted]:
        """Every softmax and fused attention node that could be attention."""
        found = []
        for node in self.model.graph.node:
            if node.op_type == "Softmax":
                if self._weighs(node.output[0]):
                    found.append(Counted(node.name, node.output[0], *self._scores(node.input[0])))
            elif node.op_type in _FUSED:
                place = _FUSED[node.op_type]
                mask = node.input[place] if place < len(node.input) else ""
                found.append(
                    Counted(node.name, node.output[0], mask not in self.varies, "its mask is computed from activations")
                )
        return found

    def _weighs(self, tensor: str) -> bool:
        """Whether a tensor is multiplied with a value that is no weight."""
        pending, seen = [tensor], {tensor}
        while pending:
            name = pending.pop()
            for node in self.users.get(name, []):
                if node.op_type in _PRODUCTS:
                    if any(i != name and i not in self.fixed and i in self.varies for i in node.input):
                        return True
                elif node.op_type in _CONTINUE:
                    new = [o for o in node.output if o not in seen]
                    seen.update(new)
                    pending.extend(new)
        return False

    def _scores(self, tensor: str) -> tuple[bool, str]:
        """From the softmax backwards: every other tensor on the way must be free of content."""
        for _ in range(_FARTHEST):
            node = self.nodes.get(tensor)
            if node is None:
                return False, "the scores are no product"
            varying = [i for i in dict.fromkeys(node.input) if i in self.varies]
            if node.op_type in _PRODUCTS:
                return True, "" if len(varying) == 2 else "one operand of the scores is a weight"
            shifted = self._shift(node)
            if shifted:
                varying = [shifted]
            if node.op_type in _ASSEMBLES and len(varying) > 1:
                found = [self._part(v) for v in varying]
                return next((f for f in found if not f[0]), (True, ""))
            if len(varying) != 1:
                return False, f"{node.op_type} mixes the scores with other activations"
            tensor = varying[0]
        return False, "no product was found"

    def _part(self, tensor: str) -> tuple[bool, str]:
        """The same for one of the parts from which scores are assembled; each is looked at once."""
        if tensor not in self.parts:
            self.parts[tensor] = (True, "")  # where parts lead to each other
            self.parts[tensor] = self._scores(tensor)
        return self.parts[tensor]

    def _shift(self, node: onnx.NodeProto) -> str:
        """The scores below the subtraction of a row's own maximum."""
        if node.op_type != "Sub" or node.input[1] not in self.nodes:
            return ""
        largest = self.nodes[node.input[1]]
        return node.input[0] if largest.op_type == "ReduceMax" and largest.input[0] == node.input[0] else ""


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and bool(np.array_equal(a, b, equal_nan=a.dtype.kind == "f"))


def count(name: str) -> list[Counted]:
    """What one graph has."""
    return Counter(name).count()


def main(wanted: Iterable[str]) -> None:
    """Prints the counts."""
    total = 0
    for name in wanted:
        found = count(name)
        total += sum(c.counts for c in found)
        print(f"{name}: {sum(c.counts for c in found)} of {len(found)}")
        for one in found:
            if not one.counts:
                print(f"    {one.output}: {one.words}")
    print(f"{total} in all")


if __name__ == "__main__":
    main(sys.argv[1:] or names())
