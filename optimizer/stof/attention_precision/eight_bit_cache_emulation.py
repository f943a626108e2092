# SPDX-License-Identifier: Apache-2.0
"""Steps of StofCachedAttention that round as the kernels with 8-bit operands do: the operator, and nodes beside it.

The operator keeps the caches, and computes steps of few tokens. For more tokens an If takes the output of standard nodes. They
read keys and values from the present caches. A second operator, whose keys are the queries, rotates these.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper

from stof.arguments.precisions import EightBits
from stof.attention_precision.eight_bit_kernels import MOST_DECODED
from stof.attention_precision.eight_bit_roundings import (
    round_scores,
    round_values,
    round_weights,
    round_weights_to_inputs,
)
from stof.cached_attention.site import INPUT_INDEX, OP, OP_INPUTS
from stof.errors import VerifyError
from stof.graph.index import DOMAIN, opset_of
from stof.graph.names import FreshNames
from stof.graph.node_builder import CAST_LIKE_OPSET, Builder
from stof.graph.node_fields import PlainValue, input_of, plain_attributes_of
from stof.mask.expression import MaskExpression
from stof.sparsify.bias_nodes import StepTensors, emit_pattern_bias

_TABLES = ("table0", "table1", "table2", "table3")


def put_roundings_over_caches(model: onnx.ModelProto, nodes: Sequence[tuple[onnx.NodeProto, EightBits]]) -> None:
    """Has nodes of a model round to 8 bits, in place. The model then needs the library.

    Raises:
        VerifyError: for sliding-window caches, nodes in subgraphs and opsets before 15.
    """
    precisions = {id(node): precision for node, precision in nodes}
    main = {id(node) for node in model.graph.node}
    for node, _ in nodes:
        sliding = plain_attributes_of(node).get("sliding_window_cache", 0)
        if sliding or id(node) not in main or opset_of(model) < CAST_LIKE_OPSET:
            why = "keeps a window of its cache" if sliding else f"is of opset {opset_of(model)}, expected 15 or later"
            why = "lies in a subgraph" if id(node) not in main else why
            raise VerifyError(f"the loss cannot be measured: {node.name!r} {why}, and no model rounds it to 8 bits")
    names = FreshNames(t for node in model.graph.node for t in (*node.input, *node.output))
    made: list[onnx.NodeProto] = []
    for node in model.graph.node:
        precision = precisions.get(id(node))
        if precision is None:
            made.append(node)
        else:
            made += _RoundingStep(node, precision, opset_of(model), names.make(f"{node.output[0]}/eight_bits")).nodes()
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in made]
    del model.graph.node[:]
    model.graph.node.extend(copies)
    kept = [f for f in model.functions if (f.domain, f.name) != (DOMAIN, OP)]
    del model.functions[:]
    model.functions.extend(kept)


class _RoundingStep:
    """The nodes in place of one operator."""

    def __init__(self, node: onnx.NodeProto, precision: EightBits, opset: int, prefix: str) -> None:
        self._node, self._precision, self._prefix = node, precision, prefix
        self._b = Builder(opset, f"{prefix}/branch_")
        self._outer = Builder(opset, f"{prefix}_")
        self._attributes: dict[str, PlainValue] = plain_attributes_of(node)
        self._heads, self._groups = (int(str(self._attributes[n])) for n in ("num_heads", "kv_num_heads"))

    def nodes(self) -> list[onnx.NodeProto]:
        """The operator, and the choice between its output and the rounded one."""
        plain = onnx.NodeProto()
        plain.CopyFrom(self._node)
        plain.output[0] = f"{self._prefix}_plain"
        self._presents = [self._present(plain, i) for i in (1, 2)]
        b = self._outer
        queries = b.add("Gather", [b.add("Shape", [self._input("query")]), b.constant(1)], axis=0)
        is_prompt = b.add("Greater", [queries, b.constant(MOST_DECODED)])
        rounded = self._attend()
        kept = f"{self._prefix}_kept"
        graphs = [
            helper.make_graph(nodes, name, [], [helper.make_tensor_value_info(output, TensorProto.UNDEFINED, None)])
            for name, nodes, output in (
                ("rounded", self._b.nodes, rounded),
                ("plain", [helper.make_node("Identity", [plain.output[0]], [kept])], kept),
            )
        ]
        for graph in graphs:
            graph.output[0].ClearField("type")
        choice = helper.make_node(
            "If",
            [is_prompt],
            [self._node.output[0]],
            name=f"{self._prefix}_choice",
            then_branch=graphs[0],
            else_branch=graphs[1],
        )
        return [plain, *b.nodes, choice]

    def _present(self, plain: onnx.NodeProto, index: int) -> str:
        if not plain.output[index]:
            plain.output[index] = f"{self._prefix}_present{index}"
        return str(plain.output[index])

    def _input(self, name: str) -> str:
        return input_of(self._node, INPUT_INDEX[name])

    def _number(self, value: float) -> str:
        return self._b.constant(value, np.float32)

    def _attend(self) -> str:
        """Nodes of the branch; gives the output [B, S, H * D]."""
        b, heads, groups = self._b, self._heads, self._groups
        query = b.add("Cast", [self._rotated_queries()], to=TensorProto.FLOAT)  # [B, H, S, D]
        rows = b.add("Shape", [query])
        head_size = b.add("Gather", [rows, b.constant([3])])
        total = b.add(
            "Reshape", [b.add("Cast", [self._input("total_sequence_length")], to=TensorProto.INT64), b.constant([1])]
        )
        counts = b.add("Add", [b.add("Cast", [self._input("seqlens_k")], to=TensorProto.INT64), b.constant(1)])
        keys = b.add("Range", [b.constant(0), b.add("Squeeze", [total]), b.constant(1)])
        exists = b.unsqueeze(b.add("Less", [b.unsqueeze(keys, [0]), b.unsqueeze(counts, [1])]), [1, 3])
        key, value = (self._existing(present, total, exists) for present in self._presents)  # [B, G, T, D]
        grouped = b.add("Reshape", [query, b.add("Concat", [b.constant([0, groups, -1]), head_size], axis=0)])
        scores = round_scores(b, grouped, b.add("Transpose", [key], perm=[0, 1, 3, 2]))
        by_head = b.add("Concat", [b.constant([0, heads, -1]), total], axis=0)
        scores = b.add(
            "Add", [b.add("Mul", [b.add("Reshape", [scores, by_head]), self._scale(head_size)]), self._bias()]
        )
        weights = self._weights(scores)
        if self._precision.has_fp8:
            weights, value = round_weights(b, weights), round_values(b, value)
        else:
            weights = round_weights_to_inputs(b, weights, self._input("query"))
        by_group = b.add("Concat", [b.constant([0, groups, -1]), total], axis=0)
        attended = b.add("MatMul", [b.add("Reshape", [weights, by_group]), value])
        attended = b.add("Reshape", [attended, rows])
        merged = b.add("Reshape", [b.add("Transpose", [attended], perm=[0, 2, 1, 3]), b.constant([0, 0, -1])])
        return b.add("CastLike", [merged, self._input("query")])

    def _existing(self, present: str, total: str, exists: str) -> str:
        """The rows of a cache up to total, in fp32; zeros where a sequence has no key."""
        b = self._b
        cut = b.add("Slice", [present, b.constant([0]), total, b.constant([2])])
        return b.add("Where", [exists, b.add("Cast", [cut], to=TensorProto.FLOAT), self._number(0.0)])

    def _scale(self, head_size: str) -> str:
        if scale := float(str(self._attributes.get("scale", 0.0))):
            return self._number(scale)
        b = self._b
        return b.add("Reciprocal", [b.add("Sqrt", [b.add("Cast", [head_size], to=TensorProto.FLOAT)])])

    def _bias(self) -> str:
        """0 where the mask allows a pair, else a large negative number: [B, H or 1, S, T]."""
        mask = MaskExpression.parse(f"k <= q and ({self._attributes.get('mask') or 'k <= q'})")
        given = {name: input_of(self._node, OP_INPUTS.index(name)) for name in _TABLES}
        tables = {name: tensor for name, tensor in given.items() if tensor and name in mask.text}
        tensors = StepTensors(*(self._input(name) for name in ("query", "seqlens_k", "total_sequence_length")))
        return emit_pattern_bias(self._b, mask, tensors, tables, self._heads, TensorProto.FLOAT)

    def _weights(self, scores: str) -> str:
        """The softmax of [B, H, S, T], with the sink's logit."""
        b, sink, top = self._b, "", self._b.reduce_max(scores, 3)
        if tensor := self._input("head_sink"):
            logits = b.add("Cast", [tensor], to=TensorProto.FLOAT)
            sink = b.add("Reshape", [logits, b.constant([1, self._heads, 1, 1])])
            top = b.add("Max", [top, sink])
        weights = b.add("Exp", [b.add("Sub", [scores, top])])
        total = b.add("ReduceSum", [weights, b.constant([3])], keepdims=1)
        if sink:
            total = b.add("Add", [total, b.add("Exp", [b.add("Sub", [sink, top])])])
        return b.add("Div", [weights, total])

    def _rotated_queries(self) -> str:
        """The queries [B, H, S, D] behind norm and rotary embedding: the keys of a first prompt at the queries' positions."""
        b, query = self._b, self._input("query")
        if not self._input("key"):  # packed: the first H of H + 2 G heads
            parts = [b.name() for _ in range(2)]
            shape = b.add("Shape", [query])
            width = b.add("Gather", [shape, b.constant([2])])
            head_size = b.add("Div", [width, b.constant([self._heads + 2 * self._groups])])
            own = b.add("Mul", [head_size, b.constant([self._heads])])
            sizes = b.add("Concat", [own, b.add("Sub", [width, own])], axis=0)
            b.nodes.append(helper.make_node("Split", [query, sizes], parts, name=parts[0], axis=2))
            query = parts[0]
        shape = b.add("Shape", [query])
        batch, count = (b.add("Gather", [shape, b.constant([axis])]) for axis in (0, 1))
        total = b.add("Cast", [count], to=TensorProto.INT32)
        last = b.add("Expand", [b.add("Sub", [total, b.constant([1], np.int32)]), batch])
        inputs = [""] * (INPUT_INDEX["k_norm_weight"] + 1)
        given = {"query": query, "key": query, "value": query, "seqlens_k": last, "total_sequence_length": total}
        if self._attributes.get("do_rotary"):
            given |= {name: self._input(name) for name in ("cos_cache", "sin_cache")}
            given["position_ids"] = self._positions(count)
        if norm := self._input("q_norm_weight"):
            given |= {"q_norm_weight": norm, "k_norm_weight": norm}
        for name, tensor in given.items():
            inputs[INPUT_INDEX[name]] = tensor
        while not inputs[-1]:
            inputs.pop()
        outputs = [b.name() for _ in range(3)]
        node = helper.make_node(OP, inputs, outputs, name=outputs[0], domain=DOMAIN)
        attributes: dict[str, PlainValue] = {"num_heads": self._heads, "kv_num_heads": self._heads, "mask": "k <= q"}
        for name in ("do_rotary", "rotary_interleaved", "qk_norm_epsilon"):
            if name in self._attributes:
                attributes[name] = self._attributes[name]
        for name, value in attributes.items():
            node.attribute.append(helper.make_attribute(name, value))
        b.nodes.append(node)
        return outputs[1]

    def _positions(self, count: str) -> str:
        """The position of each query, int64 [B, S], within the rotary table."""
        b = self._b
        if not (positions := self._input("position_ids")):
            keys = b.add("Add", [b.add("Cast", [self._input("seqlens_k")], to=TensorProto.INT64), b.constant(1)])
            total = b.add("Cast", [self._input("total_sequence_length")], to=TensorProto.INT64)
            is_first = b.add("Equal", [b.add("Reshape", [total, b.constant([1])]), count])
            before = b.add("Where", [is_first, b.constant([0]), b.add("Sub", [keys, count])])
            tokens = b.add("Range", [b.constant(0), b.add("Squeeze", [count]), b.constant(1)])
            positions = b.add("Add", [b.unsqueeze(before, [1]), b.unsqueeze(tokens, [0])])
        rows = b.add("Gather", [b.add("Shape", [self._input("cos_cache")]), b.constant([0])])
        # Padding may lie beyond the table.
        return b.add("Max", [b.add("Min", [positions, b.add("Sub", [rows, b.constant([1])])]), b.constant([0])])
