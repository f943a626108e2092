# SPDX-License-Identifier: Apache-2.0
"""How often the checks of rows run a graph, and that they refuse a wrong row at each size that they run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

from stof.attention.describe import site_describer
from stof.attention.describe.site_describer import DescribedSite, SiteDescriber
from stof.attention.expand.expanders import make_working_copy
from stof.attention.subgraphs import find_scopes
from stof.errors import UnsupportedError
from stof.mask.check.checker import MaskChecker
from stof.mask.check.run_masks import MaskRunner
from stof.mask.expression import MaskExpression
from stof.mask.lift import lift
from stof.mask.relative_terms import check_values, values
from stof.mask.relative_terms.check import check_rows
from stof.mask.relative_terms.lift import read_products
from stof.options import Options

_HEADS, _SIZE, _REACH = 3, 8, 4
_WIDTH = _HEADS * _SIZE

_PAIRS = """
    y = Concat <axis = 1> (mem, x)
    S = Shape <start = 1, end = 2> (x)  T = Shape <start = 1, end = 2> (y)
    s = Squeeze (S)  t = Squeeze (T)  past = Sub (t, s)
    i0 = Range (zero, s, one)  i1 = Add (i0, past)  i = Unsqueeze (i1, ones)  j = Range (zero, t, one)
    distance = Sub (j, i)  low = Max (distance, least)  high = Min (low, most)  rows = Add (high, reach)
    pairs = Gather (table, rows)
"""
_LAYER = """
    q0# = MatMul (x@, wq)  k0# = MatMul (y@, wk)  v0# = MatMul (y@, wv)
    q1# = Reshape (q0#, heads)  k1# = Reshape (k0#, heads)  v1# = Reshape (v0#, heads)
    q# = Transpose <perm = [0, 2, 1, 3]> (q1#)  k# = Transpose <perm = [0, 2, 3, 1]> (k1#)
    value# = Transpose <perm = [0, 2, 1, 3]> (v1#)
    ac# = MatMul (q#, k#)  SCORES  weights# = Softmax <axis = -1> (scores#)
    o# = MatMul (weights#, value#)  VALUES
    o1# = Transpose <perm = [0, 2, 1, 3]> (sum#)  x# = Reshape (o1#, flat)  y# = Concat <axis = 1> (mem, x#)
"""
_VALUES = (
    "scores# = Mul (ac#, scale)",
    'added# = Einsum <equation = "bhqk,qkd->bhqd"> (weights#, pairs)  sum# = Add (o#, added#)',
)
_KEYS = (
    'bd# = Einsum <equation = "bhqd,qkd->bhqk"> (q#, pairs)  both# = Add (ac#, bd#)  scores# = Mul (both#, scale)',
    "sum# = Identity (o#)",
)


def model_of(
    spelling: tuple[str, str], sizes: Sequence[int | str] = ("B", "S", "P"), layers: int = 1
) -> onnx.ModelProto:
    """Layers with rows by relative position beside the values, or in the scores."""
    body = _PAIRS
    for layer in range(1, layers + 1):
        before = "" if layer == 1 else str(layer - 1)
        text = _LAYER.replace("SCORES", spelling[0]).replace("VALUES", spelling[1])
        body += text.replace("#", str(layer)).replace("@", before)
    B, S, P = sizes
    graph = f"g (float[{B},{S},{_WIDTH}] x, float[{B},{P},{_WIDTH}] mem) => (float[{B},{S},{_WIDTH}] x{layers})"
    model: onnx.ModelProto = parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> {graph} {{ {body} }}')
    rng = np.random.default_rng(8)
    constants: dict[str, np.ndarray] = {
        **{n: rng.standard_normal((_WIDTH, _WIDTH)).astype(np.float32) * 0.3 for n in ("wq", "wk", "wv")},
        "table": rng.standard_normal((2 * _REACH + 1, _SIZE)).astype(np.float32),
        "scale": np.float32(_SIZE**-0.5),
        "heads": np.array([0, 0, _HEADS, _SIZE]),
        "flat": np.array([0, 0, _WIDTH]),
        **{n: np.array(i) for n, i in {"zero": 0, "one": 1, "least": -_REACH, "most": _REACH, "reach": _REACH}.items()},
        "ones": np.array([1]),
    }
    model.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in constants.items())
    return model


@dataclass
class Runs:
    """The shapes of what runs gave, and what the check of values was called with."""

    shapes: list[tuple[int, ...]] = field(default_factory=list)
    called: list[tuple[Any, ...]] = field(default_factory=list)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    """Counts the runs in which tensors are replaced: those of the checks of rows."""
    seen = Runs()
    run, check_called = MaskRunner.run, check_values.check_values

    def counted(
        self: MaskRunner, tensors: list[str], feeds: Any, sizes: Any, replaced: Any = MappingProxyType({})
    ) -> list[np.ndarray]:
        results = run(self, tensors, feeds, sizes, replaced)
        seen.shapes.extend(r.shape for r in results if replaced)
        return results

    def recorded(*arguments: Any) -> None:
        seen.called.append(arguments)
        check_called(*arguments)

    monkeypatch.setattr(MaskRunner, "run", counted)
    monkeypatch.setattr(values, "check_values", recorded)
    roles = frozenset({"relative_value", "relative_key"})
    monkeypatch.setattr(site_describer, "relative_roles", lambda: roles)
    return seen


def describe(model: onnx.ModelProto) -> list[DescribedSite]:
    scope = next(iter(find_scopes(make_working_copy(model))))
    describer = SiteDescriber(scope.working.model, scope.symbolic, Options())
    return [describer.describe(site) for site in scope.sites]


@pytest.mark.parametrize(("S", "P", "number"), [(1, 2, 1), (9, 4, 1), (14, 1, 2), (40, 3, 4), (150, 20, 8)])
def test_values_of_a_static_graph_run_once(S: int, P: int, number: int, runs: Runs) -> None:
    """14 keys a run, and 8 runs at most, for all its layers."""
    found = describe(model_of(_VALUES, (2, S, P), layers=2))
    assert [len(d.mask.relative_terms) for d in found if d.mask is not None] == [1, 1]
    assert runs.shapes == number * [(2, _HEADS, S, _SIZE)]


def test_values_of_a_graph_of_any_length(runs: Runs) -> None:
    describe(model_of(_VALUES, layers=2))
    times = Counter(shape[2] for shape in runs.shapes)
    assert sorted(times) == [1, 2, 3, 5, 8, 13, 24, 41]
    assert max(times.values()) <= check_values.MOST_RUNS


@pytest.mark.parametrize("length", [1, 2, 3, 5, 8, 13, 24, 41])
@pytest.mark.parametrize("last", [False, True])
def test_one_wrong_row_beside_values_is_refused(length: int, last: bool, runs: Runs) -> None:
    describe(model_of(_VALUES))
    ((checker, site, mask, found, index, factor),) = runs.called
    pair = length - 1 if last else 0
    one = f"max(0, 1 - abs(S - {length}) - abs(q - P - {pair}) - abs(k - P - {pair}))"
    wrong = MaskExpression.parse_integer(f"max(0, min(8, {index})) + {one}")
    with pytest.raises(UnsupportedError, match=f"length {length} is another one"):
        check_values.check_values(checker, site, mask, found, wrong, factor)


@pytest.mark.parametrize(
    "wrong",
    [
        "k - q - 15",
        "min(k - q - 16, 7)",
        "k - q - 16 + max(0, q - 148)",
        "q - k + 24",
        "max(0, k - q - 16) + max(0, 1 - abs(q - 100) - abs(k - 30))",
    ],
)
def test_a_wrong_index_of_a_long_graph_is_refused(wrong: str, runs: Runs) -> None:
    describe(model_of(_VALUES, (1, 150, 20)))
    ((checker, site, mask, found, _, factor),) = runs.called
    with pytest.raises(UnsupportedError, match="is another one"):
        check_values.check_values(checker, site, mask, found, MaskExpression.parse_integer(wrong), factor)


def test_another_factor_beside_values_is_refused(runs: Runs) -> None:
    describe(model_of(_VALUES))
    ((checker, site, mask, found, index, factor),) = runs.called
    with pytest.raises(UnsupportedError, match="is another one"):
        check_values.check_values(checker, site, mask, found, index, 1.02 * factor)


def test_weights_beyond_the_limit_are_not_run(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_values, "MOST_BYTES", 4 * _HEADS * 9 * 13)
    (fitting,) = describe(model_of(_VALUES, ("B", 9, 4)))
    assert fitting.mask is not None
    assert runs.shapes == [(1, _HEADS, 9, _SIZE)]  # two texts would not fit
    (kept,) = describe(model_of(_VALUES, ("B", 9, 5)))
    assert kept.mask is None
    assert f"the weights take {4 * _HEADS * 9 * 14} bytes, more than" in kept.reason


def products_of(sizes: Sequence[int | str]) -> tuple[Any, ...]:
    scope = next(iter(find_scopes(make_working_copy(model_of(_KEYS, sizes)))))
    checker, site = MaskChecker(scope.working.model, scope.symbolic), scope.sites[0]
    mask = lift(scope.symbolic, site)
    return checker, site, mask, read_products(checker, site, mask, mask.bias[0])


@pytest.mark.parametrize(("S", "P"), [(9, 4), (310, 20)])
def test_rows_of_a_static_graph_run_once(S: int, P: int, runs: Runs) -> None:
    """Rows and heads, each once, of a long graph as well."""
    found = products_of((2, S, P))
    runs.shapes.clear()
    right = f"k - q + {_REACH - P}"  # fixed sizes have no past: queries are counted from 0
    check_rows(*found, [MaskExpression.parse_integer(right)])
    assert runs.shapes == 2 * [(2, _HEADS, S, S + P)]
    for wrong in (f"{right} + max(0, q - {S - 2})", f"{right} + 1"):
        with pytest.raises(UnsupportedError, match=r"the row that is read at \(b, h, q, k\)"):
            check_rows(*found, [MaskExpression.parse_integer(wrong)])


def test_long_rows_of_a_free_batch_run_for_one_text_after_the_first_size(runs: Runs) -> None:
    found = products_of(("B", 310, 20))
    runs.shapes.clear()
    check_rows(*found, [MaskExpression.parse_integer(f"k - q + {_REACH - 20}")])
    assert [shape[0] for shape in runs.shapes] == [2, 2, 1]


@pytest.mark.parametrize("length", [1, 3, 5, 13, 2, 7])
def test_one_wrong_row_in_scores_is_refused(length: int, runs: Runs) -> None:
    one = f"max(0, 1 - abs(S - {length}) - abs(q - P - {length - 1}) - abs(k - P - {length - 1}))"
    wrong = MaskExpression.parse_integer(f"max(0, min(8, k - q + {_REACH})) + {one}")
    with pytest.raises(UnsupportedError, match=r"the row that is read at \(b, h, q, k\)"):
        check_rows(*products_of(("B", "S", "P")), [wrong])
