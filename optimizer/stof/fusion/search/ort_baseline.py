# SPDX-License-Identifier: Apache-2.0
"""Estimates the time of ONNX Runtime's own kernels for a region, by the graph that its optimizer makes of it.

The optimizer runs for the CPU provider in fp32. It has the fusions of the CUDA provider but for those listed here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import onnx

from stof.errors import UnsupportedError
from stof.execution.session_process import RuntimeFailure, create_session, has_onnxruntime
from stof.execution.session_worker import SessionSpec
from stof.execution.upcast import HALF, widen
from stof.files import temporary_folder
from stof.fusion.element_ops import FREE, TYPES
from stof.fusion.fusion_graph import FusionGraph
from stof.fusion.search.cost import MachineModel, has_bias
from stof.fusion.search.measure import part_model
from stof.symbolic.algebra.sizes import evaluate

_MATMUL_OPS = frozenset({"MatMul", "Gemm", "FusedMatMul"})
# Kernels of the runtime that are as fast as chains: 2.9 TB/s on an H100.
_FUSED = frozenset({"SkipLayerNormalization", "SkipSimplifiedLayerNormalization", "RotaryEmbedding"})
_SECONDS = 60.0  # timeout of a session, which takes milliseconds
_NO_KERNEL = FREE | _MATMUL_OPS | {"Constant", "Shape"}


def with_matmuls(graph: FusionGraph, node_indices: Sequence[int]) -> list[int]:
    """A region with the matmuls before and behind it: a runtime fuses biases, scales and transposes with them."""
    members = set(node_indices)
    for index in node_indices:
        around = [*graph.producers(index), *graph.consumers(index)]
        members.update(p for p in around if graph.nodes[p].op_type in _MATMUL_OPS)
    return sorted(members)


def ort_baseline_seconds(
    graph: FusionGraph, node_indices: Sequence[int], sizes: Mapping[str, int], machine: MachineModel
) -> float:
    """The estimated seconds of the runtime's kernels of a region, without the matmuls around it.

    Raises:
        UnsupportedError: when the region cannot be run alone.
    """
    whole = with_matmuls(graph, node_indices)
    outputs = list(graph.outputs(whole))
    outputs += [o for o in graph.outputs(node_indices) if o not in outputs and _is_read_elsewhere(graph, o, set(whole))]
    model, _ = part_model(graph, whole, (), outputs, sizes, fixed=True)
    optimized = _optimize(widen(model, kinds=HALF))
    width = 2 if any(graph.symbolic.dtype(o) in HALF for o in outputs) else 4
    names = {n for p in whole for n in (*graph.nodes[p].input, *graph.nodes[p].output) if n}
    shapes = {n: graph.symbolic.shape(n) for n in names}
    counts = {n: math.prod(evaluate(d, sizes) for d in s) for n, s in shapes.items() if s is not None}
    # Biases of matmuls outside of the region are computed in any case.
    outside = {
        o for p in whole if p not in set(node_indices) for o in graph.nodes[p].output if has_bias(graph.nodes[p])
    }
    # Where rows are flattened, the size of the restored output is known.
    restored = {n.input[0]: n.output[0] for n in optimized.graph.node if n.op_type == "Reshape"}
    biased = [n.output[0] for n in optimized.graph.node if has_bias(n)]
    written = {restored.get(n, n) if n not in counts else n for n in biased}
    biases = sum(machine.bias_seconds(counts.get(n, 0) * width) for n in written - outside)
    return biases + _model_seconds(optimized.graph, counts, machine, width)


def _is_read_elsewhere(graph: FusionGraph, name: str, inside: set[int]) -> bool:
    return name in graph.kept_tensors or any(r not in inside for r in graph.readers.get(name, ()))


def _optimize(model: onnx.ModelProto) -> onnx.ModelProto:
    if not has_onnxruntime():
        raise UnsupportedError("what ONNX Runtime would fuse is not known: onnxruntime is not installed")
    with temporary_folder() as folder:
        path = folder / "optimized.onnx"
        spec = SessionSpec(
            model.SerializeToString(), optimizations="extended", log_severity=4, threads=1, optimized_path=str(path)
        )
        try:
            create_session(spec, _SECONDS)
        except (RuntimeFailure, TimeoutError) as error:
            raise UnsupportedError(f"it cannot be run by itself: {error}") from error
        return onnx.load(str(path))


def _model_seconds(graph: onnx.GraphProto, known_counts: Mapping[str, int], machine: MachineModel, width: int) -> float:
    """Seconds of the memory-bound kernels. ``known_counts``: element counts of the original's tensors."""
    counts = {t.name: math.prod(t.dims) for t in graph.initializer}
    for info in (*graph.input, *graph.output, *graph.value_info):
        kind = info.type.tensor_type
        if kind.HasField("shape"):
            size = math.prod(d.dim_value for d in kind.shape.dim)
            counts[info.name] = size if kind.elem_type in TYPES else size // width  # bools are of one byte
    counts = {**counts, **known_counts}
    for node in graph.node:  # an unknown size is taken to be the largest of the operator's tensors
        most = max((counts.get(n, 0) for n in (*node.input, *node.output)), default=0)
        for name in (*node.input, *node.output):
            if not counts.get(name) and node.op_type not in _MATMUL_OPS:
                counts[name] = most
    total = 0.0
    for node in graph.node:
        if node.op_type in _NO_KERNEL or _is_fused_with_softmax(node, graph):
            continue
        touched = sum(counts.get(n, 0) for n in {*node.input, *node.output} if n)
        seconds = machine.seconds if node.op_type in _FUSED else machine.runtime_seconds
        total += seconds(touched * width)
    return total


def _is_fused_with_softmax(node: onnx.NodeProto, graph: onnx.GraphProto) -> bool:
    """Whether the CUDA provider fuses an Add with Softmax (BiasSoftmax)."""
    readers = [n for n in graph.node if set(n.input) & set(node.output)]
    return node.op_type == "Add" and [n.op_type for n in readers] == ["Softmax"]
