# SPDX-License-Identifier: Apache-2.0
"""Mutated specifications and files: each is read, or refused by an error that says why, in bounded time and memory."""

from __future__ import annotations

import io
import json
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from stof.errors import ArgumentError
from stof.prompts.files import read_prompts
from stof.sparsify.measure import allowed_pairs
from stof.sparsify.patterns import HeadCounts
from stof.sparsify.spec import parse_spec

HEADS = HeadCounts(4, 2)
SPECS = (
    "s2:local=2,stride=4,block=16,offset=1,dense_heads=1,per=query_head,layers=0:2+-1,heads=0",
    "window=40,sink=7,layers=0;window=20,layers=1",
    'mask="q - k < 9 or k % 5 == 0",dense_layers=0',
    "window=9,active_heads=2:4/8,heads=1:3",
)
WORDS = (
    *'=,;":+-019kqh()%/<[]~\x00é\n',
    "9999999",
    "4194304",
    "1e9",
    "nan",
    "stride",
    "layers",
    "and",
    "not",
    "table0",
)
HEAD = ["vertical_and_slash", [0, 7], [1, 40], 0.9]
MINFERENCE = json.dumps([{str(h): HEAD for h in range(4)}] * 2).encode()
TABLE = np.eye(4, dtype=bool) | (np.random.default_rng(0).random((2, 2, 4, 4)) < 0.4)


def saved(save: Callable[..., None], *arrays: np.ndarray, **named: object) -> bytes:
    buffer = io.BytesIO()
    save(buffer, *arrays, **named)
    return buffer.getvalue()


FILES = {
    "pattern.json": MINFERENCE,
    "table.npz": saved(np.savez, blocks=TABLE, block_size=32),
    "packed.npz": saved(np.savez_compressed, blocks=TABLE, block_size=32),
}
PROMPTS = {
    "a.npy": saved(np.save, np.arange(20).reshape(2, 10)),
    "b.json": b"[[1, 2, 3], [4, 5]]",
    "c.npz": FILES["packed.npz"],
}


def mutate_text(text: str, rng: random.Random) -> str:
    for _ in range(rng.randint(1, 2)):
        i = rng.randrange(len(text) + 1)
        text = text[:i] + (rng.choice(WORDS) if rng.random() < 0.6 else "") + text[i + rng.randint(0, 1) :]
    return text


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    for _ in range(rng.randint(1, 2)):
        i = rng.randrange(len(data))
        kind = rng.randrange(4)
        if kind == 0:
            data = data[:i] + bytes([rng.randrange(256)]) + data[i + 1 :]
        elif kind == 1:
            data = data[:i] + rng.randbytes(rng.randint(1, 9)) + data[i:]
        elif kind == 2:
            data = data[:i] + data[i + rng.randint(1, 9) :]
        else:
            data = data[: i + 1]
    return data


def resolve(spec: str) -> None:
    parsed = parse_spec(spec)
    for layer in range(2):
        if (pattern := parsed.resolve(layer, 2, HEADS)) is not None:
            allowed_pairs(pattern, 3, np.arange(70), np.arange(70))


def is_refused(run: Callable[[], object]) -> bool:
    message = ""
    try:
        run()
    except ArgumentError as error:
        message = str(error)
    assert not message or 10 < len(message) < 4000
    return bool(message)


def test_mutated_specifications() -> None:
    rng = random.Random(0)
    refused = sum(is_refused(lambda: resolve(mutate_text(rng.choice(SPECS), rng))) for _ in range(300))
    assert 150 < refused < 300


@pytest.mark.parametrize("name", [*FILES, *PROMPTS])
def test_mutated_files(name: str, tmp_path: Path) -> None:
    rng = random.Random(1)
    path = tmp_path / name
    refused = 0
    for _ in range(60):
        path.write_bytes(mutate_bytes((FILES | PROMPTS)[name], rng))
        refused += is_refused(lambda: resolve(str(path)) if name in FILES else read_prompts(path, []))
    assert 10 < refused <= 60


def test_a_header_that_promises_more_than_the_file_has(tmp_path: Path) -> None:
    data = FILES["table.npz"].replace(b"(2, 2, 4, 4)", b"(9**9,  4, 4)"[:12])
    assert data != FILES["table.npz"]
    (tmp_path / "t.npz").write_bytes(data)
    with pytest.raises(ArgumentError, match=r"t\.npz holds no arrays that can be read"):
        resolve(str(tmp_path / "t.npz"))


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (["stream_llm", 1 << 22, 1 << 22, 1], "128 heads and k up to 4194303: their table exceeds 256 MiB"),
        (
            ["vertical_and_slash", [1], [(1 << 22) - 1]],
            "128 heads and q - k up to 4194303: their table exceeds 256 MiB",
        ),
    ],
)
def test_positions_that_would_exhaust_memory(entry: list[object], message: str, tmp_path: Path) -> None:
    path = tmp_path / "pattern.json"
    path.write_text(json.dumps([{str(h): entry for h in range(128)}] * 2))
    tracemalloc.start()
    try:
        with pytest.raises(ArgumentError, match=message):
            parse_spec(str(path)).resolve(0, 2, HeadCounts(128, 128))
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("ids", [[[1, 1 << 31]], [[1 << 62]], [[-(1 << 40), 3]]])
def test_token_ids_that_no_model_has(ids: list[list[int]], tmp_path: Path) -> None:
    for path in (tmp_path / "p.json", tmp_path / "p.npy"):
        path.write_text(json.dumps(ids)) if path.suffix == ".json" else np.save(path, ids)
        with pytest.raises(
            ArgumentError, match=rf"{path.name}: prompt 0 has token id -?[0-9]+, expected 0 to 2147483647"
        ):
            read_prompts(path, [])
    np.save(tmp_path / "u.npy", np.array([1 << 63], np.uint64))
    with pytest.raises(ArgumentError, match="has token id 9223372036854775808"):
        read_prompts(tmp_path / "u.npy", [])
