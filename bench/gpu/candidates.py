# SPDX-License-Identifier: Apache-2.0
"""The candidates of the GPU grids, by name."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from bench.core import run_time
from bench.core.candidate import Candidate, Unavailable, require, select
from bench.gpu import cached
from bench.gpu.baselines import eight_bit, jit_kernels, onnx_runtime, sparse_masks, torch_sdpa
from bench.gpu.baselines.flashinfer_decode import flashinfer_decode
from bench.gpu.cached import on_device
from bench.gpu.cases import GRIDS
from bench.gpu.device_runner import DeviceRunner, GpuCandidate
from bench.gpu.problem import GpuProblem
from stof.installation import CUDA, how_to_add
from stof.runtime.cuda import CudaOp, kernel_names
from stof.runtime.library import build_info

_WORKSPACE = 1 << 30  # bytes
_FEW_QUERIES = 16  # up to that many, the decode kernel runs
_FULL_ROWS = 0.1  # density of elements above which the row-wise kernel is not timed


@functools.cache
def _workspace() -> Any:
    """Device memory that all calls share: they follow each other on one stream."""
    torch: Any = require("torch")
    return torch.empty(_WORKSPACE, dtype=torch.uint8, device="cuda")


def stof_alone(
    problem: GpuProblem, stream: Any, kernel: str = "", more: Mapping[str, float | str] | None = None
) -> DeviceRunner:
    """The library through its C ABI, by a named kernel or by the one that its selector takes; with more attributes."""
    if problem.case.grid == "cached" or (problem.case.grid == "s2" and problem.case.S == 1):
        return cached.stof_cached(problem, _workspace(), stream)
    if "cuda" not in build_info()["backends"]:
        raise Unavailable(f"this build of the library has no CUDA kernels; {how_to_add(CUDA)}")
    case, torch = problem.case, problem.torch
    tables = [case.tables[name] for name in sorted(case.tables)]
    op = CudaOp(
        "StofAttention",
        {**onnx_runtime.attributes(problem), "kernel": kernel, **(more or {})},
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
            inputs = [on_device(t) for t in given]
            calls.append(op.bind(inputs, [on_device(outputs[-1])], stream.cuda_stream, on_device(workspace)))

    def release() -> None:
        calls.clear()
        outputs.clear()

    return DeviceRunner(lambda i: calls[i](), lambda: outputs[0], bind, release, keep=(op,))


def each_kernel(problem: GpuProblem, stream: Any) -> list[tuple[str, DeviceRunner]]:
    """A runner for every kernel that the selector could take; none for few queries, which have a kernel of their own."""
    case = problem.case
    if case.S <= _FEW_QUERIES or "cuda" not in build_info()["backends"]:
        return []
    names = kernel_names(case.D, onnx_runtime.ELEMENT[case.dtype])
    if problem.density.element > _FULL_ROWS:
        # One query after the other: a hundred times slower there.
        names = [name for name in names if name != "rows"]
    return [(name, stof_alone(problem, stream, name)) for name in names]


def finding_keys(attributes: Mapping[str, float]) -> Callable[[GpuProblem, Any], DeviceRunner]:
    """The library under the causal mask alone: it finds at run time which keys decide, and is checked against their mask."""

    def made(problem: GpuProblem, stream: Any) -> DeviceRunner:
        return stof_alone(sparse_masks.CausalProblem(problem), stream, more=attributes)

    return made


_USUAL = ("paper", "long", "decode")


def in_precision(precision: str) -> Callable[[GpuProblem, Any], DeviceRunner]:
    """The library with operands of 8 bits (attribute ``precision``); quantization is part of the time."""

    def made(problem: GpuProblem, stream: Any) -> DeviceRunner:
        return stof_alone(problem, stream, more={"precision": precision})

    return made


_DENSE_GRIDS = tuple(g for g in GRIDS if g not in ("s2", "run-time"))  # there they run dense
_CAUSAL_GRIDS = ("s2", "run-time")
CANDIDATES: tuple[GpuCandidate, ...] = (
    Candidate("stof", "stof", stof_alone, GRIDS),
    Candidate("stof-ort", "stof in ONNX Runtime", onnx_runtime.stof_in_ort, _USUAL),
    Candidate("stof-choose-blocks", "stof, choose-blocks", finding_keys(run_time.CHOOSE_BLOCKS), ("run-time",)),
    Candidate("stof-skip-scores", "stof, skip-scores", finding_keys(run_time.SKIP_SCORES), ("run-time",)),
    Candidate("stof-causal", "stof, every key", sparse_masks.dense(stof_alone), ("run-time",)),
    Candidate("stof-int8", "stof, int8 scores", in_precision("int8"), ("8-bit",)),
    Candidate("stof-int8-fp8", "stof, int8 scores, fp8 weights and values", in_precision("int8_fp8"), ("8-bit",)),
    Candidate("cudnn-fp8", "cuDNN, operands in fp8", eight_bit.cudnn_fp8, ("8-bit",)),
    Candidate("sage", "SageAttention, int8 scores", eight_bit.sage, ("8-bit",)),
    Candidate("torch-cudnn", "torch SDPA, cuDNN", torch_sdpa.cudnn, _DENSE_GRIDS),
    Candidate("torch-flash", "torch FlashAttention 2", torch_sdpa.flash, _DENSE_GRIDS),
    Candidate("torch-efficient", "torch SDPA, memory-efficient + mask", torch_sdpa.efficient, _USUAL),
    Candidate("torch-math", "torch SDPA, math + mask", torch_sdpa.math, ("paper",)),
    Candidate("torch-flex", "torch FlexAttention, compiled", torch_sdpa.flex, tuple(g for g in GRIDS if g != "cached")),
    Candidate("flash-4", "FlashAttention 4", jit_kernels.flash4, ("masks", "paper", "long", "8-bit")),
    Candidate(
        "flash-4-blocks",
        "FlashAttention 4, blocks and a mask function",
        jit_kernels.flash4_blocks,
        ("masks", "run-time"),
    ),
    Candidate("cudnn-flex", "cuDNN flex attention", jit_kernels.cudnn_flex, ("masks", "paper", "long", "run-time")),
    Candidate("ort-mha", "ONNX Runtime MultiHeadAttention + bias", onnx_runtime.multi_head, ("paper", "long")),
    Candidate("ort-gqa", "ONNX Runtime GroupQueryAttention", onnx_runtime.group_query, (*_USUAL, "cached")),
    Candidate("flashinfer", "FlashInfer decode", flashinfer_decode, ("cached",)),
    Candidate(
        "flashinfer-tensor-cores",
        "FlashInfer decode on tensor cores",
        functools.partial(flashinfer_decode, tensor_cores=True),
        ("cached",),
    ),
    Candidate(
        "ort-gqa-dense",
        "ONNX Runtime GroupQueryAttention, dense",
        sparse_masks.dense(onnx_runtime.group_query),
        ("s2",),
    ),
    Candidate("torch-cudnn-dense", "torch SDPA, cuDNN, dense", sparse_masks.dense(torch_sdpa.cudnn), _CAUSAL_GRIDS),
    Candidate(
        "torch-flash-dense",
        "torch FlashAttention 2, dense",
        sparse_masks.dense(torch_sdpa.flash),
        _CAUSAL_GRIDS,
    ),
    Candidate("ort-sparse", "ONNX Runtime SparseAttention", sparse_masks.sparse_attention, ("s2",)),
    Candidate("ort-attention-23", "ONNX Runtime Attention-23, bool mask", onnx_runtime.attention_23, _USUAL),
    Candidate("ort-exported", "ONNX Runtime, as exported", onnx_runtime.exported, ("paper",)),
)
# Of the dense problem by which a full tile is timed.
ANCHORS = ("stof", "torch-cudnn", "torch-flash", "flash-4")


def find(names: list[str] | None, grid: str | None) -> list[GpuCandidate]:
    """The candidates of a grid (None: of any), or those of them that are named.

    Raises:
        ValueError: when there is no candidate of a name.
    """
    return select(CANDIDATES, names, grid)
