# SPDX-License-Identifier: Apache-2.0
"""With --emit standard everything but ONNX's Attention runs on real tokens, in a plain file."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
from encoders import (
    FLOAT,
    INT32,
    INT64,
    POOLINGS,
    Graph,
    check_same,
    encoder,
    feeds_for,
    masks,
    rows_of,
    session,
    unpadded,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from test_unpadding_fuzz import batches, chains

import stof
from stof.errors import ArgumentError
from stof.graph.index import all_nodes
from stof.options import Options
from stof.report import Report


def plain(model: onnx.ModelProto, unpad: str = "auto", **options: object) -> tuple[onnx.ModelProto, Report]:
    """The model with ONNX's operators alone, and the report."""
    result, report = unpadded(model, unpad, emit="standard", chains="auto", **options)
    assert {n.domain for n in all_nodes(result.graph.node)} <= {""}
    assert not result.functions
    return result, report


def rows_of_products(model: onnx.ModelProto, original: onnx.ModelProto, mask: np.ndarray) -> Counter[int]:
    """How many rows each matmul with a weight computes in a run, by the shapes of its result."""
    weights = {t.name for t in original.graph.initializer}
    names = [n.output[0] for n in model.graph.node if n.op_type == "MatMul" and n.input[1] in weights]
    watched = onnx.ModelProto.FromString(model.SerializeToString())
    watched.graph.output.extend(onnx.helper.make_tensor_value_info(name, FLOAT, None) for name in names)
    arrays = session(watched, with_library=False).run(names, feeds_for(original, mask))
    return Counter(int(np.prod(a.shape[:-1])) for a in arrays)


@pytest.mark.parametrize("kind", POOLINGS)
def test_pooling(kind: str) -> None:
    model = encoder(kind)
    result, report = plain(model)
    (row,) = rows_of(report)
    assert row.replaced, row.reason
    assert (row.attentions, row.of_attentions, row.rest) == (2, 2, "")
    assert [n.op_type for n in result.graph.node].count("Attention") == 2
    check_same(model, result)


def test_products_compute_real_tokens_alone() -> None:
    """All products with weights, also those whose results attention reads padded."""
    model = encoder("mean")
    mask = masks(4, 12)["right"]
    assert rows_of_products(model, model, mask) == {48: 12}
    result, _ = plain(model)
    assert rows_of_products(result, model, mask) == {int(mask.sum()): 12}
    kept, _ = plain(model, "off")
    assert rows_of_products(kept, model, mask) == {48: 12}


@pytest.mark.parametrize(
    ("dtype", "apply"), [(INT64, "add"), (INT64, "where"), (INT32, "add"), (INT32, "where"), (FLOAT, "where")]
)
@pytest.mark.parametrize("inverted", [False, True])
def test_types_of_masks(dtype: int, inverted: bool, apply: str) -> None:
    model = encoder("mean", "max", "first", layers=1, dtype=dtype, inverted=inverted, apply=apply)
    result, report = plain(model)
    assert [r.replaced for r in rows_of(report)] == [True]
    check_same(model, result, inverted=inverted)


@pytest.mark.parametrize("positions", ["table", "input", "cumsum", ""])
def test_embeddings(positions: str) -> None:
    model = encoder("mean", "first", layers=1, positions=positions, types=True)
    result, report = plain(model)
    assert rows_of(report)[0].replaced
    check_same(model, result)


def test_rows_of_padding_become_zero_where_that_is_asked_for() -> None:
    """An output with a row for each token: it stays padded, and with --unpad on its rows of padding are 0."""
    model = encoder("all", "mean")
    _, report = plain(model)
    assert [(r.replaced, "has a row for every position" in r.reason) for r in rows_of(report)] == [(False, True)]
    result, report = plain(model, "on")
    assert rows_of(report)[0].zero_outputs == ("all",)
    check_same(model, result, zero_rows=("all",))


def test_attention_that_stays_ends_the_region() -> None:
    """The nodes of a site that is not replaced are no row-wise ones: what they read is computed for all rows."""
    model = encoder("mean", layers=3)
    _, report = plain(model)
    sites = [s.site for s in report.sites]
    result, report = plain(model, skip=(sites[0],))
    (row,) = rows_of(report)
    assert row.replaced
    assert (row.attentions, row.of_attentions) == (2, 2)
    mask = masks(4, 12)["right"]
    # Of the first layer query, key, value, and what the attention that stays gives; the residual beside it has real tokens.
    assert rows_of_products(result, model, mask) == {48: 4, int(mask.sum()): 14}
    check_same(model, result)


def test_a_mask_of_the_caller() -> None:
    """A mask [B, 1, 1, S] of 0 and the lowest number that the graph adds: padding by what is in it."""
    g = Graph()
    ids = g.input("input_ids")
    added = g.input("added_mask", FLOAT, ("batch", 1, 1, "sequence"))
    x = g.embed(ids)
    for _ in range(2):
        x = g.layer(x, added)
    g.output(g.pool(x, "first", ""), "first", rank=2)
    model = g.model()
    result, _ = plain(model)
    real = masks(4, 9)["right"]
    mask = np.where(real, 0, np.finfo(np.float32).min).astype(np.float32)[:, None, None]
    feeds = {"input_ids": feeds_for(model, real)["input_ids"], "added_mask": mask}
    (wanted,), (found,) = (session(m, with_library=False).run(None, feeds) for m in (model, result))
    np.testing.assert_allclose(found, wanted, rtol=2e-4, atol=1e-5)


def test_verified_and_planned(tmp_path: Path) -> None:
    """Verification compares padded batches; a saved plan gives the same file, and one without padding's entries leaves it in."""
    source, first, second, saved = (tmp_path / n for n in ("m.onnx", "a.onnx", "b.onnx", "plan.json"))
    onnx.save(encoder("mean"), source)
    report = stof.optimize(source, first, Options(emit="standard", save_plan=saved))
    assert report.verification is not None
    assert not report.verification.failures
    assert rows_of(report)[0].replaced
    stof.optimize(source, second, Options(emit="standard", plan=saved))
    assert first.read_bytes() == second.read_bytes()


def test_a_capacity_is_refused() -> None:
    with pytest.raises(ArgumentError, match="unpad_capacity needs emit 'stof'"):
        plain(encoder("mean"), unpad_capacity=64)


@given(st.data())
@settings(max_examples=400 if os.environ.get("STOF_TEST_ALL") else 25, print_blob=True)
def test_random_chains(data: st.DataObject) -> None:
    """Operators of any kind around attention, some of which stays, with tensors in many layouts."""
    model, _ = data.draw(chains())
    dims = model.graph.input[0].type.tensor_type.shape.dim
    batch = dims[0].dim_value or data.draw(st.integers(1, 4))
    length = dims[1].dim_value or data.draw(st.integers(1, 6))
    result, _ = plain(model, data.draw(st.sampled_from(["auto", "auto", "on"])))
    found = {f"mask {i}": data.draw(batches(batch, length)) for i in range(2)}
    check_same(model, result, found, rtol=2e-3)
