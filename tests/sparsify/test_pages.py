# SPDX-License-Identifier: Apache-2.0
"""Declared patterns on PagedAttention, through the whole optimizer: prompts, chunks and decoding against fp64."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import masks
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from test_patterns import HEADS, KINDS, SIZE, wanted

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "paged_attention"))
from paged_models import Shape, draw_step, feeds_of, model_of, run_shared, session

import stof
from stof import cli, pipeline
from stof.cached_attention import rewrite
from stof.cached_attention.paged import checks
from stof.cached_attention.paged.oracle import PagedStep
from stof.cached_attention.paged.site import OP, PagedSite
from stof.options import Options
from stof.report import Report
from stof.sparsify.spec import Clause, SparsitySpec

PLAIN = Shape(H=HEADS.H, G=HEADS.G, D=16)
# Keys before a step, and new tokens: prompts, decoding of ragged sequences, chunks behind pasts.
STEPS: dict[str, tuple[list[int], list[int]]] = {
    "prompts": ([0, 0, 0], [40, 131, 7]),
    "long prompt": ([0], [SIZE]),
    "decode": ([298, 0, 63, 129], [1, 1, 1, 1]),
    "chunks": ([140, 0, 10], [70, 0, 3]),
}


def optimized(
    kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch, shape: Shape = PLAIN, *, verify: bool = False
) -> tuple[Report, onnx.ModelProto]:
    spec = SparsitySpec("test", (Clause(KINDS[kind][0]),))
    monkeypatch.setattr(pipeline, "parse_spec", lambda text: spec)
    onnx.save(model_of(shape), folder / "model.onnx")
    report = stof.optimize(folder / "model.onnx", folder / "out.onnx", Options(sparsify="test", verify=verify))
    assert report.to_text().startswith(f"{folder / 'model.onnx'}: OUTPUTS CHANGE: --sparsify puts a pattern on 1 of 1 ")
    found = onnx.load(folder / "out.onnx")
    assert [n.op_type for n in found.graph.node] == [OP]
    return report, found


def exact(step: PagedStep, mask: np.ndarray) -> np.ndarray:
    """The output in fp64; keys of each sequence are gathered from its blocks, and new ones put behind them."""
    assert step.key is not None
    assert step.value is not None
    groups, size = step.kv_num_heads, step.key_cache.shape[3]
    found = np.zeros((len(step.query), step.num_heads * size))
    for b, past in enumerate(step.past):
        begin, end = int(step.cumulative[b]), int(step.cumulative[b + 1])
        rows = step.rows_of(b, int(past))
        whole = []
        for cache, new in ((step.key_cache, step.key), (step.value_cache, step.value)):
            old = cache.reshape(-1, groups, size)[rows]
            keys = np.concatenate([old, new[begin:end].reshape(-1, groups, size)])
            whole.append(keys.swapaxes(0, 1)[None])
        if end > begin:
            length = int(past) + end - begin
            found[begin:end] = masks.attention(step.query[None, begin:end], whole[0], whole[1], mask, [length])[0]
    return found


def assert_right(
    model: onnx.ModelProto, kind: str, shape: Shape, steps: Sequence[PagedStep], atol: float = 3e-5
) -> None:
    """With the library, and without it: the function body computes the pattern, too."""
    expected = [exact(step, wanted(kind)) for step in steps]
    for library in (True, False):
        made = session(model, library=library)
        for step, output in zip(steps, expected, strict=True):
            found = made.run(None, feeds_of(shape, step))[0].astype(np.float64)
            np.testing.assert_allclose(found, output, atol=atol, rtol=1e-4, err_msg=f"library {library}")


@pytest.mark.parametrize("kind", KINDS)
def test_steps_against_fp64(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, model = optimized(kind, tmp_path, monkeypatch)
    steps = [draw_step(PLAIN, past, tokens, seed=5, padding=2) for past, tokens in STEPS.values()]
    assert_right(model, kind, PLAIN, steps)


@pytest.mark.parametrize("kind", ["s2", "window and sinks", "vertical-slash", "streaming", "blocks"])
def test_shared_pages_in_place(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences with a common prefix own its blocks together; caches are updated in place, by the body, too."""
    _, model = optimized(kind, tmp_path, monkeypatch)
    step = draw_step(PLAIN, [100, 90, 64], [1, 20, 3], seed=7)
    table = step.table.copy()
    table[:, :4] = table[0, :4]
    step = replace(step, table=table)
    caches = [x.reshape(-1, PLAIN.G, PLAIN.D).copy() for x in (step.key_cache, step.value_cache)]
    for b, past in enumerate(step.past):
        begin, end = int(step.cumulative[b]), int(step.cumulative[b + 1])
        rows = step.rows_of(b, int(past) + end - begin)[int(past) :]
        for cache, new in zip(caches, (step.key, step.value), strict=True):
            assert new is not None
            cache[rows] = new[begin:end].reshape(-1, PLAIN.G, PLAIN.D)
    for library in (True, False):
        output, *found = run_shared(session(model, library=library), feeds_of(PLAIN, step))
        np.testing.assert_allclose(output, exact(step, wanted(kind)), atol=3e-5, rtol=1e-4)
        for one, other in zip(found, caches, strict=True):
            np.testing.assert_array_equal(one.reshape(other.shape), other)


@pytest.mark.parametrize("groups", [1, 8])
def test_one_kv_head_and_one_for_each_query_head(groups: int, tmp_path: Path) -> None:
    shape = Shape(H=8, G=groups, D=16, block=32)
    onnx.save(model_of(shape), tmp_path / "model.onnx")
    options = Options(sparsify="s2:local=2,stride=16,block=16", verify=False)
    assert stof.optimize(tmp_path / "model.onnx", tmp_path / "out.onnx", options).replaced == 1
    mask = masks.to_query_heads(masks.s2(groups, SIZE, 2, 16, 16), 8)
    step = draw_step(shape, [250, 0, 290], [20, 33, 1], seed=5)
    for library in (True, False):
        found = session(onnx.load(tmp_path / "out.onnx"), library=library).run(None, feeds_of(shape, step))[0]
        np.testing.assert_allclose(found, exact(step, mask), atol=3e-5, rtol=1e-4, err_msg=f"library {library}")


@pytest.mark.parametrize("kind", ["s2", "vertical-slash"])
def test_half_precision(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = replace(PLAIN, dtype="float16")
    _, model = optimized(kind, tmp_path, monkeypatch, shape)
    assert_right(model, kind, shape, [draw_step(shape, [298, 64], [1, 2], seed=6)], atol=5e-3)


@pytest.mark.parametrize("kind", ["s2", "window and sinks", "streaming", "vertical-slash"])
def test_verified(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With everything that a node does; the report has the pattern's costs."""
    shape = replace(PLAIN, D=32, packed=True, rotary=16, sink=True, softcap=3.0, norms=True, metadata=True)
    report, _ = optimized(kind, tmp_path, monkeypatch, shape, verify=True)
    assert report.verification is not None
    assert report.verification.complete
    assert {c.site for c in report.verification.comparisons if c.site} == {"node"}
    assert report.sparsity is not None
    (row,) = report.sparsity.rows
    assert row.is_per_kv_head
    assert row.is_cache_efficient == (kind != "vertical-slash")
    assert not row.is_by_bias
    assert "KV-cache efficient" in report.to_text()


def test_layers_with_and_without_a_pattern(tmp_path: Path) -> None:
    """One function body: two patterns, one of them with a table, a window of the model's, and a dense layer."""
    shape = replace(PLAIN, packed=True)
    table = np.tril(np.random.default_rng(0).random((1, 4, 4)) < 0.5) | np.eye(4, dtype=bool)
    np.savez(tmp_path / "table.npz", blocks=table, block_size=64)
    model = model_of(shape, replace(shape, window=9), shape, shape)
    onnx.save(model, tmp_path / "model.onnx")
    spec = f"window=20,sink=3,layers=2;{tmp_path / 'table.npz'},layers=3;window=5,layers=1"
    report = stof.optimize(tmp_path / "model.onnx", tmp_path / "out.onnx", Options(sparsify=spec))
    assert report.sparsity is not None
    assert [r.reason for r in report.sparsity.rows] == [
        "--sparsify leaves it dense",
        "its mask is no plain causal one: it has a window of 9 keys",
        "",
        "",
    ]
    found = onnx.load(tmp_path / "out.onnx")
    onnx.checker.check_model(found)
    (function,) = (f for f in found.functions if f.name == OP)
    bodies = [n for n in function.node if n.op_type == "If"]
    assert len(bodies) == 1
    step = draw_step(shape, [90, 0], [3, 120], seed=3)
    feeds = {n: a for i in range(4) for n, a in feeds_of(shape, step, f"layer{i}/").items()}
    outputs = session(found, library=True).run(["layer2/output", "layer3/output"], feeds)
    query, key, value = np.split(step.query, [PLAIN.H * PLAIN.D, (PLAIN.H + PLAIN.G) * PLAIN.D], axis=1)
    plain = replace(step, query=query, key=key, value=value)
    expected = (masks.window(8, 200, 20, 3), np.repeat(masks.blocks(table, 200, 64), 8, 0))
    for mine, mask in zip(outputs, expected, strict=True):
        np.testing.assert_allclose(mine, exact(plain, mask), atol=3e-5, rtol=1e-4)


def test_two_patterns_without_the_library(tmp_path: Path) -> None:
    """Branches of one body, which read tables of different types."""
    columns = [{f"{h}": ["vertical_and_slash", [0, 5 + h], [1, 30], 1.0] for h in range(8)}] * 2
    (tmp_path / "p.json").write_text(json.dumps(columns))
    onnx.save(model_of(PLAIN, PLAIN), tmp_path / "model.onnx")
    spec = f"{tmp_path / 'p.json'},layers=0;window=20,sink=3,layers=1"
    stof.optimize(tmp_path / "model.onnx", tmp_path / "out.onnx", Options(sparsify=spec, verify=False))
    step = draw_step(PLAIN, [90, 0], [3, 60], seed=3)
    feeds = {n: a for i in range(2) for n, a in feeds_of(PLAIN, step, f"layer{i}/").items()}
    marks = masks.vertical_slash([[0, 5 + h] for h in range(8)], [[1, 30]] * 8, 200)
    for library in (True, False):
        made = session(onnx.load(tmp_path / "out.onnx"), library=library)
        outputs = made.run(["layer0/output", "layer1/output"], feeds)
        for mine, mask in zip(outputs, (marks, masks.window(8, 200, 20, 3)), strict=True):
            np.testing.assert_allclose(mine, exact(step, mask), atol=3e-5, rtol=1e-4, err_msg=f"library {library}")


def test_another_mask_in_the_result_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A site whose node has a shorter window than declared stays dense, and the report does not say otherwise."""
    emit = rewrite.emit_pages

    def faulty(model: onnx.ModelProto, sites: Sequence[PagedSite]) -> onnx.ModelProto:
        found = emit(model, sites)
        for attribute in (a for n in found.graph.node for a in n.attribute if a.name == "mask"):
            attribute.s = attribute.s.replace(b"40", b"39")
        return found

    monkeypatch.setattr(rewrite, "emit_pages", faulty)
    onnx.save(model_of(PLAIN), tmp_path / "model.onnx")
    report = stof.optimize(tmp_path / "model.onnx", tmp_path / "out.onnx", Options(sparsify="window=40"))
    assert not report.replaced
    assert "mask" in report.caches[0].reason
    assert "--sparsify changes nothing" in report.to_text()


@pytest.mark.parametrize("past", [False, True])
def test_an_operator_with_another_table_is_found(past: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the captured step, and behind a past: there the faulty operator is right in the steps of the model."""
    run = checks.run_paged_step

    def faulty(attributes: dict[str, int | float | str], step: PagedStep) -> object:
        most = int((step.past + np.diff(step.cumulative)).max())
        changed = tuple(np.ones_like(t) for t in step.tables) if most > 700 or not past else step.tables
        return run(attributes, replace(step, tables=changed))

    monkeypatch.setattr(checks, "run_paged_step", faulty)
    table = np.eye(16, dtype=bool)[None]
    np.savez(tmp_path / "table.npz", blocks=table, block_size=64)
    onnx.save(model_of(PLAIN), tmp_path / "model.onnx")
    options = Options(sparsify=str(tmp_path / "table.npz"))
    report = stof.optimize(tmp_path / "model.onnx", tmp_path / "out.onnx", options)
    assert not report.replaced
    assert ("behind a past" in report.caches[0].reason) or not past


def test_skipped_and_on_other_targets(tmp_path: Path) -> None:
    """What no operator takes stays dense: PagedAttention has no input for a pattern."""
    onnx.save(model_of(PLAIN), tmp_path / "model.onnx")
    for options, reason in (
        (Options(sparsify="window=5", skip=("cache:0",)), "left out by --skip"),
        (Options(sparsify="window=5", target="tensorrt"), "nothing was replaced"),
    ):
        report = stof.optimize(tmp_path / "model.onnx", tmp_path / "out.onnx", options)
        assert "--sparsify changes nothing" in report.to_text()
        assert report.sparsity is not None
        assert [r.sparsified for r in report.sparsity.rows] == [False]
        assert reason in report.sparsity.rows[0].reason


def test_a_site_of_another_type_stays_dense(tmp_path: Path) -> None:
    """Its pattern is not written, and the first line counts it as dense."""
    onnx.save(model_of(PLAIN, replace(PLAIN, dtype="float16")), tmp_path / "model.onnx")
    options = Options(sparsify="window=20", verify=False)
    report = stof.optimize(tmp_path / "model.onnx", tmp_path / "out.onnx", options)
    assert "OUTPUTS CHANGE: --sparsify puts a pattern on 1 of 2 attentions" in report.to_text()
    assert "dense layer 1: no operator took it, and PagedAttention has no input for a pattern" in report.to_text()
    assert [n.op_type for n in onnx.load(tmp_path / "out.onnx").graph.node] == [OP, "PagedAttention"]


WORDS, H, G, D = 31, 4, 2, 16
IDS = np.random.default_rng(2).integers(0, WORDS, (2, 300))


def decoder(path: Path, *, axes: int = 1, last: bool = False, kept: bool = False) -> Path:
    """Tokens, embedding, attention over pages, logits; ``axes`` of the tokens, logits of the last token alone.

    ``kept``: a second attention whose node no operator takes.
    """
    rng = np.random.default_rng(1)
    shape = Shape(H=H, G=G, D=D, packed=True, rotary=16, metadata=True)
    model = model_of(shape)
    graph = model.graph
    width = (H + 2 * G) * D
    arrays = {
        "embedding": rng.standard_normal((WORDS, width)), "head": rng.standard_normal((H * D, WORDS)) * 0.1,
        "cos": np.cos(np.arange(512)[:, None] * 0.7 / (1 + np.arange(8))),
        "sin": np.sin(np.arange(512)[:, None] * 0.7 / (1 + np.arange(8))),
    }  # fmt: skip
    graph.initializer.extend(numpy_helper.from_array(a.astype(np.float32), n) for n, a in arrays.items())
    graph.initializer.append(numpy_helper.from_array(np.array([-1, width]), "flat"))
    graph.initializer.append(numpy_helper.from_array(np.array(-1), "end"))
    kept_inputs = [i for i in graph.input if i.name not in ("query", "cos", "sin")]
    del graph.input[:]
    sizes = ["N"] if axes == 1 else [1, "N"]
    graph.input.extend([helper.make_tensor_value_info("input_ids", TensorProto.INT64, sizes), *kept_inputs])
    graph.node.insert(0, helper.make_node("Gather", ["embedding", "input_ids"], ["embedded"]))
    graph.node.insert(1, helper.make_node("Reshape", ["embedded", "flat"], ["query"]))
    rows = "output"
    if last:
        graph.initializer.append(numpy_helper.from_array(np.array([1]), "one"))
        graph.initializer.append(numpy_helper.from_array(np.array([1 << 30]), "behind"))
        graph.node.extend(
            [
                helper.make_node("Slice", ["cumulative", "one", "behind"], ["ends"]),
                helper.make_node("Cast", ["ends"], ["ends64"], to=TensorProto.INT64),
                helper.make_node("Add", ["ends64", "end"], ["lasts"]),
                helper.make_node("Gather", ["output", "lasts"], ["rows"]),
            ]
        )
        rows = "rows"
    graph.node.append(helper.make_node("MatMul", [rows, "head"], ["logits"]))
    caches = [o for o in graph.output if o.name.endswith("_out")]
    if kept:
        node = next(n for n in graph.node if n.op_type == "PagedAttention")
        other = onnx.NodeProto()
        other.CopyFrom(node)
        other.name = "kept"
        other.attribute.append(helper.make_attribute("is_causal", 0))
        other.input[3], other.input[4] = "key_cache2", "value_cache2"
        other.output[:] = ["output2", "key_out2", "value_out2"]
        graph.node.append(other)
        for o, i, name in ((0, 3, "key"), (1, 4, "value")):
            info = onnx.ValueInfoProto()
            info.CopyFrom(caches[o])
            info.name = node.input[i] + "2"
            graph.input.append(info)
            out = onnx.ValueInfoProto()
            out.CopyFrom(caches[o])
            out.name = f"{name}_out2"
            caches.append(out)
    del graph.output[:]
    graph.output.extend(
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["B" if last else "N", WORDS]), *caches]
    )
    onnx.save(model, path)
    return path


def run_prompts(path: Path, folder: Path, *options: str) -> tuple[int, dict[str, object]]:
    report, prompts = folder / "report.json", folder / "prompts.npy"
    np.save(prompts, IDS)
    words = [path, "-o", folder / "out.onnx", "--json", report, "--prompts", prompts, "--max-kl", "100", *options]
    status = cli.main([*map(str, words)])
    return status, json.loads(report.read_text())["sparsify"] if report.exists() else {}


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return np.asarray(e / e.sum(-1, keepdims=True))


def logits_of(model: Path, mask: np.ndarray) -> np.ndarray:
    """[2, 300, words] of whole prompts, in fp64."""
    arrays = {t.name: numpy_helper.to_array(t).astype(np.float64) for t in onnx.load(model).graph.initializer}
    found = []
    for ids in IDS:
        packed = arrays["embedding"][ids].reshape(len(ids), H + 2 * G, D)
        cos, sin = (arrays[n][: len(ids), None] for n in ("cos", "sin"))
        one, other = packed[..., : D // 2], packed[..., D // 2 :]
        turned = np.concatenate([one * cos - other * sin, other * cos + one * sin], -1)
        query, key = turned[:, :H].reshape(1, len(ids), -1), turned[:, H : H + G].swapaxes(0, 1)[None]
        value = packed[:, H + G :].swapaxes(0, 1)[None]
        found.append(masks.attention(query, key, value, mask, [len(ids)])[0] @ arrays["head"])
    return np.stack(found)


@pytest.mark.parametrize("made", [{}, {"axes": 2, "last": True}])
def test_the_loss_is_measured(made: dict[str, int], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On whole prompts, and token by token over the pages, as an fp64 model of NumPy has it."""
    path = decoder(tmp_path / "model.onnx", **made)
    status, found = run_prompts(path, tmp_path, "--no-verify", "--sparsify", "window=20,sink=2")
    assert status == 0, capsys.readouterr().err
    p, q = (softmax(logits_of(path, m)) for m in (masks.dense(H, 300), masks.window(H, 300, 20, 2)))
    kl = (p * np.log(p / q)).sum(-1)
    loss, decoded = found["loss"], found["decode_loss"]
    assert isinstance(loss, dict)
    assert isinstance(decoded, dict)
    rows = [299] if made.get("last") else list(range(300))
    assert loss["tokens"] == 2 * len(rows)
    assert loss["kl"] == pytest.approx(kl[:, rows].mean(), rel=1e-3)
    assert loss["kl"] > 1e-3
    steps = [*range(248, 256), *range(292, 300)]
    assert decoded["kl"] == pytest.approx(kl[:, steps].mean(), rel=1e-3)
    assert [(b["first"], b["count"]) for b in decoded["buckets"]] == [(0, 16), (256, 16)]


def test_a_whole_decoder_is_verified(tmp_path: Path) -> None:
    status, found = run_prompts(
        decoder(tmp_path / "model.onnx"), tmp_path, "--sparsify", "s2:local=2,stride=4,block=16"
    )
    assert status == 0
    assert found["outputs_change"]


def test_a_loss_that_cannot_be_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where a PagedAttention stays, no runtime on the CPU runs the result."""
    path = decoder(tmp_path / "model.onnx", kept=True)
    assert run_prompts(path, tmp_path, "--no-verify", "--sparsify", "window=20")[0] == 2
    message = capsys.readouterr().err
    assert "the loss on --prompts cannot be measured: 'kept' stays PagedAttention" in message
    assert not (tmp_path / "out.onnx").exists()


def test_prompts_beyond_the_rotary_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "long.npy", np.zeros(600, np.int64))
    words = [decoder(tmp_path / "model.onnx"), "-o", tmp_path / "out.onnx", "--no-verify", "--sparsify", "window=20"]
    assert cli.main([*map(str, words), "--prompts", str(tmp_path / "long.npy")]) == 1
    assert "takes no step of 600 tokens of one sequence behind 0 keys" in capsys.readouterr().err
