# SPDX-License-Identifier: Apache-2.0
"""The operator ``stof::attention`` of ``torch.library``, and those that its derivatives are made of.

| operator | gives |
|---|---|
| ``attention`` | output and LSE, by the kernels |
| ``attention_backward`` | gradients of query, key and value for those of output and LSE |
| ``attention_tangent`` | tangents of output and LSE for those of query, key and value |
| ``attention_backward_derivative`` | derivatives of ``attention_backward`` along tangents of query, key and value |
| ``attention_tangent_derivative`` | derivatives of ``attention_tangent`` along other tangents of these |

Each takes tensors, the operands of the mask and the settings, and works on the CPU, on CUDA and on tensors without content.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from stof.errors import UnsupportedError
from stof.torch.arguments import AttentionSettings, check_arguments
from stof.torch.autocast import register_autocast, run_without_autocast
from stof.torch.batching import register_batching
from stof.torch.dense import DenseAttention
from stof.torch.differentiation import Derivatives, Tensors, register_derivatives
from stof.torch.kernel import run_attention
from stof.torch.second_derivatives import differentiate_backward, differentiate_tangent

_SETTINGS = "Tensor[] operands, str mask, str roles, float scale, float softcap, str empty_rows, bool query_offset"
_library = torch.library.Library("stof", "FRAGMENT")


def _forward(query: Any, key: Any, value: Any, operands: Sequence[Any], *settings: Any) -> tuple[Any, Any]:
    attention_settings = AttentionSettings(*settings)
    check_arguments(query, key, value, operands, attention_settings)
    if query.dtype == torch.float64:
        return DenseAttention(query, key, value, operands, attention_settings, checks_indices=True).forward()
    return run_attention(query, key, value, operands, attention_settings)


def _check_then_make_outputs(query: Any, key: Any, value: Any, operands: Sequence[Any], *settings: Any) -> Any:
    check_arguments(query, key, value, operands, AttentionSettings(*settings))
    return _make_outputs(query, key, value)


def _make_outputs(query: Any, key: Any, value: Any, *_: Any) -> tuple[Any, Any]:
    B, H, S, _ = query.shape
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    return query.new_empty((B, H, S, value.shape[3])), query.new_empty((B, H, S), dtype=dtype)


def _make_inputs(query: Any, key: Any, value: Any, *_: Any) -> tuple[Any, Any, Any]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _backward(query: Any, key: Any, value: Any, grad_output: Any, grad_lse: Any, *rest: Any) -> Any:
    return _dense(query, key, value, rest).backward(grad_output, grad_lse)


def _tangent(query: Any, key: Any, value: Any, *rest: Any) -> Any:
    return _dense(query, key, value, rest[3:]).tangent(*rest[:3])


def _backward_derivative(query: Any, key: Any, value: Any, grad_output: Any, grad_lse: Any, *rest: Any) -> Any:
    dense = _dense(query, key, value, rest[3:])
    return differentiate_backward(dense, grad_output, grad_lse, rest[:3])


def _tangent_derivative(query: Any, key: Any, value: Any, *rest: Any) -> Any:
    return differentiate_tangent(_dense(query, key, value, rest[6:]), rest[:3], rest[3:6])


def _dense(query: Any, key: Any, value: Any, rest: Sequence[Any]) -> DenseAttention:
    operands, *settings = rest
    return DenseAttention(query, key, value, operands, AttentionSettings(*settings))


def _define(name: str, tensors: str, results: int, run: Callable[..., Any], make: Callable[..., Any]) -> Any:
    """An operator of tensors, operands and settings; one implementation serves all devices, and looks at that of the query.

    ``tensors`` is the part of the schema that names them, ``results`` how many tensors ``run`` computes. ``make`` makes these
    without content.
    """
    schema = f"{name}({tensors}, {_SETTINGS}) -> ({', '.join(['Tensor'] * results)})"
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    operator = getattr(torch.ops.stof, name).default

    def run_as_given(*arguments: Any) -> Any:
        return run_without_autocast(run, arguments[0].device.type, arguments)

    _library.impl(name, run_as_given, "CompositeExplicitAutograd")
    torch.library.register_fake(f"stof::{name}", make, lib=_library)
    register_batching(_library, operator, tensors.count("Tensor"))
    return operator


_INPUTS, _GRADS = "Tensor query, Tensor key, Tensor value", "Tensor grad_output, Tensor grad_lse"
_ALONG, _ALONG_2 = (f"Tensor {n}query, Tensor {n}key, Tensor {n}value" for n in ("moved_", "moved2_"))

attention_op = _define("attention", _INPUTS, 2, _forward, _check_then_make_outputs)
_backward_op = _define("attention_backward", f"{_INPUTS}, {_GRADS}", 3, _backward, _make_inputs)
_tangent_op = _define("attention_tangent", f"{_INPUTS}, {_ALONG}", 2, _tangent, _make_outputs)
_backward_derivative_op = _define(
    "attention_backward_derivative", f"{_INPUTS}, {_GRADS}, {_ALONG}", 3, _backward_derivative, _make_inputs
)
_tangent_derivative_op = _define(
    "attention_tangent_derivative", f"{_INPUTS}, {_ALONG}, {_ALONG_2}", 2, _tangent_derivative, _make_outputs
)
register_autocast(_library, attention_op)


def _pull_back_attention(tensors: Tensors, rest: Tensors, grads: Tensors, _: Sequence[bool]) -> Tensors:
    return _backward_op(*tensors, *grads, *rest)  # type: ignore[no-any-return]


def _push_forward_attention(tensors: Tensors, rest: Tensors, tangents: Tensors) -> Tensors:
    return _tangent_op(*tensors, *tangents, *rest)  # type: ignore[no-any-return]


def _pull_back_backward(tensors: Tensors, rest: Tensors, grads: Tensors, needed: Sequence[bool]) -> Tensors:
    inputs = _backward_derivative_op(*tensors, *grads, *rest) if any(needed[:3]) else [None] * 3
    return (*inputs, *(_tangent_op(*tensors[:3], *grads, *rest) if any(needed[3:]) else [None] * 2))


def _push_forward_backward(tensors: Tensors, rest: Tensors, tangents: Tensors) -> Tensors:
    return _sum(
        _backward_op(*tensors[:3], *tangents[3:], *rest), _backward_derivative_op(*tensors, *tangents[:3], *rest)
    )


def _pull_back_tangent(tensors: Tensors, rest: Tensors, grads: Tensors, needed: Sequence[bool]) -> Tensors:
    inputs = _backward_derivative_op(*tensors[:3], *grads, *tensors[3:], *rest) if any(needed[:3]) else [None] * 3
    return (*inputs, *(_backward_op(*tensors[:3], *grads, *rest) if any(needed[3:]) else [None] * 3))


def _push_forward_tangent(tensors: Tensors, rest: Tensors, tangents: Tensors) -> Tensors:
    return _sum(_tangent_op(*tensors[:3], *tangents[3:], *rest), _tangent_derivative_op(*tensors, *tangents[:3], *rest))


def _sum(left: Tensors, right: Tensors) -> Tensors:
    return tuple(a + b for a, b in zip(left, right, strict=True))


def _refuse(*_: Any) -> Any:
    raise UnsupportedError(
        "stof.torch.attention has first and second derivatives, and a third one was asked for; compute attention by "
        "PyTorch's own operators where higher derivatives are needed"
    )


for _derivatives in (
    Derivatives(attention_op, 3, _pull_back_attention, _push_forward_attention),
    Derivatives(_backward_op, 5, _pull_back_backward, _push_forward_backward),
    Derivatives(_tangent_op, 6, _pull_back_tangent, _push_forward_tangent),
    Derivatives(_backward_derivative_op, 8, _refuse, _refuse),
    Derivatives(_tangent_derivative_op, 9, _refuse, _refuse),
):
    register_derivatives(_library, _derivatives)
