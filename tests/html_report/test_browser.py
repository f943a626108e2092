# SPDX-License-Identifier: Apache-2.0
"""The page of a report in a headless browser, on a screen and on a phone; skipped where no browser is installed."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from tests.helpers.several_masks import model_with_masks
from tests.html_report.browser import find_browser, find_rasterizer, look_at, print_page, screenshot

import stof
from stof.options import Options

pytestmark = pytest.mark.skipif(find_browser() is None, reason="no browser: apt-get install chromium")
WIDTHS = (1280, 500, 400)
LEAST_FONT = 11.0  # pixels


def several(folder: Path, narrow: Callable[[str], Path]) -> Path:
    path = folder / "several.onnx"
    onnx.save(model_with_masks(), str(path))
    return path


def modernbert(folder: Path, narrow: Callable[[str], Path]) -> Path:
    return narrow("modernbert.dynamo.sdpa")


def hostile(folder: Path, narrow: Callable[[str], Path]) -> Path:
    model = model_with_masks("causal", "window")
    names = ("<script>document.title='x'</script><img src=x onerror=alert(1)>", "x" * 300 + "\u202e\x1b[31m</table>")
    for node, name in zip((n for n in model.graph.node if n.op_type == "Softmax"), names, strict=True):
        node.name = name
    path = folder / "hostile.onnx"
    onnx.save(model, str(path))
    return path


MODELS: dict[str, Callable[[Path, Callable[[str], Path]], Path]] = {
    "several": several,
    "modernbert": modernbert,
    "hostile": hostile,
}


def is_blank(png: Path) -> bool:
    """Whether all pixels of a PNG file of 8 bits a channel are one color."""
    data = png.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    offset, body, width = 8, b"", 0
    while offset < len(data):
        (length,) = struct.unpack(">I", data[offset : offset + 4])
        kind, content = data[offset + 4 : offset + 8], data[offset + 8 : offset + 8 + length]
        if kind == b"IHDR":
            width = struct.unpack(">I", content[:4])[0]
            channels = {2: 3, 6: 4}[content[9]]
        body += content if kind == b"IDAT" else b""
        offset += 12 + length
    rows = zlib.decompress(body)
    step = 1 + width * channels
    # Filtered rows of one color differ from zero in the first row and pixel alone.
    return not any(any(rows[i + 1 + channels : i + step]) for i in range(0, len(rows), step))


@pytest.mark.parametrize("name", MODELS)
def test_page_in_a_browser(name: str, tmp_path: Path, narrow: Callable[[str], Path]) -> None:
    page = tmp_path / "report.html"
    options = Options(report=page, verify_budget=5.0)
    report = stof.optimize(MODELS[name](tmp_path, narrow), tmp_path / "out.onnx", options)
    for width in WIDTHS:
        look = look_at(page, width, tmp_path)
        assert not look.console, look.console
        assert look.width == width
        assert look.scroll_width <= width, look.beyond
        assert not look.beyond
        assert look.smallest >= LEAST_FONT
        assert look.scripts == 0
        assert look.figures >= len({s.mask for s in report.sites if s.replaced})
        assert f"{report.replaced} of" in look.text
        assert "passed" in look.text
        picture = tmp_path / f"{width}.png"
        screenshot(page, width, 900, picture)
        assert not is_blank(picture)
    if name == "hostile":
        assert "<script>document.title='x'</script><img src=x onerror=alert(1)>" in look.text
        assert r"\u202e\x1b[31m</table>" in look.text


def test_faults_of_a_page_are_seen(tmp_path: Path) -> None:
    page = tmp_path / "wrong.html"
    policy = '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'">'
    page.write_text(
        f"<!DOCTYPE html><html><head>{policy}</head><body><main><p style='width:600px'>wide</p>"
        "<img src='https://example.invalid/x.png'></main></body></html>"
    )
    look = look_at(page, 400, tmp_path)
    assert look.console
    blank = tmp_path / "blank.html"
    blank.write_text("<!DOCTYPE html><html><body></body></html>")
    screenshot(blank, 400, 300, tmp_path / "blank.png")
    assert is_blank(tmp_path / "blank.png")


def test_what_overflows_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "wide.html"
    page.write_text(
        "<!DOCTYPE html><html><body><main><p style='width:600px;font-size:5px'>wide</p></main></body></html>"
    )
    look = look_at(page, 400, tmp_path)
    assert look.scroll_width > 400
    assert look.beyond
    assert look.smallest == 5.0


@pytest.mark.skipif(find_rasterizer() is None, reason="no pdftoppm: apt-get install poppler-utils")
@pytest.mark.parametrize("name", ["modernbert", "folder"])
def test_printed_pages_are_not_half_empty(name: str, tmp_path: Path, narrow: Callable[[str], Path]) -> None:
    """Boxes that must not break move to the next sheet, and leave the rest of a sheet blank."""
    page = tmp_path / "report.html"
    options = Options(report=page, verify_budget=5.0)
    if name == "folder":
        folder = tmp_path / "models"
        folder.mkdir()
        onnx.save(model_with_masks(), str(folder / "several.onnx"))
        narrow("modernbert.dynamo.sdpa").rename(folder / "model.onnx")
        stof.optimize_folder(folder, tmp_path / "out", options)
    else:
        stof.optimize(narrow("modernbert.dynamo.sdpa"), tmp_path / "out.onnx", options)
    sheets = print_page(page, tmp_path)
    assert len(sheets) > 1
    for i, rows in enumerate(sheets[:-1]):
        last = max(n for n, row in enumerate(rows) if row == "#")
        assert last > 0.55 * len(rows), f"sheet {i + 1} of {len(sheets)} ends at {last} of {len(rows)}"
