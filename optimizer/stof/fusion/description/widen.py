# SPDX-License-Identifier: Apache-2.0
"""Descriptions of chains with fp32 in place of half-precision types, for models that are compared widened."""

from __future__ import annotations

import re
from collections.abc import Collection

from onnx import TensorProto

from stof.execution.upcast import FORBIDS, FP16_FORBIDS


def widen_description(text: str, kinds: Collection[int]) -> str:
    """The description of a chain (docs/reference/chain-format.md) with fp32 in place of the given types."""
    for kind, name in ((TensorProto.FLOAT16, "f16"), (TensorProto.BFLOAT16, "bf16")):
        if kind not in kinds:
            continue
        text = re.sub(rf"\b{name}( \[|\()", r"f32\1", text)
        if kind == TensorProto.FLOAT16:
            text = re.sub(r"-(\d+\.?\d*)\b(?!\s*\*?\s*[a-z])", lambda m: _widen_number(m.group(0)), text)
    return text


def _widen_number(number: str) -> str:
    return str(int(FORBIDS)) if float(number) <= FP16_FORBIDS else number
