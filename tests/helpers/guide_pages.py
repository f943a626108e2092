# SPDX-License-Identifier: Apache-2.0
"""Runs the fenced blocks of a Markdown page in the order of the page, and compares what they print with what it states.

Blocks of Python run, and so do blocks without a language whose first word is a command of stof. Another one that follows
at once is what the one before printed. Comments of HTML, which no reader of the rendered page sees, say what differs:

========================================  ====================================================================================
``<!-- not run: REASON -->``              the next block is no command, or cannot run in a test; what can be checked of it, is
``<!-- run: tune=1 status=2 -->``         ``--tune`` measures for 1 s; the command ends with status 2
``<!-- output -->``                       the next block is what the last block printed
``<!-- output of: COMMAND -->``           the next block is what this command prints; ``; status=2`` may follow
``<!-- output ...; numbers vary -->``     as above, and other numbers and instruction sets may stand in their places
========================================  ====================================================================================

In a stated line ``...`` and ``…`` stand for anything. Lines are found in their order; there may be others between them.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib.util
import io
import json
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.helpers.cpu_isas import CPU_ISAS

import stof.bench.cli
import stof.cli
import stof.tensorrt.cli
from bench.options import make_parser

ROOT = Path(__file__).resolve().parents[2]
COMMANDS: dict[str, tuple[Callable[[Sequence[str]], int], Callable[[], argparse.ArgumentParser]]] = {
    "stof-optimize": (stof.cli.main, stof.cli._parser),
    "stof-bench": (stof.bench.cli.main, stof.bench.cli._parser),
    "stof-trt": (stof.tensorrt.cli.main, stof.tensorrt.cli._parser),
}
_FENCE = re.compile(
    r"(?P<note>(?:^<!-- .*? -->\n)*)^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
_NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[-+]\d+)?")
_ISA = re.compile("|".join(sorted(CPU_ISAS, key=len, reverse=True)))
_ANYTHING = re.compile(r"\.\.\.|…")


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        place: the page and the line.
        language: behind the fence; empty for commands and what is printed.
        text: what it holds.
        note: what the comment before it says.
        follows: whether the block before it ends on the line above.
    """

    place: str
    language: str
    text: str
    note: str
    follows: bool

    @property
    def reason(self) -> str:
        """Why it is not run; empty where it is."""
        return self.note.removeprefix("not run: ") if self.note.startswith("not run: ") else ""

    @property
    def is_output(self) -> bool:
        """Whether it is what something printed."""
        is_command = self.text.split(maxsplit=1)[0] in COMMANDS
        follows = self.follows and not self.note and not is_command
        return not self.language and (self.note.startswith("output") or follows)

    def setting(self, name: str, default: str) -> str:
        """A value of the note."""
        found = re.search(rf"(?:^run: |\s|; ){name}=(\S+?)(?=;|\s|$)", self.note)
        return found[1] if found else default

    def lines(self) -> list[str]:
        """Its commands, without comments; those that go on in the next line are joined."""
        return [line for line in self.text.replace("\\\n", " ").splitlines() if line.split("#")[0].strip()]


def read_blocks(page: Path) -> list[Block]:
    """The blocks of a page in their order."""
    text, blocks, end = page.read_text(), [], -2
    for found in _FENCE.finditer(text):
        line = text.count("\n", 0, found.start("language")) + 1
        note = " ".join(re.findall(r"<!-- (.*?) -->", found["note"]))
        place = f"{page.relative_to(ROOT)}:{line}"
        blocks.append(Block(place, found["language"], found["text"], note, found.start() == end + 1))
        end = found.end()
    return blocks


@dataclass
class PageRun:
    """A page while it runs, in the current folder.

    Attributes:
        names: what Python blocks define; they share it.
        printed: what the last block printed.
        ran: places of blocks that ran.
        compared: places of blocks that were compared.
        left: the reasons by the places of blocks that did not run.
    """

    names: dict[str, Any] = field(default_factory=dict)
    printed: str = ""
    is_python: bool = False
    ran: list[str] = field(default_factory=list)
    compared: list[str] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)

    def take(self, block: Block) -> None:
        """Runs, compares or checks a block.

        Raises:
            AssertionError: with the place of what is wrong.
        """
        if block.reason:
            check_unrun(block)
            self.left[block.place] = block.reason
        elif block.is_output:
            self._compare(block)
        elif block.language == "python":
            self.printed, self.is_python = _printed(lambda: exec(_compiled(block), self.names), with_errors=False), True
            self.ran.append(block.place)
        else:
            self.printed, self.is_python = "".join(_run_command(line, block) for line in block.lines()), False
            self.ran.append(block.place)

    def _compare(self, block: Block) -> None:
        command = re.match(r"output of: (.*?)(?:; status=\d+|; numbers vary)*$", block.note)
        if command:
            self.printed, self.is_python = _run_command(command[1], block), False
        if self.is_python and not block.note and not _ANYTHING.search(block.text):
            assert self.printed == block.text, f"{block.place} states\n{block.text}\nprinted is\n{self.printed}"
        else:
            compare_lines(block.text, self.printed, vary=block.note.endswith("numbers vary"), place=block.place)
        self.compared.append(block.place)


def compare_lines(stated: str, printed: str, *, vary: bool, place: str) -> None:
    """Finds each stated line in its order in what was printed, whatever the spaces and line breaks.

    Raises:
        AssertionError: with the first line that is not there.
    """
    found, at = " ".join(printed.split()), 0
    for line in stated.splitlines():
        if not _ANYTHING.sub("", line).strip():
            continue
        match = re.compile(_pattern(line, vary=vary)).search(found, at)
        assert match, f"{place} states\n{line}\nwhich is not printed there:\n{printed}"
        at = match.end()


def _pattern(line: str, *, vary: bool) -> str:
    parts = []
    for part in re.split(r"(\.\.\.|…)", " ".join(line.split())):
        escaped = ".*?" if _ANYTHING.fullmatch(part) else re.escape(part)
        if vary and escaped != ".*?":
            texts = re.split(_ISA, part)
            escaped = f"(?:{_ISA.pattern})".join(
                _NUMBER.pattern.join(re.escape(word) for word in _NUMBER.split(text)) for text in texts
            )
        parts.append(escaped)
    return "".join(parts)


def _printed(work: Callable[[], Any], *, with_errors: bool) -> str:
    printed = io.StringIO()
    errors = contextlib.redirect_stderr(printed) if with_errors else contextlib.nullcontext()
    with contextlib.redirect_stdout(printed), errors:
        work()
    return printed.getvalue()


def _compiled(block: Block) -> Any:
    lines = int(block.place.rpartition(":")[2]) * "\n"  # so that errors have the line of the page
    return compile(lines + block.text, block.place, "exec")


def _run_command(line: str, block: Block) -> str:
    name, *arguments = shlex.split(line, comments=True)
    assert name in COMMANDS, f"{block.place}: {name} cannot be run; say why in a comment before the block"
    seconds = block.setting("tune", "")
    if seconds and "--tune" in arguments:
        arguments[arguments.index("--tune") + 1] = seconds
    status: list[int] = []
    printed = _printed(lambda: status.append(COMMANDS[name][0](arguments)), with_errors=True)
    assert status == [int(block.setting("status", "0"))], f"{block.place}: {line}: status {status[0]}\n{printed}"
    return printed


def check_unrun(block: Block) -> None:
    """Checks what can be checked of a block that is not run: syntax, options of commands, files, targets, presets, extras.

    Raises:
        AssertionError, SyntaxError, ArgumentError: with what is not there.
    """
    if block.language == "python":
        ast.parse(block.text)
    if block.language or block.reason.startswith("it is"):
        return
    for line in block.lines():
        with contextlib.suppress(ValueError):  # text that is no command
            for part in re.split(r"\s&&\s", line):
                _check_command(shlex.split(part, comments=True), block.place)


def _check_command(words: list[str], place: str) -> None:
    while words and re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    name, *arguments = words or [""]
    if name in COMMANDS:
        COMMANDS[name][1]().parse_args(arguments)
    elif name == "make":
        assert re.search(rf"^{arguments[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), (
            f"{place}: {arguments[0]}"
        )
    elif name == "python" and arguments[0] == "-m":
        assert importlib.util.find_spec(arguments[1]), f"{place}: {arguments[1]}"
        if arguments[1] == "bench":
            make_parser().parse_args(arguments[2:])
    elif (name == "python" and arguments[0] != "-c") or name == "bash":
        assert (ROOT / arguments[0]).is_file(), f"{place}: {arguments[0]}"
    elif name == "cmake" and arguments[:1] == ["--preset"]:
        presets = json.loads((ROOT / "CMakePresets.json").read_text())["configurePresets"]
        assert arguments[1] in [preset["name"] for preset in presets], f"{place}: {arguments[1]}"
    elif name == "pip":
        project = (ROOT / "pyproject.toml").read_text()
        for extras in re.findall(r"\[([\w,]+)\]", " ".join(arguments)):
            for extra in extras.split(","):
                assert re.search(rf"^{extra} = ", project, re.MULTILINE), f"{place}: no extra {extra}"
