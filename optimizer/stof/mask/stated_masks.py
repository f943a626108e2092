# SPDX-License-Identifier: Apache-2.0
"""Masks that the user states (``--mask``, ``--plan``): bound to the graph's tensors like lifted ones, then checked."""

from __future__ import annotations

from dataclasses import replace

from stof.errors import ArgumentError, UnsupportedError, VerifyError
from stof.mask.check.checker import MaskChecker
from stof.mask.empty_rows.from_fills import policy_from_fills
from stof.mask.evaluate import BiasedMaskError
from stof.mask.expression import MaskExpression
from stof.mask.expression_parser import MaskSyntaxError
from stof.mask.families import describe
from stof.mask.lift import lift
from stof.mask.site import AttentionSite, LiftedMask, RuntimeOperand, tables_of
from stof.symbolic import Symbolic


def state(symbolic: Symbolic, site: AttentionSite, text: str, checker: MaskChecker) -> LiftedMask:
    """A stated mask with the operands that it reads, checked against the graph by execution.

    Operands, tables and biases are those of the mask as it is lifted. Where that fails, ``pad`` is the one model input
    [B, T] that the site's mask depends on.

    Raises:
        ArgumentError: when the text does not parse or reads what the graph's mask does not.
        VerifyError: when it is not the graph's mask, with the first pair that differs.
    """
    what = f"the mask {text!r} stated for site {site.name!r}"
    expression = _parse(text, None, what)
    try:
        lifted: LiftedMask | None = lift(symbolic, site)
    except UnsupportedError:
        lifted = None
    mask = replace(
        lifted or LiftedMask(),
        expression=expression,
        operands=tuple(_operand(site, role, lifted, checker, what) for role in sorted(expression.vectors)),
        tables=tuple(t for t in (lifted.tables if lifted else ()) if t[0] in expression.tables),
    )
    if missing := sorted(expression.tables - {t[0] for t in mask.tables}):
        raise ArgumentError(f"{what} reads {missing[0]}, but the graph's mask has no such table")
    _parse(text, mask, what)
    try:
        mask = _check(site, mask, checker, is_opaque=lifted is None or any(t in mask.bias for t in site.terms))
    except UnsupportedError as error:
        raise VerifyError(f"{what} is not the graph's: {error}. Nothing was written") from error
    return replace(mask, family=f"{describe(mask.expression)}, stated")


def _parse(text: str, mask: LiftedMask | None, what: str) -> MaskExpression:
    """The expression of a text; with a mask, ranks and types of its tables are checked, too."""
    try:
        return MaskExpression.parse(text, None if mask is None else tables_of(mask))
    except MaskSyntaxError as error:
        raise ArgumentError(f"{what} is refused: {error}; docs/reference/mask-format.md has the grammar") from None


def _check(site: AttentionSite, mask: LiftedMask, checker: MaskChecker, *, is_opaque: bool) -> LiftedMask:
    """The mask after its check. ``is_opaque``: some term could not be lifted.

    Such a term counts as a bias, unless running it shows that it only masks.
    """
    if is_opaque:
        # Lifting saw too little of the values that forbid.
        mask = replace(mask, empty_rows=policy_from_fills(site, checker.fills(site, mask)))
    if is_opaque and mask.bias:
        try:
            without = replace(mask, bias=(), notes=())
            checker.check(site, without, is_stated=True)
        except BiasedMaskError:
            pass  # the term is a bias
        else:
            return without
    checker.check(site, mask, is_stated=True)
    return mask


def _operand(
    site: AttentionSite, role: str, lifted: LiftedMask | None, checker: MaskChecker, what: str
) -> RuntimeOperand:
    for operand in lifted.operands if lifted else ():
        if operand.role == role:
            return operand
    vectors = checker.runner.vectors(site)
    if role != "pad" or len(vectors) != 1:
        names = ", ".join(repr(f) for f in vectors) or "none"
        raise ArgumentError(
            f"{what} reads {role}, but the graph's mask has no such operand: the model inputs [B, T] that it depends on "
            f"are {names}, expected exactly one, and role pad"
        )
    return RuntimeOperand(role, vectors[0])
