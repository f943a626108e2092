# SPDX-License-Identifier: Apache-2.0
"""Counts the attention of a graph by running it, with nothing of stof's matcher.

A softmax counts when its output reaches a product with a value, when the way back to the product of query and key, or to
several where the scores are assembled of parts, is free of other activations, and when whatever is added to the scores,
multiplied with them or selects them is the same for other tokens, pixels or samples: then it depends on shapes, constants,
padding, positions or segments alone. Terms of relative positions may be added, too, which activations compute: products of
query or key with a table that does not vary, and tables times a factor of each query.

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
_SHIFTS = frozenset(
    _MOVES | {"Cast", "Identity", "Dropout", "Concat", "GatherElements", "GatherND", "Where", "Mul", "Div"}
)


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
        self.rows: set[str] = set()  # tensors with one element in the last axis
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
        arrays = {n: a for n, a in first.items() if isinstance(a, np.ndarray)}
        self.rows = {n for n, a in arrays.items() if a.ndim and a.shape[-1] == 1}
        return {n for n, a in arrays.items() if not _same(a, second[n])}

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
            if len(varying) == 2 and node.op_type == "Add" and (scores := self._without_term(varying)):
                varying = [scores]
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

    def _without_term(self, varying: list[str]) -> str:
        """Of two summands of scores that with the product of query and key; "" where the other is no term of positions."""
        for scores, term in (varying, varying[::-1]):
            sources = self._sources_of_product(scores)
            if sources and self._is_relative(term, sources):
                return scores
        return ""

    def _sources_of_product(self, tensor: str) -> set[str]:
        """Where query and key of scores come from; nothing where no product of both is below."""
        pending, seen = [tensor], {tensor}
        while pending:
            node = self.nodes.get(pending.pop())
            if node is None:
                continue
            varying = [i for i in dict.fromkeys(node.input) if i in self.varies]
            if node.op_type in _PRODUCTS:
                if len(varying) == 2:
                    return {self._source(v) for v in varying}
            elif node.op_type in _SHIFTS | _ASSEMBLES | {"Add"}:
                pending += [v for v in varying if v not in seen]
                seen.update(varying)
        return set()

    def _source(self, tensor: str) -> str:
        """The tensor from which another one comes by moves, and by sums and products with what does not vary."""
        while (node := self.nodes.get(tensor)) is not None:
            varying = [i for i in dict.fromkeys(node.input) if i in self.varies]
            if node.op_type not in _SHIFTS | {"Add", "Sub"} or len(varying) != 1:
                break
            tensor = varying[0]
        return tensor

    def _is_relative(self, tensor: str, sources: set[str]) -> bool:
        """Whether a summand of the scores is a sum of products of query or key with tables, or of tables with factors of rows."""
        node = self.nodes.get(tensor)
        if node is None:
            return False
        varying = [i for i in dict.fromkeys(node.input) if i in self.varies]
        if node.op_type in _PRODUCTS or (node.op_type == "ReduceSum" and self._source(varying[0]) in sources):
            return len(varying) == 1 and self._source(varying[0]) in sources
        if node.op_type == "Mul" and len(varying) == 1 and varying[0] in self.rows:
            return True
        if node.op_type in _SHIFTS | {"Add", "ScatterND"} and varying:
            return all(self._is_relative(v, sources) for v in varying)
        return False

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
