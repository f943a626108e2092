# SPDX-License-Identifier: Apache-2.0
"""Finds MLPs, and says why some cannot be replaced: those whose activation gives zeros, or all.

The zeros are found from the operators. Activations give them whose row of ``ACTIVATIONS`` says so; Mul, Pow and functions that
are 0 at 0 keep them. So Relu counts, its square, and a Gelu behind the threshold of Gemma 3n.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace

import onnx

from stof.errors import UnsupportedError
from stof.graph.index import GraphIndex, is_standard
from stof.graph.names import FreshNames
from stof.sparse_mlp.activations import read_activation, read_activation_with_zeros
from stof.sparse_mlp.gate_paths import GatePaths
from stof.sparse_mlp.matmuls import MatmulReader, Projection
from stof.sparse_mlp.quantized import with_equal_blocks
from stof.sparse_mlp.site import GateProjection, MlpSite
from stof.symbolic import Symbolic

# Functions of one value that are 0 at 0. Those of ONNX Runtime have the same names.
_ZERO_AT_ZERO = frozenset(
    {"Abs", "Cast", "Erf", "FastGelu", "Gelu", "Identity", "Neg", "QuickGelu", "Reshape", "Sqrt", "Swish", "Tanh"}
)
# Attention nodes whose outputs behind the first one continue a KV cache.
_WITH_CACHE = frozenset(
    {"Attention", "DecoderMaskedMultiHeadAttention", "GroupQueryAttention", "MultiHeadAttention", "SparseAttention"}
    | {"StofCachedAttention"}
)
_LOWEST = {int(onnx.TensorProto.UINT8): 0.0, int(onnx.TensorProto.INT8): -128.0}
_DEPTH = 12  # operators between Relu and the matmul
_MOST_BEFORE = 64  # tensors between the first matmul and the last one
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
    candidates = []
    for node in model.graph.node:
        hidden = finder.read_hidden(node)
        if hidden is None:
            continue
        name = names.make(node.name or f"{node.op_type} of {node.output[0]}")
        try:
            candidates.append(MlpCandidate(name, finder.read_site(name, node, hidden)))
        except UnsupportedError as error:
            candidates.append(MlpCandidate(name, None, str(error)))
    return candidates


@dataclass(frozen=True)
class _Hidden:
    """What the last matmul multiplies: the activated neurons, and the factor of each; empty: none.

    ``is_flattened``: a Reshape joins the axes of the tokens before the matmul, as GPT-2 has it.
    """

    activated: str
    factor: str = ""
    has_zeros: bool = True
    is_flattened: bool = False


class _Finder:
    """Reads sites of one graph."""

    def __init__(self, index: GraphIndex, symbolic: Symbolic, any_activation: bool) -> None:
        self._index, self._symbolic, self._any_activation = index, symbolic, any_activation
        self._matmuls = MatmulReader(index, symbolic)
        self._paths = GatePaths(index, symbolic, self._matmuls)
        self._zeros: dict[str, bool] = {}

    def read_hidden(self, node: onnx.NodeProto) -> _Hidden | None:
        """What a node multiplies by a constant, where that is neurons behind an activation; else None."""
        matmul = self._matmuls.read(node)
        if matmul is None:
            return None
        tensor = matmul.input
        inner = self._before_reshape(tensor)
        if inner is not None:
            return self._read_flattened(inner)
        if not self._has_zeros(tensor, _DEPTH):
            return self._read_without_zeros(tensor) if self._any_activation else None
        producer = self._index.producer(tensor)
        assert producer is not None
        if producer.op_type == "Mul" and producer.input[0] != producer.input[1]:
            sides = [t for t in producer.input if self._has_zeros(t, _DEPTH)]
            others = [t for t in producer.input if t not in sides]
            if len(sides) == 1 and self._matmuls.behind(others[0]) is not None:
                return _Hidden(sides[0], others[0])
        return _Hidden(tensor)

    def _read_flattened(self, tensor: str) -> _Hidden | None:
        """Neurons in front of a Reshape; only those that no second matmul multiplies."""
        if self._has_zeros(tensor, _DEPTH):
            return _Hidden(tensor, is_flattened=True)
        if self._any_activation and self._is_activated_matmul(tensor):
            return _Hidden(tensor, has_zeros=False, is_flattened=True)
        return None

    def _before_reshape(self, tensor: str) -> str | None:
        """What a Reshape that keeps the last axis reads; None where a tensor is not the result of one."""
        node = self._index.producer(tensor)
        if node is None or node.op_type != "Reshape" or not is_standard(node):
            return None
        shape = self._symbolic.shape(tensor)
        size = shape[-1].constant if shape else None
        return node.input[0] if size is not None and self._has_width(node.input[0], size) else None

    def _read_without_zeros(self, tensor: str) -> _Hidden | None:
        """Neurons behind an activation that gives no zeros, perhaps with a factor."""
        if self._is_activated_matmul(tensor):
            return _Hidden(tensor, has_zeros=False)
        mul = self._index.producer(tensor)
        if mul is None or mul.op_type != "Mul" or not is_standard(mul):
            return None
        for activated, factor in (tuple(mul.input), tuple(mul.input)[::-1]):
            if self._is_activated_matmul(activated) and self._matmuls.behind(factor) is not None:
                return _Hidden(activated, factor, has_zeros=False)
        return None

    def _is_activated_matmul(self, tensor: str) -> bool:
        """Whether a tensor is an activation of a matmul: other functions of tokens are no MLP."""
        activation = read_activation(self._index, self._symbolic, tensor)
        if activation is None:
            return False
        gate, name = activation
        if name == "none":
            node = self._index.producer(gate)
            assert node is not None
            gate = node.input[0]
        return self._matmuls.behind(self._before_reshape(gate) or gate) is not None

    def read_site(self, name: str, node: onnx.NodeProto, hidden: _Hidden) -> MlpSite:
        """The site of a matmul.

        Raises:
            UnsupportedError: naming what the operator does not support.
        """
        matmul = self._matmuls.read(node)
        assert matmul is not None
        reshaped = hidden.activated if hidden.is_flattened else ""
        for tensor in filter(None, (matmul.input, hidden.factor, reshaped)):
            if len(self._index.consumers(tensor)) > 1 or self._matmuls.is_visible(tensor):
                raise UnsupportedError(f"{tensor!r} has other readers, which need all neurons")
        down, output = self._matmuls.read_weight(matmul, sums_over_neurons=True)
        gate, activation = self._read_activation(hidden)
        if hidden.is_flattened:
            gate, activation = self._flatten_gate(gate, activation, matmul.input)
        dtype = self._symbolic.dtype(hidden.activated)
        if dtype not in (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16):
            element_type = onnx.TensorProto.DataType.Name(dtype) if dtype else "not known"
            raise UnsupportedError(f"the element type of {hidden.activated!r} is {element_type}")
        if self._symbolic.dtype(gate) != dtype or not self._has_width(gate, down.inner):
            raise UnsupportedError(f"the shape or type of {gate!r} is not known")
        if down.inner < _LEAST_NEURONS:
            raise UnsupportedError(f"it has {down.inner} neurons, fewer than {_LEAST_NEURONS}")
        if not 1 <= max(down.inner, down.outer) <= _LARGEST:
            raise UnsupportedError(f"its weight has shape [{down.inner}, {down.outer}]")
        site = MlpSite(name, gate, activation, hidden.activated, down, output, down.inner, down.outer, dtype)
        site = self._with_gate_weight(replace(site, has_zeros=hidden.has_zeros))
        if not hidden.factor:
            return replace(site, input_size=self._size_before(gate, site.neurons))
        up = self._matmuls.read_projection(hidden.factor)
        if up.weight.outer != down.inner or not self._has_width(up.input, up.weight.inner):
            raise UnsupportedError(
                f"the weight {up.weight.tensor!r} gives {up.weight.outer} elements, expected {down.inner}"
            )
        if not self._has_same_tokens(up.input, gate):
            raise UnsupportedError(
                f"{up.input!r} and {gate!r} may have different tokens: the axes before the last one differ"
            )
        if up.weight.whole and not self._has_both_parts(site, up):
            return self.read_site(name, node, _Hidden(matmul.input, has_zeros=hidden.has_zeros))
        weight, down = with_equal_blocks(up.weight, down)
        return replace(site, input=up.input, up=weight, down=down, input_size=weight.inner)

    def _has_both_parts(self, site: MlpSite, up: Projection) -> bool:
        """Whether a packed matmul gives the gate and the up values of a site, and nothing else."""
        gate = site.projection
        if (
            gate is None
            or gate.matmul_output != up.node.output[0]
            or gate.weight.outer + up.weight.outer != up.weight.whole
        ):
            return False
        cuts = [self._index.producer(t) for t in (gate.tensor, up.tensor)]
        outputs = {o for n in cuts if n is not None for o in n.output}
        whole = cuts[0].input[0] if cuts[0] is not None else ""
        is_own = outputs <= {gate.tensor, up.tensor} and not self._matmuls.is_visible(whole)
        return is_own and gate.weight.first != up.weight.first and self._ends_in(whole, outputs)

    def _ends_in(self, tensor: str, outputs: set[str]) -> bool:
        """Whether all that follows from a tensor, sizes of it for instance, is read by the nodes of these outputs alone."""
        pending, seen = [tensor], {tensor}
        while pending:
            name = pending.pop()
            if self._matmuls.is_visible(name) or len(seen) > _MOST_BEFORE:
                return False
            for node in self._index.consumers(name):
                fresh = [] if outputs.intersection(node.output) else [o for o in node.output if o not in seen]
                seen.update(fresh)
                pending += fresh
        return True

    def _read_activation(self, hidden: _Hidden) -> tuple[str, str]:
        """The tensor in front of an activation that the operator computes, and its name; else the tensor itself."""
        node = self._index.producer(hidden.activated)
        assert node is not None
        if hidden.has_zeros:
            activation = read_activation_with_zeros(self._index, self._symbolic, node)
        else:
            activation = read_activation(self._index, self._symbolic, hidden.activated)
        return activation or (hidden.activated, "none")

    def _flatten_gate(self, gate: str, activation: str, flat: str) -> tuple[str, str]:
        """The gate with the axes of ``flat``, the flattened hidden tensor, and the activation behind it."""
        before = self._before_reshape(gate) if activation != "none" else None
        return (flat, "none") if before is None or not self._has_same_tokens(before, flat) else (before, activation)

    def _with_gate_weight(self, site: MlpSite) -> MlpSite:
        """The site with the matmul behind its gate, and with the one that gives it, where a predictor may stand for it."""
        path = self._paths.read(site.activated, site.neurons)
        if path is None:
            return site
        gate = path.projection
        projection = GateProjection(gate.tensor, gate.node.output[0], gate.weight, path.is_movable)
        if gate.weight.quantization is None or gate.weight.quantization.dequantize_linear is None:
            site = replace(site, projection=projection)
        try:
            weight, _ = with_equal_blocks(gate.weight, site.down)
        except UnsupportedError:  # the gate stays as it is
            return site
        is_usable = gate.tensor == site.gate and self._has_width(gate.input, weight.inner)
        if (
            not is_usable
            or self._rank(gate.input) != self._rank(site.gate)
            or self._symbolic.dtype(gate.input) != site.dtype
        ):
            return site
        return replace(site, gate_input=gate.input, gate_weight=weight)

    def _has_zeros(self, tensor: str, depth: int) -> bool:
        """Whether operators make a tensor zero in places."""
        if tensor not in self._zeros:
            node = self._index.producer(tensor)
            self._zeros[tensor] = node is not None and depth > 0 and self._gives_zeros(node, depth)
        return self._zeros[tensor]

    def _gives_zeros(self, node: onnx.NodeProto, depth: int) -> bool:
        if read_activation_with_zeros(self._index, self._symbolic, node) is not None:
            return True
        op = node.op_type
        if op in ("FastGelu", "QuickGelu"):  # with a bias, 0 becomes something else
            return len([t for t in node.input if t]) == 1 and self._has_zeros(node.input[0], depth - 1)
        if not is_standard(node) and op != "Gelu":
            return False
        if op in _ZERO_AT_ZERO:
            return self._has_zeros(node.input[0], depth - 1)
        if op == "DequantizeLinear":
            return self._gives_quantized_zeros(node, depth)
        if op == "Mul":
            return any(self._has_zeros(t, depth - 1) for t in node.input)
        if op == "Pow":
            exponent = self._symbolic.uniform(node.input[1])
            return exponent is not None and exponent > 0 and self._has_zeros(node.input[0], depth - 1)
        if op == "Div":
            divisor = self._symbolic.uniform(node.input[1])
            return bool(divisor) and self._has_zeros(node.input[0], depth - 1)
        return False

    def _gives_quantized_zeros(self, node: onnx.NodeProto, depth: int) -> bool:
        """Whether a DequantizeLinear gives zeros: of zeros that were quantized, or where quantizing clips what is negative."""
        quantize = self._index.producer(node.input[0])
        if quantize is None or not is_standard(quantize):
            return False
        if quantize.op_type == "DynamicQuantizeLinear":
            return list(node.input) == list(quantize.output) and self._has_zeros(quantize.input[0], depth - 1)
        if quantize.op_type != "QuantizeLinear" or list(node.input[1:]) != list(quantize.input[1:]):
            return False
        zero = self._symbolic.uniform(node.input[2]) if len(node.input) > 2 and node.input[2] else 0.0
        lowest = _LOWEST.get(self._symbolic.dtype(node.input[0]))
        return (zero is not None and zero == lowest) or self._has_zeros(quantize.input[0], depth - 1)

    def _has_width(self, tensor: str, size: int) -> bool:
        shape = self._symbolic.shape(tensor)
        return shape is not None and 1 <= len(shape) <= 8 and shape[-1].constant == size

    def _has_same_tokens(self, one: str, other: str) -> bool:
        """Whether two tensors have the same axes before the last one, so that neither is broadcast along the other."""
        first, second = self._symbolic.shape(one), self._symbolic.shape(other)
        return bool(first and second and first[:-1] == second[:-1])

    def _rank(self, tensor: str) -> int:
        return len(self._symbolic.shape(tensor) or ())

    def _size_before(self, gate: str, neurons: int) -> int:
        """The weights that a neuron has in the matmuls in front of the last one; 0 where they are not known."""
        pending, seen, size = [gate], {gate}, 0
        while pending and len(seen) <= _MOST_BEFORE:
            tensor = pending.pop()
            matmul = self._matmuls.behind(tensor)
            if matmul is not None:
                with suppress(UnsupportedError):
                    weight = self._matmuls.read_projection(tensor).weight
                    size += weight.inner * (weight.outer == neurons)
                continue
            node = self._index.producer(tensor)
            for name in () if node is None else node.input:
                if name not in seen and self._has_width(name, neurons):
                    seen.add(name)
                    pending.append(name)
        return size


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
