# SPDX-License-Identifier: Apache-2.0
"""Runs of the command with thresholds, with kernels that leave out keys or stand-ins for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from skip_models import D, texts

from stof import cli
from stof.arguments.threshold_kinds import KINDS, SKIP_SCORES, ThresholdKind
from stof.graph.index import DOMAIN, all_nodes
from stof.runtime.library import library_path
from stof.runtime.skip_counts import SkipCounts
from stof.thresholds import apply, layers, runs

LENGTH = 1100  # tokens, as many as calibration asks for


def simulate_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits of the library that state that CPU and CUDA kernels leave out keys, in both ways."""
    for module in (layers, apply):
        monkeypatch.setattr(module, "leaves_out", lambda op, target, kind: target != "tensorrt")


def simulate_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that leave out keys: c multiplies the scores of its node by less than 1, and leaves out more the larger it is.

    With the largest threshold of a ladder scores are multiplied by 0.5.
    """
    simulate_limits(monkeypatch)
    last = [0.5]  # the share of the last model

    def put(model: onnx.ModelProto, thresholds: layers.Thresholds) -> onnx.ModelProto:
        copy = layers.put_thresholds(model, thresholds)
        rungs = [(site.kind.ladder, c) for site, c in thresholds.items() if c > 0]
        last[0] = max([0.5 * (np.searchsorted(ladder, c) + 1) / len(ladder) for ladder, c in rungs], default=last[0])
        for node in all_nodes(copy.graph.node):
            values = {a.name: a for a in node.attribute}
            for kind in KINDS:
                if kind.attribute in values:
                    usual = values["scale"].f or D**-0.5
                    values["scale"].f = usual * (1 - values[kind.attribute].f / kind.ladder[-1] / 2)
        return copy

    for module in (runs, apply):
        monkeypatch.setattr(module, "put_thresholds", put)
        monkeypatch.setattr(module, "take_skip_counts", lambda: SkipCounts(42000, round(42000 * last[0])))


def run(folder: Path, model: Path, spec: str, *options: str) -> tuple[int, Path, dict[str, Any]]:
    """Status, the file that is written, and ``sparsify`` of the report."""
    target, report = folder / "out.onnx", folder / "report.json"
    for file in (target, report):
        file.unlink(missing_ok=True)
    words = [str(model), "-o", str(target), "--json", str(report), "--sparsify", spec, *options]
    status = cli.main(words)
    return status, target, json.loads(report.read_text())["sparsify"] if report.exists() else {}


def inputs_options(folder: Path, count: int = 4, length: int = LENGTH, *, padding: bool = False) -> list[str]:
    options = []
    for i, ids in enumerate(texts(count, length)):
        feed = {"input_ids": ids[None]} | ({"attention_mask": np.ones_like(ids[None])} if padding else {})
        np.savez(folder / f"feed{i}.npz", **feed)
        options += ["--inputs", str(folder / f"feed{i}.npz")]
    return options


def thresholds_of(path: Path, kind: ThresholdKind = SKIP_SCORES) -> dict[str, float]:
    """The attribute of each of stof's attentions."""
    nodes = [n for n in onnx.load(path).graph.node if n.domain == DOMAIN and n.op_type in layers.OPS]
    return {n.name: next((a.f for a in n.attribute if a.name == kind.attribute), 0.0) for n in nodes}


def outputs_of(path: Path, feed: dict[str, np.ndarray]) -> list[np.ndarray]:
    options = ort.SessionOptions()
    options.register_custom_ops_library(str(library_path()))
    made = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return list(made.run(None, feed))
