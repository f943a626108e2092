# SPDX-License-Identifier: Apache-2.0
"""Whether what zeroes rows after the softmax zeroes those without a key, at every size and for every input.

The operator gives zeros for a row without a key, and can stand for the graph's guard only if the guard's condition is that no
key of the row is allowed by the same mask. That is read from the graph: a reduction over the keys of a mask that lifts to the
same expression. Where it cannot be read, the guard stays in the graph behind the operator.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import replace

import onnx
from onnx import TensorProto

from stof.attention.layouts import uniform
from stof.errors import GuardError, UnsupportedError
from stof.graph.model_graph import GraphIndex
from stof.mask.lift import element, lift
from stof.site import AttentionSite, LiftedMask, MaskTerm, TermKind
from stof.symbolic import Int, Symbolic, integer
from stof.symbolic.algebra.piecewise import cases
from stof.symbolic.algebra.terms import to_real

_DEEPEST = 16
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
        GuardError: when the guard says something else, or what it says cannot be read.
        UnsupportedError: when what makes weights zero again may do so with others than those that the mask forbids.
    """
    if site.zeroed:
        added = [t for t in mask.bias if t.kind is TermKind.ADD and symbolic.value(t.tensor) is not None]
        if added:
            raise UnsupportedError(
                f"weights are made zero once more where {added[0].tensor!r} masks, which stays a bias: the operator gives "
                "what the bias gives where all of a row is masked, the graph zeros"
            )
    if site.pair_guard is not None:
        _check_pairs(symbolic, site, mask, site.pair_guard)
    if site.row_guard is None:
        return
    if mask.bias:
        raise GuardError(
            f"{site.row_guard!r} zeroes rows, of which {mask.bias[0].tensor!r} may leave others no key, too"
        )
    term = _reduced(index, symbolic, site)
    if term is None:
        raise GuardError(f"{site.row_guard!r} zeroes rows by something other than whether a mask has a key in them")
    try:
        found = lift(symbolic, _masked_by(site, term))
    except UnsupportedError as error:
        raise GuardError(f"{site.row_guard!r} zeroes rows by a mask that cannot be lifted: {error}") from error
    if found.bias or not _same(found, mask):
        raise GuardError(
            f"{site.row_guard!r} zeroes the rows without a key in '{found.expression}', the scores have "
            f"'{mask.expression}'"
        )


def _masked_by(site: AttentionSite, term: MaskTerm) -> AttentionSite:
    return replace(site, terms=(term,), row_guard=None, pair_guard=None, unguarded=None)


def _same(one: LiftedMask, other: LiftedMask) -> bool:
    return (one.expression, one.operands, one.tables) == (other.expression, other.operands, other.tables)


def _check_pairs(symbolic: Symbolic, site: AttentionSite, mask: LiftedMask, guard: MaskTerm) -> None:
    """Proves that what makes weights 0 after the softmax does so with the pairs that the mask forbids.

    Raises:
        UnsupportedError: when it may be others.
    """
    value = symbolic.value(guard.tensor)
    if value is None:
        raise UnsupportedError(
            f"{guard.tensor!r} changes the attention weights by more than shapes and inputs: {symbolic.reason(guard.tensor)}"
        )
    if guard.fill is None:
        numbers = [x for _, x in cases(to_real(element(value, site, guard)))]
        if not set(numbers) <= {0.0, 1.0}:
            raise UnsupportedError(f"{guard.tensor!r} multiplies the attention weights by more than 0 and 1")
    found = lift(symbolic, _masked_by(site, replace(guard, fill=-math.inf)))
    if found.bias or mask.by_data:  # an expression that leaves something to a bias is no proof
        tensor = (found.bias or mask.by_data)[0].tensor
        raise UnsupportedError(
            f"{guard.tensor!r} changes the attention weights, and {tensor!r} is data of which no expression says whether "
            "that is the mask of the scores"
        )
    if not _same(found, mask):
        raise UnsupportedError(
            f"{guard.tensor!r} keeps the attention weights of '{found.expression}', the scores are masked by "
            f"'{mask.expression}'; expected the same mask before and after the softmax"
        )


def _reduced(index: GraphIndex, symbolic: Symbolic, site: AttentionSite) -> MaskTerm | None:
    """The mask [.., S, T] of which a site's guard [.., S, 1] says, where true, that no entry of the row is allowed."""
    told = _Told(index, symbolic, site.dims[3]).walk(site.row_guard or "")
    if told is None:
        return None
    tensor, kept = told
    return MaskTerm(TermKind.KEEP if kept else TermKind.DROP, tensor)


class _Told:
    """Walks from a condition back to the reduction, with what a row of all zeros and one of some ones give there."""

    def __init__(self, index: GraphIndex, symbolic: Symbolic, keys: Int) -> None:
        self.index = index
        self.symbolic = symbolic
        self.keys = keys

    def walk(self, tensor: str) -> tuple[str, bool] | None:
        """The mask, and whether its ones are what is allowed."""
        # Whether the walked tensor is true where the row is to be zeroed, and of which numbers below it that is said.
        tells: Callable[[float], bool] = bool
        for _ in range(_DEEPEST):
            node = self.index.producer(tensor)
            if node is None or node.domain not in ("", "ai.onnx"):
                return None
            if node.op_type == "Not":
                tells = _after(_not, tells)
            elif node.op_type in _COMPARISONS:
                limit = uniform(self.symbolic, node.input[1])
                if limit is None:
                    return None
                tells = _after(_compared(_COMPARISONS[node.op_type], limit), tells)
            elif node.op_type in ("ReduceSum", "ReduceMax", "ReduceMin"):
                return self._reduction(node, tells)
            elif node.op_type == "Cast":
                to = self.symbolic.dtype(node.output[0])
                if to == TensorProto.BOOL:
                    tells = _after(bool, tells)
                elif to not in _COUNTING:  # 256 keys are none in 8 bits
                    return None
            else:
                return None
            tensor = node.input[0]
        return None

    def _reduction(self, node: onnx.NodeProto, tells: Callable[[float], bool]) -> tuple[str, bool] | None:
        mask = self._mask(node.input[0])
        if mask is None or not self._over_keys(node):
            return None
        if node.op_type == "ReduceMin":  # zeroes the row when all of it is dropped
            return (mask, False) if tells(1.0) and not tells(0.0) else None
        most = 1 if node.op_type == "ReduceMax" else 2**24
        # A threshold tells all counts from 0 when it tells 1 and the largest one: comparisons are monotonous, but for Equal.
        counts = [1.0, 2.0, float(most)] if most > 1 else [1.0]
        return (mask, True) if tells(0.0) and not any(tells(n) for n in counts) else None

    def _over_keys(self, node: onnx.NodeProto) -> bool:
        """Whether only the last axis is reduced, and stays as one of size 1; of an axis of size 1, it is all one.

        An axis that is neither that nor as long as the keys tells of some of them.
        """
        shape, reduced = self.symbolic.shape(node.input[0]), self.symbolic.shape(node.output[0])
        one = integer(1)
        return bool(shape) and shape is not None and shape[-1] in (one, self.keys) and reduced == (*shape[:-1], one)

    def _mask(self, tensor: str) -> str | None:
        """The boolean tensor whose ones are added or compared."""
        for _ in range(_DEEPEST):
            if self.symbolic.dtype(tensor) == TensorProto.BOOL:
                return tensor
            node = self.index.producer(tensor)
            if node is None or node.op_type != "Cast":
                return None
            tensor = node.input[0]
        return None


def _after(first: Callable[[float], bool], then: Callable[[float], bool]) -> Callable[[float], bool]:
    return lambda x: then(float(first(x)))


def _not(x: float) -> bool:
    return not x


def _compared(compare: Callable[[float, float], bool], limit: float) -> Callable[[float], bool]:
    return lambda x: compare(x, limit)
