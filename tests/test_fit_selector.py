# SPDX-License-Identifier: Apache-2.0
"""The tool that fits the CUDA selector's costs: reads the kernels' lists, and asks the planner itself."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
PLANNER = ROOT / "build/dev/libstof_plan_times.so"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    """tools/fit_selector.py."""
    spec = importlib.util.spec_from_file_location("fit_selector", ROOT / "tools/fit_selector.py")
    assert spec is not None and spec.loader is not None
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
            assert 0 < kernel.row < 10_000 and 0 < kernel.full <= kernel.partial < 5_000, kernel
            assert 100 <= kernel.alone <= 100 * kernel.workers, kernel


def test_model_is_the_plan(tool: ModuleType) -> None:
    planner = tool.Planner(PLANNER)
    kernel = tool.Kernel(64, 64, 4, 1, 1000.0, 500.0, 700.0)

    def take(expression: str, B: int, length: int, **costs: float) -> float:
        point = tool.Point(f"{expression} {B} {length}", (B, 3, 3, length, length), 64, expression, {}, {})
        return float(planner.predict(point, tool.replace(kernel, **costs)) - tool.LAUNCH)

    # A row of one partial tile, of two tiles, and each worker with one of them.
    assert take("k <= q", 1, 64) == pytest.approx(1.7)
    assert take("k <= q", 2, 128) == pytest.approx(2.2)
    assert take("", 1, 128) == pytest.approx(2.0)
    # Alone on its multiprocessor the one with two tiles is faster, but not than all are in the mean.
    assert take("k <= q", 2, 128, alone=110.0) == pytest.approx(2.0)
    assert take("k <= q", 2, 128, alone=400.0) == pytest.approx((1.7 + 2.2) / 2)
    # One MiB of keys and values: 4 bytes for each of 64 elements of 3 heads and 1366 keys.
    assert take("k <= q", 1, 1366, reread=900.0) - take("k <= q", 1, 1366) == pytest.approx(0.9)


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
