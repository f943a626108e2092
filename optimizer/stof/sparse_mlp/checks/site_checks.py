# SPDX-License-Identifier: Apache-2.0
"""MLP sites before verification: the operator on captured activations beside the dense MLP in fp64."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from stof.graph.external_data import is_external, location_of
from stof.runtime.library import LibraryError, Op
from stof.sparse_mlp.emit import emit_mlps
from stof.sparse_mlp.site import INPUT_INDEX, OP, OP_INPUTS, MlpSite
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
        return emit_mlps(self.working, [s for s in self.mlp_sites if s.name in set(sites)])

    def rounding_errors(self, captured: Mapping[str, np.ndarray]) -> dict[str, Noisy]:
        found = {}
        for site in self.mlp_sites:
            array = captured.get(site.output)
            largest = 1.0 if array is None else float(np.abs(array[np.isfinite(array)]).max(initial=0.0))
            found[site.output] = Noisy(site.dtype, site.neurons, largest)
        return found

    def compare(self, emitted: onnx.ModelProto, captured: Mapping[str, np.ndarray]) -> Iterator[Comparison]:
        nodes = {n.output[0]: n for n in emitted.graph.node if n.output and n.op_type == OP}
        stored = {t.name: t for t in (*self.working.graph.initializer, *emitted.graph.initializer)}
        for site in self.mlp_sites:
            weights = [w for w in (site.down, site.up) if w is not None]
            constants = [n for w in weights for n in (w.tensor, w.bias) if n]
            if site.gate not in captured or (site.input and site.input not in captured):
                continue
            known = {name: _read(stored[name], self._folder) for name in constants}
            yield _compare_site(site, nodes[site.output], known, captured)


def _read(tensor: onnx.TensorProto, folder: Path) -> np.ndarray:
    """A constant, mapped where it is external data."""
    if not is_external(tensor):
        return np.asarray(numpy_helper.to_array(tensor))
    where = location_of(tensor)
    dtype = np.dtype(helper.tensor_dtype_to_np_dtype(tensor.data_type))
    return np.memmap(folder / where.location, dtype, "r", where.offset, tuple(tensor.dims))


def _compare_site(
    site: MlpSite, node: onnx.NodeProto, known: Mapping[str, np.ndarray], captured: Mapping[str, np.ndarray]
) -> Comparison:
    what = f"site {site.name!r}"
    dtype = np.dtype(helper.tensor_dtype_to_np_dtype(site.dtype))
    gate = captured[site.gate].reshape(-1, site.neurons)
    tokens = _sample(len(gate))
    given = gate[tokens]
    tokens_in = captured[site.input].reshape(len(gate), -1)[tokens] if site.input else None
    if (original := captured.get(site.output)) is not None:
        # A half-precision model runs as its fp32 twin: its tensors are compared before they are rounded.
        exact, single = (compute_mlp(site, given, tokens_in, known, kind) for kind in (np.float64, np.float32))
        away = np.abs(original.reshape(-1, site.output_size)[tokens].astype(np.float64) - exact)
        budget = _ORIGINAL_FACTOR * (_largest(single - exact) + _ulps(exact, original.dtype))
        if _largest(away) > budget:
            detail = "the replaced nodes compute something else than the operator's contract"
            return Comparison(what, _largest(away), budget, False, site.name, detail)
    rows = np.ascontiguousarray(given).astype(dtype)
    inputs = None if tokens_in is None else np.ascontiguousarray(tokens_in).astype(dtype)
    exact, single = (compute_mlp(site, rows, inputs, known, kind) for kind in (np.float64, np.float32))
    try:
        found = _run(site, node, rows, inputs, known).astype(np.float64)
    except LibraryError as error:
        return Comparison(what, np.inf, 0.0, False, site.name, str(error))
    odd = np.isfinite(found) != np.isfinite(exact)
    if odd.any():
        return Comparison(what, np.inf, 0.0, False, site.name, describe_nonfinite(odd, found, exact))
    away = np.abs(found - exact)
    rounded = single.astype(dtype).astype(np.float64)
    budget = _FACTOR * _largest(rounded - exact) + _ulps(exact, dtype)
    coverage = Coverage(
        found.size, sampled_rows=len(tokens), all_rows=len(gate), left_out=len(gate) * site.output_size - found.size
    )
    return Comparison(what, _largest(away), budget, _largest(away) <= budget, site.name, coverage=coverage)


def compute_mlp(
    site: MlpSite,
    gate: np.ndarray,
    inputs: np.ndarray | None,
    known: Mapping[str, np.ndarray],
    kind: type[np.floating[Any]],
) -> np.ndarray:
    """The dense MLP behind its gate, in one type.

    Args:
        site: what is computed.
        gate: [tokens, F].
        inputs: [tokens, K]; None where the site has no up matmul.
        known: weights and biases by name.
        kind: the type to compute in.

    Returns:
        [tokens, N] of that type.
    """
    total: np.ndarray = np.zeros((len(gate), site.output_size), kind)
    for start in range(0, site.neurons, _BLOCK):
        block = slice(start, min(start + _BLOCK, site.neurons))
        hidden: np.ndarray = gate[:, block].astype(kind)
        if site.activation != "none":
            hidden = np.maximum(hidden, kind(0))
        if site.activation == "relu2":
            hidden = hidden * hidden
        if site.up is not None and inputs is not None:
            weight = known[site.up.tensor]
            rows = weight[block] if site.up.is_by_neuron else weight[:, block].T
            factor: np.ndarray = inputs.astype(kind) @ np.asarray(rows).astype(kind).T
            if site.up.bias:
                factor = factor + known[site.up.bias].reshape(-1)[block].astype(kind)
            hidden = hidden * factor
        weight = known[site.down.tensor]
        rows = weight[block] if site.down.is_by_neuron else weight[:, block].T
        total += hidden @ np.asarray(rows).astype(kind)
    return total + known[site.down.bias].reshape(-1).astype(kind) if site.down.bias else total


def _run(
    site: MlpSite, node: onnx.NodeProto, gate: np.ndarray, inputs: np.ndarray | None, known: Mapping[str, np.ndarray]
) -> np.ndarray:
    """The operator on a buffer that holds large numbers before."""
    arrays: list[np.ndarray | None] = [None] * len(OP_INPUTS)
    arrays[INPUT_INDEX["gate"]] = gate
    for weight, name in ((site.down, "down"), (site.up, "up")):
        if weight is None:
            continue
        values = known[weight.tensor]
        arrays[INPUT_INDEX[f"{name}_weight"]] = np.ascontiguousarray(values if weight.is_by_neuron else values.T)
        if weight.bias:
            arrays[INPUT_INDEX[f"{name}_bias"]] = np.ascontiguousarray(known[weight.bias].reshape(-1))
    arrays[INPUT_INDEX["input"]] = gate if inputs is None else inputs
    while arrays[-1] is None:
        arrays.pop()
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    output = np.full((len(gate), site.output_size), _POISON, gate.dtype)
    Op(OP, {n: v.decode() if isinstance(v, bytes) else v for n, v in attributes.items()}).run(
        arrays, [output], threads=2
    )
    return output


def _sample(tokens: int) -> np.ndarray:
    """Which tokens are compared: all, or some that are spread evenly."""
    return np.unique(np.linspace(0, tokens - 1, min(tokens, _MOST_TOKENS)).astype(np.int64))


def _largest(array: np.ndarray) -> float:
    return float(np.abs(array[np.isfinite(array)]).max(initial=0.0))


def _ulps(array: np.ndarray, dtype: np.dtype) -> float:
    return _ULPS * _EPSILON.get(dtype.name, 1.2e-7) * _largest(array)
