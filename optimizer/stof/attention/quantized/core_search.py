# SPDX-License-Identifier: Apache-2.0
"""Finds attention whose scores or weights are rounded, and makes its float form.

In the float form query, key and value meet in float, and scores and weights are never rounded. Quantizers of query, key and
value fall, too, where a float tensor lies before them. The quantizer of the result stays, behind the nodes that move its axes,
so that the search for sites sees the layout: rounding with one scale commutes with moves.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx

from stof.attention.move_paths import MOVES
from stof.attention.quantized.core_form import CoreForm, NodeNames, QuantizedCore
from stof.attention.quantized.parameters import CONTRIB, QuantizedConstants, is_dequantize, is_quantize, quantizer_of
from stof.attention.quantized.products import QuantizedProduct, match_product
from stof.errors import UnsupportedError
from stof.graph.index import GraphIndex, describe, domain_of, is_standard, opset_of
from stof.graph.names import unused_prefix
from stof.mask.roundings import Quantizer

_MOST_DEPTH = 40
_MOST_CHAIN = 24
_ELEMENTWISE = frozenset(
    {"Add", "Sub", "Mul", "Div", "Where", "Max", "Min", "Clip", "Neg", "Tanh", "IsNaN", "Dropout", "Cast", "CastLike"}
)
_FLOATS = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)
_BINARY = {"QLinearAdd": "Add", "QLinearMul": "Mul"}
_LEAST_INPUTS = {"QLinearAdd": 7, "QLinearMul": 7, "QLinearWhere": 8, "QLinearSoftmax": 4}  # a damaged node has fewer


def find_float_cores(model: onnx.ModelProto) -> tuple[QuantizedCore, ...]:
    """The quantized attentions of the main graph in float form, in the order of the graph."""
    return CoreSearch(model, "stof_float_").run()


class CoreSearch:
    """Walks backwards from each product of two computed tensors; a softmax on the way makes it that of weights and values.

    Args:
        model: its main graph is searched.
        prefix: of the names of new tensors.
    """

    def __init__(self, model: onnx.ModelProto, prefix: str) -> None:
        self.index = GraphIndex(model.graph)
        self.constants = QuantizedConstants(self.index)
        self._graph = model.graph
        self._opset = opset_of(model)
        self._names = NodeNames(unused_prefix(model.graph, prefix))
        self.refused: dict[str, str] = {}  # why a core has no form, by the output of its softmax

    def run(self) -> tuple[QuantizedCore, ...]:
        """The cores, none of which shares a node with another one."""
        cores: list[QuantizedCore] = []
        taken: set[str] = set()
        for node in self._graph.node:
            product = self.product_of(node)
            core = None if product is None else self._match_core(product)
            # Two products may read one softmax: the second one keeps the quantized weights, and with them the first.
            if core is not None and not taken & core.replaced and core.softmax not in {c.softmax for c in cores}:
                taken |= core.replaced
                cores.append(core)
        return tuple(cores)

    def product_of(self, node: onnx.NodeProto | None) -> QuantizedProduct | None:
        """The product of two computed tensors that a node writes."""
        return match_product(self.index, self.constants, node)

    def _match_core(self, product: QuantizedProduct) -> QuantizedCore | None:
        for side in (0, 1):  # on which the weights are
            form = CoreForm(self._names, self.constants)
            try:
                weights = self._weights_of(product, side, form)
                if len(form.softmaxes) != 1 or form.products != 1 or not form.is_rounded:
                    continue
                values = self.operand(product, 1 - side, form)
            except UnsupportedError as error:
                if form.softmaxes:
                    self.refused[form.softmaxes[0]] = str(error)
                elif source := self._softmax_behind(product, side):
                    self.refused[source] = str(error)
                continue
            result = form.add("MatMul", [values, weights] if side else [weights, values])
            replaced = frozenset(self._write_result(product, result, form))
            source = form.softmaxes[0]
            node = self.index.producer(source)
            name = node.name if node is not None and node.name else source
            unrounded = frozenset(form.unrounded)
            return QuantizedCore(name, source, form.known[source], tuple(form.nodes), replaced, unrounded)
        return None

    def _softmax_behind(self, product: QuantizedProduct, side: int) -> str:
        """The output of the softmax that an operand of a product is made of by nodes of one input; empty: it is not."""
        tensor = (product.left, product.right)[side]
        for _ in range(_MOST_CHAIN):
            node = self.index.producer(tensor)
            if node is None or node.op_type in ("Softmax", "QLinearSoftmax"):
                return "" if node is None else tensor
            tensor = node.input[2 if node.op_type == "Where" else 0]
        return ""

    def _weights_of(self, product: QuantizedProduct, side: int, form: CoreForm) -> str:
        tensor = (product.left, product.right)[side]
        if product.quantizers is None:
            return self.number(tensor, form, 0)
        form.is_rounded = True
        return self.number_of_codes(tensor, product.quantizers[side], form, 0)

    # What another form does otherwise.

    def round(self, found: str, rounds: Quantizer, read: Quantizer, form: CoreForm) -> str:
        """A tensor behind a rounding of the graph: by ``rounds``, whose codes are read by ``read``."""
        return found

    def round_by_range(self, found: str, form: CoreForm) -> str:
        """A tensor behind a rounding whose scale is that of its own range."""
        return found

    def operand(self, product: QuantizedProduct, side: int, form: CoreForm) -> str:
        """Query, key or value of a product."""
        tensor = (product.left, product.right)[side]
        if product.quantizers is None:
            return self._plain(tensor, form, 0)
        return self._plain_of_codes(tensor, product.quantizers[side], form, 0)

    def input_of(self, op: str, tensor: str, codes_of: Quantizer | None, form: CoreForm, depth: int) -> str:
        """What stands for an input of an elementwise operator; with a quantizer it is codes."""
        if codes_of is not None:
            return self.number_of_codes(tensor, codes_of, form, depth)
        return self.number(tensor, form, depth) if tensor else tensor

    # The way back from the weights to the scores' product.

    def number(self, tensor: str, form: CoreForm, depth: int) -> str:
        """What stands for a float tensor."""
        if tensor not in form.known:
            form.known[tensor] = tensor  # of a cycle, which a damaged graph may have
            form.known[tensor] = self._find_number(tensor, form, depth)
        return form.known[tensor]

    def _find_number(self, tensor: str, form: CoreForm, depth: int) -> str:
        node = self.index.producer(tensor)
        if node is None or depth > _MOST_DEPTH or node.output[0] != tensor:
            return tensor
        product = self.product_of(node)
        if product is not None and product.rounds is None:
            return self._scores(product, form)
        if is_dequantize(node):
            quantizer = quantizer_of(node, 1)
            folded = form.fold(node.input[0], quantizer)
            if folded or self.constants.is_constant(tensor):
                return folded or tensor
            form.is_rounded = True
            return self.number_of_codes(node.input[0], quantizer, form, depth + 1)
        if not is_standard(node):
            return tensor
        if node.op_type == "Softmax":
            return self._softmax(node, self.number(node.input[0], form, depth + 1), form)
        if node.op_type in _ELEMENTWISE and not _casts_to_other(node):
            return form.copy(node, [self.input_of(node.op_type, n, None, form, depth + 1) for n in node.input])
        if node.op_type in MOVES:
            return form.copy(node, [self.number(node.input[0], form, depth + 1), *node.input[1:]])
        return tensor

    def number_of_codes(self, codes: str, quantizer: Quantizer, form: CoreForm, depth: int) -> str:
        """What stands for the numbers of codes that are read by a quantizer."""
        node = self.index.producer(codes)
        if self.constants.is_constant(codes):
            return form.fold(codes, quantizer) or form.dequantize(codes, quantizer)
        if node is None or depth > _MOST_DEPTH:
            return form.dequantize(codes, quantizer)
        if is_quantize(node):
            return self.round(self.number(node.input[0], form, depth + 1), quantizer_of(node, 1), quantizer, form)
        if node.op_type == "DynamicQuantizeLinear" and codes == node.output[0]:
            return self.round_by_range(self.number(node.input[0], form, depth + 1), form)
        product = self.product_of(node)
        if product is not None and product.rounds is not None:
            return self.round(self._scores(product, form), product.rounds, quantizer, form)
        if is_standard(node) and node.op_type in MOVES:
            moved = self.number_of_codes(node.input[0], quantizer, form, depth + 1)
            return form.add(node.op_type, [moved, *node.input[1:]], like=node)
        if domain_of(node) != CONTRIB or len(node.input) < _LEAST_INPUTS.get(node.op_type, 0):
            return form.dequantize(codes, quantizer)
        if node.op_type in _BINARY:
            op = _BINARY[node.op_type]
            found = form.add(op, self._coded_inputs(op, node, (0, 3), form, depth + 1))
            return self.round(found, quantizer_of(node, 6), quantizer, form)
        if node.op_type == "QLinearWhere":
            found = form.add("Where", [node.input[0], *self._coded_inputs("Where", node, (1, 4), form, depth + 1)])
            return self.round(found, quantizer_of(node, 7), quantizer, form)
        if node.op_type == "QLinearSoftmax":
            source = self.number_of_codes(node.input[0], quantizer_of(node, 1), form, depth + 1)
            return self.round(self._softmax(node, source, form), quantizer_of(node, 3), quantizer, form)
        return form.dequantize(codes, quantizer)

    def _coded_inputs(
        self, op: str, node: onnx.NodeProto, places: Sequence[int], form: CoreForm, depth: int
    ) -> list[str]:
        return [self.input_of(op, node.input[i], quantizer_of(node, i + 1), form, depth) for i in places]

    def _softmax(self, node: onnx.NodeProto, source: str, form: CoreForm) -> str:
        attributes = {a.name: a.i for a in node.attribute}
        if attributes.get("opset", self._opset) < 13 and node.op_type != "Softmax":
            raise UnsupportedError(f"{describe(node)} flattens axes, as Softmax did before opset 13")
        form.softmaxes.append(node.output[0])
        if node.op_type == "Softmax" and source == node.input[0]:
            form.known[node.output[0]] = node.output[0]
            return str(node.output[0])
        result = form.add("Softmax", [source], axis=attributes.get("axis", -1))
        form.nodes[-1].name = node.name or node.output[0]  # by which options name the site
        form.known[node.output[0]] = result
        return result

    def _scores(self, product: QuantizedProduct, form: CoreForm) -> str:
        form.products += 1
        form.is_rounded |= product.is_quantized
        operands = [self.operand(product, side, form) for side in (0, 1)]
        if product.node.op_type == "MatMul":
            return form.copy(product.node, operands)
        return form.add("MatMul", operands)

    # Query, key and value.

    def _plain(self, tensor: str, form: CoreForm, depth: int) -> str:
        """A query, key or value without quantizers that only moves separate from it."""
        node = self.index.producer(tensor)
        if node is None or depth > _MOST_DEPTH:
            return tensor
        if is_dequantize(node):
            return self._plain_of_codes(node.input[0], quantizer_of(node, 1), form, depth + 1)
        if is_standard(node) and node.op_type in MOVES:
            return form.copy(node, [self._plain(node.input[0], form, depth + 1), *node.input[1:]])
        return tensor

    def _plain_of_codes(self, codes: str, quantizer: Quantizer, form: CoreForm, depth: int) -> str:
        node = self.index.producer(codes)
        if node is None or depth > _MOST_DEPTH:
            return form.dequantize(codes, quantizer)
        if is_quantize(node) or (node.op_type == "DynamicQuantizeLinear" and codes == node.output[0]):
            return self._plain(node.input[0], form, depth + 1)
        if is_standard(node) and node.op_type in MOVES and self.constants.is_per_tensor(quantizer):
            moved = self._plain_of_codes(node.input[0], quantizer, form, depth + 1)
            return form.add(node.op_type, [moved, *node.input[1:]], like=node)
        return form.dequantize(codes, quantizer)

    # The result.

    def _write_result(self, product: QuantizedProduct, result: str, form: CoreForm) -> set[str]:
        """Nodes from a float result to what the graph reads, with moves before quantizers; the outputs that they replace."""
        tensor = str(product.node.output[0])
        replaced = {tensor}
        points: list[tuple[str, Quantizer]] = []
        moves: list[onnx.NodeProto] = []
        if product.rounds is not None:
            points.append(("QuantizeLinear", product.rounds))
        for _ in range(_MOST_CHAIN):
            users = self.index.consumers(tensor)
            if len(users) != 1 or tensor in self.index.outputs or tensor in self.index.captured:
                break
            user = users[0]
            if user.input[0] != tensor or tensor in list(user.input)[1:]:
                break
            if is_quantize(user) or is_dequantize(user):
                quantizer = quantizer_of(user, 1)
                if not self.constants.is_per_tensor(quantizer) or not quantizer.zero_point:
                    break
                points.append(("QuantizeLinear" if is_quantize(user) else "DequantizeLinear", quantizer))
            elif is_standard(user) and user.op_type in MOVES:
                moves.append(user)
            else:
                break
            tensor = user.output[0]
            replaced.add(tensor)
        for node in moves:
            result = form.add(node.op_type, [result, *node.input[1:]], like=node)
        for op, quantizer in self._without_repetitions(points):
            result = form.add(op, [result, *quantizer.inputs])
        form.nodes[-1].output[0] = tensor
        return replaced

    def _without_repetitions(self, points: Sequence[tuple[str, Quantizer]]) -> list[tuple[str, Quantizer]]:
        """Quantizers without those that round codes to themselves."""
        kept: list[tuple[str, Quantizer]] = []
        for op, quantizer in points:
            repeats = op == "QuantizeLinear" and kept and kept[-1][0] == "DequantizeLinear"
            if repeats and self.constants.are_equal(kept[-1][1], quantizer):
                kept.pop()
            else:
                kept.append((op, quantizer))
        return kept


def _casts_to_other(node: onnx.NodeProto) -> bool:
    """Whether a Cast is not one between floats: a mask of numbers or of truth values lies before it."""
    return node.op_type == "Cast" and next((a.i for a in node.attribute if a.name == "to"), 0) not in _FLOATS
