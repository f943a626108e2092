# SPDX-License-Identifier: Apache-2.0
"""Wrong relative tables: an error that says what is expected, when a node is made or when sizes are known."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

import stof
from stof.runtime.library import LibraryError, Op

S, T, H, D, DV = 6, 9, 4, 8, 5


def f(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def run(operands: dict[str, np.ndarray], index: str | None, **attributes: Any) -> np.ndarray:
    given = {"operands": " ".join(operands), **attributes}
    if index is not None:
        given["relative_index"] = index
    out = np.zeros((2, H, S, DV), np.float32)
    Op("StofAttention", given).run([f(2, H, S, D), f(2, H, T, D), f(2, H, T, DV), *operands.values()], [out])
    return out


KEY = {"relative_key": f(H, 14, D)}
BIAS = {"relative_bias": f(1, 5)}
CASES: dict[str, tuple[dict[str, np.ndarray], str | None, str]] = {
    "no index": (KEY, None, "no entry for relative_key, which attribute operands names"),
    "blank index": (KEY, "  ", "no entry for relative_key"),
    "index of another": (
        KEY,
        "relative_key: k - q; relative_value: k - q",
        "an entry for relative_value, expected none",
    ),
    "index without a table": ({}, "relative_key: k - q", "an entry for relative_key, expected none"),
    "two entries": (KEY, "relative_key: k - q; relative_key: k", "two entries for relative_key"),
    "no colon": (KEY, "relative_key k - q", "entry 'relative_key k - q', expected one of relative_key"),
    "role of no table": (KEY, "bias: k - q", "entry 'bias: k - q', expected one of relative_key"),
    "last semicolon": (KEY, "relative_key: k - q;", "entry '', expected one of"),
    "no expression": (KEY, "relative_key: ", "no expression for relative_key"),
    "condition": (KEY, "relative_key: k <= q", "index expression, column"),
    "syntax": (KEY, "relative_key: k - (q", "relative_index of relative_key: index expression, column 7: expected ')'"),
    "reads b": (KEY, "relative_key: k - q + b", "reads b, expected q, k, S, T, P and tables"),
    "reads h": (KEY, "relative_key: h", "relative_index of relative_key reads h"),
    "reads lengths": (KEY, "relative_key: k - lengths[b]", "reads lengths"),
    "no difference": (KEY, "relative_key: q * k", "is no function of one difference A(k) - C(q)"),
    "two differences": (KEY, "relative_key: max(k - q, k)", "is no function of one difference"),
    "missing table": (KEY, "relative_key: table0[k]", "table0 is not among the given tables"),
    "outside of a table": (
        {"table0": np.arange(3), **KEY},
        "relative_key: table0[k]",
        "relative_index of relative_key: index 0 of table0 runs from 0 to 8, expected 0 to 2",
    ),
    "span": (KEY, "relative_key: k * 1048577 - q", "that span 8388622 values, expected at most 2^23"),
    "second alone": ({"relative_key1": f(1, 3, D)}, "relative_key1: k - q", "expected relative_key beside it"),
    "factor alone": ({"relative_bias_factor": f(1, 1, S)}, None, "expected relative_bias beside it"),
    "factor of keys": ({**BIAS, "relative_bias_factor": f(1, 1, T)}, None, "expected [1 or 2, 1 or 4, 6]"),
    "factor of rank 2": ({**BIAS, "relative_bias_factor": f(1, S)}, None, "shape [1, 6], expected"),
    "factor of doubles": ({**BIAS, "relative_bias_factor": np.ones((1, 1, S))}, None, "expected that of query or fp32"),
    "heads": ({"relative_key": f(2, 14, D)}, "relative_key: k - q", "expected [1 or 4, 1 to 8388608, 8 or 9]"),
    "rank": ({"relative_key": f(14, D)}, "relative_key: k - q", "shape [14, 8], expected"),
    "columns": ({"relative_query": f(1, 14, D + 2)}, "relative_query: k - q", "8 or 9]"),
    "columns of values": ({"relative_value": f(1, 14, DV + 1)}, "relative_value: k - q", "1 to 1024, 5]"),
    "rows of values": ({"relative_value": f(1, 1025, DV)}, "relative_value: k - q", "1 to 1024, 5]"),
    "no rows": ({"relative_key": f(1, 0, D)}, "relative_key: k - q", "shape [1, 0, 8], expected"),
    "type": (
        {"relative_key": np.ones((1, 14, D), np.float16)},
        "relative_key: k - q",
        "expected that of query or fp32",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_refused(name: str) -> None:
    operands, index, message = CASES[name]
    with pytest.raises(LibraryError) as error:
        run(operands, index)
    assert message in str(error.value)


def test_taken() -> None:
    """What the cases change is legal."""
    assert np.isfinite(run(KEY, "relative_key: k - q")).all()
    assert np.isfinite(run({"table0": np.arange(9), **KEY}, " relative_key :table0[k]")).all()
    assert np.isfinite(run({**BIAS, "relative_bias_factor": f(1, 1, S)}, None)).all()
    both = {**KEY, "relative_query": f(1, 3, D + 1), "relative_key1": f(1, 1, D)}
    index = "relative_query:k//3-q//3;relative_key1: 0; relative_key: k * 1000 - q * 1000"
    assert np.isfinite(run(both, index)).all()


def test_session_refuses_the_node() -> None:
    """A constant table: the expression is an error before a run. Without one the session runs."""

    def session(index: str) -> Any:
        shapes = {"q": ["B", H, "S", D], "k": ["B", H, "T", D], "v": ["B", H, "T", DV], "r": [H, "L", D]}
        inputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in shapes.items()]
        node = helper.make_node(
            "StofAttention", list(shapes), ["out"], "one", domain="stof", operands="relative_key", relative_index=index
        )
        graph = helper.make_graph([node], "g", inputs, [helper.make_tensor_value_info("out", TensorProto.FLOAT, None)])
        imports = [helper.make_opsetid("", 18), helper.make_opsetid("stof", 1)]
        options = ort.SessionOptions()
        options.log_severity_level = 4
        stof.register(options)
        model = helper.make_model(graph, opset_imports=imports, ir_version=8).SerializeToString()
        return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])

    with pytest.raises(Exception, match="is no function of one difference"):
        session("relative_key: q * k")
    feeds = {"q": f(2, H, S, D), "k": f(2, H, T, D), "v": f(2, H, T, DV), "r": KEY["relative_key"]}
    found = session("relative_key: k - q + S - 1").run(None, feeds)[0]
    np.testing.assert_array_equal(found, run(KEY, "relative_key: k - q + S - 1"))
