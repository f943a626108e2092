# SPDX-License-Identifier: Apache-2.0
"""Hooks of mkdocs: pages from files outside of docs/, and links between files as links between pages.

The repository's Markdown files link each other, source files and folders, as they lie. On the site a source file is a page with
its text, and a folder the list of its pages: every link leads somewhere, and no link leaves the site for the repository.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
# Files outside of docs/ that are pages, by path in the repository.
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "examples/README.md": "examples/index.md",
    "examples/quickstart.ipynb": "examples/quickstart.md",
    "models/README.md": "models/index.md",
    "tests/README.md": "tests/index.md",
}
SECTIONS = {
    "guide": ("Guide", "How do I …?"),
    "reference": ("Reference", "What is promised: formats, operators, interfaces, support."),
    "design": ("Design", "How it works, and why."),
    "lab": ("Lab", "What was tried."),
}
_RESULTS = "results"  # the folder of data in docs/
_LANGUAGES = {".py": "python", ".h": "cpp", ".cc": "cpp", ".cu": "cpp", ".sh": "bash", ".json": "json"}
_LINK = re.compile(r"(!?\[(?:[^\[\]`]|`[^`]*`|\[[^\]]*\])*\])\(([^()\s]+)\)")
_CODE = re.compile(r"`[^`]+`")
_FENCE = re.compile(r"^\s*```")
_CSS = Path(__file__).with_name("site.css")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that no file of docs/ is."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=_read_markdown(source)))
    for folder in SECTIONS:
        files.append(File.generated(config, f"{folder}/index.md", content=_list_pages(folder)))
    files.append(File.generated(config, f"{_RESULTS}/index.md", content=_list_results()))
    files.append(File.generated(config, "assets/site.css", content=_CSS.read_text(encoding="utf-8")))
    linked = {t for page in _sources() for t in _targets(page) if (ROOT / t).is_file() and _page_of(t) is None}
    for target in sorted(t for t in linked if not t.startswith("docs/")):
        files.append(File.generated(config, f"source/{target}.md", content=_show_source(target)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Makes links between files links between pages."""
    if page.is_homepage:
        page.meta["hide"] = ["navigation"]  # it has no other page beside it
    path = _path_of(page.file.src_uri)
    if path is None:
        return markdown

    def replace(found: re.Match[str]) -> str:
        return f"{found[1]}({_site_link(path, found[2], page.file.src_uri)})"

    def convert(line: str) -> str:
        if line.startswith("|"):  # GitHub wants a backslash before a bar in code of a table; here it would be shown
            line = _CODE.sub(lambda code: code[0].replace("\\|", "|"), line)
        return _LINK.sub(replace, line)

    return "".join(convert(line) if is_text else line for line, is_text in _lines(markdown))


def _sources() -> list[str]:
    """Every Markdown file that is a page."""
    return [*PAGES, *(p.relative_to(ROOT).as_posix() for p in sorted((ROOT / "docs").rglob("*.md")))]


def _read_markdown(path: str) -> str:
    """A page as Markdown; of a notebook its cells one after the other."""
    text = (ROOT / path).read_text(encoding="utf-8")
    if not path.endswith(".ipynb"):
        return text
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(text)["cells"]]
    return "\n\n".join(f"```python\n{words}\n```" if kind == "code" else words for kind, words in cells) + "\n"


def _lines(markdown: str) -> Iterator[tuple[str, bool]]:
    """The lines of a page, and whether each is text rather than code."""
    is_code = False
    for line in markdown.splitlines(keepends=True):
        is_fence = bool(_FENCE.match(line))
        yield line, not is_code and not is_fence
        is_code ^= is_fence


def _targets(path: str) -> Iterator[str]:
    """What a file links to, as paths in the repository."""
    for line, is_text in _lines(_read_markdown(path)):
        for found in _LINK.finditer(line) if is_text else ():
            if not _is_outside(found[2]):
                yield _resolve(path, found[2].partition("#")[0])


def _is_outside(link: str) -> bool:
    return "://" in link or link.startswith(("#", "mailto:"))


def _resolve(path: str, link: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), link)) if link else path


def _path_of(page: str) -> str | None:
    """The file in the repository that a page is; None for lists and sources."""
    for source, name in PAGES.items():
        if name == page:
            return source
    return f"docs/{page}" if (ROOT / "docs" / page).is_file() else None


def _page_of(path: str) -> str | None:
    """The file of the site that a file or folder of the repository is; None where it is none yet."""
    if path in PAGES:
        return PAGES[path]
    inner = path.removeprefix("docs/")
    if path.startswith("docs/") and (ROOT / path).is_file():
        return inner
    return f"{inner}/index.md" if path.startswith("docs/") and inner in (*SECTIONS, _RESULTS) else None


def _site_link(path: str, link: str, page: str) -> str:
    if _is_outside(link):
        return link
    name, sign, anchor = link.partition("#")
    target = _resolve(path, name)
    found = _page_of(target) or (f"source/{target}.md" if (ROOT / target).is_file() else target)
    return f"{posixpath.relpath(found, posixpath.dirname(page) or '.')}{sign}{anchor}"


def _title(path: Path) -> str:
    found = re.search(r"^# (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    if found is None:
        raise ValueError(f"{path} has no title: its first line should be '# Title'")
    return found[1]


def _list_pages(folder: str) -> str:
    title, words = SECTIONS[folder]
    pages = sorted((ROOT / "docs" / folder).glob("*.md"), key=_title)
    return "\n".join([f"# {title}", "", words, "", *(f"* [{_title(p)}]({p.name})" for p in pages), ""])


def _list_results() -> str:
    folder = ROOT / "docs" / _RESULTS
    names = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*.json"))
    return "\n".join(["# Results", "", "Records of measurements, as JSON.", "", *(f"* [{n}]({n})" for n in names), ""])


def _show_source(path: str) -> str:
    """A page with a file's text, which the search leaves out."""
    text = (ROOT / path).read_text(encoding="utf-8")
    mark = "`" * max(3, 1 + max((len(m) for m in re.findall(r"`+", text)), default=0))
    language = _LANGUAGES.get(Path(path).suffix, "text")
    return f"---\nsearch:\n  exclude: true\n---\n# {path}\n\n{mark}{language}\n{text.rstrip()}\n{mark}\n"
