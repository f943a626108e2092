# SPDX-License-Identifier: Apache-2.0
"""Masks that the user states (``--mask``, ``--plan``): bound to the graph's tensors like lifted ones, then checked."""

from __future__ import annotations

import re
from dataclasses import replace

from stof.errors import ArgumentError, UnsupportedError, VerifyError
from stof.mask.check.checker import MaskChecker
from stof.mask.families import describe
from stof.mask.lift import empty_rows, lift
from stof.runtime.library import LibraryError, Mask
from stof.site import AttentionSite, LiftedMask, RuntimeOperand, tables_of
from stof.symbolic import Symbolic

_ROLE = re.compile(r"\b(pad|segment_q|segment_k|lengths|table\d+)\s*\[")


def state(symbolic: Symbolic, site: AttentionSite, expression: str, checker: MaskChecker) -> LiftedMask:
    """A stated mask with the operands that it reads, checked against the graph by execution.

    Operands, tables and biases are those of the mask as it is lifted. Where that fails, ``pad`` is the one model input
    [B, T] that the site's mask depends on.

    Raises:
        ArgumentError: when the expression does not parse or reads what the graph's mask does not.
        VerifyError: when it is not the graph's mask, with the first pair that differs.
    """
    what = f"the mask {expression!r} stated for site {site.name!r}"
    try:
        lifted: LiftedMask | None = lift(symbolic, site)
    except UnsupportedError:
        lifted = None
    roles = sorted(set(_ROLE.findall(expression)))
    mask = replace(
        lifted or LiftedMask(""),
        expression=expression,
        operands=tuple(_operand(site, role, lifted, checker, what) for role in roles if not role.startswith("table")),
        tables=tuple(t for t in (lifted.tables if lifted else ()) if t[0] in roles),
    )
    if missing := [r for r in roles if r.startswith("table") and r not in {t[0] for t in mask.tables}]:
        raise ArgumentError(f"{what} reads {missing[0]}, but the graph's mask has no such table")
    try:
        mask = replace(mask, expression=str(Mask(expression, tables_of(mask))))
    except LibraryError as error:
        raise ArgumentError(f"{what} is refused: {error}; docs/reference/mask-format.md has the grammar") from None
    try:
        mask = _confirmed(site, mask, checker, opaque=lifted is None or any(t in mask.bias for t in site.terms))
    except UnsupportedError as error:
        raise VerifyError(f"{what} is not the graph's: {error}. Nothing was written") from error
    return replace(mask, family=f"{describe(mask.expression)}, stated")


def _confirmed(site: AttentionSite, mask: LiftedMask, checker: MaskChecker, *, opaque: bool) -> LiftedMask:
    """The mask, checked. A term that could not be lifted counts as a bias, unless running it shows that it only masks."""
    if opaque:
        # Lifting saw too little of the values that forbid.
        mask = replace(mask, empty_rows=empty_rows(site, checker.fills(site, mask), []))
    if opaque and mask.bias:
        try:
            without = replace(mask, bias=(), notes=())
            checker.check(site, without, stated=True)
        except UnsupportedError as error:
            if "adds" not in str(error):
                raise
        else:
            return without
    checker.check(site, mask, stated=True)
    return mask


def _operand(
    site: AttentionSite, role: str, lifted: LiftedMask | None, checker: MaskChecker, what: str
) -> RuntimeOperand:
    for operand in lifted.operands if lifted else ():
        if operand.role == role:
            return operand
    found = checker.runner.vectors(site)
    if role != "pad" or len(found) != 1:
        named = ", ".join(repr(f) for f in found) or "none"
        raise ArgumentError(
            f"{what} reads {role}, but the graph's mask has no such operand: the model inputs [B, T] that it depends on "
            f"are {named}, expected exactly one, and role pad"
        )
    return RuntimeOperand(role, found[0])
