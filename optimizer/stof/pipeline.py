# SPDX-License-Identifier: Apache-2.0
"""The steps in order: load, match, lift, check, choose, emit, verify, report."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

import onnx

from stof.errors import ArgumentError, UnsupportedError, VerifyError
from stof.graph import DOMAIN, load, save
from stof.kernels.cost import Prediction, predict, why_not
from stof.mask.check import MaskChecker, tables_of
from stof.mask.families import picture
from stof.mask.lift import lift
from stof.options import Options
from stof.passes.attention import find_sites
from stof.passes.body import OP
from stof.passes.emit import Rewrite, emit
from stof.report import Report, SiteReport
from stof.runtime import build_info
from stof.site import AttentionSite, EmptyRows, LiftedMask
from stof.symbolic import Symbolic
from stof.verify import Verifier

REPORT_LENGTH = 2048
_RANGE = (128, 8192)


def optimize(model: str | Path, output: str | Path | None = None, options: Options | None = None) -> Report:
    """Writes an equivalent model with sparse attention.

    Args:
        model: the ONNX file; it is never modified. External data must lie beside it.
        output: the file to write, by default ``<name>.stof.onnx`` beside the input. Nothing is written when there is no
            site to replace, or with ``options.dry_run``.
        options: see :class:`stof.options.Options`.

    Raises:
        ArgumentError: wrong arguments, an output that cannot be written.
        ModelError: the input is no model that can be read.
        VerifyError: the result differs from the original; nothing was written.
    """
    options = options or Options()
    source = Path(model)
    target = Path(output or options.output or source.with_name(f"{source.stem}.stof.onnx"))
    # The interpreter follows chains of movement operators by recursion; each is as deep as the graph writes it.
    sys.setrecursionlimit(max(sys.getrecursionlimit(), 20_000))
    _check_target(source, target)
    report = Report(str(source), length=REPORT_LENGTH, library=build_info())
    with _timed(report, "load"):
        graph = load(source)
    if any(n.domain == DOMAIN and n.op_type == OP for n in graph.graph.node):
        report.sites = [_done(n) for n in graph.graph.node if n.op_type == OP]
        return report
    with _timed(report, "match"):
        symbolic = Symbolic(graph)
        sites, findings = find_sites(graph, symbolic)
    report.sites = [SiteReport(f.site, False, f.reason) for f in findings]
    with _timed(report, "lift"):
        rewrites = _choose(graph, symbolic, sites, options, report)
    report.nodes_before = len(graph.graph.node)
    _pictures(report, rewrites)
    if options.dry_run or not rewrites:
        return report
    with _timed(report, "emit"):
        emitted = emit(graph, symbolic, rewrites)
    report.nodes_after = len(emitted.graph.node)
    _verify_and_write(report, graph, symbolic, rewrites, emitted, source, target, options)
    return report


def _check_target(source: Path, target: Path) -> None:
    if target.exists() and source.exists() and target.samefile(source):
        raise ArgumentError(f"the output {target} is the input; choose another file with -o")
    if target.is_dir():
        raise ArgumentError(f"the output {target} is a folder; name a file with -o")
    if not target.parent.is_dir():
        raise ArgumentError(f"the folder {target.parent} does not exist; make it, or choose another output with -o")


@contextmanager
def _timed(report: Report, step: str) -> Iterator[None]:
    start = time.monotonic()
    yield
    report.seconds[step] = time.monotonic() - start


def _done(node: onnx.NodeProto) -> SiteReport:
    mask = next((a.s.decode() for a in node.attribute if a.name == "mask"), "")
    return SiteReport(node.name, False, "is StofAttention already", mask=mask)


def _chosen(site: AttentionSite, options: Options) -> str:
    """Why a site is left out by the user's choice; empty when it is not."""
    labels = (site.name, str(site.index))
    if options.only and not any(fnmatch(label, p) for label in labels for p in options.only):
        return "not among --only"
    if any(fnmatch(label, p) for label in labels for p in options.skip):
        return "left out by --skip"
    return ""


def _choose(
    graph: onnx.ModelProto, symbolic: Symbolic, sites: list[AttentionSite], options: Options, report: Report
) -> list[Rewrite]:
    checker = MaskChecker(graph, symbolic)
    rewrites = []
    predictions: dict[tuple[object, ...], list[Prediction]] = {}
    for site in sites:
        try:
            reason = _chosen(site, options)
            if reason:
                raise UnsupportedError(reason)
            mask = _mask(symbolic, site, options)
            checker.check(site, mask)
            if reasons := why_not(site, mask):
                raise UnsupportedError("no kernel: " + "; ".join(reasons))
            key = (mask.expression, mask.tables, site.num_heads, site.head_size)
            if key not in predictions:
                predictions[key] = [predict(site, mask, n) for n in (*_lengths(options), REPORT_LENGTH)]
            *within, shown = predictions[key]
            worst = min(within, key=lambda p: p.gain)
            if worst.gain < 1.0:
                raise UnsupportedError(f"a loss is predicted at S = {worst.length}: {worst.gain:.2f}x")
        except UnsupportedError as error:
            report.sites.append(SiteReport(site.name, False, str(error), site.form))
            continue
        rewrites.append(Rewrite(site, mask))
        report.sites.append(_replaced(site, mask, shown, str(report.library.get("cpu_isa", ""))))
    return rewrites


def _mask(symbolic: Symbolic, site: AttentionSite, options: Options) -> LiftedMask:
    stated = options.masks.get(site.name, options.masks.get(str(site.index)))
    mask = lift(symbolic, site)
    if stated is not None:
        mask = replace(mask, expression=stated, family="stated")
    if options.ignore_empty_rows and mask.empty_rows is not EmptyRows.NAN:
        mask = replace(mask, empty_rows=EmptyRows.ZERO)
    return mask


def _lengths(options: Options) -> tuple[int, ...]:
    most = max((high for _, high in options.shapes.values()), default=_RANGE[1])
    least = min((low for low, _ in options.shapes.values()), default=_RANGE[0])
    return tuple(sorted({least, (least + most) // 4, most}))


def _replaced(site: AttentionSite, mask: LiftedMask, shown: Prediction, isa: str) -> SiteReport:
    heads = f"{site.num_heads} heads" + (f" on {site.kv_num_heads}" if site.kv_num_heads != site.num_heads else "")
    return SiteReport(
        site.name,
        True,
        "replaced",
        site.form,
        mask.expression,
        mask.family,
        heads,
        site.head_size,
        mask.empty_rows.value,
        f"cpu block-wise {isa}",
        shown.tile_density,
        shown.gain,
        mask.notes,
    )


def _pictures(report: Report, rewrites: list[Rewrite]) -> None:
    for rewrite in rewrites:
        mask = rewrite.mask
        if mask.expression not in report.pictures and "segment_" not in mask.expression and len(report.pictures) < 6:
            try:
                report.pictures[mask.expression] = picture(mask.expression, tables_of(mask))
            except Exception as error:  # a picture is decoration; a mask of fixed size may not stretch to its length
                report.pictures[mask.expression] = [f"(no picture: {error})"]


def _verify_and_write(
    report: Report,
    graph: onnx.ModelProto,
    symbolic: Symbolic,
    rewrites: list[Rewrite],
    emitted: onnx.ModelProto,
    source: Path,
    target: Path,
    options: Options,
) -> None:
    if options.verify:
        try:
            with tempfile.TemporaryDirectory(prefix=".stof-", dir=target.parent) as scratch:
                verifier = Verifier(graph, symbolic, rewrites, options.verify_budget)
                verification = verifier.run(source, emitted, Path(scratch), partial(emit, graph, symbolic))
        except OSError as error:
            raise ArgumentError(f"{target.parent} cannot be written: {error.strerror or error}") from error
        report.verification = verification
        report.seconds["verify"] = verification.seconds
        if verification.failures:
            raise VerifyError(_failure(report, rewrites))
    with _timed(report, "write"):
        save(emitted, target, source)
    report.output = str(target)


def _failure(report: Report, rewrites: list[Rewrite]) -> str:
    assert report.verification is not None
    failures = report.verification.failures
    sites = report.verification.faulty_sites()
    if sites:
        masks = {r.site.name: r.mask.expression for r in rewrites}
        first = next(c for c in failures if c.site == sites[0])
        return (
            f"verification failed at site {sites[0]!r} (mask {masks.get(sites[0], '')!r}): error {first.difference:.3e}, "
            f"allowed {first.budget:.3e}; {first.detail}. {len(sites)} faulty site(s): {', '.join(sites)}. Nothing was "
            "written; --skip SITE leaves a site as it is"
        )
    first = failures[0]
    return (
        f"verification failed: {first.what} differs by {first.difference:.3e}, allowed {first.budget:.3e}; {first.detail}. "
        f"Every site alone is right; the difference comes with site {report.verification.suspect!r}, when those before it are "
        "replaced, too. Nothing was written; --skip SITE leaves a site as it is"
    )
