# SPDX-License-Identifier: Apache-2.0
"""Words and limits of chain descriptions (docs/reference/chain-format.md), which printer, parser and search share."""

from __future__ import annotations

MOST_TEXT = 16 << 10  # bytes of a description
MOST_NODES = 256  # operations
MOST_DEPTH = 64  # levels of an expression
MOST_INPUTS, MOST_OUTPUTS, MOST_REDUCTIONS, MOST_AXES = 16, 8, 16, 6
MOST_DIMENSIONS = 10  # of an input by which an axis may be sized: one digit names them
LARGEST_INTEGER = 1 << 31
REDUCTIONS = frozenset({"sum", "mean", "max_of", "min_of"})
_UNARY = frozenset(
    ["abs", "exp", "log", "sqrt", "rsqrt", "reciprocal", "tanh", "erf", "sigmoid", "softplus", "sin", "cos", "floor"]
    + ["ceil", "round", "relu", "silu", "gelu", "gelu_tanh", "f32", "f16", "bf16"]
)
ARITY = {**dict.fromkeys(_UNARY | REDUCTIONS, 1), "min": 2, "max": 2, "pow": 2, "select": 3}  # functions of the grammar
KEYWORDS = frozenset({"axes", "let", "out", "inf", "nan"})
