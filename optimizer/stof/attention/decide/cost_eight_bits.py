# SPDX-License-Identifier: Apache-2.0
"""An estimate for compute capability 9.0: what int8 scores, and e4m3 weights and values, gain over attention in 16 bits."""

from __future__ import annotations

from dataclasses import dataclass

from stof.arguments.precisions import EightBits

# TFLOP/s of kernels without masks, by head size, and GB/s at which both kernels that quantize read and write. Measured on an
# H200, S 8192 and 32768, other kernels between the calls, as a model has them (docs/design/attention-8bit.md). At its power limit
# that board gives 8 bits no gain; where one kernel runs without a break, 16 bits are slower.
_FULL = {64: 575.0, 128: 775.0}
_INT8 = {64: 490.0, 128: 775.0}
_INT8_FP8 = {64: 490.0, 128: 765.0}
_QUANTIZATION_GBPS = 2200.0
_QUANTIZATION_LAUNCH = 5.0  # microseconds of these two kernels, with the gaps before them
_KERNEL_OVERHEAD = 4.5  # microseconds of an attention kernel of a few tiles, in any precision


@dataclass(frozen=True)
class AttentionSizes:
    """A run of one attention: B, H, G, S, T, D, and the share of its tiles that the mask leaves."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_size: int
    density: float = 1.0


def estimate_gain(sizes: AttentionSizes, precision: EightBits) -> float:
    """The time in 16 bits over that in 8 bits, with quantization.

    A key tile is quantized once and read by every query tile that attends it: windows and short sequences read it too rarely.
    """
    flops = 4.0 * sizes.batch * sizes.heads * sizes.queries * sizes.keys * sizes.head_size * sizes.density
    rates = _INT8_FP8 if precision.has_fp8 else _INT8
    full_us, eight_bit_us = (flops / table[sizes.head_size] * 1e-6 for table in (_FULL, rates))
    rows = sizes.batch * sizes.head_size
    per_key = 6 if precision.has_fp8 else 3  # values stay as they are where weights do
    moved = rows * (3 * sizes.heads * sizes.queries + per_key * sizes.kv_heads * sizes.keys)
    quantization_us = _QUANTIZATION_LAUNCH + moved / _QUANTIZATION_GBPS * 1e-3
    return (full_us + _KERNEL_OVERHEAD) / (eight_bit_us + _KERNEL_OVERHEAD + quantization_us)
