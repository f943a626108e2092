# SPDX-License-Identifier: Apache-2.0
"""Makes a failing case smaller: a smaller mask, a plainer style, a plainer form, as long as it fails in the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace

from .expr import Expr, make
from .forms import Form
from .judge import Fault
from .schedule import Spec
from .styles import Style

_MOST = 150


def kind_of(error: Exception) -> str:
    """What fails: the same kind of fault, or the same exception."""
    return error.kind if isinstance(error, Fault) else f"{type(error).__name__}: {str(error)[:40]}"


def shrink(spec: Spec, error: Exception, run: Callable[[Spec], object]) -> tuple[Spec, Exception]:
    """The smallest case found that still fails, and its error."""
    wanted, tries = kind_of(error), 0
    found = True
    while found and tries < _MOST:
        found = False
        for smaller in _smaller(spec):
            tries += 1
            try:
                run(smaller)
            except Exception as own:
                if kind_of(own) == wanted:
                    spec, error, found = smaller, own, True
                    break
            if tries >= _MOST:
                break
    return spec, error


def _smaller(spec: Spec) -> Iterator[Spec]:
    if not spec.plain:
        yield replace(spec, plain=True)
    for name, plain, whole in (("style", Style(), spec.style), ("form", Form(), spec.form)):
        if whole != plain:
            yield replace(spec, **{name: plain})  # type: ignore[arg-type]
            for field in fields(whole):
                default = getattr(plain, field.name)
                if getattr(whole, field.name) != default:
                    yield replace(spec, **{name: replace(whole, **{field.name: default})})  # type: ignore[arg-type]
    for expr in _parts(spec.mask.expr):
        yield replace(spec, mask=replace(spec.mask, expr=expr))
    if spec.opset != 18:
        yield replace(spec, opset=18)
    if spec.pad_kind != "i":
        yield replace(spec, pad_kind="i")


def _parts(e: Expr) -> Iterator[Expr]:
    """Simpler conditions: one of its parts, a junction with fewer of them, or one with a simpler part."""
    for i, arg in enumerate(e.args):
        if not isinstance(arg, Expr):
            continue
        if arg.boolean:
            yield arg
        if e.kind in ("and", "or") and len(e.args) > 2:
            yield make(e.kind, *e.args[:i], *e.args[i + 1 :])
        for smaller in _parts(arg):
            if smaller.boolean == arg.boolean:
                yield Expr(e.kind, (*e.args[:i], smaller, *e.args[i + 1 :]))
