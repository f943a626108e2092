# SPDX-License-Identifier: Apache-2.0
"""StofQuantizedAttention nodes as sessions, and what they compute in fp64."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

import stof

Array = np.ndarray[Any, Any]
TENSORS = ("query", "key", "value")
ROUNDINGS = ("score", "scaled_score", "biased_score")


@dataclass(frozen=True)
class Codes:
    """How numbers and codes correspond: number = (code - zero_point) * scale."""

    scale: float
    zero_point: int = 0
    dtype: str = "uint8"

    @property
    def arrays(self) -> tuple[Array, Array]:
        return np.array(self.scale, np.float32), np.array(self.zero_point, self.dtype)

    def numbers(self, codes: Array) -> Array:
        return (codes.astype(np.float64) - self.zero_point) * float(np.float32(self.scale))

    def round(self, numbers: Array) -> Array:
        """Numbers that have codes, the nearest ones."""
        info = np.iinfo(self.dtype)
        steps = np.rint(numbers / float(np.float32(self.scale))) + self.zero_point
        return self.numbers(np.clip(steps, info.min, info.max))


@dataclass
class Node:
    """A node: its tensors by name (query, key, value as [B, heads, rows, size]), codes by name, further operands, attributes."""

    tensors: dict[str, Array]
    codes: dict[str, Codes]
    operands: dict[str, Array] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)

    @property
    def roles(self) -> dict[str, Array]:
        """All operands by role: scales and zero points, then the others."""
        scalars = {
            f"{n}{end}": a
            for n, c in self.codes.items()
            for end, a in zip(("_scale", "_zero_point"), c.arrays, strict=True)
        }
        return {**scalars, **self.operands}

    def model(self, *, constants: bool = True) -> onnx.ModelProto:
        """The node as a model; scales and zero points are initializers or inputs."""
        roles = self.roles
        scalars = [n for n in roles if n not in self.operands] if constants else []
        given = {**self.tensors, **{n: a for n, a in roles.items() if n not in scalars}}
        inputs = [
            helper.make_tensor_value_info(
                n, helper.np_dtype_to_tensor_dtype(a.dtype), [f"{n}{i}" for i in range(a.ndim)]
            )
            for n, a in given.items()
        ]
        attributes = {"operands": " ".join(roles), **self.attributes}
        node = helper.make_node(
            "StofQuantizedAttention", [*self.tensors, *roles], ["out"], "core", domain="stof", **attributes
        )
        out = helper.make_tensor_value_info("out", TensorProto.FLOAT, None)
        graph = helper.make_graph([node], "g", inputs, [out], [numpy_helper.from_array(roles[n], n) for n in scalars])
        imports = [helper.make_opsetid("", 18), helper.make_opsetid("stof", 1)]
        return helper.make_model(graph, opset_imports=imports, ir_version=8)

    def session(self, *, constants: bool = True) -> ort.InferenceSession:
        options = ort.SessionOptions()
        options.register_custom_ops_library(str(stof.library_path()))
        options.log_severity_level = 4
        return ort.InferenceSession(
            self.model(constants=constants).SerializeToString(), options, ["CPUExecutionProvider"]
        )

    def run(self, *, constants: bool = True) -> Array:
        feed = {**self.tensors, **(self.operands if constants else self.roles)}
        found: Array = self.session(constants=constants).run(None, feed)[0]
        return found


def draw(seed: int, *, B: int = 2, H: int = 2, G: int = 1, S: int = 21, T: int = 70, D: int = 16, Dv: int = 24,
         types: str = "uint8 int8 int8") -> dict[str, Array]:  # fmt: skip
    """Random codes of query, key and value."""
    rng = np.random.default_rng(seed)
    shapes = ((B, H, S, D), (B, G, T, D), (B, G, T, Dv))
    codes = [
        rng.integers(0, 256, shape).astype(np.uint8).view(t) for shape, t in zip(shapes, types.split(), strict=True)
    ]
    return dict(zip(TENSORS, codes, strict=True))


def codes_for(tensors: dict[str, Array], **further: Codes) -> dict[str, Codes]:
    """Codes of query, key and value, by which scores are a few units; ``further`` ones of scores and weights."""
    given = {
        n: Codes(0.01, 3 if n == "key" else 120 - 128 * (a.dtype == np.int8), str(a.dtype)) for n, a in tensors.items()
    }
    return {**given, "weight": Codes(1 / 255), **further}


def compute(node: Node, allowed: Array | bool = True) -> tuple[Array, Array]:
    """Outputs and rounded weights in fp64, [B, H, S, Dv] and [B, H, S, T]; rows without an allowed key give 0."""
    query, key, value = (node.codes[n].numbers(node.tensors[n]) for n in TENSORS)
    group = query.shape[1] // key.shape[1]
    key, value = (np.repeat(x, group, 1) for x in (key, value))
    scores = query @ key.transpose(0, 1, 3, 2)
    for name in ROUNDINGS:
        if name == "scaled_score":
            scores = scores * float(np.float32(node.attributes.get("scale", query.shape[-1] ** -0.5)))
        if name == "biased_score" and "bias" in node.operands:
            scores = scores + node.operands["bias"]
        if name in node.codes:
            scores = node.codes[name].round(scores)
    scores = np.where(allowed, scores, -np.inf)
    most = scores.max(-1, keepdims=True)
    powers = np.exp(scores - np.where(np.isfinite(most), most, 0.0))
    total = powers.sum(-1, keepdims=True)
    weights = powers / np.where(total > 0.0, total, 1.0)
    codes = node.codes.get("weight") or Codes(float(np.float32(weights.max()) / np.float32(255)))
    weights = codes.round(weights)
    return weights @ value, weights
