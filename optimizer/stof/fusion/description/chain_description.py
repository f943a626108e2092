# SPDX-License-Identifier: Apache-2.0
"""Descriptions of fused chains as values: what StofChain, or the epilogue of StofGemm, computes.

A text is parsed once, where it enters: from a node's attribute. It is printed where it leaves: into a node, a report, the
tuning cache or the library.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from onnx import TensorProto

from stof.execution.upcast import FORBIDS, FP16_FORBIDS
from stof.fusion.description.format import ARITY
from stof.fusion.description.nodes import AffineIndex, Axes, AxisSize, ChainOutput, ExpressionNode, Lets, number_node
from stof.fusion.description.parser import parse_parts
from stof.fusion.description.printer import print_chain

_TYPE_NAMES = {int(TensorProto.FLOAT16): "f16", int(TensorProto.BFLOAT16): "bf16"}


@dataclass(frozen=True, eq=False, repr=False)
class ChainDescription:
    """A chain: its axes, named values and outputs (docs/reference/chain-format.md).

    Two descriptions are equal when they print the same text.

    Attributes:
        axes: names and sizes, outermost first; the last one is the row.
        lets: values with a name, which later ones and outputs use.
        outs: the outputs.
    """

    axes: Axes
    lets: Lets
    outs: tuple[ChainOutput, ...]

    @classmethod
    def parse(cls, text: str) -> ChainDescription:
        """A description from its text.

        Raises:
            ModelError: with the line, what was found and what was expected.
        """
        return cls(*parse_parts(text))

    @cached_property
    def text(self) -> str:
        """The text, as attributes and the tuning cache hold it."""
        return print_chain(self.axes, self.lets, self.outs)

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"ChainDescription({self.text!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ChainDescription) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)

    def nodes(self) -> Iterator[ExpressionNode]:
        """Every node of its expressions."""
        pending = [*(value for _, value in self.lets), *(out.expression for out in self.outs)]
        while pending:
            node = pending.pop()
            yield node
            pending.extend(node.arguments)

    @cached_property
    def values(self) -> frozenset[ExpressionNode]:
        """The different expressions that it computes."""
        return frozenset(node for node in self.nodes() if node.op != "let")

    @property
    def reads(self) -> list[ExpressionNode]:
        """The different reads of inputs."""
        return [node for node in self.values if node.op == "read"]

    @cached_property
    def functions(self) -> frozenset[str]:
        """The functions of the grammar that it calls."""
        return frozenset(node.op for node in self.nodes() if node.op in ARITY)

    def has_only_plain_indices(self, axes: Collection[str]) -> bool:
        """Whether each of some axes is used as an index by itself only, so that no value depends on its size."""
        if any(set(dim) & set(axes) for out in self.outs for dim in out.dims if len(dim) > 1):
            return False
        for node in self.nodes():
            if node.op == "axis" and node.value in axes:
                return False
            for index in node.indices:
                names = {name for name, _ in index.terms}
                if names & set(axes) and index != AffineIndex(((next(iter(names)), 1),), 0):
                    return False
        return True

    def with_sizes(self, sizes: Mapping[int, int]) -> ChainDescription:
        """The description with other sizes in place of fixed sizes of axes."""
        axes = ((n, s if s.input >= 0 else AxisSize(sizes.get(s.number, s.number))) for n, s in self.axes)
        return replace(self, axes=tuple(axes))

    def with_expressions(self, change: Callable[[ExpressionNode], ExpressionNode]) -> ChainDescription:
        """The description with every node of its expressions changed, outermost first."""

        def apply(node: ExpressionNode) -> ExpressionNode:
            changed = change(node)
            return replace(changed, arguments=tuple(apply(a) for a in changed.arguments))

        lets = tuple((name, apply(value)) for name, value in self.lets)
        outs = tuple(replace(out, expression=apply(out.expression)) for out in self.outs)
        return replace(self, lets=lets, outs=outs)

    def widened(self, kinds: Collection[int]) -> ChainDescription:
        """The description with fp32 in place of the given element types; itself where it has none of them.

        A number of fp16 that forbids stands there as ``f16(-65504)``. It becomes what a widened model has in its place
        (upcast.py); any other number is of fp32, and stays.
        """
        names = {_TYPE_NAMES[kind] for kind in kinds if kind in _TYPE_NAMES}
        if not names & {*self.functions, *(out.dtype for out in self.outs)}:
            return self
        widened = self.with_expressions(lambda node: _widen_node(node, names))
        outs = (replace(out, dtype="f32" if out.dtype in names else out.dtype) for out in widened.outs)
        return replace(widened, outs=tuple(outs))


def widen_attribute(text: str, kinds: Collection[int]) -> str:
    """The text of a description with fp32 in place of the given element types; as it is where it has none of them."""
    description = ChainDescription.parse(text)
    widened = description.widened(kinds)
    return text if widened is description else widened.text


def _widen_node(node: ExpressionNode, names: Collection[str]) -> ExpressionNode:
    if node.op not in names:
        return node
    operand = node.arguments[0]
    if node.op == "f16" and operand.op == "number" and float(operand.value) <= FP16_FORBIDS:
        return number_node(FORBIDS)
    return replace(node, op="f32")
