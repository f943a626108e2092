# SPDX-License-Identifier: Apache-2.0
"""The dense formula of masked attention in PyTorch operators: all of fp64, and the first derivatives of the kernel.

Everything walks over chunks of query rows, so that what is as large as the scores stays below ``CHUNK_BYTES``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch

from stof.errors import ArgumentError
from stof.mask.expression import MaskExpression
from stof.torch.arguments import AttentionSettings

CHUNK_BYTES = 1 << 28
_SCORES_AT_ONCE = 6  # tensors as large as the scores that a chunk of a first derivative holds


@dataclass(frozen=True)
class Chunk:
    """The weights [B, G, R, rows, T] of some query rows, of which R share a key head.

    Attributes:
        rows: of the queries.
        query: these rows, in the type that is computed in.
        empty: the rows without an allowed key, [.., rows, 1].
        scores: scaled and capped; -inf where the mask forbids. An empty row has zeros, or its scores where ``empty_rows`` is
            ``all``: NaN would pass into the derivatives of other rows.
        weights: the softmax of the scores, of empty rows too.
        tanh: of the scores before the cap; None where there is no cap.
    """

    rows: slice
    query: Any
    empty: Any
    scores: Any
    weights: Any
    tanh: Any

    def slope(self) -> Any:
        """The derivative of the cap at each score."""
        return 1 - self.tanh * self.tanh


class DenseAttention:
    """Masked attention of one call, in fp32, or in fp64 where the tensors are.

    ``checks_indices``: whether indices of operands may be out of range, because no kernel has checked them before.
    Tensors of rows have the shape [B, G, R, rows, size], of keys [B, G, 1, T, size].
    """

    def __init__(
        self,
        query: Any,
        key: Any,
        value: Any,
        operands: Sequence[Any],
        settings: AttentionSettings,
        *,
        checks_indices: bool = False,
    ) -> None:
        self.settings = settings
        self.dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
        self.B, self.H, self.S, _ = query.shape
        self.G, self.T = key.shape[1], key.shape[2]
        self.dtypes = (query.dtype, key.dtype, value.dtype)
        self.query, self.key, self.value = self.of_rows(query), self.of_keys(key), self.of_keys(value)
        self.device = query.device
        values: dict[str, Any] = {
            "S": self.S,
            "T": self.T,
            "P": self.T - self.S if settings.query_offset else 0,
            "abs": torch.abs,
            "min": partial(_apply, torch.minimum, self.device),
            "max": partial(_apply, torch.maximum, self.device),
        }
        for role, tensor in zip(settings.roles.split(), operands, strict=True):
            tensor = tensor.to(self.device)
            is_condition = role == "pad" or tensor.dtype == torch.bool
            tensor = tensor != 0 if is_condition else tensor.long()
            values[role] = _CheckedOperand(role, tensor) if checks_indices else tensor
        self.past = values["P"]
        self.allows = _parse(settings.mask).as_function(values)

    def of_rows(self, tensor: Any) -> Any:
        """A tensor [B, H, S, size] as [B, G, R, S, size]."""
        return tensor.reshape(self.B, self.G, self.H // self.G, self.S, tensor.shape[3])

    def of_keys(self, tensor: Any) -> Any:
        """A tensor [B, G, T, size] as [B, G, 1, T, size], in the type that is computed in."""
        return tensor.to(self.dtype).unsqueeze(2)

    def forward(self) -> tuple[Any, Any]:
        """Output [B, H, S, Dv] and LSE [B, H, S]."""
        outputs, lses = [], []
        for chunk in self.chunks(_SCORES_AT_ONCE):
            lse = torch.logsumexp(chunk.scores, -1) if self.T else chunk.scores.sum(-1)
            lses.append(lse.masked_fill(chunk.empty[..., 0], float("-inf")))
            outputs.append(self.fill_empty(chunk, chunk.weights @ self.value))
        output, lse = torch.cat(outputs, 3), torch.cat(lses, 3)
        return output.flatten(1, 2), lse.flatten(1, 2)

    def backward(self, grad_output: Any, grad_lse: Any) -> tuple[Any, Any, Any]:
        """The gradients of query, key and value, of the dtype of each."""
        grad_output, grad_lse = self.of_rows(grad_output), self.of_rows(grad_lse.unsqueeze(-1))
        grads = []
        grad_key, grad_value = (torch.zeros_like(t) for t in (self.key, self.value))
        for chunk in self.chunks(_SCORES_AT_ONCE):
            upper, upper_lse = self.upper(chunk, grad_output, grad_lse)
            grad_value += self.over_heads(chunk.weights, self._upper_of_values(chunk, grad_output, upper))
            inner = upper @ self.value.transpose(-1, -2)
            shift = (chunk.weights * inner).sum(-1, keepdim=True) - upper_lse
            grad_scores = inner.sub_(shift).mul_(chunk.weights)  # 0 where the mask forbids, as the weights
            if chunk.tanh is not None:
                grad_scores.mul_(chunk.slope())
            grads.append(grad_scores @ self.key)
            grad_key += self.over_heads(grad_scores, chunk.query)
        return self.gradients(torch.cat(grads, 3), grad_key, grad_value)

    def tangent(self, query: Any, key: Any, value: Any) -> tuple[Any, Any]:
        """The tangents of output and LSE for those of query, key and value."""
        query, key, value = self.of_rows(query), self.of_keys(key), self.of_keys(value)
        outputs, lses = [], []
        for chunk in self.chunks(_SCORES_AT_ONCE):
            weights = chunk.weights
            moved = self.differentiate_scores(chunk, query, key)
            if chunk.tanh is not None:
                moved.mul_(chunk.slope())
            mean = (weights * moved).sum(-1, keepdim=True)
            output = moved.sub_(mean).mul_(weights) @ self.value + weights @ value
            outputs.append(self.fill_empty(chunk, output))
            lses.append(mean.masked_fill(chunk.empty, 0))
        return self.tangents(outputs, lses)

    def differentiate_scores(self, chunk: Chunk, query: Any, key: Any) -> Any:
        """The tangents of the scores before the cap, for those of query and key; 0 in empty rows that no score reaches."""
        moved, rows = query[..., chunk.rows, :].to(self.dtype), chunk.query
        if self.settings.empty_rows != "all":
            moved, rows = moved.masked_fill(chunk.empty, 0), rows.masked_fill(chunk.empty, 0)
        scores = moved @ self.key.transpose(-1, -2)
        return scores.add_(rows @ key.transpose(-1, -2)).mul_(self.settings.scale)

    def upper(self, chunk: Chunk, grad_output: Any, grad_lse: Any) -> tuple[Any, Any]:
        """The gradients of output and LSE of a chunk's rows, as far as they reach the scores."""
        upper_output, lse = (t[..., chunk.rows, :].to(self.dtype) for t in (grad_output, grad_lse))
        if self.settings.empty_rows != "all":
            upper_output = upper_output.masked_fill(chunk.empty, 0)
        return upper_output, lse.masked_fill(chunk.empty, 0)

    def _upper_of_values(self, chunk: Chunk, grad_output: Any, upper: Any) -> Any:
        """The gradients of a chunk's output as they reach the values: NaN where the weights are."""
        match self.settings.empty_rows:
            case "mean":
                return grad_output[..., chunk.rows, :].to(self.dtype)
            case "nan":
                return upper.masked_fill(chunk.empty, float("nan"))
        return upper

    def fill_empty(self, chunk: Chunk, output: Any) -> Any:
        """Output or tangent of a chunk's rows, with what ``empty_rows`` says in those without an allowed key."""
        fill = {"zero": 0.0, "nan": float("nan")}.get(self.settings.empty_rows)
        return output if fill is None or self.T == 0 else output.masked_fill(chunk.empty, fill)

    def over_heads(self, scores: Any, rows: Any) -> Any:
        """The product of transposed scores and rows, summed over the query heads of a key head: [B, G, 1, T, size]."""
        return (scores.transpose(-1, -2) @ rows).sum(2, keepdim=True)

    def gradients(self, query: Any, key: Any, value: Any) -> tuple[Any, Any, Any]:
        """Sums over the chunks as gradients of query, key and value: scaled, in the shape and type of each."""
        query, key = query.flatten(1, 2).mul_(self.settings.scale), key.squeeze(2).mul_(self.settings.scale)
        of_query, of_key, of_value = self.dtypes
        return query.to(of_query), key.to(of_key), value.squeeze(2).to(of_value)

    def tangents(self, outputs: Sequence[Any], lses: Sequence[Any]) -> tuple[Any, Any]:
        """Tangents of the chunks as those of output and LSE."""
        output, lse = (torch.cat(tuple(chunks), 3).flatten(1, 2) for chunks in (outputs, lses))
        return output.to(self.dtypes[0]), lse.squeeze(-1)

    def chunks(self, at_once: int) -> Iterator[Chunk]:
        """The chunks of query rows, of which ``at_once`` tensors as large as the scores are alive together."""
        size = torch.empty((), dtype=self.dtype).element_size()
        row_bytes = max(1, self.B * self.H * self.T * size * at_once)
        step = max(1, CHUNK_BYTES // row_bytes)
        for first in range(0, max(1, self.S), step):  # one chunk without rows gives the shapes of S = 0
            yield self._chunk(slice(first, min(self.S, first + step)))

    def _chunk(self, rows: slice) -> Chunk:
        query = self.query[..., rows, :].to(self.dtype)
        scores = (query @ self.key.transpose(-1, -2)).mul_(self.settings.scale)
        tanh = None
        if self.settings.softcap > 0:
            tanh = scores.div_(self.settings.softcap).tanh_()
            scores = tanh * self.settings.softcap
        b, h, k = (torch.arange(n, device=self.device) for n in (self.B, self.H, self.T))
        q = torch.arange(rows.start, rows.stop, device=self.device) + self.past
        mask_values = self.allows(b[:, None, None, None], h[:, None, None], q[:, None], k)
        allowed = torch.as_tensor(mask_values, device=self.device).broadcast_to(self.B, self.H, len(q), self.T)
        allowed = allowed.reshape(scores.shape)
        empty = ~allowed.any(-1, keepdim=True)
        if self.settings.empty_rows == "all":
            allowed = allowed | empty
        scores = torch.where(allowed, scores, torch.where(empty, 0.0, float("-inf")).to(self.dtype))
        return Chunk(rows, query, empty, scores, torch.softmax(scores, -1), tanh)


class _CheckedOperand:
    """An operand of a mask whose indices are checked: PyTorch takes negative ones from the end, and CUDA aborts at others."""

    def __init__(self, role: str, tensor: Any) -> None:
        self.role, self.tensor, self.shape = role, tensor, tensor.shape

    def __getitem__(self, indices: tuple[Any, ...]) -> Any:
        for axis, (index, size) in enumerate(zip(indices, self.shape, strict=True)):
            positions = torch.as_tensor(index)
            if positions.numel() and not (positions.min() >= 0 and positions.max() < size):
                raise ArgumentError(
                    f"mask reads index {axis} of {self.role} from {int(positions.min())} to {int(positions.max())}, "
                    f"expected 0 to {size - 1}"
                )
        return self.tensor[indices]


_parse = lru_cache(maxsize=64)(MaskExpression.parse)


def _apply(function: Any, device: Any, left: Any, right: Any) -> Any:
    """A function of two operands, of which one may be a number, or none a tensor."""
    return function(*(torch.as_tensor(x, device=device) for x in (left, right)))
