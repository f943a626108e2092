# SPDX-License-Identifier: Apache-2.0
"""Times of StofAttention in ONNX Runtime's CUDA provider beside the runtime's own operators, on a machine with a GPU:
captured graphs, IO binding, one stream.

``python tests/cuda/time_ort.py`` with onnxruntime-gpu, torch and ``STOF_LIBRARY``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import torch
from onnx import TensorProto, helper, numpy_helper
from ort_models import TYPES, Bound, bind, on_device, outputs, queries

import stof
from stof.attention.checks.reference import Problem, random_problem
from stof.files import strict_json

# What a node takes is a fourth of what five take more than one: of a run of one nobody can say which part of it is the
# runtime's, and a profiler's traces have gaps between kernels that runs have not.
NODES = 5
PROBLEMS = (
    ("float16", 1, 32, 8192, 128, "abs(q - k) <= 128"),
    ("float16", 1, 16, 4096, 64, "abs(q - k) <= 128"),
    ("float16", 1, 16, 4096, 64, "k <= q"),
    ("float16", 8, 12, 1024, 64, "abs(q - k) <= 128"),
    ("float32", 1, 16, 4096, 64, "abs(q - k) <= 128"),
    ("float32", 1, 16, 4096, 64, "k <= q"),
    ("float32", 8, 12, 1024, 64, "abs(q - k) <= 128"),
)
Run = Callable[[], None]


def native(kind: str, B: int, H: int, S: int, D: int, mask: np.ndarray, dtype: str, nodes: int) -> bytes:
    """The runtime's own operator under the same mask, so many of it: MultiHeadAttention with a bias, or Attention-23 with
    a bool mask.
    """
    if kind == "MultiHeadAttention":
        shape = [B, S, H * D]
        rest, settings = ["k", "v", "", "", "bias"], {"num_heads": H, "domain": "com.microsoft"}
        bias = np.where(mask, 0, -65504).astype(dtype)[None, None]
        constant = numpy_helper.from_array(bias, "bias")
    else:
        shape = [B, H, S, D]
        rest, settings = ["k", "v", "mask"], {}
        constant = numpy_helper.from_array(mask, "mask")
    made = [
        helper.make_node(kind, [query, *rest], [out], **settings)
        for query, out in zip(queries(nodes), outputs(nodes), strict=True)
    ]
    given = [helper.make_tensor_value_info(n, TYPES[dtype], shape) for n in (*queries(nodes), "k", "v")]
    results = [helper.make_tensor_value_info(n, TYPES[dtype], shape) for n in outputs(nodes)]
    imports = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
    graph = helper.make_graph(made, "g", given, results, [constant])
    return bytes(helper.make_model(graph, opset_imports=imports, ir_version=10).SerializeToString())


def timed(runs: list[Run], stream: torch.cuda.Stream) -> list[float]:
    """Microseconds of each, taken by turns: the median of 30 after 10, measured with events on the stream."""
    times: list[list[float]] = [[] for _ in runs]
    for i in range(40):
        for run, own in zip(runs, times, strict=True):
            first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            first.record(stream)
            run()
            last.record(stream)
            last.synchronize()
            if i >= 10:
                own.append(first.elapsed_time(last) * 1e3)
    return [sorted(own)[15] for own in times]


def identity(settings: dict[str, str], stream: torch.cuda.Stream) -> float:
    """Microseconds of a captured run of one Identity of one number: what the runtime itself takes for a run."""
    node = helper.make_node("Identity", ["x"], ["y"])
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [1]) for n in "xy")
    data = helper.make_model(
        helper.make_graph([node], "g", [x], [y]), opset_imports=[helper.make_opsetid("", 18)], ir_version=8
    )
    one = ort.InferenceSession(data.SerializeToString(), providers=[("CUDAExecutionProvider", settings)])
    tensors = {n: torch.ones(1, device="cuda") for n in "xy"}
    binding = one.io_binding()
    binding.bind_input("x", "cuda", 0, TensorProto.FLOAT, (1,), tensors["x"].data_ptr())
    binding.bind_output("y", "cuda", 0, TensorProto.FLOAT, (1,), tensors["y"].data_ptr())
    for _ in range(3):
        one.run_with_iobinding(binding)
    return timed([lambda: one.run_with_iobinding(binding)], stream)[0]


def kept(row: dict[str, Any], kind: str) -> dict[str, float]:
    """Shares of the gain over ``kind`` that nodes alone have: of the time that is saved, and of the quotient of times, as
    measured and less what the runtime takes for a run of nothing.
    """
    own, other, floor = row["stof"], row[kind], row["identity"]
    own_node, other_node = row["stof node"], row[f"{kind} node"]
    gain = other_node / own_node
    return {
        "time": round((other - own) / (other_node - own_node), 3),
        "quotient": round(other / own / gain, 3),
        "quotient beyond identity": round((other - floor) / (own - floor) / gain, 3),
    }


def own_runs(
    kind: str, problem: Problem, mask: np.ndarray, output: torch.Tensor, settings: dict[str, str]
) -> tuple[list[Run], float]:
    """Runs of models of one and of NODES of the runtime's operators, and how far their output is from ``output``."""
    B, H, S, D = problem.q.shape
    packed = kind == "MultiHeadAttention"
    inputs = {
        n: on_device(a.transpose(0, 2, 1, 3).reshape(B, S, H * D) if packed else a)
        for n, a in zip("qkv", (problem.q, problem.k, problem.v), strict=True)
    }
    out = torch.full_like(inputs["q"], float("nan"))
    runs: list[Run] = []
    for nodes in (1, NODES):
        data = native(kind, B, H, S, D, mask, problem.q.dtype.name, nodes)
        session = ort.InferenceSession(data, providers=[("CUDAExecutionProvider", settings)])
        binding = bind(session, inputs, out, nodes)
        torch.cuda.synchronize()
        for _ in range(3):
            session.run_with_iobinding(binding)
        runs.append(lambda s=session, b=binding: s.run_with_iobinding(b))  # type: ignore[misc]
    torch.cuda.synchronize()
    mine = output.transpose(1, 2).reshape(B, S, H * D) if packed else output
    difference = float((out.float() - mine.float()).abs().max())
    if not difference < 0.1:
        raise RuntimeError(f"{kind}: its output differs from StofAttention's by {difference}")
    return runs, difference


def measure() -> list[dict[str, Any]]:
    """A row of times for every problem, each by turns with the runtime's operators."""
    rows = []
    for dtype, B, H, S, D, mask in PROBLEMS:
        problem = random_problem(np.random.default_rng(0), B, H, S, D, dtype=np.dtype(dtype), mask=mask)
        stream = torch.cuda.Stream()
        settings = {"user_compute_stream": str(stream.cuda_stream), "enable_cuda_graph": "1"}
        row: dict[str, Any] = {"dtype": dtype, "B": B, "H": H, "S": S, "D": D, "mask": mask}
        bound = [Bound(problem, nodes=nodes, **settings) for nodes in (1, NODES)]
        for _ in range(3):
            for one in bound:
                one.run()
        row["identity"] = round(min(identity(settings, stream) for _ in range(3)), 1)
        dense = np.asarray(Problem(problem.q[:1, :1], problem.k[:1, :1], problem.v[:1, :1], mask).evaluate_mask()[0, 0])
        runs: dict[str, list[Run]] = {"stof": [one.run for one in bound]}
        for kind in ("MultiHeadAttention", "Attention"):
            try:
                runs[kind], difference = own_runs(kind, problem, dense, bound[0].output, settings)
                row[f"{kind} difference"] = difference
            except Exception as error:  # what the provider refuses is part of the table
                row[kind] = str(error)[:200]
        times = timed([run for pair in runs.values() for run in pair], stream)
        for i, kind in enumerate(runs):
            one, many = times[2 * i : 2 * i + 2]
            row[kind], row[f"{kind} node"] = round(one, 1), round((many - one) / (NODES - 1), 1)
        for kind in list(runs)[1:]:
            row[f"kept over {kind}"] = kept(row, kind)
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def write(rows: list[dict[str, Any]], path: Path) -> None:
    """Writes the rows with what made them."""
    machine = {"device": torch.cuda.get_device_name(), "onnxruntime": ort.__version__, "library": stof.build_info()}
    path.write_text(strict_json.dumps_by_line({"machine": machine, "rows": rows}) + "\n")


def main() -> int:
    """Times all problems."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, help="a JSON file for the times")
    arguments = parser.parse_args()
    if arguments.results is not None and arguments.results.is_dir():
        parser.error(f"--results: {arguments.results} is a folder, expected the path of a file to write")
    rows = measure()
    if arguments.results is not None:
        write(rows, arguments.results)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
