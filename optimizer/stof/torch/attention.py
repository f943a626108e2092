# SPDX-License-Identifier: Apache-2.0
"""Masked attention as a PyTorch function."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from stof.errors import ArgumentError
from stof.mask.expression_nodes import is_table_name
from stof.torch.arguments import as_number, check_kinds, name_subclass
from stof.torch.block_mask import to_mask
from stof.torch.operator import attention_op


def attention(
    q: Any,
    k: Any,
    v: Any,
    mask: Any = None,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    tables: Mapping[str, Any] | None = None,
    pad: Any = None,
    segment_q: Any = None,
    segment_k: Any = None,
    lengths: Any = None,
    empty_rows: str = "zero",
    query_offset: bool = False,
    return_lse: bool = False,
) -> Any:
    """Attention over the pairs of query and key that a mask allows, by the kernels of the plugin library.

    Computes ``softmax(cap(scale * q k^T)) v`` over the allowed keys, as docs/reference/operators.md defines StofAttention.
    Key head ``h // (H // G)`` serves query head ``h``. CPU and CUDA; works under ``torch.compile`` and ``torch.export``.
    First and second derivatives, of the LSE too, come from the dense formula in chunks of query rows, in reverse and forward
    mode, also under ``torch.func`` and ``vmap``. ``torch.autocast`` casts q, k and v as it does for PyTorch's own attention.
    Longer than 60 lines: most of them are this contract.

    Args:
        q: [B, H, S, D], fp32, fp16 or bf16. fp64 is computed by the dense formula, for ``torch.autograd.gradcheck``.
        k: [B, G, T, D] of the type of q; H is a multiple of G.
        v: [B, G, T, Dv] of the type of q.
        mask: a mask expression (docs/reference/mask-format.md), a ``BlockMask`` of FlexAttention, or what
            ``from_block_mask`` gives. None allows every pair.
        scale: factor of the scores; None: 1 / sqrt(D).
        softcap: scores become ``softcap * tanh(scores / softcap)``; 0: they stay.
        tables: ``table0``, ``table1``, ... that the expression reads: tensors of bool, uint8, int32 or int64, or arrays.
            They are constants of the call, best kept on the CPU.
        pad: key padding mask [B or 1, T], non-zero for real keys. The expression reads it as ``pad[b, k]``.
        segment_q: integers [B or 1, S] that the expression reads as ``segment_q[b, q - P]``; P is 0 without an offset.
        segment_k: integers [B or 1, T] that the expression reads as ``segment_k[b, k]``.
        lengths: integers [B or 1] that the expression reads as ``lengths[b]``.
        empty_rows: what a query without an allowed key gives: ``zero``, ``nan``, ``mean`` or ``all``.
        query_offset: whether the queries are the last S of T positions, so that ``q`` of the expression counts from T - S.
        return_lse: whether the LSE is returned as well.

    Returns:
        [B, H, S, Dv] of the type of q. With ``return_lse`` a pair: this, and the natural logarithm of each row's sum of
        exp(scores), fp32 [B, H, S]; -inf where a row has no allowed key.

    Raises:
        ArgumentError: for wrong arguments, naming what was found and expected.
        UnsupportedError: for third derivatives, a subclass that refuses the operator, a BlockMask that cannot be read.
        LibraryError: when the library is missing or refuses the call.
    """
    text, mask_tables = to_mask(mask)
    if tables:
        if mask_tables:
            raise ArgumentError("tables are given beside a mask that has tables of its own")
        mask_tables = {name: _as_tensor(name, table) for name, table in tables.items()}
    operands: dict[str, Any] = {
        "pad": pad,
        "segment_q": segment_q,
        "segment_k": segment_k,
        "lengths": lengths,
        **mask_tables,
    }
    operands = {role: tensor for role, tensor in operands.items() if tensor is not None}
    tensors = {"q": q, "k": k, "v": v, **operands}
    check_kinds(tensors)
    if q.dim() != 4:
        raise ArgumentError(f"q has shape {list(q.shape)}, expected four axes [B, H, S, D]")
    scale = 1 / math.sqrt(max(1, q.shape[3])) if scale is None else as_number("scale", scale)
    settings = (text, " ".join(operands), scale, as_number("softcap", softcap), empty_rows, bool(query_offset))
    try:
        output, lse = attention_op(q, k, v, list(operands.values()), *settings)
    except (NotImplementedError, TypeError) as error:
        name_subclass(tensors, error)
        raise
    return (output, lse) if return_lse else output


def _as_tensor(name: str, table: Any) -> Any:
    if not is_table_name(name):
        raise ArgumentError(f"tables has the name {name!r}, expected table0, table1, ...")
    if not isinstance(table, np.ndarray):
        return table
    if table.dtype.kind not in "biufc":
        raise ArgumentError(f"{name} is an array of {table.dtype}, expected bool, uint8, int32 or int64")
    return torch.from_numpy(np.ascontiguousarray(table))
