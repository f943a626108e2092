# SPDX-License-Identifier: Apache-2.0
"""The page of a report: strict HTML without network and scripts, every fact of the report, and a bounded size."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from tests.helpers.several_masks import MASKS, model_with_masks
from tests.html_report.strict_page import parse, report_of, site, text_of, write_model

import stof
from stof import cli
from stof.attention.report import SiteReport, SiteSection, Step
from stof.errors import VerifyError
from stof.fusion.report import ChainReport, ChainSection
from stof.html_report import to_html
from stof.options import Options
from stof.report import Report, Section
from stof.selection import CandidateNames
from stof.system.processor import cpu_name, usable_cores
from stof.verification.model_times import ModelTimes, RunTimes
from stof.verification.result import Comparison, Coverage, SkippedCase, Verification

HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "a\x00\x1b[31m\nb\u202e",
    "]]>&amp;<!--",
    "\ud800x",
]


# ---- what it says ----
def test_page_of_every_mask(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    report = stof.optimize(write_model(tmp_path), tmp_path / "out.onnx", Options(report=page, verify_budget=5.0))
    parsed = parse(page.read_text())
    words = " ".join(" ".join(parsed.words).split())
    assert report.replaced == len(MASKS)
    for row in report.sites:
        assert row.site in words
        assert row.mask in words
    assert f"{len(MASKS)} of {len(MASKS)}" in words
    assert f"{report.nodes_before} → {report.nodes_after}" in words
    assert "Verification passed" in words
    assert sum(tag == "figure" for tag, _ in parsed.tags) == len(MASKS)
    assert "heads 1, 3" in words  # of the mask by heads, which has three pictures
    assert "4 documents, for example" in words
    assert words.index("Time before and after") < words.index("Masks every pair") < words.rindex("Attention sites")


def test_density_in_words() -> None:
    section = SiteSection([site(), site("t"), site("dense", mask="", family="dense", tile_density=1.0)])
    from stof.mask.draw_masks import MaskDrawing

    section.drawings = {
        "k <= q": MaskDrawing(64, (("", ("#.", "##")),), "a note"),
        "": MaskDrawing(64, (("", ("##",)),), ""),
    }
    words = text_of(to_html(report_of(section)))
    assert "2 sites 53 % of tiles computed at S = 2048 a note" in words
    assert "1 site 100 % of tiles computed at S = 2048" in words


def test_tiles_are_drawn_as_rectangles() -> None:
    from stof.html_report.elements import tile_grid

    drawn = tile_grid(["##+.", "...+"], "a mask")
    assert 'class="all" d="M0 0h2v1h-2z"' in drawn
    assert 'class="some" d="M2 0h1v1h-1zM3 1h1v1h-1z"' in drawn
    assert 'viewBox="0 0 4 2"' in drawn


def test_reasons_of_kept_candidates_and_layers() -> None:
    kept = SiteReport("/encoder/layers.7/Softmax", False, "no kernel: head size 1000", step=Step.KERNEL)
    chains = ChainSection(
        [ChainReport("c", "Add Mul", False, "estimated slower"), ChainReport("d", "Mul", True, "", "", 2.0, True)]
    )
    words = text_of(to_html(report_of(SiteSection([kept]), chains)))
    assert "row layer name result details" in words.replace("heads ", "")
    assert "0 7 /encoder/layers.7/Softmax kept kernel: no kernel: head size 1000" in words
    assert "estimated slower" in words
    assert "1 × chain of Mul 2.00× measured" in words


def test_measured_times_come_first() -> None:
    times = ModelTimes("batch 1, length 512", RunTimes(0.2, 0.25, 9), RunTimes(0.1, 0.11, 9))
    words = text_of(to_html(report_of(SiteSection([site()]), times=times)))
    assert "Measured speed-up 2.00×" in words
    assert words.index("original 200 ms") < words.index("optimized 100 ms") < words.index("7.90× estimated")


def test_a_failed_verification_is_said_first() -> None:
    wrong = Comparison("site 'a'", 1.0, 0.1, False, "a", "other shapes", Coverage(7))
    right = [Comparison(f"output {i}", 0.01, 0.1, True, coverage=Coverage(7)) for i in range(3)]
    page = to_html(report_of(SiteSection([site()]), verification=Verification([*right, wrong], 1.0)))
    words = text_of(page)
    assert "Verification failed: no file was written" in words
    assert "Verification failed 1 of 4 comparisons" in words
    assert words.index("site 'a'") < words.index("output 0")
    assert "other shapes" in words
    assert "1e+03 %" in words


def test_numbers_that_are_none() -> None:
    odd = [
        Comparison("a", float("nan"), 0.1, False),
        Comparison("b", float("inf"), 0.0, False),
        Comparison("c", 0.0, 0.0, True),
    ]
    section = SiteSection([site(predicted_gain=0.0), site(predicted_gain=float("inf")), site(predicted_gain=0.5)])
    words = text_of(to_html(report_of(section, verification=Verification(odd))))
    assert "nan" in words
    assert "200 %" in words


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({}, "Nothing to do: the graph has no Softmax node"),
        ({"dry_run": True}, "a dry run"),
        ({"notes": ("the kernels are not built",)}, "Notes the kernels are not built"),
        (
            {"library": {"backends": ["cpu", "cuda"]}, "seconds": {"load": 1.5}},
            "step load 1.50 s library: backends cpu, cuda",
        ),
    ],
)
def test_other_facts(facts: dict[str, Any], words: str) -> None:
    assert words in text_of(to_html(report_of(SiteSection(), **facts)))


def test_an_op_that_says_only_what_it_must() -> None:
    class Plain(Section):
        names = CandidateNames("call")

        def __init__(self) -> None:
            self.rows = [site(reason) for reason in ("a", "b")]

        def to_json(self) -> dict[str, Any]:
            return {}

        def lines(self) -> list[str]:
            return []

    words = text_of(to_html(report_of(Plain())))
    assert "Calls 2 of 2" in words
    assert "2 × call 0, … replaced replaced 2 names call 0 , call 1" in words


# ---- what it must not do ----
@pytest.mark.parametrize("name", HOSTILE)
def test_names_are_text(name: str, tmp_path: Path) -> None:
    comparison = Comparison(name, 1.0, 2.0, False, name, name)
    section = SiteSection(
        [site(name, mask=name, family=name, heads=name, form=name, notes=(name,)), SiteReport(name, False, name)]
    )
    from stof.mask.draw_masks import MaskDrawing

    section.drawings = {name: MaskDrawing(8, ((name, ("#.",)),), name)}
    chains = ChainSection([ChainReport(name, name, done, name, name, 2.0) for done in (True, False)])
    verification = Verification([comparison], suspects=(name,))
    times = ModelTimes(name, RunTimes(1, 1, 1), RunTimes(1, 1, 1))
    report = Report(
        name, name, {"sites": section, "chains": chains}, 2, 1, verification=verification, times=times,
        seconds={name: 1.0}, library={name: [name]}, notes=(name,),
    )  # fmt: skip
    page = to_html(report)
    assert stof.errors.shown(name) in text_of(page)
    assert page.isprintable() or all(c.isprintable() or c == "\n" for c in page)


def test_thousands_of_sites_make_a_small_page() -> None:
    rows = [site(f"/model/layers.{i}/{'x' * 300}/Softmax", index=i, mask=f"k <= q + {i % 3}") for i in range(5000)]
    other = [site(f"t{i}", mask="q" * 3000 + f" < {i}") for i in range(3000)]
    chains = [ChainReport(f"c{i}", "Add " * 500, False, f"reason {i} " * 200) for i in range(3000)]
    comparisons = [Comparison(f"site {r.site}", 0.1, 1.0, True, r.site) for r in rows]
    sections = (SiteSection([*rows, *other]), ChainSection(chains))
    page = to_html(report_of(*sections, verification=Verification(comparisons)))
    assert len(page) < 4_000_000
    words = text_of(page)
    assert "layers.0/" in words
    assert "1667 ×" in words  # rows that are alike but for their names
    assert "0 to 4998" in words or "1 to 4999" in words or "2 to 4997" in words
    assert "more rows are in the report as JSON" in words
    assert "4700 more comparisons" in words


def test_long_tables_are_folded() -> None:
    few, many = (
        to_html(report_of(SiteSection([site(f"s{i}", mask=f"k <= q + {i}") for i in range(n)]))) for n in (30, 31)
    )
    assert few.count("<details>") + 1 == many.count("<details>")
    assert "31 rows, 31 of them replaced" in text_of(many)


# ---- the option ----
def test_option_writes_the_page(tmp_path: Path) -> None:
    model = write_model(tmp_path, "causal")
    page = tmp_path / "page.html"
    assert cli.main([str(model), "--dry-run", "--report", str(page)]) == 0
    assert "1 of 1 can be replaced" in text_of(page.read_text())
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_file()) == ["model.onnx", "page.html"]
    assert cli.main([str(model), "--explain", "--report", str(page)]) == 0
    assert cli.main([str(model), "--no-verify", "--report", str(page)]) == 0
    assert "not verified" in text_of(page.read_text())


def test_page_is_written_when_verification_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from stof.verification import verifier

    wrong = Comparison("output", 1.0, 0.0, False, coverage=Coverage(1))

    def compare_outputs(run: Any, cases: object) -> list[int]:
        run.result.comparisons.append(wrong)
        return []

    monkeypatch.setattr(verifier._Run, "compare_outputs", compare_outputs)
    page = tmp_path / "page.html"
    with pytest.raises(VerifyError):
        stof.optimize(write_model(tmp_path, "causal"), options=Options(report=page))
    assert "Verification failed: no file was written" in text_of(page.read_text())
    assert not (tmp_path / "model.stof.onnx").exists()


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--json", "the HTML report {page} is the report too"),
        ("--save-plan", "the saved plan {page} is the HTML report too"),
        ("-o", "the output {page} is the HTML report too"),
    ],
)
def test_page_is_no_other_output(option: str, words: str, tmp_path: Path, capsys: Any) -> None:
    model, page = write_model(tmp_path, "causal"), tmp_path / "page"
    assert cli.main([str(model), "--report", str(page), option, str(page)]) == 1
    assert words.format(page=page) in capsys.readouterr().err
    assert not page.exists()


@pytest.mark.parametrize("make", [lambda f: f / "model.onnx", lambda f: f, lambda f: f / "no" / "page.html"])
def test_page_that_cannot_be_written(make: Callable[[Path], Path], tmp_path: Path, capsys: Any) -> None:
    model = write_model(tmp_path, "causal")
    before = model.read_bytes()
    assert cli.main([str(model), "--report", str(make(tmp_path))]) == 1
    assert "HTML report" in capsys.readouterr().err
    assert model.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir() if p.is_file()] == ["model.onnx"]


def test_json_and_text_do_not_change_with_the_page(tmp_path: Path) -> None:
    model, page = write_model(tmp_path, "window"), tmp_path / "page.html"
    plain, with_page = (stof.optimize(model, options=Options(dry_run=True, report=p)) for p in (None, page))
    assert plain.to_text() == with_page.to_text()
    first, second = json.loads(plain.to_json()), json.loads(with_page.to_json())
    assert first.pop("seconds").keys() == second.pop("seconds").keys()
    runs = [found.pop("run") for found in (first, second)]
    assert [
        run.pop("command").endswith(end)
        for run, end in zip(runs, ("--dry-run", f"--report {page} --dry-run"), strict=True)
    ]
    assert [run.pop("date")[:10] for run in runs] == [time.strftime("%Y-%m-%d", time.gmtime())] * 2
    assert runs[0] == runs[1]
    assert first == second


def test_sites_are_grouped_by_their_mask() -> None:
    """Sites of one mask stand together, those that differ in their names alone in one row, with all names and layers."""
    masks = ["k <= q", "abs(q - k) <= 64"]
    rows = [site(f"/layers.{i}/Softmax", mask=masks[i % 2], index=i) for i in range(6)]
    rows.append(SiteReport("/layers.6/Softmax", False, "no kernel", mask=masks[0], step=Step.KERNEL))
    rows.append(SiteReport("/router/Softmax", False, "not recovered", step=Step.LIFT))
    page = to_html(report_of(SiteSection(rows)))
    groups = [dict(attributes) for tag, attributes in parse(page).tags if tag == "th" and "colspan" in attributes]
    assert len(groups) == 3
    words = text_of(page)
    table = words[words.rindex("Attention sites") :]
    places = [
        table.index(text)
        for text in (
            "k <= q 3 of 4",
            "0, 2, 4",
            "3 × /layers.0/Softmax",
            "kernel: no kernel",
            "abs(q - k) <= 64 3 of 3",
        )
    ]
    assert places == sorted(places)
    assert "no mask known 0 of 1" in table
    assert all(row.site in table for row in rows)


def test_contiguous_layers_are_ranges() -> None:
    rows = [site(f"/layers.{i}/Softmax", index=i) for i in (0, 1, 2, 4, 7, 8)]
    assert "0 to 2, 4, 7 to 8" in text_of(to_html(report_of(SiteSection(rows))))


def test_the_page_says_how_it_was_made(tmp_path: Path) -> None:
    model, page = write_model(tmp_path, "causal"), tmp_path / "a page.html"
    out = tmp_path / "out.onnx"
    stof.optimize(model, out, Options(report=page, verify=False))
    words = text_of(page.read_text())
    assert f"command stof-optimize {model} -o {out} --report '{page}' --no-verify date " in words
    assert time.strftime("date %Y-%m-%d ", time.gmtime()) in words
    machine = words[words.index("machine ") : words.index("versions ")]
    assert cpu_name() in machine
    assert f"{usable_cores()} cores" in machine
    assert stof.build_info()["cpu_isa"] in machine
    versions = (
        f"versions stof {stof.__version__}, onnxruntime {onnxruntime.__version__}, onnx {onnx.__version__}, python 3."
    )
    assert versions in words
    sizes = [f"{file.stat().st_size / 1024:.1f} KiB" for file in (model, out)]
    assert f"file size {' → '.join(sizes)}" in words
    assert f"File size {' → '.join(sizes)}" in words


def test_sizes_count_external_data(tmp_path: Path) -> None:
    model = model_with_masks("causal")
    weight = onnx.numpy_helper.from_array(np.ones((64, 1024), np.float32), "w")
    model.graph.initializer.append(weight)
    onnx.save(model, str(tmp_path / "m.onnx"), save_as_external_data=True, location="m.data", size_threshold=1024)
    report = stof.optimize(tmp_path / "m.onnx", tmp_path / "out.onnx", Options(verify=False))
    assert report.facts is not None
    own = [(tmp_path / name).stat().st_size for name in ("m.onnx", "out.onnx", "m.data")]
    assert (report.facts.model_bytes, report.facts.output_bytes) == (own[0] + own[2], own[1] + own[2])
    assert json.loads(report.to_json())["run"]["model_bytes"] == own[0] + own[2]


def test_what_was_not_compared_stays_visible() -> None:
    """Sets of inputs and sites that were left out are sentences above the table, not rows of a closed one."""
    rows = [Comparison(f"output {i}", 0.1 + i / 1000, 1.0, True, coverage=Coverage(9)) for i in range(40)]
    skipped = [SkippedCase("batch 2, length 4096", "memory"), *(SkippedCase(f"case {i}", "time") for i in range(20))]
    found = Verification(
        [*rows, Comparison("wrong", 2.0, 1.0, False, coverage=Coverage(9))], complete=False, cases=["a"], skipped=skipped,
        sites_left=7, quantized=True, sliced=True,
    )  # fmt: skip
    page = to_html(report_of(SiteSection([site()]), verification=found))
    visible = " ".join(re.sub("<[^>]+>", " ", page[: page.index("<details>")]).split())
    for words in (
        "A limit ended verification",
        "1 of 22 sets of inputs were compared; not batch 2, length 4096 (memory); case 0 (time)",
        "and 9 more",
        "No time was left to compare 7 sites",
        "an argmax or a length that is decided by rounding may flip",
        "ran on slices of its queries",
        "failed wrong",
        "passed output 39",
    ):
        assert words in visible
    assert "output 0" not in visible
