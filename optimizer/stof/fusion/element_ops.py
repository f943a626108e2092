# SPDX-License-Identifier: Apache-2.0
"""Memory-bound operators as terms: what each computes for one element of its output."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
import onnx
from onnx import TensorProto, helper

from stof.errors import UnsupportedError
from stof.fusion.terms import TermPool
from stof.graph.index import domain_of

TYPES = {int(TensorProto.FLOAT): "f32", int(TensorProto.FLOAT16): "f16", int(TensorProto.BFLOAT16): "bf16"}
_MICROSOFT = "com.microsoft"


@dataclass
class Element:
    """One element of a node's output: terms of its inputs, and attributes.

    ``rows`` holds the inputs at the row's own position, which reductions run over.
    """

    pool: TermPool
    node: onnx.NodeProto
    inputs: list[int | None]  # None where an input is not given
    constants: list[float | None]  # of inputs that are one number
    dtype: int = int(TensorProto.FLOAT)  # of the first output
    rows: Element | None = None

    @property
    def row(self) -> Element:
        """The element at the row's own position."""
        return self.rows or self

    def attribute(self, name: str, default: float) -> float:
        """A numeric attribute."""
        for a in self.node.attribute:
            if a.name == name:
                return float(helper.get_attribute_value(a))
        return default

    def word(self, name: str, default: str) -> str:
        """A string attribute."""
        for a in self.node.attribute:
            if a.name == name:
                return str(a.s.decode(errors="replace"))
        return default

    def term(self, op: str, *args: int) -> int:
        """A term of an operator of the grammar."""
        return self.pool.make(op, *args)

    def num(self, value: float) -> int:
        """A constant."""
        return self.pool.number(value)

    def __getitem__(self, i: int) -> int:
        term = self.inputs[i] if i < len(self.inputs) else None
        if term is None:
            raise UnsupportedError(f"{self.node.op_type} without input {i}")
        return term

    def has(self, i: int) -> bool:
        """Whether an optional input is given."""
        return i < len(self.inputs) and self.inputs[i] is not None


Rule = Callable[[Element], int]


def _unary(name: str) -> Rule:
    return lambda e: e.term(name, e[0])


def _binary(name: str) -> Rule:
    return lambda e: e.term(name, e[0], e[1])


def _fold(name: str) -> Rule:
    def rule(e: Element) -> int:
        return reduce(lambda a, b: e.term(name, a, b), [e[i] for i in range(len(e.inputs))])

    return rule


def _average(e: Element) -> int:
    return e.term("div", _fold("add")(e), e.num(len(e.inputs)))


def _pow(e: Element) -> int:
    exponent = e.constants[1]
    x = e[0]
    if exponent in (2.0, 3.0):
        square = e.term("mul", x, x)
        return square if exponent == 2.0 else e.term("mul", square, x)
    named = {0.5: "sqrt", -0.5: "rsqrt", -1.0: "reciprocal"}
    if exponent in named:
        return e.term(named[exponent], x)
    return x if exponent == 1.0 else e.term("pow", x, e[1])


# Largest finite number of each type: the bound of a Clip that has none.
_LARGEST = {
    int(TensorProto.FLOAT): float(np.finfo(np.float32).max),
    int(TensorProto.FLOAT16): float(np.finfo(np.float16).max),
    int(TensorProto.BFLOAT16): float.fromhex("0x1.fep+127"),
}


def _clip(e: Element) -> int:
    """Clip; a bound that is not given is the type's lowest or largest number, so that no result is infinite."""
    most = _LARGEST[e.dtype]
    x = e.term("max", e[0], e[1] if e.has(1) else e.num(-most))
    return e.term("min", x, e[2] if e.has(2) else e.num(most))


def _gelu(e: Element) -> int:
    return e.term("gelu_tanh" if e.word("approximate", "none") == "tanh" else "gelu", e[0])


def _add_bias(e: Element) -> int:
    return e.term("add", e[0], e[1]) if e.has(1) else e[0]


def _swish(alpha: float) -> Rule:
    def rule(e: Element) -> int:
        factor = e.attribute("alpha", alpha)
        scaled = e[0] if factor == 1.0 else e.term("mul", e[0], e.num(factor))
        return e.term("mul", e[0], e.term("sigmoid", scaled))

    return rule


def _where_negative(e: Element, below: int) -> int:
    """``below`` where x < 0, else x."""
    return e.term("select", e.term("lt", e[0], e.num(0.0)), below, e[0])


def _exp_minus_one(e: Element, x: int) -> int:
    return e.term("sub", e.term("exp", x), e.num(1.0))


def _elu(e: Element) -> int:
    return _where_negative(e, e.term("mul", e.num(e.attribute("alpha", 1.0)), _exp_minus_one(e, e[0])))


def _selu(e: Element) -> int:
    alpha, gamma = e.attribute("alpha", 1.67326319217681884765625), e.attribute("gamma", 1.05070102214813232421875)
    return e.term("mul", e.num(gamma), _where_negative(e, e.term("mul", e.num(alpha), _exp_minus_one(e, e[0]))))


def _celu(e: Element) -> int:
    alpha = e.num(e.attribute("alpha", 1.0))
    return _where_negative(e, e.term("mul", alpha, _exp_minus_one(e, e.term("div", e[0], alpha))))


def _clamp_to_unit(e: Element, x: int) -> int:
    return e.term("max", e.num(0.0), e.term("min", e.num(1.0), x))


def _hard_sigmoid(e: Element) -> int:
    alpha, beta = e.num(e.attribute("alpha", 0.2)), e.num(e.attribute("beta", 0.5))
    return _clamp_to_unit(e, e.term("add", e.term("mul", alpha, e[0]), beta))


def _hard_swish(e: Element) -> int:
    return e.term("mul", e[0], _clamp_to_unit(e, e.term("add", e.term("div", e[0], e.num(6.0)), e.num(0.5))))


def _softsign(e: Element) -> int:
    return e.term("div", e[0], e.term("add", e.num(1.0), e.term("abs", e[0])))


def _mish(e: Element) -> int:
    return e.term("mul", e[0], e.term("tanh", e.term("softplus", e[0])))


def _leaky_relu(e: Element) -> int:
    return _where_negative(e, e.term("mul", e.num(e.attribute("alpha", 0.01)), e[0]))


def _thresholded_relu(e: Element) -> int:
    return e.term("select", e.term("gt", e[0], e.num(e.attribute("alpha", 1.0))), e[0], e.num(0.0))


ELEMENTWISE: dict[tuple[str, str], Rule] = {
    **{
        ("", op): _unary(name)
        for op, name in {
            "Abs": "abs",
            "Ceil": "ceil",
            "Cos": "cos",
            "Erf": "erf",
            "Exp": "exp",
            "Floor": "floor",
            "Log": "log",
            "Neg": "neg",
            "Reciprocal": "reciprocal",
            "Relu": "relu",
            "Round": "round",
            "Sigmoid": "sigmoid",
            "Sin": "sin",
            "Softplus": "softplus",
            "Sqrt": "sqrt",
            "Tanh": "tanh",
        }.items()
    },
    **{
        ("", op): _binary(name)
        for op, name in {
            "Add": "add",
            "Sub": "sub",
            "Mul": "mul",
            "Div": "div",
            "Equal": "eq",
            "Less": "lt",
            "LessOrEqual": "le",
            "Greater": "gt",
            "GreaterOrEqual": "ge",
            "And": "mul",
            "Or": "max",
            "Xor": "ne",
        }.items()
    },
    ("", "Max"): _fold("max"),
    ("", "Min"): _fold("min"),
    ("", "Sum"): _fold("add"),
    ("", "Mean"): _average,
    ("", "Pow"): _pow,
    ("", "Clip"): _clip,
    ("", "Gelu"): _gelu,
    ("", "Swish"): _swish(1.0),
    ("", "Elu"): _elu,
    ("", "Selu"): _selu,
    ("", "Celu"): _celu,
    ("", "HardSigmoid"): _hard_sigmoid,
    ("", "HardSwish"): _hard_swish,
    ("", "LeakyRelu"): _leaky_relu,
    ("", "Mish"): _mish,
    ("", "PRelu"): lambda e: _where_negative(e, e.term("mul", e[1], e[0])),
    ("", "Softsign"): _softsign,
    ("", "ThresholdedRelu"): _thresholded_relu,
    ("", "Where"): lambda e: e.term("select", e[0], e[1], e[2]),
    ("", "IsNaN"): lambda e: e.term("ne", e[0], e[0]),
    ("", "Not"): lambda e: e.term("eq", e[0], e.num(0.0)),
    ("", "Cast"): lambda e: e[0],
    ("", "CastLike"): lambda e: e[0],
    (_MICROSOFT, "Gelu"): _unary("gelu"),
    (_MICROSOFT, "BiasGelu"): lambda e: e.term("gelu", _add_bias(e)),
    (_MICROSOFT, "FastGelu"): lambda e: e.term("gelu_tanh", _add_bias(e)),
    (_MICROSOFT, "QuickGelu"): _swish(1.702),
    (_MICROSOFT, "BiasAdd"): lambda e: e.term("add", e.term("add", e[0], e[1]), e[2]),
}


def _mean_square(e: Element, x: int) -> int:
    return e.term("mean", e.term("mul", x, x))


def _reduction(name: str, before: str = "", after: str = "") -> Rule:
    def rule(e: Element) -> int:
        x = e[0]
        x = e.term("mul", x, x) if before == "square" else e.term(before, x) if before else x
        x = e.term(name, x)
        return e.term(after, x) if after else x

    return rule


def _log_sum_exp(e: Element) -> int:
    top = e.term("max_of", e[0])
    # A row with inf, or of -inf alone: its maximum minus itself would be NaN.
    finite = e.term("lt", e.term("abs", top), e.num(math.inf))
    top = e.term("select", finite, top, e.num(0.0))
    return e.term("add", top, e.term("log", e.term("sum", e.term("exp", e.term("sub", e[0], top)))))


def _log_sum(e: Element) -> int:
    top = e.term("max_of", e[0])
    return e.term("add", top, e.term("log", e.term("sum", e.term("exp", e.term("sub", e[0], top)))))


REDUCTION: dict[str, Rule] = {
    "ReduceMean": _reduction("mean"),
    "ReduceSum": _reduction("sum"),
    "ReduceMax": _reduction("max_of"),
    "ReduceMin": _reduction("min_of"),
    "ReduceL1": _reduction("sum", "abs"),
    "ReduceL2": _reduction("sum", "square", "sqrt"),
    "ReduceSumSquare": _reduction("sum", "square"),
    "ReduceLogSumExp": _log_sum_exp,
}


def _normalize(e: Element, inputs: tuple[int, int], scale: int | None, bias: int | None, epsilon: float) -> int:
    """Divides by the root mean square. ``inputs``: the centered value here and at the row's own position."""
    x, row = inputs
    x = e.term("mul", x, e.term("rsqrt", e.term("add", _mean_square(e, row), e.num(epsilon))))
    x = x if scale is None else e.term("mul", x, scale)
    return x if bias is None else e.term("add", x, bias)


def _center(e: Element, here: int, row: int, centered: bool) -> tuple[int, int]:
    mean = e.term("mean", row)
    return (e.term("sub", here, mean), e.term("sub", row, mean)) if centered else (here, row)


def _layer_norm(centered: bool) -> Rule:
    def rule(e: Element) -> int:
        bias = e[2] if centered and e.has(2) else None
        centered_input = _center(e, e[0], e.row[0], centered)
        return _normalize(e, centered_input, e[1] if e.has(1) else None, bias, e.attribute("epsilon", 1e-5))

    return rule


def skip_sum(e: Element, centered: bool) -> int:
    """Input + skip + bias: the fourth output of SkipLayerNormalization and SkipSimplifiedLayerNormalization."""
    position = 4 if centered else 3
    total = e.term("add", e[0], e[1])
    return e.term("add", total, e[position]) if e.has(position) else total


def _skip_norm(centered: bool) -> Rule:
    def rule(e: Element) -> int:
        bias = e[3] if centered and e.has(3) else None
        centered_input = _center(e, skip_sum(e, centered), skip_sum(e.row, centered), centered)
        return _normalize(e, centered_input, e[2], bias, e.attribute("epsilon", 1e-12))

    return rule


def _softmax(e: Element) -> int:
    top = e.term("max_of", e.row[0])
    here, row = (e.term("exp", e.term("sub", x, top)) for x in (e[0], e.row[0]))
    return e.term("div", here, e.term("sum", row))


def _log_softmax(e: Element) -> int:
    return e.term("sub", e[0], _log_sum(e.row))


# Operators whose result at one element needs the whole row.
ROWWISE: dict[tuple[str, str], Rule] = {
    ("", "LayerNormalization"): _layer_norm(True),
    ("", "RMSNormalization"): _layer_norm(False),
    ("", "SimplifiedLayerNormalization"): _layer_norm(False),
    (_MICROSOFT, "SimplifiedLayerNormalization"): _layer_norm(False),
    (_MICROSOFT, "SkipLayerNormalization"): _skip_norm(True),
    (_MICROSOFT, "SkipSimplifiedLayerNormalization"): _skip_norm(False),
    ("", "Softmax"): _softmax,
    ("", "LogSoftmax"): _log_softmax,
}
# Discontinuous or ill-conditioned functions: rounding their input differently may change the result altogether, so that
# their inputs are rounded exactly as the graph rounds them.
DISCONTINUOUS = frozenset(
    ["Sin", "Cos", "Floor", "Ceil", "Round", "IsNaN", "ThresholdedRelu"]
    + ["Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual"]
)
# ONNX Runtime's CUDA kernels of these reach half the bandwidth of a chain, even where there is nothing to fuse.
NORMS = frozenset({"LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization"})
SKIP_NORMS = frozenset({"SkipLayerNormalization", "SkipSimplifiedLayerNormalization"})
MOVEMENT = frozenset(
    ["Identity", "Dropout", "Slice", "Split", "Concat", "Expand", "Transpose", "Reshape", "Flatten", "Squeeze"]
    + ["Unsqueeze", "Gather"]
)
FREE = frozenset(
    {"Identity", "Dropout", "Reshape", "Flatten", "Squeeze", "Unsqueeze"}
)  # no kernel runs: the data stays in place


def kind_of_node(node: onnx.NodeProto) -> str:
    """``elementwise``, ``reducing``, ``rowwise`` or ``moving``; empty for operators that no chain has."""
    key = (domain_of(node), node.op_type)
    if key in ELEMENTWISE:
        return "elementwise"
    if key in ROWWISE:
        return "rowwise"
    if not key[0] and key[1] in REDUCTION:
        return "reducing"
    return "moving" if not key[0] and key[1] in MOVEMENT else ""


def data_inputs(node: onnx.NodeProto) -> Sequence[int]:
    """The numbers of the inputs that hold data rather than axes, shapes or bounds; all inputs of other operators."""
    if node.op_type == "Concat" or kind_of_node(node) in ("elementwise", "rowwise", ""):
        return [i for i, n in enumerate(node.input) if n and not (node.op_type == "CastLike" and i)]
    return [0]


def as_number(array: np.ndarray | None) -> float | None:
    """A constant of one element as a number."""
    if array is None or array.size != 1 or (array.dtype.kind not in "fiub" and array.dtype.name != "bfloat16"):
        return None
    return float(array.reshape(-1)[0])
