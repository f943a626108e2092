# SPDX-License-Identifier: Apache-2.0
"""Gemm nodes with a transposed or scaled constant weight, as Gemm nodes with neither.

StofGemm and its kernels have one layout of a weight, [K, N]. The transposed weight takes the place of the stored one, so that the
file has as many bytes as before. An attribute for the layout would need kernels that pack from it on every machine.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from stof.attention.limits import type_names
from stof.errors import UnsupportedError
from stof.graph.external_data import map_array
from stof.graph.index import captured_tensors, describe, domain_of, node_tensors
from stof.graph.names import FreshNames
from stof.graph.node_fields import attributes_of, input_of
from stof.graph.protobuf import copy_node, copy_with_nodes, remove_named

_TYPES = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16})


@dataclass(frozen=True, eq=False)
class PlainGemm:
    """What takes the place of a Gemm node.

    Attributes:
        node: a Gemm without attributes.
        tensors: new constants.
        gone: the names of those that nothing reads any more. Constant nodes among them are dead: the edit removes them.
        sharers: the indices of all Gemm nodes that read its weight, where these are several.
    """

    node: onnx.NodeProto
    tensors: tuple[TensorProto, ...]
    gone: frozenset[str]
    sharers: frozenset[int] = frozenset()


@dataclass(frozen=True, eq=False)
class PlainGemms:
    """The plain forms of a model's Gemm nodes.

    Attributes:
        forms: by the index of the node.
        reasons: why others have none, by the index.
    """

    forms: Mapping[int, PlainGemm]
    reasons: Mapping[int, str]

    def put(self, model: onnx.ModelProto, indices: Iterable[int]) -> onnx.ModelProto:
        """A copy of the model with the plain forms of some nodes; itself where there are none.

        Nodes that share a weight with one of them become plain, too: the file keeps one copy of it.
        """
        chosen = [i for i in indices if i in self.forms]
        forms = {j: self.forms[j] for i in chosen for j in (i, *sorted(self.forms[i].sharers))}
        if not forms:
            return model
        nodes = [forms[i].node if i in forms else n for i, n in enumerate(model.graph.node)]
        result = copy_with_nodes(model, nodes)
        gone = {name for form in forms.values() for name in form.gone}
        remove_named(result.graph.initializer, gone)
        remove_named(result.graph.value_info, gone)
        result.graph.initializer.extend({t.name: t for form in forms.values() for t in form.tensors}.values())
        return result


def constant_tensors(nodes: Iterable[onnx.NodeProto]) -> dict[str, TensorProto]:
    """The tensors that Constant nodes hold, by the names of their outputs.

    An output's name is what nodes read; the tensor's own field ``name`` may be empty or anything.
    """
    return {
        node.output[0]: a.t
        for node in nodes
        if node.op_type == "Constant" and not domain_of(node)
        for a in node.attribute
        if a.name == "value"
    }


def find_plain_gemms(model: onnx.ModelProto, least_weights: int, folder: Path) -> PlainGemms:
    """The plain forms of the Gemm nodes in a model's main graph that have transposed or scaled constants.

    Args:
        model: the model.
        least_weights: elements below which a weight is left alone.
        folder: of the model's external data.
    """
    graph = model.graph
    given = {v.name for v in graph.input}
    stored = {t.name: t for t in graph.initializer if t.name not in given} | constant_tensors(graph.node)
    names = FreshNames([*given, *stored, *(t for n in graph.node for t in node_tensors(n))])
    readers = _Readers.of(graph)
    candidates = dict[int, _PlainForm]()
    for index, node in enumerate(graph.node):
        if node.op_type != "Gemm" or domain_of(node) or (weight := stored.get(input_of(node, 1))) is None:
            continue
        if weight.data_type not in _TYPES or len(weight.dims) != 2 or math.prod(weight.dims) < least_weights:
            continue
        form = _PlainForm(node, stored, readers, names, folder)
        if form.needs_rewrite():
            candidates[index] = form
    return _make_forms(candidates, readers)


@dataclass(frozen=True, eq=False)
class _Readers:
    """Who reads the tensors of a graph.

    Attributes:
        nodes: by the name of a tensor the nodes that read it, also those whose subgraphs do, by their indices.
        outputs: of the graph.
    """

    nodes: Mapping[str, Mapping[int, onnx.NodeProto]]
    outputs: frozenset[str]

    @classmethod
    def of(cls, graph: onnx.GraphProto) -> _Readers:
        """Those of a graph."""
        nodes: dict[str, dict[int, onnx.NodeProto]] = defaultdict(dict)
        for index, node in enumerate(graph.node):
            for name in {*node.input, *captured_tensors(node)}:
                nodes[name][index] = node
        return cls(dict(nodes), frozenset(o.name for o in graph.output))

    def count(self, name: str) -> int:
        """How many read a tensor."""
        return len(self.nodes.get(name, ())) + (name in self.outputs)


def _make_forms(candidates: Mapping[int, _PlainForm], readers: _Readers) -> PlainGemms:
    """The plain forms of nodes that need some. All readers of a weight share one, if they read it in one way."""
    groups: dict[_Layout, set[int]] = defaultdict(set)
    for index, form in candidates.items():
        if form.layout is not None:
            groups[form.layout].add(index)
    reasons = {index: reason for index, form in candidates.items() if (reason := form.why_not())}
    for layout, group in groups.items():
        if reason := _find_conflict(layout, group, readers, reasons):
            reasons |= dict.fromkeys(group - reasons.keys(), reason)
    forms, weights = dict[int, PlainGemm](), dict[_Layout, TensorProto]()
    for index, form in candidates.items():
        if index in reasons:
            continue
        group = groups[form.layout] if form.layout is not None else set()
        try:
            forms[index] = replace(form.make(weights), sharers=frozenset(group) if len(group) > 1 else frozenset())
        except UnsupportedError as error:  # of the weight: all nodes that share it have this reason
            reasons[index] = str(error)
    return PlainGemms(forms, reasons)


def _find_conflict(layout: _Layout, group: Collection[int], readers: _Readers, reasons: Mapping[int, str]) -> str:
    """Why the weight of a layout has to stay in the file as it is stored; empty where it has not.

    Args:
        layout: the weight, and how a group reads it.
        group: all nodes that do.
        readers: of all tensors.
        reasons: why nodes have no plain form, by the index.
    """
    words = ""
    for index, node in readers.nodes[layout.weight].items():
        if index not in group:
            words = f"read by {describe(node)} in another way, expected the same transB and alpha"
        elif list(node.input).count(layout.weight) > 1:
            words = f"another operand of {describe(node)} as well"
        elif index in reasons:
            words = f"read by {describe(node)} as well, which stays ({reasons[index]})"
        if words:
            break
    if layout.weight in readers.outputs:
        words = "an output of the model as well"
    return words and f"its weight {layout.weight!r} is {words}: a second copy would make the file larger"


@dataclass(frozen=True)
class _Layout:
    """How a node reads its weight, where that is not as it is stored."""

    weight: str
    is_transposed: bool
    alpha: float


class _PlainForm:
    """One Gemm node by a constant weight."""

    def __init__(
        self,
        node: onnx.NodeProto,
        stored: Mapping[str, TensorProto],
        readers: _Readers,
        names: FreshNames,
        folder: Path,
    ) -> None:
        attributes = attributes_of(node)
        self.node = node
        self.readers, self.names, self.folder = readers, names, folder
        self.stored = stored
        self.weight, self.bias = stored[node.input[1]], stored.get(input_of(node, 2))
        self.alpha, self.beta = (float(attributes.get(name, 1.0)) for name in ("alpha", "beta"))
        self.is_left_transposed = bool(attributes.get("transA", 0))
        self.is_transposed = bool(attributes.get("transB", 0))
        self.columns = int(self.weight.dims[0 if self.is_transposed else 1])

    def needs_rewrite(self) -> bool:
        """Whether StofGemm cannot compute the node as it is.

        It has a transposed or scaled operand, a bias of one element, or a beta without a bias, which says nothing and goes.
        """
        is_one = self.bias is not None and math.prod(self.bias.dims) == 1
        return self.is_left_transposed or self.is_transposed or self.alpha != 1 or self.beta != 1 or is_one

    @property
    def layout(self) -> _Layout | None:
        """How it reads its weight; None: as it is stored."""
        is_stored = not self.is_transposed and self.alpha == 1
        return None if is_stored else _Layout(self.node.input[1], self.is_transposed, self.alpha)

    def why_not(self) -> str:
        """Why it has no plain form, whatever its weight; empty: it may have one."""
        if self.is_left_transposed:
            return "its left operand is transposed (transA)"
        try:
            self._plain_bias_values()
        except UnsupportedError as error:
            return str(error)
        return ""

    def make(self, made_weights: dict[_Layout, TensorProto]) -> PlainGemm:
        """The plain form of a node that :meth:`why_not` says nothing against.

        Args:
            made_weights: the weights in their new layouts so far; gets this one's.

        Raises:
            UnsupportedError: where its weight cannot be scaled.
        """
        weights = self._plain_weight(made_weights)
        bias = self._plain_bias()
        node = copy_node(self.node)
        del node.attribute[:]
        inputs = [node.input[0], weights.name if weights else node.input[1]]
        if bias is not None:
            inputs.append(bias.name)
        elif self.beta != 0 and input_of(node, 2):
            inputs.append(node.input[2])
        del node.input[:]
        node.input.extend(inputs)
        gone = {n for n in self.node.input[2:] if n not in inputs and self.readers.count(n) == 1 and n in self.stored}
        gone |= {self.node.input[1]} - set(inputs)  # all its readers become plain
        return PlainGemm(node, tuple(t for t in (weights, bias) if t is not None), frozenset(gone))

    def _plain_weight(self, made_weights: dict[_Layout, TensorProto]) -> TensorProto | None:
        """The weight as [K, N], times alpha; None: as it is stored."""
        if self.layout is None:
            return None
        if self.layout not in made_weights:
            array = map_array(self.weight, self.folder)
            if self.alpha != 1:
                array = self._scale(array, self.alpha, "weight", "alpha")
            layout = "transposed" if self.is_transposed else "scaled"
            made_weights[self.layout] = self._tensor(1, layout, array.T if self.is_transposed else array)
        return made_weights[self.layout]

    def _plain_bias(self) -> TensorProto | None:
        """The bias times beta, one element for each column; None: as it is stored, or without any."""
        values = self._plain_bias_values()
        return None if values is None else self._tensor(2, "scaled" if self.beta != 1 else "repeated", values)

    def _plain_bias_values(self) -> np.ndarray | None:
        """Those of :meth:`_plain_bias`.

        Raises:
            UnsupportedError: where the bias is computed or cannot be scaled.
        """
        name = input_of(self.node, 2)
        if not name or self.beta == 0:
            return None
        if self.bias is None:
            if self.beta != 1:
                raise UnsupportedError(f"its bias is not constant, and beta is {self.beta:g}")
            return None
        is_one = math.prod(self.bias.dims) == 1
        if self.beta == 1 and not is_one:
            return None
        array = map_array(self.bias, self.folder)
        if self.beta != 1:
            array = self._scale(array, self.beta, "bias", "beta")
        return np.repeat(array.reshape(1), self.columns) if is_one else array

    def _scale(self, array: np.ndarray, factor: float, operand: str, name: str) -> np.ndarray:
        """A constant operand times a factor of this name.

        Raises:
            UnsupportedError: where a number overflows, or is not exact in fp16 or bf16.
        """
        if factor == 0 or not math.isfinite(factor):
            raise UnsupportedError(f"{name} is {factor:g}")
        words = f"{name} is {factor:g}, and its {operand} times {name}"
        kind = type_names([self.weight.data_type], "or")
        exact = array.astype(np.float64) * factor
        with np.errstate(over="ignore", under="ignore"):
            scaled = exact.astype(array.dtype)
        wide = scaled.astype(np.float64)
        if not np.array_equal(np.isfinite(wide), np.isfinite(exact)):
            raise UnsupportedError(f"{words} exceeds the largest number of {kind}")
        if array.dtype != np.float32 and not np.array_equal(wide, exact, equal_nan=True):
            raise UnsupportedError(f"{words} is not exact in {kind}")
        return scaled

    def _tensor(self, index: int, layout: str, array: np.ndarray) -> TensorProto:
        """A new constant in the place of an input, of its type."""
        name = self.names.make(f"{self.node.input[index]}/{layout}")
        values = np.ascontiguousarray(array).tobytes()
        return helper.make_tensor(name, self.stored[self.node.input[index]].data_type, array.shape, values, raw=True)
