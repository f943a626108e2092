# SPDX-License-Identifier: Apache-2.0
"""The ops that stof writes into models, in the order in which a model is rewritten, by what a written model may have."""

from __future__ import annotations

from typing import Any

from stof.attention.rewrite import ATTENTION
from stof.attention.standard.rewrite import STANDARD_ATTENTION
from stof.cached_attention.rewrite import CACHED_ATTENTION
from stof.fusion.rewrite import FUSION
from stof.op_rewrite import OpRewrite
from stof.sparse_mlp.rewrite import SPARSE_MLP
from stof.unpadding.rewrite import UNPADDING
from stof.unpadding.standard import STANDARD_UNPADDING

OPS: tuple[OpRewrite[Any, Any, Any], ...] = (CACHED_ATTENTION, ATTENTION, UNPADDING, SPARSE_MLP, FUSION)
STANDARD_OPS: tuple[OpRewrite[Any, Any, Any], ...] = (STANDARD_ATTENTION, STANDARD_UNPADDING)  # of ``--emit standard``
PLAN_FORMATS = {op.key: op.plan_format for op in OPS}
