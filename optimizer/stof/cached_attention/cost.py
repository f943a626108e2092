# SPDX-License-Identifier: Apache-2.0
"""The predicted gain of one decoding step, which is bound by reading the cache. The constants are ratios of measured times."""

from __future__ import annotations

from stof.cached_attention.site import CacheSite

REPORT_LENGTH = 4096  # keys in the cache at which the report's gain is given
# ONNX Runtime's CPU kernel reads keys and values once for each query head, also those outside of a window. The further heads
# of a group find them in a CPU cache, at this share of the time of the first read.
_REREAD = 0.35
_FIXED = 128  # the time of a step besides reading the cache, in keys
# On a CUDA device the runtime's kernels skip keys outside of windows, too. What differs is the kernels' speed: the runtime's
# time over the operator's, without a window and with one of 1024 keys.
_CUDA_DENSE, _CUDA_WINDOW = 1.05, 1.2


def predict_gain(site: CacheSite, target: str) -> tuple[float, int]:
    """The runtime's time over the operator's for one new token of a sequence, and the number of keys before it."""
    capacity = site.capacity.constant
    length = REPORT_LENGTH
    if site.sliding:
        length = capacity or site.window
    elif capacity:
        length = min(length, capacity)
    is_narrow = 0 < site.window < length and not site.sliding
    if target == "cuda":
        return (_CUDA_WINDOW if is_narrow else _CUDA_DENSE), length
    group = site.num_heads // site.kv_num_heads
    keys = min(site.window, length) if site.window else length
    return ((1 + _REREAD * (group - 1)) * length + _FIXED) / (keys + _FIXED), length
