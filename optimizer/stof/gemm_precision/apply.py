# SPDX-License-Identifier: Apache-2.0
"""Turns matmuls by constant weights into StofGemm in reduced precision where their errors are small."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import onnx
from onnx import helper

from stof.arguments.precisions import Precision
from stof.errors import ArgumentError
from stof.fusion.emit import GEMM, apply_edit, make_edit
from stof.gemm_precision.selection import reasons_left_out
from stof.gemm_precision.sites import FoundGemms
from stof.graph.index import DOMAIN
from stof.selection import Selection
from stof.sparsify.gemm_report import GemmReport, GemmRow
from stof.sparsify.reduced_rows import Row
from stof.verification.site_error import SiteError

METADATA = "stof_gemm_precision"
MeasureErrors = Callable[[FoundGemms], Mapping[str, SiteError]]


def report_gemms(
    found: FoundGemms,
    kernel: str,
    precision: Precision,
    planned: Collection[str] | None,
    selection: Selection | None = None,
) -> GemmReport:
    """The GEMMs that may compute in a precision, before their errors are measured.

    Args:
        found: the GEMMs.
        kernel: that this machine has for them; empty: none.
        precision: that is allowed.
        planned: names of those of which a plan says so; None: all that a kernel computes.
        selection: of the options; None: there is none.

    Raises:
        ArgumentError: for a plan of another model, and for options that name none of the GEMMs.
    """
    rows = []
    left_out = reasons_left_out(selection, [site.name for site in found.sites])
    for site, why in zip(found.sites, left_out, strict=True):
        reason = why or site.reason
        if not reason and not kernel:
            reason = f"this machine has no {precision.name} kernel for GEMMs"
        elif not reason and planned is not None and site.name not in planned:
            reason = "the plan says so"
        rows.append(
            GemmRow(node=site.name, operators=site.operators, weights=site.weights, reduced=not reason, reason=reason)
        )
    if unknown := sorted(set(planned or ()) - {row.node for row in rows}):
        raise ArgumentError(
            f"the plan computes {unknown[0]!r} in {precision.name}, and the optimized model has no such matmul by a "
            "constant weight"
        )
    return GemmReport(rows, kernel=kernel)


def judge_rows(
    before: Sequence[Row],
    sites: Mapping[str, SiteError],
    max_error: float,
    unknown: str,
    *,
    is_planned: bool,
    force: bool,
) -> list[Row]:
    """Rows with their errors; those with a large or an unknown one stay as they are.

    Args:
        before: the rows.
        sites: what was measured, by name.
        max_error: the largest relative RMS error that is allowed.
        unknown: why errors of others are not known.
        is_planned: a plan takes the place of both bounds.
        force: unknown errors are allowed.
    """
    rows = []
    for row in before:
        error, reason = sites.get(row.node, SiteError()), row.reason
        if row.reduced and error.fault:
            reason = f"it differs from the definition that rounds as its kernels do: {error.fault}"
        elif row.reduced and error.overflows:
            reason = "a number beyond the largest of the precision takes a finite result away"
        elif row.reduced and error.relative_rms is None and not (is_planned or force):
            reason = f"its error is not known: {unknown}; --force allows it all the same"
        elif row.reduced and error.relative_rms is not None and error.relative_rms > max_error and not is_planned:
            reason = f"its relative RMS error is {error.relative_rms:.2g}, --max-error allows {max_error:g}"
        rows.append(replace(row, relative_rms=error.relative_rms, reduced=not reason, reason=reason))
    return rows


def put_gemms(found: FoundGemms, precision: Precision, names: Collection[str]) -> onnx.ModelProto:
    """A copy of the model in which sites of these names are StofGemm in a precision.

    Raises:
        UnsupportedError: when they cannot share a function, or wait for each other.
    """
    graph = found.graph
    chains = [site.chain for site in found.sites if site.chain is not None and site.name in names]
    substitutes = {t: other for c in chains for t, other in graph.shape_substitutes(c.region.node_indices).items()}
    # Gemm nodes that stay keep their own weights.
    model = found.plain.put(found.model, [i for c in chains for i in c.region.node_indices])
    model = apply_edit(model, make_edit(model, graph.symbolic, chains, substitutes))
    for node in model.graph.node:
        if node.domain == DOMAIN and node.op_type == GEMM:
            node.attribute.append(helper.make_attribute(precision.attribute, 1))
    entry = model.metadata_props.add()
    entry.key = METADATA
    entry.value = (
        f"outputs change; {precision.name}: {'; '.join(n for n in (s.name for s in found.sites) if n in names)}"
    )
    return model
