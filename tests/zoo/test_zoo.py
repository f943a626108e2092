# SPDX-License-Identifier: Apache-2.0
"""Every architecture of the zoo through the optimizer: verified by it, and run again here on inputs of another making.

By default one graph of each architecture that is not large, of changing exporters; all with STOF_TEST_ALL=1. Original and
optimized graph are compared at a length above every window, batch 2, padded on either side, rows without a key included.
What is written for each target, with chains and without, also runs where the library is missing.
"""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

import stof
from stof.options import Options

sys.path.insert(0, str(Path(__file__).resolve().parent))
import count_sites
import peak_memory
import zoo_inputs
import zoo_table

ALL = os.environ.get("STOF_TEST_ALL", "0") == "1"
LARGEST = 900  # nodes of a graph that is tested by default; larger ones take 5 to 25 s each
# Of the largest value, beside what two runs of the original differ by: graphs compute in fp32, fp16 or bf16.
TOLERANCE = {"float32": 3e-5, "float16": 2e-2, "bfloat16": 3e-2}
# Of every attention and every chain, also those that are slower: beside these, one graph in so many.
SEVERAL_RANKS = [
    "zoo/vit.dynamo.eager",
    "zoo/swin.dynamo.sdpa",
    "zoo/beit.torchscript.eager",
    "zoo/gemma2-bf16.dynamo.eager",
]
EVERY = 12


def table() -> dict[str, tuple[int, int]]:
    """Sites and replaced sites of each graph, as docs/results/zoo.json has them."""
    return {name: (row.sites, row.replaced) for name, row in zoo_table.read_rows().items()}


def chosen() -> list[str]:
    """The graphs to test: one of each architecture, in turn of each of its forms that are not large."""
    if ALL:
        return zoo_inputs.names()
    by_architecture: dict[str, list[str]] = {}
    manifest = zoo_inputs.build.manifest()
    for name in (n for n in zoo_inputs.names() if manifest[n]["nodes"] <= LARGEST):
        by_architecture.setdefault(name.rsplit(".", 2)[0], []).append(name)
    return [forms[i % len(forms)] for i, forms in enumerate(by_architecture.values())]


def test_the_table_covers_the_zoo() -> None:
    rows = table()
    assert list(rows) == zoo_inputs.names()
    total, replaced = (sum(column) for column in zip(*rows.values(), strict=True))
    assert replaced >= 0.97 * total, f"{replaced} of {total} sites are replaced"


def test_the_page_is_of_the_results() -> None:
    rows = zoo_table.read_rows()
    assert zoo_table.PAGE.read_text() == zoo_table.page(rows)
    assert zoo_table.RESULTS.read_text() == zoo_table.write_rows(rows)


def test_default_runs_are_small() -> None:
    """What peak_memory.py has measured: all graphs, status 0, at most 4 GiB."""
    costs = peak_memory.read_costs()
    assert list(costs) == zoo_inputs.names()
    assert not {n: c for n, c in costs.items() if c.status or c.peak_mb > peak_memory.MOST_MB}


@pytest.mark.parametrize("name", chosen())
def test_optimized_graph_gives_the_same(name: str, tmp_path: Path) -> None:
    model = zoo_inputs.filled(name)
    path, written = tmp_path / "model.onnx", tmp_path / "out.onnx"
    onnx.save(model, str(path))
    report = stof.optimize(path, written, Options(verify_budget=5))
    counted = {c.name for c in count_sites.count(name) if c.counts}
    done = {s.site for s in report.sites if s.replaced}
    assert (len(counted), len(counted & done)) == table()[name]
    assert all(s.reason for s in report.sites if not s.replaced)
    if not done:
        assert written.read_bytes() == path.read_bytes()
        return
    assert report.verification is not None
    assert not report.verification.failures
    compare(name, model, onnx.load(str(written)))


@pytest.mark.parametrize(
    "name", zoo_inputs.names() if ALL else list(dict.fromkeys([*SEVERAL_RANKS, *chosen()[::EVERY]]))
)
def test_what_is_written_runs_without_the_library(name: str, tmp_path: Path) -> None:
    model = zoo_inputs.filled(name)
    path, written = tmp_path / "model.onnx", tmp_path / "out.onnx"
    onnx.save(model, str(path))
    different: dict[bytes, onnx.ModelProto] = {}
    for target, chains in itertools.product(("cpu", "cuda", "tensorrt"), ("on", "auto")):
        written.unlink(missing_ok=True)
        stof.optimize(path, written, Options(target=target, chains=chains, verify=False))
        if written.exists():
            found = onnx.load(str(written))
            parts = [found.graph, *found.functions]
            different[b"".join(part.SerializeToString(deterministic=True) for part in parts)] = found
    for found in different.values():
        compare(name, model, found, library="")


@pytest.mark.parametrize("name", ["zoo/gpt-neo.torchscript.eager", "zoo/openai-gpt.dynamo.eager"])
def test_two_levels_of_masks_differ_at_padded_queries_alone(name: str, tmp_path: Path) -> None:
    """Rows without a key under two masks of different strength: docs/reference/attention-forms.md."""
    model = zoo_inputs.filled(name)
    path, written = tmp_path / "model.onnx", tmp_path / "out.onnx"
    onnx.save(model, str(path))
    report = stof.optimize(path, written, Options(verify_budget=5, ignore_empty_rows=True))
    assert [s.replaced for s in report.sites] == [True, True]
    plain = zoo_inputs.session(model, optimized=False)
    found = zoo_inputs.session(onnx.load(str(written)), library=str(stof.library_path()))
    for side in ("left", "right", ""):
        feed = zoo_inputs.feeds(name, model, 2, 45, side, seed=7)
        (hidden, *_), (other, *_) = (s.run(None, feed) for s in (plain, found))
        real = feed["attention_mask"].astype(bool)
        assert (~real).any() == bool(side)
        away = np.abs(hidden - other).max(-1)
        assert away[real].max() <= TOLERANCE["float32"] * np.abs(hidden).max()
        assert side != "left" or away[~real].max() > 1e-2  # else nothing is to be ignored


@pytest.mark.parametrize(
    "name",
    [n for n in zoo_inputs.names() if n.startswith(("zoo/gpt-neo.", "zoo/openai-gpt."))]
    if ALL
    else ["zoo/gpt-neo.torchscript.eager", "zoo/openai-gpt.dynamo.eager"],
)
def test_two_levels_of_masks_give_every_row_of_the_original(name: str, tmp_path: Path) -> None:
    """Every row beside the original in fp64, also those without a key and batch rows that are all padding."""
    model = zoo_inputs.filled(name)
    path, written = tmp_path / "model.onnx", tmp_path / "out.onnx"
    onnx.save(model, str(path))
    report = stof.optimize(path, written, Options(verify=False))
    assert [s.replaced for s in report.sites] == [True, True]
    exact = zoo_inputs.session(zoo_inputs.in_fp64(model), optimized=False)
    optimized = onnx.load(str(written))
    for library in (str(stof.library_path()), ""):
        found = zoo_inputs.session(optimized, library=library)
        for side in ("left", "right", "all"):
            feed = zoo_inputs.feeds(name, model, 2, 45, side, seed=7)
            if side == "all":
                feed["attention_mask"][1] = 0
            assert not feed["attention_mask"].all()
            (want, *_), (got, *_) = (s.run(None, feed) for s in (exact, found))
            assert want.dtype == np.float64
            assert np.abs(got - want).max() <= 3e-6 * np.abs(want).max(), side


def compare(name: str, model: onnx.ModelProto, optimized: onnx.ModelProto, library: str | None = None) -> None:
    """Both models on inputs of batch 2 at length 45, padded left, right and not at all; ``library`` "" is none."""
    dtype = zoo_inputs.build.manifest()[name].get("dtype", "float32")
    before, after = zoo_inputs.runnable(model), zoo_inputs.runnable(optimized)
    plain = zoo_inputs.session(before, optimized=False)
    legal = zoo_inputs.session(before)
    found = zoo_inputs.session(after, library=str(stof.library_path()) if library is None else library)
    for side in ("left", "right", ""):
        feed = zoo_inputs.feeds(name, before, 2, 45, side, seed=7)
        outputs = [s.run(None, feed) for s in (plain, legal, found)]
        for output, a, b, c in zip(plain.get_outputs(), *outputs, strict=True):
            assert c.shape == a.shape, output.name
            if a.dtype.kind != "f":
                assert np.array_equal(a, c), output.name
                continue
            assert np.array_equal(np.isfinite(a), np.isfinite(c)), (output.name, side)
            good = np.isfinite(a) & np.isfinite(b)
            wide = [x[good].astype(np.float64) for x in (a, b, c)]
            budget = 4 * np.abs(wide[0] - wide[1]).max(initial=0) + TOLERANCE[dtype] * np.abs(wide[0]).max(initial=0)
            assert np.abs(wide[2] - wide[0]).max(initial=0) <= budget, (output.name, side)
