# SPDX-License-Identifier: Apache-2.0
"""The predicted gain of one decoding step, in relative terms. A step is bound by the bytes of the cache that it reads.

docs/reference/cached-attention.md is the contract; the constants are ratios of measured times. Only ratios are used.
"""

from __future__ import annotations

from stof.cached_attention.site import CacheSite

REPORT_LENGTH = 4096  # keys in the cache at which the report's gain is given
# ONNX Runtime's CPU kernel reads keys and values once for each query head, and all of them beside a window. A head that was
# just read comes from a nearer cache, at this share of the time of a first read.
_REREAD = 0.35
_FIXED = 128  # keys that take as long as what a step does besides attention
# On a CUDA device the runtime's kernels skip keys outside of windows, too; what is left are rates of the kernels, the
# runtime's time over the operator's: 1 / 0.95 dense, 1 / 0.83 with a window of 1024.
_CUDA_DENSE, _CUDA_WINDOW = 1.05, 1.2


def predict_gain(site: CacheSite, target: str) -> tuple[float, int]:
    """The runtime's time over the operator's for one new token of a sequence, and the number of keys before it."""
    capacity = site.capacity.constant
    length = REPORT_LENGTH
    if site.sliding:
        length = capacity or site.window
    elif capacity:
        length = min(length, capacity)
    if site.declared is not None:
        keys = site.declared.facts.read_density * length
        rate = _CUDA_DENSE if target == "cuda" else 1 + _REREAD * (site.num_heads // site.kv_num_heads - 1)
        return (rate * length + _FIXED) / (keys + _FIXED), length
    is_narrow = 0 < site.window < length and not site.sliding
    if target == "cuda":
        return (_CUDA_WINDOW if is_narrow else _CUDA_DENSE), length
    group = site.num_heads // site.kv_num_heads
    keys = min(site.window, length) if site.window else length
    return ((1 + _REREAD * (group - 1)) * length + _FIXED) / (keys + _FIXED), length
