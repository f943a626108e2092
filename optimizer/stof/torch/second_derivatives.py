# SPDX-License-Identifier: Apache-2.0
"""Second derivatives of masked attention by the dense formula, in chunks of query rows.

With the weights W, the tangents X of the scores and A = X - rowsum(W X), the tangent of W is W A.
"""

from __future__ import annotations

from typing import Any

import torch

from stof.torch.dense import Chunk, DenseAttention

_SCORES_AT_ONCE = 12  # tensors as large as the scores that a chunk of a second derivative holds

Rows = tuple[Any, Any, Any]  # query, key and value, or tangents of them


def differentiate_backward(dense: DenseAttention, grad_output: Any, grad_lse: Any, tangents: Rows) -> Rows:
    """The derivatives of the gradients of query, key and value along tangents of these, with fixed gradients of the outputs.

    Because second derivatives are symmetric, they are also the gradients of ``<grad, tangent of the outputs>``.
    """
    grad_output, grad_lse = dense.of_rows(grad_output), dense.of_rows(grad_lse.unsqueeze(-1))
    query, key, value = _lay_out(dense, tangents)
    query_parts, key_sum, value_sum = [], torch.zeros_like(dense.key), torch.zeros_like(dense.value)
    for chunk in dense.chunks(_SCORES_AT_ONCE):
        upper, upper_lse = dense.upper(chunk, grad_output, grad_lse)
        weights = chunk.weights
        _, moved, centred = _differentiate_capped_scores(dense, chunk, query, key)
        inner = upper @ dense.value.transpose(-1, -2)
        inner_moved = upper @ value.transpose(-1, -2)
        mean_moved = (weights * (centred * inner + inner_moved)).sum(-1, keepdim=True)
        inner = inner - (weights * inner).sum(-1, keepdim=True) + upper_lse
        grad_scores = weights * inner
        grad_moved = weights * (centred * inner + inner_moved - mean_moved)
        if chunk.tanh is not None:
            slope = chunk.slope()
            grad_moved = grad_moved * slope + grad_scores * _differentiate_slope(dense, chunk, moved)
            grad_scores = grad_scores * slope
        query_parts.append(grad_moved @ dense.key + grad_scores @ key)
        rows = query[..., chunk.rows, :].to(dense.dtype)
        key_sum += dense.over_heads(grad_moved, chunk.query) + dense.over_heads(grad_scores, rows)
        value_sum += dense.over_heads(weights * centred, upper)
    return dense.gradients(torch.cat(query_parts, 3), key_sum, value_sum)


def differentiate_tangent(dense: DenseAttention, tangents: Rows, others: Rows) -> tuple[Any, Any]:
    """The second derivatives of output and LSE along two directions of query, key and value."""
    (query, key, value), (query_2, key_2, value_2) = _lay_out(dense, tangents), _lay_out(dense, others)
    outputs, lses = [], []
    for chunk in dense.chunks(_SCORES_AT_ONCE):
        weights = chunk.weights
        before_cap, moved, centred = _differentiate_capped_scores(dense, chunk, query, key)
        _, moved_2, centred_2 = _differentiate_capped_scores(dense, chunk, query_2, key_2)
        mixed = _differentiate_scores_twice(dense, chunk, (query, key), (query_2, key_2))
        if chunk.tanh is not None:
            mixed = mixed * chunk.slope() + before_cap * _differentiate_slope(dense, chunk, moved_2)
        mean = (weights * (centred_2 * moved + mixed)).sum(-1, keepdim=True)
        output = (weights * (centred * centred_2 + mixed - mean)) @ dense.value
        output = output + (weights * centred) @ value_2 + (weights * centred_2) @ value
        outputs.append(dense.fill_empty(chunk, output))
        lses.append(mean.masked_fill(chunk.empty, 0))
    return dense.tangents(outputs, lses)


def _lay_out(dense: DenseAttention, tangents: Rows) -> Rows:
    query, key, value = tangents
    return dense.of_rows(query), dense.of_keys(key), dense.of_keys(value)


def _differentiate_capped_scores(dense: DenseAttention, chunk: Chunk, query: Any, key: Any) -> Rows:
    """The tangents of the scores before the cap and after it, and the latter without their mean under the weights."""
    before_cap = dense.differentiate_scores(chunk, query, key)
    moved = before_cap if chunk.tanh is None else before_cap * chunk.slope()
    return before_cap, moved, moved - (chunk.weights * moved).sum(-1, keepdim=True)


def _differentiate_slope(dense: DenseAttention, chunk: Chunk, moved: Any) -> Any:
    """The tangent of the slope of the cap, 1 - tanh(x / c)^2, for the tangents of the capped scores."""
    return (-2 / dense.settings.softcap) * chunk.tanh * moved


def _differentiate_scores_twice(
    dense: DenseAttention, chunk: Chunk, one: tuple[Any, Any], other: tuple[Any, Any]
) -> Any:
    """The second derivative of the scores before the cap, which are bilinear in query and key."""
    rows = [t[0][..., chunk.rows, :].to(dense.dtype) for t in (one, other)]
    if dense.settings.empty_rows != "all":
        rows = [t.masked_fill(chunk.empty, 0) for t in rows]
    derivative = rows[0] @ other[1].transpose(-1, -2) + rows[1] @ one[1].transpose(-1, -2)
    return derivative * dense.settings.scale
