# SPDX-License-Identifier: Apache-2.0
"""ONNX Runtime's candidates: the exported chain, its own attention operators, and StofAttention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from bench.core.candidate import Runner, Unavailable, require
from bench.cpu.problem import CpuProblem
from stof.bench.sessions import session
from stof.mask.expression import CAUSAL, PADDING
from stof.runtime import library

_OPSET = 20


def bind_inputs(found: Any, feeds: Mapping[str, np.ndarray], output: str = "y") -> Any:
    """The session's binding with inputs in place, so that a run copies nothing in or out."""
    ort = require("onnxruntime")
    binding = found.io_binding()
    for name, array in feeds.items():
        binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array))
    binding.bind_output(output, "cpu")
    return binding


def _runner(
    problem: CpuProblem,
    nodes: Sequence[onnx.NodeProto],
    feeds: Mapping[str, np.ndarray],
    threads: int,
    *,
    packed: bool,
    opset: int = _OPSET,
    constants: Sequence[onnx.TensorProto] = (),
    domains: Sequence[tuple[str, int]] = (),
) -> Runner:
    case = problem.case
    shape = [case.B, case.S, case.H * case.D] if packed else [case.B, case.H, case.S, case.D]
    graph = helper.make_graph(
        list(nodes),
        "attention",
        [helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape) for n, a in feeds.items()],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
        list(constants),
    )
    opsets = [helper.make_opsetid("", opset), *[helper.make_opsetid(d, v) for d, v in domains]]
    model = helper.make_model(graph, opset_imports=opsets)
    model.ir_version = 9 if opset < 23 else 11
    found = session(model.SerializeToString(), threads, stof=any(d == "stof" for d, _ in domains))
    binding = bind_inputs(found, feeds)

    def output() -> np.ndarray:
        found.run_with_iobinding(binding)
        result: np.ndarray = binding.copy_outputs_to_cpu()[0]
        return problem.unpack_heads(result, case.H) if packed else result

    return Runner(lambda: found.run_with_iobinding(binding), output, keep=(found, binding))


def _no_empty_mask(problem: CpuProblem) -> bool:
    return bool(problem.case.mask)


def exported(problem: CpuProblem, threads: int) -> Runner:
    """MatMul - Mul - Add - Softmax - MatMul, as exporters write it; the mask is a ready [1, 1, S, S] input."""
    case = problem.case
    feeds = {"q": problem.q, "k": problem.k, "v": problem.v}
    nodes, key, value = [], "k", "v"
    constants = [helper.make_tensor("scale", TensorProto.FLOAT, [], [problem.scale])]
    if case.G != case.H:
        wide = [case.B, case.G, case.H // case.G, case.S, case.D]
        flat = [case.B, case.H, case.S, case.D]
        constants += [
            helper.make_tensor("axes", TensorProto.INT64, [1], [2]),
            helper.make_tensor("wide", TensorProto.INT64, [5], wide),
            helper.make_tensor("flat", TensorProto.INT64, [4], flat),
        ]
        for name in ("k", "v"):
            nodes += [
                helper.make_node("Unsqueeze", [name, "axes"], [name + "1"]),
                helper.make_node("Expand", [name + "1", "wide"], [name + "2"]),
                helper.make_node("Reshape", [name + "2", "flat"], [name + "3"]),
            ]
        key, value = "k3", "v3"
    nodes += [
        helper.make_node("Transpose", [key], ["kt"], perm=[0, 1, 3, 2]),
        helper.make_node("MatMul", ["q", "kt"], ["s"]),
        helper.make_node("Mul", ["s", "scale"], ["t"]),
    ]
    last = "t"
    if _no_empty_mask(problem) or case.pad:
        feeds["mask"] = problem.additive
        nodes.append(helper.make_node("Add", ["t", "mask"], ["m"]))
        last = "m"
    nodes += [
        helper.make_node("Softmax", [last], ["p"], axis=-1),
        helper.make_node("MatMul", ["p", value], ["y"]),
    ]
    return _runner(problem, nodes, feeds, threads, packed=False, constants=constants)


def multi_head(problem: CpuProblem, threads: int) -> Runner:
    """com.microsoft MultiHeadAttention with attention_bias; causal by its own attribute, dense without a bias."""
    case = problem.case
    if case.G != case.H:
        raise Unavailable("cannot express shared key heads")
    feeds = {name: problem.pack_heads(getattr(problem, name)) for name in ("q", "k", "v")}
    inputs = ["q", "k", "v"]
    causal = case.expression == CAUSAL
    if _no_empty_mask(problem) and not causal:
        feeds["mask"] = problem.additive
        inputs += ["", "", "mask"]
    node = helper.make_node(
        "MultiHeadAttention", inputs, ["y"], domain="com.microsoft", num_heads=case.H, unidirectional=int(causal)
    )
    return _runner(problem, [node], feeds, threads, packed=True, domains=[("com.microsoft", 1)])


def group_query(problem: CpuProblem, threads: int) -> Runner:
    """com.microsoft GroupQueryAttention, causal, with local_window_size where the mask is a window."""
    case = problem.case
    window = case.expression.window()
    if window is None or window[1] != 0:
        raise Unavailable("expresses causal masks and causal windows only")
    size = window[0] + 1 if window[0] >= 0 else -1
    feeds = {name: problem.pack_heads(getattr(problem, name)) for name in ("q", "k", "v")}
    feeds["lengths"] = np.full([case.B], case.S - 1, np.int32)
    feeds["total"] = np.array(case.S, np.int32)
    node = helper.make_node(
        "GroupQueryAttention",
        ["q", "k", "v", "", "", "lengths", "total"],
        ["y", "present_key", "present_value"],
        domain="com.microsoft",
        num_heads=case.H,
        kv_num_heads=case.G,
        local_window_size=size,
    )
    return _runner(problem, [node], feeds, threads, packed=True, domains=[("com.microsoft", 1)])


def standard(opset: int) -> Any:
    """ai.onnx Attention of opset 23 or 24 with a boolean mask; causal by its own attribute, dense without a mask."""

    def build(problem: CpuProblem, threads: int) -> Runner:
        case = problem.case
        feeds = {"q": problem.q, "k": problem.k, "v": problem.v}
        causal = case.expression == CAUSAL
        if problem.allowed is not None and not causal:
            feeds["mask"] = problem.allowed
        node = helper.make_node("Attention", list(feeds), ["y"], is_causal=int(causal))
        return _runner(problem, [node], feeds, threads, packed=False, opset=opset)

    return build


def attributes(problem: CpuProblem) -> dict[str, int | float | str]:
    """The attributes of StofAttention for a problem."""
    roles = sorted(problem.case.tables)
    if problem.case.pad:
        roles = ["pad", *roles]
    expression = problem.case.expression & PADDING if problem.case.pad else problem.case.expression
    return {"mask": expression.text, "scale": problem.scale, "operands": " ".join(roles)}


def operands(problem: CpuProblem) -> dict[str, np.ndarray]:
    """The inputs of StofAttention by role."""
    found = {"q": problem.q, "k": problem.k, "v": problem.v}
    if problem.case.pad:
        found["pad"] = problem.pad
    found.update({name: np.ascontiguousarray(problem.case.tables[name]) for name in sorted(problem.case.tables)})
    return found


def stof_in_ort(problem: CpuProblem, threads: int, **more: float) -> Runner:
    """StofAttention as a node of ONNX Runtime, with further attributes: thresholds of run-time masks, a precision."""
    feeds = operands(problem)
    tables = [onnx.numpy_helper.from_array(feeds.pop(name), name) for name in sorted(problem.case.tables)]
    names = [*feeds, *[t.name for t in tables]]
    node = helper.make_node("StofAttention", names, ["y"], domain="stof")
    node.attribute.extend(helper.make_attribute(name, value) for name, value in {**attributes(problem), **more}.items())
    return _runner(problem, [node], feeds, threads, packed=False, constants=tables, domains=[("stof", 1)])


def stof_alone(problem: CpuProblem, threads: int) -> Runner:
    """The same function through the library's C ABI, with its own threads."""
    op = library.Op("StofAttention", attributes(problem))
    inputs = list(operands(problem).values())
    result = np.empty_like(problem.q)

    def run() -> None:
        op.run(inputs, [result], threads)

    def output() -> np.ndarray:
        run()
        return result

    return Runner(run, output, keep=(op, inputs))
