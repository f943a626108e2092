# SPDX-License-Identifier: Apache-2.0
"""The original with zeros as rows of padding, which a result with ``--unpad on`` is compared with."""

from __future__ import annotations

from collections.abc import Sequence

import onnx
from onnx import TensorProto, helper

from stof.graph.index import opset_of
from stof.graph.names import rename_tensor, unused_prefix
from stof.graph.node_builder import Builder
from stof.graph.protobuf import copy_model
from stof.symbolic import Symbolic
from stof.unpadding.region import UnpaddedRegion
from stof.unpadding.token_axes import TokenAxes


def find_missing(model: onnx.ModelProto, region: UnpaddedRegion) -> str:
    """The mask of a region, where a model has no such tensor; else empty."""
    names = {v.name for v in model.graph.input} | {n for node in model.graph.node for n in node.output}
    return "" if region.mask.tensor in names else region.mask.tensor


def with_zero_rows(
    model: onnx.ModelProto,
    unpadded: onnx.ModelProto,
    symbolic: Symbolic,
    regions: Sequence[UnpaddedRegion],
) -> onnx.ModelProto:
    """A copy of the original in which outputs have zeros as rows of padding. Those of a sequence without a real token stay.

    Args:
        model: the original.
        unpadded: the model whose nodes the regions have.
        symbolic: of that model.
        regions: those with outputs of the model.
    """
    written = copy_model(model)
    for number, region in enumerate(regions):
        tensors = region.unpadded(unpadded.graph.node)
        builder = Builder(opset_of(model), unused_prefix(written.graph, f"stof_zero{number}_"))
        inside = _find_rows(builder, region, symbolic.dtype(region.mask.tensor))
        for name in region.zero_outputs(unpadded.graph):
            shape = symbolic.shape(name)
            assert shape is not None
            _mask_output(written.graph, builder, (name, symbolic.dtype(name), len(shape)), tensors[name], inside)
        written.graph.node.extend(builder.nodes)
    return written


def _find_rows(b: Builder, region: UnpaddedRegion, dtype: int) -> str:
    """[B, S]: which rows stay. ``dtype`` is the mask's."""
    length = b.add("Slice", [b.add("Shape", [region.source]), b.constant([1]), b.constant([2])])
    rows = b.add("Reshape", [region.mask.tensor, b.add("Concat", [b.constant([-1]), length], axis=0)])
    real = region.mask.add_real(b, rows, dtype)
    any_real = b.add("ReduceSum", [b.add("Cast", [real], to=TensorProto.INT64), b.constant([1])], keepdims=1)
    return b.add("Or", [real, b.add("Less", [any_real, b.constant(1)])])


# Types that ONNX Runtime's Where takes on the CPU; others are cast to one that holds all their numbers.
_CHOSEN = frozenset({TensorProto.FLOAT, TensorProto.INT32, TensorProto.INT64})
_WIDER: dict[int, int] = {
    TensorProto.FLOAT16: TensorProto.FLOAT,
    TensorProto.BFLOAT16: TensorProto.FLOAT,
    TensorProto.DOUBLE: TensorProto.DOUBLE,
}


def _mask_output(
    graph: onnx.GraphProto, b: Builder, output: tuple[str, int, int], axes: TokenAxes, inside: str
) -> None:
    """Puts a Where behind what writes an output, of which name, type and rank are given."""
    name, dtype, rank = output
    inner = f"{b.prefix}{name}"
    rename_tensor(graph, name, inner)
    rows = b.add("Reshape", [inside, b.constant([-1])]) if axes.merged else inside
    rest = [a for a in range(rank) if a not in axes.axes]
    condition = b.unsqueeze(rows, rest) if rest else rows
    wide = dtype if dtype in _CHOSEN else _WIDER.get(dtype, TensorProto.INT64)
    rows = b.add("Cast", [inner], to=wide)
    rows = b.add("Where", [condition, rows, b.add("Cast", [b.constant(0)], to=wide)])
    b.nodes.append(helper.make_node("Cast", [rows], [name], name=f"{b.prefix}{name}_rows", to=dtype))
