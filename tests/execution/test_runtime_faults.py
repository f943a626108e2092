# SPDX-License-Identifier: Apache-2.0
"""A fault of some versions of ONNX Runtime is worked around in these versions, and nowhere else.

A fault of one version was assumed for all: `com.microsoft::Attention` without a bias was refused where it runs.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from stof.execution import runtime_faults
from stof.execution.runtime_faults import RuntimeFault

ROOT = Path(__file__).resolve().parents[2]
VERSIONS = ((1, 18), (1, 19), (1, 20), (1, 22), (1, 31), (1, 32), (2, 0))
EXPECTED = {
    RuntimeFault.ATTENTION_FUSION_ABORTS: (True, False, False, False, False, False, False),
    RuntimeFault.NO_DATA_FOLDER: (True, True, True, False, False, False, False),
    RuntimeFault.SEVERAL_TOKENS_BEHIND_A_PAST: (True, True, False, False, False, False, False),
    # No version is known that has none of these.
    RuntimeFault.SEVERAL_TOKENS_OF_A_BATCH: (True,) * 7,
    RuntimeFault.PADDED_SLIDING_PROMPTS: (True,) * 7,
    RuntimeFault.HEAD_NORMS: (True,) * 7,
    RuntimeFault.NO_PAGED_ATTENTION: (True,) * 7,
    RuntimeFault.NO_ATTENTION_WINDOWS: (True, True, True, True, True, False, False),
    RuntimeFault.SHORT_SPARSE_SEQUENCES: (True,) * 7,
}


@pytest.mark.parametrize("fault", RuntimeFault)
def test_the_installed_version_decides(fault: RuntimeFault, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for version in VERSIONS:
        monkeypatch.setattr(runtime_faults, "runtime_version", lambda version=version: version)
        found.append(fault.is_present())
    assert tuple(found) == EXPECTED[fault]


def test_the_page_lists_each_fault_with_its_versions() -> None:
    page = (ROOT / "docs/reference/support-matrix.md").read_text()
    rows = re.findall(r"^\| (.*) \| ((?:before|up to) [^|]*) \|$", page, re.MULTILINE)
    assert rows == [(f.value.what, f.value.versions) for f in RuntimeFault]


def test_no_other_module_asks_for_versions() -> None:
    """Numbers of versions stand in one place; a comparison elsewhere would be a workaround that nobody finds."""
    for path in (ROOT / "optimizer/stof").rglob("*.py"):
        if path.name not in ("runtime_faults.py", "session_process.py"):
            assert "runtime_version()" not in path.read_text(), path
