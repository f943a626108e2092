# SPDX-License-Identifier: Apache-2.0
"""The text of --sparse-mlp: calibration prompts or a file of predictors, how neurons are predicted, and the layers.

A specification is clauses with ``;`` between them. A clause is fields ``key=value`` with ``,`` between them, behind the path of
calibration prompts in the first clause. All clauses share these prompts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from stof.arguments.slices import Slice, parse_slices
from stof.errors import ArgumentError

OPTION = "--sparse-mlp"
KINDS = ("magnitude", "svd", "trained")
FILES = ("powerinfer", "teal", "predictors")
_LAYER_FIELDS = ("layers", "dense_layers")
_COMMON_FIELDS = ("tokens", "max_error")
_FIELDS = {
    "magnitude": ("kind", "active", "by_neuron", *_LAYER_FIELDS, *_COMMON_FIELDS),
    "svd": ("kind", "active", "recall", "rank", "by_neuron", *_LAYER_FIELDS, *_COMMON_FIELDS),
    "trained": ("kind", "active", "recall", "rank", "seed", *_LAYER_FIELDS, *_COMMON_FIELDS),
    "powerinfer": ("powerinfer", "active", "recall", *_LAYER_FIELDS, *_COMMON_FIELDS),
    "teal": ("teal", "active", *_LAYER_FIELDS, *_COMMON_FIELDS),
    "predictors": ("predictors", *_LAYER_FIELDS, *_COMMON_FIELDS),
}
_MOST_TEXT = 1 << 16
_MOST_TOKENS = 1 << 17
DEFAULT_TOKENS = 2048
DEFAULT_ACTIVE = 0.5
_DEFAULT_RANK = 0.04  # of the neurons
_T = TypeVar("_T")
_EXPECTED = "prompts.npz,kind=magnitude,active=0.5 or predictors=FILE"


@dataclass(frozen=True)
class MlpClause:
    """How the neurons of some layers are predicted.

    Attributes:
        kind: ``magnitude``, ``svd`` or ``trained``; of a file ``powerinfer``, ``teal`` or ``predictors``.
        file: of predictors or thresholds; None: they are calibrated.
        active: the share of neurons that stays active; None: not stated.
        recall: the share of active neurons that a predictor selects; None: not stated.
        rank: of a predictor; 0: 4 % of the neurons.
        by_neuron: whether each neuron has a threshold of its own; None: as the kind has it.
        seed: of training.
        layers: those that it is for; empty: all.
        dense_layers: those that stay as they are.
    """

    kind: str
    file: Path | None = None
    active: float | None = None
    recall: float | None = None
    rank: int = 0
    by_neuron: bool | None = None
    seed: int = 0
    layers: tuple[Slice, ...] = ()
    dense_layers: tuple[Slice, ...] = ()

    @property
    def is_fitted(self) -> bool:
        """Whether calibration prompts are needed: for thresholds or a predictor that no file has."""
        return self.file is None or (self.kind == "powerinfer" and (self.active is not None or self.recall is not None))

    def has_layer(self, layer: int, count: int) -> bool:
        """Whether it is for one of so many layers.

        Raises:
            ArgumentError: when a slice selects none, or reaches beyond.
        """
        dense = {i for s in self.dense_layers for i in s.of(count, "dense_layers")}
        selected = {i for s in self.layers for i in s.of(count, "layers")} if self.layers else range(count)
        return layer in selected and layer not in dense

    def rank_of(self, neurons: int, size: int) -> int:
        """The rank for a gate weight [neurons, size].

        Raises:
            ArgumentError: when the stated one is larger than the weight.
        """
        if self.rank > min(neurons, size):
            raise ArgumentError(
                f"rank={self.rank} is larger than the gate weight [{neurons}, {size}], expected 1 to {min(neurons, size)}"
            )
        return self.rank or min(max(1, math.ceil(_DEFAULT_RANK * neurons)), neurons, size)


@dataclass(frozen=True)
class MlpSpec:
    """What --sparse-mlp asks for.

    Attributes:
        text: as the user wrote it.
        prompts: the file of calibration prompts; None: no clause is calibrated, all read files.
        clauses: in order.
        tokens: how many are kept for calibration.
        max_error: the largest relative output error of an MLP that is replaced; None: the default of the model's kind.
    """

    text: str
    prompts: Path | None
    clauses: tuple[MlpClause, ...]
    tokens: int = DEFAULT_TOKENS
    max_error: float | None = None

    def clause_of(self, layer: int, count: int) -> MlpClause | None:
        """The clause for one of so many MLPs; None where it stays as it is.

        Raises:
            ArgumentError: when two clauses are for one layer, or slices do not fit.
        """
        clauses = [c for c in self.clauses if c.has_layer(layer, count)]
        if len(clauses) > 1:
            raise ArgumentError(f"{OPTION}: two clauses are for layer {layer}; separate them by layers=")
        return clauses[0] if clauses else None

    @property
    def files(self) -> dict[str, Path]:
        """The files that it names, by what they are."""
        predictor_files = {f"{c.kind} file {c.file}": c.file for c in self.clauses if c.file is not None}
        return predictor_files | ({} if self.prompts is None else {"calibration prompts": self.prompts})


def parse_mlp_spec(text: str) -> MlpSpec:
    """Reads a specification.

    Raises:
        ArgumentError: naming the clause, its key and the value, and what was expected.
    """
    if len(text) > _MOST_TEXT:
        raise ArgumentError(f"{OPTION} has {len(text)} characters, expected up to {_MOST_TEXT}")
    prompts: Path | None = None
    fields: list[_Fields] = []
    for number, part in enumerate(text.split(";")):
        items = [x.strip() for x in part.split(",")]
        is_path = bool(items[0]) and ("=" not in items[0] or Path(items[0]).exists())
        if is_path and number:
            raise ArgumentError(
                f"{OPTION} {text!r}: clause {number} names prompts; all clauses share those of the first"
            )
        if is_path:
            prompts = Path(items.pop(0))
        fields.append(_Fields(part.strip(), items))
    clauses = tuple(f.clause() for f in fields)
    is_fitted = any(c.is_fitted for c in clauses)
    if is_fitted and prompts is None:
        raise ArgumentError(f"{OPTION} {text!r} names no calibration prompts, expected {_EXPECTED}")
    tokens = [f.number("tokens", 1, _MOST_TOKENS) for f in fields if "tokens" in f.values]
    errors = [f.amount("max_error") for f in fields if "max_error" in f.values]
    most = _agree_on_value(text, "tokens", tokens)
    return MlpSpec(text, prompts, clauses, most or DEFAULT_TOKENS, _agree_on_value(text, "max_error", errors))


def _agree_on_value(text: str, key: str, values: Sequence[_T]) -> _T | None:
    """The value that all clauses which state one agree on; None where none does."""
    if len(set(values)) > 1:
        raise ArgumentError(f"{OPTION} {text!r} has {len(set(values))} different {key}, expected one for all clauses")
    return values[0] if values else None


class _Fields:
    """The fields of one clause; every fault is an error that names the key and the value."""

    def __init__(self, clause: str, items: Sequence[str]) -> None:
        self.clause_text = clause
        self.values: dict[str, str] = {}
        for item in items:
            key, sign, value = (x.strip() for x in item.partition("="))
            if not sign or not key:
                raise ArgumentError(f"{OPTION} {clause!r}: {item!r} is no field, expected key=value")
            if key in self.values:
                raise ArgumentError(f"{OPTION} {clause!r} has {key} twice; give it once")
            self.values[key] = value
        named = [k for k in FILES if k in self.values]
        if len(named) > 1 or (named and "kind" in self.values):
            both = f"{named[0]} and {named[1] if len(named) > 1 else 'kind'}"
            raise ArgumentError(f"{OPTION} {clause!r} has {both}; give one of them")
        self.kind = named[0] if named else self.values.get("kind", KINDS[0])
        if self.kind not in _FIELDS:
            raise self.error("kind", f"one of {', '.join(KINDS)}")
        if unknown := [k for k in self.values if k not in _FIELDS[self.kind]]:
            expected = ", ".join(_FIELDS[self.kind])
            raise ArgumentError(f"{OPTION} {clause!r} has key {unknown[0]!r}, expected {expected} for {self.kind}")

    def error(self, key: str, expected: str) -> ArgumentError:
        """The fault of a field."""
        return ArgumentError(f"{OPTION} {self.clause_text!r} has {key}={self.values[key]}, expected {expected}")

    def number(self, key: str, least: int, most: int) -> int:
        """An integer field that is there."""
        text = self.values[key]
        if not re.fullmatch(r"[0-9]{1,9}", text) or not least <= int(text) <= most:
            raise self.error(key, f"an integer from {least} to {most}")
        return int(text)

    def share(self, key: str) -> float | None:
        """A field above 0, up to 1; None where it is absent."""
        if key not in self.values:
            return None
        value = self._float(key)
        if not 0 < value <= 1:
            raise self.error(key, "a share above 0, up to 1")
        return value

    def amount(self, key: str) -> float:
        """A field from 0 on that is there."""
        value = self._float(key)
        if not 0 <= value < math.inf:
            raise self.error(key, "a number from 0 on")
        return value

    def clause(self) -> MlpClause:
        """The clause of the fields."""
        path = self.values.get(self.kind) if self.kind in FILES else None
        if path == "":
            raise self.error(self.kind, "a path")
        return MlpClause(
            self.kind,
            None if path is None else Path(path),
            self.share("active"),
            self.share("recall"),
            self.number("rank", 1, 1 << 16) if "rank" in self.values else 0,
            bool(self.number("by_neuron", 0, 1)) if "by_neuron" in self.values else None,
            self.number("seed", 0, (1 << 29)) if "seed" in self.values else 0,
            self._slices("layers"),
            self._slices("dense_layers"),
        )

    def _float(self, key: str) -> float:
        try:
            return float(self.values[key])
        except ValueError:
            return math.nan

    def _slices(self, key: str) -> tuple[Slice, ...]:
        if key not in self.values:
            return ()
        slices = parse_slices(self.values[key], OPTION)
        if slices is None:
            raise self.error(key, "indices or slices such as 3, 0:2 or -2:, with + between them")
        return slices
