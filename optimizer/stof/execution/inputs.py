# SPDX-License-Identifier: Apache-2.0
"""Inputs for a model that nobody described: ranges of integers from the nodes that read them, padding for masks."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper

from stof.errors import UnsupportedError
from stof.execution import drawn_values
from stof.execution.case import Case, Counts, Padding
from stof.execution.fused_counts import find_fused_counts
from stof.execution.input_sizes import InputSizes
from stof.execution.input_uses import InputUse, find_constant_steps, find_inputs_behind, find_source, input_uses
from stof.execution.static_caches import find_filled_lengths, find_static_caches
from stof.graph.index import GraphIndex
from stof.symbolic import Symbolic
from stof.symbolic.algebra.piecewise import reads_input
from stof.symbolic.algebra.sizes import evaluate, holds, size_names
from stof.symbolic.algebra.terms import Cond, Int, integer
from stof.symbolic.facts import dtype_kind

_DECIDES = 1000.0  # what a number of an input adds to scores where it says whether a key counts
_FLOATS = frozenset({int(TensorProto.FLOAT), int(TensorProto.FLOAT16), int(TensorProto.BFLOAT16)})
_FEW = 4  # numbers of an input that are scales rather than data


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
        scores: the shapes of the scores whose lengths cases state, by default those of all softmaxes.
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
        scores: Sequence[Sequence[Int]] | None = None,
    ) -> None:
        self.model = model
        self.symbolic = symbolic
        self.limits = limits or {}
        self._divides: bool | None = None
        self._index = index or GraphIndex(model.graph)
        index = self._index
        self.uses = input_uses(index, symbolic)
        initializers = {t.name for t in model.graph.initializer}
        # Defaults that a caller may override are drawn where masks read them.
        defaults = initializers - pads - set(self.limits) - segments
        self.inputs = [i for i in model.graph.input if i.name not in defaults]
        input_names = {i.name for i in self.inputs}
        self.counts = frozenset(self.limits) & input_names  # inputs that masks read as numbers of keys
        read = self.counts | (looking & input_names)
        self.taken = find_fused_counts(fused, symbolic, read) if read and fused is not None else {}
        self.from_end = {n for n in looking & input_names if self.uses.rows(n) is not None} - set(self.taken)
        caches = find_static_caches(index, symbolic, input_names)
        self.filled = find_filled_lengths(index if fused is None else GraphIndex(fused), symbolic, input_names)
        # Numbers of keys that are counted are counted in padding masks, or from where a static cache is written.
        vectors = {n for n in input_names if dtype_kind(symbolic.dtype(n)) == "i" and len(symbolic.shape(n) or ()) < 2}
        self.writes = find_inputs_behind(index, frozenset(c.first for c in caches), vectors)
        self.pads = find_inputs_behind(index, pads, input_names)
        self.pads |= find_inputs_behind(index, frozenset(self.limits) - input_names, input_names) - self.writes
        self.forbidding = forbidding & input_names
        self.added = frozenset(source for name in added if (source := find_source(index, name)) in input_names)
        switches = [_switch(index, symbolic, name) for name in sorted(added)]
        self.switches = {name: forbids for name, forbids in filter(None, switches) if name in input_names}
        self.documents = (segments & input_names) - self.pads
        self.restarting = find_inputs_behind(index, segments - input_names, input_names) - self.pads
        self.dimensions = InputSizes(
            symbolic,
            [symbolic.shape(i.name) or () for i in self.inputs],
            _find_scores(model.graph, symbolic) if scores is None else scores,
            self._row_lengths(),
            [(c.capacity, c.new) for c in caches],
            self._is_taken,
        )
        sizes = [size for pair in symbolic.equalities for size in pair] if self.counts else []
        sized = {atom.args[0] for size in sizes for atom in size.atoms() if atom.kind == "read"}
        # Numbers of keys of which a graph takes the largest as the length of its masks.
        self.longest = find_inputs_behind(index, frozenset(map(str, sized)), input_names) & self.counts
        # What failed runs have shown: the ends of ranges, and numbers of inputs about which the graph says nothing.
        self.narrowed: dict[str, tuple[int, int]] = {}
        self.numbers: dict[str, int] = {}
        # What runs that took too long have shown: by which factor numbers are smaller, or larger, than usual ones.
        self.magnitudes: dict[str, float] = {}

    def _row_lengths(self) -> list[tuple[Sequence[Int], Int]]:
        """The shapes of inputs that state the lengths of rows, as recurrent layers read them, and their largest values."""
        lengths: list[tuple[Sequence[Int], Int]] = []
        for value in self.inputs:
            if dtype_kind(value.type.tensor_type.elem_type) == "i":
                ends = [b.high for b in self.uses.bounds(value.name) if b.use is InputUse.LENGTH and b.is_hard]
                shape = self.symbolic.shape(value.name) or ()
                lengths += [(shape, end) for end in ends if end is not None]
        return lengths

    @property
    def rows(self) -> dict[str, int | None]:
        """The rows of the smallest table that each input indexes, None if it indexes none."""
        return {i.name: self.uses.rows(i.name) for i in self.inputs}

    def sizes(self, case: Case) -> dict[str, int]:
        """Every dimension name at a case: leading ones are batches, all others lengths of scores."""
        return self.dimensions.choose(self.dimensions.fit(case))

    def _is_taken(self, conditions: Sequence[tuple[str, bool]], case: Case, sizes: Mapping[str, int]) -> bool:
        """Whether a case takes the branch of an If, by switches that are drawn and conditions on sizes."""
        return all(self._decide(tensor, case, sizes) == wanted for tensor, wanted in conditions)

    def _decide(self, tensor: str, case: Case, sizes: Mapping[str, int]) -> bool | None:
        """What a condition is in a case; None where that is not known."""
        value = self.symbolic.value(tensor)
        if value is None or value.kind != "b":
            return None
        condition = value.at(tuple(integer(0) for _ in value.shape))
        if not isinstance(condition, Cond):
            return None
        if condition.kind in ("read", "unread"):
            is_switch = self._is_switch(str(condition.args[0]))
            return _is_on(case) == (condition.kind == "read") if is_switch else None
        try:
            return holds(condition, sizes)
        except (UnsupportedError, ZeroDivisionError):
            return None

    def _is_switch(self, name: str) -> bool:
        """Whether an input is one boolean, which an If reads."""
        shape = self.symbolic.shape(name)
        is_single = shape is not None and all(d.constant == 1 for d in shape)
        return is_single and dtype_kind(self.symbolic.dtype(name)) == "b" and name in {i.name for i in self.inputs}

    def prompt_case(self, tokens: int) -> Case:
        """One sequence without a past, of so many tokens, or of as many as the model takes."""
        return Case(1, tokens, Padding.NONE)

    def token_case(self, keys: int) -> Case | None:
        """A step of one token, behind ``keys - 1`` others in a KV cache; None where the model has no cache that is known.

        Here these are models whose keys are a past and the new ones, as exporters concatenate them.
        """
        for shape in self.dimensions.scores:
            if len(shape) < 2:
                continue
            queries, past = shape[-2], shape[-1] - shape[-2]
            if all(d.atom is not None and d.atom.kind == "size" for d in (queries, past)) and keys > 1:
                names = [next(iter(size_names(d))) for d in (queries, past)]
                return Case(1, keys, Padding.NONE, ((names[0], 1), (names[1], keys - 1)))
        return None

    def draw(
        self, case: Case, rng: np.random.Generator, needed: Collection[str] | None = None
    ) -> dict[str, np.ndarray]:
        """One set of inputs by name; of float inputs those that are ``needed``, None: all of them."""
        sizes = self.sizes(case)
        feeds = {}
        for value in self.inputs:
            if needed is not None and value.name not in needed and value.type.tensor_type.elem_type in _FLOATS:
                continue  # caches may be large
            shape = self.symbolic.shape(value.name)
            if shape is None:
                raise ValueError(f"input {value.name!r} is no tensor of known rank")
            dims = [evaluate(d, sizes) for d in shape]
            dtype = np.dtype(helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type))
            low, high = self.range(value.name, sizes) if value.name in self.writes else (None, None)
            if low is not None and high is not None:
                draw = drawn_values.draw_indices if self._is_of_rows(value.name) else drawn_values.draw_next_positions
                drawn = draw(dims, max(low, 0), high, rng)
            elif value.name in self.counts:
                drawn = self._counts(value.name, dims, dtype, case, sizes, rng)
            else:
                drawn = self._draw_one(value.name, dims, dtype, case, sizes, rng)
            feeds[value.name] = np.asarray(drawn, dtype)  # arithmetic makes NumPy scalars of arrays without axes
        if case.counts is Counts.USUAL:
            for name, cache in self.filled.items():
                ends = (feeds[cache.first] if cache.first else np.zeros(1, np.int64)) + evaluate(cache.new, sizes)
                ends = np.minimum(ends, evaluate(cache.capacity, sizes))  # positions of a circular cache go on
                feeds[name] = np.broadcast_to(ends, feeds[name].shape).astype(feeds[name].dtype)
        return feeds

    def range(self, name: str, sizes: Mapping[str, int]) -> tuple[int | None, int | None]:
        """What an integer input may hold at these sizes for ONNX Runtime to run; None is no end."""
        ends = [b.range(sizes) for b in self.uses.bounds(name) if b.is_hard]
        ends += [self.narrowed[name]] if name in self.narrowed else []
        low = max((low for low, _ in ends if low is not None), default=None)
        high = min((high for _, high in ends if high is not None), default=None)
        return low, high if high is None or low is None else max(low, high)

    def _counts(
        self,
        name: str,
        dims: list[int],
        dtype: np.dtype,
        case: Case,
        sizes: Mapping[str, int],
        rng: np.random.Generator,
    ) -> np.ndarray:
        """Numbers of keys; or flags."""
        most = evaluate(self.limits[name], sizes)
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
        first, last = self.range(name, sizes)
        if first is not None or last is not None:
            rows = self.uses.rows(name)
            counts = np.clip(counts, -rows if rows is not None and name in self.from_end else first, last)
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
        self,
        name: str,
        dims: list[int],
        dtype: np.dtype,
        case: Case,
        sizes: Mapping[str, int],
        rng: np.random.Generator,
    ) -> np.ndarray:
        if name in self.pads or name in self.switches:
            mask = drawn_values.draw_padding(dims, case, rng, self._counts_divide())
            forbids = name in self.forbidding or self.switches.get(name, False)
            return (1 - mask if forbids else mask).astype(dtype)
        if self._is_switch(name):
            return np.full(dims, _is_on(case), dtype)
        if dtype.kind == "b":
            # Most likely a mask, and a stated one may forget it.
            return drawn_values.draw_padding(dims, case, rng, self._counts_divide()).astype(dtype)
        if name in self.documents or name in self.restarting:
            ids, positions = drawn_values.draw_documents(dims, rng)
            last = self.range(name, sizes)[1]
            limit = 1 << 30 if last is None else last + 1
            drawn = (ids if name in self.documents else positions) % limit
            if name in self.from_end and dtype.kind == "i" and drawn.ndim:
                drawn[::-1][::2] -= limit  # in the last row, and every second one before it
            return drawn.astype(dtype)
        if dtype.kind in "iu":
            integers = self._integers(name, dims, case, sizes, rng)
            if name in self.magnitudes:
                integers = drawn_values.reduce_integers(integers, self.magnitudes[name], self.range(name, sizes)[0])
            return integers.astype(dtype)
        magnitude = self.magnitudes.get(name, 1.0)
        if self.is_factor(name):
            return (magnitude * drawn_values.draw_factors(dims, rng)).astype(dtype)
        numbers = (magnitude * rng.standard_normal(dims)).astype(dtype)
        return drawn_values.mask_entries(numbers, rng) if name in self.added and len(dims) > 1 else numbers

    def _integers(
        self, name: str, dims: list[int], case: Case, sizes: Mapping[str, int], rng: np.random.Generator
    ) -> np.ndarray:
        """Integers by the use that says most about them; where no node says anything, positions."""
        low, high = self.range(name, sizes)
        if name in self.numbers:
            return np.full(dims, self.numbers[name])
        bounds = self.uses.bounds(name)
        use = min((b.use for b in bounds), key=list(InputUse).index, default=None)
        if use in (InputUse.SLOT, InputUse.INDEX) and high is None:
            soft = [b.range(sizes)[1] for b in bounds if b.use is use]
            high = min((end for end in soft if end is not None), default=None)
        if use in (InputUse.SLOT, InputUse.INDEX) and low is not None and high is not None and high >= 0:
            low = max(low, 0)  # what is computed from an index is counted from the end at most
        match use:
            case InputUse.SLOT if high is not None:
                return drawn_values.draw_slots(dims, low or 0, high, rng)
            case InputUse.INDEX if high is not None:
                return drawn_values.draw_indices(dims, low or 0, high, rng)
            case InputUse.MASK:
                return drawn_values.draw_padding(dims, case, rng, True)
            case InputUse.LENGTH | InputUse.SIZE if self._has_one_a_row(name) or any(b.is_hard for b in bounds):
                ranges = [b.range(sizes) for b in bounds if b.use is use]
                least = max((end for end, _ in ranges if end is not None), default=1)
                limit = min((end for _, end in ranges if end is not None), default=self._find_longest(case, sizes))
                most = max(least, limit if high is None else min(limit, high))
                return drawn_values.draw_lengths(dims, least, most, case, rng)
            case InputUse.SHAPE:
                return self._shape_values(name, dims)
            case InputUse.VALUE:
                number = max((end for b in bounds if (end := b.range(sizes)[0]) is not None), default=0)
                return np.full(dims, number)
        return drawn_values.draw_positions(dims, low, high)

    def is_factor(self, name: str) -> bool:
        """Whether a float input holds a few numbers near 1, as scales, speeds and temperatures are."""
        shape = self.symbolic.shape(name) or ()
        sizes = [d.constant for d in shape]
        is_float = dtype_kind(self.symbolic.dtype(name)) == "f"
        return is_float and len(sizes) <= 1 and all(n is not None and n <= _FEW for n in sizes)

    def _is_of_rows(self, name: str) -> bool:
        """Whether an input is one number, or a vector of one number for each row of a batch: others are positions."""
        return all(
            d.constant == 1 or size_names(d) & self.dimensions.batch_names for d in self.symbolic.shape(name) or ()
        )

    def _has_one_a_row(self, name: str) -> bool:
        """Whether an input has one number for each row of a batch, or one for all: others that are compared are positions."""
        shape = self.symbolic.shape(name) or ()
        names = size_names(shape[0]) if shape else set()
        return all(d.constant == 1 for d in shape[1:]) and names <= self.dimensions.batch_names

    def _find_longest(self, case: Case, sizes: Mapping[str, int]) -> int:
        """The largest length of an input: that of rows whose own lengths are given beside them."""
        names = set(sizes) - self.dimensions.batch_names
        return max((sizes[n] for n in names), default=case.length)

    def _shape_values(self, name: str, dims: list[int]) -> np.ndarray:
        """A shape that changes nothing: ones, and for Reshape the sizes that there are."""
        values = np.ones(dims, np.int64)
        readers = {n.op_type for n in self._index.consumers(name)}
        if readers == {"Reshape"} and values.ndim:
            values[:] = 0
            values[-1:] = -1
        return values


def _is_on(case: Case) -> bool:
    """What a switch, which an If reads, is in a case: on in the first one of all, off in the last one."""
    return case.padding is Padding.LEFT or (case.padding is Padding.NONE and case.batch > 1)


def _find_scores(graph: onnx.GraphProto, symbolic: Symbolic) -> list[Sequence[Int]]:
    """The shapes of what softmaxes give, where they are known."""
    shapes = (symbolic.shape(n.output[0]) for n in graph.node if n.op_type == "Softmax")
    return [s for s in shapes if s is not None]


def _switch(index: GraphIndex, symbolic: Symbolic, tensor: str) -> tuple[str, bool] | None:
    """The tensor of zeros and ones that what is added to scores is made of, ``(1 - mask) * -10000``; whether ones forbid."""
    tensor, steps = find_constant_steps(index, tensor, symbolic.constant)
    values = np.array([0.0, 1.0])
    with np.errstate(all="ignore"):
        for operate, left, right in reversed(steps):
            values = operate(values if left is None else left, values if right is None else right)
        apart = abs(values[1] - values[0])  # infinite or NaN of what zeros are divided by: no mask of zeros and ones
    if not _DECIDES <= apart < math.inf or dtype_kind(symbolic.dtype(tensor)) != "f":
        return None
    return tensor, bool(values[1] < values[0])
