# SPDX-License-Identifier: Apache-2.0
"""Fused nodes that append to a cache with room for more keys in place: kept, with the reason."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import parser

import stof
from stof.options import Options

_MULTI = "MultiHeadAttention <num_heads = 4, unidirectional = 1>"
_MASKED = "DecoderMaskedMultiHeadAttention <num_heads = 4, past_present_share_buffer = 1>"
REFUSED = {
    "keys in the cache": (_MULTI, "int32[B, 2, C] m", "(q, k, v, , , , pk, pv, n)", "depends on the provider"),
    "beams": (_MULTI, "int32[B, 2, C] m", "(q, k, v, , , , pk, pv, n, m)", "order of beam search"),
    "one token": (_MASKED, "float[1] m", "(q, k, v, , , pk, pv, n)", "depends on the provider"),
    "one token, beams": (
        _MASKED,
        "int32[B, 2, C] m, int32[1] width",
        "(q, k, v, , , pk, pv, n, width, m)",
        "order of beam search",
    ),
    "one token, no cache": (_MASKED, "float[1] m", "(q, k, v)", "one token at a time"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, tmp_path: Path) -> None:
    """The node is a row of the report."""
    node, more, operands, reason = REFUSED[name]
    new, whole = "float[B, S, 32]", "float[B, 4, C, 8]"
    outputs = "y" if name.endswith("no cache") else "y, nk, nv"
    model = parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 18, "com.microsoft" : 1]>
    step ({new} q, {new} k, {new} v, {whole} pk, {whole} pv, int32[1] n, {more}) => ({new} y) {{
        [node] {outputs} = com.microsoft.{node} {operands}
    }}""")
    onnx.save(model, tmp_path / "model.onnx")
    report = stof.optimize(tmp_path / "model.onnx", options=Options(dry_run=True))
    assert [(s.site, s.replaced) for s in report.sites] == [("node", False)]
    assert reason in report.sites[0].reason
