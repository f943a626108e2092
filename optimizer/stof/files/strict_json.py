# SPDX-License-Identifier: Apache-2.0
"""JSON as RFC 8259 has it, for every reader: Python's own has numbers NaN and Infinity, and half of a surrogate pair."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

from stof.errors import shown

_NUMBERS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def dumps(
    value: Any,
    *,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
    default: Callable[[Any], Any] | None = None,
) -> str:
    r"""A value as strict JSON in ASCII. Numbers that JSON has not are the strings "nan", "inf" and "-inf".

    Bytes of file names that are not UTF-8 become ``\xff``.
    """
    text = json.dumps(
        _make_strict(value),
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=lambda v: _make_strict(_other(v, default)),
        allow_nan=False,
    )
    return text.replace("\x7f", "\\u007f")  # the one control character that json leaves in a string


def dumps_by_line(value: Any, *, sort_keys: bool = False) -> str:
    """As :func:`dumps`, compact, with a line for each item of a list and each field of an object.

    What an item holds stands on its line. Fields of a field have lines where one of them is a list of objects.
    """

    def dump_compact(part: Any) -> str:
        return dumps(part, separators=(",", ":"), sort_keys=sort_keys)

    def by_line(part: Any) -> str:
        if isinstance(part, dict):
            names = sorted(part) if sort_keys else list(part)
            return "{\n" + ",\n".join(f"{dump_compact(name)}:{field(part[name])}" for name in names) + "\n}"
        return "[\n" + ",\n".join(dump_compact(item) for item in part) + "\n]"

    def field(part: Any) -> str:
        return by_line(part) if _has_table(part) else dump_compact(part)

    return by_line(value) if isinstance(value, dict | list | tuple) and value else dump_compact(value)


def _has_table(value: Any) -> bool:
    """Whether a value is a list of objects, or an object that has one."""
    if isinstance(value, dict):
        return any(_has_table(part) for part in value.values())
    return isinstance(value, list | tuple) and any(isinstance(item, dict) for item in value)


def quoted(value: object) -> str:
    """A JSON value for a message, cut where it is long."""
    text = dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def loads(text: str, *, restore_numbers: bool = False) -> Any:
    """What a text of strict JSON holds. ``restore_numbers``: the strings that stand for numbers become these.

    Raises:
        ValueError: for a text that is no JSON, NaN, Infinity, and a field that one object has twice.
        RecursionError: for one that is nested too deep.
    """
    value = json.loads(text, object_pairs_hook=_object, parse_constant=_constant)
    return _restore_numbers(value) if restore_numbers else value


def _other(value: Any, default: Callable[[Any], Any] | None) -> Any:
    if default is None:
        raise TypeError(f"{type(value).__name__} has no form in JSON")
    return default(value)


def _make_strict(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, str):
        return value if value.isascii() else _escape_surrogates(value)
    if isinstance(value, dict):
        return {_make_strict(k) if isinstance(k, str) else k: _make_strict(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_make_strict(v) for v in value]
    return value


def _escape_surrogates(text: str) -> str:
    return "".join(shown(c) if "\ud800" <= c <= "\udfff" else c for c in text)


def _restore_numbers(value: Any) -> Any:
    if isinstance(value, str):
        return _NUMBERS.get(value, value)
    if isinstance(value, dict):
        return {k: _restore_numbers(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_restore_numbers(v) for v in value]
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [n for n, _ in pairs]
        raise ValueError(f"field {next(n for n in names if names.count(n) > 1)!r} twice in one object")
    return fields


def _constant(text: str) -> float:
    raise ValueError(f"{text} is no JSON number")
