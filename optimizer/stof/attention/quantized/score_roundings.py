# SPDX-License-Identifier: Apache-2.0
"""Roundings that the walks from a softmax have met, as those of the operator."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from onnx import TensorProto

from stof.attention.quantized.parameters import QuantizedConstants, describe_rounding, find_dequantize, quantizer_of
from stof.errors import UnsupportedError
from stof.graph.index import GraphIndex
from stof.mask.roundings import Quantizer, SiteRoundings
from stof.mask.site import AttentionSite
from stof.symbolic import Symbolic

_CODES = (TensorProto.INT8, TensorProto.UINT8)


class RoundingError(UnsupportedError):
    """Attention that rounds scores or weights to 8 bits otherwise than StofQuantizedAttention does."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"{reason}; --dequantize-attention computes it in float")


@dataclass(frozen=True)
class ScoreRounding:
    """A rounding of the scores, with what lies between it and the softmax.

    Attributes:
        quantizer: its scale and zero point.
        source: the tensor that is rounded.
        factor: by which rounded scores are multiplied.
        terms: how many masks and biases are applied to them.
    """

    quantizer: Quantizer
    source: str
    factor: float
    terms: int


@dataclass(frozen=True)
class RoundedScores:
    """The way of the scores, as far as roundings depend on it.

    Attributes:
        roundings: those that were met, the nearest to the softmax first.
        factor: of the scores.
        terms: how many masks and biases they have.
    """

    roundings: tuple[ScoreRounding, ...]
    factor: float
    terms: int

    def by_role(self) -> dict[str, Quantizer]:
        """The roundings by the operator's roles.

        Raises:
            RoundingError: for one at a place where the operator has none, and for several at one place.
        """
        found: dict[str, Quantizer] = {}
        for rounding in self.roundings:
            role = self._role(rounding)
            if found.setdefault(role, rounding.quantizer) != rounding.quantizer:
                raise RoundingError(f"{rounding.source!r} is rounded twice, by other scales")
        return found

    def _role(self, rounding: ScoreRounding) -> str:
        if rounding.terms != self.terms:
            if rounding.terms == 0 and rounding.factor == 1.0:
                return "biased_score"
            raise RoundingError(f"{rounding.source!r} is rounded between two masks, or scaled behind one")
        if rounding.factor == self.factor:
            return "score"
        if rounding.factor == 1.0:
            return "scaled_score"
        raise RoundingError(f"{rounding.source!r} is rounded between two scales")


@dataclass(frozen=True)
class RoundedWay:
    """Roundings of the scores, and that of the weights: the tensor that is rounded, and by what."""

    scores: RoundedScores
    weight: tuple[str, Quantizer] | None


def with_roundings(
    index: GraphIndex, symbolic: Symbolic, site: AttentionSite, way: RoundedWay, unrounded: frozenset[str]
) -> AttentionSite:
    """A site with its roundings, whose query, key and value are numbers of codes; as it is, where nothing else is rounded.

    Args:
        index: of the graph.
        symbolic: facts of its tensors.
        site: the site.
        way: what the walks from its softmax have met.
        unrounded: masks that are rounded in the original, and not here.

    Raises:
        RoundingError: where something is rounded, and the operator does not take all of it.
    """
    if way.weight is None and not way.scores.roundings:
        return site
    if way.weight is None:
        raise RoundingError("the scores are rounded to 8 bits, and the attention weights are not")
    _check_site(site)
    constants = QuantizedConstants(index)
    roles = way.scores.by_role()
    if "score" in roles and site.scale != way.scores.factor:  # a part of the scale lies before the product
        if way.scores.factor != 1.0 or "scaled_score" in roles:
            raise RoundingError("scores are rounded between two scales, one of which the query or the key has")
        roles["scaled_score"] = roles.pop("score")
    by_range = constants.is_by_range(way.weight[1])
    for quantizer in (*roles.values(), *([] if by_range else [way.weight[1]])):
        _check_codes(constants, quantizer)
    quantizers, types = _find_codes(index, symbolic, site, constants)
    steps = constants.steps(roles["biased_score"]) if "biased_score" in roles else None
    roundings = SiteRoundings(
        quantizers[0],
        quantizers[1],
        quantizers[2],
        way.weight[1],
        roles.get("score"),
        roles.get("scaled_score"),
        roles.get("biased_score"),
        is_weight_by_range=by_range,
        lowest=None if steps is None else steps.lowest,
        code_types=(types[0], types[1], types[2]),
        sources=(*(r.source for r in way.scores.roundings), way.weight[0]),
        unrounded=frozenset(t.tensor for t in site.terms) & unrounded,
    )
    words = "weights rounded by their range" if by_range else "rounded weights"
    return replace(site, roundings=roundings, form=f"{site.form}, {words}")


def _find_codes(
    index: GraphIndex, symbolic: Symbolic, site: AttentionSite, constants: QuantizedConstants
) -> tuple[list[Quantizer], list[int]]:
    """The quantizers of query, key and value, and the element types of their codes."""
    codes: list[str] = []
    quantizers: list[Quantizer] = []
    for operand, role in zip((site.query, site.key, site.value), ("query", "key", "value"), strict=True):
        dequantize = find_dequantize(index, operand.tensor)
        if dequantize is None or site.dtype != TensorProto.FLOAT:
            raise RoundingError(
                f"scores or weights are rounded to 8 bits, and the {role} {operand.tensor!r} is no fp32 number of codes"
            )
        quantizer = quantizer_of(dequantize, 1)
        if not constants.is_per_tensor(quantizer):
            raise RoundingError(f"{describe_rounding(dequantize)} has a scale for each channel, expected one number")
        codes.append(dequantize.input[0])
        quantizers.append(quantizer)
    types = [symbolic.dtype(c) for c in codes]
    if odd := [(c, t) for c, t in zip(codes, types, strict=True) if t not in _CODES]:
        raise RoundingError(f"{odd[0][0]!r} has element type {odd[0][1]}, expected codes of int8 or uint8")
    return quantizers, types


def _check_site(site: AttentionSite) -> None:
    """Refuses what the operator of quantized attention does not take."""
    refused = {
        "a sink": site.sink is not None,
        "a soft cap": bool(site.softcap),
        "a scale by head or row": site.query_factor is not None,
        "a guard of rows": site.row_guard is not None or site.unguarded is not None,
        "weights that are masked": site.pair_guard is not None or site.zeroed,
        "values by relative position": site.added_values is not None,
        "a lower bound of scores": site.floored,
        "a scale that is not positive": not site.scale > 0,
    }
    if found := [words for words, is_there in refused.items() if is_there]:
        raise RoundingError(f"scores or weights are rounded to 8 bits, and there is {found[0]}")


def _check_codes(constants: QuantizedConstants, quantizer: Quantizer) -> None:
    if not constants.is_per_tensor(quantizer):
        raise RoundingError(
            f"scores or weights are rounded by {quantizer.scale!r}, which is not known to be one number"
        )
    point = constants.array(quantizer.zero_point) if quantizer.zero_point else None
    if point is not None and point.dtype not in (np.dtype(np.int8), np.dtype(np.uint8)):
        raise RoundingError(f"scores or weights are rounded to {point.dtype}, and kernels take int8 and uint8")
