# SPDX-License-Identifier: Apache-2.0
"""The bench of whole decoders: its graph against NumPy, bytes and bounds, refusals and results that differ."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy_decoder import read_weights, run_decoder

from bench.cli import main
from bench.decoder.build_decoder import build_decoder
from bench.decoder.devices import HostDevice
from bench.decoder.graph import Decoder, DecoderShape
from bench.decoder.measure_decoder import DecoderPlan, describe_record, measure_decoder, summarize
from bench.decoder.run import plan_of
from bench.decoder.steps import Caches, DecoderStep, DecoderTensors
from bench.decoder.variants import (
    CACHED,
    VARIANTS,
    cache_bytes_read,
    keys_of_query,
    masks_of,
    pair_share,
    write_graphs,
    write_weights,
)
from stof.mask.expression import CAUSAL, MaskExpression

SHAPE = DecoderShape(32, 4, 2, 16, 48, 24, 2, 64, "float32")
PLAN = DecoderPlan(
    SHAPE,
    (DecoderStep(2, 1, 40, 40), DecoderStep(1, 1, 9, 40)),
    DecoderStep(1, 16, 16, 16),
    DecoderStep(1, 20, 20, 32),
    1,
)
DENSE = tuple(v for v in VARIANTS if v.name in ("gqa", "stof"))
PATTERN = replace(next(v for v in VARIANTS if v.name == "stof-sinks"), sparsify="window=5,sink=2")
WINDOWED = (
    replace(next(v for v in VARIANTS if v.name == "gqa-window"), window=6),
    replace(next(v for v in VARIANTS if v.name == "stof-window"), window=6),
)


class Host(HostDevice):
    """The CPU with a given read rate, so that nothing is measured for it."""

    def read_rate(self) -> float:
        return 1e9


def files(folder: Path, variants: Any = DENSE) -> Decoder:
    """The files of some variants with their weights."""
    decoder = build_decoder(SHAPE)
    write_weights(decoder, Host(1), folder)
    write_graphs(SHAPE, "cpu", folder, variants)
    return decoder


@pytest.mark.parametrize("window", [0, 6])
def test_graph_is_the_decoder_that_numpy_computes(tmp_path: Path, window: int) -> None:
    variants = DENSE if not window else WINDOWED
    decoder = files(tmp_path, variants)
    weights = read_weights(decoder, tmp_path)
    device = Host(1)
    caches = Caches(device, SHAPE, 2 * SHAPE.kv_heads * 40 * SHAPE.head_size)
    ids = np.random.default_rng(19).integers(0, SHAPE.vocabulary, (2, 19))
    # Of the token behind a prompt, too: what the cache holds is then read.
    for variant in variants:
        session = device.session(str(tmp_path / variant.file), stof=variant.optimized)
        for step, given in ((DecoderStep(2, 18, 18, 40), ids[:, :18]), (DecoderStep(2, 1, 19, 40), ids[:, 18:])):
            tensors = DecoderTensors(device, SHAPE, step, caches)
            tensors._given["input_ids"][:] = given
            device.run(session, tensors.bind(session))
            expected, _ = run_decoder(SHAPE, weights, ids[:, : step.length], window)
            np.testing.assert_allclose(tensors.logits()[:, 0], expected, atol=1e-5)


def test_weights_that_a_token_reads_are_the_matmuls_and_norms() -> None:
    decoder = build_decoder(SHAPE)
    N, D = SHAPE.hidden, SHAPE.head_size
    layer = N * (4 + 2 * 2) * D + 4 * D * N + 3 * N * SHAPE.inner + 2 * N
    assert decoder.read_bytes == 4 * (2 * layer + N + N * SHAPE.vocabulary)
    ends = [w.offset + 4 * int(np.prod(w.dims)) for w in decoder.weights]
    assert all(end <= after.offset for end, after in zip(ends, decoder.weights[1:], strict=False))
    assert ends[-1] <= decoder.size


def test_keys_of_a_query_count_those_of_a_group_once() -> None:
    mask = MaskExpression.parse("k <= q and (q - k < 3 or (k + h) % 5 == 0)")
    kept = [{k for k in range(18) if 17 - k < 3 or (k + h) % 5 == 0} for h in range(4)]
    assert keys_of_query(mask, 17, 4, 4) == sum(len(k) for k in kept)
    assert keys_of_query(mask, 17, 4, 2) == len(kept[0] | kept[1]) + len(kept[2] | kept[3])
    assert keys_of_query(CAUSAL, 17, 4, 2) == 36


def test_share_of_pairs_of_a_window() -> None:
    length, window = 40, 7
    mask = MaskExpression.parse(f"k <= q and q - k < {window}")
    pairs = sum(min(q + 1, window) for q in range(length))
    assert pair_share(mask, length, 2) == pytest.approx(pairs / (length * (length + 1) / 2))
    assert pair_share(CAUSAL, length, 2) == 1


def test_cache_bytes_follow_the_masks_of_the_files(tmp_path: Path) -> None:
    write_graphs(SHAPE, "cpu", tmp_path, (*DENSE, *WINDOWED, PATTERN))
    row = 2 * SHAPE.layers * 3 * SHAPE.kv_heads * SHAPE.head_size * 4  # of a position, for three sequences
    keys = {v.name: cache_bytes_read(tmp_path / v.file, SHAPE, 3, 29) / row for v in (*DENSE, *WINDOWED, PATTERN)}
    assert keys == {"gqa": 30, "stof": 30, "gqa-window": 6, "stof-window": 6, "stof-sinks": 7}
    assert [len(masks_of(tmp_path / f"{n}.onnx")) for n in keys] == [SHAPE.layers] * 5


def test_records_have_times_bounds_and_errors(tmp_path: Path) -> None:
    decoder = files(tmp_path, (*DENSE, PATTERN))
    prompt, *tokens = measure_decoder(PLAN, decoder, Host(1), tmp_path, (*DENSE, PATTERN))
    assert prompt["step"] == "prompt"
    assert not prompt["missing"]
    assert not prompt["notes"]
    assert set(prompt["us"]) == {"gqa", "stof", "stof-sinks"}
    assert 0 < prompt["attention_share"]["gqa"]["share"] < 1
    assert prompt["attention_share"]["stof"]["how"] == "profile"
    assert [t["key"] for t in tokens] == [["token", 2, 2, 40, 40], ["token", 2, 1, 9, 40]]
    for token in tokens:
        assert set(token["error"]) == {"stof", "stof-sinks"}
        assert max(token["error"].values()) < 1e-5
        assert set(token["times_faster"]["stof"]) == {"same attention", "dense"}
        assert set(token["times_faster"]["stof-sinks"]) == {"dense"}
        for name, us in token["us"].items():
            bound = (token["weight_bytes"] + token["cache_bytes"][name]) / 1e9 * 1e6  # of a gigabyte a second
            assert token["bound_us"][name] == pytest.approx(bound, rel=1e-4)
            assert token["of_bound"][name] == pytest.approx(bound / us, rel=1e-2)
    text = "\n".join(describe_record(prompt) + describe_record(tokens[1]))
    assert "attention in gqa: p = " in text
    assert "token 9 in caches of 40" in text


def test_bound_of_s2_follows_from_the_share_of_attention(tmp_path: Path) -> None:
    s2 = next(v for v in VARIANTS if v.name == "stof-s2")
    decoder = files(tmp_path, (*DENSE, s2))
    prompt = next(iter(measure_decoder(PLAN, decoder, Host(1), tmp_path, (*DENSE, s2))))
    for dense in ("gqa", "stof"):
        share = prompt["attention_share"][dense]["share"]
        found = prompt["bounds"][f"stof-s2 over {dense}"]
        assert found["bound"] == pytest.approx(1 / (1 - share + share / 8), rel=1e-3)
        assert found["times_faster"] == pytest.approx(prompt["us"][dense] / prompt["us"]["stof-s2"], rel=1e-3)
        assert found["of_bound"] == pytest.approx(found["times_faster"] / found["bound"], rel=1e-2)


def test_share_of_attention_without_a_profile(tmp_path: Path) -> None:
    class WithoutProfile(Host):
        def shares(self, path: str, *, stof: bool, bind: Any) -> dict[str, float]:
            raise RuntimeError("no profiler here")

    narrow = replace(PATTERN, sparsify="window=1")
    decoder = files(tmp_path, (*DENSE, narrow))
    prompt = next(iter(measure_decoder(PLAN, decoder, WithoutProfile(1), tmp_path, (*DENSE, narrow))))
    assert "no profiler here" in prompt["notes"]["profile of stof"]
    kept = prompt["kept_pairs"]["stof-sinks"]
    assert kept == pytest.approx(16 / 136, abs=1e-4)
    found = prompt["attention_share"]["stof"]
    us = prompt["us"]
    assert found["how"] == "difference of times"
    assert found["share"] == pytest.approx((us["stof"] - us["stof-sinks"]) / us["stof"] / (1 - kept), abs=1e-2)


def test_variant_with_other_results_is_not_timed(tmp_path: Path) -> None:
    decoder = files(tmp_path)
    path = tmp_path / "stof.onnx"
    model = onnx.load(str(path), load_external_data=False)
    for node in model.graph.node:
        if node.op_type == CACHED:
            next(a for a in node.attribute if a.name == "mask").s = b"k <= q and q - k < 3"
    path.write_bytes(model.SerializeToString())
    records = list(measure_decoder(PLAN, decoder, Host(1), tmp_path, DENSE))
    assert all(set(r["us"]) == {"gqa"} for r in records)
    assert all("results differ by" in r["missing"]["stof"] for r in records)


class CapturingHost(Host):
    """The CPU as if it captured runs; refuses to where it is told to."""

    def __init__(self, refused_session: str = "", refused_run: str = "") -> None:
        super().__init__(1)
        self.refused_session, self.refused_run = refused_session, refused_run
        self.graphs: dict[str, list[int]] = {}
        self._names: dict[int, str] = {}

    def session(self, path: str, *, stof: bool, xqa: bool = True, captures: bool = False) -> Any:
        if captures and Path(path).stem == self.refused_session:
            raise RuntimeError("cannot use the graph capture feature")
        found = super().session(path, stof=stof)
        self._names[id(found)] = Path(path).stem
        return found

    def run(self, session: Any, binding: Any, graph: int = 0) -> None:
        name = self._names[id(session)]
        if graph and name == self.refused_run:
            raise RuntimeError("the capture failed")
        self.graphs.setdefault(name, []).append(graph)
        super().run(session, binding)


@pytest.mark.parametrize("refused", ["refused_session", "refused_run"])
def test_variant_whose_runs_cannot_be_captured_is_timed_without(tmp_path: Path, refused: str) -> None:
    decoder = files(tmp_path)
    device = CapturingHost(**{refused: "stof"})
    *_, last = measure_decoder(PLAN, decoder, device, tmp_path, DENSE)
    assert set(last["us"]) == {"gqa", "stof"}
    assert not last["missing"]
    assert "captur" in last["notes"]["stof is not captured"]
    assert last["captured"] == ["gqa"]
    assert set(device.graphs["stof"]) == {0}
    # A captured graph of its own for every shape, and none for prompts.
    assert set(device.graphs["gqa"]) == {0, 1, 2}


def test_summary_has_the_least_of_each_figure() -> None:
    def token(B: int, T: int, ratio: float, share: float) -> dict[str, Any]:
        shape = {"B": B, "G": 8, "T": T, "capacity": T}
        faster = {"stof": {"same attention": ratio, "dense": 9.0}, "stof-s2": {"dense": 9.0}}
        return {"step": "token", "shape": shape, "times_faster": faster, "of_bound": {"stof": share}}

    prompt = {
        "step": "prompt",
        "shape": {"B": 1, "G": 8, "T": 64, "capacity": 64},
        "bounds": {"stof-s2 over gqa": {"bound": 1.6, "times_faster": 1.4, "of_bound": 0.875}},
    }
    records = [prompt, token(1, 32, 1.2, 0.5), token(1, 64, 1.1, 0.9), token(4, 64, 1.3, 0.8)]
    assert summarize(records) == [
        "least a token, dense, over GroupQueryAttention: 1.100 (B1 G8 T64 in 64)",
        "least a token at 64, stof, of the byte bound: 0.800 (B4 G8 T64 in 64)",
        "least a prompt, stof-s2 over gqa, of 1 / (1 - p + p/8): 0.875 (B1 G8 T64 in 64)",
    ]
    assert summarize([]) == []


def test_plan_holds_larger_batches_as_far_as_caches_fit() -> None:
    plan = plan_of("cuda", 32, (16384, 131072), None, 32768, 7)
    steps = [(s.batch, s.length, s.capacity) for s in plan.tokens]
    assert steps == [(1, 16384, 16384), (1, 131072, 131072), (8, 16384, 16384), (2, 131072, 131072), (1, 16384, 131072)]
    assert max(plan.shape.cache_bytes(s.batch, s.capacity) for s in plan.tokens) < 30e9
    assert plan.shape.positions == 131072
    assert plan.prompt == DecoderStep(1, 32768, 32768, 32768)


def test_command_stores_records_of_prepared_graphs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared, results = tmp_path / "prepared", tmp_path / "results"
    asked = ["decoder", "--lengths", "96", "--prompt", "64", "--batches", "1", "--rounds", "1", "--threads", "1"]
    asked += ["--variants", "gqa", "stof", "--prepared", str(prepared)]
    assert main([*asked, "--prepare"]) == 0
    (folder,) = prepared.iterdir()
    assert sorted(p.name for p in folder.iterdir()) == ["gqa.onnx", "stof.onnx"]
    assert main([*asked, "--results", str(results)]) == 0
    records = json.loads((results / "decoder-cpu.json").read_text())
    assert [r["key"][0] for r in records] == ["prompt", "token"]
    assert "token 96, B1 H8 G2 D64" in capsys.readouterr().out


def test_command_refuses_variants_that_do_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["decoder", "--variants", "gpa"]) == 1
    assert "no variant gpa; there are gqa, " in capsys.readouterr().err
