# SPDX-License-Identifier: Apache-2.0
"""Writing StofAttention nodes: the only step that changes a graph."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from onnx import helper

import stof
from stof.errors import UnsupportedError
from stof.graph import DOMAIN, opset_of
from stof.passes.body import OP, Variant, make_function
from stof.site import AttentionSite, LiftedMask, MaskTerm
from stof.symbolic import Int, Symbolic

_NEUTRAL = {
    "pad": np.ones((1, 1), np.int64),
    "bias": np.zeros((1, 1, 1, 1), np.float32),
    "segment_q": np.zeros((1, 1), np.int64),
    "segment_k": np.zeros((1, 1), np.int64),
    "lengths": np.zeros(1, np.int64),
}


@dataclass(frozen=True)
class Rewrite:
    """A site and its mask, decided to be replaced."""

    site: AttentionSite
    mask: LiftedMask


def emit(model: onnx.ModelProto, symbolic: Symbolic, rewrites: Sequence[Rewrite]) -> onnx.ModelProto:
    """A copy of the model in which every rewrite's site is one StofAttention node."""
    if not rewrites:
        return copy.deepcopy(model)
    bare = onnx.ModelProto()
    bare.CopyFrom(model)
    del bare.functions[:]  # GraphSurgeon's ordering cannot cope with all of them; they are put back below
    editor = _Editor(model, gs.import_onnx(bare), symbolic)
    slots = _slots(rewrites)
    variants: list[Variant] = []
    for rewrite in rewrites:
        variant = _variant(rewrite, slots)
        if variant not in variants:
            variants.append(variant)
        editor.replace(rewrite, variant, variants.index(variant), slots)
    editor.prune()
    return editor.transplant(make_function(variants, opset_of(model)))


def _slots(rewrites: Sequence[Rewrite]) -> tuple[str, ...]:
    """The operand roles of the model: one slot each, in the same order at every call."""
    roles: set[str] = set()
    for rewrite in rewrites:
        roles.update(_roles(rewrite.mask))
    order = [*_NEUTRAL, *sorted((r for r in roles if r.startswith("table")), key=lambda r: (len(r), r))]
    return tuple(r for r in order if r in roles)


def _roles(mask: LiftedMask) -> set[str]:
    found = {o.role for o in mask.operands} | {t[0] for t in mask.tables}
    return found | {"bias"} if mask.bias else found


def _variant(rewrite: Rewrite, slots: Sequence[str]) -> Variant:
    site, mask = rewrite.site, rewrite.mask
    own = _roles(mask)
    return Variant(
        mask.expression,
        (site.query.layout, site.key.layout, site.value.layout, site.output_layout),
        site.num_heads,
        site.kv_num_heads,
        site.head_size,
        site.value_head_size,
        mask.empty_rows,
        site.query_offset,
        site.softcap,
        tuple(r if r in own else "unused" for r in slots),
        site.dtype,
    )


class _Editor:
    def __init__(self, model: onnx.ModelProto, graph: gs.Graph, symbolic: Symbolic) -> None:
        self.model = model
        self.graph = graph
        self.symbolic = symbolic
        self.tensors: dict[str, gs.Tensor] = graph.tensors()
        self.protos = {n.output[0]: n for n in model.graph.node if n.output}
        self.node_names = {n.name for n in model.graph.node}
        self.shared: dict[tuple[str, bytes], gs.Constant] = {}
        self.added: set[int] = set()
        self.declared = list(model.graph.input)
        self.needed = self._live_in_original()  # ids of nodes; only these are ours to remove

    def replace(self, rewrite: Rewrite, variant: Variant, number: int, slots: Sequence[str]) -> None:
        site = rewrite.site
        output = self.tensors[site.output]
        place = self._place(output)
        operands, extra = self._operands(rewrite, slots)
        layouts = [layout.value for layout in variant.layouts]
        node = gs.Node(
            op=OP,
            name=self._unique(f"{site.name}/{OP}"),
            domain=DOMAIN,
            attrs={
                "mask": variant.expression,
                "mask_id": number,
                "scale": site.scale,
                "softcap": site.softcap,
                "layout": layouts[0] if len(set(layouts)) == 1 else " ".join(layouts),
                "num_heads": site.num_heads,
                "kv_num_heads": site.kv_num_heads,
                "query_offset": site.query_offset,
                "empty_rows": variant.empty_rows.value,
                "operands": " ".join(variant.roles),
                "results": "",
                "plugin_namespace": DOMAIN,
                "plugin_version": "1",
            },
            inputs=[self.tensors[o.tensor] for o in (site.query, site.key, site.value)] + operands,
        )
        output.inputs.clear()
        node.outputs.append(output)
        for i, added in enumerate([*extra, node]):
            self.graph.nodes.insert(place + i, added)
            self.added.add(id(added))

    def _place(self, output: gs.Tensor) -> int:
        producer = output.inputs[0]
        return next(i for i, n in enumerate(self.graph.nodes) if n is producer)

    def _unique(self, name: str) -> str:
        candidate, i = name, 1
        while candidate in self.node_names:
            i += 1
            candidate = f"{name}_{i}"
        self.node_names.add(candidate)
        return candidate

    def _fresh(self, name: str) -> str:
        candidate, i = name, 1
        while candidate in self.tensors:
            i += 1
            candidate = f"{name}_{i}"
        return candidate

    def _initializer(self, name: str, array: np.ndarray) -> gs.Constant:
        key = (f"{array.dtype}{array.shape}", array.tobytes())
        if key not in self.shared:
            constant = gs.Constant(self._fresh(name), array)
            self.tensors[constant.name] = constant
            self.shared[key] = constant
        return self.shared[key]

    def _operands(self, rewrite: Rewrite, slots: Sequence[str]) -> tuple[list[gs.Tensor], list[gs.Node]]:
        given = {o.role: self.tensors[o.tensor] for o in rewrite.mask.operands}
        extra: list[gs.Node] = []
        for name, dtype, shape, data in rewrite.mask.tables:
            array = np.frombuffer(data, np.dtype(dtype)).reshape(shape).copy()
            given[name] = self._initializer(f"stof_{name}", array)
        if rewrite.mask.bias:
            given["bias"] = self._bias(rewrite.mask.bias, extra)
        operands = []
        for role in slots:
            if role not in given:
                neutral = _NEUTRAL.get(role, np.zeros(1, np.bool_))
                given[role] = self._initializer(f"stof_unused_{role}", neutral)
            operands.append(given[role])
        return operands, extra

    def _bias(self, terms: Sequence[MaskTerm], extra: list[gs.Node]) -> gs.Tensor:
        total: gs.Tensor | None = None
        for term in terms:
            tensor = self.tensors[term.tensor]
            if term.scale != 1.0:
                dtype = helper.tensor_dtype_to_np_dtype(self.symbolic.dtype(term.tensor))
                factor = self._initializer("stof_bias_scale", np.array(term.scale, dtype))
                tensor = self._append("Mul", [tensor, factor], extra, dtype)
            total = tensor if total is None else self._append("Add", [total, tensor], extra, total.dtype)
        assert total is not None
        return total

    def _append(self, op: str, inputs: list[gs.Tensor], extra: list[gs.Node], dtype: object) -> gs.Tensor:
        out = gs.Variable(self._fresh("stof_bias"), dtype=dtype)
        self.tensors[out.name] = out
        extra.append(gs.Node(op=op, name=self._unique(out.name), inputs=inputs, outputs=[out]))
        return out

    def prune(self) -> None:
        """Removes what only the replaced sites needed. A Shape of a removed tensor is told from the graph's inputs."""
        live = self._live()
        nodes = []
        for node in self.graph.nodes:
            if id(node) in live:
                source = node.inputs[0].inputs if node.op == "Shape" and node.inputs else []
                if source and id(source[0]) not in live:
                    nodes.extend(self._shape_nodes(node))
                else:
                    nodes.append(node)
            elif id(node) not in self.needed and id(node) not in self.added:
                nodes.append(node)
        kept = {id(n) for n in nodes}
        for node in self.graph.nodes:
            if id(node) not in kept:
                node.inputs.clear()
        self.graph.nodes = nodes

    def _live(self) -> set[int]:
        """Ids of the nodes that an output needs; a Shape that the inputs can tell does not need its tensor."""
        pending = [n for t in self.graph.outputs for n in t.inputs]
        live: set[int] = set()
        while pending:
            node = pending.pop()
            if id(node) in live:
                continue
            live.add(id(node))
            if node.op == "Shape" and self._elements(node) is not None:
                continue
            pending.extend(n for t in node.inputs for n in t.inputs)
            pending.extend(n for t in _captured(node) for n in t.inputs)
        return live

    def _live_in_original(self) -> set[int]:
        producers = {o: n for n in self.model.graph.node for o in n.output}
        pending = [o.name for o in self.model.graph.output]
        seen: set[str] = set()
        while pending:
            node = producers.get(pending.pop())
            if node is None or node.output[0] in seen:
                continue
            seen.add(node.output[0])
            pending.extend(node.input)
            for attribute in node.attribute:
                for graph in [attribute.g] if attribute.HasField("g") else []:
                    pending.extend(name for inner in graph.node for name in inner.input)
        return {id(n) for n in self.graph.nodes if n.outputs and n.outputs[0].name in seen}

    def _elements(self, node: gs.Node) -> list[tuple[str, int] | int] | None:
        """The elements of a Shape as numbers and (graph input, axis), or None."""
        value = self.symbolic.value(node.outputs[0].name)
        elements = None if value is None else value.elements()
        if elements is None:
            return None
        found: list[tuple[str, int] | int] = []
        for element in elements:
            assert isinstance(element, Int)
            if element.constant is not None:
                found.append(element.constant)
                continue
            place = self._input_axis(element)
            if place is None:
                return None
            found.append(place)
        return found

    def _input_axis(self, size: Int) -> tuple[str, int] | None:
        for value in self.declared:
            for axis, own in enumerate(self.symbolic.shape(value.name) or ()):
                if own == size:
                    return (value.name, axis)
        return None

    def _shape_nodes(self, node: gs.Node) -> list[gs.Node]:
        elements = self._elements(node)
        assert elements is not None
        output = node.outputs[0]
        nodes: list[gs.Node] = []
        parts: list[gs.Tensor] = []
        for element in elements:
            if isinstance(element, int):
                parts.append(self._initializer("stof_size", np.array([element], np.int64)))
                continue
            name, axis = element
            whole = gs.Variable(self._fresh(f"stof_shape_of_{name}"), dtype=np.int64)
            self.tensors[whole.name] = whole
            one = gs.Variable(self._fresh(f"stof_size_of_{name}"), dtype=np.int64)
            self.tensors[one.name] = one
            which = self._initializer("stof_axis", np.array([axis], np.int64))
            nodes.append(gs.Node("Shape", self._unique(whole.name), inputs=[self.tensors[name]], outputs=[whole]))
            nodes.append(gs.Node("Gather", self._unique(one.name), {"axis": 0}, [whole, which], [one]))
            parts.append(one)
        output.inputs.clear()
        nodes.append(gs.Node("Concat", self._unique(f"{node.name}/stof"), {"axis": 0}, parts, [output]))
        for added in nodes:
            self.added.add(id(added))
        return nodes

    def transplant(self, function: onnx.FunctionProto) -> onnx.ModelProto:
        """The edited graph in a copy of the original model, so that nothing that GraphSurgeon drops is lost."""
        exported = gs.export_onnx(self.graph, do_type_check=False)
        result = onnx.ModelProto()
        result.CopyFrom(self.model)
        graph = result.graph
        del graph.node[:]
        for node, proto in zip(self.graph.nodes, exported.graph.node, strict=True):
            original = None if id(node) in self.added or not node.outputs else self.protos.get(node.outputs[0].name)
            graph.node.append(original if original is not None else proto)
        used = {name for node in graph.node for name in _names(node)} | {o.name for o in graph.output}
        overridable = {i.name for i in graph.input}
        known = {t.name for t in self.model.graph.initializer}
        kept = [t for t in self.model.graph.initializer if t.name in used or t.name in overridable]
        new = [t for t in exported.graph.initializer if t.name not in known and t.name in used]
        del graph.initializer[:]
        graph.initializer.extend([*kept, *new])
        infos = [v for v in self.model.graph.value_info if v.name in used]
        del graph.value_info[:]
        graph.value_info.extend(infos)
        previous = [f for f in result.functions if (f.domain, f.name) == (DOMAIN, OP)]
        if previous:
            raise UnsupportedError("the model already holds StofAttention; optimize the original instead")
        result.functions.append(function)
        if not any(e.domain == DOMAIN for e in result.opset_import):
            result.opset_import.append(helper.make_opsetid(DOMAIN, 1))
        result.ir_version = max(result.ir_version, 8)  # local functions
        entry = result.metadata_props.add()
        entry.key, entry.value = "stof_version", stof.__version__
        return result


def _captured(node: gs.Node) -> list[gs.Tensor]:
    found: list[gs.Tensor] = []
    for value in node.attrs.values():
        if isinstance(value, gs.Graph):
            for inner in value.nodes:
                found.extend(inner.inputs)
                found.extend(_captured(inner))
    return found


def _names(node: onnx.NodeProto) -> set[str]:
    found = {*node.input, *node.output}
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            for inner in attribute.g.node:
                found |= _names(inner)
            found |= {o.name for o in attribute.g.output}
    return found


