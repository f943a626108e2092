# SPDX-License-Identifier: Apache-2.0
"""The layouts of SparseAttention nodes: as expressions and tables, and what is refused with its reason."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import helper
from sparse_models import STRIDED, SparseShape, candidates_of, csr, random_layouts, sparse_model, strided

from stof.mask.expression import MaskExpression


def expression_of(layout: np.ndarray, block: int = 16, heads: int = 8) -> tuple[str, np.ndarray | None]:
    shape = SparseShape(layout, block=block, H=heads, G=heads)
    (candidate,) = candidates_of(sparse_model(shape))
    assert candidate.site is not None
    assert candidate.site.layout is not None
    return candidate.site.mask.text, candidate.site.layout.table


EXPRESSIONS = {
    "dense": (np.tril(np.ones((2, 6, 6), bool)), "k <= q"),
    "local": (strided(9, 3, 64, 1, offset=1), "q // 16 - k // 16 < 3 and k <= q"),
    "one layout": (strided(12, 2, 4, 1), "(q // 16 - k // 16 < 2 or k // 16 % 4 == 3) and k <= q"),
    "a step for each head": (strided(12, 2, 8, 8), "(q // 16 - k // 16 < 2 or (k // 16 + h) % 8 == 7) and k <= q"),
    "step 2": (strided(24, 2, 8, 4, step=2), "(q // 16 - k // 16 < 2 or (k // 16 + h * 2) % 8 == 7) and k <= q"),
    "step back": (strided(24, 2, 8, 8, step=7), "(q // 16 - k // 16 < 2 or (k // 16 - h) % 8 == 7) and k <= q"),
    "cycle of layouts": (strided(24, 2, 8, 4), "(q // 16 - k // 16 < 2 or (k // 16 + h % 4) % 8 == 7) and k <= q"),
    "one for each key head": (
        np.repeat(strided(24, 2, 8, 4, step=2), 2, axis=0),
        "(q // 16 - k // 16 < 2 or (k // 16 + h // 2 * 2) % 8 == 7) and k <= q",
    ),
    "runs in a cycle": (
        np.repeat(strided(24, 2, 8, 2), 2, axis=0),
        "(q // 16 - k // 16 < 2 or (k // 16 + h % 4 // 2) % 8 == 7) and k <= q",
    ),
    "equal layouts": (
        np.repeat(strided(12, 2, 4, 1), 8, axis=0),
        "(q // 16 - k // 16 < 2 or k // 16 % 4 == 3) and k <= q",
    ),
    "columns that rows do not reach": (
        strided(7, 2, 8, 8),
        "(q // 16 - k // 16 < 2 or (k // 16 + h) % 8 == 7) and k <= q",
    ),
}


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_short_expressions(name: str) -> None:
    layout, wanted = EXPRESSIONS[name]
    assert expression_of(layout) == (wanted, None)


def test_residues_without_a_step() -> None:
    """Heads whose columns do not move evenly read them from a table of numbers."""
    i, j = np.indices((12, 12))
    layout = (i >= j) & ((i - j < 2) | (j % 5 == np.array([0, 3, 4, 1])[:, None, None]))
    mask, table = expression_of(layout)
    assert mask == "(q // 16 - k // 16 < 2 or k // 16 % 5 == table0[h % 4]) and k <= q"
    assert table is not None
    np.testing.assert_array_equal(table, [0, 3, 4, 1])


@pytest.mark.parametrize("change", [(0, 11, 4), (3, 9, 0), (7, 11, 11)])
def test_one_block_more_or_less(change: tuple[int, int, int]) -> None:
    """A layout that a short expression misses in one block alone becomes a table."""
    layout = strided(12, 2, 4, 8)
    layout[change] ^= True
    mask, table = expression_of(layout)
    assert mask == "table0[h, q // 16, k // 16] and k <= q"
    assert table is not None
    np.testing.assert_array_equal(table, layout)


@pytest.mark.parametrize("seed", range(12))
def test_expressions_say_what_layouts_say(seed: int) -> None:
    """Random strides, steps and sizes, evaluated at every position."""
    rng = np.random.default_rng(seed)
    blocks, count = int(rng.integers(2, 14)), int(rng.choice([1, 2, 4, 8]))
    stride = int(rng.integers(2, 9))
    layout = strided(blocks, int(rng.integers(1, 4)), stride, count, int(rng.integers(0, stride)), int(rng.integers(9)))
    mask, table = expression_of(layout)
    h, q, k = np.ogrid[:8, : blocks * 16, : blocks * 16]
    expression = MaskExpression.parse(mask, {} if table is None else {"table0": table})
    found = np.broadcast_to(expression.evaluate({"h": h, "q": q, "k": k, "table0": table}), (8, q.size, k.size))
    np.testing.assert_array_equal(found, layout[h % count, q // 16, k // 16] & (k <= q))


def test_tables_of_layouts_that_repeat() -> None:
    """A table holds repeated layouts once, whether they repeat in sequence or in cycles."""
    layouts = random_layouts(6, 2)
    for given, index in ((np.repeat(layouts, 2, axis=0), "h % 4 // 2"), (np.tile(layouts, (2, 1, 1)), "h % 2")):
        mask, table = expression_of(given)
        assert mask == f"table0[{index}, q // 16, k // 16] and k <= q"
        assert table is not None
        np.testing.assert_array_equal(table, layouts)
    mask, table = expression_of(np.repeat(layouts[:1], 4, axis=0))
    assert mask == "table0[0, q // 16, k // 16] and k <= q"
    assert table is not None
    assert table.shape == (1, 6, 6)


def reason_of(model: onnx.ModelProto) -> str:
    (candidate,) = candidates_of(model)
    assert candidate.site is None
    return candidate.reason


BLOCKS = np.tril(np.ones((1, 3, 3), bool))
ROWS, COLUMNS = np.array([[0, 1, 3, 6]], np.int32), np.array([[0, 0, 1, 0, 1, 2]], np.int32)


def changed(array: np.ndarray, index: int, value: int) -> np.ndarray:
    found = array.copy()
    found[0, index] = value
    return found


DAMAGED: dict[str, tuple[dict[str, np.ndarray], str]] = {
    "negative": ({"columns": changed(COLUMNS, 2, -1)}, r"block_col_indices\[0\] has -1 in row 1, expected 0 to 1"),
    "beyond": ({"columns": changed(COLUMNS, 5, 3)}, r"block_col_indices\[0\] has 3 in row 2, expected 0 to 2"),
    "above the diagonal": ({"columns": changed(COLUMNS, 0, 2)}, r"block_col_indices\[0\] has 2 in row 0"),
    "huge": ({"columns": changed(COLUMNS, 1, 2**31 - 1)}, r"block_col_indices\[0\] has 2147483647 in row 1"),
    "twice": ({"columns": changed(COLUMNS, 4, 0)}, r"block_col_indices\[0\] has 0 behind 0 in row 2"),
    "not ascending": (
        {"columns": np.array([[0, 1, 0, 0, 1, 2]], np.int32)},
        r"block_col_indices\[0\] has 0 behind 1 in row 1: blocks must ascend",
    ),
    "first": ({"rows": changed(ROWS, 0, 1)}, r"block_row_indices\[0\] begins with 1, expected 0"),
    "descending": ({"rows": changed(ROWS, 2, 0)}, r"block_row_indices\[0\] has 0 at 2, behind 1"),
    "too many": ({"rows": changed(ROWS, 3, 7)}, r"block_row_indices\[0\] ends with 7, .* has 6 columns"),
    "an empty row": ({"rows": changed(ROWS, 1, 0)}, r"block_row_indices\[0\] names no block in row 0"),
    "layouts": (
        {"rows": np.repeat(ROWS, 3, axis=0)},
        r"block_row_indices has shape \[3, 4\], expected a divisor of 4 heads",
    ),
    "no layout": ({"rows": np.zeros((0, 4), np.int32)}, r"block_row_indices has shape \[0, 4\]"),
    "no block": ({"rows": np.zeros((1, 1), np.int32)}, r"block_row_indices has shape \[1, 1\]"),
    "other layouts": ({"columns": np.repeat(COLUMNS, 2, axis=0)}, "block_col_indices has 2 layouts, .* 1"),
    "rank": ({"columns": COLUMNS[0]}, r"block_col_indices is int32 \[6\], expected int32 with 2 axes"),
    "type": ({"rows": ROWS.astype(np.int64)}, r"block_row_indices is int64 \[1, 4\]"),
    "too large": ({"rows": np.zeros((1, 20001), np.int32)}, "1 layouts of 20000 blocks, whose table exceeds 256 MiB"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_layouts(name: str) -> None:
    arrays, words = DAMAGED[name]
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(reason_of(sparse_model(SparseShape(BLOCKS), **arrays)))


def test_the_layouts_that_are_damaged_are_fine_otherwise() -> None:
    (candidate,) = candidates_of(sparse_model(SparseShape(BLOCKS), rows=ROWS, columns=COLUMNS))
    assert candidate.site is not None
    assert candidate.site.mask.text == "k <= q"


def test_layouts_that_are_run_time_data() -> None:
    model = sparse_model(SparseShape(BLOCKS))
    stored = next(t for t in model.graph.initializer if t.name == "columns")
    model.graph.initializer.remove(stored)
    model.graph.input.append(helper.make_tensor_value_info("columns", onnx.TensorProto.INT32, [1, 6]))
    assert reason_of(model) == "its layouts are run-time data: block_col_indices 'columns' is no constant"


def with_input(index: int, name: str) -> onnx.ModelProto:
    model = sparse_model(replace(STRIDED, rotary=16))
    inputs = model.graph.node[0].input
    while len(inputs) <= index:
        inputs.append("")
    inputs[index] = name
    return model


NODES = {
    "block size": (sparse_model(replace(STRIDED, block=48)), "sparse_block_size is 48, expected 16, 32, 64 or 128"),
    "attribute": (
        sparse_model(replace(STRIDED, other={"causal": 1})),
        "attribute 'causal', whose meaning is not known",
    ),
    "type": (sparse_model(replace(STRIDED, other={"do_rotary": 1.0})), "do_rotary is 1.0, expected an integer"),
    "flag": (
        sparse_model(replace(STRIDED, other={"rotary_interleaved": 2})),
        "rotary_interleaved is 2, expected 0 or 1",
    ),
    "scale": (sparse_model(replace(STRIDED, other={"scale": float("nan")})), "scale is nan"),
    "heads": (sparse_model(replace(STRIDED, H=5, G=2)), "5 query heads on 2 key heads"),
    "input": (with_input(11, "total"), "it has input 11, 'total', whose meaning is not known"),
    "no past": (with_input(3, ""), "it has no input past_key"),
    "no lengths": (with_input(8, ""), "it has no input key_total_sequence_lengths"),
    "half a pair": (with_input(10, ""), "it has input cos_cache and no sin_cache"),
    "key alone": (with_input(1, "query"), "it has input key and no value"),
}


@pytest.mark.parametrize("name", NODES)
def test_nodes_that_are_refused(name: str) -> None:
    model, words = NODES[name]
    assert words in reason_of(model)


@pytest.mark.parametrize("seed", range(4))
def test_random_damage(seed: int) -> None:
    """Arrays with random entries are refused with a reason, or read as what they say."""
    rng = np.random.default_rng(seed)
    values = np.array([-(2**31), -1, 0, 1, 2, 3, 4, 9, 2**31 - 1])
    refused = 0
    for _ in range(60):
        rows, columns = csr(random_layouts(4, 2, int(rng.integers(1 << 30))))
        for array in (rows, columns)[: int(rng.integers(1, 3))]:
            array.flat[rng.integers(array.size)] = rng.choice(values)
        (candidate,) = candidates_of(sparse_model(SparseShape(BLOCKS), rows=rows, columns=columns))
        if candidate.site is None:
            refused += 1
            assert candidate.reason.startswith(("block_row_indices", "block_col_indices"))
            continue
        assert candidate.site.layout is not None
        wanted = np.zeros((2, 4, 4), bool)
        for layout, row in np.ndindex(2, 4):
            wanted[layout, row, columns[layout, rows[layout, row] : rows[layout, row + 1]]] = True
        np.testing.assert_array_equal(candidate.site.layout.allowed, wanted)
    assert 5 < refused < 60
