# SPDX-License-Identifier: Apache-2.0
"""Errors in standard ONNX for batches with more tokens than a fixed capacity has rows."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import onnx
from onnx import helper

from stof.execution.run_failure import FEWER_ROWS
from stof.graph.index import captured_tensors, is_standard, opset_of, producer_indices
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
    for i, region in enumerate(regions):
        wanted = {region.source, region.mask.tensor, *(r.indices for r in region.index_reads)}
        wanted |= {guard.tensor for guard in region.guards}
        output = next((o.name for o in written.graph.output if symbolic.shape(o.name)), "")
        if not output or not _add_missing(written, unpadded, wanted):
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


def _add_missing(model: onnx.ModelProto, source: onnx.ModelProto, wanted: Collection[str]) -> bool:
    """Copies what computes tensors that a model lacks, as a guard's operand; False: they cannot be copied, and nothing is.

    Args:
        model: is changed.
        source: has the tensors. Those that both models have are the same.
        wanted: the names of the tensors.
    """
    names = {v.name for v in (*model.graph.input, *model.graph.initializer)}
    names |= {n for node in model.graph.node for n in node.output}
    writers = producer_indices(source.graph.node)
    found: set[int] = set()
    constants: set[str] = set()
    pending = list(set(wanted) - names)
    while pending:
        name = pending.pop()
        i = writers.get(name)
        if i is None:
            constants.add(name)
        elif i not in found:
            found.add(i)
            node = source.graph.node[i]
            pending += ({*node.input, *captured_tensors(node)} - names) - {""}
    nodes = [source.graph.node[i] for i in sorted(found)]
    copied = [i for i in source.graph.initializer if i.name in constants]
    is_other = any(not is_standard(n) or names.intersection(n.output) for n in nodes)
    if is_other or len(copied) < len(constants) or (nodes and opset_of(model) != opset_of(source)):
        return False
    model.graph.node.extend(nodes)
    model.graph.initializer.extend(copied)
    return True
