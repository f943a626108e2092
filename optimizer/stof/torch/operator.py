# SPDX-License-Identifier: Apache-2.0
"""The operators ``stof::attention`` and ``stof::attention_backward`` of ``torch.library``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from stof.torch.arguments import AttentionSettings, check_arguments
from stof.torch.dense import DenseAttention
from stof.torch.kernel import run_attention

_SETTINGS = "str mask, str roles, float scale, float softcap, str empty_rows, bool query_offset"


def _forward(query: Any, key: Any, value: Any, operands: Sequence[Any], *settings: Any) -> tuple[Any, Any]:
    given = AttentionSettings(*settings)
    check_arguments(query, key, value, operands, given)
    if query.dtype == torch.float64:
        return DenseAttention(query, key, value, operands, given).forward()
    return run_attention(query, key, value, operands, given)


def _forward_shapes(query: Any, key: Any, value: Any, operands: Sequence[Any], *settings: Any) -> tuple[Any, Any]:
    check_arguments(query, key, value, operands, AttentionSettings(*settings))
    B, H, S, _ = query.shape
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    return query.new_empty((B, H, S, value.shape[3])), query.new_empty((B, H, S), dtype=dtype)


def _backward(
    grad_output: Any, grad_lse: Any, query: Any, key: Any, value: Any, operands: Sequence[Any], *settings: Any
) -> tuple[Any, Any, Any]:
    dense = DenseAttention(query, key, value, operands, AttentionSettings(*settings))
    return dense.backward(grad_output, grad_lse)


def _backward_shapes(
    grad_output: Any, grad_lse: Any, query: Any, key: Any, value: Any, operands: Sequence[Any], *settings: Any
) -> tuple[Any, Any, Any]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


# One implementation for all devices: it looks at the device of the query.
attention_op = torch.library.custom_op(
    "stof::attention",
    _forward,
    mutates_args=(),
    schema=f"(Tensor query, Tensor key, Tensor value, Tensor[] operands, {_SETTINGS}) -> (Tensor, Tensor)",
)
attention_op.register_fake(_forward_shapes)
_backward_op = torch.library.custom_op(
    "stof::attention_backward",
    _backward,
    mutates_args=(),
    schema="(Tensor grad_output, Tensor grad_lse, Tensor query, Tensor key, Tensor value, Tensor[] operands, "
    f"{_SETTINGS}) -> (Tensor, Tensor, Tensor)",
)
_backward_op.register_fake(_backward_shapes)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    query, key, value, operands, *settings = inputs
    ctx.save_for_backward(query, key, value, *operands)
    ctx.settings = settings


def _differentiate(ctx: Any, grad_output: Any, grad_lse: Any) -> tuple[Any, ...]:
    query, key, value, *operands = ctx.saved_tensors
    grads = _backward_op(grad_output, grad_lse, query, key, value, operands, *ctx.settings)
    return (*grads, [None] * len(operands), *([None] * len(ctx.settings)))


attention_op.register_autograd(_differentiate, setup_context=_keep)
