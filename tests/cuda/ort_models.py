# SPDX-License-Identifier: Apache-2.0
"""Models of attention nodes alone in ONNX Runtime's CUDA provider, their tensors bound on the GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime as ort
import torch
from onnx import TensorProto, helper, numpy_helper

import stof
from stof.attention.checks.reference import Problem

TYPES = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}
TORCH_TYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
ELEMENTS = {
    **{TORCH_TYPES[name]: kind for name, kind in TYPES.items()},
    torch.bool: TensorProto.BOOL,
    torch.uint8: TensorProto.UINT8,
    torch.int8: TensorProto.INT8,
    torch.int32: TensorProto.INT32,
    torch.int64: TensorProto.INT64,
}


def outputs(nodes: int) -> list[str]:
    """The names of what a model of so many nodes puts out."""
    return ["out", *(f"out{i}" for i in range(1, nodes))]


def queries(nodes: int) -> list[str]:
    """The names of their queries, which are inputs of their own: equal nodes would be made one."""
    return ["q", *(f"q{i}" for i in range(1, nodes))]


def model(problem: Problem, constants: tuple[str, ...] = (), nodes: int = 1) -> bytes:
    """StofAttention nodes beside each other; dimensions are open. ``constants`` are roles that become initializers."""
    arrays, attributes = problem.inputs(), problem.attributes()
    names = ["q", "k", "v", *str(attributes["operands"]).split()]
    given, fixed = [], []
    for name, array in zip(names, arrays, strict=True):
        kind = helper.np_dtype_to_tensor_dtype(array.dtype)
        if name in constants:
            fixed.append(numpy_helper.from_array(array, name))
        else:
            given.append(helper.make_tensor_value_info(name, kind, [f"{name}{i}" for i in range(array.ndim)]))
    kind = TYPES[problem.q.dtype.name]
    given += [helper.make_tensor_value_info(name, kind, ["q0", "q1", "q2", "q3"]) for name in queries(nodes)[1:]]
    made = [
        helper.make_node("StofAttention", [query, *names[1:]], [out], f"attention_{out}", domain="stof", **attributes)
        for query, out in zip(queries(nodes), outputs(nodes), strict=True)
    ]
    results = [helper.make_tensor_value_info(out, kind, None) for out in outputs(nodes)]
    graph = helper.make_graph(made, "g", given, results, fixed)
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("stof", 1)]
    return bytes(helper.make_model(graph, opset_imports=imports, ir_version=8).SerializeToString())


def session(data: bytes, **provider: Any) -> Any:
    """A session on the CUDA provider, which must take every node."""
    options = ort.SessionOptions()
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    stof.register(options)
    return ort.InferenceSession(data, options, providers=[("CUDAExecutionProvider", provider)])


def on_device(array: np.ndarray) -> torch.Tensor:
    """The array on the GPU; bfloat16 by its bits."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).cuda().view(torch.bfloat16)
    return torch.from_numpy(np.ascontiguousarray(array)).cuda()


def to_host(tensor: torch.Tensor) -> np.ndarray:
    """The tensor as fp32."""
    return tensor.float().cpu().numpy()


class Bound:
    """A session whose inputs and outputs are torch tensors on the GPU; all nodes read the same and write the same."""

    def __init__(
        self,
        problem: Problem,
        constants: tuple[str, ...] = (),
        shared: Any = None,
        nodes: int = 1,
        **provider: Any,
    ) -> None:
        self.session = session(model(problem, constants, nodes), **provider) if shared is None else shared
        names = ["q", "k", "v", *str(problem.attributes()["operands"]).split()]
        arrays = dict(zip(names, problem.inputs(), strict=True))
        self.inputs = {n: on_device(a) for n, a in arrays.items() if n not in constants}
        dtype = TORCH_TYPES[problem.q.dtype.name]
        self.output = torch.full(problem.shape, float("nan"), dtype=dtype, device="cuda")
        self.binding = bind(self.session, self.inputs, self.output, nodes)
        torch.cuda.synchronize()

    def run(self) -> None:
        """Queues one run."""
        self.session.run_with_iobinding(self.binding)


def bind(session: Any, inputs: dict[str, torch.Tensor], output: torch.Tensor, nodes: int) -> Any:
    """A binding of so many nodes, whose queries are all ``inputs["q"]``."""
    binding = session.io_binding()
    for name, tensor in [*inputs.items(), *((query, inputs["q"]) for query in queries(nodes)[1:])]:
        binding.bind_input(name, "cuda", 0, ELEMENTS[tensor.dtype], tuple(tensor.shape), tensor.data_ptr())
    for out in outputs(nodes):
        binding.bind_output(out, "cuda", 0, ELEMENTS[output.dtype], tuple(output.shape), output.data_ptr())
    return binding
