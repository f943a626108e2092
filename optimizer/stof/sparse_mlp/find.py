# SPDX-License-Identifier: Apache-2.0
"""Finds MLPs, and says why some cannot be replaced: those whose activation gives zeros, or all.

The zeros are found from the operators: Relu gives them, and products, powers and functions that are 0 at 0 keep them. So the
square of Relu counts, and a Gelu behind the threshold of Gemma 3n.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

import onnx
from onnx import helper

from stof.errors import UnsupportedError
from stof.graph.index import GraphIndex, is_standard
from stof.graph.names import FreshNames
from stof.sparse_mlp.activations import read_activation, read_relu
from stof.sparse_mlp.quantized import is_quantized_matmul, read_quantized
from stof.sparse_mlp.site import MlpSite, MlpWeight
from stof.symbolic import Symbolic

# Functions of one value that are 0 at 0. Those of ONNX Runtime have the same names.
_ZERO_AT_ZERO = frozenset(
    {"Abs", "Cast", "Erf", "FastGelu", "Gelu", "Identity", "Neg", "QuickGelu", "Sqrt", "Swish", "Tanh"}
)
# Attention nodes whose outputs behind the first one continue a KV cache.
_WITH_CACHE = frozenset(
    {"Attention", "DecoderMaskedMultiHeadAttention", "GroupQueryAttention", "MultiHeadAttention", "SparseAttention"}
    | {"StofCachedAttention"}
)
_DEPTH = 12  # operators between Relu and the matmul
_LEAST_NEURONS = 64  # of smaller matmuls, the time is that of calls
_LARGEST = 1 << 24  # neurons and features


@dataclass(frozen=True)
class MlpCandidate:
    """The last matmul of an MLP: a site, or the reason why it cannot be replaced."""

    name: str
    site: MlpSite | None
    reason: str = ""


def find_mlps(model: onnx.ModelProto, symbolic: Symbolic, *, any_activation: bool = False) -> list[MlpCandidate]:
    """The candidates of the main graph, in its order.

    Args:
        model: the model.
        symbolic: its facts.
        any_activation: also MLPs without true zeros: SiLU, GELU and others.
    """
    finder = _Finder(GraphIndex(model.graph), symbolic, any_activation)
    names = FreshNames()
    found = []
    for node in model.graph.node:
        hidden = finder.read_hidden(node)
        if hidden is None:
            continue
        name = names.make(node.name or f"{node.op_type} of {node.output[0]}")
        try:
            found.append(MlpCandidate(name, finder.read_site(name, node, hidden)))
        except UnsupportedError as error:
            found.append(MlpCandidate(name, None, str(error)))
    return found


@dataclass(frozen=True)
class _Hidden:
    """What the last matmul multiplies: the activated neurons, and the factor of each; empty: none."""

    activated: str
    factor: str = ""
    has_zeros: bool = True


class _Finder:
    """Reads sites of one graph."""

    def __init__(self, index: GraphIndex, symbolic: Symbolic, any_activation: bool) -> None:
        self._index, self._symbolic, self._any_activation = index, symbolic, any_activation
        self._zeros: dict[str, bool] = {}

    def read_hidden(self, node: onnx.NodeProto) -> _Hidden | None:
        """What a node multiplies by a constant, where that is neurons behind an activation; else None."""
        if not self._is_matmul(node):
            return None
        tensor = node.input[0]
        if not self._has_zeros(tensor, _DEPTH):
            return self._read_without_zeros(tensor) if self._any_activation else None
        product = self._index.producer(tensor)
        assert product is not None
        if product.op_type == "Mul" and product.input[0] != product.input[1]:
            sides = [t for t in product.input if self._has_zeros(t, _DEPTH)]
            others = [t for t in product.input if t not in sides]
            if len(sides) == 1 and self._matmul_behind(others[0]) is not None:
                return _Hidden(sides[0], others[0])
        return _Hidden(tensor)

    def _read_without_zeros(self, tensor: str) -> _Hidden | None:
        """Neurons behind an activation that gives no zeros, perhaps with a factor."""
        if self._is_activated_matmul(tensor):
            return _Hidden(tensor, has_zeros=False)
        product = self._index.producer(tensor)
        if product is None or product.op_type != "Mul" or not is_standard(product):
            return None
        for activated, factor in (tuple(product.input), tuple(product.input)[::-1]):
            if self._is_activated_matmul(activated) and self._matmul_behind(factor) is not None:
                return _Hidden(activated, factor, has_zeros=False)
        return None

    def _is_activated_matmul(self, tensor: str) -> bool:
        """Whether a tensor is an activation of a matmul: other functions of tokens are no MLP."""
        found = read_activation(self._index, self._symbolic, tensor)
        if found is None:
            return False
        gate, name = found
        if name == "none":
            node = self._index.producer(gate)
            assert node is not None
            gate = node.input[0]
        return self._matmul_behind(gate) is not None

    def read_site(self, name: str, node: onnx.NodeProto, hidden: _Hidden) -> MlpSite:
        """The site of a matmul.

        Raises:
            UnsupportedError: naming what the operator does not support.
        """
        for tensor in filter(None, (node.input[0], hidden.factor)):
            if len(self._index.consumers(tensor)) > 1 or self._is_visible(tensor):
                raise UnsupportedError(f"{tensor!r} has other readers, which need all neurons")
        down, output = self._read_weight(node, sums_over_neurons=True)
        gate, activation = self._read_activation(hidden)
        dtype = self._symbolic.dtype(hidden.activated)
        if dtype not in (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16):
            found = onnx.TensorProto.DataType.Name(dtype) if dtype else "not known"
            raise UnsupportedError(f"the element type of {hidden.activated!r} is {found}")
        if self._symbolic.dtype(gate) != dtype or not self._has_width(gate, down.inner):
            raise UnsupportedError(f"the shape or type of {gate!r} is not known")
        if down.inner < _LEAST_NEURONS:
            raise UnsupportedError(f"it has {down.inner} neurons, fewer than {_LEAST_NEURONS}")
        if not 1 <= max(down.inner, down.outer) <= _LARGEST:
            raise UnsupportedError(f"its weight has shape [{down.inner}, {down.outer}]")
        site = MlpSite(name, gate, activation, hidden.activated, down, output, down.inner, down.outer, dtype)
        site = self._with_gate_weight(replace(site, has_zeros=hidden.has_zeros))
        if not hidden.factor:
            return replace(site, input_size=self._size_before(gate))
        matmul = self._matmul_behind(hidden.factor)
        assert matmul is not None
        up, written = self._read_weight(matmul, sums_over_neurons=False)
        if written != hidden.factor:
            raise UnsupportedError(f"{hidden.factor!r} is not the matmul with its bias alone")
        if up.outer != down.inner or not self._has_width(matmul.input[0], up.inner):
            raise UnsupportedError(f"the weight {up.tensor!r} gives {up.outer} elements, expected {down.inner}")
        if self._rank(matmul.input[0]) != self._rank(gate):
            raise UnsupportedError(f"{matmul.input[0]!r} and {gate!r} have different ranks")
        _check_equal_quantization(up, down)
        return replace(site, input=matmul.input[0], up=up, input_size=up.inner)

    def _is_matmul(self, node: onnx.NodeProto | None) -> bool:
        """Whether a node multiplies a tensor by a constant weight."""
        if node is None or len(node.input) < 2 or node.input[1] in self._index.inputs:
            return False
        weight = self._index.initializers.get(node.input[1])
        if weight is None:
            return False
        if is_quantized_matmul(node):
            return len(weight.dims) == 3
        if not is_standard(node) or node.op_type not in ("MatMul", "Gemm") or len(weight.dims) != 2:
            return False
        plain = {"alpha": 1.0, "beta": 1.0, "transA": 0}
        values = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        return all(values.get(key, wanted) == wanted for key, wanted in plain.items())

    def _matmul_behind(self, tensor: str) -> onnx.NodeProto | None:
        """The matmul that gives a tensor, perhaps with a bias."""
        node = self._index.producer(tensor)
        if node is not None and is_standard(node) and node.op_type == "Add":
            inner = [t for t in node.input if not self._is_vector(t)]
            node = self._index.producer(inner[0]) if len(inner) == 1 else None
        return node if self._is_matmul(node) else None

    def _read_weight(self, node: onnx.NodeProto, sums_over_neurons: bool) -> tuple[MlpWeight, str]:
        """The weight of a matmul with its bias, and the tensor behind the bias.

        Args:
            node: the matmul.
            sums_over_neurons: whether it sums over neurons; else it gives them.

        Raises:
            UnsupportedError: naming what the operator does not support.
        """
        weight, bias = self._read_factor(node, sums_over_neurons)
        if bias:
            if not self._is_vector(bias):
                raise UnsupportedError(f"its summand {bias!r} is no constant vector")
            return replace(weight, bias=bias), node.output[0]
        output = node.output[0]
        readers = self._index.consumers(output)
        if (
            len(readers) == 1
            and not self._is_visible(output)
            and readers[0].op_type == "Add"
            and is_standard(readers[0])
        ):
            other = [t for t in readers[0].input if t != output]
            if len(other) == 1 and self._is_vector(other[0]):
                return replace(weight, bias=other[0]), readers[0].output[0]
        return weight, output

    def _read_factor(self, node: onnx.NodeProto, sums_over_neurons: bool) -> tuple[MlpWeight, str]:
        """The weight of a matmul without its bias, and the bias that the node itself adds."""
        tensor = node.input[1]
        if is_quantized_matmul(node):
            return read_quantized(node, self._index.initializers, self._index.inputs, sums_over_neurons)
        is_transposed = any(a.name == "transB" and a.i for a in node.attribute)
        inner, outer = (int(d) for d in self._index.initializers[tensor].dims)
        if is_transposed:
            inner, outer = outer, inner
        bias = node.input[2] if node.op_type == "Gemm" and len(node.input) > 2 else ""
        return MlpWeight(tensor, inner, outer, sums_over_neurons != is_transposed), bias

    def _read_activation(self, hidden: _Hidden) -> tuple[str, str]:
        """The tensor in front of an activation that the operator computes, and its name; else the tensor itself."""
        node = self._index.producer(hidden.activated)
        assert node is not None
        if hidden.has_zeros:
            found = read_relu(self._index, self._symbolic, node)
        else:
            found = read_activation(self._index, self._symbolic, hidden.activated)
        return found or (hidden.activated, "none")

    def _with_gate_weight(self, site: MlpSite) -> MlpSite:
        """The site with the matmul that gives its gate, where a predictor may stand for it."""
        matmul = self._matmul_behind(site.gate)
        if matmul is None:
            return site
        try:
            weight, written = self._read_weight(matmul, sums_over_neurons=False)
            if weight.outer == site.neurons:
                _check_equal_quantization(weight, site.down)
        except UnsupportedError:  # the gate stays as it is
            return site
        tokens = matmul.input[0]
        is_usable = written == site.gate and weight.outer == site.neurons and self._has_width(tokens, weight.inner)
        if not is_usable or self._rank(tokens) != self._rank(site.gate) or self._symbolic.dtype(tokens) != site.dtype:
            return site
        return replace(site, gate_input=tokens, gate_weight=weight)

    def _has_zeros(self, tensor: str, depth: int) -> bool:
        """Whether operators make a tensor zero in places."""
        if tensor not in self._zeros:
            node = self._index.producer(tensor)
            self._zeros[tensor] = node is not None and depth > 0 and self._gives_zeros(node, depth)
        return self._zeros[tensor]

    def _gives_zeros(self, node: onnx.NodeProto, depth: int) -> bool:
        op = node.op_type
        if op in ("FastGelu", "QuickGelu"):  # with a bias, 0 becomes something else
            return len([t for t in node.input if t]) == 1 and self._has_zeros(node.input[0], depth - 1)
        if not is_standard(node) and op != "Gelu":
            return False
        if op == "Relu":
            return True
        if op in _ZERO_AT_ZERO:
            return self._has_zeros(node.input[0], depth - 1)
        if op == "Mul":
            return any(self._has_zeros(t, depth - 1) for t in node.input)
        if op == "Pow":
            exponent = self._symbolic.uniform(node.input[1])
            return exponent is not None and exponent > 0 and self._has_zeros(node.input[0], depth - 1)
        if op == "Div":
            divisor = self._symbolic.uniform(node.input[1])
            return bool(divisor) and self._has_zeros(node.input[0], depth - 1)
        return False

    def _is_vector(self, tensor: str) -> bool:
        """Whether a tensor is a constant with one axis that is not 1, the last one."""
        stored = self._index.initializers.get(tensor)
        return stored is not None and tensor not in self._index.inputs and len(stored.dims) == 1

    def _is_visible(self, tensor: str) -> bool:
        return tensor in self._index.outputs or tensor in self._index.captured

    def _has_width(self, tensor: str, size: int) -> bool:
        shape = self._symbolic.shape(tensor)
        return shape is not None and 1 <= len(shape) <= 8 and shape[-1].constant == size

    def _rank(self, tensor: str) -> int:
        return len(self._symbolic.shape(tensor) or ())

    def _size_before(self, gate: str) -> int:
        """The features of a token in front of the first matmul; 0 where they are not known."""
        for node in self._behind(gate):
            if self._is_matmul(node):
                with suppress(UnsupportedError):
                    return self._read_factor(node, sums_over_neurons=False)[0].inner
        return 0

    def _behind(self, tensor: str) -> Iterator[onnx.NodeProto]:
        """The node that gives a tensor, and those in front of it."""
        node = self._index.producer(tensor)
        if node is not None:
            yield node
            yield from filter(None, map(self._index.producer, node.input[:2]))


def _check_equal_quantization(up: MlpWeight, down: MlpWeight) -> None:
    """The operator has one number of bits and one block size for all weights."""
    kinds = []
    for weight in (up, down):
        q = weight.quantization
        kinds.append("not quantized" if q is None else f"int{q.bits} in blocks of {q.block_size}")
    if kinds[0] != kinds[1]:
        raise UnsupportedError(f"{up.tensor!r} is {kinds[0]} and {down.tensor!r} {kinds[1]}: they have to be alike")


def has_cache(model: onnx.ModelProto) -> bool:
    """Whether a model decodes token by token: an output continues an input, or attention reads a past."""
    inputs = {i.name for i in model.graph.input}
    outputs = {o.name for o in model.graph.output}
    for node in model.graph.node:
        if node.op_type == "Concat" and outputs.intersection(node.output) and inputs.intersection(node.input):
            return True
        if node.op_type in _WITH_CACHE and inputs.intersection(node.input) and outputs.intersection(node.output[1:]):
            return True
    return False
