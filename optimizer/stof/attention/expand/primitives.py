# SPDX-License-Identifier: Apache-2.0
"""Appends attention in primitive nodes, as an unfused graph has it, and the small pieces that all expanders need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from onnx import TensorProto, helper

from stof.errors import UnsupportedError
from stof.graph.node_builder import Builder
from stof.mask.strength import LOWEST
from stof.symbolic import Int, Symbolic

_FLOATS = frozenset({int(TensorProto.FLOAT), int(TensorProto.FLOAT16), int(TensorProto.BFLOAT16)})


@dataclass(frozen=True)
class ScoreMask:
    """A mask of the scores: a tensor that broadcasts to [B, H, S, T], fp32 and added, or boolean and true where allowed.

    ``fill`` replaces the scores that a boolean mask forbids.
    """

    tensor: str
    boolean: bool = False
    fill: float = -np.inf


@dataclass(frozen=True)
class AttentionCore:
    """Operands and attributes of one attention: query [B, H, S, D], key [B, G, T, D], value [B, G, T, Dv] of one float type."""

    query: str
    key: str
    value: str
    heads: int
    groups: int
    scale: float
    dtype: int
    softcap: float = 0.0
    masks: Sequence[ScoreMask] = field(default_factory=tuple)
    guard: bool = False  # fully masked rows give 0, not NaN


def append_attention(builder: Builder, core: AttentionCore, softmax: str) -> str:
    """Appends the nodes of attention and returns their result [B, H, S, Dv]. ``softmax`` names the softmax node."""
    b = builder
    repeat = core.heads // core.groups
    is_16_bit = core.dtype != TensorProto.FLOAT
    key, value = (repeat_heads(b, t, core.heads, repeat) for t in (core.key, core.value))
    scores = b.add("MatMul", [core.query, b.add("Transpose", [key], perm=[0, 1, 3, 2])])
    if is_16_bit:  # runtimes apply scale and softcap in fp32
        scores = b.add("Cast", [scores], to=TensorProto.FLOAT)
    if core.scale != 1.0:
        scores = b.add("Mul", [scores, b.constant(core.scale, np.float32)])
    if core.softcap:
        cap = b.constant(core.softcap, np.float32)
        scores = b.add("Mul", [b.add("Tanh", [b.add("Div", [scores, cap])]), cap])
    for mask in core.masks:
        if mask.boolean:
            scores = b.add("Where", [mask.tensor, scores, b.constant(mask.fill, np.float32)])
        else:
            scores = b.add("Add", [scores, mask.tensor])
    weights = b.add("Softmax", [scores], axis=-1)
    b.nodes[-1].name = softmax
    if core.guard and core.masks:
        weights = b.add("Where", [b.add("IsNaN", [weights]), b.constant(0, np.float32), weights])
    if is_16_bit:
        weights = b.add("Cast", [weights], to=core.dtype)
    return b.add("MatMul", [weights, value])


def repeat_heads(b: Builder, tensor: str, heads: int, repeat: int) -> str:
    """[B, G, T, D] with every head repeated: [B, H, T, D]."""
    if repeat == 1:
        return tensor
    wide = b.add("Expand", [b.unsqueeze(tensor, [2]), b.constant([1, 1, repeat, 1, 1])])
    shape = [b.constant([0, heads]), axis_size(b, tensor, 2), axis_size(b, tensor, 3)]
    return b.add("Reshape", [wide, b.add("Concat", shape, axis=0)])


def axis_size(b: Builder, tensor: str, axis: int) -> str:
    """The size of one axis as int64[1]."""
    return b.add("Gather", [b.add("Shape", [tensor]), b.constant([axis])], axis=0)


def squeeze_scalar(b: Builder, vector: str) -> str:
    """A tensor [1] as a scalar."""
    return b.add("Squeeze", [vector, b.constant([0])])


def positions(b: Builder, count: str) -> str:
    """The positions 0, 1, ..., ``count`` - 1; ``count`` is int64[1]."""
    return b.add("Range", [b.constant(0), squeeze_scalar(b, count), b.constant(1)])


def split_heads(b: Builder, tensor: str, heads: int) -> str:
    """[B, S, H * D] as [B, H, S, D]."""
    return b.add("Transpose", [b.add("Reshape", [tensor, b.constant([0, 0, heads, -1])])], perm=[0, 2, 1, 3])


def merge_heads(b: Builder, tensor: str, width: int) -> str:
    """[B, H, S, D] as [B, S, H * D]; ``width`` is H * D."""
    moved = b.add("Transpose", [tensor], perm=[0, 2, 1, 3])
    return b.add("Reshape", [moved, b.constant([0, 0, width])])


@dataclass(frozen=True)
class Band:
    """The keys that a query at position p attends: p - left <= k <= p + right; None: no bound on that side."""

    left: int | None = None
    right: int | None = None


def band_masks(b: Builder, query: str, key: str, limits: Band, offset: str | None) -> list[ScoreMask]:
    """Boolean masks [.., S, T] of a band over query [B, H, S, D] and key [B, G, T, D].

    ``offset`` is the position of the first query, an int64 tensor that broadcasts to [.., S, 1].
    """
    if limits.left is None and limits.right is None:
        return []
    rows = b.unsqueeze(positions(b, axis_size(b, query, 2)), [1])
    keys = b.unsqueeze(positions(b, axis_size(b, key, 2)), [0])
    if offset is not None:
        rows = b.add("Add", [rows, offset])
    masks = []
    if limits.right is not None:
        last = b.add("Add", [rows, b.constant(limits.right)]) if limits.right else rows
        masks.append(ScoreMask(b.add("LessOrEqual", [keys, last]), boolean=True))
    if limits.left is not None:
        first = b.add("Sub", [rows, b.constant(limits.left)]) if limits.left else rows
        masks.append(ScoreMask(b.add("GreaterOrEqual", [keys, first]), boolean=True))
    return masks


def require_shape(symbolic: Symbolic, tensor: str, role: str, ranks: Sequence[int]) -> tuple[Int, ...]:
    """The shape of an operand of a fused node.

    Raises:
        UnsupportedError: when the rank is unknown or another one.
    """
    shape = symbolic.shape(tensor)
    if shape is None or len(shape) not in ranks:
        rank = "unknown rank" if shape is None else f"rank {len(shape)}"
        raise UnsupportedError(f"{role} {tensor!r} has {rank}, expected {' or '.join(map(str, ranks))}")
    return shape


def require_size(size: Int | None, what: str) -> int:
    """A size that must be static.

    Raises:
        UnsupportedError: when it is not known, or 0.
    """
    number = None if size is None else size.constant
    if not number:
        raise UnsupportedError(f"{what} is not a known number but {size}")
    return number


def require_float_type(symbolic: Symbolic, tensor: str) -> int:
    """The element type of the query.

    Raises:
        UnsupportedError: when it is not fp32, fp16 or bf16.
    """
    dtype = symbolic.dtype(tensor)
    if dtype not in _FLOATS:
        name = TensorProto.DataType.Name(dtype) if dtype else "unknown"
        raise UnsupportedError(f"{tensor!r} has element type {name}, expected fp32, fp16 or bf16")
    return dtype


def replace_lowest_by_inf(b: Builder, symbolic: Symbolic, tensor: str, kind: int) -> str:
    """An additive mask with -inf in place of the type's lowest finite number.

    ONNX Runtime gives zeros for rows that hold nothing but that number. The specification promises zeros for -inf only,
    but the optimized model has to match what the runtime computes.
    """
    if kind not in _FLOATS:
        return tensor
    dtype = np.dtype(helper.tensor_dtype_to_np_dtype(kind))
    lowest = -LOWEST[kind]
    array = symbolic.constant(tensor)
    if array is not None and not bool(np.any(array.astype(np.float64) <= lowest)):
        return tensor
    low = b.add("LessOrEqual", [tensor, b.constant(lowest, dtype)])
    return b.add("Where", [low, b.constant(-np.inf, dtype), tensor])


def additive_mask(b: Builder, symbolic: Symbolic, tensor: str) -> str:
    """A float mask in fp32, as the runtime reads it: see :func:`replace_lowest_by_inf`."""
    kind = symbolic.dtype(tensor)
    return cast_to_fp32(b, replace_lowest_by_inf(b, symbolic, tensor, kind), kind)


def prepend_past(b: Builder, past: tuple[str, str], present: tuple[str, str]) -> tuple[str, str]:
    """Keys and values [B, G, T, D] behind those of earlier steps."""
    return b.add("Concat", [past[0], present[0]], axis=2), b.add("Concat", [past[1], present[1]], axis=2)


def check_groups(heads: int, groups: int) -> None:
    """Refuses query heads that cannot share key heads evenly.

    Raises:
        UnsupportedError: with both numbers.
    """
    if min(heads, groups) < 1 or heads % groups:
        raise UnsupportedError(f"{heads} query heads are no multiple of {groups} key heads")


def cast_to_fp32(b: Builder, tensor: str, kind: int) -> str:
    """A mask or bias of element type ``kind`` as fp32."""
    return tensor if kind == TensorProto.FLOAT else b.add("Cast", [tensor], to=TensorProto.FLOAT)
