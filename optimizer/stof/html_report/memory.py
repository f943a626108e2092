# SPDX-License-Identifier: Apache-2.0
"""Memory on the page: the peak before and after, the tensors at it, and what grows with the square of a length."""

from __future__ import annotations

from collections.abc import Sequence

from stof.execution.run_limits import show_bytes
from stof.html_report import elements as e
from stof.memory.memory_report import MemoryReport
from stof.memory.peak import LiveTensor
from stof.report import Report

_MOST_ROWS = 100


def memory_card(report: Report) -> str:
    """The peak in the summary; empty where it is not estimated."""
    memory = report.memory
    if memory is None or (found := memory.result) is None:
        return ""
    value = show_bytes(found.activations)
    if memory.after is not None and memory.before is not None:
        value = f"{show_bytes(memory.before.activations)} → {value}"
    at = f", at {memory.sizes_words}" if memory.sizes_words else ""
    kind = "bad" if memory.is_above_limit else ""
    return e.card("Memory of activations", value, f"estimated{at}", kind)


def memory_part(report: Report) -> str:
    """The tensors at the peak, and those that stay quadratic; empty where nothing is estimated."""
    memory = report.memory
    if memory is None:
        return ""
    if (found := memory.result) is None:
        return e.tag("h2", "Memory") + e.tag("p", e.text(memory.headline), class_="quiet")
    parts = [e.tag("h2", "Memory"), e.tag("p", e.text(_sentence(memory), 1000), class_="quiet")]
    if found.tensors:
        parts.append(_table(found.tensors, f"{len(found.tensors)} tensors at the peak"))
    if found.quadratic:
        count = len(found.quadratic)
        words = f"{count} tensor{'' if count == 1 else 's'} with the square of a length"
        parts.append(e.fold(words, _table(found.quadratic[:_MOST_ROWS], "")))
    return "".join(parts)


def _sentence(memory: MemoryReport) -> str:
    found = memory.result
    assert found is not None
    return f"{memory.headline.removeprefix('memory: ')}. Most is alive at {found.node}; the largest tensors there:"


def _table(tensors: Sequence[LiveTensor], summary: str) -> str:
    rows = [
        (
            e.tag("td", e.text(show_bytes(t.bytes)), class_="number"),
            e.tag("td", e.tag("code", e.text(t.shape))),
            e.tag("td", e.tag("code", e.text(t.name)), class_="text"),
            e.tag("td", e.text(t.node), class_="text"),
            e.tag("td", e.text(t.reason), class_="text"),
        )
        for t in tensors
    ]
    return e.table(("bytes", "shape", "tensor", "node", "why"), [e.RowGroup(rows)], summary)
