# SPDX-License-Identifier: Apache-2.0
"""The text of --sparse-mlp: what it means, and each fault with its key and value."""

from __future__ import annotations

from pathlib import Path

import pytest

from stof.errors import ArgumentError
from stof.sparse_mlp.calibration.spec import DEFAULT_TOKENS, parse_mlp_spec


def test_prompts_alone_mean_magnitudes_of_all_layers() -> None:
    spec = parse_mlp_spec("prompts.npz")
    (clause,) = spec.clauses
    assert (spec.prompts, spec.tokens, spec.max_error) == (Path("prompts.npz"), DEFAULT_TOKENS, None)
    assert (clause.kind, clause.active, clause.recall, clause.file) == ("magnitude", None, None, None)
    assert [spec.clause_of(i, 3) for i in range(3)] == [clause] * 3


def test_clauses_for_other_layers() -> None:
    spec = parse_mlp_spec(
        "p.json,kind=svd,rank=8,recall=0.9,layers=1:3;active=0.3,layers=3:,dense_layers=-1;teal=d,layers=0"
    )
    found = [spec.clause_of(i, 6) for i in range(6)]
    assert [c.kind if c else "" for c in found] == ["teal", "svd", "svd", "magnitude", "magnitude", ""]
    assert found[1] is not None
    assert (found[1].rank, found[1].recall) == (8, 0.9)
    assert spec.files == {"teal file d": Path("d"), "calibration prompts": Path("p.json")}


def test_file_with_signs_in_its_name(tmp_path: Path) -> None:
    path = tmp_path / "a=b.npz"
    path.touch()
    assert parse_mlp_spec(f"{path},active=0.3").prompts == path


def test_fields_of_all_clauses() -> None:
    spec = parse_mlp_spec("p.npz,tokens=64,max_error=0.1,layers=0;kind=svd,tokens=64,layers=1:")
    assert (spec.tokens, spec.max_error) == (64, 0.1)


@pytest.mark.parametrize(("neurons", "size", "rank"), [(160, 48, 7), (3, 2, 1), (4096, 48, 48), (11008, 4096, 441)])
def test_default_rank_is_a_share_of_the_neurons(neurons: int, size: int, rank: int) -> None:
    assert parse_mlp_spec("p.npz,kind=svd").clauses[0].rank_of(neurons, size) == rank


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("kind=svd", "names no calibration prompts, expected prompts.npz"),
        ("powerinfer=d,recall=0.9", "names no calibration prompts, expected prompts.npz"),
        ("p.npz,kind=lstm", "has kind=lstm, expected one of magnitude, svd, trained"),
        ("p.npz,active=0", "has active=0, expected a share above 0, up to 1"),
        ("p.npz,active=1.1", "has active=1.1, expected a share above 0, up to 1"),
        ("p.npz,active=nan", "has active=nan, expected a share above 0, up to 1"),
        ("p.npz,kind=svd,recall=some", "has recall=some, expected a share above 0, up to 1"),
        ("p.npz,kind=svd,rank=0", "has rank=0, expected an integer from 1"),
        ("p.npz,kind=trained,seed=-1", "has seed=-1, expected an integer from 0"),
        ("p.npz,tokens=0", "has tokens=0, expected an integer from 1"),
        ("p.npz,max_error=-1", "has max_error=-1, expected a number from 0 on"),
        ("p.npz,by_neuron=2", "has by_neuron=2, expected an integer from 0 to 1"),
        ("p.npz,layers=x", "has layers=x, expected indices or slices"),
        ("p.npz,rank=8", "has key 'rank', expected kind, active, by_neuron"),
        ("p.npz,active=0.3,active=0.4", "has active twice; give it once"),
        ("p.npz,bogus", "'bogus' is no field, expected key=value"),
        ("p.npz,teal=d,predictors=f", "has teal"),
        ("predictors=f,kind=svd", "has predictors and kind; give one of them"),
        ("teal=", "has teal=, expected a path"),
        ("p.npz;q.npz", "clause 1 names prompts; all clauses share those of the first"),
        ("p.npz,tokens=3;kind=svd,tokens=4", "has 2 different tokens, expected one for all clauses"),
        ("p.npz;", "'' is no field, expected key=value"),
        ("x" * 70000, "has 70000 characters"),
    ],
)  # fmt: skip
def test_faults(text: str, words: str) -> None:
    with pytest.raises(ArgumentError) as raised:
        parse_mlp_spec(text)
    assert str(raised.value).startswith("--sparse-mlp")
    assert words in str(raised.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("p.npz,layers=4:", "--sparse-mlp: layers=4: selects from 3 layers, expected 0 to 3"),
        ("p.npz,dense_layers=7", "--sparse-mlp: dense_layers=7 selects from 3 dense_layers, expected -3 to 2"),
        ("p.npz;kind=svd,layers=1", "--sparse-mlp: two clauses are for layer 1; separate them by layers="),
    ],
)
def test_layers_that_do_not_fit_the_model(text: str, words: str) -> None:
    spec = parse_mlp_spec(text)
    with pytest.raises(ArgumentError) as raised:
        [spec.clause_of(layer, 3) for layer in range(3)]
    assert str(raised.value) == words


def test_rank_that_does_not_fit_the_weight() -> None:
    clause = parse_mlp_spec("p.npz,kind=svd,rank=49").clauses[0]
    with pytest.raises(ArgumentError, match=r"rank=49 is larger than the gate weight \[160, 48\], expected 1 to 48"):
        clause.rank_of(160, 48)
