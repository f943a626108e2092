# SPDX-License-Identifier: Apache-2.0
"""The attentions of an optimized model, as thresholds count them, and the attributes that have these."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import onnx
from onnx import helper

from stof.arguments.threshold_kinds import CHOOSE_BLOCKS, KINDS, ThresholdKind, ThresholdSite
from stof.attention.function_body import OP as ATTENTION
from stof.cached_attention.paged.site import OP as PAGED
from stof.cached_attention.site import INPUT_INDEX
from stof.cached_attention.site import OP as CACHED
from stof.errors import ArgumentError
from stof.graph.index import DOMAIN, all_nodes
from stof.graph.names import FreshNames
from stof.graph.node_fields import input_of
from stof.graph.protobuf import copy_model
from stof.mask.expression import MaskExpression
from stof.runtime.limits import leaves_out
from stof.sparsify.spec import SparsitySpec, ThresholdClause
from stof.targets import CPU, Target

OPS = (ATTENTION, CACHED, PAGED)
_LSE = "lse"


Thresholds = Mapping[ThresholdSite, float]


@dataclass(frozen=True)
class ThresholdLayer:
    """One attention of an optimized model, and a kind of threshold.

    Attributes:
        name: of its node; of several nodes that share query, key and value, of the first one.
        layer: its index among the attentions that are operators, in the order of the graph.
        op: the operator.
        kind: of the threshold.
        clause: what asks for one; None: nothing does.
        reason: why it leaves out nothing; empty where it does.
    """

    name: str
    layer: int
    op: str
    kind: ThresholdKind
    clause: ThresholdClause | None
    reason: str = ""

    @property
    def site(self) -> ThresholdSite:
        """What its threshold is for."""
        return ThresholdSite(self.kind, self.name)


def check_target(target: Target, spec: SparsitySpec) -> None:
    """Refuses a target on which no operator's kernels leave out anything, and calibration without CPU kernels that do.

    Raises:
        ArgumentError: naming the target.
        LibraryError: without a library, and for one of an earlier version.
    """
    for kind in spec.threshold_kinds:
        if not any(leaves_out(op, target.name, kind) for op in OPS):
            raise ArgumentError(
                f"--sparsify {spec.text!r}: no attention kernel of this library {kind.third_person} for --target {target.name}"
            )
        is_calibrated = any(c.threshold is None for c in spec.threshold_clauses if c.kind is kind)
        if is_calibrated and not any(leaves_out(op, CPU.name, kind) for op in OPS):
            raise ArgumentError(
                f"--sparsify {spec.text!r}: thresholds are calibrated in runs on the CPU, whose kernels in this library do not "
                f"{kind.verb}; give a number, threshold={kind.example} for instance"
            )


def find_layers(
    model: onnx.ModelProto, spec: SparsitySpec, kind: ThresholdKind, target: Target
) -> tuple[ThresholdLayer, ...]:
    """The attentions of an optimized model in the order of the graph, and which of them leave out keys in this way.

    Raises:
        ArgumentError: when clauses are for layers that it does not have, or none of those that they are for can do it.
    """
    by_name = nodes_by_layer(model)
    clauses = spec.threshold_clauses_of_layers(kind, len(by_name))
    layers = []
    for index, (name, nodes) in enumerate(by_name.items()):
        clause, op, reason = clauses[index], nodes[0].op_type, ""
        if clause is None:
            reason = "--sparsify leaves it exact"
        elif not leaves_out(op, target.name, kind):
            reason = f"no kernel of {op} {kind.third_person} on target {target.name}"
        elif clause.threshold is None and not leaves_out(op, CPU.name, kind):
            reason = f"no CPU kernel of {op} {kind.third_person}, on which thresholds are calibrated"
        elif kind is CHOOSE_BLOCKS:
            reason = next((words for node in nodes if (words := _why_no_choice(node))), "")
        layers.append(ThresholdLayer(name, index, op, kind, clause, reason))
    wanted = [x for x in layers if x.clause is not None]
    if wanted and all(x.reason for x in wanted):
        raise ArgumentError(f"--sparsify {spec.text!r}: no attention can {kind.verb}: {wanted[0].reason}")
    return tuple(layers)


def _why_no_choice(node: onnx.NodeProto) -> str:
    """Why kernels compute every key block of an attention in every run; empty where they do not.

    docs/reference/operators.md has the conditions. A mask that reads run-time operands is static only where these are padding
    and the lengths of caches, which kernels read themselves.
    """
    texts = _text_attributes(node)
    roles = set(texts.get("operands", "").split())
    if bias := sorted(r for r in roles if r == "bias" or r.startswith("relative_")):
        return f"its scores have terms besides products of queries and keys ({bias[0]})"
    if node.op_type == CACHED and input_of(node, INPUT_INDEX["attention_bias"]):
        return "its scores have terms besides products of queries and keys (attention_bias)"
    if texts.get("empty_rows") == "all":
        return "its fully masked rows attend all keys"
    mask = MaskExpression.parse(texts["mask"]) if texts.get("mask") else None
    read = set() if mask is None else mask.vectors - {"pad"}
    return f"its mask reads {sorted(read)[0]} at run time" if read else ""


def _text_attributes(node: onnx.NodeProto) -> dict[str, str]:
    return {a.name: a.s.decode(errors="replace") for a in node.attribute if a.type == onnx.AttributeProto.STRING}


def put_thresholds(model: onnx.ModelProto, thresholds: Thresholds) -> onnx.ModelProto:
    """A copy of a model whose attentions have these thresholds; those of 0 leave out nothing."""
    copy = copy_model(model)
    nodes = nodes_by_layer(copy)
    for kind in KINDS:
        given = {site.name: c for site, c in thresholds.items() if site.kind is kind and c > 0}
        for name, threshold in given.items():
            for node in nodes[name]:
                node.attribute.append(helper.make_attribute(kind.attribute, float(threshold)))
        if given:
            entry = copy.metadata_props.add()
            entry.key = kind.metadata
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
    layers = nodes_by_layer(model)
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
    texts = _text_attributes(node)
    # Packed sequences have no such result.
    return "first_position" not in texts.get("operands", "").split() and texts.get("results", "") == ""


def nodes_by_layer(model: onnx.ModelProto) -> dict[str, list[onnx.NodeProto]]:
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
