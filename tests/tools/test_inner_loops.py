# SPDX-License-Identifier: Apache-2.0
"""tools/inner_loops.py: loops that it finds in a listing, and the shares that it computes of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools.inner_loops import CORES, Core, fma_share, inner_loops, read_functions

LISTING = """\
tile.o:     file format elf64-littleaarch64

0000000000000000 <Tile(float const*)>:
   0:\tmov\tx2, #0x0
   4:\tldp\tq0, q1, [x0]
   8:\tldr\tq2, [x1]
   c:\tfmla\tv3.4s, v0.4s, v2.s[0]
  10:\tfmla\tv4.4s, v1.4s, v2.s[1]
  14:\tmov\tv5.16b, v3.16b
  18:\tldr\tq6, [sp, #16]
  1c:\tadd\tx0, x0, #0x20
  20:\tcmp\tx0, x3
  24:\tb.ne\t4 <Tile(float const*)+0x4>  // b.any
  28:\tcbnz\tx4, 0 <Tile(float const*)>
  2c:\tret

0000000000000030 <Rest()>:
  30:\tret
"""


def test_the_loop_without_a_loop_inside_is_found() -> None:
    functions = dict(read_functions(LISTING))
    assert list(functions) == ["Tile(float const*)", "Rest()"]
    assert inner_loops(functions["Rest()"]) == []
    (loop,) = inner_loops(functions["Tile(float const*)"])
    assert (loop[0].address, loop[-1].address, len(loop)) == ("4", "24", 9)
    assert [x.name for x in loop if x.is_vector] == ["fmla", "fmla", "mov"]
    assert [x.vectors_loaded for x in loop if x.is_load] == [2, 1, 1]
    assert sum(x.is_spill for x in loop) == 1


@pytest.mark.parametrize(
    ("name", "operands", "loaded"),
    [
        ("ldr", "q2, [x1]", 1),
        ("ldr", "s2, [x1], #4", 1),
        ("ldp", "q0, q1, [x0]", 2),
        ("ldp", "d8, d9, [sp, #16]", 2),
        ("ldr", "x2, [x1, #8]", 0),
        ("ldp", "x29, x30, [sp], #16", 0),
        ("ldrb", "w3, [x2]", 0),
        ("ld1r", "{v4.4s}, [x1]", 1),
        ("ld1", "{v6.s}[1], [x1]", 1),
        ("ld2", "{v0.8b, v1.8b}, [x1]", 2),
        ("ld1", "{v30.16b-v1.16b}, [x1]", 4),
        ("ld1", "{v4.4s - v6.4s}, [x0], x2", 3),
        ("str", "q2, [x1]", 0),
    ],
)
def test_registers_that_a_load_fills(name: str, operands: str, loaded: int) -> None:
    ((_, (instruction,)),) = read_functions(f"0 <F()>:\n   4:\t{name}\t{operands}\n")
    assert instruction.vectors_loaded == loaded


@pytest.mark.parametrize(
    ("core", "share"),
    [
        (Core("bound by vectors", 1, 9, 4), 2 / 3),
        (Core("bound by width", 2, 3, 4), 2 / 2 / 3),
        (Core("bound by loads", 4, 9, 1), 2 / 4 / 4),
    ],
)
def test_the_scarcest_resource_bounds_the_share(core: Core, share: float) -> None:
    (loop,) = inner_loops(dict(read_functions(LISTING))["Tile(float const*)"])
    assert fma_share(loop, core) == pytest.approx(share)


def test_the_page_states_the_cores_of_the_script() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/design/neon.md").read_text()
    for core in CORES:
        assert f"| {core.name} | {core.vectors} | {core.width} | {core.loads} |" in page
