# SPDX-License-Identifier: Apache-2.0
"""Runs changed exports: the optimized model must follow the change, refuse the site, or be stopped by verification."""

from __future__ import annotations

import importlib
import multiprocessing
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from stof.attention.decide.cost_cpu import refusals
from stof.attention.describe.site_problem import SiteProblem
from stof.attention.emit import Rewrite, emit
from stof.attention.expand.expanders import make_working_copy
from stof.attention.find import find_sites
from stof.errors import StofError, UnsupportedError
from stof.mask.accept import accept, with_or_without_guard
from stof.mask.check.checker import MaskChecker
from stof.mask.lift import lift
from stof.mask.relative_bias.lift import with_relative_bias
from stof.mask.site import AttentionSite
from stof.options import Options
from stof.pipeline import optimize
from stof.symbolic import Symbolic

from .judge import session
from .mutate import mutate

SIZES = ((2, 37, "left"), (2, 22, "right"))
TOLERANCE = 2e-4  # of the outputs' range


@dataclass(frozen=True)
class MutantOutcome:
    """One changed graph: what was changed, and followed, refused, stopped, invalid or wrong."""

    graph: str
    number: int
    change: str
    state: str
    masks: tuple[str, ...] = ()
    fault: str = ""
    seconds: float = 0.0
    matters: bool = False  # its outputs are not those of the unchanged graph


def _build() -> Any:
    """The module that fills stored graphs, which lies outside the package."""
    folder = str(Path(__file__).resolve().parents[2] / "models")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module("build")


def graphs() -> list[str]:
    """The narrow stored graphs."""
    return [n.removeprefix("narrow/") for n in _build().names(True) if n.startswith("narrow/")]


@cache
def _graph(name: str) -> onnx.ModelProto:
    build = _build()
    found: onnx.ModelProto = build.fill(build.load_graph(f"narrow/{name}"), seed=3)
    return found


def _feeds(model: onnx.ModelProto, batch: int, length: int, side: str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(length)
    mask = np.ones((batch, length), np.int64)
    mask[-1, : length // 3] = 0
    mask = mask if side == "left" else np.ascontiguousarray(mask[:, ::-1])
    known = {"attention_mask": mask, "input_ids": rng.integers(3, 90, (batch, length))}
    return {i.name: known[i.name] for i in model.graph.input}


def _outputs(model: onnx.ModelProto, library: bool) -> list[np.ndarray]:
    runner = session(model, library=library)
    found: list[np.ndarray] = []
    for size in SIZES:
        results: list[Any] = runner.run(None, _feeds(model, *size))
        found += results
    return found


@cache
def _unchanged(name: str) -> list[np.ndarray]:
    return _outputs(_graph(name), library=False)


def _difference(wanted: list[np.ndarray], found: list[np.ndarray]) -> str:
    for a, b in zip(wanted, found, strict=True):
        # NaN of the original alone comes from keys that a query may not attend (docs/guide/options.md, "NaN").
        defined = ~np.isnan(a)
        if np.isnan(b[defined]).any():
            return f"{np.isnan(b[defined]).sum()} NaN where the original has numbers"
        if 2 * defined.sum() < a.size:
            return f"{a.size - defined.sum()} of {a.size} elements are NaN in the original, too many to compare"
        error = float(np.abs(a[defined] - b[defined]).max(initial=0.0))
        span = float(np.ptp(np.nan_to_num(a)))
        if error > TOLERANCE * max(span, 1e-3):
            return f"outputs differ by {error:.2e}, of a range of {span:.2e}"
    return ""


def run_mutant(name: str, seed: int, number: int) -> MutantOutcome:
    """Changes graph ``name`` in the way of ``number`` and compares."""
    start = time.monotonic()
    model = onnx.ModelProto()
    model.CopyFrom(_graph(name))
    change = mutate(model, random.Random(f"{seed}/{number}"), number)

    def outcome(state: str, masks: tuple[str, ...] = (), fault: str = "", matters: bool = False) -> MutantOutcome:
        return MutantOutcome(name, number, change, state, masks, fault, time.monotonic() - start, matters)

    try:
        wanted = _outputs(model, library=False)
    except Exception:
        return outcome("invalid")
    matters = bool(_difference(_unchanged(name), wanted))
    try:
        optimized, masks = _optimized(model)
    except StofError as error:
        return outcome("refused", fault=f"the model is refused: {error}", matters=matters)
    if optimized is None:
        return outcome("refused", matters=matters)
    fault = _difference(wanted, _outputs(optimized, library=True))
    if not fault:
        return outcome("followed", masks, matters=matters)
    stopped = _stopped(model)
    return outcome("stopped" if stopped else "wrong", masks, fault, matters)


def _optimized(model: onnx.ModelProto) -> tuple[onnx.ModelProto | None, tuple[str, ...]]:
    """The model with every site replaced that the check by execution lets pass, before verification."""
    working = make_working_copy(model)
    symbolic = Symbolic(working.model)
    sites, _ = find_sites(working.model, symbolic, working.materialized)
    checker = MaskChecker(working.model, symbolic)

    def accepted(site: AttentionSite) -> Rewrite:
        mask = with_relative_bias(checker, site, lift(symbolic, site))
        accept(checker, site, mask)
        return Rewrite(site, mask)

    rewrites = []
    for site in sites:
        try:
            found = with_or_without_guard(site, accepted)
        except UnsupportedError:
            continue
        if not refusals(SiteProblem.of(found.site, found.mask)):
            rewrites.append(found)
    if not rewrites:
        return None, ()
    masks = tuple(r.mask.expression.text for r in rewrites)
    return emit(working.expand_for([r.site for r in rewrites]), symbolic, rewrites), masks


def _stopped(model: onnx.ModelProto) -> bool:
    """Whether verification keeps the optimized model from being written, or the command leaves the sites alone."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        onnx.save(model, str(path))
        try:
            optimize(path, options=Options())
        except StofError:
            return True
        written = path.with_name("model.stof.onnx")
        if not written.exists():
            return True
        found = onnx.load(str(written))
        return not _difference(_outputs(model, library=False), _outputs(found, library=True))


def _run(task: tuple[str, int, int]) -> MutantOutcome:
    return run_mutant(*task)


def run_mutants(seed: int, count: int, *, workers: int = 2) -> list[MutantOutcome]:
    """Changes that many graphs: each of the stored ones in turn, each kind of change in turn."""
    names = graphs()
    tasks = [(names[i % len(names)], seed, i) for i in range(count)]
    if workers <= 1:
        return [_run(t) for t in tasks]
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        return pool.map(_run, tasks, chunksize=4)


def mutant_report(outcomes: list[MutantOutcome]) -> str:
    """Counts by kind of change, and the faults."""
    kinds = sorted({o.change.split(":")[0] for o in outcomes})
    states = ["followed", "refused", "stopped", "invalid", "wrong"]
    lines = [f"{len(outcomes)} changed graphs, {sum(o.matters for o in outcomes)} with other outputs than before"]
    lines.append(f"{'change':14}" + "".join(f"{s:>10}" for s in states))
    for kind in kinds:
        count = Counter(o.state for o in outcomes if o.change.split(":")[0] == kind)
        lines.append(f"{kind:14}" + "".join(f"{count[s]:10}" for s in states))
    lines += [
        f"{o.state}: {o.graph} {o.number} ({o.change}): {o.fault}; masks {sorted(set(o.masks))}"
        for o in outcomes
        if o.state in ("wrong", "stopped")
    ]
    return "\n".join(lines)
