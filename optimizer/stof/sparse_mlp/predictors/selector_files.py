# SPDX-License-Identifier: Apache-2.0
"""Files with the selectors of a model: an .npz (docs/reference/predictor-format.md)."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from stof.archives import read_arrays
from stof.errors import ArgumentError
from stof.files import temporary_file
from stof.sparse_mlp.predictors.selector import NeuronSelector

_WHAT = "predictor file"
_VERSION = 1
_MOST_BYTES = 1 << 33
_MOST_LAYERS = 1000
_NAME = re.compile(r"(\d{1,4})\.(threshold|predictor_down|predictor_up|predictor_relu)")


def write_selectors(path: Path, selectors: Sequence[NeuronSelector]) -> None:
    """Writes the selectors of a model, in the order of its MLPs, whole or not at all.

    Raises:
        ArgumentError: naming the file, when it cannot be written; for none, or more than 1000 selectors.
    """
    if not 1 <= len(selectors) <= _MOST_LAYERS:
        raise ArgumentError(f"{len(selectors)} selectors, expected 1 to {_MOST_LAYERS}")
    arrays: dict[str, np.ndarray] = {"version": np.array(_VERSION, np.int64)}
    for i, selector in enumerate(selectors):
        arrays[f"{i}.threshold"] = selector.threshold
        if selector.predictor_down is not None and selector.predictor_up is not None:
            arrays[f"{i}.predictor_down"] = selector.predictor_down
            arrays[f"{i}.predictor_up"] = selector.predictor_up
            if selector.predictor_activation == "relu":
                arrays[f"{i}.predictor_relu"] = np.array(1, np.int64)
    try:
        with temporary_file(path.parent) as new:
            held = io.BytesIO()
            np.savez(held, **arrays)  # type: ignore[arg-type]
            new.write(held.getbuffer())
            new.replace(path)
    except OSError as error:
        raise ArgumentError(f"the {_WHAT} {path} cannot be written: {error.strerror or error}") from error


def read_selectors(path: Path) -> list[NeuronSelector]:
    """The selectors of a model, in the order of its MLPs.

    Raises:
        ArgumentError: naming the file and the array, when it is damaged, or an array is missing, unknown, or of another
            type or shape.
    """
    arrays = read_arrays(_WHAT, path, _MOST_BYTES)
    version = arrays.pop("version", None)
    if version is None or version.shape or version.dtype.kind not in "iu" or int(version) != _VERSION:
        found = "no version" if version is None else f"version {version.dtype} {list(version.shape)}"
        found = (
            f"version {int(version)}"
            if version is not None and not version.shape and version.dtype.kind in "iu"
            else found
        )
        raise ArgumentError(f"the {_WHAT} {path} has {found}, expected {_VERSION}; write it again")
    layers: dict[int, dict[str, np.ndarray]] = {}
    for name, array in arrays.items():
        match = _NAME.fullmatch(name)
        if match is None or str(int(match[1])) != match[1]:
            raise ArgumentError(f"the {_WHAT} {path} has an array {name!r}, expected names such as 0.threshold")
        layers.setdefault(int(match[1]), {})[match[2]] = array
    if sorted(layers) != list(range(len(layers))) or not layers:
        raise ArgumentError(
            f"the {_WHAT} {path} has {len(layers)} selectors, expected numbers from 0 on, without a gap"
        )
    return [_selector(path, i, layers[i]) for i in range(len(layers))]


def _selector(path: Path, index: int, arrays: dict[str, np.ndarray]) -> NeuronSelector:
    relu = arrays.get("predictor_relu")
    if "threshold" not in arrays:
        raise ArgumentError(f"the {_WHAT} {path} has no array {index}.threshold")
    if relu is not None and (relu.shape or relu.dtype.kind not in "iu" or int(relu) != 1):
        raise ArgumentError(
            f"{index}.predictor_relu of the {_WHAT} {path} is {relu.dtype} {list(relu.shape)}, expected 1"
        )
    try:
        return NeuronSelector(
            arrays["threshold"],
            arrays.get("predictor_down"),
            arrays.get("predictor_up"),
            "none" if relu is None else "relu",
        )
    except ArgumentError as error:
        raise ArgumentError(f"selector {index} of the {_WHAT} {path}: {error}") from None
