# SPDX-License-Identifier: Apache-2.0
"""The roles of StofAttention's operands for relative positions (docs/reference/operators.md)."""

from __future__ import annotations

from stof.runtime.library import LibraryError, op_limits

RELATIVE_BIAS = "relative_bias"  # a bias by distance
RELATIVE_BIAS_FACTOR = "relative_bias_factor"  # a number of each query that multiplies it
# Relative tables: their rows meet queries, keys or weights.
RELATIVE_KEY, RELATIVE_KEY1 = "relative_key", "relative_key1"
RELATIVE_QUERY = "relative_query"
RELATIVE_VALUE = "relative_value"

TABLES_OF_QUERIES = (RELATIVE_KEY, RELATIVE_KEY1)
# In the order in which limits count those that a target takes.
TABLE_ROLES = (*TABLES_OF_QUERIES, RELATIVE_QUERY, RELATIVE_VALUE)
_MOST_VALUE_ROWS = "most_relative_value_rows"


def most_value_rows() -> int:
    """The most rows of a table that weights meet, of all targets.

    Raises:
        LibraryError: without a library, and for one of an earlier version, which does not state it.
    """
    targets = op_limits()["StofAttention"]["targets"].values()
    stated = [n[_MOST_VALUE_ROWS] for t in targets for n in t.get("types", {}).values() if _MOST_VALUE_ROWS in n]
    if not stated:
        raise LibraryError(f"the plugin library does not state {_MOST_VALUE_ROWS}: it is of an earlier version of stof")
    return int(max(stated))
