# SPDX-License-Identifier: Apache-2.0
"""Rules of single operators on constants agree with a runtime."""

from __future__ import annotations

import math

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from stof.symbolic import Symbolic, integer, var

INF, NAN = math.inf, math.nan


def of_constants(op: str, *arrays: np.ndarray, **attributes: int) -> onnx.ModelProto:
    """A model of one operator, whose output is y."""
    stored = [numpy_helper.from_array(a, f"x{i}") for i, a in enumerate(arrays)]
    node = helper.make_node(op, [t.name for t in stored], ["y"], **attributes)
    y = helper.make_tensor_value_info("y", helper.np_dtype_to_tensor_dtype(arrays[0].dtype), None)
    graph = helper.make_graph([node], "g", [], [y], stored)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def run(model: onnx.ModelProto, **inputs: np.ndarray) -> np.ndarray:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(["y"], inputs)[0])


FUNCTIONS = ["Ceil", "Cos", "Erf", "Exp", "Floor", "Log", "Reciprocal", "Round", "Sigmoid", "Sin", "Sqrt", "Tanh"]


@pytest.mark.parametrize("op", FUNCTIONS)
def test_functions_of_extreme_numbers(op: str) -> None:
    """Which are infinite, 0 or no number: masks are made of them."""
    numbers = np.array([-INF, -1000, -100, -2.5, -0.5, 0, 0.5, 1.5, 2.5, 100, 1000, INF], np.float32)
    model = of_constants(op, numbers)
    found = Symbolic(model).constant("y")
    assert found is not None
    np.testing.assert_allclose(found, run(model), rtol=1e-6, atol=1e-40)


@pytest.mark.parametrize("op", ["Min", "Max"])
def test_extremes_of_what_is_no_number(op: str) -> None:
    model = of_constants(op, np.array([1, NAN, 2, NAN], np.float32), np.array([NAN, 1, INF, -INF], np.float32))
    np.testing.assert_array_equal(Symbolic(model).constant("y"), run(model))


LARGE = 2**53 + 1  # which fp64 does not hold
DIVIDENDS = np.array([LARGE, -LARGE, 2**63 - 1, 2**62 + 1, -(2**62) - 1, 7, -7, 7, -7, 6], np.int64)
DIVISORS = np.array([1, 1, 2, 10, 10, 2, 2, -2, -2, -3], np.int64)


@pytest.mark.parametrize(("op", "fmod"), [("Div", None), ("Mod", 0), ("Mod", 1)])
def test_large_integers_are_divided_exactly(op: str, fmod: int | None) -> None:
    """ONNX Runtime itself has the remainder of C of doubles; the operator's definition has that of integers."""
    model = of_constants(op, DIVIDENDS, DIVISORS, **({} if fmod is None else {"fmod": fmod}))
    (wanted,) = ReferenceEvaluator(model).run(None, {})
    np.testing.assert_array_equal(Symbolic(model).constant("y"), wanted)


@pytest.mark.parametrize("op", ["ReduceSum", "ReduceMax", "ReduceSumSquare"])
@pytest.mark.parametrize("axes", [None, [], [1]], ids=str)
@pytest.mark.parametrize("keep", [0, 1])
@pytest.mark.parametrize("idle", [0, 1])
def test_the_shape_of_what_is_reduced_along_no_axis(op: str, axes: list[int] | None, keep: int, idle: int) -> None:
    given = [np.ones((2, 3), np.float32)] + ([] if axes is None else [np.array(axes, np.int64)])
    model = of_constants(op, *given, keepdims=keep, noop_with_empty_axes=idle)
    shape = Symbolic(model).shape("y")
    assert shape is not None
    assert tuple(d.constant for d in shape) == run(model).shape


@pytest.mark.parametrize("dtype", [np.int64, np.float32, np.bool_], ids=lambda d: d.__name__)
def test_nothing_stored_beside_an_input(dtype: type) -> None:
    """What is chosen from is looked up at any place, also where it has no element."""
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    node = helper.make_node("Concat", ["none", "x"], ["y"], axis=0)
    x, y = (helper.make_tensor_value_info(n, kind, ["S"]) for n in "xy")
    none = numpy_helper.from_array(np.zeros(0, dtype), "none")
    graph = helper.make_graph([node], "g", [x], [y], [none])
    symbolic = Symbolic(helper.make_model(graph))
    whole, own = symbolic.value("y"), symbolic.value("x")
    assert whole is not None
    assert own is not None
    for place in (var("q"), integer(3)):
        assert whole.at((place,)) == own.at((place,))


def test_no_element_of_nothing_is_known() -> None:
    none = numpy_helper.from_array(np.zeros(0, np.float32), "none")
    found = Symbolic(helper.make_model(helper.make_graph([], "g", [], [], [none]))).value("none")
    assert found is not None
    assert found.at((var("q"),)).kind == "table"  # type: ignore[union-attr]
