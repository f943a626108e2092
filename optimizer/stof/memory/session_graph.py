# SPDX-License-Identifier: Apache-2.0
"""The nodes that a session of ONNX Runtime runs, in its order: constants are folded, and what copies nothing is gone."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import onnx

from stof.graph.index import all_nodes, captured_tensors, is_standard, subgraphs
from stof.memory.declared_shapes import DeclaredShape
from stof.memory.session_fusions import RANDOM, fuse_matmuls, merge_equal_nodes
from stof.memory.session_node import SessionNode
from stof.symbolic import Symbolic

# Whose result may differ from run to run, which nobody folds.
_COPIES = frozenset({"Identity", "Dropout"})


@dataclass(frozen=True, eq=False)
class SessionGraph:
    """What a session runs.

    Attributes:
        nodes: in the order in which they run.
        outputs: tensors of the caller's, at the end.
        given: tensors that are there before the first node: inputs, constants, and outer tensors.
        constants: those of them that are constant, and of outer ones.
    """

    nodes: tuple[SessionNode, ...]
    outputs: frozenset[str]
    given: frozenset[str]
    constants: frozenset[str]


def read_session_graph(
    graph: onnx.GraphProto,
    symbolic: Symbolic,
    declared: Mapping[str, DeclaredShape],
    outer_constants: Collection[str] = (),
    *,
    is_optimized: bool,
) -> SessionGraph:
    """A graph as a session runs it.

    Args:
        graph: the main graph of a model, or one of a node's.
        symbolic: facts of its tensors.
        declared: shapes that are known before sizes are.
        outer_constants: constants around it.
        is_optimized: whether the session optimizes graphs, which is the default.
    """
    outputs = frozenset(o.name for o in graph.output)
    inputs = {i.name for i in graph.input}
    constants = {t.name for t in graph.initializer} - inputs
    constants |= {t.values.name for t in graph.sparse_initializer}
    given = inputs | constants
    constants |= set(outer_constants)
    renamed: dict[str, str] = {}
    nodes: list[SessionNode] = []
    for proto in graph.node:
        node = _rename(proto, renamed)
        read = {n for n in (*node.inputs, *node.captured) if n}
        if _is_constant(node, read, constants, declared, is_optimized=is_optimized):
            constants.update(node.outputs)
            given.update(node.outputs)
        elif is_optimized and _is_copy(node, symbolic) and not outputs & set(node.outputs):
            renamed |= dict.fromkeys(node.outputs, node.inputs[0])
        else:
            nodes.append(node)
    if is_optimized:
        nodes = merge_equal_nodes(nodes, _named_constants(graph), outputs)
        nodes = fuse_matmuls(nodes, outputs, partial(_is_scalar, symbolic, constants), partial(_is_float, symbolic))
    written = {o for node in nodes for o in node.outputs}
    given |= {n for node in nodes for n in (*node.inputs, *node.captured) if n} - written
    return SessionGraph(tuple(nodes[i] for i in _order(nodes)), outputs, frozenset(given), frozenset(constants))


def _named_constants(graph: onnx.GraphProto) -> Iterator[tuple[str, onnx.TensorProto]]:
    """Constants by the tensors that hold them: those that are stored, and those of nodes."""
    given = {i.name for i in graph.input}
    yield from ((t.name, t) for t in graph.initializer if t.name not in given)
    for node in graph.node:
        if node.op_type == "Constant" and is_standard(node):
            yield from ((node.output[0], a.t) for a in node.attribute if a.name == "value")


def _is_scalar(symbolic: Symbolic, constants: Collection[str], name: str) -> bool:
    shape = symbolic.shape(name) if name in constants else None
    return shape is not None and all(size.constant == 1 for size in shape)


def _is_float(symbolic: Symbolic, name: str) -> bool:
    return symbolic.dtype(name) == onnx.TensorProto.FLOAT


def _rename(proto: onnx.NodeProto, renamed: Mapping[str, str]) -> SessionNode:
    captured: Iterable[str] = ()
    if subgraphs(proto):
        own = {o for n in all_nodes([proto]) if n is not proto for o in n.output}
        own |= {t.name for g in subgraphs(proto) for t in (*g.input, *g.initializer)}
        captured = sorted(captured_tensors(proto) - own - {""})
    inputs = tuple(renamed.get(n, n) for n in proto.input)
    return SessionNode(proto, inputs, tuple(renamed.get(n, n) for n in captured), tuple(o for o in proto.output if o))


def _is_constant(
    node: SessionNode,
    read: set[str],
    constants: set[str],
    declared: Mapping[str, DeclaredShape],
    *,
    is_optimized: bool,
) -> bool:
    """Whether a session computes a node when it is made."""
    if node.op == "Constant" and is_standard(node.proto):
        return True
    if not is_optimized or subgraphs(node.proto) or node.op in RANDOM or not is_standard(node.proto):
        return False
    if read <= constants and read:
        return True
    shape = declared.get(node.inputs[0]) if node.op in ("Shape", "Size") else None
    return shape is not None and all(isinstance(size, int) for size in shape)


def _is_copy(node: SessionNode, symbolic: Symbolic) -> bool:
    """Whether a session's optimizer removes a node whose result is its input."""
    if not is_standard(node.proto):
        return False
    if node.op in _COPIES:
        return len(node.outputs) == 1
    return node.op == "Cast" and symbolic.dtype(node.inputs[0]) == symbolic.dtype(node.outputs[0]) != 0


def _order(nodes: Sequence[SessionNode]) -> list[int]:
    """Indices of nodes in the order of a session: depth first from those that nobody reads, later inputs first."""
    writer = {o: i for i, node in enumerate(nodes) for o in node.outputs}
    inputs = [
        sorted({writer[n] for n in (*node.inputs, *node.captured) if n in writer}, key=lambda i: (nodes[i].rank, i))
        for node in nodes
    ]
    read = {i for before in inputs for i in before}
    pending = [(i, False) for i in sorted(range(len(nodes)), key=lambda i: (nodes[i].rank, i)) if i not in read]
    visited: set[int] = set()
    order: list[int] = []
    while pending:
        i, is_left = pending.pop()
        if is_left:
            order.append(i)
        elif i not in visited:
            visited.add(i)
            pending.append((i, True))
            pending += [(j, False) for j in inputs[i] if j not in visited]
    return order
