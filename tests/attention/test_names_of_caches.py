# SPDX-License-Identifier: Apache-2.0
"""Decoders whose past keys and past values have lengths of different names, as torch's dynamo exporter writes DynamicCache.

A MatMul ties them: status 0 and all sites replaced, with any number of layers, and with fewer key heads.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from fused_attention_nodes import forced, run, same

V, H, D = 30, 4, 8
N = H * D


def make_decoder(layers: int, groups: int, queries: str) -> onnx.ModelProto:
    """A decoder with caches [b0, G, kI, D] and [bI, G, vI, D]; the mask [m, t] has names of its own, too."""
    caches = [f"float[b{i}, {groups}, {kind}{i}, {D}] past_{kind}{i}" for i in range(layers) for kind in "kv"]
    inputs = ", ".join([f"int64[b, {queries}] ids", "int64[m, t] mask", *caches])
    outputs = ", ".join(["float y", *(f"float {kind}{i}_new" for i in range(layers) for kind in "kv")])
    weights = [f"float[{V}, {N}] words"]
    body = """x0 = Gather (words, ids) one = Constant <value_int = 1> () zero = Constant <value_int = 0> ()
    first = Constant <value_ints = [0]> () last = Constant <value_ints = [1]> () both = Constant <value_ints = [1, 2]> ()
    scale = Constant <value = float {0.35}> () nothing = Constant <value = float {0}> ()
    low = Constant <value = float {-3.4028234663852886e38}> ()
    ps = Shape <start = 2, end = 3> (past_k0) ss = Shape <start = 1> (ids) ts = Add (ps, ss)
    p = Squeeze (ps) e = Squeeze (ts) rows = Range (p, e, one) columns = Range (zero, e, one)
    r = Unsqueeze (rows, last) c = Unsqueeze (columns, first) causal = LessOrEqual (c, r)
    pm = Unsqueeze (mask, both) pb = Cast <to = 9> (pm) allowed = And (causal, pb) bias = Where (allowed, nothing, low)
    """
    body += f"heads = Constant <value_ints = [0, 0, -1, {D}]> () flat = Constant <value_ints = [0, 0, {N}]> ()\n"
    body += f"repeat = Constant <value_ints = [1, 1, {H // groups}, 1, 1]> () two = Constant <value_ints = [2]> ()\n"
    body += f"merged = Constant <value_ints = [0, {H}, -1, {D}]> ()\n"
    for i in range(layers):
        weights += [f"float[{N}, {N}] wq{i}", f"float[{N}, {groups * D}] wk{i}", f"float[{N}, {groups * D}] wv{i}"]
        for kind in "qkv":
            body += f"{kind}m{i} = MatMul (x{i}, w{kind}{i}) {kind}r{i} = Reshape ({kind}m{i}, heads) "
            body += f"{kind}t{i} = Transpose <perm = [0, 2, 1, 3]> ({kind}r{i})\n"
        for kind in "kv":
            body += f"{kind}{i}_new = Concat <axis = 2> (past_{kind}{i}, {kind}t{i}) "
            body += f"{kind}u{i} = Unsqueeze ({kind}{i}_new, two) {kind}w{i} = Tile ({kind}u{i}, repeat) "
            body += f"{kind}h{i} = Reshape ({kind}w{i}, merged)\n"
        body += f"""kx{i} = Transpose <perm = [0, 1, 3, 2]> (kh{i}) s{i} = MatMul (qt{i}, kx{i}) sm{i} = Mul (s{i}, scale)
        sa{i} = Add (sm{i}, bias) sw{i} = Softmax <axis = -1> (sa{i}) o{i} = MatMul (sw{i}, vh{i})
        ot{i} = Transpose <perm = [0, 2, 1, 3]> (o{i}) of{i} = Reshape (ot{i}, flat) x{i + 1} = Add (x{i}, of{i})\n"""
    body += f"y = Identity (x{layers})"
    model = onnx.parser.parse_model(
        f'<ir_version: 9, opset_import: ["" : 18]> g ({inputs}) => ({outputs}) <{", ".join(weights)}> {{ {body} }}'
    )
    rng = np.random.default_rng(0)
    for value in model.graph.value_info:
        shape = [d.dim_value for d in value.type.tensor_type.shape.dim]
        array = (rng.standard_normal(shape) * 0.3).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, value.name))
    del model.graph.value_info[:]
    return model


@pytest.mark.parametrize(
    ("layers", "groups", "queries"), [(1, 4, "s"), (2, 2, "s"), (5, 4, "s"), (3, 1, "s"), (2, 2, "1"), (2, 4, "6")]
)
def test_every_site_is_replaced(layers: int, groups: int, queries: str, tmp_path: Path) -> None:
    model = make_decoder(layers, groups, queries)
    onnx.checker.check_model(model)
    report, target = forced(model, tmp_path)
    assert [s.replaced for s in report.sites] == [True] * layers, [s.reason for s in report.sites]
    found = report.verification
    assert found is not None
    assert not found.failures
    assert len({c.site for c in found.comparisons if c.site and c.comparable}) == layers
    rng = np.random.default_rng(1)
    for batch, new, past in ((2, 7, 20), (1, 1, 40), (3, 6, 1)):
        new = int(queries) if queries.isdecimal() else new
        mask = np.ones((batch, past + new), np.int64)
        mask[1:, :1] = 0
        feed = {"ids": rng.integers(0, V, (batch, new)), "mask": mask}
        for i in range(layers):
            for kind in "kv":
                feed[f"past_{kind}{i}"] = rng.standard_normal((batch, groups, past, D)).astype(np.float32)
        same(run(target, feed, library=True), run(model, feed))
