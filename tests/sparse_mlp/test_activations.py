# SPDX-License-Identifier: Apache-2.0
"""One list of activations: a name that is not handled is an error, never another activation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from mlp_models import MlpForm, make_mlp_model
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator
from tests.sparse_mlp.dense_mlp import activate as activate_in_fp64

import stof
from stof.fusion.description.chain_description import ChainDescription
from stof.fusion.description.evaluate import evaluate_chain
from stof.graph.node_builder import Builder
from stof.runtime.library import op_limits
from stof.sparse_mlp.activations import ACTIVATIONS, find_activation
from stof.sparse_mlp.checks import oracle
from stof.sparse_mlp.decide import reasons
from stof.sparse_mlp.site import OP

UNKNOWN = ("mish", "Relu", "gelu_new", "")
X = np.random.default_rng(7).normal(0, 3, 500).astype(np.float32)


def test_names_are_the_library_s() -> None:
    """plugins/core/base/activation.h has the list."""
    limits = op_limits()
    assert list(ACTIVATIONS) == limits[OP]["activations"]
    assert [name for name, a in ACTIVATIONS.items() if a.gives_zeros] == limits[OP]["activations_with_zeros"]
    assert limits["StofAttention"]["activations"] == []


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_zeros(name: str) -> None:
    """What the list says of true zeros holds for the definition."""
    assert ACTIVATIONS[name].gives_zeros == bool(np.all(activate_in_fp64(name, X.astype(np.float64))[X < 0] == 0))


@pytest.mark.parametrize("name", [name for name, a in ACTIVATIONS.items() if a.gives_zeros])
def test_bodies_with_zeros_have_operands_of_all_types(name: str) -> None:
    """Neurons that are left out for their zeros are activated in the model's type, others in fp32."""
    for element in (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16):
        builder = Builder(20, "b_")
        result = find_activation(name).emit(builder, "gate")
        infos = [helper.make_tensor_value_info(n, element, [None]) for n in ("gate", result)]
        model = helper.make_model(
            helper.make_graph(builder.nodes, "g", infos[:1], infos[1:]), opset_imports=[helper.make_opsetid("", 20)]
        )
        onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)


def _run_body(name: str) -> Any:
    builder = Builder(20, "b_")
    result = find_activation(name).emit(builder, "gate")
    nodes = [*builder.nodes, helper.make_node("Identity", [result], ["y"])]
    value = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [None]) for n in ("gate", "y")]
    graph = helper.make_graph(nodes, "g", value[:1], value[1:])
    return ReferenceEvaluator(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])).run(
        None, {"gate": X}
    )[0]


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_body_and_oracle_equal_the_definition(name: str) -> None:
    """The function body in standard ONNX, and the oracle of checks."""
    want = activate_in_fp64(name, X.astype(np.float64))
    np.testing.assert_allclose(oracle.activate(name, X.astype(np.float64)), want, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(_run_body(name), want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["relu", "gelu", "gelu_tanh", "silu"])
def test_chains_mean_the_same(name: str) -> None:
    """Functions of chains that are activations of epilogues, too, have one meaning."""
    x = X.astype(np.float64)
    (found,) = evaluate_chain(ChainDescription.parse(f"axes n = x0.0; out y0 f32 [n] = {name}(x0[n])"), [x])
    np.testing.assert_allclose(found, activate_in_fp64(name, x), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_names_are_errors(name: str) -> None:
    """The body once was that of gelu_tanh for any unknown name, and the oracle's answer the gate itself."""
    with pytest.raises(ValueError, match="expected one of none, relu, relu2, gelu, gelu_tanh, silu"):
        find_activation(name)
    with pytest.raises(ValueError, match=f"the activation is {name!r}"):
        oracle.activate(name, X)


def test_activation_that_the_library_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An MLP stays where an earlier library does not compute its activation."""
    known = op_limits()
    earlier = {**known, OP: {**known[OP], "activations": ["none", "relu"]}}
    monkeypatch.setattr(reasons, "op_limits", lambda: earlier)
    onnx.save(make_mlp_model(MlpForm("relu2")), str(tmp_path / "model.onnx"))
    report = stof.optimize(tmp_path / "model.onnx", tmp_path / "out.onnx")
    rows = report.sections["mlps"].to_json()["mlps"]
    assert rows
    assert not any(row["replaced"] for row in rows)
    assert all("has no relu2; install one of this version" in row["reason"] for row in rows), rows
