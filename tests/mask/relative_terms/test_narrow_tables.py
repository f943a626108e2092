# SPDX-License-Identifier: Apache-2.0
"""Relative tables under a static window: which rows are kept, and that nothing has more of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from zoo_graphs import draw_feed, fill_graph

from stof.attention.describe import site_describer
from stof.attention.describe.site_describer import DescribedSite, SiteDescriber
from stof.attention.emit import Rewrite, emit
from stof.attention.expand.expanders import make_working_copy
from stof.attention.subgraphs import Scope, find_scopes
from stof.mask.expression import MaskExpression
from stof.mask.relative_terms.narrow import narrow_tables
from stof.mask.site import EmptyRows, LiftedMask, RowRange, WeakerMasks
from stof.options import Options

WINDOWS = ["relative/conformer-window.dynamo.eager", "relative/parakeet-window.torchscript.eager"]


def describe(name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[onnx.ModelProto, Scope, DescribedSite]:
    monkeypatch.setattr(site_describer, "relative_roles", lambda: frozenset({"relative_key"}))
    model = fill_graph(name)
    scope = next(iter(find_scopes(make_working_copy(model))))
    (described,) = (SiteDescriber(scope.working.model, scope.symbolic, Options()).describe(s) for s in scope.sites)
    assert described.mask is not None, described.reason
    return model, scope, described


def run(model: onnx.ModelProto, feed: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return dict(zip((o.name for o in session.get_outputs()), session.run(None, feed), strict=True))


@pytest.mark.parametrize("name", WINDOWS)
def test_exports_with_a_window(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, scope, described = describe(name, monkeypatch)
    assert described.mask is not None
    (term,) = described.mask.relative_terms
    assert (term.role, term.index.text) == ("relative_key", "k - q + min(S - 1, 128)")
    assert term.table.rows == RowRange(1, 0, -1, 128, 128)
    assert described.mask.expression.window() == (128, 128)
    emitted = emit(scope.working.model, scope.symbolic, [Rewrite(described.site, described.mask)])
    rng = np.random.default_rng(11)
    for batch, length in ((1, 1), (2, 7), (2, 129), (1, 300)):
        feed = draw_feed(model, rng, batch, length - 2)
        assert feed["hidden_states"].shape[1] == length
        wanted, found = (run(m, feed)["last_hidden_state"] for m in (model, emitted))
        assert np.abs(wanted).max() > 1e-3
        np.testing.assert_allclose(found, wanted, atol=2e-5 * float(np.abs(wanted).max()))


@pytest.mark.parametrize("name", WINDOWS)
def test_no_tensor_has_a_row_for_each_distance(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, scope, described = describe(name, monkeypatch)
    assert described.mask is not None
    length = 300
    feed = draw_feed(model, np.random.default_rng(2), 1, length - 2)
    shapes = {}
    for narrowed in (True, False):
        wide = replace(described.mask.relative_terms[0].table, rows=None)
        whole = replace(
            described.mask.relative_terms[0], table=wide, index=MaskExpression.parse_integer("k - q + S - 1")
        )
        mask = described.mask if narrowed else replace(described.mask, relative_terms=(whole,))
        emitted = emit(scope.working.model, scope.symbolic, [Rewrite(described.site, mask)])
        floats = [v.name for v in emitted.graph.value_info if v.type.tensor_type.elem_type == onnx.TensorProto.FLOAT]
        emitted.graph.output.extend(onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, None) for n in floats)
        shapes[narrowed] = [a.shape for a in run(emitted, feed).values()]
    assert any(2 * length - 1 in shape for shape in shapes[False])
    assert not any(2 * length - 1 in shape for shape in shapes[True])
    assert any(257 in shape for shape in shapes[True])


@pytest.fixture(scope="module")
def site() -> tuple[Scope, DescribedSite]:
    with pytest.MonkeyPatch.context() as patch:
        _, scope, described = describe(WINDOWS[0], patch)
        return scope, described


def with_index(described: DescribedSite, text: str, mask: str, **changes: object) -> LiftedMask:
    assert described.mask is not None
    (term,) = described.mask.relative_terms
    term = replace(term, index=MaskExpression.parse_integer(text), table=replace(term.table, rows=None))
    expression = MaskExpression.parse(mask)
    return replace(described.mask, relative_terms=(term,), expression=expression, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("index", "mask", "narrowed", "rows"),
    [
        ("k - q + S - 1", "abs(q - k) <= 5 and pad[b, k]", "k - q + min(S - 1, 5)", (5, 5)),
        ("k - q + S - 1", "k <= q and q - k <= 9", "k - q + min(S - 1, 9)", (9, 0)),
        ("q - k + S - 1", "k <= q and q - k <= 9", "q - k + min(S - 1, 0)", (0, 9)),
        ("S - 1 - q + k", "abs(q - k) <= 5 and abs(q - k) <= 3", "k - q + min(S - 1, 3)", (3, 3)),
        ("k - q + S - 1", "abs(q - k) <= 5 and (q % 2 == 0 or k % 2 == 0)", "k - q + min(S - 1, 5)", (5, 5)),
    ],
)
def test_the_rows_of_a_window(
    site: tuple[Scope, DescribedSite], index: str, mask: str, narrowed: str, rows: tuple[int, int]
) -> None:
    scope, described = site
    (term,) = narrow_tables(scope.symbolic, described.site, with_index(described, index, mask)).relative_terms
    assert term.index.text == narrowed
    assert term.table.rows is not None
    assert (term.table.rows.before, term.table.rows.after) == rows
    old, new = MaskExpression.parse_integer(index), MaskExpression.parse_integer(narrowed)
    allowed = MaskExpression(MaskExpression.parse(mask).without_padding().root)
    for length in (1, 2, 5, 6, 11, 40):
        first, end = term.table.rows.limits(length, length)
        numbers = np.arange(2 * length - 1)
        for q in range(length):
            for k in range(length):
                names = {"q": q, "k": k, "S": length, "T": length, "P": 0}
                if allowed.evaluate(names):
                    was = numbers[np.clip(old.evaluate(names), 0, len(numbers) - 1)]
                    kept = numbers[first:end]
                    assert kept[np.clip(new.evaluate(names), 0, len(kept) - 1)] == was


@pytest.mark.parametrize(
    ("index", "mask", "changes"),
    [
        ("k - q + S - 1", "k <= q", {}),  # no limit to the left
        ("k - q + S - 1", "abs(q - k) <= 5 or k == 0", {}),  # far pairs as well
        ("k - q + S - 1", "abs(q - k) <= 5", {"empty_rows": EmptyRows.ALL}),
        ("k - q + S - 1", "abs(q - k) <= 5", {"weaker": WeakerMasks((MaskExpression(),), True)}),
        ("k - q + S + 7", "abs(q - k) <= 5", {}),  # clamped at the last row
        ("k - q - 2", "abs(q - k) <= 5", {}),  # clamped at the first row
        ("2 * k - 2 * q + S - 1", "abs(q - k) <= 5", {}),
        ("min(k - q, 4) + S - 1", "abs(q - k) <= 5", {}),
        ("k // 2 - q // 2 + S - 1", "abs(q - k) <= 5", {}),
        ("k + S - 1", "abs(q - k) <= 5", {}),
    ],
)
def test_tables_that_stay(site: tuple[Scope, DescribedSite], index: str, mask: str, changes: dict[str, object]) -> None:
    scope, described = site
    whole = with_index(described, index, mask, **changes)
    assert narrow_tables(scope.symbolic, described.site, whole) == whole
