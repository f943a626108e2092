# SPDX-License-Identifier: Apache-2.0
"""The text of --sparsify: clauses, each a pattern with the layers and KV heads that it is for.

A specification is clauses with ``;`` between them. A clause is fields ``key=value`` with ``,`` between them, behind ``s2:`` or
the path of a file where it has one. Texts in double quotes may hold both signs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from stof.arguments.slices import Slice, parse_slices
from stof.errors import ArgumentError
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
from stof.symbolic import LONGEST

_S2 = "s2:"
_SCOPES = ("layers", "dense_layers", "heads", "active_heads")
_FIELDS = {
    "s2": ("local", "stride", "block", "offset", "relative", "homogeneous", "dense_heads", "per"),
    "window": ("window", "sink"),
    "mask": ("mask",),
}
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
    clauses = tuple(_parse_clause(c.strip()) for c in _split(text, ";"))
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
    if text.startswith(_S2):
        fields = _Fields(text, _split(text[len(_S2) :], ","), "s2")
        return fields.clause(_read_strided(fields))
    items = _split(text, ",")
    key = items[0].partition("=")[0].strip()
    if "=" not in items[0] or Path(items[0]).exists():
        fields = _Fields(text, items[1:], "")
        options = {k: v for k, v in fields.values.items() if k not in _SCOPES}
        path = Path(items[0].strip())
        return replace(fields.clause(read_pattern_file(path, options)), file=path)
    kinds = {"window": "window", "sink": "window", "mask": "mask", **dict.fromkeys(_SCOPES, "")}
    if key not in kinds:
        raise ArgumentError(f"--sparsify {text!r} begins with {key!r}, expected {_EXPECTED}")
    names = {item.partition("=")[0].strip() for item in items}
    kind = next((k for k in ("mask", "window") if k in names), None)
    if kind is None:
        raise ArgumentError(f"--sparsify {text!r} has no pattern, expected {_EXPECTED}")
    fields = _Fields(text, items, kind)
    if kind == "mask":
        return fields.clause(TextPattern(fields.values["mask"]))
    return fields.clause(WindowPattern(fields.number("window", 1), fields.number("sink", 0, 0)))


def _read_strided(fields: _Fields) -> StridedPattern:
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


class _Fields:
    """The fields of one clause; every fault is an error that names the key and the value."""

    def __init__(self, clause: str, items: Sequence[str], kind: str) -> None:
        self.clause_text = clause
        self.values: dict[str, str] = {}
        keys = (*_FIELDS[kind], *_SCOPES) if kind else ()
        for item in items:
            key, sign, value = (x.strip() for x in item.partition("="))
            if not sign or not key:
                raise ArgumentError(f"--sparsify {clause!r}: {item.strip()!r} is no field, expected key=value")
            if keys and key not in keys:
                raise ArgumentError(f"--sparsify {clause!r} has key {key!r}, expected {', '.join(keys)}")
            if key in self.values:
                raise ArgumentError(f"--sparsify {clause!r} has {key} twice; give it once")
            self.values[key] = value[1:-1] if len(value) > 1 and value[0] == value[-1] == '"' else value

    def error(self, key: str, expected: str) -> ArgumentError:
        """The fault of a field."""
        actual = f"has {key}={self.values[key]}" if key in self.values else f"has no {key}"
        return ArgumentError(f"--sparsify {self.clause_text!r} {actual}, expected {expected}")

    def number(self, key: str, least: int, default: int | None = None, most: int = LONGEST) -> int:
        """An integer field; without a default it must be there."""
        if key not in self.values and default is not None:
            return default
        text = self.values.get(key, "")
        if not re.fullmatch(r"[0-9]{1,9}", text) or not least <= int(text) <= most:
            raise self.error(key, f"an integer from {least} to {most}")
        return int(text)

    def flag(self, key: str) -> bool:
        """A field that is 0 or 1; 0 where it is absent."""
        return bool(self.number(key, 0, 0, 1))

    def slices(self, key: str) -> tuple[Slice, ...]:
        """Indices and slices with ``+`` between them."""
        if key not in self.values:
            return ()
        slices = parse_slices(self.values[key], "--sparsify")
        if slices is None:
            raise self.error(key, "indices or slices such as 3, 0:2 or -2:, with + between them")
        return slices

    def clause(self, pattern: HeadPattern | LayerPatterns) -> Clause:
        """The clause of a pattern."""
        heads = self.slices("heads")
        if len(heads) > 1:
            raise self.error("heads", "one slice")
        head_slice = heads[0] if heads else None
        return Clause(pattern, self.slices("layers"), self.slices("dense_layers"), head_slice, self.active_heads())

    def active_heads(self) -> ActiveHeads | None:
        """The field ``active_heads``; None where it is absent."""
        if "active_heads" not in self.values:
            return None
        match = re.fullmatch(r"([0-9]{1,6}):([0-9]{1,6})/([0-9]{1,6})", self.values["active_heads"])
        start, stop, whole = map(int, match.groups()) if match else (0, 0, 0)
        if not start < stop <= whole:
            raise self.error(
                "active_heads", "the graph's KV heads and how many the whole model has, 8:16/32 for instance"
            )
        return ActiveHeads(start, stop, whole)


def _split(text: str, sign: str) -> list[str]:
    """The parts between signs that stand outside of double quotes.

    Raises:
        ArgumentError: where a quote is not closed.
    """
    parts = [""]
    is_quoted = False
    for character in text:
        is_quoted ^= character == '"'
        if character == sign and not is_quoted:
            parts.append("")
        else:
            parts[-1] += character
    if is_quoted:
        raise ArgumentError(f"--sparsify {text!r} has a double quote that is not closed")
    return parts
