# SPDX-License-Identifier: Apache-2.0
"""Mask expressions whose evaluation would not end: refused by the library at a run, and by the optimizer before it writes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from stof import cli
from stof.errors import UnsupportedError
from stof.mask.accept import check_work
from stof.mask.expression import MaskExpression
from stof.runtime.library import LibraryError, Op

LONGEST = 1 << 22


def repeated(terms: int) -> str:
    """A mask of 4 * terms - 1 nodes."""
    return " or ".join(["k <= q"] * terms)


@pytest.mark.parametrize(("terms", "length", "fits"), [(33, 100, True), (33, 50_000, False), (1000, 9000, False)])
def test_the_library_refuses_a_run_that_would_not_end(terms: int, length: int, fits: bool) -> None:
    rng = np.random.default_rng(terms)
    query, key, value = (rng.standard_normal((1, 1, length, 1), np.float32) for _ in range(3))
    found = np.full_like(query, np.nan)
    op = Op("StofAttention", {"mask": repeated(terms)})
    if not fits:
        with pytest.raises(LibraryError, match=f"{4 * terms - 1} nodes for {length} queries and {length} keys"):
            op.run([query, key, value], [found], threads=2)
        return
    op.run([query, key, value], [found], threads=2)
    scores = np.where(np.tri(length, dtype=bool), query[0, 0].astype(np.float64) @ key[0, 0].T, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    exact = weights / weights.sum(-1, keepdims=True) @ value[0, 0]
    np.testing.assert_allclose(found[0, 0], exact, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("terms", "queries", "keys", "fits"),
    [
        (32, None, None, True),
        (33, None, None, False),
        (33, None, 1, False),
        (32, LONGEST, LONGEST, True),
        (33, LONGEST, LONGEST, False),
        (1000, 8192, 8192, True),
        (1000, 8192, 8704, False),
    ],
)
def test_what_may_be_written(terms: int, queries: int | None, keys: int | None, fits: bool) -> None:
    if fits:
        check_work(MaskExpression.parse(repeated(terms)), queries, keys)
    else:
        with pytest.raises(UnsupportedError, match=f"its mask has {4 * terms - 1} nodes"):
            check_work(MaskExpression.parse(repeated(terms)), queries, keys)


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("True", 1),
        ("k <= q", 3),
        ("q - 2 * k < 7", 7),  # as tests/cpp/mask/test_expr.cc counts them
        ("abs(q-k)<=64 and not pad[b, k]", 11),
        ("min(q, k//3)%2!=1 or segment_q[b, q] == segment_k[b, k]", 17),
    ],
)
def test_nodes_are_counted_as_the_library_does(text: str, nodes: int) -> None:
    most = 129 // (nodes + 1)  # copies with "or" between them that have no more than 128 nodes
    check_work(MaskExpression.parse(" or ".join([text] * most)), None, None)
    with pytest.raises(UnsupportedError, match=f"its mask has {(most + 1) * (nodes + 1) - 1} nodes"):
        check_work(MaskExpression.parse(" or ".join([text] * (most + 1))), None, None)


@pytest.mark.parametrize(("length", "replaced"), [("S", False), (40, True)])
def test_a_stated_mask_that_is_too_large_is_not_written(
    length: int | str, replaced: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = f"""
    <ir_version: 8, opset_import: ["": 18]>
    g (float[1,4,{length},8] q, float[1,4,{length},8] k, float[1,4,{length},8] v) => (float[a,b,c,d] y) {{
        at2 = Constant <value = int64 {{2}}> ()
        zero = Constant <value = int64 {{0}}> ()
        one = Constant <value = int64 {{1}}> ()
        last = Constant <value = int64[1] {{1}}> ()
        shape = Shape (q)
        s = Gather (shape, at2)
        columns = Range (zero, s, one)
        rows = Unsqueeze (columns, last)
        w = LessOrEqual (columns, rows)
        kt = Transpose <perm = [0, 1, 3, 2]> (k)
        s1 = MatMul (q, kt)
        low = Constant <value = float {{-inf}}> ()
        s2 = Where (w, s1, low)
        p = Softmax (s2)
        y = MatMul (p, v)
    }}"""
    path = tmp_path / "m.onnx"
    onnx.save(onnx.parser.parse_model(text), path)
    assert cli.main([str(path), "--mask", f"0={repeated(40)}"]) == 0
    out = capsys.readouterr().out
    assert ("its mask has 159 nodes, expected at most 128 where lengths are not fixed" in out) != replaced, out
    assert (tmp_path / "m.stof.onnx").exists() == replaced
