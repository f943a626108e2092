# SPDX-License-Identifier: Apache-2.0
"""Inputs of a decoder that agree with each other: masks or lengths, the total, caches that have room, positions."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx

from stof.cached_attention.run_lengths import RunLengths
from stof.cached_attention.site import CacheSite
from stof.errors import UnsupportedError
from stof.execution.case import Case, Padding
from stof.execution.input_sizes import find_least
from stof.execution.input_uses import find_inputs_behind, find_source
from stof.execution.inputs import InputMaker
from stof.execution.runtime_faults import RuntimeFault
from stof.graph.index import GraphIndex
from stof.symbolic import LONGEST, Int, Symbolic, integer
from stof.symbolic.algebra.sizes import evaluate, size_names

_LONGEST_WINDOW = 640  # windows above are longer than any input that is drawn
_DEFAULT_WINDOW = 16
_PASTS = ("past_key", "past_value")
_DRAWN_SCALES = (0.01, 0.05)  # at which numbers near 1 neither vanish nor saturate


@dataclass(frozen=True)
class _Step:
    """Sizes of a step: batch, new tokens, keys after it, further rows of the cache; ragged: sequences differ in length."""

    batch: int
    queries: int
    total: int
    slack: int
    ragged: bool


class CacheInputMaker(InputMaker):
    """Draws inputs of a decoder; a case's length is the number of keys after the step, and ``other`` states the sizes.

    Args:
        model: the decoder.
        symbolic: its facts.
        sites: those that are replaced.
        lengths: reads lengths from inputs.
        shapes: the least and the largest size in use of dimensions, by name.
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        symbolic: Symbolic,
        sites: Sequence[CacheSite],
        lengths: RunLengths,
        shapes: Mapping[str, tuple[int, int]] | None = None,
    ) -> None:
        self.sites = tuple(sites)
        self.limits_of_user = shapes or {}
        self.lengths_of = lengths
        index = GraphIndex(model.graph)
        input_names = {i.name for i in model.graph.input}
        behind = find_inputs_behind(index, frozenset(s.input("seqlens_k") for s in sites), input_names)
        self.masks = frozenset(n for n in behind if len(symbolic.shape(n) or ()) == 2)
        scores = [[s.batch, integer(s.num_heads), s.queries, s.total] for s in sites if s.total is not None]
        super().__init__(model, symbolic, self.masks, index=index, scores=scores or None)
        self._sources = {
            name: find_source(index, name) for s in sites for name in (s.input("seqlens_k"), s.input("position_ids"))
        }
        self._input_names = input_names
        self._outputs = {o.name for o in model.graph.output}
        totals = frozenset(s.input("total_sequence_length") for s in sites)
        self._total_inputs = sorted(
            n for n in find_inputs_behind(index, totals, input_names) if n not in self.masks and self._is_single(n)
        )
        self._behind = {
            t: find_inputs_behind(index, frozenset({t}), input_names) for t in (s.input("seqlens_k") for s in sites)
        }
        self._length_inputs = sorted(n for n in behind if len(symbolic.shape(n) or ()) == 1)

    def _is_single(self, name: str) -> bool:
        shape = self.symbolic.shape(name)
        return shape is not None and all(d.constant == 1 for d in shape)

    def sizes(self, case: Case) -> dict[str, int]:
        """Every dimension name at a case; where it states no sizes, those of a prompt that fills the cache."""
        prompt = _Step(case.batch, case.length, case.length, 0, False)
        stated = {**dict(self._case(self._limit(prompt) or prompt).other), **dict(case.other)}
        return super().sizes(replace(case, other=tuple(stated.items())))

    def prompt_case(self, tokens: int) -> Case:
        """One sequence without a past, within rotary tables and sizes of the model."""
        prompt = _Step(1, tokens, tokens, 0, False)
        return self._case(self._limit(prompt) or prompt)

    def token_case(self, keys: int) -> Case | None:
        """A step of one token, behind ``keys - 1`` others or fewer; None where sizes of the model rule it out."""
        step = self._limit(_Step(1, 1, keys, 0, False))
        return None if step is None or step.queries > 1 or step.total == 1 else self._case(step)

    def draw(
        self, case: Case, rng: np.random.Generator, needed: Collection[str] | None = None
    ) -> dict[str, np.ndarray]:
        """One set of inputs by name, in which lengths, masks and positions agree."""
        feed = super().draw(case, rng, needed)
        for name in self._total_inputs:
            self._set_number(feed, name, self.sites[0].input("total_sequence_length"), np.array(case.length))
        seen: set[str] = set()
        for site in self.sites:
            tensor = site.input("seqlens_k")
            if tensor not in seen:
                seen.add(tensor)
                self._set_lengths(feed, site, case, rng)
            self._set_positions(feed, site)
            if site.quantized:
                _set_quantized(feed, site, rng)
        return feed

    def _set_lengths(self, feed: dict[str, np.ndarray], site: CacheSite, case: Case, rng: np.random.Generator) -> None:
        """Makes masks, or inputs that hold lengths, say how many keys each sequence has."""
        queries = self.lengths_of.size(site.queries, feed)
        total = self.lengths_of.read(site.input("total_sequence_length"), feed)
        batch = self.lengths_of.size(site.batch, feed)
        if queries is None or total is None or total.size != 1 or batch is None:
            return
        most = int(total.reshape(-1)[0])
        least = 1 if most == queries else min(queries, most)
        keys = np.full(batch, most, np.int64)
        if case.padding is not Padding.NONE and batch > 1:
            keys[1:] = rng.integers(least, most, batch - 1, endpoint=True)
            keys[2:3] = least  # one sequence with as few as there can be
        for name in sorted(self.masks):
            mask = feed[name]
            if mask.shape[0] == batch:
                feed[name] = (np.arange(mask.shape[1])[None] < keys[:, None]).astype(mask.dtype)
        for name in self._length_inputs:
            if feed[name].shape == keys.shape and name in self._behind[site.input("seqlens_k")]:
                self._set_number(feed, name, site.input("seqlens_k"), keys - site.uncounted_keys)

    def _set_number(self, feed: dict[str, np.ndarray], name: str, tensor: str, wanted: np.ndarray) -> None:
        """Sets an input so that a tensor, which is that input or its sum with a constant, has the wanted value."""
        shape, dtype = feed[name].shape, feed[name].dtype
        feed[name] = np.array(np.broadcast_to(wanted, shape), dtype)
        number = self.lengths_of.read(tensor, feed)
        if number is not None and number.size == wanted.size:
            away = wanted.reshape(-1) - number.reshape(-1)
            feed[name] = np.array(feed[name] + away.reshape(shape), dtype)

    def _set_positions(self, feed: dict[str, np.ndarray], site: CacheSite) -> None:
        source = self._sources.get(site.input("position_ids"), "")
        keys, queries = self.lengths_of.keys(site, feed), self.lengths_of.size(site.queries, feed)
        total = self.lengths_of.read(site.input("total_sequence_length"), feed)
        if source not in feed or feed[source].ndim != 2 or keys is None or queries is None or total is None:
            return
        before = np.zeros_like(keys) if int(total.reshape(-1)[0]) == queries else keys - queries
        if feed[source].shape == (len(keys), queries):
            feed[source] = (before[:, None] + np.arange(queries)[None]).astype(feed[source].dtype)

    def steps(self, tokens: float, pads_prompts: bool) -> list[Case]:
        """Cases: a padded prompt, one token of ragged sequences, several tokens behind a past, a prompt beyond the windows.

        Args:
            tokens: how many a set may have.
            pads_prompts: whether prompts of a batch may have different lengths, with padding to the right.
        """
        lengths = [s.reach if s.layout is None else s.layout.first_sparse_length for s in self.sites]
        above = max([x for x in lengths if 0 < x <= _LONGEST_WINDOW], default=_DEFAULT_WINDOW) + 37
        wanted = [
            _Step(3, 11, 11, 10, pads_prompts),
            _Step(3, 1, above, 5, True),
            _Step(1, 5, above + 7, 3, False),
            _Step(2 if 2 * above <= tokens else 1, above, above, 0, False),
            _Step(2, 1, 9, 6, True),
        ]
        if any(s.layout is not None for s in self.sites) and RuntimeFault.SHORT_SPARSE_SEQUENCES.is_present():
            # Site checks compare lengths that differ.
            wanted = [replace(step, ragged=False) for step in wanted]
        cases = [self._case(limited) for step in wanted if (limited := self._limit(step)) is not None]
        return list(dict.fromkeys(cases or [self._case(step) for step in wanted]))

    def case_of_step(self, queries: int, total: int, rows: int) -> Case | None:
        """The case of one sequence in a step; None where sizes are fixed to others.

        Args:
            queries: new tokens.
            total: keys after the step.
            rows: of the caches, where they are not fixed.
        """
        step = _Step(1, queries, total, rows - total, False)
        limited = self._limit(step)
        is_same = limited is not None and replace(limited, slack=step.slack) == step
        return self._case(limited) if limited is not None and is_same else None

    def knows_lengths(self, feed: Mapping[str, np.ndarray]) -> bool:
        """Whether lengths follow from these inputs, so that ``draw`` has made them agree."""
        totals = (self.lengths_of.read(s.input("total_sequence_length"), feed) for s in self.sites)
        return all(self.lengths_of.keys(s, feed) is not None for s in self.sites) and all(t is not None for t in totals)

    def caches(self) -> dict[str, str]:
        """The output with the present of each input with a past; empty where some cache is no input or no output."""
        presents = {s.input(n): o for s in self.sites for n, o in zip(_PASTS, s.node.output[1:3], strict=True)}
        return presents if set(presents) <= self._input_names and set(presents.values()) <= self._outputs else {}

    def _limit(self, step: _Step) -> _Step | None:
        """A step within fixed sizes, rotary tables and the user's limits; None where there is none of its kind."""
        sites = self.sites
        least, most = self._range([s.queries for s in sites])
        fewest, longest = self._range([s.total for s in sites if s.total is not None])
        least_rows, rows = self._range([s.capacity for s in sites if not s.sliding])
        tables = [self.symbolic.shape(s.input("cos_cache")) for s in sites if s.does_rotary]
        positions = [shape[0].constant for shape in tables if shape is not None and shape[0].constant]
        described = [s.layout.length for s in sites if s.layout is not None]
        longest = min([longest, rows, *positions, *described])
        low, high = self._range([s.batch for s in sites])
        batch = min(max(step.batch, low), high)
        if step.queries == step.total:
            fewest, longest = max(least, fewest), min(most, longest)
            total = queries = min(max(step.total, fewest), longest)
        else:
            queries = min(max(step.queries, least), most)
            total = min(max(step.total, fewest, queries), longest)
        is_refused = False
        if queries > 1 and queries != total:
            takes_one = RuntimeFault.SEVERAL_TOKENS_OF_A_BATCH.is_present()
            batch = 1 if takes_one and low <= 1 else batch
            is_refused = (takes_one and batch > 1) or RuntimeFault.SEVERAL_TOKENS_BEHIND_A_PAST.is_present()
        if total < max(1, fewest, queries) or is_refused:
            return None
        slack = min(max(step.slack, least_rows - total), rows - total)
        return _Step(batch, queries, total, slack, step.ragged)

    def _range(self, sizes: Sequence[Int]) -> tuple[int, int]:
        """The least and the largest value that sizes may have: fixed ones, and those that the user limits."""
        low, high = 1, LONGEST
        for size in sizes:
            if size.constant:
                low, high = max(low, size.constant), min(high, size.constant)
            elif size.atom is not None and str(size.atom.args[0]) in self.limits_of_user:
                least, most = self.limits_of_user[str(size.atom.args[0])]
                low, high = max(low, least), min(high, most)
        return low, high

    def _case(self, step: _Step) -> Case:
        values: dict[str, int] = {}
        batches = {n for s in self.sites for n in size_names(s.batch)}
        for site in self.sites:
            _assign(values, site.queries, step.queries, batches)
        for site in self.sites:
            if site.total is not None:
                _assign(values, site.total, step.total, batches)
        # A size that both kinds of caches share is that of a full one: a sliding-window cache may have more rows.
        for site in sorted(self.sites, key=lambda s: s.sliding):
            rows = step.total + step.slack if not site.sliding else site.window + min(step.slack, site.window)
            _assign(values, site.capacity, rows, batches)
            for name in _PASTS:
                _, groups, capacity, size = self.symbolic.shape(site.input(name)) or (None, None, None, None)
                for dim, number in ((groups, site.kv_num_heads), (capacity, rows), (size, site.head_size)):
                    if dim is not None:
                        _assign(values, dim, number, batches)
        padding = Padding.RIGHT if step.ragged and step.batch > 1 else Padding.NONE
        return Case(step.batch, step.total, padding, tuple(values.items()))


def _set_quantized(feed: dict[str, np.ndarray], site: CacheSite, rng: np.random.Generator) -> None:
    """Fills quantized caches that are inputs with numbers of their whole range; scales that are inputs are positive."""
    for name in (site.input("past_key"), site.input("past_value")):
        if name in feed:
            numbers = rng.integers(-127, 127, feed[name].shape, endpoint=True)
            feed[name] = numbers.astype(feed[name].dtype)
    for name in (site.input("k_scale"), site.input("v_scale")):
        if name in feed:
            feed[name] = rng.uniform(*_DRAWN_SCALES, feed[name].shape).astype(feed[name].dtype)


def _assign(values: dict[str, int], size: Int, wanted: int, batches: set[str]) -> None:
    """Sets the one free name of a size to the value at which the size is the wanted one."""
    names = size_names(size) - set(values) - batches
    if len(names) != 1:
        return
    (name,) = names
    if size.atom is not None:
        values[name] = wanted
        return
    least = find_least(size, names, 1, wanted, values)
    rest = _evaluate(size, {**values, name: 0})
    values[name] = 0 if rest == wanted else least


def _evaluate(size: Int, values: Mapping[str, int]) -> int | None:
    try:
        return evaluate(size, values)
    except UnsupportedError:  # a name without a value
        return None
