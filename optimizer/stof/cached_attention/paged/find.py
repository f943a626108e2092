# SPDX-License-Identifier: Apache-2.0
"""Finds PagedAttention nodes, and says why some cannot be replaced.

Source: the operator's schema in ONNX Runtime 1.31 and 1.32.
"""

from __future__ import annotations

from typing import Any

import onnx

from stof.attention.limits import type_names
from stof.cached_attention.node_checks import check_equal_sizes
from stof.cached_attention.node_reader import NodeReader
from stof.cached_attention.node_signature import NodeSignature
from stof.cached_attention.node_site import MICROSOFT
from stof.cached_attention.paged.site import INPUT_INDEX, INPUTS, OUTPUTS, PAGED, PagedSite
from stof.errors import UnsupportedError
from stof.graph.index import GraphIndex, domain_of
from stof.graph.node_fields import output_of
from stof.symbolic import Int, Symbolic

# Attributes of the schema besides those that GroupQueryAttention has, too.
_ATTRIBUTES: dict[str, type] = {
    **dict.fromkeys(("is_causal", "rotary_offset", "v_head_size"), int),
    **dict.fromkeys(("kv_cache_layout", "k_quant_type", "v_quant_type", "k_cache_dtype", "v_cache_dtype"), bytes),
}
_LEAST_BLOCK = 16
_SIGNATURE = NodeSignature(
    inputs=dict(enumerate(INPUTS)),
    required=("query", "key_cache", "value_cache", "cumulative_sequence_length", "past_seqlens", "block_table"),
    pairs=(("key", "value"), ("cos_cache", "sin_cache"), ("q_norm_weight", "k_norm_weight")),
    outputs=OUTPUTS,
)
_CACHES = ("key_cache", "value_cache")
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
    reader = NodeReader(node, INPUT_INDEX, symbolic, 2)
    window = _refuse_attributes(reader)
    _refuse_signature(reader, node, index)
    heads, groups, head_size = reader.read_heads("key_cache")
    query = reader.shape("query", 2)
    dtype = reader.read_type(head_size, target, (), _CACHES)
    _check_integers(reader, symbolic)
    keys, values = reader.read_caches(_CACHES, 2, groups, head_size)
    _check_blocks(keys, values)
    past, table = reader.shape("past_seqlens", 1), reader.shape("block_table", 2)
    most = (head_size - int(reader.attributes.get("rotary_offset", 0))) // 2
    rotary = reader.read_transform(heads, head_size, most, "half of the elements that it may rotate")
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
        blocks=keys[0],
        block_size=keys[1],
        columns=table[1],
    )


def _refuse_attributes(reader: NodeReader) -> int:
    """Checks the attributes. Returns the window, 0 for none."""
    window = reader.read_attributes(_ATTRIBUTES, ("is_causal",))
    _refuse_values(reader.attributes)
    offset = reader.attributes.get("rotary_offset", 0)
    if offset < 0 or offset % 8:
        raise UnsupportedError(f"rotary_offset is {offset}, expected a multiple of 8")
    return window


def _refuse_values(attributes: dict[str, Any]) -> None:
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


def _refuse_signature(reader: NodeReader, node: onnx.NodeProto, index: GraphIndex) -> None:
    for name in ("k_scale", "v_scale"):
        if reader.input(name):
            raise UnsupportedError(f"its cache is quantized: it has input {name}")
    _SIGNATURE.check(node)
    for i, cache in enumerate(_CACHES, 1):
        readers = len(index.consumers(reader.input(cache)))
        if readers > 1:
            raise UnsupportedError(
                f"{cache} {reader.input(cache)!r} has {readers} readers, expected this node alone: it is updated in place"
            )
        if index.consumers(output_of(node, i)):
            raise UnsupportedError(f"{OUTPUTS[i]} is read by other nodes, expected a cache that is updated once a step")


def _check_integers(reader: NodeReader, symbolic: Symbolic) -> None:
    for name in _INTEGERS:
        element_type = symbolic.dtype(reader.input(name)) if reader.input(name) else 0
        if element_type not in (0, onnx.TensorProto.INT32):
            raise UnsupportedError(f"{name} is {type_names([element_type], 'or').strip()}, expected int32")


def _check_blocks(keys: tuple[Int, ...], values: tuple[Int, ...]) -> None:
    for name, shape in zip(_CACHES, (keys, values), strict=True):
        rows = shape[1].constant
        if rows is not None and (rows < _LEAST_BLOCK or rows & (rows - 1)):
            raise UnsupportedError(f"{name} has blocks of {rows} rows, expected a power of two from {_LEAST_BLOCK} on")
    for axis in (0, 1):
        check_equal_sizes(_CACHES, (keys[axis], values[axis]), f" as size {axis}")
