# SPDX-License-Identifier: Apache-2.0
"""The attentions of an optimized model, as skip by score counts them, and the attribute that has their threshold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import onnx
from onnx import helper

from stof.attention.function_body import OP as ATTENTION
from stof.cached_attention.paged.site import OP as PAGED
from stof.cached_attention.site import OP as CACHED
from stof.errors import ArgumentError
from stof.graph.index import DOMAIN, all_nodes
from stof.graph.names import FreshNames
from stof.graph.protobuf import copy_model
from stof.runtime.skip_counts import skips_scores
from stof.sparsify.spec import SkipClause, SparsitySpec
from stof.targets import CPU, Target

OPS = (ATTENTION, CACHED, PAGED)
METADATA = "stof_skip_scores"
_ATTRIBUTE = "skip_threshold"
_LSE = "lse"


@dataclass(frozen=True)
class SkipLayer:
    """One attention of an optimized model.

    Attributes:
        name: of its node; of several nodes that share query, key and value, of the first one.
        layer: its index among the attentions that are operators, in the order of the graph.
        op: the operator.
        clause: what asks for skipping; None: nothing does.
        reason: why it computes every key tile; empty where it skips.
    """

    name: str
    layer: int
    op: str
    clause: SkipClause | None
    reason: str = ""


def check_target(target: Target, spec: SparsitySpec) -> None:
    """Refuses a target on which no operator's kernels skip, and calibration without CPU kernels that do.

    Raises:
        ArgumentError: naming the target.
        LibraryError: without a library, and for one of an earlier version.
    """
    if not any(skips_scores(op, target.name) for op in OPS):
        raise ArgumentError(
            f"--sparsify {spec.text!r}: no attention kernel of this library skips by score for --target {target.name}"
        )
    is_calibrated = any(c.threshold is None for c in spec.skip_clauses)
    if is_calibrated and not any(skips_scores(op, CPU.name) for op in OPS):
        raise ArgumentError(
            f"--sparsify {spec.text!r}: thresholds are calibrated in runs on the CPU, whose kernels in this library do not "
            "skip by score; give a number, threshold=0.5 for instance"
        )


def find_layers(model: onnx.ModelProto, spec: SparsitySpec, target: Target) -> tuple[SkipLayer, ...]:
    """The attentions of an optimized model in the order of the graph, and which of them skip.

    Raises:
        ArgumentError: when clauses are for layers that it does not have, or none of those that they are for can skip.
    """
    first_nodes = {name: node for name, (node, *_) in _nodes_by_layer(model).items()}
    clauses = spec.skip_clauses_of_layers(len(first_nodes))
    layers = []
    for index, (name, node) in enumerate(first_nodes.items()):
        clause, reason = clauses[index], ""
        if clause is None:
            reason = "--sparsify leaves it exact"
        elif not skips_scores(node.op_type, target.name):
            reason = f"no kernel of {node.op_type} skips by score on target {target.name}"
        elif clause.threshold is None and not skips_scores(node.op_type, CPU.name):
            reason = f"no CPU kernel of {node.op_type} skips by score, on which thresholds are calibrated"
        layers.append(SkipLayer(name, index, node.op_type, clause, reason))
    wanted = [x for x in layers if x.clause is not None]
    if wanted and all(x.reason for x in wanted):
        raise ArgumentError(f"--sparsify {spec.text!r}: no attention can skip by score: {wanted[0].reason}")
    return tuple(layers)


def put_thresholds(model: onnx.ModelProto, thresholds: Mapping[str, float]) -> onnx.ModelProto:
    """A copy of a model whose attentions of these names skip by these thresholds; those of 0 compute every key tile."""
    copy = copy_model(model)
    nodes = _nodes_by_layer(copy)
    given = {name: c for name, c in thresholds.items() if c > 0}
    for name, threshold in given.items():
        for node in nodes[name]:
            node.attribute.append(helper.make_attribute(_ATTRIBUTE, float(threshold)))
    if given:
        entry = copy.metadata_props.add()
        entry.key = METADATA
        entry.value = "outputs change; " + "; ".join(f"{name}: {c:g}" for name, c in given.items())
    return copy


def add_lse_outputs(model: onnx.ModelProto, names: Sequence[str]) -> dict[str, str]:
    """Adds the log-sum-exp of attentions to a model's outputs, in place.

    Args:
        model: the model. It then needs the library: the functions of stof's operators have no such result.
        names: of attentions.

    Returns:
        The output's name by the attention's, for those that can give one.
    """
    outputs: dict[str, str] = {}
    layers = _nodes_by_layer(model)
    main = {id(n) for n in model.graph.node}
    taken = FreshNames(t for n in all_nodes(model.graph.node) for t in n.output)
    for name in names:
        nodes = layers[name]
        node = nodes[0]
        if len(nodes) > 1 or id(node) not in main or not _can_give_lse(node):
            continue
        outputs[name] = taken.make(f"{name}_{_LSE}")
        attribute = next((a for a in node.attribute if a.name == "results"), None)
        if attribute is None:
            node.attribute.append(helper.make_attribute("results", _LSE))
        else:
            attribute.s = _LSE.encode()
        del node.output[1:]
        node.output.append(outputs[name])
        model.graph.output.append(helper.make_tensor_value_info(outputs[name], onnx.TensorProto.FLOAT, None))
    if outputs:
        kept = [f for f in model.functions if (f.domain, f.name) != (DOMAIN, ATTENTION)]
        del model.functions[:]
        model.functions.extend(kept)
    return outputs


def _can_give_lse(node: onnx.NodeProto) -> bool:
    if node.op_type != ATTENTION:
        return False
    texts = {a.name: a.s.decode(errors="replace") for a in node.attribute if a.type == onnx.AttributeProto.STRING}
    # Packed sequences have no such result.
    return "first_position" not in texts.get("operands", "").split() and texts.get("results", "") == ""


def _nodes_by_layer(model: onnx.ModelProto) -> dict[str, list[onnx.NodeProto]]:
    """The nodes of each attention, by the name of the first one, in the order of the graph.

    Fully masked rows that attend by a weaker mask are a second node of the same attention, with the same operands.
    """
    by_operands: dict[tuple[str, ...], list[onnx.NodeProto]] = {}
    for node in _attention_nodes(model):
        by_operands.setdefault(
            (node.op_type, *node.input[:3]) if node.op_type == ATTENTION else tuple(node.output), []
        ).append(node)
    names = FreshNames()
    return {names.make(nodes[0].name or nodes[0].output[0]): nodes for nodes in by_operands.values()}


def _attention_nodes(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    return (n for n in all_nodes(model.graph.node) if n.domain == DOMAIN and n.op_type in OPS)
