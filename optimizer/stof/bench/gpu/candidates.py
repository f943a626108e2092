# SPDX-License-Identifier: Apache-2.0
"""The candidates of the GPU's grids, by name."""

from __future__ import annotations

import functools
from typing import Any

from stof.bench.core.runner import Unavailable, require
from stof.bench.gpu import baselines_jit, baselines_ort, baselines_torch
from stof.bench.gpu.candidate import Candidate, Peer
from stof.bench.gpu.cases import GRIDS
from stof.bench.gpu.problem import Problem
from stof.installation import CUDA, how_to_add
from stof.runtime.cuda import CudaOp, DeviceTensor, kernel_names
from stof.runtime.library import build_info

_WORKSPACE = 64 << 20
_FEW_QUERIES = 16  # up to that, decode's kernel
_FULL_ROWS = 0.1  # density above which the row-wise kernel is not timed


def _device(tensor: Any) -> DeviceTensor:
    return DeviceTensor(tensor.data_ptr(), str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


@functools.cache
def _workspace() -> Any:
    """Device memory that all calls share, since they follow each other on one stream."""
    torch: Any = require("torch")
    return torch.empty(_WORKSPACE, dtype=torch.uint8, device="cuda")


def own(problem: Problem, stream: Any, kernel: str = "") -> Candidate:
    """The library through its C ABI; by the kernel that its selector takes, or by the one of that name."""
    if "cuda" not in build_info()["backends"]:
        raise Unavailable(f"this build of the library has no CUDA kernels; {how_to_add(CUDA)}")
    case, torch = problem.case, problem.torch
    tables = [case.tables[name] for name in sorted(case.tables)]
    op = CudaOp(
        "StofAttention",
        baselines_ort.attributes(problem) | {"kernel": kernel},
        3 + len(tables),
        dict(enumerate(tables, 3)),
    )
    workspace = _workspace()
    calls: list[Any] = []
    outputs: list[Any] = []

    def bind() -> None:
        release()
        for given in problem.sets():
            outputs.append(torch.full_like(given[0], float("nan")))
            inputs = [_device(t) for t in given]
            calls.append(op.bind(inputs, [_device(outputs[-1])], stream.cuda_stream, _device(workspace)))

    def release() -> None:
        calls.clear()
        outputs.clear()

    return Candidate(lambda i: calls[i](), lambda: outputs[0], bind, release, keep=(op,))


def each_kernel(problem: Problem, stream: Any) -> list[tuple[str, Candidate]]:
    """A candidate for every kernel that the selector could take; none for what has a kernel of its own."""
    case = problem.case
    if case.S <= _FEW_QUERIES or "cuda" not in build_info()["backends"]:
        return []
    names = kernel_names(case.D, baselines_ort.ELEMENT[case.dtype])
    if problem.density.element > _FULL_ROWS:
        # One query after the other: a hundred times slower there, and nothing that anybody would choose.
        names = [name for name in names if name != "rows"]
    return [(name, own(problem, stream, name)) for name in names]


PEERS: tuple[Peer, ...] = (
    Peer("stof", "stof", own, GRIDS),
    Peer("stof-ort", "stof in ONNX Runtime", baselines_ort.own),
    Peer("torch-cudnn", "torch SDPA, cuDNN", baselines_torch.cudnn, GRIDS),
    Peer("torch-flash", "torch FlashAttention 2", baselines_torch.flash, GRIDS),
    Peer("torch-efficient", "torch SDPA, memory-efficient + mask", baselines_torch.efficient),
    Peer("torch-math", "torch SDPA, math + mask", baselines_torch.math, ("paper",)),
    Peer("torch-flex", "torch FlexAttention, compiled", baselines_torch.flex, GRIDS),
    Peer("flash-4", "FlashAttention 4", baselines_jit.flash4, ("masks", "paper", "long")),
    Peer("flash-4-blocks", "FlashAttention 4, blocks and a mask function", baselines_jit.flash4_blocks, ("masks",)),
    Peer("cudnn-flex", "cuDNN flex attention", baselines_jit.cudnn_flex, ("masks", "paper", "long")),
    Peer("ort-mha", "ONNX Runtime MultiHeadAttention + bias", baselines_ort.multi_head, ("paper", "long")),
    Peer("ort-gqa", "ONNX Runtime GroupQueryAttention", baselines_ort.group_query),
    Peer("ort-attention-23", "ONNX Runtime Attention-23, bool mask", baselines_ort.attention_23),
    Peer("ort-exported", "ONNX Runtime, as exported", baselines_ort.exported, ("paper",)),
)
OWN = ("stof", "stof-ort")
# Of the dense problem that says what a full tile costs.
ANCHORS = ("stof", "torch-cudnn", "torch-flash", "flash-4")


def find(names: list[str] | None, grid: str | None) -> list[Peer]:
    """The candidates of a grid, or of any; all, or those named.

    Raises:
        ValueError: when there is none of that name.
    """
    unknown = set(names or ()) - {p.name for p in PEERS}
    if unknown:
        raise ValueError(f"no peer {', '.join(sorted(unknown))}; there are {', '.join(p.name for p in PEERS)}")
    return [p for p in PEERS if (grid is None or grid in p.grids) and (names is None or p.name in names)]
