# SPDX-License-Identifier: Apache-2.0
"""Stored results of padded texts, on CPUs and GPUs, as sections of the page of numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

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
_GPU_PEERS = {
    "stof-padded": "`--unpad off`",
    "ort": "ORT exported",
    "ort-transformers": "ORT optimizer",
    "ort-packed": "ORT packed",
    "ort-sorted": "ORT sorted",
    "ort-transformers-sorted": "ORT optimizer sorted",
    "ort-packed-sorted": "ORT packed sorted",
}
_CAPTURED_PEERS = ("stof-padded-captured", "ort-captured", "ort-transformers-captured")


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
                *_ratios(ratios, _PEERS),
                _memory(record),
            ]
        )
    about = (
        "**Padded texts**: `python -m bench texts`, useful tokens a second, and how many times as fast as each peer. "
        "Memory: with `--unpad off` → `auto`."
    )
    return [about, "", table(head, rows)]


def tabulate_gpu(records: Sequence[Record]) -> list[str]:
    """A row for each model, distribution of lengths and size of a batch, captured and not; none where there are no records."""
    if not records:
        return []
    first = ["model", "lengths", "batch"]
    head = [*first, "padded/real", "tokens/s", "kernels", *_GPU_PEERS.values()]
    captured_head = [
        *first, "padded/capacity", "tokens/s", "kernels", "`--unpad off`", "ORT exported", "ORT optimizer",
    ]  # fmt: skip
    rows, captured = [], []
    for record in sorted(records, key=lambda r: (r["model"], r["key"][2], r["rows"])):
        point = [f"{record['model']}, {record['precision']}", record["key"][2], str(record["rows"])]
        padding = f"{record['padded_over_real']['arrival']:.2f}"
        rows.append([*point, padding, *_rates(record, "stof"), *_ratios(record.get("ratio", {}), _GPU_PEERS)])
        if "ratio_captured" in record:
            capacity = f"{record['capacity']['padded_over_capacity']:.2f}"
            ratios = _ratios(record["ratio_captured"], _CAPTURED_PEERS)
            captured.append([*point, capacity, *_rates(record, "stof-captured"), *ratios])
    about = (
        "**Padded texts**: `python -m bench texts --device cuda`, useful tokens a second, the time of kernels over that of calls "
        "(above 100 % where kernels overlap), and how many times as fast as each peer."
    )
    found = [about, "", table(head, rows)]
    if captured:
        found += ["The same from captured graphs, of a capacity that holds the largest batch:", ""]
        found.append(table(captured_head, captured))
    return found


def _rates(record: Record, name: str) -> list[str]:
    """Useful tokens a second of a candidate, and the share of its kernels."""
    row = record["peers"].get(name, {})
    rate, share = row.get("useful_tokens_per_second"), row.get("kernel_share")
    return ["–" if rate is None else f"{rate:,.0f}", "–" if share is None else f"{share:.0%}"]


def _ratios(ratios: Mapping[str, float], peers: Iterable[str]) -> list[str]:
    return [f"{ratios[peer]:.2f}" if peer in ratios else "–" for peer in peers]


def _memory(record: Record) -> str:
    """Bytes above the loaded model, of stof with and without padding."""
    found = [record.get("memory", {}).get(name, {}).get("above") for name in ("stof-padded", "stof")]
    return "–" if None in found else " → ".join(f"{size / 1e6:,.0f} MB" for size in found)
