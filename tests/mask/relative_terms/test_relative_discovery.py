# SPDX-License-Identifier: Apache-2.0
"""Relative terms of exported graphs: what is found, emitted, and computed by the function body in place of the graph's nodes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from zoo_graphs import draw_feed, fill_graph

import build
import stof
from stof.attention.describe import site_describer
from stof.attention.describe.site_describer import DescribedSite, SiteDescriber
from stof.attention.emit import Rewrite, emit
from stof.attention.expand.expanders import make_working_copy
from stof.attention.function_body import OP
from stof.attention.subgraphs import Scope, find_scopes
from stof.mask.empty_rows.weaker_rows import strictest_mask, weaker_mask
from stof.mask.expression import MaskExpression
from stof.mask.site import WeakerMasks
from stof.options import Options

ROLES = frozenset({"relative_key", "relative_key1", "relative_query", "relative_value"})
FOUND = {
    "relative/deberta-v3.torchscript.eager": {"relative_key": "table0", "relative_query": "table0"},
    "relative/deberta-own.dynamo.eager": {"relative_key": "q - k + 512", "relative_query": "q - k + 512"},
    "relative/deberta-c2p.torchscript.eager": {"relative_key": "table0"},
    "relative/deberta-p2c.torchscript.eager": {"relative_query": "table0"},
    "relative/deberta-v1.torchscript.eager": {"relative_key": "q - k + S", "relative_query": "q - k + S"},
    "relative/conformer.dynamo.eager": {"relative_key": "k - q + S - 1"},
    "relative/parakeet.torchscript.eager": {"relative_key": "k - q + S - 1"},
    "relative/parakeet.dynamo.eager": {"relative_key": "k - q + S - 1"},
    "zoo/xlnet.torchscript.eager": {"relative_key": "k - q + S"},
    # Positions are added to the inputs as well: no run has more than 512.
    "zoo/deberta-v2.torchscript.eager": {"relative_key": "table0", "relative_query": "table0"},
    # The mask is applied to the weights as well.
    "zoo/sew-d.torchscript.eager": {"relative_key": "table0", "relative_query": "table0"},
    "relative/wav2vec2-bert.dynamo.eager": {"relative_key": "min(max(k - q, -12), 4) + 12"},
    "relative/speecht5.torchscript.eager": {"relative_key": "table0"},
    # Rows of zeros around the stored ones, as many as inputs are long, are no part of the tables.
    "relative/vits.torchscript.eager": {"relative_key": "k - q + 5", "relative_value": "k - q + 5"},
    "relative/vitdet.torchscript.eager": {
        "relative_key": "q // 4 - k // 4 + 3",
        "relative_key1": "q % 4 - k % 4 + 3",
    },
}


def describe(
    model: onnx.ModelProto, monkeypatch: pytest.MonkeyPatch, roles: frozenset[str]
) -> tuple[Scope, list[DescribedSite]]:
    """The sites of a model, for a library that takes these roles."""
    monkeypatch.setattr(site_describer, "relative_roles", lambda: roles)
    scope = next(iter(find_scopes(make_working_copy(model))))
    describer = SiteDescriber(scope.working.model, scope.symbolic, Options())
    return scope, [describer.describe(site) for site in scope.sites]


def run(model: onnx.ModelProto, feed: dict[str, np.ndarray]) -> list[np.ndarray]:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    outputs: list[np.ndarray] = ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    ).run(None, feed)
    return outputs


@pytest.mark.parametrize("name", FOUND)
def test_terms_of_exports(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = fill_graph(name)
    scope, described = describe(model, monkeypatch, ROLES)
    rewrites = []
    for one in described[:1]:
        assert one.mask is not None, one.reason
        found = {t.role: t.index.text for t in one.mask.relative_terms}
        assert found.keys() == FOUND[name].keys()
        for role, text in FOUND[name].items():
            assert found[role].startswith("table0[max(0, min(") if text == "table0" else found[role] == text
    for one in described:
        assert one.mask is not None, one.reason
        assert one.mask.relative_terms
        rewrites.append(Rewrite(one.site, one.mask))
    emitted = emit(scope.working.model, scope.symbolic, rewrites)
    nodes = [n for n in emitted.graph.node if n.op_type == OP]
    assert len(nodes) == len(described)
    for node in nodes:
        attributes = {a.name: a.s.decode() for a in node.attribute if a.type == onnx.AttributeProto.STRING}
        assert set(FOUND[name]) <= set(attributes["operands"].split())
        assert set(FOUND[name]) == {entry.split(":")[0].strip() for entry in attributes["relative_index"].split(";")}
    rng = np.random.default_rng(3)
    for batch, length in ((1, 5), (2, 37)):
        feed = draw_feed(model, rng, batch, length)
        for mine, wanted in zip(run(emitted, feed), run(model, feed), strict=True):
            assert np.abs(wanted).max() > 1e-3
            np.testing.assert_allclose(mine, wanted, atol=2e-5 * float(np.abs(wanted).max()))


def test_gated_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """WavLM: a table by distance times a number of each query and head."""
    model = fill_graph("zoo/wavlm.torchscript.eager")
    scope, described = describe(model, monkeypatch, frozenset({"relative_bias_factor"}))
    rewrites = []
    for one in described:
        assert one.mask is not None
        assert one.mask.relative_factor is not None
        assert one.mask.relative is not None
        assert (one.mask.relative.heads, one.mask.bias) == (4, ())
        rewrites.append(Rewrite(one.site, one.mask))
    emitted = emit(scope.working.model, scope.symbolic, rewrites)
    rng = np.random.default_rng(5)
    for batch, length in ((1, 5), (3, 41)):
        feed = draw_feed(model, rng, batch, length)
        for mine, wanted in zip(run(emitted, feed), run(model, feed), strict=True):
            np.testing.assert_allclose(mine, wanted, atol=2e-5 * float(np.abs(wanted).max()))


def test_layers_share_a_table_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both terms of both layers of DeBERTa v3 read one table of buckets."""
    _, described = describe(fill_graph("relative/deberta-v3.torchscript.eager"), monkeypatch, ROLES)
    assert len(described) == 2
    tables = {one.mask.tables for one in described if one.mask is not None}
    assert len(tables) == 1
    assert [len(t) for t in tables] == [1]


@pytest.mark.parametrize("keeps_scores", [True, False])
def test_tables_of_rows_stay_beside_weaker_masks(keeps_scores: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both nodes of a site read the table that an index names, or the second one has no term."""
    _, described = describe(fill_graph("relative/deberta-v3.torchscript.eager"), monkeypatch, ROLES)
    found = described[0].mask
    assert found is not None
    assert [name for name, *_ in found.tables] == ["table0"]
    mask = replace(found, weaker=WeakerMasks((MaskExpression.parse("k <= q"),), keeps_scores))
    assert strictest_mask(mask).tables == found.tables
    assert strictest_mask(mask).relative_terms == found.relative_terms
    second = weaker_mask(described[0].site, mask)
    assert second.relative_terms == (found.relative_terms if keeps_scores else ())
    assert second.tables == (found.tables if keeps_scores else ())


@pytest.mark.parametrize(
    "roles",
    [frozenset(), frozenset({"relative_bias_factor"}), frozenset({"relative_key"})],
    ids=["none", "factor", "queries"],
)
def test_a_library_without_a_role_keeps_the_bias(roles: frozenset[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Then all is as before: the term is one bias."""
    _, described = describe(fill_graph("relative/deberta-v1.torchscript.eager"), monkeypatch, roles)
    for one in described:
        assert one.mask is not None
        assert not one.mask.relative_terms
        assert len(one.mask.bias) == 1


def test_rows_of_inputs_stay_a_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that depend on data of a run are not the same for all batches."""
    model = fill_graph("zoo/xlnet.torchscript.eager")
    _, described = describe(model, monkeypatch, ROLES)
    assert described[0].mask is not None
    table = described[0].mask.relative_terms[0].table.tensor
    mask = next(i.name for i in model.graph.input if "mask" in i.name)
    # The rows times a number that is read from an input.
    for node in model.graph.node:
        for i, name in enumerate(node.output):
            if name == table:
                node.output[i] = "rows_before"
    index = next(i for i, n in enumerate(model.graph.node) if "rows_before" in n.output)
    more = [
        onnx.helper.make_node("Cast", [mask], ["as_float"], to=onnx.TensorProto.FLOAT),
        onnx.helper.make_node("ReduceMax", ["as_float"], ["largest"], keepdims=0),
        onnx.helper.make_node("Mul", ["rows_before", "largest"], [table]),
    ]
    for offset, node in enumerate(more):
        model.graph.node.insert(index + 1 + offset, node)
    _, described = describe(model, monkeypatch, ROLES)
    assert described[0].mask is not None
    assert not described[0].mask.relative_terms
    assert any("is no product with rows by relative position" in str(note) for note in described[0].mask.notes)


def test_terms_times_other_values_stay_a_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    """Funnel multiplies a term by 0 where a class token stands: the report says so."""
    model = fill_graph("relative/conformer.dynamo.eager")
    _, described = describe(model, monkeypatch, ROLES)
    assert described[0].mask is not None
    term = described[0].mask.relative_terms[0].term.tensor
    more = [
        onnx.helper.make_node("Shape", [term], ["term_shape"]),
        onnx.helper.make_node("Slice", ["term_shape", "last", "behind"], ["keys"]),
        onnx.helper.make_node("Squeeze", ["keys"], ["number"]),
        onnx.helper.make_node("Range", ["nothing", "number", "one"], ["position"]),
        onnx.helper.make_node("Greater", ["position", "nothing"], ["is_later"]),
        onnx.helper.make_node("Cast", ["is_later"], ["factor"], to=onnx.TensorProto.FLOAT),
        onnx.helper.make_node("Mul", [term, "factor"], ["term_times_factor"]),
    ]
    index = next(i for i, n in enumerate(model.graph.node) if term in n.input)
    for node in model.graph.node:
        for i, name in enumerate(node.input):
            if name == term:
                node.input[i] = "term_times_factor"
    for offset, node in enumerate(more):
        model.graph.node.insert(index + offset, node)
    numbers = {"last": np.array([-1]), "behind": np.array([2**31 - 1]), "nothing": np.array(0), "one": np.array(1)}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(a, n) for n, a in numbers.items())
    _, described = describe(model, monkeypatch, ROLES)
    assert described[0].mask is not None
    assert not described[0].mask.relative_terms
    assert any("queries or keys meet rows in it" in str(note) for note in described[0].mask.notes)


def test_stored_names() -> None:
    """Each stored graph of relative terms is in the manifest."""
    assert len([n for n in build.names() if n.startswith("relative/")]) == 19


@pytest.mark.parametrize("name", ["relative/parakeet.torchscript.eager", "relative/deberta-v3.torchscript.eager"])
def test_a_plan_of_a_dry_run_is_taken(name: str, tmp_path: Path) -> None:
    """The mask of a plan is that of the split terms where relative terms need these; it counts as lifted all the same."""
    source, target, plan, again = (tmp_path / n for n in ("m.onnx", "o.onnx", "plan.json", "again.json"))
    onnx.save(fill_graph(name), source)
    stof.optimize(source, options=Options(dry_run=True, save_plan=plan))
    report = stof.optimize(source, target, Options(plan=plan, save_plan=again, verify=False))
    assert [s.replaced for s in report.sites] == [True] * len(report.sites)
    assert all(any("relative_" in note for note in s.notes) for s in report.sites)
    assert plan.read_bytes() == again.read_bytes()
