# SPDX-License-Identifier: Apache-2.0
"""What StofAttention takes, by target and element type: the plugin library's answer, or the same numbers without it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

from onnx import TensorProto

from stof.runtime.library import op_limits

_NAMES = {int(TensorProto.FLOAT): "fp32", int(TensorProto.FLOAT16): "fp16", int(TensorProto.BFLOAT16): "bf16"}


@dataclass(frozen=True)
class AttentionLimits:
    """The limits of a node whose query, key and value have one element type; head sizes are those of all three."""

    largest_head_size: int = 256
    head_size_multiple_of: int = 1
    most_heads: int = 65536
    most_length: int = 1 << 22  # of queries, keys and batches
    most_operands: int = 13


# Where there is no library, or one that cannot be asked. tests/attention/test_limits.py compares them with the library's,
# which plugins/core/contract/attention_limits.h declares.
_ANY = dict.fromkeys(_NAMES, AttentionLimits())
_ON_CUDA = {t: AttentionLimits(head_size_multiple_of=8 if t != TensorProto.FLOAT else 1) for t in _NAMES}
FALLBACK: Mapping[str, Mapping[int, AttentionLimits]] = {"cpu": _ANY, "cuda": _ON_CUDA, "tensorrt": _ON_CUDA}
FALLBACK_ROLES = frozenset({"pad", "bias", "relative_bias", "sink", "segment_q", "segment_k", "lengths", "unused"})


def limits_of(target: str) -> Mapping[int, AttentionLimits]:
    """The limits of a target of ``--target``, by ONNX element type; types that are missing are not taken."""
    found = op_limits().get("StofAttention")
    if found is None:
        return FALLBACK[target]
    names = [f.name for f in fields(AttentionLimits)]
    types = found["targets"][target]["types"]
    return {int(t): AttentionLimits(**{n: numbers[n] for n in names}) for t, numbers in types.items()}


def operand_roles() -> frozenset[str]:
    """The roles that an operand may have, besides ``table0``, ``table1``, ..."""
    found = op_limits().get("StofAttention")
    return FALLBACK_ROLES if found is None else frozenset(found["roles"])


def element_types() -> frozenset[int]:
    """The ONNX element types that some target takes."""
    return frozenset(t for target in FALLBACK for t in limits_of(target))


def largest_head_size() -> int:
    """The largest head size that some target takes."""
    return max(one.largest_head_size for target in FALLBACK for one in limits_of(target).values())


def most_heads() -> int:
    """The most query heads that some target takes."""
    return max(one.most_heads for target in FALLBACK for one in limits_of(target).values())


def most_length() -> int:
    """The most queries, keys or batches that some target takes."""
    return max(one.most_length for target in FALLBACK for one in limits_of(target).values())


def type_names(types: Iterable[int], conjunction: str) -> str:
    """Element types for a message: "fp32, fp16 or bf16"."""
    *names, last = [_NAMES.get(t, TensorProto.DataType.Name(t)) for t in types]
    return f"{', '.join(names)} {conjunction} {last}" if names else last
