# SPDX-License-Identifier: Apache-2.0
"""Chains by way of the whole command: verified, decided by what was measured, left out where outputs differ."""

from __future__ import annotations

import html
import itertools
import json
import re
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import onnx
import onnxruntime as ort
import pytest

import large
import stof
from stof import cli
from stof.fusion import rewrite
from stof.fusion.decide.measured import LEAST_GAIN_INTERLEAVED, MeasuredDecider, make_chain_decider
from stof.fusion.decide.measured_config import LoneOperators
from stof.fusion.decide.regions import DecidedChains
from stof.fusion.report import ChainReport
from stof.options import Options
from stof.pipeline import optimize
from stof.tuning_cache import Cache


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "cache" / "tuning.sqlite"
    monkeypatch.setenv("STOF_CACHE", str(path))
    return path


@pytest.fixture
def two_chains(tmp_path: Path) -> Path:
    """A model of two different chains, each of which is searched: the search of a whole model takes ten times as long."""
    path = tmp_path / "model.onnx"
    model = large.elementwise_chains(18)
    [n for n in model.graph.node if n.op_type == "Tanh"][-1].op_type = "Sigmoid"
    onnx.save(model, str(path))
    return path


def calls(path: Path) -> list[onnx.NodeProto]:
    return [n for n in onnx.load(str(path)).graph.node if n.op_type == "StofChain"]


@pytest.mark.parametrize("name", ["bert.dynamo.sdpa", "modernbert.torchscript.sdpa"])
def test_all_chains_are_replaced_and_verified(narrow: Callable[[str], Path], name: str) -> None:
    report = optimize(narrow(name), options=Options(chains="on"))
    assert report.verification is not None
    assert not report.verification.failures
    assert report.output is not None
    replaced = [c for c in report.chains if c.replaced]
    assert len(calls(Path(report.output))) == len(replaced) >= 5
    assert "chain of" in report.to_text()
    # The function body serves where the library is missing.
    ort.InferenceSession(report.output, providers=["CPUExecutionProvider"])


def test_no_chain_without_being_asked_for(narrow: Callable[[str], Path], cache: Path) -> None:
    report = optimize(narrow("bert.dynamo.sdpa"))
    assert not report.chains
    assert report.output is not None
    assert not calls(Path(report.output))
    assert not cache.exists()


def test_chains_that_make_outputs_differ_stay_out(
    narrow: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = rewrite.emit_decided

    def spoiled(decided: DecidedChains) -> onnx.ModelProto:
        """Every chain that ends with an addition subtracts, as a defect of the printer or of a kernel would have it."""
        made = plain(decided)
        for node in made.graph.node:
            for a in node.attribute:
                if node.op_type == "StofChain" and a.name == "chain":
                    a.s = a.s.replace(b"gelu(", b"silu(")
        return made

    monkeypatch.setattr(rewrite, "emit_decided", spoiled)
    report = optimize(narrow("bert.dynamo.sdpa"), options=Options(chains="on"))
    assert report.verification is not None
    assert not report.verification.failures
    assert report.replaced == 2
    assert report.output is not None
    assert not calls(Path(report.output))
    assert all(not c.replaced and "differs by" in c.reason for c in report.chains)


@pytest.mark.parametrize(("gain", "replaced"), [(2.0, True), (LEAST_GAIN_INTERLEAVED - 0.005, False)])
def test_measurements_decide(
    narrow: Callable[[str], Path], cache: Path, monkeypatch: pytest.MonkeyPatch, gain: float, replaced: bool
) -> None:
    model = narrow("bert.dynamo.sdpa")
    times = iter(range(10_000))

    def measured(
        self: MeasuredDecider,
        site: object,
        timers: object,
        problems: object,
        config: object,
    ) -> None:
        next(times)
        for problem in problems:  # type: ignore[attr-defined]
            if config is None:
                self.cache.put(problem, "original", gain)
            else:
                self.cache.put(problem, "0", 1.0)

    monkeypatch.setattr(MeasuredDecider, "_time", measured)
    monkeypatch.setattr(MeasuredDecider, "_time_interleaved", lambda *_: None)
    monkeypatch.setattr("stof.fusion.decide.measured._MeasuredCost.__call__", lambda *_: 1.0)
    first = optimize(model, options=Options(tune=30.0, verify=False))
    assert any(c.replaced for c in first.chains) == replaced
    known = next(times)
    again = optimize(model, options=Options(verify=False))  # from the cache, without a measurement
    assert next(times) == known + 1
    assert [(c.chain, c.replaced) for c in again.chains] == [(c.chain, c.replaced) for c in first.chains]
    if not replaced:
        assert all("of the original's speed" in c.reason for c in again.chains)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many operators each measurement was of; a chain saves half of one."""
    asked: list[int] = []

    def seconds(self: object, places: Sequence[int], chains: Sequence[object], outputs: object) -> float:
        asked.append(len(places))
        return 1e-3 * (len(places) - len(chains) / 2)

    def in_turns(
        self: object, places: Sequence[int], candidates: Sequence[Sequence[object]], *_: object
    ) -> list[float]:
        return [seconds(self, places, chains, None) for chains in candidates]

    monkeypatch.setattr("stof.fusion.decide.measured.Timer.seconds", seconds)
    monkeypatch.setattr("stof.fusion.decide.measured.Timer.measure_interleaved", in_turns)
    return asked


def test_a_search_that_ended_is_not_made_again(two_chains: Path, cache: Path, asked: list[int]) -> None:
    first = optimize(two_chains, options=Options(tune=60.0, verify=False))
    number = len(asked)
    assert number > 0
    again = optimize(two_chains, options=Options(tune=60.0, verify=False))
    assert len(asked) == number
    assert [(c.chain, c.replaced, c.gain) for c in again.chains] == [
        (c.chain, c.replaced, c.gain) for c in first.chains
    ]
    assert all(c.measured for c in again.chains if c.gain is not None)


def test_a_search_that_was_cut_off_goes_on_with_more_time(
    two_chains: Path, cache: Path, asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MeasuredDecider, "_is_over", lambda self: self.options.tune < 100)
    numbers = []
    for tune in (60.0, 60.0, 120.0, 60.0):
        optimize(two_chains, options=Options(tune=tune, verify=False))
        numbers.append(len(asked))
    assert 0 < numbers[0] == numbers[1] < numbers[2] == numbers[3]


def test_what_another_build_measured_counts_for_nothing(narrow: Callable[[str], Path], cache: Path) -> None:
    """The report, too, is the one of a run without a cache: a default run does not depend on what else was tuned."""
    model = narrow("bert.dynamo.sdpa")
    plain = optimize(model, options=Options(verify=False)).to_text()
    Cache(cache, "another device", "another build").put({"chain": ""}, "0", 1.0)
    report = optimize(model, options=Options(verify=False))
    assert not report.chains
    assert report.to_text() == plain


def test_a_default_run_says_when_earlier_measurements_decide(
    two_chains: Path, cache: Path, asked: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """After any ``--tune`` the same command gives another model: the report says so, and an option gives the first one."""
    outputs = [tmp_path / name for name in ("before.onnx", "tuned.onnx", "after.onnx", "without.onnx")]
    page, facts = tmp_path / "page.html", tmp_path / "facts.json"
    written = ["--report", str(page), "--json", str(facts)]
    arguments: list[list[str]] = [[], ["--tune", "60"], written, ["--ignore-measurements"]]
    texts = []
    for output, own in zip(outputs, arguments, strict=True):
        assert cli.main([str(two_chains), "--no-verify", "-o", str(output), *own]) == 0
        texts.append(capsys.readouterr().out)
    before, tuned, after, without = (output.read_bytes() for output in outputs)
    assert before == without
    assert tuned == after != before
    (line,) = (line for line in texts[2].splitlines() if line.startswith("choices: "))
    assert f" in {cache}; --ignore-measurements decides without them" in line
    assert f"{datetime.now(UTC):%Y-%m-%d}" in line
    assert not any("choices: " in texts[i] for i in (0, 1, 3))
    found = json.loads(facts.read_text())["earlier_measurements"]
    assert f"{found['decisions']} follow {found['measurements']} measurements of earlier runs" in line
    assert found["path"] == str(cache)
    assert html.escape(line.removeprefix("choices: ")) in page.read_text()


def test_tuning_can_ignore_what_was_measured_before(two_chains: Path, cache: Path, asked: list[int]) -> None:
    numbers, earlier = [], []
    for ignore in (False, False, True):
        report = optimize(two_chains, options=Options(tune=60.0, verify=False, ignore_measurements=ignore))
        numbers.append(len(asked))
        earlier.append(report.earlier_measurements)
    assert numbers[0] == numbers[1] < numbers[2]
    assert [e is None for e in earlier] == [True, False, True]


def test_what_no_scheme_is_counts_for_nothing(cache: Path) -> None:
    """A file that another version, or somebody else, has written to."""
    problem = {"chain": ""}
    own = Cache(cache, "device", "build")
    for config, seconds in (("original", 1.0), ("no scheme", 0.1), ("7", 0.1), ("0", 0.5), ("2n", 0.1), ("2p", 0.4)):
        own.put(problem, config, seconds)
    decider = MeasuredDecider(Options(), own, 0.0)
    assert decider._decide([problem], 3, "", LoneOperators()).segments == ((0, 3),)
    assert decider._decide([problem], 3, "", LoneOperators(matmuls=((0, 1),))).segments == ((0, 1),)


def test_a_real_measurement(narrow: Callable[[str], Path], cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it says on this machine, it is kept, and it decides the next run."""
    # The time is over after some two hundred looks at the clock, however long these take.
    monkeypatch.setattr(
        "stof.fusion.rewrite.make_chain_decider",
        partial(make_chain_decider, clock=partial(next, itertools.count(0.0, 0.01))),
    )
    model = narrow("bert.dynamo.sdpa")
    first = optimize(model, options=Options(tune=2.0, verify=False))
    again = optimize(model, options=Options(verify=False))

    def outcome(chain: ChainReport) -> tuple[bool, float | None, str]:
        # The first run had no time for some regions, the second one does not measure: they say so in other words.
        unmeasured = re.search("(no chain of it )?was not measured", chain.reason)
        return chain.replaced, chain.gain, unmeasured[0] if unmeasured else chain.reason

    assert list(map(outcome, first.chains)) == list(map(outcome, again.chains))
    assert any(c.gain is not None for c in first.chains)
    assert stof.build_info()["build_id"] in _texts(cache)


def _texts(cache: Path) -> str:
    import sqlite3

    with sqlite3.connect(cache) as database:
        return " ".join(row[0] for row in database.execute("SELECT problem FROM measurements"))
