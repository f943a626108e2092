# SPDX-License-Identifier: Apache-2.0
"""Paths that a folder has for each layer of a model, numbered from 0 on."""

from __future__ import annotations

import re
from pathlib import Path

from stof.errors import ArgumentError

MOST_LAYERS = 1000  # of a model whose predictors are read or written


def layer_paths(folder: Path, kind: str, prefix: str, suffix: str = "") -> list[Path]:
    """The entries ``<prefix>0<suffix>``, ``<prefix>1<suffix>`` and so on of a folder, in the order of the layers.

    Args:
        folder: exists.
        kind: ``files`` or ``folders``, for messages.
        prefix: of the names.
        suffix: of the names.

    Raises:
        ArgumentError: naming the folder, when there are none, more than 1000, or one is missing.
    """
    pattern = re.compile(rf"{re.escape(prefix)}(\d{{1,4}}){re.escape(suffix)}")
    numbers = sorted(int(m[1]) for p in folder.iterdir() if (m := pattern.fullmatch(p.name)))
    if not numbers or len(numbers) > MOST_LAYERS:
        raise ArgumentError(
            f"{folder} has {len(numbers)} {kind} {prefix}0{suffix}, {prefix}1{suffix} ..., expected 1 to {MOST_LAYERS}"
        )
    missing = next((i for i in range(len(numbers)) if i not in numbers), None)
    if missing is not None:
        raise ArgumentError(
            f"{folder} has {len(numbers)} {kind} {prefix}N{suffix}, but {prefix}{missing}{suffix} is missing"
        )
    return [folder / f"{prefix}{i}{suffix}" for i in range(len(numbers))]
