# SPDX-License-Identifier: Apache-2.0
"""What StofAttention takes, by target and element type, as the plugin library says.

plugins/core/contract/attention_limits.h declares the numbers. Each function raises ``LibraryError`` without a library.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from onnx import TensorProto

from stof.mask.relative_roles import RELATIVE_BIAS_FACTOR, TABLE_ROLES
from stof.runtime.library import LibraryError, op_limits, type_limits
from stof.targets import Target

_OP = "StofAttention"
_NAMES = {int(TensorProto.FLOAT): "fp32", int(TensorProto.FLOAT16): "fp16", int(TensorProto.BFLOAT16): "bf16"}


@dataclass(frozen=True)
class AttentionLimits:
    """The limits of a node whose query, key and value have one element type; head sizes are those of all three.

    Attributes:
        largest_head_size: the most elements of a head.
        head_size_multiple_of: what head sizes are multiples of.
        most_heads: query heads.
        most_length: queries, keys and batches.
        most_operands: inputs behind query, key and value.
    """

    largest_head_size: int
    head_size_multiple_of: int
    most_heads: int
    most_length: int
    most_operands: int


def limits_of(target: str) -> Mapping[int, AttentionLimits]:
    """The limits of a target of ``--target``, by ONNX element type; types that are missing are not taken."""
    return type_limits(_OP, target, AttentionLimits)


def _all_limits() -> Iterator[tuple[int, AttentionLimits]]:
    """The element types of each target, with their limits."""
    for target in op_limits()[_OP]["targets"]:
        yield from limits_of(target).items()


def operand_roles() -> frozenset[str]:
    """The roles that an operand may have, besides ``table0``, ``table1``, ..."""
    return frozenset(op_limits()[_OP]["roles"])


def relative_roles() -> frozenset[str]:
    """The roles of relative tables, and that of the factor of a relative bias; none without a library."""
    try:
        return frozenset(r for r in operand_roles() if r in {*TABLE_ROLES, RELATIVE_BIAS_FACTOR})
    except LibraryError:
        return frozenset()


def relative_roles_on(target: Target) -> frozenset[str]:
    """The roles of ``relative_roles`` that kernels of a target take. An earlier library does not say: all on the CPU alone."""
    try:
        types = op_limits()[_OP]["targets"][target.name].get("types", {})
    except LibraryError:
        return frozenset()
    usual = 0 if target.uses_gpu else len(TABLE_ROLES)
    taken = min((numbers.get("relative_tables", usual) for numbers in types.values()), default=0)
    return relative_roles() & {*TABLE_ROLES[:taken], *((RELATIVE_BIAS_FACTOR,) if taken else ())}


def element_types() -> frozenset[int]:
    """The ONNX element types that some target takes."""
    return frozenset(t for t, _ in _all_limits())


def largest_head_size() -> int:
    """The largest head size that some target takes."""
    return max(limits.largest_head_size for _, limits in _all_limits())


def most_heads() -> int:
    """The most query heads that some target takes."""
    return max(limits.most_heads for _, limits in _all_limits())


def most_length() -> int:
    """The most queries, keys or batches that some target takes."""
    return max(limits.most_length for _, limits in _all_limits())


def type_names(types: Iterable[int], conjunction: str) -> str:
    """Element types for a message: "fp32, fp16 or bf16"."""
    *names, last = [_NAMES.get(t, TensorProto.DataType.Name(t)) for t in types]
    return f"{', '.join(names)} {conjunction} {last}" if names else last
