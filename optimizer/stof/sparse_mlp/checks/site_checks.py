# SPDX-License-Identifier: Apache-2.0
"""MLP sites before verification: the operator on captured activations beside the dense MLP in fp64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper

from stof.graph.external_data import map_array
from stof.graph.weight_layout import LayoutReader
from stof.runtime.library import LibraryError, Op
from stof.sparse_mlp.checks.rounded_tokens import round_tokens
from stof.sparse_mlp.emit import emit_mlps
from stof.sparse_mlp.linear_weights import read_values
from stof.sparse_mlp.quantized import dequantize
from stof.sparse_mlp.site import INPUT_INDEX, OP, MlpSite, MlpWeight
from stof.symbolic import Symbolic
from stof.verification.compare import describe_nonfinite
from stof.verification.perturb import Noisy
from stof.verification.result import Comparison, Coverage
from stof.verification.site_checks import SiteChecks

_FACTOR = 2.0  # operator error ≤ 2 × that of the dense MLP in fp32 + 4 ulp
_ORIGINAL_FACTOR = 16.0  # the runtime's kernels sum in other orders
_ULPS = 4
_EPSILON = {"float32": 1.2e-7, "float16": 9.8e-4, "bfloat16": 7.9e-3}
_MOST_TOKENS = 48  # that are compared
_BLOCK = 1024  # neurons that are multiplied together, in fp64
_QUANTIZED_SHARE = 0.05  # of the largest output: further off, quantized nodes compute something else
_TOKENS = (INPUT_INDEX["input"], INPUT_INDEX["gate"])
_POISON = 1e4  # what buffers hold before a run


class MlpChecks(SiteChecks):
    """The MLPs of a model that became StofSparseMLP.

    Args:
        working: the model that they were found in.
        symbolic: its facts.
        mlp_sites: what was replaced.
        folder: of the model's external data.
    """

    def __init__(
        self, working: onnx.ModelProto, symbolic: Symbolic, mlp_sites: Sequence[MlpSite], folder: Path
    ) -> None:
        self.working, self.symbolic = working, symbolic
        self.mlp_sites = tuple(mlp_sites)
        self.sites = tuple(s.name for s in mlp_sites)
        self.types = frozenset(s.dtype for s in mlp_sites)
        self._folder = folder

    def tensors(self) -> list[str]:
        given = {i.name for i in self.working.graph.input}
        found = [t for s in self.mlp_sites for t in (s.gate, s.input, s.output) if t]
        return [t for t in dict.fromkeys(found) if t not in given]

    def emit(self, sites: Sequence[str]) -> onnx.ModelProto:
        return emit_mlps(self.working, [s for s in self.mlp_sites if s.name in set(sites)], self._folder)

    def rounding_variants(self, working: onnx.ModelProto, dtype: Callable[[str], int]) -> list[onnx.ModelProto]:
        rounded = round_tokens(working, self.mlp_sites, dtype(self.mlp_sites[0].output))
        return [] if rounded is None else [rounded]

    def rounding_errors(self, captured: Mapping[str, np.ndarray]) -> dict[str, Noisy]:
        found = {}
        for site in self.mlp_sites:
            array = captured.get(site.output)
            largest = 1.0 if array is None else float(np.abs(array[np.isfinite(array)]).max(initial=0.0))
            found[site.output] = Noisy(site.dtype, site.output_size, largest)
        return found

    def compare(self, emitted: onnx.ModelProto, captured: Mapping[str, np.ndarray]) -> Iterator[Comparison]:
        nodes = {n.output[0]: n for n in emitted.graph.node if n.output and n.op_type == OP}
        own = _Constants(emitted.graph, self._folder)
        original = _Constants(self.working.graph, self._folder)
        for site in self.mlp_sites:
            if site.gate in captured and (not site.input or site.input in captured):
                yield _compare_site(site, nodes[site.output], original, own, captured)


class _Constants:
    """The constants of a graph, those in another layout among them."""

    def __init__(self, graph: onnx.GraphProto, folder: Path) -> None:
        self._layouts = LayoutReader(graph)
        self._folder = folder

    def read(self, name: str) -> np.ndarray:
        """A constant by its name."""
        if name in self._layouts.stored:
            return read_values(self._layouts.stored[name], self._folder)
        found = self._layouts.read(name)
        assert found is not None
        return found.layout.apply(map_array(found.source, self._folder))


def _compare_site(
    site: MlpSite, node: onnx.NodeProto, original: _Constants, own: _Constants, captured: Mapping[str, np.ndarray]
) -> Comparison:
    what = f"site {site.name!r}"
    dtype = np.dtype(helper.tensor_dtype_to_np_dtype(site.dtype))
    gate = captured[site.gate].reshape(-1, site.neurons)
    tokens = _sample(len(gate))
    given = gate[tokens]
    tokens_in = captured[site.input].reshape(len(gate), -1)[tokens] if site.input else None
    weights = MlpWeights.of(site, original)
    rounding = 0.0
    if (computed := captured.get(site.output)) is not None:
        # A half-precision model runs as its fp32 twin: its tensors are compared before they are rounded.
        exact, single = (compute_mlp(site, given, tokens_in, weights, kind) for kind in (np.float64, np.float32))
        away = _largest(computed.reshape(-1, site.output_size)[tokens].astype(np.float64) - exact)
        budget = _ORIGINAL_FACTOR * (_largest(single - exact) + _ulps(exact, computed.dtype))
        if site.quantization is not None:
            # Where ONNX Runtime quantizes tokens, too, its own error is what is allowed.
            rounding, budget = away, max(budget, _QUANTIZED_SHARE * _largest(exact))
        if away > budget:
            detail = "the replaced nodes compute something else than the operator's contract"
            return Comparison(what, away, budget, False, site.name, detail)
    rows = np.ascontiguousarray(given).astype(dtype)
    inputs = None if tokens_in is None else np.ascontiguousarray(tokens_in).astype(dtype)
    exact, single = (compute_mlp(site, rows, inputs, weights, kind) for kind in (np.float64, np.float32))
    try:
        found = _run(site, node, rows, inputs, own).astype(np.float64)
    except LibraryError as error:
        return Comparison(what, np.inf, 0.0, False, site.name, str(error))
    odd = np.isfinite(found) != np.isfinite(exact)
    if odd.any():
        return Comparison(what, np.inf, 0.0, False, site.name, describe_nonfinite(odd, found, exact))
    away = _largest(found - exact)
    rounded = single.astype(dtype).astype(np.float64)
    if site.rounds_tokens:
        # Verification runs have weights as they are stored, of which ONNX Runtime's kernel rounds no tokens.
        coarse = compute_mlp(site, rows, inputs, weights, np.float64, rounds_tokens=True)
        rounding = max(rounding, _largest(coarse - exact))
    budget = _FACTOR * max(_largest(rounded - exact), rounding) + _ulps(exact, dtype)
    left_out = len(gate) * site.output_size - found.size
    coverage = Coverage(found.size, sampled_rows=len(tokens), all_rows=len(gate), left_out=left_out)
    return Comparison(what, away, budget, away <= budget, site.name, coverage=coverage)


@dataclass(frozen=True)
class MlpWeights:
    """The weights of a site, [F, other] each, and its biases; None: there is none."""

    down: np.ndarray
    up: np.ndarray | None = None
    down_bias: np.ndarray | None = None
    up_bias: np.ndarray | None = None

    @classmethod
    def of(cls, site: MlpSite, constants: _Constants) -> MlpWeights:
        """Those of a site in a model."""

        def rows(weight: MlpWeight, is_down: bool) -> np.ndarray:
            values = constants.read(weight.tensor)
            if (q := weight.quantization) is None:
                values = values if weight.is_by_neuron else values.T
                return values if is_down else values[weight.first : weight.first + weight.outer]
            zeros = constants.read(q.zero_points) if q.zero_points else None
            dense = dequantize(weight, values, constants.read(q.scales), zeros)
            return dense if is_down else dense.T

        def bias(weight: MlpWeight) -> np.ndarray | None:
            if not weight.bias:
                return None
            return constants.read(weight.bias).reshape(-1)[weight.first : weight.first + weight.outer]

        if site.up is None:
            return cls(rows(site.down, True), None, bias(site.down))
        return cls(rows(site.down, True), rows(site.up, False), bias(site.down), bias(site.up))


def compute_mlp(
    site: MlpSite,
    gate: np.ndarray,
    inputs: np.ndarray | None,
    weights: MlpWeights,
    kind: type[np.floating[Any]],
    *,
    rounds_tokens: bool = False,
) -> np.ndarray:
    """The dense MLP behind its gate, in one type.

    Args:
        site: what is computed.
        gate: [tokens, F].
        inputs: [tokens, K]; None where the site has no up matmul.
        weights: of the site.
        kind: the type to compute in.
        rounds_tokens: whether what quantized weights multiply is rounded to int8 in blocks, as accuracy_level 4 allows.

    Returns:
        [tokens, N] of that type.
    """
    if rounds_tokens and inputs is not None:
        inputs = _round_to_int8(inputs.astype(kind), site)
    total: np.ndarray = np.zeros((len(gate), site.output_size), kind)
    for start in range(0, site.neurons, _BLOCK):
        block = slice(start, min(start + _BLOCK, site.neurons))
        hidden: np.ndarray = gate[:, block].astype(kind)
        if site.activation != "none":
            hidden = np.maximum(hidden, kind(0))
        if site.activation == "relu2":
            hidden = hidden * hidden
        if weights.up is not None and inputs is not None:
            factor: np.ndarray = inputs.astype(kind) @ np.asarray(weights.up[block]).astype(kind).T
            if weights.up_bias is not None:
                factor = factor + weights.up_bias[block].astype(kind)
            hidden = hidden * factor
        if rounds_tokens:
            hidden = _round_to_int8(hidden, site)
        total += hidden @ np.asarray(weights.down[block]).astype(kind)
    return total if weights.down_bias is None else total + weights.down_bias.astype(kind)


def _round_to_int8(array: np.ndarray, site: MlpSite) -> np.ndarray:
    """Rows rounded to int8 in blocks of the quantization's size, each with a scale of its own."""
    assert site.quantization is not None
    size = site.quantization.block_size
    blocks = np.pad(array, ((0, 0), (0, -array.shape[1] % size))).reshape(len(array), -1, size)
    scales = np.abs(blocks).max(2, keepdims=True) / 127
    rounded = np.round(blocks / np.where(scales > 0, scales, 1)) * scales
    found: np.ndarray = rounded.reshape(len(array), -1)[:, : array.shape[1]]
    return found


def _run(
    site: MlpSite, node: onnx.NodeProto, gate: np.ndarray, inputs: np.ndarray | None, constants: _Constants
) -> np.ndarray:
    """The node's operator on its own constants, into a buffer that holds large numbers before."""
    names = ["" if i in _TOKENS else name for i, name in enumerate(node.input)]
    arrays = [np.ascontiguousarray(constants.read(name)) if name else None for name in names]
    if site.order is not None:
        gate = np.ascontiguousarray(gate[:, site.order.indices])
    arrays[INPUT_INDEX["gate"]] = gate
    arrays[INPUT_INDEX["input"]] = gate if inputs is None else inputs
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    output = np.full((len(gate), site.output_size), _POISON, gate.dtype)
    decoded = {n: v.decode() if isinstance(v, bytes) else v for n, v in attributes.items()}
    Op(OP, decoded).run(arrays, [output], threads=2)
    return output


def _sample(tokens: int) -> np.ndarray:
    """Which tokens are compared: all, or some that are spread evenly."""
    return np.unique(np.linspace(0, tokens - 1, min(tokens, _MOST_TOKENS)).astype(np.int64))


def _largest(array: np.ndarray) -> float:
    return float(np.abs(array[np.isfinite(array)]).max(initial=0.0))


def _ulps(array: np.ndarray, dtype: np.dtype) -> float:
    return _ULPS * _EPSILON.get(dtype.name, 1.2e-7) * _largest(array)
