# SPDX-License-Identifier: Apache-2.0
"""The bias operand of a call, from the terms that a graph adds to its scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs
from onnx import TensorProto

from stof.graph.editor import Editing
from stof.mask.strength import LOWEST
from stof.site import AttentionSite, MaskTerm, TermKind
from stof.symbolic import Symbolic, integer


def bias_of(
    editing: Editing, symbolic: Symbolic, site: AttentionSite, terms: Sequence[MaskTerm], extra: list[gs.Node]
) -> gs.Tensor:
    """The sum of the additive terms: one of them as it is where that will do, else computed in fp32."""
    types = {symbolic.dtype(t.tensor) for t in terms}
    known = {TensorProto.FLOAT} if site.floored else {site.dtype, TensorProto.FLOAT}
    plain = len(terms) == 1 and terms[0].scale == 1.0 and types <= known and terms[0].kind is TermKind.ADD
    total: gs.Tensor | None = None
    for term in terms:
        tensor = editing.tensors[term.tensor]
        if term.merged:
            tensor = _unmerged(editing, extra, tensor, symbolic.dtype(term.tensor), term.merged)
        if term.windows:
            tensor = _over_windows(editing, symbolic, site, term, extra)
        if term.groups:
            tensor = _over_groups(editing, symbolic, term, extra)
        if term.kind is not TermKind.ADD:
            tensor = _selecting(editing, extra, tensor, term.kind is TermKind.KEEP)
        elif not plain and symbolic.dtype(term.tensor) != TensorProto.FLOAT:
            tensor = append(editing, extra, "Cast", [tensor], to=int(TensorProto.FLOAT))
        if term.scale != 1.0:
            factor = editing.initializer("stof_bias_scale", np.array(term.scale, np.float32))
            tensor = append(editing, extra, "Mul", [tensor, factor])
        total = tensor if total is None else append(editing, extra, "Add", [total, tensor])
    assert total is not None
    if site.floored:  # of a row with -inf and the lowest number alone, all keys have a share
        least = editing.initializer("stof_bias_floor", np.array(-LOWEST[TensorProto.FLOAT], np.float32))
        total = append(editing, extra, "Max", [total, least])
    return total


def _selecting(editing: Editing, extra: list[gs.Node], tensor: gs.Tensor, keeps: bool) -> gs.Tensor:
    """0 where a condition leaves scores, -inf elsewhere."""
    condition = editing.variable("stof_bias_kept", TensorProto.BOOL)
    extra.append(editing.node("Cast", condition.name, [tensor], [condition], to=int(TensorProto.BOOL)))
    zero, minus = (editing.initializer("stof_bias_fill", np.array(x, np.float32)) for x in (0.0, -np.inf))
    return append(editing, extra, "Where", [condition, zero, minus] if keeps else [condition, minus, zero])


@dataclass(frozen=True)
class _Shaping:
    """Nodes that bring a term into the form of a bias."""

    editing: Editing
    extra: list[gs.Node]
    prefix: str  # of names

    def add(
        self, op: str, name: str, inputs: list[gs.Tensor], dtype: int = TensorProto.INT64, **attributes: object
    ) -> gs.Tensor:
        """The output of a node more."""
        out = self.editing.variable(f"{self.prefix}_{name}", dtype)
        self.extra.append(self.editing.node(op, out.name, inputs, [out], **attributes))
        return out

    def numbers(self, *values: int) -> gs.Tensor:
        """A constant vector."""
        return self.editing.initializer(f"{self.prefix}_sizes", np.array(values, np.int64))


def _unmerged(editing: Editing, extra: list[gs.Node], tensor: gs.Tensor, dtype: int, heads: int) -> gs.Tensor:
    """[B*H, .., ..] as [B, H, .., ..]."""
    shaping = _Shaping(editing, extra, "stof_bias")
    add, numbers = shaping.add, shaping.numbers
    sizes = add("Shape", "shape", [tensor])
    rest = add("Slice", "rest", [sizes, numbers(1), numbers(3)])
    target = add("Concat", "target", [numbers(-1, heads), rest], axis=0)
    return add("Reshape", "spread", [tensor, target], dtype)


def _over_windows(
    editing: Editing, symbolic: Symbolic, site: AttentionSite, term: MaskTerm, extra: list[gs.Node]
) -> gs.Tensor:
    """A term of scores [X, W, H, S, T] as one of [X*W, H, S, T]."""
    kind = symbolic.dtype(term.tensor)

    shaping = _Shaping(editing, extra, "stof_windows")
    add, numbers = shaping.add, shaping.numbers
    tensor = editing.tensors[term.tensor]
    own = symbolic.shape(term.tensor) or ()
    if len(own) < 5:
        tensor = add("Unsqueeze", "wide", [tensor, numbers(*range(5 - len(own)))], kind)
    shape = add("Shape", "shape", [tensor])
    single = [len(own) < 5 - i or own[i - 5 + len(own)] == integer(1) for i in (0, 1)]
    if any(single) and not all(single):
        other = 1 if single[0] else 0
        # Batch comes first in every layout; of a query that is transposed for one, where the transposition takes it from.
        axis = 1 - other if site.query.joined else site.query.perm[0] if site.query.perm else 0
        count = add("Gather", "batch", [add("Shape", "query", [editing.tensors[site.query.tensor]]), numbers(axis)])
        if not site.query.joined:
            count = add("Div", "count", [count, add("Gather", "part", [shape, numbers(other)])])
        parts = [numbers(1)] * 5
        parts[1 - other] = count
        tensor = add("Expand", "spread", [tensor, add("Concat", "target", parts, axis=0)], kind)
    rest = add("Slice", "rest", [shape, numbers(2), numbers(5)])
    return add("Reshape", "flat", [tensor, add("Concat", "sizes", [numbers(-1), rest], axis=0)], kind)


def _over_groups(editing: Editing, symbolic: Symbolic, term: MaskTerm, extra: list[gs.Node]) -> gs.Tensor:
    """A term of scores [B, G, R, S, T] as one of [B, G*R, S, T]."""
    kind = symbolic.dtype(term.tensor)

    shaping = _Shaping(editing, extra, "stof_groups")
    add, numbers = shaping.add, shaping.numbers
    tensor = editing.tensors[term.tensor]
    own = symbolic.shape(term.tensor) or ()
    of_heads = tuple(d.constant for d in (*(integer(1),) * (5 - len(own)), *own)[1:3])
    wanted = (1, 1) if of_heads == (1, 1) else term.groups
    if len(own) < 5 or of_heads != wanted:
        tensor = add("Expand", "spread", [tensor, numbers(1, *wanted, 1, 1)], kind)
    shape = add("Shape", "shape", [tensor])
    batch, rest = (add("Slice", "part", [shape, numbers(a), numbers(b)]) for a, b in ((0, 1), (3, 5)))
    target = add("Concat", "target", [batch, numbers(wanted[0] * wanted[1]), rest], axis=0)
    return add("Reshape", "flat", [tensor, target], kind)


def append(editing: Editing, extra: list[gs.Node], op: str, inputs: list[gs.Tensor], **attributes: object) -> gs.Tensor:
    """A node more of one fp32 output."""
    out = editing.variable("stof_bias", TensorProto.FLOAT)
    extra.append(editing.node(op, out.name, inputs, [out], **attributes))
    return out
