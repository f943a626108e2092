# SPDX-License-Identifier: Apache-2.0
"""The error of each attention in reduced precision against fp64, on tensors that the original computes of sets of inputs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
from onnx import helper

from stof.arguments.precisions import Precision
from stof.attention_precision.layers import put_precision
from stof.cached_attention.report import KEY as CACHES
from stof.errors import ArgumentError, VerifyError
from stof.execution.inputs import InputMaker
from stof.execution.ort_sessions import Sessions
from stof.execution.run_limits import LimitReached
from stof.execution.session_process import RuntimeFailure, release_sessions
from stof.execution.upcast import HALF, Twins, widen_feeds
from stof.files import temporary_folder
from stof.graph.index import DOMAIN
from stof.op_parts import collect_typed_attributes
from stof.op_rewrite import Job
from stof.prompt_runs.feeds import make_prompt_feed
from stof.prompt_runs.limits import prompt_limits
from stof.stages import Stage, find_model_inputs
from stof.thresholds.layers import OPS, nodes_by_layer
from stof.thresholds.measured_sets import MeasuredSets
from stof.verification.site_checks import SiteChecks
from stof.verification.site_error import SiteError
from stof.verification.verified_models import find_half_constants

_PROBED = 128  # tokens of a prompt, by which the bytes of a longer one are known
_MOST_BYTES = 1 << 31  # of tensors at sites that one run gives
_MOST_TOKENS = 1024  # over KV caches: fp64 takes all scores at once there
_STEPS_BACK = 6  # from a site's output to its operator: conversions of its layout, and the choice among its rows


Layers = Mapping[str, str]  # the name of each site's operator, by the site
Captured = Mapping[str, np.ndarray]
Visit = Callable[[SiteChecks, onnx.ModelProto, Layers, Captured], None]
FindOperators = Callable[[onnx.ModelProto, SiteChecks, Collection[str]], Layers]


@dataclass(frozen=True)
class MeasuredErrors:
    """What was measured of all attentions.

    Attributes:
        sites: by the names of operators, of those that lie in the main graph.
        tokens: how many of each prompt count, at most; 0: all of each set.
    """

    sites: Mapping[str, SiteError]
    tokens: int = 0


def measure_errors(
    job: Job,
    stages: Sequence[Stage],
    precision: Precision,
    names: Collection[str],
    sets: MeasuredSets,
    some: Sequence[int],
    folder: Path,
) -> MeasuredErrors:
    """The errors of attentions.

    Every operator computes, in the precision, what the original's nodes compute before it: errors do not add up. Of long prompts
    the first tokens count, as many as there is memory for.

    Args:
        job: the optimization.
        stages: whose model it is.
        precision: in which they may compute.
        names: of operators.
        sets: what the original runs on.
        some: the indices of those that count.
        folder: for temporary files.

    Raises:
        ArgumentError: when the original does not run on a set.
        VerifyError: when memory does not suffice.
    """

    def emit(model: onnx.ModelProto) -> onnx.ModelProto:
        return put_precision(model, precision, names)

    what = f"attentions in {precision.name}"
    return measure_sites(job, stages, what, names, (sets, some), folder, emit, attentions_of_sites)


def measure_sites(
    job: Job,
    stages: Sequence[Stage],
    what: str,
    names: Collection[str],
    measured: tuple[MeasuredSets, Sequence[int]],
    folder: Path,
    emit: Callable[[onnx.ModelProto], onnx.ModelProto],
    find_operators: FindOperators,
) -> MeasuredErrors:
    """The errors of operators on tensors that the original computes. Arguments and errors are those of :func:`visit_sites`."""
    errors: dict[str, SiteError] = {}

    def visit(checks: SiteChecks, emitted: onnx.ModelProto, layers: Layers, captured: Captured) -> None:
        for name, error in compare_sites(checks, emitted, layers, captured):
            errors[name] = errors.get(name, SiteError()).join(error)

    tokens = visit_sites(job, stages, what, names, measured, folder, emit, visit, find_operators)
    return MeasuredErrors(errors, tokens)


def visit_sites(
    job: Job,
    stages: Sequence[Stage],
    what: str,
    names: Collection[str],
    measured: tuple[MeasuredSets, Sequence[int]],
    folder: Path,
    emit: Callable[[onnx.ModelProto], onnx.ModelProto],
    visit: Visit,
    find_operators: FindOperators,
    *,
    holds_all_scores: bool = True,
) -> int:
    """Runs the original on sets of inputs, and gives each op's sites the tensors that it computes there.

    Args:
        job: the optimization.
        stages: whose model it is.
        what: the operators and their precision, for messages.
        names: of operators.
        measured: what the original runs on, and the indices of the sets that count.
        folder: for temporary files.
        emit: makes of a stage's model the one whose sites are looked at.
        visit: gets the checks of an op, that model, the operators of its sites, and the tensors that were computed.
        find_operators: which operators the sites of an op are.
        holds_all_scores: ``visit`` holds all scores over a KV cache in memory at once, so prompts are shorter there.

    Returns:
        How many tokens of each prompt count, at most; 0: all of each set.

    Raises:
        ArgumentError: when the original does not run on a set.
        VerifyError: when memory does not suffice.
    """
    sets, some = measured
    longest, maker = _longest_prompt(sets), find_model_inputs(job, stages).maker
    try:
        with temporary_folder(folder) as scratch:
            sessions = Sessions(job.source.parent.resolve(), scratch, prompt_limits(job.options.verify_memory))
            for stage in stages:
                checks = stage.op.site_checks(job, stage.decided)
                if checks is None or not checks.sites:
                    continue
                emitted = emit(stage.model)
                layers = find_operators(emitted, checks, names)
                if layers:
                    capture = _Capture(sessions, checks, stages, scratch)
                    if sets.prompts:
                        most_tokens = _MOST_TOKENS if holds_all_scores and stage.op.key == CACHES else None
                        sets = _shorten_prompts(sets, capture, maker, most_tokens)
                    for feed in sets.feeds(maker, some):
                        visit(checks, emitted, layers, capture.run(feed()))
    except RuntimeFailure as error:
        raise ArgumentError(f"{sets.source}: the original does not run on it: {error}") from error
    except LimitReached as error:
        raise VerifyError(f"the errors of {what} could not be measured: {error}") from error
    finally:
        release_sessions()
    most = _longest_prompt(sets)
    return most if most < longest else 0


def _longest_prompt(sets: MeasuredSets) -> int:
    """In tokens; 0 without prompts."""
    return max(map(len, sets.prompts), default=0)


def _shorten_prompts(sets: MeasuredSets, capture: _Capture, maker: InputMaker, most_tokens: int | None) -> MeasuredSets:
    """The prompts with as many tokens as may run at once, by the bytes that a short one takes.

    Args:
        sets: the prompts.
        capture: runs them.
        maker: of inputs.
        most_tokens: a bound beside that of memory; None: there is none.
    """
    ids = max(sets.prompts, key=len)[:_PROBED]
    try:
        feed = make_prompt_feed(maker, ids)
    except ArgumentError:  # the model has a fixed length, which its prompts have
        return sets
    taken = sum(array.nbytes for array in capture.run(feed).values())
    limit = max(len(ids), _MOST_BYTES * len(ids) // max(taken, 1))
    limit = limit if most_tokens is None else min(limit, most_tokens)
    return replace(sets, prompts=tuple(ids[:limit] for ids in sets.prompts))


def compare_sites(
    checks: SiteChecks, emitted: onnx.ModelProto, layers: Mapping[str, str], captured: Mapping[str, np.ndarray]
) -> Iterator[tuple[str, SiteError]]:
    """The error of each site of an operator beside its definition, with the operator's name."""
    for comparison in checks.compare(emitted, captured):
        if (name := layers.get(comparison.site)) is not None:
            yield name, SiteError(comparison.relative_rms, "" if comparison.ok else comparison.message())


def attentions_of_sites(emitted: onnx.ModelProto, checks: SiteChecks, names: Collection[str]) -> dict[str, str]:
    """The name of each site's attention in the model, by the site."""
    layers = {node.output[0]: name for name, nodes in nodes_by_layer(emitted).items() for node in nodes}
    writers = {o: n for n in emitted.graph.node for o in n.output if o}
    found: dict[str, str] = {}
    for site, outputs in checks.outputs().items():
        node = _find_operator(writers, outputs[0])
        name = "" if node is None else layers.get(node.output[0], "")
        if name in names:
            found[site] = name
    return found


def _find_operator(writers: Mapping[str, onnx.NodeProto], output: str) -> onnx.NodeProto | None:
    """The attention operator whose result a tensor is, behind nodes that move or choose its elements."""
    tensors = [output]
    for _ in range(_STEPS_BACK):
        nodes = [writers[t] for t in tensors if t in writers]
        for node in nodes:
            if node.domain == DOMAIN and node.op_type in OPS:
                return node
        tensors = [t for node in nodes for t in node.input]
    return None


class _Capture:
    """Runs of the model that an op's sites were found in, with the tensors at these sites as outputs.

    Half-precision models run widened to fp32, as in verification: the CPU provider lacks kernels for them.
    """

    def __init__(self, sessions: Sessions, checks: SiteChecks, stages: Sequence[Stage], scratch: Path) -> None:
        self._is_widened = bool(checks.types & HALF)
        model, types = checks.working, {t: checks.symbolic.dtype(t) for t in checks.tensors()}
        if self._is_widened:
            constants = find_half_constants(checks.working, checks.symbolic)
            typed = collect_typed_attributes(stage.op for stage in stages)
            model = Twins(sessions.weights, scratch, constants, typed).of(model)
            types = {t: int(onnx.TensorProto.FLOAT) if kind in HALF else kind for t, kind in types.items()}
        extended = onnx.ModelProto()
        extended.CopyFrom(model)
        declared = {o.name for o in extended.graph.output}
        for name, kind in types.items():
            if name not in declared and kind:
                extended.graph.output.append(helper.make_tensor_value_info(name, kind, None))
        self._session = sessions.make(extended, optimized=False, library=True)

    def run(self, feed: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The tensors, and the inputs."""
        given = widen_feeds(feed) if self._is_widened else dict(feed)
        names = list(self._session.outputs)
        return {**given, **dict(zip(names, self._session.run(names, given), strict=True))}
