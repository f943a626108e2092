# SPDX-License-Identifier: Apache-2.0
"""The text of --sparsify: clauses, each a pattern with the layers and KV heads that it is for.

A specification is clauses with ``;`` between them. A clause is fields ``key=value`` with ``,`` between them, behind the name of a
pattern or the path of a file where it has one: ``s2:local=4,stride=8`` or ``s2(local=4,stride=8)``. Texts in double quotes
may hold all signs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from stof.arguments.slices import Slice
from stof.errors import ArgumentError
from stof.sparsify.clause_text import Fields, split_named, split_outside_quotes
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

_SCOPES = ("layers", "dense_layers", "heads", "active_heads")
_MOST_TEXT = 1 << 16
_EXPECTED = 's2:local=N,stride=N, window=N, mask="..." or the path of a pattern file'


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
        layers: those that it is for; empty: all.
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
        dense = {i for s in self.dense_layers for i in s.of(count, "dense_layers")}
        sparse_layers = {i for s in self.layers for i in s.of(count, "layers")} if self.layers else set(range(count))
        if isinstance(self.pattern, LayerPatterns):
            self.pattern.check_layers(count)
        if layer in dense or layer not in sparse_layers:
            return None
        return self.pattern.layers[layer] if isinstance(self.pattern, LayerPatterns) else self.pattern


@dataclass(frozen=True)
class SparsitySpec:
    """What --sparsify asks for.

    Attributes:
        text: as the user wrote it.
        clauses: in order.
    """

    text: str
    clauses: tuple[Clause, ...]

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


def parse_spec(text: str) -> SparsitySpec:
    """Reads a specification, and the files that it names.

    Raises:
        ArgumentError: naming the clause or file, its key and the value, and what was expected.
    """
    if len(text) > _MOST_TEXT:
        raise ArgumentError(f"--sparsify has {len(text)} characters, expected up to {_MOST_TEXT}")
    clauses = tuple(_parse_clause(c.strip()) for c in split_outside_quotes(text, ";"))
    if len(stated := {c.active_heads for c in clauses if c.active_heads is not None}) > 1:
        raise ArgumentError(
            f"--sparsify {text!r} has {len(stated)} different active_heads, expected one for all clauses"
        )
    return SparsitySpec(text, clauses)


def _own_heads(some: Slice, heads: HeadCounts) -> range:
    """The graph's KV heads among those of a slice of the whole model's."""
    chosen = some.of(heads.all_kv_heads, "heads")
    start, stop = (min(max(x - heads.first, 0), heads.G) for x in (chosen.start, chosen.stop))
    return range(start, stop)


def _parse_clause(text: str) -> Clause:
    if not text:
        raise ArgumentError(f"--sparsify has an empty clause, expected {_EXPECTED}")
    if (named := split_named(text, _PATTERNS)) is not None:
        name, items = named
        return _read_clause(text, items, _PATTERNS[name])
    items = split_outside_quotes(text, ",")
    key = items[0].partition("=")[0].strip()
    if "=" not in items[0] or Path(items[0]).exists():
        fields = Fields(text, items[1:], ())
        options = {k: v for k, v in fields.values.items() if k not in _SCOPES}
        path = Path(items[0].strip())
        return replace(_make_clause(fields, read_pattern_file(path, options)), file=path)
    if key not in ("window", "sink", "mask", *_SCOPES):
        raise ArgumentError(f"--sparsify {text!r} begins with {key!r}, expected {_EXPECTED}")
    keys = {item.partition("=")[0].strip() for item in items}
    pattern = next((k for k in ("mask", "window") if k in keys), None)
    if pattern is None:
        raise ArgumentError(f"--sparsify {text!r} has no pattern, expected {_EXPECTED}")
    return _read_clause(text, items, _PATTERNS[pattern])


def _read_clause(text: str, items: Sequence[str], kind: _PatternKind) -> Clause:
    fields = Fields(text, items, (*kind.fields, *_SCOPES))
    return _make_clause(fields, kind.read(fields))


def _read_window(fields: Fields) -> WindowPattern:
    return WindowPattern(fields.number("window", 1), fields.number("sink", 0, 0))


def _read_mask(fields: Fields) -> TextPattern:
    if "mask" not in fields.values:
        raise fields.error("mask", "a mask expression in double quotes")
    return TextPattern(fields.values["mask"])


def _read_strided(fields: Fields) -> StridedPattern:
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


@dataclass(frozen=True)
class _PatternKind:
    """A named pattern: its fields, and what makes it of them."""

    fields: tuple[str, ...]
    read: Callable[[Fields], HeadPattern]


_PATTERNS = {
    "s2": _PatternKind(
        ("local", "stride", "block", "offset", "relative", "homogeneous", "dense_heads", "per"), _read_strided
    ),
    "window": _PatternKind(("window", "sink"), _read_window),
    "mask": _PatternKind(("mask",), _read_mask),
}


def _make_clause(fields: Fields, pattern: HeadPattern | LayerPatterns) -> Clause:
    """The clause of a pattern, where its fields put it."""
    heads = fields.slices("heads")
    if len(heads) > 1:
        raise fields.error("heads", "one slice")
    head_slice = heads[0] if heads else None
    active_heads = _read_active_heads(fields)
    return Clause(pattern, fields.slices("layers"), fields.slices("dense_layers"), head_slice, active_heads)


def _read_active_heads(fields: Fields) -> ActiveHeads | None:
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
