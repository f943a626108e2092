# SPDX-License-Identifier: Apache-2.0
"""The error of each GEMM in reduced precision against fp64, on what the model in full precision computes before it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

from stof.arguments.precisions import RoundedOperands
from stof.errors import ArgumentError, VerifyError
from stof.execution.ort_sessions import Sessions
from stof.execution.run_limits import LimitReached
from stof.execution.session_process import RuntimeFailure, release_sessions
from stof.execution.upcast import HALF, Twins, holds, widen_feeds
from stof.files import temporary_folder
from stof.fusion.description.evaluate import evaluate_chain
from stof.fusion.emit import GEMM
from stof.gemm_precision.sites import FoundGemms, GemmSite
from stof.graph.protobuf import copy_model
from stof.op_parts import collect_typed_attributes
from stof.op_rewrite import Job
from stof.prompt_runs.limits import prompt_limits
from stof.runtime.library import Op, Tensor, call, tensor_of
from stof.stages import Stage, find_model_inputs
from stof.thresholds.measured_sets import MeasuredSets
from stof.verification.array_distance import largest_number, relative_rms, ulp_of_largest
from stof.verification.site_error import SiteError
from stof.verification.verified_models import find_half_constants

_MOST_ROWS = 128  # of each GEMM
_MOST_TOKENS = 512  # of a prompt
_COLUMNS = 4096  # of a weight that are multiplied in fp64 at a time
_SLACK = 1e-3  # of the largest number, to which a kernel is held: sums in fp32 are far closer


def measure_gemm_errors(
    job: Job,
    stages: Sequence[Stage],
    found: FoundGemms,
    precision: RoundedOperands,
    sets: MeasuredSets,
    some: Sequence[int],
    folder: Path,
) -> dict[str, SiteError]:
    """The errors of GEMMs by the names of their sites, on some rows of each set.

    Args:
        job: the optimization.
        stages: whose model it is.
        found: the GEMMs.
        precision: in which they may compute.
        sets: what the model runs on.
        some: the indices of those that count.
        folder: for temporary files.

    Raises:
        ArgumentError: when the model does not run on a set.
        VerifyError: when memory does not suffice.
    """
    sites = [site for site in found.sites if site.chain is not None]
    model = found.graph.model
    stored = {t.name: t for t in model.graph.initializer}
    read = {n for site in sites if site.chain is not None for n in site.chain.inputs}
    source = job.source.parent.resolve()
    errors: dict[str, SiteError] = {}
    if sets.prompts:
        sets = replace(sets, prompts=tuple(ids[:_MOST_TOKENS] for ids in sets.prompts))
    try:
        with temporary_folder(folder) as scratch:
            sessions = Sessions(source, scratch, prompt_limits(job.options.verify_memory))
            is_widened = holds(found.model, HALF)
            extended = _with_outputs(found, read - set(stored), _widener(found, stages, sessions, scratch, is_widened))
            session = sessions.make(extended, optimized=False, library=True)
            for feed in sets.feeds(find_model_inputs(job, stages).maker, some):
                given = widen_feeds(feed()) if is_widened else feed()
                names = [n for n in session.outputs if n in read]
                computed = session.run(names, given) if names else []  # no names would ask for all outputs
                arrays = {**given, **dict(zip(names, computed, strict=True))}
                for site in sites:
                    mine = {n: arrays[n] if n in arrays else _load(stored[n], source) for n in _inputs_of(site)}
                    kind = helper.tensor_dtype_to_np_dtype(site.chain.dtypes[0]) if site.chain else np.float32
                    mine = {n: x.astype(kind, copy=False) for n, x in mine.items()}
                    errors[site.name] = errors.get(site.name, SiteError()).join(_error_of(site, mine, precision))
    except RuntimeFailure as error:
        raise ArgumentError(f"{sets.source}: the model does not run on it: {error}") from error
    except LimitReached as error:
        raise VerifyError(f"the errors of GEMMs in {precision.name} could not be measured: {error}") from error
    finally:
        release_sessions()
    return errors


def describe_rows(sets: MeasuredSets, some: Sequence[int]) -> str:
    """What errors of GEMMs are measured on, for the report."""
    rows = f"{_MOST_ROWS} rows of a set at most"
    is_cut = any(len(sets.prompts[i]) > _MOST_TOKENS for i in some) if sets.prompts else False
    return (
        f"{rows}, the first {_MOST_TOKENS} tokens of {sets.describe(some)}"
        if is_cut
        else f"{rows}, {sets.describe(some)}"
    )


def _inputs_of(site: GemmSite) -> tuple[str, ...]:
    assert site.chain is not None
    return tuple(dict.fromkeys(site.chain.inputs))


def _load(tensor: onnx.TensorProto, folder: Path) -> np.ndarray:
    return np.asarray(numpy_helper.to_array(tensor, str(folder)))


def _widener(
    found: FoundGemms, stages: Sequence[Stage], sessions: Sessions, scratch: Path, is_widened: bool
) -> Callable[[onnx.ModelProto], onnx.ModelProto]:
    """What makes of a half-precision model one in fp32, as verification runs it: the CPU provider lacks kernels for it."""
    if not is_widened:
        return copy_model
    constants = find_half_constants(found.model, found.graph.symbolic)
    return Twins(sessions.weights, scratch, constants, collect_typed_attributes(s.op for s in stages)).of


def _with_outputs(
    found: FoundGemms, names: Collection[str], copy: Callable[[onnx.ModelProto], onnx.ModelProto]
) -> onnx.ModelProto:
    """A copy of the model with tensors as outputs."""
    extended = copy(found.model)  # plain forms of Gemm nodes compute the same
    declared = {v.name for v in (*extended.graph.output, *extended.graph.input)}
    is_widened = not holds(extended, HALF)
    for name in sorted(set(names) - declared):
        kind = found.graph.symbolic.dtype(name)
        kind = int(onnx.TensorProto.FLOAT) if is_widened and kind in HALF else kind
        extended.graph.output.append(helper.make_tensor_value_info(name, kind, None))
    return extended


def _error_of(site: GemmSite, arrays: Mapping[str, np.ndarray], precision: RoundedOperands) -> SiteError:
    """The error of one GEMM on some of its rows."""
    chain = site.chain
    assert chain is not None
    count = chain.operand_count
    left = arrays[chain.inputs[0]]
    left = np.ascontiguousarray(left.reshape(-1, left.shape[-1]))
    if not left.size:
        return SiteError()
    rows = np.unique(np.linspace(0, len(left) - 1, min(len(left), _MOST_ROWS)).astype(np.int64))
    left = np.ascontiguousarray(left[rows])
    weights = [np.ascontiguousarray(arrays[n]) for n in chain.inputs[1:count]]
    columns = weights[0].shape[1] // (2 if chain.pair == 1 else 1)
    further = []
    for name, axes in zip(chain.inputs[count:], chain.reads, strict=True):
        array = arrays[name]
        if axes == "mn":
            array = array.reshape(-1, columns)[rows]
        elif axes == "m":
            array = array.reshape(-1)[rows]
        else:
            array = array.reshape(-1) if axes else array.reshape(())
        further.append(np.ascontiguousarray(array))

    def compute(factors: Sequence[np.ndarray]) -> np.ndarray:
        products = [_multiply(factors[0], w) for w in factors[1:]]
        if chain.pair == 1:
            products = [products[0][:, :columns], products[0][:, columns:]]
        return evaluate_chain(chain.description, [*products, *further])[0]

    kind = left.dtype
    mine = np.full((len(rows), columns), np.nan, kind)
    operator = _make_operator(site, precision, weights, len(further))
    operator.run([left, *weights, *further], [mine], threads=2)
    exact = compute([left, *weights])
    rounded = compute([precision.round(x) for x in (left, *weights)])
    with np.errstate(over="ignore"):
        has_exact, has_rounded = (np.isfinite(x.astype(kind).astype(np.float64)) for x in (exact, rounded))
    both = has_rounded & has_exact
    most = float(np.abs(mine[both].astype(np.float64) - rounded[both]).max(initial=0.0))
    numbers = rounded[both]  # the result is rounded to its own type at last
    allowed = _SLACK * largest_number(numbers) + ulp_of_largest(numbers, kind) / 2
    fault = f"by {most:.3g}, and {allowed:.3g} is allowed" if not most <= allowed else ""
    overflows = bool((has_exact & ~has_rounded).any())
    return SiteError(relative_rms(mine, exact, both), fault, overflows)


def _multiply(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """A matmul in fp64; the right operand becomes fp64 by blocks of columns."""
    wide = left.astype(np.float64)
    blocks = [wide @ right[:, n : n + _COLUMNS].astype(np.float64) for n in range(0, right.shape[1], _COLUMNS)]
    return np.concatenate(blocks, axis=1)


def _make_operator(site: GemmSite, precision: RoundedOperands, weights: Sequence[np.ndarray], further: int) -> Op:
    """The operator as the model will have it, with its weights packed."""
    chain = site.chain
    assert chain is not None
    operator = Op(GEMM, {"epilogue": chain.description.text, "pair": chain.pair, precision.attribute: 1})
    known = [Tensor(), *map(tensor_of, weights), *[Tensor()] * further]
    call("stof_op_prepare", operator.handle, (Tensor * len(known))(*known), ctypes.c_int(len(known)))
    return operator
