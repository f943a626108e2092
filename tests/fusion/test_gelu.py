# SPDX-License-Identifier: Apache-2.0
"""GELU made of primitives is one function of the format; what is only like it is not."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from chain_graphs import FLOAT, HALF, Builder, N, activations
from fused import fuse_chains

from stof.fusion.decide.measured import take_all

ROOT, CUBE = math.sqrt(2 / math.pi), 0.044715


def _last(b: Builder, x: str, raised: str) -> str:
    return str(b.add("Mul", b.add("Mul", x, b.number(0.5)), b.add("Add", raised, b.number(1.0))))


def erf_divided(b: Builder, x: str) -> str:
    """As torch's exporters: x * (erf(x / sqrt(2)) + 1) * 0.5."""
    raised = b.add("Erf", b.add("Div", x, b.number(math.sqrt(2))))
    return str(b.add("Mul", b.add("Mul", x, b.add("Add", raised, b.number(1.0))), b.number(0.5)))


def erf_multiplied(b: Builder, x: str) -> str:
    return _last(b, x, b.add("Erf", b.add("Mul", b.number(math.sqrt(0.5)), x)))


def tanh_cubed(b: Builder, x: str) -> str:
    """As GPT-2: the cube by Pow."""
    cube = b.add("Pow", x, b.number(3.0))
    inner = b.add("Mul", b.number(ROOT), b.add("Add", x, b.add("Mul", b.number(CUBE), cube)))
    return _last(b, x, b.add("Tanh", inner))


def tanh_multiplied(b: Builder, x: str) -> str:
    cube = b.add("Mul", b.add("Mul", x, x), x)
    inner = b.add("Mul", b.add("Add", x, b.add("Mul", cube, b.number(CUBE))), b.number(ROOT))
    return _last(b, x, b.add("Tanh", inner))


def tanh_factored(b: Builder, x: str) -> str:
    """As FastGelu's authors: sqrt(2 / pi) x (1 + 0.044715 x x)."""
    square = b.add("Mul", b.add("Mul", b.number(CUBE), x), x)
    inner = b.add("Mul", b.add("Mul", x, b.number(ROOT)), b.add("Add", b.number(1.0), square))
    return _last(b, x, b.add("Tanh", inner))


def _text(make: Callable[[Builder, str], str], dtype: int) -> str:
    b = Builder(dtype)
    x = b.add("Add", activations(b), b.weight(N))
    y = make(b, x)
    found = fuse_chains(b.model(y), take_all)
    (node,) = [n for n in found.model.graph.node if n.op_type == "StofChain"]
    return str(next(a.s.decode() for a in node.attribute if a.name == "chain"))


@pytest.mark.parametrize("dtype", [FLOAT, HALF], ids=["fp32", "fp16"])
@pytest.mark.parametrize(
    ("make", "word"),
    [
        (erf_divided, "gelu("),
        (erf_multiplied, "gelu("),
        (tanh_cubed, "gelu_tanh("),
        (tanh_multiplied, "gelu_tanh("),
        (tanh_factored, "gelu_tanh("),
    ],
    ids=lambda p: p.__name__ if callable(p) else "",
)
def test_gelu_of_primitives(make: Callable[[Builder, str], str], word: str, dtype: int) -> None:
    text = _text(make, dtype)
    assert word in text
    assert "erf(" not in text
    assert " tanh(" not in text


def _with(root: float, cube: float, half: float, one: float) -> Callable[[Builder, str], str]:
    def make(b: Builder, x: str) -> str:
        inner = b.add(
            "Mul", b.add("Add", x, b.add("Mul", b.add("Mul", b.add("Mul", x, x), x), b.number(cube))), b.number(root)
        )
        return str(b.add("Mul", b.add("Mul", x, b.number(half)), b.add("Add", b.add("Tanh", inner), b.number(one))))

    return make


@pytest.mark.parametrize(
    "numbers",
    [(ROOT * 1.001, CUBE, 0.5, 1.0), (ROOT, CUBE * 1.01, 0.5, 1.0), (ROOT, CUBE, 0.51, 1.0), (ROOT, CUBE, 0.5, 1.01)],
)
def test_other_numbers_are_no_gelu(numbers: tuple[float, float, float, float]) -> None:
    assert "gelu" not in _text(_with(*numbers), FLOAT)


def test_of_another_argument_it_is_no_gelu() -> None:
    def make(b: Builder, x: str) -> str:
        raised = b.add("Erf", b.add("Mul", b.add("Abs", x), b.number(math.sqrt(0.5))))
        return _last(b, x, raised)

    assert "gelu" not in _text(make, FLOAT)


def test_rounded_numbers_in_fp32_are_no_gelu() -> None:
    half, root, cube = (float(np.float16(v)) for v in (math.sqrt(2), ROOT, CUBE))

    def divided(b: Builder, x: str) -> str:
        return _last(b, x, b.add("Erf", b.add("Div", x, b.number(half))))

    assert "gelu" not in _text(divided, FLOAT)
    assert "gelu" not in _text(_with(root, cube, 0.5, 1.0), FLOAT)


def test_small_results_in_halves_are_within_the_check() -> None:
    def low(b: Builder, x: str) -> str:
        return erf_divided(b, b.add("Min", x, b.number(-1.0)))

    assert "gelu(" in _text(low, HALF)


@pytest.mark.parametrize("op", ["Add", "Mul"])
def test_many_doublings_come_to_an_end(op: str) -> None:
    """What is walked again at every use would be walked 2^40 times."""

    def doubled(b: Builder, x: str) -> str:
        y = x
        for _ in range(40):
            y = b.add(op, y, y) if op == "Add" else b.add("Tanh", b.add("Mul", y, y))
        return _last(b, x, b.add("Tanh", y))

    assert "gelu" not in _text(doubled, FLOAT)
