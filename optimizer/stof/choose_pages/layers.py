# SPDX-License-Identifier: Apache-2.0
"""The attentions over contiguous caches of an optimized model: which of them choose pages, and the model in which they do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import onnx
from onnx import TensorProto, helper

from stof.cached_attention.paged.site import OP as PAGED
from stof.cached_attention.site import INPUT_INDEX, OP, OP_INPUTS, OP_OUTPUTS, PAST_BOUNDS, PRESENT_BOUNDS
from stof.choose_pages.function_body import PAGE_ROWS, add_bounds
from stof.errors import ArgumentError
from stof.graph.index import DOMAIN, all_nodes
from stof.graph.node_fields import attributes_of, input_of
from stof.graph.protobuf import copy_model
from stof.runtime.limits import chooses_pages
from stof.sparsify.pages_clause import PagesClause
from stof.sparsify.spec import SparsitySpec
from stof.targets import Target

METADATA = "stof_choose_pages"
_SUFFIX = "_page_bounds"
_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)


@dataclass(frozen=True)
class PageLayer:
    """One StofCachedAttention of an optimized model.

    Attributes:
        name: of its node.
        layer: its index among them, in the order of the graph.
        clause: what asks for choosing; None: nothing does.
        past_key, present_key: the model's input and output that are its cache of keys.
        reason: why it attends every page; empty where it chooses.
    """

    name: str
    layer: int
    clause: PagesClause | None
    past_key: str
    present_key: str
    reason: str = ""

    @property
    def past_bounds(self) -> str:
        """The model's input with the bounds of the step before."""
        return f"{self.past_key}{_SUFFIX}"

    @property
    def present_bounds(self) -> str:
        """The model's output with those of the step."""
        return f"{self.present_key}{_SUFFIX}"


def check_pages_target(target: Target, spec: SparsitySpec) -> None:
    """Refuses a target whose kernels choose no pages.

    Raises:
        ArgumentError: naming the target.
        LibraryError: without a library, and for one that does not state its limits.
    """
    if not chooses_pages(OP, target.name):
        raise ArgumentError(
            f"--sparsify {spec.text!r}: no attention kernel of this library chooses pages for --target {target.name}"
        )


def find_page_layers(model: onnx.ModelProto, spec: SparsitySpec) -> tuple[PageLayer, ...]:
    """The attentions over contiguous caches in the order of the graph, and which of them choose pages.

    Raises:
        ArgumentError: when clauses are for layers that the model does not have, or none of those that they are for can choose.
    """
    nodes = list(_cached_nodes(model))
    if not nodes:
        pages = any(n.domain == DOMAIN and n.op_type == PAGED for n in all_nodes(model.graph.node))
        why = (
            f"{PAGED} chooses no pages of its block table"
            if pages
            else "pages are those of a KV cache, in decoders whose attention becomes StofCachedAttention; encoders and models "
            "without a cache have none"
        )
        raise ArgumentError(f"--sparsify {spec.text!r}: no attention can choose pages: {why}")
    clauses = spec.pages_clauses_of_layers(len(nodes))
    inputs = {i.name: i for i in model.graph.input}
    outputs = {o.name for o in model.graph.output}
    main = {id(n) for n in model.graph.node}
    taken = {
        *inputs,
        *(i.name for i in model.graph.initializer),
        *(t for n in all_nodes(model.graph.node) for t in n.output),
    }
    layers = []
    for index, node in enumerate(nodes):
        past, present = input_of(node, INPUT_INDEX["past_key"]), node.output[1]
        reason = "--sparsify leaves it dense" if clauses[index] is None else ""
        if not reason and (id(node) not in main or past not in inputs or present not in outputs):
            reason = "its cache is no input and output of the model, beside which bounds could be"
        if not reason and attributes_of(node).get("sliding_window_cache", 0):
            reason = "its cache slides, so that rows move from page to page"
        if not reason and inputs[past].type.tensor_type.elem_type not in _FLOATS:
            reason = "its cache is quantized"
        layer = PageLayer(node.name or node.output[0], index, clauses[index], past, present, reason)
        if not reason:
            names = {layer.past_bounds, layer.present_bounds}
            if names & taken:
                layer = replace(layer, reason=f"the model has a tensor {min(names & taken)!r}, the name of its bounds")
            taken |= names
        layers.append(layer)
    wanted = [x for x in layers if x.clause is not None]
    if wanted and all(x.reason for x in wanted):
        raise ArgumentError(f"--sparsify {spec.text!r}: no attention can choose pages: {wanted[0].reason}")
    return tuple(layers)


def put_pages(model: onnx.ModelProto, layers: Sequence[PageLayer]) -> onnx.ModelProto:
    """A copy of a model whose attentions choose pages as their clauses say, with inputs and outputs for the bounds.

    Args:
        model: the model.
        layers: of ``find_page_layers``; one at least chooses.
    """
    copy = copy_model(model)
    choosing = {x.layer: x for x in layers if not x.reason}
    inputs = {i.name: i for i in copy.graph.input}
    notes = []
    for index, node in enumerate(_cached_nodes(copy)):
        layer = choosing.get(index)
        clause = None if layer is None else layer.clause
        node.attribute.append(helper.make_attribute(PAGE_ROWS, clause.rows if clause else 64))
        if layer is None or clause is None:
            node.output.append("")  # runtimes want all outputs of a function in its calls
            continue
        node.attribute.append(helper.make_attribute("chosen_pages", clause.pages))
        node.input.extend([""] * (OP_INPUTS.index(PAST_BOUNDS) - len(node.input)))
        node.input.append(layer.past_bounds)
        node.output.append(layer.present_bounds)
        past = inputs[layer.past_key]
        copy.graph.input.append(_value_info(layer.past_bounds, past, f"past_pages_{clause.rows}"))
        copy.graph.output.append(_value_info(layer.present_bounds, past, f"present_pages_{clause.rows}"))
        notes.append(f"{layer.name}: {clause.pages} pages of {clause.rows} rows")
    # Calls of one function body have one element type, and caches that are not quantized have it, too.
    add_bounds(copy, next(inputs[x.past_key].type.tensor_type.elem_type for x in choosing.values()))
    entry = copy.metadata_props.add()
    entry.key, entry.value = METADATA, "outputs change; " + "; ".join(notes)
    return copy


def count_pages(model: onnx.ModelProto, shape_of: Callable[[str], Sequence[int]]) -> dict[str, int]:
    """The numbers of pages of a model, by the names of their dimensions; none where it chooses no pages.

    Args:
        model: the model.
        shape_of: gives the shape of a cache by its name.
    """
    dims = {v.name: v.type.tensor_type.shape.dim for v in (*model.graph.input, *model.graph.output)}
    found: dict[str, int] = {}
    for node in (n for n in _cached_nodes(model) if PAGE_ROWS in attributes_of(n)):
        past, present = input_of(node, OP_INPUTS.index(PAST_BOUNDS)), node.output[OP_OUTPUTS.index(PRESENT_BOUNDS)]
        caches = {past: input_of(node, INPUT_INDEX["past_key"]), present: node.output[1]}
        rows = int(attributes_of(node)[PAGE_ROWS])
        found |= {dims[b][2].dim_param: -(-shape_of(cache)[2] // rows) for b, cache in caches.items() if b}
    return found


def _value_info(name: str, past_key: onnx.ValueInfoProto, pages: str) -> onnx.ValueInfoProto:
    """Bounds [B, G, pages, 2, D] of a cache [B, G, C, D]; `pages` names their number, beside the name of C."""
    info = onnx.ValueInfoProto()
    info.CopyFrom(past_key)
    info.name = name
    dims = info.type.tensor_type.shape.dim
    size = onnx.TensorShapeProto.Dimension()
    size.CopyFrom(dims[3])
    capacity = dims[2].dim_param
    dims[2].Clear()
    dims[2].dim_param = f"{capacity}_{pages}" if capacity else pages
    dims[3].Clear()
    dims[3].dim_value = 2
    dims.add().CopyFrom(size)
    return info


def _cached_nodes(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    return (n for n in all_nodes(model.graph.node) if n.domain == DOMAIN and n.op_type == OP)
