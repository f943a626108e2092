# SPDX-License-Identifier: Apache-2.0
"""The report of a folder says why padding stays in its models, as that of a single model does."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest
from encoders import encoder

from stof import cli


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model of which all can be unpadded, and one that gives a row for each token."""
    found = tmp_path / "models"
    (found / "onnx").mkdir(parents=True)
    onnx.save(encoder("mean"), found / "pooled.onnx")
    onnx.save(encoder("all"), found / "onnx" / "model.onnx")
    return found


REASON = "padding of attention_mask stays: output 'all' has a row for every position"


@pytest.mark.parametrize("dry_run", [False, True])
def test_why_padding_stays(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], dry_run: bool) -> None:
    page, data = tmp_path / "report.html", tmp_path / "report.json"
    options = ["--chains", "off", "--no-verify", "--report", str(page), "--json", str(data)]
    options += ["--dry-run"] if dry_run else ["-o", str(tmp_path / "out")]
    assert cli.main([str(folder), *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("onnx/model.onnx: "))
    assert lines[first + 1] == f"  {REASON}"
    assert sum("padding of" in line for line in lines) == 1
    html = page.read_text()
    index = html[: html.index('id="model-0"')]
    assert index.count(REASON.replace("'", "&#x27;")) == 1
    files = json.loads(data.read_text())["files"]
    assert files["onnx/model.onnx"]["unpadding"][0]["reason"] == REASON.partition("stays: ")[2]
    assert files["pooled.onnx"]["unpadding"][0]["replaced"]


def test_nothing_stays_where_it_may_become_zero(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([str(folder), "-o", str(tmp_path / "out"), "--unpad", "on", "--no-verify"]) == 0
    assert "padding of" not in capsys.readouterr().out
