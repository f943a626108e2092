# SPDX-License-Identifier: Apache-2.0
"""What the commands print, and how they end: on any terminal, in any encoding, into a full disk or a closed pipe."""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import NoReturn, TextIO

from stof.arguments.checks import suggest
from stof.arguments.environment import TRACEBACK
from stof.errors import ArgumentError, StofError, shown

_ASCII_FORMS = {"×": "x", "·": "*"}  # the signs of reports and messages
_UNKNOWN = "unrecognized arguments: "  # how argparse begins its message


class CommandDone(Exception):
    """An option has done all that there is to do."""


class VersionAction(argparse.Action):
    """The option ``--version``: prints what ``describe`` gives, and ends the command."""

    def __init__(
        self, option_strings: Sequence[str], dest: str, describe: Callable[[], Sequence[str]], **_: object
    ) -> None:
        text = "version, and which parts are installed"
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, default=argparse.SUPPRESS, help=text)
        self._describe = describe

    def __call__(self, *_: object) -> None:
        """Prints the lines.

        Raises:
            CommandDone: always.
        """
        say(*self._describe())
        raise CommandDone


class OutputError(ArgumentError):
    """Standard output takes no more."""


class Parser(argparse.ArgumentParser):
    """A parser whose errors are errors of the command, and whose help is printed as everything else is.

    Attributes:
        hint: what to do with an argument too many that is no option; may be empty.
    """

    hint = ""

    def error(self, message: str) -> NoReturn:
        """Refuses the arguments.

        Raises:
            ArgumentError: always. It names the option that may be meant.
        """
        raise ArgumentError(f"{message}{self._find_hint(message)} (see {self.prog} --help)")

    def _find_hint(self, message: str) -> str:
        rest = message.removeprefix(_UNKNOWN)
        if rest == message:
            return ""
        unknown = [word.partition("=")[0] for word in rest.split() if word.startswith("--")]
        if unknown:
            return suggest(unknown[0], sorted(self._list_options()))
        return self.hint and f"; {self.hint}"

    def _list_options(self) -> set[str]:
        """The long options of the parser and its commands."""
        options = {o for o in self._option_string_actions if o.startswith("--")}
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                options |= {o for p in action.choices.values() for o in p._option_string_actions if o.startswith("--")}
        return options

    def _print_message(self, message: str, file: object = None) -> None:
        if message:
            say(*message.rstrip("\n").split("\n"))


def say(*lines: str) -> None:
    """Prints lines on standard output. Whoever closes the pipe has read enough: what follows goes nowhere, silently.

    Raises:
        OutputError: where the lines cannot be written otherwise, as to a full disk.
    """
    try:
        _write(sys.stdout, lines)
    except BrokenPipeError:
        _silence(sys.stdout)
    except (OSError, ValueError) as error:  # ValueError: the stream was closed
        _silence(sys.stdout)
        reason = getattr(error, "strerror", None) or error
        raise OutputError(f"standard output cannot be written: {reason}") from error


def complain(line: str) -> None:
    """Prints a line on standard error, or nowhere: the exit status tells what there is to tell."""
    try:
        _write(sys.stderr, (line,))
    except (OSError, ValueError):
        _silence(sys.stderr)


def run_command(name: str, run: Callable[[], int]) -> int:
    """Runs a command and returns its exit status; every error is one line on standard error.

    An error that nobody foresaw comes with some input, as a rule with a damaged model: the status is 3, and 1 where the
    system refuses a file. ``STOF_TRACEBACK=1`` shows where it came from.
    """
    try:
        TRACEBACK.flag()  # a wrong value is found before it is needed
        return run()
    except CommandDone:
        return 0
    except StofError as error:
        if error.__cause__ is not None:
            _show_traceback()
        complain(f"{name}: {error}")
        return error.exit_code
    except OSError as error:
        _show_traceback()
        names = [shown(n) for n in (error.filename, error.filename2) if n is not None]
        complain(f"{name}: {': '.join([*names, error.strerror or str(error)])}")
        return 1
    except Exception as error:  # the last resort of a command: whatever nobody expected
        _show_traceback()
        complain(
            f"{name}: internal error: {type(error).__name__}: {shown(error)}; please report it, with what "
            f"{TRACEBACK.name}=1 shows"
        )
        return 3


def _show_traceback() -> None:
    if TRACEBACK.text() == "1":
        for line in traceback.format_exc().rstrip("\n").split("\n"):
            complain(line)


def _write(stream: TextIO | None, lines: tuple[str, ...]) -> None:
    if stream is None:  # closed before Python started
        return
    text = "".join(f"{shown(line, None)}\n" for line in lines)
    stream.write(make_encodable(text, stream))
    stream.flush()


def make_encodable(text: str, stream: TextIO) -> str:
    """The text as the stream's encoding has it: stof's own signs in ASCII where it lacks them, escapes for other characters.

    Consoles of Windows often have cp1252 or cp437, and LANG=C has ASCII alone.
    """
    encoding = stream.encoding or "utf-8"
    for sign, ascii_form in _ASCII_FORMS.items():
        if sign in text and not _has_character(encoding, sign):
            text = text.replace(sign, ascii_form)
    return text.encode(encoding, "backslashreplace").decode(encoding)


@functools.lru_cache(maxsize=64)
def _has_character(encoding: str, character: str) -> bool:
    try:
        character.encode(encoding)
    except UnicodeEncodeError:
        return False
    return True


def _silence(stream: TextIO | None) -> None:
    """Python flushes the stream once more at its end, and would complain again: what is left goes nowhere."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())  # type: ignore[union-attr]
        os.close(nowhere)


def read_pairs(items: Sequence[str], option: str) -> dict[str, str]:
    """The values by name of an option that is given as NAME=VALUE.

    Raises:
        ArgumentError: for other forms, and names that are given twice.
    """
    values = {}
    for item in items:
        name, sign, value = item.partition("=")
        if not sign or not name or not value:
            raise ArgumentError(f"{option} {item!r}: expected NAME=VALUE")
        if name in values:
            raise ArgumentError(f"{option} names {name!r} twice; give it once")
        values[name] = value
    return values


def read_shapes(items: Sequence[str]) -> dict[str, tuple[int, int]]:
    """The least and the largest size of dimensions, by name, of --shape NAME=N[..M].

    Raises:
        ArgumentError: for other forms, and names that are given twice.
    """
    sizes = {}
    for name, text in read_pairs(items, "--shape").items():
        low, _, high = text.partition("..")
        try:
            sizes[name] = (int(low), int(high or low))
        except ValueError:
            raise ArgumentError(f"--shape {name}={text}: expected a number or N..M") from None
        if not 0 < sizes[name][0] <= sizes[name][1]:
            raise ArgumentError(f"--shape {name}={text}: expected 0 < N <= M")
    return sizes
