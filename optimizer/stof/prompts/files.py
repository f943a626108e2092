# SPDX-License-Identifier: Apache-2.0
"""Prompts: token ids, or texts beside a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from stof.errors import ArgumentError
from stof.files import read_text, strict_json
from stof.files.archives import read_arrays

TOKENIZER = "tokenizer.json"
TOKENS = "input_ids"  # the model's input
_MOST_PROMPTS = 4096
_MOST_ID = 1 << 31  # as int32 has it
_EXPECTED = "expected .npy or .npz with integer arrays [S] or [B, S], .json with lists of ids or texts, or .txt"


@dataclass(frozen=True, eq=False)
class PromptSet:
    """Prompts, and where they come from.

    Attributes:
        source: for people: "--prompts held_out.npz".
        prompts: token ids of each, int64 [S].
    """

    source: str
    prompts: tuple[np.ndarray, ...]

    @property
    def tokens(self) -> int:
        """Of all prompts."""
        return sum(len(ids) for ids in self.prompts)


def read_prompts(path: Path, folders: Sequence[Path], option: str = "--prompts") -> list[np.ndarray]:
    """The token ids of each prompt, int64 [S].

    Args:
        path: arrays or lists of ids, or texts.
        folders: where a ``tokenizer.json`` may lie, for texts.
        option: that names the file, for messages.

    Raises:
        ArgumentError: naming the file, the prompt and the value.
    """
    kind = path.suffix.lower()
    if kind == ".txt":
        prompts = _encode(path, [read_text("prompts", path)], folders, option)
    elif kind == ".json":
        prompts = _read_json(path, folders, option)
    elif kind in (".npy", ".npz"):
        prompts = _read_arrays(path, option)
    else:
        raise ArgumentError(f"{option} {path}: {_EXPECTED}")
    if not 0 < len(prompts) <= _MOST_PROMPTS:
        raise ArgumentError(f"{option} {path} has {len(prompts)} prompts, expected 1 to {_MOST_PROMPTS}")
    for i, ids in enumerate(prompts):
        if not ids.size:
            raise ArgumentError(f"{option} {path}: prompt {i} has no token")
        if outside := [int(x) for x in (ids.min(), ids.max()) if not 0 <= x < _MOST_ID]:
            raise ArgumentError(f"{option} {path}: prompt {i} has token id {outside[0]}, expected 0 to {_MOST_ID - 1}")
    return [ids.astype(np.int64) for ids in prompts]


def check_vocabulary(
    path: Path, prompts: Sequence[np.ndarray], graph: onnx.GraphProto, option: str = "--prompts"
) -> None:
    """Refuses token ids beyond the rows of an embedding that the model looks them up in.

    Args:
        path: of the prompts.
        prompts: token ids of each.
        graph: of the model.
        option: that names the file, for messages.

    Raises:
        ArgumentError: naming the file, the prompt and the id.
    """
    rows = {t.name: t.dims[0] for t in graph.initializer if t.dims}
    lookups = [n for n in graph.node if n.op_type == "Gather" and list(n.input[1:2]) == [TOKENS]]
    tables = [n.input[0] for n in lookups if not any(a.i for a in n.attribute)]  # axis 0
    for table in (t for t in tables if t in rows):
        for i, ids in enumerate(prompts):
            if ids.max() >= rows[table]:
                raise ArgumentError(
                    f"{option} {path}: prompt {i} has token id {int(ids.max())}, expected 0 to {rows[table] - 1}: the "
                    f"model's embedding {table!r} has {rows[table]} rows"
                )


def _read_arrays(path: Path, option: str) -> list[np.ndarray]:
    arrays = read_arrays("prompts", path)
    prompts: list[np.ndarray] = []
    for name, array in arrays.items():
        if array.dtype.kind not in "iu" or array.ndim not in (1, 2):
            what = f"array {name!r}" if name else "an array"
            raise ArgumentError(f"{option} {path} has {what} of {array.dtype} {list(array.shape)}; {_EXPECTED}")
        prompts += list(np.atleast_2d(array))
    return prompts


def _read_json(path: Path, folders: Sequence[Path], option: str) -> list[np.ndarray]:
    try:
        data: Any = strict_json.loads(read_text("prompts", path))
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"{option} {path} is no JSON: {error}") from None
    if not isinstance(data, list):
        raise ArgumentError(f"{option} {path} is no list; {_EXPECTED}")
    if data and all(isinstance(x, str) for x in data):
        return _encode(path, data, folders, option)
    prompts = []
    for i, row in enumerate([data] if all(_is_id(x) for x in data) else data):
        if not isinstance(row, list) or not all(_is_id(x) for x in row):
            raise ArgumentError(f"{option} {path}: prompt {i} is no list of token ids; {_EXPECTED}")
        prompts.append(np.array(row, np.int64))
    return prompts


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 63


def _encode(path: Path, texts: Sequence[str], folders: Sequence[Path], option: str) -> list[np.ndarray]:
    try:
        import tokenizers  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        raise ArgumentError(
            f"{option} {path} holds text, which package tokenizers turns into token ids: pip install tokenizers, or give ids"
        ) from None
    places = [path.parent, *folders]
    file = next((p / TOKENIZER for p in places if (p / TOKENIZER).is_file()), None)
    if file is None:
        raise ArgumentError(f"{option} {path} holds text, and there is no {TOKENIZER} beside it or the model; give ids")
    try:
        tokenizer = tokenizers.Tokenizer.from_str(read_text("tokenizer", file))
        return [np.array(tokenizer.encode(text).ids, np.int64) for text in texts]
    except Exception as error:  # the package raises Exception itself
        raise ArgumentError(f"{file} is no tokenizer that reads {path}: {error}") from None
