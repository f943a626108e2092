# SPDX-License-Identifier: Apache-2.0
"""Run-time operands: the tensors of a graph that a mask may read, as the vectors that the operator takes."""

from __future__ import annotations

from collections.abc import Sequence

from onnx import TensorProto

from stof.errors import UnsupportedError
from stof.mask.from_condition import B
from stof.mask.site import OperandView, RuntimeOperand
from stof.symbolic import Int, Symbolic
from stof.symbolic.algebra.terms import Atom, subterms

# Element types of run-time operands (docs/reference/operators.md).
_NUMBER_TYPES = frozenset({TensorProto.INT32, TensorProto.INT64})
_PAD_TYPES = _NUMBER_TYPES | {TensorProto.BOOL, TensorProto.UINT8, TensorProto.FLOAT, TensorProto.FLOAT16}


def bind_operand(
    symbolic: Symbolic,
    operands: dict[str, RuntimeOperand],
    tensor: str,
    indices: Sequence[Int],
    boolean: bool,
    keys: Int,
) -> tuple[str, int | None]:
    """The role of a tensor that a mask reads, and its axis of positions, None where it has one number for each batch.

    ``operands`` are those bound so far, by role; the new one is added. ``boolean``: its elements are compared with 0.
    ``keys`` is T, the length that vectors by keys must have.

    Raises:
        UnsupportedError: for a tensor that is no operand of the operator, or a second one of its role.
    """
    shape = symbolic.shape(tensor)
    dtype = symbolic.dtype(tensor)
    if dtype not in (_PAD_TYPES if boolean else _NUMBER_TYPES):
        kind, wanted = TensorProto.DataType.Name(dtype), "padding of bool, uint8, int32, int64, fp32 or fp16"
        raise UnsupportedError(
            f"the mask reads {tensor!r} of type {kind}, of which the operator takes "
            f"{wanted if boolean else 'numbers of int32 or int64'} only; cast it before"
        )
    axes = [a for a, d in enumerate(shape or ()) if symbolic.canonicalize(d).constant != 1]
    others = [a for a in axes if indices[a] != B]
    axis = others[0] if others else None
    # No vector of the operator has an axis of heads, for instance.
    is_foreign = axis is not None and not _variables(indices[axis]) <= {"q", "k"}
    view = None if shape is None or len(others) > 1 or is_foreign else _view(axes, axis, len(shape))
    if view is None:
        words = ", ".join(str(d.constant or "?") for d in shape or ())
        at = ", ".join(_index_text(i) for i in indices)
        raise UnsupportedError(
            f"the mask reads {tensor!r} of shape [{words}] at ({at}); only vectors with one "
            "axis of positions, [B, length] or [length], and numbers for each batch, [B] or one, can be operands"
        )
    position = None if axis is None or shape is None or boolean else _fixed_position(indices[axis], shape[axis])
    axis = axis if position is None else None
    if axis is None:
        role = "lengths"
    else:
        role = _role_of_vector(operands, RuntimeOperand("pad", tensor, view), indices[axis], boolean)
        if role != "segment_q" and shape is not None and _differ(shape[axis], keys):
            raise UnsupportedError(f"the mask reads {tensor!r}, which has not one element for each key")
    operand = RuntimeOperand(role, tensor, view, position)
    if operands.setdefault(role, operand) != operand:
        raise UnsupportedError(f"the mask reads {operands[role].tensor!r} and {tensor!r} as {role}; only one can be")
    return role, axis


def _fixed_position(index: Int, size: Int) -> int | None:
    """The one position at which a vector is read, counted from its end where that is negative; None where there are several."""
    if index.constant is not None:
        return index.constant
    from_end = (index - size).constant
    return from_end if from_end is not None and from_end < 0 else None


def _role_of_vector(operands: dict[str, RuntimeOperand], pad: RuntimeOperand, index: Int, boolean: bool) -> str:
    """The role of a vector of positions. Only one by keys is padding; other conditions are numbers that are not 0."""
    reads_query = "q" in _variables(index)
    if boolean and (operands.get("pad") == pad or ("pad" not in operands and not reads_query)):
        return "pad"
    return "segment_q" if reads_query else "segment_k"


def _differ(one: Int, other: Int) -> bool:
    """Whether two sizes are different in every run: keys are padding with tokens before it, say."""
    rest = one - other
    if any(a.kind != "size" for a in rest.atoms()):
        return False
    return bool(rest.terms) and len({c > 0 for _, c in rest.terms}) == 1


def _variables(index: Int) -> set[str]:
    return {str(p.args[0]) for p in subterms(index) if isinstance(p, Atom) and p.kind == "var"}


def _index_text(index: Int) -> str:
    atom = index.atom
    if index.constant is not None:
        return str(index.constant)
    return str(atom.args[0]) if atom is not None and atom.kind == "var" else "..."


def _view(axes: Sequence[int], axis: int | None, rank: int) -> OperandView | None:
    """How a tensor becomes a vector, None where it cannot. ``axes`` have more than one element, ``axis`` is that of positions."""
    if axis is None:
        if len(axes) > 1:
            return None
        return OperandView.SAME if rank == 1 else OperandView.FLAT
    match list(axes):
        case [only] if only == axis:
            return OperandView.SAME if (rank, axis) == (2, 1) else OperandView.ROW
        case [0, last] if last == axis:
            return OperandView.SAME if rank == 2 else OperandView.ROWS
        case [0, 1] if axis == 0 and rank == 2:
            return OperandView.TURNED
    return None
