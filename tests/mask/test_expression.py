# SPDX-License-Identifier: Apache-2.0
"""Mask expressions as values: Python's parser and printer against the library's, and evaluation."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from generated.families import FAMILIES, draw
from stof.graph.node_builder import Builder
from stof.mask.expression import CAUSAL, EVERY_PAIR, PADDING, MaskExpression
from stof.mask.expression_nodes import Binary, Constant, K, Name, Q
from stof.mask.expression_parser import MaskSyntaxError
from stof.mask.families import describe, picture
from stof.mask.to_onnx import ScoreSizes
from stof.runtime.library import LibraryError, Mask

ROOT = Path(__file__).resolve().parent.parent.parent
TABLES = {
    "table0": np.arange(9).reshape(3, 3) % 2 == 0,
    "table1": np.array([4, -2, 7, 0, 1]),
    "table12": (np.arange(2 * 3 * 4).reshape(1, 2, 3, 4) % 5).astype(np.uint8),
}
# Canonical, and of every kind that the tests in other folders hold.
CANONICAL = [
    "k <= q",
    "abs(q - k) <= 64",
    "k <= q and q - k <= 511 and pad[b, k]",
    "abs(q - k) <= 4 or k <= 15 or q <= 15",
    "k <= q - 2 or q - k <= -3",
    "(q - k) % 5 != 0",
    "q // 16 == k // 16 and (pad[b, k] or k == q)",
    "not (k <= q and pad[b, k])",
    "not pad[b, k]",
    "k + 1 <= lengths[b]",
    "segment_q[b, q - P] == segment_k[b, k]",
    "table0[q % 3, k % 3] and not table0[k % 3, q % 3]",
    "table1[abs(q - k) % 5] <= 3 + h",
    "table12[b, h, q % 3, k % 4] == 2",
    "min(q, k) * -2 <= max(q, T - 1) - S // 2",
    "-(q * k) <= -q // 3",
    "(q - k) // -3 < 2 * (q // 2) * (k // 2)",
    "q - (k - 1) > 0 and (k <= q and pad[b, k])",
    "True and k <= q or False",
    "7 * (q // 128) * (k // 128) % 61 < 7",
]
REFUSED = [
    *[
        "q <",
        "q",
        "k <= q <= T",
        "q + (k <= q)",
        "not q <= not k",
        "-pad[b, k]",
        "abs(k <= q)",
        "min(q) <= k",
        "x[b, k]",
    ],
    *["q // k == 0", "q % 0 == 0", "q // (1 - 1) == 0", "pad[b]", "pad[k <= q, k]", "lengths[b, k] == 1", "table7[q]"],
    *[
        "table0[q]",
        "table0[q, k] == 1",
        "table1[q]",
        "9007199254740993 <= q",
        "1" * 5000 + " <= q",
        "k<=q;",
        "k <= q\n",
    ],
    *[
        "_ <= q",
        "q1 <= q",
        "q <= é",
        "0x1 <= q",
        "1.5 <= q",
        "1_0 <= q",
        "q ** 2 <= k",
        "q / 2 <= k",
        "+q <= k",
        "(k <= q",
    ],
    *[
        "k <= q)",
        "pad[b, k",
        "pad b",
        "table0[q % 3, k % 3, 0, 0, 0]",
        "orq <= k",
        "not",
        "q if q else k",
        "True == True",
    ],
]


def known_texts() -> list[str]:
    """The expressions of the zoo's table and of the stored results."""
    found = set(re.findall(r"`([^`\n]+)`", (ROOT / "docs/reference/zoo.md").read_text()))
    for path in (ROOT / "docs/results").rglob("*.json"):
        pending = [json.loads(path.read_text())]
        while pending:
            value = pending.pop()
            if isinstance(value, dict):
                found |= {value[k] for k in ("mask", "expression") if isinstance(value.get(k), str)}
                pending += value.values()
            elif isinstance(value, list):
                pending += value
    return sorted(found)


def library_text(text: str) -> str | None:
    """The text that the library prints for a text; None where it refuses it."""
    try:
        return str(Mask(text, TABLES))
    except LibraryError:
        return None


def own_text(text: str) -> str | None:
    """The same by Python's parser and printer."""
    try:
        return str(MaskExpression.parse(text, TABLES))
    except MaskSyntaxError:
        return None


def integer(rng: random.Random, depth: int) -> str:
    """A random integer of the grammar, now and then not quite of it."""
    if depth == 0 or rng.random() < 0.3:
        return rng.choice(
            [*"bhqkSTP012", "64", "-3", "lengths[b]", "segment_q[b, q - P]", "segment_k[b,k]", "table1[h]"]
        )
    inner = integer(rng, depth - 1)
    match rng.randrange(7):
        case 0 | 1:
            return f"{inner} {rng.choice('+-*')} {integer(rng, depth - 1)}"
        case 2:
            return f"{inner} {rng.choice(['//', '%'])} {rng.choice(['2', '-3', '(4)', '- -5', '0', 'q'])}"
        case 3:
            return f"({inner})"
        case 4:
            return f"-{inner}"
        case 5:
            return f"abs({inner})"
    return rng.choice([f"min({inner},{integer(rng, depth - 1)})", f"table12[b, h, {inner} % 3, k % 4]"])


def condition(rng: random.Random, depth: int) -> str:
    """A random condition of the grammar, now and then not quite of it."""
    if depth == 0 or rng.random() < 0.2:
        compared = f"{integer(rng, 2)} {rng.choice(['<', '<=', '>', '>=', '==', '!='])} {integer(rng, 2)}"
        return rng.choice(
            ["pad[b, k]", "True", "False", "k <= q", "table0[q % 3, k % 3]", compared, compared, compared]
        )
    inner = condition(rng, depth - 1)
    match rng.randrange(4):
        case 0 | 1:
            return f"{inner} {rng.choice(['and', 'or'])} {condition(rng, depth - 1)}"
        case 2:
            return f"({inner})"
    return f"not {inner}"


_SCRAPS = [
    *[
        "b",
        "q",
        "k",
        "T",
        "0",
        "7",
        "-",
        "and",
        "or",
        "not",
        "<",
        "<=",
        "==",
        "=",
        "!",
        "+",
        "*",
        "/",
        "//",
        "%",
        "abs(",
        "min(",
    ],
    *[
        ",",
        "(",
        ")",
        "[",
        "]",
        "pad[b, k]",
        "pad",
        "table0",
        "table2[q]",
        " ",
        "\t",
        "\n",
        ".",
        "x",
        "_",
        "é",
        "True",
        "",
    ],
]


def mutate(rng: random.Random, text: str) -> str:
    """A text in which a few characters are lost or replaced."""
    for _ in range(rng.randrange(1, 3)):
        begin = rng.randrange(len(text) + 1)
        text = text[:begin] + rng.choice(_SCRAPS) + text[begin + rng.randrange(3) :]
    return text


@pytest.mark.parametrize("text", CANONICAL)
def test_canonical_texts_stay_as_they_are(text: str) -> None:
    assert own_text(text) == text == library_text(text)


@pytest.mark.parametrize("text", REFUSED)
def test_other_texts_are_refused(text: str) -> None:
    assert own_text(text) is None
    assert library_text(text) is None


def test_every_known_expression_is_read_and_printed_as_the_library_does() -> None:
    texts = [t for t in known_texts() if "table" not in t]
    taken = [t for t in texts if own_text(t) is not None]
    assert len(taken) > 50
    for text in texts:
        assert own_text(text) == library_text(text), text


def test_tables_that_are_not_given_may_be_any() -> None:
    taken = [t for t in known_texts() if "table" in t]
    assert len(taken) > 3
    for text in taken:
        assert MaskExpression.parse(text).text == text
    assert MaskExpression.parse("table0[q] == table0[table0[k]]").tables == {"table0"}
    for text in ("table0[q] and table0[k] == 1", "table0[q] and table0[q, k]", "table0[table0[q, k]]"):
        with pytest.raises(MaskSyntaxError):
            MaskExpression.parse(text)


@pytest.mark.parametrize("seed", range(4))
def test_both_parsers_take_the_same_texts_and_print_them_alike(seed: int) -> None:
    rng = random.Random(seed)
    taken = 0
    for _ in range(1500):
        text = condition(rng, rng.randrange(5))
        if rng.random() < 0.5:
            text = mutate(rng, text)
        found = own_text(text)
        assert found == library_text(text), text
        taken += found is not None
        if found is not None:
            assert own_text(found) == found, text
    assert 300 < taken < 1400


@pytest.mark.parametrize("family", FAMILIES)
def test_drawn_masks_of_every_family_are_read_alike(family: str) -> None:
    rng = random.Random(family)
    for _ in range(20):
        mask = draw(family, rng)
        text = re.sub(r"\bseg\[b, (\w)\]", r"segment_\1[b, \1]", str(mask.expr))
        names = {name: f"table{i}" for i, name in enumerate(mask.tables)}
        for name, table in names.items():
            text = re.sub(rf"\b{name}\[", f"{table}[", text)
        tables = {names[n]: np.ascontiguousarray(a) for n, a in mask.tables.items()}
        assert str(MaskExpression.parse(text, tables)) == str(Mask(text, tables))


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        *[("(" * n + "q<k" + ")" * n, n <= 64) for n in (64, 65)],
        *[("-" * n + "q < k", n <= 64) for n in (64, 65)],
        *[("not " * n + "q < k", n <= 64) for n in (64, 65)],
        *[("abs(" * n + "q" + ")" * n + "< k", n <= 64) for n in (64, 65)],
        *[(" + ".join(["q"] * n) + " < k", 2 * n + 1 <= 4096) for n in (2047, 2048)],
        *[(" and ".join(["k < q"] * n), 4 * n - 1 <= 4096) for n in (1024, 1025)],
        *[("q < k" + " " * (n - 5), n <= 65536) for n in (65536, 65537)],
    ],
    ids=lambda x: f"{len(x)}" if isinstance(x, str) else str(x),
)
def test_limits(text: str, fits: bool) -> None:
    assert (own_text(text) is not None) == fits == (library_text(text) is not None)


def test_messages_name_the_column() -> None:
    for text, words in {
        "k <= ": "column 6: unexpected end",
        "abs(q - k <= 4": "column 11: expected ')'",
        "k <= q and q": "column 13: an integer where a condition is expected",
        "depth[b, k]": "column 6: unknown name 'depth'",
    }.items():
        with pytest.raises(MaskSyntaxError, match=re.escape(words)):
            MaskExpression.parse(text)


def arrays(rng: np.random.Generator, sizes: dict[str, int]) -> dict[str, np.ndarray]:
    """Run-time operands of these sizes."""
    B, S, T = sizes["B"], sizes["S"], sizes["T"]
    return {
        "pad": rng.random((B, T)) < 0.6,
        "segment_q": rng.integers(-2, 3, (B, S)),
        "segment_k": rng.integers(-2, 3, (1, T)),
        "lengths": rng.integers(0, T + 1, B),
    }


def evaluated(expression: MaskExpression, sizes: dict[str, int], operands: dict[str, np.ndarray]) -> np.ndarray:
    """The expression by NumPy, as booleans [B, H, S, T]."""
    shape = tuple(sizes[n] for n in "BHST")
    indices = dict(zip("bhqk", np.indices(shape, sparse=True), strict=True))
    indices["q"] = indices["q"] + sizes["P"]
    values = {**indices, **{n: sizes[n] for n in "STP"}, **operands, **TABLES}
    return np.broadcast_to(expression.evaluate(values), shape)


def drawn(count: int, seed: int) -> Iterator[tuple[str, dict[str, int], dict[str, np.ndarray], np.ndarray]]:
    """Expressions that the library evaluates at small random sizes, with what they read and what they give."""
    rng, numbers = random.Random(seed), np.random.default_rng(seed)
    while count:
        sizes = {n: rng.randrange(1, most) for n, most in {"B": 4, "H": 3, "S": 6, "T": 9, "P": 5}.items()}
        operands = arrays(numbers, sizes)
        text = condition(rng, 3)
        try:
            mask = Mask(text, TABLES)
            given = {n: np.ascontiguousarray(a) for n, a in operands.items() if n in MaskExpression.parse(text).reads}
            wanted = mask.evaluate(*(sizes[n] for n in "BHSTP"), given)
        except LibraryError:
            continue
        count -= 1
        yield text, sizes, operands, wanted


def test_evaluation_agrees_with_the_library() -> None:
    for text, sizes, operands, wanted in drawn(400, seed=7):
        np.testing.assert_array_equal(evaluated(MaskExpression.parse(text), sizes, operands), wanted, text)


def computed(
    text: str, sizes: dict[str, int], operands: dict[str, np.ndarray], *, tables_have_rank: bool = False
) -> np.ndarray:
    """The mask by ONNX nodes, as it broadcasts to [B, H, S, T]."""
    expression = MaskExpression.parse(text, TABLES)
    builder = Builder(18, "m")
    scalars = ScoreSizes(*(builder.constant(sizes[n]) for n in "BHSTP"))
    given = {n: a for n, a in {**operands, **TABLES}.items() if n in expression.reads}
    output = expression.to_onnx(builder, scalars, {n: n for n in given}, tables_have_rank=tables_have_rank)
    inputs = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape) for n, a in given.items()
    ]
    outputs = [helper.make_tensor_value_info(output, TensorProto.BOOL, None)]
    graph = helper.make_graph(builder.nodes, "g", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    (found,) = ReferenceEvaluator(model).run(None, given)
    return np.asarray(found)


def test_nodes_compute_what_the_library_does() -> None:
    for i, (text, sizes, operands, wanted) in enumerate(drawn(60, seed=8)):
        found = computed(text, sizes, operands, tables_have_rank=i % 2 == 1)
        np.testing.assert_array_equal(np.broadcast_to(found, wanted.shape), wanted, text)


@pytest.mark.parametrize(
    "text",
    [
        "table0[q % 3, k % 3]",
        "table0[1, k % 3] and not table0[q % 3, 2]",
        "table0[k % 3, q % 3]",
        "table0[h % 3, k % 3] or table1[q % 5] > 3",
        "table12[b, h, q % 3, k % 4] != 0",
        "table12[0, h, (q + k) % 3, 1] == 2",
        "table1[(q - P) // 2 % 5] <= k",
        "table1[S % 5] <= k",
    ],
)
def test_nodes_of_tables_that_keep_their_axes(text: str) -> None:
    sizes = {"B": 3, "H": 2, "S": 5, "T": 7, "P": 4}
    wanted = Mask(text, TABLES).evaluate(*(sizes[n] for n in "BHSTP"))
    for tables_have_rank in (False, True):
        found = computed(text, sizes, {}, tables_have_rank=tables_have_rank)
        np.testing.assert_array_equal(np.broadcast_to(found, wanted.shape), wanted, text)


def test_the_static_part_allows_whatever_the_expression_may_allow() -> None:
    for text, sizes, operands, wanted in drawn(300, seed=9):
        static = MaskExpression.parse(text).static_part()
        assert not static.vectors
        if not ({"or", "not"} & set(text.split())):
            assert (evaluated(static, sizes, operands) | ~wanted).all(), text
    for text, part in {
        "k <= q and pad[b, k]": "k <= q",
        "pad[b, k]": "",
        "k <= q and (q <= 3 or segment_q[b, q] == segment_k[b, k])": "k <= q",
        "(k <= q or k <= 3 and pad[b, k]) and not pad[b, k]": "k <= q or k <= 3",
        "table0[segment_k[b, k], k]": "",
        "table0[q, k] and k <= lengths[b]": "table0[q, k]",
    }.items():
        assert MaskExpression.parse(text).static_part().text == part


def test_what_an_expression_reads() -> None:
    mask = MaskExpression.parse("abs(q - k) <= 64 and (pad[b, k] or table0[h % 12, k // -64]) and k < T + 3 - 3")
    assert mask.reads == {"q", "k", "b", "h", "T", "pad", "table0"}
    assert (mask.vectors, mask.tables) == ({"pad"}, {"table0"})
    assert mask.literals == {64, 12, 3}
    assert mask.node_count == 26
    assert len(mask.conjuncts) == 3
    assert MaskExpression.parse("not pad[b, k]").forbids_padding
    assert not MaskExpression.parse("pad[b, k] and not k <= q").forbids_padding
    assert MaskExpression.parse("table0[segment_q[b, q] + 1, k]").indexes_table("segment_q")
    assert not MaskExpression.parse("table0[q, k] and segment_q[b, q] == 1").indexes_table("segment_q")


@pytest.mark.parametrize(
    ("text", "window", "family"),
    [
        ("", (-1, -1), "dense"),
        ("True", (-1, -1), "dense"),
        ("pad[b, k]", (-1, -1), "dense + padding"),
        ("k <= q", (-1, 0), "causal"),
        ("k <= q and pad[b, k]", (-1, 0), "causal + padding"),
        ("q <= k", (0, -1), "window(0, -1)"),
        ("q == k", (0, 0), "causal window(0, 0)"),
        ("abs(q - k) <= 64", (64, 64), "window(64, 64)"),
        ("k <= q and q - k <= 511", (511, 0), "causal window(511, 0)"),
        ("k - q <= 3 and q - k <= 5 and pad[b, k]", (5, 3), "window(5, 3) + padding"),
        ("pad[b, k] or k == q", None, "general"),
        ("not pad[b, k]", None, "general"),
        ("k <= q - 1", None, "general"),
        ("abs(q - k) <= 4 or k <= 3 or q <= 3", None, "window + global"),
        ("abs(q - k) <= 4 or table0[q, k]", None, "table"),
        ("k <= q and segment_q[b, q] == segment_k[b, k]", None, "documents"),
    ],
)
def test_windows_and_families(text: str, window: tuple[int, int] | None, family: str) -> None:
    mask = MaskExpression.parse(text)
    assert mask.window() == window
    assert describe(mask) == family


def test_every_pair_is_one_value() -> None:
    assert MaskExpression.parse("") == MaskExpression.parse(" True\t") == EVERY_PAIR == MaskExpression()
    assert (EVERY_PAIR.text, str(EVERY_PAIR), EVERY_PAIR.conjuncts) == ("", "True", ())
    assert EVERY_PAIR.allows_all
    assert not CAUSAL.allows_all
    assert len({CAUSAL, MaskExpression.parse("k<=q"), MaskExpression.parse("(k) <= (q)")}) == 1


def test_both() -> None:
    either = MaskExpression.parse("k <= q or k <= 3")
    assert (either & PADDING).text == "(k <= q or k <= 3) and pad[b, k]"
    assert (EVERY_PAIR & PADDING) == (PADDING & EVERY_PAIR) == PADDING
    assert (CAUSAL & PADDING & either).conjuncts == (*CAUSAL.conjuncts, *PADDING.conjuncts, *either.conjuncts)
    assert EVERY_PAIR & EVERY_PAIR == EVERY_PAIR


def test_substitution() -> None:
    mask = MaskExpression.parse("k <= q and -k // 2 != T - 2 and pad[b, k]")
    assert mask.substitute({"k": Q}).text == "q <= q and -q // 2 != T - 2 and pad[b, q]"
    last = Binary("-", Name("T"), Constant(1))
    assert mask.substitute({"k": last, "q": K}).text == "T - 1 <= k and -(T - 1) // 2 != T - 2 and pad[b, T - 1]"
    assert mask.substitute({"k": Constant(3)}).text == "3 <= q and -3 // 2 != T - 2 and pad[b, 3]"


def test_lengths_as_a_number() -> None:
    mask = MaskExpression.parse("S + k <= lengths[b] + q and pad[b, k] and segment_q[b, q] < max(lengths[b], 3)")
    found = mask.with_lengths(40)
    assert found.text == "S + k <= 40 + q and pad[b, k] and segment_q[b, q] < max(40, 3)"
    assert MaskExpression.parse("k <= q").with_lengths(40) == MaskExpression.parse("k <= q")


def test_a_picture_leaves_out_padding() -> None:
    for text in ("k <= q", "k <= q and pad[b, k]", "not pad[b, k] and k <= q"):
        assert picture(MaskExpression.parse(text))[:2] == ["+...............", "#+.............."]
