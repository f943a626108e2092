# SPDX-License-Identifier: Apache-2.0
"""Relative terms of the score in ONNX Runtime's CUDA provider, on a machine with a GPU: single nodes against fp64, captured
graphs, and whole exported graphs that are optimized for CUDA, beside the originals on the CPU.

``python tests/cuda/check_relative.py [NAME]...`` with onnxruntime-gpu, torch and ``STOF_LIBRARY``; names are those of graphs in
models/graphs, default: all with relative terms. Ends with an error where one is wrong.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import torch
from ort_models import TYPES, Bound, to_host

import stof
from stof.attention.checks.reference import Problem, assert_close, random_problem
from stof.options import Options

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "models"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))
from relative_problem import RelativeProblem, Table
from zoo_graphs import draw_feed, fill_graph

import build

# The weights are rounded to half precision before the second product.
TOLERANCE = {"float32": 5e-6, "float16": 2.0**-11 * 6, "bfloat16": 2.0**-8 * 6}
TYPES_OF = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
LINES = {
    "rising": "k - q + S + P - 1",
    "falling": "q - k + T - 1",
    "shaw": "max(-12, min(4, k - q)) + 12",
    "bucketed": "table0[max(0, min(64, q - k + 32))]",
    "grid rows": "q // 7 - k // 7 + 20",
    "grid columns": "k % 7 - q % 7 + 6",
    "absolute": "abs(k - q)",
}
GRAPHS_BESIDE = ("zoo/xlnet.torchscript.eager", "zoo/wavlm.torchscript.eager")


@dataclass(frozen=True)
class Node:
    """A problem in the form that ``ort_models`` runs."""

    relative: RelativeProblem

    @property
    def q(self) -> np.ndarray:
        return self.relative.plain.q

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.relative.plain.shape)

    def inputs(self) -> list[np.ndarray]:
        return self.relative.inputs()

    def attributes(self) -> dict[str, Any]:
        return self.relative.attributes()


def make(
    rng: np.random.Generator, roles: dict[str, str], S: int, T: int, D: int, dtype: str, *, shared: bool = False,
    further: bool = False, has_factor: bool = False, **settings: Any,
) -> RelativeProblem:  # fmt: skip
    """A random problem with tables of these roles. Heads: 4, of keys and values 2."""
    kind = np.dtype(TYPES_OF[dtype])
    plain: Problem = random_problem(rng, 2, 4, S, D, G=2, T=T, dtype=kind, **settings)
    tables = {}
    for role, line in roles.items():
        rows = S + T - 1 if LINES[line] in (LINES["rising"], LINES["falling"]) else 40
        values = rng.standard_normal((1 if shared else 4, rows, D + further), np.float32).astype(kind)
        tables[role] = Table(values, LINES[line])
    buckets = np.concatenate([[0], np.cumsum(rng.integers(0, 2, 64))]).astype(np.int32)
    constants = {"table0": buckets} if "bucketed" in roles.values() else {}
    factor = rng.standard_normal((2, 4, S), np.float32).astype(kind) if has_factor else None
    return RelativeProblem(plain, tables, constants, factor)


def problems(rng: np.random.Generator) -> Iterator[tuple[str, RelativeProblem]]:
    """What the provider has to compute, by name."""
    for dtype in TYPES:
        for line in LINES:
            for role in ("relative_key", "relative_query"):
                for S, T in ((1, 1), (65, 33), (130, 130), (200, 333)):
                    yield f"{dtype} {role} {line} {S} x {T}", make(rng, {role: line}, S, T, 64, dtype)
        both = {"relative_key": "bucketed", "relative_query": "bucketed"}
        yield f"{dtype} both", make(rng, both, 300, 300, 64, dtype, shared=True, padded=True, mask="abs(q - k) <= 90")
        grid = {"relative_key": "grid rows", "relative_key1": "grid columns"}
        yield f"{dtype} grid", make(rng, grid, 140, 140, 80, dtype, further=True)
        past = make(rng, {"relative_key": "rising"}, 40, 200, 64, dtype, mask="k <= q", query_offset=True)
        yield f"{dtype} past", past
        bias = rng.standard_normal((4, 65)).astype(np.float32)
        factored = make(rng, {}, 190, 190, 64, dtype, has_factor=True, relative_bias=bias, softcap=20.0)
        yield f"{dtype} factor", factored
        yield f"{dtype} factor and term", replace(factored, tables=make(rng, both, 190, 190, 64, dtype).tables,
                                                  constants=make(rng, both, 190, 190, 64, dtype).constants)  # fmt: skip
        for size in (8, 40, 128, 160, 256):
            yield f"{dtype} D{size}", make(rng, both, 129, 130, size, dtype, further=True)


def constants_of(problem: RelativeProblem) -> tuple[str, ...]:
    """The inputs that are constants: CUDA reads tables of expressions when the session is made."""
    return tuple(problem.constants)


def check_nodes() -> int:
    """Every problem with IO binding; the number of problems."""
    count = 0
    for name, problem in problems(np.random.default_rng(55)):
        bound = Bound(Node(problem), constants_of(problem))  # type: ignore[arg-type]
        bound.run()
        torch.cuda.synchronize()
        try:
            wanted, _ = problem.reference()
            assert_close(to_host(bound.output), wanted, TOLERANCE[problem.plain.q.dtype.name] * 4)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error
        count += 1
    return count


def check_capture() -> None:
    """With enable_cuda_graph: replays follow queries and tables that lie at the captured addresses."""
    rng = np.random.default_rng(56)
    roles = {"relative_key": "rising", "relative_query": "bucketed"}
    problem = make(rng, roles, 150, 150, 64, "float16")
    bound = Bound(Node(problem), constants_of(problem), enable_cuda_graph="1")  # type: ignore[arg-type]
    for _ in range(5):
        other = make(rng, roles, 150, 150, 64, "float16")
        other = replace(problem, plain=replace(problem.plain, q=other.plain.q), tables=other.tables)
        other = replace(other, constants=problem.constants)
        bound.inputs["q"].copy_(torch.from_numpy(other.plain.q))
        for role, table in other.tables.items():
            bound.inputs[role].copy_(torch.from_numpy(table.rows))
        bound.output.fill_(float("nan"))
        torch.cuda.synchronize()
        bound.run()
        torch.cuda.synchronize()
        assert_close(to_host(bound.output), other.reference()[0], TOLERANCE["float16"] * 4)


def check_graph(name: str) -> str:
    """Optimizes a graph for CUDA and compares it with the original on the CPU; says how many of its nodes have terms."""
    model = fill_graph(name)
    with tempfile.TemporaryDirectory() as folder:
        path, written = Path(folder) / "model.onnx", Path(folder) / "out.onnx"
        onnx.save(model, str(path))
        stof.optimize(path, written, Options(target="cuda", verify=False))
        optimized = onnx.load(str(written))
        nodes = [n for n in optimized.graph.node if n.op_type == "StofAttention"]
        attributes = [{a.name: a.s.decode() for a in n.attribute if a.type == a.STRING} for n in nodes]
        with_terms = sum("relative_" in a.get("operands", "") for a in attributes)
        options = ort.SessionOptions()
        stof.register(options)
        providers = [("CUDAExecutionProvider", {"use_tf32": "0"}), "CPUExecutionProvider"]
        session = ort.InferenceSession(str(written), options, providers=providers)
    plain = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(57)
    for batch, length in ((1, 5), (2, 37), (3, 130)):
        feed = draw_feed(model, rng, batch, length)
        for mine, wanted in zip(session.run(None, feed), plain.run(None, feed), strict=True):
            largest = float(np.abs(wanted).max())
            assert largest > 1e-3, f"{name}: an output of zeros shows nothing"
            np.testing.assert_allclose(mine, wanted, atol=5e-5 * largest, rtol=0, err_msg=f"{name}, {batch} x {length}")
    return f"{with_terms} of {len(nodes)} nodes have relative terms"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="graphs; default: all with relative terms")
    arguments = parser.parse_args()
    start = time.monotonic()
    if not arguments.names:
        print(f"{check_nodes()} nodes are right in the CUDA provider", flush=True)
        check_capture()
        print("a captured graph follows its inputs", flush=True)
    wrong = 0
    for name in arguments.names or [*(n for n in build.names() if n.startswith("relative/")), *GRAPHS_BESIDE]:
        try:
            print(f"{name}: {check_graph(name)}", flush=True)
        except Exception as error:  # one graph must not end the others
            wrong += 1
            print(f"{name}: FAIL: {type(error).__name__}: {str(error)[:600]}", flush=True)
    print(f"done in {time.monotonic() - start:.0f} s, {wrong} graphs are wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
