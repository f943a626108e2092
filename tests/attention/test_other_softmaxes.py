# SPDX-License-Identifier: Apache-2.0
"""A softmax that is no attention is called what it is, and quantized scores are called quantized."""

from __future__ import annotations

import pytest
from attention_forms import PLAIN, model, only_site, reason

_SCALES = "scale = Constant <value = float {0.1}> ()\nzero = Constant <value = uint8 {128}> ()\n"
_SCORES = "%kt\ns1 = MatMul (q, kt)\n"
_WEIGHT = "w = ConstantOfShape <value = float[1] {0.5}> (dims)\n"

# name: (inputs, outputs, body, reason)
NAMED = {
    "a classifier behind a matrix product": (
        "float[B,S,8] x",
        "float[a,b,c] out",
        "dims = Constant <value = int64[2] {8, 5}> ()\n" + _WEIGHT + "s = MatMul (x, w)\nout = Softmax (s)",
        "no attention but a classifier: the scores are a product with the weight 'w'",
    ),
    "a classifier with a bias and a temperature": (
        "float[B,S,8] x",
        "float[a,b,c] out",
        "dims = Constant <value = int64[2] {8, 5}> ()\n"
        + _WEIGHT
        + "bias = Constant <value = float[5] {1, 2, 3, 4, 5}> ()\n"
        "two = Constant <value = float {2.0}> ()\ns1 = MatMul (x, w)\ns2 = Add (bias, s1)\ns = Div (s2, two)\nout = Softmax (s)",
        "no attention but a classifier: the scores are a product with the weight 'w'",
    ),
    "a classifier whose weight is that of an embedding": (
        "float[B,S,8] x",
        "float[a,b,c] out",
        "dims = Constant <value = int64[2] {5, 8}> ()\n"
        + _WEIGHT
        + "wt = Transpose (w)\ns = MatMul (x, wt)\nout = Softmax (s)",
        "no attention but a classifier: the scores are a product with the weight 'wt'",
    ),
    "a classifier of one vector a sample": (
        "float[B,8] x",
        "float[a,b] out",
        "dims = Constant <value = int64[2] {8, 5}> ()\n" + _WEIGHT + "s = Gemm (x, w)\nout = Softmax (s)",
        "no attention but a classifier: the scores are a product with the weight 'w'",
    ),
    "a convolution's classes": (
        "float[B,8,16] x",
        "float[a,b,c] out",
        "dims = Constant <value = int64[3] {5, 8, 1}> ()\n" + _WEIGHT + "s1 = Conv (x, w)\n"
        "s = Transpose <perm = [0, 2, 1]> (s1)\nout = Softmax (s)",
        "no attention but a classifier: the scores are a product with the weight 'w'",
    ),
    "a quantized classifier": (
        "float[B,S,8] x",
        "float[a,b,c] out",
        "dims = Constant <value = int64[2] {8, 5}> ()\n" + _WEIGHT + _SCALES + "s1 = MatMul (x, w)\n"
        "s2 = QuantizeLinear (s1, scale, zero)\ns = DequantizeLinear (s2, scale, zero)\nout = Softmax (s)",
        "no attention but a classifier: the scores are a product with the weight 'w'",
    ),
    "pooling over positions": (
        "float[B,S,8] x",
        "float[a,b,c] out",
        "dims = Constant <value = int64[2] {8, 1}> ()\n" + _WEIGHT + "s = MatMul (x, w)\np = Softmax <axis = 1> (s)\n"
        "y = Mul (p, x)\nout = Neg (y)",
        "no attention but a pooling over positions: the softmax runs along axis 1, expected the last",
    ),
    "classes of pixels": (
        "float[B,4,8,8] x",
        "float[a,b,c,d] out",
        "s = Neg (x)\nout = Softmax <axis = 1> (s)",
        "no attention but a classifier: the softmax runs along axis 1, expected the last",
    ),
    "learned weights of layers": (
        "float[B,3,8,8] x",
        "float[a,b,c,d] out",
        "w = Constant <value = float[3] {1, 2, 3}> ()\np = Softmax (w)\nshape = Constant <value = int64[4] {1, 3, 1, 1}> ()\n"
        "p4 = Reshape (p, shape)\nout = Mul (x, p4)",
        "no attention but learned weights: the scores are the constant 'w'",
    ),
    "rows of one matrix": (
        "float[B,7] x",
        "float[a,b] out",
        "s = Neg (x)\nout = Softmax (s)",
        "no attention but a classifier: the scores are rows of one matrix",
    ),
    "scores that are quantized": (
        PLAIN,
        "float[a,b,c,d] out",
        _SCORES + _SCALES + "s2 = QuantizeLinear (s1, scale, zero)\ns3 = DequantizeLinear (s2, scale, zero)\n"
        "p = Softmax (s3)\nout = MatMul (p, v)",
        "the scores are rounded to 8 bits, and the attention weights are not; --dequantize-attention computes it in float",
    ),
    "integer scores with a scale": (
        "uint8[B,4,S,8] q, uint8[B,4,8,S] kt, float[B,4,S,8] v",
        "float[a,b,c,d] out",
        _SCALES + "s1 = MatMulInteger (q, kt)\ns2 = Cast <to = 1> (s1)\ns3 = Mul (s2, scale)\np = Softmax (s3)\n"
        "out = MatMul (p, v)",
        "the scores are quantized by the MatMulInteger node that writes 's1'",
    ),
    "weights that are quantized": (
        PLAIN,
        "float[a,b,c,d] out",
        _SCORES
        + _SCALES
        + "p = Softmax (s1)\np2 = QuantizeLinear (p, scale, zero)\np3 = DequantizeLinear (p2, scale, zero)\n"
        "out = MatMul (p3, v)",
        "scores or weights are rounded to 8 bits, and the query 'q' is no fp32 number of codes",
    ),
}


_SQUARE = "dims = Constant <value = int64[2] {8, 8}> ()\n" + _WEIGHT
_HEADS = "split = Constant <value = int64[4] {0, 0, 2, 4}> ()\n"
_MIX = "dims = Constant <value = int64[2] {4, 4}> ()\n" + _WEIGHT
# A softmax over features was called a classifier: linear attention, talking heads, routers and gates, pooling.
NAMED |= {
    "queries of linear attention": (
        "float[B,S,8] x, float[B,8,8] context",
        "float[a,b,c] out",
        _SQUARE + "s = MatMul (x, w)\np = Softmax (s)\nout = MatMul (p, context)",
        "no attention of queries and keys but a softmax over features, as linear attention and gates have: the scores are a "
        "product with the weight 'w', and its result goes to the MatMul node that writes 'out'",
    ),
    "queries of linear attention by heads, features before positions": (
        "float[B,S,8] x, float[B,2,4,4] context",
        "float[a,b,c,d] out",
        _SQUARE + _HEADS + "s0 = MatMul (x, w)\ns1 = Reshape (s0, split)\ns = Transpose <perm = [0, 2, 3, 1]> (s1)\n"
        "p = Softmax <axis = 2> (s)\nout = MatMul (context, p)",
        "no attention of queries and keys but a softmax over features, as linear attention and gates have: the softmax runs "
        "along axis 2, expected the last",
    ),
    "keys of linear attention": (
        "float[B,S,8] x, float[B,2,S,4] v",
        "float[a,b,c,d] out",
        _SQUARE + _HEADS + "s0 = MatMul (x, w)\ns1 = Reshape (s0, split)\ns = Transpose <perm = [0, 2, 3, 1]> (s1)\n"
        "p = Softmax (s)\nout = MatMul (p, v)",
        "no attention but a pooling over positions, or the keys of linear attention: the scores are a product with the "
        "weight 'w', and its result goes to the MatMul node that writes 'out'",
    ),
    "keys of linear attention of an image, by a convolution": (
        "float[B,8,16] x, float[B,16,4] v",
        "float[a,b,c] out",
        "dims = Constant <value = int64[3] {8, 8, 1}> ()\n" + _WEIGHT + "s = Conv (x, w)\np = Softmax (s)\n"
        "out = MatMul (p, v)",
        "no attention but a pooling over positions, or the keys of linear attention",
    ),
    "pooling by one column": (
        "float[B,S,8] x",
        "float[a,b,c] out",
        "dims = Constant <value = int64[2] {8, 1}> ()\n" + _WEIGHT + "s1 = MatMul (x, w)\n"
        "s = Transpose <perm = [0, 2, 1]> (s1)\np = Softmax (s)\nout = MatMul (p, x)",
        "no attention but a pooling over positions, or the keys of linear attention: the scores are a product with the "
        "weight 'w'",
    ),
    "talking heads by an Einsum": (
        PLAIN,
        "float[a,b,c,d] out",
        _MIX + '%kt\ns1 = MatMul (q, kt)\ns = Einsum <equation = "bhqk,hg->bgqk"> (s1, w)\np = Softmax (s)\n'
        "out = MatMul (p, v)",
        "the weight 'w' mixes scores of queries and keys with each other before the softmax, as talking heads do",
    ),
    "talking heads by a MatMul over transposed scores": (
        PLAIN,
        "float[a,b,c,d] out",
        _MIX + "%kt\ns1 = MatMul (q, kt)\ns2 = Transpose <perm = [0, 2, 3, 1]> (s1)\ns3 = MatMul (s2, w)\n"
        "s = Transpose <perm = [0, 3, 1, 2]> (s3)\np = Softmax (s)\nout = MatMul (p, v)",
        "the weight 'w' mixes scores of queries and keys with each other before the softmax, as talking heads do",
    ),
    "talking heads by a convolution": (
        PLAIN,
        "float[a,b,c,d] out",
        "dims = Constant <value = int64[4] {4, 4, 1, 1}> ()\n" + _WEIGHT + "%kt\ns1 = MatMul (q, kt)\n"
        "s = Conv (s1, w)\np = Softmax (s)\nout = MatMul (p, v)",
        "the weight 'w' mixes scores of queries and keys with each other before the softmax, as talking heads do",
    ),
    "a router that chooses experts": (
        "float[N,8] x, float[N,2] each",
        "float[a,b] out",
        _SQUARE + "two = Constant <value = int64[1] {2}> ()\ns = MatMul (x, w)\np = Softmax (s)\n"
        "best, where = TopK (p, two)\nout = Mul (best, each)",
        "no attention but a router: the scores are a product with the weight 'w', and its result goes to the TopK node that "
        "writes 'best'",
    ),
    "a router of a fused node": (
        "float[N,8] x",
        "float[a,b] out",
        _SQUARE + "e = Constant <value = int64[3] {8, 8, 8}> ()\nw1 = ConstantOfShape <value = float[1] {0.5}> (e)\n"
        "s = MatMul (x, w)\np = Softmax (s)\nout = com.microsoft.MoE (x, p, w1, , w1)",
        "no attention but a router: the scores are a product with the weight 'w', and its result goes to "
        "the com.microsoft::MoE node that writes 'out'",
    ),
    "a gate of all experts": (
        "float[B,S,8] x, float[B,S,8] each",
        "float[a,b,c] out",
        _SQUARE + "s = MatMul (x, w)\np = Softmax (s)\nout = Mul (p, each)",
        "no attention but a gate: the scores are a product with the weight 'w', and its result goes to the Mul node",
    ),
    "a classifier that names the best": (
        "float[B,S,8] x",
        "int64[a,b,c] out",
        _SQUARE + "s = MatMul (x, w)\np = Softmax (s)\nout = ArgMax <axis = -1> (p)",
        "no attention but a classifier: the scores are a product with the weight 'w'",
    ),
}


def test_a_learned_query_keeps_its_own_reason() -> None:
    """A constant that meets computed keys is a query: what keeps the site is told, not that it pools."""
    graph = model(
        "float[B,H,S,8] k, float[B,H,S,8] v",
        "float[a,b,c,d] out",
        "dims = Constant <value = int64[4] {1, 1, 3, 8}> ()\n"
        + _WEIGHT.replace("w =", "q =")
        + _SCORES
        + "p = Softmax (s1)\nout = MatMul (p, v)",
    )
    assert "pooling" not in reason(graph)
    assert "classifier" not in reason(graph)


@pytest.mark.parametrize("name", NAMED)
def test_is_called_what_it_is(name: str) -> None:
    inputs, outputs, body, words = NAMED[name]
    assert words in reason(model(inputs, outputs, body))


def test_attention_of_matrices_is_not_called_a_classifier() -> None:
    graph = model(
        "float[S,8] q, float[8,T] kt, float[T,8] v",
        "float[a,b] out",
        "s = MatMul (q, kt)\np = Softmax (s)\nout = MatMul (p, v)",
    )
    assert reason(graph) == "the scores have 2 axes, expected batch, heads, queries and keys"


def test_attention_over_queries_is_not_called_a_pooling() -> None:
    graph = model(PLAIN, "float[a,b,c,d] out", _SCORES + "p = Softmax <axis = 2> (s1)\nout = MatMul (p, v)")
    assert reason(graph) == "the softmax runs along axis 2, expected the last"


def test_attention_that_fails_elsewhere_keeps_its_own_reason() -> None:
    graph = model(PLAIN.replace("4", "H"), "float[a,b,c,d] out", _SCORES + "p = Softmax (s1)\nout = MatMul (p, v)")
    assert "of known heads" in reason(graph)


def test_queries_that_are_constants_are_attention() -> None:
    graph = model(
        "float[1,4,S,8] k, float[1,4,S,8] v",
        "float[a,b,c,d] out",
        "dims = Constant <value = int64[4] {1, 4, 3, 8}> ()\n"
        + _WEIGHT.replace("w =", "q =")
        + _SCORES
        + "p = Softmax (s1)\nout = MatMul (p, v)",
    )
    assert only_site(graph).num_heads == 4
