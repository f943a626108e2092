# SPDX-License-Identifier: Apache-2.0
"""Which form of ``ai.onnx::Attention`` computes a site: its attributes, its lengths of keys, and what is left to ``attn_mask``.

The operator gives 0 for fully masked rows. Rows that the graph gives the mean of all values, or attention to all keys, need a
mask of finite numbers, which takes part of the mask into ``attn_mask`` that an attribute could state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from onnx import TensorProto

from stof.errors import UnsupportedError
from stof.mask.expression import CAUSAL, EVERY_PAIR, MaskExpression
from stof.mask.expression_nodes import Node, join
from stof.mask.site import AttentionSite, EmptyRows, Layout, LiftedMask, MaskTerm, OperandView, RuntimeOperand
from stof.symbolic.tensor import Shape

FIRST_OPSET, LENGTHS_OPSET, WINDOWS_OPSET = 23, 24, 25
_TYPES = (TensorProto.FLOAT, TensorProto.FLOAT16)
_LENGTHS = MaskExpression.parse("k + 1 <= lengths[b]").root
# fp32 scores vanish beside it, so that all keys of a row have the same weight. ONNX Runtime takes the lowest number for -inf.
ABSORBING_FILL = -1e30
_SOFT_FILL = -1e4  # scores keep most of their digits beside it


@dataclass(frozen=True)
class StandardForm:
    """One ``Attention`` node.

    Attributes:
        rank: of query, key, value and result: 3 for [B, S, N], 4 for [B, H, S, D].
        is_causal: the attribute.
        window: the attributes ``left_window_size`` and ``right_window_size``; (-1, -1): none.
        lengths: what becomes ``nonpad_kv_seqlen``; None: nothing.
        mask: the pairs that ``attn_mask`` allows.
        fill: what a float ``attn_mask`` has for other pairs.
        raises_bias: a finite bias below -1e30 is raised to it: ONNX Runtime takes the lowest number for -inf.
        bias: terms that are added to it.
    """

    rank: int
    is_causal: bool = False
    window: tuple[int, int] = (-1, -1)
    lengths: RuntimeOperand | None = None
    mask: MaskExpression = EVERY_PAIR
    fill: float = -np.inf
    raises_bias: bool = False
    bias: tuple[MaskTerm, ...] = ()

    @property
    def opset(self) -> int:
        """The first opset that has it."""
        if self.window != (-1, -1):
            return WINDOWS_OPSET
        return LENGTHS_OPSET if self.lengths is not None else FIRST_OPSET

    @property
    def has_mask(self) -> bool:
        """Whether it reads ``attn_mask``."""
        return not self.mask.allows_all or bool(self.bias)

    @property
    def has_float_mask(self) -> bool:
        """Whether ``attn_mask`` is added to the scores; else it is boolean."""
        return self.has_mask and (bool(self.bias) or self.fill != -np.inf)

    def __str__(self) -> str:
        """What it reads, for the report."""
        words = ["is_causal"] if self.is_causal else []
        words += [f"window ({self.window[0]}, {self.window[1]})"] if self.window != (-1, -1) else []
        words += ["nonpad_kv_seqlen"] if self.lengths is not None else []
        words += [f"{'float' if self.has_float_mask else 'boolean'} attn_mask"] if self.has_mask else []
        return f"Attention-{self.opset}" + (f": {', '.join(words)}" if words else "")


def choose_form(
    site: AttentionSite,
    mask: LiftedMask,
    lengths: RuntimeOperand | None = None,
    *,
    every_row_has_key: bool = False,
    bias_bound: float = np.inf,
    has_windows: bool = False,
) -> StandardForm:
    """The form that computes a site.

    Args:
        site: the attention.
        mask: its mask, without products with relative tables (:func:`with_biases`).
        lengths: of the keys of each row (:func:`find_lengths`).
        every_row_has_key: it is proven that no row is fully masked, or such rows may give anything.
        bias_bound: the largest absolute value of the sum of biases, where it is known.
        has_windows: the attributes of opset 25 may be written.

    Raises:
        UnsupportedError: when the operator does not compute it, with the reason.
    """
    _check(site, mask)
    rank = _rank(site)
    fill = _fill(site, mask, every_row_has_key=every_row_has_key)
    if fill != -np.inf:  # the attributes forbid by -inf
        return StandardForm(rank, mask=mask.expression, fill=fill, bias=mask.bias)
    raises_bias = bool(mask.bias) and not every_row_has_key and bias_bound > -ABSORBING_FILL
    if raises_bias and site.dtype != TensorProto.FLOAT:
        raise UnsupportedError(
            "a bias may be the lowest number for a whole row, which Attention takes for -inf, and fp16 has no number instead"
        )
    form = StandardForm(rank, bias=mask.bias, raises_bias=raises_bias)
    rest = list(mask.expression.conjuncts)
    if lengths is not None and _LENGTHS in rest:
        form = replace(form, lengths=lengths)  # by which is_causal and windows would count positions from the last key
        rest.remove(_LENGTHS)
    elif _counts_from_first_key(site):
        form, rest = _with_positions(form, rest, has_windows=has_windows)
    return replace(form, mask=MaskExpression(join("and", rest)) if rest else EVERY_PAIR)


def with_biases(mask: LiftedMask) -> LiftedMask:
    """The mask with tables by distance, and what is multiplied with them, as the tensors that the graph adds."""
    terms = [] if mask.relative is None else list(mask.relative.terms)
    terms += [] if mask.relative_factor is None else [mask.relative_factor.term]
    terms += [t.term for t in mask.relative_terms]
    added = tuple(t for t in dict.fromkeys(terms) if t not in mask.bias)
    return replace(mask, bias=(*mask.bias, *added), relative=None, relative_factor=None, relative_terms=())


def _check(site: AttentionSite, mask: LiftedMask) -> None:
    """Raises for what the operator cannot express."""
    if site.dtype not in _TYPES:
        name = TensorProto.DataType.Name(site.dtype)
        raise UnsupportedError(f"ONNX Runtime's CPU provider has no Attention of {name}, expected fp32 or fp16")
    if site.sink is not None:
        raise UnsupportedError("its softmax has a sink, which Attention has not")
    if site.roundings is not None:
        raise UnsupportedError(
            "its scores or weights are rounded to 8 bits, which Attention does not do; --dequantize-attention computes them in "
            "float"
        )
    if mask.weaker is not None:
        raise UnsupportedError("a fully masked row attends by a weaker mask, which Attention cannot")
    if site.added_values is not None:
        raise UnsupportedError("its result has a product of weights and relative rows, which Attention has not")
    if site.floored:
        raise UnsupportedError("its scores have a floor, which Attention has not")


def _rank(site: AttentionSite) -> int:
    """3 where all tensors have the heads behind the positions, so that nothing is transposed in the graph.

    In fp16 ONNX Runtime's kernel takes a quarter longer for rank 3, which is more than transpositions in the graph take.
    """
    layouts = (site.query.layout, site.key.layout, site.value.layout, site.output_layout)
    is_three = Layout.BHSD not in layouts and site.query_factor is None and site.dtype == TensorProto.FLOAT
    return 3 if is_three else 4


def _fill(site: AttentionSite, mask: LiftedMask, *, every_row_has_key: bool) -> float:
    """What forbidden pairs have in ``attn_mask``, by what fully masked rows are to give."""
    if mask.empty_rows is EmptyRows.ZERO or every_row_has_key:
        return -np.inf
    if mask.empty_rows is EmptyRows.NAN:
        raise UnsupportedError(
            "a row without a key is NaN, which Attention makes 0, and it is not proven that each row has one; --empty-rows "
            "ignore takes 0"
        )
    if site.dtype != TensorProto.FLOAT:
        what = "attends all keys" if mask.empty_rows is EmptyRows.ALL else "gives the mean of all values"
        raise UnsupportedError(
            f"a fully masked row {what}, which needs a finite number in attn_mask, and fp16 has none that leaves or absorbs "
            "scores; --empty-rows ignore takes 0"
        )
    return _SOFT_FILL if mask.empty_rows is EmptyRows.ALL else ABSORBING_FILL


def find_lengths(site: AttentionSite, mask: LiftedMask, shape: Callable[[str], Shape | None]) -> RuntimeOperand | None:
    """The lengths of the keys of each row of the batch, which ``nonpad_kv_seqlen`` states; None where there are none.

    Args:
        site: the attention.
        mask: its mask.
        shape: of a tensor; one number that serves several rows is no such vector.
    """
    operand = next((o for o in mask.operands if o.role == "lengths"), None)
    if operand is None or operand.at is not None or operand.view not in (OperandView.SAME, OperandView.FLAT):
        return None
    sizes = shape(operand.tensor)
    is_of_batch = bool(sizes) and sizes is not None and sizes[0] == site.dims[0]
    return operand if is_of_batch and all(n.constant == 1 for n in (sizes or ())[1:]) else None


def _counts_from_first_key(site: AttentionSite) -> bool:
    """Whether the first query stands at the first key, as without a past."""
    return not site.query_offset or site.dims[2] == site.dims[3]


def _with_positions(
    form: StandardForm, conjuncts: Sequence[Node], *, has_windows: bool
) -> tuple[StandardForm, list[Node]]:
    """The form with what attributes say of positions, and the other conditions."""
    rest = list(conjuncts)
    if CAUSAL.root in rest:
        rest.remove(CAUSAL.root)
        form = replace(form, is_causal=True)
    if not has_windows:
        return form, rest
    for condition in list(rest):
        window = MaskExpression(condition).window()
        if not MaskExpression(condition).vectors and window not in (None, (-1, -1)):
            assert window is not None
            form = replace(form, window=_narrower(form.window, window))
            rest.remove(condition)
    return form, rest


def _narrower(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    left, right = (min((n for n in pair if n >= 0), default=-1) for pair in zip(one, other, strict=True))
    return left, right
