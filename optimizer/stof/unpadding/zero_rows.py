# SPDX-License-Identifier: Apache-2.0
"""The original with zeros as rows of padding, which a result with ``--unpad on`` is compared with."""

from __future__ import annotations

from collections.abc import Sequence

import onnx
from onnx import TensorProto, helper

from stof.graph.index import opset_of
from stof.graph.node_builder import Builder
from stof.graph.protobuf import copy_model
from stof.symbolic import Symbolic
from stof.unpadding.region import UnpaddedRegion
from stof.unpadding.token_axes import TokenAxes


def find_missing(model: onnx.ModelProto, region: UnpaddedRegion) -> str:
    """A tensor by which the rows of padding are found, and which a model does not have; empty where it has all."""
    names = {v.name for v in model.graph.input} | {n for node in model.graph.node for n in node.output}
    return next((n for n in (region.mask.tensor, *(r.indices for r in region.index_reads)) if n not in names), "")


def with_zero_rows(
    model: onnx.ModelProto,
    unpadded: onnx.ModelProto | None,
    symbolic: Symbolic | None,
    regions: Sequence[UnpaddedRegion],
) -> onnx.ModelProto:
    """A copy of the original in which outputs have zeros before the first real token of a sequence and behind its last one.

    Rows of a sequence without a real token stay, and those of one of which a node reads another position. The rows are found by
    sums along the mask, not as the rewrite finds them.

    Args:
        model: the original.
        unpadded: the model whose nodes the regions have.
        symbolic: of that model.
        regions: those with outputs of the model.
    """
    assert unpadded is not None
    assert symbolic is not None
    written = copy_model(model)
    for number, region in enumerate(regions):
        tensors = region.unpadded(unpadded.graph.node)
        axes = {o.name: tensors[o.name] for o in written.graph.output if o.name in tensors}
        builder = Builder(opset_of(model), f"stof_zero{number}_")
        inside = _find_rows(builder, region)
        for name, own in axes.items():
            shape = symbolic.shape(name)
            assert shape is not None
            _mask_output(written.graph, builder, name, own, len(shape), inside)
        written.graph.node.extend(builder.nodes)
    return written


def _find_rows(b: Builder, region: UnpaddedRegion) -> str:
    """[B, S]: which rows stay."""
    length = b.add("Slice", [b.add("Shape", [region.source]), b.constant([1]), b.constant([2])])
    rows = b.add("Reshape", [region.mask.tensor, b.add("Concat", [b.constant([-1]), length], axis=0)])
    real = b.add("Cast", [rows], to=TensorProto.BOOL)
    if region.mask.is_inverted:
        real = b.add("Not", [real])
    count = b.add("Cast", [real], to=TensorProto.INT64)
    axis, zero = b.constant(1), b.constant(0)
    begun = b.add("Greater", [b.add("CumSum", [count, axis]), zero])
    not_over = b.add("Greater", [b.add("CumSum", [count, axis], reverse=1), zero])
    inside = b.add("And", [begun, not_over])
    total = b.add("ReduceSum", [count, b.constant([1])], keepdims=1)
    inside = b.add("Or", [inside, b.add("Equal", [total, zero])])
    positions = sorted({r.position for r in region.reads})
    missing = [b.add("Not", [b.add("Gather", [inside, b.constant([p])], axis=1)]) for p in positions]
    for condition in missing:
        inside = b.add("Or", [inside, condition])
    for indices, kind in dict.fromkeys((r.indices, r.kind) for r in region.index_reads):
        if kind == "rows":
            rows = b.add("Gather", [b.add("Reshape", [inside, b.constant([-1])]), indices])
        else:
            rows = b.add("GatherND", [inside, indices], batch_dims=int(kind == "positions"))
        kept = b.add("Cast", [rows], to=TensorProto.INT64)
        missed = b.add("ReduceSum", [b.add("Sub", [b.constant(1), kept])], keepdims=0)
        inside = b.add("Or", [inside, b.add("Greater", [missed, zero])])
    return inside


def _mask_output(graph: onnx.GraphProto, b: Builder, name: str, axes: TokenAxes, rank: int, inside: str) -> None:
    """Puts a Where behind what writes an output."""
    inner = f"{b.prefix}{name}"
    for node in graph.node:
        for names in (node.input, node.output):
            for j, found in enumerate(names):
                if found == name:
                    names[j] = inner
    if axes.merged:
        rows = b.add("Reshape", [inside, b.constant([-1])])
        rest = [a for a in range(rank) if a != axes.position]
    else:
        rows = inside
        rest = [a for a in range(rank) if a not in axes.axes]
    condition = b.unsqueeze(rows, rest) if rest else rows
    zero = b.add("CastLike", [b.constant(0), inner]) if b.opset >= 15 else b.add("Sub", [inner, inner])
    b.nodes.append(helper.make_node("Where", [condition, inner, zero], [name], name=f"{b.prefix}{name}_rows"))
