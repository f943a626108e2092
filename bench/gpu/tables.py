# SPDX-License-Identifier: Apache-2.0
"""Stored results of the GPU's grids and models as a summary in Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from bench.gpu import cases, summary
from bench.gpu.cases import GRIDS
from stof.bench.results import Record, read

_ABOUT = {
    "masks": "fp16, eight masks at three problems, dense and causal at more",
    "paper": "H12 D64 fp16, masks of band and global width round(sqrt(S))",
    "long": "B1 H32 D128, bf16 with 32 key heads and fp16 with 8",
    "bits": "fp16, every tile partial: `(q - k) % 5 != 0`",
    "cached": "one query appended to a cache of T - 1 keys, fp16, B 1 to 64; roofline by the rate of reads",
    "s2": "masks per KV head: local + vertical stride, sinks + window, vertical-slash; steps of a decoder and prefill",
    "decode": "one query after T - 1 cached keys, B1 H32 G8 D128 fp16",
}
# What a table of models shows of the variants that were timed.
_MODEL_VARIANTS = ("exported", "tool", "mha", "stof")
_WORST_POINTS = 5


def device(folder: Path) -> str | None:
    """The GPU that a folder's results are of."""
    for grid in GRIDS:
        for record in read(folder / f"attention-cuda-{grid}.json")[:1]:
            return str(record["machine"]["device"])
    return None


def summary_lines(folder: Path, output: Path) -> list[str]:
    """What a folder holds of a GPU, as lines of the page; plots lie beside ``output``, the folder of all results."""
    by_grid = {grid: read(folder / f"attention-cuda-{grid}.json") for grid in GRIDS}
    models = _models(read(folder / "models-cuda.json"), read(folder / "compiled.json"))
    return [*_attention({grid: records for grid, records in by_grid.items() if records}, folder, output), *models]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *["| " + " | ".join(row) + " |" for row in rows]]) + "\n"


def _attention(by_grid: dict[str, list[Record]], folder: Path, output: Path) -> list[str]:
    if not by_grid:
        return []
    every = [record for records in by_grid.values() for record in records]
    found = [f"**Attention**: `python -m bench attention --device cuda --grid {' '.join(by_grid)}`. {_machine(every)}"]
    found += [f"* {grid}: {_ABOUT[grid]}." for grid in by_grid]
    found += [*_not_measured(by_grid), *_without(every), *_plots(by_grid, folder, output), ""]
    extended = any(summary.over_jit(r) is not None for r in every)
    rows = [
        [f"**{grid}**" if group == "all" else f"{grid}: {group}", *summary.row(records, extended)]
        for grid, kept in by_grid.items()
        for group, records in _groups(grid, kept).items()
    ]
    found.append(table(["", *summary.HEAD, *(summary.JIT_HEAD if extended else [])], rows))
    found += [*_worst(every), *_in_runtime(every), *_regrets(every), *_full_tiles(every), *_bits(every)]
    return found


def _plots(by_grid: dict[str, list[Record]], folder: Path, output: Path) -> list[str]:
    """Links to the plots that lie beside the results."""
    paths = {grid: output.parent / "plots" / f"{folder.name}-{grid}.png" for grid in by_grid}
    links = [f"[{grid}](../plots/{path.name})" for grid, path in paths.items() if path.is_file()]
    return [f"* Plots, fraction of the roofline by mask and length: {', '.join(links)}."] if links else []


def _groups(grid: str, records: Sequence[Record]) -> dict[str, list[Record]]:
    """All of a grid, then by mask where there are several; the paper grid by length, too."""
    found = {"all": list(records)}
    masks = summary.groups(records, lambda r: r["mask_name"])
    if len(masks) > 1:
        found |= masks
    return found | (summary.groups(records, summary.length_range) if grid == "paper" else {})


def _versions(machines: Sequence[Record]) -> str:
    return ", ".join(f"{k} {v}" for k, v in sorted({v for m in machines for v in m["versions"].items()}))


def _machine(records: Sequence[Record]) -> str:
    machines = [r["machine"] for r in records]
    dates = sorted(m["date"][:10] for m in machines)
    builds = ", ".join(sorted({m["library"] for m in machines}))
    tiles = ", ".join(f"{v:.2f} ns ({k})" for k, v in sorted(machines[-1]["tile_ns"].items()))
    return (
        f"Library build {builds}; {_versions(machines)}; {dates[0]} to {dates[-1]}. Copy "
        f"{machines[-1]['copy_gbps']:.0f} GB/s, launch {machines[-1]['launch_us']:.2f} µs, a full tile of 128 × 128 {tiles}.\n"
    )


def _without(records: Sequence[Record]) -> list[str]:
    """Peers that no point has a time of, why not, and at how many points they were not asked."""
    reasons: dict[str, Counter[str]] = {}
    timed = {p for r in records for p, row in r["peers"].items() if "us" in row}
    for record in records:
        for peer, row in record["peers"].items():
            if peer not in timed:
                reasons.setdefault(row["label"], Counter())[row.get("missing", "")] += 1
    found = []
    for label, why in reasons.items():
        parts = [f"{count} points: {reason}" for reason, count in sorted(why.items())]
        asked = sum(why.values())
        parts += [f"not asked at {len(records) - asked}"] if asked < len(records) else []
        found.append(f"{label} ({'; '.join(parts)})")
    return [f"* Not timed: {', '.join(found)}."] if found else []


def _not_measured(by_grid: dict[str, list[Record]]) -> list[str]:
    """The points of each grid that there is no record of."""
    found = []
    for grid, records in by_grid.items():
        known = [r["key"] for r in records]
        open_points = [case for case in cases.grid(grid) if case.key not in known]
        if open_points:
            masks = ", ".join(dict.fromkeys(case.name for case in open_points))
            found.append(f"* {grid}: not measured yet, {len(open_points)} points of {masks}")
    return found


def _worst(records: Sequence[Record]) -> list[str]:
    """The points with the least ratio to the best peer."""
    lost = sum((summary.ratio(r) or 1) < 1 for r in records)
    rows = summary.worst_points(records, _WORST_POINTS)
    return (
        [f"Points where a peer is faster: {lost}. The worst points:", "", table(summary.WORST_HEAD, rows)]
        if rows
        else []
    )


def _in_runtime(records: Sequence[Record]) -> list[str]:
    """What a model of one node costs over the library alone."""
    times = [r for r in (summary.ratio(x, "stof-ort") for x in records) if r]
    if not times:
        return []
    return [
        f"As a node of ONNX Runtime the operator takes {summary.geomean(times):.3f} times as long (geometric mean of "
        f"{len(times)} points, at most {max(times):.3f}).",
        "",
    ]


def _regrets(records: Sequence[Record]) -> list[str]:
    """How far the selector's choices are from the best kernel."""
    rows = summary.regrets(records)
    if not rows:
        return []
    return [
        "The selector's choice beside every kernel it could take (`--kernels`):",
        "",
        table(summary.REGRET_HEAD, rows),
    ]


def _full_tiles(records: Sequence[Record]) -> list[str]:
    """The rate on full tiles alone, by mask and head size, in one line."""
    found = [
        f"{mask} D{D} {least:.1%}" + (f" to {most:.1%} ({count} points)" if count > 1 else "")
        for (mask, D), (count, least, most) in summary.full_tile_ranges(records).items()
    ]
    return [f"Full tiles alone, of the best dense kernel's rate: {', '.join(found)}.", ""] if found else []


def _bits(records: Sequence[Record]) -> list[str]:
    """What bits in every tile cost, in one line."""
    rows = summary.bits(records)
    if not rows:
        return []
    costs = ", ".join(f"{more} ({at.partition(' ')[2]})" for at, more in rows)
    return [f"What an element mask in every tile costs over no mask: {costs}.", ""]


def _models(records: Sequence[Record], compiled: Sequence[Record]) -> list[str]:
    if not records:
        return []
    found = [
        "**Models**: `python -m bench model NAME --device cuda`: fp16, ONNX Runtime's CUDA provider, IO binding, graph replays, "
        "ms;",
        "torch.compile with max-autotune: `python -m bench.gpu.torch_compile`.",
        "",
    ]
    labels = {k: label for r in records for k, label in r["labels"].items()}
    variants = [k for k in _MODEL_VARIANTS if any(k in r["us"] for r in records)]
    by_torch = {(r["model"], *r["shape"]): r["us"] for r in compiled}
    gains: dict[str, list[float]] = {}
    rows = []
    for record in records:
        times: dict[str, float] = record["us"]
        name, batch, length = record["model"], record["shape"]["B"], record["shape"]["S"]
        torch_us = by_torch.get((name.partition(".")[0], batch, length))
        over = record.get("over_best")
        if torch_us and over:
            over = min(over, torch_us / times["stof"])
            if name.startswith("paper-"):
                gains.setdefault(f"({batch}, {length})", []).append(over)
        cells = [*[_milliseconds(times.get(k)) for k in variants], _milliseconds(torch_us)]
        rows.append([name.partition(".")[0], str(batch), str(length), *cells, f"{over:.2f}" if over else "–"])
    found.append(table(["model", "B", "S", *[labels[k] for k in variants], "torch.compile", "over the best"], rows))
    if gains:
        means = [f"{shape} {summary.geomean(g):.2f}" for shape, g in gains.items()]
        every = [x for g in gains.values() for x in g]
        found.append(
            f"The paper's models over the best of all, geometric means: {', '.join(means)}, all "
            f"{summary.geomean(every):.2f}, least {min(every):.2f}.\n"
        )
    return found


def _milliseconds(us: float | None) -> str:
    return f"{us / 1e3:.2f}" if us else "–"
