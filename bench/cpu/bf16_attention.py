# SPDX-License-Identifier: Apache-2.0
"""Attention with bf16 matmuls on a CPU: stof with and without, torch in bf16, OpenVINO at its default precision."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from bench.core.candidate import Candidate
from bench.core.case import AttentionCase, named_mask
from bench.cpu.baselines import CpuCandidate, openvino, sdpa
from bench.cpu.baselines_ort import standard, stof_in_ort
from bench.cpu.problem import CpuProblem
from stof.arguments.precisions import BF16
from stof.bench.results import Record
from stof.runtime.limits import kernel_in_precision
from stof.verification.array_distance import relative_rms

MASKS = ("dense", "causal", "window-128")
_GRID = "bf16-attention"
_LENGTHS, _SIZES = (512, 4096), (64, 128)
_HEADS = 12


def grid(
    masks: Sequence[str] | None, lengths: Sequence[int] | None, sizes: Sequence[int] | None
) -> Iterator[AttentionCase]:
    """The points, B1 H12; None: those of the grid.

    Args:
        masks: of ``MASKS``.
        lengths: S.
        sizes: D.
    """
    for mask in masks or MASKS:
        for size in sizes or _SIZES:
            for length in lengths or _LENGTHS:
                expression, tables = named_mask(mask, length)
                yield AttentionCase(_GRID, mask, expression, 1, _HEADS, _HEADS, length, length, size, "float32", tables)


class Bf16Problem(CpuProblem):
    """An attention problem whose errors are root mean squares: single elements say little of rounded operands."""

    tolerance = 2e-2
    relative_to = "the root mean square"

    def error(self, output: np.ndarray) -> float:
        """The root mean square of the differences from fp64 over that of fp64, in the checked rows."""
        rows, expected = self._reference
        if output.shape != self.q.shape:
            raise ValueError(f"output of shape {output.shape}, expected {self.q.shape}")
        found = relative_rms(output[:, :, rows], expected, np.ones(expected.shape, bool))
        return np.inf if found is None else found

    def describe(self, threads: int) -> Record:
        """Key, mask, shape, densities, and the instructions that compute in bf16 here; empty: none do."""
        kernel = kernel_in_precision("StofAttention", BF16.attribute)
        return {**super().describe(threads), "kernel": kernel}


CANDIDATES: tuple[CpuCandidate, ...] = (
    Candidate("stof-bf16", "stof, --allow-bf16", partial(stof_in_ort, allow_bf16=1)),
    Candidate("stof", "stof", stof_in_ort),
    Candidate("torch-bf16", "torch SDPA, bf16 tensors", sdpa("bool", "bfloat16")),
    Candidate("torch", "torch SDPA", sdpa("bool")),
    Candidate("openvino", "OpenVINO SDPA, default precision", partial(openvino, precision=None)),
    Candidate("openvino-f32", "OpenVINO SDPA, f32", openvino),
    Candidate("ort-attention-23", "ONNX Runtime Attention-23", standard(23), score_tensors=2),
)


def describe_record(record: Record) -> list[str]:
    """The record as text: a line for the point, and one for each candidate with its ratio to the first."""
    machine, peers = record["machine"], record["peers"]
    kernel = record["kernel"] or "no bf16 kernel"
    found = [f"{record['mask_name']} {record['key'][1]}, {machine['threads']} thread(s), {kernel}"]
    own = peers.get("stof-bf16", {}).get("us")
    for row in peers.values():
        if "us" not in row:
            found.append(f"  {row['label']:34s} missing: {row['missing']}")
            continue
        ratio = f"{row['us'] / own:7.2f}x" if own else ""
        found.append(f"  {row['label']:34s} {row['us']:12.1f} us {ratio}  relative RMS error {row['error']:.0e}")
    return found
