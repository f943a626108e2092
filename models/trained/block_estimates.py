# SPDX-License-Identifier: Apache-2.0
"""Compares cheap estimates of which 128 x 128 blocks of the trained models' attention matter. Needs numpy only.

``python models/trained/block_estimates.py {prompts,documents} [--length N] [--texts N] [--shares 0.1 0.25 0.5] [--layers 0 1]``

Each estimate gives a number for a pooled query and a pooled key. A block is kept where one of its numbers is close enough to the
largest one of the same pooled query, or where it has the first key or the queries' own positions. How close is close enough is
chosen for each layer so that a given share of the blocks is kept. Printed for each estimate and share:

* multiplications, relative to those of Q K^T, and the share of the blocks that is kept;
* the softmax mass that the blocks keep, the mean of all rows, by layer;
* the share of right answers of the model whose attention is restricted to the blocks.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from retrieval_models import HEADS, NAMES
from retrieval_numpy import DRAW, SCALE, Model, right_answers
from retrieval_texts import Texts

BLOCK = 128


@dataclass(frozen=True)
class Estimate:
    """A way to estimate the scores of a pooled query and a pooled key.

    Attributes:
        kind: "means" of pools; "antidiagonals" of a pool of queries and one of keys, whose pairs are summed; "bounds" on the
            scores of a mean query with keys between a smallest and a largest one; "samples": one query of a pool, all keys.
        queries: of a pool.
        keys: of a pool.
    """

    kind: str
    queries: int
    keys: int

    @property
    def cost(self) -> float:
        """Multiplications relative to Q K^T. Those of the means are additions, and do not count."""
        pairs = self.queries * self.keys
        return {"antidiagonals": self.queries, "bounds": 2}.get(self.kind, 1) / pairs

    def scores(self, q: np.ndarray, k: np.ndarray) -> np.ndarray:
        """Estimated scores of a head, [pooled queries, pooled keys], from q and k [S, D]."""
        queries, keys = (x.reshape(-1, n, x.shape[1]) for x, n in ((q, self.queries), (k, self.keys)))
        if self.kind == "samples":
            return np.asarray(queries[:, self.queries // 2] @ keys[:, 0].T * SCALE)
        if self.kind == "antidiagonals":
            backwards = keys[:, ::-1].reshape(len(keys), -1)
            return np.asarray(queries.reshape(len(queries), -1) @ backwards.T * (SCALE / self.queries))
        means = queries.mean(1)
        if self.kind == "bounds":
            over, under = np.maximum(means, 0), np.minimum(means, 0)
            return np.asarray((over @ keys.max(1).T + under @ keys.min(1).T) * SCALE)
        return np.asarray(means @ keys.mean(1).T * SCALE)

    def margins(self, q: np.ndarray, k: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """How far each block, at its best pooled key, is below the largest estimate of a pooled query: [blocks, blocks], <= 0.

        Args:
            q: of a head, [S, D].
            k: likewise.
            counts: the blocks that the mask leaves, bool [blocks, blocks].
        """
        n = len(counts)
        scores = self.scores(q, k).reshape(n, BLOCK // self.queries, n, BLOCK // self.keys).max(3)
        scores = np.where(counts[:, None], scores, -np.inf)
        return np.asarray((scores - scores.max(2, keepdims=True)).max(1))


_MEANS = ((1, 1), (1, 32), (2, 16), (4, 8), (8, 4), (8, 8), (16, 2), (16, 4), (32, 1), (32, 2))
ESTIMATES = (
    *(Estimate("means", a, b) for a, b in _MEANS),
    *(Estimate("antidiagonals", n, n) for n in (8, 16, 32)),
    Estimate("bounds", 8, 8),
    Estimate("samples", 32, 1),
)


def counted_blocks(model: Model, length: int) -> np.ndarray:
    """The blocks that the mask leaves, bool [blocks, blocks]."""
    n = length // BLOCK
    return np.tri(n, dtype=bool) if model.is_causal else np.ones((n, n), bool)


def attend(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, blocks: np.ndarray, is_causal: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Attention of a head restricted to blocks.

    Returns:
        The output [S, D], and each row's share of the weights by key block, [S, blocks].
    """
    output, masses = np.empty_like(v), np.zeros((len(q), blocks.shape[1]), np.float32)
    columns = np.arange(len(k)).reshape(-1, BLOCK)
    for i, chosen in enumerate(blocks):
        rows = slice(i * BLOCK, (i + 1) * BLOCK)
        keys = columns[chosen].ravel()
        scores = q[rows] @ k[keys].T * np.float32(SCALE)
        if is_causal:
            scores[np.arange(rows.start, rows.stop)[:, None] < keys] = -np.inf
        weights = np.exp(scores - scores.max(1, keepdims=True))
        weights /= weights.sum(1, keepdims=True)
        output[rows] = weights @ v[keys]
        masses[rows, chosen] = weights.reshape(BLOCK, -1, BLOCK).sum(2)
    return output, masses


@dataclass(frozen=True, eq=False)
class Sample:
    """A text, and what exact attention has of it.

    Attributes:
        text: one text.
        queries: of each layer and head, [L, H, S, D].
        keys: likewise.
        masses: the share of each row's weights by key block, [L, H, S, blocks].
    """

    text: Texts
    queries: np.ndarray
    keys: np.ndarray
    masses: np.ndarray


def sample_of(model: Model, text: Texts) -> tuple[Sample, float]:
    """A text under exact attention, and the share of its answers that are right."""
    x = model.embed(text.ids[0])
    blocks = counted_blocks(model, len(x))
    found: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    for layer in range(model.layers):
        q, k, v = model.project(layer, x)
        heads = [attend(q[h], k[h], v[h], blocks, model.is_causal) for h in range(HEADS)]
        found.append((q, k, np.stack([m for _, m in heads])))
        x = model.finish(layer, x, np.stack([y for y, _ in heads]))
    queries, keys, masses = (np.stack(part) for part in zip(*found, strict=True))
    return Sample(text, queries, keys, masses), float(right_answers(model.logits(x), text, model.is_causal).mean())


def choose(margins: np.ndarray, least: float, counts: np.ndarray) -> np.ndarray:
    """The blocks that are kept: own ones, the first one, and those whose margin is not below ``least``."""
    own = np.eye(len(counts), dtype=bool)
    own[:, 0] = True
    return np.asarray((own | (margins >= least)) & counts)


def find_least(margins: Sequence[np.ndarray], share: float, counts: np.ndarray) -> float:
    """The margin with which a share of the blocks that count is kept, or more where first and own blocks are more."""
    forced = choose(np.full(counts.shape, -np.inf), 0.0, counts)
    free = np.sort(np.concatenate([m[counts & ~forced] for m in margins]))[::-1]
    wanted = round((share * counts.sum() - forced.sum()) * len(margins))
    return float(free[min(wanted, len(free)) - 1]) if wanted > 0 else math.inf


def restricted_share(model: Model, estimate: Estimate, least: Mapping[int, float], text: Texts) -> float:
    """The share of a text's answers that are right where layers are restricted to the blocks of an estimate.

    Args:
        model: the model.
        estimate: chooses blocks.
        least: the margin, by layer. Other layers are exact.
        text: one text.
    """
    x = model.embed(text.ids[0])
    counts = counted_blocks(model, len(x))
    for layer in range(model.layers):
        q, k, v = model.project(layer, x)
        heads = []
        for h in range(HEADS):
            blocks = counts
            if layer in least:
                blocks = choose(estimate.margins(q[h], k[h], counts), least[layer], counts)
            if layer == model.layers - 1 and not model.is_causal:  # row 0 alone answers
                blocks = np.where(np.arange(len(blocks))[:, None] == 0, blocks, np.arange(len(blocks)) == 0)
            heads.append(attend(q[h], k[h], v[h], blocks, model.is_causal)[0])
        x = model.finish(layer, x, np.stack(heads))
    return float(right_answers(model.logits(x), text, model.is_causal).mean())


def compare(model: Model, samples: Sequence[Sample], estimate: Estimate, share: float, layers: Sequence[int]) -> str:
    """One row of the table: the share kept, the mass kept by layer, the accuracy, margins in nats by layer."""
    counts = counted_blocks(model, samples[0].queries.shape[2])
    leasts: dict[int, float] = {}
    masses, kept = [], []
    for layer in layers:
        heads = [(s.queries[layer, h], s.keys[layer, h], s.masses[layer, h]) for s in samples for h in range(HEADS)]
        margins = [estimate.margins(q, k, counts) for q, k, _ in heads]
        leasts[layer] = find_least(margins, share, counts)
        blocks = [choose(m, leasts[layer], counts) for m in margins]
        kept.append(np.mean([b.sum() / counts.sum() for b in blocks]))
        rows = [np.where(b.repeat(BLOCK, 0), mass, 0).sum(1) for b, (_, _, mass) in zip(blocks, heads, strict=True)]
        masses.append(np.mean(rows))
    accuracy = np.mean([restricted_share(model, estimate, leasts, s.text) for s in samples])
    mass = " ".join(f"{100 * m:6.2f}" for m in masses)
    nats = " ".join(f"{x:7.1f}" for x in leasts.values())
    return f"{100 * np.mean(kept):5.1f} {mass} {100 * accuracy:6.1f} {nats}"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description="Compares estimates of which blocks of attention matter.")
    parser.add_argument("name", choices=NAMES)
    parser.add_argument(
        "--length", type=int, default=4096, help=f"bytes of a text, a multiple of {BLOCK} (default 4096)"
    )
    parser.add_argument("--texts", type=int, default=10)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.1, 0.25, 0.5], help="of the blocks that are kept")
    parser.add_argument("--layers", type=int, nargs="+", default=[0, 1], help="that are restricted")
    arguments = parser.parse_args()
    rng = np.random.default_rng(7)
    model = Model(arguments.name)
    found = [sample_of(model, DRAW[arguments.name](rng, 1, arguments.length)) for _ in range(arguments.texts)]
    print(f"{arguments.name}: exact attention answers {100 * np.mean([share for _, share in found]):.1f} %")
    print("estimate                  cost  kept, mass kept by layer, right: %; margins, nats")
    samples = [sample for sample, _ in found]
    for share in arguments.shares:
        for estimate in ESTIMATES:
            row = compare(model, samples, estimate, share, arguments.layers)
            label = f"{estimate.kind} {estimate.queries} x {estimate.keys}"
            print(f"{label:22} 1/{1 / estimate.cost:4.0f}  {row}", flush=True)


if __name__ == "__main__":
    main()
