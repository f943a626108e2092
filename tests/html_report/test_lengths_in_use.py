# SPDX-License-Identifier: Apache-2.0
"""Reports name lengths in use alone."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from tests.command.test_cli import ATTENTION, WINDOW, text

import stof


@pytest.mark.parametrize(
    ("shape", "length"), [((128, 512), 512), ((4000, 9000), 4000), ((1, 9000), 2048), ((300, 300), 300)]
)
def test_estimates_are_given_at_a_length_in_use(shape: tuple[int, int], length: int, tmp_path: Path) -> None:
    """An estimate at S = 2048 of a model that is used up to 512 names a length that no input has."""
    path = tmp_path / "model.onnx"
    onnx.save(text(WINDOW + ATTENTION), str(path))
    report = stof.optimize(path, options=stof.Options(dry_run=True, shapes={"S": shape}))
    assert [row.length for row in report.sites] == [length]
    assert f" at S = {length}\n" in report.to_text()
