# SPDX-License-Identifier: Apache-2.0
"""Times of whole models: what is measured, on which inputs, within which limits, and how it is reported."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from tests.cached_attention.gqa_models import Shape, model_of
from tests.helpers.several_masks import model_with_masks

import build
import stof
from stof import cli
from stof.api.folder import optimize_folder
from stof.execution.case import Case, Padding
from stof.execution.ort_sessions import file_session
from stof.execution.session_process import RuntimeFailure, Session, TimingLimits
from stof.options import Options
from stof.verification import model_times, timed_cases
from stof.verification.model_inputs import default_inputs
from stof.verification.model_times import time_models
from stof.verification.timed_cases import NotTimedError

QUICK = TimingLimits(seconds=30.0, end=90.0, most_rounds=3, least_rounds=1)


def loop_model(rounds: str) -> onnx.ModelProto:
    """A model that adds 1 so often; without an end where rounds is empty."""
    return onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 18]>
        g (float[1,S] x) => (float[1,S] y) {{
            most = Constant <value = int64 {{{rounds}}}> ()
            go = Constant <value = bool {{1}}> ()
            y = Loop (most, go, x) <body = b (int64 i, bool c, float[1,S] a) => (bool d, float[1,S] r) {{
                d = Identity (c)
                one = Constant <value = float {{1.0}}> ()
                r = Add (a, one)
            }}>
        }}"""
    )


@pytest.fixture
def put(tmp_path: Path) -> Callable[[str, onnx.ModelProto], Path]:
    def write(name: str, model: onnx.ModelProto) -> Path:
        onnx.save(model, str(tmp_path / name))
        return tmp_path / name

    return write


# ---- the measurement ----
def test_the_slower_model_takes_longer(put: Callable[..., Path]) -> None:
    slow, fast = loop_model("20000"), loop_model("20")
    found = time_models(put("slow.onnx", slow), put("fast.onnx", fast), default_inputs(slow), {}, QUICK)
    assert found.original.best > 5 * found.optimized.best
    assert found.speedup == found.original.best / found.optimized.best
    assert found.original.best <= found.original.median
    assert 1 <= found.original.runs == found.optimized.runs <= 3


def test_rounds_end_with_the_time(put: Callable[..., Path]) -> None:
    model = loop_model("30000")
    path = put("model.onnx", model)
    limits = TimingLimits(seconds=0.0, end=60.0, most_rounds=1000, least_rounds=3)
    assert time_models(path, path, default_inputs(model), {}, limits).original.runs == 3


def test_a_model_without_an_end_is_ended(put: Callable[..., Path]) -> None:
    model = loop_model("9223372036854775807")
    path = put("model.onnx", model)
    start = time.monotonic()
    with pytest.raises(NotTimedError, match="more than 1 s"):
        time_models(path, path, default_inputs(model), {}, TimingLimits(1.0, 1.0, 5, 1))
    assert time.monotonic() - start < 30


def test_sessions_take_turns(put: Callable[..., Path]) -> None:
    first, second = (file_session(put(f"{n}.onnx", loop_model(n)), library=False, seconds=60.0) for n in ("2", "3"))
    feeds = {"x": np.zeros((1, 4), np.float32)}
    samples = first.measure([second], feeds, QUICK)
    assert [len(s) for s in samples] == [3, 3]
    assert all(seconds > 0 for s in samples for seconds in s)
    with pytest.raises(RuntimeFailure):
        first.measure([second], {"x": np.zeros(3, np.float32)}, QUICK)
    assert second.run(None, feeds, 60.0)[0].tolist() == [[3.0] * 4]  # they still run


# ---- which inputs ----
@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ({}, ["S 128", "S 512", "S 2048"]),
        ({"S": (16, 64)}, ["S 16", "S 64"]),
        ({"S": (100, 1000)}, ["S 100", "S 250", "S 1000"]),
        ({"S": (300, 300)}, ["S 300"]),
        ({"S": (4000, 9000)}, ["S 4000"]),
    ],
)
def test_lengths_are_those_in_use(
    shapes: dict[str, tuple[int, int]], words: list[str], put: Callable[..., Path]
) -> None:
    model = loop_model("2")
    path = put("model.onnx", model)
    found = time_models(path, path, default_inputs(model), shapes, QUICK)
    assert [times.inputs for times in found.lengths] == words
    assert [times.shapes for times in found.lengths] == [{"x": (1, int(w.removeprefix("S ")))} for w in words]
    assert [times.length for times in found.lengths] == [int(w.removeprefix("S ")) for w in words]
    assert found.left_out == ()


@pytest.mark.parametrize(
    ("name", "shapes", "words"),
    [
        ("narrow/modernbert.dynamo.sdpa", {"sequence": (64, 64)}, "batch 1, sequence 64"),
        ("zoo/qwen3-fixed.dynamo.sdpa", {}, "input_ids, attention_mask [2, 48]"),
        ("zoo/vit-features.optimum.sdpa", {}, "batch_size 1, num_channels 3, height 48, width 48"),
        ("zoo/whisper.dynamo.sdpa", {}, "batch 1, target 128, input_features [1, 16, 100]"),
        ("zoo/llama-cached.dynamo.sdpa", {"sequence": (8, 8), "past": (8, 8)}, "batch 1, sequence 8, total 16, past 8"),
    ],
)
def test_the_label_names_the_sizes_that_ran(
    name: str, shapes: dict[str, tuple[int, int]], words: str, put: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``--time`` named a length that no input has: with ``--shape``, of fixed sizes, of images, of decoders with caches."""
    model = build.fill(build.load_graph(name), seed=1)
    path = put("model.onnx", model)
    fed: list[dict[str, np.ndarray]] = []
    measure = Session.measure

    def note(session: Session, others: object, feeds: dict[str, np.ndarray], limits: object) -> list[list[float]]:
        found = measure(session, others, feeds, replace(QUICK, seconds=0.0, least_rounds=1))  # type: ignore[arg-type]
        fed.append(feeds)
        return found

    monkeypatch.setattr(Session, "measure", note)
    found = time_models(path, path, default_inputs(model), shapes, QUICK)
    assert found.inputs == words
    assert found.shapes in [{n: a.shape for n, a in feeds.items()} for feeds in fed]


def test_lengths_beyond_stored_positions_leave_the_others(put: Callable[..., Path]) -> None:
    """A table of 700 positions: 128, 512 and no more, of which the report says why."""
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 18]>
        g (float[1,S] x) => (float[1,S] y) <float[1,700] table = {0}> {
            shape = Shape (x)
            zero = Constant <value_ints = [0, 0]> ()
            part = Slice (table, zero, shape)
            y = Add (x, part)
        }"""
    )
    model.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(np.ones((1, 700), np.float32), "table"))
    path = put("model.onnx", model)
    found = time_models(path, path, default_inputs(model), {}, QUICK)
    assert [times.inputs for times in found.lengths] == ["S 128", "S 512"]
    (words,) = found.left_out
    assert words.startswith("S 2048: ONNX Runtime does not run it: ")
    between = time_models(path, path, default_inputs(model), {"S": (2, 1200)}, QUICK)
    assert [times.inputs for times in between.lengths] == ["S 75", "S 300", "S 600"][:2] + ["S 512"]


def test_a_length_for_which_the_time_does_not_suffice_is_left_out(
    put: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = loop_model("2")
    path = put("model.onnx", model)
    monkeypatch.setattr(model_times._Run, "_has_time_for", lambda *_: False)
    found = time_models(path, path, default_inputs(model), {}, QUICK)
    assert found.inputs == "S 128"
    assert found.left_out == tuple(f"S {n}: longer than the 30 s of --time" for n in (512, 2048))


def test_all_lengths_share_the_time(put: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    model = concat_decoder()
    path = put("model.onnx", model)
    now = iter(range(1000))
    monkeypatch.setattr(model_times.time, "monotonic", lambda: float(next(now)))
    given: list[tuple[float, float]] = []
    measure = Session.measure

    def note(session: Session, others: object, feeds: object, limits: TimingLimits) -> list[list[float]]:
        given.append((limits.seconds, limits.end))
        return measure(session, others, feeds, replace(limits, seconds=0.0, end=60.0))  # type: ignore[arg-type]

    monkeypatch.setattr(Session, "measure", note)
    time_models(path, path, default_inputs(model), {}, TimingLimits(20.0, 60.0, 3, 1))
    assert len(given) == 4  # three lengths and a token
    assert all(seconds < 20.0 and end < 60.0 for seconds, end in given)
    assert given[2][0] > max(given[0][0], given[1][0])  # the longest has the largest part


def test_large_models_are_timed_at_short_lengths(put: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    model = loop_model("2")
    path = put("model.onnx", model)
    monkeypatch.setattr(timed_cases, "_FLOPS", 2000.0)
    found = time_models(path, path, default_inputs(model), {}, QUICK)
    assert [times.inputs for times in found.lengths] == ["S 128"]


def test_memory_of_the_machine_is_respected(put: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_with_masks("causal")
    path = put("model.onnx", model)
    scores = 4 * 2048 * 2048 * 4  # bytes of 4 heads
    monkeypatch.setattr(timed_cases, "free_memory", lambda: 3 * scores)
    assert "S 1024" in time_models(path, path, default_inputs(model), {}, QUICK).inputs
    monkeypatch.setattr(timed_cases, "free_memory", lambda: 100)
    with pytest.raises(NotTimedError, match="more than half of the memory that is free"):
        time_models(path, path, default_inputs(model), {}, QUICK)


# ---- one token ----
def concat_decoder() -> onnx.ModelProto:
    """Causal attention over a past that is concatenated with the new keys, as exporters write it."""
    return onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 18]>
        g (float[B,2,S,8] q, float[B,2,S,8] k, float[B,2,S,8] v, float[B,2,P,8] past_k, float[B,2,P,8] past_v)
          => (float[B,2,S,8] y, float[B,2,T,8] keys, float[B,2,T,8] values) {
            keys = Concat <axis = 2> (past_k, k)
            values = Concat <axis = 2> (past_v, v)
            kt = Transpose <perm = [0, 1, 3, 2]> (keys)
            scores = MatMul (q, kt)
            weights = Softmax <axis = -1> (scores)
            y = MatMul (weights, values)
        }"""
    )


def test_one_token_behind_a_past_is_timed_beside_the_prompt(put: Callable[..., Path]) -> None:
    model = concat_decoder()
    path = put("model.onnx", model)
    maker = default_inputs(model).maker
    case = maker.token_case(300)
    assert case is not None
    feeds = maker.draw(case, np.random.default_rng(0))
    assert feeds["q"].shape == (1, 2, 1, 8)
    assert feeds["past_k"].shape == feeds["past_v"].shape == (1, 2, 299, 8)
    found = time_models(path, path, default_inputs(model), {}, QUICK)
    assert found.token is not None
    assert found.token.original.best < found.original.best
    assert found.token.inputs == f"B 1, S 1, P {found.length - 1}"
    assert found.to_json()["token"]["speedup"] == found.token.speedup


def test_models_without_a_cache_have_no_token() -> None:
    assert default_inputs(model_with_masks("causal")).maker.token_case(300) is None
    assert default_inputs(loop_model("2")).maker.token_case(300) is None


def test_token_that_does_not_run_leaves_the_times_of_the_prompt(
    put: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = concat_decoder()
    path = put("model.onnx", model)
    inputs = default_inputs(model)
    case = Case(1, 8, Padding.NONE, (("S", 1), ("P", 7)))
    monkeypatch.setattr(inputs.maker, "token_case", lambda keys: case)
    draw = inputs.maker.draw
    monkeypatch.setattr(
        inputs.maker, "draw", lambda c, rng: {n: a[:, :1] if c is case and n == "q" else a for n, a in draw(c, rng).items()}
    )  # fmt: skip
    found = time_models(path, path, inputs, {}, QUICK)
    assert found.original.best > 0
    assert found.token is None


# ---- the option ----
def test_option_reports_times(
    tmp_path: Path, put: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(model_times, "_LIMITS", QUICK)
    model, found, page = (
        put("model.onnx", model_with_masks("window", "causal")),
        tmp_path / "r.json",
        tmp_path / "r.html",
    )
    arguments = ["--time", "--json", str(found), "--report", str(page), "--verify-budget", "5"]
    assert cli.main([str(model), *arguments]) == 0
    assert "measured: " in capsys.readouterr().out
    data = json.loads(found.read_text())
    times = data["times"]
    own = {"inputs", "shapes", "length", "original", "optimized", "speedup"}
    assert times.keys() == {*own, "lengths"}
    assert all(t.keys() == own for t in times["lengths"])
    assert times["lengths"][-1] == {key: times[key] for key in own}
    assert [t["length"] for t in times["lengths"]] == [128, 512, 2048]
    assert times["original"].keys() == times["optimized"].keys() == {"best", "median", "runs"}
    assert times["speedup"] == pytest.approx(times["original"]["best"] / times["optimized"]["best"])
    assert "time" in data["seconds"]
    assert "Measured speed-up" in page.read_text()


def test_reports_have_a_line_for_one_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_times, "_LIMITS", QUICK)
    folder = tmp_path / "decoder"
    folder.mkdir()
    onnx.save(model_of(Shape(packed=True, rotary=16)), str(folder / "model.onnx"))
    report = stof.optimize(folder / "model.onnx", options=Options(verify=False, time=True))
    assert report.times is not None
    assert report.times.token is not None
    lines = [line for line in report.to_text().splitlines() if line.startswith("measured")]
    assert [line.split(":")[0] for line in lines] == ["measured"] * (len(lines) - 1) + ["measured, one token"]
    assert len(lines) == 1 + len(report.times.lengths)
    found = optimize_folder(folder, tmp_path / "out", Options(verify=False, time=True)).to_text()
    assert "\n  measured, one token: " in found


def test_without_the_option_nothing_is_timed(put: Callable[..., Path]) -> None:
    report = stof.optimize(put("model.onnx", model_with_masks("causal")), options=Options(verify=False))
    assert report.times is None
    assert json.loads(report.to_json())["times"] is None
    assert "measured" not in report.to_text()


@pytest.mark.parametrize("error", [NotTimedError("too large"), RuntimeFailure("no kernel"), MemoryError()])
def test_what_hinders_is_a_note(error: Exception, put: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(model_times, "time_models", fail)
    report = stof.optimize(put("model.onnx", model_with_masks("causal")), options=Options(time=True, verify_budget=2.0))
    assert report.times is None
    assert report.output is not None
    assert any(note.startswith("not timed: ") and str(error) in note for note in report.notes)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--dry-run"], "--time needs a model that is written"),
        (["--explain"], "--time needs a model that is written"),
        (["--target", "cuda"], "--time measures on the CPU"),
        (["--target", "tensorrt"], "--time measures on the CPU"),
    ],
)
def test_options_that_exclude_it(arguments: list[str], words: str, put: Callable[..., Path], capsys: Any) -> None:
    model = put("model.onnx", model_with_masks("causal"))
    assert cli.main([str(model), "--time", *arguments]) == 1
    assert words in capsys.readouterr().err
    assert [p.name for p in model.parent.iterdir() if p.is_file()] == ["model.onnx"]


def test_it_needs_onnxruntime(put: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr("stof.pipeline.has_onnxruntime", lambda: False)
    assert cli.main([str(put("model.onnx", model_with_masks("causal"))), "--time", "--no-verify"]) == 1
    assert "--time needs onnxruntime" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("seconds", "keys", "fits"),
    [
        ([2.0], 2048, True),  # one length says no more than that longer ones take as long
        ([6.0], 512, False),
        ([2.0, 2.1], 2048, True),  # weights decide
        ([0.1, 1.0], 2048, False),  # 0.9 s for 384 keys more: 4.6 s for 2048, in each of 4 rounds
        ([1.0, 0.9], 2048, True),
    ],
)
def test_time_for_a_longer_input_is_told_by_shorter_ones(seconds: list[float], keys: int, fits: bool) -> None:
    inputs = default_inputs(loop_model("2"))
    run = model_times._Run(None, None, inputs, {}, TimingLimits(18.0, 60.0, 20, 3))  # type: ignore[arg-type]
    known = [
        model_times.ModelTimes("", model_times.RunTimes(t / 2, t, 3), model_times.RunTimes(t / 2, t, 3), length=n)
        for t, n in zip(seconds, (128, 512), strict=False)
    ]
    timed = timed_cases.TimedCase(Case(1, keys, Padding.NONE), keys, keys)
    assert run._has_time_for(timed, known) == fits
