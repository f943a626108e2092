# SPDX-License-Identifier: Apache-2.0
"""Choices about chains that earlier versions stored still decide: entries of the tuning cache, and plans.

The texts here were written by a version before configurations were values. Nothing of this version makes them.
"""

from __future__ import annotations

import json
import re
import sqlite3
from contextlib import closing
from pathlib import Path

import onnx
import pytest
from chain_graphs import Builder
from fused import fuse_chains
from hypothesis import given
from hypothesis import strategies as st

from stof.fusion.decide.measured import MeasuredDecider
from stof.fusion.decide.measured_config import ChainConfig, LoneOperators, SegmentConfig, read_config
from stof.fusion.decide.selection import ChainSelection
from stof.fusion.plan_entry import ChainPlan
from stof.ops import PLAN_FORMATS
from stof.options import Options
from stof.plan import parse
from stof.tuning_cache import Cache

PROBLEM = (
    '{"build": "b1", "chain": "axes a = x0.0, b = x0.1, n = 64\\nlet t0 = x0[a, b, n] + x1[n]\\nlet t1 = t0 - mean(t0)\\n'
    'out y0 f32 [a, b, n] = tanh(t1 * rsqrt(mean(t1 * t1) + 1e-05) * x2[n] + x3[n]) * -0.5", "device": "cpu", '
    '"operators": "Add LayerNormalization Add Tanh Mul", "shapes": [[%d, %d, 64], [64], [64], [64]], '
    '"types": [1, 1, 1, 1, 1], "version": 1}'
)
SIZES = ((1, 128), (8, 512))
PLAN = """{
  "format": "stof-plan",
  "version": 1,
  "sites": [],
  "chains": [
    {
      "chain": "Mul of t9",
      "operators": "Add LayerNormalization Add Tanh Mul",
      "replace": true,
      "segments": [
        [
          2,
          5
        ]
      ]
    }
  ]
}
"""
TABLES = {
    "undated": "measured\n    (problem TEXT, config TEXT, seconds REAL NOT NULL, PRIMARY KEY (problem, config)) WITHOUT ROWID",
    "dated": "measurements\n    (problem TEXT, config TEXT, seconds REAL NOT NULL, time REAL NOT NULL, "
    "PRIMARY KEY (problem, config)) WITHOUT ROWID",
}


def norm_and_tanh() -> onnx.ModelProto:
    b = Builder()
    x = b.add("Add", b.input("x", ["B", "S", 64]), b.weight(64))
    x = b.add("Add", b.add("LayerNormalization", x, b.weight(64)), b.weight(64))
    return b.model(b.add("Mul", b.add("Tanh", x), b.number(-0.5)))


@pytest.mark.parametrize("kind", ["undated", "dated"])
@pytest.mark.parametrize(
    ("stored", "segments"),
    [
        ({"original": 1.0, "0": 0.5}, ((0, 5),)),
        ({"original": 1.0, "0": 0.5, "1c": 0.25, "1cp": 0.2}, ((0, 2), (2, 5))),
        ({"original": 1.0, "2": 0.25, "18": 0.5}, ((2, 5),)),
        ({"original": 1.0, "0": 0.99}, ()),
        ({"original": 1.0, "0": 0.98, "in turns": 1.0, "searched": 1e9}, ((0, 5),)),
        ({"original": 1.0, "operators 0 to 2": 0.1, "1d": 0.1, "20": 0.1, "0x0": 0.1, " 0": 0.1, "0_0": 0.1}, ()),
    ],
)
def test_stored_measurements_decide(
    tmp_path: Path, kind: str, stored: dict[str, float], segments: tuple[tuple[int, int], ...]
) -> None:
    path = tmp_path / "own" / "tuning.sqlite"
    path.parent.mkdir(mode=0o700)
    with closing(sqlite3.connect(path)) as database, database:
        database.execute(f"CREATE TABLE {TABLES[kind]}")
        for sizes in SIZES:
            for config, seconds in stored.items():
                row = (PROBLEM % sizes, config, seconds, *([1e9] if kind == "dated" else []))
                database.execute(f"INSERT INTO {TABLES[kind].split()[0]} VALUES ({', '.join('?' * len(row))})", row)
    decider = MeasuredDecider(Options(), Cache(path, "cpu", "b1"), 0.0)
    (plan,) = fuse_chains(norm_and_tanh(), decider).plans
    assert plan.segments == segments


def test_a_stored_plan_decides() -> None:
    plan = parse(PLAN, PLAN_FORMATS)
    (entry,) = plan.entries["chains"]
    assert isinstance(entry, ChainPlan)
    assert json.loads(PLAN)["chains"] == [entry.to_json()]

    def refuse(*_: object) -> None:
        raise AssertionError("the plan has decided")

    result = fuse_chains(norm_and_tanh(), refuse, selection=ChainSelection(planned=(entry,)))  # type: ignore[arg-type]
    assert result.plans == (entry,)
    assert [c.operators for c in result.reports if c.replaced] == ["Add Tanh Mul"]


@given(st.builds(ChainConfig, st.integers(0, 1 << 64).map(lambda n: n << 1), st.booleans(), st.booleans()))
def test_a_key_is_read_back(config: ChainConfig) -> None:
    assert read_config(config.key) == config


@given(st.text(alphabet="0123456789abcdefpnABx_+- ", max_size=6))
def test_any_key_is_read_or_none(key: str) -> None:
    """By the pattern that earlier versions read keys with."""
    match = re.fullmatch("([0-9a-f]+)(p?)(n?)", key)
    expected = None if match is None else ChainConfig(int(match[1], 16), bool(match[2]), bool(match[3]))
    assert read_config(key) == expected


def test_keys_of_every_kind() -> None:
    assert ChainConfig(0x1C, True, True).key == "1cpn"
    assert SegmentConfig((0, 3)).key == "operators 0 to 3"
    assert SegmentConfig((1, 2), is_lone_norm=True).key == "operators 1 to 2 by themselves as a chain"
    for key in (
        "original",
        "searched",
        "in turns",
        "operators 0 to 3",
        "1cnp",
        "p",
        "",
        SegmentConfig((1, 2), True).key,
    ):
        assert read_config(key) is None
    lone = LoneOperators(matmuls=((0, 1),), norms=((2, 3),))
    scheme = ((0, 1), (1, 2), (2, 3))
    assert [c.key for c in lone.configs(scheme)] == ["2", "2p", "2n", "2pn"]
    assert [c.segments(3, lone) for c in lone.configs(scheme)] == [(), ((0, 1),), ((2, 3),), ((0, 1), (2, 3))]
    assert [c.key for c in LoneOperators().configs(scheme)] == ["2"]
