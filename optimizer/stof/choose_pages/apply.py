# SPDX-License-Identifier: Apache-2.0
"""Has an optimized and verified model choose pages, and the report say in which layers."""

from __future__ import annotations

import onnx

from stof.choose_pages.layers import PageLayer, find_page_layers, put_pages
from stof.sparsify.pages_report import PageChoiceRow, PagesReport


def report_pages(report: PagesReport, model: onnx.ModelProto) -> tuple[PageLayer, ...]:
    """The attentions over contiguous caches of an optimized model, whose rows the report gets.

    Raises:
        ArgumentError: as :func:`stof.choose_pages.layers.find_page_layers`.
    """
    layers = find_page_layers(model, report.spec)
    report.rows = [_row_of(x) for x in layers]
    return layers


def choose_pages(report: PagesReport, model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with bounds and attributes; the same where no attention chooses.

    Args:
        report: gets rows.
        model: verified; it may have thresholds.

    Raises:
        ArgumentError: as :func:`report_pages`.
    """
    layers = report_pages(report, model)
    return model if all(x.reason for x in layers) else put_pages(model, layers)


def _row_of(layer: PageLayer) -> PageChoiceRow:
    if layer.reason or layer.clause is None:
        return PageChoiceRow(layer.name, layer.layer, False, layer.reason)
    clause = layer.clause
    return PageChoiceRow(
        layer.name, layer.layer, True, "", clause.pages, clause.rows, layer.past_bounds, layer.present_bounds
    )
