# SPDX-License-Identifier: Apache-2.0
"""Inputs for a model that nobody described: ranges of indices from the tables that they look up, padding for masks."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping

import numpy as np
import onnx
from onnx import helper

from stof.errors import UnsupportedError
from stof.execution.case import Case, Counts, Padding
from stof.graph.index import GraphIndex, all_nodes, domain_of, node_tensors
from stof.symbolic import Symbolic
from stof.symbolic.algebra.piecewise import reads_input
from stof.symbolic.algebra.sizes import evaluate, size_names
from stof.symbolic.algebra.terms import Int, integer
from stof.symbolic.facts import dtype_kind

_LARGEST_INPUT = 1 << 22
_LONGEST_CHAIN = 16
_SIDES = 257  # sizes of a side of an image that are tried
_DECIDES = 1000.0  # what a number of an input adds to scores where it says whether a key counts
_OPERATE = {"Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Div": np.divide}
_THROUGH = frozenset({"Cast", "Identity", "Reshape", "Unsqueeze", "Squeeze", "Expand", "Flatten", "Transpose"})
# Where fused nodes read numbers of keys, and which they take: from the first one on, to all keys and the second one. ONNX
# Runtime's CPU provider refuses others or, where it does not ask, reads and writes outside of its tensors.
_TAKEN: dict[tuple[str, str, int], tuple[int, int | None]] = {
    ("", "Attention", 6): (0, 0),
    ("com.microsoft", "Attention", 3): (0, None),
    ("com.microsoft", "GroupQueryAttention", 5): (0, -1),  # of the last key, not of keys
    ("com.microsoft", "MultiHeadAttention", 4): (0, None),
}


class InputMaker:
    """Draws inputs of a model.

    Args:
        model: without external data.
        symbolic: its shapes and values.
        pads: tensors that masks read as padding: model inputs, or what is computed from them.
        limits: inputs that hold numbers of keys, each with the number that there are.
        segments: tensors that masks compare with themselves: document ids, or what is computed from positions.
        forbidding: of the padding, what is true where a key may not be attended.
        looking: of all these, those of which masks look up tables: indices may be counted from the end.
        added: tensors that are added to scores: inputs that are, or are moved to these, are masks of a caller.
        index: of the model's graph, where there is one already.
        fused: the graph with its fused nodes, where a runtime is to run these on the inputs: they refuse some numbers of
            keys, and read and write elsewhere in memory with others.
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        symbolic: Symbolic,
        pads: frozenset[str],
        limits: Mapping[str, Int] | None = None,
        segments: frozenset[str] = frozenset(),
        forbidding: frozenset[str] = frozenset(),
        looking: frozenset[str] = frozenset(),
        added: frozenset[str] = frozenset(),
        index: GraphIndex | None = None,
        fused: onnx.GraphProto | None = None,
    ) -> None:
        self.model = model
        self.symbolic = symbolic
        self.limits = limits or {}
        self._divides: bool | None = None
        index = index or GraphIndex(model.graph)
        initializers = {t.name for t in model.graph.initializer}
        # Defaults that a caller may override are drawn where masks read them.
        defaults = initializers - pads - set(self.limits) - segments
        self.inputs = [i for i in model.graph.input if i.name not in defaults]
        self.rows = {i.name: _table_rows(index, symbolic, i.name) for i in self.inputs}
        given = {i.name for i in self.inputs}
        self.counts = frozenset(self.limits) & given  # inputs that masks read as numbers of keys
        read = self.counts | (looking & given)
        self.taken = _taken_counts(fused, symbolic, read) if read and fused is not None else {}
        self.from_end = {n for n in looking & given if self.rows[n] is not None} - set(self.taken)
        # Numbers of keys that are counted are counted in padding masks.
        self.pads = _behind(index, pads | (frozenset(self.limits) - given), given)
        self.forbidding = forbidding & given
        self.added = frozenset(source for name in added if (source := _source(index, name)) in given)
        switches = [_switch(index, symbolic, name) for name in sorted(added)]
        self.switches = {name: forbids for name, forbids in filter(None, switches) if name in given}
        self.documents = (segments & given) - self.pads
        self.restarting = _behind(index, segments - given, given) - self.pads
        softmaxes = (symbolic.shape(n.output[0]) for n in model.graph.node if n.op_type == "Softmax")
        self.shapes = [s for s in softmaxes if s is not None]
        self.scores = list(dict.fromkeys(d for shape in self.shapes for d in shape if _divides(d)))
        # Sizes that strides and windows make; others are made to agree one by one.
        self.whole = [p for p in symbolic.equalities if _divides(p[0]) or _divides(p[1])]
        self.batch_names = self._batch_names()
        sized = {a.args[0] for pair in symbolic.equalities for size in pair for a in size.atoms() if a.kind == "read"}
        # Numbers of keys of which a graph takes the largest as the length of its masks.
        self.longest = _behind(index, frozenset(map(str, sized)), given) & self.counts

    def _batch_names(self) -> set[str]:
        """Dimensions that lead: of a vector, unless others have it behind their batch, or it is equal to such lengths."""
        shapes = [s for i in self.inputs if (s := self.symbolic.shape(i.name))]
        found, alone = (
            {str(s[0].atom.args[0]) for s in shapes if (len(s) > 1) == several and s[0].atom is not None}
            for several in (True, False)
        )
        behind = {n for s in shapes for d in s[1:] for n in size_names(d)}
        pairs = [p for pair in self.symbolic.equalities for p in (pair, pair[::-1])]
        equal = {n for one, other in pairs if size_names(other) & behind for n in size_names(one)}
        return found | (alone - behind - equal)

    def sizes(self, case: Case) -> dict[str, int]:
        """Every dimension name at a case: leading ones are batches, all others lengths."""
        found: dict[str, int] = {}
        for value in self.inputs:
            for dim in self.symbolic.shape(value.name) or ():
                for atom in dim.atoms():
                    name = str(atom.args[0])
                    found[name] = case.batch if name in self.batch_names else case.length
                    if name.isdigit():  # what some exporters call a size that they took for dynamic and found fixed
                        found[name] = int(name)
        for size in self._lengths():
            names = size_names(size) - self.batch_names
            least = _least(size, names, case.batch, case.length)
            found |= {name: max(found.get(name, 1), least) for name in names}
        other = {name: size for name, size in case.other if name in found}
        found |= other
        self._agree(found, case, set(other))
        self._settle(found)
        return found | other

    def _lengths(self) -> list[Int]:
        """Lengths of scores that strides make shorter than the input: samples that become frames."""
        return list(dict.fromkeys(d for shape in self.shapes for d in shape[-2:] if _divides(d)))

    def _agree(self, sizes: dict[str, int], case: Case, solved: set[str]) -> None:
        """Makes sizes agree that must be equal in a valid run: the mask's length and that of past and new keys, say.

        What is solved stays.
        """
        for pair in self.symbolic.equalities:
            for alone, other in (pair, pair[::-1]):
                if alone.constant is not None:
                    solved |= self._fix(other, alone.constant, sizes, solved, case)
                atom = alone.atom
                name = "" if atom is None or atom.kind != "size" else str(atom.args[0])
                used = {str(a.args[0]) for a in other.atoms() if a.kind == "size"}
                if name not in sizes or name in solved | used or not used <= set(sizes) or name in self.batch_names:
                    continue
                lengths = sorted(used - self.batch_names - solved)
                if len(lengths) > 1:  # different ones, lest a past as long as the queries hide which is which
                    sizes[lengths[0]] = case.length // 2 + 1
                try:
                    found = evaluate(other, sizes)
                except UnsupportedError:
                    continue
                if found < 1:
                    continue
                sizes[name] = found
                solved |= {name, *used}
                break

    def _settle(self, sizes: dict[str, int]) -> None:
        """Makes lengths larger until all sizes agree and scores are not empty: an image of whole windows, say."""
        wrong = self._disagreeing(sizes)
        names = set().union(*(size_names(size) for size in wrong)) & set(sizes)
        names = {n for n in names - self.batch_names if not n.isdigit()}
        least = max((sizes[n] for n in names), default=0)
        for length in range(least, least + _SIDES) if names else []:
            tried = {**sizes, **dict.fromkeys(names, length)}
            if not self._disagreeing(tried):
                sizes |= tried
                return
        if wrong:
            self.whole = []  # no sizes make them agree: they are not looked for again

    def _disagreeing(self, sizes: dict[str, int]) -> list[Int]:
        """Sizes that are equal in a valid run and are not, and sizes of scores that are nothing."""
        found: list[Int] = []
        for one, other in self.whole:
            with contextlib.suppress(UnsupportedError, ZeroDivisionError):
                if evaluate(one, sizes) != evaluate(other, sizes):
                    found += [one, other]
        for size in self.scores:
            with contextlib.suppress(UnsupportedError, ZeroDivisionError):
                if evaluate(size, sizes) < 1:
                    found.append(size)
        return found

    def _fix(self, size: Int, wanted: int, sizes: dict[str, int], solved: set[str], case: Case) -> set[str]:
        """Gives dimensions the value with which a size is a constant: patches of an image, one for each stored position."""
        names = size_names(size) - self.batch_names
        if not names or names & solved or not names <= set(sizes):
            return set()
        # All of them alike; or one of another size, as an image that is not square.
        first, *_ = sorted(names)
        for given in [{}, *({first: n} for n in range(1, _SIDES))] if len(names) > 1 else [{}]:
            rest = names - set(given)
            found = {**given, **dict.fromkeys(rest, _least(size, rest, case.batch, wanted, given))}
            try:
                reached = evaluate(size, {**dict.fromkeys(size_names(size), case.batch), **found})
            except UnsupportedError:
                return set()
            if reached == wanted:
                sizes |= found
                return names
        return set()

    def draw(self, case: Case, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """One set of inputs by name."""
        sizes = self.sizes(case)
        feeds = {}
        for value in self.inputs:
            shape = self.symbolic.shape(value.name)
            if shape is None:
                raise ValueError(f"input {value.name!r} is no tensor of known rank")
            dims = [evaluate(d, sizes) for d in shape]
            dtype = np.dtype(helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type))
            if value.name in self.counts:
                most = evaluate(self.limits[value.name], sizes)
                feeds[value.name] = self._counts(value.name, dims, dtype, most, case, rng)
                continue
            feeds[value.name] = self._draw_one(value.name, dims, dtype, case, rng)
        return feeds

    def _counts(
        self, name: str, dims: list[int], dtype: np.dtype, most: int, case: Case, rng: np.random.Generator
    ) -> np.ndarray:
        """Numbers of keys, of which there are ``most``; or flags."""
        counts = np.asarray(rng.integers(min(1, most), most, dims, endpoint=True))
        flat = counts.reshape(-1)
        if name in self.longest:
            flat[:1] = most
        flat[2:3] = min(1, most)  # a third row has one key, as with padding
        if case.padding is Padding.LEAST:
            flat[:] = most
            flat[1::2] = max(most - 1, min(1, most))
        if case.counts is not Counts.USUAL and not self._counts_divide():
            low, high = {
                Counts.NONE: (0, 0),
                Counts.NEGATIVE: (-most - 2, -1),
                Counts.BEYOND: (most + 1, 2 * most + 2),
            }[case.counts]
            if low >= 0 or dtype.kind not in "bu":
                flat[::-1][::2] = rng.integers(low, high, len(flat[::2]), endpoint=True)
        rows = self.rows[name]
        if rows is not None:
            counts = np.clip(counts, -rows if name in self.from_end else 0, rows - 1)
        if name in self.taken:
            least, more = self.taken[name]
            counts = np.clip(counts, least, None if more is None else max(most + more, least))
        return counts.astype(dtype)

    def _counts_divide(self) -> bool:
        """Whether integers are divided by what is computed from data: the runtime ends the process when that is 0."""
        if self._divides is None:
            nodes = [n for n in self.model.graph.node if n.op_type in ("Div", "Mod") and len(n.input) == 2]
            self._divides = any(self._by_data(n.input[1]) for n in nodes)
        return self._divides

    def _by_data(self, divisor: str) -> bool:
        if dtype_kind(self.symbolic.dtype(divisor)) != "i" or self.symbolic.constant(divisor) is not None:
            return False
        value = self.symbolic.value(divisor)
        element = None if value is None else value.at(tuple(integer(0) for _ in value.shape))
        return element is None or reads_input(element)

    def _draw_one(
        self, name: str, dims: list[int], dtype: np.dtype, case: Case, rng: np.random.Generator
    ) -> np.ndarray:
        if name in self.pads or name in self.switches:
            mask = _padding(dims, case, rng, self._counts_divide())
            forbids = name in self.forbidding or self.switches.get(name, False)
            return (1 - mask if forbids else mask).astype(dtype)
        if dtype.kind == "b" and all(d.constant == 1 for d in self.symbolic.shape(name) or ()):
            # A switch, which an If reads: on in the first case of all, off in the last one.
            on = case.padding is Padding.LEFT or (case.padding is Padding.NONE and case.batch > 1)
            return np.full(dims, on, dtype)
        if dtype.kind == "b":
            # Most likely a mask, and a stated one may forget it.
            return _padding(dims, case, rng, self._counts_divide()).astype(dtype)
        if name in self.documents or name in self.restarting:
            ids, places = _documents(dims, rng)
            limit = self.rows[name] or 1 << 30
            found = (ids if name in self.documents else places) % limit
            if name in self.from_end and dtype.kind == "i" and found.ndim:
                found[::-1][::2] -= limit  # in the last row, and every second one before it
            return found.astype(dtype)
        if dtype.kind in "iu":
            rows = self.rows[name]
            if rows is not None:
                return rng.integers(0, rows, dims).astype(dtype)
            # Neither a look-up nor a mask: positions, the common meaning of what is left.
            return np.broadcast_to(np.arange(dims[-1]) if dims else 0, dims).astype(dtype)
        numbers = rng.standard_normal(dims).astype(dtype)
        return _with_masked(numbers, rng) if name in self.added and len(dims) > 1 else numbers


def _taken_counts(
    graph: onnx.GraphProto, symbolic: Symbolic, inputs: frozenset[str]
) -> dict[str, tuple[int, int | None]]:
    """The numbers of keys that fused nodes take, by input: from the first one to all keys and the second one, if any.

    Of inputs that lead to other numbers of fused nodes, from one key to all are taken.
    """
    index = GraphIndex(graph)
    found: dict[str, tuple[int, int | None]] = {}

    def restrict(name: str, least: int, most: int | None) -> None:
        known, end = found.get(name, (least, most))
        found[name] = max(known, least), most if end is None else end if most is None else min(end, most)

    for node in graph.node:
        for part in all_nodes([node]):
            if not domain_of(part) and part.op_type != "Attention":
                continue
            if part is not node:  # in a subgraph, whose own tensors have no values here
                for name in _behind(index, frozenset(node_tensors(node)), set(inputs)):
                    restrict(name, 1, 0)
                continue
            for place, operand in enumerate(node.input):
                if symbolic.dtype(operand) not in (0, onnx.TensorProto.INT32, onnx.TensorProto.INT64):
                    continue
                taken = _TAKEN.get((domain_of(node), node.op_type, place))
                source = _source(index, operand)
                if taken is not None and source in inputs:
                    restrict(source, *taken)
                    continue
                for name in _behind(index, frozenset({operand}), set(inputs)):
                    restrict(name, 1, 0)
    return found


def _source(index: GraphIndex, tensor: str) -> str:
    """The tensor from whose elements a tensor is moved together."""
    for _ in range(_LONGEST_CHAIN):
        node = index.producer(tensor)
        if node is None or node.op_type not in _THROUGH:
            break
        tensor = node.input[0]
    return tensor


def _switch(index: GraphIndex, symbolic: Symbolic, tensor: str) -> tuple[str, bool] | None:
    """The tensor of zeros and ones that what is added to scores is made of, ``(1 - mask) * -10000``; whether ones forbid."""
    steps: list[tuple[np.ufunc, np.ndarray | None, np.ndarray | None]] = []
    for _ in range(_LONGEST_CHAIN):
        node = index.producer(tensor)
        if node is None:
            break
        operate = _OPERATE.get(node.op_type)
        if operate is not None and not domain_of(node):
            given = [symbolic.constant(name) for name in node.input]
            open_places = [place for place, value in enumerate(given) if value is None]
            if len(open_places) != 1 or any(g is not None and (g.size == 0 or np.ptp(g) != 0) for g in given):
                break
            left, right = (g if g is None else np.float64(g.reshape(-1)[0]) for g in given)
            steps.append((operate, left, right))
            tensor = node.input[open_places[0]]
        elif node.op_type in _THROUGH:
            tensor = node.input[0]
        else:
            break
    values = np.array([0.0, 1.0])
    with np.errstate(all="ignore"):
        for operate, left, right in reversed(steps):
            values = operate(values if left is None else left, values if right is None else right)
        apart = abs(values[1] - values[0])  # infinite or NaN of what zeros are divided by: no mask of zeros and ones
    if not _DECIDES <= apart < math.inf or dtype_kind(symbolic.dtype(tensor)) != "f":
        return None
    return tensor, bool(values[1] < values[0])


def _with_masked(numbers: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Some entries the lowest number, and some rows all of them, but none of the first batch's first row."""
    masked = (rng.random(numbers.shape) < 0.3) | (rng.random((*numbers.shape[:-1], 1)) < 0.2)
    masked.reshape(-1, numbers.shape[-1])[:1] = False
    if numbers.dtype.kind != "f":  # bfloat16
        return numbers
    return np.where(masked, np.finfo(numbers.dtype).min, numbers).astype(numbers.dtype)


def _padding(dims: list[int], case: Case, rng: np.random.Generator, least: bool) -> np.ndarray:
    """0 where a key is padded; ``least``: one key is left in every row."""
    mask = np.ones(dims, np.int64)
    if case.padding is Padding.NONE or not dims or dims[-1] < 2:
        return mask
    for number, row in enumerate(mask.reshape(-1, dims[-1])[1 if len(mask) > 1 else 0 :]):
        count = int(rng.integers(1, max(2, dims[-1] // 2)))
        if case.padding is Padding.LEAST:
            count = 1 - number % 2
        elif number == 1:  # a third one has one key left, so that rows of a window have none
            count = dims[-1] - 1
        elif number == 2:  # a fourth one is all padding
            count = dims[-1] - least
        if case.padding is Padding.LEFT:
            row[:count] = 0
        else:
            row[dims[-1] - count :] = 0
    return mask


def _documents(dims: list[int], rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of documents that lie side by side in each row, and positions that begin again with each."""
    ids, places = np.zeros(dims, np.int64), np.zeros(dims, np.int64)
    length = dims[-1] if dims else 0
    if length:
        for row, at in zip(ids.reshape(-1, length), places.reshape(-1, length), strict=True):
            starts = np.union1d([0], rng.integers(0, length, int(rng.integers(1, 4))))
            row[:] = np.searchsorted(starts, np.arange(length), side="right") - 1
            at[:] = np.arange(length) - starts[row]
    return ids, places


def _divides(size: Int) -> bool:
    return any(a.kind in ("div", "mod") for a in size.atoms())


def _least(size: Int, names: set[str], batch: int, wanted: int, given: Mapping[str, int] | None = None) -> int:
    """The least value of dimensions with which a size that grows with them is as large as wanted, others as ``given``."""

    def reaches(n: int) -> bool:
        others = {**dict.fromkeys(size_names(size), batch), **(given or {})}
        return evaluate(size, {**others, **dict.fromkeys(names, n)}) >= wanted

    try:
        high = 1
        while not reaches(high):
            high *= 2
            if high > _LARGEST_INPUT:
                return 1
        low = high // 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if reaches(middle) else (middle, high)
    except UnsupportedError:
        return 1
    return high


def _behind(index: GraphIndex, tensors: frozenset[str], given: set[str]) -> frozenset[str]:
    """The model inputs on whose data tensors depend."""
    found: set[str] = set()
    seen: set[str] = set()
    pending = list(tensors)
    while pending:
        name = pending.pop()
        if name in seen or not name:
            continue
        seen.add(name)
        node = index.producer(name)
        if name in given:
            found.add(name)
        elif node is not None and node.op_type != "Shape":
            pending.extend(node.input)
    return frozenset(found)


def _table_rows(index: GraphIndex, symbolic: Symbolic, name: str) -> int | None:
    """The rows of the smallest table that an input indexes, None if it indexes none."""
    found: list[int] = []
    pending, seen = [name], {name}
    while pending:
        tensor = pending.pop()
        for node in index.consumers(tensor):
            if node.op_type in ("Gather", "GatherElements") and len(node.input) > 1 and node.input[1] == tensor:
                shape = symbolic.shape(node.input[0])
                axis = next((a.i for a in node.attribute if a.name == "axis"), 0)
                if shape is not None and shape[axis].constant is not None:
                    found.append(shape[axis].constant or 1)
            elif node.op_type in _THROUGH and node.output[0] not in seen:
                seen.add(node.output[0])
                pending.append(node.output[0])
    return min(found) if found else None
