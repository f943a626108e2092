# SPDX-License-Identifier: Apache-2.0
"""Generated models of any size, to see what the optimizer itself costs. Needs numpy and onnx only.

``python models/large.py KIND COUNT -o FILE`` writes one; ``tools/optimizer_cost.py`` optimizes them and prints the cost.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

_HEADS = 4
_HEAD_SIZE = 8


class _Graph:
    """Collects nodes and initializers. ``add`` appends a node with one output, which it returns."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self.rng = np.random.default_rng(0)

    def add(self, op: str, *inputs: str, **attributes: object) -> str:
        output = f"t{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [output], name=f"n{len(self.nodes)}", **attributes))
        return output

    def array(self, array: np.ndarray) -> str:
        name = f"w{len(self.initializers)}"
        self.initializers.append(numpy_helper.from_array(array, name))
        return name

    def weight(self, *shape: int) -> str:
        return self.array(self.rng.standard_normal(shape, np.float32) * np.float32(0.7 / np.sqrt(shape[0])))

    def constant(self, value: float) -> str:
        """A number in a Constant node of its own."""
        return self.add("Constant", value=numpy_helper.from_array(np.array(value, np.float32)))

    def model(self, width: int, output: str) -> onnx.ModelProto:
        """A model of the input ``x`` [B, S, width], whose output is as large."""
        given, written = (helper.make_tensor_value_info(n, TensorProto.FLOAT, ["B", "S", width]) for n in ("x", output))
        graph = helper.make_graph(self.nodes, "large", [given], [written], self.initializers)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def elementwise_chains(count: int) -> onnx.ModelProto:
    """About ``count`` nodes: MatMuls, and behind each a chain of nine element-wise operators with a residual."""
    graph = _Graph()
    weight, bias, half = graph.weight(32, 32), graph.weight(32), graph.array(np.array(0.5, np.float32))
    x = "x"
    while len(graph.nodes) < count:
        y = graph.add("Add", graph.add("MatMul", x, weight), bias)
        z = graph.add("Mul", graph.add("Sigmoid", y), y)
        z = graph.add("Mul", graph.add("Tanh", graph.add("Mul", z, half)), y)
        x = graph.add("Add", graph.add("Sub", z, bias), x)
    return graph.model(32, x)


def elementwise_only(count: int) -> onnx.ModelProto:
    """One chain of ``count`` element-wise operators."""
    graph = _Graph()
    bias = graph.weight(32)
    x = "x"
    while len(graph.nodes) < count:
        x = graph.add("Tanh", graph.add("Add", x, bias))
    return graph.model(32, x)


def constant_nodes(count: int) -> onnx.ModelProto:
    """About ``count`` nodes, two of five of which are Constant nodes of one number; every read has its own."""
    graph = _Graph()
    weight = graph.weight(32, 32)
    x = "x"
    while len(graph.nodes) < count:
        y = graph.add("Add", graph.add("MatMul", x, weight), graph.constant(0.25))
        x = graph.add("Tanh", graph.add("Mul", y, graph.constant(0.5)))
        x = graph.add("Sub", x, graph.constant(0.125))
    return graph.model(32, x)


def attentions(count: int) -> onnx.ModelProto:
    """``count`` small causal attentions in a row, of dynamic batch and length, with one mask."""
    graph = _Graph()
    width = _HEADS * _HEAD_SIZE
    causal = _causal_mask(graph, "x")
    weights = [graph.weight(width, width) for _ in range(3)]
    x = "x"
    for _ in range(count):
        x = _attention(graph, x, weights, causal, _HEADS)
    return graph.model(width, x)


def encoder(count: int, width: int = 256) -> onnx.ModelProto:
    """A Transformer of about ``count`` nodes, 29 a layer, with weights of its own: 100 MB at 1,000 nodes."""
    graph = _Graph()
    causal = _causal_mask(graph, "x")
    x = "x"
    while len(graph.nodes) < count:
        weights = [graph.weight(width, width) for _ in range(4)]
        normal = graph.add("LayerNormalization", x, graph.weight(width), graph.weight(width), axis=-1)
        y = _attention(graph, normal, weights[:3], causal, width // 64)
        x = graph.add("Add", graph.add("MatMul", y, weights[3]), x)
        normal = graph.add("LayerNormalization", x, graph.weight(width), graph.weight(width), axis=-1)
        y = graph.add("Add", graph.add("MatMul", normal, graph.weight(width, 4 * width)), graph.weight(4 * width))
        y = graph.add("Mul", graph.add("Sigmoid", y), y)
        y = graph.add("Add", graph.add("MatMul", y, graph.weight(4 * width, width)), graph.weight(width))
        x = graph.add("Add", y, x)
    return graph.model(width, x)


def _causal_mask(graph: _Graph, x: str) -> str:
    """[S, S] of 0 and the lowest float, from the length of ``x``."""
    zero, one = (graph.array(np.array(n, np.int64)) for n in (0, 1))
    length = graph.add("Gather", graph.add("Shape", x), one, axis=0)
    positions = graph.add("Range", zero, length, one)
    rows = graph.add("Unsqueeze", positions, graph.array(np.array([1], np.int64)))
    allowed = graph.add("LessOrEqual", positions, rows)
    added = [graph.array(np.array(n, np.float32)) for n in (0.0, np.finfo(np.float32).min)]
    return graph.add("Where", allowed, *added)


def _attention(graph: _Graph, x: str, weights: Sequence[str], mask: str, heads: int) -> str:
    """Masked attention of ``x`` [B, S, N], projected by three weights; returns [B, S, N]."""
    split = graph.array(np.array([0, 0, heads, -1], np.int64))
    merged = graph.array(np.array([0, 0, -1], np.int64))
    query, key, value = (
        graph.add("Transpose", graph.add("Reshape", graph.add("MatMul", x, weight), split), perm=perm)
        for weight, perm in zip(weights, ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3]), strict=True)
    )
    scores = graph.add("Mul", graph.add("MatMul", query, key), graph.array(np.array(0.125, np.float32)))
    probabilities = graph.add("Softmax", graph.add("Add", scores, mask), axis=-1)
    rows = graph.add("Transpose", graph.add("MatMul", probabilities, value), perm=[0, 2, 1, 3])
    return graph.add("Reshape", rows, merged)


KINDS: dict[str, Callable[[int], onnx.ModelProto]] = {
    f.__name__: f for f in (elementwise_chains, elementwise_only, constant_nodes, attentions, encoder)
}


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="Writes a generated model.")
    parser.add_argument("kind", choices=KINDS, metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("count", type=int, metavar="COUNT", help="nodes, or attentions")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE")
    arguments = parser.parse_args()
    onnx.save(KINDS[arguments.kind](arguments.count), str(arguments.output))
    return 0


if __name__ == "__main__":
    sys.exit(main())
