# SPDX-License-Identifier: Apache-2.0
"""What the optimizer itself costs, counted in lines that are run: no work grows faster than the model."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType

import onnx
import pytest

import large
from stof.options import Options
from stof.pipeline import optimize
from stof.symbolic import Symbolic

# Of twice the nodes: work by pairs of nodes would be four times as much.
MOST_GROWTH = 2.4


def run(path: Path, chains: str) -> None:
    optimize(path, options=Options(verify=False, chains=chains, output=path.with_suffix(".out.onnx")))


def count_lines(path: Path, chains: str) -> Counter[CodeType]:
    """How many lines of each Python function are run, each round of a loop or comprehension anew."""
    found: Counter[CodeType] = Counter()

    def trace(frame: FrameType, event: str, argument: object) -> object:
        if "stof" not in frame.f_code.co_filename:
            return None
        found[frame.f_code] += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run(path, chains)
    finally:
        sys.settrace(before)
    return found


def written(tmp_path: Path, kind: str, count: int) -> Path:
    path = tmp_path / f"{kind}{count}.onnx"
    onnx.save(large.KINDS[kind](count), str(path))
    return path


@pytest.mark.parametrize(
    ("kind", "count"),
    [("elementwise_chains", 200), ("elementwise_only", 300), ("constant_nodes", 200), ("attentions", 12)],
)
def test_work_grows_with_the_model_and_no_faster(tmp_path: Path, kind: str, count: int) -> None:
    run(written(tmp_path, kind, count), "on")  # imports and caches
    small, big = (count_lines(written(tmp_path, kind, n), "on") for n in (count, 2 * count))
    assert sum(big.values()) <= MOST_GROWTH * sum(small.values())
    # A quadratic loop shows in its own function long before it shows in the sum.
    often = {code: n for code, n in big.items() if n > 10 * count}
    assert often
    for code, n in often.items():
        assert n <= MOST_GROWTH * small[code], f"{code.co_name} in {code.co_filename}"


@pytest.mark.parametrize(
    ("kind", "chains", "most"),
    [("attentions", "off", 3), ("attentions", "on", 4), ("elementwise_chains", "on", 3), ("encoder", "auto", 3)],
)
def test_a_model_is_interpreted_once_for_each_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, chains: str, most: int
) -> None:
    """Before the attention is replaced; after it, for padding and for chains; as it is written, for exact sizes.

    Never again for a site or a region.
    """
    made: list[int] = []
    original = Symbolic.__init__

    def init(self: Symbolic, model: onnx.ModelProto, *given: object, **options: object) -> None:
        made.append(len(model.graph.node))
        original(self, model, *given, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Symbolic, "__init__", init)
    run(written(tmp_path, kind, 40), chains)
    assert 1 <= len(made) <= most, made


def test_weights_are_not_copied_by_the_analysis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No weight above 64 KB is turned into an array, which would be a copy of it."""
    read: list[str] = []
    original = onnx.numpy_helper.to_array

    def to_array(tensor: onnx.TensorProto, *given: str) -> object:
        if len(tensor.raw_data) > 1 << 16:
            read.append(tensor.name)
        return original(tensor, *given)

    monkeypatch.setattr(onnx.numpy_helper, "to_array", to_array)
    path = written(tmp_path, "encoder", 60)
    assert sum(len(t.raw_data) > 1 << 16 for t in onnx.load(str(path)).graph.initializer) > 10
    report = optimize(path, options=Options(verify=False, chains="on"))
    assert report.replaced
    assert read == []
