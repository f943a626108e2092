# SPDX-License-Identifier: Apache-2.0
"""Attention forms: what surrounds the mask, one choice or several away from the plainest attention."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from .expr import Mask
from .styles import Style


@dataclass(frozen=True)
class Form:
    """What surrounds the mask. The defaults are the plainest attention there is."""

    layout: str = "bhsd"  # of inputs and output: bhsd, bshd, bsn, packed
    lengths: str = "self"  # self, cross (S and T differ), past (the queries are the last S of T)
    scale: str = "mul"  # mul, div, split, query, key, after (the mask is scaled, too)
    # add, left (mask + scores), keep, drop, sub, guarded (Max with finfo.min), multiply (scores * m + log(m))
    apply: str = "add"
    guard: str = ""  # nan, row, pairs (the weights are masked again)
    written: bool = False  # the softmax as exponentials divided by their sum
    key: str = "bhds"  # how the key is transposed: bhds, at once, 3-D
    three: bool = False  # scores [B*H, S, T]
    groups: int = 0  # key and value heads, 0 for as many as the query's
    softcap: bool = False
    shifted: bool = False  # the row's maximum is subtracted before the softmax
    bias: str = ""  # another term is added: input, or by distance (ALiBi)
    node: str = ""  # one node: bool, float (Attention of opset 23 with such a mask), multi (MultiHeadAttention)
    sink: bool = False  # a column of logits beside the scores, dropped after the softmax
    half: bool = False
    widened: bool = False  # fp16 with an fp32 softmax
    fixed: bool = False


FORMS = {
    "4-D, Mul": Form(),
    "scale Div": Form(scale="div"),
    "scale split": Form(scale="split"),
    "scale on query": Form(scale="query"),
    "scale on key": Form(scale="key"),
    "scale after mask": Form(scale="after"),
    "mask + scores": Form(apply="left"),
    "Where keeps": Form(apply="keep"),
    "Where drops": Form(apply="drop"),
    "scores - mask": Form(apply="sub"),
    "scores * mask + log(mask)": Form(apply="multiply"),
    "Max with lowest": Form(apply="guarded"),
    "NaN guard": Form(guard="nan"),
    "row guard": Form(guard="row", apply="keep"),
    "row guard, mask added": Form(guard="row"),
    "weights masked again": Form(guard="pairs", apply="keep"),
    "softmax written out": Form(written=True),
    "key transposed at once": Form(layout="bshd", key="at once"),
    "key transposed in 3-D": Form(key="3-D"),
    "[B*H, S, T]": Form(three=True),
    "grouped heads": Form(groups=2),
    "one key head": Form(groups=1),
    "packed QKV": Form(layout="packed"),
    "BSN": Form(layout="bsn"),
    "BSHD": Form(layout="bshd"),
    "cross": Form(lengths="cross"),
    "past": Form(lengths="past"),
    "softcap": Form(softcap=True),
    "row maximum": Form(shifted=True),
    "bias": Form(bias="input"),
    "ALiBi": Form(bias="distance"),
    "sink": Form(sink=True),
    "Attention, bool mask": Form(node="bool"),
    "Attention, float mask": Form(node="float"),
    "MultiHeadAttention": Form(node="multi"),
    "fp16": Form(half=True),
    "fp16, fp32 softmax": Form(half=True, widened=True),
    "fixed sizes": Form(fixed=True),
}
PLAIN = "4-D, Mul"


def vary(form: Form, rng: random.Random) -> Form:
    """The form with a few other choices where it has the default."""
    plain = Form()
    options: dict[str, list[object]] = {
        "layout": ["bshd", "bsn"],
        "scale": ["div", "split", "query"],
        "apply": ["left", "keep", "drop"],
        "guard": ["nan"],
        "groups": [2],
        "lengths": ["cross", "past"],
        "softcap": [True],
        "key": ["at once", "3-D"],
    }
    for name, values in options.items():
        if getattr(form, name) == getattr(plain, name) and rng.random() < 0.12:
            form = replace(form, **{name: rng.choice(values)})  # type: ignore[arg-type]
    return form


def legal(form: Form, mask: Mask, style: Style) -> Form:
    """The form with choices dropped that the mask, the style or other choices rule out."""
    if mask.length or style.fold == "constant":
        form = replace(form, fixed=True)
    if mask.length and form.lengths != "self":
        form = replace(form, lengths="self")
    if form.layout == "packed" and (form.lengths != "self" or form.groups):
        form = replace(form, lengths="self", groups=0)
    if form.key == "at once" and (form.groups or form.lengths == "past" or form.layout == "bhsd"):
        form = replace(form, key="bhds")
    if form.guard == "pairs" and form.apply not in ("keep", "drop"):
        form = replace(form, apply="keep")  # where it is written twice, it need not be the same to the eye
    if form.three and (form.groups or form.guard in ("row", "pairs")):
        form = replace(form, groups=0, guard="")
    if form.softcap and form.scale == "after":
        form = replace(form, scale="mul")
    if form.sink:
        form = replace(form, three=False, guard="", shifted=False)
    if form.node == "multi":
        lengths = "cross" if form.lengths == "cross" else "self"
        form = replace(form, layout="bsn", lengths=lengths, groups=0, softcap=False)
    if form.node:
        form = replace(
            form,
            half=False,
            bias="",
            sink=False,
            guard="",
            written=False,
            three=False,
            apply="add",
            key="bhds",
            scale="mul",
        )
    return form
