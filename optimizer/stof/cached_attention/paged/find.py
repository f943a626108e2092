# SPDX-License-Identifier: Apache-2.0
"""Finds PagedAttention nodes, and says why some cannot be replaced.

Source: the operator's schema in ONNX Runtime 1.31 and 1.32.
"""

from __future__ import annotations

import math
from typing import Any

import onnx

from stof.attention.limits import limits_of, type_names
from stof.cached_attention.node_site import MICROSOFT
from stof.cached_attention.paged.site import INPUT_INDEX, INPUTS, OUTPUTS, PAGED, PagedSite
from stof.errors import UnsupportedError
from stof.graph.index import GraphIndex, domain_of
from stof.graph.node_fields import attributes_of, input_of, output_of
from stof.symbolic import Int, Symbolic, integer

_ATTRIBUTES: dict[str, type] = {
    **dict.fromkeys(("num_heads", "kv_num_heads", "local_window_size", "do_rotary", "rotary_interleaved"), int),
    **dict.fromkeys(("is_causal", "rotary_offset", "v_head_size"), int),
    **dict.fromkeys(("scale", "softcap", "qk_norm_epsilon"), float),
    **dict.fromkeys(("kv_cache_layout", "k_quant_type", "v_quant_type", "k_cache_dtype", "v_cache_dtype"), bytes),
}
_TYPE_WORDS = {int: "an integer", float: "a float", bytes: "a string"}
_FLAGS = ("do_rotary", "rotary_interleaved", "is_causal")
_MOST_HEADS = 1 << 16
_LARGEST_WINDOW = 1 << 22
_SOFTCAPS = (1e-30, 1e30)
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
    heads, groups = (int(attributes.get(n, 0)) for n in ("num_heads", "kv_num_heads"))
    if not 0 < groups <= heads <= _MOST_HEADS or heads % groups:
        raise UnsupportedError(f"it has {heads} query heads on {groups} key heads, expected a multiple of them")
    query = _shape(symbolic, node, "query", 2)
    cache = _shape(symbolic, node, "key_cache", 4)
    head_size = _head_size(symbolic, node, (heads, groups), query, cache)
    dtype = symbolic.dtype(node.input[0])
    _check_types(symbolic, node, dtype, head_size, target)
    _check_caches(symbolic, node, cache, (groups, head_size))
    past, table = _shape(symbolic, node, "past_seqlens", 1), _shape(symbolic, node, "block_table", 2)
    rotary = _rotary_size(symbolic, node, head_size) if attributes.get("do_rotary", 0) else 0
    for vector, size in (("head_sink", heads), ("q_norm_weight", head_size), ("k_norm_weight", head_size)):
        shape = symbolic.shape(_input(node, vector)) if _input(node, vector) else None
        if shape is not None and (len(shape) != 1 or shape[0].constant not in (None, size)):
            raise UnsupportedError(f"{vector} has shape {[str(d) for d in shape]}, expected [{size}]")
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
    if unknown := sorted(set(attributes) - set(_ATTRIBUTES)):
        raise UnsupportedError(f"it has attribute {unknown[0]!r}, whose meaning is not known")
    for name, value in attributes.items():
        if not isinstance(value, _ATTRIBUTES[name]):
            raise UnsupportedError(f"its attribute {name} is {value!r}, expected {_TYPE_WORDS[_ATTRIBUTES[name]]}")
    _refuse_values(attributes)
    for name in ("scale", "softcap", "qk_norm_epsilon"):
        if not math.isfinite(attributes.get(name, 0.0)) or attributes.get(name, 0.0) < 0:
            raise UnsupportedError(f"{name} is {attributes[name]}, expected a number from 0 on")
    softcap = attributes.get("softcap", 0.0)
    if softcap and not _SOFTCAPS[0] <= softcap <= _SOFTCAPS[1]:
        raise UnsupportedError(f"softcap is {softcap}, expected 0 or {_SOFTCAPS[0]:g} to {_SOFTCAPS[1]:g}")
    offset = attributes.get("rotary_offset", 0)
    if offset < 0 or offset % 8:
        raise UnsupportedError(f"rotary_offset is {offset}, expected a multiple of 8")
    window = int(attributes.get("local_window_size", -1))
    if window == 0 or not -1 <= window <= _LARGEST_WINDOW:
        raise UnsupportedError(f"local_window_size is {window}, expected -1 or 1 to {_LARGEST_WINDOW}")
    return max(window, 0)


def _refuse_values(attributes: dict[str, Any]) -> None:
    for name in _FLAGS:
        if attributes.get(name, 0) not in (0, 1):
            raise UnsupportedError(f"its attribute {name} is {attributes[name]}, expected 0 or 1")
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
    tensor = _input(node, name)
    found = symbolic.shape(tensor)
    if found is None or len(found) != rank:
        known = "is not known" if found is None else f"has {len(found)} axes, expected {rank}"
        raise UnsupportedError(f"the shape of {name} {tensor!r} {known}")
    return tuple(found)


def _head_size(
    symbolic: Symbolic, node: onnx.NodeProto, counts: tuple[int, int], query: tuple[Int, ...], cache: tuple[Int, ...]
) -> int:
    heads, groups = counts
    whole = heads if _input(node, "key") else heads + 2 * groups
    size = query[1].divide(integer(whole))
    number = None if size is None else size.constant
    if number is None and query[1].constant is not None:
        raise UnsupportedError(f"query has {query[1].constant} columns, no multiple of {whole} heads")
    number = cache[3].constant if number is None else number
    if number is None:
        raise UnsupportedError("the head size is not known before the run")
    for name in ("key", "value"):
        if not _input(node, name):
            continue
        own = _shape(symbolic, node, name, 2)
        if own[1].constant not in (None, groups * number):
            raise UnsupportedError(f"{name} has {own[1].constant} columns, expected {groups} heads of {number}")
    return number


def _check_types(symbolic: Symbolic, node: onnx.NodeProto, dtype: int, head_size: int, target: str) -> None:
    types = limits_of(target)
    if dtype not in types:
        found = type_names([dtype], "or") if dtype else "not known"
        raise UnsupportedError(f"the element type of query is {found.strip()}, expected {type_names(types, 'or')}")
    for name in _OF_QUERY_TYPE:
        own = symbolic.dtype(_input(node, name)) if _input(node, name) else dtype
        if own not in (0, dtype):
            quantized = "its cache is quantized: " if name in ("key_cache", "value_cache") else ""
            raise UnsupportedError(
                f"{quantized}{name} {_input(node, name)!r} is {type_names([own], 'or').strip()}, expected query's "
                f"{type_names([dtype], 'or').strip()}"
            )
    for name in _INTEGERS:
        own = symbolic.dtype(_input(node, name)) if _input(node, name) else 0
        if own not in (0, onnx.TensorProto.INT32):
            raise UnsupportedError(f"{name} is {type_names([own], 'or').strip()}, expected int32")
    limits = types[dtype]
    if not 1 <= head_size <= limits.largest_head_size:
        raise UnsupportedError(f"no kernel: head size {head_size}, expected 1 to {limits.largest_head_size}")
    if head_size % limits.head_size_multiple_of:
        raise UnsupportedError(
            f"no kernel: head size {head_size}, expected a multiple of {limits.head_size_multiple_of}"
        )


def _check_caches(symbolic: Symbolic, node: onnx.NodeProto, cache: tuple[Int, ...], sizes: tuple[int, int]) -> None:
    other = _shape(symbolic, node, "value_cache", 4)
    for name, shape in (("key_cache", cache), ("value_cache", other)):
        for axis, size, what in ((2, sizes[0], "heads"), (3, sizes[1], "as head size")):
            if shape[axis].constant not in (None, size):
                raise UnsupportedError(f"{name} has {shape[axis].constant} {what}, expected {size}")
        rows = shape[1].constant
        if rows is not None and (rows < _LEAST_BLOCK or rows & (rows - 1)):
            raise UnsupportedError(f"{name} has blocks of {rows} rows, expected a power of two from {_LEAST_BLOCK} on")
    for axis in (0, 1):
        if None not in (cache[axis].constant, other[axis].constant) and cache[axis] != other[axis]:
            raise UnsupportedError(f"key_cache has {cache[axis]} as size {axis}, value_cache {other[axis]}")


def _rotary_size(symbolic: Symbolic, node: onnx.NodeProto, head_size: int) -> int:
    if not _input(node, "cos_cache"):
        raise UnsupportedError("do_rotary is 1, and it has no cos_cache")
    most = (head_size - int(attributes_of(node).get("rotary_offset", 0))) // 2
    size = _shape(symbolic, node, "cos_cache", 2)[1].constant
    if size is not None and not 1 <= size <= most:
        raise UnsupportedError(
            f"cos_cache has {size} columns, expected 1 to {most}, half of the elements that it may rotate"
        )
    return 2 * (size or 0)
