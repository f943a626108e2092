# SPDX-License-Identifier: Apache-2.0
"""Models of one fused attention node, random inputs for them, and what is compared."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

import stof
from stof.attention.expand.expanders import make_working_copy
from stof.attention.expand.working_copy import WorkingCopy
from stof.attention.plan_entry import SitePlan
from stof.attention.report import Step
from stof.cached_attention.plan_entry import CachePlan
from stof.options import Options
from stof.plan import Plan
from stof.report import Report

FLOAT, INT32, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT32, TensorProto.INT64, TensorProto.BOOL
MICROSOFT = "com.microsoft"
Sizes = dict[str, int]


@dataclass(frozen=True)
class Given:
    """An input: element type, sizes or their names, and for integers the smallest and the name or value of the largest."""

    name: str
    shape: tuple[int | str, ...]
    dtype: int = FLOAT
    low: int = 0
    high: int | str = 1
    masked: float = 0.0  # the share of -inf or lowest entries of a float
    fill: float = -np.inf

    def draw(self, sizes: Sizes, rng: np.random.Generator) -> np.ndarray:
        """Random values at concrete sizes."""
        shape = [s if isinstance(s, int) else sizes[s] for s in self.shape]
        dtype = helper.tensor_dtype_to_np_dtype(self.dtype)
        if self.dtype == BOOL:
            return np.asarray(rng.random(shape) < 0.6)
        if dtype.kind in "iu":
            high = self.high if isinstance(self.high, int) else sizes[self.high]
            return rng.integers(self.low, high, shape, endpoint=True).astype(dtype)
        array = rng.standard_normal(shape).astype(dtype)
        if self.masked:
            array = np.where(rng.random(shape) < self.masked, dtype.type(self.fill), array)
        return array


@dataclass(frozen=True)
class Fused:
    """A fused node: inputs (None: not given) and attributes."""

    op: str
    inputs: tuple[Given | None, ...]
    attributes: dict[str, Any] = field(default_factory=dict)
    outputs: int = 1
    rank: int = 3  # of the first output
    domain: str = MICROSOFT
    opset: int = 18
    name: str = "the/node"

    def model(self) -> onnx.ModelProto:
        """The node alone in a model with symbolic sizes."""
        outputs = [f"out{i}" for i in range(self.outputs)]
        names = [i.name if i else "" for i in self.inputs]
        node = helper.make_node(self.op, names, outputs, name=self.name, domain=self.domain, **self.attributes)
        distinct = {i.name: i for i in self.inputs if i}
        infos = [helper.make_tensor_value_info(i.name, i.dtype, list(i.shape)) for i in distinct.values()]
        dtype = next(i for i in self.inputs if i).dtype
        ranks = [self.rank, *[5 if self.op == "Attention" and self.domain else 4] * (self.outputs - 1)]
        results = [helper.make_tensor_value_info(o, dtype, [None] * r) for o, r in zip(outputs, ranks, strict=True)]
        graph = helper.make_graph([node], "fused", infos, results)
        opsets = [helper.make_opsetid("", self.opset), helper.make_opsetid(MICROSOFT, 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=10)

    def feeds(self, sizes: Sizes, seed: int) -> dict[str, np.ndarray]:
        """Random inputs."""
        rng = np.random.default_rng(seed)
        return {i.name: i.draw(sizes, rng) for i in self.inputs if i}


def run(model: onnx.ModelProto | Path, feeds: dict[str, np.ndarray], *, library: bool = False) -> list[np.ndarray]:
    """The outputs in ONNX Runtime, without its graph optimizations."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    if library:
        stof.register(options)
    given = str(model) if isinstance(model, Path) else model.SerializeToString()
    return list(ort.InferenceSession(given, options, providers=["CPUExecutionProvider"]).run(None, feeds))


def same(found: list[np.ndarray], wanted: list[np.ndarray], tolerance: float = 2e-5) -> None:
    """Equal shapes, NaN at the same places, values within a tolerance."""
    for a, b in zip(found, wanted, strict=True):
        assert a.shape == b.shape
        assert np.array_equal(np.isnan(a), np.isnan(b))
        np.testing.assert_allclose(np.nan_to_num(a), np.nan_to_num(b), atol=tolerance, rtol=tolerance)


def expanded(model: onnx.ModelProto) -> WorkingCopy:
    """The working copy, in which no fused node is left."""
    found = make_working_copy(model)
    assert not found.findings, found.findings
    onnx.checker.check_model(found.model)
    return found


def forced(model: onnx.ModelProto, folder: Path) -> tuple[Report, Path]:
    """Replaces the attention sites that can be, whatever is estimated, with verification; nodes with a cache are expanded."""
    source, target, plan = (folder / n for n in ("model.onnx", "optimized.onnx", "plan.json"))
    onnx.save(model, source)
    found = stof.optimize(source, options=Options(dry_run=True))
    caches = tuple(CachePlan(row.cache, False, reason="left to attention sites") for row in found.rows("caches"))
    if caches:
        found = stof.optimize(source, options=Options(dry_run=True, skip=("cache:*",)))
    entries = [
        SitePlan(s.site, s.step in (Step.COST, Step.DONE), s.mask, reason=s.reason)
        for s in found.sites
        if s.index is not None
    ]
    Plan({"caches": caches, "sites": tuple(entries)}).save(plan)
    return stof.optimize(source, target, Options(plan=plan)), target
