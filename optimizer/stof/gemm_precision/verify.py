# SPDX-License-Identifier: Apache-2.0
"""Verifies a model whose matmuls alone were replaced: in full precision, as other models are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx

from stof import progress
from stof.execution.given_inputs import GivenFeed
from stof.fusion.emit import GEMM
from stof.graph.index import DOMAIN
from stof.graph.protobuf import copy_model
from stof.op_rewrite import OpRewrite
from stof.report import Report
from stof.sparsify.precision_report import PrecisionReport
from stof.stages import Stage
from stof.verify_stages import verify_rewritten


def verify_gemms(
    report: Report,
    ops: Sequence[OpRewrite[Any, Any, Any]],
    stages: Sequence[Stage],
    final: onnx.ModelProto,
    folder: Path,
    user_inputs: Sequence[GivenFeed],
) -> None:
    """Compares the outputs of the model, whose StofGemm nodes compute in their own type, with the original's.

    Args:
        report: gets the comparisons.
        ops: all ops.
        stages: none of which replaced anything.
        final: the model with StofGemm nodes.
        folder: for temporary files.
        user_inputs: the user's sets of inputs.

    Raises:
        VerifyError: when outputs differ.
    """
    reduced = report.attention_precision
    if not isinstance(reduced, PrecisionReport) or not stages[-1].job.options.verify:
        return
    with progress.step("verify"):
        model = _in_full_precision(final, reduced.precision.attribute)
        verify_rewritten(report, ops, stages, model, folder, user_inputs)


def _in_full_precision(model: onnx.ModelProto, attribute: str) -> onnx.ModelProto:
    """A copy of a model whose StofGemm nodes lack the attribute that allows the precision."""
    result = copy_model(model)
    for node in result.graph.node:
        if node.domain == DOMAIN and node.op_type == GEMM:
            kept = [a for a in node.attribute if a.name != attribute]
            del node.attribute[:]
            node.attribute.extend(kept)
    return result
