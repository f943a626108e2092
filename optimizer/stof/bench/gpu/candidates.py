# SPDX-License-Identifier: Apache-2.0
"""The candidates of the GPU's grids, by name."""

from __future__ import annotations

import functools
from typing import Any

from stof.bench.gpu import peers_ort, peers_torch
from stof.bench.gpu.candidate import Candidate, Peer
from stof.bench.gpu.problem import Problem
from stof.bench.runner import Unavailable, require
from stof.runtime import build_info
from stof.runtime_cuda import CudaOp, DeviceTensor

_WORKSPACE = 64 << 20


def _device(tensor: Any) -> DeviceTensor:
    return DeviceTensor(tensor.data_ptr(), str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


@functools.cache
def _workspace() -> Any:
    """Device memory that all calls share, since they follow each other on one stream."""
    torch: Any = require("torch")
    return torch.empty(_WORKSPACE, dtype=torch.uint8, device="cuda")


def own(problem: Problem, stream: Any) -> Candidate:
    """The library through its C ABI."""
    if "cuda" not in build_info()["backends"]:
        raise Unavailable("this build of the library has no CUDA kernels")
    case, torch = problem.case, problem.torch
    tables = [case.tables[name] for name in sorted(case.tables)]
    op = CudaOp("StofAttention", peers_ort.attributes(problem), 3 + len(tables), dict(enumerate(tables, 3)))
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


PEERS: tuple[Peer, ...] = (
    Peer("stof", "stof", own),
    Peer("stof-ort", "stof in ONNX Runtime", peers_ort.own),
    Peer("torch-cudnn", "torch SDPA, cuDNN", peers_torch.cudnn),
    Peer("torch-flash", "torch FlashAttention 2", peers_torch.flash),
    Peer("torch-efficient", "torch SDPA, memory-efficient + mask", peers_torch.efficient),
    Peer("torch-math", "torch SDPA, math + mask", peers_torch.math, ("paper",)),
    Peer("torch-flex", "torch FlexAttention, compiled", peers_torch.flex),
    Peer("ort-mha", "ONNX Runtime MultiHeadAttention + bias", peers_ort.multi_head, ("paper", "long")),
    Peer("ort-gqa", "ONNX Runtime GroupQueryAttention", peers_ort.group_query),
    Peer("ort-attention-23", "ONNX Runtime Attention-23, bool mask", peers_ort.attention_23),
    Peer("ort-exported", "ONNX Runtime, as exported", peers_ort.exported, ("paper",)),
)
OWN = ("stof", "stof-ort")
# Of the dense problem that says what a full tile costs.
ANCHORS = ("stof", "torch-cudnn", "torch-flash")


def find(names: list[str] | None, grid: str) -> list[Peer]:
    """The candidates of a grid; all, or those named.

    Raises:
        ValueError: when there is none of that name.
    """
    unknown = set(names or ()) - {p.name for p in PEERS}
    if unknown:
        raise ValueError(f"no peer {', '.join(sorted(unknown))}; there are {', '.join(p.name for p in PEERS)}")
    return [p for p in PEERS if grid in p.grids and (names is None or p.name in names)]
