# SPDX-License-Identifier: Apache-2.0
"""The arguments of the operator ``stof::attention``, and the checks that all of its implementations share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from stof.errors import ArgumentError, UnsupportedError, shown
from stof.mask.expression import MaskExpression
from stof.mask.expression_nodes import is_table_name
from stof.mask.expression_parser import MaskSyntaxError

# The letters of shapes: B batch, H query heads, G key heads, S queries, T keys, D head size, Dv value head size.
EMPTY_ROWS = ("zero", "nan", "mean", "all")
_TYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_INTEGERS = (torch.int32, torch.int64)
_OPERAND_TYPES = {
    "pad": (torch.bool, torch.uint8, torch.int8, *_INTEGERS, torch.float32, torch.float16),
    "segment_q": _INTEGERS,
    "segment_k": _INTEGERS,
    "lengths": _INTEGERS,
    "table": (torch.bool, torch.uint8, *_INTEGERS),
}


@dataclass(frozen=True)
class AttentionSettings:
    """What a call of the operator says besides tensors (docs/reference/operators.md has the meaning of each).

    ``roles`` names the operands in their order, separated by blanks.
    """

    mask: str
    roles: str
    scale: float
    softcap: float
    empty_rows: str
    query_offset: bool


def check_arguments(query: Any, key: Any, value: Any, operands: Sequence[Any], settings: AttentionSettings) -> None:
    """Checks shapes, types and devices of a call.

    Raises:
        ArgumentError: naming the argument, what was found and what was expected.
    """
    check_kinds({"q": query, "k": key, "v": value, **dict(zip(settings.roles.split(), operands, strict=True))})
    for name, tensor in (("q", query), ("k", key), ("v", value)):
        if tensor.dim() != 4:
            axes = "[B, H, S, D]" if name == "q" else "[B, G, T, D]"
            raise ArgumentError(f"{name} has shape {list(tensor.shape)}, expected four axes {axes}")
        check_type(name, tensor)
        if tensor.dtype != query.dtype:
            raise ArgumentError(f"{name} has type {tensor.dtype}, expected that of q, {query.dtype}")
        if tensor.device != query.device:
            raise ArgumentError(f"{name} is on {tensor.device}, expected that of q, {query.device}")
    if query.device.type not in ("cpu", "cuda", "meta"):
        raise ArgumentError(f"q is on {query.device}, expected the CPU or a CUDA device")
    B, H, S, D = query.shape
    _, G, T, _ = key.shape
    if key.shape[0] != B or key.shape[3] != D:
        raise ArgumentError(f"k has shape {list(key.shape)}, expected [{B}, G, T, {D}] beside q {list(query.shape)}")
    if value.shape[0] != B or value.shape[1] != G or value.shape[2] != T:
        raise ArgumentError(f"v has shape {list(value.shape)}, expected [{B}, {G}, {T}, Dv] beside k {list(key.shape)}")
    if G == 0 or H % G != 0:
        raise ArgumentError(f"q has {H} heads and k has {G}, expected a multiple of the heads of k")
    if settings.query_offset and S > T:
        raise ArgumentError(f"q has {S} rows and k has {T}, expected at most as many rows as keys with query_offset")
    _check_settings(settings)
    for role, operand in zip(settings.roles.split(), operands, strict=True):
        _check_operand(role, operand, query.device, {"B": B, "S": S, "T": T})
    roles = settings.roles.split()
    ranks = tuple((r, t.dim(), t.dtype == torch.bool) for r, t in zip(roles, operands, strict=True) if is_table_name(r))
    _check_mask(settings.mask, ranks, frozenset(roles))


def check_kinds(tensors: Mapping[str, Any]) -> None:
    """Checks that arguments are dense tensors, which the operator's other checks and its kernels assume.

    Raises:
        ArgumentError: naming the argument, its kind, and what to do.
    """
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise ArgumentError(f"{name} is a {type(tensor).__name__}, expected a tensor")
        if tensor.is_nested:
            raise ArgumentError(
                f"{name} is a nested tensor, expected a dense one: pad the sequences and give pad, or put them one after "
                "the other and give segment_q and segment_k"
            )
        if tensor.layout != torch.strided:
            raise ArgumentError(f"{name} has layout {tensor.layout}, expected a dense tensor: {name}.to_dense()")
        if type(tensor).__name__ == "DTensor":
            raise ArgumentError(
                f"{name} is a DTensor, expected a tensor of this rank: {name}.to_local(), or call attention in local_map"
            )


def check_type(name: str, tensor: Any) -> None:
    """Checks that a tensor has a type of queries.

    Raises:
        ArgumentError: naming it, and the types.
    """
    if tensor.dtype not in _TYPES:
        raise ArgumentError(f"{name} has type {tensor.dtype}, expected fp32, fp16, bf16 or fp64")


def name_subclass(tensors: Mapping[str, Any], error: Exception) -> None:
    """Raises for a subclass whose ``__torch_dispatch__`` refused the operator; returns where there is none.

    Raises:
        UnsupportedError: naming the argument, its type, and what to do.
    """
    for name, tensor in tensors.items():
        if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            raise UnsupportedError(
                f"{name} is a {type(tensor).__name__}, whose __torch_dispatch__ does not run stof::attention; call it with "
                f"the plain tensors within: {shown(error, 500)}"
            ) from error


def as_number(name: str, value: Any) -> float:
    """A setting as a number.

    Raises:
        ArgumentError: where it is none, or a tensor, whose derivative would be lost.
    """
    if isinstance(value, torch.Tensor):
        raise ArgumentError(
            f"{name} is a tensor, expected a number, which has no derivative: {name}.item(), or "
            f"{'multiply q by it' if name == 'scale' else 'compute attention by PyTorch operators'}"
        )
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ArgumentError(f"{name} is {value!r}, expected a number") from None


def _check_settings(settings: AttentionSettings) -> None:
    if settings.empty_rows not in EMPTY_ROWS:
        raise ArgumentError(f"empty_rows is {settings.empty_rows!r}, expected {', '.join(EMPTY_ROWS)}")
    if not settings.softcap >= 0:
        raise ArgumentError(f"softcap is {settings.softcap}, expected 0 or more")
    if settings.scale != settings.scale or abs(settings.scale) == float("inf"):
        raise ArgumentError(f"scale is {settings.scale}, expected a finite number")


@lru_cache(maxsize=256)
def _check_mask(text: str, tables: tuple[tuple[str, int, bool], ...], roles: frozenset[str]) -> None:
    """Checks a mask beside the operands of a call; ``tables`` has the number of axes of each, and whether it is boolean."""
    constants = {name: np.empty((1,) * rank, bool if is_bool else np.int64) for name, rank, is_bool in tables}
    try:
        expression = MaskExpression.parse(text, constants)
    except MaskSyntaxError as error:
        raise ArgumentError(f"mask is {shown(text, 200)!r}: {error}") from error
    for name in sorted(expression.vectors - roles):
        raise ArgumentError(f"mask is {shown(text, 200)!r} and reads {name}, which is not given: {name}=...")
    if "pad" in roles and "pad" not in expression.vectors:
        raise ArgumentError(f"pad is given, and mask, {shown(text, 200)!r}, does not read it: add 'and pad[b, k]'")


def _check_operand(role: str, tensor: Any, device: Any, sizes: dict[str, Any]) -> None:
    is_table = is_table_name(role)
    types = _OPERAND_TYPES["table" if is_table else role]
    if tensor.dtype not in types:
        wanted = ", ".join(str(t).removeprefix("torch.") for t in types)
        raise ArgumentError(f"{role} has type {tensor.dtype}, expected one of {wanted}")
    if is_table:
        if not 1 <= tensor.dim() <= 4:
            raise ArgumentError(f"{role} has shape {list(tensor.shape)}, expected one to four axes")
        if tensor.device.type == "meta" and torch.device(device).type != "meta":
            raise ArgumentError(f"{role} is on meta, where it has no content, expected a table on the CPU")
        return
    if tensor.device != device:
        raise ArgumentError(f"{role} is on {tensor.device}, expected that of q, {device}")
    axes = {"pad": "BT", "segment_q": "BS", "segment_k": "BT", "lengths": "B"}[role]
    expected = [sizes[axis] for axis in axes]
    shape = list(tensor.shape)
    if len(shape) != len(expected) or shape[1:] != expected[1:] or (shape[0] != 1 and shape[0] != expected[0]):
        raise ArgumentError(f"{role} has shape {shape}, expected {expected}, or 1 in place of the batch")
