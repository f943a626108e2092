# SPDX-License-Identifier: Apache-2.0
"""The tool that fits the costs of the CUDA selector: it reads the kernel lists and makes tile schedules."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
PLANNER = Path(os.environ.get("STOF_LIBRARY", ROOT / "build/dev/libstof_ort.so")).parent / "libstof_plan_times.so"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    """tools/fit_selector.py."""
    spec = importlib.util.spec_from_file_location("fit_selector", ROOT / "tools/fit_selector.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["fit_selector"] = module
    spec.loader.exec_module(module)
    return module


def test_lists_are_read(tool: ModuleType) -> None:
    for head, least in ((64, 10), (128, 7)):
        kernels = tool.kernels_of(head)
        assert len(kernels) >= least
        assert len({k.name for k in kernels}) == len(kernels)
        for kernel in kernels:
            assert 0 < kernel.row < 10_000, kernel
            assert 0 < kernel.full <= kernel.partial < 5_000, kernel
            assert 100 <= kernel.solo_speed_pct <= 100 * kernel.ctas_per_sm, kernel


def take(tool: ModuleType, kernel: object, expression: str, shape: tuple[int, ...], head: int = 64) -> float:
    """Microseconds by the model, without the launch."""
    point = tool.Point(f"{expression} {shape}", shape, head, expression, {}, {})
    return float(tool.Planner(PLANNER).predict(point, kernel) - tool.LAUNCH)


def test_model_is_the_schedule(tool: ModuleType) -> None:
    kernel = tool.Kernel(64, 64, 4, 1, 1000.0, 500.0, 700.0)

    def causal(B: int, length: int, **costs: float) -> float:
        return take(tool, tool.replace(kernel, **costs), "k <= q", (B, 3, 3, length, length))

    # Tile rows of one partial tile, and of two tiles; each CTA has one of them.
    assert causal(1, 64) == pytest.approx(1.7)
    assert causal(2, 128) == pytest.approx(2.2)
    assert take(tool, kernel, "", (1, 3, 3, 128, 128)) == pytest.approx(2.0)
    # Queries are the last positions: one full tile and a partial one.
    assert take(tool, kernel, "k <= q", (1, 3, 3, 64, 128)) == pytest.approx(2.2)
    # Head 2 of every batch has three tiles, the others fewer.
    assert take(tool, kernel, "k < 64 * (h + 1)", (5, 3, 3, 64, 192)) == pytest.approx(2.5)
    # The CTA with two tiles is faster alone on its SM, but not faster than the mean.
    assert causal(2, 128, solo_speed_pct=110.0) == pytest.approx(2.0)
    assert causal(2, 128, solo_speed_pct=400.0) == pytest.approx((1.7 + 2.2) / 2)
    # One MiB of keys and values: 4 bytes for each of 64 elements of 3 heads and 1366 keys.
    assert causal(1, 1366, ns_per_mib=900.0) - causal(1, 1366) == pytest.approx(0.9)


def test_split_pipelines(tool: ModuleType) -> None:
    kernel = tool.Kernel(64, 64, 4, 4, 1000.0, 500.0, 700.0)
    # Nine tiles in three rounds, one of which has a partial tile.
    assert take(tool, kernel, "", (1, 3, 3, 64, 576)) == pytest.approx(2.5)
    assert take(tool, kernel, "k <= q", (1, 3, 3, 64, 576)) == pytest.approx(2.7)
    # One CTA an SM: of 133 tile rows one has to wait.
    assert take(tool, kernel, "", (1, 133, 133, 64, 64)) == pytest.approx(3.0)


def test_half_tiles(tool: ModuleType) -> None:
    alone = tool.Kernel(128, 128, 1, 1, 1000.0, 500.0, 500.0)
    shared = tool.Kernel(128, 64, 2, 1, 1000.0, 250.0, 250.0)
    for kernel, percent in (
        (alone, tool.kernel_constant("kHalfTilePct")),
        (shared, tool.kernel_constant("kHalfTileSharedPct")),
    ):
        # Few tile rows, and two CTAs for each: half tiles are done sooner, with a mask and without.
        for expression in ("", "k <= q"):
            assert take(tool, kernel, expression, (1, 3, 3, 128, 128)) == pytest.approx(1.5 * percent / 100)


def test_split_rows(tool: ModuleType) -> None:
    """A tile row of 64 tiles among tile rows of one is split and combined."""
    kernel = tool.Kernel(64, 64, 1, 1, 1000.0, 1000.0, 1000.0)
    whole = tool.replace(kernel, pipelines=2, split=2)  # tile rows stay whole: 32 rounds
    shape, expression = (1, 12, 12, 4096, 4096), "q < 64 or k == q"
    assert take(tool, whole, expression, shape) == pytest.approx(33.0)
    assert 2 + 0.014 * 24 + 5 < take(tool, kernel, expression, shape) < 33


def test_points(tool: ModuleType, tmp_path: Path) -> None:
    """Dilated masks are problems of their residue classes; points of another head size, or with one kernel, do not count."""
    shape = {"B": 2, "H": 12, "G": 12, "S": 1024, "T": 1024, "D": 64}
    two = {"each": [{"name": "sm90-64x64x4", "us": 3.0}, {"name": "sm90-256x64x1", "us": 4.0}]}
    records = [
        {"mask_name": "dilated-256", "shape": shape, "kernels": two},
        {"mask_name": "causal", "shape": {**shape, "D": 128}, "kernels": two},
        {"mask_name": "causal", "shape": shape, "kernels": {"each": two["each"][:1]}},
        {"mask_name": "causal", "shape": {**shape, "H": 24}, "kernels": two},
    ]
    results = tmp_path / "results.json"
    results.write_text(json.dumps(records))
    dilated, causal = tool.points_of(results, 64)
    assert (dilated.shape, dilated.expression) == ((24, 2, 2, 512, 512), "abs(q - k) <= 128")
    assert (causal.shape, causal.expression) == ((2, 24, 12, 1024, 1024), "k <= q")
    assert dilated.us == {"sm90-64x64x4": 3.0, "sm90-256x64x1": 4.0}
    # Heads whose keys and values fill half of the cache, and of a group together.
    assert (dilated.l2_heads, causal.l2_heads) == (200, 200)
    assert causal.mebibytes == 6


def test_list_that_cannot_be_read(tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = Path("cuda/attention/sm90/instantiations/d64.cu")
    (tmp_path / listed).parent.mkdir(parents=True)
    (tmp_path / listed).write_text((ROOT / listed).read_text().replace("Tile<256, 64>", "Tile<kM, 64>"))
    monkeypatch.setattr(tool, "HERE", tmp_path)
    with pytest.raises(SystemExit, match=r"d64\.cu lists 10 kernels, of which 9 could be read: adapt _ENTRY"):
        tool.kernels_of(64)


STEPS = 100


def test_fit(tool: ModuleType) -> None:
    """Costs that choose the slower one of two kernels do not afterwards; --only leaves the other one alone."""
    slow, fast = tool.Kernel(64, 64, 4, 1, 1000.0, 500.0, 520.0), tool.Kernel(256, 64, 1, 1, 1000.0, 450.0, 475.0)
    planner, points = tool.Planner(PLANNER), []
    for length in (512, 1024):
        point = tool.Point(f"{length}", (8, 12, 12, length, length), 64, "k <= q", {}, {})
        # The costs of one are right, the other takes a quarter longer than that, and less by its costs.
        right = planner.predict(point, fast)
        points.append(tool.replace(point, us={slow.name: 1.25 * right, fast.name: right}))
    kernels = [slow, fast]

    def loss(some: list[object]) -> float:
        table = [{k.name: planner.predict(p, k) for k in some} for p in points]  # type: ignore[attr-defined]
        return float(tool.loss(points, some, kernels, table))

    assert [chosen for _, chosen, _ in tool.regrets(points, kernels, planner)] == [slow.name] * 2
    for only in (None, slow.name):
        steps = itertools.count()
        fitted = tool.fit(points, kernels, planner, lambda steps=steps: next(steps) / STEPS, only)
        assert next(steps) == STEPS + 1
        assert loss(fitted) < loss(kernels)
        assert [chosen for _, chosen, _ in tool.regrets(points, fitted, planner)] == [fast.name] * 2
        assert (fitted[1] == fast) == (only is not None)
        assert all(k.full <= k.partial for k in fitted)


def test_store(tool: ModuleType, tmp_path: Path) -> None:
    """Of two times of a point the later one is kept, and nothing but times of kernels and the machine."""
    shape = {"B": 1, "H": 12, "G": 12, "S": 1024, "T": 1024, "D": 64}
    machine = {"date": "today", "device": "a device", "library": "1", "rates": {}}
    files = []
    for number in (1, 2):
        each = [{"name": "sm90-64x64x4", "us": float(number)}]
        point = {"grid": "paper", "mask_name": "causal", "shape": shape, "machine": machine, "peers": {"stof": {}}}
        files.append(tmp_path / f"{number}.json")
        files[-1].write_text(json.dumps([{**point, "kernels": {"each": each, "wrong": []}}, {**point, "grid": "long"}]))
    assert tool.main(["--store", str(tmp_path / "kept.json"), *map(str, files)]) == 0
    (kept,) = json.loads((tmp_path / "kept.json").read_text())
    assert kept["kernels"] == {"each": [{"name": "sm90-64x64x4", "us": 2.0}]}
    assert set(kept) == {"grid", "mask_name", "shape", "machine", "kernels"}
    assert set(kept["machine"]) == {"date", "device", "library"}


def test_regret(tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = {"B": 1, "H": 12, "G": 12, "S": 1024, "T": 1024, "D": 128, "dtype": "float16"}
    names = [k.name for k in tool.kernels_of(128)]
    each = [{"name": name, "us": 20.0 + i} for i, name in enumerate(names)]
    records = [{"mask_name": "causal", "shape": shape, "kernels": {"each": each}}]
    results = tmp_path / "results.json"
    results.write_text(json.dumps(records))
    arguments = ["--head", "128", "--planner", str(PLANNER), str(results)]
    assert tool.main(arguments) == 0
    planner = tool.Planner(PLANNER)
    (point,) = tool.points_of(results, 128)
    chosen = min(tool.kernels_of(128), key=lambda k: planner.predict(point, k)).name
    regret = f"{100 * (point.us[chosen] / 20.0 - 1):.2f} %"
    assert f"1 points, {regret:>7}" in capsys.readouterr().out

    assert tool.main(["--planner", str(tmp_path / "none.so"), *arguments[:2], str(results)]) == 1
    assert "stof_plan_times makes it" in capsys.readouterr().err
