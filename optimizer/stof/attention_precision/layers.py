# SPDX-License-Identifier: Apache-2.0
"""The attentions of an optimized model that may compute in reduced precision, and the attribute that says so."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import onnx
from onnx import TensorProto, helper

from stof.arguments.precisions import Precision
from stof.attention.decide.cost_cpu import estimate_precision_gain
from stof.errors import ArgumentError
from stof.graph.node_fields import plain_attributes_of
from stof.graph.protobuf import copy_model
from stof.runtime.library import EARLIER
from stof.runtime.limits import kernel_in_precision, takes_attribute
from stof.sparsify.reduced_report import PrecisionRow
from stof.symbolic import Symbolic
from stof.thresholds.layers import OPS, nodes_by_layer

METADATA = "stof_attention_precision"
_FLOATS = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16})


def check_library(precision: Precision) -> None:
    """Refuses a library whose operators do not know the precision.

    Raises:
        ArgumentError: naming the option.
        LibraryError: without a library.
    """
    if not any(takes_attribute(op, precision.attribute) for op in OPS):
        raise ArgumentError(
            f"{precision.option}: the operators of the plugin library have no attribute {precision.attribute}: {EARLIER}"
        )


def find_precision_rows(
    model: onnx.ModelProto, facts: Symbolic, precision: Precision, planned: Collection[str] | None
) -> list[PrecisionRow]:
    """The attentions of an optimized model in the order of the graph, and which of them may compute in the precision.

    Args:
        model: with the operators.
        facts: of it.
        precision: that is allowed.
        planned: names of operators of which a plan says so; None: estimates decide.

    Raises:
        ArgumentError: for a plan of another model.
    """
    rows = []
    for index, (name, nodes) in enumerate(nodes_by_layer(model).items()):
        op, kernel, gain, reason = nodes[0].op_type, "", None, ""
        if not takes_attribute(op, precision.attribute):
            reason = f"no kernel of {op} computes in {precision.name}"
        else:
            kernel = kernel_in_precision(op, precision.attribute)
            size = _head_size(facts, nodes[0])
            gain = estimate_precision_gain(size, kernel) if kernel and size else None
            if planned is not None:
                reason = "" if name in planned else "the plan says so"
            elif facts.dtype(nodes[0].input[0]) not in (0, *_FLOATS):
                reason = "its inputs are not fp32, fp16 or bf16"
            elif gain is not None and gain < 1.0:
                reason = f"a loss is estimated: {gain:.2f}x"
        rows.append(PrecisionRow(name, index, op, not reason, reason, kernel, gain))
    if unknown := sorted(set(planned or ()) - {row.node for row in rows}):
        raise ArgumentError(
            f"the plan computes {unknown[0]!r} in {precision.name}, and the optimized model has no such attention"
        )
    return rows


def _head_size(facts: Symbolic, node: onnx.NodeProto) -> int:
    """The size of a head of the node's output; 0: not known."""
    shape = facts.shape(node.output[0])
    width = shape[-1].constant if shape else None
    if not width:
        return 0
    attributes = plain_attributes_of(node)
    joined = len(shape or ()) < 4
    heads = attributes.get("num_heads", 1)
    return int(width) // max(1, int(heads)) if joined and isinstance(heads, int) else int(width)


def put_precision(model: onnx.ModelProto, precision: Precision, names: Collection[str]) -> onnx.ModelProto:
    """A copy of a model in which attentions of these names may compute in a precision; those that it lacks are left out."""
    return put_precisions(model, dict.fromkeys(names, precision))


def put_precisions(model: onnx.ModelProto, precisions: Mapping[str, Precision]) -> onnx.ModelProto:
    """As of ``put_precision``, each attention in a precision of its own."""
    copy = copy_model(model)
    found: dict[str, list[str]] = {}
    for name, nodes in nodes_by_layer(copy).items():
        if (precision := precisions.get(name)) is None:
            continue
        found.setdefault(precision.name, []).append(name)
        for node in nodes:
            node.attribute.append(helper.make_attribute(precision.attribute, precision.value))
    if found:
        entry = copy.metadata_props.add()
        entry.key = METADATA
        entry.value = "; ".join(["outputs change", *(f"{kind}: {'; '.join(names)}" for kind, names in found.items())])
    return copy
