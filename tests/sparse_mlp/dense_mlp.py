# SPDX-License-Identifier: Apache-2.0
"""StofSparseMLP by its definition in docs/reference/sparse-mlp.md, in fp64 NumPy, and random problems of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import erf
from typing import Any

import numpy as np
import numpy.typing as npt
from ml_dtypes import bfloat16

Array = npt.NDArray[Any]
NAMES = (
    "input", "gate", "gate_weight", "up_weight", "down_weight", "gate_bias", "up_bias", "down_bias", "threshold",
    "predictor_down", "predictor_up", "gate_scales", "gate_zero_points", "up_scales", "up_zero_points", "down_scales",
    "down_zero_points", "predictor_down_scales", "predictor_up_scales",
)  # fmt: skip
_ERF = np.vectorize(erf, otypes=[np.float64])


@dataclass(frozen=True)
class Case:
    """A random problem. density: the share of neurons that are active for a token, 0 to 1."""

    lead: tuple[int, ...] = (1,)
    K: int = 96
    F: int = 160
    N: int = 80
    R: int = 12
    density: float = 0.1
    activation: str = "relu"
    selection: str = "nonzero"
    up: bool = True
    biases: bool = False
    dtype: Any = np.float32
    bits: int = 0
    block: int = 32
    zero_points: bool = False
    level: int = 0
    thresholds: str = "one"  # or "each"
    quantized_predictor: bool = False
    predictor_relu: bool = False

    @property
    def tokens(self) -> int:
        """The number of tokens."""
        return int(np.prod(self.lead))


def activate(name: str, x: Array) -> Array:
    """An activation in fp64."""
    with np.errstate(all="ignore"):
        return {
            "none": lambda: x,
            "relu": lambda: np.where(x < 0, 0.0, x),
            "relu2": lambda: np.where(x < 0, 0.0, x) ** 2,
            "gelu": lambda: x * 0.5 * (1 + _ERF(x / np.sqrt(2))),
            "gelu_tanh": lambda: x * 0.5 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
            "silu": lambda: x / (1 + np.exp(-x)),
        }[name]()


@dataclass
class Problem:
    """Inputs of a node by name, and what they mean in fp64."""

    case: Case
    feeds: dict[str, Array] = field(default_factory=dict)
    weights: dict[str, Array] = field(default_factory=dict)  # dequantized: gate, up [F, K], down [F, N]

    def attributes(self) -> dict[str, Any]:
        """Attributes of the node."""
        c = self.case
        quantized = {"bits": c.bits, "block_size": c.block, "accuracy_level": c.level} if c.bits else {}
        relu = {"predictor_activation": "relu"} if c.predictor_relu else {}
        return {"activation": c.activation, "selection": c.selection, **quantized, **relu}

    def active(self) -> tuple[Array, Array]:
        """Activated gate values and which of them are active, [tokens, F]."""
        c, f = self.case, {n: a.astype(np.float64) for n, a in self.feeds.items() if a.dtype != np.uint8}
        if c.selection == "predictor":
            x = f["input"].reshape(c.tokens, c.K)
            down, up = (f.get(n, self.weights.get(n)) for n in ("predictor_down", "predictor_up"))
            low = x @ down.T
            scores = np.where(low < 0, 0.0, low) @ up.T if c.predictor_relu else low @ up.T
            gate = x @ self.weights["gate"].T + f.get("gate_bias", 0.0)
            return activate(c.activation, gate), ~(scores <= f["threshold"])
        a = activate(c.activation, f["gate"].reshape(c.tokens, c.F))
        return a, a != 0 if c.selection == "nonzero" else ~(np.abs(a) <= f["threshold"])

    def expected(self) -> tuple[Array, Array]:
        """Output, and the sum of the absolute values of what it adds, [tokens, N]."""
        c, f = self.case, {n: a.astype(np.float64) for n, a in self.feeds.items() if a.dtype != np.uint8}
        a, is_active = self.active()
        up, size = np.ones_like(a), np.ones_like(a)
        if "up" in self.weights:
            x = f["input"].reshape(c.tokens, c.K)
            up = x @ self.weights["up"].T + f.get("up_bias", 0.0)
            size = np.abs(x) @ np.abs(self.weights["up"]).T + np.abs(f.get("up_bias", 0.0))
        gate_size = np.abs(a)
        if c.selection == "predictor":
            x = f["input"].reshape(c.tokens, c.K)
            gate_size = np.abs(x) @ np.abs(self.weights["gate"]).T + np.abs(f.get("gate_bias", 0.0))
        h = np.where(is_active, a * up, 0.0)
        size = np.where(is_active, gate_size * size, 0.0)
        bias = f.get("down_bias", 0.0)
        return h @ self.weights["down"] + bias, size @ np.abs(self.weights["down"]) + np.abs(bias)


def _quantize(rng: np.random.Generator, problem: Problem, name: str, rows: int, size: int) -> None:
    """Draws a quantized weight and what it means. The down weight has its blocks along the neurons."""
    c, is_down = problem.case, name == "down"
    levels = 1 << c.bits
    values = rng.integers(0, levels, (rows, size), dtype=np.uint8)
    blocks = -(-(rows if is_down else size) // c.block)
    shape = (blocks, size) if is_down else (rows, blocks)
    scales = (rng.uniform(0.5, 1.5, shape) / levels).astype(c.dtype)
    zeros = np.full(shape, levels // 2, np.uint8)
    if c.zero_points:
        zeros = rng.integers(0, levels, shape, dtype=np.uint8)
    repeat = (lambda a: a.repeat(c.block, 0)[:rows]) if is_down else (lambda a: a.repeat(c.block, 1)[:, :size])
    problem.weights[name] = (values.astype(float) - repeat(zeros)) * repeat(scales.astype(float))
    wide = size if is_down else blocks * c.block
    padded = np.zeros((rows, wide + wide % 2), np.uint8)
    padded[:, :size] = values
    packed = padded[:, ::2] | padded[:, 1::2] << 4 if c.bits == 4 else padded[:, :wide]
    problem.feeds[f"{name}_weight"] = packed if is_down else packed.reshape(rows, blocks, -1)
    problem.feeds[f"{name}_scales"] = scales
    if c.zero_points:
        if not is_down and c.bits == 4:
            even = np.zeros((rows, blocks + blocks % 2), np.uint8)
            even[:, :blocks] = zeros
            zeros = even[:, ::2] | even[:, 1::2] << 4
        problem.feeds[f"{name}_zero_points"] = zeros


def draw(case: Case, seed: int = 0) -> Problem:
    """A problem with the density of the case, up to rounding."""
    rng = np.random.default_rng(seed)
    c = case
    problem = Problem(c)

    def normal(*shape: int) -> Array:
        return rng.standard_normal(shape).astype(c.dtype)

    weights = (["gate"] if c.selection == "predictor" else []) + (["up"] if c.up else []) + ["down"]
    for name in weights:
        size = c.N if name == "down" else c.K
        if c.bits:
            _quantize(rng, problem, name, c.F, size)
        else:
            problem.feeds[f"{name}_weight"] = (normal(c.F, size).astype(float) / np.sqrt(size)).astype(c.dtype)
            problem.weights[name] = problem.feeds[f"{name}_weight"].astype(np.float64)
        if c.biases:
            problem.feeds[f"{name}_bias"] = normal(c.N if name == "down" else c.F)
    # Positive gate values of the active neurons, the others negative.
    is_active = rng.random((*c.lead, c.F)) < c.density
    size = np.abs(rng.standard_normal((*c.lead, c.F))) + 0.1
    if c.selection != "predictor":
        gate = np.where(is_active, size, -size)
        if c.activation not in ("relu", "relu2"):
            gate = np.where(is_active, rng.choice([-1.0, 1.0], gate.shape) * size, 0.0)
        problem.feeds["gate"] = gate.astype(c.dtype)
    problem.feeds["input"] = normal(*c.lead, c.K) if c.up or c.selection == "predictor" else problem.feeds["gate"]
    if c.quantized_predictor:
        _quantized_predictor(rng, problem)
    elif c.selection == "predictor":
        problem.feeds["predictor_down"], problem.feeds["predictor_up"] = normal(c.R, c.K), normal(c.F, c.R)
        x = problem.feeds["input"].reshape(c.tokens, c.K).astype(float)
        low = x @ problem.feeds["predictor_down"].T.astype(float)
        scores = (np.maximum(low, 0) if c.predictor_relu else low) @ problem.feeds["predictor_up"].T.astype(float)
        problem.feeds["threshold"] = _thresholds(c, scores)
    elif c.selection == "magnitude":
        values = np.abs(activate(c.activation, problem.feeds["gate"].reshape(c.tokens, c.F).astype(float)))
        problem.feeds["threshold"] = _thresholds(c, values)
    return problem


def _quantized_predictor(rng: np.random.Generator, problem: Problem) -> None:
    """Draws one whose scores are far from the threshold: tokens are multiples of one, rows follow its projection."""
    c, feeds = problem.case, problem.feeds
    token = rng.standard_normal(c.K)
    feeds["input"] = (rng.choice([-1.0, 0.5], (*c.lead, 1)) * token).astype(c.dtype)

    def pad(values: Array) -> Array:
        padded = rng.integers(0, 256, (values.shape[0], -(-values.shape[1] // 32) * 32), dtype=np.uint8)
        padded[:, : values.shape[1]] = values
        return padded

    values = {"predictor_down": rng.integers(0, 256, (c.R, c.K), dtype=np.uint8)}
    projected = (values["predictor_down"].astype(float) - 128) @ token
    along = 100 * projected / np.abs(projected).max()
    signs = np.where(rng.random((c.F, 1)) < c.density, 1, -1)
    values["predictor_up"] = (128 + signs * along + rng.uniform(-20, 20, (c.F, c.R))).round().astype(np.uint8)
    for name, drawn in values.items():
        feeds[f"{name}_scales"] = rng.uniform(0.001, 0.002, drawn.shape[0]).astype(c.dtype)
        problem.weights[name] = (drawn.astype(float) - 128) * feeds[f"{name}_scales"].astype(float)[:, None]
        feeds[name] = pad(drawn)
    feeds["threshold"] = np.zeros(1, np.float32)


def _thresholds(case: Case, values: Array) -> Array:
    """Thresholds that leave the density of the case, between two values so that rounding decides nothing."""
    if case.thresholds == "each":
        values = np.sort(values, axis=0)
        at = min(values.shape[0] - 1, int(values.shape[0] * (1 - case.density)))
        low = values[at - 1] if at else values[at] - 1
        return np.asarray((low + values[at]) / 2, np.float32)
    flat = np.unique(values)
    if flat.size == 0:
        return np.zeros(1, np.float32)
    at = int(flat.size * (1 - case.density))
    if at in (0, flat.size):
        return np.array([flat[0] - 1 if at == 0 else flat[-1] + 1], np.float32)
    gaps = np.diff(flat)
    near = slice(max(0, at - 20), at + 20)  # a wide gap close to it
    at = near.start + int(np.argmax(gaps[near]))
    return np.array([(flat[at] + flat[at + 1]) / 2], np.float32)


def unit_roundoff(dtype: Any) -> float:
    """Half the distance of 1 to the next number."""
    return {np.dtype(np.float32): 2.0**-24, np.dtype(np.float16): 2.0**-11, np.dtype(bfloat16): 2.0**-8}[
        np.dtype(dtype)
    ]
