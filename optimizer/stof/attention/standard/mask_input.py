# SPDX-License-Identifier: Apache-2.0
"""Builds ``attn_mask``: layers with the same mask share one tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import onnx_graphsurgeon as gs
from onnx import TensorProto, helper

from stof.attention.bias_input import build_bias
from stof.attention.op_inputs import runtime_operand
from stof.attention.standard.decide import StandardRewrite
from stof.attention.standard.form import ABSORBING_FILL
from stof.graph.editor import Editor
from stof.graph.import_nodes import import_nodes, select_needed
from stof.graph.index import opset_of
from stof.graph.node_builder import Builder
from stof.mask.site import AttentionSite, LiftedMask, MaskTerm
from stof.mask.to_onnx import ScoreSizes
from stof.symbolic import Symbolic

_PREFIX = "stof_mask"


class MaskInputs:
    """Makes the masks of one graph.

    Args:
        editor: the graph under edit.
        symbolic: of its model.
    """

    def __init__(self, editor: Editor, symbolic: Symbolic) -> None:
        self.editor, self.symbolic = editor, symbolic
        self._made: dict[object, gs.Tensor] = {}

    def find(self, rewrite: StandardRewrite, heads: Sequence[gs.Tensor], nodes: list[gs.Node]) -> gs.Tensor:
        """The mask of a site, [B or 1, H or 1, S, T] or with fewer axes; new nodes are appended.

        Args:
            rewrite: of the site; its form has a mask.
            heads: query and key as the operator reads them.
            nodes: in front of the operator.
        """
        site, form, mask = rewrite.site, rewrite.form, rewrite.mask
        # Sizes that are equal by name are equal in every run. The rest of the form is stated by attributes.
        stated = replace(form, rank=0, is_causal=False, window=(-1, -1), lengths=None)
        key = stated, mask.operands, mask.tables, site.dims, site.query_offset, site.dtype
        if key not in self._made:
            self._made[key] = self._make(rewrite, heads, nodes)
        return self._made[key]

    def _make(self, rewrite: StandardRewrite, heads: Sequence[gs.Tensor], nodes: list[gs.Node]) -> gs.Tensor:
        site, form, mask = rewrite.site, rewrite.form, rewrite.mask
        editor, numbers = self.editor, helper.tensor_dtype_to_np_dtype(site.dtype)
        b = Builder(opset_of(editor.model), "made_")
        inputs = dict(zip(("made_query", "made_key"), heads, strict=True))
        types = dict.fromkeys(inputs, site.dtype)
        axis = 2 if form.rank == 4 else 1
        rows, keys = (_size(b, tensor, axis) for tensor in inputs)
        past = b.add("Sub", [keys, rows]) if site.query_offset else b.constant(0)
        sizes = ScoreSizes(_size(b, "made_query", 0), b.constant(site.num_heads), rows, keys, past)
        total, is_whole = "", False
        if not form.mask.allows_all:
            total = form.mask.to_onnx(b, sizes, self._operands(b, mask, form.mask.reads, inputs, types, nodes))
            is_whole = {"q", "k"} <= form.mask.reads
            if form.has_float_mask:
                total = b.add("Where", [total, b.constant(0, numbers), b.constant(form.fill, numbers)])
        if form.bias:
            bias, is_full = self._bias(b, site, form.bias, nodes, inputs, types)
            if form.fill != -np.inf:  # a row of nothing but -inf, or the lowest number, would be 0
                bias = b.add("Max", [bias, b.constant(form.fill, numbers)])
            elif form.raises_bias:
                raised = b.add("Max", [bias, b.constant(ABSORBING_FILL, numbers)])
                bias = b.add("Where", [b.add("Greater", [bias, b.constant(-np.inf, numbers)]), raised, bias])
            total, is_whole = b.add("Add", [total, bias]) if total else bias, is_whole or is_full
        if not is_whole:  # ONNX Runtime takes no mask of one row for all queries
            shape = b.add("Concat", [b.constant([1, 1]), *(b.unsqueeze(n, [0]) for n in (rows, keys))], axis=0)
            total = b.add("Expand", [total, shape])
        made = import_nodes(editor, select_needed(b.nodes, [total]), inputs, nodes, _PREFIX, types)
        return made[total]

    def _operands(
        self,
        b: Builder,
        mask: LiftedMask,
        read: frozenset[str],
        inputs: dict[str, gs.Tensor],
        types: dict[str, int],
        nodes: list[gs.Node],
    ) -> dict[str, str]:
        """The builder's names of what an expression reads at run time, and of its tables."""
        names = {}
        for operand in mask.operands:
            if operand.role in read:
                names[operand.role] = f"made_{operand.role}"
                inputs[names[operand.role]] = runtime_operand(self.editor, self.symbolic, operand, nodes, False)
        for name, dtype, shape, data in mask.tables:
            if name in read:
                array = np.frombuffer(data, np.dtype(dtype)).reshape(shape)
                names[name] = b.constant(array, np.dtype(dtype))
        return names

    def _bias(
        self,
        b: Builder,
        site: AttentionSite,
        terms: Sequence[MaskTerm],
        nodes: list[gs.Node],
        inputs: dict[str, gs.Tensor],
        types: dict[str, int],
    ) -> tuple[str, bool]:
        """The sum of biases in the type of the query, and whether it has a row for each query and a column for each key."""
        tensor = build_bias(self.editor, self.symbolic, site, terms, nodes)
        is_as_it_is = any(tensor is self.editor.tensors[t.tensor] for t in terms)
        dtype = self.symbolic.dtype(terms[0].tensor) if is_as_it_is else int(TensorProto.FLOAT)
        inputs["made_bias"], types["made_bias"] = tensor, dtype
        shapes = [self.symbolic.shape(t.tensor) for t in terms if t.view is None]
        is_full = any(shape is not None and shape[-2:] == site.dims[2:] for shape in shapes)
        return "made_bias" if dtype == site.dtype else b.add("Cast", ["made_bias"], to=site.dtype), is_full


def _size(b: Builder, tensor: str, axis: int) -> str:
    return b.add("Gather", [b.add("Shape", [tensor]), b.constant(axis)])
