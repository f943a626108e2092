# SPDX-License-Identifier: Apache-2.0
"""Writes StofAttention and StofQuantizedAttention nodes and their functions: the only step that changes a graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import onnx
import onnx_graphsurgeon as gs
from onnx import TensorProto

from stof.attention.edit.prune import Pruner
from stof.attention.edit.site_frame import Layouts, SiteFrame, layouts_of, scope_of
from stof.attention.function_body import OP, Variant, make_attention_function
from stof.attention.op_inputs import NEUTRAL, build_operands, runtime_operand
from stof.attention.quantized.function_body import QUANTIZED_OP, make_quantized_function
from stof.attention.relative_terms.body import RelativeProduct
from stof.attention.relative_terms.tables import relative_index_of
from stof.attention.tensorrt_constants import constants_attribute
from stof.graph.editor import Editor
from stof.graph.index import DOMAIN, opset_of
from stof.graph.local_functions import add_functions, check_absent
from stof.graph.protobuf import copy_model
from stof.mask.empty_rows.weaker_rows import RowNumbers, join_rows, strictest_mask, weaker_mask, weaker_site
from stof.mask.relative_roles import RELATIVE_BIAS, RELATIVE_BIAS_FACTOR
from stof.mask.roundings import QUANTIZER_ROLES
from stof.mask.site import AttentionSite, LiftedMask
from stof.symbolic import Symbolic


@dataclass(frozen=True)
class Rewrite:
    """A site that is replaced, with its mask and the decisions about it."""

    site: AttentionSite
    mask: LiftedMask
    hints: tuple[tuple[str, str], ...] = ()  # the attributes ``kernel`` and ``tile``
    tensorrt: bool = False  # also write what TensorRT's parser needs
    allow_tf32: bool = False
    ignores_empty_rows: bool = False  # fully masked rows may differ from the graph's

    @property
    def op(self) -> str:
        """The operator that computes the site."""
        return OP if self.site.roundings is None else QUANTIZED_OP


def emit(model: onnx.ModelProto, symbolic: Symbolic, rewrites: Sequence[Rewrite]) -> onnx.ModelProto:
    """A copy of the model in which the site of every rewrite is one node of its operator.

    Raises:
        UnsupportedError: when the model holds such an operator already.
    """
    if not rewrites:
        return copy_model(model)
    for op in dict.fromkeys(r.op for r in rewrites):
        check_absent(model, op)
    functions = SharedFunctions(rewrites)
    return functions.finish(replace_sites(model, symbolic, rewrites, functions))


class SharedFunctions:
    """The local functions that attention nodes of a model call: one an operator."""

    def __init__(self, rewrites: Sequence[Rewrite]) -> None:
        ops = dict.fromkeys(r.op for r in rewrites)
        self._by_op = {op: SharedFunction(op, [r for r in rewrites if r.op == op]) for op in ops}
        self.tensorrt = any(r.tensorrt for r in rewrites)

    def of(self, rewrite: Rewrite) -> SharedFunction:
        """That of a rewrite's operator."""
        return self._by_op[rewrite.op]

    def finish(self, model: onnx.ModelProto) -> onnx.ModelProto:
        """Adds the functions, the opset import and the version stamp to a model, and returns it."""
        opset = opset_of(model)
        add_functions(model, [f.make(opset) for f in self._by_op.values()], names_nodes=self.tensorrt)
        return model


class SharedFunction:
    """The local function that all nodes of one operator call: operand slots, layouts, variants of the body."""

    def __init__(self, op: str, rewrites: Sequence[Rewrite]) -> None:
        self.op = op
        self.slots = _slots([part for r in rewrites for part in parts_of(r)])
        self.layouts = _common_layouts(rewrites)
        self.grouped = any(r.site.num_heads != r.site.kv_num_heads for r in rewrites)
        self.variants: dict[Variant, int] = {}
        self.tensorrt = any(r.tensorrt for r in rewrites)

    def variant(self, rewrite: Rewrite) -> tuple[Variant, int]:
        """The variant of the body for a rewrite of one node, and its ``mask_id``."""
        variant = _variant(rewrite, self.slots, self.layouts, self.grouped)
        return variant, self.variants.setdefault(variant, len(self.variants))

    def make(self, opset: int) -> onnx.FunctionProto:
        """The function, once all nodes are made."""
        if self.op == OP:
            return make_attention_function(list(self.variants), opset)
        return make_quantized_function(list(self.variants), opset)


def parts_of(rewrite: Rewrite) -> list[Rewrite]:
    """A rewrite as those of its nodes: one, or a second one for fully masked rows that attend by weaker masks.

    The second mask reads ``segment_q``, which is among its operands only once it is made.
    """
    first = replace(rewrite, mask=strictest_mask(rewrite.mask))
    if rewrite.mask.weaker is None:
        return [first]
    site, mask = weaker_site(rewrite.site, rewrite.mask), weaker_mask(rewrite.site, rewrite.mask)
    return [first, replace(rewrite, site=site, mask=mask, hints=())]


def replace_sites(
    model: onnx.ModelProto, symbolic: Symbolic, rewrites: Sequence[Rewrite], functions: SharedFunctions
) -> onnx.ModelProto:
    """A copy of the model in which sites of the main graph are replaced."""
    editor = Editor(model)
    pruner = Pruner(editor, symbolic, [r.site for r in rewrites])
    numbers = RowNumbers(
        editor, lambda o, nodes: runtime_operand(editor, symbolic, o, nodes, functions.tensorrt), functions.tensorrt
    )
    for rewrite in rewrites:
        _replace_site(editor, symbolic, rewrite, functions.of(rewrite), numbers)
    editor.place_inserted()
    pruner.prune()
    return editor.finish()


def _slots(rewrites: Sequence[Rewrite]) -> tuple[str, ...]:
    """The operand roles of all calls: one slot each, in the same order at every call."""
    roles = set().union(*(_roles(r) for r in rewrites))
    tables = sorted((r for r in roles if r.startswith("table")), key=lambda r: (len(r), r))
    return tuple(r for r in [*NEUTRAL, *tables, *QUANTIZER_ROLES] if r in roles)


def _roles(rewrite: Rewrite) -> set[str]:
    mask = rewrite.mask
    roles = {o.role for o in mask.operands} | {t[0] for t in mask.tables} | mask.expression.vectors
    roles |= {"bias"} if mask.bias else set()
    roles |= {RELATIVE_BIAS} if mask.relative is not None else set()
    roles |= {RELATIVE_BIAS_FACTOR} if mask.relative_factor is not None else set()
    roles |= {t.role for t in mask.relative_terms}
    if (roundings := rewrite.site.roundings) is not None:
        roles |= {f"{role}_{word}" for role in roundings.operands for word in ("scale", "zero_point")}
    return roles | {"sink"} if rewrite.site.sink is not None else roles


def _common_layouts(rewrites: Sequence[Rewrite]) -> Layouts:
    """The most frequent layout of query, key, value and output: all calls share a function body, so they have the same."""
    columns = list(zip(*(layouts_of(r.site) for r in rewrites), strict=True))
    query, key, value, output = (Counter(column).most_common(1)[0][0] for column in columns)
    return query, key, value, output


def _variant(rewrite: Rewrite, slots: Sequence[str], layouts: Layouts, grouped: bool) -> Variant:
    site, mask = rewrite.site, rewrite.mask
    roles = _roles(rewrite)
    return Variant(
        mask.expression,
        layouts,
        grouped,
        mask.empty_rows,
        site.query_offset,
        site.softcap,
        tuple(r if r in roles else "unused" for r in slots),
        site.dtype,
        tuple(RelativeProduct(t.role, t.index, bool(t.table.shift)) for t in mask.relative_terms),
    )


def _replace_site(
    editor: Editor, symbolic: Symbolic, rewrite: Rewrite, function: SharedFunction, numbers: RowNumbers
) -> None:
    site = rewrite.site
    parts = parts_of(rewrite)
    frame = SiteFrame(editor, site, function.layouts)
    inputs, result, nodes = frame.inputs, frame.result, frame.nodes
    if len(parts) == 1:
        nodes.append(_node(editor, symbolic, parts[0], function, inputs, {}, result, nodes))
    else:
        heads = dict(zip(("query", "key"), inputs, strict=False))
        number, is_usual = numbers.find(site, rewrite.mask, heads, function.layouts, nodes)
        both = [editor.variable(f"{site.output}_{word}", site.dtype) for word in ("strict", "weaker")]
        for part, made, tensor in zip(parts, ({}, {"segment_q": number}), both, strict=True):
            nodes.append(_node(editor, symbolic, part, function, inputs, made, tensor, nodes))
        nodes += join_rows(editor, is_usual, function.layouts[3], both, parts[1].mask.empty_rows, result)
    frame.finish()


def _node(
    editor: Editor,
    symbolic: Symbolic,
    part: Rewrite,
    function: SharedFunction,
    inputs: Sequence[gs.Tensor],
    made: Mapping[str, gs.Tensor],
    result: gs.Tensor,
    extra: list[gs.Node],
) -> gs.Node:
    """The node of a rewrite of one node; ``made`` are operands by role that are no tensors of the model."""
    site = part.site
    variant, number = function.variant(part)
    operands = build_operands(editor, symbolic, (site, part.mask), function.slots, extra, part.tensorrt, made)
    layouts = [layout.value for layout in variant.layouts]
    # Slots that this variant does not read have the role `unused`.
    attributes = {
        "mask": variant.expression.text,
        "mask_id": number,
        "scale": site.scale,
        **({"softcap": site.softcap} if function.op == OP else {}),
        "layout": layouts[0] if len(set(layouts)) == 1 else " ".join(layouts),
        "num_heads": site.num_heads,
        "kv_num_heads": site.kv_num_heads,
        "query_offset": site.query_offset,
        "empty_rows": variant.empty_rows.value,
        "operands": " ".join(variant.roles),
        **(_attributes_of_float(part, function) if function.op == OP else {}),
        **({"weight_range": "dynamic"} if site.roundings is not None and site.roundings.is_weight_by_range else {}),
    }
    name = editor.fresh_node_name(f"{scope_of(site.name)}/{function.op}")
    return gs.Node(function.op, name, attributes, [*inputs, *operands], [result], DOMAIN)


def _attributes_of_float(part: Rewrite, function: SharedFunction) -> dict[str, object]:
    """The attributes that StofAttention alone has."""
    return {
        "results": "",
        **({"relative_index": relative_index_of(part.mask)} if part.mask.relative_terms else {}),
        "plugin_namespace": DOMAIN,
        "plugin_version": "1",
        **({"allow_tf32": 1} if part.allow_tf32 and part.site.dtype == TensorProto.FLOAT else {}),
        **dict(part.hints),
        **(constants_attribute(part.mask, function.slots) if part.tensorrt else {}),
    }
