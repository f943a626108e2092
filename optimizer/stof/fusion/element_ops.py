# SPDX-License-Identifier: Apache-2.0
"""What memory-bound operators compute of one element, in terms of a chain's expressions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
import onnx
from onnx import TensorProto, helper

from stof.errors import UnsupportedError
from stof.fusion.description import Pool
from stof.graph.index import domain_of

TYPES = {int(TensorProto.FLOAT): "f32", int(TensorProto.FLOAT16): "f16", int(TensorProto.BFLOAT16): "bf16"}
_MICROSOFT = "com.microsoft"


@dataclass
class Element:
    """One element of a node: terms of its inputs, and attributes. ``rows``: the same at the row's own place."""

    pool: Pool
    node: onnx.NodeProto
    inputs: list[int | None]  # None where an input is not given
    constants: list[float | None]  # of inputs that are one number
    dtype: int = int(TensorProto.FLOAT)  # of the first output
    rows: Element | None = None

    @property
    def row(self) -> Element:
        """The element at the row's own place, which reductions run over."""
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

    def of(self, op: str, *args: int) -> int:
        """A term."""
        return self.pool.make(op, *args)

    def num(self, value: float) -> int:
        """A constant."""
        return self.pool.number(value)

    def __getitem__(self, i: int) -> int:
        found = self.inputs[i] if i < len(self.inputs) else None
        if found is None:
            raise UnsupportedError(f"{self.node.op_type} without input {i}")
        return found

    def has(self, i: int) -> bool:
        """Whether an optional input is given."""
        return i < len(self.inputs) and self.inputs[i] is not None


Rule = Callable[[Element], int]


def _direct(name: str) -> Rule:
    return lambda e: e.of(name, e[0])


def _binary(name: str) -> Rule:
    return lambda e: e.of(name, e[0], e[1])


def _folded(name: str) -> Rule:
    def rule(e: Element) -> int:
        return reduce(lambda a, b: e.of(name, a, b), [e[i] for i in range(len(e.inputs))])

    return rule


def _average(e: Element) -> int:
    return e.of("div", _folded("add")(e), e.num(len(e.inputs)))


def _pow(e: Element) -> int:
    exponent = e.constants[1]
    x = e[0]
    if exponent in (2.0, 3.0):
        square = e.of("mul", x, x)
        return square if exponent == 2.0 else e.of("mul", square, x)
    named = {0.5: "sqrt", -0.5: "rsqrt", -1.0: "reciprocal"}
    if exponent in named:
        return e.of(named[exponent], x)
    return x if exponent == 1.0 else e.of("pow", x, e[1])


# Of the types that chains have: what a bound is that a Clip has not.
_LARGEST = {
    int(TensorProto.FLOAT): float(np.finfo(np.float32).max),
    int(TensorProto.FLOAT16): float(np.finfo(np.float16).max),
    int(TensorProto.BFLOAT16): float.fromhex("0x1.fep+127"),
}


def _clip(e: Element) -> int:
    """Between two bounds; one that is not given is the type's lowest or largest number, so that no result is infinite."""
    most = _LARGEST[e.dtype]
    x = e.of("max", e[0], e[1] if e.has(1) else e.num(-most))
    return e.of("min", x, e[2] if e.has(2) else e.num(most))


def _gelu(e: Element) -> int:
    return e.of("gelu_tanh" if e.word("approximate", "none") == "tanh" else "gelu", e[0])


def _biased(e: Element) -> int:
    return e.of("add", e[0], e[1]) if e.has(1) else e[0]


def _swish(alpha: float) -> Rule:
    def rule(e: Element) -> int:
        factor = e.attribute("alpha", alpha)
        scaled = e[0] if factor == 1.0 else e.of("mul", e[0], e.num(factor))
        return e.of("mul", e[0], e.of("sigmoid", scaled))

    return rule


def _negative(e: Element, below: int) -> int:
    """``below`` where x < 0, else x."""
    return e.of("select", e.of("lt", e[0], e.num(0.0)), below, e[0])


def _exp_less_one(e: Element, x: int) -> int:
    return e.of("sub", e.of("exp", x), e.num(1.0))


def _elu(e: Element) -> int:
    return _negative(e, e.of("mul", e.num(e.attribute("alpha", 1.0)), _exp_less_one(e, e[0])))


def _selu(e: Element) -> int:
    alpha, gamma = e.attribute("alpha", 1.67326319217681884765625), e.attribute("gamma", 1.05070102214813232421875)
    return e.of("mul", e.num(gamma), _negative(e, e.of("mul", e.num(alpha), _exp_less_one(e, e[0]))))


def _celu(e: Element) -> int:
    alpha = e.num(e.attribute("alpha", 1.0))
    return _negative(e, e.of("mul", alpha, _exp_less_one(e, e.of("div", e[0], alpha))))


def _between(e: Element, x: int) -> int:
    return e.of("max", e.num(0.0), e.of("min", e.num(1.0), x))


def _hard_sigmoid(e: Element) -> int:
    alpha, beta = e.num(e.attribute("alpha", 0.2)), e.num(e.attribute("beta", 0.5))
    return _between(e, e.of("add", e.of("mul", alpha, e[0]), beta))


def _hard_swish(e: Element) -> int:
    return e.of("mul", e[0], _between(e, e.of("add", e.of("div", e[0], e.num(6.0)), e.num(0.5))))


def _softsign(e: Element) -> int:
    return e.of("div", e[0], e.of("add", e.num(1.0), e.of("abs", e[0])))


def _mish(e: Element) -> int:
    return e.of("mul", e[0], e.of("tanh", e.of("softplus", e[0])))


def _leaky(e: Element) -> int:
    return _negative(e, e.of("mul", e.num(e.attribute("alpha", 0.01)), e[0]))


def _thresholded(e: Element) -> int:
    return e.of("select", e.of("gt", e[0], e.num(e.attribute("alpha", 1.0))), e[0], e.num(0.0))


ELEMENTWISE: dict[tuple[str, str], Rule] = {
    **{
        ("", op): _direct(name)
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
    ("", "Max"): _folded("max"),
    ("", "Min"): _folded("min"),
    ("", "Sum"): _folded("add"),
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
    ("", "LeakyRelu"): _leaky,
    ("", "Mish"): _mish,
    ("", "PRelu"): lambda e: _negative(e, e.of("mul", e[1], e[0])),
    ("", "Softsign"): _softsign,
    ("", "ThresholdedRelu"): _thresholded,
    ("", "Where"): lambda e: e.of("select", e[0], e[1], e[2]),
    ("", "IsNaN"): lambda e: e.of("ne", e[0], e[0]),
    ("", "Not"): lambda e: e.of("eq", e[0], e.num(0.0)),
    ("", "Cast"): lambda e: e[0],
    ("", "CastLike"): lambda e: e[0],
    (_MICROSOFT, "Gelu"): _direct("gelu"),
    (_MICROSOFT, "BiasGelu"): lambda e: e.of("gelu", _biased(e)),
    (_MICROSOFT, "FastGelu"): lambda e: e.of("gelu_tanh", _biased(e)),
    (_MICROSOFT, "QuickGelu"): _swish(1.702),
    (_MICROSOFT, "BiasAdd"): lambda e: e.of("add", e.of("add", e[0], e[1]), e[2]),
}


def _mean_square(e: Element, x: int) -> int:
    return e.of("mean", e.of("mul", x, x))


def _reduced(name: str, before: str = "", after: str = "") -> Rule:
    def rule(e: Element) -> int:
        x = e[0]
        x = e.of("mul", x, x) if before == "square" else e.of(before, x) if before else x
        x = e.of(name, x)
        return e.of(after, x) if after else x

    return rule


def _log_sum_exp(e: Element) -> int:
    top = e.of("max_of", e[0])
    # A row of -inf alone, or with inf in it: its largest element less itself would be NaN.
    finite = e.of("lt", e.of("abs", top), e.num(math.inf))
    top = e.of("select", finite, top, e.num(0.0))
    return e.of("add", top, e.of("log", e.of("sum", e.of("exp", e.of("sub", e[0], top)))))


def _log_sum(e: Element) -> int:
    top = e.of("max_of", e[0])
    return e.of("add", top, e.of("log", e.of("sum", e.of("exp", e.of("sub", e[0], top)))))


REDUCING: dict[str, Rule] = {
    "ReduceMean": _reduced("mean"),
    "ReduceSum": _reduced("sum"),
    "ReduceMax": _reduced("max_of"),
    "ReduceMin": _reduced("min_of"),
    "ReduceL1": _reduced("sum", "abs"),
    "ReduceL2": _reduced("sum", "square", "sqrt"),
    "ReduceSumSquare": _reduced("sum", "square"),
    "ReduceLogSumExp": _log_sum_exp,
}


def _normalized(e: Element, sums: tuple[int, int], scale: int | None, bias: int | None, epsilon: float) -> int:
    """``sums``: what is normalized, here and at the row's own place; centered already."""
    x, row = sums
    x = e.of("mul", x, e.of("rsqrt", e.of("add", _mean_square(e, row), e.num(epsilon))))
    x = x if scale is None else e.of("mul", x, scale)
    return x if bias is None else e.of("add", x, bias)


def _centered(e: Element, here: int, row: int, centered: bool) -> tuple[int, int]:
    mean = e.of("mean", row)
    return (e.of("sub", here, mean), e.of("sub", row, mean)) if centered else (here, row)


def _layer_norm(centered: bool) -> Rule:
    def rule(e: Element) -> int:
        bias = e[2] if centered and e.has(2) else None
        sums = _centered(e, e[0], e.row[0], centered)
        return _normalized(e, sums, e[1] if e.has(1) else None, bias, e.attribute("epsilon", 1e-5))

    return rule


def skip_sum(e: Element, centered: bool) -> int:
    """Input + skip + bias of SkipLayerNormalization (its fourth output) and of its form without a mean."""
    place = 4 if centered else 3
    total = e.of("add", e[0], e[1])
    return e.of("add", total, e[place]) if e.has(place) else total


def _skip_norm(centered: bool) -> Rule:
    def rule(e: Element) -> int:
        bias = e[3] if centered and e.has(3) else None
        sums = _centered(e, skip_sum(e, centered), skip_sum(e.row, centered), centered)
        return _normalized(e, sums, e[2], bias, e.attribute("epsilon", 1e-12))

    return rule


def _softmax(e: Element) -> int:
    top = e.of("max_of", e.row[0])
    here, row = (e.of("exp", e.of("sub", x, top)) for x in (e[0], e.row[0]))
    return e.of("div", here, e.of("sum", row))


def _log_softmax(e: Element) -> int:
    return e.of("sub", e[0], _log_sum(e.row))


# Operators whose result at one element needs the whole row, with the output that they are asked for.
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
# What these make of a number that is rounded differently may be altogether different: they get what the graph gives them.
STEPPED = frozenset(
    ["Sin", "Cos", "Floor", "Ceil", "Round", "IsNaN", "ThresholdedRelu"]
    + ["Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual"]
)
# Of which the runtime's CUDA kernels reach half the rate of a chain, also where there is nothing to fuse.
NORMS = frozenset({"LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization"})
SKIPPING = frozenset({"SkipLayerNormalization", "SkipSimplifiedLayerNormalization"})
MOVING = frozenset(
    ["Identity", "Dropout", "Slice", "Split", "Concat", "Expand", "Transpose", "Reshape", "Flatten", "Squeeze"]
    + ["Unsqueeze", "Gather"]
)
FREE = frozenset({"Identity", "Dropout", "Reshape", "Flatten", "Squeeze", "Unsqueeze"})  # no kernel moves anything


def kind_of_node(node: onnx.NodeProto) -> str:
    """``elementwise``, ``reducing``, ``rowwise`` or ``moving``; empty for any other operator."""
    key = (domain_of(node), node.op_type)
    if key in ELEMENTWISE:
        return "elementwise"
    if key in ROWWISE:
        return "rowwise"
    if not key[0] and key[1] in REDUCING:
        return "reducing"
    return "moving" if not key[0] and key[1] in MOVING else ""


def data_inputs(node: onnx.NodeProto) -> Sequence[int]:
    """The inputs that hold data; others are axes, shapes and bounds. All of an operator that no chain has."""
    if node.op_type == "Concat" or kind_of_node(node) in ("elementwise", "rowwise", ""):
        return [i for i, n in enumerate(node.input) if n and not (node.op_type == "CastLike" and i)]
    return [0]


def as_number(array: np.ndarray | None) -> float | None:
    """A constant of one element as a number."""
    if array is None or array.size != 1 or (array.dtype.kind not in "fiub" and array.dtype.name != "bfloat16"):
        return None
    return float(array.reshape(-1)[0])
