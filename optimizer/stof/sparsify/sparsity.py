# SPDX-License-Identifier: Apache-2.0
"""The patterns of one model: a step of the pipeline puts them on attentions, and the ops read them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from stof.arguments.threshold_kinds import SKIP_SCORES
from stof.sparsify.measure import PatternFacts, measure_pattern
from stof.sparsify.patterns import HeadCounts, Pattern
from stof.sparsify.report import SparsifiedSite, SparsityReport
from stof.sparsify.spec import SparsitySpec, ThresholdClause


@dataclass(frozen=True)
class DeclaredPattern:
    """The pattern of one attention of a model.

    Attributes:
        pattern: what it allows.
        facts: its costs.
        tables: the initializer of each table by the name that the expression has for it.
        own_bias: the bias that the attention has besides; empty: none.
    """

    pattern: Pattern
    facts: PatternFacts
    tables: Mapping[str, str]
    own_bias: str = ""


@dataclass
class Sparsity:
    """What --sparsify does to one model.

    Attributes:
        spec: what is asked for.
        report: gets a row for each attention.
        patterns: by the first output of the attention's node, in the model that the ops rewrite.
        ignored_rows: names of attentions whose fully masked rows, which are padding, may differ from the model's.
    """

    spec: SparsitySpec
    report: SparsityReport
    patterns: dict[str, DeclaredPattern] = field(default_factory=dict)
    ignored_rows: set[str] = field(default_factory=set)
    _facts: dict[tuple[object, ...], PatternFacts] = field(default_factory=dict)

    def pattern_of(self, layer: int, count: int, heads: HeadCounts) -> tuple[Pattern, PatternFacts] | None:
        """The pattern of an attention and its costs; None where it stays dense.

        Raises:
            ArgumentError: as :meth:`SparsitySpec.resolve`, and for a pattern with a query without keys.
        """
        pattern = self.spec.resolve(layer, count, heads)
        if pattern is None:
            return None
        if pattern.key not in self._facts:
            self._facts[pattern.key] = measure_pattern(pattern)
        return pattern, self._facts[pattern.key]

    def keep_dense(self, site: str, layer: int, reason: str) -> None:
        """Reports an attention without a pattern."""
        self.report.rows.append(SparsifiedSite(site, layer, False, reason))

    def put(
        self,
        site: str,
        layer: int,
        output: str,
        declared: DeclaredPattern,
        *,
        is_padded: bool = False,
        needs_operator: bool = False,
    ) -> None:
        """Reports and keeps the pattern of an attention.

        Args:
            site: its name.
            layer: its index.
            output: the first output of its node.
            declared: the pattern.
            is_padded: its positions count columns, among which may be padding. Distances are the same anyway.
            needs_operator: its node in the model has no input for the pattern: an operator takes it, or it stays dense.
        """
        moves = is_padded and not declared.pattern.is_of_distances
        row = SparsifiedSite.of(site, layer, declared.pattern, declared.facts, needs_right_padding=moves)
        self.report.rows.append(replace(row, needs_operator=needs_operator))
        self.patterns[output] = declared

    @property
    def digest(self) -> str:
        """A hash of all patterns and their places, by which a plan tells that it is of the same ones."""
        hasher = hashlib.sha256()
        for output, declared in self.patterns.items():
            hasher.update(repr((output, declared.pattern.key)).encode("utf-8", "surrogateescape"))
        return hasher.hexdigest()[:16]


def digest_of(sparsity: Sparsity | None, spec: SparsitySpec | None) -> str:
    """A hash of what --sparsify asks for, by which a plan tells that it is of the same; empty without the option.

    Args:
        sparsity: patterns; None: there are none.
        spec: what it says of run-time masks, of which plans keep thresholds; None: nothing.
    """
    patterns = "" if sparsity is None else sparsity.digest
    if spec is None or not spec.threshold_clauses:
        return patterns
    clauses = [_text_of(c) for c in spec.threshold_clauses]
    text = f"({patterns!r}, ({', '.join(clauses)}{',' if len(clauses) == 1 else ''}))"
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:16]


def _text_of(clause: ThresholdClause) -> str:
    """A clause as the plans of earlier versions hashed it."""
    name = "SkipClause" if clause.kind is SKIP_SCORES else clause.kind.clause
    return f"{name}(threshold={clause.threshold!r}, layers={clause.layers!r}, dense_layers={clause.dense_layers!r})"
