# SPDX-License-Identifier: Apache-2.0
"""FlashAttention 4 and cuDNN's flex attention, which compile kernels through CuTe DSL at their first call.

Packages: flash-attn-4, nvidia-cudnn-frontend and nvidia-cutlass-dsl with its libraries for CUDA 13 (docs/design/benchmarks.md).
"""

from __future__ import annotations

import hashlib
import importlib
from typing import Any

from bench.core.candidate import Unavailable, require
from bench.gpu.baselines.torch_sdpa import block_mask
from bench.gpu.device_runner import DeviceRunner, runner_of, window
from bench.gpu.problem import TILE, GpuProblem

_MOST_INTERVALS = 64  # of a row, where a plan still makes sense
_CHUNK = 1 << 27  # elements of the mask that are looked at together


def flash4(problem: GpuProblem, stream: Any) -> DeviceRunner:
    """FlashAttention 4 (CuTe) with its own flags: dense, causal, windows."""
    case = problem.case
    sides = window(case)
    if sides is None:
        raise Unavailable("timed with its own masks: causal and windows")
    attend = require("flash_attn.cute").flash_attn_func
    causal = sides == (-1, 0)
    left, right = (None if n < 0 or causal else n for n in sides)

    def call(q: Any, k: Any, v: Any) -> Any:
        found = attend(q, k, v, softmax_scale=problem.scale, causal=causal, window_size=(left, right))
        return found[0] if isinstance(found, tuple) else found

    return runner_of(problem, "BSHD", call)


def flash4_blocks(problem: GpuProblem, stream: Any) -> DeviceRunner:
    """FlashAttention 4 with a block list, and a mask function for partial blocks."""
    case = problem.case
    if window(case) is not None:
        raise Unavailable("timed with its own masks")
    if case.tables:
        raise Unavailable("timed with masks that read no table")
    attend = require("flash_attn.cute").flash_attn_func
    blocks = block_mask(problem, require("torch.nn.attention.flex_attention"))
    lists = require("flash_attn.cute.block_sparsity").BlockSparseTensorsTorch(
        blocks.kv_num_blocks, blocks.kv_indices, blocks.full_kv_num_blocks, blocks.full_kv_indices,
        block_size=(TILE, TILE),
    )  # fmt: skip
    allowed = mask_function(problem)

    def call(q: Any, k: Any, v: Any) -> Any:
        found = attend(q, k, v, softmax_scale=problem.scale, mask_mod=allowed, block_sparse_tensors=lists)
        return found[0] if isinstance(found, tuple) else found

    return runner_of(problem, "BSHD", call)


def mask_function(problem: GpuProblem) -> Any:
    """The mask as FlashAttention 4 compiles it into its kernel."""
    case = problem.case
    cute = require("cutlass.cute")
    sizes = {"S": case.S, "T": case.T, "P": case.P, "abs": lambda x: cute.where(x >= 0, x, -x)}
    decide = case.expression.as_function(sizes)
    offset = case.P

    @cute.jit  # type: ignore[untyped-decorator]
    def allowed(b: Any, h: Any, q: Any, k: Any, lengths: Any, tensors: Any) -> Any:
        return decide(b, h, q + offset, k)

    # What its cache of compiled kernels takes for the function's identity, which is otherwise its source.
    used = [f"{name} = {sizes[name]}" for name in "STP" if name in case.expression.reads]
    allowed.__cute_hash__ = hashlib.sha256(f"{case.mask}, {used}, {offset}".encode()).hexdigest()
    return allowed


def cudnn_flex(problem: GpuProblem, stream: Any) -> DeviceRunner:
    """cudnn.flex_attention with each query's keys as intervals; the plan is made ahead."""
    try:
        # What another installation of the package under this name does not have.
        module = importlib.import_module("cudnn.flex_attention")
    except ImportError as error:
        raise Unavailable(f"cudnn.flex_attention is not installed ({error})") from error
    ends = intervals(problem)
    plan = module.create_mask_plan(ends, *problem.sets("BSHD")[0], build_backward=False)

    def call(q: Any, k: Any, v: Any) -> Any:
        return module.flex_attn_func(q, k, v, mask_plan=plan, softmax_scale=problem.scale)

    return runner_of(problem, "BSHD", call)


def intervals(problem: GpuProblem) -> Any:
    """The mask as int32 [1 or H, n, B · S]: F of a query are [0, F0), [F1, F2), ..., n odd, the last ones empty.

    Raises:
        Unavailable: when a row has too many of them.
    """
    torch, case = problem.torch, problem.case
    heads = case.H if problem.by_head else 1
    step = max(1, _CHUNK // (heads * case.T))
    parts = []
    for start in range(0, case.S, step):
        positions = torch.arange(start, min(start + step, case.S), device=problem.device) + case.P
        allowed = problem.rows(torch.arange(heads, device=problem.device), positions)
        changes = torch.nonzero(allowed[..., 1:] != allowed[..., :-1])
        row = changes[:, 0] * len(positions) + changes[:, 1]
        counts = torch.bincount(row, minlength=heads * len(positions))
        # A row that begins with a forbidden key has an empty first interval.
        first = (~allowed[..., 0]).reshape(-1).long()
        most = int((counts + first).max()) | 1
        if most > 2 * _MOST_INTERVALS:
            raise Unavailable(
                f"takes keys as intervals: a query has {most // 2 + 1} of them, timed up to {_MOST_INTERVALS}"
            )
        found = torch.full((heads * len(positions), most), case.T, dtype=torch.int32, device=problem.device)
        found[first.bool(), 0] = 0
        place = torch.arange(len(row), device=problem.device) - (counts.cumsum(0) - counts)[row] + first[row]
        found[row, place] = (changes[:, 2] + 1).int()
        parts.append(found.reshape(heads, len(positions), most))
    most = max(part.shape[2] for part in parts)
    wide = [torch.nn.functional.pad(part, (0, most - part.shape[2]), value=case.T) for part in parts]
    return torch.cat(wide, 1).transpose(1, 2).repeat(1, 1, case.B).contiguous()
