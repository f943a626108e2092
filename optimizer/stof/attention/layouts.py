# SPDX-License-Identifier: Apache-2.0
"""Which memory a matrix operand really reads: movement operators as maps of axes.

A tensor's axes are ordered products of *atoms* (axes of a source, or factors of them). Transpose permutes, Reshape
regroups, Expand adds a broadcast atom; so "the key operand of this MatMul is tensor X laid out [B, S, G, D]" falls out
for any chain, whatever its spelling: 3-D or 4-D transposes, GQA by Unsqueeze-Expand-Reshape, packed heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import onnx
from onnx import TensorProto

from stof.errors import UnsupportedError
from stof.graph.index import GraphIndex, describe, is_standard
from stof.site import Layout, Operand
from stof.symbolic import Int, Symbolic, integer
from stof.symbolic.rules.dropout import may_drop

ONE = integer(1)
MOVES = frozenset({"Transpose", "Reshape", "Unsqueeze", "Squeeze", "Expand", "Identity", "Flatten"})
CASTS = frozenset({"Cast", "CastLike"})
_LONGEST = 24
_FLOATS: dict[int, int] = {TensorProto.FLOAT16: 1, TensorProto.BFLOAT16: 1, TensorProto.FLOAT: 2}  # by width


@dataclass(frozen=True)
class AxisAtom:
    """A factor of a source axis; ``axis`` is -1 for a broadcast one."""

    axis: int
    part: int
    size: Int


Axes = tuple[tuple[AxisAtom, ...], ...]


@dataclass(frozen=True)
class MovePath:
    """Nodes from a source tensor to a matrix operand, with the constant factor that they multiply in."""

    source: str
    nodes: tuple[onnx.NodeProto, ...]  # in order of execution
    scale: float = 1.0


def is_move(symbolic: Symbolic, node: onnx.NodeProto) -> bool:
    """Whether a node only moves its first input's elements: a view, or a cast to the same type."""
    if not is_standard(node):
        return False
    if node.op_type in CASTS:
        dtype = symbolic.dtype(node.output[0])
        return dtype != 0 and dtype == symbolic.dtype(node.input[0])
    return node.op_type in MOVES


def move_paths(index: GraphIndex, symbolic: Symbolic, tensor: str) -> list[MovePath]:
    """The operand seen from every tensor up its chain of movements and scalar factors, nearest first.

    A cast to a wider float loses nothing, and the op computes in fp32 whatever its operands are: it is passed as well.
    """
    found = [MovePath(tensor, ())]
    while len(found) <= _LONGEST:
        last = found[-1]
        node = index.producer(last.source)
        if node is None:
            break
        if is_move(symbolic, node) or _is_widening_cast(symbolic, node):
            found.append(MovePath(node.input[0], (node, *last.nodes), last.scale))
            continue
        factor = scalar_factor(symbolic, node)
        if factor is None:
            break
        found.append(MovePath(factor[0], last.nodes, last.scale * factor[1]))
    return found


def _is_widening_cast(symbolic: Symbolic, node: onnx.NodeProto) -> bool:
    if node.op_type not in CASTS or not is_standard(node):
        return False
    source, result = (_FLOATS.get(symbolic.dtype(n), 0) for n in (node.input[0], node.output[0]))
    return bool(0 < source < result)


def is_float_cast(symbolic: Symbolic, node: onnx.NodeProto) -> bool:
    """Whether a node casts between the float types of the op."""
    if node.op_type not in CASTS or not is_standard(node):
        return False
    return all(symbolic.dtype(n) in _FLOATS for n in (node.input[0], node.output[0]))


def is_identity(symbolic: Symbolic, node: onnx.NodeProto) -> bool:
    """Whether a node of the standard domain is an Identity, or a Dropout of inference.

    Raises:
        UnsupportedError: for a Dropout that drops.
    """
    if node.op_type == "Dropout" and may_drop(node, symbolic.constant):
        raise UnsupportedError(
            f"{describe(node)} may drop elements: its training_mode is not known to be false, nor its ratio to be 0"
        )
    return node.op_type in ("Identity", "Dropout")


def scalar_factor(symbolic: Symbolic, node: onnx.NodeProto) -> tuple[str, float] | None:
    """(x, c) of a Mul or Div of x by one number that does not change x's shape."""
    if not is_standard(node) or node.op_type not in ("Mul", "Div") or len(node.input) != 2:
        return None
    for i in (1, 0) if node.op_type == "Mul" else (1,):
        number = symbolic.uniform(node.input[i])
        if number is None:
            continue
        shape, other = symbolic.shape(node.output[0]), symbolic.shape(node.input[1 - i])
        own = symbolic.shape(node.input[i])
        scalar = own is not None and all(d == ONE for d in own) and (other is None or len(own) <= len(other))
        if not scalar and (shape is None or shape != other):
            continue
        if node.op_type == "Div":
            return (node.input[0], 1.0 / number) if number != 0 else None
        return (node.input[1 - i], number)
    return None


def trace_axes(symbolic: Symbolic, chain: MovePath) -> Axes | None:
    """The axes of the chain's last tensor in atoms of its source; None where they cannot be told."""
    shape = symbolic.shape(chain.source)
    if shape is None:
        return None
    axes: Axes = tuple((AxisAtom(a, 0, d),) for a, d in enumerate(shape))
    for node in chain.nodes:
        result = symbolic.shape(node.output[0])
        if result is None:
            return None
        moved = _apply_move(symbolic, node, axes, result)
        if moved is None:
            return None
        axes = moved
    return axes


def _apply_move(symbolic: Symbolic, node: onnx.NodeProto, axes: Axes, result: tuple[Int, ...]) -> Axes | None:
    if node.op_type == "Identity" or node.op_type in CASTS:
        return axes
    if node.op_type == "Transpose":
        perm = next((list(a.ints) for a in node.attribute if a.name == "perm"), list(range(len(axes)))[::-1])
        return tuple(axes[p] for p in perm)
    if node.op_type == "Expand":
        if len(result) < len(axes) or may_broadcast(symbolic, node):
            return None
        padded: Axes = ((),) * (len(result) - len(axes)) + axes
        place = len({a.part for group in axes for a in group if a.axis == -1})
        grown = []
        for group, size in zip(padded, result, strict=True):
            if _size_of(group) == size:
                grown.append(group)
            elif _size_of(group) == ONE:
                grown.append((AxisAtom(-1, place, size),))
                place += 1
            else:
                return None
        return tuple(grown)
    return _regroup(axes, result)


def may_broadcast(symbolic: Symbolic, node: onnx.NodeProto) -> bool:
    """Whether sizes of different names meet in an Expand: one may be 1 in a run, and the other not."""
    own, value = symbolic.shape(node.input[0]), symbolic.value(node.input[1])
    wanted = None if value is None else value.elements()
    if own is None or wanted is None:
        return True
    pairs = zip(reversed(own), reversed(wanted), strict=False)
    return any(ONE not in (size, other) and size != other for size, other in pairs)


def _size_of(group: Sequence[AxisAtom]) -> Int:
    total = ONE
    for atom in group:
        total = total * atom.size
    return total


def _regroup(axes: Axes, result: tuple[Int, ...]) -> Axes | None:
    """Reshape: the same atoms in the same order, cut at other places; an atom may be split in two."""
    pending = [a for group in axes for a in group if a.size != ONE]
    grouped: list[tuple[AxisAtom, ...]] = []
    for size in result:
        group: list[AxisAtom] = []
        while _size_of(group) != size:
            if not pending:
                return None
            rest = size.divide(_size_of(group))
            if rest is None:
                return None
            atom = pending.pop(0)
            if rest.divide(atom.size) is not None:
                group.append(atom)
                continue
            lower = atom.size.divide(rest)
            if lower is None or atom.axis < 0:
                return None
            grouped = [tuple(_renumber(g, atom, 1)) for g in grouped]
            group, pending = (_renumber(g, atom, 1) for g in (group, pending))
            group.append(replace(atom, size=rest))
            pending.insert(0, AxisAtom(atom.axis, atom.part + 1, lower))
        grouped.append(tuple(group))
    return tuple(grouped) if not pending else None


def _renumber(group: Sequence[AxisAtom], atom: AxisAtom, by: int) -> list[AxisAtom]:
    """The atoms, the parts of an axis behind one of them counted from another number."""
    return [replace(a, part=a.part + by) if a.axis == atom.axis and a.part > atom.part else a for a in group]


@dataclass(frozen=True)
class OperandLayout:
    """A reading of a query, key or value operand: its tensor, layout, heads and sizes."""

    operand: Operand
    dtype: int
    batch: Int
    heads: int  # of the tensor itself: G where a broadcast repeats them
    rows: Int
    size: int
    repeat: int  # H // G
    scale: float
    outer: tuple[Int, ...] = ()  # the sizes of the two axes in which the matrix operand has its batch
    groups: tuple[int, ...] = ()  # the sizes of the two axes in which the matrix operand has its heads


def check_axes(symbolic: Symbolic, node: onnx.NodeProto, role: str) -> None:
    """A MatMul repeats a factor of fewer axes for each batch of the other: its first axis then lies beside the heads.

    Raises:
        UnsupportedError: one of the factors of ``node`` has fewer axes than the other and is no single matrix.
    """
    first, second = symbolic.shape(node.input[0]), symbolic.shape(node.input[1])
    if first is None or second is None or len(first) == len(second):
        return
    fewer = min(first, second, key=len)
    if any(d != ONE for d in fewer[:-2]):
        raise UnsupportedError(
            f"{describe(node)}: the {role} has {len(second)} axes where the other factor has {len(first)}, expected as many: "
            "heads are repeated for every batch"
        )


def _drop_ones(group: Sequence[AxisAtom]) -> list[AxisAtom]:
    return [a for a in group if a.size != ONE]


def layout_candidates(
    index: GraphIndex,
    symbolic: Symbolic,
    tensor: str,
    *,
    transposed: bool,
    order: tuple[int, ...] = (),
    grouped: bool = False,
) -> list[OperandLayout]:
    """Legal readings of a matrix operand [.., rows, D] (or [.., D, rows] when ``transposed``), the best of a type last.

    ``order`` is the order of axes in which the tensor is that, where it is not its own. ``grouped``: an operand of five axes
    is [B, G, R, .., ..], else it has its batch in two.

    The farther the source the more copies fold into the op; but a tensor that the graph writes anyway, for another
    reader, is as good as its source and ends the search.
    """
    found: list[OperandLayout] = []
    for chain in move_paths(index, symbolic, tensor):
        axes = trace_axes(symbolic, chain)
        if axes is None and chain.nodes:
            break
        if axes is None or len(axes) < 3:
            continue
        axes = tuple(axes[i] for i in order) if order else axes
        rows, size = (axes[-1], axes[-2]) if transposed else (axes[-2], axes[-1])
        if grouped:
            heads = _match_split_heads(
                symbolic, chain, (*axes[:-2], ()) if order and len(axes) == 4 else axes[:-2], rows, size
            )
        else:
            batch = [a for group in axes[:-2] for a in group]
            classify = _match_split_batch if len(axes) == 5 else _match_layout
            heads = classify(symbolic, chain, batch, rows, size)
        if heads is None:
            continue
        # One that has to be transposed first is the last choice.
        found.insert(0 if heads.operand.perm else len(found), heads)
        if _is_materialized(index, symbolic, chain.source):
            break
    # [B*H, S, D] reads as B*H batches of one head as well; masks tell batches from heads, so that comes first.
    return sorted(found, key=lambda h: not any(_separates_heads(o, h) for o in found))


def _separates_heads(one: OperandLayout, other: OperandLayout) -> bool:
    """Whether a reading tells heads where another takes them for batches."""
    by_parts = one.operand.layout is Layout.BSN or not one.operand.perm
    return other.heads == 1 < one.heads and by_parts and other.batch == one.batch * integer(one.heads * one.repeat)


def _is_materialized(index: GraphIndex, symbolic: Symbolic, tensor: str) -> bool:
    if tensor in index.outputs or tensor in index.captured or tensor in index.materialized:
        return True
    users = [n for n in index.consumers(tensor) if n.op_type not in ("Shape", "MatMul", "FusedMatMul")]
    return any(not is_move(symbolic, n) and scalar_factor(symbolic, n) is None for n in users)


def _match_layout(
    symbolic: Symbolic, chain: MovePath, batch: Sequence[AxisAtom], rows: Sequence[AxisAtom], size: Sequence[AxisAtom]
) -> OperandLayout | None:
    shape = symbolic.shape(chain.source)
    if shape is None:
        return None
    dtype = symbolic.dtype(chain.source)
    whole = [AxisAtom(a, 0, d) for a, d in enumerate(shape)]
    if len(shape) == 4:
        for layout, head_axis, row_axis in ((Layout.BHSD, 1, 2), (Layout.BSHD, 2, 1)):
            heads, width = shape[head_axis].constant, shape[3].constant
            repeat = _repeat_count(batch, [whole[0], whole[head_axis]])
            fits = _drop_ones(rows) == _drop_ones([whole[row_axis]]) and _drop_ones(size) == _drop_ones([whole[3]])
            if heads and width and repeat and fits:
                operand = Operand(chain.source, layout)
                return OperandLayout(operand, dtype, shape[0], heads, shape[row_axis], width, repeat, chain.scale)
        perm = _find_transposition(whole, batch, rows, size)
        if perm is not None:
            b, h, r, d = (shape[a] for a in perm)
            if h.constant and d.constant:
                operand = Operand(chain.source, Layout.BHSD, perm)
                return OperandLayout(operand, dtype, b, h.constant, r, d.constant, _broadcast_count(batch), chain.scale)
    if len(shape) == 3 and len(_drop_ones(size)) == 1:
        head_size = _drop_ones(size)[0]
        if head_size.axis < 0:
            return None
        heads_int = shape[head_size.axis].divide(head_size.size)
        heads, width = (None if heads_int is None else heads_int.constant), head_size.size.constant
        if not heads or not width:
            return None
        split = head_size.part == 1 if heads > 1 else head_size.part == 0
        inner = AxisAtom(head_size.axis, 0, integer(heads))
        # The second is torch's nn.MultiheadAttention, length before batch; the third comes from a convolution.
        for perm in ((0, 1, 2), (1, 0, 2), (0, 2, 1)):
            repeat = _repeat_count(batch, [whole[perm[0]], inner])
            if head_size.axis == perm[2] and split and repeat and _drop_ones(rows) == _drop_ones([whole[perm[1]]]):
                operand = Operand(chain.source, Layout.BSN, () if perm == (0, 1, 2) else perm)
                return OperandLayout(operand, dtype, shape[perm[0]], heads, shape[perm[1]], width, repeat, chain.scale)
    return None


def _match_split_batch(
    symbolic: Symbolic, chain: MovePath, batch: Sequence[AxisAtom], rows: Sequence[AxisAtom], size: Sequence[AxisAtom]
) -> OperandLayout | None:
    """The reading of an operand of five axes, the first two of which are the batch: blocks of a sequence, say."""
    shape = symbolic.shape(chain.source)
    if shape is None or len(shape) != 5:
        return None
    whole = [AxisAtom(a, 0, d) for a, d in enumerate(shape)]
    for layout, head_axis, row_axis in ((Layout.BHSD, 2, 3), (Layout.BSHD, 3, 2)):
        heads, width = shape[head_axis].constant, shape[4].constant
        wanted = [whole[a] for a in (0, 1, head_axis, row_axis, 4)]
        if heads and width and [*batch, *rows, *size] == wanted:
            operand, dtype = Operand(chain.source, layout, joined=True), symbolic.dtype(chain.source)
            return OperandLayout(
                operand, dtype, shape[0] * shape[1], heads, shape[row_axis], width, 1, chain.scale, shape[:2]
            )
    return None


def _match_split_heads(
    symbolic: Symbolic, chain: MovePath, outer: Axes, rows: Sequence[AxisAtom], size: Sequence[AxisAtom]
) -> OperandLayout | None:
    """The reading of an operand of five axes, the second and third of which are its heads: groups, and the heads of each."""
    shape = symbolic.shape(chain.source)
    if shape is None or len(outer) != 3:
        return None
    batch, *of_heads = (_size_of(group) for group in outer)
    groups = tuple(s.constant or 0 for s in of_heads)
    count = groups[0] * groups[1]
    if not count:
        return None
    if len(shape) == 5:
        whole = [AxisAtom(a, 0, d) for a, d in enumerate(shape)]
        for layout, head_axis, row_axis in ((Layout.BHSD, 1, 3), (Layout.BSHD, 2, 1)):
            wanted = [[whole[a]] for a in (0, head_axis, head_axis + 1, row_axis, 4)]
            if shape[4].constant and [list(g) for g in (*outer, rows, size)] == wanted:
                operand, dtype = Operand(chain.source, layout, grouped=True), symbolic.dtype(chain.source)
                return OperandLayout(
                    operand, dtype, batch, count, shape[row_axis], shape[4].constant, 1, chain.scale, groups=groups
                )
        return None
    found = _match_layout(symbolic, chain, *_merge_head_atoms(outer, rows, size))
    if found is None or found.batch != batch or found.heads * found.repeat != count:
        return None
    return replace(found, groups=groups)


def _merge_head_atoms(
    outer: Axes, rows: Sequence[AxisAtom], size: Sequence[AxisAtom]
) -> tuple[list[AxisAtom], list[AxisAtom], list[AxisAtom]]:
    """Atoms of batch and heads, of rows and of size, in which heads are one atom where they are parts of one in order."""
    batch, rest = list(outer[0]), [list(rows), list(size)]
    heads = _drop_ones([a for group in outer[1:] for a in group])
    for i in range(len(heads) - 1, 0, -1):
        one, other = heads[i - 1 : i + 1]
        if one.axis == other.axis >= 0 and other.part == one.part + 1:
            heads[i - 1 : i + 1] = [replace(one, size=one.size * other.size)]
            batch, heads, *rest = (_renumber(g, one, -1) for g in (batch, heads, *rest))
    return [*batch, *heads], rest[0], rest[1]


def _find_transposition(
    whole: Sequence[AxisAtom], batch: Sequence[AxisAtom], rows: Sequence[AxisAtom], size: Sequence[AxisAtom]
) -> tuple[int, ...] | None:
    """The order in which four whole axes are batch, heads, rows and size; axes of size 1 stand for what is not there."""
    outer = [a for a in _drop_ones(batch) if a.axis >= 0]
    groups = [outer[:1], outer[1:], _drop_ones(rows), _drop_ones(size)]
    if len(outer) == 1 and outer[0].size.constant is not None:
        groups[:2] = [[], outer]
    used = [a for group in groups for a in group]
    if len(outer) > 2 or any(len(g) > 1 for g in groups) or any(a not in whole for a in used):
        return None
    spare = [a.axis for a in whole if a.size == ONE]
    order = [g[0].axis if g else (spare.pop(0) if spare else -1) for g in groups]
    return tuple(order) if sorted(order) == [0, 1, 2, 3] else None


def _broadcast_count(batch: Sequence[AxisAtom]) -> int:
    last = _drop_ones(batch)[-1:]
    return (last[0].size.constant or 1) if last and last[0].axis < 0 else 1


def _repeat_count(batch: Sequence[AxisAtom], wanted: Sequence[AxisAtom]) -> int | None:
    """How often each head is repeated (its broadcast atom comes last); None where the batch axes are not as wanted."""
    stripped = _drop_ones(batch)
    base = _drop_ones(wanted)
    if stripped == base:
        return 1
    if stripped[:-1] == base and stripped[-1].axis == -1:
        return stripped[-1].size.constant
    return None


def output_layout(
    shape: tuple[Int, ...], axes: Axes, heads: int, order: tuple[int, ...] = (), grouped: bool = False
) -> tuple[Layout, tuple[int, ...], bool] | None:
    """The layout of a view of the result [.., S, Dv] of the second MatMul, the transposition of it that the view is, and
    whether the first two axes of that are one.

    None when it is no legal one. ``order`` is the order of axes in which the result is that, where it is not its own.
    ``grouped``: a result of five axes has its heads in two, else its batch.
    """
    whole = [AxisAtom(a, 0, d) for a, d in enumerate(shape)]
    whole = [whole[i] for i in order] if order else whole
    groups = [_drop_ones(g) for g in axes]
    if len(shape) == 5 and grouped:
        outer, inner, of_group, s5, d5 = ([w] for w in whole)
        five = {Layout.BHSD: [outer, inner, of_group, s5, d5], Layout.BSHD: [outer, s5, inner, of_group, d5]}
        found = next((layout for layout, wanted in five.items() if [list(g) for g in axes] == wanted), None)
        if found is not None:
            return found, (), False
        b, h, s, d = (_drop_ones(g) for g in (outer, inner + of_group, s5, d5))
    elif len(shape) == 5:
        outer, inner, h, s, d = ([w] for w in whole)
        orders = {Layout.BHSD: [outer, inner, h, s, d], Layout.BSHD: [outer, inner, s, h, d]}
        return next(((layout, (), False) for layout, order in orders.items() if [list(g) for g in axes] == order), None)
    elif len(shape) == 4:
        b, h, s, d = (_drop_ones([w]) for w in whole)
    elif len(shape) == 3 and len(axes) in (2, 3, 4) and whole[0].axis == 0:  # [B*H, S, Dv]
        first = sorted(_drop_ones([a for g in axes for a in g if a.axis == 0]), key=lambda a: a.part)
        # Without a second part the axis is all batch (one head) or all heads (one batch).
        b = first[:1] if heads == 1 or len(first) == 2 else []
        h = first[len(b) :]
        if _size_of(h) != integer(heads) or len(first) > 2:
            return None
        s, d = _drop_ones([whole[1]]), _drop_ones([whole[2]])
    else:
        return None
    legal: list[tuple[list[list[AxisAtom]], Layout, tuple[int, ...], bool]] = [
        ([b, h, s, d], Layout.BHSD, (), False),
        ([b, s, h, d], Layout.BSHD, (), False),
        ([b, s, h + d], Layout.BSN, (), False),
        ([s, b, h + d], Layout.BSN, (1, 0, 2), False),
        ([b + s, h + d], Layout.BSN, (), True),
        ([s + b, h + d], Layout.BSN, (1, 0, 2), True),
        ([b, h + d, s], Layout.BSN, (0, 2, 1), False),  # channels first
        ([b, h, d, s], Layout.BHSD, (0, 1, 3, 2), False),
    ]
    for own, layout, perm, flat in legal:
        if groups == own:
            return layout, perm, flat
    if (
        len(groups) == 4 and all(groups) and all(g in (b, h, s, d) for g in groups) and len({g[0] for g in groups}) == 4
    ):  # any other order of the four
        return Layout.BHSD, tuple([b, h, s, d].index(g) for g in groups), False
    return None
