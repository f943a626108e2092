# SPDX-License-Identifier: Apache-2.0
"""Checks of arguments: each takes a value and gives it in one form, or says what was found and what was expected."""

from __future__ import annotations

import difflib
import math
import numbers
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from stof.errors import ArgumentError, shown

Check = Callable[[str, Any], Any]
_MOST_SHOWN = 60  # characters of a value


def suggest(name: object, known: Iterable[str]) -> str:
    """`; did you mean 'x'?`, where one of the known names is close; else empty."""
    text = str(name)
    by_fold = {k.lower(): k for k in known}
    close = difflib.get_close_matches(text.lower(), by_fold, 1, 0.6)
    return f"; did you mean {by_fold[close[0]]!r}?" if close else ""


def check_names(owner: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Refuses argument names that nobody knows.

    Raises:
        ArgumentError: with the closest known name.
    """
    allowed = list(known)
    for name in names:
        if name not in allowed:
            raise ArgumentError(f"{owner} has no argument {name!r}{suggest(name, allowed)}")


def refuse(name: str, value: object, expected: str) -> ArgumentError:
    """The error for an argument."""
    return ArgumentError(f"{name} is {shown(repr(value), _MOST_SHOWN)}, expected {expected}")


def check_flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise refuse(name, value, "True or False")
    return value


def check_text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise refuse(name, value, "a text")
    return value


def check_path(name: str, value: object) -> Path:
    if not isinstance(value, str | os.PathLike) or not isinstance(os.fspath(value), str):
        raise refuse(name, value, "a path")
    if not os.fspath(value):
        raise refuse(name, value, "a path that is not empty")
    return Path(os.fspath(value))


def check_number(name: str, value: object, unit: str = "") -> float:
    """A finite number from 0 on."""
    expected = f"a number{unit and ' of '}{unit} from 0 on"
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise refuse(name, value, expected)
    if not 0 <= float(value) < math.inf:
        raise refuse(name, value, expected)
    return float(value)


def check_share(name: str, value: object) -> float:
    """A number from 0 to 1."""
    share = check_number(name, value)
    if share > 1:
        raise refuse(name, value, "a number from 0 to 1")
    return share


def check_seconds(name: str, value: object) -> float:
    return check_number(name, value, "seconds")


def check_count(name: str, value: object) -> int:
    """An integer from 0 on."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 0:
        raise refuse(name, value, "an integer from 0 on")
    return int(value)


def check_texts(name: str, value: object) -> tuple[str, ...]:
    """Several texts; one alone is taken for a mistake, since it is a sequence of characters."""
    if isinstance(value, str):
        raise refuse(name, value, f"a sequence of texts: ({value!r},)")
    if not isinstance(value, Iterable) or isinstance(value, Mapping):
        raise refuse(name, value, "a sequence of texts")
    return tuple(check_text(f"an element of {name}", v) for v in value)


def check_pairs(name: str, value: object, check: Check) -> dict[str, Any]:
    """A mapping from texts; `check` takes its values."""
    if not isinstance(value, Mapping):
        raise refuse(name, value, "a mapping")
    return {check_text(f"a key of {name}", k): check(f"{name}[{k!r}]", v) for k, v in value.items()}


def check_range(name: str, value: object) -> tuple[int, int]:
    """A range of sizes: least and most, or one number for both."""
    expected = "a size, or a pair (least, most) with 0 < least <= most"
    pair = (value, value) if isinstance(value, numbers.Integral) else value
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise refuse(name, value, expected)
    if any(isinstance(x, bool) or not isinstance(x, numbers.Integral) for x in pair):
        raise refuse(name, value, expected)
    least, most = int(pair[0]), int(pair[1])
    if not 0 < least <= most:
        raise refuse(name, value, expected)
    return least, most


def one_of(*allowed: str, meant: Mapping[str, str] | None = None) -> Check:
    """A check for one of some texts.

    Args:
        *allowed: the texts.
        meant: what people mean by other texts.
    """

    def check(name: str, value: object) -> str:
        if isinstance(value, str) and value in allowed:
            return value
        *first, last = map(repr, allowed)
        guess = {"True": "on", "False": "off", **(meant or {})}.get(str(value), value)
        hint = f"; did you mean {guess!r}?" if guess in allowed else suggest(guess, allowed)
        raise refuse(name, value, f"{', '.join(first)} or {last}{hint}")

    return check


def or_none(check: Check) -> Check:
    """A check that lets None pass."""
    return lambda name, value: None if value is None else check(name, value)
