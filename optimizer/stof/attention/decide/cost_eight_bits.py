# SPDX-License-Identifier: Apache-2.0
"""An analytical estimate for attention with 8-bit operands on compute capability 9.0: what scores in int8 and e4m3 gain."""

from __future__ import annotations

from dataclasses import dataclass

from stof.arguments.precisions import EightBits

# TFLOP/s of kernels without masks at S = 8192, H = 32, by head size. bf16 at head size 128 was measured on an H200 (about
# 1500 us). The others are predicted from cycles of tensor cores, exponentials and issue slots (docs/design/attention-8bit.md).
# Head size 64 is bound by exponentials, of which 8 bits save none.
_FULL = {64: 560.0, 128: 730.0}
_INT8 = {64: 580.0, 128: 900.0}
_INT8_FP8 = {64: 600.0, 128: 1050.0}
# GB/s at which both kernels that quantize read and write: 352 MiB took about 100 to 230 us on an H200.
_QUANTIZATION = 2200.0
_LAUNCHES = 5.0  # microseconds of these two kernels, with the gaps before them
_OWN = 4.5  # microseconds of an attention kernel of a few tiles


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
    full, own = (flops / table[sizes.head_size] * 1e-6 for table in (_FULL, rates))
    rows = sizes.batch * sizes.head_size
    # Keys are read twice: for their mean, and to be quantized. Values stay as they are where weights do.
    per_key = 5 + (3 if precision.has_fp8 else 0)
    moved = rows * (3 * sizes.heads * sizes.queries + per_key * sizes.kv_heads * sizes.keys)
    return (full + _OWN) / (own + _OWN + _LAUNCHES + moved / _QUANTIZATION * 1e-3)
