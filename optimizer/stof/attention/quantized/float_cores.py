# SPDX-License-Identifier: Apache-2.0
"""The float form of quantized attention: query, key and value meet in float, and scores and weights are never rounded.

Quantizers of query, key and value fall, too, where a float tensor lies before them. The quantizer of the result stays, behind
the nodes that move its axes, so that the search sees the layout: rounding with one scale commutes with moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from stof.attention.move_paths import MOVES
from stof.attention.quantized.parameters import CONTRIB, QuantizedConstants, Quantizer, is_dequantize, is_quantize
from stof.errors import UnsupportedError
from stof.graph.dead_code import remove_dead_code
from stof.graph.index import GraphIndex, describe, domain_of, is_standard, opset_of, topological_order
from stof.graph.names import unused_prefix
from stof.graph.protobuf import copy_model, copy_node, replace_nodes

_MOST_DEPTH = 40
_MOST_CHAIN = 24
_MOST_FOLDED = 64  # elements of a quantized constant that becomes a float one
_ELEMENTWISE = frozenset(
    {"Add", "Sub", "Mul", "Div", "Where", "Max", "Min", "Clip", "Neg", "Tanh", "IsNaN", "Dropout", "Cast", "CastLike"}
)
_FLOATS = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)
_BINARY = {"QLinearAdd": "Add", "QLinearMul": "Mul"}


@dataclass(frozen=True)
class _Product:
    """A matmul of two tensors that the graph computes.

    Attributes:
        node: the node that writes the result.
        left: a float tensor, or codes.
        right: likewise.
        quantizers: of both, where they are codes.
        rounds: of the result, where that is codes.
        is_dynamic: its operands were rounded by their own range, for this product alone.
    """

    node: onnx.NodeProto
    left: str
    right: str
    quantizers: tuple[Quantizer, Quantizer] | None = None
    rounds: Quantizer | None = None
    is_dynamic: bool = False


@dataclass
class _FloatForm:
    """The nodes of a float form so far, and what was passed on the way backwards from the second product.

    Attributes:
        nodes: new ones, in order of execution.
        softmaxes: first outputs of the softmaxes that have a float form among them.
        products: how many products of two computed tensors lie behind softmaxes.
        is_rounded: whether a rounding was left out.
    """

    nodes: list[onnx.NodeProto] = field(default_factory=list)
    softmaxes: list[str] = field(default_factory=list)
    products: int = 0
    is_rounded: bool = False
    known: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class QuantizedCore:
    """An attention whose scores or weights are rounded, with the nodes of its float form.

    Attributes:
        name: that of its softmax node, or else its output.
        softmax: output of its softmax in the graph.
        float_softmax: output of the softmax in the float form.
        nodes: of the float form.
        replaced: outputs of the nodes that it replaces.
    """

    name: str
    softmax: str
    float_softmax: str
    nodes: tuple[onnx.NodeProto, ...]
    replaced: frozenset[str]


def find_quantized_cores(model: onnx.ModelProto) -> tuple[QuantizedCore, ...]:
    """The attentions of the main graph whose scores or weights are rounded to 8 bits, in the order of the graph."""
    return _CoreSearch(model).run()


def with_float_cores(model: onnx.ModelProto, cores: Sequence[QuantizedCore]) -> onnx.ModelProto:
    """A copy of a model in which these attentions compute in float."""
    replaced = frozenset(t for core in cores for t in core.replaced)
    kept = [n for n in model.graph.node if not replaced.intersection(n.output)]
    nodes = [*kept, *(n for core in cores for n in core.nodes)]
    copy = copy_model(model)
    replace_nodes(copy.graph, nodes)
    replace_nodes(copy.graph, [copy.graph.node[i] for i in topological_order(copy.graph.node)])
    remove_dead_code(copy.graph, model.graph)
    return copy


class _CoreSearch:
    """Walks backwards from each product of two computed tensors; a softmax on the way makes it that of weights and values."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self._graph = model.graph
        self._opset = opset_of(model)
        self._index = GraphIndex(model.graph)
        self._constants = QuantizedConstants(self._index)
        self._prefix = unused_prefix(model.graph, "stof_float_")
        self._count = 0

    def run(self) -> tuple[QuantizedCore, ...]:
        cores: list[QuantizedCore] = []
        taken: set[str] = set()
        for node in self._graph.node:
            product = self._match_product(node)
            core = None if product is None else self._match_core(product)
            # Two products may read one softmax: the second one keeps the quantized weights, and with them the first.
            if core is not None and not taken & core.replaced and core.softmax not in {c.softmax for c in cores}:
                taken |= core.replaced
                cores.append(core)
        return tuple(cores)

    def _match_core(self, product: _Product) -> QuantizedCore | None:
        for weights_first in (True, False):
            form = _FloatForm()
            try:
                weights = self._operand_of(product, 0 if weights_first else 1, form, is_weights=True)
                if len(form.softmaxes) != 1 or form.products != 1 or not form.is_rounded:
                    continue
                values = self._operand_of(product, 1 if weights_first else 0, form)
            except UnsupportedError:
                continue
            operands = [weights, values] if weights_first else [values, weights]
            result = self._add(form, "MatMul", operands)
            replaced = self._write_result(product, result, form)
            source = form.softmaxes[0]
            node = self._index.producer(source)
            name = node.name if node is not None and node.name else source
            return QuantizedCore(name, source, form.known[source], tuple(form.nodes), frozenset(replaced))
        return None

    def _operand_of(self, product: _Product, side: int, form: _FloatForm, *, is_weights: bool = False) -> str:
        """The float form of an operand of a product: of weights, whatever was rounded on the way; else of query, key or value."""
        tensor = (product.left, product.right)[side]
        if product.quantizers is None:
            return self._float(tensor, form, 0) if is_weights else self._plain(tensor, form, 0)
        form.is_rounded = True
        quantizer = product.quantizers[side]
        if is_weights:
            return self._float_of_codes(tensor, quantizer, form, 0)
        return self._plain_of_codes(tensor, quantizer, form, 0)

    # The way back from the weights to the scores' product.

    def _float(self, tensor: str, form: _FloatForm, depth: int) -> str:
        """What a float tensor is without the roundings before it."""
        if tensor not in form.known:
            form.known[tensor] = tensor  # of a cycle, which a damaged graph may have
            form.known[tensor] = self._find_float(tensor, form, depth)
        return form.known[tensor]

    def _find_float(self, tensor: str, form: _FloatForm, depth: int) -> str:
        node = self._index.producer(tensor)
        if node is None or depth > _MOST_DEPTH or node.output[0] != tensor:
            return tensor
        product = self._match_product(node)
        if product is not None and product.rounds is None:
            return self._scores(product, form)
        if is_dequantize(node):
            folded = self._fold(node.input[0], Quantizer.of(node, 1), form)
            if folded or self._constants.is_constant(tensor):
                return folded or tensor
            form.is_rounded = True
            return self._float_of_codes(node.input[0], Quantizer.of(node, 1), form, depth + 1)
        if not is_standard(node):
            return tensor
        if node.op_type == "Softmax":
            return self._softmax(node, self._float(node.input[0], form, depth + 1), form)
        if node.op_type in _ELEMENTWISE and not self._casts_to_other(node):
            return self._copy(node, [self._float(n, form, depth + 1) if n else n for n in node.input], form)
        if node.op_type in MOVES:
            return self._copy(node, [self._float(node.input[0], form, depth + 1), *node.input[1:]], form)
        return tensor

    def _float_of_codes(self, codes: str, quantizer: Quantizer, form: _FloatForm, depth: int) -> str:
        """The float tensor that was rounded to codes; where there is none, what the codes stand for."""
        node = self._index.producer(codes)
        if self._constants.is_constant(codes):
            return self._fold(codes, quantizer, form) or self._dequantize(codes, quantizer, form)
        if node is None or depth > _MOST_DEPTH:
            return self._dequantize(codes, quantizer, form)
        if is_quantize(node):
            return self._float(node.input[0], form, depth + 1)
        product = self._match_product(node)
        if product is not None:
            return self._scores(product, form)
        if is_standard(node) and node.op_type in MOVES:
            moved = self._float_of_codes(node.input[0], quantizer, form, depth + 1)
            return self._add(form, node.op_type, [moved, *node.input[1:]], like=node)
        if domain_of(node) != CONTRIB:
            return self._dequantize(codes, quantizer, form)
        if node.op_type in _BINARY:
            one, other = (
                self._float_of_codes(node.input[i], Quantizer.of(node, i + 1), form, depth + 1) for i in (0, 3)
            )
            return self._add(form, _BINARY[node.op_type], [one, other])
        if node.op_type == "QLinearWhere":
            one, other = (
                self._float_of_codes(node.input[i], Quantizer.of(node, i + 1), form, depth + 1) for i in (1, 4)
            )
            return self._add(form, "Where", [node.input[0], one, other])
        if node.op_type == "QLinearSoftmax":
            source = self._float_of_codes(node.input[0], Quantizer.of(node, 1), form, depth + 1)
            return self._softmax(node, source, form)
        return self._dequantize(codes, quantizer, form)

    def _softmax(self, node: onnx.NodeProto, source: str, form: _FloatForm) -> str:
        attributes = {a.name: a.i for a in node.attribute}
        meaning = attributes.get("opset", self._opset)  # of QLinearSoftmax
        if meaning < 13 and node.op_type != "Softmax":
            raise UnsupportedError(f"{describe(node)} flattens axes, as Softmax did before opset 13")
        form.softmaxes.append(node.output[0])
        result = self._add(form, "Softmax", [source], axis=attributes.get("axis", -1))
        if node.name:
            form.nodes[-1].name = node.name  # by which options name the site
        form.known[node.output[0]] = result
        return result

    def _scores(self, product: _Product, form: _FloatForm) -> str:
        form.products += 1
        form.is_rounded |= product.rounds is not None or product.is_dynamic
        operands = [self._operand_of(product, side, form) for side in (0, 1)]
        return self._add(form, "MatMul", operands)

    # Query, key and value.

    def _plain(self, tensor: str, form: _FloatForm, depth: int) -> str:
        """A query, key or value without quantizers that only moves separate from it."""
        node = self._index.producer(tensor)
        if node is None or depth > _MOST_DEPTH:
            return tensor
        if is_dequantize(node):
            return self._plain_of_codes(node.input[0], Quantizer.of(node, 1), form, depth + 1)
        if is_standard(node) and node.op_type in MOVES:
            return self._copy(node, [self._plain(node.input[0], form, depth + 1), *node.input[1:]], form)
        return tensor

    def _plain_of_codes(self, codes: str, quantizer: Quantizer, form: _FloatForm, depth: int) -> str:
        node = self._index.producer(codes)
        if node is None or depth > _MOST_DEPTH:
            return self._dequantize(codes, quantizer, form)
        if is_quantize(node) or (node.op_type == "DynamicQuantizeLinear" and codes == node.output[0]):
            return self._plain(node.input[0], form, depth + 1)
        if is_standard(node) and node.op_type in MOVES and self._constants.is_per_tensor(quantizer):
            moved = self._plain_of_codes(node.input[0], quantizer, form, depth + 1)
            return self._add(form, node.op_type, [moved, *node.input[1:]], like=node)
        return self._dequantize(codes, quantizer, form)

    # The result.

    def _write_result(self, product: _Product, result: str, form: _FloatForm) -> set[str]:
        """Nodes from a float result to what the graph reads, with moves before quantizers; the outputs that they replace."""
        tensor = str(product.node.output[0])
        replaced = {tensor}
        points: list[tuple[str, Quantizer]] = []
        moves: list[onnx.NodeProto] = []
        if product.rounds is not None:
            points.append(("QuantizeLinear", product.rounds))
        for _ in range(_MOST_CHAIN):
            users = self._index.consumers(tensor)
            if len(users) != 1 or tensor in self._index.outputs or tensor in self._index.captured:
                break
            user = users[0]
            if user.input[0] != tensor or tensor in list(user.input)[1:]:
                break
            if is_quantize(user) or is_dequantize(user):
                quantizer = Quantizer.of(user, 1)
                if not self._constants.is_per_tensor(quantizer) or (is_quantize(user) and not quantizer.zero_point):
                    break
                points.append(("QuantizeLinear" if is_quantize(user) else "DequantizeLinear", quantizer))
            elif is_standard(user) and user.op_type in MOVES:
                moves.append(user)
            else:
                break
            tensor = user.output[0]
            replaced.add(tensor)
        for node in moves:
            result = self._add(form, node.op_type, [result, *node.input[1:]], like=node)
        for op, quantizer in self._without_repetitions(points):
            result = self._add(form, op, [result, *quantizer.inputs])
        form.nodes[-1].output[0] = tensor
        return replaced

    def _without_repetitions(self, points: Sequence[tuple[str, Quantizer]]) -> list[tuple[str, Quantizer]]:
        """Quantizers without those that round codes to themselves."""
        kept: list[tuple[str, Quantizer]] = []
        for op, quantizer in points:
            repeats = op == "QuantizeLinear" and kept and kept[-1][0] == "DequantizeLinear"
            if repeats and self._constants.are_equal(kept[-1][1], quantizer):
                kept.pop()
            else:
                kept.append((op, quantizer))
        return kept

    # Products.

    def _match_product(self, node: onnx.NodeProto) -> _Product | None:
        """The product of two computed tensors whose result a node writes."""
        found = None
        if is_standard(node) and node.op_type == "MatMul":
            found = _Product(node, node.input[0], node.input[1])
        elif is_standard(node) and node.op_type == "QLinearMatMul" and len(node.input) == 8:
            quantizers = Quantizer.of(node, 1), Quantizer.of(node, 4)
            found = _Product(node, node.input[0], node.input[3], quantizers, Quantizer.of(node, 6))
        elif is_standard(node) and node.op_type == "Mul":
            found = self._match_integer_product(node)
        if found is None or any(map(self._constants.is_constant, (found.left, found.right))):
            return None
        scales = found.quantizers or ()
        return found if all(map(self._constants.is_per_tensor, scales)) else None

    def _match_integer_product(self, node: onnx.NodeProto) -> _Product | None:
        """MatMulInteger of two dynamically quantized tensors, cast to float and multiplied by the product of their scales."""
        for i in (0, 1):
            cast, scale = (self._index.producer(n) for n in (node.input[i], node.input[1 - i]))
            integer = None if cast is None or cast.op_type != "Cast" else self._index.producer(cast.input[0])
            if scale is None or scale.op_type != "Mul" or integer is None or integer.op_type != "MatMulInteger":
                continue
            sources = [self._index.producer(n) for n in integer.input[:2]]
            if len(integer.input) != 4 or any(s is None or s.op_type != "DynamicQuantizeLinear" for s in sources):
                continue
            left, right = (s for s in sources if s is not None)
            written = [(s.output[0], s.output[2]) for s in (left, right)]
            if written != [(integer.input[0], integer.input[2]), (integer.input[1], integer.input[3])]:
                continue
            if sorted(scale.input) != sorted((left.output[1], right.output[1])):
                continue
            quantizers = tuple(Quantizer(s.output[1], s.output[2]) for s in (left, right))
            return _Product(node, integer.input[0], integer.input[1], (quantizers[0], quantizers[1]), is_dynamic=True)
        return None

    # New nodes.

    def _add(
        self, form: _FloatForm, op: str, inputs: Sequence[str], like: onnx.NodeProto | None = None, **attributes: Any
    ) -> str:
        self._count += 1
        output = f"{self._prefix}{self._count}"
        node = helper.make_node(op, list(inputs), [output], name=output, **attributes)
        if like is not None:
            node.attribute.extend(like.attribute)
        form.nodes.append(node)
        return output

    def _copy(self, node: onnx.NodeProto, inputs: Sequence[str], form: _FloatForm) -> str:
        """The output of a node of other inputs: its own, where they are the same."""
        if list(inputs) == list(node.input):
            return str(node.output[0])
        self._count += 1
        copy = copy_node(node)
        copy.input[:] = inputs
        copy.output[:] = [f"{self._prefix}{self._count}"]
        copy.name = copy.output[0]
        form.nodes.append(copy)
        return str(copy.output[0])

    def _dequantize(self, codes: str, quantizer: Quantizer, form: _FloatForm) -> str:
        return self._add(form, "DequantizeLinear", [codes, *quantizer.inputs])

    def _fold(self, tensor: str, quantizer: Quantizer, form: _FloatForm) -> str:
        """A small quantized constant as a float one; empty where it is none."""
        codes, scale = self._constants.array(tensor), self._constants.array(quantizer.scale)
        point = self._constants.array(quantizer.zero_point) if quantizer.zero_point else np.zeros((), np.int64)
        if codes is None or scale is None or point is None or codes.size > _MOST_FOLDED or scale.size != 1:
            return ""
        numbers = (codes.astype(np.int64) - point.astype(np.int64).reshape(())).astype(scale.dtype) * scale.reshape(())
        output = self._add(form, "Constant", [])
        form.nodes[-1].attribute.append(
            helper.make_attribute("value", numpy_helper.from_array(np.asarray(numbers, scale.dtype)))
        )
        return output

    def _casts_to_other(self, node: onnx.NodeProto) -> bool:
        """Whether a Cast is not one between floats: a mask of numbers or of truth values lies before it."""
        return node.op_type == "Cast" and next((a.i for a in node.attribute if a.name == "to"), 0) not in _FLOATS
