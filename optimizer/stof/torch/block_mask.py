# SPDX-License-Identifier: Apache-2.0
"""Masks as the operator takes them: a text and its tables, also from a FlexAttention ``BlockMask``."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch.nn.attention.flex_attention import BlockMask as FlexBlockMask
from torch.nn.attention.flex_attention import create_mask

from stof.errors import ArgumentError, StofError, UnsupportedError, shown
from stof.mask.expression import MaskExpression
from stof.mask.expression_nodes import Binary, Constant, Lookup, Name, Node, join
from stof.runtime.library import LibraryError, Mask
from stof.torch.trace_mask_mod import MOST_TABLE_ELEMENTS, read_tensor, trace_mask_mod


@dataclass(frozen=True)
class MaskWithTables:
    """A mask expression and the tables that it reads, as tensors on the CPU.

    Attributes:
        text: the expression (docs/reference/mask-format.md); empty where every pair is allowed.
        tables: ``table0``, ``table1``, ... by name.
        note: why a table of pairs stands in the place of the mask function; empty where it does not.
    """

    text: str
    tables: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""


_converted: WeakKeyDictionary[Any, MaskWithTables] = WeakKeyDictionary()


def to_mask(mask: Any) -> tuple[str, Mapping[str, Any]]:
    """The text and the tables of whatever a caller may give as a mask.

    Raises:
        ArgumentError: for another type.
        UnsupportedError: for a BlockMask without a translation.
    """
    if mask is None:
        return "", {}
    if isinstance(mask, str):
        return mask, {}
    if isinstance(mask, MaskWithTables):
        return mask.text, mask.tables
    if isinstance(mask, FlexBlockMask):
        translation = from_block_mask(mask)
        return translation.text, translation.tables
    raise ArgumentError(f"mask is a {type(mask).__name__}, expected a mask expression, a BlockMask or None")


def from_block_mask(block_mask: Any) -> MaskWithTables:
    """The mask of a FlexAttention ``BlockMask``: its mask function as an expression, its blocks as a table where they say more.

    Tensors that the function captures are read once, at the first call for a BlockMask. A function that has no expression
    becomes a table of all pairs, of the BlockMask's own lengths; ``note`` then says why.

    Raises:
        UnsupportedError: where such a table would have more than 2^28 elements, or cannot be computed.
    """
    if not isinstance(block_mask, FlexBlockMask):
        raise ArgumentError(f"block_mask is a {type(block_mask).__name__}, expected a FlexAttention BlockMask")
    translation = _converted.get(block_mask)
    if translation is None:
        translation = _translate(block_mask)
        _converted[block_mask] = translation
    return translation


def _translate_now(block_mask: Any) -> MaskWithTables:
    blocks = _Blocks(block_mask)
    try:
        expression, tables = trace_mask_mod(block_mask.mask_mod, block_mask.kv_indices.device)
        MaskExpression.parse(expression.text, tables)
        agrees = blocks.agree_with(expression, tables)
    except StofError as error:
        return _with_table(block_mask, blocks, error)
    if not agrees:
        expression, tables = blocks.restrict(expression, tables)
    return _with_tensors(expression, tables)


def _with_tensors(expression: MaskExpression, tables: Mapping[str, np.ndarray], note: str = "") -> MaskWithTables:
    read = {n: torch.from_numpy(np.array(tables[n])) for n in tables if n in expression.tables}
    return MaskWithTables(expression.text, read, note)


def _with_table(block_mask: Any, blocks: _Blocks, reason: StofError) -> MaskWithTables:
    """The mask as a table of all pairs."""
    shape = (*blocks.listed.shape[:2], *block_mask.seq_lengths)
    if math.prod(shape) > MOST_TABLE_ELEMENTS:
        raise UnsupportedError(
            f"the BlockMask cannot be translated: {reason}; a table of its {math.prod(shape)} pairs would exceed 2^28 elements"
        )
    device = block_mask.kv_indices.device
    try:
        pairs = read_tensor(create_mask(block_mask.mask_mod, *shape, device=device))
    except Exception as error:  # whatever the user's function and PyTorch raise
        raise UnsupportedError(
            f"the BlockMask cannot be translated: {reason}; nor can a table of its pairs be computed: {shown(error, 500)}"
        ) from error
    q, k = (np.arange(n) // size for n, size in zip(shape[2:], block_mask.BLOCK_SIZE, strict=True))
    blocks_of_pairs = np.ix_(range(shape[0]), range(shape[1]), q, k)
    allowed = (pairs & blocks.listed[blocks_of_pairs]) | blocks.full[blocks_of_pairs]
    axes = [a for a in range(2) if shape[a] > 1]
    table = np.ascontiguousarray(allowed.reshape([shape[a] for a in axes] + list(shape[2:])))
    indices = (*(Name("bh"[a]) for a in axes), Name("q"), Name("k"))
    return _with_tensors(MaskExpression(Lookup("table0", indices)), {"table0": table}, str(reason))


_REASON = "a BlockMask is translated outside of compiled functions: call stof.torch.from_block_mask(block_mask) before"
_has_reason = "reason" in inspect.signature(torch.compiler.disable).parameters  # since PyTorch 2.8
# A compiled function reads what is known of a BlockMask, and cannot trace this.
_translate = torch.compiler.disable(_translate_now, **({"reason": _REASON} if _has_reason else {}))


class _Blocks:
    """The blocks that a BlockMask lists: partial ones, to which its function applies, and full ones, to which it does not."""

    def __init__(self, block_mask: Any) -> None:
        self.size = tuple(block_mask.BLOCK_SIZE)
        self.lengths = tuple(block_mask.seq_lengths)
        counts = tuple(-(-n // size) for n, size in zip(self.lengths, self.size, strict=True))
        self.full = _mark_listed(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, counts)
        partial = _mark_listed(block_mask.kv_num_blocks, block_mask.kv_indices, counts)
        if self.full.size == 0:
            self.full = np.zeros_like(partial)
        self.listed = partial | self.full

    def agree_with(self, expression: MaskExpression, tables: Mapping[str, np.ndarray]) -> bool:
        """Whether the expression allows what it allows within the listed blocks, and all of the full ones."""
        B, H = self.listed.shape[:2]
        if (B == 1 and "b" in expression.reads) or (H == 1 and "h" in expression.reads):
            return bool(self.listed.all() and not self.full.any())  # the blocks of one batch or head serve all
        (m, n), (S, T) = self.size, self.lengths
        if n % 32:
            return False
        try:
            tiles = Mask(expression.text, tables).block_mask(B, H, S, T, m, n)
        except LibraryError as error:
            raise UnsupportedError(str(error)) from error
        allowed, full = np.zeros_like(self.listed), np.zeros_like(self.listed)
        for b, h in np.ndindex(B, H):
            table = tiles.layout[b % tiles.layout.shape[0], h % tiles.layout.shape[1]]
            for row in range(tiles.rows):
                at = table * tiles.rows + row
                first, middle, last = tiles.row_ptr[at], tiles.full_begin[at], tiles.row_ptr[at + 1]
                allowed[b, h, row, tiles.key_tile[first:last]] = True
                full[b, h, row, tiles.key_tile[middle:last]] = True
        # The library's full tiles end within the keys; FlexAttention lists none beyond them as full.
        return bool((allowed <= self.listed).all() and (self.full <= full).all())

    def restrict(
        self, expression: MaskExpression, tables: Mapping[str, np.ndarray]
    ) -> tuple[MaskExpression, dict[str, np.ndarray]]:
        """The expression within the listed blocks, and all pairs of the full ones."""
        result_tables = dict(tables)
        listed = self._lookup(self.listed, result_tables)
        conditions = [listed] if expression.allows_all else [listed, expression.root]
        root = join("and", conditions)
        if self.full.any() and not expression.allows_all:
            root = join("or", [self._lookup(self.full, result_tables), root])
        return MaskExpression(root), result_tables

    def _lookup(self, blocks: np.ndarray, tables: dict[str, np.ndarray]) -> Node:
        """An element of a table of blocks, which is added to the tables."""
        axes = [a for a in range(2) if blocks.shape[a] > 1]
        name = f"table{len(tables)}"
        tables[name] = np.ascontiguousarray(blocks.reshape([blocks.shape[a] for a in axes] + list(blocks.shape[2:])))
        q, k = (
            Binary("//", Name(n), Constant(size)) if size > 1 else Name(n)
            for n, size in zip("qk", self.size, strict=True)
        )
        return Lookup(name, (*(Name("bh"[a]) for a in axes), q, k))


def _mark_listed(numbers: Any, indices: Any, counts: tuple[int, ...]) -> np.ndarray:
    """The blocks [B, H, rows, columns] that lists of key blocks name; empty where there are no lists."""
    if numbers is None or indices is None:
        return np.zeros((0,), bool)
    block_counts, columns = read_tensor(numbers), read_tensor(indices)
    B, H = block_counts.shape[:2]
    listed = np.zeros((B, H, counts[0], counts[1] + 1), bool)  # the last column takes what is listed beyond the keys
    rows = min(counts[0], block_counts.shape[2])
    chosen = np.arange(columns.shape[3]) < block_counts[:, :, :rows, None]
    b, h, row, entry = np.nonzero(chosen)
    listed[b, h, row, np.clip(columns[b, h, row, entry], 0, counts[1])] = True
    return listed[..., : counts[1]]
