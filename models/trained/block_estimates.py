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
from retrieval_models import FOLDER, NAMES, Weights, read_weights
from retrieval_texts import ANSWER, Texts, draw_documents, draw_prompts

BLOCK = 128
_LAYERS, _HEADS, _HEAD_SIZE, _ROTATED, _ROTARY_BASE = 2, 2, 64, 16, 10000.0
_SCALE = 1 / math.sqrt(_HEAD_SIZE)


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
            return np.asarray(queries[:, self.queries // 2] @ keys[:, 0].T * _SCALE)
        if self.kind == "antidiagonals":
            backwards = keys[:, ::-1].reshape(len(keys), -1)
            return np.asarray(queries.reshape(len(queries), -1) @ backwards.T * (_SCALE / self.queries))
        means = queries.mean(1)
        if self.kind == "bounds":
            over, under = np.maximum(means, 0), np.minimum(means, 0)
            return np.asarray((over @ keys.max(1).T + under @ keys.min(1).T) * _SCALE)
        return np.asarray(means @ keys.mean(1).T * _SCALE)

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


def normalize(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """A layer normalization."""
    centred = x - x.mean(-1, keepdims=True)
    return np.asarray(centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * weight)


class Model:
    """A trained model, for one text at a time, whose attention may be restricted to blocks."""

    def __init__(self, name: str) -> None:
        self.is_causal = name == "prompts"
        self.weights: Weights = read_weights(FOLDER / f"{name}.npz")

    def weight(self, name: str) -> np.ndarray:
        """A weight by the name that torch has for its module."""
        return self.weights[f"{name}.weight"]

    def counted_blocks(self, length: int) -> np.ndarray:
        """The blocks that the mask leaves, bool [blocks, blocks]."""
        n = length // BLOCK
        return np.tri(n, dtype=bool) if self.is_causal else np.ones((n, n), bool)

    def embed(self, ids: np.ndarray) -> np.ndarray:
        """Bytes [S] joined with their neighbours, [S, hidden]."""
        kernel = self.weight("conv")
        size = kernel.shape[2]
        before = size - 1 if self.is_causal else size // 2
        rows = np.pad(self.weight("embedding")[ids], ((before, size - 1 - before), (0, 0)))
        return np.asarray(sum(rows[i : i + len(ids)] @ kernel[:, :, i].T for i in range(size)))

    def project(self, layer: int, x: np.ndarray) -> tuple[np.ndarray, ...]:
        """Queries, keys and values of a layer, [heads, S, D]."""
        packed = normalize(x, self.weight(f"blocks.{layer}.attention_norm")) @ self.weight(f"blocks.{layer}.qkv").T
        q, k, v = (p.reshape(len(x), _HEADS, -1).transpose(1, 0, 2) for p in np.split(packed, 3, 1))
        return rotate(q), rotate(k), v

    def finish(self, layer: int, x: np.ndarray, attended: np.ndarray) -> np.ndarray:
        """The rest of a layer behind its attention [heads, S, D]."""
        x = x + attended.transpose(1, 0, 2).reshape(len(x), -1) @ self.weight(f"blocks.{layer}.out").T
        up = normalize(x, self.weight(f"blocks.{layer}.mlp_norm")) @ self.weight(f"blocks.{layer}.up").T
        return np.asarray(x + up / (1 + np.exp(-up)) @ self.weight(f"blocks.{layer}.down").T)

    def logits(self, x: np.ndarray) -> np.ndarray:
        """Of the rows that answer."""
        x = normalize(x, self.weight("norm")) @ self.weight("head").T
        return x if self.is_causal else x[0].reshape(ANSWER, -1)


def rotate(x: np.ndarray) -> np.ndarray:
    """Rotary positions in the first channels of [heads, S, D]."""
    half = _ROTATED // 2
    angles = np.arange(x.shape[1])[:, None] * (_ROTARY_BASE ** (-np.arange(half) / half)).astype(np.float32)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    a, b = x[..., :half], x[..., half:_ROTATED]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, x[..., _ROTATED:]], -1)


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
        scores = q[rows] @ k[keys].T * np.float32(_SCALE)
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
    blocks = model.counted_blocks(len(x))
    found: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    for layer in range(_LAYERS):
        q, k, v = model.project(layer, x)
        heads = [attend(q[h], k[h], v[h], blocks, model.is_causal) for h in range(_HEADS)]
        found.append((q, k, np.stack([m for _, m in heads])))
        x = model.finish(layer, x, np.stack([y for y, _ in heads]))
    queries, keys, masses = (np.stack(part) for part in zip(*found, strict=True))
    return Sample(text, queries, keys, masses), right_share(model, model.logits(x), text)


def right_share(model: Model, logits: np.ndarray, text: Texts) -> float:
    """The share of a text's queries that are answered."""
    found = logits.argmax(-1)
    if not model.is_causal:
        return float((found == text.answers[0]).all())
    within = text.asked[0] >= 0
    ends = np.append(len(found) - ANSWER - 1, text.asked[0, within] + 4)
    expected = np.concatenate([text.answers[:1], text.asked_answers[0, within]])
    return float((found[ends[:, None] + np.arange(ANSWER)] == expected).all(1).mean())


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
    counts = model.counted_blocks(len(x))
    for layer in range(_LAYERS):
        q, k, v = model.project(layer, x)
        heads = []
        for h in range(_HEADS):
            blocks = counts
            if layer in least:
                blocks = choose(estimate.margins(q[h], k[h], counts), least[layer], counts)
            if layer == _LAYERS - 1 and not model.is_causal:  # row 0 alone answers
                blocks = np.where(np.arange(len(blocks))[:, None] == 0, blocks, np.arange(len(blocks)) == 0)
            heads.append(attend(q[h], k[h], v[h], blocks, model.is_causal)[0])
        x = model.finish(layer, x, np.stack(heads))
    return right_share(model, model.logits(x), text)


def compare(model: Model, samples: Sequence[Sample], estimate: Estimate, share: float, layers: Sequence[int]) -> str:
    """One row of the table: the share kept, the mass kept by layer, the accuracy, margins in nats by layer."""
    counts = model.counted_blocks(samples[0].queries.shape[2])
    leasts: dict[int, float] = {}
    masses, kept = [], []
    for layer in layers:
        heads = [(s.queries[layer, h], s.keys[layer, h], s.masses[layer, h]) for s in samples for h in range(_HEADS)]
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
    draw = {"prompts": draw_prompts, "documents": draw_documents}[arguments.name]
    model = Model(arguments.name)
    found = [sample_of(model, draw(rng, 1, arguments.length)) for _ in range(arguments.texts)]
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
