# SPDX-License-Identifier: Apache-2.0
"""The dense formula of masked attention in PyTorch operators: the gradients of the kernel, and all of fp64.

Both walk over chunks of query rows, so that the scores in memory stay below ``CHUNK_BYTES``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from stof.mask.expression import MaskExpression
from stof.torch.arguments import AttentionSettings

CHUNK_BYTES = 1 << 28
_SCORES_AT_ONCE = 6  # tensors as large as the scores that a chunk of the backward pass holds


@dataclass(frozen=True)
class _Chunk:
    """The scores [B, G, R, rows, T] of some query rows, of which R share a key head.

    Attributes:
        rows: of the queries.
        allowed: the pairs that the mask allows.
        empty: the rows without an allowed key, [.., rows, 1]; None where there are none.
        scores: scaled and capped.
        slope: the derivative of the cap at each score; None where there is no cap.
    """

    rows: slice
    query: Any
    allowed: Any
    empty: Any
    scores: Any
    slope: Any

    def masked(self) -> Any:
        return self.scores.masked_fill(~self.allowed, float("-inf"))


class DenseAttention:
    """Masked attention of one call, in fp32, or in fp64 where the tensors are."""

    def __init__(self, query: Any, key: Any, value: Any, operands: Sequence[Any], settings: AttentionSettings) -> None:
        self.settings = settings
        self.dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
        self.B, self.H, self.S, _ = query.shape
        self.G, self.T = key.shape[1], key.shape[2]
        self.query = query.detach().reshape(self.B, self.G, self.H // self.G, self.S, query.shape[3])
        self.key, self.value = (t.detach().to(self.dtype).unsqueeze(2) for t in (key, value))
        self.device = query.device
        values: dict[str, Any] = {
            "S": self.S,
            "T": self.T,
            "P": self.T - self.S if settings.query_offset else 0,
            "abs": torch.abs,
            "min": _minimum,
            "max": _maximum,
        }
        for role, tensor in zip(settings.roles.split(), operands, strict=True):
            tensor = tensor.detach().to(self.device)
            is_condition = role == "pad" or tensor.dtype == torch.bool
            values[role] = tensor != 0 if is_condition else tensor.long()
        self.past = values["P"]
        self.allows = _parse(settings.mask).as_function(values)

    def forward(self) -> tuple[Any, Any]:
        """Output [B, H, S, Dv] and LSE [B, H, S]."""
        outputs, lses = [], []
        for chunk in self._chunks():
            masked = chunk.masked()
            lses.append(torch.logsumexp(masked, -1) if self.T else masked.new_full(masked.shape[:-1], float("-inf")))
            outputs.append(self._weights(chunk, masked) @ self.value)
        output, lse = torch.cat(outputs, 3), torch.cat(lses, 3)
        return output.flatten(1, 2), lse.flatten(1, 2)

    def backward(self, grad_output: Any, grad_lse: Any) -> tuple[Any, Any, Any]:
        """The gradients of query, key and value, of the dtype of each."""
        grad_output = grad_output.reshape(self.B, self.G, self.H // self.G, self.S, grad_output.shape[3])
        grad_lse = grad_lse.reshape(self.B, self.G, self.H // self.G, self.S, 1)
        grads = []
        grad_key, grad_value = (torch.zeros_like(t) for t in (self.key, self.value))
        for chunk in self._chunks():
            masked = chunk.masked()
            weights = self._weights(chunk, masked)
            upper = grad_output[..., chunk.rows, :].to(self.dtype)
            grad_value += (weights.transpose(-1, -2) @ upper).sum(2, keepdim=True)
            grad_scores = self._grad_scores(chunk, weights, upper, grad_lse[..., chunk.rows, :].to(self.dtype))
            grads.append(grad_scores @ self.key)
            grad_key += (grad_scores.transpose(-1, -2) @ chunk.query).sum(2, keepdim=True)
        grad_query = torch.cat(grads, 3).flatten(1, 2)
        dtype = self.query.dtype
        return grad_query.to(dtype), grad_key.squeeze(2).to(dtype), grad_value.squeeze(2).to(dtype)

    def _grad_scores(self, chunk: _Chunk, weights: Any, upper: Any, grad_lse: Any) -> Any:
        """The gradient of query @ key^T."""
        empty_rows = self.settings.empty_rows
        inner = upper @ self.value.transpose(-1, -2)
        if chunk.empty is not None:
            grad_lse = grad_lse.masked_fill(chunk.empty, 0)
            if empty_rows in ("mean", "nan"):  # their weights are constants
                weights = weights.masked_fill(chunk.empty, 0)
        delta = (weights * inner).sum(-1, keepdim=True)
        found = (inner - delta).add_(grad_lse).mul_(weights)  # 0 where the mask forbids, as the weights
        if chunk.slope is not None:
            found.mul_(chunk.slope)
        return found.mul_(self.settings.scale)

    def _weights(self, chunk: _Chunk, masked: Any) -> Any:
        weights = torch.softmax(masked, -1)
        if chunk.empty is None:
            return weights
        match self.settings.empty_rows:
            case "zero":
                return weights.masked_fill(chunk.empty, 0)
            case "mean":
                return weights.masked_fill(chunk.empty, 1 / max(1, self.T))
            case "all":
                return torch.where(chunk.empty, torch.softmax(chunk.scores, -1), weights)
        return weights

    def _chunks(self) -> Iterator[_Chunk]:
        size = torch.empty((), dtype=self.dtype).element_size()
        row_bytes = max(1, self.B * self.H * self.T * size * _SCORES_AT_ONCE)
        step = max(1, CHUNK_BYTES // row_bytes)
        shape = (self.B, self.G, self.H // self.G)
        b, h, k = (torch.arange(n, device=self.device) for n in (self.B, self.H, self.T))
        for first in range(0, max(1, self.S), step):  # one chunk without rows gives the shapes of S = 0
            rows = slice(first, min(self.S, first + step))
            query = self.query[..., rows, :].to(self.dtype)
            scores = (query @ self.key.transpose(-1, -2)) * self.settings.scale
            slope = None
            if self.settings.softcap > 0:
                tanh = torch.tanh(scores / self.settings.softcap)
                scores, slope = tanh * self.settings.softcap, 1 - tanh * tanh
            q = torch.arange(rows.start, rows.stop, device=self.device) + self.past
            found = self.allows(b[:, None, None, None], h[:, None, None], q[:, None], k)
            allowed = torch.as_tensor(found, device=self.device).broadcast_to(self.B, self.H, len(q), self.T)
            allowed = allowed.reshape(*shape, len(q), self.T)
            empty = ~allowed.any(-1, keepdim=True)
            yield _Chunk(rows, query, allowed, empty if bool(empty.any()) else None, scores, slope)


_parse = lru_cache(maxsize=64)(MaskExpression.parse)


def _minimum(left: Any, right: Any) -> Any:
    return torch.minimum(*_as_tensors(left, right))


def _maximum(left: Any, right: Any) -> Any:
    return torch.maximum(*_as_tensors(left, right))


def _as_tensors(left: Any, right: Any) -> tuple[Any, Any]:
    """Operands of which one may be a number, or none a tensor."""
    device = next((x.device for x in (left, right) if isinstance(x, torch.Tensor)), None)
    one, other = (torch.as_tensor(x, device=device) for x in (left, right))
    return one, other
