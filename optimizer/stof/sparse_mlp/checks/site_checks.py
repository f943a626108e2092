# SPDX-License-Identifier: Apache-2.0
"""MLP sites before verification: the operator on captured activations beside the MLP in fp64."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper

from stof.arguments.precisions import RoundedOperands, precision_of
from stof.graph.node_fields import plain_attributes_of
from stof.runtime.library import LibraryError, Op, Tensor, call, tensor_of
from stof.sparse_mlp.checks.oracle import MlpWeights, bound_rounding, compute_gate, compute_mlp
from stof.sparse_mlp.checks.rounded_tokens import round_tokens
from stof.sparse_mlp.checks.selected_neurons import select_neurons
from stof.sparse_mlp.constants import Constants
from stof.sparse_mlp.emit import emit_mlps, without_selection
from stof.sparse_mlp.site import OP, OP_INPUTS, MlpSite
from stof.symbolic import Symbolic
from stof.verification.array_distance import largest_number, relative_rms, ulp_of_largest
from stof.verification.compare import describe_nonfinite
from stof.verification.perturb import Noisy
from stof.verification.result import Comparison, Coverage
from stof.verification.site_checks import SiteChecks

_FACTOR = 2.0  # operator error ≤ 2 × that of the dense MLP in fp32 + 4 ulp
_ORIGINAL_FACTOR = 16.0  # the runtime's kernels sum in other orders
_ULPS = 4
MOST_TOKENS = 48  # that are compared
_MOST_PREDICTED = 12  # likewise, where each token has thresholds of its own
_QUANTIZED_SHARE = 0.05  # of the largest output: further off, quantized nodes compute something else
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
        inputs = {i.name for i in self.working.graph.input}
        read = [t for s in self.mlp_sites for t in (s.gate, s.tokens_input, s.output) if t]
        return [t for t in dict.fromkeys(read) if t not in inputs]

    def outputs(self) -> dict[str, list[str]]:
        return {s.name: [s.output] for s in self.mlp_sites}

    def emit(self, sites: Sequence[str]) -> onnx.ModelProto:
        some = [s for s in self.mlp_sites if s.name in set(sites)]
        return without_selection(emit_mlps(self.working, some, self._folder))

    def rounding_variants(self, working: onnx.ModelProto, dtype: Callable[[str], int]) -> list[onnx.ModelProto]:
        rounded = round_tokens(working, self.mlp_sites, dtype(self.mlp_sites[0].output))
        return [] if rounded is None else [rounded]

    def rounding_errors(self, captured: Mapping[str, np.ndarray]) -> dict[str, Noisy]:
        errors = {}
        for site in self.mlp_sites:
            array = captured.get(site.output)
            largest = 1.0 if array is None else largest_number(array)
            errors[site.output] = Noisy(site.dtype, site.output_size, largest)
        return errors

    def compare(self, emitted: onnx.ModelProto, captured: Mapping[str, np.ndarray]) -> Iterator[Comparison]:
        nodes = {n.output[0]: n for n in emitted.graph.node if n.output and n.op_type == OP}
        stored = Constants(emitted.graph, self._folder)
        original = Constants(self.working.graph, self._folder)
        for site in self.mlp_sites:
            if site.gate in captured and (not site.tokens_input or site.tokens_input in captured):
                yield _compare_site(site, nodes[site.output], original, stored, captured)


@np.errstate(over="ignore", invalid="ignore")  # models may hold infinities and NaN: those of both sides are compared
def _compare_site(
    site: MlpSite, node: onnx.NodeProto, original: Constants, stored: Constants, captured: Mapping[str, np.ndarray]
) -> Comparison:
    what = f"site {site.name!r}"
    dtype = np.dtype(helper.tensor_dtype_to_np_dtype(site.dtype))
    gate = captured[site.gate].reshape(-1, site.neurons)
    tokens = _sample(len(gate), MOST_TOKENS if site.selector is None else _MOST_PREDICTED)
    gate_rows = gate[tokens]
    tokens_in = captured[site.tokens_input].reshape(len(gate), -1)[tokens] if site.tokens_input else None
    weights = MlpWeights.of(site, original)
    rounding = 0.0
    if (computed := captured.get(site.output)) is not None:
        computed = computed.reshape(-1, site.output_size)[tokens]
        away, budget = _distance_of_original(_Expected(site, gate_rows, tokens_in, weights), computed)
        if site.quantization is not None:
            rounding = away  # where ONNX Runtime quantizes tokens, too, its own error is what is allowed
        if away > budget:
            detail = "the replaced nodes compute something else than the operator's contract"
            return Comparison(what, away, budget, False, site.name, detail)
    rows = np.ascontiguousarray(gate_rows).astype(dtype)
    inputs = None if tokens_in is None else np.ascontiguousarray(tokens_in).astype(dtype)
    arrays = {
        n: stored.read(t) for n, t in zip(OP_INPUTS, node.input, strict=False) if t and n not in ("input", "gate")
    }
    expected = _Expected(site, rows, inputs, weights)
    thresholds = None
    if site.selector is not None:
        chosen = select_neurons(site, rows, inputs)
        expected, thresholds = (
            replace(expected, active=chosen.active),
            chosen.thresholds(_read_thresholds(site, arrays)),
        )
    exact = wanted = expected.output(np.float64)
    if (precision := precision_of(plain_attributes_of(node))) is not None:
        expected = replace(expected, weights=weights.rounded(precision))
        wanted = expected.output(np.float64)
    try:
        result = _run(site, node, rows, inputs, arrays, thresholds).astype(np.float64)
    except LibraryError as error:
        return Comparison(what, np.inf, 0.0, False, site.name, str(error))
    odd = np.isfinite(result) != np.isfinite(exact)
    if odd.any():
        return Comparison(what, np.inf, 0.0, False, site.name, describe_nonfinite(odd, result, exact))
    if site.rounds_tokens:
        # Verification runs have weights as they are stored, of which ONNX Runtime's kernel rounds no tokens.
        rounding = max(rounding, largest_number(expected.output(np.float64, rounds_tokens=True) - exact))
    rounded = expected.output(np.float32).astype(dtype).astype(np.float64)
    budget = _FACTOR * max(largest_number(rounded - wanted), rounding) + _ULPS * ulp_of_largest(wanted, dtype)
    left_out = len(gate) * site.output_size - result.size
    coverage = Coverage(result.size, sampled_rows=len(tokens), all_rows=len(gate), left_out=left_out)
    away, rms = largest_number(result - wanted), None
    if precision is not None:
        # Tokens with thresholds run one after the other, and are not rounded.
        limit = budget if thresholds is None else np.inf
        away, rms = _check_rounded(replace(expected, factor_type=precision), result, exact, away, limit)
    return Comparison(what, away, budget, away <= budget, site.name, coverage=coverage, relative_rms=rms)


def _check_rounded(
    expected: _Expected, result: np.ndarray, exact: np.ndarray, away: float, limit: float
) -> tuple[float, float | None]:
    """How far a result is from the nearer one of two definitions, and its relative RMS error.

    Args:
        expected: the definition that rounds tokens and hidden values as well as weights.
        result: of the operator, in fp64.
        exact: without any rounding.
        away: how far the result is from the definition that rounds weights alone.
        limit: the distance up to which it need not be near the other one.
    """
    return expected.distance(result) if away > limit else away, expected.larger_error(result, exact)


def _distance_of_original(expected: _Expected, computed: np.ndarray) -> tuple[float, float]:
    """How far what the original computes is from the contract, and how far it may be.

    A half-precision model runs as its fp32 twin: its tensors are compared before they are rounded.
    """
    exact, single = (expected.output(kind) for kind in (np.float64, np.float32))
    away = largest_number(computed.astype(np.float64) - exact)
    budget = _ORIGINAL_FACTOR * (largest_number(single - exact) + _ULPS * ulp_of_largest(exact, computed.dtype))
    if expected.site.quantization is not None:
        budget = max(budget, _QUANTIZED_SHARE * largest_number(exact))
    return away, budget


@dataclass(frozen=True, eq=False)
class _Expected:
    """What a site's operator is to give for some tokens.

    Attributes:
        site: the site.
        gate: [tokens, F]; computed from ``inputs`` where the operator does.
        inputs: [tokens, K], or None.
        weights: of the site.
        active: bool [tokens, F], the neurons that count; None: all.
        factor_type: the type that tokens and hidden values are rounded to; None: they are not.
    """

    site: MlpSite
    gate: np.ndarray
    inputs: np.ndarray | None
    weights: MlpWeights
    active: np.ndarray | None = None
    factor_type: RoundedOperands | None = None

    def output(self, kind: type[np.floating[Any]], *, rounds_tokens: bool = False) -> np.ndarray:
        """The output [tokens, N] in one type; :func:`compute_mlp` has ``rounds_tokens``."""
        gate = self.gate
        if self.weights.gate is not None and self.inputs is not None:
            gate = compute_gate(
                self.site, self.inputs, self.weights, kind, rounds_tokens=rounds_tokens, factor_type=self.factor_type
            )
        inputs = self.inputs if self.site.up is not None else None
        return compute_mlp(
            self.site,
            gate,
            inputs,
            self.weights,
            kind,
            rounds_tokens=rounds_tokens,
            factor_type=self.factor_type,
            active=self.active,
        )

    def larger_error(self, result: np.ndarray, exact: np.ndarray) -> float | None:
        """The larger relative RMS error against ``exact``: the result's, or this definition's; None where ``exact`` is 0.

        Many tokens are rounded on CPUs with kernels for it. Their error counts on every machine.
        """
        errors = (relative_rms(result, exact), relative_rms(self.output(np.float64), exact))
        return max((x for x in errors if x is not None), default=None)

    def distance(self, result: np.ndarray) -> float:
        """How far a result is from the definition with rounded factors, less :func:`bound_rounding`; every neuron counts."""
        assert self.factor_type is not None
        inputs = self.inputs if self.site.up is not None else None
        bound = bound_rounding(self.site, self.gate, inputs, self.weights, self.factor_type)
        return largest_number(np.maximum(np.abs(result - self.output(np.float64)) - bound, 0.0))


def _run(
    site: MlpSite,
    node: onnx.NodeProto,
    gate: np.ndarray,
    inputs: np.ndarray | None,
    constants: Mapping[str, np.ndarray],
    thresholds: np.ndarray | None,
) -> np.ndarray:
    """The node's operator on its own constants, into a buffer that holds large numbers before.

    With thresholds [tokens, F] of each token, tokens are run one after the other.
    """
    arrays = {n: np.ascontiguousarray(a) for n, a in constants.items()}
    if site.order is not None:
        gate = np.ascontiguousarray(gate[:, site.order.indices])
        thresholds = None if thresholds is None else np.ascontiguousarray(thresholds[:, site.order.indices])
    output = np.full((len(gate), site.output_size), _POISON, gate.dtype)
    op = Op(OP, plain_attributes_of(node))
    if precision_of(plain_attributes_of(node)) is not None:
        # Weights are rounded before the operator runs, as by runtimes, which give it constants then.
        known = [tensor_of(arrays[n]) if n in arrays else Tensor() for n in OP_INPUTS[: len(node.input)]]
        call("stof_op_prepare", op.handle, (Tensor * len(known))(*known), ctypes.c_int(len(known)))
    every = [slice(0, len(gate))] if thresholds is None else [slice(t, t + 1) for t in range(len(gate))]
    for rows in every:
        operands = {**arrays, "input": (gate if inputs is None else inputs)[rows]}
        operands |= {} if site.selection == "predictor" else {"gate": gate[rows]}
        operands |= {} if thresholds is None else {"threshold": thresholds[rows.start]}
        op.run([operands.get(name) for name in OP_INPUTS[: len(node.input)]], [output[rows]], threads=2)
    return output


def _read_thresholds(site: MlpSite, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """The node's thresholds, [1] or [F] with the neurons as they are in the model before."""
    thresholds = arrays["threshold"]
    return thresholds if site.order is None or thresholds.size == 1 else thresholds[np.argsort(site.order.indices)]


def _sample(tokens: int, most: int) -> np.ndarray:
    """Which tokens are compared: all, or some that are spread evenly."""
    return np.unique(np.linspace(0, tokens - 1, min(tokens, most)).astype(np.int64))
