# SPDX-License-Identifier: Apache-2.0
"""What the GPU's benchmark does without a GPU: masks, densities, references, FlexAttention's blocks, sums."""

from __future__ import annotations

import dataclasses
import math
import os
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import stof
from bench.core.candidate import Unavailable
from bench.core.case import AttentionCase, named_mask
from bench.gpu import cases, models, run, summary, tables, trace, variants
from bench.gpu import worker_pool as pool
from bench.gpu.device_runner import window
from stof.bench.drawn_feeds import draw_static_feeds
from stof.execution.upcast import widen
from stof.runtime.cuda import CudaOp, DeviceTensor
from stof.runtime.library import LibraryError, Mask, build_info

torch = pytest.importorskip("torch")

from bench.gpu.baselines import jit_kernels, sparse_masks, torch_sdpa  # noqa: E402
from bench.gpu.device_runner import DeviceRunner  # noqa: E402
from bench.gpu.problem import GpuProblem  # noqa: E402


def numpy_mask(case: AttentionCase) -> np.ndarray:
    """[H, S, T], from the definitions in docs/design/benchmarks.md."""
    q = (np.arange(case.S) + case.P)[None, :, None]
    k = np.arange(case.T)[None, None, :]
    h = np.arange(case.H)[:, None, None]
    side = round(math.sqrt(case.T))
    glob = (abs(q - k) <= side) | (q < side) | (k < side)
    found = {
        "dense": q >= 0,
        "causal": k <= q,
        "window": abs(q - k) <= side,
        "dilated": (abs(q - k) <= side + 1) & ((q - k) % 2 == 0),
        "longformer": glob,
        "s2": (k <= q) & ((q // 64 - k // 64 < 8) | ((k // 64 + h) % 8 == 0)),
        "window-128": abs(q - k) <= 128,
        "causal-1024": (k <= q) & (q - k < 1024),
        "longformer-128": (abs(q - k) <= 128) | (q < 64) | (k < 64),
        "dilated-256": (abs(q - k) <= 256) & ((q - k) % 2 == 0),
        "bits": (q - k) % 5 != 0,
        "s2-4": (k <= q) & ((q // 64 - k // 64 < 8) | ((k // 64 + h // (case.H // case.G)) % 4 == 0)),
        "s2-16": (k <= q) & ((q // 64 - k // 64 < 8) | ((k // 64 + h // (case.H // case.G)) % 16 == 0)),
        "s2-4-128": (k <= q) & ((q // 128 - k // 128 < 4) | ((k // 128 + h // (case.H // case.G)) % 4 == 0)),
        "s2-16-128": (k <= q) & ((q // 128 - k // 128 < 4) | ((k // 128 + h // (case.H // case.G)) % 16 == 0)),
        "sinks-1024": (k <= q) & ((q - k < 1024) | (k < 4)),
        "slash-37": (k <= q) & ((q - k < 96) | (k % 37 == 0)),
        "every-10": (k <= q) & (k // 128 % 10 == 0),
        "every-4": (k <= q) & (k // 128 % 4 == 0),
        "every-2": (k <= q) & (k // 128 % 2 == 0),
        "bigbird-23": (abs(q // 64 - k // 64) <= 1)
        | (q < 64)
        | (k < 64)
        | ((7 * (q // 64) + 13 * (k // 64) + (q // 64) * (k // 64)) % 23 == 0),
    }
    if case.name == "bigbird":
        found["bigbird"] = glob | case.tables["table0"][q // 64, k // 64]
    if case.name.startswith("random"):
        found[case.name] = case.tables["table0"][q // 128, k // 128]
    return np.broadcast_to(found[case.name], (case.H, case.S, case.T))


def small(grid: str, lengths: tuple[int, ...], heads: int = 4) -> list[AttentionCase]:
    """The grid's masks at short lengths, with few heads."""
    found = {}
    for case in cases.grid(grid):
        for length in lengths:
            groups = max(1, heads * case.G // case.H)
            mask, tables = named_mask(case.name, length, heads // groups)
            sizes = {"H": heads, "G": groups, "T": length, "S": length if case.S > 1 else 1, "B": 1}
            made = dataclasses.replace(case, mask=mask, tables=tables, **sizes)
            found[str(made)] = made
    return list(found.values())


# Forking a process that has threads is deprecated in Python 3.12; the pool forks before it uses any.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")

CASES = [
    *small("paper", (256,)),
    *small("masks", (512,)),
    *small("long", (1024,), heads=8),
    *small("bits", (256,)),
    *small("decode", (1024, 2048), heads=8),
    *small("s2", (1024,), heads=8),
    *small("cached", (1500,), heads=8),
    *small("run-time", (1280,), heads=8),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_masks(case: AttentionCase) -> None:
    expected = numpy_mask(case)
    problem = GpuProblem(case, device="cpu")
    heads = case.H if problem.by_head else 1
    assert np.array_equal(problem.dense.numpy()[0], expected[:heads])
    assert (heads == case.H) == case.name.startswith("s2")
    assert problem.density.pairs == expected.sum() * case.B
    assert problem.density.element == pytest.approx(expected.mean())
    tiles = np.pad(expected, ((0, 0), (0, -case.S % 128), (0, -case.T % 128)))
    tiles = tiles.reshape(case.H, -(-case.S // 128), 128, -(-case.T // 128), 128).any((2, 4))
    assert problem.density.tiles == tiles.sum() * case.B
    if case.S > 1:
        problem.check_mask()


@pytest.mark.parametrize("case", [c for c in CASES if c.mask and c.S > 1], ids=str)
def test_blocks_of_flex(case: AttentionCase) -> None:
    module = pytest.importorskip("torch.nn.attention.flex_attention")
    problem = GpuProblem(case, device="cpu")
    block = torch_sdpa.block_mask(problem, module)
    tiles = numpy_mask(case).reshape(case.H, case.S // 128, 128, case.T // 128, 128)
    kept = np.broadcast_to(block.to_dense().numpy()[0] != 0, tiles.shape[:2] + (case.T // 128,))
    assert np.array_equal(kept, tiles.any((2, 4)))
    whole = np.zeros_like(kept)
    counts, indices = block.full_kv_num_blocks.numpy()[0], block.full_kv_indices.numpy()[0]
    for h in range(case.H):
        for row in range(kept.shape[1]):
            at = h if len(counts) > 1 else 0
            whole[h, row, indices[at, row, : counts[at, row]]] = True
    assert np.array_equal(whole, tiles.all((2, 4)))


@pytest.mark.parametrize("case", [CASES[0], CASES[3], CASES[9], CASES[-1]], ids=str)
def test_reference(case: AttentionCase) -> None:
    problem = GpuProblem(case, device="cpu")
    q, k, v = (x.double() for x in problem.sets()[0])
    wide = (x.repeat_interleave(case.H // case.G, 1) for x in (k, v))
    mask = torch.from_numpy(np.array(numpy_mask(case)))[None]
    output = torch.nn.functional.scaled_dot_product_attention(q, *wide, attn_mask=mask)
    assert problem.error(output) < 1e-12
    wrong = output.clone()
    wrong[:, :, -1] += 0.5
    assert problem.error(wrong) > 0.1
    wrong[:, :, -1] = float("nan")
    assert not problem.error(wrong) <= 1


def test_windows() -> None:
    def case(mask: str) -> AttentionCase:
        return AttentionCase("paper", "", mask, 1, 1, 1, 128, 128, 64, "float16")

    assert window(case("")) == (-1, -1)
    assert window(case("k <= q")) == (-1, 0)
    assert window(case("abs(q - k) <= 23")) == (23, 23)
    assert window(case("k <= q and q - k <= 1023")) == (1023, 0)
    assert window(case("abs(q - k) <= 23 or q < 23 or k < 23")) is None
    assert window(case("abs(q - k) <= 23 and (q - k) % 2 == 0")) is None


def test_keys_outside_the_mask_of_a_run_time_case_change_nothing() -> None:
    problem = GpuProblem(small("run-time", (700,), heads=2)[0], device="cpu")
    query, key, value = (x.double() for x in problem.sets()[0])
    case = problem.case
    scores = problem.scale * query @ key.repeat_interleave(case.H // case.G, 1).transpose(-1, -2)
    causal = torch.ones(case.S, case.T, dtype=torch.bool).tril()
    output = scores.masked_fill(~causal, -math.inf).softmax(-1) @ value.repeat_interleave(case.H // case.G, 1)
    assert problem.error(output) < 1e-6
    assert float(problem.dense.double().mean()) < 0.2


def test_grids() -> None:
    assert len(list(cases.grid("paper"))) == 5 * 6 * 3
    assert len(list(cases.grid("masks"))) == 3 * 8 + 5 * 2 + 3 * 2
    assert len(list(cases.grid("long"))) == 8 * 5 * 2
    assert len(list(cases.grid("decode"))) == 3 * 8
    assert len(list(cases.grid("cached"))) == 27 + 22
    assert len(list(cases.grid("s2"))) == 7 * 4 + 13
    assert len(list(cases.grid("run-time"))) == 4 * 3
    assert max(4 * c.B * c.G * c.T * c.D for c in cases.grid("cached")) < 31e9
    assert {c.T for c in cases.grid("cached", ["causal-1024"], batches=[64])} == {8192, 16384, 114688}
    assert {str(c) for c in cases.grid("paper", ["causal"], [512], [8])} == {"paper causal B8 H12 S512 D64 fp16"}
    keys = [tuple(c.key) for g in cases.GRIDS for c in cases.grid(g)]
    assert len(set(keys)) == len(keys)


def record(us: float, peers: dict[str, float], S: int = 1024, mask: str = "window") -> dict[str, object]:
    rows = {"stof": {"us": us, "roofline": 0.5}, **{k: {"us": v} for k, v in peers.items()}}
    shape = {"B": 1, "H": 12, "G": 12, "S": S, "T": S, "D": 64, "dtype": "float16"}
    return {"grid": "paper", "mask_name": mask, "shape": shape, "peers": rows, "roof_us": us / 2}


def test_sums() -> None:
    records = [
        record(10, {"torch-flex": 20, "ort-mha": 40}),
        record(10, {"torch-flex": 9, "stof-ort": 1}, mask="causal"),
        record(10, {"torch-flex": 80}, S=256),
    ]
    assert summary.best_peer(records[0]) == ("torch-flex", 20)
    assert summary.ratio(records[0], "ort-mha") == 4
    assert summary.ratio(records[1]) == pytest.approx(0.9)
    assert summary.row(records)[:4] == [
        "3",
        f"{(2 * 0.9 * 8) ** (1 / 3):.2f}",
        "0.90",
        f"{(2 * 0.9 * 8) ** (1 / 3):.2f}",
    ]
    assert summary.losses(records) == ["0.900 causal B1 H12 S1024 D64 float16: 10.0 µs, torch-flex 9.0 µs"]
    text = "\n".join(summary.summary(records))
    assert "1 point(s) below 1.0, 1 of them below 0.97" in text


def test_full_tiles() -> None:
    """Their rate beside the dense kernel of the same length, and beside that at 8192 keys where there is none."""

    def long(us: float, peers: dict[str, float], S: int, mask: str, tiles: int) -> dict[str, object]:
        density = {"element": tiles / (S // 128) ** 2, "tile": tiles / (S // 128) ** 2, "tiles": tiles}
        machine = {"dense_us": {"D64 float16": {"stof": 50, "flash-4": 16 * 4096 * 1e-3, "torch-cudnn": 99999.0}}}
        return {**record(us, peers, S, mask), "density": density, "machine": machine}

    blocks, dense = long(10, {}, 16384, "random-10", 2000), long(20, {"flash-4": 32.768}, 16384, "dense", 16384)
    assert summary.full_tiles([blocks, dense]) == [["random-10 B1 H12 S16384 D64 float16", "12.2%", "40.0%", "flash-4"]]
    assert summary.full_tiles([blocks])[0][2] == "20.0%"
    # In turns: 2000 tiles in 40 µs beside 12 heads of 128 × 128 in 1966.
    turns = {"full_tiles": {"stof_us": 40.0, "dense_us": {"torch-cudnn": 2400.0, "flash-4": 1966.08}}}
    assert summary.full_tiles([{**blocks, **turns}, dense])[0][2:] == ["50.0%", "flash-4"]
    assert summary.full_tiles([long(10, {}, 4096, "random-10", 2000)]) == []
    partial = long(10, {}, 8192, "window", 500)
    partial["density"] = {"element": 0.03, "tile": 0.05, "tiles": 500}
    assert summary.full_tiles([partial]) == []


def test_bits() -> None:
    """What bits in every tile cost: by masks that leave no tile of 64 full or empty, beside no mask in the same turns."""
    for case in small("bits", (256, 320)):
        blocks = Mask(case.mask, case.tables).block_mask(1, case.H, case.S, case.T, 64, 64, case.P)
        assert len(blocks.key_tile) == (case.S // 64) ** 2
        assert (blocks.bits_id >= 0).all()
    timed = {**record(99, {}, 4096, "bits"), "bits": {"stof_us": 45.0, "dense_us": {"stof": 40.0}}}
    assert summary.bits([record(10, {}, 4096, "bits"), timed]) == [["bits B1 H12 S4096 D64 float16", "12.5%"]]


def test_what_was_not_timed() -> None:
    records = [record(10, {"torch-flex": 20}), record(10, {}), record(10, {})]
    for one, reason in zip(records, ("too long", "too long", None), strict=True):
        if reason is not None:
            one["peers"]["torch-math"] = {"label": "math", "missing": reason}  # type: ignore[index]
    assert tables._without(records) == ["* Not timed: math (2 points: too long; not asked at 1)."]
    assert tables._without(records[2:]) == []


def test_ceilings() -> None:
    def anchor(launch: float, copy: float, us: float) -> dict[str, object]:
        tiles = {
            "D64 float16": {"density": {"tiles": 1000}, "peers": {"stof": {"us": us}, "torch-cudnn": {"missing": ""}}}
        }
        rates = {"device": "a GPU", "versions": {}, "launch": launch, "copy": copy, "read": 2 * copy}
        return {"rates": rates, "tiles": tiles}

    found = run.ceilings([anchor(2e-6, 3e12, 9.0), anchor(1e-6, 2e12, 8.0)])
    assert found["launch_us"] == 1.0
    assert found["copy_gbps"] == 3000.0
    assert found["read_gbps"] == 6000.0
    assert found["tile_ns"] == {"D64 float16": 8.0}
    with pytest.raises(RuntimeError, match="no clock"):
        run.ceilings([{"rates": "no clock", "tiles": {}}])


def test_trace() -> None:
    """Kernels go to the node that launched them, though the two clocks start elsewhere."""
    shift = 7_000_123.0

    def node(name: str, op: str, ts: int, dur: int) -> dict[str, object]:
        shapes = {"input_type_shape": [{"float16": [1, 2, 64, 64]}], "output_type_shape": [{"float16": [1, 2, 64, 64]}]}
        arguments = {"op_name": op, "provider": "CUDAExecutionProvider", **(shapes if op == "Softmax" else {})}
        return {"cat": "Node", "name": f"{name}_kernel_time", "ts": ts, "dur": dur, "args": arguments}

    host = [
        node("cold", "MatMul", 10, 900),
        {"cat": "Session", "name": "model_run", "ts": 0, "dur": 1000},
        node("a", "MatMul", 5010, 40),
        node("b", "Softmax", 5060, 30),
        {"cat": "Session", "name": "model_run", "ts": 5000, "dur": 100},
    ]
    device: list[dict[str, object]] = [{"name": "traced run", "ph": "X", "ts": 5000 + shift - 40}]
    for i, (at, took) in enumerate([(5015, 100), (5045, 20), (5065, 7)]):
        device.append({"cat": "cuda_runtime", "ts": at + shift, "args": {"correlation": i}})
        device.append({"cat": "kernel", "ts": at + shift + 500, "dur": took, "args": {"correlation": i}})
    nodes = trace.match(host, device)
    assert [(n.call.name, round(n.device_seconds * 1e6)) for n in nodes] == [("a", 120), ("b", 7)]
    sums = models._sums(nodes, 64)
    assert (sums["attention_us"], sums["rest_us"], sums["memcpy_nodes"]) == (7.0, 120.0, 0)
    host[2]["dur"], host[3]["dur"] = 2, 2
    with pytest.raises(ValueError, match="launches fall into a node"):
        trace.match(host, device)


def test_variants(tmp_path: Path) -> None:
    """All variants of a narrow model compute the same, the one with MultiHeadAttention too."""
    missing = variants.prepare("narrow/modernbert.dynamo.sdpa", (2, 96), tmp_path / "bare")
    assert missing == {}
    kinds = variants.assemble(tmp_path / "bare", tmp_path / "full")
    assert kinds == list(variants.LABELS)
    results = {}
    for kind in kinds:
        model = onnx.load(str(tmp_path / "full" / f"{kind}.onnx"))
        operators = {n.op_type for n in model.graph.node}
        assert ("StofAttention" in operators) == (kind in ("attention", "plain", "stof", "tool-stof"))
        assert ("StofChain" in operators) == (kind in ("chains", "plain", "stof", "tool-stof"))
        assert kind != "plain" or "StofGemm" not in operators
        assert ("MultiHeadAttention" in operators) == (kind == "mha")
        options = ort.SessionOptions()
        options.log_severity_level = 4
        stof.register(options)
        # No kernel of the CPU takes MultiHeadAttention in fp16.
        data = (widen(model) if kind == "mha" else model).SerializeToString()
        session = ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])
        feeds = draw_static_feeds(tmp_path / "full/exported.onnx")
        results[kind] = session.run(None, feeds)[0].astype(np.float32)
    span = np.ptp(results["exported"])
    for kind, output in results.items():
        assert abs(output - results["exported"]).max() <= 0.01 * span, kind
    assert span > 1


def test_constants_of_a_device_operator() -> None:
    """What needs no device: constants are checked when they are given."""
    attributes = {"mask": "table0[k]", "operands": "table0"}
    with pytest.raises(LibraryError, match="1 inputs, expected"):
        CudaOp("StofAttention", attributes, 1)
    with pytest.raises(LibraryError, match="table0"):
        CudaOp("StofAttention", attributes, 4, {3: np.zeros((2, 2), np.float32)})
    op = CudaOp("StofAttention", attributes, 4, {3: np.ones(8, bool)})
    tensor = DeviceTensor(256, "float16", (1, 8, 64))
    refusal = "expected rank 4" if "cuda" in build_info()["backends"] else "no CUDA kernels"
    with pytest.raises(LibraryError, match=refusal):
        op.bind([tensor] * 3, [tensor], 0)()
    with pytest.raises(ValueError, match="complex64"):
        op.bind([DeviceTensor(256, "complex64", (1,))] * 3, [tensor], 0)


def worker(channel: Connection, plan: object) -> None:
    """Builds and times at once; dies at S = 256, hangs at 512, refuses 1024."""
    channel.send((-1, None))
    while True:
        verb, number, case = channel.recv()
        if verb == "build" and case.S == 256:
            os._exit(1)
        if verb == "build" and case.S == 512:
            while True:  # until the pool ends it
                time.sleep(60)
        built: object = "refused" if case is not None and case.S == 1024 else 0.5
        channel.send((number, built if verb == "build" else {"number": number, "verb": verb}))


class Watched(pool.WorkerPool):
    """A pool by whose clock the time is over once all cases but those that hang have come to an end."""

    def __init__(self, workers: int, ends: int) -> None:
        self.left = ends
        super().__init__(workers, pool.PointPlan(None, 1), worker, lambda: 0.0 if self.left > 0 else 1e9)

    def _answers(self, seconds: float) -> list[tuple[int, Any]]:
        found = super()._answers(seconds)
        self.left -= sum(number >= 0 for number, _ in found)
        return found


def test_pool() -> None:
    """A process that dies or hangs takes only its own points along."""
    made = list(cases.grid("paper", ["causal"], batches=[1]))
    hands = Watched(len(made), ends=sum(c.S != 512 for c in made))
    said: list[str] = []
    try:
        failed = hands.build(made, said.append)
        by_length = {made[n].S: reason for n, reason in failed.items()}
        assert by_length[256] == "the process that ran it ended"
        assert by_length[512] == "it took too long"
        assert by_length[1024] == "refused"
        assert len(said) >= 3
        kept = [n for n in range(len(made)) if n not in failed]
        assert kept
        assert [hands.time(n) for n in kept] == [{"number": n, "verb": "time"} for n in kept]
        gone = next(n for n, c in enumerate(made) if c.S == 256)
        assert hands.time(gone) == "the process that built it is gone"
        assert hands.anchors([(64, "float16")])["tiles"]["D64 float16"]["verb"] == "anchor"
    finally:
        hands.close()


def nobody(channel: Connection, plan: object) -> None:
    """As on a machine without a GPU."""
    channel.send((-1, "RuntimeError: no device"))


def test_pool_without_a_device() -> None:
    hands = pool.WorkerPool(2, pool.PointPlan(None, 1), nobody)
    with pytest.raises(Unavailable, match="no device"):
        hands.build(list(cases.grid("paper", ["causal"], [128])), print)
    hands.close()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_intervals(case: AttentionCase) -> None:
    """What cuDNN's flex attention is told: ends of intervals, and nothing where a row has too many."""
    case = dataclasses.replace(case, B=2)
    problem = GpuProblem(case, device="cpu")
    expected = numpy_mask(case)
    edges = np.diff(np.pad(expected, ((0, 0), (0, 0), (1, 1))).astype(np.int8), axis=2) > 0
    if edges.sum(2).max() > jit_kernels._MOST_INTERVALS:
        with pytest.raises(Unavailable, match="intervals"):
            jit_kernels.intervals(problem)
        return
    ends = jit_kernels.intervals(problem).numpy()
    heads, count, rows = ends.shape
    assert (heads, rows) == (case.H if problem.by_head else 1, 2 * case.S)
    assert count % 2 == 1
    starts = np.concatenate([np.zeros((heads, 1, rows), np.int32), ends[:, 1::2]], 1)[..., None]
    keys = np.arange(case.T)
    found = ((starts <= keys) & (keys < ends[:, ::2, :, None])).sum(1)
    assert np.array_equal(found, np.tile(expected[:heads], (1, 2, 1)))  # each allowed key is in exactly one


def test_regret() -> None:
    """By how much the selector's choice is slower than the best kernel, itself among them."""

    def with_kernels(chosen: float, *each: float) -> dict[str, object]:
        rows = [{"name": f"kernel-{i}", "us": us} for i, us in enumerate(each)]
        return {**record(10, {"torch-flex": 20}), "kernels": {"chosen_us": chosen, "each": rows, "wrong": []}}

    records = [with_kernels(11, 10, 12), with_kernels(9.9, 10, 12), with_kernels(5, 5, 6, 7), record(10, {})]
    assert summary.regret(records[0]) == pytest.approx(0.1)
    assert summary.regret(records[1]) == 0
    assert summary.regret(records[3]) is None
    rows = summary.regrets(records)
    assert [row[:5] for row in rows] == [["64", "2", "2", "4.9%", "10.0%"], ["64", "3", "1", "0.0%", "0.0%"]]
    assert "regret, D 64, kernels 2" in "\n".join(summary.summary(records))


def test_over_jit() -> None:
    records = [record(10, {"torch-flex": 20, "flash-4": 9, "cudnn-flex": 12}), record(10, {"torch-flex": 20})]
    assert summary.over_jit(records[0]) == pytest.approx(0.9)
    assert summary.over_jit(records[1]) is None
    assert summary.row(records, extended=True)[-2:] == ["0.90", "0.90"]
    assert len(summary.row(records)) == len(summary.HEAD)


def test_layouts_of_sparse_attention() -> None:
    """Blocks of 64 that reproduce the mask below the diagonal; other masks are refused."""
    case = next(c for c in CASES if c.grid == "s2" and c.name == "s2-4" and c.S == 1)
    problem = GpuProblem(case, device="cpu")
    found = sparse_masks.layouts(problem)
    i, j = np.indices((case.T // 64, case.T // 64))
    for h in range(case.H):
        expected = (i >= j) & ((i - j < 8) | ((j + h // (case.H // case.G)) % 4 == 0))
        assert np.array_equal(found[h], expected)
    rows, columns = sparse_masks._csr(found)
    assert [columns[1, rows[1, r] : rows[1, r + 1]].tolist() for r in range(3)] == [[0], [0, 1], [0, 1, 2]]
    with pytest.raises(Unavailable, match="whole blocks"):
        sparse_masks.layouts(GpuProblem(dataclasses.replace(case, mask="k <= q and q - k < 100"), device="cpu"))


def test_dense_in_place_of_a_mask() -> None:
    """The candidate gets the problem's inputs under a causal mask, and is checked against that."""
    case = next(c for c in CASES if c.grid == "s2" and c.S > 1)
    problem = GpuProblem(case, device="cpu")
    seen = []

    def build(plain: GpuProblem, stream: object) -> DeviceRunner:
        seen.append(plain)
        return DeviceRunner(lambda i: None, lambda: None)

    runner = sparse_masks.dense(build)(problem, None)
    plain = seen[0]
    assert plain.case.mask == "k <= q"
    assert plain.sets()[0][0] is problem.sets()[0][0]
    problem.rotate()
    assert plain.count == problem.count > 1
    q, k, v = (x.double() for x in problem.sets()[0])
    wide = (x.repeat_interleave(case.H // case.G, 1) for x in (k, v))
    output = torch.nn.functional.scaled_dot_product_attention(q, *wide, is_causal=True)
    assert runner.error is not None
    assert runner.error(output) < 1e-12
    assert problem.error(output) > 1e-2
