# SPDX-License-Identifier: Apache-2.0
"""Translates ``stof::attention`` for ``torch.onnx.export``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from stof.errors import ArgumentError
from stof.graph.node_builder import Builder
from stof.graph.node_fields import attributes_of
from stof.torch.arguments import AttentionSettings
from stof.torch.operator import attention_op
from stof.torch.standard_nodes import ExportedAttention


def translation_table() -> dict[Callable[..., Any], Callable[..., Any]]:
    """The table for ``torch.onnx.export(..., dynamo=True, custom_translation_table=stof.torch.translation_table())``.

    A call of ``attention`` becomes standard ONNX nodes, which any runtime runs. ``stof-optimize`` finds them, lifts the mask
    expression from them, and writes the StofAttention node.

    Raises:
        ArgumentError: without onnxscript, which PyTorch's exporter needs.
    """
    try:
        from onnxscript import evaluator
    except ImportError as error:
        raise ArgumentError("the export to ONNX needs the package onnxscript: pip install onnxscript") from error

    def attention(
        query: Any,
        key: Any,
        value: Any,
        operands: Sequence[Any],
        mask: str,
        roles: str,
        scale: float,
        softcap: float,
        empty_rows: str,
        query_offset: bool,
    ) -> Any:
        settings = AttentionSettings(mask, roles, scale, softcap, empty_rows, query_offset)
        recorder: Any = evaluator.default()  # PyTorch's, which has the opset that it writes
        return _translate(recorder.opset, (query, key, value), operands, settings)

    return {_overload(): attention}


def _overload() -> Any:
    """The operator as graphs of ``torch.export`` hold it."""
    return attention_op


def _translate(
    opset: Any, tensors: tuple[Any, Any, Any], operands: Sequence[Any], settings: AttentionSettings
) -> tuple[Any, Any]:
    query, key, value = tensors
    names = dict(zip(settings.roles.split(), (f"operand{i}" for i in range(len(operands))), strict=True))
    values = {"query": query, "key": key, "value": value, **dict(zip(names.values(), operands, strict=True))}
    call = ExportedAttention(
        settings,
        _require_fixed(query, 1, "q"),
        _require_fixed(key, 1, "k"),
        (_require_fixed(key, 3, "k"), _require_fixed(value, 3, "v")),
        int(query.dtype),
        names,
    )
    builder = Builder(opset.version, "")
    output, lse = call.add_nodes(builder, "query", "key", "value")
    for node in builder.nodes:
        attributes = attributes_of(node)
        values[node.output[0]] = getattr(opset, node.op_type)(*(values[n] for n in node.input), **attributes)
    return values[output], values[lse]


def _require_fixed(tensor: Any, axis: int, name: str) -> int:
    size = tensor.shape[axis]
    if not isinstance(size, int):
        raise ArgumentError(
            f"axis {axis} of {name} is dynamic ({size}), expected fixed numbers of heads and head sizes"
        )
    return size
