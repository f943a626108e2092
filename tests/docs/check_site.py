# SPDX-License-Identifier: Apache-2.0
"""Checks build/site: links, anchors and pictures are there, nothing is loaded from elsewhere, the search finds words.

``python tests/docs/check_site.py``, after ``make docs``, which fails by itself where a Markdown link leads nowhere.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parents[2]
LOADED = {("script", "src"), ("img", "src"), ("link", "href"), ("iframe", "src"), ("source", "src")}
LEFT_OVERS = ("](", "\\|", "<!--", "```")  # Markdown that was not understood
LEAST_PAGES = 60


class PageReader(HTMLParser):
    """Reads a page.

    Attributes:
        ids: names of anchors.
        links: with the tag and attribute that have them.
        words: the text outside of code.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[tuple[str, str, str]] = []
        self.words: list[str] = []
        self._inside: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attributes}
        self.ids |= {values[name] for name in ("id", "name") if name in values}
        if values.get("rel") in ("canonical", "next", "prev"):
            return
        self.links += [(tag, name, values[name]) for name in ("href", "src") if name in values]
        if tag in ("code", "pre", "script", "style"):
            self._inside.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if self._inside and self._inside[-1] == tag:
            self._inside.pop()

    def handle_data(self, data: str) -> None:
        if not self._inside:
            self.words.append(data)


def find_faults(site: Path) -> Iterator[str]:
    """What is wrong with the pages of a site, a line each."""
    pages = {path: PageReader(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    for path, page in pages.items():
        name = path.relative_to(site).as_posix()
        if name == "404.html":  # its links begin at the root of a server
            continue
        for tag, attribute, link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                if (tag, attribute) in LOADED:
                    yield f"{name} loads {link} from another server"
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file():
                yield f"{name} links to {link}, which is not there"
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].ids:
                yield f"{name} links to {link}, which has no such anchor"
        text = " ".join(page.words)
        yield from (f"{name} shows {mark!r}" for mark in LEFT_OVERS if mark in text)


def check_search(site: Path) -> None:
    """The index has the text of pages, and none of sources."""
    documents = json.loads((site / "search/search_index.json").read_text(encoding="utf-8"))["docs"]
    where = {d["location"].partition("#")[0] for d in documents}
    assert any("stof-optimize" in d["text"] for d in documents)
    assert {"", "guide/options/", "reference/operators/", "design/architecture/"} <= where
    assert not any(place.startswith("source/") for place in where)


def check_the_check(folder: Path) -> None:
    """Each kind of fault is found."""
    folder.mkdir(parents=True, exist_ok=True)
    page = (
        '<a id="here"></a><a href="#here"></a><a href="#gone"></a><a href="gone/"></a><img src="http://x/y"><p>a](b</p>'
    )
    (folder / "index.html").write_text(page, encoding="utf-8")
    assert len(list(find_faults(folder))) == 4, list(find_faults(folder))


def main() -> int:
    """Prints what is wrong."""
    site = ROOT / "build/site"
    check_the_check(ROOT / "build/site-check")
    pages = list(site.rglob("index.html"))
    assert len(pages) >= LEAST_PAGES, f"{site} has {len(pages)} pages, expected at least {LEAST_PAGES}: run make docs"
    faults = list(find_faults(site))
    check_search(site)
    print("\n".join(faults) or f"{len(pages)} pages: all links, anchors and pictures are there")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
