# SPDX-License-Identifier: Apache-2.0
"""How, when and where the report of a page was made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stof.html_report import elements as e
from stof.run_facts.facts import RunFacts

_MIB = 1 << 20


def run_facts(
    facts: RunFacts | None, files: Mapping[str, str], seconds: Mapping[str, float], library: Mapping[str, Any]
) -> str:
    """The last part of a page.

    Args:
        facts: of the run; None: not known.
        files: paths by what they are.
        seconds: of the run's steps.
        library: ``build_info()``.
    """
    pairs: dict[str, object] = {}
    if facts is not None:
        pairs["command"] = facts.command or "from Python, with a model in memory"
        pairs["date"] = facts.date
        pairs["machine"] = _describe_machine(facts)
        pairs["versions"] = ", ".join(f"{name} {version}" for name, version in facts.versions.items())
    pairs |= files
    if sizes := describe_sizes(facts):
        pairs["file size"] = f"{sizes}, with external data"
    steps = {f"step {name}": f"{spent:.2f} s" for name, spent in seconds.items()}
    parts = {f"library: {name}": _join(value) for name, value in library.items()}
    more = e.fold("Times of the steps, library", e.facts({**steps, **parts})) if steps or parts else ""
    return e.tag("h2", "Run") + e.tag("div", e.facts(pairs), class_="card flow") + more


def _describe_machine(facts: RunFacts) -> str:
    """The CPU, its cores, the instruction set in use, the GPU that choices are for, and the system."""
    machine = facts.machine
    words = [
        machine.get("cpu", ""),
        f"{machine.get('cores', '?')} cores",
        machine.get("isa", ""),
        machine.get("gpu", ""),
    ]
    return ", ".join(filter(None, [*words, machine.get("system", "")]))


def describe_sizes(facts: RunFacts | None) -> str:
    """Sizes of the model before and after, as far as they are known."""
    if facts is None or facts.model_bytes is None:
        return ""
    before = show_size(facts.model_bytes)
    return before if facts.output_bytes is None else f"{before} → {show_size(facts.output_bytes)}"


def show_size(count: int) -> str:
    """A number of bytes in MiB, or in KiB where it is small."""
    return f"{count / _MIB:.1f} MiB" if count >= _MIB else f"{count / 1024:.1f} KiB"


def _join(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
