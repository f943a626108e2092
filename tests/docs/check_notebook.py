# SPDX-License-Identifier: Apache-2.0
"""Runs examples/quickstart.ipynb in a kernel of this Python: each cell ends, and prints what the text around it says.

``python tests/docs/check_notebook.py`` needs a built library, nbclient and ipykernel.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "examples/quickstart.ipynb"
SECONDS = 300  # of a cell


def check_stored(notebook: nbformat.NotebookNode) -> None:
    """The committed file has no outputs, and its links lead to files."""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert not cell.outputs, "the committed notebook has outputs; strip them"
            assert cell.execution_count is None
        else:
            for link in re.findall(r"\]\(([^)#:]+)\)", cell.source):
                assert (NOTEBOOK.parent / link).exists(), f"the notebook links to {link}, which is not there"


def main() -> int:
    """Prints what the cells print."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    check_stored(notebook)
    place = {"metadata": {"path": str(NOTEBOOK.parent)}}
    NotebookClient(
        notebook, timeout=SECONDS, kernel_name="python3", resources=place
    ).execute()  # an error of a cell is raised
    text = "".join(o.get("text", "") for c in notebook.cells if c.cell_type == "code" for o in c.outputs)
    print(text)
    assert re.search(r"verified: \d+ sites against fp64", text)
    assert "window(" in text
    assert re.search(r"^[1-9]\d* replaced; nodes: \d+ -> \d+$", text, re.MULTILINE)
    assert len(re.findall(r"largest difference .* of the largest value", text)) >= 1
    gain = re.search(r"ms, (\d+\.\d+)x", text)
    assert gain, "no time was printed"
    assert float(gain[1]) > 1.2, f"the notebook shows a gain of {gain[1]}, expected more"
    return 0


if __name__ == "__main__":
    sys.exit(main())
