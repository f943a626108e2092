# SPDX-License-Identifier: Apache-2.0
"""What a node does when its session is created, and its second output, in ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

import stof
from stof.attention.checks.reference import Problem, assert_close, random_problem, reference, reference_lse
from stof.runtime.library import cache_stats


def session(problem: Problem, outputs: list[str], *, fixed: bool, **attributes: Any) -> ort.InferenceSession:
    """One node, with the problem's shapes or open ones."""
    arrays = dict(zip(["q", "k", "v", "pad"], problem.inputs(), strict=False))
    kinds = {n: helper.np_dtype_to_tensor_dtype(a.dtype) for n, a in arrays.items()}
    inputs = [
        helper.make_tensor_value_info(n, kinds[n], a.shape if fixed else [f"{n}{i}" for i in range(a.ndim)])
        for n, a in arrays.items()
    ]
    given = {**problem.attributes(), **attributes}
    node = helper.make_node("StofAttention", list(arrays), outputs, "attention", domain="stof", **given)
    types = [kinds["q"], TensorProto.FLOAT]
    results = [helper.make_tensor_value_info(n, t, None) for n, t in zip(outputs, types, strict=False) if n]
    graph = helper.make_graph([node], "g", inputs, results)
    imports = [helper.make_opsetid("", 20), helper.make_opsetid("stof", 1)]
    options = ort.SessionOptions()
    options.log_severity_level = 4
    stof.register(options)
    model = helper.make_model(graph, opset_imports=imports, ir_version=9)
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def run(made: ort.InferenceSession, problem: Problem) -> list[np.ndarray]:
    found: list[np.ndarray] = made.run(None, dict(zip(["q", "k", "v", "pad"], problem.inputs(), strict=False)))
    return found


@pytest.mark.parametrize("fixed", [True, False])
def test_a_mask_of_fixed_shapes_is_made_with_the_session(fixed: bool) -> None:
    mask = f"(q * 3 + k * k) % {19 if fixed else 23} < 7"
    problem = random_problem(np.random.default_rng(5), 2, 2, 70, 16, T=90, mask=mask, padded=True)
    cache_stats(clear=True)
    made = session(problem, ["out"], fixed=fixed)
    assert cache_stats()["builds"] == int(fixed)
    wanted = reference(problem)
    for _ in range(2):
        assert_close(run(made, problem)[0], wanted)
        assert cache_stats()["builds"] == 1
    # The node holds its mask, whoever empties the cache.
    cache_stats(clear=True)
    assert_close(run(made, problem)[0], wanted)
    assert cache_stats()["builds"] == int(not fixed)


def test_shapes_that_no_run_can_have_leave_the_session_alone() -> None:
    problem = random_problem(np.random.default_rng(6), 1, 2, 40, 16, T=30, mask="k <= q", query_offset=True)
    made = session(problem, ["out"], fixed=True)
    with pytest.raises(Exception, match="query_offset"):
        run(made, problem)


@pytest.mark.parametrize(
    ("mask", "batch", "heads"),
    [("(q * q * 7919 + k * k * 104729) % 1009 < 300", 1, 1), ("q == h and k == b", 999, 999)],
)
@pytest.mark.usefixtures("watchdog")
def test_no_mask_is_built_for_sizes_that_are_only_declared(mask: str, batch: int, heads: int) -> None:
    """A model may declare tensors that nobody has: every tile of 2^44 pairs undecided, or 10^6 tables."""
    shape = [batch, heads, 1 << 22, 1]
    infos = [helper.make_tensor_value_info(n, TensorProto.FLOAT, shape) for n in "qkv"]
    result = helper.make_tensor_value_info("out", TensorProto.FLOAT, None)
    node = helper.make_node("StofAttention", list("qkv"), ["out"], "attention", domain="stof", mask=mask)
    imports = [helper.make_opsetid("", 20), helper.make_opsetid("stof", 1)]
    model = helper.make_model(helper.make_graph([node], "g", infos, [result]), opset_imports=imports, ir_version=9)
    options = ort.SessionOptions()
    stof.register(options)
    cache_stats(clear=True)
    ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    assert cache_stats()["misses"] == 0


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("fixed", [True, False])
def test_the_second_output(dtype: Any, fixed: bool) -> None:
    problem = random_problem(np.random.default_rng(7), 2, 4, 9, 8, G=2, T=20, mask="abs(q - k) <= 3", dtype=dtype)
    wanted, wanted_lse = reference(problem), reference_lse(problem)
    both = session(problem, ["out", "lse"], fixed=fixed, results="lse")
    assert [o.type for o in both.get_outputs()][1] == "tensor(float)"
    out, lse = run(both, problem)
    assert_close(out, wanted)
    assert lse.dtype == np.float32
    assert_close(lse, wanted_lse)
    for outputs in (["out"], ["out", ""]):  # asked for by the attribute alone
        assert np.array_equal(run(session(problem, outputs, fixed=fixed, results="lse"), problem)[0], out)
    with pytest.raises(Exception, match="output alone"):
        run(session(problem, ["out", "lse"], fixed=fixed), problem)
