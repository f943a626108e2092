# SPDX-License-Identifier: Apache-2.0
"""From a point to the tables, on a CPU that stands in for the device: what is recorded, not how long anything takes."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from bench.cli import main
from bench.core.candidate import Candidate
from bench.core.case import AttentionCase
from bench.gpu import candidates, cases, point, run, tables, timing
from bench.gpu.device_runner import DeviceRunner, runner_of
from bench.gpu.problem import GpuProblem
from stof.bench.results import merge, read, store_all

torch = pytest.importorskip("torch")


class Stream:
    """Does everything at once."""

    cuda_stream = 0

    def synchronize(self) -> None:
        """Nothing is under way."""


class Event:
    """A point in the time of the host."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.at = 0.0

    def record(self, stream: Stream) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        assert self.at > 0

    def elapsed_time(self, other: Event) -> float:
        return (other.at - self.at) * 1e3


class Graph:
    """Counts what it is told; a replay takes as long as the capture did."""

    made: ClassVar[list[Graph]] = []

    def capture_begin(self, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local"
        self.begin = time.perf_counter()
        Graph.made.append(self)

    def capture_end(self) -> None:
        self.took = time.perf_counter() - self.begin
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        time.sleep(self.took)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.cuda and the inputs on the CPU."""
    for name, value in {
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": Graph,
        "stream": contextlib.nullcontext,
        "synchronize": lambda: None,
        "empty_cache": lambda: None,
        "_sleep": lambda cycles: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    made = GpuProblem.__init__

    def on_cpu(self: GpuProblem, case: AttentionCase, seed: int = 0) -> None:
        made(self, case, seed, device="cpu")

    monkeypatch.setattr(GpuProblem, "__init__", on_cpu)
    Graph.made.clear()


def small() -> AttentionCase:
    """A point of the grid with a single head."""
    return dataclasses.replace(next(cases.grid("paper", ["causal"], [256], [1])), H=1, G=1)


def anchors(us: float) -> dict[str, Any]:
    """A machine whose full tiles of 64 take a nanosecond."""
    peers = {"stof": {"us": us}}
    dense = {"density": {"tiles": int(us * 1000)}, "peers": peers}
    rates = {"device": "a device", "versions": {"torch": "2"}, "launch": 1e-6, "copy": 1e12, "read": 2e12}
    return {"rates": rates, "tiles": {"D64 float16": dense}}


def test_point_of_a_cache(device: None) -> None:
    """Its roofline is the rate of reads, and rows say how much of that they reach."""
    case = dataclasses.replace(next(cases.grid("cached", ["dense"], [1024], [1])), H=2, G=1)

    def build(problem: GpuProblem, stream: Any) -> DeviceRunner:
        attend = torch.nn.functional.scaled_dot_product_attention
        return runner_of(problem, "BHSD", lambda q, k, v: attend(q, k, v, enable_gqa=True))

    made = point.GpuPoint(case, [Candidate("sdpa", "torch SDPA", build)], Stream())
    record = run._complete(made.measure(rounds=2), [anchors(8.0)])
    row = record["peers"]["sdpa"]
    assert row["error"] < 1e-2
    read_us = record["bytes"] / 2e12 * 1e6
    assert record["roof_us"] == pytest.approx(1 + read_us, abs=1e-3)
    assert row["read_share"] == pytest.approx(read_us / row["us"], abs=1e-4)


def test_point(device: None, tmp_path: Path) -> None:
    case = small()
    peers = candidates.find(["torch-math", "ort-mha", "torch-flash"], "paper")
    made = point.GpuPoint(case, peers, Stream())
    assert made.rows["torch-math"]["error"] < 1e-3
    assert "missing" in made.rows["ort-mha"]  # no CUDA provider here
    assert made.problem.sets() is not None
    assert made.problem.count == 1  # nothing is kept but the first set, made again when it is asked for
    record = run._complete(made.measure(rounds=2), [anchors(8.0)])
    row = record["peers"]["torch-math"]
    assert record["rotated"] > 8  # small inputs: many sets
    assert row["best_us"] <= row["us"] <= row["worst_us"]
    assert row["launches"] >= 8
    # 3 of 4 tiles are kept, a nanosecond each; inputs and output at 1 TB/s.
    assert record["density"]["tiles"] == 3
    assert record["bytes"] == 4 * 2 * 256 * 64
    assert record["roof_us"] == pytest.approx(1 + 0.131, abs=1e-3)
    assert record["bound"] == "memory"
    assert row["roofline"] == pytest.approx(record["roof_us"] / row["us"], abs=1e-4)
    assert json.loads(json.dumps(record)) == record
    store_all(tmp_path / "attention-cuda-paper.json", [record])
    text = "\n".join(tables.summary_lines(tmp_path, tmp_path))
    assert "90 points" in text  # that of one head is none of the grid
    assert "| **paper** | 0 |" in text


def test_bits(device: None) -> None:
    """In the grid of bits stof's own time without a mask is taken in the same turns, and nobody else's."""
    (math,) = candidates.find(["torch-math"], "paper")
    peers = [dataclasses.replace(math, name="stof"), math]
    case = dataclasses.replace(next(cases.grid("bits")), H=1, G=1, S=256, T=256)
    record = point.GpuPoint(case, peers, Stream()).measure(rounds=1)
    assert set(record["bits"]) == {"stof_us", "dense_us"}
    assert set(record["bits"]["dense_us"]) == {"stof"}
    assert "full_tiles" not in record
    other = point.GpuPoint(dataclasses.replace(case, grid="paper"), peers, Stream()).measure(rounds=1)
    assert "bits" not in other


def test_merge(tmp_path: Path) -> None:
    """Points that another machine has measured replace those with the same key and leave all others alone."""
    here, there = tmp_path / "here", tmp_path / "there"
    store_all(here / "attention-cuda-paper.json", [{"key": ["a", n], "us": 1.0} for n in range(90)])
    store_all(there / "attention-cuda-paper.json", [{"key": ["a", n], "us": 2.0} for n in range(18, 91)])
    store_all(there / "attention-cuda-decode.json", [{"key": ["d"], "us": 3.0}])
    lines = merge(there, here)
    assert lines == [
        "attention-cuda-decode.json: 1 records, 1 of them new, 1 in all",
        "attention-cuda-paper.json: 73 records, 1 of them new, 91 in all",
    ]
    assert [r["us"] for r in read(here / "attention-cuda-paper.json")] == [1.0] * 18 + [2.0] * 73
    assert main(["merge", str(there), str(here)]) == 0
    (there / "other.json").write_text('[{"name": "of somebody else"}]')
    with pytest.raises(ValueError, match="records without keys"):
        merge(there, here)
    assert main(["merge", str(tmp_path / "nowhere"), str(here)]) == 1


def test_capture_fails(device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A candidate that cannot be captured is listed, and the others are timed."""
    case = small()
    made = point.GpuPoint(case, candidates.find(["torch-math"], "paper"), Stream())
    begin = Graph.capture_begin

    def refuse(self: Graph, capture_error_mode: str) -> None:
        begin(self, capture_error_mode)
        raise RuntimeError("not permitted when stream is capturing")

    monkeypatch.setattr(Graph, "capture_begin", refuse)
    record = made.measure(rounds=1)
    assert "not captured: RuntimeError: not permitted" in record["peers"]["torch-math"]["missing"]
    assert "us" not in record["peers"]["torch-math"]


@pytest.fixture
def clock(device: None, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], timing.CapturedLaunches]:
    """Candidates that take a given time, by a clock of their own."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    now[0] = 1.0

    def made(seconds: float) -> timing.CapturedLaunches:
        return timing.CapturedLaunches(lambda i: time.sleep(seconds), 3, Stream())

    return made


@pytest.mark.parametrize(("seconds", "launches"), [(5e-6, 100), (60e-6, 34), (1e-3, 3), (20e-3, 3)])
def test_launches(clock: Callable[[float], timing.CapturedLaunches], seconds: float, launches: int) -> None:
    """Short kernels are captured a hundred times, long ones once for each set of inputs."""
    one = clock(seconds)
    one.capture()
    assert one.launches == launches
    assert one.slow == (seconds > 4e-3)
    (found,) = timing.interleave_launches([one], rounds=7)
    assert found.median == pytest.approx(seconds)
    assert found.plain == pytest.approx(seconds)
    assert Graph.made[-1].replays == (3 if one.slow else 7) + 1


def test_rounds_rotate(clock: Callable[[float], timing.CapturedLaunches]) -> None:
    """Everybody goes first once."""
    order: list[int] = []
    several = [clock(1e-3) for _ in range(3)]
    for i, one in enumerate(several):
        one.capture()
        replay = one.replay
        one.replay = lambda i=i, replay=replay: order.append(i) or replay()  # type: ignore[method-assign, misc, func-returns-value]
    timing.interleave_launches(several, rounds=3)
    assert order == [0, 1, 2, 1, 2, 0, 2, 0, 1]
