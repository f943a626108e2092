# SPDX-License-Identifier: Apache-2.0
"""The function body of StofAttention, run by ONNX Runtime without the library, against the formula in fp64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from stof.attention.checks.reference import Problem, assert_close, random_problem, reference, reference_lse
from stof.attention.function_body import OP, Variant, make_attention_function
from stof.graph.index import DOMAIN, all_nodes
from stof.mask.expression import MaskExpression
from stof.mask.site import EmptyRows, Layout


def run_body(problem: Problem, opset: int, lse: bool = False, others: int = 0) -> list[np.ndarray]:
    """The outputs of a model whose one node is a call of the function, that of the last of 1 + ``others`` variants."""
    attributes = problem.attributes()
    heads = {"num_heads": problem.q.shape[1], "kv_num_heads": problem.k.shape[1]}
    variant = Variant(
        MaskExpression.parse(problem.mask),
        (Layout.BHSD,) * 4,
        heads["num_heads"] != heads["kv_num_heads"],
        problem.empty_rows,
        int(problem.query_offset),
        problem.softcap,
        tuple(str(attributes["operands"]).split()),
        TensorProto.FLOAT,
    )
    arrays = problem.inputs()
    names = [f"x{i}" for i in range(len(arrays))]
    inputs = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
        for n, a in zip(names, arrays, strict=True)
    ]
    scale = float(problem.q.shape[3] ** -0.5)
    results = ["y", "lse"] if lse else ["y"]
    node = helper.make_node(OP, names, results, domain=DOMAIN, mask_id=others, scale=scale, **heads)
    outputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in results]
    variants = [*(replace(variant, expression=MaskExpression.parse(f"q - k <= {i}")) for i in range(others)), variant]
    model = helper.make_model(
        helper.make_graph([node], "g", inputs, outputs),
        opset_imports=[helper.make_opsetid("", opset), helper.make_opsetid(DOMAIN, 1)],
        functions=[make_attention_function(variants, opset, lse)],
        ir_version=8,
    )
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    found: list[np.ndarray] = session.run(None, dict(zip(names, arrays, strict=True)))
    return found


@pytest.mark.parametrize("opset", [13, 18, 21])
@pytest.mark.parametrize(
    "settings",
    [
        {"mask": "abs(q - k) <= 3"},
        {"relative": (4, 9)},
        {"relative": (1, 31), "mask": "k <= q", "query_offset": True},
        {"relative": (4, 1), "sink": True},
        {"sink": True, "mask": "k <= q and q - k <= 2", "padded": True},
        {"sink": True, "relative": (4, 13), "biased": True, "softcap": 3.0},
    ],
    ids=str,
)
def test_the_body_is_the_formula(settings: dict[str, Any], opset: int) -> None:
    rng = np.random.default_rng(1)
    extra: dict[str, Any] = dict(settings)
    shape = extra.pop("relative", None)
    if shape is not None:
        extra["relative_bias"] = rng.standard_normal(shape).astype(np.float32) * 2
    if extra.pop("sink", False):
        extra["sink"] = rng.standard_normal(4).astype(np.float32) * 2
    if extra.pop("biased", False):
        extra["bias"] = rng.standard_normal((1, 4, 1, 19)).astype(np.float32)
    problem = random_problem(rng, 2, 4, 13, 8, G=2, T=19, **extra)
    wanted = reference(problem)
    assert_close(run_body(problem, opset)[0], wanted)
    assert_close(problem.run(), wanted)


@pytest.mark.parametrize("opset", [13, 18, 21])
@pytest.mark.parametrize(
    ("policy", "sink"), [("zero", False), ("zero", True), ("mean", False), ("all", False), ("nan", False)]
)
def test_the_logarithm_of_the_divisor(policy: str, sink: bool, opset: int) -> None:
    """Rows without a key among them, and a sink far above all scores; behind two other variants of the body."""
    rng = np.random.default_rng(2)
    logits = np.array([0.5, -2.0, 200.0, -300.0], np.float32) if sink else None
    problem = random_problem(
        rng,
        2,
        4,
        13,
        8,
        G=2,
        T=19,
        mask="abs(q - k) <= 3 and q % 5 != 2",
        padded=True,
        empty_rows=EmptyRows(policy),
        sink=logits,
        softcap=2.0,
    )
    wanted, wanted_lse = reference(problem), reference_lse(problem)
    assert np.isneginf(wanted_lse).any() != sink
    assert np.isfinite(wanted_lse).any()
    for found, lse in (run_body(problem, opset, lse=True, others=2), problem.run_with_lse()):
        assert_close(found, wanted)
        assert np.array_equal(np.isneginf(lse), np.isneginf(wanted_lse))
        assert_close(np.where(np.isneginf(lse), 0, lse), np.where(np.isneginf(wanted_lse), 0, wanted_lse))
    assert_close(run_body(problem, opset, others=2)[0], wanted)


def test_no_key_at_all() -> None:
    problem = random_problem(np.random.default_rng(3), 1, 2, 3, 8, T=0, sink=np.array([1.5, -1.0], np.float32))
    found, lse = problem.run_with_lse()
    assert not found.any()
    assert np.array_equal(lse, np.array([[[1.5] * 3, [-1.0] * 3]], np.float32))
    assert np.isneginf(random_problem(np.random.default_rng(3), 1, 2, 3, 8, T=0).run_with_lse()[1]).all()


def test_branches_read_no_attribute() -> None:
    """TensorRT's parser takes references to attributes in the branches of an If for 0."""
    masks = ("abs(q - k) <= 3", "k <= q", "abs(q - k) <= 5")
    variants = [
        Variant(MaskExpression.parse(m), (Layout.BSN,) * 4, True, EmptyRows.ZERO, 0, 0.0, ("pad",), TensorProto.FLOAT)
        for m in masks
    ]
    function = make_attention_function(variants, 18)
    top = {a.ref_attr_name for n in function.node for a in n.attribute if a.ref_attr_name}
    assert top == set(function.attribute) == {"mask_id", "scale", "num_heads", "kv_num_heads"}
    branches = [a.g for n in function.node for a in n.attribute if a.HasField("g")]
    assert len(branches) == 2
    inner = [n for branch in branches for n in all_nodes(branch.node)]
    assert sum(n.op_type == "Softmax" for n in inner) == len(masks)
    assert not [n.name for n in inner for a in n.attribute if a.ref_attr_name]
