# SPDX-License-Identifier: Apache-2.0
"""The candidates of the CPU attention grid, and the baselines outside of ONNX Runtime: torch and OpenVINO."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from bench.core.candidate import Candidate, Runner, Unavailable, require
from bench.cpu import baselines_ort
from bench.cpu.problem import CpuProblem
from stof.mask.expression import CAUSAL

CpuCandidate = Candidate[CpuProblem, int, Runner]  # built for a number of threads


def _torch(threads: int) -> Any:
    torch = require("torch")
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    return torch


def _torch_runner(torch: Any, call: Callable[[], Any]) -> Runner:
    def run() -> None:
        call()

    def output() -> np.ndarray:
        found: np.ndarray = call().float().numpy()
        return found

    return Runner(run, output, keep=(torch,))


def sdpa(kind: str, dtype: str = "float32") -> Callable[[CpuProblem, int], Runner]:
    """SDPA of torch with a mask of a kind, "bool" or "float", on tensors of a type."""

    def build(problem: CpuProblem, threads: int) -> Runner:
        torch = _torch(threads)
        q, k, v = (torch.from_numpy(x).to(getattr(torch, dtype)) for x in (problem.q, problem.k, problem.v))
        options: dict[str, Any] = {"enable_gqa": True} if problem.case.G != problem.case.H else {}
        if problem.case.expression == CAUSAL:
            if kind == "float":
                raise Unavailable("causal is its own flag, timed under the boolean mask")
            options["is_causal"] = True
        elif problem.allowed is None:
            if kind == "float":
                raise Unavailable("no mask, timed under the boolean mask")
        elif kind == "bool":
            options["attn_mask"] = torch.from_numpy(problem.allowed)[None, None]
        else:
            options["attn_mask"] = torch.from_numpy(problem.additive)
        attention = torch.nn.functional.scaled_dot_product_attention
        return _torch_runner(torch, lambda: attention(q, k, v, scale=problem.scale, **options))

    return build


def _flex(problem: CpuProblem, threads: int) -> Runner:
    torch = _torch(threads)
    flex = require("torch.nn.attention.flex_attention")
    case = problem.case
    torch._dynamo.reset()
    q, k, v = (torch.from_numpy(x) for x in (problem.q, problem.k, problem.v))
    block = None
    if case.mask:
        tables = {name: torch.from_numpy(np.ascontiguousarray(t)) for name, t in case.tables.items()}
        allowed = case.expression.as_function({**tables, "S": case.S, "T": case.S, "P": 0})
        block = flex.create_block_mask(allowed, None, None, case.S, case.S, device="cpu")
    compiled = torch.compile(flex.flex_attention)
    options = {"block_mask": block, "scale": problem.scale, "enable_gqa": case.G != case.H}
    try:
        compiled(q, k, v, **options)
    except Exception as error:  # Dynamo, Inductor and the C++ compiler behind them raise types of their own
        raise Unavailable(f"does not compile: {str(error).strip().splitlines()[0][:160]}") from error
    return _torch_runner(torch, lambda: compiled(q, k, v, **options))


def openvino(problem: CpuProblem, threads: int, precision: str | None = "f32") -> Runner:
    """OpenVINO's SDPA, computed in a precision; None: in that which it takes by default on this machine."""
    ov = require("openvino")
    operators = require("openvino.opset13")
    case = problem.case
    if case.G != case.H:
        raise Unavailable("not timed with shared key heads")
    feeds = [problem.q, problem.k, problem.v]
    causal = case.expression == CAUSAL
    if problem.allowed is not None and not causal:
        feeds.append(problem.additive)
    inputs = [operators.parameter(list(x.shape), np.float32) for x in feeds]
    node = operators.scaled_dot_product_attention(*inputs, causal=causal)
    settings: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1}
    settings |= {} if precision is None else {"INFERENCE_PRECISION_HINT": precision}
    compiled = ov.Core().compile_model(ov.Model([node], inputs, "attention"), "CPU", settings)
    request = compiled.create_infer_request()
    for i, array in enumerate(feeds):
        request.set_input_tensor(i, ov.Tensor(array, shared_memory=True))

    def output() -> np.ndarray:
        request.infer()
        return np.array(request.get_output_tensor(0).data)

    return Runner(request.infer, output, keep=(compiled, feeds))


CANDIDATES: tuple[CpuCandidate, ...] = (
    Candidate("stof", "stof in ONNX Runtime", baselines_ort.stof_in_ort),
    Candidate("stof-c", "stof through the C ABI", baselines_ort.stof_alone),
    Candidate("ort-exported", "ONNX Runtime, as exported", baselines_ort.exported, score_tensors=2),
    Candidate("ort-mha", "ONNX Runtime MultiHeadAttention + bias", baselines_ort.multi_head, score_tensors=2),
    Candidate("ort-gqa", "ONNX Runtime GroupQueryAttention", baselines_ort.group_query, score_tensors=1),
    Candidate("ort-attention-23", "ONNX Runtime Attention-23, bool mask", baselines_ort.standard(23), score_tensors=2),
    Candidate("ort-attention-24", "ONNX Runtime Attention-24, bool mask", baselines_ort.standard(24), score_tensors=2),
    Candidate("torch-sdpa-bool", "torch SDPA, bool mask", sdpa("bool")),
    Candidate("torch-sdpa-float", "torch SDPA, float mask", sdpa("float")),
    Candidate("torch-flex", "torch FlexAttention, compiled", _flex),
    Candidate("openvino", "OpenVINO SDPA", openvino),
)
