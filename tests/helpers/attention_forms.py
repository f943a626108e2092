# SPDX-License-Identifier: Apache-2.0
"""Attention in many spellings as ONNX text, and what a rewrite of it must hold."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort

from stof.attention.emit import Rewrite, emit
from stof.attention.find import find_sites
from stof.errors import UnsupportedError
from stof.mask.accept import accept, with_or_without_guard
from stof.mask.check.checker import MaskChecker
from stof.mask.lift import lift
from stof.mask.relative_bias.lift import with_relative_bias
from stof.mask.site import AttentionSite, Finding
from stof.symbolic import Symbolic

H, D, N = 4, 8, 32


def model(inputs: str, outputs: str, body: str, opset: int = 18) -> onnx.ModelProto:
    """A model from the text of its inputs, outputs and nodes. ``%name`` in a body is a snippet below."""
    for name, text in SNIPPETS.items():
        body = body.replace(f"%{name}\n", f"{text}\n")
    text = (
        f'<ir_version: 8, opset_import: ["": {opset}, "com.microsoft": 1]>\ng ({inputs}) => ({outputs}) {{\n{body}\n}}'
    )
    return onnx.parser.parse_model(text)


PACKED = "float[B,S,32] x, float[B,S,32] y, float[B,S,32] z"
PLAIN = "float[B,4,S,8] q, float[B,4,S,8] k, float[B,4,S,8] v"

SNIPPETS = {
    # [B, S, N] -> [B, H, S, D]
    "heads": """
      split = Constant <value = int64[4] {0, 0, 4, 8}> ()
      q4 = Reshape (x, split)
      q = Transpose <perm = [0, 2, 1, 3]> (q4)
      k4 = Reshape (y, split)
      k = Transpose <perm = [0, 2, 1, 3]> (k4)
      v4 = Reshape (z, split)
      v = Transpose <perm = [0, 2, 1, 3]> (v4)""",
    "kt": "kt = Transpose <perm = [0, 1, 3, 2]> (k)",
    "merge": """
      flat = Constant <value = int64[3] {0, 0, 32}> ()
      o4 = Transpose <perm = [0, 2, 1, 3]> (o)
      out = Reshape (o4, flat)""",
    "scale": "scale = Constant <value = float {0.35}> ()",
    # w: bool [S, T] of a causal window of 5, from the queries' and keys' positions
    "window": """
      shape_q = Shape (q)
      shape_k = Shape (k)
      two = Constant <value = int64 {2}> ()
      zero = Constant <value = int64 {0}> ()
      one = Constant <value = int64 {1}> ()
      five = Constant <value = int64 {5}> ()
      s = Gather (shape_q, two)
      t = Gather (shape_k, two)
      past = Sub (t, s)
      rows0 = Range (zero, s, one)
      rows1 = Add (rows0, past)
      columns = Range (zero, t, one)
      last = Constant <value = int64[1] {1}> ()
      rows = Unsqueeze (rows1, last)
      causal = LessOrEqual (columns, rows)
      distance = Sub (rows, columns)
      near = Less (distance, five)
      w = And (causal, near)""",
    # added: float [S, T], 0 or -inf
    "added": """
      nothing = Constant <value = float {0.0}> ()
      inf = Constant <value = float {-inf}> ()
      added = Where (w, nothing, inf)""",
}


def sites(graph: onnx.ModelProto) -> tuple[list[AttentionSite], list[Finding]]:
    """What the matcher says."""
    return find_sites(graph, Symbolic(graph))


def only_site(graph: onnx.ModelProto) -> AttentionSite:
    """The one site of a graph."""
    found, findings = sites(graph)
    assert not findings, findings
    assert len(found) == 1
    return found[0]


def reason(graph: onnx.ModelProto) -> str:
    """Why the one softmax of a graph is no site."""
    found, findings = sites(graph)
    assert not found
    assert len(findings) == 1
    return findings[0].reason


def rewrite(graph: onnx.ModelProto) -> tuple[onnx.ModelProto, list[Rewrite]]:
    """The graph with every site replaced whose mask lifts and passes the check."""
    symbolic = Symbolic(graph)
    found, findings = find_sites(graph, symbolic)
    assert not findings, findings
    checker = MaskChecker(graph, symbolic)

    def accepted(site: AttentionSite) -> Rewrite:
        mask = with_relative_bias(checker, site, lift(symbolic, site))
        accept(checker, site, mask, ignore_empty_rows=True)
        return Rewrite(site, mask)

    rewrites = [with_or_without_guard(site, accepted) for site in found]
    return emit(graph, symbolic, rewrites), rewrites


def run(graph: onnx.ModelProto, feeds: dict[str, np.ndarray], *, library: bool = False) -> list[np.ndarray]:
    """The outputs in ONNX Runtime, with the library or by function bodies."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    if library:
        import stof

        stof.register(options)
    session = ort.InferenceSession(graph.SerializeToString(), options, providers=["CPUExecutionProvider"])
    found: list[Any] = session.run(None, feeds)
    return found


def feeds(graph: onnx.ModelProto, sizes: dict[str, int], seed: int = 0) -> dict[str, np.ndarray]:
    """Random inputs; int64 inputs are padding masks with a key more than none in every row."""
    rng = np.random.default_rng(seed)
    given = {}
    for value in graph.graph.input:
        tensor = value.type.tensor_type
        shape = [d.dim_value or sizes[d.dim_param] for d in tensor.shape.dim]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)
        if dtype.kind == "f":
            given[value.name] = rng.standard_normal(shape).astype(dtype)
        else:
            mask = np.asarray(rng.random(shape) < 0.7)
            if mask.ndim:
                mask[..., 0] = True
            given[value.name] = mask.astype(dtype)
    return given


def assert_equivalent(graph: onnx.ModelProto, *sizes: dict[str, int], tolerance: float = 2e-6) -> onnx.ModelProto:
    """The rewritten graph gives the original's outputs with the library and by its function body; returns it."""
    optimized, _ = rewrite(graph)
    onnx.checker.check_model(optimized)
    assert [n.op_type for n in optimized.graph.node].count("StofAttention") >= 1
    assert not any(n.op_type == "Softmax" for n in optimized.graph.node)
    for seed, one in enumerate(sizes):
        given = feeds(graph, one, seed)
        wanted = run(graph, given)
        for library in (False, True):
            for a, b in zip(wanted, run(optimized, given, library=library), strict=True):
                assert a.shape == b.shape
                assert np.array_equal(np.isnan(a), np.isnan(b))
                np.testing.assert_allclose(np.nan_to_num(b), np.nan_to_num(a), atol=tolerance, rtol=0)
    return optimized


__all__ = ["PACKED", "PLAIN", "UnsupportedError", "assert_equivalent", "model", "only_site", "reason", "rewrite", "run"]
