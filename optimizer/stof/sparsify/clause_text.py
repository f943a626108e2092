# SPDX-License-Identifier: Apache-2.0
"""The text of one clause of --sparsify: a name and fields, ``name:field=value,...`` or ``name(field=value,...)``."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from stof.arguments.slices import Slice, parse_slices
from stof.errors import ArgumentError
from stof.symbolic import LONGEST


def split_named(text: str, names: Collection[str]) -> tuple[str, list[str]] | None:
    """The name and the fields' texts of a clause that begins with its name; None where it does not.

    A name alone has no fields.

    Raises:
        ArgumentError: where a parenthesis does not end the clause, or a quote is not closed.
    """
    match = re.match(r"([a-z][a-z0-9-]*)\s*(:|\(|$)", text)
    if match is None or match[1] not in names:
        return None
    name, sign, rest = match[1], match[2], text[match.end() :].strip()
    if sign == "(":
        if not rest.endswith(")"):
            is_closed = len(split_outside_quotes(rest, ")")) > 1
            fault = "is not closed" if not is_closed else "does not end the clause"
            raise ArgumentError(f"--sparsify {text!r} has a parenthesis that {fault}, expected {name}(key=value,...)")
        rest = rest[:-1].strip()
        return name, split_outside_quotes(rest, ",") if rest else []
    return name, split_outside_quotes(rest, ",") if sign == ":" else []


def split_outside_quotes(text: str, sign: str) -> list[str]:
    """The parts between signs that stand outside of double quotes.

    Raises:
        ArgumentError: where a quote is not closed.
    """
    parts = [""]
    is_quoted = False
    for character in text:
        is_quoted ^= character == '"'
        if character == sign and not is_quoted:
            parts.append("")
        else:
            parts[-1] += character
    if is_quoted:
        raise ArgumentError(f"--sparsify {text!r} has a double quote that is not closed")
    return parts


class ClauseFields:
    """The fields of one clause; every fault is an error that names the key and the value."""

    def __init__(self, clause: str, items: Sequence[str], keys: Collection[str]) -> None:
        """Reads them.

        Args:
            clause: its whole text, for messages.
            items: the fields' texts.
            keys: that are known; empty: any.

        Raises:
            ArgumentError: for another key, one that is there twice, and what is no field.
        """
        self.clause_text = clause
        self.values: dict[str, str] = {}
        for item in items:
            key, sign, value = (x.strip() for x in item.partition("="))
            if not sign or not key:
                raise ArgumentError(f"--sparsify {clause!r}: {item.strip()!r} is no field, expected key=value")
            if keys and key not in keys:
                raise ArgumentError(f"--sparsify {clause!r} has key {key!r}, expected {', '.join(keys)}")
            if key in self.values:
                raise ArgumentError(f"--sparsify {clause!r} has {key} twice; give it once")
            self.values[key] = value[1:-1] if len(value) > 1 and value[0] == value[-1] == '"' else value

    def error(self, key: str, expected: str) -> ArgumentError:
        """The fault of a field."""
        actual = f"has {key}={self.values[key]}" if key in self.values else f"has no {key}"
        return ArgumentError(f"--sparsify {self.clause_text!r} {actual}, expected {expected}")

    def number(self, key: str, least: int, default: int | None = None, most: int = LONGEST) -> int:
        """An integer field; without a default it must be there."""
        if key not in self.values and default is not None:
            return default
        text = self.values.get(key, "")
        if not re.fullmatch(r"[0-9]{1,9}", text) or not least <= int(text) <= most:
            raise self.error(key, f"an integer from {least} to {most}")
        return int(text)

    def flag(self, key: str) -> bool:
        """A field that is 0 or 1; 0 where it is absent."""
        return bool(self.number(key, 0, 0, 1))

    def slices(self, key: str) -> tuple[Slice, ...]:
        """Indices and slices with ``+`` between them."""
        if key not in self.values:
            return ()
        slices = parse_slices(self.values[key], "--sparsify")
        if slices is None:
            raise self.error(key, "indices or slices such as 3, 0:2 or -2:, with + between them")
        return slices
