# SPDX-License-Identifier: Apache-2.0
"""Masked attention in fp64 by PyTorch's own operators, with the pairs that a mask allows given one by one."""

from __future__ import annotations

import torch
from torch import Tensor


def attention_fp64(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    allowed: Tensor,
    scale: float | None = None,
    softcap: float = 0.0,
    empty_rows: str = "zero",
) -> tuple[Tensor, Tensor]:
    """Output [B, H, S, Dv] and LSE [B, H, S] in fp64, differentiable; ``allowed`` broadcasts to [B, H, S, T]."""
    q, k, v = (t.double() for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    allowed = allowed.expand(scores.shape)
    empty = ~allowed.any(-1, keepdim=True)
    # Fully masked rows get scores without a mask first: no NaN enters the gradients of the others.
    masked = scores.masked_fill(~allowed & ~empty, float("-inf"))
    weights = torch.softmax(masked, -1)
    fill = {"zero": torch.zeros_like(weights), "nan": torch.full_like(weights, float("nan")), "all": weights}
    fill["mean"] = torch.full_like(weights, 1 / weights.shape[-1])
    weights = torch.where(empty, fill[empty_rows], weights)
    # Not torch.logsumexp: its tangent has no gradient.
    top = masked.detach().amax(-1, keepdim=True)
    lse = ((masked - top).exp().sum(-1, keepdim=True).log() + top).masked_fill(empty, float("-inf")).squeeze(-1)
    return weights @ v, lse


def pairs(text: str, B: int, H: int, S: int, T: int, P: int = 0, **named: Tensor) -> Tensor:
    """The pairs [B, H, S, T] that a mask allows: the text as Python, for each index in turn (``and`` and ``or`` are kept)."""
    found = torch.zeros(B, H, S, T, dtype=torch.bool)
    values = {name: _Rows(tensor) for name, tensor in named.items()}
    code = compile(text.strip() or "True", "mask", "eval")
    for b in range(B):
        for h in range(H):
            for q in range(S):
                for k in range(T):
                    names = {
                        "b": b,
                        "h": h,
                        "q": q + P,
                        "k": k,
                        "S": S,
                        "T": T,
                        "P": P,
                        "abs": abs,
                        "min": min,
                        "max": max,
                    }
                    found[b, h, q, k] = bool(eval(code, {"__builtins__": {}}, {**names, **values}))
    return found


class _Rows:
    """A tensor by indices, of which an axis of size 1 serves every index."""

    def __init__(self, tensor: Tensor) -> None:
        self.array = tensor.numpy()

    def __getitem__(self, index: int | tuple[int, ...]) -> object:
        indices = index if isinstance(index, tuple) else (index,)
        return self.array[tuple(0 if n == 1 else i for i, n in zip(indices, self.array.shape, strict=True))]
