# SPDX-License-Identifier: Apache-2.0
"""Plans: for each candidate of each op whether it is replaced and how, as a file that can be kept, edited and applied again.

A plan holds no time, path or machine: the same model and choices give the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from stof.arguments.emissions import EMISSIONS, STOF, Emission
from stof.arguments.precisions import BF16, PRECISIONS, Precision, option_that_allows
from stof.arguments.threshold_kinds import KINDS, ThresholdKind
from stof.errors import ArgumentError
from stof.files import read_text, strict_json, write_text
from stof.files.strict_json import quoted
from stof.targets import CPU, TARGETS, Target

FORMAT = "stof-plan"
VERSION = 1
_CLAUSES = "threshold_clauses"
_DEQUANTIZES = "dequantize_attention"
_PRECISION, _GEMM_PRECISION, _MLP_PRECISION = "attention_precision", "gemm_precision", "mlp_precision"


class PlanEntry(Protocol):
    """The decision for one candidate of an op."""

    @property
    def name(self) -> str:
        """The candidate's name, once in the entries of its op."""

    @property
    def replace(self) -> bool:
        """Whether the candidate is replaced."""

    @property
    def reason(self) -> str:
        """Why it is kept; empty where it is replaced, or where an edited file gives no reason."""

    def to_json(self) -> dict[str, Any]:
        """The entry as a JSON object."""


@dataclass(frozen=True)
class EntryFormat:
    """How the entries of one op stand in a plan file.

    Attributes:
        kind: what messages call a candidate, ``site`` for instance.
        read: an entry from where it stands (the file, the place in it) and its JSON value.
        required: whether every plan has the op's list.
    """

    kind: str
    read: Callable[[str, str, object], PlanEntry]
    required: bool = False


@dataclass(frozen=True)
class Plan:
    """The decisions for all candidates of a model, by the key of their op and in the order of the graph.

    An op that looked for no candidates has no entries.
    """

    entries: Mapping[str, tuple[PlanEntry, ...]]
    target: Target = CPU
    emission: Emission = STOF
    sparsity: str = ""  # digest of the patterns of --sparsify
    thresholds: Mapping[ThresholdKind, Mapping[str, float]] = field(default_factory=dict)  # by the names of operators
    threshold_clauses: tuple[str, ...] = ()  # of --sparsify, for messages
    dequantizes_attention: bool = False  # it is for --dequantize-attention
    # Below that of their inputs, by the names of operators; None: a run with --allow-bf16 or
    # --attention-precision decides.
    attention_precision: Mapping[str, Precision] | None = None
    gemm_precision: Mapping[str, Precision] | None = None  # the same of matmuls by constant weights, by their names
    mlp_precision: Mapping[str, Precision] | None = None  # the same of sparse MLPs

    def of(self, key: str, name: str) -> PlanEntry | None:
        """The decision for a candidate of an op."""
        return next((e for e in self.entries.get(key, ()) if e.name == name), None)

    def precisions(self) -> tuple[tuple[str, str, Mapping[str, Precision] | None], ...]:
        """The plan's keys of precisions, what they are of, and what it decides."""
        return (
            (_PRECISION, "attention", self.attention_precision),
            (_GEMM_PRECISION, "GEMMs", self.gemm_precision),
            (_MLP_PRECISION, "sparse MLPs", self.mlp_precision),
        )

    def check_is_for(self, target: Target, emission: Emission) -> None:
        """Refuses another target, and operators in another form.

        Raises:
            ArgumentError: naming what the plan is for.
        """
        if self.target is not target:
            raise ArgumentError(
                f"the plan is for target {self.target.name}, not {target.name}; use --target {self.target.name}"
            )
        if self.emission is not emission:
            raise ArgumentError(
                f"the plan is for --emit {self.emission.name}, not {emission.name}; use --emit {self.emission.name}"
            )

    def check_precisions(self, allowed: Collection[Precision]) -> None:
        """Refuses precisions that options do not allow.

        Raises:
            ArgumentError: naming one operator, and the option that allows all precisions of its kind.
        """
        for key, what, chosen in self.precisions():
            for name, precision in (chosen or {}).items():
                if precision not in allowed:
                    raise ArgumentError(
                        f"the plan computes {what} in {precision.name}, that of {name!r} for instance, and "
                        f"{option_that_allows(set((chosen or {}).values()))} is not given; give it, or take {key} out of the plan"
                    )

    def to_json(self) -> str:
        """The plan as text; :func:`parse` reads it back."""
        data: dict[str, Any] = {"format": FORMAT, "version": VERSION, "target": self.target.name}
        data |= {"emit": self.emission.name} if self.emission is not STOF else {}
        data |= {"sparsity": self.sparsity} if self.sparsity else {}
        data |= {_DEQUANTIZES: True} if self.dequantizes_attention else {}
        data |= {_CLAUSES: list(self.threshold_clauses)} if self.threshold_clauses else {}
        data |= {kind.plan_key: dict(found) for kind in KINDS if (found := self.thresholds.get(kind))}
        for key, _, chosen in self.precisions():
            if chosen is not None:
                data[key] = {name: precision.name for name, precision in chosen.items()}
        data |= {key: [e.to_json() for e in entries] for key, entries in self.entries.items()}
        return strict_json.dumps(data, indent=2)

    def save(self, path: Path) -> None:
        """Writes the plan, whole or not at all.

        Raises:
            ArgumentError: when the file cannot be written.
        """
        write_text("plan", path, [self.to_json()])


def load(path: Path, formats: Mapping[str, EntryFormat]) -> Plan:
    """Reads a plan. ``formats``: of the entries of each op, by its key.

    Raises:
        ArgumentError: when the file cannot be read or is no plan, with the entry at fault, what was found and expected.
    """
    return parse(read_text("plan", path), formats, str(path))


def parse(text: str, formats: Mapping[str, EntryFormat], where: str = "plan") -> Plan:
    """A plan from its text. ``where`` begins the messages.

    Raises:
        ArgumentError: when the text is no plan, with the entry at fault, what was found and what was expected.
    """
    try:
        data = strict_json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"{where} is no plan: it is no JSON ({error}); --save-plan writes one") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ArgumentError(f'{where} is no plan: expected an object with "format": "{FORMAT}"; --save-plan writes one')
    if data.get("version") != VERSION:
        raise ArgumentError(
            f"{where} is a plan of version {data.get('version')!r}, expected {VERSION}; save it again with this stof"
        )
    fields = Fields(
        where,
        "",
        data,
        {
            "format",
            "version",
            "target",
            "emit",
            "sparsity",
            _DEQUANTIZES,
            _CLAUSES,
            *(_PRECISION, _GEMM_PRECISION, _MLP_PRECISION),
            *(kind.plan_key for kind in KINDS),
            *formats,
        },
    )
    target = TARGETS[fields.text("target", CPU.name, tuple(TARGETS))]
    emission = EMISSIONS[fields.text("emit", STOF.name, tuple(EMISSIONS))]
    entries: dict[str, tuple[PlanEntry, ...]] = {}
    for key, form in formats.items():
        if key not in data and not form.required:
            continue
        by_name: dict[str, PlanEntry] = {}
        for number, value in enumerate(fields.take(key, list, None)):
            entry = form.read(where, f"{key}[{number}]", value)
            if entry.name in by_name:
                raise ArgumentError(
                    f"{where}: {key}[{number}] names {entry.name!r} again; keep one entry for each {form.kind}"
                )
            by_name[entry.name] = entry
        entries[key] = tuple(by_name.values())
    thresholds = {kind: found for kind in KINDS if (found := _read_thresholds(fields, kind))}
    clauses = fields.take(_CLAUSES, list, [])
    if any(not isinstance(clause, str) for clause in clauses):
        raise ArgumentError(f"{where} has {_CLAUSES} {quoted(clauses)}, expected a list of strings")
    dequantizes = fields.take(_DEQUANTIZES, bool, False)
    precisions = (
        _read_precisions(fields, _PRECISION, PRECISIONS),
        *(_read_precisions(fields, key, {BF16.name: BF16}) for key in (_GEMM_PRECISION, _MLP_PRECISION)),
    )
    sparsity = fields.text("sparsity", "")
    return Plan(entries, target, emission, sparsity, thresholds, tuple(clauses), dequantizes, *precisions)


def _read_thresholds(fields: Fields, kind: ThresholdKind) -> dict[str, float]:
    """The thresholds of a kind, by the names of attention operators; 0: nothing is left out."""
    thresholds: dict[str, float] = {}
    for name, value in fields.take(kind.plan_key, dict, {}).items():
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not (value == 0 or kind.allows(value)):
            raise ArgumentError(
                f"{fields.where} has {kind.plan_key}[{name!r}] {quoted(value)}, expected 0, or {kind.range_words}"
            )
        thresholds[name] = float(value)
    return thresholds


def _read_precisions(fields: Fields, key: str, known: Mapping[str, Precision]) -> dict[str, Precision] | None:
    """The precisions of one kind of operator, by the names of operators; None: the plan does not decide about them."""
    if key not in fields.data:
        return None
    precisions: dict[str, Precision] = {}
    for name, value in fields.take(key, dict, None).items():
        if not isinstance(value, str) or value not in known:
            names = " or ".join(quoted(name) for name in known)
            raise ArgumentError(f"{fields.where} has {key}[{name!r}] {quoted(value)}, expected {names}")
        precisions[name] = known[value]
    return precisions


class Fields:
    """The fields of one JSON object of a plan, checked as they are taken; every fault is an ``ArgumentError``."""

    def __init__(self, where: str, location: str, data: object, names: set[str]) -> None:
        self.where = f"{where}: {location}" if location else where
        if not isinstance(data, Mapping):
            raise ArgumentError(f"{self.where} is {quoted(data)}, expected an object")
        self.data = data
        if unknown := sorted(set(data) - names):
            raise ArgumentError(f"{self.where} has field {unknown[0]!r}, expected only {', '.join(sorted(names))}")

    def take(self, name: str, kind: type | tuple[type, ...], default: Any) -> Any:
        """A field of a type; without a default it must be there."""
        if name not in self.data:
            if default is None:
                raise ArgumentError(f"{self.where} has no field {name!r}")
            return default
        value = self.data[name]
        # bool is an int to Python, not to JSON.
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            names = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
            raise ArgumentError(f"{self.where} has {name} {quoted(value)}, expected {names}")
        return value

    def text(self, name: str, default: str | None, choices: tuple[str, ...] = ()) -> str:
        """A string, one of the choices where there are any."""
        value: str = self.take(name, str, default)
        if choices and value not in choices:
            raise ArgumentError(f"{self.where} has {name} {value!r}, expected one of {', '.join(choices)}")
        return value
