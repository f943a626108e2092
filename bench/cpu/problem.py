# SPDX-License-Identifier: Apache-2.0
"""An attention problem on the CPU: random NumPy inputs, the mask as an array, and some rows of the output in fp64."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import numpy as np

from bench.core.case import AttentionCase
from bench.core.problem import AttentionProblem, MaskDensity
from stof.bench.results import Record
from stof.runtime.library import Mask

_TILE = (48, 64)
_ROWS = 24  # that are checked, of every head
# Of the largest value: some tens of ulp, by another order of summation and another exp in fp32.
TOLERANCE = 2e-5


class CpuProblem(AttentionProblem):
    """Inputs in fp32 of a case with S = T, and its mask."""

    tolerance = TOLERANCE

    def __init__(self, case: AttentionCase, seed: int = 0) -> None:
        super().__init__(case)
        rng = np.random.default_rng(seed)
        shape = (case.B, case.H, case.S, case.D)
        keys = (case.B, case.G, case.S, case.D)
        self.q = rng.standard_normal(shape, np.float32)
        self.k = rng.standard_normal(keys, np.float32)
        self.v = rng.standard_normal(keys, np.float32)
        self.pad = np.ones((case.B, case.S), bool)

    @cached_property
    def allowed(self) -> np.ndarray | None:
        """The mask [S, T] as booleans; None when dense."""
        if not self.case.mask:
            return None
        found: np.ndarray = Mask(self.case.mask, self.case.tables).evaluate(1, 1, self.case.S, self.case.S)[0, 0]
        return found

    @cached_property
    def additive(self) -> np.ndarray:
        """The mask [1, 1, S, T] as exporters write it: 0 or the lowest finite value."""
        size = self.case.S
        found = np.zeros((1, 1, size, size), np.float32)
        if self.allowed is not None:
            found[0, 0][~self.allowed] = np.finfo(np.float32).min
        return found

    @cached_property
    def density(self) -> MaskDensity:
        """The density of the mask, at tiles of 48 x 64."""
        size = self.case.S
        pairs = size * size if self.allowed is None else int(self.allowed.sum())
        rows, columns = -(-size // _TILE[0]), -(-size // _TILE[1])
        tiles = rows * columns
        if self.case.mask:
            block = Mask(self.case.mask, self.case.tables).block_mask(1, 1, size, size, *_TILE)
            tiles = len(block.key_tile)
        heads = self.case.B * self.case.H
        return MaskDensity(pairs / size**2, tiles / (rows * columns), pairs * heads, tiles * heads)

    @property
    def pairs(self) -> int:
        """Allowed pairs, of all heads and batches."""
        return self.density.pairs

    @property
    def tile_flops(self) -> float:
        """Multiplications and additions over whole tiles with an allowed pair."""
        return 4.0 * self.case.D * self.density.tiles * _TILE[0] * _TILE[1]

    @property
    def bytes(self) -> int:
        """Bytes of query, key, value and output."""
        return 2 * self.q.nbytes + self.k.nbytes + self.v.nbytes

    def pack_heads(self, array: np.ndarray) -> np.ndarray:
        """[B, H, S, D] as [B, S, H·D]."""
        b, h, s, d = array.shape
        return np.ascontiguousarray(array.transpose(0, 2, 1, 3)).reshape(b, s, h * d)

    def unpack_heads(self, array: np.ndarray, heads: int) -> np.ndarray:
        """[B, S, H·D] as [B, H, S, D]."""
        b, s, n = array.shape
        found: np.ndarray = array.reshape(b, s, heads, n // heads).transpose(0, 2, 1, 3)
        return found

    @cached_property
    def _reference(self) -> tuple[np.ndarray, np.ndarray]:
        """Row numbers, and the output of those rows of every head in fp64."""
        size, case = self.case.S, self.case
        rng = np.random.default_rng(1)
        rows = np.unique(np.concatenate([[0, size // 2, size - 1], rng.integers(0, size, _ROWS)]))
        found = np.empty((case.B, case.H, len(rows), case.D))
        for b in range(case.B):
            for h in range(case.H):
                g = h // (case.H // case.G)
                scores = self.q[b, h, rows].astype(np.float64) @ self.k[b, g].astype(np.float64).T * self.scale
                if self.allowed is not None:
                    scores[~self.allowed[rows]] = -np.inf
                weights = np.exp(scores - scores.max(-1, keepdims=True))
                weights /= weights.sum(-1, keepdims=True)
                found[b, h] = weights @ self.v[b, g].astype(np.float64)
        return rows, found

    def error(self, output: np.ndarray) -> float:
        """The largest difference from fp64 over the checked rows, relative to the largest value there."""
        rows, expected = self._reference
        if output.shape != self.q.shape:
            raise ValueError(f"output of shape {output.shape}, expected {self.q.shape}")
        return float(np.abs(output[:, :, rows] - expected).max() / np.abs(expected).max())

    def describe(self, threads: int) -> Record:
        """Key, mask, shape and densities."""
        case, density = self.case, self.density
        key = [case.name, case.mask, case.S, threads] if case.grid == "sites" else [case.name, case.shape, threads]
        return {
            "key": key,
            "grid": case.grid,
            "mask": case.mask or "True",
            "mask_name": case.name,
            "shape": {"B": case.B, "H": case.H, "G": case.G, "S": case.S, "D": case.D, "dtype": "fp32"},
            "density": {"element": round(density.element, 5), "tile": round(density.tile, 5), "tile_shape": "48x64"},
        }

    def figures(self, candidate: str, seconds: float, rates: Mapping[str, float]) -> dict[str, float]:
        """Useful GFLOP/s, GB/s, and the share of the roofline, over whole tiles with an allowed pair."""
        del candidate
        roof = max(self.bytes / rates["read_gbps"], self.tile_flops / rates["fma_gflops"]) * 1e-9
        return {
            "useful_gflops": round(self.useful_flops / seconds * 1e-9, 2),
            "gbps": round(self.bytes / seconds * 1e-9, 2),
            "roofline": round(roof / seconds, 3),
        }
