# SPDX-License-Identifier: Apache-2.0
"""Batches of texts of different lengths, on which ``--time`` runs a model whose padding is left out."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import NormalDist

import numpy as np

from stof.execution.inputs import InputMaker
from stof.verification.padding.padded_batch import Feed, PaddedBatch, find_padding_value, find_real_value

# Of log-normal lengths: the median as a share of the positions, and the deviation of logarithms.
_MEDIAN, _SIGMA = 0.25, 0.6


def draw_lengths(texts: int, positions: int, rng: np.random.Generator) -> np.ndarray:
    """Log-normal lengths of texts, 1 to the positions that there are: its quantiles, so that few texts stand for many."""
    quantiles = NormalDist(sigma=_SIGMA)
    logarithms = np.array([quantiles.inv_cdf((i + 0.5) / texts) for i in range(texts)])
    lengths = np.clip(np.rint(_MEDIAN * positions * np.exp(logarithms)), 1, positions).astype(np.int64)
    return rng.permutation(lengths)


def pad_texts(batches: Iterable[PaddedBatch], maker: InputMaker, feed: Feed, seed: int = 0) -> tuple[Feed, float]:
    """Inputs whose masks have texts of such lengths, and all positions over those of real tokens.

    Args:
        batches: the batches of the model.
        maker: has drawn the inputs.
        feed: the inputs.
        seed: of the order of lengths.
    """
    padded, rng = dict(feed), np.random.default_rng(seed)
    positions = tokens = 0
    for batch in batches:
        masks = {
            n: value for n in batch.axes if (value := find_padding_value(batch, maker, n)) is not None and n in feed
        }
        if not masks:
            continue
        texts, length = (feed[next(iter(masks))].shape[i] for i in (0, -1))
        lengths = draw_lengths(texts, length, rng)
        positions, tokens = positions + texts * length, tokens + int(lengths.sum())
        for name, value in masks.items():
            rows = np.arange(length) < lengths[:, None]
            rows = rows.reshape(texts, *([1] * (feed[name].ndim - 2)), length)
            real = np.where(feed[name] == value, find_real_value(value), feed[name])
            padded[name] = np.where(rows, real, value).astype(feed[name].dtype)
    return padded, positions / tokens if tokens else 1.0
