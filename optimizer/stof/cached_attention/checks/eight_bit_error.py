# SPDX-License-Identifier: Apache-2.0
"""The error of a step over a KV cache whose operands are rounded to 8 bits, against fp64, on some of its query rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stof.arguments.precisions import EightBits
from stof.attention.checks.eight_bit_error import EightBitErrors, ErrorSums, choose_rows
from stof.cached_attention.checks.oracle import CacheStep, append_to_cache, find_allowed


def measure_eight_bits_of_step(step: CacheStep, precisions: Sequence[EightBits]) -> EightBitErrors:
    """The errors in each precision. Padding of a first prompt has neither queries nor keys.

    Args:
        step: in the type of the site, whose cache is not quantized.
        precisions: those to measure.
    """
    sequences, _ = append_to_cache(step, storage=step.query.dtype)
    batch, queries = step.query.shape[:2]
    heads, groups, keys = step.num_heads, step.kv_num_heads, max(s.keys.shape[1] for s in sequences)
    kept_heads, kept_rows = choose_rows(batch * heads, queries, keys)
    sums, rows = ErrorSums(precisions, step.query.dtype), 0
    sink = None if step.sink is None else step.sink.astype(np.float64).reshape(-1)
    last = (-1, -1)
    for b, h in (divmod(int(i), heads) for i in kept_heads):
        sequence, shared = sequences[b], h // (heads // groups)
        if last != (b, shared):
            sums.set_keys(sequence.keys[shared], sequence.values[shared], None)
            last = (b, shared)
        some = kept_rows[kept_rows < sequence.tokens]
        allowed = find_allowed(step, sequence, h, some)
        sums.add(sequence.query[h, some], step.scale or None, allowed, None if sink is None else float(sink[h]))
        rows += len(some)
    shape = (batch, heads, groups, queries, keys, sequences[0].query.shape[2])
    return EightBitErrors(sums.squares, sums.exact_squares, rows, heads * sum(s.tokens for s in sequences), shape)
