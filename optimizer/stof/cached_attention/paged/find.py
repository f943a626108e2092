# SPDX-License-Identifier: Apache-2.0
"""Finds PagedAttention nodes, and says why some cannot be replaced.

Source: the operator's schema in ONNX Runtime 1.31 and 1.32.
"""

from __future__ import annotations

from typing import Any

import onnx

from stof.attention.limits import type_names
from stof.cached_attention.node_checks import (
    check_attribute_types,
    check_cache_heads,
    check_columns,
    check_element_types,
    check_flags,
    check_kernel_limits,
    check_numbers,
    check_vectors,
    read_head_counts,
    read_head_size,
    read_rotary_size,
    read_shape,
    read_window,
)
from stof.cached_attention.node_site import MICROSOFT
from stof.cached_attention.paged.site import INPUT_INDEX, INPUTS, OUTPUTS, PAGED, PagedSite
from stof.errors import UnsupportedError
from stof.graph.index import GraphIndex, domain_of
from stof.graph.node_fields import attributes_of, input_of, output_of
from stof.symbolic import Int, Symbolic

_ATTRIBUTES: dict[str, type] = {
    **dict.fromkeys(("num_heads", "kv_num_heads", "local_window_size", "do_rotary", "rotary_interleaved"), int),
    **dict.fromkeys(("is_causal", "rotary_offset", "v_head_size"), int),
    **dict.fromkeys(("scale", "softcap", "qk_norm_epsilon"), float),
    **dict.fromkeys(("kv_cache_layout", "k_quant_type", "v_quant_type", "k_cache_dtype", "v_cache_dtype"), bytes),
}
_FLAGS = ("do_rotary", "rotary_interleaved", "is_causal")
_LEAST_BLOCK = 16
_REQUIRED = ("query", "key_cache", "value_cache", "cumulative_sequence_length", "past_seqlens", "block_table")
_PAIRS = (("key", "value"), ("cos_cache", "sin_cache"), ("q_norm_weight", "k_norm_weight"))
_OF_QUERY_TYPE = (
    *("key", "value", "key_cache", "value_cache", "cos_cache", "sin_cache", "head_sink"),
    *("q_norm_weight", "k_norm_weight"),
)
_INTEGERS = ("cumulative_sequence_length", "past_seqlens", "block_table", "slot_mapping", "attention_metadata")


def reads_pages(node: onnx.NodeProto) -> bool:
    """Whether a node is ONNX Runtime's PagedAttention."""
    return domain_of(node) == MICROSOFT and node.op_type == PAGED


def read_paged_site(name: str, node: onnx.NodeProto, index: GraphIndex, symbolic: Symbolic, target: str) -> PagedSite:
    """The site of a node.

    Args:
        name: for options, plans and reports.
        node: a PagedAttention of the main graph.
        index: of the graph.
        symbolic: facts of the model.
        target: of ``--target``, whose limits hold.

    Raises:
        UnsupportedError: naming what the operator does not support.
    """
    window = _refuse_attributes(node)
    _refuse_signature(node, index)
    attributes = attributes_of(node)
    heads, groups = read_head_counts(attributes)
    query = _shape(symbolic, node, "query", 2)
    cache = _shape(symbolic, node, "key_cache", 4)
    head_size = read_head_size(query[1], cache[3], (heads, groups), is_packed=not _input(node, "key"))
    for fresh in ("key", "value"):
        if _input(node, fresh):
            check_columns(fresh, _shape(symbolic, node, fresh, 2)[1], groups, head_size)
    dtype = symbolic.dtype(node.input[0])
    check_kernel_limits(dtype, head_size, target)
    check_element_types(symbolic, dtype, {n: _input(node, n) for n in _OF_QUERY_TYPE}, ("key_cache", "value_cache"))
    _check_integers(symbolic, node)
    _check_caches(cache, _shape(symbolic, node, "value_cache", 4), groups, head_size)
    past, table = _shape(symbolic, node, "past_seqlens", 1), _shape(symbolic, node, "block_table", 2)
    rotary = 0
    if attributes.get("do_rotary", 0):
        most = (head_size - int(attributes.get("rotary_offset", 0))) // 2
        reason = "half of the elements that it may rotate"
        rotary = read_rotary_size(symbolic, _input(node, "cos_cache"), most, reason)
    sizes = {"head_sink": heads, "q_norm_weight": head_size, "k_norm_weight": head_size}
    check_vectors(symbolic, [(name, _input(node, name), size) for name, size in sizes.items()])
    return PagedSite(
        name=name,
        node=node,
        num_heads=heads,
        kv_num_heads=groups,
        head_size=head_size,
        dtype=dtype,
        window=window,
        rotary_size=rotary,
        tokens=query[0],
        batch=past[0],
        blocks=cache[0],
        block_size=cache[1],
        columns=table[1],
    )


def _input(node: onnx.NodeProto, name: str) -> str:
    return input_of(node, INPUT_INDEX[name])


def _refuse_attributes(node: onnx.NodeProto) -> int:
    """Checks the attributes. Returns the window, 0 for none."""
    attributes = attributes_of(node)
    check_attribute_types(attributes, _ATTRIBUTES)
    _refuse_values(attributes)
    check_numbers(attributes)
    offset = attributes.get("rotary_offset", 0)
    if offset < 0 or offset % 8:
        raise UnsupportedError(f"rotary_offset is {offset}, expected a multiple of 8")
    return read_window(attributes)


def _refuse_values(attributes: dict[str, Any]) -> None:
    check_flags(attributes, _FLAGS)
    layout = attributes.get("kv_cache_layout", b"SEPARATE").decode(errors="replace")
    if layout not in ("", "SEPARATE"):
        raise UnsupportedError(
            f"its cache holds latent rows, which are keys and values at once: kv_cache_layout is {layout!r}"
        )
    if size := attributes.get("v_head_size", 0):
        raise UnsupportedError(f"v_head_size is {size}: values of another head size, expected 0")
    if not attributes.get("is_causal", 1):
        raise UnsupportedError("is_causal is 0: queries attend later tokens of their step")
    for name in ("k_quant_type", "v_quant_type"):
        if (kind := attributes.get(name, b"NONE")) not in (b"", b"NONE"):
            raise UnsupportedError(f"its cache is quantized: {name} is {kind.decode(errors='replace')!r}")
    for name in ("k_cache_dtype", "v_cache_dtype"):
        if (kind := attributes.get(name, b"")) not in (b"", b"float16", b"bfloat16"):
            raise UnsupportedError(f"its cache is quantized: {name} is {kind.decode(errors='replace')!r}")


def _refuse_signature(node: onnx.NodeProto, index: GraphIndex) -> None:
    for i, name in enumerate(node.input):
        if name and i >= len(INPUTS):
            raise UnsupportedError(f"it has input {i}, {name!r}, whose meaning is not known")
        if name and INPUTS[i] in ("k_scale", "v_scale"):
            raise UnsupportedError(f"its cache is quantized: it has input {INPUTS[i]}")
    for i, name in enumerate(node.output):
        if name and i >= len(OUTPUTS):
            raise UnsupportedError(f"it has output {i}, {name!r}, whose meaning is not known")
    for name in _REQUIRED:
        if not _input(node, name):
            raise UnsupportedError(f"it has no input {name}")
    for pair in _PAIRS:
        given = [name for name in pair if _input(node, name)]
        if len(given) == 1:
            raise UnsupportedError(f"it has input {given[0]} and no {next(n for n in pair if n not in given)}")
    for i, name in enumerate(OUTPUTS):
        if not output_of(node, i):
            raise UnsupportedError(f"it does not write {name}: whoever reads the cache would not see new keys")
    for cache, present in (("key_cache", 1), ("value_cache", 2)):
        readers = len(index.consumers(_input(node, cache)))
        if readers > 1:
            raise UnsupportedError(
                f"{cache} {_input(node, cache)!r} has {readers} readers, expected this node alone: it is updated in place"
            )
        if index.consumers(output_of(node, present)):
            raise UnsupportedError(
                f"{OUTPUTS[present]} is read by other nodes, expected a cache that is updated once a step"
            )


def _shape(symbolic: Symbolic, node: onnx.NodeProto, name: str, rank: int) -> tuple[Int, ...]:
    return read_shape(symbolic, name, _input(node, name), rank)


def _check_integers(symbolic: Symbolic, node: onnx.NodeProto) -> None:
    for name in _INTEGERS:
        own = symbolic.dtype(_input(node, name)) if _input(node, name) else 0
        if own not in (0, onnx.TensorProto.INT32):
            raise UnsupportedError(f"{name} is {type_names([own], 'or').strip()}, expected int32")


def _check_caches(keys: tuple[Int, ...], values: tuple[Int, ...], groups: int, head_size: int) -> None:
    shapes = {"key_cache": keys, "value_cache": values}
    check_cache_heads(shapes, 2, groups, head_size)
    for name, shape in shapes.items():
        rows = shape[1].constant
        if rows is not None and (rows < _LEAST_BLOCK or rows & (rows - 1)):
            raise UnsupportedError(f"{name} has blocks of {rows} rows, expected a power of two from {_LEAST_BLOCK} on")
    for axis in (0, 1):
        if None not in (keys[axis].constant, values[axis].constant) and keys[axis] != values[axis]:
            raise UnsupportedError(f"key_cache has {keys[axis]} as size {axis}, value_cache {values[axis]}")
