# SPDX-License-Identifier: Apache-2.0
"""The bench of padded texts on a GPU, as far as a CPU tells: files, bound batches, capacity, records, tables, options.

Where batches are bound, the host's memory and ONNX Runtime's CPU provider stand in for the device's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from bench.cli import main
from bench.core.candidate import Unavailable
from bench.numbers_page import document
from bench.texts import cuda, cuda_models, run
from bench.texts.bound_batches import BoundBatches, CapturedBatches
from bench.texts.cuda import CudaTextDevice, CudaTextPoint, CudaTextProblem
from bench.texts.cuda_candidates import CUDA_CANDIDATES
from bench.texts.cuda_models import (
    CAPACITY,
    CUDA_KINDS,
    PACKED,
    choose_capacity,
    shape_ranges,
    write_capacity_file,
    write_cuda_files,
)
from bench.texts.describe import describe_record
from bench.texts.kernel_time import KernelTime, sum_events
from bench.texts.lengths import Lengths, TextWindow
from bench.texts.runtimes import CpuRuntime
from bench.texts.text_models import EXPORTED, MODELS, PADDED, TRANSFORMERS, UNPADDED, TextFiles
from stof.bench.results import Record
from stof.bench.sessions import session
from stof.options import Options
from stof.runtime import library

TINY = MODELS["tiny"]
SHORT = Lengths("short", 6, 0.6, 24, padded_to=24)
SHAPES = shape_ranges([4, 8], 24)


class HostMemory(CpuRuntime):
    """The host's memory and the CPU provider in the place of a GPU; runs of captured sessions are counted by shape."""

    name = "cpu"

    def __init__(self) -> None:
        super().__init__(1)
        object.__setattr__(self, "sizes", [])

    sizes: list[dict[str, int]]

    def place(self, array: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(array).copy()

    def copy(self, source: np.ndarray, target: np.ndarray) -> None:
        np.copyto(target, source)

    def read(self, buffer: np.ndarray) -> np.ndarray:
        return buffer.copy()

    def address(self, buffer: np.ndarray) -> int:
        return int(buffer.ctypes.data)

    def session(self, path: Path, *, stof: bool, sizes: Mapping[str, int] | None = None, captures: bool = False) -> Any:
        assert captures == (sizes is not None)
        if sizes is None:
            return session(str(path), 1, stof=stof)
        self.sizes.append(dict(sizes))
        options = ort.SessionOptions()
        options.log_severity_level = 3
        for name, size in sizes.items():
            options.add_free_dimension_override_by_name(name, size)
        if stof:
            library.register(options)
        return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def run(self, session: Any, binding: Any) -> None:
        session.run_with_iobinding(binding)

    def wait(self) -> None:
        pass


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> TextFiles:
    """The files of the tiny model."""
    return write_cuda_files(TINY, tmp_path_factory.mktemp("texts"), CUDA_KINDS, SHAPES, capability=90)


def make_window(padded_to: int | None = 24) -> TextWindow:
    return TextWindow(replace(SHORT, padded_to=padded_to), TINY.vocabulary, TINY.inputs, 1, size=64)


def make_problem(files: TextFiles, padded_to: int | None = 24, runtime: Any = None) -> CudaTextProblem:
    return CudaTextProblem(TINY, "float16", files, make_window(padded_to), 4, 3, runtime or HostMemory())


def operators(path: Path) -> set[str]:
    return {node.op_type for node in onnx.load(str(path)).graph.node}


def test_files_are_fp16_with_inputs_of_int64(files: TextFiles) -> None:
    """What the tools make of the model, each in its own file."""
    assert files.missing == {}
    assert set(files.paths) == {EXPORTED, TRANSFORMERS, PACKED, PADDED, UNPADDED}
    for path in files.paths.values():
        graph = onnx.load(str(path)).graph
        assert {i.type.tensor_type.elem_type for i in graph.input} == {onnx.TensorProto.INT64}
        assert [o.type.tensor_type.elem_type for o in graph.output] == [onnx.TensorProto.FLOAT16]
        assert onnx.TensorProto.FLOAT not in {t.data_type for t in graph.initializer if len(t.dims) > 1}
    assert files.facts[TRANSFORMERS]["fused"] == {
        "EmbedLayerNormalization": 1, "Attention": 2, "BiasGelu": 2, "SkipLayerNormalization": 4,
    }  # fmt: skip
    assert files.facts[PACKED] == {"packed_attentions": 2}
    assert {"PackedAttention", "RemovePadding", "RestorePadding"} <= operators(files.paths[PACKED])
    assert "PackedAttention" not in operators(files.paths[TRANSFORMERS])
    assert {"StofAttention", "StofChain", "StofGemm"} <= operators(files.paths[PADDED])


def test_packing_needs_what_the_optimizer_makes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its peers are made as well; without the tool, both are missing with the same reason."""
    made = write_cuda_files(TINY, tmp_path / "a", {PACKED}, SHAPES, capability=90)
    assert set(made.paths) == {EXPORTED, TRANSFORMERS, PACKED}

    def refuse(*_: object) -> None:
        raise Unavailable("onnxruntime.transformers.optimizer is not installed (no such module)")

    monkeypatch.setattr(cuda_models, "_optimize_by_transformers", refuse)
    made = write_cuda_files(TINY, tmp_path / "b", {PACKED, PADDED}, SHAPES, capability=90)
    assert set(made.paths) == {EXPORTED, PADDED}
    assert "is not installed" in made.missing[TRANSFORMERS]
    assert made.missing[PACKED] == made.missing[TRANSFORMERS]


def test_a_capacity_holds_the_largest_batch() -> None:
    masks = [np.repeat([[1, 0]], count, 0) for count in (100, 129, 128)]
    assert choose_capacity([{"attention_mask": m} for m in masks]) == 256
    assert choose_capacity([{"attention_mask": masks[2]}]) == 128


def test_each_capacity_has_a_file(files: TextFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that points share are not touched."""
    given: list[tuple[Path, Path, int]] = []

    def note(source: Path, path: Path, options: Options) -> dict[str, int]:
        given.append((source, path, options.unpad_capacity))
        return {"a": 1}

    monkeypatch.setattr(cuda_models, "optimize_texts", note)
    for tokens in (384, 512):
        made = write_capacity_file(files, tmp_path, {CAPACITY, PADDED}, tokens, SHAPES)
        assert made.paths == {**files.paths, CAPACITY: tmp_path / f"float16.{tokens}.capacity.onnx"}
        assert given.pop() == (files.paths[EXPORTED], made.paths[CAPACITY], tokens)
        assert made.facts[CAPACITY] == {"a": 1}
    assert CAPACITY not in files.paths
    assert write_capacity_file(files, tmp_path, {PADDED}, 384, SHAPES) == files


@pytest.mark.parametrize("padded_to", [24, None])
@pytest.mark.parametrize(("kind", "is_stof"), [(EXPORTED, False), (TRANSFORMERS, False), (PADDED, True)])
def test_bound_and_captured_batches_give_what_sessions_give(
    files: TextFiles, kind: str, is_stof: bool, padded_to: int | None
) -> None:
    """Also where a graph was captured with another batch of the same shape; a shape has one session."""
    memory, batches = HostMemory(), make_window(padded_to).arrival(4, 5).feeds
    loaded = session(str(files.paths[kind]), 1, stof=is_stof)
    expected = [loaded.run(None, feeds)[0] for feeds in batches]
    outputs = [np.empty_like(e) for e in expected]
    bound = BoundBatches(memory, memory.session(files.paths[kind], stof=is_stof), batches, outputs)
    captured = CapturedBatches(memory, files.paths[kind], is_stof, batches, outputs)
    shapes = {feeds["input_ids"].shape for feeds in batches}
    assert len(shapes) == (1 if padded_to else len(memory.sizes))
    assert {(s["batch"], s["sequence"]) for s in memory.sizes} == shapes
    for made in (bound, captured):
        found = made.outputs()
        assert found.dtype == np.float16
        np.testing.assert_allclose(found.astype(np.float64), np.concatenate(expected), rtol=2e-2, atol=2e-3)
    assert len({e.tobytes() for e in expected}) == len(expected)  # so that a stale output is seen


def test_outputs_that_no_run_writes_are_nan(files: TextFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results of an earlier call do not stay where a later one does nothing."""
    memory, batches = HostMemory(), make_window().arrival(4, 2).feeds
    outputs = [np.empty((4, TINY.hidden), np.float16) for _ in batches]
    made = (
        BoundBatches(memory, memory.session(files.paths[EXPORTED], stof=False), batches, outputs),
        CapturedBatches(memory, files.paths[EXPORTED], False, batches, outputs),
    )
    assert all(np.isfinite(m.outputs()).all() for m in made)
    monkeypatch.setattr(HostMemory, "run", lambda *_: None)
    assert all(np.isnan(m.outputs()).all() for m in made)


def test_results_are_compared_with_fp32(files: TextFiles) -> None:
    """The tolerance is twice what the exported fp16 model differs by; one that is not finite is refused."""
    problem = make_problem(files)
    fp32 = CpuRuntime(1).open("ort", files.fp32, ())
    expected = np.concatenate([fp32(feeds) for feeds in problem.batches(True).feeds])
    assert problem.error((expected, True)) == 0
    half = CpuRuntime(1).open("ort", files.paths[EXPORTED], ())
    change = problem.error((np.concatenate([half(f) for f in problem.batches(False).feeds]), False))
    assert 1e-5 < change < 1e-2
    assert problem.tolerance == pytest.approx(max(1e-3, 2 * change))
    assert [o.shape for o in problem.empty_outputs(False)] == [(4, TINY.hidden)] * 3
    assert {o.dtype for o in problem.empty_outputs(True)} == {np.dtype(np.float16)}

    class Infinite(HostMemory):
        def open(self, engine: str, path: Path, batches: Any) -> Any:
            return lambda feeds: np.full((4, 2), np.inf if path == files.paths[EXPORTED] else 1.0, np.float32)

    with pytest.raises(Unavailable, match="not finite"):
        make_problem(files, runtime=Infinite())


MACHINE = {
    "device": "A GPU",
    "versions": {"onnxruntime": "1"},
    "library": "b1",
    "compiler": "c",
    "date": "2026-01-02 UTC",
}


@pytest.fixture
def measured(files: TextFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Record:
    """The record of a point with stand-ins for the GPU, its profiler, and the file of a captured graph."""
    monkeypatch.setattr(CudaTextDevice, "_machine", lambda _: MACHINE)
    monkeypatch.setattr(cuda, "measure_kernel_time", lambda run: (run(), KernelTime(1e-5, 1e-6, 7))[1])
    held = replace(files, paths={**files.paths, CAPACITY: files.paths[PADDED]})
    problem, memory = make_problem(held), HostMemory()
    return CudaTextPoint(problem, CUDA_CANDIDATES, CudaTextDevice(memory)).measure(2)  # type: ignore[arg-type]


def test_a_record_has_times_shares_and_ratios(measured: Record) -> None:
    rows, real = measured["peers"], measured["real_tokens"]
    assert list(rows) == [c.name for c in CUDA_CANDIDATES]
    for name, row in rows.items():
        if "packed" in name:  # the CPU has no such kernels
            assert "missing" in row
            continue
        assert row["error"] <= measured["tolerance"]
        assert row["best_us"] <= row["us"] <= row["worst_us"]
        tokens = real["sorted" if name.endswith("-sorted") else "arrival"]
        assert row["useful_tokens_per_second"] == pytest.approx(tokens / row["us"] * 1e6, rel=0.01)
        assert row["kernel_share"] == pytest.approx(10 / row["us"], rel=0.05, abs=1e-4)
        assert (row["kernel_us"], row["copy_us"], row["kernels"]) == (10.0, 1.0, 7)
    assert measured["key"] == ["tiny", "float16", "short", 4, 3, 0]
    assert measured["machine"] == MACHINE
    tokens = measured["capacity"]["tokens"]
    assert tokens == 128
    padded = 3 * 4 * 24
    assert measured["capacity"]["padded_over_capacity"] == pytest.approx(padded / (3 * 128), abs=1e-3)
    captured = measured["ratio_captured"]
    assert captured.keys() == {n for n, row in rows.items() if "us" in row} - {"stof-captured"}
    gain = captured["stof-padded-captured"]
    assert gain == pytest.approx(rows["stof-padded-captured"]["us"] / rows["stof-captured"]["us"], rel=0.01)
    assert measured["share_of_padded_over_capacity"] == pytest.approx(gain / (padded / (3 * 128)), rel=0.01)
    assert measured["ratio"].keys() == captured.keys() - {"stof"} | {"stof-captured"}


def test_a_record_as_text_and_in_the_tables(measured: Record, tmp_path: Path) -> None:
    text = describe_record(measured)
    assert text[0].endswith("; A GPU")
    own = next(line for line in text if line.startswith("  stof, --unpad on"))
    share = f"{measured['peers']['stof']['kernel_share']:.0%}"
    assert f"kernels {share} of the time" in own
    assert f"stof captured {measured['ratio_captured']['stof']:.2f}x" in own
    assert any("% of padded/capacity (0.75 at 128 tokens)" in line for line in text)
    assert any(line.startswith("  the same in packing mode") and "missing: " in line for line in text)
    folder = tmp_path / "results" / "h200"
    folder.mkdir(parents=True)
    (folder / "texts-cuda.json").write_text(json.dumps([measured]))
    page = document(tmp_path / "results").splitlines()
    assert "## A GPU" in page
    assert "Library build b1; onnxruntime 1; 2026-01-02 to 2026-01-02." in page
    first, second = (
        [cell.strip() for cell in line.strip("|").split("|")] for line in page if line.startswith("| tiny, float16")
    )
    rows, ratio, captured = measured["peers"], measured["ratio"], measured["ratio_captured"]
    assert first[:3] == second[:3] == ["tiny, float16", "short", "4"]
    assert first[4:9] == [
        f"{rows['stof']['useful_tokens_per_second']:,.0f}", share,
        *(f"{ratio[n]:.2f}" for n in ("stof-padded", "ort", "ort-transformers")),
    ]  # fmt: skip
    assert first[9:] == ["–", *(f"{ratio[n]:.2f}" for n in ("ort-sorted", "ort-transformers-sorted")), "–"]
    assert second[3:5] == ["0.75", f"{rows['stof-captured']['useful_tokens_per_second']:,.0f}"]
    assert second[6:] == [
        f"{captured[n]:.2f}" for n in ("stof-padded-captured", "ort-captured", "ort-transformers-captured")
    ]


def test_a_profile_that_fails_is_no_failure_of_the_point(files: TextFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> None:
        raise ValueError("the profiler saw no kernel")

    monkeypatch.setattr(CudaTextDevice, "_machine", lambda _: MACHINE)
    monkeypatch.setattr(cuda, "measure_kernel_time", refuse)
    (candidate,) = (c for c in CUDA_CANDIDATES if c.name == "ort")
    device: Any = CudaTextDevice(HostMemory())  # type: ignore[arg-type]
    record = CudaTextPoint(make_problem(files), [candidate], device).measure(1)
    assert record["peers"]["ort"]["kernels_missing"] == "ValueError: the profiler saw no kernel"
    assert "kernels not profiled: ValueError: the profiler saw no kernel" in describe_record(record)[1]


def test_kernels_are_summed_and_copies_apart() -> None:
    events = [
        {"cat": "kernel", "dur": 3.5}, {"cat": "kernel", "dur": 1}, {"cat": "gpu_memcpy", "dur": 2},
        {"cat": "gpu_memset", "dur": 4}, {"cat": "cuda_runtime", "dur": 100}, {"name": "metadata"},
    ]  # fmt: skip
    found = sum_events(events)
    assert (found.kernel_seconds, found.copy_seconds) == pytest.approx((4.5e-6, 6e-6))
    assert found.kernels == 2
    with pytest.raises(ValueError, match="no kernel"):
        sum_events(events[2:])


class Bench(run.CudaTextBench):
    """The command on a GPU that measures nothing; it keeps which points it was asked for."""

    asked: list[tuple[str, str, int]]
    failing: str = ""

    def __init__(self, arguments: Any) -> None:
        run.TextBench.__init__(self, arguments)
        self.asked = []

    def write(self, model: Any, precision: str, folder: Path) -> TextFiles:
        self.asked.append(("write", model.name, 0))
        return TextFiles(folder)

    def measure(self, model: Any, precision: str, files: Any, window: Any, rows: int, folder: Path) -> Record:
        self.asked.append((model.name, window.lengths.name, rows))
        if window.lengths.name == self.failing:
            raise RuntimeError("CUDA out of memory")
        return {
            "key": [model.name, precision, window.lengths.name, rows, 2, 0], "model": model.name, "precision": precision,
            "lengths": "", "rows": rows, "batches": 2, "padded_over_real": {"arrival": 1.0, "sorted": 1.0}, "peers": {},
            "files": {}, "machine": MACHINE,
        }  # fmt: skip


def run_bench(monkeypatch: pytest.MonkeyPatch, results: Path, *words: str) -> tuple[int, Bench]:
    """The command's status, and what it was asked for."""
    made: list[Bench] = []
    monkeypatch.setattr(run, "CudaTextBench", lambda arguments: made.append(Bench(arguments)) or made[0])
    status = main(["texts", "--device", "cuda", "--peers", "ort", "--results", str(results), *words])
    return status, made[0]


def test_the_command_measures_every_size_of_a_batch_with_the_same_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, bench = run_bench(monkeypatch, tmp_path, "--models", "tiny", "reranker", "--batch", "4", "8")
    assert status == 0
    assert bench.asked == [
        ("write", "tiny", 0), *(("tiny", name, rows) for name in ("padded-256", "longest", "pairs") for rows in (4, 8)),
        ("write", "reranker", 0), ("reranker", "pairs", 4), ("reranker", "pairs", 8),
    ]  # fmt: skip
    assert bench.arguments.rounds == 7
    records = json.loads((tmp_path / "texts-cuda.json").read_text())
    assert [r["key"][:4] for r in records] == [[m, "float16", n, rows] for m, n, rows in bench.asked if rows]
    assert "not measured" not in capsys.readouterr().out


def test_no_point_begins_after_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was measured before is stored, also where a point fails."""
    monkeypatch.setattr(Bench, "failing", "padded-256")
    times = iter([0.0, 1.0, 2.0, *[11.0] * 9])
    monkeypatch.setattr("bench.texts.run.monotonic", lambda: next(times))
    words = ("--models", "tiny", "--lengths", "padded-256", "longest", "pairs", "--limit", "10")
    status, bench = run_bench(monkeypatch, tmp_path, *words)
    assert status == 3
    assert bench.asked == [("write", "tiny", 0), ("tiny", "padded-256", 32), ("tiny", "longest", 32)]
    assert len(json.loads((tmp_path / "texts-cuda.json").read_text())) == 1
    text = capsys.readouterr().out
    assert "not measured: tiny float16, padded-256, batches of 32: RuntimeError: CUDA out of memory" in text
    assert "not measured: tiny float16, pairs, batches of 32: the time was over" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--device", "cuda", "--precisions", "int8"), "int8: models run in float16 on --device cuda"),
        (("--device", "cpu", "--precisions", "float16"), "float16: models run in fp32, int8 on --device cpu"),
        (
            ("--device", "cuda", "--peers", "openvino"),
            "no candidate openvino; there are ort, ort-transformers, ort-packed",
        ),
        (("--device", "cpu", "--peers", "ort-packed"), "no candidate ort-packed"),
    ],
)
def test_what_a_device_has_not_is_refused(
    words: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(run, "CudaTextBench", Bench)
    assert main(["texts", "--models", "tiny", "--threads", "1", "--results", str(tmp_path), *words]) == 1
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
