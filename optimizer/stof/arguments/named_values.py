# SPDX-License-Identifier: Apache-2.0
"""Options that are given as NAME=VALUE: sizes of dimensions, masks of sites."""

from __future__ import annotations

from collections.abc import Sequence

from stof.errors import ArgumentError


def read_pairs(items: Sequence[str], option: str) -> dict[str, str]:
    """The values by name of an option that is given as NAME=VALUE.

    Raises:
        ArgumentError: for other forms, and names that are given twice.
    """
    found = {}
    for item in items:
        name, sign, value = item.partition("=")
        if not sign or not name or not value:
            raise ArgumentError(f"{option} {item!r}: expected NAME=VALUE")
        if name in found:
            raise ArgumentError(f"{option} names {name!r} twice; give it once")
        found[name] = value
    return found


def read_shapes(items: Sequence[str]) -> dict[str, tuple[int, int]]:
    """The least and the largest size of dimensions, by name, of --shape NAME=N[..M].

    Raises:
        ArgumentError: for other forms, and names that are given twice.
    """
    found = {}
    for name, text in read_pairs(items, "--shape").items():
        low, _, high = text.partition("..")
        try:
            found[name] = (int(low), int(high or low))
        except ValueError:
            raise ArgumentError(f"--shape {name}={text}: expected a number or N..M") from None
        if not 0 < found[name][0] <= found[name][1]:
            raise ArgumentError(f"--shape {name}={text}: expected 0 < N <= M")
    return found
