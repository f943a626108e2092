# SPDX-License-Identifier: Apache-2.0
"""Quantized attention in one form: MatMul, Softmax and MatMul in float, with QuantizeLinear and DequantizeLinear between.

It computes what the graph computes. Query, key and value are DequantizeLinear of codes, behind which axes move, so that the
codes can be the operands of a site. QOperator nodes and MatMulInteger become what they stand for. Masks that are rounded
before they are added are added unrounded, where the lowest code still forbids.
"""

from __future__ import annotations

import onnx

from stof.attention.move_paths import MOVES
from stof.attention.quantized.core_form import CoreForm, RoundedForms
from stof.attention.quantized.core_search import CoreSearch
from stof.attention.quantized.parameters import is_dequantize, is_quantize, quantizer_of
from stof.attention.quantized.products import QuantizedProduct
from stof.errors import UnsupportedError
from stof.graph.index import all_nodes, is_standard
from stof.mask.roundings import Quantizer
from stof.mask.site import FORBIDDING_VALUE

_MOST_NODES = 40
_QUANTIZES = frozenset({"QuantizeLinear", "DynamicQuantizeLinear", "QLinearMatMul"})
_MASKS = frozenset({"Add", "Sub", "Where", "Max"})  # operators by which scores are masked


def find_rounded_forms(model: onnx.ModelProto, prefix: str = "stof_rounded_") -> RoundedForms:
    """The quantized attentions of the main graph with all of their roundings, in the order of the graph.

    Args:
        model: the model.
        prefix: of the names of new tensors.
    """
    if not any(n.op_type in _QUANTIZES for n in all_nodes(model.graph.node)):
        return RoundedForms()
    search = _RoundedSearch(model, prefix)
    cores = search.run()
    found = {core.softmax for core in cores}
    return RoundedForms(cores, {s: reason for s, reason in search.refused.items() if s not in found})


class _RoundedSearch(CoreSearch):
    """Keeps all roundings but those of masks."""

    _drops = False  # on the way through a mask

    def round(self, found: str, rounds: Quantizer, read: Quantizer, form: CoreForm) -> str:
        if not self._drops:
            return form.dequantize(form.quantize(found, rounds), read)
        steps = self.constants.steps(rounds)
        if steps is None or steps.lowest > FORBIDDING_VALUE:
            raise UnsupportedError("the mask is rounded, and the lowest code does not forbid")
        form.unrounded.add(found)
        return found

    def round_by_range(self, found: str, form: CoreForm) -> str:
        return found if self._drops else form.dequantize(*form.quantize_by_range(found))

    def input_of(self, op: str, tensor: str, codes_of: Quantizer | None, form: CoreForm, depth: int) -> str:
        before = form.products
        found = super().input_of(op, tensor, codes_of, form, depth)
        if form.products > before or tensor in form.with_products:
            form.with_products.add(tensor)
            return found
        if self._drops or op not in _MASKS:
            return found
        known, form.known, self._drops = form.known, {}, True
        try:
            return super().input_of(op, tensor, codes_of, form, depth)
        except UnsupportedError:
            return found  # rounded, a bias like any other
        finally:
            form.known, self._drops = known, False

    def operand(self, product: QuantizedProduct, side: int, form: CoreForm) -> str:
        """DequantizeLinear of codes, and the moves behind it."""
        tensor = (product.left, product.right)[side]
        quantizer = None if product.quantizers is None else product.quantizers[side]
        moves: list[onnx.NodeProto] = []
        is_codes = quantizer is not None
        for _ in range(_MOST_NODES):
            node = self.index.producer(tensor)
            if node is None:
                break
            if node.op_type == "DynamicQuantizeLinear" and is_codes:
                tensor, quantizer = self._codes_by_range(node, moves, form)
                break
            if is_standard(node) and node.op_type in MOVES:
                moves.insert(0, node)
            elif is_codes and is_quantize(node):
                assert quantizer is not None
                if not self.constants.are_equal(quantizer_of(node, 1), quantizer):
                    break
                is_codes = False
            elif not is_codes and is_dequantize(node):
                read = quantizer_of(node, 1)
                if not self.constants.is_per_tensor(read):
                    raise UnsupportedError("query, key or value has a scale for each channel")
                if quantizer is not None and not self.constants.are_equal(read, quantizer):
                    break
                quantizer, is_codes = quantizer or read, True
            else:
                break
            tensor = node.input[0]
        if quantizer is None:
            raise UnsupportedError("query, key or value is not quantized")
        if not is_codes:
            tensor = self._codes_of(tensor, quantizer, form)
        result = form.dequantize(tensor, quantizer)
        for node in moves:
            result = form.add(node.op_type, [result, *node.input[1:]], like=node)
        return result

    def _codes_by_range(
        self, node: onnx.NodeProto, moves: list[onnx.NodeProto], form: CoreForm
    ) -> tuple[str, Quantizer]:
        """The codes of a DynamicQuantizeLinear, in front of the moves before it, which are added to ``moves``."""
        tensor, inner = str(node.input[0]), list[onnx.NodeProto]()
        while (mover := self.index.producer(tensor)) is not None and is_standard(mover) and mover.op_type in MOVES:
            if len(inner) > _MOST_NODES or mover.op_type == "Expand":
                break
            inner.insert(0, mover)
            tensor = mover.input[0]
        if not inner:
            return str(node.output[0]), Quantizer(node.output[1], node.output[2])
        moves[:0] = inner
        return form.quantize_by_range(tensor)

    def _codes_of(self, tensor: str, quantizer: Quantizer, form: CoreForm) -> str:
        """The codes of a float tensor: those that the graph computes anyway, if it does."""
        for user in self.index.consumers(tensor):
            is_same = is_quantize(user) and self.constants.are_equal(quantizer_of(user, 1), quantizer)
            if is_same and user.input[0] == tensor:
                return str(user.output[0])
        return form.quantize(tensor, quantizer)
