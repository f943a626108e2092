# SPDX-License-Identifier: Apache-2.0
"""Draws README's picture, docs/plots/speedup.svg, from docs/results: ``python tools/plot_speedup.py``."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WIDTH, LEFT, RIGHT = 780, 275, 70  # px; the bars lie between the margins
ROW, BAR, HEADER = 26, 16, 34
MOST = 9.0  # the end of the axis, times as fast
FONT = 'font-family="system-ui, sans-serif"'
BAR_COLOR, TEXT, MUTED, GRID = "#2f6fb0", "#1f2328", "#59636e", "#d5dae0"


def _records(name: str) -> list[dict[str, Any]]:
    """The last record of each point."""
    found = json.loads((ROOT / "docs/results" / name).read_text())
    return list({json.dumps(record["key"]): record for record in found}.values())


def panels() -> dict[str, list[tuple[str, float]]]:
    """The bars by title of a panel: each a label, and how many times as fast stof is."""
    cpu = [
        (f"ModernBERT-base, S = {r['shape']['S']}", r["seconds"]["original"] / r["seconds"]["optimized"])
        for r in _records("xeon/models-cpu.json")
        if r["model"] == "modernbert-base.dynamo.sdpa"
    ]
    gpu: list[tuple[str, float]] = []
    of_paper: dict[tuple[int, int], list[float]] = {}
    for record in _records("h100/models-cuda.json"):
        name, batch, length = record["key"]
        if name.startswith("paper-"):
            of_paper.setdefault((batch, length), []).append(record["over_best"])
        else:
            title = {"bert-base": "BERT-base", "modernbert-base": "ModernBERT-base"}[name.split(".")[0]]
            gpu.append((f"{title}, {batch} × {length}", record["over_best"]))
    for (batch, length), gains in sorted(of_paper.items()):
        gpu.append((f"six models, BigBird mask, {batch} × {length}", math.prod(gains) ** (1 / len(gains))))
    return {
        "CPU: Xeon, AVX-512, 2 threads, fp32, batch 1; over the exported model": cpu,
        "GPU: H100, fp16, batch × length; over the best that ONNX Runtime has": gpu,
    }


def svg() -> str:
    """The picture as text."""
    y, body = 14, []
    scale = (WIDTH - LEFT - RIGHT) / MOST
    for title, bars in panels().items():
        body.append(f'<text x="16" y="{y + 16}" {FONT} font-size="14" font-weight="600" fill="{TEXT}">{title}</text>')
        y += HEADER
        bottom = y + ROW * len(bars)
        for tick in range(1, int(MOST) + 1, 2):
            x = LEFT + tick * scale
            body.append(f'<line x1="{x:.1f}" y1="{y - 4}" x2="{x:.1f}" y2="{bottom - 4}" stroke="{GRID}"/>')
            place = f'x="{x:.1f}" y="{bottom + 10}" text-anchor="middle"'
            body.append(f'<text {place} {FONT} font-size="11" fill="{MUTED}">{tick}×</text>')
        for label, gain in bars:
            place = f'x="{LEFT - 10}" y="{y + 12}" text-anchor="end"'
            body.append(f'<text {place} {FONT} font-size="13" fill="{TEXT}">{label}</text>')
            length = gain * scale
            body.append(f'<rect x="{LEFT}" y="{y}" width="{length:.1f}" height="{BAR}" rx="2" fill="{BAR_COLOR}"/>')
            place = f'x="{LEFT + length + 6:.1f}" y="{y + 13}"'
            body.append(f'<text {place} {FONT} font-size="13" font-weight="600" fill="{TEXT}">{gain:.1f}×</text>')
            y += ROW
        y += 30
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y}" viewBox="0 0 {WIDTH} {y}">'
    note = "<!-- Written by tools/plot_speedup.py from docs/results; do not edit. -->"
    return "\n".join([head, note, f'<rect width="{WIDTH}" height="{y}" fill="#ffffff"/>', *body, "</svg>", ""])


if __name__ == "__main__":
    (ROOT / "docs/plots/speedup.svg").write_text(svg())
