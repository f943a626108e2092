# SPDX-License-Identifier: Apache-2.0
"""Rules of the operators for ``torch.func.vmap``: the axis that is mapped over becomes part of the batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from stof.errors import UnsupportedError
from stof.mask.expression import MaskExpression, rebuild
from stof.mask.expression_nodes import B, Binary, Constant, Lookup, Node, fold, is_table_name


def register_batching(library: Any, operator: Any, count: int) -> None:
    """Registers the rules of an operator of ``count`` tensors [B, ..], operands of a mask, and settings.

    There are two: ``is_grads_batched`` and ``vectorize`` of ``torch.autograd`` use an older vmap than ``torch.func``.
    """
    name = operator._schema.name
    torch.library.register_vmap(name, partial(_map_of_func, operator, count), lib=library)
    library.impl(name.split("::")[1], partial(_map_of_autograd, operator, count), "Batched")


def _map_of_func(operator: Any, count: int, info: Any, axes: Sequence[Any], *arguments: Any) -> tuple[Any, Any]:
    results = _map(operator, count, info.batch_size, axes, arguments)
    return results, (0,) * len(results)


def _map_of_autograd(operator: Any, count: int, *arguments: Any) -> tuple[Any, ...]:
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    sizes = set()

    def unwrap(argument: Any) -> Any:
        if isinstance(argument, list):
            return [unwrap(a) for a in argument]
        if not isinstance(argument, torch.Tensor) or not torch._C._functorch.is_legacy_batchedtensor(argument):
            return argument
        unwrapped = torch._remove_batch_dim(argument, level, 0, 0)
        sizes.add(unwrapped.shape[0])
        if 0 in sizes:  # a size that the call above gives to a tensor of another level
            raise UnsupportedError(
                "stof.torch.attention within is_grads_batched or vectorize of torch.autograd, one inside the other; use "
                "torch.func, whose transforms nest"
            )
        return unwrapped

    plain_arguments = [unwrap(a) for a in arguments]
    axes = [_axes_of_unwrapped(*pair) for pair in zip(arguments, plain_arguments, strict=True)]
    results = _map(operator, count, max(sizes), axes, plain_arguments)
    return tuple(torch._add_batch_dim(t, 0, level) for t in results)


def _axes_of_unwrapped(before: Any, after: Any) -> Any:
    if isinstance(before, list):
        return [_axes_of_unwrapped(*pair) for pair in zip(before, after, strict=True)]
    return None if before is after else 0


def _map(operator: Any, count: int, size: Any, axes: Sequence[Any], arguments: Sequence[Any]) -> tuple[Any, ...]:
    """The results for each index of the mapped axes, which have one size, as their first axis."""
    tensors, operands, (mask, roles, *settings) = arguments[:count], arguments[count], arguments[count + 1 :]
    named = dict(zip(roles.split(), zip(operands, axes[count], strict=True), strict=True))
    batch = _size_without(tensors[0], axes[0])
    text = _fold_batch(mask, batch, named)
    if text is None:
        return _run_one_by_one(operator, size, axes, arguments)
    folded_tensors = [_fold(t, axis, size) for t, axis in zip(tensors, axes[:count], strict=True)]
    vectors = [_fold_operand(role, tensor, axis, size, batch) for role, (tensor, axis) in named.items()]
    results = operator(*folded_tensors, vectors, text, roles, *settings)
    return tuple(t.unflatten(0, (size, batch)) for t in results)


def _size_without(tensor: Any, mapped: int | None) -> Any:
    """The size of the first axis besides the mapped one."""
    return tensor.shape[1 if mapped == 0 else 0]


def _fold(tensor: Any, mapped: int | None, size: Any) -> Any:
    """[N, B, ..] as [N B, ..], of a tensor that may be the same for all N."""
    if mapped is None:
        return tensor.expand(size, *tensor.shape).flatten(0, 1)
    return tensor.movedim(mapped, 0).flatten(0, 1)


def _fold_operand(role: str, tensor: Any, mapped: int | None, size: Any, batch: Any) -> Any:
    """A table as it is. A vector [1 or B, ..] as [N B, ..], or still [1, ..] where it serves every batch."""
    if is_table_name(role) or (mapped is None and tensor.shape[0] == 1):
        return tensor
    if _size_without(tensor, mapped) != batch:
        tensor = tensor if mapped is None else tensor.movedim(mapped, 0)
        tensor, mapped = tensor.expand(-1, batch, *tensor.shape[2:]), 0
    return _fold(tensor, mapped, size)


def _run_one_by_one(operator: Any, size: int, axes: Sequence[Any], arguments: Sequence[Any]) -> tuple[Any, ...]:
    """The results for each index in turn: where a table differs, the operator itself does."""

    def pick(argument: Any, axis: Any, index: int) -> Any:
        if isinstance(argument, list):
            return [pick(*pair, index) for pair in zip(argument, axis, strict=True)]
        return argument if axis is None else argument.select(axis, index)

    result_tuples = [
        operator(*(pick(a, axis, i) for a, axis in zip(arguments, axes, strict=True))) for i in range(size)
    ]
    return tuple(torch.stack(results) for results in zip(*result_tuples, strict=True))


def _fold_batch(mask: str, batch: Any, operands: Mapping[str, tuple[Any, Any]]) -> str | None:
    """The expression where ``b`` counts N·B batches: the index within the B of one call is ``b % B``.

    Vectors are read by ``b`` itself, because they are folded alike. None where that cannot be expressed.
    """
    if any(is_table_name(role) and axis is not None for role, (_, axis) in operands.items()):
        return None
    expression = MaskExpression.parse(mask)
    if "b" not in expression.reads and not expression.vectors:
        return mask
    is_expressed = True

    def combine(node: Node, children: Sequence[Node]) -> Node:
        nonlocal is_expressed
        if node == B:
            return Constant(0) if batch <= 1 else Binary("%", B, Constant(int(batch)))
        if not isinstance(node, Lookup):
            return rebuild(node, children)
        if node.is_table:
            shape = operands[node.name][0].shape if node.name in operands else ()
            # A size of 1 serves every batch, where the index is b itself.
            return Lookup(node.name, tuple(
                Constant(0) if index == B and axis < len(shape) and shape[axis] == 1 else child
                for axis, (index, child) in enumerate(zip(node.indices, children, strict=True))
            ))  # fmt: skip
        is_expressed &= node.indices[0] == B
        return Lookup(node.name, (B, *children[1:]))

    folded = MaskExpression(fold(expression.root, combine))
    return folded.text if is_expressed else None
