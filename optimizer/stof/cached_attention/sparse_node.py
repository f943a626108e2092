# SPDX-License-Identifier: Apache-2.0
"""SparseAttention of domain com.microsoft: its signature, checked, and its inputs at the indices of GroupQueryAttention.

Source: the operator's schema and CPU kernel in ONNX Runtime 1.31.
"""

from __future__ import annotations

import hashlib

import onnx
from onnx import helper

from stof.cached_attention.block_layout import BLOCK_SIZES, BlockLayout, read_layout
from stof.cached_attention.node_checks import check_attribute_types, check_flags, check_numbers
from stof.cached_attention.node_signature import NodeSignature
from stof.cached_attention.node_site import MICROSOFT
from stof.cached_attention.site import GROUP_QUERY, INPUTS, OUTPUTS, SPARSE, SPARSE_COLUMNS, SPARSE_INDEX, SPARSE_ROWS
from stof.errors import UnsupportedError
from stof.graph.index import domain_of
from stof.graph.node_fields import attributes_of, input_of
from stof.symbolic import Symbolic

_NAMES = {
    **{index: name for name, index in SPARSE_INDEX.items()},
    **{SPARSE_ROWS: "block_row_indices", SPARSE_COLUMNS: "block_col_indices", 8: "key_total_sequence_lengths"},
}
_SIGNATURE = NodeSignature(
    inputs=_NAMES,
    required=tuple(_NAMES[i] for i in (0, 3, 4, 5, 6, 7, 8)),
    pairs=(("key", "value"), ("cos_cache", "sin_cache")),
    outputs=OUTPUTS,
)
LayoutKey = tuple[bytes, bytes, int, int]  # of row and column indices, the block size, the heads
_ATTRIBUTES: dict[str, type] = {
    **dict.fromkeys(("num_heads", "kv_num_heads", "sparse_block_size", "do_rotary", "rotary_interleaved"), int),
    "scale": float,
}


def is_sparse(node: onnx.NodeProto) -> bool:
    """Whether a node is ONNX Runtime's SparseAttention; it always has a cache."""
    return domain_of(node) == MICROSOFT and node.op_type == SPARSE


def as_group_query(node: onnx.NodeProto) -> onnx.NodeProto:
    """A GroupQueryAttention with the inputs and attributes that both have, for checks; ``seqlens_k`` still counts keys."""
    inputs = [input_of(node, SPARSE_INDEX[name]) if name in SPARSE_INDEX else "" for name in INPUTS]
    group_query = helper.make_node(GROUP_QUERY, inputs, list(node.output), name=node.name, domain=MICROSOFT)
    group_query.attribute.extend(a for a in node.attribute if a.name != "sparse_block_size")
    return group_query


def check_sparse(node: onnx.NodeProto) -> None:
    """Checks inputs, outputs and attributes by themselves.

    Raises:
        UnsupportedError: with what is unknown, missing or wrong.
    """
    _SIGNATURE.check(node)
    _check_attributes(node)


def _check_attributes(node: onnx.NodeProto) -> None:
    attributes = attributes_of(node)
    check_attribute_types(attributes, _ATTRIBUTES)
    check_flags(attributes, ("do_rotary", "rotary_interleaved"))
    check_numbers(attributes)
    if (size := attributes.get("sparse_block_size", 0)) not in BLOCK_SIZES:
        raise UnsupportedError(f"sparse_block_size is {size}, expected 16, 32, 64 or 128")


def read_node_layout(
    node: onnx.NodeProto, symbolic: Symbolic, heads: int, layouts: dict[LayoutKey, BlockLayout]
) -> BlockLayout:
    """The layouts of a node that was checked.

    Args:
        node: the SparseAttention.
        symbolic: facts of its model.
        heads: query heads.
        layouts: those of nodes before; gets those of this one. Layers share them, and reading takes a second.

    Raises:
        UnsupportedError: when they are no constants, or damaged.
    """
    arrays = []
    for i in (SPARSE_ROWS, SPARSE_COLUMNS):
        array = symbolic.constant(node.input[i])
        if array is None:
            raise UnsupportedError(f"its layouts are run-time data: {_NAMES[i]} {node.input[i]!r} is no constant")
        arrays.append(array)
    size = int(attributes_of(node)["sparse_block_size"])
    digests = [hashlib.sha256(f"{a.dtype}{a.shape}".encode() + a.tobytes()).digest() for a in arrays]
    key = digests[0], digests[1], size, heads
    if key not in layouts:
        layouts[key] = read_layout(arrays[0], arrays[1], size, heads)
    return layouts[key]
