# SPDX-License-Identifier: Apache-2.0
"""What StofSparseMLP takes, as the plugin library says; plugins/core/contract/sparse_mlp_limits.h declares the numbers."""

from __future__ import annotations

from dataclasses import dataclass

from stof.errors import UnsupportedError
from stof.runtime.library import op_limits, type_limits
from stof.sparse_mlp.site import OP


@dataclass(frozen=True)
class MlpLimits:
    """The limits of a node.

    Attributes:
        smallest_block_size: of quantized weights; sizes are powers of two.
        largest_block_size: likewise.
        predictor_multiple_of: what rows of a quantized predictor are padded to.
        most_accuracy_level: the largest value of attribute ``accuracy_level``.
    """

    smallest_block_size: int
    largest_block_size: int
    predictor_multiple_of: int
    most_accuracy_level: int

    def has_block_size(self, size: int) -> bool:
        """Whether weights may be quantized in blocks of a size."""
        return self.smallest_block_size <= size <= self.largest_block_size and size & (size - 1) == 0


def mlp_limits() -> MlpLimits:
    """The limits, which are the same for all targets and element types.

    Raises:
        LibraryError: without a library, and for one of an earlier version, which does not state them.
        UnsupportedError: when the library does not have the operator.
    """
    for target in op_limits().get(OP, {}).get("targets", ()):
        for limits in type_limits(OP, target, MlpLimits).values():
            return limits
    raise UnsupportedError(f"the plugin library has no {OP}; install one of this version")
