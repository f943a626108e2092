# SPDX-License-Identifier: Apache-2.0
"""Gemm nodes with a transposed or scaled constant weight, as Gemm nodes with neither.

StofGemm and its kernels have one layout of a weight, [K, N]. The transposed weight takes the place of the stored one, so that the
file has as many bytes as before. An attribute for the layout would need kernels that pack from it on every machine.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from stof.attention.limits import type_names
from stof.errors import UnsupportedError
from stof.graph.external_data import map_array
from stof.graph.index import captured_tensors, domain_of, node_tensors
from stof.graph.names import FreshNames
from stof.graph.node_fields import attributes_of, input_of
from stof.graph.protobuf import copy_node, copy_with_nodes, remove_named

_SECOND_COPY = (
    "its weight is transposed or scaled and others read it as it is stored: a second copy would make the file larger"
)
_TYPES = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16})


@dataclass(frozen=True, eq=False)
class PlainGemm:
    """What takes the place of a Gemm node.

    Attributes:
        node: a Gemm without attributes.
        tensors: new constants.
        gone: the names of those that nothing reads any more. Constant nodes among them are dead: the edit removes them.
        sharing: the indices of all Gemm nodes that read its weight, where these are several.
    """

    node: onnx.NodeProto
    tensors: tuple[TensorProto, ...]
    gone: frozenset[str]
    sharing: frozenset[int] = frozenset()


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
        forms = {j: self.forms[j] for i in chosen for j in (i, *sorted(self.forms[i].sharing))}
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
    """The tensors that Constant nodes hold, by the names of their outputs. Their own names say nothing."""
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
    readers = Counter(name for n in graph.node for name in {*n.input, *captured_tensors(n)})
    readers.update(o.name for o in graph.output)
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


def _make_forms(candidates: Mapping[int, _PlainForm], readers: Mapping[str, int]) -> PlainGemms:
    """The plain forms of nodes that need some. All readers of a weight share one, if they read it in one way."""
    by_layout: dict[_Layout, list[int]] = defaultdict(list)
    for index, form in candidates.items():
        if form.layout is not None:
            by_layout[form.layout].append(index)
    forms, reasons = dict[int, PlainGemm](), dict[int, str]()
    weights: dict[_Layout, TensorProto] = {}
    for index, form in candidates.items():
        group = [] if form.layout is None else by_layout[form.layout]
        try:
            if form.layout is not None and readers[form.layout.weight] > sum(candidates[i].reads_once for i in group):
                raise UnsupportedError(_SECOND_COPY)
            made = form.make(weights)
            forms[index] = replace(made, sharing=frozenset(group)) if len(group) > 1 else made
        except UnsupportedError as error:
            reasons[index] = str(error)
    for index in [i for i, made in forms.items() if made.sharing & reasons.keys()]:
        del forms[index]
        reasons[index] = _SECOND_COPY
    return PlainGemms(forms, reasons)


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
        readers: Mapping[str, int],
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
        """Whether StofGemm cannot compute the node as it is: a transposed or scaled operand, or a bias of one element."""
        is_one = self.bias is not None and math.prod(self.bias.dims) == 1
        return self.is_left_transposed or self.is_transposed or self.alpha != 1 or self.beta != 1 or is_one

    @property
    def layout(self) -> _Layout | None:
        """How it reads its weight; None: as it is stored."""
        is_stored = not self.is_transposed and self.alpha == 1
        return None if is_stored else _Layout(self.node.input[1], self.is_transposed, self.alpha)

    @property
    def reads_once(self) -> bool:
        """Whether its weight is no other operand of it as well."""
        return list(self.node.input).count(self.node.input[1]) == 1

    def make(self, made: dict[_Layout, TensorProto]) -> PlainGemm:
        """The plain form.

        Args:
            made: the weights in their new layouts so far; gets this one's.

        Raises:
            UnsupportedError: where it has none.
        """
        if self.is_left_transposed:
            raise UnsupportedError("its left operand is transposed (transA)")
        weights = self._plain_weight(made)
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
        gone = {n for n in self.node.input[2:] if n not in inputs and self.readers[n] == 1 and n in self.stored}
        gone |= {self.node.input[1]} - set(inputs)  # all its readers become plain
        return PlainGemm(node, tuple(t for t in (weights, bias) if t is not None), frozenset(gone))

    def _plain_weight(self, made: dict[_Layout, TensorProto]) -> TensorProto | None:
        """The weight as [K, N], times alpha; None: as it is stored."""
        if self.layout is None:
            return None
        if self.layout not in made:
            array = map_array(self.weight, self.folder)
            if self.alpha != 1:
                array = self._scale(array, self.alpha, "weight", "alpha")
            layout = "transposed" if self.is_transposed else "scaled"
            made[self.layout] = self._tensor(1, layout, array.T if self.is_transposed else array)
        return made[self.layout]

    def _plain_bias(self) -> TensorProto | None:
        """The bias times beta, one element for each column; None: as it is stored, or without any."""
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
        layout = "scaled" if self.beta != 1 else "repeated"
        return self._tensor(2, layout, np.repeat(array.reshape(1), self.columns) if is_one else array)

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
