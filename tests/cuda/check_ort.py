# SPDX-License-Identifier: Apache-2.0
"""StofAttention in ONNX Runtime's CUDA provider, on a machine with a GPU: results against fp64, IO binding, graph capture,
two sessions on streams of their own, one session in two threads, a device without free memory, and times beside the runtime's
own operators.

``python tests/cuda/check_ort.py`` with onnxruntime-gpu, torch and ``STOF_LIBRARY``; ends with an error when one is wrong.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import torch
from onnx import TensorProto, helper, numpy_helper

import stof
from stof.site import EmptyRows
from stof.testing import Problem, assert_close, random_padding, random_problem, reference

# The weights are rounded to half precision before the second product.
TOLERANCE = {"float32": 5e-6, "float16": 2.0**-11 * 6, "bfloat16": 2.0**-8 * 6}
TYPES = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}
TORCH_TYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def model(problem: Problem, constants: tuple[str, ...] = ()) -> bytes:
    """One StofAttention node; dimensions are open. ``constants`` are roles that become initializers."""
    arrays, attributes = problem.inputs(), problem.attributes()
    names = ["q", "k", "v", *str(attributes["operands"]).split()]
    given, fixed = [], []
    for name, array in zip(names, arrays, strict=True):
        kind = helper.np_dtype_to_tensor_dtype(array.dtype)
        if name in constants:
            fixed.append(numpy_helper.from_array(array, name))
        else:
            given.append(helper.make_tensor_value_info(name, kind, [f"{name}{i}" for i in range(array.ndim)]))
    node = helper.make_node("StofAttention", names, ["out"], "attention", domain="stof", **attributes)
    output = helper.make_tensor_value_info("out", TYPES[problem.q.dtype.name], None)
    graph = helper.make_graph([node], "g", given, [output], fixed)
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("stof", 1)]
    return bytes(helper.make_model(graph, opset_imports=imports, ir_version=8).SerializeToString())


def session(data: bytes, **provider: Any) -> Any:
    """A session on the CUDA provider, which must take every node."""
    options = ort.SessionOptions()
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    stof.register(options)
    return ort.InferenceSession(data, options, providers=[("CUDAExecutionProvider", provider)])


def on_device(array: np.ndarray) -> torch.Tensor:
    """The array on the GPU; bfloat16 by its bits."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).cuda().view(torch.bfloat16)
    return torch.from_numpy(np.ascontiguousarray(array)).cuda()


def to_host(tensor: torch.Tensor) -> np.ndarray:
    """The tensor as fp32."""
    return tensor.float().cpu().numpy()


class Bound:
    """A session whose inputs and output are torch tensors on the GPU."""

    def __init__(self, problem: Problem, constants: tuple[str, ...] = (), shared: Any = None, **provider: Any) -> None:
        self.session = session(model(problem, constants), **provider) if shared is None else shared
        names = ["q", "k", "v", *str(problem.attributes()["operands"]).split()]
        arrays = dict(zip(names, problem.inputs(), strict=True))
        self.inputs = {n: on_device(a) for n, a in arrays.items() if n not in constants}
        dtype = TORCH_TYPES[problem.q.dtype.name]
        self.output = torch.full(problem.shape, float("nan"), dtype=dtype, device="cuda")
        self.binding = self.session.io_binding()
        for name, tensor in self.inputs.items():
            kind = helper.np_dtype_to_tensor_dtype(arrays[name].dtype)
            self.binding.bind_input(name, "cuda", 0, kind, tuple(tensor.shape), tensor.data_ptr())
        self.binding.bind_output(
            "out", "cuda", 0, TYPES[problem.q.dtype.name], tuple(self.output.shape), self.output.data_ptr()
        )
        torch.cuda.synchronize()

    def run(self) -> None:
        """Queues one run."""
        self.session.run_with_iobinding(self.binding)


def problems(rng: np.random.Generator) -> dict[str, tuple[Problem, tuple[str, ...]]]:
    """What the provider has to compute, by name, with the roles that are constants."""
    found: dict[str, tuple[Problem, tuple[str, ...]]] = {}
    for dtype in TYPES:
        kind = np.dtype(dtype)
        for size in (64, 128, 80, *((30, 256) if dtype == "float32" else ())):
            found[f"{dtype} dense D{size}"] = (random_problem(rng, 2, 4, 200, size, dtype=kind), ())
            window = random_problem(rng, 2, 4, 333, size, G=2, dtype=kind, mask="abs(q - k) <= 40", padded=True)
            found[f"{dtype} window padded D{size}"] = (window, ())
        table = rng.random((257, 257)) < 0.1
        table[5] = False
        for policy in EmptyRows:
            problem = random_problem(
                rng, 1, 2, 257, 64, dtype=kind, mask="table0[q, k]", operands={"table0": table}, empty_rows=policy
            )
            found[f"{dtype} table {policy.value}"] = (problem, ("table0",))
        heads = "k <= q and (q // 16 - k // 16 < 2 or (k // 16 + h) % 4 == 0)"
        found[f"{dtype} per head"] = (random_problem(rng, 2, 4, 300, 64, dtype=kind, mask=heads), ())
        past = random_problem(rng, 2, 4, 7, 64, T=301, dtype=kind, mask="k <= q and q - k < 50", query_offset=True)
        found[f"{dtype} past"] = (past, ())
        extra = random_problem(
            rng, 2, 4, 190, 64, dtype=kind, mask="k <= q", softcap=20.0,
            relative_bias=rng.standard_normal((4, 65)).astype(np.float32),
            sink=rng.standard_normal(4).astype(kind),
            bias=rng.standard_normal((1, 4, 190, 190)).astype(np.float32),
        )  # fmt: skip
        found[f"{dtype} bias, table by distance, sink, softcap"] = (extra, ("relative_bias", "sink"))
        for size in (64, 128):
            found[f"{dtype} segments D{size}"] = (segments(rng, 2, 4, 300, size, dtype=kind), ())
            found[f"{dtype} segments, one row for all D{size}"] = (
                segments(rng, 3, 4, 260, size, rows=1, dtype=kind, G=2, empty_rows=EmptyRows.ALL),
                (),
            )
            lengths = {"lengths": np.array([200, 0, 77], np.int32), "pad": random_padding(rng, 3, 200)}
            by_length = "k < lengths[b] and (k < 3 or pad[b, k]) and abs(q - k) < 90"
            found[f"{dtype} lengths D{size}"] = (
                random_problem(rng, 3, 2, 200, size, dtype=kind, mask=by_length, operands=lengths),
                (),
            )
        step = {"lengths": np.array([300, 150], np.int64)}
        found[f"{dtype} one query"] = (
            random_problem(rng, 2, 4, 1, 64, T=301, dtype=kind, mask="k <= q and q - k < 50", query_offset=True), ()
        )  # fmt: skip
        found[f"{dtype} one query, lengths"] = (
            random_problem(rng, 2, 4, 1, 64, T=301, dtype=kind, mask="k < lengths[b]", operands=step), ()
        )  # fmt: skip
    for pad in (np.bool_, np.uint8, np.int8, np.int32, np.float32, np.float16):
        problem = random_problem(rng, 4, 2, 150, 64, dtype=np.float16, mask="abs(q - k) <= 40", padded=True)
        operands = {"pad": (problem.operands["pad"] * rng.integers(1, 100, (4, 150))).astype(pad)}
        found[f"padding as {np.dtype(pad).name}"] = (replace(problem, operands=operands), ())
    return found


def segment_ids(rng: np.random.Generator, rows: int, length: int) -> np.ndarray:
    """int64 [rows, length]: rising ids in stretches of about 60."""
    return np.cumsum(rng.random((rows, length)) < 1 / 60, axis=-1).astype(np.int64)


def segments(
    rng: np.random.Generator, B: int, H: int, S: int, D: int, *, rows: int | None = None, **settings: Any
) -> Problem:
    """Packed documents under a causal mask; the ids are vectors of the run, one row of them for all batches or for each."""
    ids = segment_ids(rng, rows or B, S)
    mask = "k <= q and segment_q[b, q] == segment_k[b, k]"
    return random_problem(rng, B, H, S, D, mask=mask, operands={"segment_q": ids, "segment_k": ids}, **settings)


def check_results() -> int:
    """Every problem with IO binding; the number of problems."""
    count = 0
    for name, (problem, constants) in problems(np.random.default_rng(0)).items():
        bound = Bound(problem, constants)
        bound.run()
        torch.cuda.synchronize()
        try:
            assert_close(to_host(bound.output), reference(problem), TOLERANCE[problem.q.dtype.name] * 4)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error
        count += 1
    return count


def check_capture() -> None:
    """With enable_cuda_graph: replays follow the inputs that lie at the captured addresses."""
    rng = np.random.default_rng(1)
    problem = random_problem(rng, 2, 4, 300, 64, dtype=np.float16, mask="abs(q - k) <= 20", padded=True)
    bound = Bound(problem, enable_cuda_graph="1")
    for _ in range(5):
        q = rng.standard_normal(problem.q.shape).astype(np.float16)
        pad = random_padding(rng, 2, 300)
        bound.inputs["q"].copy_(torch.from_numpy(q))
        bound.inputs["pad"].copy_(torch.from_numpy(pad))
        bound.output.fill_(float("nan"))
        torch.cuda.synchronize()
        bound.run()
        torch.cuda.synchronize()
        other = Problem(q, problem.k, problem.v, problem.mask, {"pad": pad})
        assert_close(to_host(bound.output), reference(other), TOLERANCE["float16"] * 4)


def check_segments_capture() -> None:
    """A captured graph makes the mask again from the segment ids of each replay."""
    rng = np.random.default_rng(2)
    for size in (64, 128):
        problem = segments(rng, 2, 4, 700, size, dtype=np.float16)
        bound = Bound(problem, enable_cuda_graph="1")
        for _ in range(5):
            ids = segment_ids(rng, 2, 700)
            for name in ("segment_q", "segment_k"):
                bound.inputs[name].copy_(torch.from_numpy(ids))
            bound.output.fill_(float("nan"))
            torch.cuda.synchronize()
            bound.run()
            torch.cuda.synchronize()
            operands = {"segment_q": ids, "segment_k": ids}
            other = Problem(problem.q, problem.k, problem.v, problem.mask, operands)
            assert_close(to_host(bound.output), reference(other), TOLERANCE["float16"] * 4)


def check_threads() -> None:
    """One session, two threads, paddings and segments that differ: neither's memory may get to the other too early."""
    rng = np.random.default_rng(3)
    for dynamic in (False, True):
        draws = []
        for _ in range(2):
            mask = "abs(q - k) <= 300 and pad[b, k]"
            operands = {"pad": random_padding(rng, 4, 1024)}
            if dynamic:
                mask += " and segment_q[b, q] == segment_k[b, k]"
                ids = segment_ids(rng, 4, 1024) // 8
                operands.update(segment_q=ids, segment_k=ids)
            draws.append(random_problem(rng, 4, 4, 1024, 64, dtype=np.float16, mask=mask, operands=operands))
        first = Bound(draws[0])
        bounds = [first, Bound(draws[1], shared=first.session)]
        wanted = [torch.from_numpy(reference(problem)).cuda() for problem in draws]
        torch.cuda.synchronize()
        failures: list[BaseException] = []

        def work(bound: Bound, want: torch.Tensor, failures: list[BaseException] = failures) -> None:
            try:
                stream = torch.cuda.Stream()
                with torch.cuda.stream(stream):
                    for _ in range(150):
                        bound.output.fill_(float("nan"))
                        stream.synchronize()
                        bound.run()
                        worst = float((bound.output.double() - want).abs().max())
                        assert worst <= TOLERANCE["float16"] * 4, worst
            except BaseException as error:  # shown by the main thread
                failures.append(error)

        threads = [threading.Thread(target=work, args=pair) for pair in zip(bounds, wanted, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]


def check_memory() -> None:
    """A device without free memory: an error that says so, and a session that goes on."""
    rng = np.random.default_rng(4)
    large, small = (segments(rng, 1, 1, length, 64, dtype=np.float16) for length in (32768, 100))
    bound = Bound(large)
    other = Bound(small, shared=bound.session)
    other.run()  # whatever else a first run needs
    torch.cuda.synchronize()
    held = []
    for size in (1 << 30, 1 << 25):
        while torch.cuda.mem_get_info()[0] > (32 << 20) + size:
            held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
    message = ""
    try:
        bound.run()
    except Exception as error:  # ONNX Runtime's own types differ by version
        message = str(error)
    assert "no device memory for" in message, message or "a mask of 130 MiB fits into 64"
    held.clear()
    torch.cuda.empty_cache()
    for one in (other, bound):
        one.run()
    torch.cuda.synchronize()
    assert_close(to_host(other.output), reference(small), TOLERANCE["float16"] * 4)
    assert bool(torch.isfinite(bound.output).all())


def check_streams() -> None:
    """Two sessions on two streams from two threads, with shapes that neither met before."""
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            stream = torch.cuda.Stream()
            rng = np.random.default_rng(seed)
            for length in range(129, 700, 57):
                problem = random_problem(rng, 1, 4, length, 64, dtype=np.float16, mask="abs(q - k) <= 33", padded=True)
                bound = Bound(problem, user_compute_stream=str(stream.cuda_stream))
                for _ in range(3):
                    bound.run()
                stream.synchronize()
                assert_close(to_host(bound.output), reference(problem), TOLERANCE["float16"] * 4)
        except BaseException as error:  # shown by the main thread
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def native(kind: str, B: int, H: int, S: int, D: int, mask: np.ndarray, dtype: str) -> bytes:
    """The runtime's own operator under the same mask: MultiHeadAttention with a bias, or Attention-23 with a bool mask."""
    if kind == "MultiHeadAttention":
        shape = [B, S, H * D]
        node = helper.make_node(
            kind, ["q", "k", "v", "", "", "bias"], ["out"], num_heads=H, domain="com.microsoft"
        )  # fmt: skip
        bias = np.where(mask, 0, -65504).astype(dtype)[None, None]
        constant = numpy_helper.from_array(bias, "bias")
    else:
        shape = [B, H, S, D]
        node = helper.make_node(kind, ["q", "k", "v", "mask"], ["out"])
        constant = numpy_helper.from_array(mask, "mask")
    given = [helper.make_tensor_value_info(n, TYPES[dtype], shape) for n in "qkv"]
    output = helper.make_tensor_value_info("out", TYPES[dtype], shape)
    imports = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
    graph = helper.make_graph([node], "g", given, [output], [constant])
    return bytes(helper.make_model(graph, opset_imports=imports, ir_version=10).SerializeToString())


def timed(run: Callable[[], None], stream: torch.cuda.Stream) -> float:
    """Microseconds a run, the median of 30, measured with events on the stream."""
    times = []
    for i in range(40):
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record(stream)
        run()
        last.record(stream)
        last.synchronize()
        if i >= 10:
            times.append(first.elapsed_time(last) * 1e3)
    return sorted(times)[15]


def kernels(run: Callable[[], None], stream: torch.cuda.Stream) -> float:
    """Microseconds from the start of a run's first work on the device to the end of its last, the median of 20 traced runs."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    times = []
    for _ in range(20):
        with torch.profiler.profile(activities=activities) as profile:
            run()
            stream.synchronize()
        spans = [e.time_range for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        if not spans:
            raise RuntimeError("the profiler saw no work on the device")
        times.append(float(max(s.end for s in spans) - min(s.start for s in spans)))
    return sorted(times)[10]


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
    return timed(lambda: one.run_with_iobinding(binding), stream)


def kept(row: dict[str, Any], kind: str) -> dict[str, float]:
    """Shares of the gain over ``kind`` that the kernels alone have: of the time that is saved, and of the quotient of
    times, as measured and less what the runtime takes for a run of nothing. Traces and times are not by turns.
    """
    own, other, floor = row["stof"], row[kind], row["identity"]
    own_kernels, other_kernels = row["stof kernels"], row[f"{kind} kernels"]
    gain = other_kernels / own_kernels
    return {
        "time": round((other - own) / (other_kernels - own_kernels), 3),
        "quotient": round(other / own / gain, 3),
        "quotient beyond identity": round((other - floor) / (own - floor) / gain, 3),
    }


def measure() -> list[dict[str, object]]:
    """Times beside the runtime's operators: captured graphs, IO binding, one stream."""
    rows = []
    for dtype, B, H, S, D, mask in (
        ("float16", 1, 32, 8192, 128, "abs(q - k) <= 128"),
        ("float16", 1, 16, 4096, 64, "abs(q - k) <= 128"),
        ("float16", 1, 16, 4096, 64, "k <= q"),
        ("float16", 8, 12, 1024, 64, "abs(q - k) <= 128"),
        ("float32", 1, 16, 4096, 64, "abs(q - k) <= 128"),
        ("float32", 1, 16, 4096, 64, "k <= q"),
        ("float32", 8, 12, 1024, 64, "abs(q - k) <= 128"),
    ):
        rng = np.random.default_rng(0)
        problem = random_problem(rng, B, H, S, D, dtype=np.dtype(dtype), mask=mask)
        stream = torch.cuda.Stream()
        settings = {"user_compute_stream": str(stream.cuda_stream), "enable_cuda_graph": "1"}
        row: dict[str, object] = {"dtype": dtype, "B": B, "H": H, "S": S, "D": D, "mask": mask}
        bound = Bound(problem, **settings)
        for _ in range(3):
            bound.run()
        row["identity"] = round(min(identity(settings, stream) for _ in range(3)), 1)
        row["stof"] = round(timed(bound.run, stream), 1)
        row["stof kernels"] = round(kernels(bound.run, stream), 1)
        dense = np.asarray(Problem(problem.q[:1, :1], problem.k[:1, :1], problem.v[:1, :1], mask).allowed()[0, 0])
        for kind in ("MultiHeadAttention", "Attention"):
            packed = kind == "MultiHeadAttention"
            tensors = {
                n: on_device(a.transpose(0, 2, 1, 3).reshape(B, S, H * D) if packed else a)
                for n, a in zip("qkv", (problem.q, problem.k, problem.v), strict=True)
            }
            out = torch.empty_like(tensors["q"])
            try:
                one = ort.InferenceSession(
                    native(kind, B, H, S, D, dense, dtype), providers=[("CUDAExecutionProvider", settings)]
                )
                binding = one.io_binding()
                for n, tensor in tensors.items():
                    binding.bind_input(n, "cuda", 0, TYPES[dtype], tuple(tensor.shape), tensor.data_ptr())
                binding.bind_output("out", "cuda", 0, TYPES[dtype], tuple(out.shape), out.data_ptr())
                torch.cuda.synchronize()
                for _ in range(3):
                    one.run_with_iobinding(binding)
                run: Callable[[], None] = lambda s=one, b=binding: s.run_with_iobinding(b)  # type: ignore[misc] # noqa: E731
                row[kind] = round(timed(run, stream), 1)
                torch.cuda.synchronize()
                mine = bound.output.transpose(1, 2).reshape(B, S, H * D) if packed else bound.output
                row[f"{kind} difference"] = float((out.float() - mine.float()).abs().max())
            except Exception as error:  # what the provider refuses is part of the table
                row[kind] = str(error)[:200]
                continue
            row[f"{kind} kernels"] = round(kernels(run, stream), 1)
            row[f"kept over {kind}"] = kept(row, kind)
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def main() -> int:
    """The checks in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, help="a JSON file for the times")
    arguments = parser.parse_args()
    if arguments.results is not None and arguments.results.is_dir():
        parser.error(f"--results: {arguments.results} is a folder, expected the path of a file to write")
    start = time.monotonic()
    print(f"{check_results()} problems are right in the CUDA provider", flush=True)
    check_capture()
    print("a captured graph follows its inputs", flush=True)
    check_segments_capture()
    print("a captured graph follows its segment ids", flush=True)
    check_streams()
    print("two sessions on two streams are right", flush=True)
    check_threads()
    print("one session in two threads is right", flush=True)
    check_memory()
    print("a device without free memory gives an error", flush=True)
    rows = measure()
    if arguments.results is not None:
        machine = {"device": torch.cuda.get_device_name(), "onnxruntime": ort.__version__, "library": stof.build_info()}
        arguments.results.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")
    print(f"done in {time.monotonic() - start:.0f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
