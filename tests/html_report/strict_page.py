# SPDX-License-Identifier: Apache-2.0
"""Reads pages that are strict HTML without network and scripts, and makes reports for them."""

from __future__ import annotations

import html.parser
import re
from pathlib import Path
from typing import Any

import onnx
from tests.helpers.several_masks import model_with_masks

from stof.attention.report import SiteReport, Step
from stof.report import Report, Section

_VOID = {"meta", "br", "img", "link", "input", "hr"}
_KNOWN = {
    "html", "head", "meta", "title", "style", "body", "main", "h1", "h2", "h3", "p", "div", "span", "b", "i", "code", "ul",
    "li", "figure", "figcaption", "svg", "rect", "path", "table", "thead", "tbody", "tr", "th", "td", "details", "summary",
    "dl", "dt", "dd", "section", "a",
}  # fmt: skip


class StrictParser(html.parser.HTMLParser):
    """Takes pages whose tags are balanced, known and free of scripts and addresses."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.words: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in _KNOWN, f"unexpected element {tag}"
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names))
        for name, value in attrs:
            assert not name.startswith("on"), f"{tag} has a handler {name}"
            assert name not in ("src", "srcset", "action", "xlink:href"), f"{tag} has an address {value}"
            if name == "href":  # within the page
                assert tag == "a"
                assert re.fullmatch(r"#model-\d+", value or ""), f"an address: {value}"
        self.tags.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert "svg" in self.open, f"<{tag}/> closes itself in SVG only"
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> without its start"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.words.append(data)

    def handle_comment(self, data: str) -> None:
        raise AssertionError(f"a comment: {data}")


def parse(page: str) -> StrictParser:
    """The page, which has to be strict."""
    assert page.startswith("<!DOCTYPE html>\n")
    assert all(address not in page for address in ("http:", "https:", "url(", "@import", "javascript:"))
    parser = StrictParser()
    parser.feed(page)
    parser.close()
    assert not parser.open
    return parser


def text_of(page: str) -> str:
    return " ".join(" ".join(parse(page).words).split())


def site(name: str = "s", **changes: Any) -> SiteReport:
    facts: dict[str, Any] = {
        "form": "BHSD", "mask": "k <= q", "family": "causal", "heads": "4 heads", "head_size": 8, "kernel": "cpu",
        "empty_rows": "zero", "tile_density": 0.53, "predicted_gain": 7.9, "index": 0, "step": Step.DONE, "length": 2048,
    }  # fmt: skip
    return SiteReport(name, True, "replaced", **{**facts, **changes})


def report_of(*sections: Section, **facts: Any) -> Report:
    return Report("model.onnx", sections={str(i): s for i, s in enumerate(sections)}, **facts)


def write_model(folder: Path, *kinds: str) -> Path:
    path = folder / "model.onnx"
    onnx.save(model_with_masks(*kinds), str(path))
    return path
