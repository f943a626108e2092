# SPDX-License-Identifier: Apache-2.0
"""The text of --sparsify and pattern files: what they mean, and errors that name clause or file, key and value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import masks
import numpy as np
import pytest

from stof.errors import ArgumentError
from stof.sparsify.measure import allowed_pairs
from stof.sparsify.patterns import HeadCounts, Pattern
from stof.sparsify.spec import parse_spec

HEADS = HeadCounts(4, 2)
SIZE = 200
ROWS = np.arange(SIZE)


def pairs(pattern: Pattern | None) -> np.ndarray:
    assert pattern is not None
    return np.stack([allowed_pairs(pattern, h, ROWS, ROWS) for h in range(HEADS.H)])


def check(spec: str, expected: np.ndarray, layer: int = 0, layers: int = 2) -> None:
    """``expected`` is of KV heads or of query heads."""
    found = pairs(parse_spec(spec).resolve(layer, layers, HEADS))
    np.testing.assert_array_equal(found, masks.to_query_heads(expected, HEADS.H))


def test_inline_patterns() -> None:
    check("s2:local=2,stride=3,block=16", masks.s2(2, SIZE, 2, 3, 16))
    check("s2:local=1,stride=2", masks.s2(2, SIZE, 1, 2, 64))
    check("s2: local=1, stride=4, block=16, relative=1", masks.s2(2, SIZE, 1, 4, 16, relative=True))
    check(
        "s2:local=1,stride=4,block=16,homogeneous=1,offset=1", masks.s2(2, SIZE, 1, 4, 16, homogeneous=True, offset=1)
    )
    check("s2:local=1,stride=4,block=16,dense_heads=1", masks.s2(2, SIZE, 1, 4, 16, dense_heads=1))
    check("s2:local=1,stride=4,block=16,per=query_head", masks.s2(4, SIZE, 1, 4, 16))
    check("window=30,sink=4", masks.window(2, SIZE, 30, 4))
    check("sink=4,window=30", masks.window(2, SIZE, 30, 4))
    check('mask="min(k, q) < 3 or q - k < 5"', masks.window(2, SIZE, 5, 3))


def test_names_with_parentheses() -> None:
    check("s2(local=2,stride=3,block=16)", masks.s2(2, SIZE, 2, 3, 16))
    check("s2 ( local=2, stride=3, block=16 )", masks.s2(2, SIZE, 2, 3, 16))
    check("window(window=30,sink=4)", masks.window(2, SIZE, 30, 4))
    check("window:window=30,sink=4", masks.window(2, SIZE, 30, 4))
    check('mask(mask="min(k, q) < 3 or (q - k < 5)")', masks.window(2, SIZE, 5, 3))
    spec = parse_spec("window(window=30,layers=0);s2(local=1,stride=4,block=16,layers=1)")
    for layer, expected in ((0, masks.window(2, SIZE, 30)), (1, masks.s2(2, SIZE, 1, 4, 16))):
        np.testing.assert_array_equal(pairs(spec.resolve(layer, 2, HEADS)), masks.to_query_heads(expected, HEADS.H))


def test_layers_and_heads() -> None:
    spec = parse_spec("s2:local=1,stride=4,block=16,dense_layers=0:2+-1")
    assert [spec.resolve(i, 6, HEADS) is None for i in range(6)] == [True, True, False, False, False, True]
    check("window=30,heads=1", np.concatenate([masks.dense(1, SIZE), masks.window(1, SIZE, 30)]))
    check("window=30,heads=1:;window=9,heads=0", np.concatenate([masks.window(1, SIZE, 9), masks.window(1, SIZE, 30)]))
    by_layer = parse_spec("window=30,layers=0;window=9,layers=1:3")
    for layer, length in ((0, 30), (1, 9), (2, 9)):
        np.testing.assert_array_equal(
            pairs(by_layer.resolve(layer, 4, HEADS)), masks.to_query_heads(masks.window(2, SIZE, length), 4)
        )
    assert by_layer.resolve(3, 4, HEADS) is None


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("s2:local=2", r"has no stride, expected an integer from 1 to"),
        ("s2:local=0,stride=4", "has local=0, expected an integer from 1"),
        ("s2:local=2,stride=-4", "has stride=-4, expected an integer"),
        ("s2:local=2,stride=4,block=48", "has block=48, expected 16, 32, 64 or 128"),
        ("s2:local=2,stride=4,block=256", "has block=256, expected an integer from 16 to 128"),
        ("s2:local=2,stride=4,blocks=16", "has key 'blocks', expected local, stride, block"),
        ("s2:local=2,stride=4,local=3", "has local twice"),
        ("s2:local=2,stride=4,relative=yes", "has relative=yes, expected an integer from 0 to 1"),
        ("s2:local=2,stride=4,per=head", "has per=head, expected kv_head or query_head"),
        ("s2:local,stride=4", "'local' is no field"),
        ("s2:", "'' is no field"),
        ("s2()", "has no stride, expected an integer"),
        ("s2", "has no stride, expected an integer"),
        ("s2(local=1,stride=2),layers=1", "parenthesis that does not end the clause, expected s2[(]key=value,...[)]"),
        ("s2(local=1,stride=2", "parenthesis that is not closed, expected s2[(]key=value,...[)]"),
        ("s2(local=1,,stride=2)", "'' is no field"),
        ("mask()", "has no mask, expected a mask expression"),
        ("s3(local=1,stride=2)", "begins with 's3[(]local', expected s2:local=N"),
        ("window=0", "has window=0, expected an integer from 1"),
        ("window=4,sinks=3", "has key 'sinks', expected window, sink"),
        ("window=99999999999", "expected an integer from 1"),
        ("sink=4", "has no pattern"),
        ("layers=1", "has no pattern"),
        ("windows=4", "begins with 'windows'"),
        ('mask="k <', "a double quote that is not closed"),
        ('mask="k <"', "is no mask expression"),
        ("window=4;", "an empty clause"),
        ("", "an empty clause"),
        ("window=4,layers=x", "has layers=x, expected indices or slices"),
        ("window=4,layers=:", "has layers=:, expected indices"),
        ("window=4,layers=5", "layers=5 selects from 2 layers"),
        ("window=4,dense_layers=0:9", "dense_layers=0:9 selects from 2 dense_layers"),
        ("window=4,heads=2", "heads=2 selects from 2 heads"),
        ("window=4,heads=0+1", "has heads=0[+]1, expected one slice"),
        ("window=4;window=5", "two clauses are for KV head 0 of layer 0"),
        ("window=4,active_heads=2:4", "has active_heads=2:4, expected the graph's KV heads and how many"),
        ("window=4,active_heads=4:2/8", "has active_heads=4:2/8, expected"),
        ("window=4,active_heads=6:9/8", "has active_heads=6:9/8, expected"),
        ("window=4,active_heads=0:3/6", "active_heads=0:3/6 are 3 heads, the attention has 2 KV heads"),
        ("window=4,heads=8,active_heads=2:4/8", "heads=8 selects from 8 heads"),
        ("window=4,heads=0,active_heads=0:2/8;window=5,heads=1,active_heads=2:4/8", "2 different active_heads"),
        ("window=4,active_heads=2:4/8;window=5,heads=3", "two clauses are for KV head 3 of layer 0"),
        ("none.json", "none.json"),
        ("absent", "'absent' is no file, and no pattern"),
    ],
)
def test_faults_name_the_key_and_the_value(spec: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        parse_spec(spec).resolve(0, 2, HEADS)


def test_heads_of_a_rank() -> None:
    """KV heads 2 and 3 of 4: clauses and counts are those of the whole model."""
    windows = np.concatenate([masks.window(1, SIZE, 9), masks.window(1, SIZE, 20)])
    check("window=9,heads=0:3,active_heads=2:4/4;window=20,heads=3", windows)
    check("window=9,heads=3:,active_heads=2:4/4", np.concatenate([masks.dense(1, SIZE), masks.window(1, SIZE, 9)]))
    check("s2:local=2,stride=8,block=16,active_heads=2:4/4", masks.s2(4, SIZE, 2, 8, 16)[2:])
    check(
        "s2:local=2,stride=4,block=16,dense_heads=1,active_heads=2:4/4", masks.s2(4, SIZE, 2, 4, 16, dense_heads=1)[2:]
    )
    assert parse_spec("window=9,heads=0:2,active_heads=2:4/4").resolve(0, 2, HEADS) is None
    # Layers that stay dense may have other heads.
    assert parse_spec("window=9,dense_layers=0,active_heads=0:1/2").resolve(0, 2, HEADS) is None


def duo(folder: Path, table: str = "1.0\t0.2\n0.1\t0.9\n", config: Any = None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "full_attention_heads.tsv").write_text(table)
    config = {"sink_size": 5, "recent_size": 20} if config is None else config
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return folder


def test_duo_attention(tmp_path: Path) -> None:
    folder = duo(tmp_path / "heads")
    streaming = masks.window(1, SIZE, 20, 5)
    check(str(folder), np.concatenate([masks.dense(1, SIZE), streaming]), 0)
    check(str(folder), np.concatenate([streaming, masks.dense(1, SIZE)]), 1)
    check(f"{folder},threshold=0.15", np.concatenate([streaming, masks.dense(1, SIZE)]), 1)
    assert parse_spec(f"{folder},threshold=0.15").resolve(0, 2, HEADS) is None
    assert parse_spec(f"{folder},dense_layers=1").resolve(1, 2, HEADS) is None


@pytest.mark.parametrize(
    ("table", "config", "message"),
    [
        ("1 0\n1\n", None, "heads.tsv has 1 numbers in line 2, expected 2"),
        ("1 x\n", None, "heads.tsv has 'x' in line 1, column 2, expected a number"),
        ("1 nan\n", None, "heads.tsv has 'nan' in line 1"),
        ("", None, "heads.tsv is empty"),
        ("1 0\n", None, "heads.tsv has 1 layers, the model 2"),
        ("1 0 1\n0 0 0\n", None, "heads.tsv has 3 heads, the attention has 2 KV heads"),
        ("1 0\n0 1\n", {"sink_size": 5}, "config.json has recent_size null"),
        ("1 0\n0 1\n", {"sink_size": -1, "recent_size": 5}, "config.json has sink_size -1, expected"),
        ("1 0\n0 1\n", {"sink_size": 1, "recent_size": 5, "window": 3}, "config.json has key 'window'"),
        ("1 0\n0 1\n", "[", "config.json is no JSON"),
        ("1 0\n0 1\n", [], "config.json is \\[\\], expected an object"),
    ],
)
def test_faults_of_duo_attention(table: str, config: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=message):
        parse_spec(str(duo(tmp_path / "heads", table, config))).resolve(0, 2, HEADS)


def minference(folder: Path, data: Any) -> Path:
    path = folder / "pattern.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


LINES = [[0, 7], [1, 40]]  # columns and diagonals of one head
FOUR = {"0": ["vertical_and_slash", *LINES, 0.9], "1": ["stream_llm", 3, 20, 1], "2": ["vertical_and_slash", [9], []],
        "3": ["vertical_and_slash", [], [5], 1]}  # fmt: skip


def test_minference(tmp_path: Path) -> None:
    """Query heads of a group differ."""
    path = minference(tmp_path, [FOUR, FOUR])
    expected = masks.vertical_slash([[0, 7], [], [9], []], [[1, 40], [], [], [5]], SIZE)
    expected[1] = masks.window(1, SIZE, 20, 3)[0]
    check(str(path), expected)


def test_minference_with_counts(tmp_path: Path) -> None:
    heads = {str(h): ["vertical_and_slash", 6, 30, 1] for h in range(4)}
    path = minference(tmp_path, [heads, heads])
    check(f"{path},counts=first", masks.window(4, SIZE, 30, 6))
    with pytest.raises(ArgumentError, match=r"layer 0, head 0 has v 6: so many columns .* add counts=first"):
        parse_spec(str(path))


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (["block_sparse", 100, 5, 1], "layer 1, head 2 is 'block_sparse'"),
        (["dense", 100, 5, 1], "layer 1, head 2 is 'dense', expected"),
        (["stream_llm", -3, 5, 1], "layer 1, head 2 has v -3"),
        (["stream_llm", [3], 5, 1], r"layer 1, head 2 has v \[3\]"),
        (["vertical_and_slash", [1, "x"], [5], 1], r"layer 1, head 2 has v \[1, .x.\]"),
        (["vertical_and_slash", [1], [1 << 23], 1], "layer 1, head 2 has s"),
        (["vertical_and_slash", [1]], "expected \\[kind, v, s, score\\]"),
        ("stream_llm", "expected \\[kind, v, s, score\\]"),
    ],
)
def test_faults_of_minference(entry: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=message):
        parse_spec(str(minference(tmp_path, [FOUR, {**FOUR, "2": entry}])))


@pytest.mark.parametrize(
    ("data", "message"),
    [("{", "is no JSON"), ({}, "expected a list"), ([{"0": FOUR["1"], "x": 1}], "has key 'x', expected heads 0 to 1")],
)
def test_files_that_are_no_pattern_of_minference(data: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=message):
        parse_spec(str(minference(tmp_path, data)))


def test_a_file_with_an_unknown_option(tmp_path: Path) -> None:
    path = minference(tmp_path, [FOUR])
    with pytest.raises(ArgumentError, match="has key 'count', expected counts, layers"):
        parse_spec(f"{path},count=first")
    with pytest.raises(ArgumentError, match="has counts=last, expected first"):
        parse_spec(f"{path},counts=last")


TABLE = np.eye(4, dtype=bool) | (np.random.default_rng(0).random((2, 2, 4, 4)) < 0.4)


def blocks(folder: Path, **arrays: Any) -> Path:
    np.savez(folder / "table.npz", **arrays)
    return folder / "table.npz"


def test_block_tables(tmp_path: Path) -> None:
    path = blocks(tmp_path, blocks=TABLE, block_size=32)
    for layer in range(2):
        check(str(path), masks.blocks(TABLE[layer], SIZE, 32), layer)
    path = blocks(tmp_path, blocks=TABLE[0].astype(np.int32))
    check(f"{path},block=64", masks.blocks(TABLE[0], SIZE, 64), 1)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"blocks": TABLE}, r"has block sizes \[\], expected one"),
        ({"blocks": TABLE, "block_size": 48}, "has block_size 48, expected one of 16, 32, 64, 128"),
        ({"blocks": TABLE, "block": 32}, "has array 'block', expected blocks and block_size"),
        ({"block_size": 32}, "has no array 'blocks'"),
        ({"blocks": TABLE[0, 0], "block_size": 32}, r"has blocks \[4, 4\], expected"),
        ({"blocks": TABLE * 0.5, "block_size": 32}, "has blocks of float64"),
        ({"blocks": TABLE * 3, "block_size": 32}, "has blocks of int64, expected booleans, or 0 and 1"),
        ({"blocks": TABLE[..., :3], "block_size": 32}, "has blocks with 4 query and 3 key blocks"),
        ({"blocks": TABLE & ~np.tri(4, dtype=bool), "block_size": 32}, "have no key block"),
        ({"blocks": TABLE[:1], "block_size": 32}, "table.npz has 1 layers, the model 2"),
        ({"blocks": np.tile(TABLE[0], (2, 1, 1))[:3], "block_size": 32}, "table.npz has 3 heads, expected 1, 2"),
    ],
)
def test_faults_of_block_tables(arrays: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=message):
        parse_spec(str(blocks(tmp_path, **arrays))).resolve(0, 2, HEADS)


def test_an_archive_that_would_exhaust_memory(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "t.npz", blocks=np.zeros((1, 1 << 15, (1 << 13) + 1), bool))
    assert (tmp_path / "t.npz").stat().st_size < 1 << 22
    with pytest.raises(ArgumentError, match=r"bytes of arrays, expected up to"):
        parse_spec(str(tmp_path / "t.npz"))


def test_a_file_that_is_no_archive(tmp_path: Path) -> None:
    (tmp_path / "t.npz").write_bytes(b"PK\x03\x04 and no more")
    with pytest.raises(ArgumentError, match=r"t\.npz holds no arrays that can be read"):
        parse_spec(str(tmp_path / "t.npz"))
    np.save(tmp_path / "a.npy", TABLE)
    (tmp_path / "a.npy").rename(tmp_path / "b.npz")
    with pytest.raises(ArgumentError, match="has array ''"):
        parse_spec(str(tmp_path / "b.npz"))
