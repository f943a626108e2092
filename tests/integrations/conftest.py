# SPDX-License-Identifier: Apache-2.0
"""Tests of other tools with optimized models. They run where these are installed.

The part "integrations" of tools/test.sh fails without them.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

TOOLS = ("fastembed", "olive", "optimum", "ray", "sentence_transformers")
MISSING = [name for name in TOOLS if importlib.util.find_spec(name) is None]
HAS_NODE = shutil.which("npm") is not None and shutil.which("node") is not None
collect_ignore_glob = ["test_*.py"] if MISSING else [] if HAS_NODE else ["test_node.py"]
ROOT = Path(__file__).resolve().parents[2]
if not MISSING:
    sys.path += [str(Path(__file__).parent), str(ROOT / "tests/texts"), str(ROOT / "examples")]
    # Tools that report their use over the network do not do so in tests.
    os.environ |= {"OLIVE_DISABLE_TELEMETRY": "1", "RAY_USAGE_STATS_ENABLED": "0", "HF_HUB_OFFLINE": "1"}


def pytest_report_header() -> str:
    """A line where tests of this folder are left out."""
    if MISSING:
        return f"tests/integrations: left out, {MISSING[0]} is not installed; tools/test.sh runs them (make test-all)"
    return "" if HAS_NODE else "tests/integrations: test_node.py is left out, npm is not installed"


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Checkpoints ``minilm`` and ``reranker``; ``features`` and ``classifier``, exported of them; ``fast-...``, optimized."""
    from tool_folders import make_folders

    folder = tmp_path_factory.mktemp("tools")
    make_folders(folder)
    yield folder
    shutil.rmtree(folder)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Warnings of other tools are no failures of these tests."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.filterwarnings("ignore"))
