# SPDX-License-Identifier: Apache-2.0
"""Decoders whose layers differ: dense, with declared patterns, with layouts of SparseAttention, windows, biases of their own.

All layers share one function body, which must run without the library for each of them.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import masks
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cached_attention"))
from gqa_models import Shape, draw_step, feeds_of, model_of, run_shared, session
from sparse_models import SparseShape, csr, random_layouts, strided

import stof
from stof.cached_attention.checks.oracle import CacheStep, compute_step
from stof.options import Options

H, G, D, SIZE = 8, 4, 16, 150
Layer = Shape | SparseShape
DENSE = Shape(H=H, G=G, D=D)
BIASED = replace(DENSE, bias=(1, H))
WINDOW = replace(DENSE, window=9)
SLIDING = replace(DENSE, window=9, sliding=True)
RANDOM = SparseShape(random_layouts(10, H), H=H, G=G, D=D)
STRIDED = SparseShape(strided(10, 2, 4, 4), H=H, G=G, D=D)
# Equal columns that no step explains: the mask looks them up in an int64 table.
LISTED = SparseShape(np.concatenate([strided(10, 1, 5, 1, offset=o) for o in (0, 3, 1, 2)]), H=H, G=G, D=D)
TABLE = np.tril(np.random.default_rng(0).random((H, 6, 6)) < 0.4) | np.eye(6, dtype=bool)
HEADS = "".join(f"{a} {b} {c} {d}\n" for a, b, c, d in [(1, 0, 0, 1)] * 4)


def mixed_model(layers: list[Layer]) -> onnx.ModelProto:
    """Layers beside each other, with lengths by one attention mask."""
    model = model_of(*(s if isinstance(s, Shape) else s.plain for s in layers), masks=True)
    graph = model.graph
    for i, s in enumerate(layers):
        if isinstance(s, Shape):
            continue
        node = next(n for n in graph.node if n.name == f"layer{i}/node")
        for name, array in zip(("rows", "columns"), csr(s.layout), strict=True):
            graph.initializer.append(numpy_helper.from_array(array, f"layer{i}/{name}"))
        inputs = [*node.input[:5], f"layer{i}/rows", f"layer{i}/columns", "total1", "lengths"]
        node.CopyFrom(
            helper.make_node(
                "SparseAttention", inputs, list(node.output), name=node.name, domain="com.microsoft",
                num_heads=s.H, kv_num_heads=s.G, sparse_block_size=s.block,
            )
        )  # fmt: skip
    place = next(i for i, n in enumerate(graph.node) if "total" in n.output) + 1
    graph.node.insert(place, helper.make_node("Reshape", ["total", "one"], ["total1"]))
    graph.node.insert(place, helper.make_node("Cast", ["count"], ["lengths"], to=TensorProto.INT32))
    return model


def draw(layers: list[Layer], queries: int, length: int) -> tuple[list[CacheStep], dict[str, np.ndarray]]:
    """A step of each layer, and the inputs of all; two sequences of one length, which all kernels of the runtime compute."""
    steps: list[CacheStep] = []
    feeds: dict[str, np.ndarray] = {"attention_mask": np.ones((2, length), np.int64)}
    for i, s in enumerate(layers):
        shape = s if isinstance(s, Shape) else s.plain
        step = draw_step(shape, [length] * 2, queries, 40 if shape.sliding else 170, seed=i)
        if isinstance(s, SparseShape):
            step = replace(step, layout=s.layout, block_size=s.block)
        steps.append(step)
        own = feeds_of(shape, step, f"layer{i}/")
        feeds |= {n: a for n, a in own.items() if n not in ("seqlens_k", "total")}
    return steps, feeds


def s2(**fields: Any) -> np.ndarray:
    return masks.to_query_heads(masks.s2(G, SIZE, 2, 4, 16, **fields), H)


WINDOWED = masks.window(H, SIZE, 30, 4)
BLOCKS = masks.blocks(TABLE, SIZE, 16)
STREAMING = np.where(np.repeat([True, False, False, True], 2)[:, None, None], masks.dense(H, SIZE), WINDOWED)
BOTH = np.concatenate([BLOCKS[:2], STREAMING[2:]])

# The layers, the specification, and the mask that it puts on some of them.
MODELS: dict[str, tuple[list[Layer], str, dict[int, np.ndarray]]] = {
    "patterns beside layouts": (
        [DENSE, RANDOM, STRIDED, DENSE],
        "s2:local=2,stride=4,block=16,layers=0;{folder}/t.npz,layers=3",
        {0: s2(), 3: BLOCKS},
    ),
    "tables of other ranks and types": (
        [DENSE, LISTED, DENSE, RANDOM],
        "{folder}/t.npz,layers=0;{folder}/duo,layers=2",
        {0: BLOCKS, 2: STREAMING},
    ),
    "two tables on one layer": (
        [DENSE, RANDOM, DENSE, DENSE],
        "{folder}/t.npz,layers=0,heads=0;{folder}/duo,layers=0,heads=1:",
        {0: BOTH},
    ),
    "biases of some layers": (
        [DENSE, BIASED, RANDOM, BIASED, BIASED],
        "window=30,sink=4,layers=0:2;{folder}/t.npz,layers=3",
        {0: WINDOWED, 1: WINDOWED, 3: BLOCKS},
    ),
    "windows beside a pattern": (
        [DENSE, WINDOW, SLIDING, LISTED],
        "window=30,sink=4,layers=0",
        {0: WINDOWED},
    ),
}


def optimized(name: str, folder: Path) -> tuple[onnx.ModelProto, stof.Report]:
    layers, spec, patterns = MODELS[name]
    np.savez(folder / "t.npz", blocks=TABLE, block_size=16)
    (folder / "duo").mkdir()
    (folder / "duo" / "full_attention_heads.tsv").write_text(HEADS)
    (folder / "duo" / "config.json").write_text('{"sink_size": 4, "recent_size": 30}')
    onnx.save(mixed_model(layers), folder / "model.onnx")
    options = Options(sparsify=spec.format(folder=folder), verify="layouts" in name or "biases" in name)
    report = stof.optimize(folder / "model.onnx", folder / "out.onnx", options)
    assert report.sparsity is not None
    assert {r.layer for r in report.sparsity.rows if r.sparsified} == set(patterns)
    return onnx.load(folder / "out.onnx"), report


@pytest.mark.parametrize("name", MODELS)
def test_layers_against_fp64(name: str, tmp_path: Path) -> None:
    """Some are verified; then a prompt and a token, with the library and by the function body."""
    layers, _, patterns = MODELS[name]
    found, report = optimized(name, tmp_path)
    assert report.replaced == len(layers)
    names = [o.name for o in found.graph.output]
    for queries, length in ((140, 140), (1, 139)):
        steps, feeds = draw(layers, queries, length)
        for library in (True, False):
            mine = run_shared(session(found, library=library), feeds)  # as SparseAttention demands
            values = dict(zip(names, mine, strict=True))
            for i, step in enumerate(steps):
                if step.sliding and queries > 1:
                    continue  # onnxruntime's kernel takes prompts that its cache has room for
                bias = np.zeros((1, 1, queries, length)) if step.bias is None else step.bias
                if i in patterns:
                    allowed = patterns[i][:, length - queries : length, :length]
                    step = replace(step, bias=np.where(allowed, bias, -np.inf))
                np.testing.assert_allclose(
                    values[f"layer{i}/output"], compute_step(step).output, atol=3e-5, rtol=1e-4,
                    err_msg=f"layer {i}, {queries} tokens, library {library}",
                )  # fmt: skip
