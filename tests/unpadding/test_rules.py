# SPDX-License-Identifier: Apache-2.0
"""Each rule of unpadding, held against the node itself in ONNX Runtime: on padded tensors and on their real tokens.

More than 500 lines: a case for each form of each operator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from one_node import ABSENT, BATCH, LENGTH, NodeCase, Operand, check_row_wise, fixed, plain, tokens, weight
from onnx import TensorProto

from stof.unpadding.rules import _ELEMENTWISE, _RULES

MS = "com.microsoft"


def case(
    op: str,
    *operands: Operand,
    opset: int = 18,
    outputs: int = 1,
    domain: str = "",
    is_static: bool = False,
    **attributes: Any,
) -> NodeCase:
    return NodeCase(op, operands, opset, outputs, domain, attributes, is_static)


def named(cases: Sequence[NodeCase]) -> list[Any]:
    found: dict[str, int] = {}
    params = []
    for c in cases:
        name = f"{c.op}-{'|'.join(o.shape.replace(' ', ',') for o in c.operands)}-{c.opset}{'-static' if c.is_static else ''}"
        found[name] = found.get(name, 0) + 1
        params.append(pytest.param(c, id=name if found[name] == 1 else f"{name}-{found[name]}"))
    return params


_BINARY = {
    "f": [
        "Add",
        "Sub",
        "Mul",
        "Div",
        "Pow",
        "PRelu",
        "Max",
        "Min",
        "Sum",
        "Greater",
        "GreaterOrEqual",
        "Less",
        "LessOrEqual",
        "Equal",
    ],
    "i": ["Mod", "Add", "Equal"],
    "b": ["And", "Or", "Xor", "Equal"],
    "u8": ["BitShift"],
}
_UNARY = {
    "f": [
        "Abs",
        "Acos",
        "Atan",
        "Ceil",
        "Celu",
        "Cos",
        "Elu",
        "Erf",
        "Exp",
        "Floor",
        "HardSigmoid",
        "HardSwish",
        "Identity",
        "IsInf",
        "IsNaN",
        "LeakyRelu",
        "Log",
        "Neg",
        "Reciprocal",
        "Relu",
        "Round",
        "Selu",
        "Sigmoid",
        "Sign",
        "Sin",
        "Softplus",
        "Softsign",
        "Sqrt",
        "Tan",
        "Tanh",
        "ThresholdedRelu",
        "Mish",
    ],
    "b": ["Not"],
}
_NEW = {"Mish": 18, "Gelu": 20}


def _not_zero(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.integers(1, 9, shape)


def _binary(op: str, dtype: str) -> list[NodeCase]:
    if op == "Mod":
        return [
            case(
                op,
                first,
                Operand(
                    second.shape,
                    "i",
                    second.has_tokens,
                    None if second.array is None else second.array + 1,
                    source=_not_zero,
                ),
            )
            for first, second in (c.operands for c in _binary("Equal", "i"))
        ]
    attributes = {"direction": "LEFT"} if op == "BitShift" else {}
    pairs = [
        (tokens("B S 4", dtype), tokens("B S 4", dtype)),
        (tokens("B S 4", dtype), weight(4, dtype=dtype) if dtype != "b" else fixed([True, False, True, True], "b")),
        (tokens("B S 4", dtype), plain("S 1", dtype)),
        (tokens("B 2 S 4", dtype), plain("B 1 S 1", dtype)),
        (tokens("BS 4", dtype), plain("BS 1", dtype)),
        (tokens("B S 4", dtype), plain("B 1 4", dtype)),
        (tokens("B S 4", dtype), plain("1 1 1", dtype)),
    ]
    if op != "PRelu":  # its slope broadcasts one way alone
        pairs += [
            (plain("2 B S 4", dtype), tokens("B S 4", dtype)),
            (tokens("S", dtype, has_tokens=False), tokens("B 4 S", dtype)),
            (tokens("B S 1", dtype), tokens("2 B S 4", dtype)),
            (tokens("S B 4", dtype), plain("B 4", dtype)),
        ]
    return [case(op, *pair, **attributes) for pair in pairs]


ELEMENTWISE = [
    *(c for dtype, ops in _BINARY.items() for op in ops for c in _binary(op, dtype)),
    *(
        case(op, tokens(s, d))
        for d, ops in _UNARY.items()
        for op in ops
        for s in ("B S 4", "BS 4", "B S", "S B 3", "B 2 S 4")
    ),
    case("Gelu", tokens("B S 4"), opset=20),
    case("Gelu", tokens("B S 4"), opset=20, approximate="tanh"),
    case("Cast", tokens("B S", "i"), to=TensorProto.FLOAT),
    case("Cast", tokens("B 2 S 4"), to=TensorProto.BOOL),
    case("CastLike", tokens("B S 4", "i"), weight(1)),
    case("Clip", tokens("B S 4"), fixed(0.5), fixed(1.0)),
    case("Clip", tokens("B S 4"), ABSENT, fixed(1.0)),
    case("Clip", tokens("BS 4"), opset=10, min=0.5, max=1.0),
    case("Sum", tokens("B S 4"), plain("S 4"), tokens("B S 1")),
    case("Sum", tokens("B S 4")),
    case("Max", plain("4"), tokens("B S 4"), plain("B S 4"), plain("")),
    case("Add", tokens("B S 4"), plain("B S 4"), is_static=True),
    case("Add", tokens("B S 3"), plain("5 3"), is_static=True),
    case("Where", tokens("B S 1", "b"), tokens("B S 4"), plain("")),
    case("Where", plain("S 4", "b"), tokens("B S 4"), tokens("B S 1")),
    case("Where", tokens("B 1 S 1", "b"), plain("4"), tokens("B 2 S 4")),
    case("Where", tokens("BS 1", "b"), tokens("BS 4"), tokens("BS 4")),
]
ZEROS = [
    case("Mul", tokens("B S 4"), tokens("B S 1", is_zero=True)),
    case("Mul", tokens("B S 1", is_zero=True), tokens("B S 4")),
    case("Mul", tokens("B 1 S 1", "i", is_zero=True), tokens("B 2 S 4", "i")),
    case("Mul", tokens("B S 4", is_zero=True), tokens("B S 4", is_zero=True)),
    case("Mul", tokens("BS 4"), tokens("BS 1", is_zero=True)),
    case("Where", tokens("B S 1", "b", is_zero=True), tokens("B S 4"), plain("")),
    case("Where", tokens("B S 1", "b", is_zero=True), tokens("B S 4"), tokens("B S 4")),
    case("Where", tokens("B S 1", "b", is_true=True), plain("4"), tokens("B S 4")),
    case("Where", tokens("S B 1", "b", is_true=True), tokens("S B 4"), tokens("S B 4")),
]


def _reduced(op: str) -> list[NodeCase]:
    newer = 13 if op == "ReduceSum" else 18
    return [
        case(op, tokens("B S 4"), fixed([-1], "i"), opset=newer),
        case(op, tokens("B S 4"), fixed([2], "i"), opset=newer, keepdims=0),
        case(op, tokens("B 2 S 4"), fixed([1, 3], "i"), opset=newer, keepdims=0),
        case(op, tokens("2 B S"), fixed([0], "i"), opset=newer, keepdims=0),
        case(op, tokens("BS 2 4"), fixed([-2], "i"), opset=newer, keepdims=0),
        case(op, tokens("B S 4"), opset=11, axes=[2]),
        case(op, tokens("B 2 S 4"), opset=11, axes=[-3], keepdims=0),
    ]


def _along(op: str, *rest: Operand, **attributes: Any) -> list[NodeCase]:
    return [
        case(
            op, tokens("B S 4"), *rest, opset=attributes.pop("opset", 17) if "opset" in attributes else 17, **attributes
        ),
        case(op, tokens("BS 4"), *rest, opset=17, **attributes),
        case(op, tokens("B 2 S 4"), *rest, opset=17, **attributes),
        case(op, tokens("S B 4"), *rest, opset=17, axis=-1, **attributes),
    ]


NORMS = [
    *_along("LayerNormalization", weight(4), weight(4, seed=6)),
    *_along("LayerNormalization", weight(4)),
    case("LayerNormalization", tokens("B S 2 4"), weight(2, 4), axis=2, opset=17),
    case("LayerNormalization", tokens("B S 2 4"), weight(2, 4), axis=-2, opset=17),
    *_along("SimplifiedLayerNormalization", weight(4)),
    case("RMSNormalization", tokens("B S 4"), weight(4), opset=23),
    case("RMSNormalization", tokens("B S 2 4"), weight(2, 4), axis=2, opset=23),
    case("LpNormalization", tokens("B S 4"), axis=-1, p=2),
    case("LpNormalization", tokens("B S 4"), axis=2, p=1, opset=11),
    *(case(op, tokens("B S 4"), opset=o) for op in ("Softmax", "LogSoftmax") for o in (13, 18)),
    *(case(op, tokens("B S 4"), opset=11, axis=2) for op in ("Softmax", "LogSoftmax")),
    case("Softmax", tokens("BS 4"), opset=11),
    case("Softmax", tokens("B 4 S"), opset=13, axis=1),
    case("Softmax", tokens("B 4 S 2"), opset=13, axis=-3),
    case("Dropout", tokens("B S 4"), opset=13),
    case("Dropout", tokens("B S 4"), fixed(0.5), opset=13),
    case("Dropout", tokens("B S 4"), opset=10, ratio=0.3),
    case(
        "SkipLayerNormalization",
        tokens("B S 4"),
        tokens("B S 4"),
        weight(4),
        weight(4, seed=2),
        weight(4, seed=3),
        domain=MS,
    ),
    case("SkipLayerNormalization", tokens("B S 4"), plain("1 S 4"), weight(4), domain=MS),
    case("SkipLayerNormalization", tokens("B S 4"), plain("S 4"), weight(4), domain=MS),
    case("SkipLayerNormalization", tokens("BS 4"), tokens("BS 4"), weight(4), domain=MS),
    case("SkipSimplifiedLayerNormalization", tokens("B S 4"), tokens("B S 4"), weight(4), domain=MS),
    case("BiasGelu", tokens("B S 4"), weight(4), domain=MS),
    case("FastGelu", tokens("B S 4"), weight(4), domain=MS),
    case("FastGelu", tokens("B S 4"), domain=MS),
    case("Gelu", tokens("B S 4"), domain=MS),
    case("QuickGelu", tokens("BS 4"), domain=MS, alpha=1.7),
]
_IDS = tokens("B S", "i")
MOVES = [
    case("Tile", tokens("B S 4"), fixed([1, 1, 3], "i")),
    case("Tile", tokens("BS 1 4"), fixed([1, 2, 1], "i")),
    case("GatherND", tokens("3 B S 4"), fixed([[1], [2]], "i")),
    case("GatherND", tokens("3 2 B S"), fixed([2, 1], "i")),
    case("GatherND", tokens("3 BS 4"), plain("2 2 1", "i", high=3)),
    case("Gather", weight(4, 6), _IDS),
    case("Gather", weight(2, 4, 3), _IDS, axis=1),
    case("Gather", weight(2, 4, 3), _IDS, axis=-2),
    case("Gather", weight(4), tokens("BS", "i")),
    case("Gather", weight(4, 2), tokens("S B", "i32")),
    case("Gather", plain("B 4"), _IDS, axis=1),
    case("Gather", tokens("B S 4"), fixed([3, 0], "i"), axis=2),
    case("Gather", tokens("B S 4"), fixed(1, "i"), axis=-1),
    case("Gather", tokens("3 B S 4"), fixed(1, "i")),
    case("Gather", tokens("B 2 S 4"), fixed([[1, 0], [1, 1]], "i"), axis=1),
    case("Gather", tokens("B S 4"), plain("2", "i"), axis=2),
    case("Transpose", tokens("B S 2 4"), perm=[0, 2, 1, 3]),
    case("Transpose", tokens("B S 4"), perm=[1, 0, 2]),
    case("Transpose", tokens("B 2 S 4")),
    case("Transpose", tokens("BS 2 4"), perm=[1, 0, 2]),
    case("Unsqueeze", tokens("B S"), fixed([-1], "i")),
    case("Unsqueeze", tokens("B S 4"), fixed([1, 3], "i")),
    case("Unsqueeze", tokens("BS 4"), fixed([0], "i")),
    case("Unsqueeze", tokens("B S"), opset=11, axes=[1, 2]),
    case("Squeeze", tokens("B 1 S 1"), fixed([1, -1], "i")),
    case("Squeeze", tokens("B S 1"), opset=11, axes=[2]),
    case("Squeeze", tokens("1 BS"), fixed([0], "i")),
    case("Split", tokens("B S 6"), outputs=3, num_outputs=3, axis=-1),
    case("Split", tokens("B S 6"), fixed([1, 5], "i"), outputs=2, axis=2),
    case("Split", tokens("3 B S 6"), outputs=3, opset=13),
    case("Split", tokens("B 2 S 4"), outputs=2, opset=11, axis=1, split=[1, 1]),
    case("Slice", tokens("B S 4"), fixed([1], "i"), fixed([3], "i"), fixed([2], "i")),
    case("Slice", tokens("B S 4"), fixed([-1], "i"), fixed([-5], "i"), fixed([-1], "i"), fixed([-1], "i")),
    case("Slice", tokens("2 B S"), fixed([1], "i"), fixed([2], "i")),
    case("Slice", tokens("B 4 S 4"), fixed([1, 0], "i"), fixed([3, 2], "i"), fixed([1, 3], "i")),
    case("Slice", tokens("B S 4"), opset=9, starts=[1], ends=[3], axes=[2]),
    case("Slice", tokens("4 B S"), opset=9, starts=[1], ends=[3]),
    case("Concat", tokens("B S 4"), tokens("B S 2"), axis=-1),
    case("Concat", tokens("B S 4"), plain("B S 2"), axis=2),
    case("Concat", plain("B 2 S 4"), tokens("B 3 S 4"), axis=1),
    case("Concat", tokens("BS 4"), tokens("BS 4"), axis=1),
    case("Concat", tokens("B S 4"), axis=2),
    case("Expand", tokens("B S 1"), fixed([1, 1, 4], "i")),
    case("Expand", tokens("B S 1"), fixed([2, 1, 1, 4], "i")),
    case("Expand", tokens("B S 1"), fixed([BATCH, LENGTH, 4], "i"), is_static=True),
    case("Expand", tokens("BS 1"), fixed([1, 4], "i")),
    case("Flatten", tokens("B S 2 4"), axis=2),
    case("Flatten", tokens("B S 4"), axis=-1),
]
RESHAPES = [
    case("Reshape", tokens("B S 6"), fixed([0, 0, 2, 3], "i")),
    case("Reshape", tokens("B S 6"), fixed([0, 0, 2, -1], "i")),
    case("Reshape", tokens("B S 2 3"), fixed([0, 0, 6], "i")),
    case("Reshape", tokens("B S 6"), fixed([-1, 6], "i")),
    case("Reshape", tokens("B S"), fixed([-1], "i")),
    case("Reshape", tokens("B 2 S 3"), fixed([0, 0, 0, 3, 1], "i")),
    case("Reshape", tokens("B S 6"), fixed([BATCH, LENGTH, 2, 3], "i"), is_static=True),
    case("Reshape", tokens("B S 6"), fixed([BATCH * LENGTH, 6], "i"), is_static=True),
    case("Reshape", tokens("B S 5"), fixed([BATCH, LENGTH, 5, 1], "i"), is_static=True),
    case("Reshape", tokens("B S 6"), fixed([BATCH, 1, LENGTH, 6], "i"), is_static=True),
    case("Reshape", tokens("BS 6"), fixed([BATCH, LENGTH, 6], "i"), is_static=True),
    case("Reshape", tokens("BS 6"), fixed([BATCH, LENGTH, 3, 2], "i"), is_static=True),
    case("Reshape", tokens("BS 6"), fixed([0, 2, 3], "i")),
    case("Reshape", tokens("B S 2 3"), fixed([-1, 2, 3], "i"), allowzero=1),
]


def _dynamic_quantize() -> list[NodeCase]:
    # The largest and the smallest number lie among the real tokens, so that both forms have the same scale.
    def source(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        x = rng.uniform(-1, 1, shape).astype(np.float32)
        x[1, 0], x[1, 1] = -3, 5
        return x

    return [case("DynamicQuantizeLinear", tokens("B S 4", source=source), outputs=3)]


MATMULS = [
    case("Conv", tokens("B 4 S"), weight(3, 4, 1), weight(3)),
    case("Conv", tokens("B 4 S"), weight(4, 1, 1), group=4, auto_pad="SAME_UPPER", kernel_shape=[1]),
    case("Conv", tokens("B 4 S 2"), weight(3, 4, 1, 1), pads=[0, 0, 0, 0], strides=[1, 1], dilations=[2, 2]),
    case("MatMul", tokens("B S 4"), weight(4, 3)),
    case("MatMul", tokens("BS 4"), weight(4, 3)),
    case("MatMul", tokens("B S 4"), weight(1, 4, 3)),
    case("MatMul", tokens("B S 4"), weight(2, 1, 4, 3)),
    case("MatMul", tokens("B 2 S 4"), weight(2, 4, 3)),
    case("MatMul", tokens("B 2 S 4"), weight(1, 2, 4, 3)),
    case("MatMul", tokens("B S 2 4"), weight(4, 3)),
    case("MatMul", tokens("B S 2 4"), weight(1, 1, 4, 3)),
    case("MatMul", tokens("S B 4"), weight(4, 3)),
    case("MatMul", weight(3, 4), tokens("B 4 S")),
    case("MatMul", weight(2, 3, 4), tokens("B 2 4 S")),
    case("MatMul", plain("3 4"), tokens("B 2 4 S")),
    case("MatMulInteger", tokens("B S 4", "u8"), weight(4, 3, dtype="i8")),
    case("MatMulInteger", tokens("B S 4", "u8"), weight(4, 3, dtype="u8"), fixed(2, "u8"), fixed(1, "u8")),
    case("MatMulInteger", tokens("BS 4", "u8"), weight(4, 3, dtype="u8"), fixed(2, "u8"), fixed([1, 2, 3], "u8")),
    case("Gemm", tokens("BS 4"), weight(4, 3), weight(3)),
    case("Gemm", tokens("BS 4"), weight(3, 4), weight(1, 3), transB=1, alpha=0.5, beta=2.0),
    case("Gemm", tokens("BS 4"), weight(4, 3)),
    case("FusedGemm", tokens("BS 4"), weight(4, 3), weight(3), domain=MS, activation="Relu"),
    *_dynamic_quantize(),
    case("QuantizeLinear", tokens("B S 4"), fixed(0.1), fixed(3, "u8")),
    case("QuantizeLinear", tokens("BS 4"), fixed(0.1), fixed(3, "u8")),
    case("QuantizeLinear", tokens("B S 4"), fixed([0.1, 0.2, 0.3, 0.4]), fixed([3, 2, 1, 0], "u8"), axis=2),
    case("DequantizeLinear", tokens("B S 4", "u8"), fixed(0.1), fixed(3, "u8")),
    case(
        "QLinearMatMul",
        tokens("B S 4", "u8"),
        fixed(0.1),
        fixed(2, "u8"),
        weight(4, 3, dtype="u8"),
        fixed(0.2),
        fixed(1, "u8"),
        fixed(0.5),
        fixed(9, "u8"),
    ),
    case("MatMulIntegerToFloat", tokens("B S 4", "u8"), weight(4, 3, dtype="u8"), fixed(0.1), fixed(0.2), domain=MS),
    case(
        "MatMulNBits",
        tokens("B S 16"),
        fixed(np.arange(3 * 8).reshape(3, 1, 8), "u8"),
        weight(3),
        domain=MS,
        K=16,
        N=3,
        bits=4,
        block_size=16,
    ),
    case(
        "RotaryEmbedding",
        tokens("B S 8"),
        tokens("B S", "i", high=5),
        weight(16, 2),
        weight(16, 2, seed=7),
        domain=MS,
        num_heads=2,
        rotary_embedding_dim=4,
    ),
    case(
        "RotaryEmbedding",
        tokens("B 2 S 4"),
        tokens("B S", "i", high=5),
        weight(16, 2),
        weight(16, 2, seed=7),
        domain=MS,
    ),
]
REDUCTIONS = [
    "ReduceMax",
    "ReduceMean",
    "ReduceMin",
    "ReduceProd",
    "ReduceSum",
    "ReduceSumSquare",
    "ReduceL1",
    "ReduceL2",
]
INSIDE = [  # tensors that stay inside of a region: torch.nn.MultiheadAttention's
    case("Reshape", tokens("S B 6"), fixed([-1, 6], "i")),
    case("Reshape", tokens("S B 6"), fixed([LENGTH * BATCH, 6], "i"), is_static=True),
    case("Reshape", tokens("S B 2 3"), fixed([LENGTH * BATCH, 6], "i"), is_static=True),
    case("Reshape", tokens("turned 6"), fixed([LENGTH, BATCH, 6], "i"), is_static=True),
    case("Reshape", tokens("turned 6"), fixed([0, 2, 3], "i"), is_static=True),
    case("Reshape", tokens("S B 6"), fixed([LENGTH, 2 * BATCH, 3], "i"), is_static=True),
    case("Reshape", tokens("S B*2 3"), fixed([LENGTH, 2 * BATCH, 3, 1], "i"), is_static=True),
    case("Reshape", tokens("B*2 S 3"), fixed([BATCH, 2, LENGTH, 3], "i"), is_static=True),
    case("Reshape", tokens("S B*2 3"), fixed([LENGTH, BATCH, 2, 3], "i"), is_static=True),
    case("Transpose", tokens("S B*2 3"), is_static=True, perm=[1, 0, 2]),
    case("Transpose", tokens("turned 6"), is_static=True, perm=[1, 0]),
    case("Unsqueeze", tokens("B*2 S 3"), fixed([1], "i"), is_static=True),
    case("Squeeze", tokens("B*2 1 S 3"), fixed([1], "i"), is_static=True),
    case("Add", tokens("turned 4"), weight(4), is_static=True),
    case("Mul", tokens("B*2 S 4"), fixed(0.5), is_static=True),
    case("Add", tokens("B*2 S 4"), tokens("B*2 S 4"), is_static=True),
    case("Where", tokens("B*2 S 4", "b"), tokens("B*2 S 4"), fixed(0.0), is_static=True),
    case("MatMul", tokens("turned 6"), weight(6, 4), is_static=True),
    case("MatMul", tokens("B*2 S 3"), weight(3, 4), is_static=True),
    case("Gemm", tokens("turned 6"), weight(6, 4), weight(4), is_static=True),
]
POSITIVE = [
    *ELEMENTWISE,
    *ZEROS,
    *(c for op in REDUCTIONS for c in _reduced(op)),
    *NORMS,
    *MOVES,
    *RESHAPES,
    *MATMULS,
    *INSIDE,
]


def _dynamic_matmul() -> NodeCase:
    # As for DynamicQuantizeLinear.
    source = _dynamic_quantize()[0].operands[0].source
    return case(
        "DynamicQuantizeMatMul", tokens("B S 4", source=source), weight(4, 3, dtype="u8"), fixed(0.2), domain=MS
    )


POSITIVE.append(_dynamic_matmul())


def _code_cases(op: str) -> list[NodeCase]:
    """Two tensors of codes: of tokens both, or one of all tokens alike."""
    scales = (fixed(0.1), fixed(2, "u8")), (fixed(0.2), fixed(3, "u8")), (fixed(0.4), fixed(7, "u8"))
    return [
        case(op, tokens("B S 4", "u8"), *scales[0], other, *scales[1], *scales[2], domain=MS)
        for other in (tokens("B S 4", "u8"), weight(4, dtype="u8"))
    ]


for _op in ("QLinearAdd", "QLinearMul"):
    POSITIVE += _code_cases(_op)


@pytest.mark.parametrize("node", named(POSITIVE))
def test_computes_each_token_by_itself(node: NodeCase) -> None:
    row_wise = node.row_wise()
    assert row_wise is not None
    check_row_wise(node, row_wise)


def test_every_rule_has_a_case() -> None:
    tested = {(c.domain, c.op) for c in POSITIVE}
    # ONNX Runtime registers the second one in the standard domain alone; MatMulBnb4's rule is MatMulNBits'.
    assert _RULES.keys() - tested == {(MS, "MatMulBnb4"), (MS, "SimplifiedLayerNormalization")}
    assert set(_ELEMENTWISE) <= {op for _, op in tested}


@pytest.mark.parametrize(
    ("op", "condition"),
    [("Mul", {}), ("Where", {}), ("Where", {"is_zero": True}), ("Where", {"is_true": True})],
)
def test_only_what_padding_hides_is_ignored(op: str, condition: dict[str, bool]) -> None:
    if op == "Mul":
        row_wise = case("Mul", tokens("B S 4"), tokens("B S 4")).row_wise()
        expected = set()
    else:
        row_wise = case("Where", tokens("B S 1", "b", **condition), tokens("B S 4"), tokens("B S 4")).row_wise()
        expected = {1} if condition.get("is_zero") else {2} if condition else set()
    assert row_wise is not None
    assert row_wise.ignored == expected


# Nodes that mix tokens, or may: a rule either says nothing, or what it says holds.
MIXING = [
    case("Tile", tokens("B S 4"), fixed([2, 1, 1], "i")),
    case("Tile", tokens("B S 4"), fixed([1, 2, 1], "i")),
    case("Tile", tokens("B S 4"), plain("3", "i", high=3)),
    case("GatherND", tokens("B S 4"), plain("2 1", "i", high=2)),
    case("GatherND", tokens("B S 4"), plain("B 1", "i", high=3), batch_dims=1),
    case("GatherND", plain("B 4 3"), tokens("B S 1", "i"), batch_dims=1),
    case("GatherND", weight(4, 4), tokens("B 2 S", "i"), is_static=True),
    case("GatherND", tokens("B S 4"), tokens("B S 1", "i"), batch_dims=2),
    case("Conv", tokens("B 4 S"), weight(3, 4, 3), pads=[1, 1]),
    case("Conv", tokens("B 4 S"), weight(3, 4, 1), strides=[2]),
    case("Conv", tokens("B 4 S"), weight(3, 4, 1), pads=[1, 0]),
    case("Conv", tokens("B S 4"), weight(3, 5, 1), is_static=True),
    case("Conv", tokens("4 B S"), weight(3, 3, 1), is_static=True),
    case("Conv", tokens("B 4 S"), plain("3 4 1")),
    case("Conv", tokens("S 4 B"), weight(3, 4, 1)),
    case("Conv", tokens("B 4 S 2"), weight(3, 4, 1, 2)),
    *(
        case(op, tokens("B S 4"), fixed([a], "i"), opset=18, keepdims=k)
        for op in REDUCTIONS
        for a in (0, 1, -2)
        for k in (0, 1)
    ),
    *(case(op, tokens("B S 4"), opset=18) for op in REDUCTIONS),
    case("ReduceSum", tokens("BS 4"), fixed([0], "i")),
    case("ReduceMean", tokens("B S 4"), plain("1", "i", high=2)),
    case("ReduceMean", tokens("B S 4"), fixed([], "i"), noop_with_empty_axes=1),
    *(case("Softmax", tokens("B S 4"), axis=a) for a in (0, 1, -2)),
    case("Softmax", tokens("B S 4"), opset=11),
    case("Softmax", tokens("B 4 S"), opset=11, axis=1),
    case("Softmax", tokens("B 2 S 5"), opset=11, axis=2),
    case("Softmax", tokens("B 4 S")),
    case("LogSoftmax", tokens("B S"), axis=-1),
    case("LpNormalization", tokens("B S 4"), axis=1),
    case("LayerNormalization", tokens("B S 4"), plain("S 4"), axis=1, opset=17),
    case("LayerNormalization", tokens("B 4 S"), plain("S"), opset=17),
    case("LayerNormalization", tokens("B S 4"), fixed(np.arange(20).reshape(5, 4)), opset=17, is_static=True),
    case("LayerNormalization", tokens("B S 4"), weight(4), outputs=3, opset=17),
    case("LayerNormalization", tokens("B S 4"), weight(4), outputs=2, opset=17),
    case("Dropout", tokens("B S 4"), outputs=2, opset=13),
    case("LayerNormalization", tokens("B S 4"), plain("B 1 4"), opset=17),
    case("LayerNormalization", tokens("B S 4"), weight(4), plain("B 1 4"), opset=17),
    case("RMSNormalization", tokens("B S 4"), plain("S 4"), opset=23),
    case("RMSNormalization", tokens("B S 4"), plain("B 1 4"), opset=23),
    case("SkipLayerNormalization", tokens("B S 4"), tokens("B S 4"), weight(4), outputs=4, domain=MS),
    case("MatMul", tokens("B S 4"), tokens("B 4 S")),
    case("MatMul", tokens("B S 4"), plain("B 4 3")),
    case("MatMul", plain("B 3 S"), tokens("B S 4")),
    case("MatMul", plain("3 S"), tokens("B S 4")),
    case("MatMul", tokens("B 4 S"), plain("S 3")),
    case("MatMul", tokens("B S 4"), plain("S 4 3"), is_static=False),
    case("MatMul", tokens("S B 4"), plain("S 4 3")),
    case("MatMul", tokens("B S 2 4"), plain("S 4 3")),
    case("MatMul", tokens("B S 2 4"), plain("B 1 4 3")),
    case("MatMul", tokens("B S 2 4"), plain("B S 4 3")),
    case("MatMul", tokens("B S"), plain("S")),
    case("MatMul", plain("S"), tokens("B S 4")),
    case("MatMul", tokens("B S 4"), weight(4)),
    case("MatMulInteger", tokens("B S 4", "u8"), tokens("B 4 S", "u8")),
    case("MatMulInteger", tokens("B S 4", "u8"), plain("B 4 3", "u8")),
    case("Gemm", tokens("BS 4"), weight(15, 3), transA=1, is_static=True),
    case("Gemm", tokens("BS 4"), weight(4, 3), plain("BS 3")),
    case("MatMulInteger", tokens("B S 4", "u8"), weight(4, 3, dtype="u8"), plain("S", "u8")),
    case("Gemm", tokens("BS 4"), weight(4, 3), tokens("BS 3")),
    case("Gemm", plain("3 BS"), tokens("BS 4")),
    case("Gemm", plain("3 4"), tokens("BS 4"), transB=1),
    case("FusedGemm", tokens("BS 4"), weight(15, 3), domain=MS, transA=1, activation="Relu", is_static=True),
    case("FusedGemm", tokens("BS 4"), weight(4, 3), plain("BS 3"), domain=MS, activation="Relu"),
    case(
        "QuantizeLinear",
        tokens("B S 4"),
        fixed([0.1, 0.2, 0.3, 0.4, 0.5]),
        fixed([1, 2, 3, 4, 5], "u8"),
        is_static=True,
    ),
    case("QuantizeLinear", tokens("B S 4"), fixed([0.1, 0.2, 0.3]), fixed([1, 2, 3], "u8"), axis=0, is_static=True),
    case("QuantizeLinear", tokens("B 4 S"), fixed(0.1), fixed(3, "u8")),
    case("QuantizeLinear", tokens("B 4 S"), fixed([0.1, 0.2, 0.3, 0.4]), fixed([1, 2, 3, 4], "u8")),
    case("QuantizeLinear", tokens("BS 4"), fixed([0.1, 0.2, 0.3, 0.4]), fixed([1, 2, 3, 4], "u8")),
    case("DequantizeLinear", tokens("B S 4", "u8"), plain("S"), plain("S", "u8"), axis=-2),
    case("DequantizeLinear", tokens("B S 5", "u8"), plain("S"), plain("S", "u8"), axis=1),
    case(
        "QLinearMatMul",
        tokens("B S 4", "u8"),
        fixed(0.1),
        fixed(2, "u8"),
        plain("B 4 3", "u8"),
        fixed(0.2),
        fixed(1, "u8"),
        fixed(0.5),
        fixed(9, "u8"),
    ),
    case("MatMulIntegerToFloat", tokens("B S 4", "u8"), plain("B 4 3", "u8"), fixed(0.1), fixed(0.2), domain=MS),
    case("DynamicQuantizeMatMul", tokens("B S 4"), plain("B 4 3", "u8"), fixed(0.2), domain=MS),
    case("Gather", tokens("B S 4"), fixed([0, 2], "i"), axis=1),
    case("Gather", tokens("B S 4"), fixed(0, "i"), axis=-2),
    case("Gather", tokens("B S 4"), fixed(0, "i")),
    case("Gather", tokens("B S 4"), tokens("B S", "i", high=3)),
    case("Gather", tokens("BS 4"), plain("3", "i")),
    case("Squeeze", tokens("1 B S"), opset=13),
    case("Slice", tokens("B S 4"), fixed([1], "i"), fixed([3], "i"), fixed([1], "i")),
    case("Slice", tokens("B S 4"), fixed([1], "i"), fixed([3], "i"), fixed([-2], "i")),
    case("Slice", tokens("B S 4"), fixed([0, 0], "i"), fixed([2, 2], "i")),
    case("Slice", tokens("B S 4"), fixed([0], "i"), fixed([9], "i"), fixed([1], "i"), fixed([2], "i")),
    case("Slice", tokens("B S 4"), fixed([1], "i"), fixed([3], "i"), plain("1", "i", high=3)),
    case("Slice", tokens("B S 4"), plain("2", "i", high=1), plain("2", "i", high=3)),
    case("Slice", tokens("B S 4"), opset=9, starts=[1], ends=[3], axes=[-2]),
    case("Split", tokens("B S 4"), fixed([2, 3], "i"), outputs=2, axis=1, is_static=True),
    case("Split", tokens("B S 4"), num_outputs=3, outputs=3),
    case("Concat", tokens("B S 4"), tokens("B S 4"), axis=1),
    case("Concat", tokens("B S 4"), tokens("B S 4"), axis=-3),
    case("Concat", tokens("B S 4"), plain("B 2 4"), axis=1),
    case("Concat", tokens("B S 5"), tokens("S B 5"), axis=2, is_static=True),
    case("Flatten", tokens("B S 4"), axis=1),
    case("Flatten", tokens("B S 4"), axis=0),
    case("Flatten", tokens("S B 4"), axis=2),
    case("Flatten", tokens("B 2 S 4"), axis=2),
    case("Reshape", tokens("B S 4"), fixed([0, -1], "i")),
    case("Reshape", tokens("B S 6"), fixed([LENGTH, BATCH, 6], "i"), is_static=True),
    case("Reshape", tokens("B S 6"), fixed([0, 2, -1, 3], "i")),
    case("Reshape", tokens("B S 5"), fixed([BATCH, 5, LENGTH], "i"), is_static=True),
    case("Reshape", tokens("B S 15"), fixed([15, 15], "i"), is_static=True),
    case("Reshape", tokens("S B*2 3"), fixed([LENGTH * BATCH, 6], "i"), is_static=True),
    case("Reshape", tokens("S B*2 3"), fixed([LENGTH, 2, BATCH, 3], "i"), is_static=True),
    case("Reshape", tokens("S B 6"), fixed([2 * LENGTH, BATCH, 3], "i"), is_static=True),
    case("Reshape", tokens("B S 6"), fixed([2 * BATCH, LENGTH, 3], "i"), is_static=True),
    case("Add", tokens("turned 4"), plain("BS 1"), is_static=True),
    case("Add", tokens("B*2 S 4"), plain("B*2 1 1"), is_static=True),
    case("Add", tokens("B*2 S 4"), plain("S 1"), is_static=True),
    case("ReduceMean", tokens("B*2 S 4"), fixed([0], "i"), is_static=True),
    case("Gather", tokens("B*2 S 4"), fixed(0, "i"), is_static=True, axis=0),
    case("MatMul", tokens("B*2 S 4"), tokens("B*2 4 S"), is_static=True),
    case("Reshape", tokens("B 2 S"), fixed([-1, 2], "i")),
    case("Reshape", tokens("B S 4"), fixed([1, -1], "i")),
    case("Reshape", tokens("B S 4"), plain("3", "i")),
    case("Expand", tokens("B S 1"), plain("3", "i")),
    case("Transpose", tokens("B S 4"), perm=[2, 1, 0]),
    # What broadcasts: [S, B], [B] or [S] along wrong axes, two places of the tokens in one node.
    case("Add", tokens("B S 1"), tokens("S B 1"), is_static=True)
    if BATCH == LENGTH
    else case("Add", tokens("B S B"), tokens("S B")),
    case("Add", tokens("S B"), tokens("B S B")),
    case("Add", tokens("B S S"), plain("S S")),
    case("Add", tokens("B S 1"), plain("B")),
    case("Add", tokens("B S 1"), plain("B 1 1 1")),
    case("Add", tokens("B S"), tokens("B S 1 1")),
    case("Mul", tokens("B S 1"), tokens("B 1 S")),
    case("Add", tokens("BS 4"), plain("3 1 4")),
    case("Add", tokens("B S BS"), tokens("BS")),
    case("Where", tokens("B 1 S", "b"), tokens("B S 1"), plain("")),
    case("CastLike", fixed(1.5), tokens("B S 4", "i")),
    case("CastLike", plain("4"), tokens("B S 4", "i")),
    case("CastLike", plain("2 1 1 4"), tokens("B S 4", "i")),
    case("CastLike", tokens("B S", "i"), tokens("B S 4")),
    case("CumSum", tokens("B S"), fixed(1, "i")),
    case("ArgMax", tokens("B S 4"), axis=1),
    case(
        "RotaryEmbedding",
        tokens("B S 8"),
        plain("1", "i", high=1),
        weight(16, 2),
        weight(16, 2, seed=7),
        domain=MS,
        num_heads=2,
        rotary_embedding_dim=4,
    ),
    case(
        "RotaryEmbedding",
        tokens("B S 8"),
        plain("B S", "i", high=5),
        weight(16, 2),
        weight(16, 2, seed=7),
        domain=MS,
        num_heads=2,
        rotary_embedding_dim=4,
    ),
    case("BiasGelu", tokens("B S 4"), tokens("BS"), domain=MS),
]


@pytest.mark.parametrize("node", named(MIXING))
def test_what_is_said_of_a_node_that_may_mix_tokens_holds(node: NodeCase) -> None:
    row_wise = node.row_wise()
    if row_wise is not None:
        check_row_wise(node, row_wise)


@pytest.mark.parametrize(
    "node", named([c for c in MIXING if c.op.startswith("Reduce") and c.operands[0].shape in ("B S 4", "BS 4")])
)
def test_a_reduction_over_tokens_is_refused(node: NodeCase) -> None:
    assert node.row_wise() is None


def test_a_node_of_another_domain_is_unknown() -> None:
    assert case("Add", tokens("B S 4"), tokens("B S 4"), domain="somebody.else").row_wise() is None
    assert case("Relu", plain("B S 4")).row_wise() is None
