# SPDX-License-Identifier: Apache-2.0
"""Writing StofAttention nodes: the only step that changes a graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from onnx import TensorProto, helper

import stof
from stof.attention.function_body import OP, Variant, make_function
from stof.attention.op_inputs import NEUTRAL, operands_of
from stof.attention.prune import Pruner
from stof.errors import UnsupportedError
from stof.graph.editor import Editing
from stof.graph.model_graph import DOMAIN, opset_of
from stof.graph.tensorrt_compat import constants, name_nodes
from stof.site import AttentionSite, Layout, LiftedMask, Operand
from stof.symbolic import Symbolic
from stof.symbolic.dimension_names import declared

_LOWEST_IR = 8  # local functions


@dataclass(frozen=True)
class Rewrite:
    """A site and its mask, decided to be replaced.

    ``hints`` are the attributes ``kernel`` and ``tile``. ``tensorrt``: what TensorRT's parser needs is written, too.
    """

    site: AttentionSite
    mask: LiftedMask
    hints: tuple[tuple[str, str], ...] = ()
    tensorrt: bool = False
    allow_tf32: bool = False


def emit(model: onnx.ModelProto, symbolic: Symbolic, rewrites: Sequence[Rewrite]) -> onnx.ModelProto:
    """A copy of the model in which every rewrite's site is one StofAttention node.

    Raises:
        UnsupportedError: when the model holds StofAttention already.
    """
    if not rewrites:
        copy = onnx.ModelProto()
        copy.CopyFrom(model)
        return copy
    if any((f.domain, f.name) == (DOMAIN, OP) for f in model.functions):
        raise UnsupportedError(f"the model already holds {OP}; optimize the original instead")
    calls = Calls(rewrites)
    return calls.finish(edit(model, symbolic, rewrites, calls))


class Calls:
    """What all calls of a model share, in whatever graph they are: operand slots, layouts, and the body's variants."""

    def __init__(self, rewrites: Sequence[Rewrite]) -> None:
        self.slots = _slots(rewrites)
        self.layouts = _common_layouts(rewrites)
        self.grouped = any(r.site.num_heads != r.site.kv_num_heads for r in rewrites)
        self.variants: dict[Variant, int] = {}
        self.tensorrt = any(r.tensorrt for r in rewrites)

    def variant(self, rewrite: Rewrite) -> tuple[Variant, int]:
        """The variant of the body that a call takes, and its number."""
        found = _variant(rewrite, self.slots, self.layouts, self.grouped)
        return found, self.variants.setdefault(found, len(self.variants))

    def finish(self, model: onnx.ModelProto) -> onnx.ModelProto:
        """Adds to the model what its calls need: the function, the opset, the version stamp."""
        model.functions.append(make_function(list(self.variants), opset_of(model)))
        if not any(e.domain == DOMAIN for e in model.opset_import):
            model.opset_import.append(helper.make_opsetid(DOMAIN, 1))
        model.ir_version = max(model.ir_version, _LOWEST_IR)
        if self.tensorrt:
            name_nodes(model)
        _stamp(model)
        return model


def edit(model: onnx.ModelProto, symbolic: Symbolic, rewrites: Sequence[Rewrite], calls: Calls) -> onnx.ModelProto:
    """A copy of the model with the nodes of its main graph rewritten."""
    editing = Editing(model)
    pruner = Pruner(editing, symbolic, [r.site for r in rewrites])
    for rewrite in rewrites:
        variant, number = calls.variant(rewrite)
        _replace(editing, symbolic, rewrite, variant, number, calls.slots)
    pruner.prune()
    return editing.finish()


def _stamp(model: onnx.ModelProto) -> None:
    entry = next((e for e in model.metadata_props if e.key == "stof_version"), None) or model.metadata_props.add()
    entry.key, entry.value = "stof_version", stof.__version__


def _slots(rewrites: Sequence[Rewrite]) -> tuple[str, ...]:
    """The operand roles of the model: one slot each, in the same order at every call."""
    roles = set().union(*(_roles(r) for r in rewrites))
    tables = sorted((r for r in roles if r.startswith("table")), key=lambda r: (len(r), r))
    return tuple(r for r in [*NEUTRAL, *tables] if r in roles)


def _roles(rewrite: Rewrite) -> set[str]:
    mask = rewrite.mask
    found = {o.role for o in mask.operands} | {t[0] for t in mask.tables}
    found |= {"bias"} if mask.bias else set()
    found |= {"relative_bias"} if mask.relative is not None else set()
    return found | {"sink"} if rewrite.site.sink is not None else found


Layouts = tuple[Layout, Layout, Layout, Layout]


def _layouts(site: AttentionSite) -> Layouts:
    query = site.query.layout if site.query_factor is None else Layout.BHSD  # where it is multiplied
    return (query, site.key.layout, site.value.layout, site.output_layout)


def _common_layouts(rewrites: Sequence[Rewrite]) -> Layouts:
    """One layout for each slot of all calls, since they share a function body; the most frequent where they differ."""
    columns = list(zip(*(_layouts(r.site) for r in rewrites), strict=True))
    query, key, value, output = (Counter(column).most_common(1)[0][0] for column in columns)
    return query, key, value, output


def _variant(rewrite: Rewrite, slots: Sequence[str], layouts: Layouts, grouped: bool) -> Variant:
    site, mask = rewrite.site, rewrite.mask
    own = _roles(rewrite)
    return Variant(
        mask.expression,
        layouts,
        grouped,
        mask.empty_rows,
        site.query_offset,
        site.softcap,
        tuple(r if r in own else "unused" for r in slots),
        site.dtype,
    )


def _replace(
    editing: Editing, symbolic: Symbolic, rewrite: Rewrite, variant: Variant, number: int, slots: Sequence[str]
) -> None:
    site = rewrite.site
    output = editing.tensors[site.output]
    place = next(i for i, n in enumerate(editing.graph.nodes) if n is output.inputs[0])
    extra: list[gs.Node] = []
    operands = operands_of(editing, symbolic, (rewrite.site, rewrite.mask), slots, extra, rewrite.tensorrt)
    layouts = [layout.value for layout in variant.layouts]
    # Slots that this variant does not use keep their place with the role `unused`.
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
        "plugin_namespace": DOMAIN,
        "plugin_version": "1",
        **({"allow_tf32": 1} if rewrite.allow_tf32 and site.dtype == TensorProto.FLOAT else {}),
        **dict(rewrite.hints),
        **(constants(rewrite.mask, slots) if rewrite.tensorrt else {}),
    }
    name = editing.unique(f"{_scope(site.name)}/{OP}")
    sizes = (
        (site.num_heads, site.head_size),
        (site.kv_num_heads, site.head_size),
        (site.kv_num_heads, site.value_head_size),
        (site.num_heads, site.value_head_size),
    )
    operands_found = (site.query, site.key, site.value)
    given = [_laid_out(editing, extra, o, site.dtype, n) for o, (n, _) in zip(operands_found, sizes, strict=False)]
    if site.query_factor is not None:
        own = (site.query.layout, Layout.BHSD)
        given[0] = _multiplied(editing, extra, site, _convert(editing, extra, given[0], site.dtype, own, sizes[0]))
    inputs = [
        _convert(editing, extra, tensor, site.dtype, (own, wanted), size)
        for tensor, own, wanted, size in zip(given, _layouts(site), variant.layouts, sizes, strict=False)
    ]
    output.inputs.clear()
    wanted = (variant.layouts[3], site.output_layout)
    perm = list(site.output_perm)
    apart = site.output_flat or site.output_joined or site.output_grouped
    last = editing.variable(f"{site.output}_rows", site.dtype) if apart else output
    written = editing.variable(f"{site.output}_laid", site.dtype) if perm else last
    result = written if wanted[0] is wanted[1] else editing.variable(f"{site.output}_stof", site.dtype)
    nodes = [*extra, gs.Node(OP, name, attributes, [*inputs, *operands], [result], DOMAIN)]
    if result is not written:
        _convert(editing, nodes, result, site.dtype, wanted, sizes[3], written)
    if perm:
        nodes.append(editing.node("Transpose", last.name, [written], [last], perm=perm))
    if site.output_flat:
        shape = editing.initializer("stof_shape", np.array([-1, site.num_heads * site.value_head_size], np.int64))
        nodes.append(editing.node("Reshape", output.name, [last, shape], [output]))
    if site.output_joined:
        nodes += _parted(editing, site, last, output)
    if site.output_grouped:
        _with_heads(editing, nodes, last, (site.output_layout, 1), site.output_grouped, output)
    editing.graph.nodes[place:place] = nodes
    if not site.output_joined and not site.output_grouped:
        editing.declare(site.output, site.dtype, _output_shape(site))


def _laid_out(editing: Editing, nodes: list[gs.Node], operand: Operand, dtype: int, heads: int) -> gs.Tensor:
    """The operand's tensor in its layout: itself, or transposed."""
    tensor: gs.Tensor = editing.tensors[operand.tensor]
    if operand.joined:
        tensor = _joined(editing, nodes, tensor, dtype)
    if operand.grouped:
        out = editing.variable(f"{operand.tensor}_heads", dtype)
        tensor = _with_heads(editing, nodes, tensor, (operand.layout, 2), (heads,), out)
    if not operand.perm:
        return tensor
    out = editing.variable(f"{operand.tensor}_laid", dtype)
    nodes.append(editing.node("Transpose", out.name, [tensor], [out], perm=list(operand.perm)))
    return out


def _sizes_of(editing: Editing, nodes: list[gs.Node], tensor: gs.Tensor, start: int, end: int) -> gs.Tensor:
    """Some of a tensor's sizes; ``Shape`` takes no range below opset 15."""
    sizes, some = (editing.variable(f"{tensor.name}_{word}", TensorProto.INT64) for word in ("sizes", "some"))
    limits = [editing.initializer("stof_sizes", np.array([n], np.int64)) for n in (start, end)]
    nodes.append(editing.node("Shape", sizes.name, [tensor], [sizes]))
    nodes.append(editing.node("Slice", some.name, [sizes, *limits], [some]))
    return some


def _reshaped(
    editing: Editing, nodes: list[gs.Node], tensor: gs.Tensor, parts: list[gs.Tensor], output: gs.Tensor
) -> gs.Tensor:
    target = editing.variable(f"{output.name}_shape", TensorProto.INT64)
    nodes.append(editing.node("Concat", target.name, parts, [target], axis=0))
    nodes.append(editing.node("Reshape", output.name, [tensor, target], [output]))
    return output


def _joined(editing: Editing, nodes: list[gs.Node], tensor: gs.Tensor, dtype: int) -> gs.Tensor:
    """A tensor of five axes with the first two in one."""
    any_size = editing.initializer("stof_shape", np.array([-1], np.int64))
    out = editing.variable(f"{tensor.name}_joined", dtype)
    return _reshaped(editing, nodes, tensor, [any_size, _sizes_of(editing, nodes, tensor, 2, 5)], out)


def _with_heads(
    editing: Editing,
    nodes: list[gs.Node],
    tensor: gs.Tensor,
    place: tuple[Layout, int],
    heads: Sequence[int],
    output: gs.Tensor,
) -> gs.Tensor:
    """A tensor BHSD or BSHD with its heads, that are in so many axes, in others of given sizes."""
    first = 1 if place[0] is Layout.BHSD else 2
    sizes = editing.initializer("stof_heads", np.array(heads, np.int64))
    end = first + place[1]
    outer = _sizes_of(editing, nodes, tensor, 0, first)
    rest = _sizes_of(editing, nodes, tensor, end, end + (2 if first == 1 else 1))
    return _reshaped(editing, nodes, tensor, [outer, sizes, rest], output)


def _parted(editing: Editing, site: AttentionSite, tensor: gs.Tensor, output: gs.Tensor) -> list[gs.Node]:
    """The nodes that write a result with its batch in the two axes of the query's."""
    nodes: list[gs.Node] = []
    batch = _sizes_of(editing, nodes, editing.tensors[site.query.tensor], 0, 2)
    _reshaped(editing, nodes, tensor, [batch, _sizes_of(editing, nodes, tensor, 1, 4)], output)
    return nodes


def _multiplied(editing: Editing, nodes: list[gs.Node], site: AttentionSite, query: gs.Tensor) -> gs.Tensor:
    """The query [B, H, S, D] times what the graph multiplies its scores with."""
    assert site.query_factor is not None
    op, factor = site.query_factor
    out = editing.variable(f"{site.query.tensor}_scaled", site.dtype)
    nodes.append(editing.node(op, out.name, [query, editing.tensors[factor]], [out]))
    return out


def _convert(
    editing: Editing,
    nodes: list[gs.Node],
    tensor: gs.Tensor,
    dtype: int,
    layouts: tuple[Layout, Layout],
    size: tuple[int, int],
    output: gs.Tensor | None = None,
) -> gs.Tensor:
    """The tensor in another layout; ``size`` is heads and head size, ``output`` the tensor to write if there is one."""
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
        out = output if last and output is not None else editing.variable(f"{tensor.name}_{op.lower()}", dtype)
        given = [tensor] if shape is None else [tensor, editing.initializer("stof_shape", np.array(shape, np.int64))]
        nodes.append(editing.node(op, out.name, given, [out], **attributes))
        tensor = out
    return tensor


def _scope(name: str) -> str:
    """``/layers.0/attn`` of ``/layers.0/attn/Softmax``; other names as they are."""
    return name.rpartition("/")[0] or name


def _output_shape(site: AttentionSite) -> list[int | str]:
    B, _, S, _ = site.dims
    batch, rows = (declared(d) for d in (B, S))
    heads, size = site.num_heads, site.value_head_size
    if site.output_flat:
        return ["", heads * size]
    shape: list[int | str] = {
        Layout.BHSD: [batch, heads, rows, size],
        Layout.BSHD: [batch, rows, heads, size],
        Layout.BSN: [batch, rows, heads * size],
    }[site.output_layout]
    return [shape[axis] for axis in site.output_perm] or shape
