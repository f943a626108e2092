# SPDX-License-Identifier: Apache-2.0
"""Inputs of a model over a paged cache that agree with each other: lengths, block tables, slots and bounds."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx

from stof.cached_attention.paged.site import PagedSite
from stof.execution.case import Case, Padding
from stof.execution.input_uses import find_source
from stof.execution.inputs import InputMaker
from stof.graph.index import GraphIndex
from stof.symbolic import Int, Symbolic

_DEFAULT_WINDOW, _LONGEST_WINDOW = 16, 640
_DEFAULT_BLOCK = 16
_MOST_ROWS = 1 << 12  # of a sequence in drawn inputs
_LENGTHS = ("cumulative_sequence_length", "past_seqlens", "block_table", "slot_mapping", "attention_metadata")


@dataclass(frozen=True)
class _Step:
    """Sizes of a step: sequences, their new tokens together, and the keys that the longest one may have."""

    batch: int
    tokens: int
    keys: int


class PagedInputMaker(InputMaker):
    """Draws inputs of a model over a paged cache; a case's length is the most keys of a sequence.

    Args:
        model: the model.
        symbolic: its facts.
        sites: those that are replaced.
        shapes: the least and the largest size in use of dimensions, by name.
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        symbolic: Symbolic,
        sites: Sequence[PagedSite],
        shapes: Mapping[str, tuple[int, int]] | None = None,
    ) -> None:
        self.sites = tuple(sites)
        self._limits = shapes or {}
        index = GraphIndex(model.graph)
        super().__init__(model, symbolic, frozenset(), index=index, scores=[])
        input_names = {i.name for i in self.inputs}
        self._sources = {}
        for site in sites:
            for name in _LENGTHS:
                if (tensor := site.input(name)) and (source := find_source(index, tensor)) in input_names:
                    self._sources[tensor] = source

    def draw(
        self, case: Case, rng: np.random.Generator, needed: Collection[str] | None = None
    ) -> dict[str, np.ndarray]:
        """One set of inputs by name."""
        feed = super().draw(case, rng, needed)
        sizes = self.sizes(case)
        for site in self.sites:
            self._set_site(feed, site, sizes, case, rng)
        return feed

    def caches(self) -> dict[str, str]:
        """The model outputs that the caches become, by input; empty where some are neither."""
        input_names, written = {i.name for i in self.inputs}, {o.name for o in self.model.graph.output}
        presents = {s.input(n): s.node.output[i] for s in self.sites for i, n in ((1, "key_cache"), (2, "value_cache"))}
        return presents if set(presents) <= input_names and written.issuperset(presents.values()) else {}

    def case_of_step(self, queries: int, total: int, rows: int) -> Case | None:
        """The case of one sequence in a step; None where sizes are fixed to others.

        Args:
            queries: new tokens.
            total: keys after the step.
            rows: that its blocks have at least, where their number is not fixed.
        """
        case = replace(self._case(_Step(1, queries, rows), ragged=False), length=total)
        sizes = self.sizes(case)
        fits = all(
            _value(s.tokens, sizes) == queries
            and _value(s.batch, sizes) == 1
            and _value(s.columns, sizes) * _value(s.block_size, sizes) >= total
            and _value(s.blocks, sizes) >= _value(s.columns, sizes)
            for s in self.sites
        )
        return case if fits and total <= self._most_positions() else None

    def draw_step(self, case: Case, rng: np.random.Generator) -> dict[str, np.ndarray] | None:
        """Inputs of :meth:`case_of_step`, whose sequence owns the first blocks; None where no inputs state its lengths."""
        feed, sizes = self.draw(case, rng), self.sizes(case)
        for site in self.sites:
            names = {name: self._sources.get(site.input(name), "") for name in _LENGTHS}
            if not all(names[n] for n in _LENGTHS[:3]):
                return None
            tokens = _value(site.tokens, sizes)
            cumulative, past, table = (names[n] for n in _LENGTHS[:3])
            feed[cumulative] = np.array([0, tokens], np.int32)
            feed[past] = np.array([case.length - tokens], np.int32)
            feed[table] = np.arange(feed[table].size, dtype=np.int32).reshape(feed[table].shape)
            self._set_slots(feed, site, names, sizes)
        return feed

    def _set_site(
        self,
        feed: dict[str, np.ndarray],
        site: PagedSite,
        sizes: Mapping[str, int],
        case: Case,
        rng: np.random.Generator,
    ) -> None:
        """Sets the lengths that a site reads, unless another site has set them, then its table, slots and bounds."""
        names = {name: self._sources.get(site.input(name), "") for name in _LENGTHS}
        cumulative, past, table = (names[n] for n in _LENGTHS[:3])
        if not cumulative or not past or not table:
            return
        tokens, batch = _value(site.tokens, sizes), len(feed[past])
        rows = _value(site.block_size, sizes) * feed[table].shape[1]
        if feed[cumulative].dtype != np.int32 or not _is_set(feed, cumulative, past, tokens):
            new = _divide(tokens, batch, case.padding is not Padding.NONE, rng)
            most = min(rows, case.length, self._most_positions())
            before = np.array([rng.integers(0, max(0, most - n), endpoint=True) for n in new], np.int64)
            before[int(np.argmax(new))] = max(0, most - int(new.max()))  # one sequence has all keys
            feed[cumulative] = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
            feed[past] = before.astype(np.int32)
        blocks = _value(site.blocks, sizes)
        if blocks >= feed[table].size:
            feed[table] = rng.permutation(blocks)[: feed[table].size].reshape(feed[table].shape).astype(np.int32)
        self._set_slots(feed, site, names, sizes)

    def _set_slots(
        self, feed: dict[str, np.ndarray], site: PagedSite, names: Mapping[str, str], sizes: Mapping[str, int]
    ) -> None:
        """Sets slots and bounds by lengths and the table."""
        new, before = np.diff(feed[names["cumulative_sequence_length"]]), feed[names["past_seqlens"]]
        if names["slot_mapping"]:
            table = feed[names["block_table"]]
            feed[names["slot_mapping"]] = _slots(table, new, before, _value(site.block_size, sizes))
        if names["attention_metadata"]:
            bounds = np.zeros(feed[names["attention_metadata"]].shape, np.int32)
            bounds[:2] = new.max(initial=1), (new + before).max(initial=1)
            feed[names["attention_metadata"]] = bounds

    def _most_positions(self) -> int:
        """The rows of the shortest rotary table."""
        tables = [self.symbolic.shape(s.input("cos_cache")) for s in self.sites if s.does_rotary]
        return min(
            [shape[0].constant for shape in tables if shape is not None and shape[0].constant], default=_MOST_ROWS
        )

    def steps(self, tokens: float) -> list[Case]:
        """Cases: ragged new tokens, one token a sequence, a prompt beyond the windows and declared patterns.

        Args:
            tokens: how many a set may have.
        """
        reaches = [s.reach for s in self.sites if 0 < s.reach <= _LONGEST_WINDOW]
        above = max(reaches, default=_DEFAULT_WINDOW) + 37
        wanted = [
            _Step(3, 17, above),
            _Step(3, 3, above),
            _Step(1, above, above),
            _Step(2, 9, 40),
        ]
        cases = [
            self._case(step, ragged=i in (0, 3)) for i, step in enumerate(wanted) if step.tokens <= max(tokens, 64)
        ]
        return list(dict.fromkeys(cases))

    def _case(self, step: _Step, ragged: bool) -> Case:
        values: dict[str, int] = {}
        for site in self.sites:
            batch = _choose(values, site.batch, step.batch, self._limits)
            tokens = _choose(values, site.tokens, max(step.tokens, batch), self._limits)
            size = _choose(values, site.block_size, _DEFAULT_BLOCK, self._limits)
            keys = max(step.keys, tokens)
            columns = _choose(values, site.columns, -(-keys // size), self._limits)
            _choose(values, site.blocks, batch * columns + 2, self._limits)
            for name, wanted in (
                ("cumulative_sequence_length", (batch + 1,)),
                ("past_seqlens", (batch,)),
                ("block_table", (batch, columns)),
                ("slot_mapping", (tokens,)),
                ("key_cache", (batch * columns + 2, size, site.kv_num_heads, site.head_size)),
                ("value_cache", (batch * columns + 2, size, site.kv_num_heads, site.head_size)),
            ):
                shape = self.symbolic.shape(site.input(name)) if site.input(name) else None
                for dim, number in zip(shape or (), wanted, strict=False):
                    _choose(values, dim, number, self._limits)
        length = max(step.keys, step.tokens)
        return Case(step.batch, length, Padding.RIGHT if ragged else Padding.NONE, tuple(values.items()))


def _choose(values: dict[str, int], size: Int, wanted: int, limits: Mapping[str, tuple[int, int]]) -> int:
    """Sets the name of a size, unless it has a value, and gives the size's value."""
    if size.constant is not None:
        return size.constant
    if size.atom is None:
        return wanted
    name = str(size.atom.args[0])
    low, high = limits.get(name, (1, wanted))
    return values.setdefault(name, min(max(wanted, low), max(high, low)) if name in limits else wanted)


def _value(size: Int, sizes: Mapping[str, int]) -> int:
    if size.constant is not None:
        return size.constant
    return sizes[str(size.atom.args[0])] if size.atom is not None else 0


def _is_set(feed: Mapping[str, np.ndarray], cumulative: str, past: str, tokens: int) -> bool:
    """Whether another site has drawn lengths already: they rise from 0 to all tokens."""
    ends = feed[cumulative]
    rises = bool((np.diff(ends) >= 0).all()) and int(ends[0]) == 0 and int(ends[-1]) == tokens
    return rises and bool((feed[past] >= 0).all()) and len(ends) == len(feed[past]) + 1


def _divide(tokens: int, batch: int, ragged: bool, rng: np.random.Generator) -> np.ndarray:
    """How many new tokens [B] each sequence has."""
    if ragged and batch > 1:
        cuts = np.sort(rng.integers(0, tokens, batch - 1, endpoint=True))
        return np.diff(np.concatenate([[0], cuts, [tokens]]))
    counts = np.full(batch, tokens // batch)
    counts[: tokens % batch] += 1
    return counts


def _slots(table: np.ndarray, new: np.ndarray, past: np.ndarray, size: int) -> np.ndarray:
    """The rows [N] of the cache that a step's tokens take by the block table."""
    slots = []
    for row, count, before in zip(table, new, past, strict=True):
        positions = before + np.arange(count)
        slots.append(row[positions // size] * size + positions % size)
    return np.concatenate(slots).astype(np.int32) if slots else np.zeros(0, np.int32)
