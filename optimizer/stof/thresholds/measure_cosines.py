# SPDX-License-Identifier: Apache-2.0
"""Runs the original and the result on sets of inputs, and measures the cosines of outputs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx

from stof.errors import ArgumentError, VerifyError
from stof.execution.ort_sessions import Sessions
from stof.execution.run_limits import LimitReached
from stof.execution.session_process import RuntimeFailure
from stof.execution.upcast import TypedAttributes
from stof.execution.widened_sessions import sessions_for
from stof.files import temporary_folder
from stof.op_parts import StatesOutputs
from stof.op_rewrite import Job
from stof.options import Options
from stof.prompt_runs.limits import prompt_limits
from stof.sparsify.threshold_report import OutputCosines
from stof.stages import Stage
from stof.thresholds.cosines import CosineMeter
from stof.thresholds.measured_sets import MeasuredSets
from stof.verification.model_inputs import ModelInputs


def measure_cosines(
    job: Job,
    stages: Sequence[Stage],
    inputs: ModelInputs,
    sets: MeasuredSets,
    some: Sequence[int],
    model: onnx.ModelProto,
    folder: Path,
    typed_attributes: TypedAttributes | None = None,
) -> CosineMeter:
    """The cosines of a model's outputs with the original's.

    Args:
        job: the optimization.
        stages: whose model it is.
        inputs: of the original.
        sets: what both models run on.
        some: the indices of those that count.
        model: whose outputs change; its external data lies beside the original.
        folder: for temporary files.
        typed_attributes: string attributes of stof's operators that name element types; if given, half-precision models run in
            fp32.

    Raises:
        ArgumentError: when a model does not run on a set, or no row of the outputs counts.
        VerifyError: when memory does not suffice.
    """
    meter = CosineMeter(sets.outputs)
    try:
        with temporary_folder(folder) as scratch:
            limits = prompt_limits(job.options.verify_memory)
            sessions = sessions_for(Sessions(job.source.parent.resolve(), scratch, limits), typed_attributes)
            original = sessions.make(_original(job, stages, inputs), optimized=True, library=False)
            result = sessions.make(model, optimized=True, library=True)
            for feed in sets.feeds(inputs.maker, some):
                arrays = feed()
                outputs = [session.run(sets.outputs, arrays) for session in (original, result)]
                meter.add(outputs[0], outputs[1], arrays)
    except RuntimeFailure as error:
        raise ArgumentError(f"{sets.source}: a model does not run on it: {error}") from error
    except LimitReached as error:
        raise VerifyError(f"the loss on {sets.source} could not be measured: {error}") from error
    if not meter.means():
        raise ArgumentError(
            f"{sets.source}: the outputs have no row that counts: they are empty, or attention_mask calls every token padding; "
            "give inputs with tokens"
        )
    return meter


def _original(job: Job, stages: Sequence[Stage], inputs: ModelInputs) -> onnx.ModelProto | Path:
    """The original, with outputs as options state them."""
    if inputs.original is not None:
        return inputs.original
    if job.sparsity is not None:
        return job.source
    model = job.model
    for stage in stages:
        if isinstance(stage.op, StatesOutputs):
            model = stage.op.stated_form(model, stage.decided)
    return job.source if model is job.model else model


def check_cosines(cosines: OutputCosines, options: Options, changed_by: str = "--sparsify") -> None:
    """Refuses outputs that are too far from the original's.

    Args:
        cosines: of all outputs.
        options: have the bound.
        changed_by: the option that changes them.

    Raises:
        VerifyError: naming the output and both numbers.
    """
    name, cosine = cosines.least
    if cosine >= options.min_cosine or options.force:
        return
    way = "a smaller threshold" if changed_by == "--sparsify" else "a smaller --max-error"
    if options.plan is not None:
        way = (
            "a plan with a smaller threshold"
            if changed_by == "--sparsify"
            else "a plan with fewer entries in attention_precision, gemm_precision or mlp_precision"
        )
    raise VerifyError(
        f"{changed_by} changes outputs too much: the cosine of output {name!r} with the original's is 1 - {1 - cosine:.3g} "
        f"on {cosines.source}, --min-cosine allows {options.min_cosine:g}. Nothing was written; choose {way}, "
        "lower --min-cosine, or write it anyway with --force"
    )
