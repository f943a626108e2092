# SPDX-License-Identifier: Apache-2.0
"""StofCachedAttention on the device: one query that is appended to a cache of T - 1 keys, in place."""

from __future__ import annotations

from typing import Any

import numpy as np

from bench.core.candidate import Unavailable
from bench.gpu.device_runner import DeviceRunner
from bench.gpu.problem import GpuProblem
from stof.installation import CUDA, how_to_add
from stof.mask.expression import CAUSAL
from stof.runtime.cuda import CudaOp, DeviceTensor
from stof.runtime.library import build_info

_TOTAL = 6  # the input total_sequence_length, in host memory


def on_device(tensor: Any, shape: tuple[int, ...] | None = None) -> DeviceTensor:
    """A torch tensor as the library takes it, in another shape if one is given."""
    return DeviceTensor(tensor.data_ptr(), str(tensor.dtype).removeprefix("torch."), shape or tuple(tensor.shape))


def new_rows(problem: GpuProblem, i: int) -> tuple[Any, Any, Any]:
    """The last S rows of a set's query, key and value, [B, S, heads * D]: what a step appends to the cache."""
    case = problem.case
    q, k, v = problem.sets()[i]
    last = (q, k[:, :, case.T - case.S :], v[:, :, case.T - case.S :])
    query, key, value = (x.transpose(1, 2).reshape(case.B, case.S, -1).contiguous() for x in last)
    return query, key, value


def stof_cached(problem: GpuProblem, workspace: Any, stream: Any) -> DeviceRunner:
    """The operator through the library's C ABI. Past and present are one buffer, which holds all T keys already.

    Raises:
        Unavailable: when the library has no CUDA kernels.
    """
    if "cuda" not in build_info()["backends"]:
        raise Unavailable(f"this build of the library has no CUDA kernels; {how_to_add(CUDA)}")
    case, torch = problem.case, problem.torch
    op = CudaOp(
        "StofCachedAttention",
        {"num_heads": case.H, "kv_num_heads": case.G, "mask": case.mask or str(CAUSAL.text), "scale": problem.scale},
        _TOTAL + 1,
        {_TOTAL: np.array([case.T], np.int32)},
    )
    lengths = torch.full((case.B,), case.T - 1, dtype=torch.int32, device=problem.device)
    calls: list[Any] = []
    held: list[Any] = []

    def bind() -> None:
        release()
        for i, (q, k, v) in enumerate(problem.sets()):
            new = new_rows(problem, i)
            output = torch.full_like(new[0], float("nan"))
            held.append((output, new, q))
            inputs = [*(on_device(x) for x in new), on_device(k), on_device(v), on_device(lengths)]
            results = [on_device(output), on_device(k), on_device(v)]
            calls.append(op.bind(inputs, results, stream.cuda_stream, on_device(workspace)))

    def release() -> None:
        calls.clear()
        held.clear()

    def output() -> Any:
        return held[0][0].reshape(case.B, case.S, case.H, case.D).transpose(1, 2)

    return DeviceRunner(lambda i: calls[i](), output, bind, release, keep=(op, lengths))
