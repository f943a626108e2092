# SPDX-License-Identifier: Apache-2.0
"""The function body of StofSparseMLP in standard ONNX: the dense MLP, whose idle neurons add zero.

It reads the weights in the operator's layout, so that a model holds them once. Several variants are branches of an If on
``mlp_id``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx
from onnx import helper

from stof.graph.index import DOMAIN
from stof.graph.node_builder import Builder
from stof.sparse_mlp.site import OP, OP_INPUTS, MlpSite

_MLP_ID = "mlp_id"


@dataclass(frozen=True)
class MlpVariant:
    """What the body of a call depends on."""

    activation: str
    has_up: bool
    has_up_bias: bool
    has_down_bias: bool
    dtype: int

    @classmethod
    def of(cls, site: MlpSite) -> MlpVariant:
        """The variant of a site."""
        up_bias = site.up is not None and bool(site.up.bias)
        return cls(site.activation, site.up is not None, up_bias, bool(site.down.bias), site.dtype)

    def emit(self, builder: Builder) -> str:
        """Adds the nodes. Returns the output's tensor."""
        hidden = _activate(builder, self.activation)
        if self.has_up:
            weight = builder.add("Transpose", ["up_weight"], perm=[1, 0])
            factor = builder.add("MatMul", ["input", weight])
            factor = builder.add("Add", [factor, "up_bias"]) if self.has_up_bias else factor
            hidden = builder.add("Mul", [hidden, factor])
        output = builder.add("MatMul", [hidden, "down_weight"])
        return builder.add("Add", [output, "down_bias"]) if self.has_down_bias else output


def _activate(builder: Builder, activation: str) -> str:
    if activation == "none":
        return "gate"
    positive = builder.add("Relu", ["gate"])
    return builder.add("Mul", [positive, positive]) if activation == "relu2" else positive


def make_mlp_function(variants: Sequence[MlpVariant], inputs: int, opset: int) -> onnx.FunctionProto:
    """The local function ``stof::StofSparseMLP`` for the variants of a model.

    Args:
        variants: distinct; ``mlp_id`` is the index.
        inputs: the number of inputs that calls have at most.
        opset: of the standard domain.
    """
    builder = Builder(opset, "mlp_")
    read: list[str] = []
    if len(variants) > 1:
        number = helper.make_node("Constant", [], [_MLP_ID], name=_MLP_ID)
        reference = number.attribute.add()
        reference.name, reference.ref_attr_name, reference.type = "value_int", _MLP_ID, onnx.AttributeProto.INT
        builder.nodes.append(number)
        read = [_MLP_ID]
    output = _select(builder, variants, 0)
    builder.nodes.append(helper.make_node("Identity", [output], ["y"], name="mlp_output"))
    opsets = [helper.make_opsetid("", opset)]
    return helper.make_function(DOMAIN, OP, list(OP_INPUTS[:inputs]), ["y"], builder.nodes, opsets, read)


def _select(builder: Builder, variants: Sequence[MlpVariant], i: int) -> str:
    """Nodes that compute variant i if ``mlp_id`` is i, else a later one."""
    if i + 1 == len(variants):
        return variants[i].emit(builder)
    same = builder.add("Equal", [_MLP_ID, builder.constant(i)])
    graphs = []
    for word in ("then", "else"):
        inner = Builder(builder.opset, f"{word}{i}_")
        output = variants[i].emit(inner) if word == "then" else _select(inner, variants, i + 1)
        info = helper.make_tensor_value_info(output, variants[i].dtype, None)
        graphs.append(helper.make_graph(inner.nodes, f"{word}{i}", [], [info]))
    return builder.add("If", [same], then_branch=graphs[0], else_branch=graphs[1])
