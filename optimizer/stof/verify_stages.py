# SPDX-License-Identifier: Apache-2.0
"""Verifies an optimized model, and drops the rewrites that make its outputs differ."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx

from stof.errors import ArgumentError, InputsRefusedError, ModelError, VerifyError, explained
from stof.execution.given_inputs import GivenFeed
from stof.execution.run_limits import LimitReached, RunLimits
from stof.execution.session_process import RuntimeFailure, release_sessions
from stof.execution.upcast import TypedAttributes
from stof.files import temporary_folder
from stof.op_parts import ChangesOutputs, ExplainsFailures, LeavesPaddingOut, StatesOutputs, collect_typed_attributes
from stof.op_rewrite import OpRewrite
from stof.report import Report
from stof.stages import Stage, can_drop, drop

if TYPE_CHECKING:
    from stof.verification.padding.padded_batch import PaddedBatch
    from stof.verification.result import Verification

_LONGEST_REASON = 300
_SHARE = 0.7  # of the time, for a verification after which rewrites may be dropped


@dataclass(frozen=True)
class _Outcome:
    """What a verification found.

    Attributes:
        verification: the comparisons; None where there was nothing to compare, or the model does not run.
        failure: what is wrong; empty where nothing is.
        faults: what is wrong with the sites of ops, by their keys.
        suspected: the op among whose sites the difference comes from several together; empty where none is known.
        error: what ONNX Runtime raised.
    """

    verification: Verification | None = None
    failure: str = ""
    faults: Mapping[str, str] = field(default_factory=dict)
    suspected: str = ""
    error: RuntimeFailure | None = None


def verify_stages(
    report: Report,
    ops: Sequence[OpRewrite[Any, Any, Any]],
    stages: list[Stage],
    folder: Path,
    user_inputs: Sequence[GivenFeed] = (),
) -> list[Stage]:
    """Verifies the model, and drops rewrites until its outputs are right.

    An op whose sites differ is dropped. Where no site does, each op that can be is dropped by itself, the last one first; the
    last one is dropped for good where that helps nowhere.

    Args:
        report: gets the rows of what was dropped, and the comparisons.
        ops: all ops whose operators may be in the model.
        stages: of the ops that the options enable.
        folder: for temporary files, on a disk with room for the model.
        user_inputs: sets of inputs of the user's.

    Returns:
        The stages without what was dropped.

    Raises:
        VerifyError: when outputs differ by rewrites that cannot be dropped.
        RuntimeFailure: when ONNX Runtime cannot load or run one of the models.
    """
    attempt = _Attempts(ops, folder, user_inputs)
    outcome = attempt.verify(stages)
    while outcome.failure:
        tried: list[tuple[list[Stage], _Outcome]] = []
        for trial in _trials(stages, outcome):
            tried.append((trial, attempt.verify(trial)))
            if not tried[-1][1].failure:
                break
        if not tried:
            break
        is_right = not tried[-1][1].failure
        stages, outcome = tried[-1] if is_right else tried[0]
        report.sections |= {s.op.key: s.decided.section for s in stages}
    if outcome.error is not None:
        raise outcome.error
    if outcome.verification is not None:
        report.verification = outcome.verification
        report.seconds["verify"] = attempt.seconds
        if outcome.failure:
            if outcome.verification.noise_left_out and not outcome.verification.faulty_sites():
                raise VerifyError(
                    f"verification failed: {outcome.failure}. Every site by itself computes what it should, and no time was "
                    "left for runs of the original with noise, which tell rounding from faults. Nothing was written; raise "
                    f"--verify-budget by some runs of the original, one of which takes {outcome.verification.run_seconds:.1f} s"
                )
            stage = _find_blamed(stages, outcome)
            raise VerifyError(_explain_failure(stage, outcome.verification))
    return stages


def verify_rewritten(
    report: Report,
    ops: Sequence[OpRewrite[Any, Any, Any]],
    stages: Sequence[Stage],
    final: onnx.ModelProto,
    folder: Path,
    user_inputs: Sequence[GivenFeed] = (),
) -> None:
    """Verifies a model that was rewritten behind all stages, none of which replaced anything.

    Args:
        report: gets the comparisons.
        ops: all ops whose operators may be in the model.
        stages: of the ops that the options enable.
        final: the model.
        folder: for temporary files, on a disk with room for the model.
        user_inputs: sets of inputs of the user's.

    Raises:
        VerifyError: when outputs differ.
        RuntimeFailure: when ONNX Runtime cannot load or run one of the models.
    """
    options = stages[-1].job.options
    limits = RunLimits(options.verify_budget, options.verify_memory)
    outcome = _verify(stages, folder, collect_typed_attributes(ops), limits, user_inputs, final)
    assert outcome.verification is not None
    report.verification = outcome.verification
    report.seconds["verify"] = outcome.verification.seconds
    if outcome.failure:
        raise VerifyError(
            f"verification failed: {outcome.failure}. Nothing was written; --products off leaves all matmuls as they are"
        )


def _trials(stages: Sequence[Stage], outcome: _Outcome) -> Iterator[list[Stage]]:
    """What is left of stages when one is dropped that may be at fault, those most likely to be first; or nothing."""
    faulty = [i for i, s in enumerate(stages) if s.op.key in outcome.faults]
    if any(not can_drop(stages[i]) for i in faulty):
        return
    if faulty:
        yield drop(stages, faulty[-1], outcome.faults[stages[faulty[-1]].op.key])
        return
    for i in reversed(range(len(stages))):
        if can_drop(stages[i]):
            yield drop(stages, i, outcome.failure)


def _find_blamed(stages: Sequence[Stage], outcome: _Outcome) -> Stage:
    """The op at fault: of those whose sites differ, the first; else one that cannot be dropped."""
    fixed = [s for s in stages if s.decided.has_replaced and not can_drop(s)]
    wrong = [s for s in fixed if s.op.key in outcome.faults] or [s for s in fixed if s.op.key == outcome.suspected]
    return [*wrong, *fixed, *stages][0]


def _explain_failure(stage: Stage, verification: Verification) -> str:
    if isinstance(stage.op, ExplainsFailures):
        return stage.op.explain_failure(stage.decided, verification)
    return f"verification failed: {verification.failures[0].message()}. Nothing was written"


def _describe_failure(error: RuntimeFailure) -> str:
    from stof.verification.verifier import OriginalFailureError

    words = f"ONNX Runtime does not run the model: {str(error)[:_LONGEST_REASON]}"
    if isinstance(error, OriginalFailureError):
        words += "; --no-verify replaces it unverified"
    return words


class _Attempts:
    """Verifies what is left of stages, and adds up the time.

    Args:
        ops: all ops.
        folder: for temporary files.
        user_inputs: sets of inputs of the user's.
    """

    def __init__(self, ops: Sequence[OpRewrite[Any, Any, Any]], folder: Path, user_inputs: Sequence[GivenFeed]) -> None:
        self.folder = folder
        self.user_inputs = user_inputs
        self.typed_attributes = collect_typed_attributes(ops)
        self.seconds = 0.0
        self.limits: RunLimits | None = None

    def verify(self, stages: Sequence[Stage]) -> _Outcome:
        """What a verification finds; nothing where nothing is replaced."""
        if not any(s.decided.has_replaced for s in stages):
            return _Outcome()
        try:
            outcome = _verify(stages, self.folder, self.typed_attributes, self._share(stages), self.user_inputs)
        except RuntimeFailure as error:
            return _Outcome(failure=_describe_failure(error), error=error)
        assert outcome.verification is not None
        self.seconds += outcome.verification.seconds
        return outcome

    def _share(self, stages: Sequence[Stage]) -> RunLimits:
        """The limits of one verification: a part of what is left where another one may have to follow."""
        if self.limits is None:
            options = stages[-1].job.options
            self.limits = RunLimits(options.verify_budget, options.verify_memory)
        seconds_left = max(0.0, self.limits.start + self.limits.budget - time.monotonic())
        return self.limits.share(_SHARE * seconds_left if any(can_drop(s) for s in stages) else seconds_left)


def find_padded_batches(stages: Sequence[Stage]) -> list[PaddedBatch]:
    """The batches whose padding ops leave out."""
    found = (s.op.padded_batches(s.decided) for s in stages if isinstance(s.op, LeavesPaddingOut))
    return [batch for batches in found for batch in batches]


def _verify(
    stages: Sequence[Stage],
    folder: Path,
    typed_attributes: TypedAttributes,
    limits: RunLimits,
    user_inputs: Sequence[GivenFeed],
    final: onnx.ModelProto | None = None,
) -> _Outcome:
    """What a verification finds of the last stage's model, or of another one."""
    job, final = stages[-1].job, final or stages[-1].written
    # A tenth of all imports, which --no-verify and --dry-run do not need.
    from stof.verification.site_checks import EmittedSites
    from stof.verification.verifier import Verifier

    try:
        with temporary_folder(folder) as scratch:
            sites = []
            for stage in stages:
                limits.check_time()
                if (checks := stage.op.site_checks(job, stage.decided)) is not None:
                    sites.append(EmittedSites(stage.op.key, checks, stage.model))
            original = job.model
            for stage in stages:
                if isinstance(stage.op, StatesOutputs):
                    original = stage.op.stated_form(original, stage.decided)
            searches = not any(can_drop(s) for s in stages)
            verifier = Verifier(
                original,
                sites,
                limits,
                searches,
                typed_attributes,
                user_inputs,
                job.options.shapes,
                is_from_file=job.sparsity is None and job.dequantized is None and original is job.model,
                padded_batches=find_padded_batches(stages),
            )
            for op in (s.op for s in stages):
                if isinstance(op, ChangesOutputs):
                    final = op.verifiable_form(final)
            verification = verifier.run(job.source, final, scratch)
    except OSError as error:
        raise ArgumentError(
            f"files for verification cannot be written to {folder}: {error.strerror or error}; make room there, "
            "choose another folder with -o, or leave verification out with --no-verify"
        ) from error
    except LimitReached as error:  # while it was prepared
        raise VerifyError(str(error)) from error
    except InputsRefusedError as error:
        raise InputsRefusedError(f"{job.source} was not verified: {error}") from error
    except (KeyError, MemoryError, TypeError, ValueError) as error:  # inputs that cannot be drawn or are too large
        raise ModelError(
            f"{job.source} cannot be verified ({type(error).__name__}: {explained(error)}); give inputs with --inputs FILE, or "
            "leave verification out with --no-verify. Nothing was written"
        ) from error
    finally:
        release_sessions()
    failure = verification.failures[0].message() if verification.failures else ""
    faults = {key: comparisons[0].message() for key, comparisons in verifier.faults.items()}
    return _Outcome(verification, failure, faults, verifier.suspected)
