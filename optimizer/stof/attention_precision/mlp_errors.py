# SPDX-License-Identifier: Apache-2.0
"""The error of each sparse MLP that may round to bf16 against fp64, on tensors that the original computes of sets of inputs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import onnx

from stof.arguments.precisions import RoundedOperands
from stof.attention_precision.errors import measure_sites
from stof.attention_precision.mlp_nodes import put_mlp_precision, sparse_mlps_of
from stof.op_rewrite import Job
from stof.sparse_mlp.checks.site_checks import MOST_TOKENS
from stof.stages import Stage
from stof.thresholds.measured_sets import MeasuredSets
from stof.verification.site_checks import SiteChecks
from stof.verification.site_error import SiteError


def measure_mlp_errors(
    job: Job,
    stages: Sequence[Stage],
    precision: RoundedOperands,
    names: Collection[str],
    sets: MeasuredSets,
    some: Sequence[int],
    folder: Path,
) -> tuple[Mapping[str, SiteError], str]:
    """The errors of sparse MLPs by the names of their operators, and what they were measured on.

    Every operator computes with rounded weights what the original computes with its own, of the same tokens: errors do not
    add up. Which neurons are active does not depend on the weights that are rounded. Kernels round many tokens and their
    hidden values, too: an error is the larger one of the operator's and of the definition that rounds all of them.

    Args:
        job: the optimization.
        stages: whose model it is.
        precision: to which weights may be rounded.
        names: of operators.
        sets: what the original runs on.
        some: the indices of those that count.
        folder: for temporary files.

    Raises:
        ArgumentError: when the original does not run on a set.
        VerifyError: when memory does not suffice.
    """

    def emit(model: onnx.ModelProto) -> onnx.ModelProto:
        return put_mlp_precision(model, precision, names)

    what = f"sparse MLPs in {precision.name}"
    measured = measure_sites(job, stages, what, names, (sets, some), folder, emit, _mlps_of_sites)
    described = sets.describe(some)
    described = f"the first {measured.tokens} tokens of {described}" if measured.tokens else described
    return measured.sites, f"{MOST_TOKENS} tokens of a set at most, {described}"


def _mlps_of_sites(emitted: onnx.ModelProto, checks: SiteChecks, names: Collection[str]) -> dict[str, str]:
    """The name of each site's operator in the model, by the site."""
    written = {node.output[0]: node.name for node in sparse_mlps_of(emitted.graph.node) if node.name in names}
    return {site: written[tensors[0]] for site, tensors in checks.outputs().items() if tensors[0] in written}
