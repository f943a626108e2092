# SPDX-License-Identifier: Apache-2.0
"""The commands of ``python -m bench``; ``options.py`` lists them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from bench.core.candidate import select
from bench.core.clone import RESULTS
from bench.core.point import measure_point
from bench.cpu import cases, sparse_mlp
from bench.cpu.device import CpuDevice
from bench.decoder import mlp_decoder
from bench.options import make_parser
from stof.bench import measure
from stof.bench.cli import end_command, run_with_threads, with_errors_reported
from stof.bench.results import Record, merge, store, store_all
from stof.files import write_text
from stof.terminal import say

_NAME = "python -m bench"


def main(argv: Sequence[str] | None = None) -> int:
    """The command; 0 when everything asked for was measured."""
    return end_command(_NAME, lambda: with_errors_reported(lambda: _run(make_parser().parse_args(argv))))


def _run(arguments: argparse.Namespace) -> int:
    if arguments.command == "table":
        from bench.numbers_page import document

        text = document(arguments.results)
        if arguments.output is None:
            say(*text.split("\n"))
        else:
            write_text("table", arguments.output, text.splitlines())
        return 0
    if arguments.command == "merge":
        say(*merge(arguments.found, arguments.results))
        return 0
    if arguments.command == "plot":
        from bench.gpu.plot import plots

        made = [str(p) for p in plots(arguments.results, arguments.output)]
        say(*(made or ["no results of a GPU there"]))
        return 0
    if arguments.command == "search":
        return _search(arguments)
    if arguments.command == "texts" and arguments.device == "cuda":
        from bench.texts.run import run_on_gpu

        return run_on_gpu(arguments)
    if arguments.command == "attention" and arguments.device == "cuda":
        return _attention_on_gpu(arguments)
    if arguments.command == "model" and (arguments.device == "cuda" or arguments.prepare):
        return _models_on_gpu(arguments)
    if arguments.command == "decoder-mlp":
        return mlp_decoder.run(arguments)
    if arguments.command == "decoder":
        from bench.decoder import run as decoder

        return decoder.run(arguments)
    if arguments.command == "quantized":
        from bench.cpu import quantized

        return quantized.run(arguments)
    if "rounds" in arguments:
        arguments.rounds = arguments.rounds or measure.ROUNDS
    return run_with_threads(arguments, _run_on_threads, _NAME)


def _run_on_threads(arguments: argparse.Namespace, threads: int) -> int:
    """A command of the CPU, in a process that is pinned to as many CPUs."""
    match arguments.command:
        case "attention":
            return _attention(arguments, threads)
        case "decode":
            return _decode(arguments, threads)
        case "sparse-mlp":
            return _sparse_mlp(arguments, threads)
        case "run-time-masks":
            return _run_time_masks(arguments, threads)
        case "bf16-attention":
            return _bf16_attention(arguments, threads)
        case "sites":
            return _sites(arguments, threads)
        case "texts":
            from bench.texts.run import run as run_texts

            return run_texts(arguments, threads)
        case "decode-genai":
            from bench.cpu import decode_genai

            return decode_genai.run(arguments, threads)
        case _:
            from bench.cpu.models import run

            return run(arguments, threads)


def _search(arguments: argparse.Namespace) -> int:
    from bench.cpu import search

    shape = (arguments.batch, arguments.length)
    if arguments.model is not None:
        for line in search.compare_regions(arguments.model, *shape, arguments.measured, arguments.seed):
            say(line.text())
        return 0
    found = []
    for line in search.compare_spaces(search.GRAPHS, *shape, arguments.seed):
        say(f"{line.cost:10s} {line.text()}")
        found.append(line)
    say(search.summary(found))
    store_all(arguments.results / "search.json", [x.record(i // 2) for i, x in enumerate(found)])
    return 0 if all(x.enumerated is not None and x.found <= x.enumerated * (1 + 1e-9) for x in found) else 3


def _attention(arguments: argparse.Namespace, threads: int) -> int:
    from bench.cpu.attention import describe_record
    from bench.cpu.baselines import CANDIDATES
    from bench.cpu.problem import CpuProblem

    candidates, device = select(CANDIDATES, arguments.peers), CpuDevice(threads)
    for name in arguments.masks or cases.ATTENTION_MASKS:
        for length in arguments.lengths or cases.LENGTHS:
            problem = CpuProblem(cases.attention_case(name, length))
            record = measure_point(problem, candidates, device, arguments.rounds)
            if arguments.peers is None:
                store(arguments.results / "attention-cpu.json", record)
            say(*describe_record(record))
    return 0


def _decode(arguments: argparse.Namespace, threads: int) -> int:
    from bench.cpu import decode

    device, untimed = CpuDevice(threads), 0
    for case in decode.steps():
        chosen = (
            (arguments.lengths, case.T), (arguments.batches, case.B), (arguments.heads, case.G), (arguments.sizes, case.D),
            (arguments.caches, case.cache or "fp32")
        )  # fmt: skip
        if not all(values is None or value in values for values, value in chosen):
            continue
        record = measure_point(decode.DecodeProblem(case), decode.CANDIDATES, device, arguments.rounds)
        store(arguments.results / "decode-cpu.json", record)
        say(*decode.describe_record(record))
        untimed += _lacks_times(record)
    return 3 if untimed else 0


def _sparse_mlp(arguments: argparse.Namespace, threads: int) -> int:
    modes, precisions = arguments.modes or sparse_mlp.MODES, arguments.precisions or sparse_mlp.PRECISIONS
    tokens, densities = arguments.tokens or sparse_mlp.TOKENS, arguments.densities or sparse_mlp.DENSITIES
    device, untimed = CpuDevice(threads, warm=2), 0
    layers: sparse_mlp.Layers | None = None
    for case in sparse_mlp.grid(tokens, densities, arguments.shapes):
        if case.mode not in modes or case.precision not in precisions:
            continue
        own = (case.shape, case.mode, case.precision)
        if layers is None or (layers.shape, layers.mode, layers.precision) != own:
            layers = None  # the memory of those before
            layers = sparse_mlp.Layers(case.shape, case.mode, case.precision, threads)
        problem = sparse_mlp.MlpPointProblem(case, layers)
        record = measure_point(problem, sparse_mlp.candidates_of(case.precision), device, arguments.rounds)
        store(arguments.results / "sparse-mlp-cpu.json", record)
        say(*sparse_mlp.describe_record(record))
        untimed += _lacks_times(record)
    return 3 if untimed else 0


def _run_time_masks(arguments: argparse.Namespace, threads: int) -> int:
    from bench.cpu import run_time_masks

    device, untimed = CpuDevice(threads), 0
    for point in run_time_masks.grid(arguments.kinds, arguments.lengths, arguments.shares, arguments.rows):
        record = measure_point(point.problem(), run_time_masks.CANDIDATES, device, arguments.rounds)
        store(arguments.results / "run-time-masks-cpu.json", record)
        say(*run_time_masks.describe_record(record))
        untimed += _lacks_times(record)
    return 3 if untimed else 0


def _bf16_attention(arguments: argparse.Namespace, threads: int) -> int:
    from bench.cpu import bf16_attention

    device, missing = CpuDevice(threads), 0
    for case in bf16_attention.grid(arguments.masks, arguments.lengths, arguments.sizes):
        candidates = select(bf16_attention.CANDIDATES, arguments.peers)
        record = measure_point(bf16_attention.Bf16Problem(case), candidates, device, arguments.rounds)
        if arguments.peers is None:
            store(arguments.results / "bf16-attention-cpu.json", record)
        say(*bf16_attention.describe_record(record))
        missing += any("us" not in row for name, row in record["peers"].items() if name.startswith("stof"))
    return 3 if missing else 0


def _lacks_times(record: Record) -> bool:
    """Whether a candidate of a point could not be timed, or was wrong."""
    return any("missing" in row for row in record["peers"].values())


def _attention_on_gpu(arguments: argparse.Namespace) -> int:
    from bench.gpu.cases import grid
    from bench.gpu.run import run
    from bench.gpu.timing import ROUNDS
    from bench.gpu.worker_pool import PointPlan

    chosen = (arguments.masks, arguments.lengths, arguments.batches)
    points = [case for name in arguments.grid for case in grid(name, *chosen)]
    plan = PointPlan(arguments.peers, arguments.rounds or ROUNDS, arguments.kernels)
    return run(points, plan, arguments.results, arguments.limit, arguments.again)


def _models_on_gpu(arguments: argparse.Namespace) -> int:
    from bench.gpu.variants import prepare

    name = arguments.model.replace("/", "-")
    worst = 0
    for length in arguments.lengths or [4096]:
        shape = (arguments.batch or 1, length)
        folder = (arguments.prepared or Path("build/bench")) / f"{name}-{shape[0]}-{shape[1]}"
        if arguments.prepare or not folder.is_dir():
            for kind, reason in prepare(arguments.model, shape, folder).items():
                say(f"{kind}: {reason}")
                worst = 3
        if arguments.prepare:
            say(str(folder))
            continue
        from bench.gpu.device_lock import DeviceLock
        from bench.gpu.models import describe_record, time_model_variants

        traced = "quotient" not in arguments.without
        record = time_model_variants(name, folder, shape, arguments.rounds or 9, traced, DeviceLock(arguments.lock))
        store((arguments.results or RESULTS) / "models-cuda.json", record)
        say(*describe_record(record))
        worst = max(worst, 3 if "stof" not in record["us"] else 0)
    return worst


def _sites(arguments: argparse.Namespace, threads: int) -> int:
    from bench.cpu.attention import describe_record
    from bench.cpu.baselines import CANDIDATES
    from bench.cpu.problem import CpuProblem

    candidates, device = select(CANDIDATES, ("stof", "ort-exported")), CpuDevice(threads)
    slower = 0
    for case in cases.site_cases():
        if case.S not in arguments.lengths:
            continue
        record = measure_point(CpuProblem(case), candidates, device, arguments.rounds)
        store(arguments.results / "sites-cpu.json", record)
        say(*describe_record(record))
        own, other = (record["peers"][c.name].get("us") for c in candidates)
        slower += own is None or other is None or own > other
    say(f"{slower} site(s) slower than ONNX Runtime's own nodes" if slower else "no site is slower")
    return 3 if slower else 0
