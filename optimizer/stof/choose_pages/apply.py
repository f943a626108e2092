# SPDX-License-Identifier: Apache-2.0
"""Has an optimized and verified model choose pages, and holds it to what was verified."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx

from stof.choose_pages.layers import PageLayer, check_target, find_page_layers, put_pages
from stof.errors import VerifyError
from stof.execution.ort_sessions import Sessions
from stof.execution.run_limits import LimitReached
from stof.execution.session_process import RuntimeFailure, session_environment
from stof.files import temporary_folder
from stof.op_rewrite import Job
from stof.prompt_runs.limits import prompt_limits
from stof.prompt_runs.page_bounds import Feed, empty_bounds, find_bounds
from stof.sparsify.pages_report import PageChoiceRow, PagesReport
from stof.sparsify.report import SparsityReport
from stof.sparsify.spec import SparsitySpec
from stof.stages import Stage, find_model_inputs
from stof.thresholds.switched_off import draw_unpadded, find_caches

_MOST_CASES = 8  # that are tried until one runs


def new_report(job: Job, spec: SparsitySpec) -> PagesReport | None:
    """The report of choose pages; None where --sparsify does not name it.

    Raises:
        ArgumentError: for a target whose kernels choose no pages.
        LibraryError: without a library.
    """
    if not spec.pages_clauses:
        return None
    check_target(job.target, spec)
    return PagesReport(spec)


def report_pages(report: SparsityReport | None, model: onnx.ModelProto) -> tuple[PageLayer, ...]:
    """The attentions of an optimized model, whose rows the report gets; none where --sparsify does not name choose pages.

    Raises:
        ArgumentError: as :func:`stof.choose_pages.layers.find_page_layers`.
    """
    if report is None or report.pages is None:
        return ()
    layers = find_page_layers(model, report.pages.spec)
    report.pages.rows = [_row_of(x) for x in layers]
    return layers


def choose_pages(
    job: Job, report: SparsityReport | None, model: onnx.ModelProto, stages: Sequence[Stage], folder: Path
) -> onnx.ModelProto:
    """The model with bounds and attributes; the same where --sparsify does not name choose pages.

    Args:
        job: the optimization.
        report: gets rows.
        model: verified; it may skip by score.
        stages: whose model it is.
        folder: for temporary files.

    Raises:
        ArgumentError: as :func:`report_pages`.
        VerifyError: when the model differs from the verified one under ``STOF_SKIP_SCORES=0``.
    """
    layers = report_pages(report, model)
    if all(x.reason for x in layers):
        return model
    choosing = put_pages(model, layers)
    if report is not None and report.threshold_report is not None and report.threshold_report.cosines is not None:
        report.threshold_report.warnings += ("choose-pages is not in the loss on inputs: --prompts measures it",)
    if not job.options.verify:
        return choosing
    failure: Exception | None = None
    for feed in draw_unpadded(find_model_inputs(job, stages), _MOST_CASES):
        try:
            with temporary_folder(folder) as scratch:
                sessions = Sessions(job.source.parent.resolve(), scratch, prompt_limits(job.options.verify_memory))
                _check_switched_off(sessions, model, choosing, feed)
            return choosing
        except (LimitReached, RuntimeFailure) as error:  # a window is longer than this cache, for instance
            failure = error
    if failure is not None:
        raise VerifyError(f"choose-pages could not be verified: {failure}") from failure
    return choosing


def _check_switched_off(sessions: Sessions, exact: onnx.ModelProto, choosing: onnx.ModelProto, feed: Feed) -> None:
    """Compares outputs bit by bit under ``STOF_SKIP_SCORES=0``. Caches are left out: rows behind their keys are undefined."""
    bounds = find_bounds(choosing)
    caches = find_caches(exact)
    with session_environment(STOF_SKIP_SCORES="0"):
        session = sessions.make(exact, optimized=True, library=True)
        expected = dict(zip(session.outputs, session.run(None, feed), strict=True))
        session = sessions.make(choosing, optimized=True, library=True)
        found = dict(zip(session.outputs, session.run(None, {**feed, **empty_bounds(bounds, feed)}), strict=True))
        del session
    for name, one in expected.items():
        if name in caches:
            continue
        other = found[name]
        if one.dtype != other.dtype or one.shape != other.shape or one.tobytes() != other.tobytes():
            raise VerifyError(
                f"verification failed: output {name!r} of the model that chooses pages is not that of the verified one under "
                "STOF_SKIP_SCORES=0. Nothing was written; leave choose-pages out, and please report this model"
            )
    for layer in bounds:
        if not np.isfinite(found[layer.present][:, :, :1].astype(np.float32)).all():
            raise VerifyError(
                f"verification failed: {layer.present!r} has bounds of page 0 that are not finite. Nothing was written; leave "
                "choose-pages out, and please report this model"
            )


def _row_of(layer: PageLayer) -> PageChoiceRow:
    if layer.reason or layer.clause is None:
        return PageChoiceRow(layer.name, layer.layer, False, layer.reason)
    clause = layer.clause
    return PageChoiceRow(
        layer.name, layer.layer, True, "", clause.pages, clause.rows, layer.past_bounds, layer.present_bounds
    )
