# SPDX-License-Identifier: Apache-2.0
"""Stored results of padded texts as a section of the page of numbers."""

from __future__ import annotations

from collections.abc import Sequence

from bench.gpu.tables import table
from stof.bench.results import Record

_PEERS = {
    "stof-padded": "`--unpad off`",
    "ort": "ORT exported",
    "ort-transformers": "ORT optimizer",
    "openvino": "OpenVINO",
    "ort-sorted": "ORT sorted",
    "ort-transformers-sorted": "ORT optimizer sorted",
}


def tabulate(records: Sequence[Record]) -> list[str]:
    """A row for each model, precision and distribution of lengths; none where there are no records."""
    if not records:
        return []
    head = ["model", "lengths", "threads", "padded/real", "tokens/s", *_PEERS.values(), "memory beyond the model"]
    rows = []
    for record in sorted(records, key=lambda r: (r["model"], r["precision"], r["key"][2], r["machine"]["threads"])):
        own = record["peers"].get("stof", {}).get("useful_tokens_per_second")
        ratios = record.get("ratio", {})
        rows.append(
            [
                f"{record['model']}, {record['precision']}",
                record["key"][2],
                str(record["machine"]["threads"]),
                f"{record['padded_over_real']['arrival']:.2f}",
                "–" if own is None else f"{own:,.0f}",
                *(f"{ratios[peer]:.2f}" if peer in ratios else "–" for peer in _PEERS),
                _memory(record),
            ]
        )
    about = (
        "**Padded texts**: `python -m bench texts`, useful tokens a second, and how many times as fast as each peer. "
        "Memory: with `--unpad off` → `auto`."
    )
    return [about, "", table(head, rows)]


def _memory(record: Record) -> str:
    """Bytes above the loaded model, of stof with and without padding."""
    found = [record.get("memory", {}).get(name, {}).get("above") for name in ("stof-padded", "stof")]
    return "–" if None in found else " → ".join(f"{size / 1e6:,.0f} MB" for size in found)
