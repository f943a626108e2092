# SPDX-License-Identifier: Apache-2.0
"""Stored results of the GPU's grids and models as Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stof.bench.core.results import Record, read
from stof.bench.gpu import cases, summary
from stof.bench.gpu.cases import GRIDS

_SHORT = {
    "torch-cudnn": "cuDNN",
    "torch-flash": "FA 2",
    "torch-efficient": "efficient",
    "torch-math": "math",
    "torch-flex": "flex",
    "flash-4": "FA 4",
    "flash-4-blocks": "FA 4, blocks",
    "cudnn-flex": "cuDNN flex",
    "ort-mha": "ORT MHA",
    "ort-gqa": "ORT GQA",
    "ort-attention-23": "ORT Attention-23",
    "ort-exported": "ORT exported",
}
_ABOUT = {
    "masks": "`stof-bench attention --device cuda --grid masks`: fp16, eight masks at three problems, dense and causal at more.",
    "paper": "`stof-bench attention --device cuda --grid paper`: H12 D64 fp16, masks of band and global width round(sqrt(S)).",
    "long": "`stof-bench attention --device cuda --grid long`: B1 H32 D128, bf16 with 32 key heads and fp16 with 8.",
    "bits": "`stof-bench attention --device cuda --grid bits`: fp16, every tile with bits, `(q - k) % 5 != 0`.",
    "decode": "`stof-bench attention --device cuda --grid decode`: one query after T - 1 cached keys, B1 H32 G8 D128 fp16.",
}


def device(folder: Path) -> str | None:
    """The GPU that a folder's results are of."""
    for grid in GRIDS:
        for record in read(folder / f"attention-cuda-{grid}.json")[:1]:
            return str(record["machine"]["device"])
    return None


def parts(folder: Path) -> list[str]:
    """Everything that a folder holds of a GPU."""
    found: list[str] = []
    for grid in GRIDS:
        found += _grid(grid, read(folder / f"attention-cuda-{grid}.json"), folder)
    return [*found, *_models(read(folder / "models-cuda.json"), read(folder / "compiled.json"))]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *["| " + " | ".join(row) + " |" for row in rows]]) + "\n"


def _versions(machines: Sequence[Record]) -> str:
    return ", ".join(f"{k} {v}" for k, v in sorted({v for m in machines for v in m["versions"].items()}))


def _machine(records: Sequence[Record]) -> str:
    machines = [r["machine"] for r in records]
    dates = sorted(m["date"] for m in machines)
    libraries = ", ".join(sorted({m["library"] for m in machines}))
    tiles = ", ".join(f"{v:.2f} ns ({k})" for k, v in sorted(machines[-1]["tile_ns"].items()))
    return (
        f"{machines[0]['device']}; library build {libraries}; {_versions(machines)}; {dates[0]} to {dates[-1]}. Copy "
        f"{machines[-1]['copy_gbps']:.0f} GB/s, launch {machines[-1]['launch_us']:.2f} µs, a full tile of 128 × 128 {tiles}.\n"
    )


def _grid(grid: str, records: Sequence[Record], folder: Path) -> list[str]:
    if not records:
        return []
    found = [f"### Attention on the GPU, {grid} grid", "", _ABOUT[grid], "", _machine(records)]
    plot = f"plots/{folder.name}-{grid}.png"
    if (folder.parent.parent / plot).is_file():
        found += [f"![Fraction of the roofline by mask and length]({plot})", ""]
    groups = {"all": list(records)}
    groups |= summary.groups(records, lambda r: r["mask_name"])
    ways = {"paper": summary.length_range, "masks": summary.problem, "bits": summary.problem}
    by_length = ways.get(grid, lambda r: f"T = {r['shape']['T']}")
    extended = any(summary.over_jit(r) is not None for r in records)
    groups |= summary.groups(sorted(records, key=lambda r: int(r["shape"]["T"])), by_length)
    head = ["", *summary.HEAD, *(summary.JIT_HEAD if extended else [])]
    found.append(table(head, [[k, *summary.row(v, extended)] for k, v in groups.items()]))
    found += [*_not_measured(grid, records), *_without(records), *_in_runtime(records), *_regrets(records)]
    full = summary.full_tiles(records)
    found += [table(summary.FULL_HEAD, full)] if full else []
    bits = summary.bits(records)
    found += [table(summary.BITS_HEAD, bits)] if bits else []
    lost = summary.losses(records)
    found += [f"Points where a peer is faster: {len(lost)}.", ""]
    found += [*[f"* {text}" for text in lost], ""] if lost else []
    for mask, kept in summary.groups(records, lambda r: r["mask_name"]).items():
        found += [f"#### {grid}: {mask}", "", _mask(kept), "", _points(grid, kept)]
    return found


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
        found.append(f"* {label}: not timed ({'; '.join(parts)})")
    return [*found, ""] if found else []


def _regrets(records: Sequence[Record]) -> list[str]:
    """How far the selector's choices are from the best kernel."""
    rows = summary.regrets(records)
    if not rows:
        return []
    text = (
        "The selector's choice beside every kernel that it could take (`--kernels`), all timed by turns at each point:"
    )
    return [text, "", table(summary.REGRET_HEAD, rows)]


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


def _not_measured(grid: str, records: Sequence[Record]) -> list[str]:
    """The points of the grid that there is no record of."""
    known = [r["key"] for r in records]
    masks: dict[str, set[int]] = {}
    count = 0
    for case in cases.grid(grid):
        if case.key not in known:
            masks.setdefault(case.name, set()).add(case.T)
            count += 1
    if not masks:
        return []
    words = "; ".join(f"{mask} at {', '.join(str(n) for n in sorted(lengths))}" for mask, lengths in masks.items())
    return [f"Not measured yet, {count} points, some at every one of these lengths: {words}.", ""]


def _mask(records: Sequence[Record]) -> str:
    masks = sorted({r["mask"] for r in records}, key=lambda m: (len(m), m))
    return f"`{masks[0]}`" + (" (the numbers grow with the length)" if len(masks) > 1 else "")


def _points(grid: str, records: Sequence[Record]) -> str:
    peers = [p for p in _SHORT if any("us" in r["peers"].get(p, {}) for r in records)]
    head = ["shape", "elements", "tiles", "stof", "plain", "useful TFLOP/s", "roofline", "best peer"]
    rows = []
    for record in sorted(records, key=lambda r: (r["shape"]["B"], r["shape"]["G"], r["shape"]["T"])):
        own, density, shape = record["peers"].get("stof", {}), record["density"], record["shape"]
        match grid:
            case "paper":
                first = f"B{shape['B']} S{shape['S']}"
            case "masks" | "bits":
                first = summary.problem(record)
            case _:
                first = f"G{shape['G']} T{shape['T']}"
        cells = [first, f"{density['element']:.3f}", f"{density['tile']:.3f}"]
        if "us" not in own:
            rows.append([*cells, own.get("missing", "not timed"), "", "", "", "", *[""] * len(peers)])
            continue
        over = summary.ratio(record)
        cells += [
            _time(own["us"]), _time(own["plain_us"]), f"{own['useful_tflops']:.0f}", f"{own['roofline']:.0%}",
            f"{over:.2f}" if over is not None else "–",
        ]  # fmt: skip
        rows.append([*cells, *[_over(record["peers"].get(p, {}), own["us"]) for p in peers]])
    return table([*head, *[_SHORT[p] for p in peers]], rows)


def _over(row: Record, own: float) -> str:
    return f"{row['us'] / own:.2f}" if "us" in row else "–"


def _time(us: float) -> str:
    return f"{us:.1f} µs" if us < 1000 else f"{us / 1000:.2f} ms"


def _models(records: Sequence[Record], compiled: Sequence[Record]) -> list[str]:
    if not records:
        return []
    found = [
        "### Models on the GPU",
        "",
        "`stof-bench model NAME --device cuda`: fp16, ONNX Runtime's CUDA provider, IO binding, replays of captured graphs.",
        "",
        _model_machine(records),
    ]
    labels = {k: label for r in records for k, label in r["labels"].items()}
    kinds = [k for k in labels if any(k in r["us"] for r in records)]
    head = ["model", "B", "S", *[labels[k] for k in kinds], "torch.compile", "over the best", "quotient"]
    by_torch = {(r["model"], *r["shape"]): r["us"] for r in compiled}
    gains: dict[str, list[float]] = {}
    rows = []
    for record in records:
        times: dict[str, Any] = record["us"]
        name, batch, length = record["model"], record["shape"]["B"], record["shape"]["S"]
        rival = by_torch.get((name.partition(".")[0], batch, length))
        over = record.get("over_best")
        if rival and over:
            over = min(over, rival / times["stof"])
            if name.startswith("paper-"):
                gains.setdefault(f"({batch}, {length})", []).append(over)
        quotient = record.get("quotient", {}).get("quotient")
        rows.append(
            [
                name, str(batch), str(length),
                *[f"{times[k] / 1e3:.2f} ms" if k in times else "–" for k in kinds],
                f"{rival / 1e3:.2f} ms" if rival else "–",
                f"{over:.2f}" if over else "–",
                f"{quotient:.3f}" if quotient else "–",
            ]
        )  # fmt: skip
    found.append(table(head, rows))
    if gains:
        means = [f"{shape} {summary.geomean(g):.2f} ({len(g)} models)" for shape, g in gains.items()]
        every = [x for g in gains.values() for x in g]
        found.append(
            "The paper's models over the best of all, torch.compile (max-autotune, `python -m stof.bench.gpu.torch_compile`) "
            f"among them, geometric means of those that it was timed for: {', '.join(means)}, all "
            f"{summary.geomean(every):.2f}, least {min(every):.2f}.\n"
        )
    found.append(
        "The quotient is the optimized model's time over the time that the original spends outside attention (its kernels in "
        "the runtime's own profile) plus the operators' times measured alone.\n"
    )
    reasons = {f"{r['model']} S{r['shape']['S']}: {k}: {v}" for r in records for k, v in r.get("missing", {}).items()}
    return [*found, "Not there: " + "; ".join(sorted(reasons)) + ".", ""] if reasons else found


def _model_machine(records: Sequence[Record]) -> str:
    machines = [r["machine"] for r in records]
    libraries: dict[str, list[str]] = {}
    for record in records:
        libraries.setdefault(record["machine"]["library"], []).append(record["machine"]["date"])
    builds = "; ".join(
        f"library build {build}, {len(dates)} points, {min(dates)} to {max(dates)}"
        for build, dates in libraries.items()
    )
    return f"{machines[0]['device']}; {_versions(machines)}; {builds}.\n"
