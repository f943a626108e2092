# SPDX-License-Identifier: Apache-2.0
"""Writes StofAttention nodes and their function: the only step that changes a graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from onnx import TensorProto

from stof.attention.function_body import OP, Variant, make_attention_function
from stof.attention.op_inputs import NEUTRAL, build_operands, runtime_operand
from stof.attention.prune import Pruner
from stof.attention.relative_terms.body import RelativeProduct
from stof.attention.relative_terms.tables import relative_index_of
from stof.attention.tensorrt_constants import constants_attribute
from stof.graph.editor import Editor
from stof.graph.index import DOMAIN, opset_of
from stof.graph.local_functions import add_functions, check_absent
from stof.graph.protobuf import copy_model
from stof.mask.empty_rows.weaker_rows import RowNumbers, join_rows, strictest_mask, weaker_mask, weaker_site
from stof.mask.relative_roles import RELATIVE_BIAS, RELATIVE_BIAS_FACTOR
from stof.mask.site import AttentionSite, Layout, LiftedMask, Operand
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


def emit(model: onnx.ModelProto, symbolic: Symbolic, rewrites: Sequence[Rewrite]) -> onnx.ModelProto:
    """A copy of the model in which the site of every rewrite is one StofAttention node.

    Raises:
        UnsupportedError: when the model holds StofAttention already.
    """
    if not rewrites:
        return copy_model(model)
    check_absent(model, OP)
    function = SharedFunction(rewrites)
    return function.finish(replace_sites(model, symbolic, rewrites, function))


class SharedFunction:
    """The local function that all StofAttention nodes of a model call: operand slots, layouts, variants of the body."""

    def __init__(self, rewrites: Sequence[Rewrite]) -> None:
        self.slots = _slots([part for r in rewrites for part in parts_of(r)])
        self.layouts = _common_layouts(rewrites)
        self.grouped = any(r.site.num_heads != r.site.kv_num_heads for r in rewrites)
        self.variants: dict[Variant, int] = {}
        self.tensorrt = any(r.tensorrt for r in rewrites)

    def variant(self, rewrite: Rewrite) -> tuple[Variant, int]:
        """The variant of the body for a rewrite of one node, and its ``mask_id``."""
        variant = _variant(rewrite, self.slots, self.layouts, self.grouped)
        return variant, self.variants.setdefault(variant, len(self.variants))

    def finish(self, model: onnx.ModelProto) -> onnx.ModelProto:
        """Adds the function, the opset import and the version stamp to a model, and returns it."""
        function = make_attention_function(list(self.variants), opset_of(model))
        add_functions(model, [function], names_nodes=self.tensorrt)
        return model


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
    model: onnx.ModelProto, symbolic: Symbolic, rewrites: Sequence[Rewrite], function: SharedFunction
) -> onnx.ModelProto:
    """A copy of the model in which sites of the main graph are replaced."""
    editor = Editor(model)
    pruner = Pruner(editor, symbolic, [r.site for r in rewrites])
    numbers = RowNumbers(
        editor, lambda o, nodes: runtime_operand(editor, symbolic, o, nodes, function.tensorrt), function.tensorrt
    )
    for rewrite in rewrites:
        _replace_site(editor, symbolic, rewrite, function, numbers)
    editor.place_inserted()
    pruner.prune()
    return editor.finish()


def _slots(rewrites: Sequence[Rewrite]) -> tuple[str, ...]:
    """The operand roles of all calls: one slot each, in the same order at every call."""
    roles = set().union(*(_roles(r) for r in rewrites))
    tables = sorted((r for r in roles if r.startswith("table")), key=lambda r: (len(r), r))
    return tuple(r for r in [*NEUTRAL, *tables] if r in roles)


def _roles(rewrite: Rewrite) -> set[str]:
    mask = rewrite.mask
    roles = {o.role for o in mask.operands} | {t[0] for t in mask.tables} | mask.expression.vectors
    roles |= {"bias"} if mask.bias else set()
    roles |= {RELATIVE_BIAS} if mask.relative is not None else set()
    roles |= {RELATIVE_BIAS_FACTOR} if mask.relative_factor is not None else set()
    roles |= {t.role for t in mask.relative_terms}
    return roles | {"sink"} if rewrite.site.sink is not None else roles


Layouts = tuple[Layout, Layout, Layout, Layout]


def _layouts(site: AttentionSite) -> Layouts:
    query = site.query.layout if site.query_factor is None else Layout.BHSD  # the factor is [.., S or 1, 1]
    return (query, site.key.layout, site.value.layout, site.output_layout)


def _common_layouts(rewrites: Sequence[Rewrite]) -> Layouts:
    """The most frequent layout of query, key, value and output: all calls share a function body, so they have the same."""
    columns = list(zip(*(_layouts(r.site) for r in rewrites), strict=True))
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
    layouts = function.layouts
    output = editor.tensors[site.output]
    replaced = output.inputs[0]
    extra: list[gs.Node] = []
    sizes = (
        (site.num_heads, site.head_size),
        (site.kv_num_heads, site.head_size),
        (site.kv_num_heads, site.value_head_size),
        (site.num_heads, site.value_head_size),
    )
    sources = (site.query, site.key, site.value)
    tensors = [_in_layout(editor, extra, o, site.dtype, n) for o, (n, _) in zip(sources, sizes, strict=False)]
    if site.query_factor is not None:
        query_layouts = (site.query.layout, Layout.BHSD)
        tensors[0] = _scale_query(
            editor, extra, site, _convert_layout(editor, extra, tensors[0], site.dtype, query_layouts, sizes[0])
        )
    inputs = [
        _convert_layout(editor, extra, tensor, site.dtype, (layout, wanted), size)
        for tensor, layout, wanted, size in zip(tensors, _layouts(site), layouts, sizes, strict=False)
    ]
    output.inputs.clear()
    wanted = (layouts[3], site.output_layout)
    perm = list(site.output_perm)
    is_reshaped = site.output_flat or site.output_joined or site.output_grouped
    last = editor.variable(f"{site.output}_rows", site.dtype) if is_reshaped else output
    written = editor.variable(f"{site.output}_laid", site.dtype) if perm else last
    result = written if wanted[0] is wanted[1] else editor.variable(f"{site.output}_stof", site.dtype)
    nodes = extra
    if len(parts) == 1:
        nodes.append(_node(editor, symbolic, parts[0], function, inputs, {}, result, nodes))
    else:
        heads = dict(zip(("query", "key"), inputs, strict=False))
        number, is_usual = numbers.find(site, rewrite.mask, heads, layouts, nodes)
        both = [editor.variable(f"{site.output}_{word}", site.dtype) for word in ("strict", "weaker")]
        for part, made, tensor in zip(parts, ({}, {"segment_q": number}), both, strict=True):
            nodes.append(_node(editor, symbolic, part, function, inputs, made, tensor, nodes))
        nodes += join_rows(editor, is_usual, layouts[3], both, parts[1].mask.empty_rows, result)
    if result is not written:
        _convert_layout(editor, nodes, result, site.dtype, wanted, sizes[3], written)
    if perm:
        nodes.append(editor.node("Transpose", last.name, [written], [last], perm=perm))
    if site.output_flat:
        shape = editor.initializer("stof_shape", np.array([-1, site.num_heads * site.value_head_size], np.int64))
        nodes.append(editor.node("Reshape", output.name, [last, shape], [output]))
    if site.output_joined:
        nodes += _split_batch_axis(editor, site, last, output)
    if site.output_grouped:
        _reshape_heads(editor, nodes, last, (site.output_layout, 1), site.output_grouped, output)
    editor.insert_before(replaced, nodes)
    editor.declare(site.output, site.dtype)


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
    """The StofAttention node of a rewrite of one node; ``made`` are operands by role that are no tensors of the model."""
    site = part.site
    variant, number = function.variant(part)
    operands = build_operands(editor, symbolic, (site, part.mask), function.slots, extra, part.tensorrt, made)
    layouts = [layout.value for layout in variant.layouts]
    # Slots that this variant does not read have the role `unused`.
    attributes = {
        "mask": variant.expression.text,
        "mask_id": number,
        "scale": site.scale,
        "softcap": site.softcap,
        "layout": layouts[0] if len(set(layouts)) == 1 else " ".join(layouts),
        "num_heads": site.num_heads,
        "kv_num_heads": site.kv_num_heads,
        "query_offset": site.query_offset,
        "empty_rows": variant.empty_rows.value,
        "operands": " ".join(variant.roles),
        "results": "",
        **({"relative_index": relative_index_of(part.mask)} if part.mask.relative_terms else {}),
        "plugin_namespace": DOMAIN,
        "plugin_version": "1",
        **({"allow_tf32": 1} if part.allow_tf32 and site.dtype == TensorProto.FLOAT else {}),
        **dict(part.hints),
        **(constants_attribute(part.mask, function.slots) if part.tensorrt else {}),
    }
    name = editor.fresh_node_name(f"{_scope(site.name)}/{OP}")
    return gs.Node(OP, name, attributes, [*inputs, *operands], [result], DOMAIN)


def _in_layout(editor: Editor, nodes: list[gs.Node], operand: Operand, dtype: int, heads: int) -> gs.Tensor:
    """The operand's tensor, reshaped and transposed to its layout where it differs."""
    tensor: gs.Tensor = editor.tensors[operand.tensor]
    if operand.joined:
        tensor = _merge_batch_axes(editor, nodes, tensor, dtype)
    if operand.grouped:
        out = editor.variable(f"{operand.tensor}_heads", dtype)
        tensor = _reshape_heads(editor, nodes, tensor, (operand.layout, 2), (heads,), out)
    if not operand.perm:
        return tensor
    out = editor.variable(f"{operand.tensor}_laid", dtype)
    nodes.append(editor.node("Transpose", out.name, [tensor], [out], perm=list(operand.perm)))
    return out


def _slice_shape(editor: Editor, nodes: list[gs.Node], tensor: gs.Tensor, start: int, end: int) -> gs.Tensor:
    """The sizes of axes ``start`` to ``end``; Shape takes no range below opset 15."""
    sizes, some = (editor.variable(f"{tensor.name}_{word}", TensorProto.INT64) for word in ("sizes", "some"))
    limits = [editor.initializer("stof_sizes", np.array([n], np.int64)) for n in (start, end)]
    nodes.append(editor.node("Shape", sizes.name, [tensor], [sizes]))
    nodes.append(editor.node("Slice", some.name, [sizes, *limits], [some]))
    return some


def _append_reshape(
    editor: Editor, nodes: list[gs.Node], tensor: gs.Tensor, sizes: list[gs.Tensor], output: gs.Tensor
) -> gs.Tensor:
    target = editor.variable(f"{output.name}_shape", TensorProto.INT64)
    nodes.append(editor.node("Concat", target.name, sizes, [target], axis=0))
    nodes.append(editor.node("Reshape", output.name, [tensor, target], [output]))
    return output


def _merge_batch_axes(editor: Editor, nodes: list[gs.Node], tensor: gs.Tensor, dtype: int) -> gs.Tensor:
    """A tensor of five axes with the first two merged."""
    any_size = editor.initializer("stof_shape", np.array([-1], np.int64))
    out = editor.variable(f"{tensor.name}_joined", dtype)
    return _append_reshape(editor, nodes, tensor, [any_size, _slice_shape(editor, nodes, tensor, 2, 5)], out)


def _reshape_heads(
    editor: Editor,
    nodes: list[gs.Node],
    tensor: gs.Tensor,
    source: tuple[Layout, int],
    heads: Sequence[int],
    output: gs.Tensor,
) -> gs.Tensor:
    """Reshapes the head axes of a tensor to sizes ``heads``; ``source`` is its layout and its number of head axes."""
    first = 1 if source[0] is Layout.BHSD else 2
    sizes = editor.initializer("stof_heads", np.array(heads, np.int64))
    end = first + source[1]
    outer = _slice_shape(editor, nodes, tensor, 0, first)
    rest = _slice_shape(editor, nodes, tensor, end, end + (2 if first == 1 else 1))
    return _append_reshape(editor, nodes, tensor, [outer, sizes, rest], output)


def _split_batch_axis(editor: Editor, site: AttentionSite, tensor: gs.Tensor, output: gs.Tensor) -> list[gs.Node]:
    """The nodes that write a result with the two batch axes of the query."""
    nodes: list[gs.Node] = []
    batch = _slice_shape(editor, nodes, editor.tensors[site.query.tensor], 0, 2)
    _append_reshape(editor, nodes, tensor, [batch, _slice_shape(editor, nodes, tensor, 1, 4)], output)
    return nodes


def _scale_query(editor: Editor, nodes: list[gs.Node], site: AttentionSite, query: gs.Tensor) -> gs.Tensor:
    """The query [B, H, S, D] times the factor by which the graph scales its scores."""
    assert site.query_factor is not None
    op, factor = site.query_factor
    out = editor.variable(f"{site.query.tensor}_scaled", site.dtype)
    nodes.append(editor.node(op, out.name, [query, editor.tensors[factor]], [out]))
    return out


def _convert_layout(
    editor: Editor,
    nodes: list[gs.Node],
    tensor: gs.Tensor,
    dtype: int,
    layouts: tuple[Layout, Layout],
    size: tuple[int, int],
    output: gs.Tensor | None = None,
) -> gs.Tensor:
    """Converts a tensor from one layout to another; ``size`` is heads and head size, ``output`` the tensor to write, if any."""
    steps: list[tuple[str, dict[str, object], list[int] | None]] = []
    if layouts[0] is not layouts[1]:
        if layouts[0] is Layout.BSN:
            steps.append(("Reshape", {}, [0, 0, *size]))
        if Layout.BHSD in layouts:
            steps.append(("Transpose", {"perm": [0, 2, 1, 3]}, None))
        if layouts[1] is Layout.BSN:
            steps.append(("Reshape", {}, [0, 0, size[0] * size[1]]))
    for i, (op, attributes, shape) in enumerate(steps):
        last = i + 1 == len(steps) and output is not None
        out = output if last and output is not None else editor.variable(f"{tensor.name}_{op.lower()}", dtype)
        inputs = [tensor] if shape is None else [tensor, editor.initializer("stof_shape", np.array(shape, np.int64))]
        nodes.append(editor.node(op, out.name, inputs, [out], **attributes))
        tensor = out
    return tensor


def _scope(name: str) -> str:
    """``/layers.0/attn`` for ``/layers.0/attn/Softmax``; a name without "/" as it is."""
    return name.rpartition("/")[0] or name
