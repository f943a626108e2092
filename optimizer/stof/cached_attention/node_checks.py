# SPDX-License-Identifier: Apache-2.0
"""Checks of what GroupQueryAttention, SparseAttention and PagedAttention nodes have in common; each refuses with a reason."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from stof.attention.limits import limits_of, most_heads, most_length, type_names
from stof.errors import UnsupportedError
from stof.symbolic import Int, Symbolic, integer

_KIND_WORDS = {int: "an integer", float: "a float", bytes: "a string"}
_SOFTCAPS = (1e-30, 1e30)


def check_attribute_types(attributes: Mapping[str, Any], types: Mapping[str, type]) -> None:
    """Refuses attributes that are not among the known ones, and values that are not of their type."""
    for name, value in attributes.items():
        if name not in types:
            raise UnsupportedError(f"it has attribute {name!r}, whose meaning is not known")
        if not isinstance(value, types[name]):
            raise UnsupportedError(f"its attribute {name} is {value!r}, expected {_KIND_WORDS[types[name]]}")


def check_flags(attributes: Mapping[str, Any], names: Iterable[str]) -> None:
    """Refuses attributes that are neither 0 nor 1."""
    for name in names:
        if attributes.get(name, 0) not in (0, 1):
            raise UnsupportedError(f"its attribute {name} is {attributes[name]}, expected 0 or 1")


def check_numbers(attributes: Mapping[str, Any]) -> None:
    """Refuses values of scale, softcap and qk_norm_epsilon that the operators do not take."""
    for name in ("scale", "softcap", "qk_norm_epsilon"):
        if not math.isfinite(attributes.get(name, 0.0)) or attributes.get(name, 0.0) < 0:
            raise UnsupportedError(f"{name} is {attributes[name]}, expected a number from 0 on")
    softcap = attributes.get("softcap", 0.0)
    if softcap and not _SOFTCAPS[0] <= softcap <= _SOFTCAPS[1]:
        raise UnsupportedError(f"softcap is {softcap}, expected 0 or {_SOFTCAPS[0]:g} to {_SOFTCAPS[1]:g}")


def read_window(attributes: Mapping[str, Any]) -> int:
    """The window of ``local_window_size``; 0: none."""
    window = int(attributes.get("local_window_size", -1))
    if window == 0 or not -1 <= window <= most_length():
        raise UnsupportedError(f"local_window_size is {window}, expected -1 or 1 to {most_length()}")
    return max(window, 0)


def read_head_counts(attributes: Mapping[str, Any]) -> tuple[int, int]:
    """H and G."""
    heads, groups = (int(attributes.get(n, 0)) for n in ("num_heads", "kv_num_heads"))
    if not 0 < groups <= heads <= most_heads() or heads % groups:
        raise UnsupportedError(f"it has {heads} query heads on {groups} key heads, expected a multiple of them")
    return heads, groups


def read_shape(symbolic: Symbolic, name: str, tensor: str, rank: int) -> tuple[Int, ...]:
    """The shape of an input; ``name`` is that of the schema."""
    shape = symbolic.shape(tensor)
    if shape is None or len(shape) != rank:
        problem = "is not known" if shape is None else f"has {len(shape)} axes, expected {rank}"
        raise UnsupportedError(f"the shape of {name} {tensor!r} {problem}")
    return tuple(shape)


def read_head_size(columns: Int, cache: Int, counts: tuple[int, int], *, is_packed: bool) -> int:
    """D, from the columns of query or, where these are not known, from the last axis of the cache.

    Args:
        columns: of query, H·D, or (H + 2G)·D where query, key and value lie in one tensor.
        cache: the last axis of the key cache.
        counts: H and G.
        is_packed: whether they lie in one tensor.
    """
    heads, groups = counts
    whole = heads + 2 * groups if is_packed else heads
    size = columns.divide(integer(whole))
    number = None if size is None else size.constant
    if number is None and columns.constant is not None:
        raise UnsupportedError(f"query has {columns.constant} columns, no multiple of {whole} heads")
    number = cache.constant if number is None else number
    if number is None:
        raise UnsupportedError("the head size is not known before the run")
    return number


def check_columns(name: str, columns: Int, groups: int, head_size: int) -> None:
    """Refuses keys and values whose columns are not those of G heads."""
    if columns.constant not in (None, groups * head_size):
        raise UnsupportedError(f"{name} has {columns.constant} columns, expected {groups} heads of {head_size}")


def check_element_types(symbolic: Symbolic, dtype: int, tensors: Mapping[str, str], caches: Sequence[str]) -> None:
    """Refuses inputs whose element type is not that of query.

    Args:
        symbolic: facts of the model.
        dtype: of query.
        tensors: by their names in the schema; empty where absent.
        caches: the names of caches, whose other types mean that they are quantized.
    """
    for name, tensor in tensors.items():
        element_type = symbolic.dtype(tensor) if tensor else dtype
        if element_type not in (0, dtype):
            quantized = "its cache is quantized: " if name in caches else ""
            raise UnsupportedError(
                f"{quantized}{name} {tensor!r} is {type_names([element_type], 'or').strip()}, expected query's "
                f"{type_names([dtype], 'or').strip()}"
            )


def check_kernel_limits(dtype: int, head_size: int, target: str) -> None:
    """Refuses element types and head sizes that no kernel of the target has."""
    types = limits_of(target)
    if dtype not in types:
        stated_type = type_names([dtype], "or") if dtype else "not known"
        raise UnsupportedError(
            f"the element type of query is {stated_type.strip()}, expected {type_names(types, 'or')}"
        )
    limits = types[dtype]
    if not 1 <= head_size <= limits.largest_head_size:
        raise UnsupportedError(f"no kernel: head size {head_size}, expected 1 to {limits.largest_head_size}")
    if head_size % limits.head_size_multiple_of:
        raise UnsupportedError(
            f"no kernel: head size {head_size}, expected a multiple of {limits.head_size_multiple_of}"
        )


def check_vectors(symbolic: Symbolic, vectors: Iterable[tuple[str, str, int]]) -> None:
    """Refuses vectors (name, tensor, size) of other shapes than [size]; the schema does not check them."""
    for name, tensor, size in vectors:
        shape = symbolic.shape(tensor) if tensor else None
        if shape is not None and (len(shape) != 1 or shape[0].constant not in (None, size)):
            raise UnsupportedError(f"{name} has shape {[str(d) for d in shape]}, expected [{size}]")


def check_cache_heads(shapes: Mapping[str, tuple[Int, ...]], head_axis: int, groups: int, head_size: int) -> None:
    """Refuses caches, by name, with other numbers of heads or head sizes."""
    for name, shape in shapes.items():
        for axis, size, what in ((head_axis, groups, "heads"), (3, head_size, "as head size")):
            if shape[axis].constant not in (None, size):
                raise UnsupportedError(f"{name} has {shape[axis].constant} {what}, expected {size}")


def check_equal_sizes(names: Sequence[str], sizes: tuple[Int, Int], what: str) -> None:
    """Refuses two inputs of which a size differs; ``what`` is the size's word in the message, with a blank before it."""
    if None not in (sizes[0].constant, sizes[1].constant) and sizes[0] != sizes[1]:
        raise UnsupportedError(f"{names[0]} has {sizes[0]}{what}, {names[1]} {sizes[1]}")


def read_rotary_size(symbolic: Symbolic, cos_cache: str, most: int, reason: str) -> int:
    """R of a node whose do_rotary is 1; 0 where it is not known before the run.

    Args:
        symbolic: facts of the model.
        cos_cache: the tensor; empty where it is absent.
        most: columns that it may have.
        reason: why, for the message.
    """
    if not cos_cache:
        raise UnsupportedError("do_rotary is 1, and it has no cos_cache")
    size = read_shape(symbolic, "cos_cache", cos_cache, 2)[1].constant
    if size is not None and not 1 <= size <= most:
        raise UnsupportedError(f"cos_cache has {size} columns, expected 1 to {most}, {reason}")
    return 2 * (size or 0)
