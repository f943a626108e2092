# SPDX-License-Identifier: Apache-2.0
"""The part of a model that runs here: in place of nodes for which nothing here has a kernel, it has inputs of their outputs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import onnx
from onnx import helper

from stof.execution.run_failure import parse_failure
from stof.execution.session_process import RuntimeFailure
from stof.graph.index import captured_tensors, domain_of, producer_indices
from stof.graph.protobuf import copy_with_nodes, remove_named

_MOST_TRIES = 32
Signature = tuple[str, str, tuple[int, ...]]  # domain, operator, element types


@dataclass(frozen=True, eq=False)
class RunnablePart:
    """A part of a model.

    Attributes:
        model: computes the tensors ``computed``.
        left_out: the operators of the nodes that do not run here, each with how many there are.
        drawn: the tensors that are inputs in place of outputs of such nodes.
        computed: the tensors that the part computes, of those that were asked for.
    """

    model: onnx.ModelProto
    left_out: dict[str, int]
    drawn: tuple[str, ...]
    computed: tuple[str, ...]


def find_runnable_part(
    model: onnx.ModelProto,
    wanted: Sequence[str],
    without: Collection[str],
    dtype: Callable[[str], int],
    load: Callable[[onnx.ModelProto], object],
) -> RunnablePart | None:
    """The part that computes tensors, as far as it runs; None where no part does.

    Args:
        model: the model.
        wanted: tensors.
        without: inputs that cannot be given: nodes that read them are left out, too.
        dtype: the element type of a tensor; 0: unknown.
        load: loads a model.

    Raises:
        RuntimeFailure: where a part is refused for another reason.
    """
    nodes = list(model.graph.node)
    left_out = {i for i, node in enumerate(nodes) if set(node.input) & set(without)}
    for _ in range(_MOST_TRIES):
        part = _cut(model, wanted, left_out, dtype)
        if part is None or not part.computed:
            return None
        try:
            load(part.model)
            return part
        except RuntimeFailure as error:
            failure = parse_failure(str(error))
            if not failure.lacks_kernel:
                raise
            alike = [i for i, n in enumerate(nodes) if n.op_type == failure.op and failure.node in ("", n.name)]
            signatures = {_signature(nodes[i], dtype) for i in alike}
            more = {i for i, n in enumerate(nodes) if _signature(n, dtype) in signatures} - left_out
            if not more:  # a node of a function or a subgraph
                return None
            left_out |= more
    return None


def _signature(node: onnx.NodeProto, dtype: Callable[[str], int]) -> Signature:
    return domain_of(node), node.op_type, tuple(dtype(t) for t in node.input if t)


def _cut(
    model: onnx.ModelProto, wanted: Sequence[str], left_out: Collection[int], dtype: Callable[[str], int]
) -> RunnablePart | None:
    """The part without some nodes; None where the type of a tensor is not known."""
    graph = model.graph
    writers = producer_indices(graph.node)
    computed = [t for t in wanted if writers.get(t, -1) not in left_out and dtype(t)]
    kept: set[int] = set()
    drawn: list[str] = []
    pending, seen = list(computed), set[str]()
    while pending:
        name = pending.pop()
        if not name or name in seen:
            continue
        seen.add(name)
        i = writers.get(name)
        if i is not None and i in left_out:
            drawn.append(name)
        elif i is not None:
            kept.add(i)
            pending += [*graph.node[i].input, *captured_tensors(graph.node[i])]
    if not all(map(dtype, drawn)):
        return None
    part = copy_with_nodes(model, [n for i, n in enumerate(graph.node) if i in kept])
    for field in (part.graph.input, part.graph.initializer):
        remove_named(field, {v.name for v in field} - seen)
    remove_named(part.graph.value_info, {v.name for v in graph.value_info} - seen | set(drawn))
    part.graph.input.extend(helper.make_tensor_value_info(n, dtype(n), None) for n in drawn)
    del part.graph.output[:]
    part.graph.output.extend(helper.make_tensor_value_info(n, dtype(n), None) for n in computed)
    names: dict[str, int] = {}
    for i in sorted(left_out):
        node = graph.node[i]
        name = f"{node.domain}::{node.op_type}" if domain_of(node) else node.op_type
        names[name] = names.get(name, 0) + 1
    return RunnablePart(part, names, tuple(drawn), tuple(computed))
