# SPDX-License-Identifier: Apache-2.0
"""Plans: for each site of a model whether it is replaced and how, as a file that can be kept, edited and applied again.

A plan holds no time, path or machine: the same model and choices give the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stof import strict_json
from stof.errors import ArgumentError
from stof.files import read_text, write_text
from stof.site import EmptyRows

FORMAT = "stof-plan"
VERSION = 1
TARGETS = ("cpu", "cuda", "tensorrt")
_HINTS = ("kernel", "tile")


@dataclass(frozen=True)
class SitePlan:
    """The decision for one site.

    ``mask`` and ``empty_rows`` are what the operator gets where the site is replaced; ``hints`` are its optional attributes
    ``kernel`` and ``tile``. ``predicted_gain`` (original's time over ours at S = 2048, or at the model's fixed length) and
    ``reason`` inform; nothing is decided by them when a plan is applied.
    """

    site: str
    replace: bool
    mask: str = ""
    empty_rows: str = ""  # "": what the graph gives
    hints: tuple[tuple[str, str], ...] = ()
    predicted_gain: float | None = None
    reason: str = ""


@dataclass(frozen=True)
class ChainPlan:
    """The decision for one region of operators (docs/design/fusion-search.md).

    ``segments`` are the parts of it that are chains, as ranges of its operators; there is none where it is not replaced.
    """

    chain: str
    operators: str
    segments: tuple[tuple[int, int], ...] = ()
    reason: str = ""

    @property
    def replace(self) -> bool:
        """Whether any of it is replaced."""
        return bool(self.segments)


@dataclass(frozen=True)
class Plan:
    """The decisions for all sites of a model, in the order of its graph; ``chains`` is None where none were looked for."""

    sites: tuple[SitePlan, ...]
    target: str = "cpu"
    chains: tuple[ChainPlan, ...] | None = None

    def of(self, site: str) -> SitePlan | None:
        """The decision for a site."""
        return next((s for s in self.sites if s.site == site), None)

    def to_json(self) -> str:
        """The plan as text; :func:`parse` reads it back."""
        data: dict[str, Any] = {"format": FORMAT, "version": VERSION, "target": self.target}
        data["sites"] = [_write(s) for s in self.sites]
        if self.chains is not None:
            data["chains"] = [_write_chain(c) for c in self.chains]
        return strict_json.dumps(data, indent=2)

    def save(self, path: Path) -> None:
        """Writes the plan, whole or not at all.

        Raises:
            ArgumentError: when the file cannot be written.
        """
        write_text("plan", path, [self.to_json()])


def load(path: Path) -> Plan:
    """Reads a plan.

    Raises:
        ArgumentError: when the file cannot be read or is no plan, with the entry at fault, what was found and expected.
    """
    return parse(read_text("plan", path), str(path))


def parse(text: str, where: str = "plan") -> Plan:
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
    fields = _Fields(where, "", data, {"format", "version", "target", "sites", "chains"})
    target = fields.text("target", "cpu", TARGETS)
    entries = fields.take("sites", list, None)
    sites: list[SitePlan] = []
    for number, entry in enumerate(entries):
        site = _read(where, f"sites[{number}]", entry)
        if any(s.site == site.site for s in sites):
            raise ArgumentError(f"{where}: sites[{number}] names {site.site!r} again; keep one entry for each site")
        sites.append(site)
    if "chains" not in data:
        return Plan(tuple(sites), target)
    chains: list[ChainPlan] = []
    for number, entry in enumerate(fields.take("chains", list, None)):
        chain = _read_chain(where, f"chains[{number}]", entry)
        if any(c.chain == chain.chain for c in chains):
            raise ArgumentError(f"{where}: chains[{number}] names {chain.chain!r} again; keep one entry for each chain")
        chains.append(chain)
    return Plan(tuple(sites), target, tuple(chains))


def _write_chain(chain: ChainPlan) -> dict[str, Any]:
    data: dict[str, Any] = {"chain": chain.chain, "operators": chain.operators, "replace": chain.replace}
    if chain.replace:
        data["segments"] = [list(s) for s in chain.segments]
    if chain.reason:
        data["reason"] = chain.reason
    return data


def _read_chain(where: str, place: str, entry: object) -> ChainPlan:
    fields = _Fields(where, place, entry, {"chain", "operators", "replace", "segments", "reason"})
    segments: list[tuple[int, int]] = []
    for part in fields.take("segments", list, ()):
        if not isinstance(part, list) or len(part) != 2 or any(type(x) is not int for x in part):
            raise ArgumentError(f"{fields.where} has segments {_shown(part)}, expected pairs of integers")
        if not (segments[-1][1] if segments else 0) <= part[0] < part[1]:
            raise ArgumentError(
                f"{fields.where} has segment {_shown(part)}, expected it after the one before, and not empty"
            )
        segments.append((part[0], part[1]))
    if bool(segments) != fields.take("replace", bool, None):
        raise ArgumentError(f"{fields.where}: expected segments where replace is true, and only there")
    return ChainPlan(
        fields.text("chain", None), fields.text("operators", None), tuple(segments), fields.text("reason", "")
    )


def _write(site: SitePlan) -> dict[str, Any]:
    data: dict[str, Any] = {"site": site.site, "replace": site.replace}
    if site.replace:
        data |= {"mask": site.mask, **({"empty_rows": site.empty_rows} if site.empty_rows else {}), **dict(site.hints)}
        if site.predicted_gain is not None and math.isfinite(site.predicted_gain):
            data["predicted_gain"] = round(site.predicted_gain, 3)
    if site.reason:
        data["reason"] = site.reason
    return data


def _read(where: str, place: str, entry: object) -> SitePlan:
    known = {"site", "replace", "mask", "empty_rows", "predicted_gain", "reason", *_HINTS}
    fields = _Fields(where, place, entry, known)
    gain = fields.take("predicted_gain", (int, float), 0.0)
    if not abs(gain) < 1e300:  # JSON has integers of any length, and Python reads 1e999 as infinity
        raise ArgumentError(f"{fields.where} has predicted_gain {_shown(gain)}, expected a number below 1e300")
    return SitePlan(
        site=fields.text("site", None),
        replace=fields.take("replace", bool, None),
        mask=fields.text("mask", ""),
        empty_rows=fields.text("empty_rows", None, tuple(e.value for e in EmptyRows))
        if "empty_rows" in fields.data
        else "",
        hints=tuple((h, fields.text(h, "")) for h in _HINTS if h in fields.data),
        predicted_gain=float(gain) if "predicted_gain" in fields.data else None,
        reason=fields.text("reason", ""),
    )


class _Fields:
    """The fields of one JSON object, checked as they are taken."""

    def __init__(self, where: str, place: str, data: object, known: set[str]) -> None:
        self.where = f"{where}: {place}" if place else where
        if not isinstance(data, Mapping):
            raise ArgumentError(f"{self.where} is {_shown(data)}, expected an object")
        self.data = data
        if unknown := sorted(set(data) - known):
            raise ArgumentError(f"{self.where} has field {unknown[0]!r}, expected only {', '.join(sorted(known))}")

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
            raise ArgumentError(f"{self.where} has {name} {_shown(value)}, expected {names}")
        return value

    def text(self, name: str, default: str | None, choices: tuple[str, ...] = ()) -> str:
        """A string, one of the choices where there are any."""
        value: str = self.take(name, str, default)
        if choices and value not in choices:
            raise ArgumentError(f"{self.where} has {name} {value!r}, expected one of {', '.join(choices)}")
        return value


def _shown(value: object) -> str:
    text = strict_json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
