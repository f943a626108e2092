# SPDX-License-Identifier: Apache-2.0
"""docs/reference/c-api.md has the limits that the library states: all of them, with their numbers and operators."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

from stof.runtime.library import op_limits

PAGE = (Path(__file__).resolve().parents[2] / "docs/reference/c-api.md").read_text()
SECTION = PAGE[PAGE.index("## Limits") :]
ROW = re.compile(r"^\| (`\w+`(?:, `\w+`)*) \|(.*)\|$", re.MULTILINE)
TYPES = {"1": "fp32", "10": "fp16", "16": "bf16"}


def _words(cell: str) -> list[str]:
    return re.findall(r"`(\w+)`", cell)


def _stated() -> tuple[set[str], dict[str, set[str]], dict[str, dict[int, set[str]]]]:
    """Keys of operators, the operators of each limit, and where each number of a limit holds ("fp16 cuda")."""
    keys: set[str] = set()
    operators, places = defaultdict(set), defaultdict(lambda: defaultdict(set))
    for op, limits in op_limits().items():
        keys |= set(limits)
        for target, one in limits["targets"].items():
            keys |= set(one)
            for dtype, numbers in one.get("types", {}).items():
                for name, number in numbers.items():
                    operators[name].add(op)
                    places[name][number].add(f"{TYPES[dtype]} {target}")
    return keys, operators, places


def test_the_page_lists_what_the_library_states() -> None:
    keys, operators, places = _stated()
    documented: set[str] = set()
    limits: dict[str, tuple[set[str], str]] = {}
    for names, rest in ROW.findall(SECTION):
        cells = rest.split("|")
        if len(cells) == 1:
            documented |= set(_words(names))
            continue
        values = cells[1].split(";") if "," in names else [cells[1]] * len(_words(names))
        limits |= {name: (set(_words(cells[0])), value) for name, value in zip(_words(names), values, strict=True)}
    assert documented == keys
    assert {name: found for name, (found, _) in limits.items()} == operators
    for name, (_, text) in limits.items():
        usual, *others = text.split(";")
        numbers = {
            int(re.findall(r"\b\d+\b", re.sub(r"\w*[a-z]\w*", "", clause))[0]): clause for clause in (usual, *others)
        }
        assert set(numbers) == set(places[name]), name
        for number, clause in list(numbers.items())[1:]:  # "8 in fp16 and bf16 on `cuda` and `tensorrt`"
            stated = {f"{t} {target}" for t in TYPES.values() for target in _words(clause) if t in clause}
            assert places[name][number] == stated, name


def test_the_example_is_an_answer() -> None:
    (example,) = re.findall(r'\{"1": \{(.*?)\}', SECTION, re.DOTALL)
    numbers = {name: int(number) for name, number in re.findall(r'"(\w+)": (\d+)', example)}
    assert numbers == op_limits()["StofAttention"]["targets"]["cpu"]["types"]["1"]
