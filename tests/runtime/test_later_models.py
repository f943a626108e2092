# SPDX-License-Identifier: Apache-2.0
"""Models of a later version of stof in sessions with this library: refused, ignored, or run by their function body."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from stof.runtime.library import library_path

CAUSAL = {"mask": "k <= q"}


def run(
    attributes: dict[str, str | int],
    *,
    op: str = "StofAttention",
    more_inputs: Sequence[str] = (),
    version: int = 1,
    functions: Sequence[onnx.FunctionProto] = (),
) -> np.ndarray:
    """The output of a model with one node of the library's domain; query, key and value are drawn."""
    names = ["q", "k", "v", *more_inputs]
    node = helper.make_node(op, names, ["y"], "att", domain="stof", **attributes)
    infos = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [1, 2, 4, 8]) for n in [*names, "y"]]
    graph = helper.make_graph([node], "g", infos[:-1], infos[-1:])
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("stof", version)]
    model = helper.make_model(graph, opset_imports=opsets, functions=functions, ir_version=9)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.register_custom_ops_library(str(library_path()))
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(1)
    output: np.ndarray = session.run(None, {n: rng.standard_normal((1, 2, 4, 8), np.float32) for n in names})[0]
    return output


@pytest.mark.parametrize(
    ("attributes", "error"),
    [
        ({"operands": "rotation"}, "attribute operands has role 'rotation', which this build does not know"),
        ({"results": "lse top"}, "attribute results is 'lse top', expected"),
        ({"layout": "SBHD"}, "attribute layout has 'SBHD', expected"),
        ({"empty_rows": "one"}, "attribute empty_rows is 'one', expected"),
        ({"mask": "nearest(q, k) <= 4"}, "nearest"),
        (
            {"operands": "relative_key2", "relative_index": "relative_key2: k - q"},
            "attribute operands has role 'relative_key2', which this build does not know",
        ),
        ({"operands": "relative_key", "relative_index": "relative_key: nearest(k - q)"}, "nearest"),
        ({"operands": "relative_key", "relative_index": "relative_key: k - q; order: 2"}, "entry 'order: 2'"),
    ],
    ids=str,
)
def test_words_that_it_does_not_know_are_refused(attributes: dict[str, str | int], error: str) -> None:
    with pytest.raises(Exception, match="StofAttention att: ") as found:
        run(attributes, more_inputs=["more"] if "operands" in attributes else [])
    assert error in str(found.value)


def test_attributes_that_it_does_not_know_are_ignored() -> None:
    np.testing.assert_array_equal(run({**CAUSAL, "rotation": 4}), run(CAUSAL))


def test_the_version_of_the_domain_is_not_compared() -> None:
    """Of a later version the kernels of this one run: no version says that a meaning has changed."""
    np.testing.assert_array_equal(run(CAUSAL, version=2), run(CAUSAL))


def test_an_operator_that_it_does_not_know_runs_its_function_body() -> None:
    body = [helper.make_node("Add", ["a", "b"], ["ab"]), helper.make_node("Add", ["ab", "c"], ["y"])]
    function = helper.make_function("stof", "StofSum", ["a", "b", "c"], ["y"], body, [helper.make_opsetid("", 18)])
    rng = np.random.default_rng(1)
    a, b, c = (rng.standard_normal((1, 2, 4, 8), np.float32) for _ in range(3))
    np.testing.assert_array_equal(run({}, op="StofSum", functions=[function]), (a + b) + c)
