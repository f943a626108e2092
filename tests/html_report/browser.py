# SPDX-License-Identifier: Apache-2.0
"""Looks at a page in a headless browser: messages of its console, what overflows, and a screenshot."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome-headless-shell")
_SECONDS = 120
# The page has no script, and its policy allows none: a page around it measures it in a frame of the width asked for.
_AROUND = """<!DOCTYPE html><html><body style="margin:0">
<iframe id="frame" src="{source}" style="width:{width}px;height:2000px;border:0"></iframe>
<pre id="found"></pre>
<script>
addEventListener("load", () => {{
  const page = document.getElementById("frame").contentDocument;
  const width = page.documentElement.clientWidth;
  const scrolls = (e) => e.closest(".scroll") !== null && !e.matches(".scroll");
  const beyond = [...page.querySelectorAll("body *")].filter(
    (e) => !scrolls(e) && (e.getBoundingClientRect().right > width + 1 || e.getBoundingClientRect().left < -1));
  const sizes = [...page.querySelectorAll("main *")]
    .filter((e) => e.childElementCount === 0 && e.textContent.trim() && !(e instanceof page.defaultView.SVGElement))
    .map((e) => parseFloat(page.defaultView.getComputedStyle(e).fontSize));
  document.getElementById("found").textContent = JSON.stringify({{
    width: width, scrollWidth: page.documentElement.scrollWidth, beyond: beyond.map((e) => e.outerHTML.slice(0, 200)),
    smallest: Math.min(...sizes), text: page.body.innerText, scripts: page.scripts.length,
    figures: [...page.querySelectorAll("svg")].filter((e) => e.getBoundingClientRect().width >= 90).length,
  }});
}});
</script></body></html>"""


@dataclass(frozen=True)
class Look:
    """What was seen.

    Attributes:
        console: messages of the console.
        width: of the page's frame.
        scroll_width: of the page's content.
        beyond: elements that reach out of the page, apart from those in boxes that scroll.
        smallest: the size of the smallest font, in pixels.
        text: what is visible.
        scripts: how many there are.
        figures: pictures at least 90 pixels wide.
    """

    console: list[str]
    width: int
    scroll_width: int
    beyond: list[str]
    smallest: float
    text: str
    scripts: int
    figures: int


def find_browser() -> str | None:
    """The command of a browser of Chromium's family; None where there is none."""
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


def _run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    browser = find_browser()
    assert browser is not None
    command = [
        browser,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
        "--allow-file-access-from-files",
        "--enable-logging=stderr",
        f"--user-data-dir={folder / 'profile'}",
        *arguments,
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=True)


def look_at(page: Path, width: int, folder: Path) -> Look:
    """What a reader sees of a page in a window of this width; ``folder`` is for files."""
    around = folder / f"around-{width}.html"
    around.write_text(_AROUND.format(source=html.escape(page.resolve().as_uri()), width=width))
    run = _run(folder, "--virtual-time-budget=5000", "--window-size=1400,2100", "--dump-dom", around.resolve().as_uri())
    match = re.search(r'<pre id="found">(.+?)</pre>', run.stdout, re.DOTALL)
    assert match, f"the page was not measured: {run.stdout[-500:]} {run.stderr[-1000:]}"
    found: dict[str, Any] = json.loads(html.unescape(match[1]))
    console = [line for line in run.stderr.splitlines() if "CONSOLE" in line]
    return Look(
        console,
        found["width"],
        found["scrollWidth"],
        found["beyond"],
        found["smallest"],
        found["text"],
        found["scripts"],
        found["figures"],
    )


def screenshot(page: Path, width: int, height: int, target: Path) -> None:
    """Writes a picture of a page in a window of this size."""
    _run(target.parent, f"--window-size={width},{height}", f"--screenshot={target}", page.resolve().as_uri())


def find_rasterizer() -> str | None:
    """The command that draws pages of a PDF file; None where there is none."""
    return shutil.which("pdftoppm")


def print_page(page: Path, folder: Path) -> list[list[str]]:
    """What a page looks like on paper: for each sheet its rows, each of them blank or not: " " or "#"."""
    target = folder / "printed.pdf"
    _run(folder, "--no-pdf-header-footer", f"--print-to-pdf={target}", page.resolve().as_uri())
    rasterizer = find_rasterizer()
    assert rasterizer is not None
    subprocess.run([rasterizer, "-r", "30", "-gray", str(target), str(folder / "sheet")], check=True, timeout=_SECONDS)
    return [_read_rows(sheet) for sheet in sorted(folder.glob("sheet*.pgm"))]


def _read_rows(picture: Path) -> list[str]:
    """The rows of a picture in gray: whether they are blank."""
    kind, width, height, most, pixels = re.split(rb"\s", picture.read_bytes(), maxsplit=4)
    assert (kind, most) == (b"P5", b"255")
    columns = int(width)
    rows = [pixels[i * columns : (i + 1) * columns] for i in range(int(height))]
    return [" " if min(row) > 250 else "#" for row in rows]
