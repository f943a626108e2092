# SPDX-License-Identifier: Apache-2.0
"""Estimates of StofSparseMLP's gain over the dense MLP for one token, and why a CPU computes an MLP faster with the dense one.

Where weights come from memory, their bytes give the gain. Where a CPU's caches hold them, the call and its rows cost time
beside the bytes. Quantized weights without accuracy_level 4 are dequantized, which is faster only where few neurons are active;
they stay dense only where more were counted.
"""

from __future__ import annotations

from stof.sparse_mlp.site import MlpSite
from stof.targets import Target

UNKNOWN_DENSITY = 0.5  # of neurons that were not counted: half of the outputs of a random matmul are negative

# Fitted to one thread of a Xeon with AVX-512 VNNI (docs/lab/cpu-experiments.md).
_DENSE_FP32_BYTES_PER_NS = 80.0  # with which ONNX Runtime reads weights in the caches
_DENSE_QUANTIZED_BYTES_PER_NS = 40.0  # likewise; int8 was not timed
_CALL_NS = 1000.0  # of a call, beyond the dense MLP's
_ROW_NS = 10.0  # of a weight's row that the operator reads, beyond its bytes
_LEAST_GAIN_IN_CACHES = 1.05
# An assumption for each MLP alone: larger ones come from memory, where rows and calls hide behind their bytes.
_CACHED_BYTES = 16 << 20
# The largest share of active neurons with which dequantized rows are faster: multiplications take their time, not bytes.
_MOST_ACTIVE_DEQUANTIZED = 0.3


def estimate_gain_by_bytes(site: MlpSite, density: float | None) -> float:
    """The bytes of weights that one token reads in the dense MLP, over the operator's. density: None: not measured."""
    return 1 / site.share_read(UNKNOWN_DENSITY if density is None else density)


def estimate_gain_in_caches(site: MlpSite, density: float | None) -> float:
    """The dense MLP's time for one token over the operator's, with weights in a CPU's caches. density: None: not measured."""
    assumed = UNKNOWN_DENSITY if density is None else density
    call = _CALL_NS + _ROW_NS * site.count_rows_read(assumed)
    bytes_per_ns = _DENSE_FP32_BYTES_PER_NS if site.quantization is None else _DENSE_QUANTIZED_BYTES_PER_NS
    dense = site.dense_bytes / bytes_per_ns
    return dense / (dense * site.share_read(assumed) + call)


def estimate_gain(site: MlpSite, density: float | None, target: Target) -> float:
    """The estimate by bytes; on a CPU whose caches hold the weights, the smaller of both. density: None: not measured."""
    by_bytes = estimate_gain_by_bytes(site, density)
    if target.uses_gpu or site.dense_bytes >= _CACHED_BYTES:
        return by_bytes
    return min(by_bytes, estimate_gain_in_caches(site, density))


def reason_slow_on_cpu(site: MlpSite, density: float | None, whom: str = "for one token") -> str:
    """Why a CPU computes tokens faster with the dense MLP; empty where it does not. density: None: not measured."""
    assumed = UNKNOWN_DENSITY if density is None else density
    active = f"{100 * assumed:.3g} % active neurons" + (" (not measured: give --inputs)" if density is None else "")
    is_dequantized = site.quantization is not None and not site.rounds_tokens
    if density is not None and is_dequantized and density > _MOST_ACTIVE_DEQUANTIZED:
        most = f"{100 * _MOST_ACTIVE_DEQUANTIZED:.0f} %"
        return (
            f"{active}: quantized weights without accuracy_level 4 are dequantized, which is faster only where at most {most} "
            "are active"
        )
    gain = estimate_gain_in_caches(site, density)
    if gain >= _LEAST_GAIN_IN_CACHES or site.dense_bytes >= _CACHED_BYTES:
        return ""
    size = f"{site.dense_bytes / 2**20:.2f} MiB of weights as ONNX Runtime holds them ({site.sizes})"
    return (
        f"{size}, {active}: {gain:.2f}x is estimated {whom} by bytes, rows and the call in the caches, less than "
        f"{_LEAST_GAIN_IN_CACHES}x"
    )
