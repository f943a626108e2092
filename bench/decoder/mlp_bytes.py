# SPDX-License-Identifier: Apache-2.0
"""Bytes that a decoder with sparse MLPs reads and holds, and the bounds that follow from them."""

from __future__ import annotations

from collections.abc import Mapping

from bench.decoder.graph import Decoder, DecoderShape
from bench.decoder.mlp_form import count_idle

PREDICTED = "predicted"  # the variant whose operator leaves out rows of the first matmul, too
_RANK = 0.04  # of a predictor, as a share of the neurons
_SCALE = 4  # bytes of a block's scale: MatMulNBits on the CPU has them in fp32


def matrix_bytes(shape: DecoderShape) -> float:
    """Bytes of one of an MLP's matrices, the scales among them."""
    item = 0.5 + _SCALE / shape.block_size if shape.block_size else shape.item
    return shape.hidden * shape.inner * item


def skipped_matrices(shape: DecoderShape, variant: str) -> int:
    """The matrices of an MLP of which a variant leaves out rows: an exact one needs the whole gate."""
    return (3 if shape.mlp.is_gated else 2) - (variant != PREDICTED)


def predictor_bytes(shape: DecoderShape) -> float:
    """Bytes of one predictor; of quantized models its values have 8 bits."""
    rank = _RANK * shape.inner
    return rank * (shape.hidden + shape.inner) * (1 if shape.block_size else shape.item)


def bounds(
    shape: DecoderShape, decoder: Decoder, active: Mapping[str, float], context: int, rate: float
) -> dict[str, float]:
    """By variant, how many times fewer bytes of weights and caches a token reads; ``dense_us``: what the dense one takes.

    Args:
        shape: of the decoder.
        decoder: knows the bytes of its weights.
        active: the share of the neurons that a variant computes.
        context: keys behind the token.
        rate: bytes a second.
    """
    dense = decoder.read_bytes + shape.cache_bytes(1, context)
    found = {"dense_us": round(dense / rate * 1e6, 1)}
    for name, share in active.items():
        left_out = skipped_matrices(shape, name) * (1 - share) * matrix_bytes(shape)
        more = predictor_bytes(shape) if name == PREDICTED else 0
        found[name] = round(dense / (dense + shape.layers * (more - left_out)), 4)
    return found


def idle_bytes(shape: DecoderShape, variant: str) -> int:
    """Bytes of weights that belong to neurons that are never active, in the matrices of which a variant leaves out rows."""
    share = count_idle(shape.mlp, shape.inner) / shape.inner
    return round(shape.layers * skipped_matrices(shape, variant) * share * matrix_bytes(shape))
