# SPDX-License-Identifier: Apache-2.0
"""Compares a chain's description with the operators that it replaces, on small random inputs, before it is emitted."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx

from stof.errors import ModelError, UnsupportedError
from stof.execution.session_process import create_session, has_onnxruntime
from stof.execution.session_worker import SessionSpec
from stof.execution.upcast import HALF, holds, widen
from stof.fusion.description.chain_description import ChainDescription
from stof.fusion.description.evaluate import evaluate_chain
from stof.fusion.element_ops import kind_of_node
from stof.fusion.function_body import branch_model, make_branch
from stof.fusion.gemm import FusedGemm
from stof.fusion.translate import FusedChain
from stof.fusion.work_bound import check_any_run
from stof.symbolic import Int, Symbolic
from stof.symbolic.algebra.sizes import evaluate
from stof.symbolic.algebra.terms import subterms

_SIZES = (3, 2, 5, 4, 7, 6)  # of symbolic dimensions, in order of appearance
_SCALES = (1, 16, 64)  # of the sizes, tried until no dimension is empty: windows and strides may leave nothing
_ROUNDS = 2  # the second one has other sizes
_TOLERANCE = 3e-5  # of the largest output value; fp32 beside fp64
_FP16_GELU_TOLERANCE = 1e-4  # where GELU's constants may have been rounded to fp16 (gelu.py)
_MOST_RANDOM = 262_147  # a prime above the number of rows of 128 and more in the largest input
_LARGEST = 1 << 25  # elements of an input
_MOST_COMPUTED = 1 << 27  # elements computed, which broadcasting may multiply
_REDUCIBLE = 1 << 20  # elements of an input from which on fewer rows are tried
_FEW_ROWS = (3, 5, 7)  # sizes of the first axes then
_SECONDS = 60.0  # that a run may take; it takes a few milliseconds
_NOT_FINITE = "output {} of the description is inf or NaN where its operators are not"
Shapes = list[list[int]]


def check_chain(chain: FusedChain, nodes: Sequence[onnx.NodeProto], symbolic: Symbolic, opset: int) -> None:
    """Runs the replaced operators in ONNX Runtime, or in onnx's reference evaluator, and the description in fp64.

    Raises:
        UnsupportedError: when the results differ, or one of the two cannot be run.
    """
    if not isinstance(chain, FusedGemm):  # an epilogue writes both of its axes
        check_any_run(chain.description)
    branch = make_branch(chain, nodes, symbolic, opset, "check")
    dtypes = [symbolic.dtype(n) for n in chain.inputs]
    model = branch_model(chain, branch, dtypes, opset)
    has_half = holds(model, HALF)  # also within, between casts
    if has_half:
        model = widen(model)
    description = chain.description.widened(HALF)
    has_gelu = bool(description.functions & {"gelu", "gelu_tanh"})
    tolerance = _FP16_GELU_TOLERANCE if has_half and has_gelu else _TOLERANCE
    check = _Check(chain, description, [v.name for v in model.graph.input], _runner(model), tolerance)
    # A movement operator may cut rows off at a constant; with fewer rows it would cut nothing.
    only_by_rows = all(kind_of_node(nodes[p]) != "moving" for p in chain.region.node_indices)
    tried: list[Shapes] = []
    for i in range(_ROUNDS):
        shapes = _shapes(chain, symbolic, i)
        if shapes in tried:  # all sizes are static
            break
        tried.append(shapes)
        if not (only_by_rows and check.passes_small(shapes, i)):
            check.compare(shapes, i)


@dataclass(frozen=True)
class _Check:
    """A chain and a runner of the operators that it replaces."""

    chain: FusedChain
    description: ChainDescription  # with fp32 in place of half precision, as the operators run
    names: Sequence[str]  # of the inputs
    run: Callable[[Mapping[str, np.ndarray]], list[np.ndarray]]
    tolerance: float = _TOLERANCE

    def passes_small(self, shapes: Shapes, seed: int) -> bool:
        """Whether few rows pass in place of the many of static sizes, which is tried where nothing depends on their number."""
        if max(map(_count, shapes)) <= _REDUCIBLE:
            return False
        fewer = _shrink_rows(shapes)
        if not fewer or len(set(fewer.values())) < len(fewer):
            return False
        rows = [n for n, size in self.description.axes if size.input >= 0 or size.number in fewer]
        # Where an axis is more than an index by itself, the value may depend on the number of rows.
        if not self.description.has_only_plain_indices(rows):
            return False
        try:
            small = replace(self, description=self.description.with_sizes(fewer))
            small.compare([[fewer.get(d, d) for d in s] for s in shapes], seed)
        except UnsupportedError:
            return False
        return True

    def compare(self, shapes: Shapes, seed: int) -> None:
        """Compares on random inputs of these shapes.

        Raises:
            UnsupportedError: when the results differ, or one of the two cannot be run.
        """
        if any(_count(s) > _LARGEST for s in shapes):
            raise UnsupportedError(
                f"it reads more than {_LARGEST} elements of a tensor of fixed size: too large to check"
            )
        if _count_elements(self.chain, self.description, shapes) > _MOST_COMPUTED:
            raise UnsupportedError(
                f"it computes more than {_MOST_COMPUTED} elements of fixed sizes: too large to check"
            )
        rng = np.random.default_rng(seed)
        inputs = [_random_array(rng, s) for s in shapes]
        try:
            outputs = self.run(dict(zip(self.names, inputs, strict=True)))
            exact = self._evaluate(inputs)
        except ModelError as error:
            raise UnsupportedError(f"its description cannot be evaluated: {error}") from error
        except Exception as error:  # whatever the runtime raises
            raise UnsupportedError(f"its operators cannot be run by themselves: {error}") from error
        for number, (output, wanted) in enumerate(zip(outputs, exact, strict=True)):
            compare_output(number, output, wanted, self.tolerance)

    def _evaluate(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        if isinstance(self.chain, FusedGemm):
            return evaluate_gemm(self.chain, self.description, inputs)
        return evaluate_chain(self.description, inputs)


def _count(shape: Sequence[int]) -> int:
    return math.prod(shape)


def _count_elements(chain: FusedChain, description: ChainDescription, shapes: Shapes) -> int:
    """How many elements a chain computes in the space of its axes, or a GEMM as its output."""
    if isinstance(chain, FusedGemm):
        operand, weight = shapes[:2]
        return math.prod(operand[:-1]) * weight[-1]
    sizes = [a.number if a.input < 0 else shapes[a.input][a.dim] // a.number for _, a in description.axes]
    return math.prod(sizes)


def _shrink_rows(shapes: Shapes) -> dict[int, int]:
    """Small sizes in place of the row counts: of all axes but the last, of the inputs of the highest rank.

    A size stays where a last axis or an input of lower rank has it, too: it counts columns, or weights.
    """
    rank = max(map(len, shapes))
    kept = {d for s in shapes for d in (s[-1:] if len(s) == rank else s)}
    fewer: dict[int, int] = {}
    for shape in shapes:
        for size, few in zip(shape[:-1] if len(shape) == rank else (), _FEW_ROWS, strict=False):
            if size > few and size not in kept:
                fewer[size] = few
    return fewer


def _random_array(rng: np.random.Generator, shape: Sequence[int]) -> np.ndarray:
    """Standard normal numbers. A long tensor repeats a prime number of them, so that no two rows of 128 and more are equal."""
    return np.resize(rng.standard_normal(min(_count(shape), _MOST_RANDOM), np.float32), shape)


def evaluate_gemm(chain: FusedGemm, epilogue: ChainDescription, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """What StofGemm computes, in fp64."""
    operand, *right = (x.astype(np.float64) for x in inputs[: chain.operand_count])
    rows = operand.reshape(-1, operand.shape[-1])
    weights = np.split(right[0], 2, axis=-1) if chain.pair == 1 else right
    outputs = [rows @ w for w in weights]
    count, width = outputs[0].shape
    shapes = {"mn": (count, width), "n": (width,), "m": (count,), "": ()}
    further = [x.reshape(shapes[how]) for x, how in zip(inputs[chain.operand_count :], chain.reads, strict=True)]
    (result,) = evaluate_chain(epilogue, [*outputs, *further])
    return [result.reshape((*operand.shape[:-1], width))]


def compare_output(number: int, output: np.ndarray, exact: np.ndarray, tolerance: float = _TOLERANCE) -> None:
    """Refuses an output of a description that differs from its operators'.

    Raises:
        UnsupportedError: with the difference.
    """
    if output.shape != exact.shape:
        raise UnsupportedError(
            f"output {number} of the description has shape {exact.shape}, of its operators {output.shape}"
        )
    good = np.isfinite(exact)
    if not good.all():  # rare, and slower than comparing all of them
        if not np.array_equal(output[~good].astype(np.float64), exact[~good], equal_nan=True):
            raise UnsupportedError(_NOT_FINITE.format(number))
        output, exact = output[good], exact[good]
    if not np.isfinite(output).all():
        raise UnsupportedError(_NOT_FINITE.format(number))
    difference = float(np.abs(output.astype(np.float64) - exact).max(initial=0.0))
    allowed = tolerance * max(1.0, float(np.abs(exact).max(initial=0.0)))
    if difference > allowed:
        raise UnsupportedError(
            f"output {number} of the description differs from its operators by {difference:.2e}, allowed {allowed:.2e}"
        )


def size_names(shapes: Sequence[Sequence[Int]]) -> list[str]:
    """The names of symbolic dimensions, in order of appearance."""
    names: dict[str, None] = {}
    for shape in shapes:
        for d in shape:
            names.update((str(a.args[0]), None) for a in subterms(d) if a.kind == "size")
    return list(names)


def _shapes(chain: FusedChain, symbolic: Symbolic, round_number: int) -> Shapes:
    symbolic_shapes = [symbolic.shape(n) for n in chain.inputs]
    assert all(s is not None for s in symbolic_shapes)
    shapes = [[symbolic.canonicalize(d) for d in s] for s in symbolic_shapes if s is not None]
    names = size_names(shapes)
    for scale in _SCALES:
        sizes = {n: scale * _SIZES[(i + round_number) % len(_SIZES)] for i, n in enumerate(names)}
        numbers = [[evaluate(d, sizes) for d in s] for s in shapes]
        if all(d > 0 for s in numbers for d in s):
            break
    return numbers


def _runner(model: onnx.ModelProto) -> Callable[[Mapping[str, np.ndarray]], list[np.ndarray]]:
    spec = SessionSpec(
        model.SerializeToString(), optimizations="none", log_severity=4, threads=1, reference=not has_onnxruntime()
    )
    session = create_session(spec, _SECONDS)

    def run(feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        return session.run(None, feeds, _SECONDS)

    return run
