# SPDX-License-Identifier: Apache-2.0
"""Models that quantize what they compute by its range at run time: a rounding may become a step of a whole output."""

from __future__ import annotations

import onnx
from onnx import helper

from stof.graph.index import all_nodes
from stof.symbolic import Symbolic
from stof.verification.perturb import Noisy

_QUANTIZERS = frozenset({"DynamicQuantizeLinear", "DynamicQuantizeLSTM", "DynamicQuantizeMatMul"})  # of whole tensors
_INT8_ACCURACY = 4  # of MatMulNBits: it quantizes its input


def find_quantizers(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    """The nodes that quantize their first input by its own range, in subgraphs and functions, too."""
    nodes = [*model.graph.node, *(n for f in model.functions for n in f.node)]
    return [n for n in all_nodes(nodes) if has_one_scale(n) or _quantizes_input(n)]


def has_one_scale(node: onnx.NodeProto) -> bool:
    """Whether a node quantizes its first input with one scale, by the range of all its rows."""
    return node.op_type in _QUANTIZERS


def _quantizes_input(node: onnx.NodeProto) -> bool:
    return node.op_type == "MatMulNBits" and any(
        a.name == "accuracy_level" and helper.get_attribute_value(a) == _INT8_ACCURACY for a in node.attribute
    )


def quantizer_noise(model: onnx.ModelProto, symbolic: Symbolic) -> dict[str, Noisy]:
    """Noise in the last places of what the main graph computes and then quantizes, by the tensor's name."""
    computed = {o for n in model.graph.node for o in n.output}
    noise_by_name = {}
    for node in find_quantizers(model):
        name = node.input[0]
        shape, dtype = symbolic.shape(name), symbolic.dtype(name)
        channels = shape[-1].constant if shape else None
        if name in computed and channels and dtype == onnx.TensorProto.FLOAT:
            noise_by_name[name] = Noisy(dtype, channels, 0.0)
    return noise_by_name
