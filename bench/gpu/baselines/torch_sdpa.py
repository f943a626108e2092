# SPDX-License-Identifier: Apache-2.0
"""PyTorch's attention on the device: cuDNN, FlashAttention 2, the memory-efficient kernel, the plain chain, FlexAttention.

The operators below scaled_dot_product_attention are called directly: each candidate times one known kernel.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np

from bench.core.candidate import Unavailable, require
from bench.gpu.device_runner import DeviceRunner, need_dense, need_scores, runner_of, window
from bench.gpu.problem import TILE, GpuProblem

_LONGEST_MATH = 512
_MOST_COPIED = 8 << 30  # bytes of inputs that are held in a second layout


def need_plain(problem: GpuProblem) -> bool:
    """Whether a case is causal; refuses one that is neither dense nor causal.

    Raises:
        Unavailable: with the masks that are taken.
    """
    causal = window(problem.case) == (-1, 0) and problem.case.P == 0
    if problem.case.mask and not causal:
        raise Unavailable("takes no mask but the causal one")
    return causal


def cudnn(problem: GpuProblem, stream: Any) -> DeviceRunner:
    """cuDNN: causal by its own flag, other masks as a bias."""
    case = problem.case
    operator = problem.torch.ops.aten._scaled_dot_product_cudnn_attention
    causal = window(case) == (-1, 0) and case.P == 0
    masked = bool(case.mask) and not causal
    if masked:
        need_dense(problem)

    def call(q: Any, k: Any, v: Any) -> Any:
        bias = problem.additive.expand(case.B, case.H, -1, -1) if masked else None
        return operator(q, k, v, bias, False, 0.0, causal, False, scale=problem.scale)[0]

    return runner_of(problem, "BHSD", call)


def flash(problem: GpuProblem, stream: Any) -> DeviceRunner:
    """FlashAttention 2 as built into torch, with its own windows, aligned to the last key."""
    case = problem.case
    sides = window(case)
    if sides is None:
        raise Unavailable("expresses causal masks and windows only")
    if problem.bytes > _MOST_COPIED:
        raise Unavailable(f"reads another layout: timed up to {_MOST_COPIED >> 30} GiB of keys and values")
    operator = problem.torch.ops.aten._flash_attention_forward
    causal = sides == (-1, 0)
    left, right = (None if n < 0 or causal else n for n in sides)

    def call(q: Any, k: Any, v: Any) -> Any:
        return operator(
            q, k, v, None, None, case.S, case.T, 0.0, causal, False,
            scale=problem.scale, window_size_left=left, window_size_right=right,
        )[0]  # fmt: skip

    return runner_of(problem, "BSHD", call)


def efficient(problem: GpuProblem, stream: Any) -> DeviceRunner:
    """The memory-efficient kernel with the mask as a bias; with GQA, key heads are repeated outside of the timing."""
    case = problem.case
    if window(case) == (-1, 0):
        raise Unavailable("causal has kernels of its own: cuDNN, flash")
    if case.mask:
        need_dense(problem)
    operator = problem.torch.ops.aten._scaled_dot_product_efficient_attention
    times = case.H // case.G
    wide: dict[int, tuple[Any, Any]] = {}

    def bind() -> None:
        wide.clear()
        for i, (_, k, v) in enumerate(problem.sets()):
            wide[i] = (k, v) if times == 1 else (k.repeat_interleave(times, 1), v.repeat_interleave(times, 1))

    held: list[Any] = []

    def call(i: int) -> None:
        bias = problem.additive.expand(case.B, case.H, -1, -1) if case.mask else None
        found = operator(problem.sets()[i][0], *wide[i], bias, False, 0.0, False, scale=problem.scale)[0]
        if i == 0:
            held[:] = [found]

    def release() -> None:
        wide.clear()
        held.clear()

    return DeviceRunner(call, lambda: held[0], bind, release)


def math(problem: GpuProblem, stream: Any) -> DeviceRunner:
    """Unfused matmuls and softmax."""
    case = problem.case
    if case.S > _LONGEST_MATH or case.S == 1:
        raise Unavailable(f"timed up to S = {_LONGEST_MATH}")
    need_dense(problem)
    need_scores(problem)
    operator = problem.torch.ops.aten._scaled_dot_product_attention_math

    def call(q: Any, k: Any, v: Any) -> Any:
        return operator(q, k, v, problem.additive if case.mask else None, 0.0, False, scale=problem.scale)[0]

    return runner_of(problem, "BHSD", call)


def flex(problem: GpuProblem, stream: Any) -> DeviceRunner:
    """FlexAttention, compiled for the shape; its block mask is made ahead from the library's tiles."""
    torch = problem.torch
    module = require("torch.nn.attention.flex_attention")
    case = problem.case
    torch._dynamo.config.recompile_limit = 4096
    torch._dynamo.config.accumulated_recompile_limit = 4096
    block = block_mask(problem, module) if case.mask else None
    compiled = torch.compile(module.flex_attention, dynamic=False)
    options = {"block_mask": block, "scale": problem.scale, "enable_gqa": case.G != case.H}
    return runner_of(problem, "BHSD", lambda q, k, v: compiled(q, k, v, **options))


def block_mask(problem: GpuProblem, module: Any) -> Any:
    torch, case, blocks = problem.torch, problem.case, problem.blocks
    columns = -(-case.T // TILE)
    counts, full = np.diff(blocks.row_ptr), blocks.row_ptr[1:] - blocks.full_begin
    partial = counts - full

    def table(begin: np.ndarray, size: np.ndarray) -> np.ndarray:
        found = np.zeros((len(size), columns), np.int32)
        row = np.repeat(np.arange(len(size)), size)
        place = np.arange(len(row)) - np.repeat(np.cumsum(size) - size, size)
        found[row, place] = blocks.key_tile[np.repeat(begin, size) + place]
        return found

    heads = [int(i) for i in blocks.layout[0]]

    def on_device(array: np.ndarray, *rest: int) -> Any:
        shaped = array.reshape(-1, blocks.rows, *rest)[heads][None]
        return torch.from_numpy(np.ascontiguousarray(shaped, np.int32)).to(problem.device)

    offset, allowed = case.P, problem.allowed

    def mask_mod(b: Any, h: Any, q: Any, k: Any) -> Any:
        return allowed(b, h, q + offset, k)

    given: dict[str, Any] = {
        "BLOCK_SIZE": TILE,
        "mask_mod": mask_mod if offset else allowed,
        "seq_lengths": (case.S, case.T),
    }
    make = module.BlockMask.from_kv_blocks
    if "compute_q_blocks" in inspect.signature(make).parameters:
        given["compute_q_blocks"] = False  # they are for gradients
    return make(
        on_device(partial),
        on_device(table(blocks.row_ptr[:-1], partial), columns),
        on_device(full),
        on_device(table(blocks.full_begin, full), columns),
        **given,
    )
