# SPDX-License-Identifier: Apache-2.0
"""Derivatives of the operators: reverse and forward mode, nested in any order, also under transforms of ``torch.func``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad

from stof.errors import UnsupportedError

Tensors = Sequence[Any]


@dataclass(frozen=True)
class Derivatives:
    """The derivatives of an operator, whose arguments are some tensors and then others, the ``rest``.

    Attributes:
        operator: of ``torch.ops``.
        count: of the tensors that derivatives exist for.
        pull_back: (tensors, rest, gradients of the results, whether each tensor needs one) → gradients of the tensors.
        push_forward: (tensors, rest, tangents of the tensors) → tangents of the results.
    """

    operator: Any
    count: int
    pull_back: Callable[[Tensors, Tensors, Tensors, Sequence[bool]], Tensors]
    push_forward: Callable[[Tensors, Tensors, Tensors], Tensors]


def register_derivatives(library: Any, derivatives: Derivatives) -> None:
    """Registers the derivatives of an operator that the library of ``torch.library`` defines.

    ``torch.library.register_autograd`` knows reverse mode alone: forward mode would give zeros, and ``torch.func`` an error.
    """
    count = derivatives.count

    def run(keyset: Any, *arguments: Any) -> Any:
        tensors, operands, settings = arguments[:count], arguments[count], arguments[count + 1 :]
        # That of the base class: torch.autograd.Function.apply would begin at the first of all transforms again.
        apply = super(torch.autograd.Function, _Differentiable).apply
        if not torch._C._are_functorch_transforms_active():
            return apply(derivatives, keyset, settings, *tensors, *operands)
        with enable_single_level_autograd_function():
            return apply(derivatives, keyset, settings, *tensors, *operands)

    library.impl(derivatives.operator._schema.name.split("::")[1], run, "Autograd", with_keyset=True)


class _Differentiable(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped here
    """An operator in the graph of one level: of autograd itself, or of one transform of ``torch.func``."""

    @staticmethod
    def forward(ctx: Any, derivatives: Derivatives, keyset: Any, settings: Tensors, *tensors: Any) -> Any:
        """The operator below this level. Gradients and tangents of lower levels, which the class switches off, go on."""
        ctx.derivatives, ctx.settings = derivatives, settings
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        inputs, operands = tensors[: derivatives.count], list(tensors[derivatives.count :])
        below = keyset & torch._C._after_autograd_keyset
        if not torch._C._are_functorch_transforms_active():
            with torch._C._AutoDispatchBelowAutograd():
                return derivatives.operator.redispatch(below, *inputs, operands, *settings)
        with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True), torch._C._AutoDispatchBelowAutograd():
            return derivatives.operator.redispatch(below, *inputs, operands, *settings)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Gradients of the tensors; of operands and settings there are none."""
        if torch.compiler.is_exporting() and torch._C._are_functorch_transforms_active():
            # torch.export refuses this for PyTorch's own operators; here it would write a tensor without content.
            raise UnsupportedError(
                "torch.export cannot write reverse mode of torch.func (grad, vjp, jacrev) around stof.torch.attention; use "
                "torch.autograd.grad or torch.func.jvp in what is exported"
            )
        count = ctx.derivatives.count
        saved = ctx.saved_tensors  # a checkpoint gives them once
        tensors, operands = saved[:count], list(saved[count:])
        needed = ctx.needs_input_grad[3 : 3 + count]
        gradients = ctx.derivatives.pull_back(tensors, (operands, *ctx.settings), grads, needed)
        return (None, None, None, *gradients, *([None] * len(operands)))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """Tangents of the results."""
        count = ctx.derivatives.count
        with forward_ad._set_fwd_grad_enabled(True):
            # Without the tangents of this level. Level 0 is the only one: torch.func nests by wrapping tensors.
            primals = [forward_ad.unpack_dual(t, level=0).primal for t in ctx.saved_tensors]
            input_tangents = [
                torch.zeros_like(primal) if tangent is None else tangent
                for primal, tangent in zip(primals[:count], tangents[3 : 3 + count], strict=True)
            ]
            return ctx.derivatives.push_forward(primals[:count], (primals[count:], *ctx.settings), input_tangents)
