# SPDX-License-Identifier: Apache-2.0
"""ONNX Runtime's CUDA provider on the device: its own attention operators, the exported chain, and StofAttention.

LongformerAttention is not among them: it projects hidden states itself, so that its attention cannot be timed alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from bench.core.candidate import Unavailable, require
from bench.gpu.cached import new_rows
from bench.gpu.device_runner import DeviceRunner, need_dense, need_scores, window
from bench.gpu.problem import GpuProblem
from stof.mask.expression import CAUSAL
from stof.runtime import library

ELEMENT = {"float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}
MICROSOFT = "com.microsoft"


def session(
    model: bytes | str,
    stream: Any,
    *,
    stof: bool = False,
    profile: str | None = None,
    fallback: bool = False,
    sizes: Mapping[str, int] | None = None,
    **provider: str,
) -> Any:
    """A session on the CUDA provider that queues its work on a torch stream.

    ``fallback``: nodes without a CUDA kernel run on the CPU; else such a model is refused. ``sizes`` of symbolic dimensions are
    fixed, by name.
    """
    ort = require("onnxruntime")
    if "CUDAExecutionProvider" not in ort.get_available_providers():
        raise Unavailable("onnxruntime has no CUDA provider here")
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    if not fallback:
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    for name, size in (sizes or {}).items():
        options.add_free_dimension_override_by_name(name, size)
    if profile is not None:
        options.enable_profiling = True
        options.profile_file_prefix = profile
    if stof:
        library.register(options)
    settings = {
        "user_compute_stream": str(stream.cuda_stream),
        "arena_extend_strategy": "kSameAsRequested",
        **provider,
    }
    return ort.InferenceSession(model, options, providers=[("CUDAExecutionProvider", settings)])


def unsynchronized_run_options() -> Any:
    """Options of a run that returns when its work is queued."""
    options = require("onnxruntime").RunOptions()
    options.add_run_config_entry("disable_synchronize_execution_providers", "1")
    return options


@dataclass
class Graph:
    """A model of a few nodes.

    ``inputs`` gives the device tensors of a set by name; ``host`` are small inputs on the CPU.
    """

    problem: GpuProblem
    nodes: Sequence[onnx.NodeProto]
    inputs: Callable[[int], dict[str, Any]]
    packed: bool  # output is [B, S, H·D]
    opset: int = 20
    domains: Sequence[tuple[str, int]] = ()
    constants: Sequence[onnx.TensorProto] = ()
    host: dict[str, np.ndarray] = field(default_factory=dict)
    # Outputs beside y: the device tensors that take them, for each set.
    others: Callable[[int], dict[str, Any]] = lambda i: {}
    release: Callable[[], None] = lambda: None


def _element(tensor: Any) -> int:
    names = {"bool": TensorProto.BOOL, "int32": TensorProto.INT32, **ELEMENT}
    return int(names[str(tensor.dtype).removeprefix("torch.")])


def graph_runner(graph: Graph, stream: Any) -> DeviceRunner:
    """The model in a session that queues its work on the stream."""
    ort = require("onnxruntime")
    problem, case = graph.problem, graph.problem.case
    torch = problem.torch
    kind = ELEMENT[case.dtype]
    shape = [case.B, case.S, case.H * case.D] if graph.packed else [case.B, case.H, case.S, case.D]
    given = {name: (_element(t), list(t.shape)) for name, t in graph.inputs(0).items()}
    given |= {name: (helper.np_dtype_to_tensor_dtype(a.dtype), list(a.shape)) for name, a in graph.host.items()}
    results = {"y": (kind, shape)} | {name: (_element(t), list(t.shape)) for name, t in graph.others(0).items()}
    made = helper.make_graph(
        list(graph.nodes),
        "attention",
        [helper.make_tensor_value_info(n, k, s) for n, (k, s) in given.items()],
        [helper.make_tensor_value_info(n, k, s) for n, (k, s) in results.items()],
        list(graph.constants),
    )
    opsets = [helper.make_opsetid("", graph.opset), *[helper.make_opsetid(d, v) for d, v in graph.domains]]
    model = helper.make_model(made, opset_imports=opsets, ir_version=9 if graph.opset < 23 else 11)
    found = session(model.SerializeToString(), stream, stof=any(d == "stof" for d, _ in graph.domains))
    options = unsynchronized_run_options()
    bindings: list[tuple[Any, Any]] = []

    def bind() -> None:
        bindings.clear()
        for i in range(problem.count):
            binding, output = found.io_binding(), torch.empty(shape, dtype=problem.dtype, device="cuda")
            held: list[Any] = [output]
            for name, tensor in graph.inputs(i).items():
                held.append(tensor)
                binding.bind_input(name, "cuda", 0, _element(tensor), tuple(tensor.shape), tensor.data_ptr())
            for name, array in graph.host.items():
                binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array))
            for name, tensor in {"y": output, **graph.others(i)}.items():
                held.append(tensor)
                binding.bind_output(name, "cuda", 0, _element(tensor), tuple(tensor.shape), tensor.data_ptr())
            bindings.append((binding, held))

    def output() -> Any:
        result = bindings[0][1][0]
        return result.view(case.B, case.S, case.H, case.D).transpose(1, 2) if graph.packed else result

    def release() -> None:
        bindings.clear()
        graph.release()

    return DeviceRunner(
        lambda i: found.run_with_iobinding(bindings[i][0], options), output, bind, release, keep=(found, options)
    )


def _packed(problem: GpuProblem, i: int) -> dict[str, Any]:
    q, k, v = (x.reshape(x.shape[0], x.shape[1], -1) for x in problem.sets("BSHD")[i])
    return {"q": q, "k": k, "v": v}


def _plain(problem: GpuProblem, i: int) -> dict[str, Any]:
    return dict(zip("qkv", problem.sets()[i], strict=True))


def multi_head(problem: GpuProblem, stream: Any) -> DeviceRunner:
    """com.microsoft MultiHeadAttention with attention_bias; causal by its own attribute."""
    case = problem.case
    if case.G != case.H:
        raise Unavailable("cannot express shared key heads")
    causal = case.expression == CAUSAL
    names = ["q", "k", "v"]
    if case.mask and not causal:
        need_dense(problem)
        names += ["", "", "bias"]

    def inputs(i: int) -> dict[str, Any]:
        return _packed(problem, i) | ({"bias": problem.additive} if "bias" in names else {})

    node = helper.make_node(
        "MultiHeadAttention", names, ["y"], domain=MICROSOFT, num_heads=case.H, unidirectional=int(causal),
        scale=problem.scale,
    )  # fmt: skip
    return graph_runner(Graph(problem, [node], inputs, packed=True, domains=[(MICROSOFT, 1)]), stream)


def group_query(problem: GpuProblem, stream: Any) -> DeviceRunner:
    """com.microsoft GroupQueryAttention, causal, with local_window_size; one query reads a cache that holds the rest."""
    case = problem.case
    sides = window(case)
    if sides is None or (sides[1] != 0 and case.S > 1):
        raise Unavailable("expresses causal masks and causal windows only")
    torch = problem.torch
    lengths = torch.full((case.B,), case.T - 1, dtype=torch.int32, device="cuda")
    cached = case.S < case.T

    def inputs(i: int) -> dict[str, Any]:
        if not cached:
            return _packed(problem, i) | {"lengths": lengths}
        _, k, v = problem.sets()[i]
        return dict(zip("qkv", new_rows(problem, i), strict=True)) | {"past_k": k, "past_v": v, "lengths": lengths}

    present: dict[int, dict[str, Any]] = {}

    def others(i: int) -> dict[str, Any]:
        _, k, v = problem.sets()[i]
        if cached:
            return {"present_k": k, "present_v": v}
        # One pair for all sets: they are written, never read.
        if not present:
            present[0] = {"present_k": torch.empty_like(k), "present_v": torch.empty_like(v)}
        return present[0]

    past = ["past_k", "past_v"] if cached else ["", ""]
    node = helper.make_node(
        "GroupQueryAttention", ["q", "k", "v", *past, "lengths", "total"], ["y", "present_k", "present_v"],
        domain=MICROSOFT, num_heads=case.H, kv_num_heads=case.G, scale=problem.scale,
        local_window_size=-1 if sides[0] < 0 else sides[0] + 1,
    )  # fmt: skip
    graph = Graph(
        problem, [node], inputs, packed=True, domains=[(MICROSOFT, 1)], others=others,
        host={"total": np.array(case.T, np.int32)}, release=present.clear,
    )  # fmt: skip
    return graph_runner(graph, stream)


def attention_23(problem: GpuProblem, stream: Any) -> DeviceRunner:
    """ai.onnx Attention of opset 23 with a boolean mask; causal by its own attribute."""
    case = problem.case
    need_scores(problem)
    causal = case.expression == CAUSAL
    masked = bool(case.mask) and not causal
    if masked:
        need_dense(problem)

    def inputs(i: int) -> dict[str, Any]:
        return _plain(problem, i) | ({"mask": problem.dense} if masked else {})

    node = helper.make_node(
        "Attention", ["q", "k", "v", "mask"][: 4 if masked else 3], ["y"], is_causal=int(causal), scale=problem.scale
    )
    return graph_runner(Graph(problem, [node], inputs, packed=False, opset=23), stream)


def exported(problem: GpuProblem, stream: Any) -> DeviceRunner:
    """MatMul - Mul - Add - Softmax - MatMul, as exporters write it; the mask is a ready input."""
    case = problem.case
    if case.G != case.H:
        raise Unavailable("not timed with shared key heads")
    need_scores(problem)
    if case.mask:
        need_dense(problem)
    scale = numpy_helper.from_array(np.array(problem.scale, np.float16), "scale")
    if case.dtype != "float16":
        raise Unavailable("timed in fp16 alone")
    nodes = [
        helper.make_node("Transpose", ["k"], ["kt"], perm=[0, 1, 3, 2]),
        helper.make_node("MatMul", ["q", "kt"], ["s"]),
        helper.make_node("Mul", ["s", "scale"], ["t"]),
        helper.make_node("Add", ["t", "bias"], ["m"]),
        helper.make_node("Softmax", ["m" if case.mask else "t"], ["p"], axis=-1),
        helper.make_node("MatMul", ["p", "v"], ["y"]),
    ]
    if not case.mask:
        del nodes[3]

    def inputs(i: int) -> dict[str, Any]:
        return _plain(problem, i) | ({"bias": problem.additive} if case.mask else {})

    return graph_runner(Graph(problem, nodes, inputs, packed=False, constants=[scale]), stream)


def stof_in_ort(problem: GpuProblem, stream: Any) -> DeviceRunner:
    """StofAttention as a node of ONNX Runtime."""
    case = problem.case
    tables = [numpy_helper.from_array(np.ascontiguousarray(case.tables[n]), n) for n in sorted(case.tables)]
    node = helper.make_node("StofAttention", ["q", "k", "v", *[t.name for t in tables]], ["y"], domain="stof")
    node.attribute.extend(helper.make_attribute(n, v) for n, v in attributes(problem).items())
    return graph_runner(
        Graph(problem, [node], lambda i: _plain(problem, i), packed=False, constants=tables, domains=[("stof", 1)]),
        stream,
    )


def attributes(problem: GpuProblem) -> dict[str, int | float | str]:
    """The attributes of StofAttention for a problem."""
    case = problem.case
    return {
        "mask": case.mask,
        "scale": problem.scale,
        "operands": " ".join(sorted(case.tables)),
        "query_offset": int(case.P > 0),
    }
