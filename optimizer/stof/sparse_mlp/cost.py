# SPDX-License-Identifier: Apache-2.0
"""Whether StofSparseMLP is faster than the dense MLP for one token on a CPU, where small weights lie in the caches."""

from __future__ import annotations

from stof.sparse_mlp.site import MlpSite

UNKNOWN_DENSITY = 0.5  # of neurons that were not counted: half of the outputs of a random matmul are negative

# Measured with one thread of a Xeon with AVX-512 VNNI (docs/lab/cpu-experiments.md).
_CALL_NS = 1000.0  # of a call, beyond the dense MLP's
_ROW_NS = 10.0  # of a weight's row that the operator reads, beyond its bytes
# At which ONNX Runtime reads weights in the caches, by whether they are quantized.
_BYTES_PER_NS = {False: 80.0, True: 40.0}
_LEAST_GAIN = 1.05
_CACHED_BYTES = 16 << 20  # of an MLP; larger ones come from memory, and rows and calls hide behind their bytes
# The largest share of active neurons of quantized weights that multiply fp32 values: rows are dequantized, not memory-bound.
_MOST_ACTIVE_DEQUANTIZED = 0.3


def estimate_cpu_gain(site: MlpSite, density: float) -> float:
    """The dense MLP's time for one token over the operator's, with weights in the caches."""
    own = _CALL_NS + _ROW_NS * site.count_rows_read(density)
    dense = site.dense_bytes / _BYTES_PER_NS[site.quantization is not None]
    return dense / (dense * site.share_read(density) + own)


def reason_slow_on_cpu(site: MlpSite, density: float | None) -> str:
    """Why a CPU computes one token faster with the dense MLP; empty where it does not. density: None: not measured."""
    assumed = UNKNOWN_DENSITY if density is None else density
    active = f"{100 * assumed:.3g} % active neurons" + (" (not measured: give --inputs)" if density is None else "")
    if site.quantization is not None and not site.rounds_tokens and assumed > _MOST_ACTIVE_DEQUANTIZED:
        most = f"{100 * _MOST_ACTIVE_DEQUANTIZED:.0f} %"
        return f"{active}: with quantized weights and no accuracy_level 4, it gains up to {most}"
    gain = estimate_cpu_gain(site, assumed)
    if gain >= _LEAST_GAIN or site.dense_bytes >= _CACHED_BYTES:
        return ""
    size = f"{site.dense_bytes / 2**20:.2f} MiB of weights ({site.sizes})"
    return (
        f"{size}, {active}: {gain:.2f}x is estimated for one token with weights in the caches, less than {_LEAST_GAIN}x"
    )
