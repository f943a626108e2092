# SPDX-License-Identifier: Apache-2.0
"""Runs of the command with --allow-bf16, with operators that have the attribute or, in older libraries, ignore it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import onnx
import pytest

from stof import cli
from stof.arguments.precisions import BF16
from stof.attention_precision import apply, layers
from stof.fusion.decide import measured
from stof.graph.index import DOMAIN, all_nodes
from stof.runtime.library import LibraryError
from stof.runtime.limits import kernel_in_precision, takes_attribute
from stof.thresholds.layers import OPS

for folder in ("sparsify", "cached_attention", "paged_attention", "unpadding", "graph"):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / folder))


def _has_kernel() -> bool:
    try:
        return bool(kernel_in_precision("StofAttention", BF16.attribute))
    except LibraryError:
        return False


HAS_KERNEL = _has_kernel()
REAL = pytest.mark.skipif(
    not HAS_KERNEL, reason="this machine has no bf16 instructions, or the library no kernel of them"
)


def simulate_attribute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators that know the attribute. Those of a library without it ignore it, as a machine without instructions does."""
    if not all(takes_attribute(op, BF16.attribute) for op in OPS):
        monkeypatch.setattr(layers, "takes_attribute", lambda op, attribute: True)


def leave_gemms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matmuls by constant weights stay as they are, as on a machine without a kernel for them."""
    for module in (apply, measured):
        monkeypatch.setattr(module, "cpu_bf16_gemm_kernel", lambda: "")


def run(folder: Path, model: Path, *options: str) -> tuple[int, Path, dict[str, Any]]:
    """Status, the file that is written, and the report."""
    target, report = folder / "out.onnx", folder / "report.json"
    for file in (target, report):
        file.unlink(missing_ok=True)
    status = cli.main([str(model), "-o", str(target), "--json", str(report), *options])
    return status, target, json.loads(report.read_text()) if report.exists() else {}


def flags_of(path: Path) -> dict[str, int]:
    """The attribute of each of stof's attentions."""
    nodes = [n for n in all_nodes(onnx.load(path).graph.node) if n.domain == DOMAIN and n.op_type in OPS]
    return {n.name: next((a.i for a in n.attribute if a.name == BF16.attribute), 0) for n in nodes}
