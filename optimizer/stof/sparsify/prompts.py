# SPDX-License-Identifier: Apache-2.0
"""Prompts on which the loss of a pattern is measured: token ids, or texts beside a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stof import strict_json
from stof.errors import ArgumentError
from stof.files import read_text
from stof.sparsify.archives import read_arrays

TOKENIZER = "tokenizer.json"
_MOST_PROMPTS = 4096
_EXPECTED = "expected .npy or .npz with integer arrays [S] or [B, S], .json with lists of ids or texts, or .txt"


def read_prompts(path: Path, folders: Sequence[Path]) -> list[np.ndarray]:
    """The token ids of each prompt, int64 [S].

    Args:
        path: arrays or lists of ids, or texts.
        folders: where a ``tokenizer.json`` may lie, for texts.

    Raises:
        ArgumentError: naming the file, the prompt and the value.
    """
    kind = path.suffix.lower()
    if kind == ".txt":
        found = _encode(path, [read_text("prompts", path)], folders)
    elif kind == ".json":
        found = _read_json(path, folders)
    elif kind in (".npy", ".npz"):
        found = _read_arrays(path)
    else:
        raise ArgumentError(f"--prompts {path}: {_EXPECTED}")
    if not 0 < len(found) <= _MOST_PROMPTS:
        raise ArgumentError(f"--prompts {path} has {len(found)} prompts, expected 1 to {_MOST_PROMPTS}")
    for i, ids in enumerate(found):
        if not ids.size:
            raise ArgumentError(f"--prompts {path}: prompt {i} has no token")
        if ids.min() < 0:
            raise ArgumentError(f"--prompts {path}: prompt {i} has token id {int(ids.min())}, expected ids from 0 on")
    return found


def _read_arrays(path: Path) -> list[np.ndarray]:
    arrays = read_arrays("prompts", path)
    found: list[np.ndarray] = []
    for name, array in arrays.items():
        if array.dtype.kind not in "iu" or array.ndim not in (1, 2):
            what = f"array {name!r}" if name else "an array"
            raise ArgumentError(f"--prompts {path} has {what} of {array.dtype} {list(array.shape)}; {_EXPECTED}")
        found += list(np.atleast_2d(array.astype(np.int64)))
    return found


def _read_json(path: Path, folders: Sequence[Path]) -> list[np.ndarray]:
    try:
        data: Any = strict_json.loads(read_text("prompts", path))
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"--prompts {path} is no JSON: {error}") from None
    if not isinstance(data, list):
        raise ArgumentError(f"--prompts {path} is no list; {_EXPECTED}")
    if data and all(isinstance(x, str) for x in data):
        return _encode(path, data, folders)
    found = []
    for i, row in enumerate([data] if all(_is_id(x) for x in data) else data):
        if not isinstance(row, list) or not all(_is_id(x) for x in row):
            raise ArgumentError(f"--prompts {path}: prompt {i} is no list of token ids; {_EXPECTED}")
        found.append(np.array(row, np.int64))
    return found


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 31


def _encode(path: Path, texts: Sequence[str], folders: Sequence[Path]) -> list[np.ndarray]:
    try:
        import tokenizers  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        raise ArgumentError(
            f"--prompts {path} holds text, which package tokenizers turns into token ids: pip install tokenizers, or give ids"
        ) from None
    places = [path.parent, *folders]
    file = next((p / TOKENIZER for p in places if (p / TOKENIZER).is_file()), None)
    if file is None:
        raise ArgumentError(
            f"--prompts {path} holds text, and there is no {TOKENIZER} beside it or the model; give ids"
        )
    try:
        tokenizer = tokenizers.Tokenizer.from_str(read_text("tokenizer", file))
        return [np.array(tokenizer.encode(text).ids, np.int64) for text in texts]
    except Exception as error:  # the package raises Exception itself
        raise ArgumentError(f"{file} is no tokenizer that reads {path}: {error}") from None
