# SPDX-License-Identifier: Apache-2.0
"""Declared patterns on GroupQueryAttention over a cache, through the whole optimizer: prompts and decoding against fp64."""

from __future__ import annotations

import sys
from pathlib import Path

import masks
import numpy as np
import onnx
import pytest
from test_patterns import HEADS, KINDS, SIZE, wanted

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cached_attention"))
from gqa_models import Shape, draw_step, feeds_of, model_of, session

import stof
from stof import pipeline
from stof.cached_attention.checks.oracle import CacheStep
from stof.cached_attention.site import OP
from stof.errors import VerifyError
from stof.options import Options
from stof.sparsify.spec import Clause, SparsitySpec

PLAIN = Shape(H=HEADS.H, G=HEADS.G, D=16)
# Lengths after a step, and new tokens: first prompts with padding, decoding of ragged sequences, a chunk behind a past.
STEPS = {
    "prompt": ([40, 131, 7], 131),
    "long prompt": ([SIZE], SIZE),
    "decode": ([299, 1, 64, 130], 1),
    "chunk": ([210], 70),
}


def optimized(
    kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch, shape: Shape = PLAIN, *, verify: bool = False
) -> onnx.ModelProto:
    spec = SparsitySpec("test", (Clause(KINDS[kind][0]),))
    monkeypatch.setattr(pipeline, "parse_spec", lambda text: spec)
    onnx.save(model_of(shape), folder / "model.onnx")
    report = stof.optimize(folder / "model.onnx", folder / "out.onnx", Options(sparsify="test", verify=verify))
    assert report.to_text().startswith(f"{folder / 'model.onnx'}: OUTPUTS CHANGE: --sparsify puts a pattern on 1 of 1 ")
    found = onnx.load(folder / "out.onnx")
    assert [n.op_type for n in found.graph.node] == [OP]
    return found


def exact(step: CacheStep, mask: np.ndarray) -> np.ndarray:
    """The output in fp64; the new rows are put into a cache by hand."""
    assert step.past_key is not None
    assert step.past_value is not None
    caches = []
    for past, new in ((step.past_key, step.key), (step.past_value, step.value)):
        assert new is not None
        cache = past.astype(np.float64)
        for b, length in enumerate(step.lengths):
            first = int(step.before[b])
            rows = new[b].reshape(new.shape[1], step.kv_num_heads, -1).swapaxes(0, 1)
            cache[b, :, first:length] = rows[:, : length - first]
        caches.append(cache)
    return masks.attention(step.query, caches[0], caches[1], mask, [int(n) for n in step.lengths])


@pytest.mark.parametrize("step_name", STEPS)
@pytest.mark.parametrize("kind", KINDS)
def test_steps_against_fp64(kind: str, step_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the library, and without it: the function body computes the pattern, too."""
    model = optimized(kind, tmp_path, monkeypatch)
    lengths, queries = STEPS[step_name]
    step = draw_step(PLAIN, lengths, queries, 310, seed=5)
    expected = exact(step, wanted(kind))
    rows = ~step.padded
    for library in (True, False):
        found = session(model, library=library).run(None, feeds_of(PLAIN, step))[0]
        np.testing.assert_allclose(found[rows], expected[rows], atol=3e-5, rtol=1e-4, err_msg=f"library {library}")


@pytest.mark.parametrize(
    "kind", ["s2", "s2, dense heads", "window and sinks", "text", "streaming", "vertical-slash", "blocks"]
)
def test_the_pattern_forbids_something_in_these_steps(kind: str) -> None:
    """Else the comparisons with fp64 would hold for a dense model, too."""
    step = draw_step(PLAIN, [SIZE], SIZE, 310, seed=5)
    away = np.abs(exact(step, wanted(kind)) - exact(step, masks.dense(HEADS.H, SIZE)))
    assert away.max() > 0.1


@pytest.mark.parametrize("groups", [1, 8])
def test_one_kv_head_and_one_for_each_query_head(groups: int, tmp_path: Path) -> None:
    shape = Shape(H=8, G=groups, D=16)
    onnx.save(model_of(shape), tmp_path / "model.onnx")
    options = Options(sparsify="s2:local=2,stride=16,block=16", verify=False)
    assert stof.optimize(tmp_path / "model.onnx", tmp_path / "out.onnx", options).replaced == 1
    model = onnx.load(tmp_path / "out.onnx")
    mask = masks.to_query_heads(masks.s2(groups, SIZE, 2, 16, 16), 8)
    for lengths, queries in ((STEPS["long prompt"]), (STEPS["decode"])):
        step = draw_step(shape, lengths, queries, 310, seed=5)
        for library in (True, False):
            found = session(model, library=library).run(None, feeds_of(shape, step))[0]
            np.testing.assert_allclose(found, exact(step, mask), atol=3e-5, rtol=1e-4, err_msg=f"library {library}")


@pytest.mark.parametrize("kind", ["s2", "blocks", "vertical-slash"])
def test_half_precision(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape(H=8, G=4, D=16, dtype="float16")
    model = optimized(kind, tmp_path, monkeypatch, shape)
    step = draw_step(shape, [299, 65], 1, 310, seed=6)
    for library in (True, False):
        found = session(model, library=library).run(None, feeds_of(shape, step))[0]
        np.testing.assert_allclose(found.astype(np.float64), exact(step, wanted(kind)), atol=5e-3)


@pytest.mark.parametrize("kind", ["s2", "s2, query heads", "window and sinks", "streaming", "blocks", "vertical-slash"])
def test_verified(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sites against fp64, and outputs against a dense model whose attention has the same mask; with everything a node does."""
    shape = Shape(H=8, G=4, D=32, packed=True, rotary=16, sink=True, softcap=3.0, bias=(1, 8))
    optimized(kind, tmp_path, monkeypatch, shape, verify=True)


def test_the_bias_of_bfloat16_is_selected_in_fp32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No CPU provider has Where for bf16."""
    shape = Shape(H=8, G=4, D=16, dtype="bfloat16")
    model = optimized("blocks", tmp_path, monkeypatch, shape)
    with pytest.raises(Exception, match="implementation for GroupQueryAttention"):  # the nodes before it have one
        session(model, library=False)


def test_another_mask_in_the_result_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator with a shorter window than declared fails at its site."""
    from stof.cached_attention import rewrite

    emit = rewrite.emit_caches

    def faulty(model: onnx.ModelProto, sites: object) -> onnx.ModelProto:
        found = emit(model, sites)  # type: ignore[arg-type]
        for node in found.graph.node:
            for attribute in node.attribute:
                if attribute.name == "mask":
                    attribute.s = attribute.s.replace(b"40", b"39")
        return found

    monkeypatch.setattr(rewrite, "emit_caches", faulty)
    onnx.save(model_of(PLAIN), tmp_path / "model.onnx")
    report = stof.optimize(tmp_path / "model.onnx", tmp_path / "out.onnx", Options(sparsify="window=40"))
    assert not report.replaced
    assert "mask" in report.caches[0].reason
    assert "--sparsify changes nothing" in report.to_text()


def test_a_body_with_a_dense_mask_would_be_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The original's outputs differ from those of the pattern, so that verification cannot pass by the dense model."""
    from stof.verification import verifier

    seen: list[onnx.ModelProto] = []
    make = verifier.Verifier.__init__

    def keep(self: object, original: onnx.ModelProto, *rest: object, **named: object) -> None:
        seen.append(original)
        make(self, original, *rest, **named)  # type: ignore[arg-type, misc]

    monkeypatch.setattr(verifier.Verifier, "__init__", keep)
    optimized("s2", tmp_path, monkeypatch, verify=True)
    step = draw_step(PLAIN, [SIZE], SIZE, 310, seed=5)
    reference = session(seen[0], library=False).run(None, feeds_of(PLAIN, step))[0]
    np.testing.assert_allclose(reference, exact(step, wanted("s2")), atol=3e-5, rtol=1e-4)


def test_the_body_has_no_dead_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runtimes warn of constants that nothing reads, at each load of the model."""
    (function,) = optimized("window and sinks", tmp_path, monkeypatch).functions
    read = {name for node in function.node for name in node.input} | set(function.output)
    assert [n.name for n in function.node if not read.intersection(n.output)] == []


def test_layers_with_and_without_a_pattern(tmp_path: Path) -> None:
    """The variants of one function body: dense, and two patterns."""
    shape = Shape(packed=True, rotary=16)
    model = model_of(*[shape] * 4, masks=True)
    onnx.save(model, tmp_path / "model.onnx")
    spec = "s2:local=1,stride=4,block=16,layers=1:3;window=20,sink=3,layers=3"
    report = stof.optimize(tmp_path / "model.onnx", tmp_path / "out.onnx", Options(sparsify=spec))
    assert report.replaced == 4
    assert report.sparsity is not None
    assert [(r.layer, r.sparsified) for r in report.sparsity.rows] == [(0, False), (1, True), (2, True), (3, True)]
    assert report.sparsity.rows[0].reason == "--sparsify leaves it dense"
    found = onnx.load(tmp_path / "out.onnx")
    step = draw_step(shape, [90], 90, 100)
    feeds = {k: v for i in range(4) for k, v in feeds_of(shape, step, f"layer{i}/").items()}
    feeds = {k: v for k, v in feeds.items() if k not in ("seqlens_k", "total")}
    feeds["attention_mask"] = np.ones((1, 90), np.int64)
    mine = session(found, library=True).run(None, feeds)
    body = session(found, library=False).run(None, feeds)
    dense = session(model, library=False).run(None, feeds)
    names = [o.name for o in model.graph.output]
    for name, one, other, old in zip(names, mine, body, dense, strict=True):
        if name.endswith("/output"):
            np.testing.assert_allclose(one, other, atol=2e-5, rtol=1e-4)
            assert (np.abs(one - old).max() < 1e-4) == name.startswith("layer0")


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        (Shape(window=9), "its mask is no plain causal one: it has a window of 9 keys"),
        (Shape(window=9, sliding=True), "its cache holds the last positions only (sliding_window_cache)"),
    ],
)
def test_attention_with_a_mask_of_its_own_stays(shape: Shape, reason: str, tmp_path: Path) -> None:
    onnx.save(model_of(shape, masks=True), tmp_path / "model.onnx")
    report = stof.optimize(tmp_path / "model.onnx", tmp_path / "out.onnx", Options(sparsify="window=5"))
    assert report.sparsity is not None
    assert [r.reason for r in report.sparsity.rows] == [reason]
    assert "--sparsify changes nothing" in report.to_text()
    assert report.replaced == 1


def test_nothing_is_written_where_verification_fails(tmp_path: Path) -> None:
    onnx.save(model_of(PLAIN), tmp_path / "model.onnx")
    options = Options(sparsify="window=40", verify_memory=1 << 20)
    with pytest.raises(VerifyError, match="memory"):
        stof.optimize(tmp_path / "model.onnx", tmp_path / "out.onnx", options)
    assert not (tmp_path / "out.onnx").exists()
