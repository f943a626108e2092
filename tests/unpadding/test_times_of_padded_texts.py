# SPDX-License-Identifier: Apache-2.0
"""``--time`` of a model without padding: padded texts, whose padding stands beside each time."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from encoders import BOOL, INT64, encoder

from stof import cli
from stof.execution.inputs import InputMaker
from stof.execution.session_process import Session, TimingLimits
from stof.symbolic import Symbolic
from stof.verification import model_times
from stof.verification.model_inputs import default_inputs
from stof.verification.model_times import ModelTimes, time_models
from stof.verification.padding import padded_texts
from stof.verification.padding.padded_batch import PaddedBatch
from stof.verification.padding.padded_texts import draw_lengths, pad_texts
from stof.verification.timed_cases import choose_padded_case

QUICK = TimingLimits(seconds=10.0, end=60.0, most_rounds=2, least_rounds=1)
TEXTS = PaddedBatch("attention_mask", 0, frozenset({"sequence"}), {"input_ids": (1,), "attention_mask": (1,)}, False)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "model.onnx"
    onnx.save(encoder("mean", layers=1, positions=""), found)
    return found


@pytest.fixture
def fed(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, np.ndarray]]:
    """The inputs on which sessions are timed, each set for both of them."""
    found: list[dict[str, np.ndarray]] = []
    measure = Session.measure

    def note(session: Session, others: Any, feeds: Any, limits: TimingLimits) -> list[list[float]]:
        found.append(dict(feeds))
        return measure(session, others, feeds, replace(limits, seconds=0.0, least_rounds=1))

    monkeypatch.setattr(Session, "measure", note)
    return found


def time(path: Path, **options: Any) -> ModelTimes:
    settings: dict[str, Any] = {"shapes": {}, "limits": QUICK, "padded_batches": [TEXTS]} | options
    model = onnx.load(path)
    symbolic = Symbolic(model)
    maker = InputMaker(model, symbolic, frozenset({"attention_mask"}))
    return time_models(path, path, replace(default_inputs(model), symbolic=symbolic, maker=maker), **settings)


# ---- lengths ----
@pytest.mark.parametrize(("texts", "positions"), [(1, 1), (1, 7), (3, 2), (8, 256), (64, 256), (500, 100)])
def test_lengths(texts: int, positions: int) -> None:
    lengths = draw_lengths(texts, positions, np.random.default_rng(0))
    assert lengths.shape == (texts,)
    assert lengths.min() >= 1
    assert lengths.max() <= positions
    assert abs(np.median(lengths) - positions / 4) <= 1 + positions / 40
    again = draw_lengths(texts, positions, np.random.default_rng(1))
    assert sorted(again) == sorted(lengths)
    if texts >= 500:  # of a log-normal distribution of σ 0.6
        np.testing.assert_allclose(np.log(lengths[lengths > 3]).std(), 0.6, atol=0.1)


@pytest.mark.parametrize("inverted", [False, True])
@pytest.mark.parametrize("shape", [(5, 40), (5, 1, 1, 40)])
@pytest.mark.parametrize("dtype", [INT64, BOOL])
def test_masks_get_the_lengths(dtype: int, shape: tuple[int, ...], inverted: bool) -> None:
    model = encoder("mean", layers=1, dtype=dtype)
    maker = InputMaker(model, Symbolic(model), frozenset({"attention_mask"}))
    batch = replace(TEXTS, number=int(inverted))
    kind = np.bool_ if dtype == BOOL else np.int64
    feed = {"input_ids": np.arange(200).reshape(5, 40), "attention_mask": np.full(shape, 1 - inverted, kind)}
    found, ratio = pad_texts([batch], maker, feed)
    mask = found["attention_mask"]
    assert (mask.shape, mask.dtype) == (shape, kind)
    real = (mask.reshape(5, 40) != 0) != inverted
    assert sorted(real.sum(1)) == sorted(draw_lengths(5, 40, np.random.default_rng(0)))
    assert all((np.diff(row.astype(int)) <= 0).all() for row in real)  # padded on the right
    assert ratio == 200 / real.sum()
    np.testing.assert_array_equal(found["input_ids"], feed["input_ids"])
    assert pad_texts([], maker, feed) == (feed, 1.0)


@pytest.mark.parametrize(("number", "real"), [(-np.inf, 0.0), (100.0, 7.0)])
def test_masks_of_other_numbers_keep_what_real_tokens_have(number: float, real: float) -> None:
    """A mask that is added to scores, and token ids of which one is padding."""
    model = encoder("mean", layers=1)
    maker = InputMaker(model, Symbolic(model), frozenset())
    given = np.full((5, 40), real, np.float32)
    given[:, 30:] = number
    found, ratio = pad_texts([replace(TEXTS, number=number)], maker, {"attention_mask": given})
    mask = found["attention_mask"]
    assert set(np.unique(mask)) <= {number, real, 0.0}
    assert ratio == 200 / (mask != number).sum()
    kept = (mask != number) & (given != number)
    assert kept.any()
    np.testing.assert_array_equal(mask[kept], given[kept])


def test_both_masks_of_a_model_get_lengths() -> None:
    model = encoder("mean", layers=1)
    maker = InputMaker(model, Symbolic(model), frozenset())
    batches = [PaddedBatch(n, 0, frozenset(), {n: (1,)}, False) for n in ("a", "b")]
    feed = {"a": np.ones((4, 30), np.int64), "b": np.ones((4, 17), np.int64)}
    found, ratio = pad_texts(batches, maker, feed)
    assert ratio == (4 * 30 + 4 * 17) / (found["a"].sum() + found["b"].sum())
    assert found["b"].sum(1).max() <= 17


# ---- times ----
def test_padded_texts_are_timed(path: Path, fed: list[dict[str, np.ndarray]]) -> None:
    found = time(path)
    assert found.padded is not None
    mask = fed[-1]["attention_mask"]
    assert mask.shape == (8, 256)
    assert found.padded.padded_over_real == mask.size / mask.sum()
    assert 2 < found.padded.padded_over_real < 5
    assert found.padded.label == f"batch 8, sequence 256, padded/real {mask.size / mask.sum():.1f}"
    for times, feeds in zip(found.lengths, fed, strict=False):
        assert times.padded_over_real == 1.0
        assert feeds["attention_mask"].all()
        assert times.label.endswith(", padded/real 1.0")
    data = found.to_json()
    assert data["padded"]["padded_over_real"] == found.padded.padded_over_real
    assert data["padded"]["shapes"]["input_ids"] == [8, 256]


def test_other_models_are_timed_as_before(path: Path, fed: list[dict[str, np.ndarray]]) -> None:
    found = time(path, padded_batches=())
    assert len(fed) == 3
    assert found.padded is None
    assert {times.padded_over_real for times in found.lengths} == {None}
    assert "padded" not in found.to_text()
    assert "padded" not in found.to_json()


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        ({"sequence": (16, 64)}, (8, 64)),
        ({"sequence": (16, 64), "batch": (1, 3)}, (3, 64)),
        ({"batch": (32, 32), "sequence": (10, 10)}, (32, 10)),
    ],
)
def test_sizes_in_use_count(
    shapes: dict[str, tuple[int, int]], expected: tuple[int, int], path: Path, fed: list[dict[str, np.ndarray]]
) -> None:
    assert time(path, shapes=shapes).padded is not None
    assert fed[-1]["attention_mask"].shape == expected
    assert not fed[-1]["attention_mask"].all()


@pytest.mark.parametrize(("most", "texts"), [(10**9, 8), (8 * 256, 8), (8 * 256 - 1, 4), (256, 1), (255, None)])
def test_fewer_texts_where_time_is_short(most: int, texts: int | None, path: Path) -> None:
    maker = default_inputs(onnx.load(path)).maker
    timed = choose_padded_case(maker, {}, 2048, lambda positions: positions <= most)
    assert (None if timed is None else timed.case.batch) == texts


def test_what_is_not_timed_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_times, "choose_padded_case", lambda *_: None)
    found = time(path)
    assert found.padded is None
    assert found.left_out == ("padded texts: no time or memory was left",)


# ---- reports ----
def test_reports_state_the_padding(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(model_times, "_LIMITS", replace(QUICK, seconds=5.0))
    page, data = path.with_suffix(".html"), path.with_suffix(".json")
    options = ["--time", "--chains", "off", "--report", str(page), "--json", str(data)]
    assert cli.main([str(path), *options]) == 0
    out = capsys.readouterr().out.splitlines()
    measured = [line for line in out if line.startswith("measured")]
    assert all("padded/real 1.0; best of" in line for line in measured[:-1])
    assert measured[-1].startswith("measured, padded texts: ")
    times = json.loads(data.read_text())["times"]
    assert f"padded/real {times['padded']['padded_over_real']:.1f}; best of" in measured[-1]
    html = page.read_text()
    assert "Whole model, padded texts, measured, " in html
    assert f"{times['padded']['speedup']:.2f}× on padded texts" in html
    assert cli.main([str(path), *options, "--unpad", "off"]) == 0
    assert "padded/real" not in capsys.readouterr().out + page.read_text()


def test_the_distribution_is_that_of_the_docs() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs/guide/report.md").read_text()
    assert f"median a quarter of the positions, σ {padded_texts._SIGMA}" in text
    assert padded_texts._MEDIAN == 0.25
