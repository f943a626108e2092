# SPDX-License-Identifier: Apache-2.0
"""Errors in standard ONNX for batches with more tokens than a fixed capacity has rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import onnx
from onnx import helper

from stof.execution.run_failure import FEWER_ROWS
from stof.graph.index import opset_of
from stof.graph.names import rename_tensor, unused_prefix
from stof.graph.node_builder import Builder
from stof.graph.protobuf import copy_model
from stof.symbolic import Symbolic
from stof.unpadding.region import UnpaddedRegion
from stof.unpadding.token_rows import BatchTensors, TokenRows


def refuse_excess(b: Builder, rows: str, number: str, rank: int, name: str) -> str:
    """The rows of a tensor, or an error where their number is smaller than another one.

    A Reshape fails, on every device: sizes are read on the host. Its message says both numbers.

    Args:
        b: gets the nodes.
        rows: a tensor whose first axis is of rows.
        number: [1], what they are at least.
        rank: of ``rows``.
        name: of the node that fails.
    """
    least = b.add("Concat", [number, b.constant([0] * (rank - 1))], axis=0) if rank > 1 else number
    # The largest of whole shapes: ONNX Runtime writes -1 for what it does not know in a shape that is concatenated.
    found = b.add("Reshape", [rows, b.add("Max", [b.add("Shape", [rows]), least])])
    b.nodes[-1].name = name
    return found


def with_capacity(
    model: onnx.ModelProto, unpadded: onnx.ModelProto, symbolic: Symbolic, regions: Sequence[UnpaddedRegion]
) -> onnx.ModelProto:
    """A copy of the original that refuses batches with more tokens than the unpadded model takes.

    Args:
        model: the original.
        unpadded: the model whose nodes the regions have.
        symbolic: of that model.
        regions: those with a capacity.
    """
    written = copy_model(model)
    names = {v.name for v in written.graph.input} | {n for node in written.graph.node for n in node.output}
    for i, region in enumerate(regions):
        wanted = {region.source, region.mask.tensor, *(r.indices for r in region.index_reads)}
        output = next((o.name for o in written.graph.output if symbolic.shape(o.name)), "")
        if not wanted <= names or not output:
            continue  # nothing of the original says how many tokens there are
        b = Builder(opset_of(model), unused_prefix(written.graph, f"stof_capacity{i}_"))
        sizes = b.add("Shape", [region.source])
        batch, length = (b.add("Gather", [sizes, b.constant(n)]) for n in range(2))
        tensors = BatchTensors(batch, length, region.mask.tensor, symbolic.dtype(region.mask.tensor), False)
        tokens = TokenRows(b, replace(region, capacity=0), tensors)
        place = b.add("Range", [b.constant(0), b.constant(region.capacity), b.constant(1)])
        refuse_excess(b, place, tokens.count, 1, f"{region.mask.tensor}_{FEWER_ROWS}")
        # What nothing reads would not run.
        shape = b.add("Shape", [b.nodes[-1].output[0]])
        inner = f"{b.prefix}{output}"
        rename_tensor(written.graph, output, inner)
        room = b.add("Mul", [b.add("Shape", [inner]), b.add("Div", [shape, shape])])
        b.nodes.append(helper.make_node("Reshape", [inner, room], [output], name=f"{inner}_back"))
        written.graph.node.extend(b.nodes)
    return written
