# SPDX-License-Identifier: Apache-2.0
"""The key padding masks that attention reads: in its mask expression, or in its bias.

A key is padding where an element of a tensor [B, T] is one certain number: 0 in an attention mask, 1 in a mask of padding,
the number of the padding token in token ids. In a mask of floats that the caller gives to be added to the scores, and that
nothing else reads, every element of at most -10000 is padding. All other keys are kept, whether attention allows them or not.
Where it may forbid them, too, a guard decides at run time whether a text has a key at all: else it keeps all rows.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx
from onnx import TensorProto, helper

from stof.graph.index import DOMAIN, captured_tensors, is_standard
from stof.graph.node_builder import Builder
from stof.mask.expression import MaskExpression, allows_number, find_key_vector
from stof.mask.expression_nodes import B, Constant, K, Lookup, Name, Node, in_order, print_node
from stof.mask.site import FORBIDDING_VALUE
from stof.symbolic import Symbolic
from stof.symbolic.algebra.terms import Real, Scalar, integer, var
from stof.symbolic.rules.broadcasting import project
from stof.symbolic.tensor import Index
from stof.unpadding.element_values import ElementValues, find_compared, find_reads

ATTENTION = "StofAttention"
# It takes no packed sequences: it reads padded copies, between nodes that run on real tokens.
QUANTIZED_ATTENTION = "StofQuantizedAttention"
# Operands from which a call knows how many keys there are: the first that it has.
LENGTH_ROLES = ("pad", "segment_k", "bias")
_VECTORS = ("pad", "segment_k")
_ONE = integer(1)
# At a key, of tensors [B, T] with axes of size 1 between these.
_INDICES: tuple[Index, ...] = tuple((var("b"), *[integer(0)] * ones, var("k")) for ones in range(3))
_MOST_HEADS = 64  # of which elements are compared
_STRING = onnx.AttributeProto.STRING
# Results that have the numbers of their first input, in order.
_SAME_NUMBERS = frozenset({"Identity", "Flatten", "Reshape", "Squeeze", "Unsqueeze"})
# Those of results that a mask is moved through on its way to the scores.
_MOVES = _SAME_NUMBERS | {"Cast", "Expand", "Transpose"}
_FLOATS = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE})
_COMPARED = frozenset({TensorProto.INT32, TensorProto.INT64, TensorProto.FLOAT, TensorProto.DOUBLE})
# Operators by which exporters make a mask of numbers.
_COMPARING = frozenset(
    {"Equal", "Not", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "And", "Or", "Where", "Sub", "Mul", "Cast"}
)


@dataclass(frozen=True)
class PadMask:
    """A key padding mask.

    Attributes:
        tensor: its name; [B, T], perhaps with axes of size 1 between these.
        number: its elements of this number are padding.
        is_bound: and those below it.
    """

    tensor: str
    number: float = 0.0
    is_bound: bool = False

    def add_real(self, builder: Builder, tensor: str, dtype: int) -> str:
        """Nodes that compute which elements of a tensor are not padding.

        Args:
            builder: gets the nodes.
            tensor: the mask, in any shape.
            dtype: its element type.
        """
        if self.is_bound:
            number = builder.constant(self.number, np.float32)
            is_padding = builder.add("LessOrEqual", [builder.add("Cast", [tensor], to=TensorProto.FLOAT), number])
            return builder.add("Not", [is_padding])
        if self.number == 0 or dtype == TensorProto.BOOL:
            real = builder.add("Cast", [tensor], to=TensorProto.BOOL)
            return builder.add("Not", [real]) if self.number else real
        wide = dtype
        if dtype not in _COMPARED:
            wide = TensorProto.FLOAT if dtype in _FLOATS else TensorProto.INT64
            tensor = builder.add("Cast", [tensor], to=wide)
        number = builder.constant(self.number, helper.tensor_dtype_to_np_dtype(wide))
        return builder.add("Not", [builder.add("Equal", [tensor, number])])


@dataclass(frozen=True)
class KeyCondition:
    """A guard: a text has a key where one element of an operand fulfils a condition.

    Attributes:
        tensor: the operand.
        role: of the operand.
        text: the condition, a conjunct of attention's mask.
    """

    tensor: str
    role: str
    text: str


@dataclass(frozen=True)
class KeyBias:
    """A guard: the weights of padding are 0 beside keys of which the bias is so much larger.

    Attributes:
        tensor: the bias [B or 1, H or 1, S or 1, T].
        number: its elements at padding, at most.
        of_every_key: all keys that are not padding must have such a bias, since the mask may forbid some; else one.
        skips_padding: padding needs no key as a query.
    """

    tensor: str
    number: float
    of_every_key: bool
    skips_padding: bool = False


Guard = KeyCondition | KeyBias


@dataclass(frozen=True)
class SitePadding:
    """What the mask of one StofAttention node forbids in every row.

    Attributes:
        mask: the padding.
        guard: what decides at run time whether a text has a key; None: all keys but padding are allowed.
        has_averaged_padding: a row of padding between two tokens may see no key, and gives an average over all that there are.
    """

    mask: PadMask
    guard: Guard | None = None
    has_averaged_padding: bool = False

    @property
    def reads_padding(self) -> bool:
        """Whether keys and values at padding reach results at padding, if guards ask for keys there, too."""
        return self.has_averaged_padding and not (isinstance(self.guard, KeyBias) and not self.guard.of_every_key)


def operands_of(node: onnx.NodeProto) -> dict[str, str]:
    """The operands of an attention node that it uses, by role."""
    text = next((a.s.decode() for a in node.attribute if a.name == "operands"), "")
    return {role: name for role, name in zip(text.split(), node.input[3:], strict=False) if role != "unused"}


def is_attention(node: onnx.NodeProto) -> bool:
    """Whether a node is one of the attention operators that have a mask expression, and no cache."""
    return node.domain == DOMAIN and node.op_type in (ATTENTION, QUANTIZED_ATTENTION)


def _is_rounded_by_range(node: onnx.NodeProto) -> bool:
    """Whether the weights' scale is found at run time over all rows: without padding it would differ."""
    return any(a.name == "weight_range" and a.s == b"dynamic" for a in node.attribute)


def may_have_padding(node: onnx.NodeProto) -> bool:
    """Whether a node is attention that may read a key padding mask."""
    if not is_attention(node) or _is_rounded_by_range(node):
        return False
    roles = operands_of(node).keys()
    return bool(roles & set(LENGTH_ROLES)) and not any(r.startswith("cumulative_") for r in roles)


def find_added_masks(graph: onnx.GraphProto) -> frozenset[str]:
    """Inputs of floats that are added to the scores of attention and read by nothing else: masks of the caller."""
    others = {o.name for o in graph.output}
    added: dict[str, str] = {}  # what is moved to a bias, by the bias
    for node in reversed(graph.node):
        biases = {operands_of(node).get("bias", "")} if may_have_padding(node) else set()
        is_moved = (
            is_standard(node) and node.op_type in _MOVES and node.output[0] in added and node.output[0] not in others
        )
        moved = {node.input[0]} if is_moved else set()
        if not (is_standard(node) and node.op_type in ("Shape", "Size")):
            others |= {*node.input, *captured_tensors(node)} - biases - moved
        added |= dict.fromkeys(biases | moved, "")
    inputs = {i.name for i in graph.input if i.type.tensor_type.elem_type in _FLOATS} - {
        t.name for t in graph.initializer
    }
    return frozenset(inputs & added.keys() - others)


def find_padding(
    node: onnx.NodeProto,
    symbolic: Symbolic,
    writers: Mapping[str, onnx.NodeProto],
    added: Collection[str] = frozenset(),
) -> SitePadding | None:
    """The padding that a StofAttention node's mask or bias forbids in every row; None: there is none.

    Args:
        node: the node.
        symbolic: of its model.
        writers: the nodes of its graph by their outputs.
        added: ``find_added_masks`` of its graph.
    """
    if not may_have_padding(node):
        return None
    operands, texts = operands_of(node), {a.name: a.s.decode() for a in node.attribute if a.type == _STRING}
    conjuncts = MaskExpression.parse(texts.get("mask", "")).conjuncts
    has_others = not all(_reads_keys_alone(c) for c in conjuncts)
    for role in _VECTORS:
        for conjunct in (c for c in conjuncts if find_key_vector(c) == role):
            found = _find_in_vector(conjunct, role, operands[role], symbolic, writers)
            if found is not None:
                return replace(
                    found, has_averaged_padding=has_others and texts.get("empty_rows") not in ("zero", "nan")
                )
    return _find_in_bias(operands["bias"], symbolic, has_others, added) if "bias" in operands else None


def _reads_keys_alone(conjunct: Node) -> bool:
    return all(not isinstance(n, Name) or n in (B, K) for n in in_order(conjunct))


def _find_in_vector(
    conjunct: Node, role: str, operand: str, symbolic: Symbolic, writers: Mapping[str, onnx.NodeProto]
) -> SitePadding | None:
    """The padding that a condition on one vector forbids."""
    tensor = _find_source(operand, writers, symbolic)
    names = Lookup(role, (B, K))
    compared = sorted({float(n.value) for n in in_order(conjunct) if isinstance(n, Constant)})
    is_bool = symbolic.dtype(tensor) == TensorProto.BOOL
    writer = writers.get(tensor)
    if writer is not None and writer.op_type in _COMPARING:
        found = _find_behind(conjunct, role, operand, symbolic)
        if found is not None:
            return found
    for number in dict.fromkeys([0.0, 1.0, *compared]):
        if (is_bool and number not in (0, 1)) or allows_number(conjunct, number):
            continue
        # All that is not padding is allowed by these; others may allow less.
        plain = {f"{print_node(names)} != {number:.0f}", "pad[b, k]" if number == 0 else ""}
        is_plain = print_node(conjunct) in plain | ({"not pad[b, k]"} if is_bool else set())
        guard = None if is_plain else KeyCondition(operand, role, print_node(conjunct))
        return SitePadding(PadMask(tensor, number), guard)
    return None


def _find_behind(conjunct: Node, role: str, operand: str, symbolic: Symbolic) -> SitePadding | None:
    """The padding by a tensor from which the graph computes an operand: its other results may be 0 at padding, too."""
    element = _element(operand, symbolic)
    if element is None:
        return None
    for tensor, number, value in _assumptions(element, symbolic):
        if not allows_number(conjunct, value):
            return SitePadding(PadMask(tensor, number), KeyCondition(operand, role, print_node(conjunct)))
    return None


def _find_in_bias(bias: str, symbolic: Symbolic, has_mask: bool, added: Collection[str]) -> SitePadding | None:
    """The padding that a bias [B or 1, H or 1, S or 1, T] forbids, beside a mask that depends on queries or none."""
    shape, element = symbolic.shape(bias), _element(bias, symbolic)
    if shape is None or len(shape) != 4 or element is None:
        return None
    if (mask := _find_added(element, added)) is not None:
        return SitePadding(mask, KeyBias(bias, mask.number, has_mask), has_mask or shape[2] != _ONE)
    for tensor, number, value in _assumptions(element, symbolic):
        if value <= FORBIDDING_VALUE:
            return SitePadding(PadMask(tensor, number), KeyBias(bias, value, has_mask), has_mask or shape[2] != _ONE)
    return None


def _element(name: str, symbolic: Symbolic) -> Scalar | None:
    """The element of a tensor that broadcasts to [B, H, S, T], or of a vector [B, T], at (b, h, q, k)."""
    tensor = symbolic.value(name)
    if tensor is None or tensor.is_constant or tensor.rank not in (2, 4):
        return None
    index = (var("b"), var("h"), var("q"), var("k"))
    if tensor.rank == 2:
        return tensor.at(project((index[0], index[3]), tensor.shape))
    heads = tensor.shape[1].constant
    if heads is not None and 1 < heads <= _MOST_HEADS:
        # Of each head: where they were an axis with the batch, indices are sums with the head over their number.
        each = {tensor.at(project((index[0], integer(h), *index[2:]), tensor.shape)) for h in range(heads)}
        if len(each) == 1:
            return each.pop()
    return tensor.at(project(index, tensor.shape))


def _find_added(element: Scalar, added: Collection[str]) -> PadMask | None:
    """The mask of a caller that an element of a bias is, but for roundings to narrower types; None: it is none."""
    while isinstance(element, Real) and element.kind == "rounded" and isinstance(element.args[0], Real):
        element = element.args[0]
    is_read = isinstance(element, Real) and element.kind == "read" and element.args[1] in _INDICES
    tensor = str(element.args[0]) if isinstance(element, Real) and is_read else ""
    return PadMask(tensor, FORBIDDING_VALUE, is_bound=True) if tensor in added else None


def _assumptions(element: Scalar, symbolic: Symbolic) -> list[tuple[str, float, float]]:
    """Tensors [B, T] with a number that decides an element at every key where they have it: that element's number then."""
    found: list[tuple[str, float, float]] = []
    for index, tensor in [(i, t) for i in _INDICES for t in find_reads(element, i)]:
        dtype, numbers = symbolic.dtype(tensor), find_compared(element, tensor)
        if dtype == TensorProto.BOOL:
            numbers = [n for n in numbers if n in (0, 1)]
        elif dtype in _FLOATS:
            numbers.append(-math.inf)  # of a caller's mask that is added as it is
        for number in numbers:
            value = ElementValues(tensor, index, number).of(element)
            if value is not None:
                found.append((tensor, number, value))
    return found


def _find_source(tensor: str, writers: Mapping[str, onnx.NodeProto], symbolic: Symbolic) -> str:
    """What a mask is a copy of, in another shape or type: attentions that have copies of one mask are padded alike."""
    while (node := writers.get(tensor)) is not None and is_standard(node):
        is_cast = node.op_type == "Cast" and symbolic.dtype(node.input[0]) not in _FLOATS
        if node.op_type not in _SAME_NUMBERS and not is_cast:
            break
        tensor = node.input[0]
    return tensor


def find_length_slot(node: onnx.NodeProto) -> int:
    """The operand, counted from the first, whose last axis is as long as the keys of a StofAttention node are many."""
    roles: Sequence[str] = next(a for a in node.attribute if a.name == "operands").s.decode().split()
    return next(roles.index(role) for role in LENGTH_ROLES if role in roles)
