# SPDX-License-Identifier: Apache-2.0
"""Relative terms of graphs in half precision: their factors and sizes are rounded, their rows are those of the fp32 graph."""

from __future__ import annotations

import numpy as np
import pytest
from onnxruntime.transformers.float16 import convert_float_to_float16
from test_relative_discovery import FOUND, ROLES, describe
from zoo_graphs import fill_graph

from stof.attention.describe.site_describer import DescribedSite
from stof.mask.relative_terms import check

NAMES = (
    "relative/deberta-v3.torchscript.eager",
    "relative/deberta-own.dynamo.eager",
    "relative/conformer.dynamo.eager",
    "zoo/xlnet.torchscript.eager",
    "relative/wav2vec2-bert.dynamo.eager",
    "relative/speecht5.torchscript.eager",
    "relative/vits.torchscript.eager",
    "relative/vitdet.torchscript.eager",
)
# Their lengths are computed in half precision, too, which holds whole numbers up to 2048: their padding is no mask of a length.
ROUNDED_LENGTHS = {"relative/parakeet.torchscript.eager", "relative/parakeet.dynamo.eager"}


def described_in_half(name: str, monkeypatch: pytest.MonkeyPatch) -> DescribedSite:
    model = convert_float_to_float16(fill_graph(name), disable_shape_infer=True)
    return describe(model, monkeypatch, ROLES)[1][0]


@pytest.mark.parametrize("name", NAMES)
def test_terms_of_half_precision_graphs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one = described_in_half(name, monkeypatch)
    assert one.mask is not None, one.reason
    found = {t.role: t.index.text for t in one.mask.relative_terms}
    assert found.keys() == FOUND[name].keys(), [str(n) for n in one.mask.notes]
    assert all(found[role].startswith(text) for role, text in FOUND[name].items())


@pytest.mark.parametrize("name", sorted(ROUNDED_LENGTHS))
def test_rounded_lengths_keep_the_bias(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one = described_in_half(name, monkeypatch)
    assert one.mask is not None
    assert one.mask.bias
    assert not one.mask.relative_terms


def test_a_factor_that_no_rounding_explains_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    values = check._Run._values

    def doubled(self: check._Run, *arguments: object) -> np.ndarray:
        return np.asarray(1.02 * values(self, *arguments))  # type: ignore[arg-type]

    monkeypatch.setattr(check._Run, "_values", doubled)
    one = described_in_half("relative/deberta-v3.torchscript.eager", monkeypatch)
    assert one.mask is not None
    assert not one.mask.relative_terms
