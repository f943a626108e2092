# SPDX-License-Identifier: Apache-2.0
"""Finds attention nodes with a KV cache, contiguous or paged, and says why some cannot be replaced.

Source: the operator's schema in ONNX Runtime 1.31 and 1.32. A node without past or without present has no cache: attention
sites cover it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import onnx
from onnx import TensorProto

from stof.attention.limits import limits_of, type_names
from stof.cached_attention.block_layout import BlockLayout
from stof.cached_attention.node_site import MICROSOFT
from stof.cached_attention.paged.find import read_paged_site, reads_pages
from stof.cached_attention.paged.site import PagedSite
from stof.cached_attention.site import GROUP_QUERY, INPUT_INDEX, INPUTS, OP, QUANTIZED, CacheSite
from stof.cached_attention.sparse_node import LayoutKey, as_group_query, check_sparse, is_sparse, read_node_layout
from stof.errors import UnsupportedError
from stof.graph.index import GraphIndex, all_nodes, describe, domain_of, subgraphs
from stof.graph.names import FreshNames
from stof.graph.node_fields import attributes_of, input_of, output_of
from stof.runtime.library import op_limits
from stof.symbolic import Int, Symbolic, integer
from stof.symbolic.algebra.piecewise import to_int

# The attributes of the schema, with their types.
_ATTRIBUTES: dict[str, type] = {
    **dict.fromkeys(("num_heads", "kv_num_heads", "local_window_size", "do_rotary", "rotary_interleaved"), int),
    **dict.fromkeys(("causal", "smooth_softmax", "sliding_window_cache", "qk_output", "kv_cache_bit_width"), int),
    **dict.fromkeys(("scale", "softcap", "qk_norm_epsilon"), float),
    **dict.fromkeys(("k_quant_type", "v_quant_type"), bytes),
}
_FLAGS = {
    **dict.fromkeys(("do_rotary", "rotary_interleaved", "causal", "sliding_window_cache"), (0, 1)),
    "smooth_softmax": (-1, 0, 1),  # -1: not given
}
_MOST_HEADS = 1 << 16
_LARGEST_WINDOW = 1 << 22  # as lengths
_SOFTCAPS = (1e-30, 1e30)
_SCALES = {b"PER_TENSOR": "tensor", b"PER_CHANNEL": "channel"}
_BITS = 8  # of a quantized element


@dataclass(frozen=True)
class CacheCandidate:
    """A node with a cache: a site, or the reason why it cannot be replaced."""

    name: str
    site: CacheSite | PagedSite | None
    reason: str = ""


def is_group_query(node: onnx.NodeProto) -> bool:
    """Whether a node is ONNX Runtime's GroupQueryAttention."""
    return domain_of(node) == MICROSOFT and node.op_type == GROUP_QUERY


def has_cache(node: onnx.NodeProto) -> bool:
    """Whether a GroupQueryAttention reads a past and writes a present."""
    return any(input_of(node, i) for i in (3, 4)) and any(output_of(node, i) for i in (1, 2))


def reads_cache(node: onnx.NodeProto) -> bool:
    """Whether a node is attention over a KV cache, of a kind that the operator replaces."""
    return is_sparse(node) or reads_pages(node) or (is_group_query(node) and has_cache(node))


def find_candidates(model: onnx.ModelProto, symbolic: Symbolic, target: str) -> list[CacheCandidate]:
    """The nodes with a cache, in the order of the graph; those of subgraphs are refused.

    Args:
        model: its functions that hold such nodes are inlined.
        symbolic: facts of the model.
        target: of ``--target``, whose limits hold.
    """
    index = GraphIndex(model.graph)
    names = FreshNames()
    found: list[CacheCandidate] = []
    layouts: dict[LayoutKey, BlockLayout] = {}
    for node, outer in _nodes(model.graph):
        if not reads_cache(node):
            continue
        name = names.make(node.name or f"{node.op_type} of {node.output[0] or output_of(node, 1)}")
        try:
            if outer is not None:
                raise UnsupportedError(f"it lies in a subgraph of {describe(outer)}, where caches are not replaced")
            site: CacheSite | PagedSite
            if reads_pages(node):
                site = read_paged_site(name, node, index, symbolic, target)
            else:
                site = _read_site(name, node, index, symbolic, target, layouts)
            found.append(CacheCandidate(name, site))
        except UnsupportedError as error:
            found.append(CacheCandidate(name, None, str(error)))
    return found


def _nodes(graph: onnx.GraphProto) -> Iterator[tuple[onnx.NodeProto, onnx.NodeProto | None]]:
    """All nodes, each with the node of the main graph in whose subgraph it lies."""
    for node in graph.node:
        yield node, None
        for inner in subgraphs(node):
            yield from ((n, node) for n in all_nodes(inner.node))


def _read_site(
    name: str,
    node: onnx.NodeProto,
    index: GraphIndex,
    symbolic: Symbolic,
    target: str,
    layouts: dict[LayoutKey, BlockLayout],
) -> CacheSite:
    """The site of a node.

    Raises:
        UnsupportedError: naming what the operator does not support.
    """
    original, window, sliding = node, 0, False
    if is_sparse(original):
        check_sparse(original)
        node = as_group_query(original)
    else:
        _refuse_signature(node, index)
        window, sliding = _refuse_attributes(node)
    attributes = attributes_of(node)
    heads, groups = (int(attributes.get(n, 0)) for n in ("num_heads", "kv_num_heads"))
    if not 0 < groups <= heads <= _MOST_HEADS or heads % groups:
        raise UnsupportedError(f"it has {heads} query heads on {groups} key heads, expected a multiple of them")
    query = _shape(symbolic, node, 0, 3)
    past = _shape(symbolic, node, 3, 4)
    head_size = _head_size(symbolic, node, (heads, groups), query, past)
    dtype = symbolic.dtype(node.input[0])
    scales = _read_scales(node)
    _check_types(symbolic, node, dtype, head_size, target, is_quantized=bool(scales))
    quantized = _quantized_type(symbolic, node, scales, (groups, head_size)) if scales else 0
    _check_caches(symbolic, node, past, (groups, head_size))
    capacity = past[2]
    if sliding and capacity.constant is not None and capacity.constant < window:
        raise UnsupportedError(
            f"its sliding-window cache has {capacity.constant} rows, fewer than the window of {window}"
        )
    rotary = _rotary_size(symbolic, node, head_size) if attributes.get("do_rotary", 0) else 0
    _check_vectors(symbolic, node, heads, head_size)
    return CacheSite(
        name=name,
        node=original,
        num_heads=heads,
        kv_num_heads=groups,
        head_size=head_size,
        dtype=dtype,
        window=window,
        rotary_size=rotary,
        sliding=sliding,
        batch=query[0],
        queries=query[1],
        capacity=capacity,
        total=_total(symbolic, input_of(node, 6)),
        layout=read_node_layout(original, symbolic, heads, layouts) if is_sparse(original) else None,
        quantized=quantized,
        scales=scales or ("", ""),
    )


def _refuse_signature(node: onnx.NodeProto, index: GraphIndex) -> None:
    for i, name in enumerate(node.input):
        if not name:
            continue
        if i == 16:
            raise UnsupportedError("it has input query_seqlens: rows with different numbers of queries")
        if i >= len(INPUTS):
            raise UnsupportedError(f"it has input {i}, {name!r}, whose meaning is not known")
    for i, name in enumerate(node.output):
        if name and i == 3 and (name in index.outputs or name in index.captured or index.consumers(name)):
            raise UnsupportedError("its output output_qk [B, H, S, T] is used")
        if name and i > 3:
            raise UnsupportedError(f"it has output {i}, {name!r}, whose meaning is not known")
    for some in ((3, 4), (14, 15), (1, 2), (7, 8)):
        given = [INPUTS[i] for i in some if input_of(node, i)]
        if len(given) == 1:
            missing = next(INPUTS[i] for i in some if INPUTS[i] not in given)
            raise UnsupportedError(f"it has input {given[0]} and no {missing}")
    for i in (0, 5, 6):
        if not input_of(node, i):
            raise UnsupportedError(f"it has no input {INPUTS[i]}")
    for i in (0, 1, 2):
        if not output_of(node, i):
            raise UnsupportedError(f"it does not write {('output', 'present_key', 'present_value')[i]}")


def _refuse_attributes(node: onnx.NodeProto) -> tuple[int, bool]:
    """Checks the attributes. Returns the window, 0 for none, and whether it is a sliding-window cache."""
    attributes = attributes_of(node)
    if unknown := sorted(set(attributes) - set(_ATTRIBUTES)):
        raise UnsupportedError(f"it has attribute {unknown[0]!r}, whose meaning is not known")
    for name, value in attributes.items():
        if not isinstance(value, _ATTRIBUTES[name]):
            words = {int: "an integer", float: "a float", bytes: "a string"}
            raise UnsupportedError(f"its attribute {name} is {value!r}, expected {words[_ATTRIBUTES[name]]}")
    for name, allowed in _FLAGS.items():
        if attributes.get(name, 0) not in allowed:
            raise UnsupportedError(f"its attribute {name} is {attributes[name]}, expected 0 or 1")
    if not attributes.get("causal", 1):
        raise UnsupportedError("causal is 0: queries attend later keys, which the cache does not hold yet")
    for name in ("scale", "softcap", "qk_norm_epsilon"):
        if not math.isfinite(attributes.get(name, 0.0)) or attributes.get(name, 0.0) < 0:
            raise UnsupportedError(f"{name} is {attributes[name]}, expected a number from 0 on")
    softcap = attributes.get("softcap", 0.0)
    if softcap and not _SOFTCAPS[0] <= softcap <= _SOFTCAPS[1]:
        raise UnsupportedError(f"softcap is {softcap}, expected 0 or {_SOFTCAPS[0]:g} to {_SOFTCAPS[1]:g}")
    window = attributes.get("local_window_size", -1)
    if window == 0 or not -1 <= window <= _LARGEST_WINDOW:
        raise UnsupportedError(f"local_window_size is {window}, expected -1 or 1 to {_LARGEST_WINDOW}")
    sliding = attributes.get("sliding_window_cache", 0) == 1
    if sliding and window < 0:
        raise UnsupportedError("sliding_window_cache is 1, and local_window_size is not given")
    if sliding and input_of(node, 10):
        raise UnsupportedError(
            "sliding_window_cache is 1 beside attention_bias, which also has columns for positions that the cache has dropped"
        )
    return max(window, 0), sliding


def _read_scales(node: onnx.NodeProto) -> tuple[str, str] | None:
    """What has a scale of its own, of keys and of values: "tensor" or "channel"; None where the cache is not quantized."""
    attributes = attributes_of(node)
    width = attributes.get("kv_cache_bit_width", 0)
    found: list[str] = []
    for prefix in ("k", "v"):
        kind, scale = attributes.get(f"{prefix}_quant_type") or b"NONE", input_of(node, INPUT_INDEX[f"{prefix}_scale"])
        if kind not in (b"NONE", *_SCALES):
            text = kind.decode(errors="replace")
            raise UnsupportedError(f"{prefix}_quant_type is {text!r}, expected NONE, PER_TENSOR or PER_CHANNEL")
        if (kind != b"NONE") != bool(scale):
            has = f"it has input {prefix}_scale" if scale else f"it has no input {prefix}_scale"
            raise UnsupportedError(f"{has}, and {prefix}_quant_type is {kind.decode()}")
        found += [_SCALES[kind]] if scale else []
    if len(found) == 1:
        raise UnsupportedError("one of keys and values is quantized alone")
    if found and width != _BITS:
        raise UnsupportedError(f"its cache is quantized to {width} bits, and kernels read {_BITS} bits alone")
    if not found and width:
        raise UnsupportedError(f"kv_cache_bit_width is {width}, and k_quant_type is NONE")
    return (found[0], found[1]) if found else None


def _quantized_type(symbolic: Symbolic, node: onnx.NodeProto, scales: tuple[str, str], sizes: tuple[int, int]) -> int:
    """The element type of quantized caches."""
    kinds = [symbolic.dtype(node.input[i]) for i in (3, 4)]
    taken = op_limits().get(OP, {}).get("storage_types", list(QUANTIZED) if not op_limits() else [])
    if kinds[0] != kinds[1] or kinds[0] not in taken:
        found = type_names(dict.fromkeys(kinds), "and").strip() if all(kinds) else "not known"
        raise UnsupportedError(
            f"its cache is quantized, and its element type is {found}, expected INT8 or FLOAT8E4M3FN"
        )
    for name, kind in zip(("k_scale", "v_scale"), scales, strict=True):
        tensor = input_of(node, INPUT_INDEX[name])
        shape = symbolic.shape(tensor)
        dims = None if shape is None else [d.constant for d in shape]
        own = symbolic.dtype(tensor)
        groups, size = sizes
        expected = {
            "tensor": [[1] * rank for rank in range(5)],
            "channel": [[groups * size], [groups, size], [groups, 1, size], [1, groups, 1, size]],
        }[kind]
        if dims is None or dims not in expected or own != TensorProto.FLOAT:
            known = "of unknown shape" if shape is None else f"{[str(d) for d in shape]}"
            wanted = "one element" if kind == "tensor" else f"[1, {groups}, 1, {size}] or [{groups * size}]"
            raise UnsupportedError(
                f"{name} {tensor!r} is {known} of {type_names([own], 'or').strip() if own else 'unknown type'}, expected "
                f"{wanted} of fp32"
            )
    return kinds[0]


def _shape(symbolic: Symbolic, node: onnx.NodeProto, i: int, rank: int) -> tuple[Int, ...]:
    found = symbolic.shape(node.input[i])
    if found is None or len(found) != rank:
        known = "is not known" if found is None else f"has {len(found)} axes, expected {rank}"
        raise UnsupportedError(f"the shape of {INPUTS[i]} {node.input[i]!r} {known}")
    return tuple(found)


def _head_size(
    symbolic: Symbolic, node: onnx.NodeProto, counts: tuple[int, int], query: tuple[Int, ...], past: tuple[Int, ...]
) -> int:
    heads, groups = counts
    whole = heads if input_of(node, 1) else heads + 2 * groups
    size = query[2].divide(integer(whole))
    number = None if size is None else size.constant
    if number is None and query[2].constant is not None:
        raise UnsupportedError(f"query has {query[2].constant} columns, no multiple of {whole} heads")
    number = past[3].constant if number is None else number
    if number is None:
        raise UnsupportedError("the head size is not known before the run")
    if not input_of(node, 1):
        return number
    for i in (1, 2):
        own = _shape(symbolic, node, i, 3)
        if own[2].constant not in (None, groups * number):
            raise UnsupportedError(f"{INPUTS[i]} has {own[2].constant} columns, expected {groups} heads of {number}")
        if own[1] != query[1] and None not in (own[1].constant, query[1].constant):
            raise UnsupportedError(f"query has {query[1]} positions, {INPUTS[i]} {own[1]}")
    return number


def _check_types(
    symbolic: Symbolic, node: onnx.NodeProto, dtype: int, head_size: int, target: str, *, is_quantized: bool
) -> None:
    types = limits_of(target)
    if dtype not in types:
        found = type_names([dtype], "or") if dtype else "not known"
        raise UnsupportedError(f"the element type of query is {found.strip()}, expected {type_names(types, 'or')}")
    for i in (1, 2, 3, 4, 7, 8, 10, 11, 14, 15):
        if is_quantized and i in (3, 4):
            continue
        own = symbolic.dtype(node.input[i]) if input_of(node, i) else dtype
        if own not in (0, dtype):
            raise UnsupportedError(
                f"{INPUTS[i]} {node.input[i]!r} is {type_names([own], 'or').strip()}, expected query's "
                f"{type_names([dtype], 'or').strip()}"
            )
    limits = types[dtype]
    if not 1 <= head_size <= limits.largest_head_size:
        raise UnsupportedError(f"no kernel: head size {head_size}, expected 1 to {limits.largest_head_size}")
    if head_size % limits.head_size_multiple_of:
        raise UnsupportedError(
            f"no kernel: head size {head_size}, expected a multiple of {limits.head_size_multiple_of}"
        )


def _check_caches(symbolic: Symbolic, node: onnx.NodeProto, past: tuple[Int, ...], sizes: tuple[int, int]) -> None:
    other = _shape(symbolic, node, 4, 4)
    for i, shape in ((3, past), (4, other)):
        for axis, size, what in ((1, sizes[0], "heads"), (3, sizes[1], "as head size")):
            if shape[axis].constant not in (None, size):
                raise UnsupportedError(f"{INPUTS[i]} has {shape[axis].constant} {what}, expected {size}")
    if None not in (past[2].constant, other[2].constant) and past[2] != other[2]:
        raise UnsupportedError(f"past_key has {past[2]} rows, past_value {other[2]}")


def _rotary_size(symbolic: Symbolic, node: onnx.NodeProto, head_size: int) -> int:
    if not input_of(node, 7):
        raise UnsupportedError("do_rotary is 1, and it has no cos_cache")
    size = _shape(symbolic, node, 7, 2)[1].constant
    if size is not None and not 1 <= 2 * size <= head_size:
        raise UnsupportedError(f"cos_cache has {size} columns, expected 1 to {head_size // 2}, half of the head size")
    return 2 * (size or 0)


def _check_vectors(symbolic: Symbolic, node: onnx.NodeProto, heads: int, head_size: int) -> None:
    """The sizes of what the schema does not check."""
    for i, size in ((11, heads), (14, head_size), (15, head_size)):
        shape = symbolic.shape(node.input[i]) if input_of(node, i) else None
        if shape is not None and (len(shape) != 1 or shape[0].constant not in (None, size)):
            raise UnsupportedError(f"{INPUTS[i]} has shape {[str(d) for d in shape]}, expected [{size}]")


def _total(symbolic: Symbolic, tensor: str) -> Int | None:
    """The value of total_sequence_length as an expression of sizes, or of an element of an input."""
    value = symbolic.value(tensor)
    elements = None if value is None else value.elements()
    return to_int(elements[0]) if elements is not None and len(elements) == 1 else None
