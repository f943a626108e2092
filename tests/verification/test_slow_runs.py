# SPDX-License-Identifier: Apache-2.0
"""Models whose runs take much of the budget: what is compared in it, what is left, and what is said of that.

Times are simulated: a run waits for as long as it is to take, or for as long as it may.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import stof
from stof import cli
from stof.execution import run_limits, session_process
from stof.execution.ort_sessions import VerifiedSession
from stof.execution.run_limits import RunLimits

BUDGET, GRACE = 9.0, 1.0
TOTAL = BUDGET + GRACE
Feeds = Mapping[str, np.ndarray]


class Runs:
    """The runs of a verification.

    Args:
        seconds: that a run on some inputs takes.
        monkeypatch: replaces the runs of sessions.
        slowdown: how many times as long the optimized model takes.
    """

    def __init__(
        self, seconds: Callable[[Feeds], float], monkeypatch: pytest.MonkeyPatch, slowdown: float = 1.0
    ) -> None:
        self.feeds: list[Feeds] = []
        self.ended = 0
        own = VerifiedSession.run

        def run(
            session: VerifiedSession, outputs: Sequence[str] | None, feeds: Feeds, until: float | None = None
        ) -> list[Any]:
            self.feeds.append(feeds)
            factor = slowdown if session._name == "the optimized model" else 1.0
            needed, left = seconds(feeds) * factor, session._limits.seconds_left(until)
            time.sleep(min(needed, left))
            if needed > left:
                self.ended += 1
                raise session._limits.end_step(f"run {session._name}", left, until)
            return own(session, outputs, feeds, until)

        monkeypatch.setattr(VerifiedSession, "run", run)
        monkeypatch.setattr(run_limits, "GRACE", GRACE)


def _verify(path: Path, *options: str) -> tuple[int, dict[str, Any]]:
    report = path.with_name("report.json")
    status = cli.main([str(path), "--verify-budget", str(BUDGET), "--json", str(report), *options])
    return status, json.loads(report.read_text())["verification"] or {}


@pytest.mark.parametrize(("share", "chains"), [(6 / 49, "off"), (12 / 49, "on")])
def test_what_fits_is_compared_and_the_rest_is_named(
    share: float,
    chains: str,
    narrow: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Kind: where one run takes 6 to 12 s of a budget of 45 s, the plan of runs shrinks to the measured cost of one run.

    Where rewrites may be dropped, a verification has a part of the budget only, and takes more where it needs it.
    """
    path = narrow("bert.dynamo.sdpa")
    page = path.with_name("report.html")
    Runs(lambda _: share * TOTAL, monkeypatch)
    start = time.monotonic()
    status, found = _verify(path, "--chains", chains, "--report", str(page))
    out, errors = capsys.readouterr()
    assert status == 0, errors
    assert time.monotonic() - start < TOTAL + 8  # with what comes before verification
    compared = [c["what"] for c in found["comparisons"] if not c["site"]]
    assert compared
    assert {c["site"] for c in found["comparisons"]} > {""}
    assert not found["complete"]
    assert len(found["skipped"]) >= 2
    assert {s["reason"] for s in found["skipped"]} == {"time"}
    (line,) = [line for line in out.splitlines() if "sets of inputs were compared" in line]
    assert line.strip().startswith(f"{len(found['cases'])} of {len(found['cases']) + len(found['skipped'])} sets")
    assert f"{found['skipped'][0]['case']} (time)" in line
    assert f"sets of inputs were compared; not {found['skipped'][0]['case']} (time)" in page.read_text()
    assert path.with_name("model.stof.onnx").exists()


def test_a_budget_that_is_used_up_is_said_to_be(
    narrow: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Kind: "took longer than 0.3 s, which may be endless" where little of the budget was left."""
    path = narrow("bert.dynamo.sdpa")
    Runs(lambda _: 0.38 * TOTAL, monkeypatch)
    status, _ = _verify(path, "--chains", "off")
    errors = capsys.readouterr().err
    assert status == 2
    assert "endless" not in errors
    assert "--verify-budget is used up: " in errors
    assert "One run of the original takes 3." in errors
    assert "3 runs are needed" in errors
    assert "raise --verify-budget" in errors
    assert not path.with_name("model.stof.onnx").exists()


# A voice model in small: how many frames a token gets depends on the numbers of an input.
def voiced(frames: str) -> onnx.ModelProto:
    """Attention over tokens, each of which is repeated; ``frames`` are nodes that compute how often, as tensor n of int64[1]."""
    rng = np.random.default_rng(0)
    weights = {n: (rng.standard_normal((32, 32)) * 0.2).astype(np.float32) for n in ("wq", "wk", "wv")}
    text = f"""
    <ir_version: 8, opset_import: ["": 17]>
    g (float[1, S, 32] x, float[1, 24] style, float[1] speed, int64[1] repeats) => (float[1, samples] audio)
    <float scale = {{0.25}}, int64[4] cut = {{0, 0, 2, 16}}, int64[3] join = {{0, 0, 32}}, int64[1] one = {{1}},
     int64[1] last = {{2}}, int64[2] flat = {{1, -1}}, float many = {{100.0}}, float few = {{2.0}}>
    {{
        q = MatMul (x, wq) k = MatMul (x, wk) v = MatMul (x, wv)
        qr = Reshape (q, cut) kr = Reshape (k, cut) vr = Reshape (v, cut)
        qt = Transpose <perm = [0, 2, 1, 3]> (qr) kt = Transpose <perm = [0, 2, 3, 1]> (kr)
        vt = Transpose <perm = [0, 2, 1, 3]> (vr)
        s = MatMul (qt, kt) t = Mul (s, scale) p = Softmax <axis = -1> (t) o = MatMul (p, vt)
        oc = Transpose <perm = [0, 2, 1, 3]> (o) h = Reshape (oc, join)
        m = ReduceMean <axes = [2], keepdims = 1> (h)
        {frames}
        w = Concat <axis = 0> (one, one, n) wide = Expand (m, w) audio = Reshape (wide, flat)
    }}"""
    model = onnx.parser.parse_model(text)
    model.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in weights.items())
    used = {name for node in model.graph.node for name in node.input}
    kept = [i for i in model.graph.input if i.name in used]
    del model.graph.input[:]
    model.graph.input.extend(kept)
    return model


_ENERGY = "e = Mul (style, style) r = ReduceMean <axes = [1], keepdims = 0> (e)"
_WHOLE = "n = Cast <to = 7> (c)"
FRAMES = {
    "a vector's energy": f"{_ENERGY} z = Mul (r, r) a = Mul (z, many) b = Ceil (a) c = Add (b, few) {_WHOLE}",
    "exponentials of a vector": f"y = ReduceMax <axes = [1], keepdims = 0> (style) z = Exp (y) a = Mul (z, z) "
    f"b = Mul (a, few) c = Ceil (b) {_WHOLE}",
    "a number that divides": f"a = Div (many, speed) c = Ceil (a) {_WHOLE}",
    "an integer": "d = Mul (repeats, repeats) n = Add (d, one)",
}


def _energy(name: str, feeds: Feeds) -> float:
    """How many frames the inputs make."""
    if name == "a vector's energy":
        return float(100 * np.mean(feeds["style"] ** 2) ** 2)
    if name == "exponentials of a vector":
        return float(2 * np.exp(2 * feeds["style"].max()))
    return float(100 / feeds["speed"][0]) if "divides" in name else float(feeds["repeats"][0] ** 2)


@pytest.mark.parametrize("name", [n for n in FRAMES if n != "an integer"])
def test_numbers_are_searched_that_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Kind: run time that depends on values is searched for values that run, the largest of them."""
    path, page = tmp_path / "model.onnx", tmp_path / "report.html"
    onnx.save(voiced(FRAMES[name]), path)
    most = {"a vector's energy": 4.0, "exponentials of a vector": 16.0, "a number that divides": 20.0}[name]
    runs = Runs(lambda feeds: 1e9 if _energy(name, feeds) > most else 0.0, monkeypatch)
    status, found = _verify(path, "--report", str(page))
    out, errors = capsys.readouterr()
    assert status == 0, errors
    assert found["ok"]
    assert found["cases"]
    assert not found["skipped"]
    assert runs.ended >= 1
    ((reduced, factor),) = found["reduced_inputs"].items()
    assert reduced == ("speed" if "divides" in name else "style")
    assert f"numbers of {reduced!r} are " in out
    assert (
        f"Numbers of &#x27;{reduced}&#x27; are " in page.read_text()
        or f"Numbers of '{reduced}' are " in page.read_text()
    )
    compared = [f for f in runs.feeds if _energy(name, f) <= most]
    # Not only on the smallest numbers: a length is compared that these decide.
    assert max(_energy(name, f) for f in compared[-4:]) > most / 300
    assert factor > 1 if "divides" in name else 1 / 256 < factor < 1


def test_tensors_that_are_too_large_are_made_smaller(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Lengths that no memory suffices for are refused by the runtime, rather than ended by a limit."""
    path = tmp_path / "model.onnx"
    model = voiced(FRAMES["a vector's energy"])
    next(t for t in model.graph.initializer if t.name == "many").CopyFrom(
        numpy_helper.from_array(np.float32(4e12), "many")
    )
    onnx.save(model, path)
    assert cli.main([str(path)]) == 0, capsys.readouterr().err
    assert "numbers of 'style' are 1/" in capsys.readouterr().out


def test_numbers_of_a_user_are_not_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(voiced(FRAMES["a vector's energy"]), path)
    rng = np.random.default_rng(1)
    given = {"x": rng.standard_normal((1, 9, 32)), "style": 0.3 * rng.standard_normal((1, 24))}
    np.savez(tmp_path / "feed.npz", **{n: a.astype(np.float32) for n, a in given.items()})
    runs = Runs(lambda feeds: 1e9 if _energy("a vector's energy", feeds) > 4.0 else 0.0, monkeypatch)
    status, found = _verify(path, "--inputs", str(tmp_path / "feed.npz"))
    assert status == 0, capsys.readouterr().err
    np.testing.assert_array_equal(runs.feeds[0]["style"], given["style"].astype(np.float32))
    assert found["cases"][0].startswith("inputs ")
    assert found["reduced_inputs"]["style"] < 1  # of drawn ones, which follow


def test_where_no_numbers_run_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(voiced(FRAMES["a vector's energy"]), path)
    Runs(lambda _: 1e9, monkeypatch)
    start = time.monotonic()
    assert cli.main([str(path), "--verify-budget", "3"]) == 2
    assert time.monotonic() - start < 10
    errors = capsys.readouterr().err
    assert "Numbers of 'style' from 1/256 of the usual size on were tried; --inputs gives others" in errors
    assert not path.with_name("model.stof.onnx").exists()


def test_a_part_of_a_budget_takes_more_where_it_needs_it() -> None:
    whole = RunLimits(10.0, 1 << 30)
    part = whole.share(4.0)
    before = part.end
    part.extend(1.0)
    assert part.end == before < whole.end
    part.extend(9.0)
    assert before < part.end < whole.end
    part.extend(100.0)
    assert part.end == whole.end
    assert part.end_of_case(3.0) - time.monotonic() == pytest.approx((whole.end - time.monotonic() - 3.0) / 3, abs=0.1)


def test_a_difference_without_time_for_noise_is_no_verdict_on_sites(
    narrow: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where outputs differ and no run with noise fits, the message says so, and blames no site."""
    path = narrow("bert.dynamo.sdpa")
    monkeypatch.setattr("stof.verification.verified_models._FLOOR", 0.0)
    monkeypatch.setattr("stof.verification.compare.MODEL_FACTOR", 0.0)
    monkeypatch.setattr("stof.verification.compare._ULPS", 0.0)
    Runs(lambda _: 0.27 * TOTAL, monkeypatch)  # three runs fit, and a fourth does not
    assert _verify(path, "--chains", "off")[0] == 2
    errors = capsys.readouterr().err
    assert "no time was left for runs of the original with noise, which tell rounding from faults" in errors
    assert "one of which takes 2." in errors
    assert "--skip" not in errors
    assert not path.with_name("model.stof.onnx").exists()


def test_values_of_a_decision_are_timed_on_the_same_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--time runs the models on numbers that verification has found to run."""
    path = tmp_path / "model.onnx"
    onnx.save(voiced(FRAMES["a vector's energy"]), path)
    Runs(lambda feeds: 1e9 if _energy("a vector's energy", feeds) > 4.0 else 0.0, monkeypatch)
    timed: list[Feeds] = []
    own = session_process.Session.measure

    def measure(session: session_process.Session, others: Any, feeds: Feeds, limits: Any) -> Any:
        timed.append(feeds)
        return own(session, others, feeds, limits)

    monkeypatch.setattr(session_process.Session, "measure", measure)
    report = stof.optimize(path, options=stof.Options(time=True, verify_budget=BUDGET))
    assert report.times is not None
    assert all(_energy("a vector's energy", f) < 4.0 for f in timed)


def test_slow_inputs_leave_time_for_noise_of_quick_ones(
    narrow: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Kind: inputs that run at once were refused for want of a run with noise, as other inputs had taken the time for it."""
    path = narrow("bert.dynamo.sdpa")
    monkeypatch.setattr("stof.verification.verified_models._FLOOR", 0.0)
    monkeypatch.setattr("stof.verification.compare.MODEL_FACTOR", 0.0)
    monkeypatch.setattr("stof.verification.compare._ULPS", 0.0)
    shapes: list[tuple[int, ...]] = []

    def seconds(feeds: Feeds) -> float:
        shapes.append(next(iter(feeds.values())).shape)
        return 0.01 if shapes[-1] == shapes[0] else 0.1 * TOTAL

    Runs(seconds, monkeypatch, slowdown=8.0)
    assert _verify(path, "--chains", "off")[0] == 2
    assert len(set(shapes)) > 1
    assert "no time was left for runs of the original with noise" not in capsys.readouterr().err
