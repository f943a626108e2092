# SPDX-License-Identifier: Apache-2.0
"""Graphs between scores and softmax as ONNX text, and what they mean in fp64."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Feeds = dict[str, np.ndarray]
Meaning = Callable[[np.ndarray, Feeds], np.ndarray]  # of scores [B, H, S, T]

# Positions of queries (qs, [S, 1]) and keys (ks, [1, T]) of scores s.
POSITIONS = """
    zero = Constant <value = int64 {0}> ()
    one = Constant <value = int64 {1}> ()
    at0 = Constant <value = int64[1] {0}> ()
    at1 = Constant <value = int64[1] {1}> ()
    qn1 = Shape <start = 2, end = 3> (s)
    kn1 = Shape <start = 3, end = 4> (s)
    qn = Squeeze (qn1, at0)
    kn = Squeeze (kn1, at0)
    qr = Range (zero, qn, one)
    kr = Range (zero, kn, one)
    qs = Unsqueeze (qr, at1)
    ks = Unsqueeze (kr, at0)
    inf = Constant <value = float {-inf}> ()
    lowest = Constant <value = float {-3.4028234663852886e38}> ()
    nothing = Constant <value = float {0.0}> ()
"""


def allowed(condition: Callable[[np.ndarray, np.ndarray, Feeds], np.ndarray], fill: float = -np.inf) -> Meaning:
    """A condition on positions q [S, 1] and k [1, T], and on the inputs; ``fill`` in the place of other scores."""

    def mean(scores: np.ndarray, feeds: Feeds) -> np.ndarray:
        q, k = np.arange(scores.shape[2])[:, None], np.arange(scores.shape[3])[None]
        return np.where(condition(q, k, feeds), scores, fill)

    return mean


def attend(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float, meaning: Callable[[np.ndarray], np.ndarray]
) -> np.ndarray:
    """Attention in fp64 over key heads that query heads share; a row without a key is NaN."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    scores = meaning(q @ np.swapaxes(k, 2, 3) * scale)
    with np.errstate(invalid="ignore"):
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights = weights / weights.sum(-1, keepdims=True)
    out: np.ndarray = weights @ v
    return out
