# SPDX-License-Identifier: Apache-2.0
"""What ONNX Runtime would run in the place of a region: its own optimizer is asked, with the products around the region.

It runs for the CPU provider in fp32, which has the fusions of the CUDA provider but for those that are listed here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import onnx

from stof.errors import UnsupportedError
from stof.execution.inputs import evaluate
from stof.execution.session_process import RuntimeFailure, create_session, has_onnxruntime
from stof.execution.session_worker import SessionSpec
from stof.execution.upcast import HALF, widen
from stof.files import temporary_folder
from stof.fusion.element_ops import FREE, TYPES
from stof.fusion.regions import Graph
from stof.fusion.search.cost import Machine, is_biased
from stof.fusion.search.measure import part_model

_PRODUCTS = frozenset({"MatMul", "Gemm", "FusedMatMul"})
# Kernels of the runtime that are as fast as chains: 2.9 TB/s on an H100.
_FUSED = frozenset({"SkipLayerNormalization", "SkipSimplifiedLayerNormalization", "RotaryEmbedding"})
_SECONDS = 60.0  # that a session of a region may take; it takes a few milliseconds
_NO_KERNEL = FREE | _PRODUCTS | {"Constant", "Shape"}


def with_products(graph: Graph, places: Sequence[int]) -> list[int]:
    """A region with the products that it reads from and that read it: a runtime fuses biases, scales and transposes with them."""
    found = set(places)
    for place in places:
        around = [*graph.before(place), *graph.after(place)]
        found.update(p for p in around if graph.nodes[p].op_type in _PRODUCTS)
    return sorted(found)


def rival_seconds(graph: Graph, places: Sequence[int], sizes: Mapping[str, int], machine: Machine) -> float:
    """The predicted time of a region as the runtime has it, the products around it left out.

    Raises:
        UnsupportedError: where that cannot be told.
    """
    whole = with_products(graph, places)
    outputs = list(graph.outputs(whole))
    outputs += [o for o in graph.outputs(places) if o not in outputs and _read_elsewhere(graph, o, set(whole))]
    model, _ = part_model(graph, whole, (), outputs, sizes, fixed=True)
    optimized = _optimized(widen(model, kinds=HALF))
    width = 2 if any(graph.symbolic.dtype(o) in HALF for o in outputs) else 4
    names = {n for p in whole for n in (*graph.nodes[p].input, *graph.nodes[p].output) if n}
    shapes = {n: graph.symbolic.shape(n) for n in names}
    known = {n: math.prod(evaluate(d, sizes) for d in s) for n, s in shapes.items() if s is not None}
    # What the region does not have is paid in any case.
    paid = {o for p in whole if p not in set(places) for o in graph.nodes[p].output if is_biased(graph.nodes[p])}
    # Of flattened rows, what is known is the restored product.
    restored = {n.input[0]: n.output[0] for n in optimized.graph.node if n.op_type == "Reshape"}
    biased = [n.output[0] for n in optimized.graph.node if is_biased(n)]
    written = {restored.get(n, n) if n not in known else n for n in biased}
    biases = sum(machine.bias_seconds(known.get(n, 0) * width) for n in written - paid)
    return biases + _seconds(optimized.graph, known, machine, width)


def _read_elsewhere(graph: Graph, name: str, inside: set[int]) -> bool:
    return name in graph.kept or any(r not in inside for r in graph.readers.get(name, ()))


def _optimized(model: onnx.ModelProto) -> onnx.ModelProto:
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


def _seconds(graph: onnx.GraphProto, known: Mapping[str, int], machine: Machine, width: int) -> float:
    """``known``: how many elements tensors of the original have."""
    counts = {t.name: math.prod(t.dims) for t in graph.initializer}
    for info in (*graph.input, *graph.output, *graph.value_info):
        kind = info.type.tensor_type
        if kind.HasField("shape"):
            size = math.prod(d.dim_value for d in kind.shape.dim)
            counts[info.name] = size if kind.elem_type in TYPES else size // width  # bools are of one byte
    counts = {**counts, **known}
    for node in graph.node:  # where nothing states a size, the largest one of the operator's tensors
        most = max((counts.get(n, 0) for n in (*node.input, *node.output)), default=0)
        for name in (*node.input, *node.output):
            if not counts.get(name) and node.op_type not in _PRODUCTS:
                counts[name] = most
    total = 0.0
    for node in graph.node:
        if node.op_type in _NO_KERNEL or _is_added_by_softmax(node, graph):
            continue
        touched = sum(counts.get(n, 0) for n in {*node.input, *node.output} if n)
        seconds = machine.seconds if node.op_type in _FUSED else machine.runtime_seconds
        total += seconds(touched * width)
    return total


def _is_added_by_softmax(node: onnx.NodeProto, graph: onnx.GraphProto) -> bool:
    """Whether the CUDA provider's BiasSoftmax takes an addition in."""
    readers = [n for n in graph.node if set(n.input) & set(node.output)]
    return node.op_type == "Add" and [n.op_type for n in readers] == ["Softmax"]
