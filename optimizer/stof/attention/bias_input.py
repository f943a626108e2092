# SPDX-License-Identifier: Apache-2.0
"""Builds the bias operand of a call from the additive terms of a site."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs
from onnx import TensorProto

from stof.graph.editor import Editor
from stof.mask.site import AttentionSite, MaskTerm, TermKind
from stof.mask.strength import LOWEST
from stof.symbolic import Symbolic, integer


def build_bias(
    editor: Editor, symbolic: Symbolic, site: AttentionSite, terms: Sequence[MaskTerm], extra: list[gs.Node]
) -> gs.Tensor:
    """The sum of the terms, in fp32; a single additive term of an accepted type is used as it is."""
    types = {symbolic.dtype(t.tensor) for t in terms}
    accepted = {TensorProto.FLOAT} if site.floored else {site.dtype, TensorProto.FLOAT}
    is_used_as_is = len(terms) == 1 and terms[0].scale == 1.0 and types <= accepted and terms[0].kind is TermKind.ADD
    total: gs.Tensor | None = None
    for term in terms:
        tensor = editor.tensors[term.tensor]
        if term.merged:
            tensor = _split_heads_from_batch(editor, extra, tensor, symbolic.dtype(term.tensor), term.merged)
        if term.windows:
            tensor = _merge_windows(editor, symbolic, site, term, extra)
        if term.groups:
            tensor = _merge_groups(editor, symbolic, term, extra)
        if term.kind is not TermKind.ADD:
            tensor = _bias_from_condition(editor, extra, tensor, term.kind is TermKind.KEEP)
        elif not is_used_as_is and symbolic.dtype(term.tensor) != TensorProto.FLOAT:
            tensor = append_fp32_node(editor, extra, "Cast", [tensor], to=int(TensorProto.FLOAT))
        if term.scale != 1.0:
            factor = editor.initializer("stof_bias_scale", np.array(term.scale, np.float32))
            tensor = append_fp32_node(editor, extra, "Mul", [tensor, factor])
        total = tensor if total is None else append_fp32_node(editor, extra, "Add", [total, tensor])
    assert total is not None
    if site.floored:  # a row of nothing but -inf and the lowest number attends all keys
        least = editor.initializer("stof_bias_floor", np.array(-LOWEST[TensorProto.FLOAT], np.float32))
        total = append_fp32_node(editor, extra, "Max", [total, least])
    return total


def _bias_from_condition(editor: Editor, extra: list[gs.Node], tensor: gs.Tensor, keeps: bool) -> gs.Tensor:
    """0 where a condition keeps scores, -inf elsewhere."""
    condition = editor.variable("stof_bias_kept", TensorProto.BOOL)
    extra.append(editor.node("Cast", condition.name, [tensor], [condition], to=int(TensorProto.BOOL)))
    zero, minus = (editor.initializer("stof_bias_fill", np.array(x, np.float32)) for x in (0.0, -np.inf))
    return append_fp32_node(editor, extra, "Where", [condition, zero, minus] if keeps else [condition, minus, zero])


@dataclass(frozen=True)
class _NodeBuilder:
    """Appends the nodes that reshape a term."""

    editor: Editor
    extra: list[gs.Node]
    prefix: str  # of the names of new tensors

    def add(
        self, op: str, name: str, inputs: list[gs.Tensor], dtype: int = TensorProto.INT64, **attributes: object
    ) -> gs.Tensor:
        """Appends a node and returns its output."""
        out = self.editor.variable(f"{self.prefix}_{name}", dtype)
        self.extra.append(self.editor.node(op, out.name, inputs, [out], **attributes))
        return out

    def numbers(self, *values: int) -> gs.Tensor:
        """A constant vector."""
        return self.editor.initializer(f"{self.prefix}_sizes", np.array(values, np.int64))


def _split_heads_from_batch(
    editor: Editor, extra: list[gs.Node], tensor: gs.Tensor, dtype: int, heads: int
) -> gs.Tensor:
    """A term [B*H, .., ..] as [B, H, .., ..]."""
    nodes = _NodeBuilder(editor, extra, "stof_bias")
    add, numbers = nodes.add, nodes.numbers
    sizes = add("Shape", "shape", [tensor])
    rest = add("Slice", "rest", [sizes, numbers(1), numbers(3)])
    target = add("Concat", "target", [numbers(-1, heads), rest], axis=0)
    return add("Reshape", "spread", [tensor, target], dtype)


def _merge_windows(
    editor: Editor, symbolic: Symbolic, site: AttentionSite, term: MaskTerm, extra: list[gs.Node]
) -> gs.Tensor:
    """A term of scores [X, W, H, S, T] as one of [X*W, H, S, T]."""
    kind = symbolic.dtype(term.tensor)

    nodes = _NodeBuilder(editor, extra, "stof_windows")
    add, numbers = nodes.add, nodes.numbers
    tensor = editor.tensors[term.tensor]
    own = symbolic.shape(term.tensor) or ()
    if len(own) < 5:
        tensor = add("Unsqueeze", "wide", [tensor, numbers(*range(5 - len(own)))], kind)
    shape = add("Shape", "shape", [tensor])
    single = [len(own) < 5 - i or own[i - 5 + len(own)] == integer(1) for i in (0, 1)]
    if any(single) and not all(single):
        other = 1 if single[0] else 0
        # Every layout has the batch first. A transposed query has it where its perm takes axis 0 from.
        axis = 1 - other if site.query.joined else site.query.perm[0] if site.query.perm else 0
        count = add("Gather", "batch", [add("Shape", "query", [editor.tensors[site.query.tensor]]), numbers(axis)])
        if not site.query.joined:
            count = add("Div", "count", [count, add("Gather", "part", [shape, numbers(other)])])
        repeats = [numbers(1)] * 5
        repeats[1 - other] = count
        tensor = add("Expand", "spread", [tensor, add("Concat", "target", repeats, axis=0)], kind)
    rest = add("Slice", "rest", [shape, numbers(2), numbers(5)])
    return add("Reshape", "flat", [tensor, add("Concat", "sizes", [numbers(-1), rest], axis=0)], kind)


def _merge_groups(editor: Editor, symbolic: Symbolic, term: MaskTerm, extra: list[gs.Node]) -> gs.Tensor:
    """A term of scores [B, G, R, S, T] as one of [B, G*R, S, T]."""
    kind = symbolic.dtype(term.tensor)

    nodes = _NodeBuilder(editor, extra, "stof_groups")
    add, numbers = nodes.add, nodes.numbers
    tensor = editor.tensors[term.tensor]
    own = symbolic.shape(term.tensor) or ()
    of_heads = tuple(d.constant for d in (*(integer(1),) * (5 - len(own)), *own)[1:3])
    wanted = (1, 1) if of_heads == (1, 1) else term.groups
    if len(own) < 5 or of_heads != wanted:
        tensor = add("Expand", "spread", [tensor, numbers(1, *wanted, 1, 1)], kind)
    shape = add("Shape", "shape", [tensor])
    batch, rest = (add("Slice", "part", [shape, numbers(a), numbers(b)]) for a, b in ((0, 1), (3, 5)))
    target = add("Concat", "target", [batch, numbers(wanted[0] * wanted[1]), rest], axis=0)
    return add("Reshape", "flat", [tensor, target], kind)


def append_fp32_node(
    editor: Editor, extra: list[gs.Node], op: str, inputs: list[gs.Tensor], **attributes: object
) -> gs.Tensor:
    """Appends a node with one fp32 output and returns that."""
    out = editor.variable("stof_bias", TensorProto.FLOAT)
    extra.append(editor.node(op, out.name, inputs, [out], **attributes))
    return out
