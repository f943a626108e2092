# SPDX-License-Identifier: Apache-2.0
"""PagedAttention in standard ONNX, which runs where the runtime has no kernel of it: the original of a verification.

Every token is scored against the keys of all sequences, and its mask keeps those of its own one. That is no way to serve a
model: it is for small inputs. All is computed in fp32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from stof.cached_attention.expand_sites import add_rms_norm, expand_sites, split_packed
from stof.cached_attention.paged.site import PagedNode, PagedSite
from stof.graph.node_builder import Builder
from stof.mask.expression import MaskExpression
from stof.mask.expression_nodes import B, Lookup
from stof.mask.to_onnx import ScoreSizes, emit_mask

_FORBIDDEN = -1e30  # a score that adds nothing
_POSITION = Lookup("lengths", (B,))  # of each token: in a pattern's mask the tokens are the batch


def expand_pages(model: onnx.ModelProto, sites: Sequence[PagedSite]) -> onnx.ModelProto:
    """A copy of the model in which the node of every site is standard nodes, which attend by its declared pattern, too."""
    expanded = expand_sites(model, sites, "stof_paged", _expand_site)
    add_tables(expanded.graph, sites)
    return expanded


def _expand_site(builder: Builder, site: PagedSite, node: onnx.NodeProto) -> None:
    pattern, tables = (None, {}) if site.declared is None else (site.declared.pattern.mask, site.declared.tables)
    expand_node(builder, site, node.output, pattern, tables)


def add_tables(graph: onnx.GraphProto, sites: Sequence[PagedSite]) -> None:
    """Gives a graph the tables of the patterns of sites, unless it has them."""
    stored = {t.name for t in graph.initializer}
    for site in sites:
        for name, array in site.mask_tables.items():
            assert site.declared is not None
            tensor = site.declared.tables[name]
            if tensor not in stored:
                stored.add(tensor)
                graph.initializer.append(numpy_helper.from_array(array, tensor))


def expand_node(
    builder: Builder,
    node: PagedNode,
    outputs: Sequence[str],
    pattern: MaskExpression | None = None,
    tables: Mapping[str, str] | None = None,
) -> None:
    """Adds standard nodes that compute what a PagedAttention does.

    Args:
        builder: gets the nodes.
        node: the PagedAttention.
        outputs: what is written: output, key_cache_out and value_cache_out.
        pattern: the mask on (h, q, k), with ``k <= q``; None: that and the node's window.
        tables: the tensor of each table of the pattern.
    """
    _Expansion(node, builder, pattern, tables or {}).write(outputs)


class _Expansion:
    """The nodes in place of one PagedAttention; the arguments are those of :func:`expand_node`."""

    def __init__(
        self, site: PagedNode, builder: Builder, pattern: MaskExpression | None, tables: Mapping[str, str]
    ) -> None:
        self.site, self.b = site, builder
        self.pattern, self.tables = pattern, tables
        lengths = ("cumulative_sequence_length", "past_seqlens", "block_table")
        self.cumulative, self.past, self.table = (self._to_int64(site.input(name)) for name in lengths)
        self.tokens = self._size(site.input("query"), 0)
        self.batch, self.columns = self._size(self.table, 0), self._size(self.table, 1)
        self.blocks, self.block_size = (self._size(site.input("key_cache"), axis) for axis in (0, 1))

    def write(self, outputs: Sequence[str]) -> None:
        """Adds nodes that write the site's outputs."""
        b, site = self.b, self.site
        heads, groups, size = site.num_heads, site.kv_num_heads, site.head_size
        self._find_tokens()
        query, key, value = self._split_heads()
        if site.input("q_norm_weight"):
            query = self._normalize(query, site.input("q_norm_weight"))
            key = self._normalize(key, site.input("k_norm_weight"))
        if site.does_rotary:
            query, key = self._rotate(query, heads), self._rotate(key, groups)
        stored, slots = self._find_slots()
        caches = []
        for name, fresh, output in (("key_cache", key, outputs[1]), ("value_cache", value, outputs[2])):
            cache = site.input(name)
            flat = b.add("Reshape", [cache, b.constant([-1, groups, size])])
            flat = b.add("ScatterND", [flat, slots, b.add("Gather", [self._cast(fresh, site.dtype), stored])])
            self._add_as("Reshape", [flat, b.add("Shape", [cache])], output)
            caches.append(self._to_float(b.add("Gather", [flat, self._find_rows()])))
        query = self._to_float(self._cast(query, site.dtype))  # rounded as in the operator
        by_group = b.add("Reshape", [query, b.constant([0, groups, heads // groups, size])])
        by_group = b.add("Transpose", [by_group], perm=[1, 0, 2, 3])
        keys = b.unsqueeze(b.add("Transpose", [caches[0]], perm=[1, 2, 0]), [1])
        values = b.unsqueeze(b.add("Transpose", [caches[1]], perm=[1, 0, 2]), [1])
        weights = self._weights(b.add("MatMul", [by_group, keys]))
        attended = b.add("Transpose", [b.add("MatMul", [weights, values])], perm=[1, 0, 2, 3])
        self._add_as("Reshape", [self._cast(attended, site.dtype), b.constant([0, heads * size])], outputs[0])

    def _to_int64(self, tensor: str) -> str:
        return self.b.add("Cast", [tensor], to=TensorProto.INT64)

    def _size(self, tensor: str, axis: int) -> str:
        """One dimension of a tensor, a scalar."""
        return self.b.add("Gather", [self.b.add("Shape", [tensor]), self.b.constant(axis)])

    def _float(self, value: float) -> str:
        return self.b.constant(value, np.float32)

    def _cast(self, tensor: str, dtype: int) -> str:
        """A tensor of the site's type in fp32, or the other way round."""
        return tensor if self.site.dtype == TensorProto.FLOAT else self.b.add("Cast", [tensor], to=dtype)

    def _to_float(self, tensor: str) -> str:
        return self._cast(tensor, TensorProto.FLOAT)

    def _add_as(self, op: str, inputs: Sequence[str], output: str) -> None:
        self.b.nodes.append(helper.make_node(op, list(inputs), [output], name=self.b.name()))

    def _range(self, count: str) -> str:
        return self.b.add("Range", [self.b.constant(0), count, self.b.constant(1)])

    def _find_tokens(self) -> None:
        """Sets the sequence, position and validity [N] of each token; padding counts as the token at position 0."""
        b = self.b
        token = self._range(self.tokens)
        ends = b.add("Slice", [self.cumulative, b.constant([1]), b.unsqueeze(self.batch, [0])])
        passed = b.add("GreaterOrEqual", [b.unsqueeze(token, [1]), b.unsqueeze(ends, [0])])
        self.sequence = b.add("ReduceSum", [self._to_int64(passed), b.constant([1])], keepdims=0)
        begin, past = (b.add("Gather", [x, self.sequence]) for x in (self.cumulative, self.past))
        position = b.add("Add", [past, b.add("Sub", [token, begin])])
        self.is_token = b.add("Less", [token, b.add("Gather", [self.cumulative, self.batch])])
        self.position = b.add("Where", [self.is_token, position, b.constant(0)])

    def _split_heads(self) -> list[str]:
        """Query, key and value as [N, heads, D]."""
        b, site = self.b, self.site
        counts = (site.num_heads, site.kv_num_heads, site.kv_num_heads)
        return [
            b.add("Reshape", [self._to_float(x), b.constant([0, n, site.head_size])])
            for x, n in zip(split_packed(b, site, 1), counts, strict=True)
        ]

    def _normalize(self, x: str, weight: str) -> str:
        """The RMS norm of each head."""
        return add_rms_norm(self.b, x, 2, self._to_float(weight), self._float(self.site.norm_epsilon))

    def _cut(self, x: str, begin: int, end: int) -> str:
        """Elements of each head."""
        return self.b.add("Slice", [x, *(self.b.constant([n]) for n in (begin, end, 2))])

    def _rotate(self, x: str, heads: int) -> str:
        """The rotary embedding of [N, heads, D]."""
        b, site = self.b, self.site
        size, offset = site.rotary_size, site.rotary_offset
        cos, sin = (
            b.unsqueeze(b.add("Gather", [self._to_float(site.input(name)), self.position]), [1])
            for name in ("cos_cache", "sin_cache")
        )
        turning = self._cut(x, offset, offset + size)
        if site.is_interleaved:
            pairs = b.add("Reshape", [turning, b.constant([0, heads, size // 2, 2])])
            one, other = (b.add("Gather", [pairs, b.constant(i)], axis=3) for i in (0, 1))
        else:
            one, other = self._cut(turning, 0, size // 2), self._cut(turning, size // 2, size)
        first = b.add("Sub", [b.add("Mul", [one, cos]), b.add("Mul", [other, sin])])
        second = b.add("Add", [b.add("Mul", [other, cos]), b.add("Mul", [one, sin])])
        if site.is_interleaved:
            pairs = b.add("Concat", [b.unsqueeze(first, [3]), b.unsqueeze(second, [3])], axis=3)
            turned = [b.add("Reshape", [pairs, b.constant([0, heads, size])])]
        else:
            turned = [first, second]
        before = [self._cut(x, 0, offset)] if offset else []
        after = [self._cut(x, offset + size, site.head_size)] if offset + size < site.head_size else []
        return b.add("Concat", [*before, *turned, *after], axis=2)

    def _find_slots(self) -> tuple[str, str]:
        """The tokens [K] that are stored, and the rows [K, 1] of the cache that they are stored in."""
        b = self.b
        if self.site.input("slot_mapping"):
            slot = self._to_int64(self.site.input("slot_mapping"))
        else:
            column = b.add("Div", [self.position, self.block_size])
            entry = b.add("Add", [b.add("Mul", [self.sequence, self.columns]), column])
            block = b.add("Gather", [b.add("Reshape", [self.table, b.constant([-1])]), entry])
            in_block = b.add("Mod", [self.position, self.block_size])
            slot = b.add("Add", [b.add("Mul", [block, self.block_size]), in_block])
        is_stored = b.add("And", [self.is_token, b.add("GreaterOrEqual", [slot, b.constant(0)])])
        stored = b.add("Squeeze", [b.add("NonZero", [is_stored]), b.constant([0])])
        return stored, b.unsqueeze(b.add("Gather", [slot, stored]), [1])

    def _find_rows(self) -> str:
        """The rows of the cache at all positions of all sequences, one after the other."""
        b = self.b
        last = b.add("Sub", [self.blocks, b.constant(1)])
        table = b.add("Min", [b.add("Max", [self.table, b.constant(0)]), last])
        first = b.add("Mul", [b.add("Reshape", [table, b.constant([-1, 1])]), self.block_size])
        rows = b.add("Add", [first, b.unsqueeze(self._range(self.block_size), [0])])
        return b.add("Reshape", [rows, b.constant([-1])])

    def _find_allowed(self) -> str:
        """Which of all keys each token attends, as [1, N, 1, keys] or [G, N, H / G, keys]."""
        b = self.b
        if self.pattern is not None:
            return self._find_allowed_by(self.pattern)
        length = b.add("Mul", [self.columns, self.block_size])
        row = self._range(b.add("Mul", [self.batch, length]))
        owner, key = (b.unsqueeze(b.add(op, [row, length]), [0]) for op in ("Div", "Mod"))
        sequence, position = (b.unsqueeze(x, [1]) for x in (self.sequence, self.position))
        allowed = b.add("And", [b.add("Equal", [owner, sequence]), b.add("LessOrEqual", [key, position])])
        allowed = b.add("And", [allowed, b.unsqueeze(self.is_token, [1])])
        if self.site.window:
            distance = b.add("Sub", [position, key])
            allowed = b.add("And", [allowed, b.add("Less", [distance, b.constant(self.site.window)])])
        return b.unsqueeze(allowed, [0, 2])

    def _find_allowed_by(self, pattern: MaskExpression) -> str:
        """Which of all keys each token attends by a pattern: the same of each sequence, but only of the token's own one."""
        b, site = self.b, self.site
        length = b.add("Mul", [self.columns, self.block_size])
        sizes = ScoreSizes(
            B=self.tokens, H=b.constant(site.num_heads), S=b.constant(1), T=length, P=b.constant(0)
        )  # fmt: skip
        mask = pattern.substitute({"q": _POSITION}).root
        allowed = emit_mask(b, mask, sizes, {"lengths": self.position, **self.tables})  # [N, H or 1, 1, length]
        owner = b.unsqueeze(self._range(self.batch), [0, 1, 3])
        is_same_sequence = b.add("Equal", [owner, b.unsqueeze(self.sequence, [1, 2, 3])])
        is_same_sequence = b.add("And", [is_same_sequence, b.unsqueeze(self.is_token, [1, 2, 3])])  # [N, 1, B, 1]
        allowed = b.add("And", [allowed, is_same_sequence])
        groups = site.kv_num_heads if "h" in pattern.reads else 1
        heads = site.num_heads // groups if "h" in pattern.reads else 1
        return b.add("Transpose", [b.add("Reshape", [allowed, b.constant([0, groups, heads, -1])])], perm=[1, 0, 2, 3])

    def _weights(self, scores: str) -> str:
        """The softmax of [G, N, H / G, keys]; rows without an allowed key are 0."""
        b, site = self.b, self.site
        scores = b.add("Mul", [scores, self._float(site.scale or site.head_size**-0.5)])
        if site.softcap:
            cap = self._float(site.softcap)
            scores = b.add("Mul", [b.add("Tanh", [b.add("Div", [scores, cap])]), cap])
        allowed = self._find_allowed()
        scores = b.add("Where", [allowed, scores, self._float(_FORBIDDEN)])
        top, sink = b.reduce_max(scores, 3), ""
        if site.input("head_sink"):
            group = site.num_heads // site.kv_num_heads
            sink = b.add(
                "Reshape", [self._to_float(site.input("head_sink")), b.constant([site.kv_num_heads, 1, group, 1])]
            )
            top = b.add("Max", [top, sink])
        weights = b.add("Exp", [b.add("Sub", [scores, top])])
        weights = b.add("Where", [allowed, weights, self._float(0.0)])
        total = b.add("ReduceSum", [weights, b.constant([3])], keepdims=1)
        if sink:
            total = b.add("Add", [total, b.add("Exp", [b.add("Sub", [sink, top])])])
        is_empty = b.add("Equal", [total, self._float(0.0)])
        return b.add("Div", [weights, b.add("Where", [is_empty, self._float(1.0), total])])
