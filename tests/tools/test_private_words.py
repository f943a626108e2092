# SPDX-License-Identifier: Apache-2.0
"""Sources and docs use the field's terms: no line matches an expression of tools/private_words.txt."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIST = "tools/private_words.txt"
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
SEARCHED = ("bench", "optimizer", "cuda", "cpu", "plugins", "tests", "tools", ":(glob)models/*.py", "docs", *PAGES)
LEFT_OUT = (LIST, "docs/results/")
GLOSSARY = "docs/design/architecture.md"
QUOTED = re.compile(r'"[^"]*"|“[^”]*”')


@dataclass(frozen=True)
class PrivateWord:
    """An expression of the list, what to write instead, and a line that it matches."""

    pattern: re.Pattern[str]
    instead: str
    sample: str


def read_list(text: str) -> list[PrivateWord]:
    found = []
    notes: list[str] = []
    for line in text.splitlines():
        if line.startswith("#"):
            notes.append(line)
        elif line:
            instead = [n.removeprefix("# write: ") for n in notes if n.startswith("# write: ")]
            samples = [n.removeprefix("# e.g. ") for n in notes if n.startswith("# e.g. ")]
            assert len(instead) == len(samples) == 1, f"{LIST}: {line} needs one '# write:' and one '# e.g.' above it"
            found.append(PrivateWord(re.compile(line, re.IGNORECASE), instead[0], samples[0]))
            notes = []
    return found


WORDS = read_list((ROOT / LIST).read_text())


def hits(name: str, text: str) -> Iterator[str]:
    """A message for each expression that a line matches. The glossary may quote a private word to explain it."""
    in_glossary = False
    for number, line in enumerate(text.split("\n"), 1):
        if name == GLOSSARY and line.startswith("## "):
            in_glossary = line == "## Glossary"
        searched = QUOTED.sub("", line) if in_glossary else line
        for word in WORDS:
            if word.pattern.search(searched):
                yield f"{name}:{number}: matches {word.pattern.pattern}, write: {word.instead}"


def texts() -> Iterator[tuple[str, str]]:
    """The name and text of each tracked file that is text."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--", *SEARCHED]
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in names:
        if not name or name.startswith(LEFT_OUT) or not (ROOT / name).is_file():
            continue
        data = (ROOT / name).read_bytes()
        if b"\0" not in data:
            yield name, data.decode("utf-8", "replace")


def test_no_private_words() -> None:
    searched = dict(texts())
    assert len(searched) > 500
    found = [hit for name, text in searched.items() for hit in hits(name, text)]
    assert not found, "private words:\n" + "\n".join(found)


@pytest.mark.parametrize("word", WORDS, ids=lambda word: word.pattern.pattern)
def test_a_sample_is_found(word: PrivateWord) -> None:
    found = list(hits("cuda/sample.h", f"\n{word.sample}\n"))
    assert f"cuda/sample.h:2: matches {word.pattern.pattern}, write: {word.instead}" in found


def test_quotations_in_the_glossary_are_left_out() -> None:
    sample = next(w.sample for w in WORDS if len(list(hits("", w.sample))) == 1)
    page = f'{sample}\n## Glossary\n| LPT | "{sample}" |\n| LPT | {sample} |\n## Pages\n"{sample}"'
    assert [int(hit.split(":")[1]) for hit in hits(GLOSSARY, page)] == [1, 4, 6]
