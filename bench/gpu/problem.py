# SPDX-License-Identifier: Apache-2.0
"""An attention problem on the device: rotated random inputs, the mask in every form that a baseline reads, and some rows of
the output in fp64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import numpy as np

from bench.core import run_time
from bench.core.candidate import require
from bench.core.case import AttentionCase
from bench.core.problem import AttentionProblem, MaskDensity
from stof.arguments.precisions import INT8, INT8_FP8
from stof.bench.results import Record
from stof.runtime.library import BlockMask, Mask

LONG_ROWS = 8192  # queries from which on full tiles are compared with dense kernels
TILE = 128  # rows and columns of a tile in densities and rooflines, whatever a kernel's tiles are
# Of the largest value: the softmax weights are rounded to half precision before the second matmul.
TOLERANCE = {"float16": 4e-3, "bfloat16": 3e-2}
# Of the root mean square: with operands of 8 bits single elements say little. stof's own have the bounds of the product.
_EIGHT_BIT_TOLERANCE = 0.1
_OWN_TOLERANCE = {"stof-int8": INT8.max_error, "stof-int8-fp8": INT8_FP8.max_error}
_PAST_L2 = 128 << 20  # bytes of inputs that do not stay in the L2 cache
_MOST_BYTES = 8 << 30
_MOST_SETS = 100
_ROWS = 24
_HEADS = 8
_CHUNK = 1 << 26


class GpuProblem(AttentionProblem):
    """Several sets of inputs, so that each run finds its own outside of the L2 cache, and the mask.

    Raises:
        Unavailable: when torch is not installed.
    """

    def __init__(self, case: AttentionCase, seed: int = 0, device: str = "cuda") -> None:
        super().__init__(case)
        self.torch: Any = require("torch")
        self.device = device
        self.dtype = getattr(self.torch, case.dtype)
        self.tolerance = TOLERANCE.get(case.dtype, 0.0)
        if case.grid == "8-bit":
            self.tolerance, self.relative_to = _EIGHT_BIT_TOLERANCE, "the root mean square"
        self._seed = seed
        self._layouts: dict[str, list[tuple[Any, Any, Any]]] = {}
        self.count = 1

    def tolerance_of(self, candidate: str) -> float:
        """As of the base class."""
        return _OWN_TOLERANCE.get(candidate, self.tolerance)

    @property
    def pairs(self) -> int:
        """Allowed pairs, of all heads and batches."""
        return self.density.pairs

    @property
    def bytes(self) -> int:
        """Bytes of query, output, and the keys and values that some query attends."""
        case = self.case
        queries = 2 * case.B * case.H * case.S * case.D
        keys = 2 * case.B * case.G * case.T * case.D * self.density.keys
        return int(2 * (queries + keys))

    def describe(self, threads: int) -> Record:
        """Key, mask, shape, densities, and how many sets of inputs take turns."""
        del threads
        case, density = self.case, self.density
        return {
            "key": case.key,
            "grid": case.grid,
            "mask": case.mask or "True",
            "mask_name": case.name,
            "shape": {
                "B": case.B, "H": case.H, "G": case.G, "S": case.S, "T": case.T, "D": case.D, "dtype": case.dtype,
            },
            "density": {
                "element": round(density.element, 6), "tile": round(density.tile, 6),
                "tile_shape": f"{TILE}x{TILE}", "tiles": density.tiles,
            },
            "bytes": self.bytes,
            "rotated": self.count,
        }  # fmt: skip

    def figures(self, candidate: str, seconds: float, rates: Mapping[str, float]) -> dict[str, float]:
        """Useful TFLOP/s and GB/s; the roofline follows when the machine's rates are known."""
        del candidate, rates
        return {
            "useful_tflops": round(self.useful_flops / seconds * 1e-12, 2),
            "gbps": round(self.bytes / seconds * 1e-9, 1),
        }

    def rotate(self) -> None:
        """Makes enough sets of inputs to exceed the L2 cache twice."""
        case = self.case
        held = 4 * case.B * (case.H * case.S + case.G * case.T) * case.D
        count = min(_MOST_SETS, math.ceil(_PAST_L2 / self.bytes), _MOST_BYTES // held)
        self.count = max(1 if held > _MOST_BYTES else 2, count)  # one such set exceeds L2 by itself
        self._layouts.clear()

    def sets(self, layout: str = "BHSD") -> list[tuple[Any, Any, Any]]:
        """(q, k, v) of every set: BHSD, BSHD (or BSN, the same memory)."""
        if layout not in self._layouts:
            if layout == "BHSD":
                self._layouts[layout] = [self._inputs(i) for i in range(self.count)]
            else:
                kept = self.sets("BHSD")
                self._layouts[layout] = [tuple(x.transpose(1, 2).contiguous() for x in one) for one in kept]
        return self._layouts[layout]

    def release(self) -> None:
        """Frees the inputs."""
        self._layouts.clear()
        self.count = 1

    def _inputs(self, number: int) -> tuple[Any, Any, Any]:
        case, torch = self.case, self.torch
        random = torch.Generator(device=self.device).manual_seed(1000 * self._seed + number)
        shapes = [(case.B, case.H, case.S), (case.B, case.G, case.T), (case.B, case.G, case.T)]
        q, k, v = (
            torch.randn(*shape, case.D, device=self.device, dtype=self.dtype, generator=random) for shape in shapes
        )
        if case.grid == "run-time":  # the keys that the mask allows are those that decide
            last = torch.tensor([case.T - 1], device=self.device)
            decides = self.rows(torch.zeros(1, dtype=torch.long, device=self.device), last)[0, 0]
            q[..., 0] = run_time.lift(case.D)
            k[..., 0] = torch.where(decides, run_time.lift(case.D), 0.0).to(self.dtype)
        return q, k, v

    @cached_property
    def allowed(self) -> Callable[..., Any]:
        """The mask as a function of index tensors (b, h, q, k); q counts from P."""
        case = self.case
        tables = {n: self.torch.from_numpy(np.ascontiguousarray(t)).to(self.device) for n, t in case.tables.items()}
        decide = case.expression.as_function({**tables, "S": case.S, "T": case.T, "P": case.P})
        return decide if case.mask else lambda _b, _h, _q, k: k == k

    @cached_property
    def by_head(self) -> bool:
        """Whether heads differ."""
        return bool(self.case.mask) and len(self.blocks.layout[0]) > 1

    def rows(self, h: Any, positions: Any) -> Any:
        """The mask [heads, rows, T] of some heads and query positions."""
        torch = self.torch
        keys = torch.arange(self.case.T, device=self.device)
        found = self.allowed(0, h[:, None, None], positions[None, :, None], keys[None, None, :])
        return torch.broadcast_to(found, (len(h), len(positions), self.case.T))

    @cached_property
    def dense(self) -> Any:
        """The mask as booleans [1, 1 or H, S, T] on the device; large."""
        torch, case = self.torch, self.case
        heads = case.H if self.by_head else 1
        found = torch.empty((1, heads, case.S, case.T), dtype=torch.bool, device=self.device)
        step = max(1, _CHUNK // (heads * case.T))
        for start in range(0, case.S, step):
            positions = torch.arange(start, min(start + step, case.S), device=self.device) + case.P
            found[0, :, start : start + step] = self.rows(torch.arange(heads, device=self.device), positions)
        return found

    @cached_property
    def additive(self) -> Any:
        """The mask as 0 and the lowest finite value of the dtype."""
        torch = self.torch
        found = torch.zeros(self.dense.shape, dtype=self.dtype, device=self.device)
        return found.masked_fill_(~self.dense, torch.finfo(self.dtype).min)

    @cached_property
    def blocks(self) -> BlockMask:
        """The mask at tiles of 128 × 128, as the library classifies them."""
        case = self.case
        return Mask(case.mask or "True", case.tables).block_mask(1, case.H, case.S, case.T, TILE, TILE, case.P)

    @cached_property
    def density(self) -> MaskDensity:
        """The density of the mask, at tiles of 128 x 128."""
        case = self.case
        rows, columns = -(-case.S // TILE), -(-case.T // TILE)
        if case.S < TILE:
            return self._density_of_rows(rows * columns)
        if not case.mask:
            pairs, tiles, keys = case.S * case.T * case.H, rows * columns * case.H, 1.0
        else:
            blocks = self.blocks
            per_tile = np.full(len(blocks.key_tile), TILE * TILE, np.int64)
            partial = blocks.bits_id >= 0
            counts = np.bitwise_count(blocks.bits).sum((1, 2), dtype=np.int64)
            per_tile[partial] = counts[blocks.bits_id[partial]]
            sums = np.concatenate([[0], np.cumsum(per_tile)])
            bounds = blocks.row_ptr[:: blocks.rows]
            tables = blocks.layout[0, [h % blocks.layout.shape[1] for h in range(case.H)]]
            pairs = int((sums[bounds[tables + 1]] - sums[bounds[tables]]).sum())
            tiles = int((bounds[tables + 1] - bounds[tables]).sum())
            keys = len(np.unique(blocks.key_tile)) / columns
        return MaskDensity(
            pairs / (case.S * case.T * case.H), tiles / (rows * columns * case.H), pairs * case.B, tiles * case.B, keys
        )

    def _density_of_rows(self, tiles: int) -> MaskDensity:
        """The density for few queries, from the mask itself. ``tiles``: all tiles of a head."""
        case, torch = self.case, self.torch
        allowed = self.rows(torch.arange(case.H, device=self.device), torch.arange(case.S, device=self.device) + case.P)
        pairs = int(allowed.sum())
        padded = torch.nn.functional.pad(allowed, (0, -case.T % TILE)).reshape(case.H, case.S, -1, TILE)
        kept = int(padded.any(-1).any(1).sum())
        # The query heads of a group share their keys.
        group = allowed.reshape(case.G, case.H // case.G, case.S, case.T).any(2).any(1)
        return MaskDensity(
            pairs / (case.S * case.T * case.H),
            kept / (tiles * case.H),
            pairs * case.B,
            kept * case.B,
            int(group.sum()) / (case.G * case.T),
        )

    @property
    def full_tiles(self) -> bool:
        """Whether all tiles are full or empty, and some are empty."""
        return self.density.element == self.density.tile < 1

    @cached_property
    def _reference(self) -> tuple[Any, Any, Any, Any]:
        """Batches, heads and rows that are checked, and set 0's output there in fp64."""
        case, torch = self.case, self.torch
        rng = np.random.default_rng(1)
        pairs = rng.permutation(case.B * case.H)[:_HEADS]
        rows = np.unique(np.concatenate([[0, case.S // 2, case.S - 1], rng.integers(0, case.S, _ROWS)]))
        b, h, r = (torch.from_numpy(x).to(self.device) for x in (pairs // case.H, pairs % case.H, rows))
        q, k, v = self.sets()[0]
        g = h // (case.H // case.G)
        scores = q[b[:, None], h[:, None], r[None]].double() @ k[b, g].double().transpose(1, 2) * self.scale
        scores.masked_fill_(~self.rows(h, r + case.P), -math.inf)
        return b, h, r, torch.softmax(scores, -1) @ v[b, g].double()

    def error(self, output: Any) -> float:
        """The largest difference of set 0's output [B, H, S, D] from fp64, relative to the largest value there.

        In the grid 8-bit: the root mean square of the differences over that of fp64.
        """
        b, h, r, expected = self._reference
        found = output[b[:, None], h[:, None], r[None]].double()
        if self.case.grid == "8-bit":
            return float((found - expected).norm() / expected.norm())
        return float((found - expected).abs().max() / expected.abs().max())

    def check_mask(self) -> None:
        """Compares the number of allowed pairs in the library's tiles with that of the evaluated expression.

        Raises:
            ValueError: when they differ.
        """
        case, torch = self.case, self.torch
        if case.S * case.T > 1 << 24 or not case.mask or case.S < TILE:
            return
        heads = case.H if self.by_head else 1
        positions = torch.arange(case.S, device=self.device) + case.P
        pairs = sum(int(self.rows(torch.tensor([h], device=self.device), positions).sum()) for h in range(heads))
        pairs *= case.B * case.H // heads
        if pairs != self.density.pairs:
            raise ValueError(f"{case}: {pairs} pairs by the expression, {self.density.pairs} by the block mask")
