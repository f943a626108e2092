# SPDX-License-Identifier: Apache-2.0
"""The clause ``choose-pages`` of --sparsify: how many pages of a KV cache a decode step attends, and in which layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stof.arguments.slices import Slice
from stof.sparsify.clause_text import ClauseFields

PAGES = "choose-pages"
PAGE_ROWS = (16, 32, 64, 128)
_DEFAULT_ROWS = 16


@dataclass(frozen=True)
class PagesClause:
    """Choose pages, and the layers that do it.

    Attributes:
        pages: the operator's ``chosen_pages``, of each KV head.
        rows: of a page, its ``page_rows``.
        layers: those that it is for; empty: all.
        dense_layers: those that attend every page.
    """

    pages: int
    rows: int = _DEFAULT_ROWS
    layers: tuple[Slice, ...] = ()
    dense_layers: tuple[Slice, ...] = ()


def read_pages(clause: str, items: Sequence[str]) -> PagesClause:
    """Reads the fields of a clause.

    Raises:
        ArgumentError: naming the key and the value, and what was expected.
    """
    fields = ClauseFields(clause, items, ("pages", "rows", "layers", "dense_layers"))
    rows = fields.number("rows", 0, _DEFAULT_ROWS, 1 << 22)
    if rows not in PAGE_ROWS:
        raise fields.error("rows", "16, 32, 64 or 128")
    return PagesClause(fields.number("pages", 1), rows, fields.slices("layers"), fields.slices("dense_layers"))
