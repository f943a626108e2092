# SPDX-License-Identifier: Apache-2.0
"""The nodes around an operator that replaces a site: operands in its layouts, and its result in the form that the graph reads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_graphsurgeon as gs
from onnx import TensorProto

from stof.graph.editor import Editor
from stof.mask.site import AttentionSite, Layout, Operand

Layouts = tuple[Layout, Layout, Layout, Layout]  # of query, key, value and result


class SiteFrame:
    """A site under edit, in whose place an operator comes. Append its nodes, which write ``result``, then call :meth:`finish`.

    Args:
        editor: the graph under edit.
        site: what is replaced; the node that wrote its output writes nothing from here on.
        layouts: those of the operator.

    Attributes:
        nodes: new nodes, in the place of the site.
        inputs: query, key and value in the operator's layouts.
        result: what the operator is to write.
    """

    def __init__(self, editor: Editor, site: AttentionSite, layouts: Layouts) -> None:
        self.editor, self.site = editor, site
        self.nodes: list[gs.Node] = []
        self._sizes = (
            (site.num_heads, site.head_size),
            (site.kv_num_heads, site.head_size),
            (site.kv_num_heads, site.value_head_size),
            (site.num_heads, site.value_head_size),
        )
        self._output = editor.tensors[site.output]
        self._replaced = self._output.inputs[0]
        self.inputs = self._lay_out_operands(layouts)
        self._output.inputs.clear()
        self._moved = (layouts[3], site.output_layout)
        is_reshaped = site.output_flat or site.output_joined or site.output_grouped
        self._last = editor.variable(f"{site.output}_result", site.dtype) if is_reshaped else self._output
        self._written = editor.variable(f"{site.output}_transposed", site.dtype) if site.output_perm else self._last
        is_converted = self._moved[0] is not self._moved[1]
        self.result = editor.variable(f"{site.output}_stof", site.dtype) if is_converted else self._written

    def _lay_out_operands(self, layouts: Layouts) -> list[gs.Tensor]:
        editor, site, nodes = self.editor, self.site, self.nodes
        sources = (site.query, site.key, site.value)
        types = (site.dtype,) * 3 if site.roundings is None else site.roundings.code_types
        tensors = [
            _in_layout(editor, nodes, o, dtype, n, codes=site.roundings is not None)
            for o, (n, _), dtype in zip(sources, self._sizes, types, strict=False)
        ]
        if site.query_factor is not None:
            query_layouts = (site.query.layout, Layout.BHSD)
            tensors[0] = _scale_query(
                editor,
                nodes,
                site,
                _convert_layout(editor, nodes, tensors[0], site.dtype, query_layouts, self._sizes[0]),
            )
        return [
            _convert_layout(editor, nodes, tensor, dtype, (layout, wanted), size)
            for tensor, dtype, layout, wanted, size in zip(
                tensors, types, layouts_of(site), layouts, self._sizes, strict=False
            )
        ]

    def finish(self) -> None:
        """Appends the nodes that bring the result into the form of the site's output, and puts all nodes into the graph."""
        editor, site, nodes = self.editor, self.site, self.nodes
        last, output = self._last, self._output
        if self.result is not self._written:
            _convert_layout(editor, nodes, self.result, site.dtype, self._moved, self._sizes[3], self._written)
        if site.output_perm:
            nodes.append(editor.node("Transpose", last.name, [self._written], [last], perm=list(site.output_perm)))
        if site.output_flat:
            shape = editor.initializer("stof_shape", np.array([-1, site.num_heads * site.value_head_size], np.int64))
            nodes.append(editor.node("Reshape", output.name, [last, shape], [output]))
        if site.output_joined:
            nodes += _split_batch_axis(editor, site, last, output)
        if site.output_grouped:
            _reshape_heads(editor, nodes, last, (site.output_layout, 1), site.output_grouped, output)
        editor.insert_before(self._replaced, nodes)
        editor.declare(site.output, site.dtype)


def layouts_of(site: AttentionSite) -> Layouts:
    """The layouts in which a site has query, key, value and result."""
    query = site.query.layout if site.query_factor is None else Layout.BHSD  # the factor is [.., S or 1, 1]
    return (query, site.key.layout, site.value.layout, site.output_layout)


def scope_of(name: str) -> str:
    """``/layers.0/attn`` for ``/layers.0/attn/Softmax``; a name without "/" as it is."""
    return name.rpartition("/")[0] or name


def _in_layout(
    editor: Editor, nodes: list[gs.Node], operand: Operand, dtype: int, heads: int, *, codes: bool
) -> gs.Tensor:
    """The operand's tensor, or its codes, reshaped and transposed to its layout where it differs."""
    tensor: gs.Tensor = editor.tensors[operand.tensor]
    if codes:
        tensor = _codes_of(editor, nodes, tensor, dtype)
    if operand.joined:
        tensor = _merge_batch_axes(editor, nodes, tensor, dtype)
    if operand.grouped:
        out = editor.variable(f"{operand.tensor}_heads", dtype)
        tensor = _reshape_heads(editor, nodes, tensor, (operand.layout, 2), (heads,), out)
    if not operand.perm:
        return tensor
    out = editor.variable(f"{operand.tensor}_transposed", dtype)
    nodes.append(editor.node("Transpose", out.name, [tensor], [out], perm=list(operand.perm)))
    return out


def _codes_of(editor: Editor, nodes: list[gs.Node], tensor: gs.Tensor, dtype: int) -> gs.Tensor:
    """The codes of a tensor, which is DequantizeLinear of them with moves behind it: the codes are moved instead."""
    writer = tensor.inputs[0]
    if writer.op == "DequantizeLinear":
        codes: gs.Tensor = writer.inputs[0]
        return codes
    moved = _codes_of(editor, nodes, writer.inputs[0], dtype)
    out = editor.variable(f"{tensor.name}_codes", dtype)
    nodes.append(editor.node(writer.op, out.name, [moved, *writer.inputs[1:]], [out], **writer.attrs))
    return out


def _slice_shape(editor: Editor, nodes: list[gs.Node], tensor: gs.Tensor, start: int, end: int) -> gs.Tensor:
    """The sizes of axes ``start`` to ``end``; Shape takes no range below opset 15."""
    sizes, sliced = (editor.variable(f"{tensor.name}_{word}", TensorProto.INT64) for word in ("sizes", "sliced"))
    limits = [editor.initializer("stof_sizes", np.array([n], np.int64)) for n in (start, end)]
    nodes.append(editor.node("Shape", sizes.name, [tensor], [sizes]))
    nodes.append(editor.node("Slice", sliced.name, [sizes, *limits], [sliced]))
    return sliced


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
    out = editor.variable(f"{tensor.name}_merged_batch", dtype)
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
