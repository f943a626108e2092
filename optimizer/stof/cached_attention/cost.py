# SPDX-License-Identifier: Apache-2.0
"""The estimated gain of one decoding step, which is bound by reading the cache. The constants are ratios of measured times."""

from __future__ import annotations

from collections.abc import Mapping

from onnx import TensorProto

from stof.cached_attention.block_layout import BlockLayout
from stof.cached_attention.problem import CacheProblem
from stof.graph.external_data import ITEM_SIZES
from stof.symbolic.algebra.sizes import evaluate_or_none
from stof.targets import Target

REPORT_LENGTH = 4096  # keys in the cache at which the report's gain is given
_CURVE = (128, 512, 1024, 2048, 4096, 8192)  # the same for the report's chart
# ONNX Runtime's CPU kernel reads keys and values once for each query head, also those outside of a window. The further heads
# of a group find them in a CPU cache, at this share of the time of the first read.
_REREAD = 0.35
_FIXED = 128  # the time of a step besides reading the cache, in keys
_MASKED = 1.25  # the time of its SparseAttention, which computes and masks all scores, over GroupQueryAttention's
# On a CUDA device the runtime's kernels skip keys outside of windows, too. What differs is the kernels' speed: the runtime's
# time over the operator's, without a window and with one of 1024 keys. Where one KV head serves more than 8 query heads or the
# heads are wider than 128, its kernel is faster; so it is where a batch reads half a GiB and more.
# docs/results/comparisons/cached-layers-h200.json has the times.
_CUDA_DENSE, _CUDA_WINDOW = 1.05, 1.2
_CUDA_ONE_KV_HEAD, _CUDA_LARGE = 0.82, 0.93
_LARGE_BYTES, _LARGE_BATCH = 1 << 29, 8
_HALF = (TensorProto.FLOAT16, TensorProto.BFLOAT16)


def estimate_gain(
    problem: CacheProblem,
    target: Target,
    shapes: Mapping[str, tuple[int, int]] | None = None,
    keys: int = REPORT_LENGTH,
) -> tuple[float, int]:
    """The runtime's time over the operator's for one new token of a sequence, and the number of keys before it.

    Args:
        problem: over contiguous caches.
        target: what runs the model.
        shapes: ranges of dimensions in use (``--shape``), which tell the bytes of the cache.
        keys: before the token, where the cache may hold so many.
    """
    capacity = None if problem.capacity is None else problem.capacity.constant
    length = keys
    if problem.is_sliding:
        length = capacity or problem.window
    elif capacity:
        length = min(length, capacity)
    if problem.layout is not None:
        return _estimate_sparse(problem, problem.layout, min(length, problem.layout.length), target)
    if problem.read_density is not None:
        read = problem.read_density * length
        rate = _CUDA_DENSE if target.uses_gpu else 1 + _REREAD * (problem.num_heads // problem.kv_num_heads - 1)
        return (rate * length + _FIXED) / (read + _FIXED), length
    is_narrow = 0 < problem.window < length and not problem.is_sliding
    if target.uses_gpu:
        return (_CUDA_WINDOW if is_narrow else _estimate_dense_cuda(problem, shapes or {})), length
    group = problem.num_heads // problem.kv_num_heads
    attended = min(problem.window, length) if problem.window else length
    return ((1 + _REREAD * (group - 1)) * length + _FIXED) / (attended + _FIXED), length


def estimate_curve(
    problem: CacheProblem, target: Target, shapes: Mapping[str, tuple[int, int]] | None = None
) -> tuple[tuple[int, float], ...]:
    """The same at several numbers of keys, for the report's page; empty where it is known at one."""
    if problem.read_density is not None:  # its density is known at one length
        return ()
    gains = {length: gain for gain, length in (estimate_gain(problem, target, shapes, keys) for keys in _CURVE)}
    return tuple(sorted(gains.items())) if len(gains) > 1 else ()


def _estimate_dense_cuda(problem: CacheProblem, shapes: Mapping[str, tuple[int, int]]) -> float:
    """The gain where a query attends all keys, on a CUDA device."""
    if problem.dtype not in _HALF or problem.is_quantized:
        return _CUDA_DENSE
    if problem.kv_num_heads == 1 and (problem.num_heads > 8 or problem.head_size > 128):
        return _CUDA_ONE_KV_HEAD
    most = {name: high for name, (_, high) in shapes.items()}
    sizes = [None if size is None else evaluate_or_none(size, most) for size in (problem.batch, problem.capacity)]
    batch, capacity = sizes
    if batch is None or capacity is None:  # no range is stated
        return _CUDA_DENSE
    read = 2 * batch * capacity * problem.kv_num_heads * problem.head_size * ITEM_SIZES[problem.dtype]
    return _CUDA_LARGE if batch >= _LARGE_BATCH and read >= _LARGE_BYTES else _CUDA_DENSE


def _estimate_sparse(problem: CacheProblem, layout: BlockLayout, length: int, target: Target) -> tuple[float, int]:
    """The gain over SparseAttention: its CPU kernel reads all keys and masks scores, that of CUDA reads the blocks."""
    if target.uses_gpu:
        return 1.0, length
    group = problem.num_heads // problem.kv_num_heads
    keys = layout.count_read_keys(length, problem.num_heads, problem.kv_num_heads)
    if layout.varies_by_head:
        # Heads of a group are packed only where the mask does not read h; others go over their keys one by one.
        keys += _REREAD * (group * layout.count_attended_keys(length, problem.num_heads) - keys)
    runtime = _MASKED * (1 + _REREAD * (group - 1)) * length
    return (runtime + _FIXED) / (keys + _FIXED), length
