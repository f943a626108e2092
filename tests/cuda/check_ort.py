# SPDX-License-Identifier: Apache-2.0
"""StofAttention in ONNX Runtime's CUDA provider, on a machine with a GPU: results against fp64, IO binding, graph capture,
two sessions on streams of their own, one session in two threads, a device without free memory. Times: time_ort.py.

``python tests/cuda/check_ort.py`` with onnxruntime-gpu, torch and ``STOF_LIBRARY``; ends with an error when one is wrong.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from ort_models import TYPES, Bound, to_host

from stof.attention.checks.reference import Problem, assert_close, random_padding, random_problem, reference
from stof.mask.site import EmptyRows

# The weights are rounded to half precision before the second product.
TOLERANCE = {"float32": 5e-6, "float16": 2.0**-11 * 6, "bfloat16": 2.0**-8 * 6}

# The masks of nodes that compute fully masked rows alone (docs/reference/attention-forms.md), where all scores are the same.
FULLY_MASKED_ROWS = {
    "one": "segment_q[b, q] == 1 and (k <= q and q - k <= 40 or k <= q and pad[b, k])",
    "two": "segment_q[b, q] == 1 and pad[b, k] or segment_q[b, q] == 2",
}


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
        for name, mask in FULLY_MASKED_ROWS.items():
            vectors = {"segment_q": rng.integers(0, 3, (3, 200)), "pad": random_padding(rng, 3, 200)}
            vectors["segment_q"][0] = 0  # no row is the node's own
            weaker = random_problem(rng, 3, 4, 200, 64, dtype=kind, mask=mask, operands=vectors, scale=0.0)
            found[f"{dtype} rows that attend by a weaker mask, {name}"] = (weaker, ())
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


def main() -> int:
    """The checks in turn."""
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
    print(f"done in {time.monotonic() - start:.0f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
