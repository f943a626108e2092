# SPDX-License-Identifier: Apache-2.0
"""Reads what GroupQueryAttention and PagedAttention nodes have in common, and refuses what the operators do not support."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx

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
from stof.graph.node_fields import attributes_of, input_of
from stof.symbolic import Int, Symbolic

_ATTRIBUTES: dict[str, type] = {
    **dict.fromkeys(("num_heads", "kv_num_heads", "local_window_size", "do_rotary", "rotary_interleaved"), int),
    **dict.fromkeys(("scale", "softcap", "qk_norm_epsilon"), float),
}
_FLAGS = ("do_rotary", "rotary_interleaved")
_OF_QUERY_TYPE = ("key", "value", "cos_cache", "sin_cache", "head_sink", "q_norm_weight", "k_norm_weight")


class NodeReader:
    """One node. Its methods raise UnsupportedError, naming what the operators do not support.

    Args:
        node: the node.
        index: of its inputs, by their names in the schema.
        symbolic: facts of the model.
        row_rank: the axes of query, and of key and value where these are inputs of their own.
    """

    def __init__(self, node: onnx.NodeProto, index: Mapping[str, int], symbolic: Symbolic, row_rank: int) -> None:
        self._node, self._index, self._symbolic, self._row_rank = node, index, symbolic, row_rank
        self.attributes = attributes_of(node)

    def input(self, name: str) -> str:
        """The tensor of an input; empty where it is absent."""
        return input_of(self._node, self._index[name])

    def shape(self, name: str, rank: int) -> tuple[Int, ...]:
        """The shape of an input that has so many axes."""
        return read_shape(self._symbolic, name, self.input(name), rank)

    def read_attributes(self, others: Mapping[str, type], flags: Sequence[str]) -> int:
        """Checks names and types of attributes, and values of the common ones. Gives the window, 0 for none.

        Args:
            others: the types of the attributes that one operator alone has.
            flags: those of them that are 0 or 1.
        """
        check_attribute_types(self.attributes, {**_ATTRIBUTES, **others})
        check_flags(self.attributes, (*_FLAGS, *flags))
        check_numbers(self.attributes)
        return read_window(self.attributes)

    def read_heads(self, cache: str) -> tuple[int, int, int]:
        """H, G and D; ``cache`` is the name of the key cache. Checks the columns of new keys and values."""
        heads, groups = read_head_counts(self.attributes)
        columns, rows = self.shape("query", self._row_rank)[-1], self.shape(cache, 4)
        size = read_head_size(columns, rows[3], (heads, groups), is_packed=not self.input("key"))
        for name in ("key", "value"):
            if self.input(name):
                check_columns(name, self.shape(name, self._row_rank)[-1], groups, size)
        return heads, groups, size

    def read_type(self, head_size: int, target: str, others: Sequence[str], caches: Sequence[str]) -> int:
        """The element type of query, which kernels of the target take.

        Args:
            head_size: D.
            target: of ``--target``.
            others: inputs of the same type that one operator alone has.
            caches: caches of the same type.
        """
        dtype = self._symbolic.dtype(self.input("query"))
        check_kernel_limits(dtype, head_size, target)
        names = (*caches, *_OF_QUERY_TYPE, *others)
        check_element_types(self._symbolic, dtype, {name: self.input(name) for name in names}, caches)
        return dtype

    def read_caches(
        self, names: tuple[str, str], head_axis: int, groups: int, head_size: int
    ) -> tuple[tuple[Int, ...], tuple[Int, ...]]:
        """The shapes of the caches of keys and of values, whose heads are checked.

        Args:
            names: of their inputs.
            head_axis: the axis of heads.
            groups: G.
            head_size: D.
        """
        keys, values = (self.shape(name, 4) for name in names)
        check_cache_heads(dict(zip(names, (keys, values), strict=True)), head_axis, groups, head_size)
        return keys, values

    def read_transform(self, heads: int, head_size: int, most: int, reason: str) -> int:
        """R; 0 without a rotary embedding, or where R is not known before the run. Checks sinks and norms, too.

        Args:
            heads: H.
            head_size: D.
            most: columns that cos_cache may have.
            reason: why, for the message.
        """
        rotates = self.attributes.get("do_rotary", 0)
        size = read_rotary_size(self._symbolic, self.input("cos_cache"), most, reason) if rotates else 0
        sizes = {"head_sink": heads, "q_norm_weight": head_size, "k_norm_weight": head_size}
        check_vectors(self._symbolic, [(name, self.input(name), length) for name, length in sizes.items()])
        return size
