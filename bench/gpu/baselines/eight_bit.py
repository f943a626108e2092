# SPDX-License-Identifier: Apache-2.0
"""Attention in 8 bits: cuDNN with operands in fp8, and SageAttention, which quantizes to int8.

Packages: nvidia-cudnn-frontend (1.13 or later), sageattention 1.0.6 (Triton).
"""

from __future__ import annotations

from typing import Any

from bench.core.candidate import Unavailable, require
from bench.gpu.baselines.torch_sdpa import need_plain
from bench.gpu.device_runner import DeviceRunner, runner_of
from bench.gpu.problem import GpuProblem

_SCALES = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
_MOST_E4M3 = 448.0


def cudnn_fp8(problem: GpuProblem, stream: Any) -> DeviceRunner:
    """CuDNN with one scale a tensor. Its operands are e4m3 before the time begins, and its output is e4m3."""
    causal = need_plain(problem)
    torch, case = problem.torch, problem.case
    if case.G != case.H:
        raise Unavailable("timed with as many key heads as query heads")
    cudnn = require("cudnn")
    handle = cudnn.create_handle()
    cudnn.set_stream(handle=handle, stream=stream.cuda_stream)
    e4m3, fp32 = cudnn.data_type.FP8_E4M3, cudnn.data_type.FLOAT
    graph = cudnn.pygraph(io_data_type=e4m3, intermediate_data_type=fp32, compute_data_type=fp32, handle=handle)
    shape = (case.B, case.H, case.S, case.D)
    strides = (case.H * case.S * case.D, case.S * case.D, case.D, 1)
    given = [graph.tensor(name=name, dim=shape, stride=strides, data_type=e4m3) for name in "qkv"]
    one = (1, 1, 1, 1)
    scales = {name: graph.tensor(name=name, dim=one, stride=one, data_type=fp32) for name in _SCALES}
    found, _, largest_weight, largest_output = graph.sdpa_fp8(
        *given, **scales, attn_scale=problem.scale, use_causal_mask=causal, generate_stats=False, name="attention"
    )
    found.set_output(True).set_dim(shape).set_stride(strides).set_data_type(e4m3)
    for largest in (largest_weight, largest_output):
        largest.set_output(True).set_dim(one).set_stride(one).set_data_type(fp32)
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A])
    graph.check_support()
    graph.build_plans()
    workspace = torch.empty(max(1, graph.get_workspace_size()), dtype=torch.uint8, device=problem.device)
    packs: list[dict[Any, Any]] = []
    outputs: list[Any] = []
    factors: list[float] = []

    def bind() -> None:
        release()
        for q, k, v in problem.sets():
            tensors, own = zip(*(_to_e4m3(torch, x) for x in (q, k, v)), strict=True)
            # Weights are at most 1: 256 leaves room and is a power of two. Outputs are at most as large as values.
            values = dict(zip(_SCALES, (*own, 1 / 256, 256.0, 1 / own[2]), strict=True))
            pack = {node: _scalar(problem, values[name]) for name, node in scales.items()}
            outputs.append(torch.empty(shape, dtype=torch.float8_e4m3fn, device=problem.device))
            factors.append(own[2])
            pack |= dict(zip(given, tensors, strict=True)) | {found: outputs[-1]}
            pack |= {largest_weight: _scalar(problem, 0.0), largest_output: _scalar(problem, 0.0)}
            packs.append(pack)

    def release() -> None:
        for kept in (packs, outputs, factors):
            kept.clear()

    return DeviceRunner(
        lambda i: graph.execute(packs[i], workspace, handle=handle),
        lambda: outputs[0].float() * factors[0],
        bind,
        release,
        keep=(graph, workspace, handle),
    )


def _to_e4m3(torch: Any, x: Any) -> tuple[Any, float]:
    """A tensor over its scale, and the scale, which gives the largest magnitude the largest value of e4m3."""
    scale = float(x.abs().max()) / _MOST_E4M3
    return (x.float() / scale).to(torch.float8_e4m3fn), scale


def _scalar(problem: GpuProblem, value: float) -> Any:
    return problem.torch.full((1, 1, 1, 1), value, dtype=problem.torch.float32, device=problem.device)


def sage(problem: GpuProblem, stream: Any) -> DeviceRunner:
    """SageAttention 1: scores in int8, weights and values in fp16. It would take the mean off the keys in place: done here."""
    del stream
    causal = need_plain(problem)
    attend = require("sageattention").sageattn

    def call(q: Any, k: Any, v: Any) -> Any:
        centered = k - k.mean(2, keepdim=True)
        return attend(q, centered, v, is_causal=causal, sm_scale=problem.scale, smooth_k=False)

    return runner_of(problem, "BHSD", call)
