# SPDX-License-Identifier: Apache-2.0
"""Masks that are proven to leave every query a key, those that are not, and that no proof is wrong."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto

from stof.mask.empty_rows.key_proof import leaves_a_key
from stof.mask.expression import MaskExpression
from stof.mask.site import AttentionSite, Layout, LiftedMask, Operand, OperandView, RuntimeOperand
from stof.runtime.library import Mask
from stof.symbolic import Int, dim, integer

BATCH, ROWS, KEYS, PAST = (dim(n) for n in ("batch", "rows", "keys", "past"))
SELF, CROSS, CACHED, LONGER = (ROWS, ROWS), (ROWS, KEYS), (ROWS, PAST + ROWS), (ROWS, ROWS + KEYS)


def site(lengths: tuple[Int, Int], *, offset: bool = False) -> AttentionSite:
    """Two heads over queries and keys of these numbers; ``offset``: the queries are the last."""
    q, k, v = (Operand(n, Layout.BHSD) for n in "qkv")
    common = {"num_heads": 2, "kv_num_heads": 2, "head_size": 8, "value_head_size": 8, "scale": 1.0}
    return AttentionSite(
        **{"name": "a", "index": 0, "softmax": "a", "query": q, "key": k, "value": v, "output": "o", **common},  # type: ignore[arg-type]
        output_layout=Layout.BHSD,
        dtype=TensorProto.FLOAT,
        query_offset=int(offset),
        dims=(BATCH, integer(2), *lengths),
    )


def mask(expression: str, *, same: bool = True, **tables: np.ndarray) -> LiftedMask:
    """An expression with what it reads; ``same``: the queries' segments are the keys' tensor."""
    tensors = {"pad": "mask", "segment_q": "ids" if same else "other_ids", "segment_k": "ids", "lengths": "counts"}
    return LiftedMask(
        MaskExpression.parse(expression),
        operands=tuple(RuntimeOperand(r, t, OperandView.SAME) for r, t in tensors.items() if r in expression),
        tables=tuple((n, str(a.dtype), a.shape, a.tobytes()) for n, a in tables.items()),
    )


DIAGONAL = np.eye(4, dtype=bool)
SHIFTED = np.roll(DIAGONAL, 1, axis=1)
DOCUMENTS = "segment_q[b, q - P] == segment_k[b, k]"

PROVEN = {
    "every pair": (mask(""), site(CROSS)),
    "causal": (mask("k <= q"), site(SELF)),
    "causal from the first of fewer keys": (mask("k <= q"), site(CROSS)),
    "causal behind a past": (mask("k <= q"), site(CACHED, offset=True)),
    "a window": (mask("abs(q - k) <= 4"), site(SELF)),
    "a window behind a past": (mask("k <= q and q - k <= 4"), site(CACHED, offset=True)),
    "a window over keys that go on": (mask("abs(q - k) <= 4"), site(LONGER)),
    "dilated": (mask("abs(q - k) <= 8 and (q - k) % 2 == 0"), site(SELF)),
    "chunks": (mask("q // 8 == k // 8 and k <= q"), site(SELF)),
    "the first keys, whatever else": (mask("k <= 3 or pad[b, k] and q < k"), site(CROSS)),
    "the last key": (mask("k >= T - 1 or k < q - 100"), site(CROSS)),
    "a window, beside a table": (mask("abs(q - k) <= 11 or table0[q // 64, k // 64]", table0=SHIFTED), site(SELF)),
    "blocks with the diagonal": (mask("table0[q // 64, k // 64]", table0=DIAGONAL), site(SELF)),
    "blocks with the first column": (
        mask("table0[q // 64, k // 64]", table0=np.eye(3, 1) + np.ones((3, 2)) > 0),
        site(CROSS),
    ),
    "tables of each head": (mask("table0[h, q, k]", table0=np.stack([DIAGONAL, np.tri(4, dtype=bool)])), site(SELF)),
    "a table of all heads": (mask("table0[h, q, k]", table0=DIAGONAL[None]), site(SELF)),
    "documents": (mask(DOCUMENTS), site(SELF)),
    "documents that are not over": (mask(f"k <= q and {DOCUMENTS}"), site(SELF)),
    "one key or another": (mask("q < 5 and k == 0 or 5 <= q and k == q"), site(SELF)),
    "a fixed size": (mask("k < q or k == 3"), site((integer(9), integer(4)))),
    "a table of a fixed size": (mask("table0[q, k]", table0=SHIFTED), site((integer(4), integer(4)))),
    "heads of a fixed size": (
        mask("table0[h, q, k]", table0=np.stack([SHIFTED, DIAGONAL])),
        site((integer(4), integer(4))),
    ),
}
UNPROVEN = {
    "padding": (mask("pad[b, k]"), site(SELF)),
    "a window under padding": (mask("abs(q - k) <= 4 and pad[b, k]"), site(SELF)),
    "nothing": (mask("False"), site(SELF)),
    "what came before": (mask("k < q"), site(SELF)),
    "a window over fewer keys": (mask("abs(q - k) <= 4"), site(CROSS)),
    "a causal window from the first of fewer keys": (mask("k <= q and q - k <= 4"), site(CROSS)),
    "the last queries of fewer keys": (mask("k <= q"), site(CROSS, offset=True)),
    "blocks without the diagonal": (mask("table0[q // 64, k // 64]", table0=SHIFTED), site(SELF)),
    "a head without the diagonal": (mask("table0[h, q, k]", table0=np.stack([DIAGONAL, SHIFTED])), site(SELF)),
    "documents behind a past": (mask(DOCUMENTS), site(CACHED, offset=True)),
    "documents of two tensors": (mask(DOCUMENTS, same=False), site(SELF)),
    "lengths": (mask("k < lengths[b]"), site(SELF)),
    "a fixed size with an empty row": (mask("k < q"), site((integer(9), integer(9)))),
    "a fixed size with padding": (mask("k <= q and pad[b, k]"), site((integer(9), integer(9)))),
    "a window over fewer keys of fixed numbers": (mask("abs(q - k) <= 4"), site((integer(40), integer(9)))),
}


@pytest.mark.parametrize("name", PROVEN)
def test_masks_that_leave_a_key(name: str) -> None:
    found, where = PROVEN[name]
    assert leaves_a_key(where, found)


@pytest.mark.parametrize("name", UNPROVEN)
def test_masks_that_may_not(name: str) -> None:
    found, where = UNPROVEN[name]
    assert not leaves_a_key(where, found)


def _numbers() -> st.SearchStrategy[str]:
    atoms = st.sampled_from(["q", "k", "S", "T", "P", "0", "1", "2", "5", "segment_k[b, k]", "segment_q[b, q - P]"])
    return st.recursive(
        atoms,
        lambda inner: st.one_of(
            st.builds("({} {} {})".format, inner, st.sampled_from(["+", "-", "*"]), inner),
            st.builds("({} {} {})".format, inner, st.sampled_from(["//", "%"]), st.sampled_from(["2", "3"])),
            st.builds("abs({})".format, inner),
            st.builds("{}({}, {})".format, st.sampled_from(["min", "max"]), inner, inner),
        ),
        max_leaves=4,
    )


def _conditions() -> st.SearchStrategy[str]:
    compared = st.builds("{} {} {}".format, _numbers(), st.sampled_from(["<", "<=", ">", ">=", "==", "!="]), _numbers())
    bands = st.sampled_from(
        ["k <= q", "q - k <= 2", "k - q <= 1", "q == k", "k == 0", "k == T - 1", "q >= 1", "q <= 2"]
    )
    reads = st.sampled_from(["pad[b, k]", "table0[q % 3, k % 3]", "table0[k % 3, q % 3]", "True"])
    return st.recursive(
        st.one_of(compared, bands, bands, reads),
        lambda inner: st.one_of(
            st.builds("({} and {})".format, inner, inner),
            st.builds("({} or {})".format, inner, inner),
            st.builds("not ({})".format, inner),
        ),
        max_leaves=5,
    )


@settings(max_examples=400)
@given(
    expression=_conditions(),
    form=st.sampled_from([(SELF, False), (CROSS, False), (CACHED, True), (LONGER, False)]),
    same=st.booleans(),
    bits=st.integers(0, 511),
    seed=st.integers(0, 1 << 16),
)
def test_no_proof_is_wrong(
    expression: str, form: tuple[tuple[Int, Int], bool], same: bool, bits: int, seed: int
) -> None:
    """Whatever is proven holds at all small sizes and for any vectors."""
    lengths, offset = form
    table = (bits >> np.arange(9) & 1).astype(bool).reshape(3, 3)
    drawn = mask(expression, same=same, **({"table0": table} if "table0" in expression else {}))
    if not leaves_a_key(site(lengths, offset=offset), drawn):
        return
    rng = np.random.default_rng(seed)
    parsed = Mask(expression, {"table0": table} if "table0" in expression else {})
    for rows in range(1, 6):
        for other in range(1, 5):
            keys = {SELF: rows, CROSS: other}.get(lengths, rows + other)
            ids = rng.integers(-2, 3, (2, max(rows, keys)))
            vectors = {
                "pad": rng.random((2, keys)) < 0.5,
                "segment_k": ids[:, :keys],
                "segment_q": ids[:, :rows] if same else rng.integers(-2, 3, (2, rows)),
            }
            read = {n: np.ascontiguousarray(a) for n, a in vectors.items() if n in expression}
            allowed = parsed.evaluate(2, 2, rows, keys, keys - rows if offset else 0, read)
            assert allowed.any(axis=-1).all(), (rows, keys)
