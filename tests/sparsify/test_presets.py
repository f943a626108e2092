# SPDX-License-Identifier: Apache-2.0
"""The patterns triangle and radial: pairs by their definitions, and whole models against fp64."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import masks
import numpy as np
import onnx
import pytest
from onnx import helper
from test_patterns import HEADS
from test_sites import H, draw, exact, fused, optimized, primitive, run

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cached_attention"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "paged_attention"))
import paged_models
import test_caches
from gqa_models import Shape, draw_step, feeds_of, model_of, session

import stof
from stof.cached_attention.checks.oracle import CacheStep
from stof.cached_attention.site import OP
from stof.errors import ArgumentError
from stof.options import Options
from stof.report import Report
from stof.runtime.library import Mask
from stof.sparsify.measure import allowed_pairs, measure_pattern
from stof.sparsify.patterns import HeadPattern, Pattern, build_pattern
from stof.sparsify.presets import RadialPattern, TrianglePattern
from stof.sparsify.spec import parse_spec

SIZE = 300
TRIANGLE = "triangle(sink=7,window=40,last=20)"
RADIAL = "radial(tokens=20)"


def whole(pattern: HeadPattern) -> Pattern:
    return build_pattern([(None, pattern)], HEADS)


@cache
def radial(size: int, tokens: int, sink: int) -> np.ndarray:
    return masks.radial(1, size, tokens, sink)


# ---- pairs ----


@pytest.mark.parametrize(
    ("pattern", "mask"),
    [
        (TrianglePattern(7, 40, 20), masks.triangle(1, SIZE, 7, 40, 20)),
        (TrianglePattern(0, 1, 1), masks.triangle(1, SIZE, 0, 1, 1)),
        (TrianglePattern(3, 30, SIZE), masks.dense(1, SIZE)),
        (RadialPattern(16), radial(SIZE, 16, 1)),
        (RadialPattern(20, 0), radial(SIZE, 20, 0)),
        (RadialPattern(37, 2), radial(SIZE, 37, 2)),
        (RadialPattern(400), np.ones((1, SIZE, SIZE), bool)),
    ],
)
def test_pairs_are_those_of_the_definition(pattern: HeadPattern, mask: np.ndarray) -> None:
    """By Python's evaluator and by the library's, for every pair."""
    made = whole(pattern)
    rows = np.arange(SIZE)
    library = Mask(made.mask.text, dict(made.tables)).evaluate(1, HEADS.H, SIZE, SIZE)[0].astype(bool)
    for h in range(HEADS.H):
        np.testing.assert_array_equal(allowed_pairs(made, h, rows, rows), mask[0])
        np.testing.assert_array_equal(library[h], mask[0])


def test_far_frames_keep_some_diagonals() -> None:
    """Beyond as many frames as a frame has tokens, one key of some frames stays."""
    made = whole(RadialPattern(16, 0))
    mask = radial(1100, 16, 0)
    rows = np.arange(1100)
    np.testing.assert_array_equal(allowed_pairs(made, 0, rows, rows), mask[0])
    kept = [mask[0, :16, f * 16 : f * 16 + 16].sum() for f in range(68)]
    assert kept[:2] == [256, 256]
    assert kept[31] == kept[16] == 16  # a window of one key
    assert [f for f in range(32, 64) if kept[f]] == list(range(32, 64, 2))
    assert [f for f in range(64, 68) if kept[f]] == [64]


def test_each_octave_halves_the_window() -> None:
    widths = RadialPattern(1560).widths()
    assert widths.dtype == np.int32
    assert widths[[0, 1, 2, 3, 4, 7, 8, 15, 1023, 1024]].tolist() == [1560, 1560, 780, 780, 390, 390, 195, 195, 3, 1]
    assert len(widths) * 1560 >= 1 << 22


@pytest.mark.parametrize("chunk", [5, 64, 100])
def test_chunks_have_the_pairs_of_the_prompt(chunk: int) -> None:
    """And more: the last rows of each chunk are dense, too."""
    pattern = whole(TrianglePattern(7, 40, 20))
    keys = np.arange(SIZE)
    prompt = allowed_pairs(pattern, 0, keys, keys)
    for first in range(0, SIZE, chunk):
        rows = keys[first : first + chunk]
        pairs = allowed_pairs(pattern, 0, rows, keys, past=first, count=len(rows))
        expected = masks.triangle(1, SIZE, 7, 40, 20, first=first, end=first + len(rows))[0]
        np.testing.assert_array_equal(pairs, expected[rows])
        assert not (prompt[rows] & ~pairs).any()


def test_what_is_said_of_densities() -> None:
    size = 32768
    facts = measure_pattern(whole(TrianglePattern()))
    rows = np.arange(size, dtype=np.int64)
    kept = np.minimum(rows + 1, 520)
    kept[-128:] = rows[-128:] + 1
    # 48 rows are looked at, and the last one is one of them.
    assert facts.density == pytest.approx((kept[:-128].sum() + size * size / 48) / (size * (size + 1) / 2), rel=0.05)
    assert (facts.is_causal, facts.is_per_kv_head, facts.is_cache_efficient) == (True, True, False)
    video = measure_pattern(whole(RadialPattern(1024)))
    table = RadialPattern(1024).widths()[np.abs(np.arange(32)[:, None] - np.arange(32)[None])].astype(np.int64)
    pairs = 1024 * (2 * table - 1) - table * (table - 1)  # of two frames, within a distance in space
    pairs[:, 0] = 1024**2
    assert video.density == pytest.approx(pairs.sum() / size**2, rel=0.05)
    assert not video.is_causal


# ---- clauses ----


def test_defaults() -> None:
    assert parse_spec("triangle").clauses[0].pattern == TrianglePattern(8, 512, 128)
    assert parse_spec("triangle:window=9,last=3,sink=0").clauses[0].pattern == TrianglePattern(0, 9, 3)
    assert parse_spec("radial:tokens=99").clauses[0].pattern == RadialPattern(99, 1)
    assert parse_spec("radial(tokens=16,sink=0)").clauses[0].pattern == RadialPattern(16, 0)


@pytest.mark.parametrize(
    ("spec", "sparse"),
    [
        ("triangle", [2, 3, 4]),
        ("triangle(layers=1)", [1]),
        ("triangle(layers=0:)", [0, 1, 2, 3, 4]),
        ("triangle(dense_layers=-1)", [2, 3]),
        ("triangle;window=9,layers=0:2", [0, 1, 2, 3, 4]),
        ("radial(tokens=16)", [0, 1, 2, 3, 4]),
    ],
)
def test_layers(spec: str, sparse: list[int]) -> None:
    assert [i for i in range(5) if parse_spec(spec).resolve(i, 5, HEADS) is not None] == sparse


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("triangle(window=0)", "has window=0, expected an integer from 1"),
        ("triangle(last=0)", "has last=0, expected an integer from 1"),
        ("triangle(sink=-1)", "has sink=-1, expected an integer from 0"),
        ("triangle(tokens=3)", "has key 'tokens', expected sink, window, last, layers"),
        ("radial", "has no tokens, expected an integer from 16"),
        ("radial(tokens=15)", "has tokens=15, expected an integer from 16"),
        ("radial(tokens=1024,sink=4097)", "has sink=4097, expected an integer from 0 to 4096"),
        ("radial(tokens=16,heads=0);window=9,heads=1", "heads of one attention have causal and bidirectional patterns"),
        ("triangle;window=9,layers=3", "two clauses are for KV head 0 of layer 3"),
    ],
)
def test_faults_name_clause_key_and_value(spec: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        parse_spec(spec).resolve(3, 5, HEADS)


# ---- attention without a cache ----


def unmasked(*, is_padded: bool = False) -> onnx.ModelProto:
    """Bidirectional attention as primitive nodes."""
    if not is_padded:
        return primitive(mask="none")
    model = primitive(mask="padded")
    nodes = [n for n in model.graph.node if "both" not in n.output]
    for node in nodes:
        node.input[:] = ["real4" if x == "both" else x for x in node.input]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return model


def bidirectional(*, groups: int = H) -> onnx.ModelProto:
    model = fused(groups=groups)
    del model.graph.node[0].attribute[:]
    return model


def row_of(report: Report) -> tuple[bool, str]:
    assert report.sparsity is not None
    (row,) = report.sparsity.rows
    return row.sparsified, row.reason


@pytest.mark.parametrize(
    ("model", "spec", "mask"),
    [
        (primitive(), TRIANGLE, masks.triangle(1, SIZE, 7, 40, 20)),
        (fused(), TRIANGLE, masks.triangle(1, SIZE, 7, 40, 20)),
        (fused(groups=2), "triangle:last=1,window=70", masks.triangle(1, SIZE, 8, 70, 1)),
        (unmasked(), RADIAL, radial(SIZE, 20, 1)),
        (bidirectional(), RADIAL, radial(SIZE, 20, 1)),
        (bidirectional(groups=2), "radial:tokens=37,sink=0", radial(SIZE, 37, 0)),
    ],
)
def test_an_operator_takes_them(model: onnx.ModelProto, spec: str, mask: np.ndarray, tmp_path: Path) -> None:
    """Verified, and right with the library and without."""
    report, found = optimized(model, tmp_path, spec)
    assert [(r.replaced, r.reason) for r in report.sites] == [(True, "replaced")]
    assert row_of(report) == (True, "")
    assert "OUTPUTS CHANGE" in report.to_text().splitlines()[0]
    feeds = draw(next(i.type.tensor_type.shape.dim[1].dim_value for i in model.graph.input if i.name == "k"))
    assert np.abs(exact(feeds, mask) - exact(feeds, mask | True)).max() > 0.1
    for library in (True, False):
        np.testing.assert_allclose(run(found, feeds, library=library), exact(feeds, mask), atol=3e-5, rtol=1e-4)


def test_some_heads_and_the_others_dense(tmp_path: Path) -> None:
    _, found = optimized(bidirectional(), tmp_path, "radial(tokens=20,heads=2:5)")
    mask = np.ones((H, SIZE, SIZE), bool)
    mask[2:5] = radial(SIZE, 20, 1)
    feeds = draw()
    for library in (True, False):
        np.testing.assert_allclose(run(found, feeds, library=library), exact(feeds, mask), atol=3e-5, rtol=1e-4)


def test_the_report_of_a_bidirectional_pattern(tmp_path: Path) -> None:
    report, _ = optimized(unmasked(), tmp_path, RADIAL, verify=False)
    text = report.to_text()
    assert "pattern on layer 0: radial over frames of 20 tokens + 1 first frame" in text
    assert "% of all pairs at 32768 tokens; per KV head; bidirectional" in text


def test_frames_count_from_the_first_token(tmp_path: Path) -> None:
    """Each sequence of a padded batch gets what it gets alone: padding to the left, to the right, on both sides, none."""
    report, found = optimized(unmasked(is_padded=True), tmp_path, RADIAL)
    assert report.replaced == 1
    assert row_of(report) == (True, "")
    feeds = draw(batch=4)
    spans = [(0, SIZE), (131, SIZE), (0, 170), (17, 203)]
    real = np.stack([(np.arange(SIZE) >= a) & (np.arange(SIZE) < b) for a, b in spans])
    for library in (True, False):
        mine = run(found, {**feeds, "real": real}, library=library)
        for i, (a, b) in enumerate(spans):
            alone = {n: x[i : i + 1, :, a:b] for n, x in feeds.items()}
            expected = exact(alone, radial(SIZE, 20, 1)[:, : b - a, : b - a])[0]
            np.testing.assert_allclose(mine[i, :, a:b], expected, atol=3e-5, rtol=1e-4)


def test_cross_attention_stays(tmp_path: Path) -> None:
    """Its keys are no frames."""
    model = bidirectional()
    for info in model.graph.input:
        if info.name != "q":
            info.type.tensor_type.shape.dim[2].dim_param = "T"
    report, _ = optimized(model, tmp_path, RADIAL, verify=False)
    assert row_of(report)[0] is False
    assert "its queries and keys may be of two sequences" in row_of(report)[1]


@pytest.mark.parametrize(
    ("model", "spec", "reason"),
    [
        (unmasked(), TRIANGLE, "its mask is no plain causal one"),
        (primitive(), RADIAL, "its mask forbids pairs: k <= q; 'radial over frames of 20 tokens"),
        (primitive(mask="window"), RADIAL, "its mask forbids pairs: "),
        (primitive(mask="padded"), TRIANGLE, "its sequences are padded, and 'triangle: 7 sinks"),
    ],
)
def test_other_attention_stays(model: onnx.ModelProto, spec: str, reason: str, tmp_path: Path) -> None:
    report, _ = optimized(model, tmp_path, spec, verify=False)
    assert row_of(report)[0] is False
    assert row_of(report)[1].startswith(reason)


# ---- attention over a cache ----


def exact_triangle(step: CacheStep) -> np.ndarray:
    """The output in fp64: each sequence has last rows of its own."""
    queries = step.query.shape[1]
    found = []
    for b, first in enumerate(step.before):
        end = int(first) + queries
        mask = masks.triangle(step.num_heads, max(SIZE, end), 7, 40, 20, first=int(first), end=end)
        found.append(test_caches.exact(step, mask)[b])
    return np.stack(found)


def optimized_cache(folder: Path, shape: Shape = test_caches.PLAIN, *, verify: bool = False) -> onnx.ModelProto:
    onnx.save(model_of(shape), folder / "model.onnx")
    options = Options(sparsify=TRIANGLE, verify=verify)
    assert stof.optimize(folder / "model.onnx", folder / "out.onnx", options).replaced == 1
    found = onnx.load(folder / "out.onnx")
    assert [n.op_type for n in found.graph.node] == [OP]
    return found


@pytest.mark.parametrize(
    ("lengths", "queries"),
    [*test_caches.STEPS.values(), ([SIZE, 150], 20), ([SIZE, 150], 21), ([299, 130, 64], 64)],
)
def test_steps_against_fp64(lengths: list[int], queries: int, tmp_path: Path) -> None:
    """With the library, and without it: the function body computes the pattern, too."""
    model = optimized_cache(tmp_path)
    step = draw_step(test_caches.PLAIN, lengths, queries, 310, seed=5)
    rows = ~step.padded
    expected = exact_triangle(step)
    # ONNX Runtime's node takes several tokens behind a past of one sequence only.
    has_body = len(lengths) == 1 or queries in (1, step.total)
    for library in (True, False) if has_body else (True,):
        found = session(model, library=library).run(None, feeds_of(test_caches.PLAIN, step))[0]
        np.testing.assert_allclose(found[rows], expected[rows], atol=3e-5, rtol=1e-4, err_msg=f"library {library}")


def test_a_decode_step_is_dense(tmp_path: Path) -> None:
    model = optimized_cache(tmp_path)
    step = draw_step(test_caches.PLAIN, [299, 64], 1, 310, seed=5)
    expected = test_caches.exact(step, masks.dense(HEADS.H, SIZE))
    found = session(model, library=True).run(None, feeds_of(test_caches.PLAIN, step))[0]
    np.testing.assert_allclose(found, expected, atol=3e-5, rtol=1e-4)


def test_verified_with_all_that_a_node_does(tmp_path: Path) -> None:
    shape = Shape(H=8, G=4, D=32, packed=True, rotary=16, sink=True, softcap=3.0, bias=(1, 8))
    optimized_cache(tmp_path, shape, verify=True)


def test_radial_over_a_cache_stays(tmp_path: Path) -> None:
    onnx.save(model_of(test_caches.PLAIN), tmp_path / "model.onnx")
    report = stof.optimize(tmp_path / "model.onnx", tmp_path / "out.onnx", Options(sparsify=RADIAL, verify=False))
    assert row_of(report)[0] is False
    assert row_of(report)[1].startswith("its mask is causal: 'radial over frames of 20 tokens")


def test_pages_stay(tmp_path: Path) -> None:
    """A step has sequences of several lengths, which a mask over pages cannot read."""
    onnx.save(paged_models.model_of(paged_models.Shape(H=8, G=4, D=16)), tmp_path / "model.onnx")
    report = stof.optimize(tmp_path / "model.onnx", tmp_path / "out.onnx", Options(sparsify=TRIANGLE, verify=False))
    assert row_of(report)[0] is False
    assert row_of(report)[1].startswith("over pages each sequence of a step has its own length")
    masks_of_nodes = [
        helper.get_node_attr_value(n, "mask")
        for n in onnx.load(tmp_path / "out.onnx").graph.node
        if n.op_type == "StofPagedAttention"
    ]
    assert masks_of_nodes == [b"k <= q"]
