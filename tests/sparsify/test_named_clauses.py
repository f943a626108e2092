# SPDX-License-Identifier: Apache-2.0
"""Clauses with a name: ``name(fields)`` is ``name:fields``; skip by score joins patterns."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from stof.arguments.threshold_kinds import CHOOSE_BLOCKS, KINDS, SKIP_SCORES, ThresholdKind
from stof.errors import ArgumentError
from stof.sparsify.patterns import HeadCounts
from stof.sparsify.spec import SparsitySpec, ThresholdClause, parse_spec

HEADS = HeadCounts(4, 2)


def without_text(spec: SparsitySpec) -> tuple[object, ...]:
    return spec.clauses, spec.threshold_clauses


@pytest.mark.parametrize(
    ("named", "other"),
    [
        ("s2(local=2,stride=3,block=16)", "s2:local=2,stride=3,block=16"),
        ("s2( local=2, stride=3 )", "s2: local=2, stride=3"),
        ("s2 (local=2,stride=3,layers=0+2:,heads=1)", "s2:local=2,stride=3,layers=0+2:,heads=1"),
        ("window(window=30,sink=4)", "window=30,sink=4"),
        ("window:window=30,layers=1", "window=30,layers=1"),
        ('mask(mask="(q - k) < 5 or (k < 2)")', 'mask="(q - k) < 5 or (k < 2)"'),
        ("window(window=3);s2(local=1,stride=2,layers=1)", "window=3;s2:local=1,stride=2,layers=1"),
        ("skip-scores(threshold=3.5,layers=2:)", "skip-scores:threshold=3.5,layers=2:"),
        ("skip-scores", "skip-scores(threshold=auto)"),
        ("skip-scores()", "skip-scores:threshold=auto"),
        ("choose-blocks", "choose-blocks(threshold=auto)"),
        ("choose-blocks(threshold=0.5,dense_layers=0)", "choose-blocks:threshold=0.5,dense_layers=0"),
    ],
)
def test_both_forms_mean_the_same(named: str, other: str) -> None:
    assert without_text(parse_spec(named)) == without_text(parse_spec(other))


def test_a_text_may_be_longer_than_a_path() -> None:
    condition = " or ".join(f"q - k == {i}" for i in range(400))
    assert without_text(parse_spec(f'mask="{condition}"')) == without_text(parse_spec(f'mask(mask="{condition}")'))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.clause)
def test_thresholds_of_layers(kind: ThresholdKind) -> None:
    spec = parse_spec(f"{kind.clause}(threshold=0.5,layers=0:2);{kind.clause}:dense_layers=0:2+-1")
    clauses = spec.threshold_clauses_of_layers(kind, 5)
    assert [None if c is None else c.threshold for c in clauses] == [0.5, 0.5, None, None, None]
    assert [c is None for c in clauses] == [False, False, False, False, True]
    assert spec.clauses == ()
    assert spec.threshold_kinds == (kind,)


def test_the_largest_threshold() -> None:
    assert parse_spec("skip-scores(threshold=4194304)").threshold_clauses == (ThresholdClause(SKIP_SCORES, 4194304.0),)
    assert parse_spec("skip-scores:threshold=1e-3").threshold_clauses == (ThresholdClause(SKIP_SCORES, 0.001),)
    assert parse_spec("choose-blocks(threshold=1)").threshold_clauses == (ThresholdClause(CHOOSE_BLOCKS, 1.0),)


def test_a_layer_has_a_pattern_and_skips() -> None:
    spec = parse_spec("window=30,layers=1:;skip-scores(threshold=2)")
    assert [spec.resolve(i, 3, HEADS) is None for i in range(3)] == [True, False, False]
    assert all(c == ThresholdClause(SKIP_SCORES, 2.0) for c in spec.threshold_clauses_of_layers(SKIP_SCORES, 3))


def test_a_layer_skips_and_chooses() -> None:
    """Clauses of both kinds are for any layers, also for the same ones."""
    spec = parse_spec("choose-blocks(layers=1:);skip-scores(threshold=2);s2:local=1,stride=2")
    assert spec.threshold_kinds == (SKIP_SCORES, CHOOSE_BLOCKS)
    assert [c is None for c in spec.threshold_clauses_of_layers(CHOOSE_BLOCKS, 3)] == [True, False, False]
    assert not any(c is None for c in spec.threshold_clauses_of_layers(SKIP_SCORES, 3))
    assert len(spec.clauses) == 1


def clauses_of_four_layers(spec: str) -> list[tuple[ThresholdClause | None, ...]]:
    parsed = parse_spec(spec)
    return [parsed.threshold_clauses_of_layers(kind, 4) for kind in KINDS]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        *(
            (f"skip-scores(threshold={x})", rf"has threshold={x}, expected auto or a number from 1.2e-38 to 4194304")
            for x in ("0", "-1", "nan", "inf", "4194305", "1e99", "much", "")
        ),
        *(
            (f"choose-blocks(threshold={x})", rf"has threshold={x}, expected auto or a number from 1.2e-38 to 1")
            for x in ("0", "-0.5", "nan", "inf", "1.0001", "1e-39", "much", "")
        ),
        ("skip-scores(tresholds=1)", "has key 'tresholds', expected threshold, layers, dense_layers"),
        ("skip-scores(threshold=1,heads=0)", "has key 'heads', expected threshold, layers, dense_layers"),
        ("skip-scores(threshold=1,threshold=2)", "has threshold twice"),
        ("skip-scores(3.5)", "'3.5' is no field, expected key=value"),
        ("skip-scores(threshold=1", r"a parenthesis that is not closed, expected skip-scores\(key=value"),
        ("skip-scores,threshold=1", r"the fields of skip-scores are written skip-scores\(key=value"),
        ("skip-scores:layers=x", "has layers=x, expected indices or slices"),
        ("skip-scores:layers=7", "layers=7 selects from 4 layers"),
        ("skip-scores;skip-scores(threshold=1,layers=3)", "two skip-scores clauses are for layer 3"),
        ("choose-blocks(layers=3);choose-blocks(layers=2:)", "two choose-blocks clauses are for layer 3"),
        ("choose-blocks(heads=0)", "has key 'heads', expected threshold, layers, dense_layers"),
        ("s2(local=2)", "has no stride, expected an integer"),
        ("s2", "has no stride, expected an integer"),
        ("window(sink=2)", "has no window, expected an integer"),
        ("mask(layers=2)", "has no mask, expected a mask expression"),
        ("skip_scores", "'skip_scores' is no file, and no pattern"),
    ],
)
def test_faults_name_clause_key_and_value(spec: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        clauses_of_four_layers(spec)


def test_a_file_may_have_the_name_of_a_clause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("s2", "window(1).npz"):
        with Path(name if name.endswith(".npz") else f"{name}.npz").open("wb") as file:
            np.savez(file, blocks=np.ones((1, 2, 2), bool), block_size=np.array(64))
    assert parse_spec("window(1).npz").clauses[0].file == Path("window(1).npz")
    Path("s2.npz").rename("s2")
    with pytest.raises(ArgumentError, match="s2: "):  # read as the file, whose name says no format
        parse_spec("s2")
