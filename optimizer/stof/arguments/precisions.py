# SPDX-License-Identifier: Apache-2.0
"""Precisions below that of its inputs in which attention may compute, each by an attribute of the operators."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
from onnx import TensorProto, helper

from stof.targets import CPU, CUDA, Target


@dataclass(frozen=True)
class Precision:
    """A precision in which attention may compute its two matmuls: queries with keys, and weights with values.

    Sums, the softmax and what follows stay in fp32.

    Attributes:
        name: for reports and plans.
        option: of ``stof-optimize`` that allows it.
        attribute: of the attention operators that allows it.
        value: of that attribute.
        target: on which kernels of it run.
        max_error: the largest relative RMS error of an attention, against fp64, with which it takes the precision by default.
    """

    name: str
    option: str
    attribute: str
    value: int | str
    target: Target
    max_error: float


@dataclass(frozen=True)
class RoundedOperands(Precision):
    """A type to which the operands of both matmuls are rounded.

    Attributes:
        dtype: the ONNX element type.
        slack: how far, relative to the largest value of a head, a kernel may be from the definition that rounds as it does. The
            running maximum decides to which binade a weight is rounded.
    """

    dtype: int
    slack: float

    def round(self, array: np.ndarray) -> np.ndarray:
        """The numbers of an array rounded to the type, in the array's own type."""
        rounded: np.ndarray = array.astype(helper.tensor_dtype_to_np_dtype(self.dtype)).astype(array.dtype)
        return rounded


@dataclass(frozen=True)
class EightBits(Precision):
    """Operands of 8 bits with scales: scores in int8, and perhaps weights and values in e4m3.

    Attributes:
        has_fp8: whether weights and values are e4m3.
    """

    has_fp8: bool


BF16 = RoundedOperands(
    name="bf16",
    option="--allow-bf16",
    attribute="allow_bf16",
    value=1,
    target=CPU,
    max_error=0.01,
    dtype=int(TensorProto.BFLOAT16),
    slack=2.0**-8,
)
# docs/design/attention-8bit.md has the errors that the bounds are above.
INT8 = EightBits(
    name="int8",
    option="--attention-precision int8",
    attribute="precision",
    value="int8",
    target=CUDA,
    max_error=0.015,
    has_fp8=False,
)
INT8_FP8 = EightBits(
    name="int8_fp8",
    option="--attention-precision fp8",
    attribute="precision",
    value="int8_fp8",
    target=CUDA,
    max_error=0.045,
    has_fp8=True,
)
PRECISIONS: Mapping[str, Precision] = {p.name: p for p in (BF16, INT8, INT8_FP8)}

AS_INPUTS, AUTO = "fp16", "auto"
# What --attention-precision allows, by its value.
ATTENTION_PRECISIONS: Mapping[str, tuple[EightBits, ...]] = {
    AS_INPUTS: (),
    "int8": (INT8,),
    "fp8": (INT8_FP8,),
    AUTO: (INT8, INT8_FP8),
}


def option_that_allows(precisions: Collection[Precision]) -> str:
    """The option of ``stof-optimize`` that allows all these precisions of one kind of operator; at least one is given."""
    return f"--attention-precision {AUTO}" if {INT8, INT8_FP8} <= set(precisions) else next(iter(precisions)).option


def precision_of(attributes: Mapping[str, object]) -> RoundedOperands | None:
    """The type to which a node's attributes allow operands to be rounded; None: none."""
    return BF16 if attributes.get(BF16.attribute) == BF16.value else None
