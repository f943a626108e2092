# SPDX-License-Identifier: Apache-2.0
"""Narrow graphs of real exporters: every site is found, reads the best tensors, and leaves no dead nodes."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from attention_forms import rewrite

import build
from stof.attention.emit import Rewrite
from stof.attention.find import find_sites
from stof.mask.site import Layout
from stof.symbolic import Symbolic

NAMES = build.names(narrow=True)
GROUPED = ("mistral", "gemma3", "embeddinggemma")


def graph(name: str) -> onnx.ModelProto:
    return build.fill(build.load_graph(name), seed=2)


@pytest.mark.parametrize("name", NAMES)
def test_sites_and_operands(name: str) -> None:
    model = graph(name)
    sites, findings = find_sites(model, Symbolic(model))
    assert not findings
    assert len(sites) == build.manifest()[name]["softmax"]
    family = Path(name).name.split(".")[0]
    for site in sites:
        assert site.output_layout is Layout.BSN
        # BERT's projections are read as they are; elsewhere rotary embeddings write [B, H, S, D].
        wanted = Layout.BSN if family == "bert" else Layout.BHSD
        assert {site.query.layout, site.key.layout} == {wanted}
        assert site.kv_num_heads * (2 if family in GROUPED else 1) == site.num_heads
        assert site.nan_guard == name.endswith("sdpa")
        assert site.query_offset == 0
        assert site.scores_shape[2] == site.scores_shape[3]


@pytest.mark.parametrize("name", NAMES)
def test_nothing_of_length_by_length_is_left(name: str) -> None:
    model = graph(name)
    symbolic = Symbolic(model)
    optimized, rewrites = rewrite(model)
    length = rewrites[0].site.dims[3]
    kinds = {n.op_type for n in optimized.graph.node}
    assert "StofAttention" in kinds
    assert not kinds & {"Softmax", "Trilu", "IsNaN"}
    for node in optimized.graph.node:
        for tensor in (*node.input, *node.output):
            shape = symbolic.shape(tensor) or ()
            assert list(shape).count(length) < 2, (node.name, tensor)


@pytest.mark.parametrize("name", ["narrow/gemma3.dynamo.sdpa", "narrow/modernbert.torchscript.eager"])
def test_some_sites_replaced_and_others_left(name: str) -> None:
    from stof.attention.emit import emit

    model = graph(name)
    _, rewrites = rewrite(model)
    kept: list[Rewrite] = rewrites[1:]
    optimized = emit(model, Symbolic(model), kept)
    onnx.checker.check_model(optimized)
    count = {k: [n.op_type for n in optimized.graph.node].count(k) for k in ("Softmax", "StofAttention")}
    assert count == {"Softmax": 1, "StofAttention": len(rewrites) - 1}
    again = find_sites(optimized, Symbolic(optimized))
    assert [s.name for s in again[0]] == [rewrites[0].site.name]
