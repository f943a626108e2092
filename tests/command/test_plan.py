# SPDX-License-Identifier: Apache-2.0
"""Plans: saved, read back, edited, applied; files that are no plans; and masks that a user states."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

import stof
from stof import cli
from stof.attention.decide import cost_cpu as cost
from stof.attention.plan_entry import SitePlan
from stof.cached_attention.plan_entry import CachePlan
from stof.errors import ArgumentError
from stof.ops import PLAN_FORMATS
from stof.plan import Plan, load, parse
from stof.targets import CUDA, TARGETS

WINDOW = "abs(q - k) <= 16 and pad[b, k]"

cache_plans = st.builds(
    CachePlan,
    cache=st.text(min_size=1),
    replace=st.just(True),
    predicted_gain=st.none() | st.integers(0, 10_000_000).map(lambda n: n / 1000),
    reason=st.text(),
) | st.builds(CachePlan, cache=st.text(min_size=1), replace=st.just(False), reason=st.text())
site_plans = st.builds(
    SitePlan,
    site=st.text(min_size=1),
    replace=st.just(True),
    mask=st.text(),
    empty_rows=st.sampled_from(["zero", "nan", "mean", "all"]),
    hints=st.sampled_from([(), (("kernel", "a"),), (("kernel", "a"), ("tile", "48x64"))]),
    predicted_gain=st.none() | st.integers(0, 10_000_000).map(lambda n: n / 1000),
    reason=st.text(),
) | st.builds(SitePlan, site=st.text(min_size=1), replace=st.just(False), reason=st.text())
plans = st.builds(
    Plan,
    st.fixed_dictionaries(
        {"sites": st.lists(site_plans, max_size=5, unique_by=lambda s: s.site).map(tuple)},
        optional={"caches": st.lists(cache_plans, max_size=3, unique_by=lambda c: c.cache).map(tuple)},
    ).map(lambda entries: {key: entries[key] for key in PLAN_FORMATS if key in entries}),
    st.sampled_from(list(TARGETS.values())),
)


@given(plans)
def test_a_plan_reads_back_as_it_was(plan: Plan) -> None:
    text = plan.to_json()
    assert parse(text, PLAN_FORMATS) == plan
    assert parse(text, PLAN_FORMATS).to_json() == text


def changed(**fields: Any) -> str:
    site = {"site": "a", "replace": True}
    data: dict[str, Any] = {"format": "stof-plan", "version": 1, "target": "cpu", "sites": [site]}
    for name, value in fields.items():
        (site if name.startswith("site_") else data)[name.removeprefix("site_")] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no JSON"),
        ("[" * 100_000, "no JSON"),
        ('{"format": "stof-plan", "format": "x"}', "field 'format' twice"),
        ("[]", "expected an object with"),
        ('{"sites": []}', "expected an object with"),
        (changed(version=2), "plan of version 2, expected 1"),
        (changed(version=None), "plan of version None, expected 1"),
        (changed(target="rocm"), "has target 'rocm', expected one of cpu, cuda, tensorrt"),
        (
            changed(more=1),
            "has field 'more', expected only attention_precision, block_thresholds, caches, chains, dequantize_attention, emit, "
            "format, gemm_precision, mlp_precision, mlps, sites, skip_thresholds, sparsity, target, threshold_clauses, "
            "unpadding, version",
        ),
        (changed(sites={}), "has sites {}, expected list"),
        (changed(sites=[3]), r"sites\[0\] is 3, expected an object"),
        (changed(sites=[{"site": "a"}]), r"sites\[0\] has no field 'replace'"),
        (changed(sites=[{"site": "a", "replace": False}] * 2), r"sites\[1\] names 'a' again"),
        (changed(site_replace=1), r"sites\[0\] has replace 1, expected bool"),
        (changed(site_site=None), "has site null, expected str"),
        (changed(site_mask=["q"]), r'has mask \["q"\], expected str'),
        (changed(site_empty_rows="one"), "has empty_rows 'one', expected one of zero, nan, mean, all"),
        (changed(site_predicted_gain=True), "has predicted_gain true, expected int or float"),
        (changed(site_predicted_gain=float("nan")), "NaN is no JSON number"),
        (changed(site_predicted_gain=10**400), "expected a number below 1e300"),
        (
            changed(site_predicted_gain=0).replace('"predicted_gain": 0', '"predicted_gain": 1e999'),
            "a number below 1e300",
        ),
        (changed(site_maks="q"), r"sites\[0\] has field 'maks'"),
    ],
)
def test_what_is_no_plan_is_refused(text: str, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        parse(text, PLAN_FORMATS)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"the plan .*none\.json does not exist"):
        load(tmp_path / "none.json", PLAN_FORMATS)
    with pytest.raises(ArgumentError, match="cannot be read: Is a directory"):
        load(tmp_path, PLAN_FORMATS)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ArgumentError, match="no UTF-8 text"):
        load(tmp_path / "bytes", PLAN_FORMATS)


@pytest.fixture
def model(narrow: Callable[[str], Path]) -> Path:
    return narrow("modernbert.dynamo.sdpa")


def attentions(path: Path) -> dict[str, onnx.NodeProto]:
    return {n.output[0]: n for n in onnx.load(str(path)).graph.node if n.op_type == "StofAttention"}


def attribute(node: onnx.NodeProto, name: str) -> str:
    return next((a.s.decode() for a in node.attribute if a.name == name), "")


def test_a_saved_plan_gives_the_same_model_and_the_same_plan(model: Path, tmp_path: Path) -> None:
    first, second, third = (tmp_path / f"{n}.json" for n in ("first", "second", "third"))
    assert cli.main([str(model), "--dry-run", "--save-plan", str(first)]) == 0
    assert not model.with_name("model.stof.onnx").exists()
    assert cli.main([str(model), "--save-plan", str(second)]) == 0
    chosen = model.with_name("model.stof.onnx").read_bytes()
    assert cli.main([str(model), "--plan", str(first), "--save-plan", str(third)]) == 0
    assert first.read_bytes() == second.read_bytes() == third.read_bytes()
    assert model.with_name("model.stof.onnx").read_bytes() == chosen
    plan = load(first, PLAN_FORMATS)
    assert [s.replace for s in plan.entries["sites"]] == [True] * 4
    assert {s.mask for s in plan.entries["sites"]} == {"pad[b, k]", WINDOW}


def edited(model: Path, change: Callable[[list[dict[str, Any]]], object]) -> Path:
    path = model.with_name("plan.json")
    assert cli.main([str(model), "--dry-run", "--save-plan", str(path)]) == 0
    data = json.loads(path.read_text())
    change(data["sites"])
    path.write_text(json.dumps(data))
    return path


def test_an_edited_plan_is_followed(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def change(sites: list[dict[str, Any]]) -> None:
        sites[0] = {"site": sites[0]["site"], "replace": False, "reason": "is faster as it is"}
        sites[1]["kernel"] = "one"
        sites[2]["mask"] = "q - k < 17 and k - q < 17 and pad[b, k]"
        del sites[3]

    plan = edited(model, change)
    report = stof.optimize(model, options=stof.Options(plan=plan))
    assert [s.replaced for s in report.sites] == [False, True, True, False]
    assert [report.sites[0].reason, report.sites[3].reason] == ["is faster as it is", "not in the plan"]
    nodes = list(attentions(model.with_name("model.stof.onnx")).values())
    assert [attribute(n, "kernel") for n in nodes] == ["one", ""]
    assert [attribute(n, "mask") for n in nodes] == [WINDOW, "q - k < 17 and k - q < 17 and pad[b, k]"]
    assert report.verification is not None
    assert not report.verification.failures


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        (lambda s: s[1].update(mask="abs(q - k) <= 15 and pad[b, k]"), 2, "is not the graph's"),
        (lambda s: s[1].update(mask="abs(q - k) <= 16"), 2, "is not the graph's"),
        (lambda s: s[1].update(mask="abs(q - k <= 16"), 1, "is refused"),
        (lambda s: s[1].update(mask="table0[k] and pad[b, k]"), 1, "has no such table"),
        (lambda s: s[1].update(mask="segment_q[b, q] == segment_k[b, k]"), 1, "has no such operand"),
        (lambda s: s[1].update(site="elsewhere"), 1, "'elsewhere', which the model does not have"),
    ],
)
def test_a_plan_that_does_not_fit_the_model(
    model: Path,
    change: Callable[[list[dict[str, Any]]], object],
    code: int,
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan = edited(model, change)
    files = set(model.parent.iterdir())
    assert cli.main([str(model), "--plan", str(plan)]) == code
    assert words in capsys.readouterr().err
    assert set(model.parent.iterdir()) == files


def test_a_plan_for_another_target(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = model.with_name("plan.json")
    Plan({"sites": ()}, CUDA).save(path)
    assert cli.main([str(model), "--plan", str(path)]) == 1
    assert "the plan is for target cuda" in capsys.readouterr().err


def test_a_plan_that_replaces_what_cannot_be(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = edited(model, lambda sites: None)
    monkeypatch.setattr(cost, "refusals", lambda problem: ["head size 512"])
    assert cli.main([str(model), "--plan", str(plan)]) == 3
    error = capsys.readouterr().err
    assert (
        f"replaces site {load(plan, PLAN_FORMATS).entries['sites'][0].name!r}, which cannot be: no kernel: head size 512"
        in error
    )
    assert "set its replace to false" in error
    assert not model.with_name("model.stof.onnx").exists()


def test_a_model_that_was_optimized_before(narrow: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    path = narrow("bert.dynamo.eager")
    once, twice, saved = (path.with_name(n) for n in ("once.onnx", "twice.onnx", "plan.json"))
    assert cli.main([str(path), "-o", str(once), "--skip", "1"]) == 0
    assert cli.main([str(once), "-o", str(twice), "--save-plan", str(saved)]) == 0
    assert twice.read_bytes() == once.read_bytes()
    assert "optimize the model from which it was made" in capsys.readouterr().out
    sites = load(saved, PLAN_FORMATS).entries["sites"]
    assert [s.replace for s in sites] == [False, False]
    assert sorted(s.reason[:9] for s in sites) == ["is StofAt", "the model"]
    assert len({s.site for s in sites}) == 2
    assert cli.main([str(once), "-o", str(twice), "--plan", str(saved)]) == 0
    assert cli.main([str(once), "--skip", "no such site"]) == 1
