# SPDX-License-Identifier: Apache-2.0
"""The text of a run that replaced nothing names what was found: MLPs, caches, chains, attention, or nothing at all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import onnx
import pytest
from mlp_models import MlpForm, make_mlp_model

import stof
from stof.attention.report import SiteReport, SiteSection
from stof.cached_attention.report import CacheReport, CacheSection
from stof.fusion.report import ChainReport, ChainSection
from stof.html_report import to_html
from stof.options import Options
from stof.report import Report, Section
from stof.sparse_mlp.report import MlpReport, MlpSection

NOTHING = "the graph has no Softmax node"
MLPS = [MlpReport(f"mlp{i}", i, False, "too small") for i in range(2)]
CACHES = [CacheReport("cache", 0, False, "no kernel")]
CHAINS = [ChainReport(f"chain{i}", "Add Mul", False, f"reason {i}") for i in range(3)]
SITES = [SiteReport("site", False, "a bias")]


def report_of(*found: Section) -> Report:
    sections = {"caches": CacheSection(), "sites": SiteSection(), "mlps": MlpSection(), "chains": ChainSection()}
    given = {s.names.kind: s for s in found}
    return Report("m.onnx", sections={key: given.get(s.names.kind, s) for key, s in sections.items()})


@pytest.mark.parametrize(
    ("found", "words"),
    [
        # The case that was wrong: a model whose only candidates are MLPs was told that it has no Softmax.
        ([MlpSection(MLPS)], "0 of 2 MLPs are replaced (too small)"),
        ([CacheSection(CACHES)], "0 of 1 attentions over a KV cache are replaced (no kernel)"),
        ([ChainSection(CHAINS)], "0 of 3 chains are replaced"),
        ([SiteSection(SITES)], "no attention site is replaced"),
        (
            [SiteSection(SITES), MlpSection(MLPS)],
            "no attention site is replaced, 0 of 2 MLPs are replaced (too small)",
        ),
    ],
    ids=["MLPs", "caches", "chains", "sites", "both"],
)
def test_sections_with_candidates_say_it(found: list[Section], words: str) -> None:
    report = report_of(*found)
    for text in (report.to_text(), replace(report, copied=True).to_text()):
        assert f"nothing to do: {words}; " in text
        assert NOTHING not in text
    assert report.summary() == f"nothing to do: {words}"
    assert f"Nothing to do: {words}; no file was written" in to_html(report)


def test_nothing_at_all_says_what_was_looked_for() -> None:
    text = report_of().to_text()
    assert f"nothing to do: {NOTHING}, " in text
    assert "no MLP whose activation gives zeros; no file was written" in text


def test_a_model_of_mlps_alone(tmp_path: Path) -> None:
    """Both stay, each with its reason, and the last line speaks of MLPs."""
    onnx.save(make_mlp_model(MlpForm(), layers=2), str(tmp_path / "m.onnx"))
    text = stof.optimize(tmp_path / "m.onnx").to_text()
    assert "0 of 2 MLPs with zeros replaced" in text
    assert text.count("  kept  ") == 2
    assert "nothing to do: 0 of 2 MLPs are replaced" in text
    assert NOTHING not in text


@pytest.mark.usefixtures("small_mlps_gain")
def test_a_model_of_mlps_that_was_optimized_before(tmp_path: Path) -> None:
    onnx.save(make_mlp_model(MlpForm(), layers=2), str(tmp_path / "m.onnx"))
    stof.optimize(tmp_path / "m.onnx", tmp_path / "once.onnx", Options(verify=False))
    report = stof.optimize(tmp_path / "once.onnx")
    assert report.summary() == (
        "nothing to do: the model was optimized before (it has 2 StofSparseMLP); give the one that it was made from"
    )


def test_a_graph_of_other_nodes(tmp_path: Path) -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (float[N] x) => (float[N] y) { y = Abs (x) }'
    )
    onnx.save(model, str(tmp_path / "m.onnx"))
    assert NOTHING in stof.optimize(tmp_path / "m.onnx").summary()
