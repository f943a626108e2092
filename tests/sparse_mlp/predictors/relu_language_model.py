# SPDX-License-Identifier: Apache-2.0
"""A small language model with ReLU MLPs, trained in NumPy on random text, and its ONNX graph with a KV cache.

The text: each sequence has one of several topics. A topic has its own tokens, and each of them a few likely successors. A model
has to find the topic by attention, and then look up the successors of a token in its MLPs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

Array = npt.NDArray[Any]
Select = Callable[[int, Array, Array], Array]  # layer, tokens [T, K], activations [T, F] -> active neurons [T, F]
VOCABULARY, TOPICS, SIZE, NEURONS, LAYERS, LENGTH = 32, 6, 64, 256, 2, 40
_STEPS, _BATCH, _RATE = 300, 12, 4e-3
_IDLE = 2e-3  # the weight of the sum of activations in the loss, which makes them rare


class RandomText:
    """Draws sequences of tokens, [n, LENGTH]."""

    def __init__(self, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.next = np.full((TOPICS, VOCABULARY, VOCABULARY), 1e-3)
        for topic in range(TOPICS):
            own = rng.choice(VOCABULARY, 14, replace=False)
            for token in range(VOCABULARY):
                self.next[topic, token, rng.choice(own, 3, replace=False)] += (0.6, 0.25, 0.15)
        self.next /= self.next.sum(-1, keepdims=True)

    def draw(self, count: int, rng: np.random.Generator) -> Array:
        """Sequences of random topics."""
        topics = rng.integers(0, TOPICS, count)
        found = np.empty((count, LENGTH), np.int64)
        found[:, 0] = rng.integers(0, VOCABULARY, count)
        for i in range(1, LENGTH):
            limits = self.next[topics, found[:, i - 1]].cumsum(-1)
            found[:, i] = (rng.random((count, 1)) * limits[:, -1:] < limits).argmax(-1)
        return found


def initial_weights(seed: int = 0) -> dict[str, Array]:
    """Random weights, fp32."""
    rng = np.random.default_rng(seed)
    shapes = {"table": (VOCABULARY, SIZE), "head": (SIZE, VOCABULARY)}
    for i in range(LAYERS):
        shapes |= {f"{i}.{n}": (SIZE, SIZE) for n in ("q", "k", "v", "o")}
        shapes |= {f"{i}.fc1": (SIZE, NEURONS), f"{i}.fc2": (NEURONS, SIZE)}
    weights = {n: rng.standard_normal(s) / np.sqrt(s[0] if n != "table" else 1) for n, s in shapes.items()}
    for i in range(LAYERS):
        weights[f"{i}.fc1_bias"], weights[f"{i}.fc2_bias"] = np.zeros(NEURONS), np.zeros(SIZE)
    return {n: w.astype(np.float32) for n, w in weights.items()}


def _normalize(x: Array) -> tuple[Array, Array]:
    factor = 1 / np.sqrt(np.square(x).mean(-1, keepdims=True) + 1e-5)
    return x * factor, factor


def _normalize_backward(gradient: Array, normalized: Array, factor: Array) -> Array:
    return np.asarray((gradient - normalized * (gradient * normalized).mean(-1, keepdims=True)) * factor)


def _softmax(x: Array) -> Array:
    shifted = np.exp(x - x.max(-1, keepdims=True))
    return np.asarray(shifted / shifted.sum(-1, keepdims=True))


class LanguageModel:
    """The model in NumPy, in the precision of its weights."""

    def __init__(self, weights: dict[str, Array]) -> None:
        self.weights = weights

    def logits(self, tokens: Array, select: Select | None = None, saved: dict[str, Array] | None = None) -> Array:
        """Logits [B, S, V] of tokens [B, S].

        Args:
            tokens: token ids.
            select: which neurons are computed; None: all.
            saved: takes the values that the gradient needs.
        """
        w, keep = self.weights, {} if saved is None else saved
        x = w["table"][tokens]
        ahead = np.triu(np.full((tokens.shape[1],) * 2, -1e9, x.dtype), 1)
        for i in range(LAYERS):
            h, keep[f"{i}.factor"] = _normalize(x)
            q, k, v = (h @ w[f"{i}.{n}"] for n in "qkv")
            p = _softmax(q @ k.swapaxes(1, 2) / np.sqrt(SIZE).astype(x.dtype) + ahead)
            mixed = p @ v
            x = x + mixed @ w[f"{i}.o"]
            g, keep[f"{i}.mlp_factor"] = _normalize(x)
            a = np.maximum(g @ w[f"{i}.fc1"] + w[f"{i}.fc1_bias"], 0)
            if select is not None:
                a = np.where(select(i, g.reshape(-1, SIZE), a.reshape(-1, NEURONS)).reshape(a.shape), a, 0)
            x = x + a @ w[f"{i}.fc2"] + w[f"{i}.fc2_bias"]
            keep |= {f"{i}.{n}": t for n, t in (("h", h), ("qt", q), ("kt", k), ("vt", v), ("p", p), ("m", mixed))}
            keep |= {f"{i}.g": g, f"{i}.a": a}
        keep["last"], keep["last_factor"] = _normalize(x)
        return np.asarray(keep["last"] @ w["head"])

    def loss(self, tokens: Array, select: Select | None = None) -> float:
        """The mean cross-entropy of the next token, in nats."""
        return cross_entropy(self.logits(tokens[:, :-1], select), tokens[:, 1:])

    def gradients(self, tokens: Array) -> dict[str, Array]:
        """Of the mean cross-entropy and the penalty of activations."""
        w, s = self.weights, dict[str, Array]()
        logits = self.logits(tokens[:, :-1], None, s)
        count = logits.shape[0] * logits.shape[1]
        d = _softmax(logits)
        np.put_along_axis(d, tokens[:, 1:, None], np.take_along_axis(d, tokens[:, 1:, None], -1) - 1, -1)
        d /= count
        flat = {n: t.reshape(-1, t.shape[-1]) for n, t in s.items() if n.split(".")[-1] in ("h", "m", "g", "a", "last")}
        found = {"head": flat["last"].T @ d.reshape(-1, VOCABULARY)}
        dx = _normalize_backward(d @ w["head"].T, s["last"], s["last_factor"])
        for i in reversed(range(LAYERS)):
            found[f"{i}.fc2"], found[f"{i}.fc2_bias"] = flat[f"{i}.a"].T @ dx.reshape(-1, SIZE), dx.sum((0, 1))
            da = np.where(s[f"{i}.a"] > 0, dx @ w[f"{i}.fc2"].T + np.float32(_IDLE / count), 0)
            found[f"{i}.fc1"], found[f"{i}.fc1_bias"] = flat[f"{i}.g"].T @ da.reshape(-1, NEURONS), da.sum((0, 1))
            dx = dx + _normalize_backward(da @ w[f"{i}.fc1"].T, s[f"{i}.g"], s[f"{i}.mlp_factor"])
            found[f"{i}.o"] = flat[f"{i}.m"].T @ dx.reshape(-1, SIZE)
            dm, p = dx @ w[f"{i}.o"].T, s[f"{i}.p"]
            dp = dm @ s[f"{i}.vt"].swapaxes(1, 2)
            ds = p * (dp - (dp * p).sum(-1, keepdims=True)) / np.sqrt(SIZE).astype(p.dtype)
            parts = {"q": ds @ s[f"{i}.kt"], "k": ds.swapaxes(1, 2) @ s[f"{i}.qt"], "v": p.swapaxes(1, 2) @ dm}
            dh = sum(t @ w[f"{i}.{n}"].T for n, t in parts.items())
            found |= {f"{i}.{n}": flat[f"{i}.h"].T @ t.reshape(-1, SIZE) for n, t in parts.items()}
            dx = dx + _normalize_backward(np.asarray(dh), s[f"{i}.h"], s[f"{i}.factor"])
        found["table"] = np.zeros_like(w["table"])
        np.add.at(found["table"], tokens[:, :-1], dx)
        return found


def cross_entropy(logits: Array, targets: Array) -> float:
    """The mean over all tokens, in nats and fp64."""
    wide = logits.astype(np.float64)
    wide -= wide.max(-1, keepdims=True)
    wide -= np.log(np.exp(wide).sum(-1, keepdims=True))
    return float(-np.take_along_axis(wide, targets[..., None], -1).mean())


def train(text: RandomText, steps: int = _STEPS, seed: int = 0) -> dict[str, Array]:
    """Weights that predict a text, by Adam with a cosine schedule."""
    weights, rng = initial_weights(seed), np.random.default_rng(seed + 1)
    first, second = ({n: np.zeros_like(w) for n, w in weights.items()} for _ in range(2))
    for step in range(1, steps + 1):
        rate = _RATE * min(1.0, step / 30) * 0.5 * (1 + np.cos(np.pi * step / steps))
        for name, gradient in LanguageModel(weights).gradients(text.draw(_BATCH, rng)).items():
            first[name] += np.float32(0.1) * (gradient - first[name])
            second[name] += np.float32(0.02) * (np.square(gradient) - second[name])
            size = np.sqrt(second[name] / np.float32(1 - 0.98**step)) + np.float32(1e-8)
            weights[name] -= np.float32(rate / (1 - 0.9**step)) * first[name] / size
    return weights


def to_onnx(weights: dict[str, Array]) -> onnx.ModelProto:
    """The graph: input_ids [B, S] and pasts [B, P, d] -> logits [B, S, V] and presents [B, P + S, d]."""
    nodes: list[onnx.NodeProto] = []
    constants = {"axes": np.array([-1]), "zero": np.array(0), "one": np.array(1), "two": np.array(2.0, np.float32)}
    constants |= {"tiny": np.array(1e-5, np.float32), "scale": np.array(1 / np.sqrt(SIZE), np.float32)}
    constants |= {"ahead": np.array(-1e9, np.float32), "none": np.array(0, np.float32), "first": np.array([0])}
    constants |= {"second": np.array([1])}

    def add(op: str, inputs: list[str], output: str, **attributes: object) -> str:
        nodes.append(helper.make_node(op, inputs, [output], name=f"/{output}", **attributes))
        return output

    def normalize(x: str, name: str) -> str:
        mean = add("ReduceMean", [add("Pow", [x, "two"], f"{name}.square"), "axes"], f"{name}.mean", keepdims=1)
        return add("Div", [x, add("Sqrt", [add("Add", [mean, "tiny"], f"{name}.sum")], f"{name}.root")], name)

    x = add("Gather", ["table", "input_ids"], "x")
    inputs = [helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["B", "S"])]
    outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["B", "S", VOCABULARY])]
    for i in range(LAYERS):
        h = normalize(x, f"{i}.h")
        q, k, v = (add("MatMul", [h, f"{i}.{n}"], f"{i}.{n}t") for n in "qkv")
        for name, new in (("key", k), ("value", v)):
            inputs.append(helper.make_tensor_value_info(f"past.{i}.{name}", TensorProto.FLOAT, ["B", "P", SIZE]))
            outputs.append(helper.make_tensor_value_info(f"present.{i}.{name}", TensorProto.FLOAT, ["B", "T", SIZE]))
            add("Concat", [f"past.{i}.{name}", new], f"present.{i}.{name}", axis=1)
        if i == 0:  # the mask: key j, counted from the first one, is not behind the query
            shapes = [add("Shape", [t], f"{t}.shape") for t in ("past.0.key", "present.0.key")]
            past, total = (add("Gather", [s, "one"], f"{s}.keys") for s in shapes)
            queries = add("Unsqueeze", [add("Range", [past, total, "one"], "queries"), "second"], "rows")
            keys = add("Unsqueeze", [add("Range", ["zero", total, "one"], "keys"), "first"], "columns")
            add("Where", [add("LessOrEqual", [keys, queries], "allowed"), "none", "ahead"], "mask")
        turned = add("Transpose", [f"present.{i}.key"], f"{i}.turned", perm=[0, 2, 1])
        scores = add("Mul", [add("MatMul", [q, turned], f"{i}.qk"), "scale"], f"{i}.scores")
        p = add("Softmax", [add("Add", [scores, "mask"], f"{i}.masked")], f"{i}.p", axis=-1)
        mixed = add("MatMul", [p, f"present.{i}.value"], f"{i}.m")
        x = add("Add", [x, add("MatMul", [mixed, f"{i}.o"], f"{i}.attended")], f"{i}.x")
        g = normalize(x, f"{i}.g")
        hidden = add("Add", [add("MatMul", [g, f"{i}.fc1"], f"{i}.fc1_matmul"), f"{i}.fc1_bias"], f"{i}.hidden")
        down = add("MatMul", [add("Relu", [hidden], f"{i}.a"), f"{i}.fc2"], f"{i}.down")
        x = add("Add", [x, add("Add", [down, f"{i}.fc2_bias"], f"{i}.y")], f"{i}.out")
    add("MatMul", [normalize(x, "last"), "head"], "logits")
    stored = [numpy_helper.from_array(np.ascontiguousarray(w), n) for n, w in (weights | constants).items()]
    graph = helper.make_graph(nodes, "language_model", inputs, outputs, stored)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
