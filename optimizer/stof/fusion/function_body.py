# SPDX-License-Identifier: Apache-2.0
"""The function body of StofChain and StofGemm: the replaced operators in standard ONNX, one branch for each chain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from stof.errors import UnsupportedError
from stof.fusion.translate import FusedChain
from stof.graph.external_data import external_files
from stof.graph.index import DOMAIN, describe, domain_of
from stof.graph.node_builder import CAST_LIKE_OPSET, Builder
from stof.graph.node_fields import attributes_of
from stof.symbolic import Int, Symbolic

OP = "StofChain"
_FLOAT = int(TensorProto.FLOAT)
_WITH_SHAPE_INPUT = frozenset({"Reshape", "Expand"})
_LARGEST_CONSTANT = 4096  # elements of axes, sizes and numbers


@dataclass(frozen=True)
class Branch:
    """One chain's nodes, with prefixed names; ``results`` are its outputs."""

    nodes: tuple[onnx.NodeProto, ...]
    results: tuple[str, ...]


def make_branch(
    chain: FusedChain, nodes: Sequence[onnx.NodeProto], symbolic: Symbolic, opset: int, prefix: str
) -> Branch:
    """Copies the nodes of a chain's region, with names that start with ``prefix``.

    Raises:
        UnsupportedError: for a node whose sizes do not follow from the chain's inputs.
    """
    return _BranchBuilder(chain, symbolic, Builder(opset, f"{prefix}_")).branch(
        [nodes[p] for p in chain.region.node_indices]
    )


class _BranchBuilder:
    def __init__(self, chain: FusedChain, symbolic: Symbolic, builder: Builder) -> None:
        self.chain = chain
        self.symbolic = symbolic
        self.builder = builder
        self.names: dict[str, str] = {}
        self.inputs = {name: _branch_input(i) for i, name in enumerate(chain.inputs)}

    def branch(self, nodes: Sequence[onnx.NodeProto]) -> Branch:
        b = self.builder
        for name, branch_name in self.inputs.items():
            # A runtime infers the types of every branch for every call; calls of other chains may have other types here.
            self.names[name] = b.add("Cast", [branch_name], to=self.symbolic.dtype(name))
        for node in nodes:
            if node.op_type == "Constant":
                continue
            outputs = self._copy_node(node)
            for name, branch_name in zip(node.output, outputs, strict=False):
                self.names[name] = branch_name
        return Branch(tuple(b.nodes), tuple(self.names[o] for o in self.chain.region.outputs))

    def _tensor(self, name: str) -> str:
        """The branch's name of a tensor of the graph."""
        if not name:
            return ""
        if name not in self.names:
            array = self.symbolic.constant(name)
            if array is None or array.size > _LARGEST_CONSTANT:
                raise UnsupportedError(f"{name!r} is neither data nor a small constant")
            self.names[name] = self.builder.constant(array, array.dtype)
        return self.names[name]

    def _copy_node(self, node: onnx.NodeProto) -> list[str]:
        key = (domain_of(node), node.op_type)
        if key[0] or node.op_type == "SimplifiedLayerNormalization":
            return self._lower_to_standard(node)
        if key[1] == "LayerNormalization" and self.builder.opset < 17:
            return self._lower_to_standard(node)
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        del copy.input[:]
        del copy.output[:]
        copy.domain = ""
        copy.doc_string = ""
        del copy.metadata_props[:]
        is_shaped = node.op_type in _WITH_SHAPE_INPUT and self.symbolic.constant(node.input[1]) is None
        inputs = [node.input[0]] if is_shaped else list(node.input)
        copy.input.extend(self._tensor(n) for n in inputs)
        if is_shaped:
            copy.input.append(self._shape(node.output[0]))
        outputs = [self.builder.name() if o else "" for o in node.output]
        copy.output.extend(outputs)
        copy.name = outputs[0]
        self.builder.nodes.append(copy)
        return outputs

    def _shape(self, name: str) -> str:
        b = self.builder
        sizes = self.symbolic.shape(name)
        if sizes is None:
            raise UnsupportedError(f"the shape of {name!r} is not known")
        parts = [self._size(d) for d in sizes]
        return b.add("Concat", parts, axis=0)

    def _size(self, size: Int) -> str:
        """A vector of one size, from numbers and dimensions of the chain's inputs."""
        b = self.builder
        if size.constant is not None:
            return b.constant([size.constant])
        for name in self.inputs:
            for i, d in enumerate(self.symbolic.shape(name) or ()):
                if d == size:
                    return b.add("Gather", [b.add("Shape", [self.names[name]]), b.constant([i])])
        for name in self.inputs:
            for i, d in enumerate(self.symbolic.shape(name) or ()):
                part = d.divide(size)
                if part is not None and part.constant is not None:
                    whole = b.add("Gather", [b.add("Shape", [self.names[name]]), b.constant([i])])
                    return b.add("Div", [whole, b.constant([part.constant])])
        if len(size.terms) == 1:
            (monomial, c) = size.terms[0]
            if len(monomial) > 1 or c != 1:
                result = b.constant([c])
                for atom in monomial:
                    result = b.add("Mul", [result, self._size(Int((((atom,), 1),)))])
                return result
        raise UnsupportedError(f"size {size} is no input's")

    def _lower_to_standard(self, node: onnx.NodeProto) -> list[str]:
        """A com.microsoft operator, or a norm that the opset lacks, as standard operators in fp32."""
        b = self.builder
        dtype = self.symbolic.dtype(node.output[0])
        inputs = [b.add("Cast", [self._tensor(n)], to=_FLOAT) if n else "" for n in node.input]
        attributes = attributes_of(node)
        op = node.op_type
        total = ""
        if op in ("BiasGelu", "FastGelu", "Gelu", "QuickGelu"):
            x = b.add("Add", inputs[:2]) if len(inputs) > 1 and inputs[1] else inputs[0]
            result = self._gelu(op, x, float(attributes.get("alpha", 1.702)))
        elif op == "BiasAdd":
            result = b.add("Add", [b.add("Add", inputs[:2]), inputs[2]])
        elif op in ("SkipLayerNormalization", "SkipSimplifiedLayerNormalization"):
            centered = op == "SkipLayerNormalization"
            total = b.add("Add", inputs[:2])
            bias = 4 if centered else 3
            if len(inputs) > bias and inputs[bias]:
                total = b.add("Add", [total, inputs[bias]])
            beta = inputs[3] if centered and len(inputs) > 3 else ""
            result = self._norm(total, inputs[2], beta, float(attributes.get("epsilon", 1e-12)), centered)
        elif op in ("LayerNormalization", "SimplifiedLayerNormalization"):
            centered = op == "LayerNormalization"
            beta = inputs[2] if centered and len(inputs) > 2 else ""
            result = self._norm(inputs[0], inputs[1], beta, float(attributes.get("epsilon", 1e-5)), centered)
        else:
            raise UnsupportedError(f"{describe(node)} has no form in standard ONNX here")
        out = [b.add("Cast", [result], to=dtype)]
        if len(node.output) > 3 and total:
            out += ["", "", b.add("Cast", [total], to=dtype)]
        return out

    def _number(self, value: float) -> str:
        return self.builder.constant(value, np.float32)

    def _gelu(self, op: str, x: str, alpha: float) -> str:
        b = self.builder
        if op == "QuickGelu":
            return b.add("Mul", [x, b.add("Sigmoid", [b.add("Mul", [x, self._number(alpha)])])])
        if op == "FastGelu":
            cube = b.add("Mul", [b.add("Mul", [x, x]), x])
            inner = b.add("Add", [x, b.add("Mul", [cube, self._number(0.044715)])])
            raised = b.add("Tanh", [b.add("Mul", [inner, self._number(float(np.sqrt(2 / np.pi)))])])
        elif op in ("BiasGelu", "Gelu"):
            raised = b.add("Erf", [b.add("Mul", [x, self._number(float(np.sqrt(0.5)))])])
        else:
            raise ValueError(f"{op} is no GELU")
        return b.add("Mul", [b.add("Mul", [x, self._number(0.5)]), b.add("Add", [raised, self._number(1.0)])])

    def _norm(self, x: str, scale: str, beta: str, epsilon: float, centered: bool) -> str:
        b = self.builder
        if centered:
            x = b.add("Sub", [x, self._mean(x)])
        square = self._mean(b.add("Mul", [x, x]))
        x = b.add("Div", [x, b.add("Sqrt", [b.add("Add", [square, self._number(epsilon)])])])
        x = b.add("Mul", [x, scale]) if scale else x
        return b.add("Add", [x, beta]) if beta else x

    def _mean(self, x: str) -> str:
        if self.builder.opset >= 18:
            return self.builder.add("ReduceMean", [x, self.builder.constant([-1])], keepdims=1)
        return self.builder.add("ReduceMean", [x], axes=[-1], keepdims=1)


def make_function(
    branches: Sequence[Branch],
    dtypes: Sequence[int],
    inputs: int,
    opset: int,
    op: str = OP,
    number: str = "chain_id",
    bits: bool = False,
    likes: Sequence[int | None] = (),
) -> onnx.FunctionProto:
    """The local function of an operator, ``stof::StofChain``; an attribute selects a branch.

    Args:
        branches: one for each distinct chain of the model.
        dtypes: element types of the outputs, the same for all calls; chains with fewer outputs leave the last ones out.
        inputs: how many inputs every call has.
        opset: the model's opset.
        op: the operator's name.
        number: the attribute that selects a branch.
        bits: select by the number's bits, each an attribute of its own (:func:`bits_of`). TensorRT's parser reads them as
            constant conditions and skips the other branches, in which the shapes of a call would not fit.
        likes: for each output an input of its type in all calls, None where there is none. The output is cast to the type
            of that input, so that a model loads after its conversion to fp16.
    """
    nodes: list[onnx.NodeProto] = []
    chosen: list[str] = []
    if len(branches) > 1:  # TensorRT's parser resolves references to attributes outside of branches only
        kind, field = (onnx.AttributeProto.TENSOR, "value") if bits else (onnx.AttributeProto.INT, "value_int")
        read = list(bits_of(0, len(branches), number)) if bits else [number]
        for attribute in read:
            chosen.append(f"{attribute}_value")
            node = helper.make_node("Constant", [], chosen[-1:], name=chosen[-1])
            reference = node.attribute.add()
            reference.name, reference.ref_attr_name, reference.type = field, attribute, kind
            nodes.append(node)
    names = [f"x{i}" for i in range(inputs)]
    builder = Builder(opset, "select_")
    if len(branches) > 1:
        _hide_shapes(builder, names, bits)
    else:
        builder.nodes += [
            helper.make_node("Identity", [n], [_branch_input(i)], name=_branch_input(i)) for i, n in enumerate(names)
        ]
    results = _select_branch(branches, 0, len(branches), chosen if bits else "".join(chosen), dtypes, builder)
    nodes += builder.nodes
    outputs = [f"y{i}" for i in range(len(dtypes))]
    for i, (result, output) in enumerate(zip(results, outputs, strict=True)):
        like = likes[i] if likes and opset >= CAST_LIKE_OPSET else None
        op_type, operands = ("Identity", [result]) if like is None else ("CastLike", [result, names[like]])
        nodes.append(helper.make_node(op_type, operands, [output], name=output))
    attributes = [c.removesuffix("_value") for c in chosen]
    return helper.make_function(DOMAIN, op, names, outputs, nodes, [helper.make_opsetid("", opset)], attributes)


def bits_of(index: int, count: int, number: str = "chain_id") -> dict[str, onnx.TensorProto]:
    """The boolean attributes that select one of ``count`` branches, the lowest bit first."""
    bits = range((count - 1).bit_length())
    return {f"{number}_bit{i}": helper.make_tensor("", TensorProto.BOOL, [], [bool(index >> i & 1)]) for i in bits}


def _branch_input(i: int) -> str:
    """The name under which branches read an input."""
    return f"x{i}_as_it_comes"


def _hide_shapes(builder: Builder, names: Sequence[str], for_tensorrt: bool) -> None:
    """Writes nodes that copy the inputs for the branches and hide their ranks from shape inference.

    A runtime infers the shapes of every branch for every call; in the branches of other chains they would not fit.
    TensorRT's parser takes no tensor of unknown rank. ``for_tensorrt`` hides it behind an If with a constant condition:
    the parser reads the branch that is taken, where inference merges both.
    """
    b = builder
    shapes = [b.add("Shape", [name]) for name in names]
    if for_tensorrt:
        as_given = _make_subgraph(b.opset, "given", lambda inner: [inner.add("Identity", [s]) for s in shapes])
        other = _make_subgraph(b.opset, "other", lambda inner: [_range_of_unknown_length(inner, s) for s in shapes])
        targets = [b.name() for _ in names]
        condition = b.constant(True, np.bool_)
        b.nodes.append(
            helper.make_node("If", [condition], targets, name=targets[0], then_branch=as_given, else_branch=other)
        )
    else:
        targets = [b.add("Gather", [s, _range_of_unknown_length(b, s)]) for s in shapes]
    for i, (name, target) in enumerate(zip(names, targets, strict=True)):
        b.nodes.append(helper.make_node("Reshape", [name, target], [_branch_input(i)], name=_branch_input(i)))


def _make_subgraph(opset: int, name: str, make: Callable[[Builder], list[str]]) -> onnx.GraphProto:
    """A branch that writes vectors of integers."""
    inner = Builder(opset, f"{name}_")
    infos = [helper.make_tensor_value_info(o, TensorProto.INT64, None) for o in make(inner)]
    return helper.make_graph(inner.nodes, name, [], infos)


def _range_of_unknown_length(builder: Builder, vector: str) -> str:
    """0, 1, ... as many as a vector has elements. Not by Range, whose length ONNX Runtime infers."""
    one = numpy_helper.from_array(np.ones(1, np.int64))
    ones = builder.add("ConstantOfShape", [builder.add("Shape", [vector])], value=one)
    return builder.add("Squeeze", [builder.add("NonZero", [ones]), builder.constant([0])])


def _select_branch(
    branches: Sequence[Branch], first: int, last: int, chosen: str | list[str], dtypes: Sequence[int], builder: Builder
) -> list[str]:
    """Adds nodes that select one of the branches [first, last); returns the names of their outputs.

    ``chosen`` names the branch's number, or its bits.
    """
    if last - first == 1:
        branch = branches[first]
        builder.nodes.extend(branch.nodes)
        # Outputs that this chain does not have: vectors of one element, as stof.result_shapes expects; TensorRT gets scalars.
        nothing = 0 if isinstance(chosen, list) else [0]
        missing = [builder.constant(nothing, helper.tensor_dtype_to_np_dtype(d)) for d in dtypes[len(branch.results) :]]
        return [*branch.results, *missing]
    bit = (last - first - 1).bit_length() - 1
    middle = first + (1 << bit)
    parts = [(first, middle), (middle, last)]
    if isinstance(chosen, list):
        condition = chosen[bit]
        parts.reverse()
    else:
        condition = builder.add("Less", [chosen, builder.constant(middle)])
    graphs = []
    for start, end in parts:
        inner = Builder(builder.opset, f"s{start}_{end}_")
        results = _select_branch(branches, start, end, chosen, dtypes, inner)
        # Some runtimes refuse an output of a branch that no node of the branch writes.
        written = [inner.add("Identity", [r]) for r in results]
        infos = [helper.make_tensor_value_info(w, d, None) for w, d in zip(written, dtypes, strict=True)]
        graphs.append(helper.make_graph(inner.nodes, f"chains{start}_{end}", [], infos))
    outputs = [builder.name() for _ in dtypes]
    node = helper.make_node("If", [condition], outputs, name=outputs[0], then_branch=graphs[0], else_branch=graphs[1])
    builder.nodes.append(node)
    return outputs


def branch_model(chain: FusedChain, branch: Branch, dtypes: Sequence[int], opset: int) -> onnx.ModelProto:
    """A branch as a model of its own, to be compared with the description. ``dtypes`` are those of the chain's inputs."""
    inputs = [helper.make_tensor_value_info(_branch_input(i), d, None) for i, d in enumerate(dtypes)]
    outputs = [helper.make_tensor_value_info(r, d, None) for r, d in zip(branch.results, chain.dtypes, strict=True)]
    graph = helper.make_graph(list(branch.nodes), "chain", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    if files := external_files(model):
        raise UnsupportedError(f"a constant of it lies in {min(files)!r} and is too large to be read")
    return model
