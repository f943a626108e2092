# SPDX-License-Identifier: Apache-2.0
"""The text of --sparsify: clauses, each a pattern with the layers and KV heads that it is for.

A specification is clauses with ``;`` between them. A clause is a name and fields ``key=value`` with ``,`` between them,
written ``name:fields`` or ``name(fields)``. In the place of a name may be the path of a file with fields behind a ``,``. The
fields of a window and a mask may stand alone. Texts in double quotes may hold all signs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, TypeVar

from stof.arguments.slices import Slice
from stof.arguments.threshold_kinds import KINDS, ThresholdKind
from stof.errors import ArgumentError
from stof.sparsify.clause_text import ClauseFields, split_named, split_outside_quotes
from stof.sparsify.pages_clause import PAGES, PagesClause, read_pages
from stof.sparsify.pattern_files import CONFIG_FILE, HEADS_FILE, LayerPatterns, read_pattern_file
from stof.sparsify.patterns import (
    BLOCKS,
    HeadCounts,
    HeadPattern,
    Pattern,
    StridedPattern,
    TextPattern,
    WindowPattern,
    build_pattern,
)
from stof.sparsify.presets import LEAST_FRAME, RadialPattern, TrianglePattern
from stof.symbolic import LONGEST

_LAYERS = ("layers", "dense_layers")
_SCOPES = (*_LAYERS, "heads", "active_heads")
_KIND_OF = {kind.clause: kind for kind in KINDS}
_AUTO = "auto"
_MOST_TEXT = 1 << 16
_EXPECTED = (
    's2:local=N,stride=N, window=N, mask="...", triangle, radial:tokens=N, skip-scores, choose-blocks, choose-pages(pages=N) or '
    "the path of a pattern file"
)


@dataclass(frozen=True)
class ActiveHeads:
    """Which KV heads of the whole model the graph has, as one rank of a tensor-parallel export: ``8:16/32``."""

    start: int
    stop: int
    whole: int

    def counts(self, heads: HeadCounts) -> HeadCounts:
        """The heads of an attention with their place in the whole model.

        Raises:
            ArgumentError: when the attention has another number of them.
        """
        if self.stop - self.start != heads.G:
            raise ArgumentError(
                f"--sparsify: active_heads={self.start}:{self.stop}/{self.whole} are {self.stop - self.start} heads, the "
                f"attention has {heads.G} KV heads"
            )
        return HeadCounts(heads.H, heads.G, self.start, self.whole)


@dataclass(frozen=True)
class Clause:
    """One pattern, and where it is put.

    Attributes:
        pattern: for the heads of each layer, or one for each layer.
        layers: those that it is for; empty: all, or the pattern's default ones.
        dense_layers: those that stay dense.
        heads: the KV heads of the whole model that it is for; None: all.
        active_heads: those that the graph has; None: all.
        file: that the pattern was read from, or its folder; None: none.
    """

    pattern: HeadPattern | LayerPatterns
    layers: tuple[Slice, ...] = ()
    dense_layers: tuple[Slice, ...] = ()
    heads: Slice | None = None
    active_heads: ActiveHeads | None = None
    file: Path | None = None

    def pattern_of(self, layer: int, count: int) -> HeadPattern | None:
        """The pattern of one of so many layers; None where it stays dense.

        Raises:
            ArgumentError: when a slice or a file is of other layers.
        """
        chosen = _chosen_layers(self.layers, self.dense_layers, count)
        if isinstance(self.pattern, HeadPattern) and not self.layers:
            chosen &= set(self.pattern.default_layers(count))
        if isinstance(self.pattern, LayerPatterns):
            self.pattern.check_layers(count)
        if layer not in chosen:
            return None
        return self.pattern.layers[layer] if isinstance(self.pattern, LayerPatterns) else self.pattern


@dataclass(frozen=True)
class ThresholdClause:
    """Skip by score or choose blocks, and the layers that do it.

    Attributes:
        kind: which of both.
        threshold: the operators' attribute, above 0; None: calibrated for each layer.
        layers: those that it is for; empty: all.
        dense_layers: those that leave out nothing.
    """

    kind: ThresholdKind
    threshold: float | None = None
    layers: tuple[Slice, ...] = ()
    dense_layers: tuple[Slice, ...] = ()

    @property
    def text(self) -> str:
        """The clause with all fields that are not at their defaults, as an option may have it."""
        threshold = [] if self.threshold is None else [f"threshold={self.threshold:g}"]
        named = (("layers", self.layers), ("dense_layers", self.dense_layers))
        fields = [*threshold, *(f"{name}={'+'.join(s.text for s in slices)}" for name, slices in named if slices)]
        return f"{self.kind.clause}({','.join(fields)})" if fields else self.kind.clause


@dataclass(frozen=True)
class SparsitySpec:
    """What --sparsify asks for.

    Attributes:
        text: as the user wrote it.
        clauses: of patterns, in order.
        threshold_clauses: of skip by score and of choose blocks, in order. They join patterns: a layer may have all three.
        pages_clauses: of choose pages, in order. They join both.
    """

    text: str
    clauses: tuple[Clause, ...]
    threshold_clauses: tuple[ThresholdClause, ...] = ()
    pages_clauses: tuple[PagesClause, ...] = ()

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that patterns were read from."""
        named = [c.file for c in self.clauses if c.file is not None]
        return tuple(
            f for path in named for f in ((path / HEADS_FILE, path / CONFIG_FILE) if path.is_dir() else (path,))
        )

    def resolve(self, layer: int, count: int, heads: HeadCounts) -> Pattern | None:
        """The pattern of an attention; None where it stays dense.

        Args:
            layer: its index in the order of the graph.
            count: of attentions.
            heads: of the attention.

        Raises:
            ArgumentError: when clauses meet, or are for other layers or heads.
        """
        parts: list[tuple[range | None, HeadPattern]] = []
        taken: set[int] = set()
        active = next((c.active_heads for c in self.clauses if c.active_heads), None)
        for clause in self.clauses:
            pattern = clause.pattern_of(layer, count)
            if pattern is None:
                continue
            heads = heads if active is None else active.counts(heads)
            some = None if clause.heads is None else _own_heads(clause.heads, heads)
            clause_heads = set(range(heads.G) if some is None else some)
            if not clause_heads:
                continue  # heads of other ranks
            if both := sorted(taken & clause_heads):
                raise ArgumentError(
                    f"--sparsify: two clauses are for KV head {both[0] + heads.first} of layer {layer}; part them by layers= "
                    "or heads="
                )
            taken |= clause_heads
            parts.append((some, pattern))
        return build_pattern(parts, heads) if parts else None

    @property
    def threshold_texts(self) -> tuple[str, ...]:
        """The clauses of thresholds, as a plan keeps them."""
        return tuple(clause.text for clause in self.threshold_clauses)

    @property
    def threshold_kinds(self) -> tuple[ThresholdKind, ...]:
        """The kinds of thresholds that it names."""
        return tuple(kind for kind in KINDS if any(c.kind is kind for c in self.threshold_clauses))

    def threshold_clauses_of_layers(self, kind: ThresholdKind, count: int) -> tuple[ThresholdClause | None, ...]:
        """The clause of a kind for each of so many layers; None where a layer leaves out nothing.

        Raises:
            ArgumentError: when clauses meet, or are for other layers.
        """
        return _clauses_of_layers(kind.clause, [c for c in self.threshold_clauses if c.kind is kind], count)

    def pages_clauses_of_layers(self, count: int) -> tuple[PagesClause | None, ...]:
        """The clause of choose pages for each of so many layers; None where a layer attends every page.

        Raises:
            ArgumentError: when clauses meet, or are for other layers.
        """
        return _clauses_of_layers(PAGES, self.pages_clauses, count)


def parse_spec(text: str) -> SparsitySpec:
    """Reads a specification, and the files that it names.

    Raises:
        ArgumentError: naming the clause or file, its key and the value, and what was expected.
    """
    if len(text) > _MOST_TEXT:
        raise ArgumentError(f"--sparsify has {len(text)} characters, expected up to {_MOST_TEXT}")
    parsed = [_parse_clause(c.strip()) for c in split_outside_quotes(text, ";")]
    clauses = tuple(c for c in parsed if isinstance(c, Clause))
    if len(stated := {c.active_heads for c in clauses if c.active_heads is not None}) > 1:
        raise ArgumentError(
            f"--sparsify {text!r} has {len(stated)} different active_heads, expected one for all clauses"
        )
    thresholds = tuple(c for c in parsed if isinstance(c, ThresholdClause))
    return SparsitySpec(text, clauses, thresholds, tuple(c for c in parsed if isinstance(c, PagesClause)))


class _OfLayers(Protocol):
    """A clause of a run-time mask."""

    @property
    def layers(self) -> tuple[Slice, ...]:
        """Those that it is for; empty: all."""

    @property
    def dense_layers(self) -> tuple[Slice, ...]:
        """Those that it is not for."""


_RunTimeClause = TypeVar("_RunTimeClause", bound=_OfLayers)


def _clauses_of_layers(name: str, clauses: Sequence[_RunTimeClause], count: int) -> tuple[_RunTimeClause | None, ...]:
    """The clause, of those with one name, for each of so many layers; None where there is none.

    Raises:
        ArgumentError: when clauses meet, or are for other layers.
    """
    found: list[_RunTimeClause | None] = [None] * count
    for clause in clauses:
        for layer in sorted(_chosen_layers(clause.layers, clause.dense_layers, count)):
            if found[layer] is not None:
                raise ArgumentError(
                    f"--sparsify: two {name} clauses are for layer {layer}; part them by layers= or dense_layers="
                )
            found[layer] = clause
    return tuple(found)


def _chosen_layers(layers: Sequence[Slice], dense_layers: Sequence[Slice], count: int) -> set[int]:
    """The layers, of so many, that slices are for."""
    dense = {i for s in dense_layers for i in s.of(count, "dense_layers")}
    chosen = {i for s in layers for i in s.of(count, "layers")} if layers else set(range(count))
    return chosen - dense


def _own_heads(some: Slice, heads: HeadCounts) -> range:
    """The graph's KV heads among those of a slice of the whole model's."""
    chosen = some.of(heads.all_kv_heads, "heads")
    start, stop = (min(max(x - heads.first, 0), heads.G) for x in (chosen.start, chosen.stop))
    return range(start, stop)


def _parse_clause(text: str) -> Clause | ThresholdClause | PagesClause:
    if not text:
        raise ArgumentError(f"--sparsify has an empty clause, expected {_EXPECTED}")
    items = split_outside_quotes(text, ",")
    path = Path(items[0].strip())
    is_path = _exists(path)
    if not is_path and (named := split_named(text, (*_PATTERNS, *_KIND_OF, PAGES))) is not None:
        name, fields = named
        if name == PAGES:
            return read_pages(text, fields)
        if name in _KIND_OF:
            return _read_threshold(text, fields, _KIND_OF[name])
        return _read_pattern(text, fields, _PATTERNS[name])
    key = items[0].partition("=")[0].strip()
    if is_path or "=" not in items[0]:
        if not is_path and key in (*_PATTERNS, *_KIND_OF, PAGES):
            raise ArgumentError(f"--sparsify {text!r}: the fields of {key} are written {key}(key=value,...)")
        file_fields = ClauseFields(text, items[1:], ())
        options = {k: v for k, v in file_fields.values.items() if k not in _SCOPES}
        return replace(_make_clause(file_fields, read_pattern_file(path, options)), file=path)
    if key not in ("window", "sink", "mask", *_SCOPES):
        raise ArgumentError(f"--sparsify {text!r} begins with {key!r}, expected {_EXPECTED}")
    keys = {item.partition("=")[0].strip() for item in items}
    pattern = next((k for k in ("mask", "window") if k in keys), None)
    if pattern is None:
        raise ArgumentError(f"--sparsify {text!r} has no pattern, expected {_EXPECTED}")
    return _read_pattern(text, items, _PATTERNS[pattern])


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # the text is too long for a path
        return False


def _read_pattern(text: str, items: Sequence[str], kind: _PatternKind) -> Clause:
    fields = ClauseFields(text, items, (*kind.fields, *_SCOPES))
    return _make_clause(fields, kind.read(fields))


def _read_threshold(clause: str, items: Sequence[str], kind: ThresholdKind) -> ThresholdClause:
    fields = ClauseFields(clause, items, ("threshold", *_LAYERS))
    text = fields.values.get("threshold", _AUTO)
    threshold: float | None = None
    if text != _AUTO:
        try:
            threshold = float(text)
        except ValueError:
            threshold = math.nan
        if not kind.allows(threshold):
            raise fields.error("threshold", f"{_AUTO} or {kind.range_words}")
    return ThresholdClause(kind, threshold, fields.slices("layers"), fields.slices("dense_layers"))


def _read_window(fields: ClauseFields) -> WindowPattern:
    return WindowPattern(fields.number("window", 1), fields.number("sink", 0, 0))


def _read_mask(fields: ClauseFields) -> TextPattern:
    if "mask" not in fields.values:
        raise fields.error("mask", 'a mask expression, mask="q - k < 512" for instance')
    return TextPattern(fields.values["mask"])


def _read_strided(fields: ClauseFields) -> StridedPattern:
    per = fields.values.get("per", "kv_head")
    if per not in ("kv_head", "query_head"):
        raise fields.error("per", "kv_head or query_head")
    block = fields.number("block", min(BLOCKS), 64, max(BLOCKS))
    if block not in BLOCKS:
        raise fields.error("block", "16, 32, 64 or 128")
    stride = fields.number("stride", 1)
    return StridedPattern(
        local=fields.number("local", 1),
        stride=stride,
        block=block,
        offset=fields.number("offset", 0, 0),
        relative=fields.flag("relative"),
        homogeneous=fields.flag("homogeneous"),
        dense_heads=fields.number("dense_heads", 0, 0),
        by_query_head=per == "query_head",
    )


def _read_triangle(fields: ClauseFields) -> TrianglePattern:
    default = TrianglePattern()
    return TrianglePattern(
        sink=fields.number("sink", 0, default.sink),
        window=fields.number("window", 1, default.window),
        last=fields.number("last", 1, default.last),
    )


def _read_radial(fields: ClauseFields) -> RadialPattern:
    tokens = fields.number("tokens", LEAST_FRAME)
    return RadialPattern(tokens, fields.number("sink", 0, 1, LONGEST // tokens))


@dataclass(frozen=True)
class _PatternKind:
    """A named pattern: its fields, and what makes it of them."""

    fields: tuple[str, ...]
    read: Callable[[ClauseFields], HeadPattern]


_PATTERNS = {
    "s2": _PatternKind(
        ("local", "stride", "block", "offset", "relative", "homogeneous", "dense_heads", "per"), _read_strided
    ),
    "window": _PatternKind(("window", "sink"), _read_window),
    "mask": _PatternKind(("mask",), _read_mask),
    "triangle": _PatternKind(("sink", "window", "last"), _read_triangle),
    "radial": _PatternKind(("tokens", "sink"), _read_radial),
}


def _make_clause(fields: ClauseFields, pattern: HeadPattern | LayerPatterns) -> Clause:
    """The clause of a pattern, where its fields put it."""
    heads = fields.slices("heads")
    if len(heads) > 1:
        raise fields.error("heads", "one slice")
    head_slice = heads[0] if heads else None
    active_heads = _read_active_heads(fields)
    return Clause(pattern, fields.slices("layers"), fields.slices("dense_layers"), head_slice, active_heads)


def _read_active_heads(fields: ClauseFields) -> ActiveHeads | None:
    """The field ``active_heads``; None where it is absent."""
    if "active_heads" not in fields.values:
        return None
    match = re.fullmatch(r"([0-9]{1,6}):([0-9]{1,6})/([0-9]{1,6})", fields.values["active_heads"])
    start, stop, whole = map(int, match.groups()) if match else (0, 0, 0)
    if not start < stop <= whole:
        raise fields.error(
            "active_heads", "the graph's KV heads and how many the whole model has, 8:16/32 for instance"
        )
    return ActiveHeads(start, stop, whole)
