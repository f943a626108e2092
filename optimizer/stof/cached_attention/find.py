# SPDX-License-Identifier: Apache-2.0
"""Finds attention nodes with a KV cache, contiguous or paged, and says why some cannot be replaced.

Source: the operator's schema in ONNX Runtime 1.31 and 1.32. A node without past or without present has no cache: attention
sites cover it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import onnx
from onnx import TensorProto

from stof.attention.limits import type_names
from stof.cached_attention.block_layout import BlockLayout
from stof.cached_attention.node_checks import check_equal_sizes
from stof.cached_attention.node_reader import NodeReader
from stof.cached_attention.node_signature import NodeSignature
from stof.cached_attention.node_site import MICROSOFT
from stof.cached_attention.paged.find import read_paged_site, reads_pages
from stof.cached_attention.paged.site import PagedSite
from stof.cached_attention.site import GROUP_QUERY, INPUT_INDEX, INPUTS, OP, OUTPUTS, CacheSite
from stof.cached_attention.sparse_node import LayoutKey, as_group_query, check_sparse, is_sparse, read_node_layout
from stof.errors import UnsupportedError
from stof.graph.index import GraphIndex, all_nodes, describe, domain_of, subgraphs
from stof.graph.names import FreshNames
from stof.graph.node_fields import attributes_of, input_of, output_of
from stof.runtime.library import op_limits
from stof.symbolic import Int, Symbolic
from stof.symbolic.algebra.piecewise import to_int

# Attributes of the schema besides those that PagedAttention has, too.
_ATTRIBUTES: dict[str, type] = {
    **dict.fromkeys(("causal", "smooth_softmax", "sliding_window_cache", "qk_output", "kv_cache_bit_width"), int),
    **dict.fromkeys(("k_quant_type", "v_quant_type"), bytes),
}
_QUERY_SEQLENS, _OUTPUT_QK = 16, 3  # an input and an output that the operator does not have
_SIGNATURE = NodeSignature(
    inputs=dict(enumerate(INPUTS)),
    required=("query", "seqlens_k", "total_sequence_length"),
    pairs=(
        *(("past_key", "past_value"), ("q_norm_weight", "k_norm_weight")),
        *(("key", "value"), ("cos_cache", "sin_cache")),
    ),
    outputs=OUTPUTS,
    other_outputs=1,
)
_PASTS = ("past_key", "past_value")
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
    candidates: list[CacheCandidate] = []
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
            candidates.append(CacheCandidate(name, site))
        except UnsupportedError as error:
            candidates.append(CacheCandidate(name, None, str(error)))
    return candidates


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
    reader = NodeReader(node, INPUT_INDEX, symbolic, 3)
    if not is_sparse(original):
        window, sliding = _refuse_attributes(reader)
    heads, groups, head_size = reader.read_heads("past_key")
    query = reader.shape("query", 3)
    _check_new_tokens(reader, query)
    scales = _read_scales(node)
    others = ("attention_bias", *(() if scales else _PASTS))
    dtype = reader.read_type(head_size, target, others, ())
    quantized = _read_quantized_type(symbolic, node, scales, (groups, head_size)) if scales else 0
    keys, values = reader.read_caches(_PASTS, 1, groups, head_size)
    check_equal_sizes(_PASTS, (keys[2], values[2]), " rows")
    capacity = keys[2]
    if sliding and capacity.constant is not None and capacity.constant < window:
        raise UnsupportedError(
            f"its sliding-window cache has {capacity.constant} rows, fewer than the window of {window}"
        )
    rotary = reader.read_transform(heads, head_size, head_size // 2, "half of the head size")
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
    if input_of(node, _QUERY_SEQLENS):
        raise UnsupportedError("it has input query_seqlens: rows with different numbers of queries")
    _SIGNATURE.check(node)
    name = output_of(node, _OUTPUT_QK)
    if name and (name in index.outputs or name in index.captured or index.consumers(name)):
        raise UnsupportedError("its output output_qk [B, H, S, T] is used")


def _refuse_attributes(reader: NodeReader) -> tuple[int, bool]:
    """Checks the attributes. Returns the window, 0 for none, and whether it is a sliding-window cache."""
    window = reader.read_attributes(_ATTRIBUTES, ("causal", "sliding_window_cache"))
    attributes = reader.attributes
    if (smooth := attributes.get("smooth_softmax", 0)) not in (-1, 0, 1):  # -1: not given
        raise UnsupportedError(f"its attribute smooth_softmax is {smooth}, expected 0 or 1")
    if not attributes.get("causal", 1):
        raise UnsupportedError("causal is 0: queries attend later keys, which the cache does not hold yet")
    sliding = attributes.get("sliding_window_cache", 0) == 1
    if sliding and not window:
        raise UnsupportedError("sliding_window_cache is 1, and local_window_size is not given")
    if sliding and reader.input("attention_bias"):
        raise UnsupportedError(
            "sliding_window_cache is 1 beside attention_bias, which also has columns for positions that the cache has dropped"
        )
    return window, sliding


def _read_scales(node: onnx.NodeProto) -> tuple[str, str] | None:
    """What has a scale of its own, of keys and of values: "tensor" or "channel"; None where the cache is not quantized."""
    attributes = attributes_of(node)
    width = attributes.get("kv_cache_bit_width", 0)
    kinds: list[str] = []
    for prefix in ("k", "v"):
        kind, scale = attributes.get(f"{prefix}_quant_type") or b"NONE", input_of(node, INPUT_INDEX[f"{prefix}_scale"])
        if kind not in (b"NONE", *_SCALES):
            text = kind.decode(errors="replace")
            raise UnsupportedError(f"{prefix}_quant_type is {text!r}, expected NONE, PER_TENSOR or PER_CHANNEL")
        if (kind != b"NONE") != bool(scale):
            has = f"it has input {prefix}_scale" if scale else f"it has no input {prefix}_scale"
            raise UnsupportedError(f"{has}, and {prefix}_quant_type is {kind.decode()}")
        kinds += [_SCALES[kind]] if scale else []
    if len(kinds) == 1:
        raise UnsupportedError("one of keys and values is quantized alone")
    if kinds and width != _BITS:
        raise UnsupportedError(f"its cache is quantized to {width} bits, and kernels read {_BITS} bits alone")
    if not kinds and width:
        raise UnsupportedError(f"kv_cache_bit_width is {width}, and k_quant_type is NONE")
    return (kinds[0], kinds[1]) if kinds else None


def _read_quantized_type(
    symbolic: Symbolic, node: onnx.NodeProto, scales: tuple[str, str], sizes: tuple[int, int]
) -> int:
    """The element type of quantized caches."""
    kinds = [symbolic.dtype(node.input[i]) for i in (3, 4)]
    taken = op_limits().get(OP, {}).get("storage_types", ())
    if kinds[0] != kinds[1] or kinds[0] not in taken:
        stated_type = type_names(dict.fromkeys(kinds), "and").strip() if all(kinds) else "not known"
        raise UnsupportedError(
            f"its cache is quantized, and its element type is {stated_type}, expected INT8 or FLOAT8E4M3FN"
        )
    for name, kind in zip(("k_scale", "v_scale"), scales, strict=True):
        tensor = input_of(node, INPUT_INDEX[name])
        shape = symbolic.shape(tensor)
        dims = None if shape is None else [d.constant for d in shape]
        scale_type = symbolic.dtype(tensor)
        groups, size = sizes
        expected = {
            "tensor": [[1] * rank for rank in range(5)],
            "channel": [[groups * size], [groups, size], [groups, 1, size], [1, groups, 1, size]],
        }[kind]
        if dims is None or dims not in expected or scale_type != TensorProto.FLOAT:
            stated_shape = "of unknown shape" if shape is None else f"{[str(d) for d in shape]}"
            wanted = "one element" if kind == "tensor" else f"[1, {groups}, 1, {size}] or [{groups * size}]"
            stated_type = type_names([scale_type], "or").strip() if scale_type else "unknown type"
            raise UnsupportedError(f"{name} {tensor!r} is {stated_shape} of {stated_type}, expected {wanted} of fp32")
    return kinds[0]


def _check_new_tokens(reader: NodeReader, query: tuple[Int, ...]) -> None:
    """Checks the positions of new keys and values, where they are inputs of their own."""
    for name in ("key", "value") if reader.input("key") else ():
        check_equal_sizes(("query", name), (query[1], reader.shape(name, 3)[1]), " positions")


def _total(symbolic: Symbolic, tensor: str) -> Int | None:
    """The value of total_sequence_length as an expression of sizes, or of an element of an input."""
    value = symbolic.value(tensor)
    elements = None if value is None else value.elements()
    return to_int(elements[0]) if elements is not None and len(elements) == 1 else None
