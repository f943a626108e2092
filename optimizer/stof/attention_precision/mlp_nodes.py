# SPDX-License-Identifier: Apache-2.0
"""The sparse MLPs of an optimized model that may round to bf16, and the attribute that says so."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import onnx
from onnx import TensorProto, helper

from stof.arguments.precisions import Precision
from stof.errors import ArgumentError
from stof.graph.index import DOMAIN
from stof.graph.node_fields import plain_attributes_of
from stof.graph.protobuf import copy_model
from stof.runtime.library import EARLIER
from stof.runtime.limits import takes_attribute
from stof.sparse_mlp.site import INPUT_INDEX, OP
from stof.sparsify.mlp_precision_report import MlpPrecisionReport, MlpPrecisionRow
from stof.symbolic import Symbolic

METADATA = "stof_mlp_precision"


def report_mlps(
    model: onnx.ModelProto, facts: Symbolic, precision: Precision, planned: Collection[str] | None
) -> MlpPrecisionReport:
    """The sparse MLPs of an optimized model's main graph, before their errors are measured.

    Args:
        model: with the operators.
        facts: of it.
        precision: that is allowed.
        planned: names of those whose weights a plan rounds; None: all that read fp32 weights.

    Raises:
        ArgumentError: for a plan of another model.
    """
    rows = []
    for node in sparse_mlps_of(model.graph.node):
        reason = _why_not(node, facts, precision)
        if not reason and planned is not None and node.name not in planned:
            reason = "the plan says so"
        shape = facts.shape(node.input[INPUT_INDEX["down_weight"]])
        neurons = shape[0].constant if shape else None
        rows.append(MlpPrecisionRow(node=node.name, neurons=int(neurons or 0), reduced=not reason, reason=reason))
    if unknown := sorted(set(planned or ()) - {row.node for row in rows}):
        raise ArgumentError(
            f"the plan rounds the weights of {unknown[0]!r} to {precision.name}, and the optimized model has no such sparse MLP"
        )
    return MlpPrecisionReport(rows)


def sparse_mlps_of(nodes: Iterable[onnx.NodeProto]) -> list[onnx.NodeProto]:
    """The sparse MLPs among nodes."""
    return [node for node in nodes if node.domain == DOMAIN and node.op_type == OP]


def _why_not(node: onnx.NodeProto, facts: Symbolic, precision: Precision) -> str:
    """Why a node's weights cannot be rounded; empty where they can."""
    if not takes_attribute(OP, precision.attribute):
        return f"{OP} of the plugin library has no attribute {precision.attribute}: {EARLIER}"
    if plain_attributes_of(node).get("bits", 0):
        return "its weights are quantized, with fewer bits"
    if facts.dtype(node.input[INPUT_INDEX["down_weight"]]) != TensorProto.FLOAT:
        return "its weights are not fp32"
    return ""


def put_mlp_precision(model: onnx.ModelProto, precision: Precision, names: Collection[str]) -> onnx.ModelProto:
    """A copy of a model in which sparse MLPs of these names may round their weights; those that it lacks are left out."""
    copy = copy_model(model)
    nodes = [node for node in sparse_mlps_of(copy.graph.node) if node.name in names]
    for node in nodes:
        node.attribute.append(helper.make_attribute(precision.attribute, precision.value))
    if nodes:
        entry = copy.metadata_props.add()
        entry.key = METADATA
        entry.value = f"outputs change; {precision.name}: {'; '.join(node.name for node in nodes)}"
    return copy
