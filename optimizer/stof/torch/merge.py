# SPDX-License-Identifier: Apache-2.0
"""Merges partial results of attention over parts of the keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from stof.errors import ArgumentError
from stof.torch.arguments import check_kinds, check_type


def merge(outputs: Sequence[Any], lses: Sequence[Any]) -> tuple[Any, Any]:
    """The result of attention over all keys from those over disjoint parts of them.

    ``lse = log(sum_p exp(lse_p))`` and ``output = sum_p exp(lse_p - lse) output_p``, computed in fp32 (fp64 for fp64). A part
    whose LSE is -inf has no allowed key for the row and contributes nothing, whatever its output holds. Rows that are empty
    in all parts give 0, and an LSE of -inf. Differentiable in outputs and LSEs.

    Args:
        outputs: of each part, [B, H, S, Dv], of one type.
        lses: of each part, [B, H, S], as ``attention`` gives them with ``return_lse``.

    Returns:
        The output of the type of the parts, and the LSE of the type of the LSEs.

    Raises:
        ArgumentError: naming the part, what was found and what was expected.
    """
    if not outputs or len(outputs) != len(lses):
        raise ArgumentError(f"{len(outputs)} outputs and {len(lses)} LSEs, expected one or more, as many of each")
    for i, (output, lse) in enumerate(zip(outputs, lses, strict=True)):
        check_kinds({f"output {i}": output, f"lse {i}": lse})
        check_type(f"output {i}", output)
        check_type(f"lse {i}", lse)
        if not output.device == lse.device == outputs[0].device:
            raise ArgumentError(
                f"output {i} is on {output.device} and lse {i} on {lse.device}, expected both on {outputs[0].device}"
            )
        if output.shape != outputs[0].shape or output.dtype != outputs[0].dtype:
            raise ArgumentError(
                f"output {i} is {output.dtype} {list(output.shape)}, expected {outputs[0].dtype} {list(outputs[0].shape)}"
            )
        if lse.shape != output.shape[:-1]:
            raise ArgumentError(f"lse {i} has shape {list(lse.shape)}, expected {list(output.shape[:-1])}")
    wide = torch.float64 if outputs[0].dtype == torch.float64 else torch.float32
    stacked = torch.stack([lse.to(wide) for lse in lses])
    is_empty = stacked == float("-inf")
    all_empty = is_empty.all(0)
    # A finite number where every part is empty: the difference of two infinities would be NaN, in gradients too.
    total = torch.logsumexp(torch.where(all_empty, 0.0, stacked), 0)
    weights = torch.exp(torch.where(is_empty, float("-inf"), stacked - total)).masked_fill(is_empty, 0)
    parts = torch.stack([output.to(wide) for output in outputs])
    parts = parts.masked_fill(is_empty[..., None], 0)  # NaN of an empty row, times 0, would be NaN
    output = (weights[..., None] * parts).sum(0).to(outputs[0].dtype)
    return output, total.masked_fill(all_empty, float("-inf")).to(lses[0].dtype)
