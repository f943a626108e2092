# SPDX-License-Identifier: Apache-2.0
"""Products of queries, or keys, with rows of a relative table, as the scores have them: relative terms before they have roles."""

from __future__ import annotations

from dataclasses import dataclass

from stof.mask.relative_terms.operands import Match
from stof.mask.relative_terms.table import FoundTable
from stof.mask.site import MaskTerm


@dataclass(frozen=True)
class Product:
    """One product of a term.

    Attributes:
        term: that it is a part of.
        factor: by which the term has it, without the term's own scale.
        vectors: the tensor of queries or keys, as the graph multiplies it.
        is_query: whether they are the queries.
        match: how they are made of the site's.
        table: the rows.
    """

    term: MaskTerm
    factor: float
    vectors: str
    is_query: bool
    match: Match
    table: FoundTable
