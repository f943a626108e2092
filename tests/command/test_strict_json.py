# SPDX-License-Identifier: Apache-2.0
"""JSON that is written is JSON for every reader, whatever it holds; what is read is, too."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stof.attention.plan_entry import SitePlan
from stof.attention.report import SiteReport, SiteSection
from stof.bench import results
from stof.errors import ArgumentError
from stof.files import strict_json
from stof.ops import PLAN_FORMATS
from stof.plan import Plan, parse
from stof.report import Report
from stof.verification.result import Comparison, Verification


def standard(text: str) -> Any:
    """What a reader makes of it that knows RFC 8259 and nothing else."""

    def refuse(word: str) -> float:
        raise AssertionError(f"{word} is no JSON")

    text.encode("ascii")
    assert text.replace("\n", "").isprintable()
    return json.loads(text, parse_constant=refuse)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters()), inner),
)


@given(anything)
def test_everything_is_written_as_json(value: Any) -> None:
    standard(strict_json.dumps(value))


@given(st.floats())
def test_numbers_are_restored(number: float) -> None:
    text = strict_json.dumps({"x": [number]})
    (found,) = strict_json.loads(text, restore_numbers=True)["x"]
    assert found == number or (math.isnan(found) and math.isnan(number))


def test_strings_stand_for_what_json_has_not() -> None:
    value = {"a": math.inf, "b": [-math.inf, np.float64("nan")], "c": "bad\udcff\x7f", "d": (1.5, "größer")}
    text = strict_json.dumps(value)
    assert standard(text) == {"a": "inf", "b": ["-inf", "nan"], "c": "bad\\xff\x7f", "d": [1.5, "größer"]}
    assert strict_json.dumps({"path": Path("x")}, default=str) == '{"path": "x"}'
    with pytest.raises(TypeError, match="PosixPath has no form"):
        strict_json.dumps(Path("x"))


@pytest.mark.parametrize("text", ["NaN", "[Infinity]", '{"a": -Infinity}', '{"a": 1, "a": 2}', "{", ""])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        strict_json.loads(text)


def test_the_report_of_a_failed_verification_is_json() -> None:
    rows = [SiteReport("a\x1b[31m\x7f\u202e", True, "", predicted_gain=math.inf)]
    report = Report("bad\udcff.onnx", sections={"sites": SiteSection(rows)})
    report.verification = Verification(comparisons=[Comparison("output 'o'", np.inf, math.nan, False)])
    found = standard(report.to_json())
    assert found["model"] == "bad\\xff.onnx"
    assert found["sites"][0]["site"] == "a\x1b[31m\x7f\u202e"
    assert found["sites"][0]["predicted_gain"] == "inf"
    (comparison,) = found["verification"]["comparisons"]
    assert (comparison["difference"], comparison["budget"]) == ("inf", "nan")
    assert found["verification"]["ok"] is False


@pytest.mark.parametrize("gain", [math.inf, -math.inf, math.nan])
def test_a_plan_leaves_out_a_gain_that_is_no_number(gain: float) -> None:
    text = Plan({"sites": (SitePlan("größer", True, predicted_gain=gain),)}).to_json()
    assert "predicted_gain" not in standard(text)["sites"][0]
    assert parse(text, PLAN_FORMATS).entries["sites"] == (SitePlan("größer", True),)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", '"inf"'])
def test_a_plan_with_such_a_number_is_refused(number: str) -> None:
    site = f'{{"site": "a", "replace": true, "predicted_gain": {number}}}'
    with pytest.raises(ArgumentError, match=r"is no plan: it is no JSON|expected int or float"):
        parse(f'{{"format": "stof-plan", "version": 1, "target": "cpu", "sites": [{site}]}}', PLAN_FORMATS)


def test_results_of_benchmarks_are_json(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    results.store(path, {"key": ["a", 1], "error": math.nan, "us": {"peer": math.inf}})
    standard(path.read_text())
    (record,) = results.read(path)
    assert math.isnan(record["error"])
    assert record["us"] == {"peer": math.inf}
    path.write_text('[{"key": [], "error": NaN}]')
    with pytest.raises(ValueError, match="NaN is no JSON number"):
        results.read(path)


def test_an_item_a_line() -> None:
    """Lines are items of a list, and fields; what they hold is compact. A list of objects has lines wherever it is a field."""
    value = {"b": [1, 2], "a": {"rows": [{"x": math.inf, "y": [1]}, {}], "n": 1}, "c": {"n": {"m": 2}}}
    text = strict_json.dumps_by_line(value)
    assert text == '{\n"b":[1,2],\n"a":{\n"rows":[\n{"x":"inf","y":[1]},\n{}\n],\n"n":1\n},\n"c":{"n":{"m":2}}\n}'
    assert strict_json.loads(text, restore_numbers=True) == value
    assert strict_json.dumps_by_line([{"b": 1, "a": [{"c": 2}]}], sort_keys=True) == '[\n{"a":[{"c":2}],"b":1}\n]'
    assert [strict_json.dumps_by_line(x) for x in ([], {}, "é", 1)] == ["[]", "{}", '"\\u00e9"', "1"]
