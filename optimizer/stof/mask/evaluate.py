# SPDX-License-Identifier: Apache-2.0
"""The pairs of query and key that masks allow: the graph's by the numbers in their tensors, lifted ones by their expression."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from stof.errors import UnsupportedError
from stof.execution.case import Case
from stof.mask.site import AttentionSite, LiftedMask, MaskTerm, TermKind, tables_of
from stof.mask.strength import forbidding_limit, forbids_softly
from stof.runtime.library import LibraryError, Mask


class BiasedMaskError(UnsupportedError):
    """A tensor that was taken for a mask adds numbers that do not forbid."""


def evaluate_term(term: MaskTerm, value: np.ndarray, dtype: int) -> np.ndarray:
    """The pairs that the tensor of a term allows; ``dtype`` is its ONNX element type in the graph."""
    if term.kind is TermKind.KEEP:
        return value.astype(bool)
    if term.kind is TermKind.DROP:
        return ~value.astype(bool)
    if (pair := _two_numbers(value)) is not None:
        numbers, is_second = pair
        allowed: np.ndarray = _evaluate_sum(term, numbers, dtype)[is_second.view(np.uint8)]
        return allowed
    return _evaluate_sum(term, value, dtype)


def _two_numbers(value: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """The two numbers of a tensor that holds no others, as most masks do, and where the second one is."""
    if not value.size:
        return None
    bits = value.view(f"u{value.dtype.itemsize}")
    ends = np.array([bits.min(), bits.max()])
    second = bits == ends[1]
    return (ends.view(value.dtype), second) if (second | (bits == ends[0])).all() else None


def is_not_zero(value: np.ndarray) -> np.ndarray:
    """The elements of a tensor that are not 0, as booleans."""
    # NumPy compares numbers in half precision ten times as slowly as their bits, of which the first is the sign.
    nonzero: np.ndarray = (value.view(np.uint16) << 1 if value.dtype == np.float16 else value) != 0
    return nonzero


def _evaluate_sum(term: MaskTerm, value: np.ndarray, dtype: int) -> np.ndarray:
    """The pairs that numbers allow which are added to scores."""
    scaled = value.astype(np.float64) * term.scale
    limit = forbidding_limit(dtype)
    others = value[is_not_zero(value)]
    soft = bool(others.size) and forbids_softly([float(others.min()), float(others.max())], term.scale)
    allowed: np.ndarray = ~((scaled <= limit) | (soft & (scaled < 0)))
    return allowed


def check_no_bias(term: MaskTerm, value: np.ndarray, allowed: np.ndarray, case: Case) -> None:
    """Refuses a term that adds more than a mask does: what neither forbids nor is 0 would be lost with the tensor.

    Raises:
        BiasedMaskError: naming the first such number.
    """
    if term.kind is TermKind.ADD and (added := allowed & is_not_zero(value)).any():
        entry = value[added][0]
        raise BiasedMaskError(f"mask tensor {term.tensor!r} adds {entry} at {case}, expected 0 or a value that forbids")


def evaluate_mask(
    site: AttentionSite, mask: LiftedMask, feeds: Mapping[str, np.ndarray], shape: tuple[int, int, int, int]
) -> tuple[np.ndarray, int]:
    """The pairs [B, H, S, T] that a lifted mask allows for what it reads, and the past length P.

    Raises:
        UnsupportedError: when it cannot be evaluated.
    """
    P = shape[3] - shape[2] if site.query_offset else 0
    runtime = {}
    for operand in mask.operands:
        array = operand.prepare(feeds[operand.tensor])
        if operand.role == "pad" and array.shape not in ((1, shape[3]), (shape[0], shape[3])):
            raise UnsupportedError(
                f"the mask reads {operand.tensor!r} as padding of shape {list(array.shape)}, where the operator takes "
                f"[{shape[0]}, {shape[3]}], one number for each key"
            )
        runtime[operand.role] = (array != 0) if operand.role == "pad" else array.astype(np.int64)
    try:
        return Mask(mask.expression.text, tables_of(mask)).evaluate(*shape, P, runtime), P
    except LibraryError as error:
        sizes = ", ".join(f"{name} = {n}" for name, n in zip("BHST", shape, strict=True))
        raise UnsupportedError(f"mask '{mask.expression}' cannot be evaluated at {sizes}: {error}") from error
