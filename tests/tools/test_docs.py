# SPDX-License-Identifier: Apache-2.0
"""The docs: links resolve, README keeps its form; options, variables, keys of plans and reports are those of the code."""

from __future__ import annotations

import argparse
import json
import re
import runpy
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

import pytest
from tests.helpers.cpu_isas import CPU_ISAS

import stof
from bench.options import make_parser
from stof import Options, cli, plan
from stof.arguments.precisions import BF16
from stof.arguments.threshold_kinds import SKIP_SCORES
from stof.attention_precision.eight_bit_report import EightBitReport, EightBitRow
from stof.bench import cli as bench_cli
from stof.cached_attention.report import CacheReport
from stof.ops import PLAN_FORMATS
from stof.prompts.loss import Bucket, Loss
from stof.sparse_mlp.report import MlpReport, MlpSection, PredictionReport
from stof.sparsify.precision_report import PrecisionReport
from stof.sparsify.reduced_report import PrecisionRow
from stof.sparsify.report import SparsifiedSite, SparsityReport
from stof.sparsify.threshold_report import ThresholdReport, ThresholdRow
from stof.tuning_cache import EarlierMeasurements
from stof.unpadding.report import UnpadReport
from stof.verification.float_distance import DequantizedAttention, OutputDistance
from stof.verification.model_times import ModelTimes, RunTimes
from stof.verification.result import DecidedDifference, PaddingMove, PartialVerification

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / room / "README.md" for room in ("examples", "models", "tests")),
    ]
)
SOURCE_ROOMS = ("bench", "optimizer", "plugins", "cpu", "cuda", "tests", "tools", "models")
SOURCE_SUFFIXES = {".py", ".cc", ".h", ".cu", ".cuh", ".sh"}

LINK = re.compile(r"!?\[[^\]\[]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#{1,6} +(.+?)\s*$", re.MULTILINE)
FENCE = re.compile(r"^(```|~~~).*?^\1\s*$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]*`")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
VARIABLE = re.compile(r"\bSTOF_[A-Z0-9_]+\b")
READ_VARIABLE = re.compile(r'(?:getenv|environ(?:\.get)?)[(\[]\s*"(STOF_[A-Z0-9_]+)"')
PAGE_IN_SOURCE = re.compile(r"\bdocs/[\w./-]+\.md\b")


def without_code(text: str) -> str:
    return CODE.sub("", FENCE.sub("", text))


@cache
def anchors(page: Path) -> frozenset[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    found: dict[str, int] = {}
    names = set()
    for heading in HEADING.findall(FENCE.sub("", page.read_text())):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        name = re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")
        number = found.get(name, 0)
        found[name] = number + 1
        names.add(f"{name}-{number}" if number else name)
    return frozenset(names)


def broken_links(page: Path) -> list[str]:
    """Relative links of a page that lead to no file or no heading."""
    found = []
    for link in LINK.findall(without_code(page.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and (target.suffix != ".md" or anchor not in anchors(target))):
            found.append(link)
    return found


@cache
def sources() -> dict[Path, str]:
    """The text of each source file but this one."""
    paths = [path for room in SOURCE_ROOMS for path in (ROOT / room).rglob("*") if path.suffix in SOURCE_SUFFIXES]
    return {path: path.read_text() for path in paths if path != Path(__file__).resolve()}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_resolve(page: Path) -> None:
    assert broken_links(page) == []


def test_broken_links_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A `b` c\n[a](#a-b-c) [b](#none) [c](page.md#a-b-c) [d](none.md) `[e](none.md)` [f](https://none)\n"
    )
    assert broken_links(page) == ["#none", "none.md"]


def test_pages_that_sources_name_exist() -> None:
    named = {(path, page) for path, text in sources().items() for page in PAGE_IN_SOURCE.findall(text)}
    assert named
    assert sorted(f"{path.relative_to(ROOT)}: {page}" for path, page in named if not (ROOT / page).is_file()) == []


def test_readme_is_short() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) < 120
    assert [line for line in lines if len(line) > 160] == []
    cells = [cell for line in lines if line.startswith("|") for cell in line.strip("|").split("|")]
    assert [cell for cell in cells if len(cell.split()) > 15] == []


def test_picture_is_that_of_the_results() -> None:
    drawn = runpy.run_path(str(ROOT / "tools/plot_speedup.py"))["svg"]()
    assert (ROOT / "docs/plots/speedup.svg").read_text() == drawn


def test_options_are_those_of_the_parser() -> None:
    text = (ROOT / "docs/guide/options.md").read_text()
    listed = text[text.index("## All options") : text.index("## Exit status")]
    parser = {o for action in cli._parser()._actions for o in action.option_strings if o.startswith("--")}
    assert set(OPTION.findall(listed)) == parser
    assert set(OPTION.findall(text)) <= parser


def commands_of(parser: argparse.ArgumentParser) -> dict[str, set[str]]:
    """The long options of each command of a parser."""
    (commands,) = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    return {
        name: {o for a in command._actions for o in a.option_strings if o.startswith("--")} - {"--help"}
        for name, command in commands.choices.items()
    }


def test_options_of_benchmarks_are_those_of_the_parsers() -> None:
    """Those of a model stand in one guide, those of the comparisons in the other, by command and with a meaning."""
    (of_model,) = commands_of(bench_cli._parser()).values()
    page = (ROOT / "docs/guide/benchmarks.md").read_text()
    table = page[page.index("| option | what it sets |") : page.index("* **Inputs**")]
    assert set(OPTION.findall(table)) == of_model
    commands = commands_of(make_parser())
    page = (ROOT / "docs/guide/comparisons.md").read_text()
    listed = page[page.index("## Options of every command") :]
    rows = {name: set(OPTION.findall(row)) for name, row in re.findall(r"^\| `([\w-]+)` \|(.*)$", listed, re.MULTILINE)}
    assert {name: rows[name] | (of_model if name == "model" else set()) for name in commands} == commands
    explained = set(OPTION.findall(listed[: listed.index("| command |")]))
    explained |= set(OPTION.findall(listed[listed.index("| option |") :]))
    assert explained - {"--help"} == set().union(*rows.values())


def test_environment_variables_are_those_of_the_sources() -> None:
    documented = set(VARIABLE.findall((ROOT / "docs/reference/environment.md").read_text()))
    read = {name for text in sources().values() for name in READ_VARIABLE.findall(text)}
    internal = {"STOF_CHECK_AUTOREG"}  # of one test's child process
    assert read - documented - internal == set()
    named = {name for text in sources().values() for name in VARIABLE.findall(text)}
    assert documented - named - {"STOF_CUDA"} == set()  # STOF_CUDA is CMake's


def test_instruction_sets_are_those_of_the_list() -> None:
    page = (ROOT / "docs/reference/environment.md").read_text()
    (row,) = re.findall(r"^\| `STOF_CPU_ISA` .*$", page, re.MULTILINE)
    assert re.findall(r"`(\w+)`", row) == ["STOF_CPU_ISA", *CPU_ISAS]


def test_plan_of_the_docs_is_a_plan() -> None:
    text = (ROOT / "docs/reference/plan-format.md").read_text()
    found = plan.parse(text[text.index("```json") + len("```json") : text.index("```\n\n## The file")], PLAN_FORMATS)
    assert plan.parse(found.to_json(), PLAN_FORMATS) == found
    assert [entry.replace for entry in found.entries["sites"]] == [True, False]
    assert found.entries["caches"]
    assert found.entries["chains"]


def test_report_keys_are_those_of_the_docs(narrow: Callable[[str], Path], tmp_path: Path) -> None:
    options = Options(json=tmp_path / "report.json", chains="on")
    stof.optimize(narrow("modernbert.dynamo.sdpa"), tmp_path / "out.onnx", options)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["chains"]
    first = report["verification"]["comparisons"][0]
    rows = tuple(asdict(kind("", None, False, "")) for kind in (CacheReport, MlpReport, UnpadReport))
    predicted = (asdict(PredictionReport("", 0)), MlpSection(spec="p.npz").to_json()["sparse_mlp"])
    bucket = Bucket(0, 1, 1, 0.0, 1.0)
    sparsity = SparsityReport("", [SparsifiedSite("", 0, False)], Loss(1, 1, 0.0, 1.0, (bucket,))).to_json()
    skip = ThresholdReport((SKIP_SCORES,), [ThresholdRow(SKIP_SCORES, "", 0, False)]).to_json(SKIP_SCORES)
    assert skip is not None
    precision = PrecisionReport([PrecisionRow("", 0, "", False)], precision=BF16, max_error=0.01).to_json()
    eight_bits = EightBitReport([EightBitRow("", 0, "", False)]).to_json()
    sparsified = (
        sparsity,
        sparsity["sites"][0],
        sparsity["loss"],
        sparsity["loss"]["buckets"][0],
        skip,
        skip["layers"][0],
    )
    distances = DequantizedAttention([], distances=[OutputDistance("", 1.0, 0.0)]).to_json()
    objects = (
        *sparsified,
        distances,
        distances["distances"][0],
        precision,
        precision["layers"][0],
        eight_bits,
        eight_bits["layers"][0],
        report,
        *rows,
        *predicted,
        report["sites"][0],
        report["chains"][0],
        report["verification"],
        asdict(DecidedDifference("", "", 0, 0, (0.0, 0.0), 0.0, 0.0, 0.0, 0, True, True)),
        asdict(PaddingMove("", "", 0, 0, 0.0, 0.0, 0.0)),
        first,
        first["coverage"],
        asdict(PartialVerification({}, {}, 0, True)),
        report["run"],
        report["memory"],
        report["memory"]["before"],
        report["memory"]["before"]["tensors"][0],
        EarlierMeasurements("", 1, (None,)).to_json(),
    )
    token = ModelTimes("", RunTimes(1.0, 1.0, 1), RunTimes(1.0, 1.0, 1))
    times = replace(token, token=token, padded=token, padded_over_real=1.0).to_json()
    (tmp_path / "folder").mkdir()
    (tmp_path / "out.onnx").rename(tmp_path / "folder" / "out.onnx")
    folder = json.loads(stof.optimize_folder(tmp_path / "folder", tmp_path / "new").to_json())
    timed = (times, times["original"], times["lengths"][0])
    keys = {key for found in (*objects, report["library"], *timed, folder) for key in found}
    tables = re.findall(r"^\| (`.*?) \|", (ROOT / "docs/reference/report-format.md").read_text(), re.MULTILINE)
    assert {key for cell in tables for key in re.findall(r"`(\w+)`", cell)} == keys


def test_every_page_is_in_the_site() -> None:
    """mkdocs.yml names each page of docs/; the site's own build, in `make test-all`, refuses others, too."""
    named = set(re.findall(r"^ *- (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE))
    pages = {p.relative_to(ROOT / "docs").as_posix() for p in (ROOT / "docs").rglob("*.md")}
    missing = sorted(p for p in pages - named if not p.endswith("README.md"))
    assert not missing, f"mkdocs.yml lacks {', '.join(missing)}"
    assert {"guide/quickstart.md", "design/neon.md"} <= named
