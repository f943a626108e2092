# SPDX-License-Identifier: Apache-2.0
"""Reads the pattern files that people hold: DuoAttention's head table, MInference's JSON, block tables as .npz.

Every fault is an ArgumentError that names the file, the key and the value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stof.errors import ArgumentError
from stof.files import read_text, strict_json
from stof.files.archives import read_arrays
from stof.files.strict_json import quoted
from stof.sparsify.patterns import (
    BLOCKS,
    BlockPattern,
    HeadPattern,
    StreamingPattern,
    VerticalSlashPattern,
)
from stof.symbolic import LONGEST

HEADS_FILE, CONFIG_FILE = "full_attention_heads.tsv", "config.json"
_MOST_TEXT = 64 << 20  # bytes of a JSON or a head table
_MOST_LAYERS = 4096
_MOST_HEADS = 1 << 12


@dataclass(frozen=True)
class LayerPatterns:
    """The patterns of a file.

    Attributes:
        source: the file.
        layers: the pattern of each layer; None: dense.
    """

    source: str
    layers: tuple[HeadPattern | None, ...]

    def check_layers(self, count: int) -> None:
        """Refuses a file of a model with other layers.

        Raises:
            ArgumentError: naming both numbers.
        """
        if len(self.layers) != count:
            raise ArgumentError(
                f"--sparsify: {self.source} has {len(self.layers)} layers, the model {count} attentions that can take one"
            )


def read_pattern_file(path: Path, options: Mapping[str, str]) -> HeadPattern | LayerPatterns:
    """The patterns of a file or folder, by its kind.

    Args:
        path: a folder of DuoAttention, a ``.json`` of MInference, a ``.npz`` of block tables.
        options: further fields of the clause.

    Raises:
        ArgumentError: naming the file, the key and the value.
    """
    if path.is_dir():
        return _read_duo(path, _Options(path, options, ("threshold",)))
    if path.suffix == ".json":
        return _read_minference(path, _Options(path, options, ("counts",)))
    if path.suffix == ".npz":
        return _read_blocks(path, _Options(path, options, ("block",)))
    if not path.exists():
        raise ArgumentError(
            f"--sparsify {str(path)!r} is no file, and no pattern: expected s2:local=N,stride=N, window=N, "
            'mask="..." or the path of a pattern file'
        )
    raise ArgumentError(f"--sparsify {path}: expected a folder of DuoAttention, a .json of MInference or a .npz")


class _Options:
    """The fields beside a file's path."""

    def __init__(self, path: Path, values: Mapping[str, str], keys: tuple[str, ...]) -> None:
        self.path, self.values = path, values
        if unknown := sorted(set(values) - set(keys)):
            expected = ", ".join((*keys, "layers", "dense_layers", "heads", "active_heads"))
            raise ArgumentError(f"--sparsify {path} has key {unknown[0]!r}, expected {expected}")

    def error(self, key: str, expected: str) -> ArgumentError:
        return ArgumentError(f"--sparsify {self.path} has {key}={self.values[key]}, expected {expected}")


def _read_duo(folder: Path, options: _Options) -> LayerPatterns:
    """A row of numbers for each layer, a number for each KV head; those above the threshold are dense."""
    threshold = 0.5
    if "threshold" in options.values:
        try:
            threshold = float(options.values["threshold"])
        except ValueError:
            threshold = math.nan
        if not math.isfinite(threshold):
            raise options.error("threshold", "a number")
    path, config_path = folder / HEADS_FILE, folder / CONFIG_FILE
    config = _json_object(config_path)
    sizes = {}
    for key, least in (("sink_size", 0), ("recent_size", 1)):
        value: Any = config.get(key)
        if not _is_integer(value) or not least <= value <= LONGEST:
            raise ArgumentError(
                f"{config_path} has {key} {strict_json.dumps(value)}, expected an integer from {least} to {LONGEST}"
            )
        sizes[key] = int(value)
    rows: list[HeadPattern | None] = []
    width = 0
    for number, line in enumerate(_text(path).splitlines()):
        if not line.strip():
            continue
        dense_heads = []
        for column, word in enumerate(line.split()):
            try:
                share = float(word)
            except ValueError:
                share = math.nan
            if not math.isfinite(share):
                raise ArgumentError(f"{path} has {word!r} in line {number + 1}, column {column + 1}, expected a number")
            dense_heads.append(share > threshold)
        width = width or len(dense_heads)
        if len(dense_heads) != width or width > _MOST_HEADS or len(rows) == _MOST_LAYERS:
            raise ArgumentError(f"{path} has {len(dense_heads)} numbers in line {number + 1}, expected {width}")
        rows.append(
            None
            if all(dense_heads)
            else StreamingPattern(tuple(dense_heads), sizes["sink_size"], sizes["recent_size"], str(path))
        )
    if not rows:
        raise ArgumentError(f"{path} is empty, expected a line for each layer")
    return LayerPatterns(str(path), tuple(rows))


def _read_minference(path: Path, options: _Options) -> LayerPatterns:
    """A list with an object for each layer, which has a list [kind, v, s, score] for each query head.

    v and s of ``vertical_and_slash`` are lists of columns and diagonals, or their numbers, which MInference chooses for each
    prompt: with ``counts=first`` the first v columns and the nearest s diagonals stand for them. Those of ``stream_llm`` are
    sinks and window.
    """
    if options.values.get("counts", "first") != "first":
        raise options.error("counts", "first")
    data = _json(path)
    if not isinstance(data, list) or not 0 < len(data) <= _MOST_LAYERS:
        raise ArgumentError(f"{path} is no pattern of MInference: expected a list with an object for each layer")
    takes_first = "counts" in options.values
    layers = []
    for layer, entry in enumerate(data):
        where = f"{path}: layer {layer}"
        if not isinstance(entry, dict) or not 0 < len(entry) <= _MOST_HEADS:
            raise ArgumentError(f"{where} is {quoted(entry)}, expected an object with a list for each head")
        columns: list[Sequence[int]] = []
        diagonals: list[Sequence[int]] = []
        names = {str(h) for h in range(len(entry))}
        if unknown := sorted(set(entry) - names):
            raise ArgumentError(f"{where} has key {unknown[0]!r}, expected heads 0 to {len(entry) - 1}")
        for head in range(len(entry)):
            positions = _read_head(f"{where}, head {head}", entry[str(head)], takes_first)
            columns.append(positions[0])
            diagonals.append(positions[1])
        layers.append(VerticalSlashPattern(tuple(columns), tuple(diagonals), where))
    return LayerPatterns(str(path), tuple(layers))


def _read_head(where: str, entry: object, takes_first: bool) -> tuple[Sequence[int], Sequence[int]]:
    """Columns and diagonals of a head, in ascending order."""
    if not isinstance(entry, list) or not 3 <= len(entry) <= 4 or not isinstance(entry[0], str):
        raise ArgumentError(f"{where} is {quoted(entry)}, expected [kind, v, s, score]")
    kind, vertical, slash = entry[:3]
    if kind == "block_sparse":
        raise ArgumentError(
            f"{where} is 'block_sparse': its blocks follow from each prompt, and no pattern states them"
        )
    if kind not in ("vertical_and_slash", "stream_llm"):
        raise ArgumentError(f"{where} is {kind!r}, expected 'vertical_and_slash' or 'stream_llm'")
    lists: list[Sequence[int]] = []
    for name, value in (("v", vertical), ("s", slash)):
        if isinstance(value, list) and kind == "vertical_and_slash":
            if not all(_is_integer(x) and 0 <= x < LONGEST for x in value):
                raise ArgumentError(f"{where} has {name} {quoted(value)}, expected positions from 0 on")
            lists.append(tuple(sorted({int(x) for x in value})))
            continue
        if not _is_integer(value) or not 0 <= value <= LONGEST:
            raise ArgumentError(f"{where} has {name} {quoted(value)}, expected a number of keys")
        if kind == "vertical_and_slash" and not takes_first:
            raise ArgumentError(
                f"{where} has {name} {value}: so many columns and diagonals, chosen for each prompt. List them, or add "
                "counts=first to take the first columns and the nearest diagonals"
            )
        lists.append(range(value))
    return lists[0], lists[1]


def _read_blocks(path: Path, options: _Options) -> HeadPattern | LayerPatterns:
    """Array ``blocks`` [heads, M, N] or [layers, heads, M, N], and ``block_size``."""
    arrays = read_arrays("block table", path)
    if unknown := sorted(set(arrays) - {"blocks", "block_size"}):
        raise ArgumentError(f"{path} has array {unknown[0]!r}, expected blocks and block_size")
    if "blocks" not in arrays:
        raise ArgumentError(f"{path} has no array 'blocks'")
    blocks = arrays["blocks"]
    if blocks.dtype != np.bool_ and not (blocks.dtype.kind in "iu" and np.isin(blocks, (0, 1)).all()):
        raise ArgumentError(f"{path} has blocks of {blocks.dtype}, expected booleans, or 0 and 1")
    if blocks.ndim not in (3, 4) or 0 in blocks.shape:
        raise ArgumentError(f"{path} has blocks {list(blocks.shape)}, expected [heads, M, N] or [layers, heads, M, N]")
    block = _block_size(path, arrays, options)
    blocks = blocks.astype(bool)
    rows, columns = blocks.shape[-2:]
    if columns < rows:
        raise ArgumentError(
            f"{path} has blocks with {rows} query and {columns} key blocks, expected as many key blocks"
        )
    if rows * block > LONGEST:
        raise ArgumentError(f"{path} has {rows} blocks of {block}, expected up to {LONGEST} tokens")
    empty = ~(blocks & np.tri(rows, columns, dtype=bool)).any(-1)
    if empty.any():
        empty_block = [int(x) for x in np.argwhere(empty)[0]]
        raise ArgumentError(
            f"{path}: query blocks {empty_block} of blocks have no key block; set their own one, the diagonal"
        )
    if blocks.ndim == 3:
        return BlockPattern(blocks, block, str(path))
    return LayerPatterns(
        str(path),
        tuple(BlockPattern(layer_blocks, block, f"{path}: layer {i}") for i, layer_blocks in enumerate(blocks)),
    )


def _block_size(path: Path, arrays: Mapping[str, np.ndarray], options: _Options) -> int:
    expected = f"one of {', '.join(map(str, BLOCKS))}"
    array = arrays.get("block_size")
    if array is not None and (
        array.size != 1 or array.dtype.kind not in "iu" or int(array.reshape(-1)[0]) not in BLOCKS
    ):
        raise ArgumentError(f"{path} has block_size {array.tolist()}, expected {expected}")
    stated = options.values.get("block")
    if stated is not None and stated not in map(str, BLOCKS):
        raise options.error("block", expected)
    sizes = {int(array.reshape(-1)[0])} if array is not None else set()
    sizes |= {int(stated)} if stated is not None else set()
    if len(sizes) != 1:
        raise ArgumentError(f"{path} has block sizes {sorted(sizes)}, expected one: array block_size, or block=N")
    return sizes.pop()


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _text(path: Path) -> str:
    return read_text("pattern file", path, _MOST_TEXT)


def _json(path: Path) -> Any:
    try:
        return strict_json.loads(_text(path))
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"{path} is no JSON: {error}") from None


def _json_object(path: Path) -> dict[str, Any]:
    data = _json(path)
    if not isinstance(data, dict):
        raise ArgumentError(f"{path} is {quoted(data)}, expected an object")
    if unknown := sorted(set(data) - {"sink_size", "recent_size"} - _OTHER_KEYS):
        raise ArgumentError(f"{path} has key {unknown[0]!r}, expected sink_size and recent_size")
    return data


# What DuoAttention's training writes beside the sizes; it does not change the pattern.
_OTHER_KEYS = frozenset(
    {"model_name", "dataset_name", "output_dir", "lr", "num_steps", "batch_size", "reg_weight", "initial_value"}
    | {"dataset_format", "min_needle_depth_ratio", "max_needle_depth_ratio", "context_lengths_num_intervals"}
    | {"depth_ratio_num_intervals", "context_length_min", "context_length_max", "num_passkeys", "config_name"}
    | {"max_length", "streaming_attn_implementation", "enable_pp", "enable_tp", "seed", "save_steps", "disable_wandb"}
    | {"gradient_accumulation_steps", "rope_theta", "supervision", "train_len", "resume", "max_grad_norm"}
)
