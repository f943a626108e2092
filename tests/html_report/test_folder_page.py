# SPDX-License-Identifier: Apache-2.0
"""The page of a folder: a row for each model that leads to its report, failures, other files, and how it was made."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import onnx
import onnx.parser
import pytest
from tests.helpers.several_masks import model_with_masks
from tests.html_report.strict_page import parse, text_of

from stof import cli
from stof.api.folder import optimize_folder
from stof.folder_report import FolderReport
from stof.html_report import folder_to_html
from stof.options import Options
from stof.report import Report
from stof.verification.result import Comparison, Coverage

PLAIN = """<ir_version: 8, opset_import: ["": 18]> g (float[N] x) => (float[N] y) { y = Relu (x) }"""
QUICK = Options(verify_budget=5.0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An encoder, another one below, a model with nothing to replace, and other files."""
    path = tmp_path / "exported"
    (path / "onnx").mkdir(parents=True)
    onnx.save(model_with_masks("causal"), str(path / "model.onnx"))
    onnx.save(model_with_masks("window", "causal"), str(path / "onnx" / "decoder.onnx"))
    onnx.save(onnx.parser.parse_model(PLAIN), str(path / "plain.onnx"))
    (path / "config.json").write_text("{}")
    return path


def links(page: str) -> list[str]:
    return [dict(attributes)["href"] or "" for tag, attributes in parse(page).tags if tag == "a"]


def test_a_row_for_each_model_leads_to_its_report(folder: Path, tmp_path: Path, capsys: Any) -> None:
    page = tmp_path / "folder.html"
    arguments = [str(folder), "-o", str(tmp_path / "out"), "--report", str(page), "--verify-budget", "5"]
    assert cli.main(arguments) == 0
    text = page.read_text()
    words = text_of(text)
    assert links(text) == ["#model-0", "#model-1", "#model-2"]
    assert [dict(a)["id"] for _, a in parse(text).tags if "id" in dict(a)] == ["model-0", "model-1", "model-2"]
    index = words[words.index("Models model result measured") : words.index("Other files")]
    rows = [
        index.index(name)
        for name in (
            "model.onnx replaced passed 1 of 1",
            "onnx/decoder.onnx replaced passed 2 of 2",
            "plain.onnx copied not verified 0 of 0",
        )
    ]
    assert rows == sorted(rows)
    assert "Nothing to do: " in index
    assert len(re.findall(r"Verification passed \d+ comparisons in", words)) == 2
    assert sum(tag == "figure" for tag, _ in parse(text).tags) == 3
    assert f"Written: {tmp_path / 'out'}" in words
    assert "config.json" in words
    assert words.count("command stof-optimize") == 1
    assert f"command stof-optimize {folder} -o {tmp_path / 'out'} --report {page} --verify-budget 5 date" in words
    assert "library: version" in words


def test_a_page_of_a_dry_run(folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "folder.html"
    optimize_folder(folder, options=Options(dry_run=True, report=page))
    words = text_of(page.read_text())
    assert "can be replaced not verified 1 of 1" in words
    assert "No file was written" in words
    assert sorted(p.name for p in tmp_path.iterdir()) == ["exported", "folder.html"]


def test_failures_are_on_the_page_and_nothing_is_written(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One model that cannot be read, one whose verification fails: why, and what was compared, stays visible."""
    from stof.verification import verifier

    (folder / "broken.onnx").write_bytes(b"no model")
    compare = verifier._Run.compare_outputs

    def spoil(run: Any, cases: Any) -> Any:
        if len(run.verifier.inputs.working.graph.output) == 2:  # the decoder
            run.result.comparisons.append(Comparison("output 'y'", 1.0, 0.0, False, coverage=Coverage(1)))
            return []
        return compare(run, cases)

    monkeypatch.setattr(verifier._Run, "compare_outputs", spoil)
    page, facts = tmp_path / "folder.html", tmp_path / "facts.json"
    report = optimize_folder(folder, tmp_path / "out", Options(report=page, json=facts, verify_budget=5.0))
    assert sorted(report.failures) == ["broken.onnx", "onnx/decoder.onnx"]
    assert not (tmp_path / "out").exists()
    words = text_of(page.read_text())
    assert "2 of 4 models failed; nothing was written" in words
    assert "Failed 2" in words
    assert "Verification failed: no file was written" in words
    assert all(str(error) in words for error in report.failures.values())
    assert "failed output 'y'" in words
    assert links(page.read_text()) == ["#model-0", "#model-1", "#model-2"]
    assert "→ " not in words[words.index("File size") : words.index("Models model result measured")]
    assert json.loads(facts.read_text())["run"]["command"].startswith("stof-optimize ")


def test_a_genai_folder(tmp_path: Path) -> None:
    """Its configuration, and who loads the library, are on the page."""
    report = FolderReport("decoder", "out", reports={"model.onnx": Report("decoder/model.onnx")})
    report.libraries, report.others = ["libstof_ort.so"], ["tokenizer.json"]
    report.registrations = {"genai_config.json": ("model.decoder.session_options",)}
    report.notes = ["a note of the folder"]
    words = text_of(folder_to_html(report))
    assert "onnxruntime_genai loads it by itself" in words
    assert "genai_config.json: model.decoder.session_options is set" in words
    assert "tokenizer.json" in words
    assert "Notes a note of the folder" in words


def test_names_of_files_are_text(tmp_path: Path) -> None:
    name = '<script>alert(1)</script>\u202e"><img src=x>.onnx'
    report = FolderReport(name, name, reports={name: Report(name)}, others=[name], libraries=[name], notes=[name])
    page = folder_to_html(report)
    assert "<script" not in page
    assert "<img" not in page
    assert "\u202e" not in page
    parse(page)


def test_a_folder_of_many_models_has_a_bounded_page() -> None:
    models = {f"model_{i:03}.onnx": Report(f"f/model_{i:03}.onnx", notes=(f"note {i}" * 100,)) for i in range(300)}
    page = folder_to_html(FolderReport("f", reports=models, others=[f"file {i}" for i in range(5000)], output="out"))
    words = text_of(page)
    assert len(links(page)) == 40
    assert "The reports of 260 more models are in the report as JSON" in words
    assert all(name in words for name in models)
    assert "and 4900 more" in words
    assert len(page) < 1_500_000


@pytest.mark.parametrize(
    ("option", "words"), [("--json", "the HTML report {page} is the report too"), ("input", "is the input")]
)
def test_the_page_is_no_other_file(option: str, words: str, folder: Path, tmp_path: Path, capsys: Any) -> None:
    page = folder / "config.json" if option == "input" else tmp_path / "page"
    more = [] if option == "input" else [option, str(page)]
    before = (folder / "config.json").read_bytes()
    assert cli.main([str(folder), "-o", str(tmp_path / "out"), "--report", str(page), *more]) == 1
    message = capsys.readouterr().err
    assert words.format(page=page) in message, message
    assert (folder / "config.json").read_bytes() == before
