# SPDX-License-Identifier: Apache-2.0
"""Proofs that a row guard zeroes exactly the fully masked rows, at every size and for every input.

The operator gives zeros for a fully masked row. It can replace the graph's guard only if the guard's condition is that the same
mask allows no key of the row. The proof reads the graph: a reduction over the keys of a mask that lifts to the same expression.
Without a proof the guard stays in the graph behind the operator.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import replace

import onnx
from onnx import TensorProto

from stof.errors import GuardError, UnsupportedError
from stof.graph.index import GraphIndex, is_standard
from stof.mask.lift import element_of_pair, lift
from stof.mask.site import AttentionSite, LiftedMask, MaskTerm, TermKind
from stof.symbolic import Int, Symbolic, integer
from stof.symbolic.algebra.piecewise import split_cases
from stof.symbolic.algebra.terms import to_real

_MAX_STEPS = 16
_COUNTING = frozenset({TensorProto.INT32, TensorProto.INT64, TensorProto.FLOAT, TensorProto.DOUBLE})
_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "Less": operator.lt,
    "LessOrEqual": operator.le,
    "Greater": operator.gt,
    "GreaterOrEqual": operator.ge,
    "Equal": operator.eq,
}


def check_guard(index: GraphIndex, symbolic: Symbolic, site: AttentionSite, mask: LiftedMask) -> None:
    """Proves that a site's row guard zeroes the rows in which its lifted mask allows no key.

    Raises:
        GuardError: when the guard has another condition, or one that cannot be read.
        UnsupportedError: when weights are zeroed that the mask may not forbid.
    """
    if site.zeroed:
        added = [t for t in mask.bias if t.kind is TermKind.ADD and symbolic.value(t.tensor) is not None]
        if added:
            raise UnsupportedError(
                f"weights are made zero once more where {added[0].tensor!r} masks, which stays a bias: the operator gives "
                "what the bias gives where all of a row is masked, the graph zeros"
            )
    if site.pair_guard is not None:
        _check_pair_guard(symbolic, site, mask, site.pair_guard)
    if site.row_guard is None:
        return
    if mask.bias:
        raise GuardError(
            f"{site.row_guard!r} zeroes rows, of which {mask.bias[0].tensor!r} may leave others no key, too"
        )
    term = _read_guard(index, symbolic, site)
    if term is None:
        raise GuardError(f"{site.row_guard!r} zeroes rows by something other than whether a mask has a key in them")
    try:
        guard_mask = lift(symbolic, _with_only_term(site, term))
    except UnsupportedError as error:
        raise GuardError(f"{site.row_guard!r} zeroes rows by a mask that cannot be lifted: {error}") from error
    if guard_mask.bias or not _are_same(guard_mask, mask):
        raise GuardError(
            f"{site.row_guard!r} zeroes the rows without a key in '{guard_mask.expression}', the scores have "
            f"'{mask.expression}'"
        )


def _with_only_term(site: AttentionSite, term: MaskTerm) -> AttentionSite:
    return replace(site, terms=(term,), row_guard=None, pair_guard=None, unguarded=None)


def _are_same(one: LiftedMask, other: LiftedMask) -> bool:
    """Whether two masks allow the same pairs; tables that index expressions of relative terms read do not count."""
    tables = [[t for t in m.tables if t[0] in m.expression.tables] for m in (one, other)]
    return (one.expression, one.operands, tables[0]) == (other.expression, other.operands, tables[1])


def _check_pair_guard(symbolic: Symbolic, site: AttentionSite, mask: LiftedMask, guard: MaskTerm) -> None:
    """Proves that the pair guard zeroes the weights of exactly the pairs that the mask forbids.

    Raises:
        UnsupportedError: when it may zero others.
    """
    value = symbolic.value(guard.tensor)
    if value is None:
        raise UnsupportedError(
            f"{guard.tensor!r} changes the attention weights by more than shapes and inputs: {symbolic.reason(guard.tensor)}"
        )
    if guard.fill is None:
        numbers = [x for _, x in split_cases(to_real(element_of_pair(value, site, guard)))]
        if not set(numbers) <= {0.0, 1.0}:
            raise UnsupportedError(f"{guard.tensor!r} multiplies the attention weights by more than 0 and 1")
    guard_mask = lift(symbolic, _with_only_term(site, replace(guard, fill=-math.inf)))
    if guard_mask.bias or mask.by_data:  # an expression that leaves something to a bias is no proof
        tensor = (guard_mask.bias or mask.by_data)[0].tensor
        raise UnsupportedError(
            f"{guard.tensor!r} changes the attention weights, and {tensor!r} is data of which no expression says whether "
            "that is the mask of the scores"
        )
    if not _are_same(guard_mask, mask):
        raise UnsupportedError(
            f"{guard.tensor!r} keeps the attention weights of '{guard_mask.expression}', the scores are masked by "
            f"'{mask.expression}'; expected the same mask before and after the softmax"
        )


def _read_guard(index: GraphIndex, symbolic: Symbolic, site: AttentionSite) -> MaskTerm | None:
    """The mask [.., S, T] that allows no key of the rows in which a site's guard [.., S, 1] is true; None where it is unknown."""
    reading = _GuardReader(index, symbolic, site.dims[3]).read(site.row_guard or "")
    if reading is None:
        return None
    tensor, allows = reading
    return MaskTerm(TermKind.KEEP if allows else TermKind.DROP, tensor)


class _GuardReader:
    """Walks from a guard back to a reduction over keys, and evaluates the way between for the numbers that it may give."""

    def __init__(self, index: GraphIndex, symbolic: Symbolic, keys: Int) -> None:
        self.index = index
        self.symbolic = symbolic
        self.keys = keys

    def read(self, tensor: str) -> tuple[str, bool] | None:
        """The reduced mask, and whether its ones allow; None where the guard is no such reduction."""
        # Whether the row is zeroed, as a function of the tensor that the walk has reached.
        zeroes: Callable[[float], bool] = bool
        for _ in range(_MAX_STEPS):
            node = self.index.producer(tensor)
            if node is None or not is_standard(node):
                return None
            if node.op_type == "Not":
                zeroes = _compose(_not, zeroes)
            elif node.op_type in _COMPARISONS:
                limit = self.symbolic.uniform(node.input[1])
                if limit is None:
                    return None
                zeroes = _compose(_compare_with(_COMPARISONS[node.op_type], limit), zeroes)
            elif node.op_type in ("ReduceSum", "ReduceMax", "ReduceMin"):
                return self._read_reduction(node, zeroes)
            elif node.op_type == "Cast":
                to = self.symbolic.dtype(node.output[0])
                if to == TensorProto.BOOL:
                    zeroes = _compose(bool, zeroes)
                elif to not in _COUNTING:  # 256 keys are none in 8 bits
                    return None
            else:
                return None
            tensor = node.input[0]
        return None

    def _read_reduction(self, node: onnx.NodeProto, zeroes: Callable[[float], bool]) -> tuple[str, bool] | None:
        mask = self._find_mask(node.input[0])
        if mask is None or not self._is_over_keys(node):
            return None
        if node.op_type == "ReduceMin":  # zeroes the row when all of it is dropped
            return (mask, False) if zeroes(1.0) and not zeroes(0.0) else None
        most = 1 if node.op_type == "ReduceMax" else 2**24
        # Comparisons other than Equal are monotonous: 1 and the largest count stand for all counts above 0.
        counts = [1.0, 2.0, float(most)] if most > 1 else [1.0]
        return (mask, True) if zeroes(0.0) and not any(zeroes(n) for n in counts) else None

    def _is_over_keys(self, node: onnx.NodeProto) -> bool:
        """Whether the last axis alone is reduced, all keys of it or one for all, and stays as one of size 1.

        An axis of another length does not cover every key.
        """
        shape, reduced = self.symbolic.shape(node.input[0]), self.symbolic.shape(node.output[0])
        one = integer(1)
        return bool(shape) and shape is not None and shape[-1] in (one, self.keys) and reduced == (*shape[:-1], one)

    def _find_mask(self, tensor: str) -> str | None:
        """The boolean tensor whose ones are added or compared."""
        for _ in range(_MAX_STEPS):
            if self.symbolic.dtype(tensor) == TensorProto.BOOL:
                return tensor
            node = self.index.producer(tensor)
            if node is None or node.op_type != "Cast":
                return None
            tensor = node.input[0]
        return None


def _compose(first: Callable[[float], bool], then: Callable[[float], bool]) -> Callable[[float], bool]:
    return lambda x: then(float(first(x)))


def _not(x: float) -> bool:
    return not x


def _compare_with(compare: Callable[[float, float], bool], limit: float) -> Callable[[float], bool]:
    return lambda x: compare(x, limit)
