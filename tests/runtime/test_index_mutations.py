# SPDX-License-Identifier: Apache-2.0
"""Damaged texts of attribute ``relative_index``: an error, or the attention that Python's own reading of the text defines."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

import numpy as np
from tests.helpers.relative_problem import RelativeProblem, Table

from stof.attention.checks.reference import random_problem
from stof.mask.expression import MaskExpression
from stof.mask.expression_parser import MaskSyntaxError
from stof.runtime.library import LibraryError

COUNT = 1500
TEXTS = (
    "k - q + S - 1",
    "q - k + T - 1",
    "min(max(k - q, -12), 4) + 12",
    "table0[max(0, min(20, q - k + 10))]",
    "q // 3 - k // 3 + 4",
    "q % 4 - k % 4 + 3",
    "abs(k - q)",
    "(k - q) * 2 + P + 9",
)
WORDS = "q k S T P b h table0 table1 ( ) [ ] , + - * // % min( max( abs( 0 1 7 40 -1 9999999999999999999 <= and ; :"
PIECES = WORDS.split()
NAMES = ("relative_key", "relative_key1", "relative_query", "relative_value")


def damage(text: str, rng: np.random.Generator) -> str:
    """A text with one or two places changed, or one of its words in the place of another."""
    for _ in range(int(rng.integers(1, 3))):
        at, length = int(rng.integers(len(text) + 1)), int(rng.integers(4))
        change = int(rng.integers(7))
        if change == 0:
            text = text[:at] + text[at + length :]
        elif change == 1:
            text = text[:at] + f" {rng.choice(PIECES)} " + text[at:]
        elif change == 2:
            text = text[:at] + str(rng.choice(PIECES)) + text[at + length :]
        elif change == 3:
            text = text[:at] + chr(int(rng.integers(1, 256))) + text[at + 1 :]
        else:
            words = re.findall(r"[a-zA-Z]+\d?|\d+|//|\S", text) or ["k"]
            others = ["q", "k", "S", "T", "P", str(rng.integers(50))] if rng.integers(2) else words
            words[int(rng.integers(len(words)))] = str(rng.choice(others))
            text = " ".join(words)
    return text


def rows_of(text: str, problem: RelativeProblem, S: int, T: int, P: int) -> np.ndarray | None:
    """The rows that pairs read by Python's parser; None where it refuses the text, or an index leaves a table."""
    try:
        index = MaskExpression.parse_integer(text)
        names = {"q": (np.arange(S) + P)[:, None], "k": np.arange(T)[None, :], "S": S, "T": T, "P": P}
        found = index.evaluate({**names, **problem.constants})
        return np.broadcast_to(np.asarray(found), (S, T))
    except (MaskSyntaxError, KeyError, IndexError, ValueError, ZeroDivisionError, OverflowError):
        return None


class Read(RelativeProblem):
    """A problem whose rows are those that Python's parser reads."""

    def rows_of(self, table: Table, S: int, T: int, P: int) -> np.ndarray:
        """The row of each pair, clamped into the table."""
        found = rows_of(table.index, self, S, T, P)
        assert found is not None
        clipped: np.ndarray = np.clip(found, 0, table.rows.shape[1] - 1)
        return clipped


def test_damaged_texts_give_an_error_or_the_right_output() -> None:
    rng = np.random.default_rng(55)
    outcomes: Counter[str] = Counter()
    for seed in range(COUNT):
        S, T = (int(n) for n in rng.integers(1, 24, 2))
        plain = replace(random_problem(rng, B=1, H=2, S=S, T=T, D=8, Dv=8), query_offset=0)
        constants = {"table0": np.sort(rng.integers(0, 30, 21)).astype(np.int32)}
        role, text = NAMES[seed % 4], damage(TEXTS[seed % len(TEXTS)], rng)
        tables = {role: Table(rng.standard_normal((2, 30, 8)).astype(np.float32), text)}
        if role == "relative_key1":
            tables = {"relative_key": Table(tables[role].rows[:1], "k - q + 3"), **tables}
        problem = Read(plain, tables, constants)
        try:
            out, _ = problem.run()
        except LibraryError:
            outcomes["refused"] += 1
            continue
        assert rows_of(text, problem, S, T, 0) is not None, f"seed {seed}: {text!r} ran, and Python refuses it"
        wanted, _ = problem.reference()
        assert np.abs(out - wanted).max(initial=0.0) < 1e-4, f"seed {seed}: {text!r}"
        outcomes["compared"] += 1
    assert min(outcomes["refused"], outcomes["compared"]) > COUNT / 8, outcomes
