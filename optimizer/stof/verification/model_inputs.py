# SPDX-License-Identifier: Apache-2.0
"""Inputs on which the optimized model and the original are compared: those that a user gives, and drawn ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

import numpy as np
import onnx

from stof.errors import InputsRefusedError, UnsupportedError
from stof.execution.case import Case, Padding
from stof.execution.given_inputs import GivenFeed
from stof.execution.inputs import InputMaker
from stof.execution.narrow_inputs import InputNarrower
from stof.execution.reduce_inputs import InputReducer
from stof.execution.run_failure import parse_failure
from stof.symbolic import Symbolic
from stof.symbolic.algebra.sizes import evaluate
from stof.verification.input_labels import describe_feeds, describe_sizes

BATCH_WITH_ALL_PADDING = 4  # rows of a batch, of which the last one is all padding
_LENGTHS = (53, 9)
_CHEAP_BYTES = 64 << 20  # of one site's scores, up to which a batch has more than two rows
_FEW_TOKENS = 256  # that any model can be given
_FLOATS = frozenset(
    {onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16, onnx.TensorProto.DOUBLE}
)
_MOST_SHOWN = 12  # inputs of a message


class OutputRows(Protocol):
    """Which rows of outputs are defined in a run. An op computes it from the run's inputs."""

    def padded_queries(self, feed: Mapping[str, np.ndarray]) -> np.ndarray | None:
        """Which queries [B, S] are padding; None where that is not known."""

    def cache_rows(self, output: str, feed: Mapping[str, np.ndarray], rows: int) -> np.ndarray | None:
        """Which of the rows [B, ``rows``] of a KV cache hold keys; None where the output is none, or nothing says it."""


@dataclass(frozen=True)
class ModelInputs:
    """How inputs of a model are drawn, by an op that knows what they mean.

    Attributes:
        working: the original, or a copy with its fused nodes expanded, whose tensors are captured.
        symbolic: facts of the working copy.
        maker: draws inputs.
        cases: sets of inputs, those most likely to expose errors first; long ones have at most so many tokens.
        may_carry_nan: whether NaN of queries without a key may spread further in the original than in the result.
        user_feeds: sets of inputs of the user's, which come first.
        shapes: the least and the largest size in use of dimensions, by name.
        rows: which rows of outputs are defined; None: all but those of padding masks.
        original: standard nodes that compute the original, of whose nodes the CPU provider has no kernel; None: it has them.
    """

    working: onnx.ModelProto
    symbolic: Symbolic
    maker: InputMaker
    cases: Callable[[float], list[Case]]
    may_carry_nan: bool = False
    user_feeds: tuple[GivenFeed, ...] = ()
    shapes: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    rows: OutputRows | None = None
    original: onnx.ModelProto | None = None

    @cached_property
    def _narrower(self) -> InputNarrower:
        return InputNarrower(self.maker)

    @cached_property
    def reducer(self) -> InputReducer:
        """Makes the numbers smaller that decide how long a run takes."""
        return InputReducer(self.maker)

    def select_cases(self, tokens: float) -> list[Case]:
        """The user's sets of inputs, then drawn ones with sizes in use and as many rows as are cheap.

        Args:
            tokens: how many a set may have.
        """
        user_cases = [self._describe_given(feed) for feed in self.user_feeds]
        if user_cases and not self._can_draw():
            return user_cases
        sized = [self.maker.dimensions.fit(self._limit_sizes(case)) for case in self.cases(tokens)]
        drawn = [self._limit_rows(case, tokens) for case in sized]
        return [*user_cases, *self._drop_repetitions(drawn)]

    @property
    def may_have_padding(self) -> bool:
        """Whether a case's padding may change its inputs: some are no floats, or are drawn by it."""
        maker = self.maker
        has_others = any(v.type.tensor_type.elem_type not in _FLOATS for v in maker.inputs)
        return has_others or bool(maker.pads or maker.switches)

    def _drop_repetitions(self, cases: Sequence[Case]) -> list[Case]:
        """One case of each kind of inputs: where all sizes are fixed, lengths and padding may change nothing."""
        case_by_kind: dict[object, Case] = {}
        for case in cases:
            padding = case.padding if self.may_have_padding else None
            kind = tuple(sorted(self.maker.sizes(case).items())), case.counts, padding
            case_by_kind.setdefault(kind, case)
        return list(case_by_kind.values())

    def _can_draw(self) -> bool:
        return all(self.symbolic.shape(value.name) is not None for value in self.maker.inputs)

    def _limit_sizes(self, case: Case) -> Case:
        """A case with the dimensions that the user has limited in their ranges."""
        if not self.shapes:
            return case
        sizes = self.maker.sizes(case)
        limited = {n: min(max(sizes[n], low), high) for n, (low, high) in self.shapes.items() if n in sizes}
        changed = {n: size for n, size in limited.items() if size != sizes[n]}
        # What is in range stays as it is, also where it was chosen to agree with what is not.
        kept = {n: size for n, size in limited.items() if changed and n not in changed}
        return replace(case, other=tuple({**kept, **dict(case.other), **changed}.items()))

    def _limit_rows(self, case: Case, tokens: float) -> Case:
        """A case with fewer rows where the scores of one site are large, or there are many tokens."""
        least = 2 if case.padding is Padding.LEAST else 1
        for batch in sorted({case.batch, 2, 1}, reverse=True):
            tried = replace(case, batch=batch)
            if least <= batch <= case.batch and (batch == least or self._is_cheap(tried, tokens)):
                return tried
        return case

    def _is_cheap(self, case: Case, tokens: float) -> bool:
        sizes = self.maker.sizes(case)
        largest, longest = 0, 0
        for shape in self.maker.dimensions.scores:
            try:
                dims = [evaluate(d, sizes) for d in shape]
            except (UnsupportedError, ZeroDivisionError):
                continue
            largest = max(largest, 4 * math.prod(dims))
            longest = max(longest, *dims[-2:]) if len(dims) > 1 else longest
        affordable = case.batch * longest <= max(tokens, _FEW_TOKENS)
        return affordable and (case.batch <= 2 or largest <= _CHEAP_BYTES)

    def _describe_given(self, feed: GivenFeed) -> Case:
        """The sizes of a user's inputs, and whether they are padded."""
        sizes: dict[str, int] = {}
        for name, array in feed.arrays.items():
            for dim, size in zip(self.symbolic.shape(name) or (), array.shape, strict=False):
                if dim.atom is not None and dim.atom.kind == "size":
                    sizes.setdefault(str(dim.atom.args[0]), size)
        batches = [n for name, n in sizes.items() if name in self.maker.dimensions.batch_names]
        lengths = [n for name, n in sizes.items() if name not in self.maker.dimensions.batch_names]
        masks = [n for n in self.maker.pads | set(self.maker.switches) if n in feed.arrays]
        is_padded = bool(self.maker.counts) or any(np.ptp(feed.arrays[n]) for n in masks if feed.arrays[n].size)
        padding = Padding.RIGHT if is_padded else Padding.NONE
        return Case(
            max(batches, default=1), max(lengths, default=1), padding, tuple(sizes.items()), source=feed.label
        )  # fmt: skip

    def name_sizes(self, case: Case, feed: Mapping[str, np.ndarray] | None = None) -> Case:
        """The case that is written with the names that the model gives its dimensions and inputs.

        Args:
            case: its sizes.
            feed: its inputs, where they are drawn already: single numbers among them say how long a past is, for instance.
        """
        if feed is not None:
            return case.with_words(describe_feeds(self.working.graph.input, feed))
        try:
            sizes = self.maker.sizes(case)
            shapes = {
                value.name: [evaluate(d, sizes) for d in shape]
                for value in self.maker.inputs
                if (shape := self.symbolic.shape(value.name)) is not None
            }
        except (KeyError, UnsupportedError, ZeroDivisionError):
            return case
        return case.with_words(describe_sizes(self.working.graph.input, shapes))

    def draw(self, cases: Sequence[Case]) -> list[dict[str, np.ndarray]]:
        """The inputs of each case, the same at each call."""
        arrays_by_label = {feed.label: feed.arrays for feed in self.user_feeds}
        return [
            dict(arrays_by_label[c.source]) if c.source else self.maker.draw(c, np.random.default_rng(i))
            for i, c in enumerate(cases)
        ]

    def narrow(self, model: onnx.ModelProto, message: str, case: Case, feed: Mapping[str, np.ndarray]) -> bool:
        """Draws other inputs from now on, going by a run that failed; False where nothing else is known to try.

        Args:
            model: the one that did not run.
            message: ONNX Runtime's.
            case: the sizes of the inputs.
            feed: the inputs.
        """
        return not case.source and self._narrower.narrow(model, message, case, feed)

    def shorten(self, case: Case) -> bool:
        """Draws shorter inputs from now on where slices went beyond their tables; False where none does."""
        return not case.source and self.maker.dimensions.fit_slices(case)

    def restate(self, case: Case) -> Case:
        """The case that names the sizes which failed runs have changed."""
        if case.source:
            return case
        case = self.maker.dimensions.fit(case)
        sizes, changed = self.maker.sizes(case), self.maker.dimensions.changed_names
        stated = {name: sizes[name] for name in sorted(changed & set(sizes)) if sizes[name] != case.length}
        return replace(case, other=tuple({**dict(case.other), **stated}.items()))

    def explain_refusal(self, case: Case, feed: Mapping[str, np.ndarray], message: str) -> InputsRefusedError:
        """The error for a model that runs on none of the inputs.

        Args:
            case: the inputs that were tried last.
            feed: their arrays.
            message: ONNX Runtime's.
        """
        shown = [_describe_array(name, feed[name]) for name in list(feed)[:_MOST_SHOWN]]
        more = f"; and {len(feed) - len(shown)} more" if len(feed) > len(shown) else ""
        tried = f"{self.name_sizes(case)}: {'; '.join(shown)}{more}"
        if parse_failure(message).is_of_capacity:
            return InputsRefusedError(
                f"none of the batches that stof drew has as few tokens as --unpad-capacity makes room for. Tried {tried}. "
                f"ONNX Runtime says: {message}. Give batches that fit with --inputs FILE, a larger capacity, or use "
                "--no-verify; nothing was written"
            )
        return InputsRefusedError(
            f"ONNX Runtime does not run the original on any inputs that stof drew. Tried {tried}. "
            f"ONNX Runtime says: {message}. Give inputs that it runs on with --inputs FILE (.npz, a folder of "
            "input_*.pb, or module:function), or use --no-verify; nothing was written"
        )

    def padded_queries(self, case: Case, feed: Mapping[str, np.ndarray]) -> np.ndarray | None:
        """Which positions [B, S] are padding, by the op or all masks of that shape; None where that is not known."""
        if case.padding is Padding.NONE:
            return None
        if self.rows is not None:
            return self.rows.padded_queries(feed)
        masks = [name for name in sorted(self.maker.pads) if name in feed and feed[name].ndim == 2]
        if not masks:
            return None
        padded = [(feed[n] == 0) != (n in self.maker.forbidding) for n in masks]
        return np.logical_and.reduce(padded) if len({x.shape for x in padded}) == 1 else None

    def cache_rows(self, output: str, feed: Mapping[str, np.ndarray], shape: Sequence[int]) -> np.ndarray | None:
        """Which rows [B, rows] of an output [B, heads, rows, size] hold keys; None where it is no KV cache."""
        return self.rows.cache_rows(output, feed, shape[2]) if self.rows is not None and len(shape) == 4 else None


def default_inputs(model: onnx.ModelProto) -> ModelInputs:
    """Inputs of a model of which no op knows more than their types and shapes."""
    symbolic = Symbolic(model)
    return ModelInputs(model, symbolic, InputMaker(model, symbolic, frozenset()), _default_cases)


def _default_cases(tokens: float) -> list[Case]:
    return [Case(2 if 2 * length <= tokens else 1, length, Padding.NONE) for length in _LENGTHS]


def _describe_array(name: str, array: np.ndarray) -> str:
    """Name, type, shape and range."""
    numbers = array[np.isfinite(array)] if array.dtype.kind == "f" else array
    values = f" of {numbers.min():.4g} to {numbers.max():.4g}" if numbers.size and array.dtype.kind in "iuf" else ""
    if array.dtype.kind in "iu" and array.size:
        values = f" of {array.min()} to {array.max()}"
    return f"{name!r} {array.dtype} {list(array.shape)}{values}"
