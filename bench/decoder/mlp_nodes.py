# SPDX-License-Identifier: Apache-2.0
"""The nodes of a decoder's MLP."""

from __future__ import annotations

from statistics import NormalDist

from bench.decoder.graph import DecoderGraph


def add_mlp(graph: DecoderGraph, path: str, normed: str) -> str:
    """The nodes of an MLP; the name of what it adds to the hidden states."""
    form, shape = graph.shape.mlp, graph.shape
    gate = graph.matmul(f"{path}/{'gate_proj' if form.is_gated else 'fc1'}/MatMul", normed, shape.hidden, shape.inner)
    if form.shift or form.idle:
        bias = graph.weight(f"{path}/fc1.bias", (shape.inner,), "gate_bias")
        gate = graph.add("Add", f"{path}/fc1/Add", [gate, bias])[0]
    if form.has_top_k:
        gate = _top_k(graph, path, gate, form.active or 1.0)
    hidden = _activate(graph, path, gate, form.activation)
    if form.is_gated:
        up = graph.matmul(f"{path}/up_proj/MatMul", normed, shape.hidden, shape.inner)
        hidden = graph.add("Mul", f"{path}/Mul", [hidden, up])[0]
    return graph.matmul(f"{path}/{'down_proj' if form.is_gated else 'fc2'}/MatMul", hidden, shape.inner, shape.hidden)


def _activate(graph: DecoderGraph, path: str, gate: str, activation: str) -> str:
    path = f"{path}/act_fn"
    if activation == "silu":
        sigmoid = graph.add("Sigmoid", f"{path}/Sigmoid", [gate])[0]
        return graph.add("Mul", f"{path}/Mul", [gate, sigmoid])[0]
    if activation == "gelu_tanh":
        return graph.add("Gelu", f"{path}/Gelu", [gate], approximate="tanh")[0]
    positive = graph.add("Relu", f"{path}/Relu", [gate])[0]
    return graph.add("Mul", f"{path}/Mul", [positive, positive])[0] if activation == "relu2" else positive


def _top_k(graph: DecoderGraph, path: str, gate: str, active: float) -> str:
    """Gemma 3n's threshold: relu(gate - (mean + standard deviation x quantile)), over the neurons of a token."""
    path = f"{path}/top_k"
    axis = graph.constant(f"{path}/axis", [-1])
    mean = graph.add("ReduceMean", f"{path}/ReduceMean", [gate, axis], keepdims=1)[0]
    centered = graph.add("Sub", f"{path}/Sub", [gate, mean])[0]
    square = graph.add("Mul", f"{path}/Mul", [centered, centered])[0]
    variance = graph.add("ReduceMean", f"{path}/ReduceMean_1", [square, axis], keepdims=1)[0]
    deviation = graph.add("Sqrt", f"{path}/Sqrt", [variance])[0]
    quantile = graph.number(f"{path}/quantile", NormalDist().inv_cdf(1 - active))
    above = graph.add("Mul", f"{path}/Mul_1", [deviation, quantile])[0]
    threshold = graph.add("Add", f"{path}/Add", [mean, above])[0]
    return graph.add("Relu", f"{path}/Relu", [graph.add("Sub", f"{path}/Sub_1", [gate, threshold])[0]])[0]
