# SPDX-License-Identifier: Apache-2.0
"""Types to which attention may round the operands of its two matmuls, each by an attribute of the operators."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from onnx import TensorProto, helper

from stof.targets import CPU, Target


@dataclass(frozen=True)
class Precision:
    """A type to which attention may round the operands of its matmuls: queries with keys, and weights with values.

    Sums, the softmax and what follows stay in fp32.

    Attributes:
        name: of the type, for reports and plans.
        option: of ``stof-optimize`` that allows it.
        attribute: of the attention operators; 1 allows it.
        target: on which kernels of it run.
        dtype: the ONNX element type that operands are rounded to.
        slack: how far, relative to the largest value of a head, a kernel may be from the definition that rounds as it does. The
            running maximum decides to which binade a weight is rounded.
    """

    name: str
    option: str
    attribute: str
    target: Target
    dtype: int
    slack: float

    def round(self, array: np.ndarray) -> np.ndarray:
        """The numbers of an array rounded to the type, in the array's own type."""
        rounded: np.ndarray = array.astype(helper.tensor_dtype_to_np_dtype(self.dtype)).astype(array.dtype)
        return rounded


BF16 = Precision(
    name="bf16",
    option="--allow-bf16",
    attribute="allow_bf16",
    target=CPU,
    dtype=int(TensorProto.BFLOAT16),
    slack=2.0**-8,
)
PRECISIONS: Mapping[str, Precision] = {p.name: p for p in (BF16,)}


def precision_of(attributes: Mapping[str, object]) -> Precision | None:
    """The precision that a node's attributes allow; None: that of its inputs."""
    return next((p for p in PRECISIONS.values() if attributes.get(p.attribute) == 1), None)
