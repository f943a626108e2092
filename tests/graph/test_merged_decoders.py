# SPDX-License-Identifier: Apache-2.0
"""Merged decoders with tables of 64 positions: drawn lengths stay inside them, and no site is blamed for what does not run.

A merged If decoder ended with "error inf" and blamed four sites, as the drawn past overran the table.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from fused_attention_nodes import forced, run, same
from merged_decoders import LOOKUPS, POSITIONS, D, H, V, make_merged_decoder
from onnx import parser
from tests.graph.test_subgraphs import MERGED


def feeds(model: onnx.ModelProto, batch: int, length: int, past: int, cache: bool) -> dict[str, np.ndarray]:
    """Random inputs; a second row is padded on the left."""
    rng = np.random.default_rng(length)
    mask = np.ones((batch, length + cache * past), np.int64)
    mask[1:, :2] = 0
    caches = [i.name for i in model.graph.input if i.name.startswith("past")]
    found = {n: rng.standard_normal((batch, H, past, D)).astype(np.float32) for n in caches}
    ids = rng.integers(0, V, (batch, length))
    return {**found, "input_ids": ids, "attention_mask": mask, "use_cache_branch": np.array([cache])}


@pytest.mark.parametrize("mask_length", ["past_sequence + 1", "mask_length"])
@pytest.mark.parametrize("lookup", LOOKUPS)
def test_both_branches_are_optimized(lookup: str, mask_length: str, tmp_path: Path) -> None:
    model = make_merged_decoder(lookup, mask_length=mask_length)
    onnx.checker.check_model(model)
    report, target = forced(model, tmp_path)
    assert [(s.replaced, s.mask) for s in report.sites] == [(True, "k <= q and pad[b, k]")] * 4
    found = report.verification
    assert found is not None
    assert {c.site for c in found.comparisons if c.site and c.comparable} == {s.site for s in report.sites}
    assert not found.skipped
    assert len(found.cases) >= 4
    for batch, length, past, cache in ((2, 1, 30, True), (1, 1, POSITIONS - 1, True), (2, 40, 39, False)):
        given = feeds(model, batch, length, past, cache)
        same(run(target, given, library=True), run(model, given))


def test_a_branch_that_refuses_all_drawn_inputs_blames_no_site(tmp_path: Path) -> None:
    """The branch with a past looks up a table by numbers that nothing says how to draw."""
    table = "table = Constant <value = float[1] {1}> ()"
    lookup = f"""{table} f = Cast <to = 1> (pad) e = Sub (f, e9) g = Cos (e) h = Mul (g, e9) i = Cast <to = 7> (h)
            j = Abs (i) two_more = Constant <value_int = 2> () l = Add (j, two_more) m = Gather (table, l)
            n = ReduceSum <keepdims = 0> (m) values = Add (own_values, n)"""
    text = MERGED.replace(
        "values = Concat <axis = 2> (past_v, v)", f"own_values = Concat <axis = 2> (past_v, v)\n{lookup}"
    )
    text = text.replace("qs = Mul (q, scale)", "qs = Mul (q, scale) e9 = Constant <value = float {5}> ()")
    report, _ = forced(parser.parse_model(text), tmp_path)
    assert {s.site for s in report.sites if s.replaced} == {"then_softmax", "else_softmax"}
    found = report.verification
    assert found is not None
    assert not found.failures
    by_site = {c.site: c for c in found.comparisons if c.site}
    assert by_site["else_softmax"].comparable
    assert not by_site["then_softmax"].comparable
    assert "cannot be run by itself" in by_site["then_softmax"].detail
    assert "compared by the model's outputs alone: 1 sites; the then_branch of" in report.to_text()
