# SPDX-License-Identifier: Apache-2.0
"""Patterns of papers that are known before the run: the triangle of long prompts, and the radial one of videos."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stof.sparsify.patterns import HeadCounts, HeadPattern
from stof.sparsify.tables import Tables
from stof.symbolic import LONGEST

LEAST_FRAME = 16  # tokens: a table has an entry for each distance of frames among LONGEST tokens


@dataclass(frozen=True)
class TrianglePattern(HeadPattern):
    """First keys, a window, and the last rows of a run dense (TriangleMix, arXiv 2507.21526).

    The paper leaves out what lies between window, first keys and last rows, in layers from a given one on. Here these are the
    second half by default. The last rows are those of a run: of a prompt, or of each chunk of one. So a prompt in chunks has
    the pairs of the whole prompt and more, and a decode step of up to ``last`` tokens is dense.

    Attributes:
        sink: first keys that all queries attend.
        window: last keys that a query attends, its own among them.
        last: the last queries of a prompt or chunk, which attend all keys.
    """

    sink: int = 8
    window: int = 512
    last: int = 128

    @property
    def label(self) -> str:  # type: ignore[override]
        """Sink, window and dense rows."""
        return f"triangle: {self.sink} sinks + window {self.window}, the last {self.last} rows of a run dense"

    @property
    def reach(self) -> int:  # type: ignore[override]
        """A prompt of so many tokens has a row of each kind."""
        return self.sink + self.window + self.last

    def condition(self, heads: HeadCounts, tables: Tables) -> str:
        sink = f" or k < {self.sink}" if self.sink else ""
        return f"q - k < {self.window}{sink} or q >= P + S - {self.last}"

    def default_layers(self, count: int) -> range:
        return range(count // 2, count)


@dataclass(frozen=True)
class RadialPattern(HeadPattern):
    """Windows in space that narrow with the distance in time, over frames of a video (Radial Attention, arXiv 2506.19852).

    A token is token x of frame f. With s tokens in a frame, d = abs(f_q - f_k) and r = 2^floor(log2(max(d, 1))), a pair attends

    * where r <= s: if abs(x_q - x_k) < s // r. So a frame and its neighbours are dense, and each octave of d halves the window;
    * where r > s: if x_q = x_k, and d is a multiple of ceil(r / s). So the share of frame pairs halves with each octave.

    All queries attend the first ``sink`` frames besides, the attention sink of the paper. The pairs are those of the definition,
    not rounded to blocks of a kernel. Attention is bidirectional, and the last frame may be cut off.

    Attributes:
        tokens: s, the tokens of a frame, from 16 on.
        sink: first frames that all queries attend.
    """

    tokens: int
    sink: int = 1
    is_causal = False

    @property
    def label(self) -> str:  # type: ignore[override]
        """Tokens of a frame, and sinks."""
        sink = f" + {self.sink} first frame{'' if self.sink == 1 else 's'}" if self.sink else ""
        return f"radial over frames of {self.tokens} tokens{sink}"

    @property
    def reach(self) -> int:  # type: ignore[override]
        """The first frames, and two octaves of distances whose windows differ."""
        return (self.sink + 8) * self.tokens

    def condition(self, heads: HeadCounts, tables: Tables) -> str:
        s, widths = self.tokens, self.widths()
        distance = f"min(abs(q // {s} - k // {s}), {len(widths) - 1})"
        near = f"abs(q % {s} - k % {s}) < {tables.add(widths)}[{distance}]"
        return f"{near} or k < {self.sink * s}" if self.sink else near

    def widths(self) -> np.ndarray:
        """The width of the window by the distance of frames: int32, one behind the largest distance in space; 0: no pair."""
        distances = np.arange(-(-LONGEST // self.tokens), dtype=np.int64)
        octaves = np.left_shift(1, np.frexp(np.maximum(distances, 1).astype(np.float64))[1].astype(np.int64) - 1)
        diagonal = distances % -(-octaves // self.tokens) == 0
        return np.where(octaves <= self.tokens, self.tokens // octaves, diagonal).astype(np.int32)
