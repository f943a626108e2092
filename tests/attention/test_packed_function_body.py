# SPDX-License-Identifier: Apache-2.0
"""Attribute ``packed``: the function body and the operator read heads from a tensor that holds others.

Both are compared with the formula in fp64, and the operator bit for bit with itself on unpacked tensors.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

import stof
from stof.attention.checks.reference import Problem, assert_close, random_problem, reference
from stof.attention.function_body import OP, Variant, add_packed_inputs, make_attention_function
from stof.graph.index import DOMAIN
from stof.mask.expression import MaskExpression
from stof.mask.site import EmptyRows, Layout
from stof.runtime.library import LibraryError, Op, has_packed
from stof.symbolic import Symbolic

FLAT = ("BSN",) * 4
LAYOUTS = [FLAT, ("BHSD", "BSN", "BSHD", "BSHD"), ("BSN", "BSHD", "BSN", "BHSD")]
PLACES = ((2, 3), (0, 5), (4, 0))  # heads before and behind those of query, key and value


def laid(heads: np.ndarray, layout: str, place: tuple[int, int]) -> np.ndarray:
    """[B, H, S, D] in another layout, with heads of NaN before and behind in BSN."""
    if layout == "BHSD":
        return heads
    rows = heads.transpose(0, 2, 1, 3)
    if layout == "BSHD":
        return np.ascontiguousarray(rows)
    B, S, H, D = rows.shape
    found = np.full((B, S, place[0] + H + place[1], D), np.nan, heads.dtype)
    found[:, :, place[0] : place[0] + H] = rows
    return found.reshape(B, S, (place[0] + H + place[1]) * D)


def restored(found: np.ndarray, layout: str, heads: int) -> np.ndarray:
    if layout == "BHSD":
        return found
    return found.reshape(*found.shape[:2], heads, -1).transpose(0, 2, 1, 3)


def packing(problem: Problem, layouts: tuple[str, ...], places: tuple[tuple[int, int], ...]) -> list[int]:
    counts = (problem.q.shape[1], problem.k.shape[1], problem.v.shape[1])
    found = []
    for layout, count, (before, behind) in zip(layouts, counts, places, strict=False):
        found += [before, before + count + behind] if layout == "BSN" else [0, count]
    return found


def arrays_of(problem: Problem, layouts: tuple[str, ...], places: tuple[tuple[int, int], ...]) -> list[np.ndarray]:
    own = (problem.q, problem.k, problem.v)
    heads = [laid(x, layout, place) for x, layout, place in zip(own, layouts, places, strict=False)]
    return [*heads, *problem.inputs()[3:]]


def attributes_of(problem: Problem, layouts: tuple[str, ...], packed: list[int] | None, **more: Any) -> dict[str, Any]:
    given = {
        **problem.attributes(),
        "scale": float(problem.q.shape[3] ** -0.5),
        "mask_id": 0,
        "layout": " ".join(layouts),
        "num_heads": problem.q.shape[1],
        "kv_num_heads": problem.k.shape[1],
    }
    return {**given, **more} if packed is None else {**given, "packed": packed, **more}


def function_of(problem: Problem, layouts: tuple[str, ...], opset: int, others: int) -> onnx.FunctionProto:
    grouped = problem.q.shape[1] != problem.k.shape[1]
    roles = tuple(str(problem.attributes()["operands"]).split())
    query, key, value, output = (Layout(layout) for layout in layouts)
    own = Variant(
        MaskExpression.parse(problem.mask),
        (query, key, value, output),
        grouped,
        problem.empty_rows,
        int(problem.query_offset),
        problem.softcap,
        roles,
        helper.np_dtype_to_tensor_dtype(problem.q.dtype),
    )
    variants = [own, *(replace(own, expression=MaskExpression.parse(f"q - k <= {i}")) for i in range(others))]
    return add_packed_inputs(make_attention_function(variants, opset), layouts, layouts)


def session(
    nodes: list[onnx.NodeProto],
    arrays: dict[str, np.ndarray],
    opset: int = 18,
    function: onnx.FunctionProto | None = None,
    fixed: bool = True,
) -> ort.InferenceSession:
    """A model of StofAttention nodes whose outputs are its own; with the library where there is no function."""
    inputs = [
        helper.make_tensor_value_info(
            n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape if fixed else [f"{n}{i}" for i in range(a.ndim)]
        )
        for n, a in arrays.items()
    ]
    kind = helper.np_dtype_to_tensor_dtype(arrays["x0"].dtype)
    outputs = [helper.make_tensor_value_info(o, kind, None) for node in nodes for o in node.output]
    model = helper.make_model(
        helper.make_graph(nodes, "g", inputs, outputs),
        opset_imports=[helper.make_opsetid("", opset), helper.make_opsetid(DOMAIN, 1)],
        functions=[] if function is None else [function],
        ir_version=8,
    )
    options = ort.SessionOptions()
    options.log_severity_level = 4
    if function is None:
        stof.register(options)
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def named(arrays: list[np.ndarray]) -> dict[str, np.ndarray]:
    return {f"x{i}": a for i, a in enumerate(arrays)}


def node_of(names: list[str], output: str, attributes: dict[str, Any]) -> onnx.NodeProto:
    return helper.make_node(OP, names, [output], output, domain=DOMAIN, **attributes)


@pytest.mark.parametrize("opset", [13, 18, 21])
@pytest.mark.parametrize("layouts", LAYOUTS, ids=" ".join)
@pytest.mark.parametrize(("groups", "others"), [(4, 0), (2, 1)])
def test_the_body_reads_its_heads(layouts: tuple[str, ...], groups: int, others: int, opset: int) -> None:
    rng = np.random.default_rng([groups, opset])
    problem = random_problem(rng, 2, 4, 13, 8, G=groups, T=19, Dv=5, mask="abs(q - k) <= 6", padded=True)
    wanted = reference(problem)
    arrays = named(arrays_of(problem, layouts, PLACES))
    attributes = attributes_of(problem, layouts, packing(problem, layouts, PLACES))
    node = node_of(list(arrays), "y", attributes)
    function = function_of(problem, layouts, opset, others)
    for made in (session([node], arrays, opset, function), session([node], arrays, opset)):
        (found,) = made.run(None, arrays)
        assert_close(restored(found, layouts[3], 4), wanted)


def test_one_body_serves_calls_with_and_without_others() -> None:
    rng = np.random.default_rng(1)
    one, other = (random_problem(rng, 1, 4, 7, 8, T=9) for _ in range(2))
    whole = ((0, 0),) * 3
    arrays = named([*arrays_of(one, FLAT, PLACES), *arrays_of(other, FLAT, whole)])
    names = list(arrays)
    nodes = [
        node_of(names[:3], "y", attributes_of(one, FLAT, packing(one, FLAT, PLACES))),
        node_of(names[3:], "z", attributes_of(other, FLAT, packing(other, FLAT, whole))),
    ]
    found = session(nodes, arrays, 18, function_of(one, FLAT, 18, 0)).run(None, arrays)
    for own, problem in zip(found, (one, other), strict=True):
        assert_close(restored(own, "BSN", 4), reference(problem))


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("layouts", LAYOUTS, ids=" ".join)
@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.parametrize("length", [1, 3, 70])
def test_the_operator_gives_the_same_bits(dtype: Any, layouts: tuple[str, ...], fixed: bool, length: int) -> None:
    rng = np.random.default_rng(length)
    problem = random_problem(rng, 2, 4, length, 16, G=2, T=70, Dv=8, mask="k % 7 != 3", padded=True, dtype=dtype)
    whole = ((0, 0),) * 3
    found = []
    for places, packed in ((whole, None), (whole, packing(problem, layouts, whole)), (PLACES, None)):
        arrays = named(arrays_of(problem, layouts, places))
        numbers = packing(problem, layouts, places) if places is PLACES else packed
        made = session([node_of(list(arrays), "y", attributes_of(problem, layouts, numbers))], arrays, fixed=fixed)
        if fixed:
            B, S, H, Dv = 2, length, 4, 8
            shapes = {"BSN": [B, S, H * Dv], "BSHD": [B, S, H, Dv], "BHSD": [B, H, S, Dv]}
            assert made.get_outputs()[0].shape == shapes[layouts[3]]
        found.append(made.run(None, arrays)[0])
    assert_close(restored(found[0], layouts[3], 4), reference(problem))
    assert np.array_equal(found[0], found[1])
    assert np.array_equal(found[0], found[2])


def test_one_tensor_holds_all_three() -> None:
    rng = np.random.default_rng(4)
    problem = random_problem(rng, 2, 4, 9, 8, G=2)
    rows = [x.transpose(0, 2, 1, 3) for x in (problem.q, problem.k, problem.v)]
    whole = np.concatenate(rows, axis=2).reshape(2, 9, 64)
    out = np.full((2, 9, 32), np.nan, np.float32)
    Op(OP, attributes_of(problem, FLAT, [0, 8, 4, 8, 6, 8])).run([whole] * 3, [out])
    assert_close(restored(out, "BSN", 4), reference(problem))


@pytest.mark.parametrize("empty", ["B", "S", "T"])
def test_tensors_without_elements(empty: str) -> None:
    sizes = {"B": 2, "S": 5, "T": 6, empty: 0}
    problem = random_problem(np.random.default_rng(5), sizes["B"], 4, sizes["S"], 8, T=sizes["T"])
    arrays = arrays_of(problem, FLAT, PLACES)
    out = np.full((sizes["B"], sizes["S"], 32), np.nan, np.float32)
    Op(OP, attributes_of(problem, FLAT, packing(problem, FLAT, PLACES))).run(arrays, [out])
    assert not out.any()


@pytest.mark.parametrize(
    ("packed", "layouts", "message"),
    [
        ([0, 4, 0, 4, 0], FLAT, "attribute packed has 5 numbers, expected 6"),
        ([0, 4, -1, 4, 0, 4], FLAT, "first head -1 of 4 for key, expected a head of 1 to 65536"),
        ([0, 4, 0, 0, 0, 4], FLAT, "first head 0 of 0 for key"),
        ([1, 4, 0, 4, 0, 4], FLAT, "first head 1 of 4 for query, expected 4 heads from the first one on"),
        ([0, 4, 0, 4, 1 << 62, 1 << 63 - 1], FLAT, "for value, expected a head"),
        ([0, 4, 1, 5, 0, 4], LAYOUTS[2], "first head 1 of 5 for key, expected 0 for layout BSHD"),
        ([0, 4, 0, 5, 0, 4], LAYOUTS[2], r"key has shape \[2, 9, 4, 8\], expected 5 heads, as attribute packed says"),
        (
            [0, 7, 0, 4, 0, 4],
            FLAT,
            r"query has shape \[2, 9, 32\], expected a last dimension that its number of heads \(7\)",
        ),
        ([0, 8, 0, 4, 0, 4], FLAT, "query and key differ in head size"),
        ("0 4 0 4 0 4", FLAT, "attribute packed is of another type"),
        (4, FLAT, "attribute packed is of another type"),
    ],
)
def test_numbers_that_are_wrong(packed: Any, layouts: tuple[str, ...], message: str) -> None:
    problem = random_problem(np.random.default_rng(6), 2, 4, 9, 8)
    arrays = named(arrays_of(problem, layouts, ((0, 0),) * 3))
    attributes = attributes_of(problem, layouts, packed)
    with pytest.raises(LibraryError, match=message):
        Op(OP, attributes).run(list(arrays.values()), [np.zeros((2, 9, 32), np.float32)])
    with pytest.raises(Exception, match=message):
        session([node_of(list(arrays), "y", attributes)], arrays, fixed=False).run(None, arrays)


def test_shapes_of_a_model_with_it() -> None:
    problem = random_problem(np.random.default_rng(7), 2, 4, 9, 8, G=2, T=11, Dv=6)
    arrays = named(arrays_of(problem, FLAT, PLACES))
    nodes = [node_of(list(arrays), "y", attributes_of(problem, FLAT, packing(problem, FLAT, PLACES)))]
    inputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, a.shape) for n, a in arrays.items()]
    graph = helper.make_graph(nodes, "g", inputs, [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)])
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid(DOMAIN, 1)]
    shape = Symbolic(helper.make_model(graph, opset_imports=opsets)).shape("y")
    assert shape is not None
    assert [d.constant for d in shape] == [2, 9, 24]


def test_a_library_without_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    assert has_packed()

    earlier = SimpleNamespace(stof_op_limits=lambda: b'{"StofAttention": {"attributes": ["mask"]}}')
    monkeypatch.setattr("stof.runtime.library.library", lambda: earlier)
    assert not has_packed()


def test_a_policy_for_empty_rows_beside_it() -> None:
    problem = random_problem(np.random.default_rng(8), 1, 4, 9, 8, mask="q % 3 != 1", empty_rows=EmptyRows.MEAN)
    arrays = named(arrays_of(problem, FLAT, PLACES))
    node = node_of(list(arrays), "y", attributes_of(problem, FLAT, packing(problem, FLAT, PLACES)))
    for function in (None, function_of(problem, FLAT, 18, 0)):
        (found,) = session([node], arrays, 18, function).run(None, arrays)
        assert_close(restored(found, "BSN", 4), reference(problem))
