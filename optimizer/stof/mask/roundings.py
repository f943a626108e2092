# SPDX-License-Identifier: Apache-2.0
"""Roundings to 8 bits inside an attention: which scale and zero point each of them has, by the operator's roles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

_LOWEST = {"int8": -128, "uint8": 0}
_HIGHEST = {"int8": 127, "uint8": 255}


@dataclass(frozen=True)
class Quantizer:
    """A scale and a zero point, by the names of their tensors; without a zero point it is 0 of uint8."""

    scale: str
    zero_point: str = ""

    @property
    def inputs(self) -> list[str]:
        """The inputs of a QuantizeLinear or DequantizeLinear behind its first one."""
        return [self.scale, self.zero_point] if self.zero_point else [self.scale]


@dataclass(frozen=True)
class SiteRoundings:
    """What is rounded in a site whose query, key and value are numbers of codes.

    Attributes:
        query: how its codes become numbers.
        key: likewise.
        value: likewise.
        weight: the rounding of the weights.
        score: that of the product of query and key, before the scale; None: there is none.
        scaled_score: that of scaled scores.
        biased_score: that of scores behind masks and biases.
        is_weight_by_range: the scale of the weights is that of their range in the run; ``weight`` names it in the graph.
        lowest: the lowest number of ``biased_score``, where it is known.
        code_types: ONNX element types of query, key and value.
        sources: the float tensors that are rounded.
        unrounded: masks of the site that the graph rounds before it adds them, which changes nothing of what they forbid.
    """

    query: Quantizer
    key: Quantizer
    value: Quantizer
    weight: Quantizer
    score: Quantizer | None = None
    scaled_score: Quantizer | None = None
    biased_score: Quantizer | None = None
    is_weight_by_range: bool = False
    lowest: float | None = None
    code_types: tuple[int, int, int] = (2, 2, 2)
    sources: tuple[str, ...] = ()
    unrounded: frozenset[str] = frozenset()

    @property
    def by_role(self) -> Mapping[str, Quantizer]:
        """Those that there are, by the operator's role without ``_scale`` and ``_zero_point``."""
        every = {
            "query": self.query,
            "key": self.key,
            "value": self.value,
            "score": self.score,
            "scaled_score": self.scaled_score,
            "biased_score": self.biased_score,
            "weight": self.weight,
        }
        return {role: quantizer for role, quantizer in every.items() if quantizer is not None}

    @property
    def operands(self) -> Mapping[str, Quantizer]:
        """Those of :attr:`by_role` that the operator is given."""
        return {r: q for r, q in self.by_role.items() if r != "weight" or not self.is_weight_by_range}

    @property
    def tensors(self) -> tuple[str, ...]:
        """All scales and zero points."""
        return tuple(dict.fromkeys(t for q in self.by_role.values() for t in q.inputs))


ROLES = ("query", "key", "value", "score", "scaled_score", "biased_score", "weight")
QUANTIZER_ROLES = tuple(f"{role}_{word}" for role in ROLES for word in ("scale", "zero_point"))


@dataclass(frozen=True)
class Steps:
    """A quantizer with its numbers.

    Attributes:
        scale: the size of a step.
        zero_point: the code of 0.
        kind: "int8" or "uint8".
    """

    scale: float
    zero_point: int
    kind: str

    @classmethod
    def of(cls, scale: np.ndarray, zero_point: np.ndarray | None) -> Steps:
        """From the values of both tensors, which have one element."""
        if zero_point is None:
            return cls(float(scale.reshape(())), 0, "uint8")
        return cls(float(scale.reshape(())), int(zero_point.reshape(())), zero_point.dtype.name)

    @property
    def lowest(self) -> float:
        """The lowest number that a code stands for."""
        return (_LOWEST[self.kind] - self.zero_point) * self.scale

    def dequantize(self, codes: np.ndarray) -> np.ndarray:
        """The numbers of codes, fp64."""
        return np.asarray((codes.astype(np.float64) - self.zero_point) * self.scale)

    def round(self, x: np.ndarray) -> np.ndarray:
        """Numbers rounded to those that codes stand for, half to even, fp64."""
        return self.dequantize(self.quantize(x))

    def quantize(self, x: np.ndarray) -> np.ndarray:
        """The codes of numbers."""
        codes = np.clip(np.rint(x / self.scale) + self.zero_point, _LOWEST[self.kind], _HIGHEST[self.kind])
        return np.asarray(codes).astype(self.kind)
