# SPDX-License-Identifier: Apache-2.0
"""What is done to a model before sites are searched: the forms that other tools fused are expanded."""

from __future__ import annotations

import onnx

from stof.passes.lower_attention import lower_attention
from stof.passes.lowering import Lowered, Lowerer, lower

_LOWERERS: dict[tuple[str, str], Lowerer] = {("", "Attention"): lower_attention}


def prepare(model: onnx.ModelProto) -> Lowered:
    """The working copy of a model in which sites are searched."""
    return lower(model, _LOWERERS)
