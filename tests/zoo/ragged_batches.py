# SPDX-License-Identifier: Apache-2.0
"""Ragged batches for graphs of the zoo, and what outputs on real tokens alone have to be. Imports nothing of stof."""

from __future__ import annotations

import numpy as np

LENGTH = 45
# Of the largest value, beside what two runs of the original differ by.
TOLERANCE = {"float32": 3e-5, "float16": 2e-2, "bfloat16": 3e-2}


def architecture(name: str) -> str:
    """The name of a graph without its folder, exporter and kind of attention."""
    return name.split("/")[-1].rsplit(".", 2)[0]


def ragged_mask(side: str, rng: np.random.Generator) -> np.ndarray:
    """[6, LENGTH]: padded on one side by different lengths, one real token, all, none, and padding between tokens."""
    mask = np.ones((6, LENGTH), np.int64)
    for row, count in ((0, 7), (1, 30), (2, LENGTH - 1)):
        mask[row, slice(0, count) if side == "left" else slice(LENGTH - count, None)] = 0
    mask[4] = 0
    mask[5] = rng.random(LENGTH) < 0.5
    return mask


def counting(mask: np.ndarray) -> np.ndarray:
    """The real tokens, and all rows of a text without one."""
    return np.asarray((mask != 0) | ~mask.any(1, keepdims=True))


def compare(
    original: np.ndarray, legal: np.ndarray, found: np.ndarray, gone: np.ndarray | None, dtype: str, what: str
) -> None:
    """Raises AssertionError where an output is another one.

    Args:
        original: the output of the original.
        legal: that of another run of it, which may differ as much.
        found: the output to look at.
        gone: rows [B, S] that have to be 0; None: none.
        dtype: the model's.
        what: names the output.
    """
    assert found.shape == original.shape, f"{what}: shape {found.shape} instead of {original.shape}"
    if gone is not None:
        assert gone.any(), f"{what}: no row of padding"
        assert not np.any(found[gone]), f"{what}: rows of padding are not 0"
        original, legal, found = (x[~gone] for x in (original, legal, found))
    good = np.isfinite(original) & np.isfinite(legal)
    elsewhere = np.argwhere(np.isfinite(original) != np.isfinite(found))
    assert not len(elsewhere), f"{what}: {len(elsewhere)} elements are finite in one output alone, first {elsewhere[0]}"
    wide = [x[good].astype(np.float64) for x in (original, legal, found)]
    largest, moved, error = (np.abs(x).max(initial=0) for x in (wide[0], wide[0] - wide[1], wide[2] - wide[0]))
    assert error <= 4 * moved + TOLERANCE[dtype] * largest, f"{what}: differs by {error:.2e} of {largest:.2e}"
