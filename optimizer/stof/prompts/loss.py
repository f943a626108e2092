# SPDX-License-Identifier: Apache-2.0
"""By how much next-token distributions differ: KL divergence and agreement, by position."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import onnx

LOGITS = "logits"  # the model's output
_FIRST_END, _GROWTH = 256, 4  # buckets end at 256, 1024, 4096 ...


@dataclass(frozen=True)
class Bucket:
    """The loss over positions from ``first`` to before ``end``, over ``count`` tokens.

    Attributes:
        kl: mean KL divergence of the next-token distributions, original against result, in nats.
        agreement: share of tokens after which both rank the same token first.
    """

    first: int
    end: int
    count: int
    kl: float
    agreement: float


@dataclass(frozen=True)
class Loss:
    """By how much next-token distributions change on prompts.

    Attributes:
        prompts: how many ran.
        tokens: how many positions were compared.
        kl: the mean KL divergence of all positions, in nats.
        agreement: the share of all positions with the same first token.
        buckets: by position.
    """

    prompts: int
    tokens: int
    kl: float
    agreement: float
    buckets: tuple[Bucket, ...]

    def lines(self, what: str = "loss") -> list[str]:
        """A line for all positions, and one for each bucket."""
        prompts = f"{self.prompts} prompt{'' if self.prompts == 1 else 's'}"
        head = (
            f"{what} on {prompts}, {self.tokens} tokens: KL divergence {self.kl:.4g}, next-token agreement "
            f"{100 * self.agreement:.2f} %"
        )
        return [
            head,
            *(
                f"  positions {b.first} to {b.end - 1}: KL divergence {b.kl:.4g}, agreement {100 * b.agreement:.2f} %, "
                f"{b.count} tokens"
                for b in self.buckets
            ),
        ]


@dataclass(frozen=True)
class PromptLoss:
    """The loss of a model whose outputs change.

    Attributes:
        source: where the prompts come from.
        whole: of whole prompts.
        decoded: of single tokens over the KV cache; None where the model has none, or all prompts have one token.
    """

    source: str
    whole: Loss
    decoded: Loss | None = None

    def lines(self) -> list[list[str]]:
        """The lines of whole prompts, and those of decoding."""
        losses = (("loss", self.whole), ("loss of decoding", self.decoded))
        return [loss.lines(what) for what, loss in losses if loss is not None]

    def headlines(self) -> list[str]:
        """The first one of each."""
        return [lines[0] for lines in self.lines()]

    @property
    def worst_kl(self) -> float:
        """The larger mean KL divergence of the two."""
        return max(loss.kl for loss in (self.whole, self.decoded) if loss is not None)


@dataclass
class LossMeter:
    """Collects positions of prompts.

    Attributes:
        prompts: how many were added.
    """

    prompts: int = 0
    _positions: list[np.ndarray] = field(default_factory=list)
    _kl: list[np.ndarray] = field(default_factory=list)
    _agrees: list[np.ndarray] = field(default_factory=list)

    def add(self, original: np.ndarray, result: np.ndarray, positions: np.ndarray) -> None:
        """Adds the logits [S, V] of both models at positions [S] of a prompt."""
        self.prompts += 1
        self._positions.append(positions)
        self._kl.append(kl_divergence(original, result))
        self._agrees.append(original.argmax(-1) == result.argmax(-1))

    def loss(self) -> Loss:
        """The loss of what was added, which is one position at least."""
        positions, kl, agrees = (np.concatenate(x) for x in (self._positions, self._kl, self._agrees))
        buckets = []
        for first, end in bucket_limits(int(positions.max()) + 1):
            in_bucket = (positions >= first) & (positions < end)
            if in_bucket.any():
                means = float(kl[in_bucket].mean()), float(agrees[in_bucket].mean())
                buckets.append(Bucket(first, end, int(in_bucket.sum()), *means))
        return Loss(self.prompts, len(kl), float(kl.mean()), float(agrees.mean()), tuple(buckets))


def bucket_limits(tokens: int) -> list[tuple[int, int]]:
    """First and end of each bucket that positions below ``tokens`` lie in."""
    limits = [(0, _FIRST_END)]
    while limits[-1][1] < tokens:
        end = limits[-1][1]
        limits.append((end, end * _GROWTH))
    return limits


def kl_divergence(original: np.ndarray, result: np.ndarray) -> np.ndarray:
    """KL(original || result) [S] of the softmax of logits [S, V], in nats; infinite where logits are no numbers."""
    divergences = np.empty(len(original))
    for i, (one, other) in enumerate(zip(original, result, strict=True)):  # by rows: vocabularies are large
        p, q = _log_softmax(one.astype(np.float64)), _log_softmax(other.astype(np.float64))
        kept = np.isfinite(p)
        with np.errstate(invalid="ignore"):
            value = float((np.exp(p[kept]) * (p[kept] - q[kept])).sum())
        divergences[i] = max(value, 0.0) if np.isfinite(value) and kept.any() and not np.isnan(q).any() else np.inf
    return divergences


def _log_softmax(x: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        shifted = x - x.max()
        return np.asarray(shifted - np.log(np.exp(shifted).sum()))


def has_logits(model: onnx.ModelProto) -> bool:
    """Whether a model has the output by which the loss is measured."""
    return any(o.name == LOGITS for o in model.graph.output)
