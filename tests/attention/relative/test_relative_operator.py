# SPDX-License-Identifier: Apache-2.0
"""Relative tables in StofAttention on the CPU, against the definition in fp64."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tests.helpers.relative_problem import RelativeProblem, Table

from stof.attention.checks.reference import random_padding, random_problem
from stof.mask.site import EmptyRows

DISTANCES = "k - q + S + P - 1"  # a row for each
LINES = {
    "rising": DISTANCES,
    "falling": "q - k + T - 1",
    "clamped": "k - q + 5",
    "bucketed": "table0[max(0, min(64, q - k + 32))]",
    "rising buckets": "table0[max(0, min(64, k - q + 32))]",
    "shaw": "max(-12, min(4, k - q)) + 12",
    "one row": "0 * (k - q)",
    "of keys": "k // 3",
    "of queries": "S + P - 1 - q",
    "grid rows": "q // 7 - k // 7 + 20",
    "grid columns": "q % 7 - k % 7 + 6",
    "grid of 64": "k % 64 - q % 64 + 63",
    "tripled": "(k - q) * 3 + 40",
    "absolute": "abs(k - q)",
    "wrapped": "(k - q) % 11",
    "random": "table1[max(0, min(96, k - q + 48))]",
}
ROLES = ("relative_key", "relative_key1", "relative_query", "relative_value")
SIZES = ((1, 1), (5, 6), (7, 7), (16, 17), (17, 1), (96, 97), (97, 130), (130, 33), (200, 511))


def constants(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """table0: buckets that rise by 0 or 1; table1: any rows."""
    steps = rng.integers(0, 2, 64)
    return {
        "table0": np.concatenate([[0], np.cumsum(steps)]).astype(np.int32),
        "table1": rng.integers(0, 40, 97).astype(np.int64),
    }


def rows_for(index: str, S: int, T: int) -> int:
    """As many rows as the expression names, or fewer where it is clamped."""
    return max(1, S + T - 1) if index in (LINES["rising"], LINES["falling"]) else 40


def make(
    rng: np.random.Generator, roles: dict[str, str], *, B: int = 2, H: int = 4, S: int = 33, T: int = 33, D: int = 17,
    Dv: int = 19, shared: bool = False, further: bool = False, dtype: Any = np.float32, table_type: Any = None,
    factor: tuple[int, int] | None = None, rows: int | None = None, **settings: Any,
) -> RelativeProblem:  # fmt: skip
    """A random problem with tables of these roles, whose rows the expressions name."""
    plain = random_problem(rng, B, H, S, D, T=T, Dv=Dv, dtype=dtype, **settings)
    tables = {}
    for role, index in roles.items():
        columns = Dv if role == "relative_value" else D + further
        shape = (1 if shared else H, rows_for(index, S, T) if rows is None else rows, columns)
        tables[role] = Table(rng.standard_normal(shape, np.float32).astype(table_type or dtype), index)
    read = " ".join(roles.values())
    used = {name: array for name, array in constants(rng).items() if name in read}
    scale = None if factor is None else rng.standard_normal((*factor, S), np.float32).astype(dtype)
    return RelativeProblem(plain, tables, used, scale)


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    return np.random.default_rng(sum(map(ord, request.node.name)))


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("line", LINES)
def test_rows(rng: np.random.Generator, role: str, line: str) -> None:
    for S, T in ((40, 40), (130, 70), (19, 150)):
        make(rng, {"relative_key": "k - q", role: LINES[line]}, S=S, T=T, shared=S == 40, further=T == 70).check()


@pytest.mark.parametrize(("S", "T"), SIZES)
@pytest.mark.parametrize("line", ["rising", "falling", "bucketed", "grid columns", "random"])
def test_sizes(rng: np.random.Generator, S: int, T: int, line: str) -> None:
    for D, Dv in ((1, 3), (64, 64), (80, 16)):
        make(rng, dict.fromkeys(ROLES, LINES[line]), S=S, T=T, D=D, Dv=Dv, further=D == 64, shared=Dv == 16).check()


@pytest.mark.parametrize(("S", "T"), [(0, 5), (5, 0), (0, 0)])
def test_empty(rng: np.random.Generator, S: int, T: int) -> None:
    for sink in (None, rng.standard_normal(4).astype(np.float32)):
        make(rng, dict.fromkeys(ROLES, DISTANCES), S=S, T=T, sink=sink).check()
    make(rng, dict.fromkeys(ROLES, DISTANCES), S=S, T=T, rows=0).check()
    make(rng, dict.fromkeys(ROLES, DISTANCES), B=0, S=3, T=3).check()


def test_long(rng: np.random.Generator) -> None:
    """Rows that a ring does not hold, and several tiles."""
    for line in ("rising", "falling", "tripled"):
        roles = {"relative_key": LINES[line], "relative_query": LINES[line]}
        make(rng, roles, B=1, H=1, S=700, T=1100, D=8, Dv=8, mask="abs(q - k) < 300 or k < 9", further=True).check()
    make(rng, {"relative_key": "k * 5 - q * 5 + 4000"}, B=1, H=1, S=600, T=600, D=8, Dv=8, rows=8000).check()
    for role in ("relative_key", "relative_query"):
        make(rng, {role: LINES["rising"]}, B=1, H=2, S=2000, T=2000, D=8, Dv=8).check()


MASKS = (
    "k <= q",
    "abs(q - k) <= 16",
    "q - k < 128 and k <= q",
    "(q + k) % 3 != 0",
    "h % 2 == 0 or k <= q",
    "q < 20 and k < 30",
)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("line", ["rising", "bucketed", "grid rows", "random"])
def test_masks(rng: np.random.Generator, mask: str, line: str) -> None:
    for policy in EmptyRows:
        roles = dict.fromkeys(ROLES, LINES[line])
        make(rng, roles, B=3, S=140, T=140, D=16, Dv=16, mask=mask, padded=True, empty_rows=policy).check()


@pytest.mark.parametrize("line", ["rising", "falling", "bucketed", "grid columns", "absolute"])
def test_scores(rng: np.random.Generator, line: str) -> None:
    """Everything else that changes scores, beside the tables; queries that are the last positions."""
    roles = dict.fromkeys(ROLES, LINES[line])
    common: dict[str, Any] = {"S": 40, "T": 100, "query_offset": True, "mask": "k <= q"}
    bias = rng.standard_normal((2, 1, 40, 100)).astype(np.float32)
    sink = rng.standard_normal(4).astype(np.float32)
    near = rng.standard_normal((4, 33)).astype(np.float32)
    make(rng, roles, softcap=3.0, **common).check()
    make(rng, roles, bias=bias, sink=sink, scale=0.7, **common).check()
    make(rng, roles, relative_bias=near, factor=(2, 4), G=2, **common).check()
    make(rng, roles, relative_bias=near[:1], factor=(1, 1), softcap=2.0, sink=sink, G=1, further=True, **common).check()
    make(rng, roles, scale=40.0, **common).check(2e-3)  # scores that lose low bits beside the row max


@pytest.mark.parametrize("heads", [(1, 1), (2, 1), (1, 4), (2, 4)])
@pytest.mark.parametrize("S", [1, 4, 16, 17, 100])
def test_factor(rng: np.random.Generator, heads: tuple[int, int], S: int) -> None:
    """A relative bias times a factor of the row, without other tables: also with few queries."""
    near = rng.standard_normal((4, 65)).astype(np.float32)
    for dtype in (np.float32, np.float16):
        make(rng, {}, S=S, T=300, relative_bias=near, factor=heads, dtype=dtype, mask="k <= q + 200").check()
        make(rng, {}, S=S, T=300, relative_bias=near, factor=heads, dtype=dtype, query_offset=True).check()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_types(rng: np.random.Generator, dtype: Any) -> None:
    for line in ("falling", "bucketed", "random"):
        for table_type in (dtype, np.float32):
            roles = dict.fromkeys(ROLES, LINES[line])
            make(rng, roles, S=70, T=150, dtype=dtype, table_type=table_type, further=line == "falling").check()


def test_head_sizes(rng: np.random.Generator) -> None:
    for D, Dv in ((8, 1), (256, 256), (33, 100)):
        for line in ("rising", "grid rows"):
            make(rng, dict.fromkeys(ROLES, LINES[line]), H=2, S=50, T=60, D=D, Dv=Dv, further=True).check()


def test_grids(rng: np.random.Generator) -> None:
    for width in (1, 5, 14, 64):
        keys = {
            "relative_key": f"q // {width} - k // {width} + {192 // width - 1}",
            "relative_key1": f"q % {width} - k % {width} + {width - 1}",
        }
        make(rng, keys, S=192, T=192, D=16, Dv=16, rows=2 * max(width, 192 // width) - 1, shared=True).check()


def test_rows_without_pairs(rng: np.random.Generator) -> None:
    """NaN in rows that no allowed pair names, and in values that no query attends, is not used."""
    for line in ("rising", "falling", "grid columns", "random"):
        problem = make(rng, dict.fromkeys(ROLES, LINES[line]), S=60, T=60, mask="abs(q - k) <= 3 and k < 50")
        named = problem.rows_of(problem.tables["relative_key"], 60, 60, 0)[problem.plain.evaluate_mask()[0, 0]]
        for table in problem.tables.values():
            other = np.setdiff1d(np.arange(table.rows.shape[1]), named)
            assert len(other) > 0
            table.rows[:, other[::2]] = np.nan
            table.rows[:, other[1::2]] = np.inf
        out, _ = problem.run()
        assert np.isfinite(out).all()
        problem.check()


def test_nan_stays_in_its_pairs(rng: np.random.Generator) -> None:
    """NaN in a row reaches the queries that name it, and no other."""
    for role in ("relative_key", "relative_query", "relative_value"):
        problem = make(rng, {role: DISTANCES}, S=60, T=60, mask="abs(q - k) <= 9", B=1)
        problem.tables[role].rows[:, 59 + 5] = np.nan
        out, _ = problem.run()
        wrong = np.isnan(out).any((0, 1, 3))
        assert wrong[: 60 - 5].all()
        assert not wrong[60 - 5 :].any()


def test_changing_sizes_and_tables(rng: np.random.Generator) -> None:
    """One operator, whose tables are no constants: other sizes and tables in each run."""
    from stof.runtime.library import Op

    first = make(rng, {"relative_key": LINES["random"]}, S=30, T=30)
    op = Op("StofAttention", first.attributes())
    for S, T in ((30, 30), (31, 30), (30, 30), (9, 70)):
        problem = make(rng, {"relative_key": LINES["random"]}, S=S, T=T)
        out = np.full(problem.plain.shape, 7.0, np.float32)
        op.run(problem.inputs(), [out])
        np.testing.assert_allclose(out, problem.reference()[0], atol=2e-5)


@pytest.mark.parametrize("has_queries", [True, False])
def test_packed_sequences(rng: np.random.Generator, has_queries: bool) -> None:
    """Packed sequences give what the padded problem gives: rows are named by positions of that."""
    from stof.runtime.library import Op

    B, H, T, D = 5, 2, 90, 16
    lengths, first = np.array([0, 1, 33, 90, 17]), np.array([3, 89, 40, 0, 20])
    S = T if has_queries else 21
    for line in ("rising", "bucketed", "grid columns", "random"):
        pad = np.zeros((B, T), np.int64)
        for b in range(B):
            pad[b, first[b] : first[b] + lengths[b]] = 1
        near = rng.standard_normal((H, 21)).astype(np.float32)
        problem = make(
            rng, dict.fromkeys(ROLES, LINES[line]), B=B, H=H, S=S, T=T, D=D, Dv=D, mask="pad[b, k]",
            operands={"pad": pad}, relative_bias=near, factor=(B, H), further=True,
        )  # fmt: skip
        wanted = problem.reference()[0]

        def pack(a: np.ndarray) -> np.ndarray:
            parts = [a[b, :, first[b] : first[b] + lengths[b]] for b in range(B)]
            return np.ascontiguousarray(np.concatenate(parts, 1)[None])

        q, k, v, *rest = problem.inputs()
        starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        role = "cumulative_sequence_length" if has_queries else "cumulative_key_length"
        attributes = problem.attributes()
        attributes["operands"] += f" {role} first_position"
        out = np.zeros((1, H, lengths.sum(), D) if has_queries else (B, H, S, D), np.float32)
        inputs = [pack(q) if has_queries else q, pack(k), pack(v), *rest, starts, first.astype(np.int32)]
        Op("StofAttention", attributes).run(inputs, [out], 2)
        np.testing.assert_allclose(out, pack(wanted) if has_queries else wanted, atol=2e-5)


@pytest.mark.parametrize("isa", ["avx2", "portable"])
def test_instruction_sets(isa: str) -> None:
    """The tests above with other instruction sets."""
    if os.environ.get("STOF_CPU_ISA"):
        pytest.skip("runs with one already")
    chosen = "test_rows or test_scores or test_long or test_grids or test_rows_without_pairs or test_types"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__, "-k", chosen],
        env={**os.environ, "STOF_CPU_ISA": isa}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]


def test_padding(rng: np.random.Generator) -> None:
    """Padding left and right, beside tables by head and a sink."""
    pad = random_padding(rng, 4, 77)
    sink = rng.standard_normal(4).astype(np.float32)
    for line in ("rising", "shaw"):
        roles = {"relative_key": LINES[line], "relative_value": LINES[line]}
        make(rng, roles, B=4, S=77, T=77, mask="pad[b, k]", operands={"pad": pad}, sink=sink).check()
