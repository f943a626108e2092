# SPDX-License-Identifier: Apache-2.0
"""Tables of rows by relative position in the function body, run without the library, against the definition in fp64."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from stof.attention.checks.reference import Problem, assert_close, random_problem, reference, reference_lse
from stof.attention.function_body import OP, Variant, make_attention_function
from stof.attention.relative_terms.body import RelativeProduct
from stof.graph.index import DOMAIN
from stof.mask.expression import MaskExpression
from stof.mask.site import Layout

ROWS = 9
TABLE0 = np.array([3, 0, 5, 8, 8, 1, 2], np.int32)
INDICES = {
    "relative_key": "k - q + 4",
    "relative_key1": "q // 2 - k // 2 + 3",
    "relative_query": "table0[max(0, min(6, q - k + 3))]",
    "relative_value": "min(S, 5) + k - q - P",
}


def relative_problem(roles: dict[str, tuple[int, int]], **settings: Any) -> Problem:
    """A random problem with tables of ``roles``: heads and row biases of each."""
    rng = np.random.default_rng(11)
    plain = random_problem(rng, settings.pop("B", 2), 4, settings.pop("S", 6), 8, Dv=5, **settings)
    sizes = {role: 5 if role == "relative_value" else 8 for role in roles}
    relative = {
        role: rng.standard_normal((heads, ROWS, sizes[role] + more), np.float32)
        for role, (heads, more) in roles.items()
    }
    index = "; ".join(f"{role}: {INDICES[role]}" for role in roles)
    operands = {**plain.operands, **({"table0": TABLE0} if "table0" in index else {})}
    return Problem(**{**plain.__dict__, "operands": operands, "relative": relative, "relative_index": index})


def run_body(problem: Problem, opset: int, plain_beside: bool = False) -> list[np.ndarray]:
    """Output and LSE of a model of one call of the function; ``plain_beside``: a variant without tables comes first."""
    attributes = problem.attributes()
    heads = {"num_heads": problem.q.shape[1], "kv_num_heads": problem.k.shape[1]}
    texts = dict(entry.split(": ", 1) for entry in problem.relative_index.split("; ") if entry)
    roles = tuple(str(attributes["operands"]).split())

    def variant(roles: tuple[str, ...], products: tuple[RelativeProduct, ...]) -> Variant:
        return Variant(
            MaskExpression.parse(problem.mask),
            (Layout.BHSD,) * 4,
            heads["num_heads"] != heads["kv_num_heads"],
            problem.empty_rows,
            int(problem.query_offset),
            problem.softcap,
            roles,
            TensorProto.FLOAT,
            products,
        )

    products = tuple(
        RelativeProduct(role, MaskExpression.parse_integer(text), problem.relative[role].shape[2] == 9)
        for role, text in texts.items()
    )
    unused = tuple("unused" if r.startswith(("relative", "table")) else r for r in roles)
    variants = [*([variant(unused, ())] if plain_beside else []), variant(roles, products)]
    arrays = problem.inputs()
    names = [f"x{i}" for i in range(len(arrays))]
    inputs = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), [None] * a.ndim)
        for n, a in zip(names, arrays, strict=True)
    ]
    scale = float(problem.q.shape[3] ** -0.5)
    node = helper.make_node(OP, names, ["y", "lse"], domain=DOMAIN, mask_id=len(variants) - 1, scale=scale, **heads)
    outputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in ("y", "lse")]
    model = helper.make_model(
        helper.make_graph([node], "g", inputs, outputs),
        opset_imports=[helper.make_opsetid("", opset), helper.make_opsetid(DOMAIN, 1)],
        functions=[make_attention_function(variants, opset, lse=True)],
        ir_version=8,
    )
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    found: list[np.ndarray] = session.run(None, dict(zip(names, arrays, strict=True)))
    return found


CASES: list[tuple[dict[str, tuple[int, int]], dict[str, Any]]] = [
    ({"relative_key": (4, 0)}, {}),
    ({"relative_key": (1, 1)}, {"T": 9, "query_offset": True, "mask": "k <= q"}),
    ({"relative_query": (4, 1)}, {"T": 3}),
    ({"relative_key": (4, 1), "relative_query": (1, 0)}, {"G": 2, "padded": True}),
    ({"relative_key": (1, 0), "relative_key1": (4, 0)}, {"softcap": 2.0}),
    ({"relative_value": (4, 0)}, {"mask": "k < q"}),
    ({"relative_key": (1, 0), "relative_value": (1, 0)}, {"T": 11, "query_offset": True, "padded": True}),
    ({"relative_key": (4, 1), "relative_query": (4, 1), "relative_value": (1, 0)}, {"S": 1, "T": 7}),
]


@pytest.mark.parametrize("opset", [13, 18, 23])
@pytest.mark.parametrize(("roles", "settings"), CASES, ids=str)
def test_the_body_is_the_definition(roles: dict[str, tuple[int, int]], settings: dict[str, Any], opset: int) -> None:
    problem = relative_problem(roles, **settings)
    for beside in (False, True):
        out, lse = run_body(problem, opset, beside)
        assert_close(out, reference(problem))
        assert_close(lse, reference_lse(problem))


def test_the_kernel_is_the_definition() -> None:
    """The library reads attribute and operands as the body does."""
    for roles, settings in CASES:
        problem = relative_problem(roles, **settings)
        out, lse = problem.run_with_lse()
        assert_close(out, reference(problem))
        assert_close(lse, reference_lse(problem))


def test_a_factor_of_rows_multiplies_the_table_by_distance() -> None:
    rng = np.random.default_rng(5)
    for heads in (1, 4):
        plain = random_problem(rng, 2, 4, 6, 8, Dv=5, relative_bias=rng.standard_normal((heads, 7), np.float32))
        factor = rng.standard_normal((2, heads, 6), np.float32)
        problem = Problem(**{**plain.__dict__, "relative_bias_factor": factor})
        out, _ = run_body(problem, 18)
        assert_close(out, reference(problem))
        assert_close(problem.run(), reference(problem))
        assert not np.allclose(out, reference(plain))


@pytest.mark.parametrize("sizes", [(0, 6, 6), (2, 0, 5), (2, 5, 0)], ids=str)
def test_nothing_to_compute(sizes: tuple[int, int, int]) -> None:
    B, S, T = sizes
    problem = relative_problem({"relative_key": (4, 1), "relative_query": (1, 0)}, B=B, S=S, T=T)
    out, _ = run_body(problem, 18)
    assert out.shape == (B, 4, S, 5)
    assert not out.any()
