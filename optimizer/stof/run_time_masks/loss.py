# SPDX-License-Identifier: Apache-2.0
"""The loss on prompts, where options change outputs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx

from stof.attention_precision.eight_bit_report import EightBitReport
from stof.errors import VerifyError
from stof.op_parts import HoldsPrompts
from stof.op_rewrite import Job, Measure
from stof.options import Options
from stof.prompts.files import PromptSet
from stof.prompts.loss import PromptLoss, has_logits
from stof.report import Report
from stof.sparsify.reduced_report import ReducedPrecisionReport
from stof.stages import Stage, find_model_inputs, typed_attributes_of_bf16, typed_attributes_to_widen


def measure_loss_on_prompts(
    report: Report, job: Job, stages: Sequence[Stage], final: onnx.ModelProto, target: Path, measure: Measure
) -> None:
    """Measures by how much next tokens change, where options change outputs and there are prompts.

    Raises:
        VerifyError: when it is above --max-kl.
    """
    is_sparsified = report.sparsity is not None and report.sparsity.changes_outputs
    changed = [s.decided.section for s in stages if s.decided.section.changes_outputs]
    decided = [s.decided for s in stages]
    prompts = job.prompts or next(
        (d.held_out for d in decided if isinstance(d, HoldsPrompts) and d.held_out is not None), None
    )
    reduced = report.attention_precision
    is_reduced = reduced is not None and reduced.changes_outputs
    if prompts is None or not (is_sparsified or changed or is_reduced):
        return
    from stof.prompt_runs.measure_loss import check_loss
    from stof.thresholds.apply import counted_skipping

    # Patterns and pages have no other measure; thresholds and neurons say themselves what they lose.
    by_itself = report.sparsity is None or not (report.sparsity.sparsified or report.sparsity.chooses_pages)
    if by_itself and not has_logits(job.model):
        return
    thresholds = None if report.sparsity is None else report.sparsity.threshold_report
    with measure("prompts"), counted_skipping(thresholds):
        loss = _measure(job, stages, final, prompts, target.parent, reduced)
    if loss is None:
        return
    if is_sparsified and report.sparsity is not None:
        report.sparsity.loss, report.sparsity.decode_loss = loss.whole, loss.decoded
    if is_reduced and reduced is not None:
        reduced.loss, reduced.decode_loss = loss.whole, loss.decoded
    for section in changed:
        section.loss = loss
    options = [*(["--sparsify"] if is_sparsified else []), *(["--sparse-mlp"] if changed else [])]
    options += [reduced.option] if is_reduced and reduced is not None else []
    check_loss(loss, " with ".join(options), job.options)


def _measure(
    job: Job,
    stages: Sequence[Stage],
    final: onnx.ModelProto,
    prompts: PromptSet,
    folder: Path,
    reduced: ReducedPrecisionReport | None,
) -> PromptLoss | None:
    """The loss of the model; of one with 8-bit attention that of a model that rounds as its kernels do.

    None where memory does not suffice for such a model, which the report then says.

    Raises:
        VerifyError: when memory does not suffice for others, or --max-kl is not its default.
    """
    from stof.prompt_runs.measure_loss import measure_loss

    inputs = find_model_inputs(job, stages)
    if not (isinstance(reduced, EightBitReport) and reduced.reduced):
        typed = typed_attributes_of_bf16(job.model, stages)
        return measure_loss(job.source, final, inputs, prompts, folder, job.options, typed)
    from stof.attention_precision.eight_bit_emulation import emulate_eight_bits

    try:
        emulated = emulate_eight_bits(final, reduced.by_name)
        typed = typed_attributes_to_widen(job.model, stages)
        return measure_loss(job.source, emulated, inputs, prompts, folder, job.options, typed)
    except VerifyError as error:
        if job.options.max_kl != Options.max_kl and not job.options.force:
            raise
        reduced.no_loss = str(error)
        return None
