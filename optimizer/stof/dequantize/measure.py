# SPDX-License-Identifier: Apache-2.0
"""Runs the quantized model, the float model and the result on the user's inputs, and holds the result to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx

from stof.errors import ArgumentError, VerifyError
from stof.execution.given_inputs import GivenFeed
from stof.execution.ort_sessions import Sessions
from stof.execution.run_limits import LimitReached
from stof.execution.session_process import RuntimeFailure, release_sessions
from stof.files import temporary_folder
from stof.graph.load_save import load
from stof.op_rewrite import Job, Measure
from stof.prompt_runs.limits import prompt_limits
from stof.thresholds.cosines import CosineMeter, rows_of_tokens
from stof.thresholds.measured_sets import MeasuredSets, find_sets
from stof.verification.float_distance import DequantizedAttention, OutputDistance


@dataclass
class _ErrorMeter:
    """Sums of squares, of differences and of a reference, by output.

    Attributes:
        model: whose outputs are held to the reference, for people.
        differences: sums by output.
        squares: of the reference, likewise.
    """

    model: str

    differences: dict[str, float] = field(default_factory=dict)
    squares: dict[str, float] = field(default_factory=dict)

    def add(
        self,
        names: Sequence[str],
        reference: Sequence[np.ndarray],
        other: Sequence[np.ndarray],
        feed: Mapping[str, np.ndarray],
    ) -> None:
        """Adds the outputs of both models on ``feed``; rows that its mask calls padding do not count, as in cosines."""
        for name, one, two in zip(names, reference, other, strict=True):
            if one.shape != two.shape:
                raise ArgumentError(
                    f"output {name!r} has shape {list(one.shape)} in the reference and {list(two.shape)} in the {self.model}; "
                    "give the --float-model from which it was made"
                )
            exact, found = one.astype(np.float64), two.astype(np.float64)
            if (rows := rows_of_tokens(one, feed)) is not None:
                exact, found = exact[rows], found[rows]
            with np.errstate(invalid="ignore", over="ignore"):
                difference = np.where(exact == found, 0.0, found - exact)
                self.differences[name] = self.differences.get(name, 0.0) + float(np.sum(difference**2))
                self.squares[name] = self.squares.get(name, 0.0) + float(np.sum(exact**2))

    def error(self, name: str) -> float:
        """The relative error; NaN where either model has numbers that are not finite."""
        difference, square = self.differences[name], self.squares[name]
        return float(np.sqrt(difference / square)) if square > 0 else float(np.sqrt(difference))


def hold_to_float(job: Job, final: onnx.ModelProto, folder: Path, given: Sequence[GivenFeed], measure: Measure) -> None:
    """Measures how far outputs with float attention are from those of the float model, or of the quantized one without it.

    Args:
        job: the optimization; its ``dequantized`` gets the distances.
        final: the model to write.
        folder: for temporary files.
        given: the user's sets of inputs.
        measure: times the step.

    Raises:
        ArgumentError: when a model does not run on the inputs, or the float model has other outputs.
        VerifyError: when an output is farther from the float model's than the quantized model's is, and its cosine is below
            ``--min-cosine``; without a float model, when its cosine with the quantized model's is.
    """
    result = job.dequantized
    if result is None or not result.sites or not given:
        return
    with measure("distance"):
        sets = find_sets(job.model, None, given)
        assert sets is not None
        result.measured_on = sets.describe(range(sets.count))
        result.distances = _measure(job, final, folder, sets, given)
    _check(result, job)


def _measure(
    job: Job, final: onnx.ModelProto, folder: Path, sets: MeasuredSets, given: Sequence[GivenFeed]
) -> list[OutputDistance]:
    float_model = job.options.float_model
    names = sets.outputs
    cosines, error = CosineMeter(names), _ErrorMeter("optimized model")
    quantized_error = _ErrorMeter("quantized model")
    try:
        with temporary_folder(folder) as scratch:
            limits = prompt_limits(job.options.verify_memory)
            own = Sessions(job.source.parent.resolve(), scratch, limits)
            quantized = own.make(job.source, optimized=True, library=False)
            optimized = own.make(final, optimized=True, library=True)
            reference = quantized
            if float_model is not None:
                load(float_model)  # with its own words for files that are no models
                others = Sessions(float_model.parent.resolve(), scratch, limits)
                reference = others.make(float_model, optimized=True, library=False)
            if missing := [n for n in names if n not in reference.outputs]:
                raise ArgumentError(
                    f"{float_model} has no output {missing[0]!r}, which the quantized model has; give the --float-model from "
                    "which that was made"
                )
            for feed in given:
                exact, found = (session.run(names, feed.arrays) for session in (reference, optimized))
                error.add(names, exact, found, feed.arrays)
                cosines.add(exact, found, feed.arrays)
                if reference is not quantized:
                    quantized_error.add(names, exact, quantized.run(names, feed.arrays), feed.arrays)
    except RuntimeFailure as failure:
        raise ArgumentError(f"{sets.source}: a model does not run on it: {failure}") from failure
    except LimitReached as reached:
        raise VerifyError(f"the distance to the float model could not be measured: {reached}") from reached
    finally:
        release_sessions()
    means = cosines.means()
    if empty := [n for n in names if n not in means]:
        raise ArgumentError(
            f"{sets.source}: output {empty[0]!r} has no row that is not padding, so nothing of it can be compared; give inputs "
            "with tokens"
        )
    return [
        OutputDistance(
            name,
            means[name],
            error.error(name),
            None if float_model is None else quantized_error.error(name),
        )
        for name in names
    ]


def _check(result: DequantizedAttention, job: Job) -> None:
    """Raises VerifyError for the output that is farthest beyond both bounds."""
    least = job.options.min_cosine
    far = [d for d in result.distances if not d.is_nearer and not d.cosine >= least]
    if not far or job.options.force:
        return
    worst = min(far, key=lambda d: d.cosine)
    if result.reference:
        raise VerifyError(
            f"--dequantize-attention: output {worst.output!r} is farther from that of {result.reference} than the quantized "
            f"model's on {result.measured_on}: error {worst.error:.3g}, {worst.quantized_error:.3g} before; its cosine is 1 - "
            f"{1 - worst.cosine:.3g}, --min-cosine allows {least:g}. Nothing was written; lower --min-cosine, leave sites out "
            "with --skip, or write it anyway with --force"
        )
    raise VerifyError(
        f"--dequantize-attention: the cosine of output {worst.output!r} with the quantized model's is 1 - "
        f"{1 - worst.cosine:.3g} on {result.measured_on}, --min-cosine allows {least:g}. Nothing was written; float attention "
        "may be the better one: give --float-model FILE to measure that, lower --min-cosine, or write it anyway with --force"
    )
