# SPDX-License-Identifier: Apache-2.0
"""Low-rank approximations of a weight that keep its matmuls with given tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stof.sparse_mlp.predictors.order_statistics import row_blocks
from stof.sparse_mlp.predictors.selector import Floats

_EXACT = 384  # neurons or token sizes up to here are decomposed exactly
_OVERSAMPLING, _ROUNDS = 16, 3  # extra directions and rounds of the subspace iteration
_SHRINKAGES = (0.02, 0.2, 1.0)  # 1: the tokens are not looked at


def approximate_weight(
    weight: Floats, tokens: Floats, held_out: Floats, rank: int, shrinkages: Sequence[float] = _SHRINKAGES
) -> tuple[Floats, Floats]:
    """Factors (up [F, R], down [R, K]) with up · down close to a weight [F, K] where tokens multiply it.

    The plain truncated SVD minimizes the error of the weight. The error of ``weight · x`` over tokens x is that of
    ``weight · S^(1/2)``, where S is the covariance of the tokens (activation-aware SVD, arXiv 2312.05821). S is estimated
    from few tokens, and so it is shrunk towards a multiple of the unit matrix. The shrinkage with the smallest error on
    held-out tokens is taken.

    Large weights are decomposed by randomized subspace iteration (Halko, Martinsson, Tropp, arXiv 0909.4061).

    Args:
        weight: fp32 [F, K].
        tokens: fp32 [T, K], their mean subtracted.
        held_out: fp32 [H, K], likewise; without a token, the first shrinkage is taken.
        rank: R, at most F and K.
        shrinkages: from 0, the covariance as it is, to 1, the plain SVD.
    """
    best: tuple[float, Floats] | None = None
    for shrinkage in shrinkages if len(held_out) else shrinkages[:1]:
        up = _leading_directions(weight, tokens, rank, shrinkage)
        error = (
            float(np.square(measure_matmul_errors(weight, up, up.T @ weight, held_out)).sum()) if len(held_out) else 0.0
        )
        if best is None or error < best[0]:
            best = error, up
    assert best is not None
    return best[1], best[1].T @ weight


def measure_matmul_errors(weight: Floats, up: Floats, down: Floats, tokens: Floats) -> Floats:
    """By how much approximated matmuls are wrong: root mean square over tokens, by neuron [F]."""
    root_means = np.empty(len(weight), np.float32)
    low = tokens @ down.T
    for rows in row_blocks(len(weight), len(tokens)):
        errors = tokens @ weight[rows].T
        errors -= low @ up[rows].T
        root_means[rows] = np.sqrt(np.einsum("tf,tf->f", errors, errors) / len(tokens))
    return root_means


def _leading_directions(weight: Floats, tokens: Floats, rank: int, shrinkage: float) -> Floats:
    """The leading eigenvectors [F, R] of weight · S · weightᵀ."""
    size = weight.shape[1]
    variance = float(np.einsum("tk,tk->", tokens, tokens, dtype=np.float64)) / max(1, tokens.size)
    if not variance:
        shrinkage, variance = 1.0, 1.0

    def apply_covariance(vectors: Floats) -> Floats:
        """S · vectors [K, ...], never with S itself."""
        shrunk = np.float32(shrinkage * variance) * vectors
        if shrinkage < 1:
            shrunk += (tokens.T @ (tokens @ vectors)) * np.float32((1 - shrinkage) / len(tokens))
        return shrunk

    if min(weight.shape) <= _EXACT:
        return _exact_directions(weight, apply_covariance(np.eye(size, dtype=np.float32)), rank)
    width = min(rank + _OVERSAMPLING, *weight.shape)
    rng = np.random.default_rng(0)  # any directions do; the same ones make results repeat
    basis = rng.standard_normal((len(weight), width), np.float32)
    for _ in range(_ROUNDS):
        basis = np.linalg.qr(weight @ apply_covariance(weight.T @ basis))[0]
    projected = weight.T @ basis
    values, vectors = np.linalg.eigh((projected.T @ apply_covariance(projected)).astype(np.float64))
    return np.asarray(basis @ vectors[:, np.argsort(-values)[:rank]].astype(np.float32))


def _exact_directions(weight: Floats, covariance: Floats, rank: int) -> Floats:
    wide, spread = weight.astype(np.float64), covariance.astype(np.float64)
    if len(weight) <= weight.shape[1]:
        values, vectors = np.linalg.eigh(wide @ spread @ wide.T)
        return np.asarray(vectors[:, np.argsort(-values)[:rank]], np.float32)
    root_values, root_vectors = np.linalg.eigh(spread)
    root = root_vectors * np.sqrt(np.maximum(root_values, 0))
    directions = np.linalg.svd(wide @ root, full_matrices=False)[0]
    return np.asarray(directions[:, :rank], np.float32)
