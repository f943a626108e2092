# SPDX-License-Identifier: Apache-2.0
"""Tables by the distance of key and query: made from dense biases, and spread to them again."""

from __future__ import annotations

import numpy as np

from stof.mask.site import RelativeBias

_CONSTANT = 32  # so many equal entries at the end of a table stand for all distances beyond


def tabulate(added: np.ndarray, allowed: np.ndarray, past: int) -> np.ndarray | None:
    """The values of [B, H, S, T] by k - q, NaN where no pair is allowed: [H or 1, 2 R + 1], R the largest distance.

    None where two allowed pairs of one head and distance differ.
    """
    B, H, S, T = added.shape
    radius = max(S - 1 + past, T - 1)
    entry = np.arange(T)[None, :] - np.arange(S)[:, None] - past + radius
    table = np.full((H, 2 * radius + 1), np.nan)
    for b in range(B):
        for h in range(H):
            pairs = allowed[b, h]
            table[h, entry[pairs]] = added[b, h][pairs]
    values = table[:, entry]
    if not np.array_equal(np.broadcast_to(values, added.shape)[allowed], added[allowed]):
        return None
    same = bool(np.all((table == table[:1]) | (np.isnan(table) & np.isnan(table[:1]))))
    return table[:1] if same else table


def shorten(table: np.ndarray, is_fixed: bool) -> np.ndarray | None:
    """The table without its constant ends, of odd length. Distances that no pair has get their neighbour's value.

    ``is_fixed``: no distance beyond the table occurs. None where the values still change at the end of another table.
    """
    radius = table.shape[1] // 2
    entries = np.flatnonzero(~np.isnan(table).all(axis=0))
    if entries.size == 0:
        return np.zeros((1, 1))
    low, high = int(entries[0]), int(entries[-1])
    for entry in range(radius + 1, table.shape[1]):
        table[:, entry] = np.where(np.isnan(table[:, entry]), table[:, entry - 1], table[:, entry])
    for entry in range(radius - 1, -1, -1):
        table[:, entry] = np.where(np.isnan(table[:, entry]), table[:, entry + 1], table[:, entry])
    if np.isnan(table).any():  # the distances with values begin on one side of 0
        fill = table[:, low]
        table = np.where(np.isnan(table), fill[:, None], table)
    least = radius
    while (
        least > 0
        and np.array_equal(table[:, radius - least], table[:, radius - least + 1])
        and np.array_equal(table[:, radius + least], table[:, radius + least - 1])
    ):
        least -= 1
    # Where pairs end before the table does, the mask ends them, whatever the length.
    seen = max(abs(low - radius), abs(high - radius))
    if not is_fixed and seen == radius and least > radius - _CONSTANT:
        return None
    return table[:, radius - least : radius + least + 1]


def table_of(bias: RelativeBias) -> np.ndarray:
    """The table as an array, fp32 [heads, size]."""
    return np.frombuffer(bias.data, np.float32).reshape(bias.heads, bias.size)


def spread(bias: RelativeBias, S: int, T: int, past: int) -> np.ndarray:
    """What a table adds to scores: [1, heads, S, T]."""
    radius = bias.size // 2
    distance = np.arange(T)[None, :] - np.arange(S)[:, None] - past
    added: np.ndarray = table_of(bias)[None, :, np.clip(distance, -radius, radius) + radius]
    return added
