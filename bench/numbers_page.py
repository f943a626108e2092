# SPDX-License-Identifier: Apache-2.0
"""The page docs/reference/numbers.md: stored results of all machines as a summary in Markdown."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from bench.gpu import tables as gpu_tables
from bench.gpu.summary import geomean
from bench.gpu.tables import table
from bench.texts.table import tabulate as tabulate_texts
from bench.texts.table import tabulate_gpu as tabulate_gpu_texts
from stof.bench.results import Record, read

_HEAD = """<!-- Written by `python -m bench table -o docs/reference/numbers.md` from docs/results; do not edit. -->
# Numbers

A summary of what was measured. Every point lies in [docs/results](../results) as JSON, with shapes, versions, densities and
all peers. [The method](../design/benchmarks.md), and [how to measure again](../guide/comparisons.md).

* Times: the least of interleaved rounds on a CPU, their median on a GPU.
* Ratios: a peer's time over stof's, so stof is faster above 1. Several points: the geometric mean.
* *The best peer*: the fastest candidate at each point that is not stof.
* *Roofline*: launch + the larger of memory time and the time of all 128 × 128 tiles with an allowed pair, at the best dense
  kernel's rate. Kernels with smaller tiles skip more, and may exceed 100 %.
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
    """The page docs/reference/numbers.md: a section for every folder of results, which holds what one machine measured."""
    lines = [_HEAD]
    for folder in [results, *sorted(p for p in results.iterdir() if p.is_dir())]:
        attention, sites, models = (read(folder / f"{n}-cpu.json") for n in ("attention", "sites", "models"))
        decoders = [r for path in sorted(folder.glob("decode-genai*.json")) for r in read(path)]
        texts = read(folder / "texts-cpu.json")
        gpu = gpu_tables.device(folder)
        if gpu is not None:
            lines += [f"## {gpu}", "", *gpu_tables.summary_lines(folder, results)]
        if found := read(folder / "texts-cuda.json"):
            if gpu is None:
                lines += [f"## {found[0]['machine']['device']}", "", f"Library {_versions(found)}\n"]
            lines += tabulate_gpu_texts(found)
        if found := [*attention, *sites, *models, *decoders, *texts]:
            machine = found[0]["machine"]
            lines += [f"## {machine['device']}, {machine['isa']}", "", _machine(found)]
            lines += [*_attention(attention), *_sites(sites), *_models(models), *_decoders(decoders)]
            lines += tabulate_texts(texts)
    lines += _patterns([r for path in sorted((results / "comparisons").glob("s2-*.json")) for r in read(path)])
    lines += _search(read(results / "search.json"))
    lines += _memory(results / "memory-bound.json")
    return "\n".join(lines).rstrip() + "\n"


def _memory(path: Path) -> list[str]:
    """Estimated over measured memory of runs, by graph."""
    if not path.is_file():
        return []
    graphs = json.loads(path.read_text()).values()
    lines = []
    for key, words in (("original", "before"), ("result", "after")):
        runs = [run for pairs in graphs for run in pairs[key]]
        ratios = [run["ratio"] for run in runs]
        least, most = (f"{pick(run['measured'] for run in runs) / 2**20:.0f}" for pick in (min, max))
        mean = f"{geomean(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        lines.append(f"* {words}: {len(runs)} runs of {least} to {most} MiB, estimate over measured {mean}")
    words = "[Estimates](../design/memory.md) beside fresh processes, by `python tests/memory/memory_bound.py`:\n"
    return ["## Peak memory of whole models", "", words, *lines]


def _time(us: float) -> str:
    if us < 1000:
        return f"{us:.0f} µs"
    return f"{us / 1000:.{2 if us < 1e5 else 0}f} ms"


def _machine(records: Sequence[Record]) -> str:
    machine = records[0]["machine"]
    rates = [r["machine"]["fma_gflops"] for r in records]
    read_rates = [r["machine"]["read_gbps"] for r in records]
    return (
        f"{machine['cpus']} CPUs; library {_versions(records)} FMA rate "
        f"{min(rates):.0f} to {max(rates):.0f} GFLOP/s, read bandwidth {min(read_rates):.1f} to {max(read_rates):.1f} GB/s.\n"
    )


def _versions(records: Sequence[Record]) -> str:
    """The builds and versions that were measured, and when."""
    versions = ", ".join(f"{k} {v}" for k, v in sorted({v for r in records for v in r["machine"]["versions"].items()}))
    dates = sorted(r["machine"]["date"][:10] for r in records)
    libraries = ", ".join(sorted({r["machine"]["library"] for r in records}))
    return f"build {libraries}; {versions}; {dates[0]} to {dates[-1]}."


def _attention(records: Sequence[Record]) -> list[str]:
    if not records:
        return []
    peers = [p for p in _SHORT if any("us" in r["peers"].get(p, {}) for r in records)]
    head = ["mask", "S", "threads", "stof", "useful GFLOP/s", "of FMA rate", *[_SHORT[p] for p in peers]]
    rows = []
    for record in sorted(records, key=lambda r: (r["mask_name"], r["machine"]["threads"], r["shape"]["S"])):
        own, machine = record["peers"]["stof"], record["machine"]
        first = [f"`{record['mask']}`", str(record["shape"]["S"]), str(machine["threads"])]
        if "us" not in own:
            rows.append([*first, own["missing"], "", "", *[""] * len(peers)])
            continue
        rate = f"{own['useful_gflops'] / machine['fma_gflops']:.0%}"
        cells = [_time(own["us"]), f"{own['useful_gflops']:.0f}", rate]
        rows.append([*first, *cells, *[_ratio(record["peers"].get(p, {}), own["us"]) for p in peers]])
    return ["**Attention**: `python -m bench attention`, B1 H12 D64, fp32.", "", table(head, rows), *_missing(records)]


def _ratio(row: Record, own: float) -> str:
    return f"{row['us'] / own:.2f}" if "us" in row else "–"


def _missing(records: Sequence[Record]) -> list[str]:
    """Peers that could not run, and why, in a line."""
    reasons: dict[tuple[str, str], int] = {}
    for record in records:
        for peer, row in record["peers"].items():
            if "missing" in row:
                at = (_SHORT.get(peer, peer), row["missing"])
                reasons[at] = reasons.get(at, 0) + 1
    found = [f"{peer}: {reason} ({count} points)" for (peer, reason), count in reasons.items()]
    return ["Not there: " + "; ".join(found) + ".", ""] if found else []


def _sites(records: Sequence[Record]) -> list[str]:
    """A row for each attention site of the first models, over its lengths and numbers of threads."""
    if not records:
        return []
    by_site: dict[tuple[str, str], list[tuple[float, str]]] = {}
    for record in records:
        own, other = (record["peers"][name].get("us") for name in ("stof", "ort-exported"))
        if own and other:
            threads = record["machine"]["threads"]
            at = f"S{record['shape']['S']}, {threads} thread{'s' if threads > 1 else ''}"
            by_site.setdefault((record["mask_name"], record["mask"]), []).append((other / own, at))
    rows = [
        [
            model, f"`{mask}`", str(len(found)), f"{geomean(r for r, _ in found) or 0:.2f}",
            f"{min(found)[0]:.2f} ({min(found)[1]})", f"{max(found)[0]:.2f} ({max(found)[1]})",
        ]
        for (model, mask), found in sorted(by_site.items())
    ]  # fmt: skip
    return [
        "**Sites of the first models**: `python -m bench sites`, ONNX Runtime's exported nodes over StofAttention, with padding.",
        "",
        table(["model", "mask", "points", "times faster", "least", "most"], rows),
    ]


def _models(records: Sequence[Record]) -> list[str]:
    if not records:
        return []
    head = ["model", "B", "S", "threads", "original", "optimized", "times faster", "OpenVINO / optimized"]
    rows = []
    for record in records:
        seconds, best = record["seconds"], record["seconds"]["optimized"]
        memory = [record["memory"][k]["above"] / 2**20 for k in ("original", "optimized")] if "memory" in record else []
        rows.append(
            [
                record["model"], str(record["shape"]["B"]), str(record["shape"]["S"]), str(record["machine"]["threads"]),
                f"{seconds['original'] * 1e3:.0f} ms", f"{best * 1e3:.0f} ms", f"{seconds['original'] / best:.2f}",
                f"{seconds['openvino'] / best:.2f}" if "openvino" in seconds else "–",
                f"{memory[0]:.0f} → {memory[1]:.0f} MiB" if memory else "–",
            ]
        )  # fmt: skip
    about = "**Models**: `python -m bench model NAME`, fp32, end to end, best of interleaved warm runs."
    return [about, "", table([*head, "memory above the weights"], rows)]


def _decoders(records: Sequence[Record]) -> list[str]:
    if not records:
        return []
    rows = []
    for record in sorted(records, key=lambda r: (r["model"], r["machine"]["threads"], r["shape"]["context"])):
        seconds, worked = record["seconds"], record["cpu_seconds"]
        rows.append(
            [
                record["model"], str(record["shape"]["context"]), str(record["machine"]["threads"]),
                *(f"{1 / seconds[k]:.1f}" for k in ("original", "optimized")),
                f"{seconds['original'] / seconds['optimized']:.2f}", f"{worked['original'] / worked['optimized']:.2f}",
            ]
        )  # fmt: skip
    about = "**Decoders**: `python -m bench decode-genai`, through ONNX Runtime GenAI, one sequence, best of interleaved tokens."
    head = ["model", "context", "threads", "original, tokens/s", "optimized", "times faster", "times less CPU time"]
    return [about, "", table(head, rows)]


def _patterns(records: Sequence[Record]) -> list[str]:
    """A row for each declared pattern and kind of step, beside the fastest dense attention."""
    if not records:
        return []
    gains: dict[tuple[str, str], list[float]] = {}
    for record in records:
        own = record["peers"]["stof"].get("us")
        others = [row["us"] for name, row in record["peers"].items() if name.endswith("-dense") and "us" in row]
        if own and others:
            step = "one token" if record["shape"]["S"] == 1 else "a prompt"
            gains.setdefault((record["mask_name"], step), []).append(min(others) / own)
    rows = [
        [f"{name}, {step}", str(len(found)), f"{geomean(found) or 0:.2f}", f"{min(found):.2f}", f"{max(found):.2f}"]
        for (name, step), found in sorted(gains.items())
    ]
    return [
        f"## Declared patterns, {records[0]['machine']['device']}",
        "",
        "`python -m bench attention --device cuda --grid s2`: fp16 and bf16, with the append to the cache. Outputs differ from "
        "dense attention, with whose fastest kernel they are compared ([patterns](../design/benchmarks.md#on-a-gpu)).",
        "",
        table(["pattern, step", "points", "times faster", "least", "most"], rows),
    ]


def _search(records: Sequence[Record]) -> list[str]:
    """The search for fusion schemes beside enumeration, greedy merging and random samples."""
    if not records:
        return []
    rows = []
    for cost in ("analytical", "drawn"):
        own = [r for r in records if r["key"][2] == cost]
        if own:
            best = sum(abs(r["exhaustive"] - 1) < 1e-6 for r in own)
            schemes = [r["schemes"] for r in own]
            others = [f"{max(r[name] for r in own):.3f}" for name in ("greedy", "random", "unfused")]
            spaces = [str(len(own)), f"{min(schemes)} to {max(schemes)}", f"{best} of {len(own)}"]
            rows.append([cost, *spaces, *others, f"{sum(r['seconds'] for r in own):.1f} s"])
    head = ["cost", "spaces", "schemes", "optimum found", "greedy", "2,000 random", "unfused", "time"]
    return [
        "## The search for fusion schemes",
        "",
        "`python -m bench search`, schemes enumerated; *drawn*: random costs. Other methods: their worst cost over the search's.",
        "",
        table(head, rows),
    ]
