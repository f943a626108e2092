# SPDX-License-Identifier: Apache-2.0
"""Checks of chains widen what is half precision, and nothing else: numbers of fp32 stay what they are.

A description in pure fp32 lost its numbers below -60000, as of (1 - mask) * -1e9, and the chain was kept.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from chain_graphs import CHAINS, Builder
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

import stof
from stof.execution.upcast import HALF
from stof.fusion.check import check_chain
from stof.fusion.description.chain_description import ChainDescription, widen_attribute
from stof.fusion.fusion_graph import FusionGraph
from stof.fusion.regions import find_chains
from stof.fusion.translate import FusedChain
from stof.symbolic import Symbolic

F32, F16 = TensorProto.FLOAT, TensorProto.FLOAT16


def mask_model(steps: list[tuple[str, float, int]], given: int, result: int) -> onnx.ModelProto:
    """A mask with one operator after the other, each with a constant of a type; casts where types change."""
    nodes, constants, name, dtype = [], [], "mask", given
    for i, (op, number, kind) in enumerate(steps):
        if kind != dtype:
            nodes.append(helper.make_node("Cast", [name], [f"cast{i}"], to=kind))
            name, dtype = f"cast{i}", kind
        array = np.array(number, helper.tensor_dtype_to_np_dtype(kind))
        constants.append(numpy_helper.from_array(array, f"c{i}"))
        nodes.append(helper.make_node(op, [name, f"c{i}"], [f"t{i}"]))
        name = f"t{i}"
    if result != dtype:
        nodes.append(helper.make_node("Cast", [name], ["last"], to=result))
        name = "last"
    nodes[-1].output[0] = "y"
    infos = [helper.make_tensor_value_info(n, t, ["B", "S"]) for n, t in (("mask", given), ("y", result))]
    graph = helper.make_graph(nodes, "g", infos[:1], infos[1:], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def checked_chain(model: onnx.ModelProto) -> FusedChain:
    """The one chain of a model, which its check has taken."""
    symbolic = Symbolic(model)
    (chain,), _ = find_chains(FusionGraph(model, symbolic))
    check_chain(chain, model.graph.node, symbolic, 17)
    return chain


@pytest.mark.parametrize("number", [-1e4, -65504.0, -1e5, -1e9, 1e9, -1e30])
def test_numbers_of_fp32_stay(number: float) -> None:
    chain = checked_chain(mask_model([("Sub", 1.0, F32), ("Mul", number, F32)], F32, F32))
    text = chain.description.text
    assert widen_attribute(text, HALF) == text
    assert "f16" not in text


MIXED = {
    "fp16 forbids in fp16": ([("Mul", -65504.0, F16), ("Add", 0.5, F16)], F16, F16),
    "fp32 forbids in a graph of fp16 inputs": ([("Sub", 1.0, F16), ("Mul", -65504.0, F32)], F16, F32),
    "fp32 forbids with more than fp16 has": ([("Mul", -1e9, F32), ("Add", 1.0, F32)], F16, F32),
    "both, with one number": ([("Add", -65504.0, F16), ("Add", -65504.0, F32)], F16, F32),
    "fp16 inside of fp32": ([("Add", 1.0, F32), ("Add", -65504.0, F16), ("Mul", 0.5, F32)], F32, F32),
}


@pytest.mark.parametrize("name", MIXED)
def test_mixed_types(name: str) -> None:
    """In the widened text, what forbids in fp16 is -1024, as in a widened model; numbers of fp32 are as before."""
    steps, given_type, result = MIXED[name]
    text = checked_chain(mask_model(steps, given_type, result)).description.text
    half = sum(kind == F16 and number < -6e4 for _, number, kind in steps)
    assert text.count("f16(-65504.0)") == half
    widened = widen_attribute(text, HALF)
    assert widened.count("-1024") == half
    assert "f16" not in widened
    single = sum(kind == F32 and number < -6e4 for _, number, kind in steps)
    assert sum(widened.count(str(n)) for n in ("-65504", "-1e9", "-1000000000")) == single


@pytest.mark.parametrize("name", MIXED)
def test_a_mixed_model_is_written(name: str, tmp_path: Path) -> None:
    """The models of verification are widened alike, and the file keeps its types."""
    steps, given_type, result = MIXED[name]
    model = mask_model(steps, given_type, result)
    onnx.save(model, tmp_path / "m.onnx")
    report = stof.optimize(tmp_path / "m.onnx", tmp_path / "o.onnx", stof.Options(chains="on"))
    (row,) = report.rows("chains")
    assert row.replaced, row.reason
    rng = np.random.default_rng(0)
    mask = rng.integers(0, 2, (3, 5)).astype(helper.tensor_dtype_to_np_dtype(given_type))
    options = ort.SessionOptions()
    stof.register(options)
    providers = ["CPUExecutionProvider"]
    (found,) = ort.InferenceSession(tmp_path / "o.onnx", options, providers=providers).run(None, {"mask": mask})
    (wanted,) = ort.InferenceSession(tmp_path / "m.onnx", providers=providers).run(None, {"mask": mask})
    assert found.dtype == wanted.dtype
    np.testing.assert_allclose(found.astype(float), wanted.astype(float), rtol=2e-3)


def test_types_of_reads_and_outputs_are_widened() -> None:
    text = "axes b = x0.0, n = x0.1\nlet t = f16(x0[b, n] - -3)\nout y0 f16 [b, n] = bf16(t) * -70000\nout y1 bf16 [b, n] = t"
    assert widen_attribute(text, ()) == text
    assert widen_attribute(text, {F16}) == (
        "axes b = x0.0, n = x0.1\nlet t = f32(x0[b, n] - -3.0)\nout y0 f32 [b, n] = bf16(t) * -70000.0\nout y1 bf16 [b, n] = t"
    )


def parts(description: ChainDescription) -> str:
    """The structure of a description, in which NaN equals itself."""
    return repr((description.axes, description.lets, description.outs))


@pytest.mark.parametrize("make", CHAINS, ids=lambda c: c.__name__)
def test_a_printed_description_is_the_same(make: Callable[[Builder], onnx.ModelProto]) -> None:
    model = make(Builder())
    chains, _ = find_chains(FusionGraph(model, Symbolic(model)))
    for chain in chains:
        again = ChainDescription.parse(chain.description.text)
        assert parts(again) == parts(chain.description)
        assert again.text == chain.description.text


ATOMS = st.sampled_from(["1", "0.5", "1e-5", "70000", "2.5e9", "inf", "nan", "b", "n", "x0[b, n]", "x1[n]", "x2[]",
                         "x0[(2 * b + 3) // 4, n - 1]", "x0[-b + 2, (n) % 3]"])  # fmt: skip
EXPRESSIONS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-", "*", "/"]), inner).map(lambda t: f"({t[0]} {t[1]} {t[2]})"),
        st.tuples(inner, st.sampled_from(["+", "-", "*", "/"]), ATOMS).map(lambda t: f"{t[0]} {t[1]} {t[2]}"),
        st.tuples(inner, inner).map(lambda t: f"({t[0]} < {t[1]})"),
        inner.map(lambda x: f"-({x})"),
        inner.map(lambda x: f"--{x}"),
        inner.map(lambda x: f"f16({x})"),
        st.tuples(inner, inner, inner).map(lambda t: f"select({t[0]}, {t[1]}, {t[2]})"),
    ),
    max_leaves=8,
)


@given(EXPRESSIONS)
def test_any_printed_expression_is_the_same(expression: str) -> None:
    parsed = ChainDescription.parse(f"axes b = x0.0, n = x0.1 / 2\nout y0 f16 [1, (b n)] = {expression}")
    assert parts(ChainDescription.parse(parsed.text)) == parts(parsed)
