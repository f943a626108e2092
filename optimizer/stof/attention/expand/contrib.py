# SPDX-License-Identifier: Apache-2.0
"""Expands ``MultiHeadAttention`` and ``Attention`` of domain com.microsoft to primitive nodes.

Sources: the operators' schemas in ONNX Runtime 1.31, and results of its CPU provider.
"""

from __future__ import annotations

import numpy as np
from onnx import TensorProto, helper

from stof.attention.expand.primitives import (
    AttentionCore,
    Band,
    ScoreMask,
    append_attention,
    axis_size,
    band_masks,
    cast_to_fp32,
    merge_heads,
    positions,
    require_float_type,
    require_shape,
    require_size,
    split_heads,
)
from stof.attention.expand.working_copy import FusedNode
from stof.errors import UnsupportedError
from stof.graph.node_builder import Builder
from stof.symbolic import Int, integer

_REASONS = {
    "cache_indirection": "it reads keys in the order of beam search, which is not expanded",
    # ONNX Runtime's CUDA provider stores the keys of such caches in another order than its CPU provider.
    "past_sequence_length": "how its cache lies in memory depends on the provider, and it reads no more keys than there are",
}
_FILL = -10000.0  # mask_filter_value where the node has none
_ATTENTION_ATTRIBUTES = (
    *("do_rotary", "mask_filter_value", "num_heads", "past_present_share_buffer", "qkv_hidden_sizes"),
    *("rotary_embedding_dim", "scale", "unidirectional"),
)
_QUANTIZED_ATTRIBUTES = (
    *("do_rotary", "mask_filter_value", "num_heads", "past_present_share_buffer", "scale", "unidirectional"),
)
_PASTS = {"Attention": 4, "QAttention": 8}  # the input of both pasts in one tensor
_LOWEST = float(np.finfo(np.float32).min)


def expand_multi_head(fused: FusedNode) -> None:
    """Appends primitive nodes that compute the outputs of a MultiHeadAttention.

    Raises:
        UnsupportedError: when the node cannot be expanded, with the reason.
    """
    fused.check_signature(("mask_filter_value", "num_heads", "scale", "unidirectional"), 10, 4)
    node = _ContribExpander(fused)
    node.refuse_unsupported({3: "qk"}, {9: "cache_indirection", 8: "past_sequence_length"})
    query, key, value = node.separate()
    node.finish(query, key, value, fused.input(4), fused.input(5), fused.past(6, 7))


def refuse_decoder_masked(fused: FusedNode) -> None:
    """Refuses a DecoderMaskedMultiHeadAttention, which is for one token.

    Raises:
        UnsupportedError: always.
    """
    if fused.input(9):
        raise UnsupportedError(f"it has input cache_indirection: {_REASONS['cache_indirection']}")
    if fused.input(5):
        raise UnsupportedError(f"it has input past_key: {_REASONS['past_sequence_length']}")
    raise UnsupportedError("it is for one token at a time, which is not expanded; MultiHeadAttention is")


def expand_contrib_attention(fused: FusedNode) -> None:
    """Appends primitive nodes that compute the outputs of an Attention and its projections of query, key and value.

    Raises:
        UnsupportedError: when the node cannot be expanded, with the reason.
    """
    fused.check_signature(_ATTENTION_ATTRIBUTES, 7, 2)
    node = _ContribExpander(fused)
    node.refuse_unsupported({}, {6: "past_sequence_length"})
    if node.attributes.get("past_present_share_buffer"):
        raise UnsupportedError(f"its past and present share a buffer: {_REASONS['past_sequence_length']}")
    if node.attributes.get("do_rotary"):
        raise UnsupportedError("it rotates query and key, which is not expanded")
    query, key, value = node.project(node.builder.add("MatMul", [fused.input(0), fused.input(1)]))
    node.finish(query, key, value, fused.input(3), fused.input(5), node.split_past(4), joined_present=True)


def expand_quantized_attention(fused: FusedNode) -> None:
    """Appends primitive nodes that compute the outputs of a QAttention: its projections are of integers, its core is float.

    Raises:
        UnsupportedError: when the node cannot be expanded, with the reason.
    """
    fused.check_signature(_QUANTIZED_ATTRIBUTES, 9, 2)
    node = _ContribExpander(fused, typed=3)
    if node.attributes.get("past_present_share_buffer"):
        raise UnsupportedError(f"its past and present share a buffer: {_REASONS['past_sequence_length']}")
    if node.attributes.get("do_rotary"):
        raise UnsupportedError("it rotates query and key, which is not expanded")
    b = node.builder
    points = [fused.input(i) for i in (6, 7)]
    if not points[0] and points[1]:
        raise UnsupportedError("its weight has a zero point and its input none")
    integers = b.add("MatMulInteger", [fused.input(0), fused.input(1), *(p for p in points if p)])
    scale = b.add("Mul", [fused.input(3), fused.input(4)])
    query, key, value = node.project(b.add("Mul", [b.add("Cast", [integers], to=node.dtype), scale]))
    node.finish(query, key, value, fused.input(5), "", node.split_past(8), joined_present=True)


class _ContribExpander:
    """What the expanders share; the element type is that of the input ``typed``."""

    def __init__(self, fused: FusedNode, typed: int = 0) -> None:
        self.fused = fused
        self.builder: Builder = fused.builder
        self.symbolic = fused.symbolic
        self.attributes = fused.attributes
        self.heads = int(self.attributes.get("num_heads", 0))
        if self.heads < 1:
            raise UnsupportedError(f"num_heads is {self.heads}, expected 1 or more")
        self.dtype = require_float_type(self.symbolic, fused.input(typed))

    def refuse_unsupported(self, outputs: dict[int, str], inputs: dict[int, str]) -> None:
        """Raises UnsupportedError where the node has one of these inputs, or something reads one of these outputs."""
        for i, name in outputs.items():
            if self.fused.output(i) and self.fused.is_used(i):
                raise UnsupportedError(f"its output {name} [B, H, S, T] is used")
        for i, name in inputs.items():
            if self.fused.input(i):
                raise UnsupportedError(f"it has input {name}: {_REASONS[name]}")

    def separate(self) -> tuple[str, str, str]:
        """Query, key and value [B, heads, length, size] of a MultiHeadAttention."""
        b, fused = self.builder, self.fused
        query, key, value = (fused.input(i) for i in range(3))
        bias = fused.input(3)
        shape = require_shape(self.symbolic, query, "query", (3, 5))
        if len(shape) == 5:  # [B, S, H, 3, D]
            self._refuse_bias(bias, "packed query, key and value")
            query, key, value = (self._unpack(query, i) for i in range(3))
            return query, key, value
        shapes = [shape]
        if not key:
            raise UnsupportedError("it has no key, and its query is not packed with it")
        shape = require_shape(self.symbolic, key, "key", (3, 4, 5))
        if len(shape) == 5:  # [B, T, H, 2, D]
            self._refuse_bias(bias, "packed key and value")
            key, value = (self._unpack(key, i) for i in range(2))
            return split_heads(b, query, self.heads), key, value
        if not value:
            raise UnsupportedError("it has a key and no value")
        shapes += [shape, require_shape(self.symbolic, value, "value", (len(shape),))]
        if len(shape) == 4:  # [B, H, T, D] of a cache
            self._refuse_bias(bias, "key and value of rank 4")
            return split_heads(b, query, self.heads), key, value
        tensors = [query, key, value]
        if bias:
            widths = [require_size(s[2], f"the width of {t!r}") for s, t in zip(shapes, tensors, strict=True)]
            require_shape(self.symbolic, bias, "bias", (1,))
            biases = self._split(bias, widths, 0)
            tensors = [b.add("Add", [t, tensor_bias]) for t, tensor_bias in zip(tensors, biases, strict=True)]
        query, key, value = (split_heads(b, t, self.heads) for t in tensors)
        return query, key, value

    def _refuse_bias(self, bias: str, words: str) -> None:
        if bias:
            raise UnsupportedError(f"it has {words} and a bias, which is not expanded")

    def _unpack(self, tensor: str, i: int) -> str:
        b = self.builder
        return b.add("Transpose", [b.add("Gather", [tensor, b.constant(i)], axis=3)], perm=[0, 2, 1, 3])

    def _split(self, tensor: str, widths: list[int], axis: int) -> list[str]:
        b = self.builder
        outputs = [b.name() for _ in widths]
        sizes = b.constant(widths)
        b.nodes.append(helper.make_node("Split", [tensor, sizes], outputs, name=outputs[0], axis=axis))
        return outputs

    def split_past(self, i: int) -> tuple[str, str]:
        """Past keys and values, which an input has in one tensor; empty where there is none."""
        past, b = self.fused.input(i), self.builder
        if not past:
            return "", ""
        require_shape(self.symbolic, past, "past", (5,))
        return b.add("Gather", [past, b.constant(0)]), b.add("Gather", [past, b.constant(1)])

    def project(self, tensor: str) -> tuple[str, str, str]:
        """Query, key and value [B, heads, length, size] of an Attention, from the product of its input and weights."""
        b, fused = self.builder, self.fused
        require_shape(self.symbolic, fused.input(0), "input", (3,))
        weight = require_shape(self.symbolic, fused.input(1), "weights", (2,))
        sizes = self.attributes.get("qkv_hidden_sizes")
        whole = require_size(weight[1], "the width of the weights")
        widths = [int(n) for n in sizes] if sizes else [whole // 3] * 3
        if sum(widths) != whole or widths[0] != widths[1]:
            raise UnsupportedError(f"qkv_hidden_sizes {widths} do not fit weights of width {whole}")
        if fused.input(2):
            tensor = b.add("Add", [tensor, fused.input(2)])
        query, key, value = (split_heads(b, t, self.heads) for t in self._split(tensor, widths, 2))
        return query, key, value

    def finish(
        self,
        query: str,
        key: str,
        value: str,
        padding: str,
        bias: str,
        past: tuple[str, str],
        joined_present: bool = False,
    ) -> None:
        """Appends the past in front of keys and values, the masks, the attention core and the node's outputs."""
        b, fused = self.builder, self.fused
        sizes = _OperandSizes(self)
        if past[0]:
            key, value = (b.add("Concat", [p, t], axis=2) for p, t in zip(past, (key, value), strict=True))
        masks = []
        if padding:
            masks.append(self._padding_mask(padding, key, sizes))
        if bias:
            masks.append(self._bias(bias))
        if self.attributes.get("unidirectional"):
            if sizes.keys != sizes.rows:
                raise UnsupportedError(
                    f"it is unidirectional with {sizes.rows} queries and {sizes.keys} keys without a past: which keys come "
                    "before a query is not defined"
                )
            offset = axis_size(b, past[0], 2) if past[0] else None
            for mask in band_masks(b, query, key, Band(right=0), offset):
                masks.append(ScoreMask(mask.tensor, True, _LOWEST))
        scale = float(self.attributes.get("scale", 0.0)) or 1.0 / float(np.sqrt(sizes.size))
        core = AttentionCore(query, key, value, self.heads, self.heads, scale, self.dtype, masks=masks)
        fused.set_output(0, merge_heads(b, append_attention(b, core, fused.name), self.heads * sizes.width))
        if joined_present and fused.output(1):
            present = [b.unsqueeze(t, [0]) for t in (key, value)]
            fused.set_output(1, b.add("Concat", present, axis=0))
        elif not joined_present:
            fused.set_output(1, key)
            fused.set_output(2, value)

    def _bias(self, bias: str) -> ScoreMask:
        require_shape(self.symbolic, bias, "attention_bias", (4,))
        return ScoreMask(cast_to_fp32(self.builder, bias, self.symbolic.dtype(bias)))

    def _padding_mask(self, padding: str, key: str, sizes: _OperandSizes) -> ScoreMask:
        """The key padding mask as a bias: mask_filter_value at keys that are padding."""
        b = self.builder
        shape = require_shape(self.symbolic, padding, "the padding mask", (1, 2, 3))
        if len(shape) == 1:
            kept = self._keys_within_lengths(padding, shape[0], key, sizes)
        else:
            if shape[-1] != sizes.all_keys and None not in (shape[-1].constant, sizes.all_keys.constant):
                raise UnsupportedError(f"padding mask {padding!r} has {shape[-1]} columns beside {sizes.all_keys} keys")
            # The schema allows 0 and 1 only.
            kept = b.add("Cast", [padding], to=TensorProto.BOOL)
            kept = b.unsqueeze(kept, [1, 2] if len(shape) == 2 else [1])
        fill = float(self.attributes.get("mask_filter_value", _FILL))
        return ScoreMask(b.add("Where", [kept, b.constant(0, np.float32), b.constant(fill, np.float32)]))

    def _keys_within_lengths(self, padding: str, count: Int, key: str, sizes: _OperandSizes) -> str:
        b, batch = self.builder, sizes.batch
        key_positions = positions(b, axis_size(b, key, 2))
        if count == batch:
            ends = b.unsqueeze(b.add("Cast", [padding], to=TensorProto.INT64), [1, 2, 3])
            return b.add("Less", [key_positions, ends])
        raise UnsupportedError(
            f"padding mask {padding!r} is a vector of {count} numbers where the batch size is {batch}; expected the lengths of "
            "the batch's rows"
        )


class _OperandSizes:
    """Symbolic sizes of a node: batch, rows (queries), keys, past, all_keys; head size of queries and keys, and of values."""

    def __init__(self, node: _ContribExpander) -> None:
        symbolic, fused = node.symbolic, node.fused
        first = require_shape(symbolic, fused.input(0), "input 0", (3, 5))
        self.batch, self.rows = first[0], first[1]
        heads = integer(node.heads)
        if fused.node.op_type in _PASTS:
            weight = require_shape(symbolic, fused.input(1), "weights", (2,))
            sizes = node.attributes.get("qkv_hidden_sizes") or [require_size(weight[1], "the width") // 3] * 3
            self.keys = self.rows
            widths = [integer(int(sizes[0])), integer(int(sizes[2]))]
            past = symbolic.shape(fused.input(_PASTS[fused.node.op_type]))
            self.past = past[3] if past is not None else integer(0)
        else:
            past = symbolic.shape(fused.input(6))
            self.past = past[2] if past is not None else integer(0)
            self.keys, widths = self._key_sizes(node, first, heads)
        self.size = require_size(widths[0].divide(heads), "the head size")
        self.width = require_size(widths[1].divide(heads), "the head size of the values")
        self.all_keys = self.keys + self.past

    @staticmethod
    def _key_sizes(node: _ContribExpander, first: tuple[Int, ...], heads: Int) -> tuple[Int, list[Int]]:
        if len(first) == 5:
            return first[1], [heads * first[4]] * 2
        key = require_shape(node.symbolic, node.fused.input(1), "key", (3, 4, 5))
        if len(key) == 5:
            return key[1], [heads * key[4]] * 2
        value = require_shape(node.symbolic, node.fused.input(2), "value", (len(key),))
        if len(key) == 4:
            return key[2], [heads * key[3], heads * value[3]]
        return key[1], [first[2], value[2]]
