#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Counts the instructions of inner loops of AArch64 objects, and the share of the peak FMA rate that issue allows.

``tools/inner_loops.py OBJECT... [--least 16]`` prints a row for each function: its inner loop with most FMAs. It runs nothing.
"""

from __future__ import annotations

import argparse
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

_FUNCTION = re.compile(r"^[0-9a-f]+ <(.*)>:$")
_INSTRUCTION = re.compile(r"^\s*([0-9a-f]+):\t(\S+)\s*(.*)$")
_TARGET = re.compile(r"([0-9a-f]+) <")
_BRANCHES = ("b", "cbz", "cbnz", "tbz", "tbnz")
_VECTOR = re.compile(r"^(v\d+\.|[bhsdq]\d+\b)")
_LOADED = re.compile(r"^[qdsv]\d+\b|^\{(?P<list>[^}]*)\}")
_RANGE = re.compile(r"v(\d+)\.\w+\s*-\s*v(\d+)\.")
_SPILL = re.compile(r"^q\d+,.*\[sp")


@dataclass(frozen=True)
class Core:
    """What a core issues in a cycle: vector instructions of 128 bits, instructions of any kind, loads of 128 bits."""

    name: str
    vectors: int
    width: int
    loads: int


CORES = (Core("Neoverse N1", 2, 4, 2), Core("Neoverse V1", 4, 8, 3), Core("Apple M1", 4, 8, 3))


@dataclass(frozen=True)
class Instruction:
    address: str
    name: str
    operands: str

    @property
    def is_load(self) -> bool:
        return self.name.startswith("ld")

    @property
    def is_fma(self) -> bool:
        return self.name in ("fmla", "fmls", "sdot")

    @property
    def is_vector(self) -> bool:
        """Whether a unit for vectors executes it; of loads only those that copy an element to all lanes."""
        if self.name == "ld1r":
            return True
        return not self.is_load and not self.name.startswith("st") and _VECTOR.match(self.operands) is not None

    @property
    def vectors_loaded(self) -> int:
        """Registers for vectors that it loads, whatever their width; none for those of integers."""
        found = _LOADED.match(self.operands) if self.is_load else None
        if found is None:
            return 0
        if (registers := found["list"]) is None:
            return 2 if self.name == "ldp" else 1
        if span := _RANGE.search(registers):
            return (int(span[2]) - int(span[1])) % 32 + 1
        return registers.count(",") + 1

    @property
    def is_spill(self) -> bool:
        return _SPILL.match(self.operands) is not None


Loop = tuple[Instruction, ...]


def read_functions(text: str) -> Iterator[tuple[str, list[Instruction]]]:
    """The functions of a listing of objdump."""
    name, body = "", list[Instruction]()
    for line in text.splitlines():
        if found := _FUNCTION.match(line):
            if body:
                yield name, body
            name, body = found.group(1), []
        elif found := _INSTRUCTION.match(line):
            body.append(Instruction(*found.groups()))
    if body:
        yield name, body


def inner_loops(body: list[Instruction]) -> list[Loop]:
    """The loops of a function that have no loop inside: what lies between a branch back and its target."""
    at = {instruction.address: i for i, instruction in enumerate(body)}
    spans = []
    for i, instruction in enumerate(body):
        if instruction.name not in _BRANCHES and not instruction.name.startswith("b."):
            continue
        target = _TARGET.search(instruction.operands)
        if target is not None and at.get(target.group(1), i + 1) <= i:
            spans.append((at[target.group(1)], i))
    inner = [a for a in spans if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in spans)]
    return [tuple(body[first : last + 1]) for first, last in inner]


def fma_share(loop: Loop, core: Core) -> float:
    """FMAs of a loop over those that a core could start in the same cycles, caches and latencies aside."""
    vectors = sum(instruction.is_vector for instruction in loop)
    loads = sum(instruction.vectors_loaded for instruction in loop)
    cycles = max(vectors / core.vectors, len(loop) / core.width, loads / core.loads)
    return sum(instruction.is_fma for instruction in loop) / core.vectors / cycles


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("objects", nargs="+", metavar="OBJECT")
    parser.add_argument("--objdump", default="aarch64-linux-gnu-objdump")
    parser.add_argument("--least", type=int, default=16, help="FMAs of a loop that is printed")
    args = parser.parse_args()
    print("| inner loop | FMAs | instructions | vectors loaded | spills |", *(f"{core.name} |" for core in CORES))
    print("|" + "---|" * (5 + len(CORES)))
    for path in args.objects:
        command = [args.objdump, "-d", "-C", "--no-show-raw-insn", path]
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        for name, body in read_functions(listing):
            loop = max(inner_loops(body), key=lambda found: sum(x.is_fma for x in found), default=())
            fmas = sum(x.is_fma for x in loop)
            if fmas < args.least:
                continue
            short = (
                name.replace("stof::cpu::", "")
                .replace("(anonymous namespace)::", "")
                .split("(")[0]
                .removeprefix("void ")
            )
            counts = (fmas, len(loop), sum(x.vectors_loaded for x in loop), sum(x.is_spill for x in loop))
            shares = (f"{100 * fma_share(loop, core):.0f} %" for core in CORES)
            print("|", " | ".join((f"`{short}`", *map(str, counts), *shares)), "|")


if __name__ == "__main__":
    main()
