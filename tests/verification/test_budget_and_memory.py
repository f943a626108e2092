# SPDX-License-Identifier: Apache-2.0
"""The time and the memory that a verification takes: what is estimated, what is ended, and what the report says of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

import stof
from stof import cli
from stof.attention.checks.site_checks import AttentionChecks
from stof.execution import run_limits
from stof.execution.case import Case, Padding
from stof.execution.run_limits import MemoryLimit, RunLimits, parse_bytes
from stof.execution.session_process import create_session, end_process
from stof.execution.session_worker import SessionSpec
from stof.memory.run_estimate import MemoryEstimate, RunEstimate
from stof.symbolic import Symbolic
from stof.system.memory import PeakMemory, free_memory, resident_bytes
from stof.verification.case_plan import CasePlan
from stof.verification.model_inputs import ModelInputs, default_inputs
from stof.verification.sliced_attention import slice_attention

_NODE = helper.make_node


@pytest.mark.parametrize(
    ("text", "number"),
    [("2G", 2 << 30), ("512M", 512 << 20), ("1.5g", 3 << 29), ("100", 100), ("64 KiB", 64 << 10), ("3MB", 3 << 20)],
)
def test_bytes_are_parsed(text: str, number: int) -> None:
    assert parse_bytes(text) == number


@pytest.mark.parametrize("text", ["", "0", "-1G", "2X", "G", "inf"])
def test_what_is_no_number_of_bytes_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=r".*"):
        parse_bytes(text)
    assert cli.main(["m.onnx", f"--verify-memory={text}"]) == 1
    assert "number of bytes" in capsys.readouterr().err


def _system(root: Path, cgroup: str, files: dict[str, str], available: int = 8 << 20) -> Path:
    for name, text in {"proc/meminfo": f"MemAvailable: {available} kB\n", "proc/self/cgroup": cgroup, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_free_memory_is_the_least_of_the_machine_and_its_groups(tmp_path: Path) -> None:
    assert free_memory(tmp_path / "nothing") == 0
    assert free_memory(_system(tmp_path / "plain", "", {})) == 8 << 30
    group = "sys/fs/cgroup/a/b"
    two = {f"{group}/memory.max": "1000\n", f"{group}/memory.current": "300\n"}
    assert free_memory(_system(tmp_path / "v2", "0::/a/b\n", two)) == 700
    cached = {**two, f"{group}/memory.stat": "anon 5\ninactive_file 100\n"}
    assert free_memory(_system(tmp_path / "cached", "0::/a/b\n", cached)) == 800
    outer = {"sys/fs/cgroup/a/memory.max": "500", "sys/fs/cgroup/a/memory.current": "100"}
    unlimited = {f"{group}/memory.max": "max", f"{group}/memory.current": "300"}
    assert free_memory(_system(tmp_path / "outer", "0::/a/b\n", {**unlimited, **outer})) == 400
    folder = "sys/fs/cgroup/memory/c"
    one = {f"{folder}/memory.limit_in_bytes": "2000", f"{folder}/memory.usage_in_bytes": "500"}
    assert free_memory(_system(tmp_path / "v1", "4:memory:/c\n0::/\n", one)) == 1500
    huge = {f"{folder}/memory.limit_in_bytes": str((1 << 63) - 4096), f"{folder}/memory.usage_in_bytes": "500"}
    assert free_memory(_system(tmp_path / "v1 without a limit", "4:memory:/c\n", huge)) == 8 << 30


def test_the_default_is_half_of_what_is_free() -> None:
    held, free = resident_bytes(), free_memory()
    assert RunLimits(1.0).memory == pytest.approx(held + free / 2, rel=0.2)
    assert RunLimits(1.0, 12345).memory == 12345


def _expanding(megabytes: int) -> SessionSpec:
    """A model that makes a tensor of so many MiB, and takes its time."""
    text = f"""
    <ir_version: 8, opset_import: ["": 18]>
    g (float x) => (float y) {{
        shape = Constant <value = int64[1] {{{megabytes << 18}}}> ()
        large = Expand (x, shape)
        sum = CumSum (large, start)
        y = ReduceMax <keepdims = 0> (sum)
    }}
    """
    model = onnx.parser.parse_model(text)
    model.graph.initializer.append(numpy_helper.from_array(np.array(0, np.int32), "start"))
    return SessionSpec(model.SerializeToString(), optimizations="none")


def test_a_run_that_takes_more_memory_is_ended() -> None:
    end_process()
    feed = {"x": np.asarray(1e-9, np.float32)}
    small = create_session(_expanding(1), 60.0)
    bound = resident_bytes() + (300 << 20)
    assert np.isfinite(small.run(None, feed, 60.0, bound)[0])
    large = create_session(_expanding(3000), 60.0)
    start = time.monotonic()
    with pytest.raises(MemoryLimit, match="more than"):
        large.run(None, feed, 60.0, bound)
    assert time.monotonic() - start < 20
    assert not large.is_alive
    assert not small.is_alive
    again = create_session(_expanding(1), 60.0)
    assert np.isfinite(again.run(None, feed, 60.0, bound)[0])


def test_a_run_that_nobody_watched_is_refused_by_its_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that are over before the first look: only what is read when the answer arrives shows what they took."""
    monkeypatch.setattr("stof.execution.worker.channel.POLL_SECONDS", 600.0)
    feed = {"x": np.asarray(1e-9, np.float32)}
    for _ in range(3):
        end_process()
        session = create_session(_expanding(300), 60.0)
        with pytest.raises(MemoryLimit, match="more than"):
            session.run(None, feed, 60.0, resident_bytes() + (300 << 20))
        assert not session.is_alive


def test_what_earlier_runs_and_sessions_took_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stof.execution.worker.channel.POLL_SECONDS", 600.0)
    end_process()
    feed = {"x": np.asarray(1e-9, np.float32)}
    large, small = (create_session(_expanding(n), 60.0) for n in (500, 1))
    assert np.isfinite(large.run(None, feed, 60.0)[0])  # without a limit, as the check of a mask runs
    bound = resident_bytes() + (300 << 20)
    del large
    assert np.isfinite(small.run(None, feed, 60.0, bound)[0])


def test_the_peak_of_a_process_is_that_since_it_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    own = os.getpid()
    before = np.ones(100 << 20, np.uint8)
    del before
    peak = PeakMemory(own)
    first = peak.peak_bytes()
    assert first < resident_bytes() + (20 << 20)
    between = np.ones(100 << 20, np.uint8)
    del between
    assert peak.peak_bytes() >= first + (90 << 20)
    assert PeakMemory(1 << 30).peak_bytes() == 0  # no such process
    # Where the peak may not be reset, one from before tells nothing, and a new one does.
    monkeypatch.setattr("stof.system.memory._RESET_PEAK", "refused")
    peak = PeakMemory(own)
    assert peak.peak_bytes() < resident_bytes() + (20 << 20)
    between = np.ones(400 << 20, np.uint8)
    del between
    assert peak.peak_bytes() >= first + (380 << 20)


def test_tensors_that_are_alive_are_counted() -> None:
    nodes = [
        _NODE("Exp", ["x"], ["a"]),
        _NODE("MatMul", ["a", "w"], ["b"]),
        _NODE("Neg", ["b"], ["c"]),
        _NODE("MatMul", ["c", "a"], ["y"]),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 100])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    w = numpy_helper.from_array(np.zeros((100, 100), np.float32), "w")
    model = helper.make_model(helper.make_graph(nodes, "g", [x], [y], [w]), opset_imports=[helper.make_opsetid("", 17)])
    estimate = MemoryEstimate(model, Symbolic(model))
    one = 4 * 100 * 100
    found = estimate.run({"n": 100})
    assert estimate.weights == one
    # Neg writes to the place of its input; before the last matmul a and c are alive, and y is made.
    assert (found.peak, found.total, found.outputs) == (3 * one, 4 * one, one)
    assert estimate.run({"n": 50}).outputs == one // 2


def _attention(
    length: int, heads: int, *, kind: str = "where", batch: int | str = "batch", layers: int = 1
) -> onnx.ModelProto:
    """Attention over a window of a fixed length, in one of several spellings."""
    rng, size = np.random.default_rng(0), 16 * heads
    positions = np.arange(length)
    near = (positions[None] <= positions[:, None]) & (positions[:, None] - positions[None] < 40)
    constants: dict[str, Any] = {
        "near": near[None, None] if kind != "merged" else near[None],
        "bias": np.where(near, 0, -1e4).astype(np.float32)[None, None].repeat(heads, 1),
        "neg": np.float32(-1e4),
        "scale": np.float32(0.25),
        "cut": np.array([0, length, heads, 16]),
        "joined": np.array([-1, length, 16]),
        "join": np.array([0, length, size]),
        "apart": np.array([-1, heads, length, 16]),
        "three": np.array([size] * 3),
    }
    nodes, x = [], "x"
    for layer in map(str, range(layers)):
        constants["w" + layer] = (rng.standard_normal((size, 3 * size)) * 0.1).astype(np.float32)
        nodes += [_NODE("MatMul", [x, "w" + layer], ["m" + layer])]
        nodes += [_NODE("Split", ["m" + layer, "three"], [c + layer for c in "qkv"], axis=2)]
        for c, perm in (
            ("q", [0, 2, 1, 3]),
            ("k", [0, 2, 3, 1] if kind != "merged" else [0, 2, 1, 3]),
            ("v", [0, 2, 1, 3]),
        ):
            nodes += [_NODE("Reshape", [c + layer, "cut"], [c + "r" + layer])]
            nodes += [_NODE("Transpose", [c + "r" + layer], [c + "t" + layer], perm=perm)]
        q, k, v = (f"{c}t{layer}" for c in "qkv")
        if kind == "merged":
            nodes += [_NODE("Reshape", [n, "joined"], [n + "m"]) for n in (q, k, v)]
            nodes += [_NODE("Transpose", [k + "m"], [k + "mt"], perm=[0, 2, 1])]
            q, k, v = q + "m", k + "mt", v + "m"
        nodes += [_NODE("MatMul", [q, k], ["s" + layer]), _NODE("Mul", ["s" + layer, "scale"], ["t" + layer])]
        masked = ["t" + layer, "bias"] if kind == "add" else ["near", "t" + layer, "neg"]
        nodes += [_NODE("Add" if kind == "add" else "Where", masked, ["u" + layer])]
        nodes += [
            _NODE("Softmax", ["u" + layer], ["p" + layer], axis=-1),
            _NODE("MatMul", ["p" + layer, v], ["o" + layer]),
        ]
        out = "o" + layer
        if kind == "merged":
            nodes += [_NODE("Reshape", [out, "apart"], [out + "a"])]
            out += "a"
        nodes += [_NODE("Transpose", [out], ["e" + layer], perm=[0, 2, 1, 3])]
        nodes += [_NODE("Reshape", ["e" + layer, "join"], ["f" + layer]), _NODE("Add", ["f" + layer, x], ["y" + layer])]
        x = "y" + layer
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [batch, length, size]) for n in ("x", x)]
    used = {name for n in nodes for name in n.input}
    weights = [numpy_helper.from_array(np.asarray(a), n) for n, a in constants.items() if n in used]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def _core(model: onnx.ModelProto) -> Sequence[str]:
    return [n.output[0] for n in model.graph.node if n.output[0] in ("s0", "t0", "u0", "p0", "o0")]


def _run(model: onnx.ModelProto, feed: dict[str, np.ndarray]) -> np.ndarray:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    found: np.ndarray = session.run(None, feed)[0]
    return found


@pytest.mark.parametrize("kind", ["where", "add", "merged"])
@pytest.mark.parametrize("length", [96, 101])
def test_slices_of_queries_give_the_same(kind: str, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stof.verification.sliced_attention._SCORES", 4 * length * 20)
    model = _attention(length, 4, kind=kind)
    sliced = slice_attention(model, [_core(model)], Symbolic(model))
    assert sliced is not None
    onnx.checker.check_model(sliced, full_check=True)
    softmaxes = [n for n in sliced.graph.node if n.op_type == "Softmax"]
    assert len(softmaxes) in (5, 6)
    feed = {"x": np.random.default_rng(1).standard_normal((2, length, 64)).astype(np.float32)}
    np.testing.assert_allclose(_run(sliced, feed), _run(model, feed), rtol=0, atol=2e-6)
    peaks = [MemoryEstimate(m, Symbolic(m)).run({"batch": 2}).peak for m in (model, sliced)]
    assert peaks[1] < peaks[0]


def test_attention_whose_rows_depend_on_each_other_is_not_sliced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stof.verification.sliced_attention._SCORES", 1000)
    model = _attention(96, 4)
    softmax = next(n for n in model.graph.node if n.op_type == "Softmax")
    softmax.attribute[0].i = 2
    assert slice_attention(model, [_core(model)], Symbolic(model)) is None
    other = _attention(96, 4)
    next(n for n in other.graph.node if n.op_type == "Mul").op_type = "CumSum"
    assert slice_attention(other, [_core(other)], Symbolic(other)) is None


def _tree_bytes(process: int) -> int:
    """Resident memory of a process and its children."""
    try:
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    except OSError:
        children = []
    return resident_bytes(process) + sum(_tree_bytes(int(c)) for c in children)


def _optimize(path: Path, *options: str) -> tuple[int, str, int, dict[str, Any]]:
    """Exit status, messages, the peak of memory of both processes, and the report's verification."""
    report = path.with_suffix(".json")
    report.unlink(missing_ok=True)
    environment = {**os.environ, "PYTHONPATH": str(Path(stof.__file__).parents[1])}
    command = [sys.executable, "-m", "stof", str(path), "--json", str(report), *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    peak = 0
    while process.poll() is None:
        peak = max(peak, _tree_bytes(process.pid))
        time.sleep(0.02)
    messages, _ = process.communicate()
    found = json.loads(report.read_text())["verification"] if report.exists() else None
    return process.returncode, messages, peak, found or {}


def test_a_large_model_is_verified_in_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(_attention(2048, 8), path)  # a score tensor has 128 MiB, and the original alone needs four of them
    status, messages, peak, verification = _optimize(path, "--verify-memory", "480M", "--verify-budget", "90")
    assert status == 0, messages
    assert verification["sliced"]
    assert verification["ok"]
    assert "ran on slices of its queries" in messages
    assert peak < 480 << 20
    (site,) = [c for c in verification["comparisons"] if c["site"]]
    assert 0 < site["coverage"]["sampled_rows"] < site["coverage"]["all_rows"]
    assert "rows of large sites" in messages


def test_without_memory_nothing_is_verified(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(_attention(512, 4), path)
    status, messages, _, _ = _optimize(path, "--verify-memory", "50M")
    assert status == 2
    assert "cannot be verified in 50 MiB of memory" in messages
    assert "raise --verify-memory" in messages
    assert not (tmp_path / "m.stof.onnx").exists()


def test_estimates_that_are_too_low_end_at_the_bound(
    narrow: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = narrow("bert.torchscript.sdpa")
    monkeypatch.setattr("stof.verification.case_plan.CasePlan.needed_bytes", lambda *_: 0)
    end_process()
    assert cli.main([str(path), "--verify-memory", "30M"]) == 2
    errors = capsys.readouterr().err
    assert "it needs more than 30 MiB of memory" in errors
    assert not path.with_suffix(".stof.onnx").exists()


def test_slow_estimates_leave_cases_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is prepared takes time of the budget, too; the first and the last case are estimated anyway."""
    model = _attention(64, 2)
    estimate = MemoryEstimate.run

    def slow(self: MemoryEstimate, sizes: dict[str, int]) -> RunEstimate:
        time.sleep(0.3)
        return estimate(self, sizes)

    monkeypatch.setattr(MemoryEstimate, "run", slow)
    inputs = default_inputs(model)
    cases = [Case(1, n, Padding.NONE) for n in (7, 8, 9, 10, 11)]
    start = time.monotonic()
    found, skipped = CasePlan(inputs, RunLimits(0.4, 1 << 40)).select(cases)
    assert time.monotonic() - start < 10
    assert found == [cases[0], cases[-1]]
    assert [(s.case, s.reason) for s in skipped] == [(str(inputs.name_sizes(c)), "time") for c in cases[1:-1]]
    found, skipped = CasePlan(inputs, RunLimits(60.0, 1 << 40)).select(cases)
    assert (found, skipped) == (cases, [])


def test_a_slow_preparation_ends_in_time(
    narrow: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_limits, "GRACE", 0.5)
    checks = AttentionChecks.model_inputs

    def slow(self: AttentionChecks) -> ModelInputs:
        time.sleep(0.7)
        return checks(self)

    monkeypatch.setattr(AttentionChecks, "model_inputs", slow)
    monkeypatch.setattr(CasePlan, "select", lambda *_: pytest.fail("there is no time for it"))
    path = narrow("bert.dynamo.sdpa")
    assert cli.main([str(path), "--verify-budget", "0"]) == 2
    errors = capsys.readouterr().err
    assert "verification was ended after 0 s and nothing was compared" in errors
    assert "raise --verify-budget" in errors
    assert not path.with_suffix(".stof.onnx").exists()


def test_a_slow_original_ends_within_the_budget(
    narrow: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A site's comparison takes long: the others are left, and the outputs are compared."""
    monkeypatch.setattr(run_limits, "GRACE", 8.0)
    monkeypatch.setattr("stof.verification.verifier._SITES_END", 0.0)
    path = narrow("modernbert.dynamo.sdpa")
    report = path.with_name("report.json")
    assert cli.main([str(path), "--verify-budget", "20", "--json", str(report)]) == 0
    verification = json.loads(report.read_text())["verification"]
    sites = [c for c in verification["comparisons"] if c["site"]]
    assert len(sites) == 1
    assert verification["sites_left"] == 3
    assert not verification["complete"]
    assert "no time was left for 3 more" in capsys.readouterr().out


def test_the_end_bounds_every_attempt() -> None:
    whole = RunLimits(10.0, 1 << 30)
    first, second = whole.share(7.0), whole.share(10.0)
    assert first.end < second.end <= whole.end
    assert not whole.is_over()
    over = RunLimits(0.0, 1 << 30, end=time.monotonic() - 1)
    assert over.is_over()
    with pytest.raises(run_limits.TimeLimit):
        over.check_time()
