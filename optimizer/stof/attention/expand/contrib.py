# SPDX-License-Identifier: Apache-2.0
"""``MultiHeadAttention`` and ``Attention`` of domain com.microsoft in primitive nodes.

Facts: the operators' schemas in ONNX Runtime 1.31, and what its CPU provider computes.
"""

from __future__ import annotations

import numpy as np
from onnx import TensorProto, helper

from stof.attention.expand.expand import Request
from stof.attention.expand.primitives import (
    Band,
    Core,
    Mask,
    added,
    attend,
    band,
    float_type,
    known_shape,
    known_size,
    merge_heads,
    positions,
    size,
    split_heads,
)
from stof.errors import UnsupportedError
from stof.graph.node_builder import Builder
from stof.symbolic import Int, integer

_FILL = -10000.0  # mask_filter_value where the node has none
_PROJECTING = (
    *("do_rotary", "mask_filter_value", "num_heads", "past_present_share_buffer", "qkv_hidden_sizes"),
    *("rotary_embedding_dim", "scale", "unidirectional"),
)
_LOWEST = float(np.finfo(np.float32).min)


def lower_multi_head(request: Request) -> None:
    """Appends the nodes that compute what a MultiHeadAttention's outputs hold.

    Raises:
        UnsupportedError: with the reason why it cannot be.
    """
    request.only(("mask_filter_value", "num_heads", "scale", "unidirectional"), 10, 4)
    node = _Contrib(request)
    node.refuse({3: "qk"}, {8: "past_sequence_length", 9: "cache_indirection"})
    query, key, value = node.separate()
    node.finish(query, key, value, request.input(4), request.input(5), request.past(6, 7))


def lower_projecting(request: Request) -> None:
    """Appends the nodes that compute what an Attention's outputs hold, with the projections of query, key and value.

    Raises:
        UnsupportedError: with the reason why it cannot be.
    """
    request.only(_PROJECTING, 7, 2)
    node = _Contrib(request)
    node.refuse({}, {6: "past_sequence_length"})
    if node.attributes.get("past_present_share_buffer"):
        raise UnsupportedError("its past and present share a buffer, which has room for more keys than there are")
    if node.attributes.get("do_rotary"):
        raise UnsupportedError("it rotates query and key, which is not expanded")
    if not request.input(2):
        raise UnsupportedError(
            "it has no bias, without which ONNX Runtime's CPU provider ends the process; add one of zeros"
        )
    query, key, value = node.projected()
    past = request.input(4)
    parts = ("", "")
    if past:
        known_shape(node.symbolic, past, "past", (5,))
        b = node.builder
        parts = b.add("Gather", [past, b.constant(0)]), b.add("Gather", [past, b.constant(1)])
    node.finish(query, key, value, request.input(3), request.input(5), parts, joined=True)


class _Contrib:
    def __init__(self, request: Request) -> None:
        self.request = request
        self.builder: Builder = request.builder
        self.symbolic = request.symbolic
        self.attributes = request.attributes
        self.heads = int(self.attributes.get("num_heads", 0))
        if self.heads < 1:
            raise UnsupportedError(f"num_heads is {self.heads}, expected 1 or more")
        self.dtype = float_type(self.symbolic, request.input(0))

    def refuse(self, outputs: dict[int, str], inputs: dict[int, str]) -> None:
        """Raises UnsupportedError for what has no counterpart."""
        for i, name in outputs.items():
            if self.request.output(i) and self.request.is_used(i):
                raise UnsupportedError(f"its output {name} [B, H, S, T] is used")
        for i, name in inputs.items():
            if self.request.input(i):
                raise UnsupportedError(f"it has input {name}: its cache has room for more keys than there are")

    def separate(self) -> tuple[str, str, str]:
        """Query, key and value [B, heads, length, size] of a MultiHeadAttention."""
        b, request = self.builder, self.request
        query, key, value = (request.input(i) for i in range(3))
        bias = request.input(3)
        shape = known_shape(self.symbolic, query, "query", (3, 5))
        if len(shape) == 5:  # [B, S, H, 3, D]
            self._no_bias(bias, "packed query, key and value")
            query, key, value = (self._of_packed(query, i) for i in range(3))
            return query, key, value
        own = [shape]
        if not key:
            raise UnsupportedError("it has no key, and its query is not packed with it")
        shape = known_shape(self.symbolic, key, "key", (3, 4, 5))
        if len(shape) == 5:  # [B, T, H, 2, D]
            self._no_bias(bias, "packed key and value")
            key, value = (self._of_packed(key, i) for i in range(2))
            return split_heads(b, query, self.heads), key, value
        if not value:
            raise UnsupportedError("it has a key and no value")
        own += [shape, known_shape(self.symbolic, value, "value", (len(shape),))]
        if len(shape) == 4:  # [B, H, T, D] of a cache
            self._no_bias(bias, "key and value of rank 4")
            return split_heads(b, query, self.heads), key, value
        tensors = [query, key, value]
        if bias:
            widths = [known_size(s[2], f"the width of {t!r}") for s, t in zip(own, tensors, strict=True)]
            known_shape(self.symbolic, bias, "bias", (1,))
            parts = self._split(bias, widths, 0)
            tensors = [b.add("Add", [t, part]) for t, part in zip(tensors, parts, strict=True)]
        query, key, value = (split_heads(b, t, self.heads) for t in tensors)
        return query, key, value

    def _no_bias(self, bias: str, words: str) -> None:
        if bias:
            raise UnsupportedError(f"it has {words} and a bias, which is not expanded")

    def _of_packed(self, tensor: str, i: int) -> str:
        b = self.builder
        return b.add("Transpose", [b.add("Gather", [tensor, b.constant(i)], axis=3)], perm=[0, 2, 1, 3])

    def _split(self, tensor: str, widths: list[int], axis: int) -> list[str]:
        b = self.builder
        outputs = [b.name() for _ in widths]
        sizes = b.constant(widths)
        b.nodes.append(helper.make_node("Split", [tensor, sizes], outputs, name=outputs[0], axis=axis))
        return outputs

    def projected(self) -> tuple[str, str, str]:
        """Query, key and value [B, heads, length, size] of an Attention, from its input and weights."""
        b, request = self.builder, self.request
        known_shape(self.symbolic, request.input(0), "input", (3,))
        weight = known_shape(self.symbolic, request.input(1), "weights", (2,))
        sizes = self.attributes.get("qkv_hidden_sizes")
        whole = known_size(weight[1], "the width of the weights")
        widths = [int(n) for n in sizes] if sizes else [whole // 3] * 3
        if sum(widths) != whole or widths[0] != widths[1]:
            raise UnsupportedError(f"qkv_hidden_sizes {widths} do not fit weights of width {whole}")
        tensor = b.add("MatMul", [request.input(0), request.input(1)])
        if request.input(2):
            tensor = b.add("Add", [tensor, request.input(2)])
        query, key, value = (split_heads(b, t, self.heads) for t in self._split(tensor, widths, 2))
        return query, key, value

    def finish(
        self, query: str, key: str, value: str, padding: str, bias: str, past: tuple[str, str], joined: bool = False
    ) -> None:
        """The core, past keys and values in front, masks, and the node's outputs."""
        b, request = self.builder, self.request
        facts = _Sizes(self)
        if past[0]:
            key, value = (b.add("Concat", [p, t], axis=2) for p, t in zip(past, (key, value), strict=True))
        masks = []
        if padding:
            masks.append(self._padding(padding, query, key, facts))
        if bias:
            masks.append(self._bias(bias))
        if self.attributes.get("unidirectional"):
            if facts.keys != facts.rows:
                raise UnsupportedError(
                    f"it is unidirectional with {facts.rows} queries and {facts.keys} keys that are no past: which keys come "
                    "before a query is not defined"
                )
            offset = size(b, past[0], 2) if past[0] else None
            for mask in band(b, query, key, Band(right=0), offset):
                masks.append(Mask(mask.tensor, True, _LOWEST))
        scale = float(self.attributes.get("scale", 0.0)) or 1.0 / float(np.sqrt(facts.size))
        core = Core(query, key, value, self.heads, self.heads, scale, self.dtype, masks=masks)
        request.give(0, merge_heads(b, attend(b, core, request.name), self.heads * facts.width))
        if joined and request.output(1):
            parts = [b.unsqueeze(t, [0]) for t in (key, value)]
            request.give(1, b.add("Concat", parts, axis=0))
        elif not joined:
            request.give(1, key)
            request.give(2, value)

    def _bias(self, bias: str) -> Mask:
        known_shape(self.symbolic, bias, "attention_bias", (4,))
        return Mask(added(self.builder, bias, self.symbolic.dtype(bias)))

    def _padding(self, padding: str, query: str, key: str, facts: _Sizes) -> Mask:
        """Padding of keys as a bias: mask_filter_value where a key is none."""
        b = self.builder
        shape = known_shape(self.symbolic, padding, "the padding mask", (1, 2, 3))
        if len(shape) == 1:
            kept = self._by_lengths(padding, shape[0], key, facts)
        else:
            if shape[-1] != facts.all_keys and None not in (shape[-1].constant, facts.all_keys.constant):
                raise UnsupportedError(f"padding mask {padding!r} has {shape[-1]} columns beside {facts.all_keys} keys")
            # Ones and zeros, says the schema: what negative numbers would mean is nowhere defined.
            kept = b.add("Cast", [padding], to=TensorProto.BOOL)
            kept = b.unsqueeze(kept, [1, 2] if len(shape) == 2 else [1])
        fill = float(self.attributes.get("mask_filter_value", _FILL))
        return Mask(b.add("Where", [kept, b.constant(0, np.float32), b.constant(fill, np.float32)]))

    def _by_lengths(self, padding: str, count: Int, key: str, facts: _Sizes) -> str:
        b, batch = self.builder, facts.batch
        places = positions(b, size(b, key, 2))
        if count == batch:
            ends = b.unsqueeze(b.add("Cast", [padding], to=TensorProto.INT64), [1, 2, 3])
            return b.add("Less", [places, ends])
        raise UnsupportedError(
            f"padding mask {padding!r} is a vector of {count} numbers where the batch size is {batch}; expected the lengths of "
            "the batch's rows"
        )


class _Sizes:
    """Symbolic sizes of a node's operands."""

    def __init__(self, node: _Contrib) -> None:
        symbolic, request = node.symbolic, node.request
        first = known_shape(symbolic, request.input(0), "input 0", (3, 5))
        self.batch, self.rows = first[0], first[1]
        heads = integer(node.heads)
        if request.node.op_type == "Attention":
            weight = known_shape(symbolic, request.input(1), "weights", (2,))
            sizes = node.attributes.get("qkv_hidden_sizes") or [known_size(weight[1], "the width") // 3] * 3
            self.keys = self.rows
            widths = [integer(int(sizes[0])), integer(int(sizes[2]))]
            past = symbolic.shape(request.input(4))
            self.past = past[3] if past is not None else integer(0)
        else:
            past = symbolic.shape(request.input(6))
            self.past = past[2] if past is not None else integer(0)
            self.keys, widths = self._of_key(node, first, heads)
        self.size = known_size(widths[0].divide(heads), "the head size")
        self.width = known_size(widths[1].divide(heads), "the head size of the values")
        self.all_keys = self.keys + self.past

    @staticmethod
    def _of_key(node: _Contrib, first: tuple[Int, ...], heads: Int) -> tuple[Int, list[Int]]:
        if len(first) == 5:
            return first[1], [heads * first[4]] * 2
        key = known_shape(node.symbolic, node.request.input(1), "key", (3, 4, 5))
        if len(key) == 5:
            return key[1], [heads * key[4]] * 2
        value = known_shape(node.symbolic, node.request.input(2), "value", (len(key),))
        if len(key) == 4:
            return key[2], [heads * key[3], heads * value[3]]
        return key[1], [first[2], value[2]]
