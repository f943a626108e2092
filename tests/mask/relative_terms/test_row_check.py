# SPDX-License-Identifier: Apache-2.0
"""The check of rows by execution: it takes the index that a graph has, and refuses any other."""

from __future__ import annotations

from dataclasses import replace

import pytest
from zoo_graphs import fill_graph

from stof.attention.expand.expanders import make_working_copy
from stof.attention.subgraphs import find_scopes
from stof.errors import UnsupportedError
from stof.mask.check.checker import MaskChecker
from stof.mask.expression import MaskExpression
from stof.mask.lift import lift
from stof.mask.relative_terms.check import check_rows
from stof.mask.relative_terms.lift import read_products
from stof.mask.relative_terms.products import Product
from stof.mask.site import AttentionSite, LiftedMask

Found = tuple[MaskChecker, AttentionSite, LiftedMask, list[Product]]


def found(name: str) -> Found:
    """The products of a graph's first site."""
    scope = next(iter(find_scopes(make_working_copy(fill_graph(name)))))
    checker = MaskChecker(scope.working.model, scope.symbolic)
    site = scope.sites[0]
    mask = lift(scope.symbolic, site)
    return checker, site, mask, read_products(checker, site, mask, mask.bias[0])


@pytest.fixture(scope="module")
def deberta() -> Found:
    return found("relative/deberta-v1.torchscript.eager")


@pytest.fixture(scope="module")
def grid() -> Found:
    return found("zoo/sam.torchscript.eager")


def check(case: Found, *texts: str) -> None:
    checker, site, mask, products = case
    assert len(products) == len(texts)
    check_rows(checker, site, mask, products, [MaskExpression.parse_integer(text) for text in texts])


def test_the_index_of_the_graph(deberta: Found) -> None:
    check(deberta, "q - k + S", "q - k + S")


@pytest.mark.parametrize(
    "wrong",
    [
        ("q - k + S - 1", "q - k + S"),
        ("q - k + S", "q - k + S + 1"),
        ("k - q + S", "q - k + S"),
        ("q - k + S", "k - q + S"),
        ("q - k + min(S, 17)", "q - k + S"),
        ("q - k + S - max(0, 2 - S)", "q - k + S"),  # wrong for one query and key alone
        ("max(q - k, 0) + S", "q - k + S"),
        ("q - k + 20", "q - k + 20"),
    ],
)
def test_other_indices_are_refused(deberta: Found, wrong: tuple[str, str]) -> None:
    with pytest.raises(UnsupportedError, match="the row that is read at"):
        check(deberta, *wrong)


def test_rows_and_columns_of_a_grid(grid: Found) -> None:
    texts = ["q // 5 - k // 5 + 4", "q % 5 - k % 5 + 4"]
    products = grid[3]
    columns_first = "%" in str(products[0].table.row) or "mod" in str(products[0].table.row)
    right = texts[::-1] if columns_first else texts
    check(grid, *right)
    with pytest.raises(UnsupportedError, match="the row that is read at"):
        check(grid, *right[::-1])


def test_a_wrong_factor_is_refused(deberta: Found) -> None:
    checker, site, mask, products = deberta
    wrong = [replace(products[0], factor=products[0].factor * 1.01), *products[1:]]
    with pytest.raises(UnsupportedError, match="that is read at"):
        check((checker, site, mask, wrong), "q - k + S", "q - k + S")


def test_pairs_that_the_mask_forbids_do_not_count(deberta: Found) -> None:
    checker, site, mask, products = deberta
    causal = replace(mask, expression=MaskExpression.parse("k <= q"), operands=())
    texts = ["max(q - k, 0) + S"] * 2
    check_rows(checker, site, causal, products, [MaskExpression.parse_integer(text) for text in texts])
