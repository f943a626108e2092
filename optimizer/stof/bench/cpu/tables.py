# SPDX-License-Identifier: Apache-2.0
"""Stored results as Markdown tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stof.bench.core.results import Record, read
from stof.bench.gpu import tables as gpu_tables
from stof.bench.gpu.tables import table

_HEAD = """<!-- Written by `stof-bench table -o docs/reference/numbers.md` from docs/results; do not edit. -->
# Numbers

How they are measured, and how to measure them again: [benchmarks.md](benchmarks.md). Times are the least of interleaved
rounds on a CPU and their median on a GPU; columns after the first times are multiples of stof's, so above 1 the peer is slower
and below 1 it is faster.
A peer that could not run is listed under the table with the reason.
"""
_SHORT = {
    "stof-c": "stof, C ABI",
    "ort-exported": "ORT exported",
    "ort-mha": "ORT MHA",
    "ort-gqa": "ORT GQA",
    "ort-attention-23": "ORT Attention-23",
    "ort-attention-24": "ORT Attention-24",
    "torch-sdpa-bool": "torch SDPA bool",
    "torch-sdpa-float": "torch SDPA float",
    "torch-flex": "torch flex",
    "openvino": "OpenVINO",
}


def document(results: Path) -> str:
    """docs/reference/numbers.md: a part for every folder of results, which holds what one machine measured."""
    parts = [_HEAD]
    for folder in [results, *sorted(p for p in results.iterdir() if p.is_dir())]:
        attention, sites, models = (read(folder / f"{n}-cpu.json") for n in ("attention", "sites", "models"))
        parts += _search(read(folder / "search.json"))
        gpu = gpu_tables.device(folder)
        if not (attention or sites or models or gpu):
            continue
        if gpu is not None:
            parts += [f"## {gpu}", "", *gpu_tables.parts(folder)]
        if attention or sites or models:
            machine = (attention or sites or models)[0]["machine"]
            parts += [f"## {machine['device']}, {machine['isa']}", ""]
            parts += [*_attention(attention), *_sites(sites), *_models(models)]
    return "\n".join(parts).rstrip() + "\n"


def _time(us: float) -> str:
    if us < 1000:
        return f"{us:.0f} µs"
    return f"{us / 1000:.{2 if us < 1e5 else 0}f} ms"


def _groups(records: Sequence[Record], *path: str) -> dict[tuple[Any, ...], list[Record]]:
    found: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        key = []
        for name in path:
            value: Any = record
            for part in name.split("."):
                value = value[part]
            key.append(value)
        found.setdefault(tuple(key), []).append(record)
    return found


def _machine(records: Sequence[Record]) -> str:
    machine = records[0]["machine"]
    versions = ", ".join(f"{k} {v}" for k, v in sorted({v for r in records for v in r["machine"]["versions"].items()}))
    dates = sorted(r["machine"]["date"] for r in records)
    libraries = ", ".join(sorted({r["machine"]["library"] for r in records}))
    rates = [r["machine"]["fma_gflops"] for r in records]
    read_rates = [r["machine"]["read_gbps"] for r in records]
    return (
        f"{machine['device']}, {machine['cpus']} CPUs, {machine['isa']}; library build {libraries}; {versions}; "
        f"{dates[0]} to {dates[-1]}. FMA rate {min(rates):.0f} to {max(rates):.0f} GFLOP/s, "
        f"read bandwidth {min(read_rates):.1f} to {max(read_rates):.1f} GB/s over the runs.\n"
    )


def _attention(records: Sequence[Record]) -> list[str]:
    if not records:
        return []
    parts = ["### Attention", "", "`stof-bench attention`: B1 H12 D64, fp32.", "", _machine(records)]
    for (threads, name), group in sorted(_groups(records, "machine.threads", "mask_name").items()):
        group.sort(key=lambda r: r["shape"]["S"])
        peers = [p for p in _SHORT if any("us" in r["peers"].get(p, {}) for r in group)]
        head = ["S", "elements", "tiles", "stof", "useful GFLOP/s", "of FMA rate", *[_SHORT[p] for p in peers]]
        rows = []
        for record in group:
            own, density = record["peers"]["stof"], record["density"]
            if "us" not in own:
                rows.append([str(record["shape"]["S"]), "", "", own["missing"], "", "", *[""] * len(peers)])
                continue
            rate = own["useful_gflops"] / record["machine"]["fma_gflops"]
            cells = [_ratio(record["peers"].get(p, {}), own["us"]) for p in peers]
            rows.append(
                [
                    str(record["shape"]["S"]),
                    f"{density['element']:.3f}",
                    f"{density['tile']:.3f}",
                    _time(own["us"]),
                    f"{own['useful_gflops']:.0f}",
                    f"{rate:.0%}",
                    *cells,
                ]
            )
        masks = sorted({r["mask"] for r in group}, key=lambda m: (len(m), m))
        shown = masks[0] if len(masks) == 1 else f"{masks[0]} (the numbers grow with S)"
        parts += [
            f"#### {name}, {threads} thread{'s' if threads > 1 else ''}",
            "",
            f"`{shown}`",
            "",
            table(head, rows),
        ]
        parts += _missing(group)
    return parts


def _ratio(row: Record, own: float) -> str:
    return f"{row['us'] / own:.2f}" if "us" in row else "–"


def _missing(group: Sequence[Record]) -> list[str]:
    reasons: dict[tuple[str, str], list[str]] = {}
    for record in group:
        for peer, row in record["peers"].items():
            if "missing" in row:
                reasons.setdefault((_SHORT.get(peer, peer), row["missing"]), []).append(str(record["shape"]["S"]))
    if not reasons:
        return []
    found = [f"{peer}: {reason} (S = {', '.join(lengths)})" for (peer, reason), lengths in reasons.items()]
    return ["Not there: " + "; ".join(found) + ".", ""]


def _search(records: Sequence[Record]) -> list[str]:
    """The search for fusion schemes beside enumeration, greedy merging and random samples."""
    if not records:
        return []
    rows = []
    for graph in dict.fromkeys(r["key"][0] for r in records):
        for cost in ("analytical", "drawn"):
            own = [r for r in records if r["key"][0] == graph and r["key"][2] == cost]
            if own:
                schemes = [r["schemes"] for r in own]
                best = sum(abs(r["exhaustive"] - 1) < 1e-6 for r in own)
                rows.append(
                    [
                        graph, cost, str(len(own)), f"{min(schemes)} to {max(schemes)}", f"{best} of {len(own)}",
                        *[f"{max(r[name] for r in own):.3f}" for name in ("greedy", "random", "unfused")],
                        f"{sum(r['seconds'] for r in own):.2f} s",
                    ]
                )  # fmt: skip
    head = ["graph", "cost", "spaces", "schemes", "as enumerated", "greedy", "2,000 random", "unfused", "time"]
    return [
        "## The search for fusion schemes",
        "",
        "`stof-bench search`: spaces of 200 to 5,000 schemes. *drawn*: costs without any order, which no model would give. The "
        "worst cost of others over the search's own.",
        "",
        table(head, rows),
    ]


def _sites(records: Sequence[Record]) -> list[str]:
    if not records:
        return []
    parts = [
        "### Sites of the first models",
        "",
        "`stof-bench sites`: the exported chain of nodes in ONNX Runtime against",
        "",
    ]
    parts[-2] += " StofAttention in ONNX Runtime, with the padding operand."
    parts.append(_machine(records))
    rows = []
    records = sorted(records, key=lambda r: (r["mask_name"], r["mask"], r["shape"]["S"], r["machine"]["threads"]))
    for record in records:
        own, other = record["peers"]["stof"], record["peers"]["ort-exported"]
        shape = record["shape"]
        rows.append(
            [
                record["mask_name"],
                f"`{record['mask']}`",
                f"H{shape['H']} G{shape['G']} D{shape['D']}",
                str(shape["S"]),
                str(record["machine"]["threads"]),
                _time(own["us"]) if "us" in own else own["missing"],
                _time(other["us"]) if "us" in other else other["missing"],
                f"{other['us'] / own['us']:.2f}" if "us" in own and "us" in other else "",
            ]
        )
    parts.append(table(["model", "mask", "heads", "S", "threads", "stof", "ONNX Runtime", "times faster"], rows))
    return parts


def _models(records: Sequence[Record]) -> list[str]:
    if not records:
        return []
    parts = [
        "### Models",
        "",
        "`stof-bench model NAME`: fp32, end to end, best of interleaved warm runs.",
        "",
        _machine(records),
    ]
    head = ["model", "B", "S", "threads", "original", "optimized", "times faster", "attention only"]
    head += ["chains only", "OpenVINO / optimized", "quotient"]
    head += ["memory above the weights", "times less"]
    rows = []
    for record in records:
        seconds = record["seconds"]
        best = seconds["optimized"]
        memory = [record["memory"][k]["above"] / 2**20 for k in ("original", "optimized")] if "memory" in record else []
        rows.append(
            [
                record["model"],
                str(record["shape"]["B"]),
                str(record["shape"]["S"]),
                str(record["machine"]["threads"]),
                f"{seconds['original'] * 1e3:.0f} ms",
                f"{best * 1e3:.0f} ms",
                f"{seconds['original'] / best:.2f}",
                *[f"{seconds['original'] / seconds[k]:.2f}" if k in seconds else "–" for k in ("attention", "chains")],
                f"{seconds['openvino'] / best:.2f}" if "openvino" in seconds else "–",
                f"{record['quotient']['quotient']:.3f}" if "quotient" in record else "–",
                f"{memory[0]:.0f} → {memory[1]:.0f} MiB" if memory else "–",
                f"{memory[0] / memory[1]:.1f}" if memory else "–",
            ]
        )
    parts.append(table(head, rows))
    parts.append(
        "The quotient is the optimized time over the time that the original's own profile spends outside attention plus the "
        "operators' times measured alone: 1 means that nothing else was lost.\n"
    )
    reasons = {f"{r['model']} S{r['shape']['S']}: {k}: {v}" for r in records for k, v in r["missing"].items()}
    if reasons:
        parts += ["Not there: " + "; ".join(sorted(reasons)) + ".", ""]
    return parts
