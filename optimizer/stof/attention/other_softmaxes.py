# SPDX-License-Identifier: Apache-2.0
"""Names a softmax that is no attention, or whose attention is quantized, in one sentence for the report.

Asked only after matching has failed: a layout or a mask that is not supported must not be called a classifier.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from functools import partial

import onnx

from stof.attention.move_paths import MovePath, trace_axes
from stof.graph.einsum import read_equation, split_equation
from stof.graph.index import GraphIndex, describe, is_standard
from stof.symbolic import Symbolic
from stof.symbolic.axis_atoms import ONE
from stof.symbolic.tensor import SMALL

_MOST_NODES = 64  # of a walk: scores are a few nodes away from their product
_PRODUCTS = frozenset({"MatMul", "Gemm", "FusedMatMul", "Einsum", "Conv", "FusedConv", "ConvTranspose", "ConvInteger"})
_QUANTIZED_PRODUCTS = frozenset({"MatMulInteger", "QLinearMatMul", "QGemm", "DynamicQuantizeMatMul", "QLinearConv"})
_HALF_QUANTIZED = frozenset({"MatMulNBits", "MatMulIntegerToFloat"})  # of a weight, with a float result
_QUANTIZES = frozenset({"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"})
_MOVES = frozenset({"Identity", "Cast", "Transpose", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Slice", "Split"})
_ELEMENTWISE = frozenset(
    {
        "Add",
        "Sub",
        "Mul",
        "Div",
        "Max",
        "Min",
        "Sum",
        "Neg",
        "Tanh",
        "Where",
        "Clip",
        "Relu",
        "Expand",
        "Gather",
        "BiasGelu",
    }
)
_WHAT_TO_DO = (
    "; attention is replaced where all of it is rounded by static scales, or with --dequantize-attention in float"
)
_WEIGHT_INPUTS = {"QLinearMatMul": (0, 3), "QGemm": (0, 3), "QLinearConv": (0, 3)}
_CHOOSES = frozenset({"TopK", "ArgMax", "ArgMin"})
_EXPERTS = frozenset({"MoE", "QMoE"})  # com.microsoft operators whose second input is a router's
# What the result of a softmax may pass before it is used: these keep its meaning.
_AFTER = _MOVES | {
    "Log",
    "Neg",
    "Div",
    "Add",
    "Sub",
    "Clip",
    "ReduceSum",
    "Where",
    "Gather",
    "GatherElements",
    "GatherND",
}
_AFTER |= {"ScatterElements", "ScatterND", "OneHot", "Equal", "Concat", "Expand", "Dropout"}


class _AxisOrigin(enum.Enum):
    """Where the axis comes from along which a softmax runs."""

    KEYS = enum.auto()  # an axis of one of two computed tensors that are multiplied
    FEATURES = enum.auto()  # columns of a weight
    POSITIONS = enum.auto()  # an axis of data that no product made
    UNKNOWN = enum.auto()


@dataclass
class _Use:
    """What becomes of the result of a softmax."""

    is_output: bool = False
    chooser: onnx.NodeProto | None = None  # picks the largest
    product: onnx.NodeProto | None = None  # a matmul with a computed tensor
    factor: onnx.NodeProto | None = None  # an elementwise one
    experts: onnx.NodeProto | None = None


@dataclass
class _Origins:
    """Where the scores of a softmax come from."""

    weights: list[str]  # constants that a product multiplies something computed with
    quantized: list[onnx.NodeProto]  # nodes by which the scores pass through integers
    constants: list[str]  # that are scores, or a part of them
    has_pairs: bool = False  # a product of two computed tensors, as of queries and keys
    has_others: bool = False  # inputs, and operators that say nothing


def explain_other_softmax(index: GraphIndex, symbolic: Symbolic, softmax: onnx.NodeProto) -> str | None:
    """Why a softmax is no attention that could be replaced; None where nothing speaks against it.

    Args:
        index: of the graph.
        symbolic: shapes of its tensors.
        softmax: a node that matching has refused.
    """
    shape = symbolic.shape(softmax.input[0])
    axis = next((a.i for a in softmax.attribute if a.name == "axis"), -1)
    origins = _origins(index, symbolic, softmax.input[0])
    origin, mixing = _UNKNOWN
    if shape:
        origin, mixing = _axis_origin(index, symbolic, softmax.input[0], axis % len(shape))
    if origin is _AxisOrigin.KEYS and mixing and not origins.has_pairs:
        return (
            f"the weight {mixing!r} mixes scores of queries and keys with each other before the softmax, as talking heads do; "
            "attention is replaced where the scores of a head are its own"
        )
    if shape and axis % len(shape) != len(shape) - 1:
        last = f"the softmax runs along axis {axis}, expected the last"
        return last if origins.has_pairs else f"{_name(index, symbolic, softmax, origin)}: {last}"
    if not origins.has_pairs and not origins.has_others:
        if origins.weights and not (origin is _AxisOrigin.POSITIONS and _is_left(index, origins.weights[0])):
            name = _name(index, symbolic, softmax, origin)
            user = _name_user(_find_use(index, symbolic, softmax.output[0]))
            return f"{name}: the scores are a product with the weight {origins.weights[0]!r}{user}"
        if origins.constants:
            return f"no attention but learned weights: the scores are the constant {origins.constants[0]!r}"
    if origins.quantized and origins.has_pairs:
        return f"the scores are quantized by {describe(origins.quantized[0])}{_WHAT_TO_DO}"
    if shape is not None and len(shape) < 3 and not origins.has_pairs:
        seen = f"the scores are {'one vector' if len(shape) < 2 else 'rows of one matrix'}"
        return f"{_name(index, symbolic, softmax, _AxisOrigin.FEATURES)}: {seen}"
    quantizer = _quantizes_weights(index, softmax.output[0])
    if quantizer is not None:
        return f"the attention weights are quantized by {describe(quantizer)}{_WHAT_TO_DO}"
    return None


def _name(index: GraphIndex, symbolic: Symbolic, softmax: onnx.NodeProto, origin: _AxisOrigin) -> str:
    """What a softmax without a product of queries and keys is, by the axis that it runs along and by what uses it."""
    use = _find_use(index, symbolic, softmax.output[0])
    if use.experts is not None or (use.chooser is not None and (use.factor is not None or use.product is not None)):
        return "no attention but a router"
    is_used = use.factor is not None or use.product is not None
    if use.is_output and not is_used:
        return "no attention but a classifier"
    if origin is _AxisOrigin.POSITIONS:
        also = ", or the keys of linear attention" if use.product is not None else ""
        return f"no attention but a pooling over positions{also}"
    if origin is _AxisOrigin.FEATURES and use.product is not None:
        return "no attention of queries and keys but a softmax over features, as linear attention and gates have"
    if origin is _AxisOrigin.FEATURES and use.factor is not None:
        return "no attention but a gate"
    return "no attention of queries and keys but a softmax over features"


def _name_user(use: _Use) -> str:
    user = use.experts or use.chooser or use.product or use.factor
    return "" if user is None or use.is_output else f", and its result goes to {describe(user)}"


def _is_left(index: GraphIndex, weight: str) -> bool:
    """Whether a weight is the left operand of a product: learned queries that meet keys."""
    return any(n.op_type in ("MatMul", "FusedMatMul", "Gemm") and n.input[0] == weight for n in index.consumers(weight))


def _find_use(index: GraphIndex, symbolic: Symbolic, tensor: str) -> _Use:
    use = _Use()
    pending, seen = [tensor], set[str]()
    while pending and len(seen) < _MOST_NODES:
        name = pending.pop(0)
        if name in seen:
            continue
        seen.add(name)
        use.is_output |= name in index.outputs
        for node in index.consumers(name):
            others = [n for n in node.input if n and n not in seen and _is_tensor(index, symbolic, n)]
            if node.op_type in _EXPERTS:
                use.experts = use.experts or node
            elif node.op_type in _CHOOSES:
                use.chooser = use.chooser or node
                pending.extend(o for o in node.output if o)
            elif node.op_type in _PRODUCTS:
                use.product = use.product or (node if others else None)
            elif node.op_type == "Mul" and others:
                use.factor = use.factor or node
            elif node.op_type == "Mul" or node.op_type in _AFTER:
                pending.extend(o for o in node.output if o)
    return use


def _is_tensor(index: GraphIndex, symbolic: Symbolic, name: str) -> bool:
    """Whether a tensor is neither a constant nor one number."""
    shape = symbolic.shape(name)
    return not _is_weight(index, symbolic, name) and (shape is None or any(d != ONE for d in shape))


_UNKNOWN = (_AxisOrigin.UNKNOWN, "")


_Origin = tuple[_AxisOrigin, str]


def _axis_origin(index: GraphIndex, symbolic: Symbolic, tensor: str, axis: int) -> _Origin:
    """Where an axis of a tensor comes from, and a weight that mixes its elements along other axes on the way."""
    return _trace_axis(index, symbolic, {}, tensor, axis)


def _trace_axis(
    index: GraphIndex,
    symbolic: Symbolic,
    origins: dict[tuple[str, int], _Origin],
    tensor: str,
    axis: int,
    depth: int = 0,
) -> _Origin:
    """As :func:`_axis_origin`; what ``origins`` holds is not traced again, as tensors are read in many ways."""
    if (tensor, axis) not in origins:
        origins[tensor, axis] = _UNKNOWN  # of a cycle, which a damaged graph may have
        origins[tensor, axis] = _trace_further(index, symbolic, origins, tensor, axis, depth)
    return origins[tensor, axis]


def _trace_further(
    index: GraphIndex, symbolic: Symbolic, origins: dict[tuple[str, int], _Origin], tensor: str, axis: int, depth: int
) -> _Origin:
    node, shape = index.producer(tensor), symbolic.shape(tensor)
    if node is None or shape is None or depth > _MOST_NODES:
        return (_AxisOrigin.POSITIONS, "") if node is None and tensor in index.inputs else _UNKNOWN
    further = partial(_trace_axis, index, symbolic, origins, depth=depth + 1)
    behind = len(shape) - axis
    if node.op_type in _QUANTIZES or node.op_type in ("Identity", "Cast", "Slice", "Split"):
        return further(node.input[0], axis)
    if node.op_type in _MOVES:
        axes = trace_axes(symbolic, MovePath(node.input[0], (node,)))
        atoms = [] if axes is None else [a for a in axes[axis] if a.size != ONE]
        return further(node.input[0], atoms[-1].axis) if atoms else _UNKNOWN
    if node.op_type == "Einsum":
        return _einsum_origin(index, symbolic, origins, node, axis, depth)
    if node.op_type in ("Conv", "FusedConv"):
        if axis == 1:
            return _AxisOrigin.FEATURES, ""
        origin, _ = further(node.input[0], axis)
        return origin, node.input[1]
    if node.op_type in ("MatMul", "FusedMatMul", "Gemm", "MatMulNBits"):
        weights = [_is_weight(index, symbolic, n) for n in node.input[:2]]
        if not any(weights):
            return (_AxisOrigin.KEYS, "") if behind < 3 else _UNKNOWN
        data = 1 if weights[0] else 0
        if behind == (2 if data else 1):  # rows or columns of the weight
            return _AxisOrigin.FEATURES, ""
        rank = len(symbolic.shape(node.input[data]) or ())
        if rank < behind:
            return _UNKNOWN
        origin, _ = further(node.input[data], rank - behind)
        return origin, node.input[1 - data]
    if node.op_type not in _ELEMENTWISE:
        return _AxisOrigin.POSITIONS, ""
    # Masks and scales say nothing where the scores themselves do.
    for name in sorted((n for n in node.input if n), key=lambda n: _is_beside(index, symbolic, n)):
        input_shape = None if _is_weight(index, symbolic, name) else symbolic.shape(name)
        if input_shape is not None and len(input_shape) >= behind and input_shape[-behind] != ONE:
            input_origin = further(name, len(input_shape) - behind)
            if input_origin[0] is not _AxisOrigin.UNKNOWN:
                return input_origin
    return _UNKNOWN


def _einsum_origin(
    index: GraphIndex,
    symbolic: Symbolic,
    origins: dict[tuple[str, int], _Origin],
    node: onnx.NodeProto,
    axis: int,
    depth: int,
) -> _Origin:
    equation = read_equation(node)
    terms, result = split_equation(equation)
    if len(terms) != 2 or "." in equation or result is None or axis >= len(result):
        return _UNKNOWN
    letter = result[axis]
    holders = [i for i, term in enumerate(terms) if letter in term]
    weights = [_is_weight(index, symbolic, n) for n in node.input]
    if not any(weights):
        return (_AxisOrigin.KEYS, "") if len(holders) == 1 else _UNKNOWN
    data = weights.index(False) if False in weights else 0
    if data not in holders:
        return _AxisOrigin.FEATURES, ""
    origin, _ = _trace_axis(index, symbolic, origins, node.input[data], terms[data].index(letter), depth + 1)
    return origin, node.input[1 - data]


def name_default_inputs(index: GraphIndex, softmax: onnx.NodeProto) -> str:
    """Words on the small initializers near a softmax that are also graph inputs; empty where there are none.

    A caller may override them, so that shapes, axes and scales which they hold are not known.
    """
    default_inputs: dict[str, None] = {}
    pending, seen = [*softmax.output, *softmax.input], set[str]()
    while pending and len(seen) < _MOST_NODES:
        name = pending.pop(0)
        if name in seen:
            continue
        seen.add(name)
        tensor = index.initializers.get(name)
        if tensor is not None and name in index.inputs and math.prod(tensor.dims) <= SMALL:
            default_inputs[name] = None
        node = index.producer(name)
        pending.extend(node.input if node is not None else ())
        if name == softmax.output[0]:
            pending.extend(n for user in index.consumers(name) for n in (*user.input, *user.output))
    if not default_inputs:
        return ""
    first, *others = default_inputs
    if others:
        return (
            f"; the initializers {first!r} and {len(others)} more are among the graph's inputs, where a caller may override "
            "them: remove them from the inputs"
        )
    return f"; the initializer {first!r} is among the graph's inputs, where a caller may override it: remove it from the inputs"


def _quantizes_weights(index: GraphIndex, tensor: str) -> onnx.NodeProto | None:
    """The node that turns the weights into integers, where one does."""
    users = index.consumers(tensor)
    quantized = [n for n in users if n.op_type in _QUANTIZES]
    return quantized[0] if quantized and all(n.op_type in (*_QUANTIZES, "Shape") for n in users) else None


def _origins(index: GraphIndex, symbolic: Symbolic, tensor: str) -> _Origins:
    origins = _Origins([], [], [])
    pending, seen = [tensor], set[str]()
    while pending:
        name = pending.pop(0)
        if name in seen:
            continue
        seen.add(name)
        node = index.producer(name)
        if _is_weight(index, symbolic, name):
            origins.constants.append(name)
        elif node is None or len(seen) > _MOST_NODES:
            origins.has_others = True
        elif node.op_type in _PRODUCTS | _QUANTIZED_PRODUCTS | _HALF_QUANTIZED:
            _read_product(index, symbolic, node, origins)
        elif node.op_type in _QUANTIZES:
            origins.quantized.append(node)
            pending.append(node.input[0])
        elif is_standard(node) and node.op_type in _MOVES:
            pending.append(node.input[0])
        elif is_standard(node) and node.op_type in _ELEMENTWISE:
            # A mask or a scale made from sizes and inputs says nothing of the scores.
            pending.extend(n for n in node.input if n and not _is_beside(index, symbolic, n))
        else:
            origins.has_others = True
    return origins


def _read_product(index: GraphIndex, symbolic: Symbolic, node: onnx.NodeProto, origins: _Origins) -> None:
    if node.op_type in _QUANTIZED_PRODUCTS:
        origins.quantized.append(node)
    input_indices = _WEIGHT_INPUTS.get(node.op_type, (0, 1))
    weights = [
        node.input[i] for i in input_indices if i < len(node.input) and _is_weight(index, symbolic, node.input[i])
    ]
    origins.weights.extend(weights)
    origins.has_pairs |= not weights


def _is_beside(index: GraphIndex, symbolic: Symbolic, tensor: str) -> bool:
    """Whether a tensor is a mask or a scale: a value of sizes and inputs, or a constant."""
    return symbolic.value(tensor) is not None or _is_weight(index, symbolic, tensor)


def _is_weight(index: GraphIndex, symbolic: Symbolic, tensor: str) -> bool:
    """Whether a tensor is a constant, also moved, cast or dequantized."""
    for _ in range(_MOST_NODES):
        node = index.producer(tensor)
        if node is None or node.op_type not in _MOVES | _QUANTIZES:
            break
        tensor = node.input[0]
    if node is not None:
        return node.op_type in ("Constant", "ConstantOfShape") or symbolic.constant(tensor) is not None
    return tensor in index.initializers
