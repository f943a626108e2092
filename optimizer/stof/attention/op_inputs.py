# SPDX-License-Identifier: Apache-2.0
"""Builds the operand inputs of a StofAttention call, which follow query, key and value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_graphsurgeon as gs
from onnx import TensorProto, helper

from stof.attention.bias_input import append_fp32_node, build_bias
from stof.attention.relative_terms.tables import build_factor, build_tables
from stof.graph.editor import Editor
from stof.mask.relative_bias.distance_table import table_of
from stof.mask.relative_roles import (
    RELATIVE_BIAS,
    RELATIVE_BIAS_FACTOR,
    RELATIVE_KEY,
    RELATIVE_KEY1,
    RELATIVE_QUERY,
    RELATIVE_VALUE,
)
from stof.mask.roundings import QUANTIZER_ROLES, SiteRoundings
from stof.mask.site import AttentionSite, LiftedMask, OperandView, RuntimeOperand
from stof.symbolic import Symbolic

# TensorRT plugins take no uint8. Its documentation does not list bool, which its parser accepts.
_TENSORRT_PAD_TYPES = frozenset({TensorProto.INT32, TensorProto.INT64, TensorProto.FLOAT, TensorProto.FLOAT16})
_INTEGERS = frozenset({TensorProto.INT32, TensorProto.INT64})
_PAD_TYPES = _TENSORRT_PAD_TYPES | {TensorProto.BOOL, TensorProto.UINT8}
NEUTRAL: dict[str, np.ndarray] = {
    "pad": np.ones((1, 1), np.int64),
    "bias": np.zeros((1, 1, 1, 1), np.float32),
    RELATIVE_BIAS: np.zeros((1, 1), np.float32),
    RELATIVE_BIAS_FACTOR: np.zeros((1, 1, 1), np.float32),
    RELATIVE_KEY: np.zeros((1, 1, 1), np.float32),
    RELATIVE_KEY1: np.zeros((1, 1, 1), np.float32),
    RELATIVE_QUERY: np.zeros((1, 1, 1), np.float32),
    RELATIVE_VALUE: np.zeros((1, 1, 1), np.float32),
    "sink": np.zeros(1, np.float32),
    "segment_q": np.zeros((1, 1), np.int64),
    "segment_k": np.zeros((1, 1), np.int64),
    "lengths": np.zeros(1, np.int64),
}


def build_operands(
    editor: Editor,
    symbolic: Symbolic,
    masked_site: tuple[AttentionSite, LiftedMask],
    slots: Sequence[str],
    extra: list[gs.Node],
    tensorrt: bool,
    made: Mapping[str, gs.Tensor],
) -> list[gs.Tensor]:
    """The tensors for a call's operand slots.

    Args:
        editor: the graph under edit.
        symbolic: of its model.
        masked_site: the site and its mask.
        slots: the operand roles of the model's calls, in the order of inputs. Unused slots get a small constant.
        extra: new nodes that compute operands are appended here.
        tensorrt: whether TensorRT's parser reads the model.
        made: operands by role that are no tensors of the model.
    """
    site, mask = masked_site
    tensors = {**made, **{o.role: runtime_operand(editor, symbolic, o, extra, tensorrt) for o in mask.operands}}
    for name, dtype, shape, data in mask.tables:
        array = np.frombuffer(data, np.dtype(dtype)).reshape(shape).copy()
        if tensorrt and array.dtype == np.uint8:
            array = array.astype(np.int32)  # the parser would convert it as well, with a warning
        tensors[name] = editor.initializer(f"stof_{name}", array)
    if mask.bias:
        tensors["bias"] = build_bias(editor, symbolic, site, mask.bias, extra)
    if mask.relative is not None:
        tensors[RELATIVE_BIAS] = editor.initializer("stof_relative_bias", table_of(mask.relative).copy())
    if mask.relative_factor is not None:
        tensors[RELATIVE_BIAS_FACTOR] = build_factor(editor, symbolic, site, mask.relative_factor, extra)
    if mask.relative_terms:
        tables: list[gs.Node] = []
        tensors |= build_tables(editor, symbolic, site, mask, tables)
        editor.insert_early(tables)
    if site.roundings is not None:
        tensors |= _quantizer_operands(editor, site.roundings)
    if site.sink is not None:
        tensors["sink"] = _sink_operand(editor, symbolic, site, extra)
    return [tensors[slot] if slot in tensors else _unused_operand(editor, slot) for slot in slots]


def runtime_operand(
    editor: Editor, symbolic: Symbolic, operand: RuntimeOperand, extra: list[gs.Node], tensorrt: bool
) -> gs.Tensor:
    """A run-time operand in the shape and one of the types that the op takes."""
    tensor: gs.Tensor = editor.tensors[operand.tensor]
    dtype = symbolic.dtype(operand.tensor)
    flatten_axis = {OperandView.ROW: 0, OperandView.ROWS: 1}.get(operand.view)
    if operand.view is OperandView.TURNED:
        out = editor.variable(f"stof_{operand.role}", dtype)
        extra.append(editor.node("Transpose", out.name, [tensor], [out], perm=[1, 0]))
        tensor = out
    elif flatten_axis is not None:  # not Reshape, which refuses a batch of 0
        out = editor.variable(f"stof_{operand.role}", dtype)
        extra.append(editor.node("Flatten", out.name, [tensor], [out], axis=flatten_axis))
        tensor = out
    elif operand.view is OperandView.FLAT:
        out = editor.variable(f"stof_{operand.role}", dtype)
        shape = editor.initializer("stof_shape", np.array([-1], np.int64))
        extra.append(editor.node("Reshape", out.name, [tensor, shape], [out]))
        tensor = out
    if operand.at is not None:
        out = editor.variable(f"stof_{operand.role}", dtype)
        position = editor.initializer("stof_position", np.array(operand.at, np.int64))
        extra.append(editor.node("Gather", out.name, [tensor, position], [out], axis=1))
        tensor = out
    is_padding = operand.role == "pad"
    if dtype not in (_PAD_TYPES if is_padding else _INTEGERS):
        dtype = int(TensorProto.BOOL if is_padding else TensorProto.INT64)
        tensor = _cast(editor, operand, extra, tensor, dtype)
    if tensorrt and is_padding and dtype not in _TENSORRT_PAD_TYPES:
        tensor = _cast(editor, operand, extra, tensor, int(TensorProto.INT32))
    return tensor


def _cast(editor: Editor, operand: RuntimeOperand, extra: list[gs.Node], tensor: gs.Tensor, dtype: int) -> gs.Tensor:
    out = editor.variable(f"stof_{operand.role}", dtype)
    extra.append(editor.node("Cast", out.name, [tensor], [out], to=dtype))
    return out


def _quantizer_operands(editor: Editor, roundings: SiteRoundings) -> dict[str, gs.Tensor]:
    """Scales and zero points by their roles; a quantizer without a zero point gets 0 of its type."""
    tensors: dict[str, gs.Tensor] = {}
    types = dict(zip(("query", "key", "value"), roundings.code_types, strict=True))
    for role, quantizer in roundings.operands.items():
        tensors[f"{role}_scale"] = editor.tensors[quantizer.scale]
        if quantizer.zero_point:
            tensors[f"{role}_zero_point"] = editor.tensors[quantizer.zero_point]
        else:
            kind = helper.tensor_dtype_to_np_dtype(types.get(role, int(TensorProto.UINT8)))
            tensors[f"{role}_zero_point"] = editor.initializer("stof_zero_point", np.zeros((), kind))
    return tensors


def _unused_operand(editor: Editor, role: str) -> gs.Tensor:
    if role in QUANTIZER_ROLES:
        return editor.initializer(
            f"stof_unused_{role}", np.ones((), np.float32) if role.endswith("scale") else np.zeros((), np.uint8)
        )
    return editor.initializer(f"stof_unused_{role}", NEUTRAL.get(role, np.zeros(1, np.bool_)))


def _sink_operand(editor: Editor, symbolic: Symbolic, site: AttentionSite, extra: list[gs.Node]) -> gs.Tensor:
    """The logits of the sink: [H], of the site's type or fp32."""
    assert site.sink is not None
    if site.sink_values:
        return editor.initializer("stof_sink", np.array(site.sink_values, np.float32))
    tensor, dtype = editor.tensors[site.sink], symbolic.dtype(site.sink)
    shape = symbolic.shape(site.sink)
    if shape is None or len(shape) != 1:
        out = editor.variable("stof_sink", dtype)
        flat = editor.initializer("stof_shape", np.array([-1], np.int64))
        extra.append(editor.node("Reshape", out.name, [tensor, flat], [out]))
        tensor = out
    if dtype not in (site.dtype, TensorProto.FLOAT):
        tensor = append_fp32_node(editor, extra, "Cast", [tensor], to=int(TensorProto.FLOAT))
    return tensor
