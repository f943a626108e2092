# SPDX-License-Identifier: Apache-2.0
"""Writes ``Attention`` nodes of ONNX in the place of sites: the only step that changes a graph."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from onnx import TensorProto

from stof.attention.edit.prune import Pruner
from stof.attention.edit.site_frame import Layouts, SiteFrame, scope_of
from stof.attention.op_inputs import runtime_operand
from stof.attention.standard.decide import StandardRewrite
from stof.attention.standard.mask_input import MaskInputs
from stof.attention.subgraphs import Scope
from stof.graph.editor import Editor
from stof.graph.index import opset_of
from stof.graph.old_opsets import raise_opset
from stof.graph.protobuf import copy_model
from stof.mask.site import Layout, RuntimeOperand
from stof.symbolic import Symbolic

OP = "Attention"
_LAYOUTS: dict[int, Layouts] = {
    3: (Layout.BSN, Layout.BSN, Layout.BSN, Layout.BSN),
    4: (Layout.BHSD, Layout.BHSD, Layout.BHSD, Layout.BHSD),
}


def emit_standard(scope: Scope, rewrites: Sequence[StandardRewrite]) -> onnx.ModelProto:
    """A copy of the model in which the site of every rewrite is one ``Attention``.

    Args:
        scope: the main graph.
        rewrites: of its sites.

    Raises:
        UnsupportedError: when the opset of the model cannot be raised to that of a form.
    """
    model = with_opset_of(scope, rewrites)
    if not rewrites:
        return model
    editor = Editor(model)
    pruner = Pruner(editor, scope.symbolic, [r.site for r in rewrites])
    masks = MaskInputs(editor, scope.symbolic)
    for rewrite in rewrites:
        _replace_site(editor, scope.symbolic, rewrite, masks)
    editor.place_inserted()
    pruner.prune()
    return editor.finish()


def with_opset_of(scope: Scope, rewrites: Sequence[StandardRewrite]) -> onnx.ModelProto:
    """A copy of the model with the fused nodes of sites expanded, in an opset that has the forms of all rewrites.

    Raises:
        UnsupportedError: when it cannot be converted to that.
    """
    base = scope.working.expand_for(r.site for r in rewrites)
    opset = max((r.form.opset for r in rewrites), default=0)
    if opset <= opset_of(base):
        return copy_model(base)
    raised = raise_opset(base, opset)
    raised.ir_version = max(raised.ir_version, _first_ir_version(opset))
    return raised


def _first_ir_version(opset: int) -> int:
    """The IR version that came with an opset of the standard domain."""
    return int(onnx.helper.find_min_ir_version_for([onnx.helper.make_opsetid("", opset)]))


def _replace_site(editor: Editor, symbolic: Symbolic, rewrite: StandardRewrite, masks: MaskInputs) -> None:
    site, form = rewrite.site, rewrite.form
    frame = SiteFrame(editor, site, _LAYOUTS[form.rank])
    nodes, inputs = frame.nodes, list(frame.inputs)
    mask = masks.find(rewrite, inputs[:2], nodes) if form.has_mask else None
    lengths = None
    if form.lengths is not None:
        lengths = _lengths_in_range(editor, symbolic, form.lengths, (inputs[1], 2 if form.rank == 4 else 1), nodes)
    inputs += _without_trailing([mask, None, None, lengths])
    name = editor.fresh_node_name(f"{scope_of(site.name)}/{OP}")
    nodes.append(gs.Node(OP, name, attributes_of(rewrite), inputs, [frame.result]))
    frame.finish()


def attributes_of(rewrite: StandardRewrite) -> dict[str, Any]:
    """The attributes of the node; those with their default are left out."""
    site, form = rewrite.site, rewrite.form
    heads = {"q_num_heads": site.num_heads, "kv_num_heads": site.kv_num_heads} if form.rank == 3 else {}
    windows = dict(zip(("left_window_size", "right_window_size"), form.window, strict=True))
    given = {"is_causal": int(form.is_causal), "softcap": site.softcap}
    return {
        **heads,
        "scale": site.scale,
        **{n: v for n, v in given.items() if v},
        **{n: v for n, v in windows.items() if v >= 0},
    }


def _without_trailing(inputs: Iterable[gs.Tensor | None]) -> list[gs.Tensor]:
    """Optional inputs, up to the last one that is given."""
    given = list(inputs)
    while given and given[-1] is None:
        given.pop()
    return [gs.Variable.empty() if tensor is None else tensor for tensor in given]


def _lengths_in_range(
    editor: Editor, symbolic: Symbolic, operand: RuntimeOperand, key: tuple[gs.Tensor, int], nodes: list[gs.Node]
) -> gs.Tensor:
    """Lengths as int64 from 0 to the number of keys; ONNX Runtime refuses others, which a comparison in the graph takes.

    ``key``: the tensor of keys, and its axis of positions.
    """

    def add(op: str, inputs: list[gs.Tensor], **attributes: object) -> gs.Tensor:
        out = editor.variable(f"stof_lengths_{op.lower()}", TensorProto.INT64)
        nodes.append(editor.node(op, out.name, inputs, [out], **attributes))
        return out

    def constant(value: object) -> gs.Tensor:
        return editor.initializer("stof_lengths", np.array(value, np.int64))

    lengths = runtime_operand(editor, symbolic, operand, nodes, False)
    keys = add("Gather", [add("Shape", [key[0]]), constant([key[1]])])
    whole = add("Cast", [lengths], to=int(TensorProto.INT64))
    return add("Max", [add("Min", [whole, keys]), constant([0])])
