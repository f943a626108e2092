# SPDX-License-Identifier: Apache-2.0
"""``stof-bench attention | decode | sparse-mlp | sites | model | decoder | decode-genai | search | merge | table | plot``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from stof.bench.core import measure
from stof.bench.core.candidate import Unavailable, select
from stof.bench.core.results import RESULTS
from stof.bench.cpu import cases, sparse_mlp
from stof.bench.decoder import mlp_decoder, mlp_models
from stof.bench.gpu.cases import GRIDS
from stof.errors import ArgumentError
from stof.files import write_text
from stof.tensorrt.describe_installation import describe_installation
from stof.terminal import Parser, VersionAction, complain, run_command, say


def main(argv: Sequence[str] | None = None) -> int:
    """The command; 0 when everything asked for was measured."""
    try:
        return run_command("stof-bench", lambda: _run_with_errors_reported(_parser().parse_args(argv)))
    except KeyboardInterrupt:
        complain("stof-bench: interrupted")
        return 130


def _run_with_errors_reported(arguments: argparse.Namespace) -> int:
    try:
        return _run(arguments)
    except (Unavailable, ValueError, KeyError) as error:
        raise ArgumentError(error) from error


def _parser() -> Parser:
    parser = Parser(prog="stof-bench", description="Times stof beside its baselines (docs/design/benchmarks.md).")
    parser.add_argument("--version", action=VersionAction, describe=describe_installation)
    commands = parser.add_subparsers(dest="command", required=True)
    attention = commands.add_parser("attention", help="the grids of the attention operator")
    attention.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    attention.add_argument("--grid", nargs="+", choices=GRIDS, default=["paper"], help="of --device cuda")
    attention.add_argument("--masks", nargs="+", default=None, metavar="NAME", help="default: all")
    attention.add_argument("--lengths", nargs="+", type=int, default=None, metavar="S", help="default: all")
    attention.add_argument(
        "--batches", nargs="+", type=int, default=None, metavar="B", help="of --grid paper; default: all"
    )
    attention.add_argument("--peers", nargs="+", default=None, metavar="NAME", help="default: all")
    attention.add_argument(
        "--kernels", action="store_true", help="of --device cuda: time every kernel of each point, too"
    )
    attention.add_argument("--again", type=int, default=0, metavar="N", help="time points that lose N times more")
    attention.add_argument("--limit", type=float, metavar="SECONDS", help="of --device cuda: begin no point after that")
    decode = commands.add_parser("decode", help="steps of a decoder beside GroupQueryAttention, on a CPU")
    decode.add_argument("--lengths", nargs="+", type=int, default=None, metavar="T", help="default: all")
    decode.add_argument("--batches", nargs="+", type=int, default=None, metavar="B", help="default: all")
    decode.add_argument("--heads", nargs="+", type=int, default=None, metavar="G", help="of keys; default: all")
    decode.add_argument("--sizes", nargs="+", type=int, default=None, metavar="D", help="of a head; default: all")
    decode.add_argument("--caches", nargs="+", default=None, metavar="TYPE", help="fp32, int8; default: both")
    mlp = commands.add_parser("sparse-mlp", help="the MLP of active neurons beside the dense one, on a CPU")
    mlp.add_argument("--device", choices=["cpu"], default="cpu")
    shapes = [*sparse_mlp.SHAPES, *sparse_mlp.SMALL_SIZES]
    large = ", ".join(sparse_mlp.SHAPES)
    mlp.add_argument("--shapes", nargs="+", choices=shapes, default=None, help=f"default: {large}")
    mlp.add_argument("--modes", nargs="+", choices=sparse_mlp.MODES, default=None, help="default: all")
    mlp.add_argument("--precisions", nargs="+", choices=sparse_mlp.PRECISIONS, default=None, help="default: all")
    mlp.add_argument("--tokens", nargs="+", type=int, default=None, metavar="T", help="default: 1, 4, 16")
    mlp.add_argument("--densities", nargs="+", type=float, default=None, metavar="D", help="0 to 1; default: all")
    sites = commands.add_parser("sites", help="the first models' attention shapes beside ONNX Runtime's own nodes")
    sites.add_argument("--lengths", nargs="+", type=int, default=list(cases.SITE_LENGTHS), metavar="S")
    model = commands.add_parser("model", help="a whole model before and after stof-optimize")
    model.add_argument("model", help="an .onnx file, or the name of a graph under models/graphs")
    model.add_argument(
        "--lengths", nargs="+", type=int, default=None, metavar="S",
        help="of dimensions that are lengths (default: up to three that run fast enough; on a GPU 4096)",
    )  # fmt: skip
    model.add_argument("--batch", type=int, default=None, help="of dimensions that count rows of a batch (1)")
    model.add_argument(
        "--shape", action="append", default=[], metavar="NAME=N[..M]", help="on a CPU: range of a dimension in use"
    )
    model.add_argument(
        "--inputs", nargs="+", default=[], metavar="FILE", help="on a CPU: your inputs, as stof-optimize takes them"
    )
    model.add_argument("--optimized", type=Path, help="the optimized file (default: made when it is not there)")
    model.add_argument("--without", nargs="+", default=[], choices=["openvino", "memory", "quotient"])
    model.add_argument("--ablation", action="store_true", help="on a CPU: attention alone and chains alone, too")
    model.add_argument("--tune", type=float, default=0.0, metavar="SECONDS", help="on a CPU: measure chains first")
    model.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    model.add_argument("--prepared", type=Path, metavar="DIR", help="of --device cuda: fp16 graphs without weights")
    model.add_argument("--lock", type=Path, metavar="FILE", help="of --device cuda: processes with it time in turns")
    model.add_argument("--prepare", action="store_true", help="write them, which needs no GPU, and end")
    decoder = commands.add_parser("decoder", help="a whole decoder of random weights, its tokens and a prompt")
    decoder.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    decoder.add_argument("--lengths", nargs="+", type=int, default=None, metavar="T", help="keys behind a token")
    decoder.add_argument(
        "--batches", nargs="+", type=int, default=None, metavar="B", help="default: 1 and a larger one"
    )
    decoder.add_argument("--heads", nargs="+", type=int, default=None, metavar="G", help="of keys (8 and 32; CPU: 2)")
    decoder.add_argument("--prompt", type=int, default=None, metavar="S", help="32768 (CPU: 1024); 0: none")
    decoder.add_argument("--variants", nargs="+", default=None, metavar="NAME", help="default: all")
    decoder.add_argument("--prepared", type=Path, metavar="DIR", help="optimized graphs, without weights")
    decoder.add_argument("--prepare", action="store_true", help="write them, which needs no GPU, and end")
    mlps = commands.add_parser("decoder-mlp", help="a whole decoder whose MLPs are sparse beside the dense one")
    mlps.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    mlps.add_argument("--models", nargs="+", choices=list(mlp_models.MODELS), required=True)
    mlps.add_argument("--precisions", nargs="+", choices=mlp_models.PRECISIONS, default=["float32"])
    mlps.add_argument(
        "--active", type=float, default=None, metavar="SHARE", help="of the neurons; default: the model's"
    )
    mlps.add_argument(
        "--idle", type=float, default=0.0, metavar="SHARE", help="of the neurons: they are never active (0)"
    )
    mlps.add_argument("--batch", type=int, default=1, metavar="B", help="sequences of a token")
    mlps.add_argument("--variants", nargs="+", default=None, metavar="NAME", help="default: all")
    mlps.add_argument("--no-memory", action="store_true", help="do not measure resident memory")
    mlps.add_argument("--no-times", action="store_true", help="measure resident memory alone")
    generation = commands.add_parser(
        "decode-genai", help="a model folder of ONNX Runtime GenAI before and after, on the CPU"
    )
    generation.add_argument("folder", type=Path, help="the model folder (models/genai.py builds some)")
    generation.add_argument("--contexts", nargs="+", type=int, default=[512, 4096, 16384], metavar="T")
    generation.add_argument("--tokens", type=int, default=32, metavar="N", help="timed at each context (32)")
    generation.add_argument("--optimized", type=Path, metavar="DIR", help="default: made when it is not there")
    search = commands.add_parser("search", help="the search for fusion schemes beside others, region by region")
    search.add_argument(
        "model", type=Path, nargs="?", help="an .onnx file; without, spaces of stored graphs are enumerated"
    )
    search.add_argument("--results", type=Path, default=RESULTS, metavar="DIR")
    search.add_argument("--batch", type=int, default=1)
    search.add_argument("--length", type=int, default=128, metavar="S")
    search.add_argument("--measured", action="store_true", help="times on this device in place of the analytical cost")
    search.add_argument("--seed", type=int, default=0)
    for command in (attention, decode, mlp, sites, model, decoder, mlps, generation):
        several = command in (attention, decode, mlp, sites)
        command.add_argument("--threads", nargs="+", type=int, default=[1, 2] if several else [2])
        # A user's own file is measured wherever the user is: results of it are stored where --results says.
        default, words = (None, "default: docs/results for graphs of models/") if command is model else (RESULTS, None)
        command.add_argument("--results", type=Path, default=default, metavar="DIR", help=words)
    for command in (attention, decode, mlp, sites, model, decoder, mlps):
        command.add_argument("--rounds", type=int, default=None, help="default: 5 on a CPU, 7 on a GPU")
    merge = commands.add_parser("merge", help="results that another machine wrote, into those here")
    merge.add_argument("found", type=Path, metavar="DIR", help="the folder that the other machine wrote")
    merge.add_argument("results", type=Path, metavar="INTO", help="for instance docs/results/h100")
    table = commands.add_parser("table", help="tables of the stored results, in Markdown")
    table.add_argument("--results", type=Path, default=RESULTS, metavar="DIR")
    table.add_argument("-o", "--output", type=Path, help="the file to write (default: the terminal)")
    plot = commands.add_parser("plot", help="pictures of the GPU's grids; needs matplotlib")
    plot.add_argument("results", type=Path, metavar="DIR", help="a machine's folder, for instance docs/results/h100")
    plot.add_argument("-o", "--output", type=Path, default=Path("docs/plots"), metavar="DIR")
    return parser


def _run(arguments: argparse.Namespace) -> int:
    if arguments.command == "table":
        from stof.bench.cpu.tables import document

        text = document(arguments.results)
        if arguments.output is None:
            say(*text.split("\n"))
        else:
            write_text("table", arguments.output, text.splitlines())
        return 0
    if arguments.command == "merge":
        from stof.bench.core.results import merge

        say(*merge(arguments.found, arguments.results))
        return 0
    if arguments.command == "plot":
        from stof.bench.gpu.plot import plots

        made = [str(p) for p in plots(arguments.results, arguments.output)]
        say(*(made or ["no results of a GPU there"]))
        return 0
    if arguments.command == "search":
        return _search(arguments)
    if arguments.command == "attention" and arguments.device == "cuda":
        return _attention_on_gpu(arguments)
    if arguments.command == "model" and (arguments.device == "cuda" or arguments.prepare):
        return _models_on_gpu(arguments)
    if arguments.command == "decoder-mlp":
        return mlp_decoder.run(arguments)
    if arguments.command == "decoder":
        from stof.bench.decoder import run as decoder

        return decoder.run(arguments)
    if "rounds" in arguments:
        arguments.rounds = arguments.rounds or measure.ROUNDS
    if len(arguments.threads) > 1:
        return _each_thread_count(arguments)
    threads: int = arguments.threads[0]
    measure.pin(threads)
    match arguments.command:
        case "attention":
            return _attention(arguments, threads)
        case "decode":
            return _decode(arguments, threads)
        case "sparse-mlp":
            return _sparse_mlp(arguments, threads)
        case "sites":
            return _sites(arguments, threads)
        case "decode-genai":
            from stof.bench.cpu import decode_genai

            return decode_genai.run(arguments, threads)
        case _:
            from stof.bench.cpu.models import run

            return run(arguments, threads)


def _search(arguments: argparse.Namespace) -> int:
    from stof.bench.core.results import store_all
    from stof.bench.cpu import search

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


def _each_thread_count(arguments: argparse.Namespace) -> int:
    """A process for each count, since a process is pinned once."""
    import multiprocessing

    worst = 0
    for threads in arguments.threads:
        arguments.threads = [threads]
        process = multiprocessing.get_context("spawn").Process(target=_child, args=(arguments,))
        process.start()
        process.join()
        worst = max(worst, process.exitcode or 0)
    return worst


def _child(arguments: argparse.Namespace) -> None:
    sys.exit(run_command("stof-bench", lambda: _run_with_errors_reported(arguments)))


def _attention(arguments: argparse.Namespace, threads: int) -> int:
    from stof.bench.core.results import store
    from stof.bench.cpu.attention import describe_record, measure_point
    from stof.bench.cpu.baselines import CANDIDATES

    candidates = select(CANDIDATES, arguments.peers)
    for name in arguments.masks or cases.ATTENTION_MASKS:
        for length in arguments.lengths or cases.LENGTHS:
            record = measure_point(cases.attention_case(name, length), threads, candidates, arguments.rounds)
            if arguments.peers is None:
                store(arguments.results / "attention-cpu.json", record)
            say(*describe_record(record))
    return 0


def _decode(arguments: argparse.Namespace, threads: int) -> int:
    from stof.bench.core.results import store
    from stof.bench.cpu import decode

    for point in decode.points():
        chosen = (
            (arguments.lengths, point.T), (arguments.batches, point.B), (arguments.heads, point.G), (arguments.sizes, point.D),
            (arguments.caches, point.cache)
        )  # fmt: skip
        if not all(values is None or value in values for values, value in chosen):
            continue
        record = decode.measure_point(point, threads, arguments.rounds)
        store(arguments.results / "decode-cpu.json", record)
        say(decode.describe_record(point, record))
    return 0


def _sparse_mlp(arguments: argparse.Namespace, threads: int) -> int:
    from stof.bench.core.results import store

    modes, precisions = arguments.modes or sparse_mlp.MODES, arguments.precisions or sparse_mlp.PRECISIONS
    tokens, densities = arguments.tokens or sparse_mlp.TOKENS, arguments.densities or sparse_mlp.DENSITIES
    layers: sparse_mlp.Layers | None = None
    for point in sparse_mlp.points(tokens, densities, arguments.shapes):
        if point.mode not in modes or point.precision not in precisions:
            continue
        own = (point.shape, point.mode, point.precision)
        if layers is None or (layers.shape, layers.mode, layers.precision) != own:
            layers = None  # the memory of those before
            layers = sparse_mlp.Layers(point.shape, point.mode, point.precision, threads)
        record = sparse_mlp.measure_point(point, layers, arguments.rounds)
        store(arguments.results / "sparse-mlp-cpu.json", record)
        say(sparse_mlp.describe_record(point, record))
    return 0


def _attention_on_gpu(arguments: argparse.Namespace) -> int:
    from stof.bench.gpu.cases import grid
    from stof.bench.gpu.run import run
    from stof.bench.gpu.timing import ROUNDS
    from stof.bench.gpu.worker_pool import PointPlan

    chosen = (arguments.masks, arguments.lengths, arguments.batches)
    points = [case for name in arguments.grid for case in grid(name, *chosen)]
    plan = PointPlan(arguments.peers, arguments.rounds or ROUNDS, arguments.kernels)
    return run(points, plan, arguments.results, arguments.limit, arguments.again)


def _models_on_gpu(arguments: argparse.Namespace) -> int:
    from stof.bench.core.results import store
    from stof.bench.gpu.variants import prepare

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
        from stof.bench.gpu.device_lock import DeviceLock
        from stof.bench.gpu.models import describe_record, measure_point

        traced = "quotient" not in arguments.without
        record = measure_point(name, folder, shape, arguments.rounds or 9, traced, DeviceLock(arguments.lock))
        store((arguments.results or RESULTS) / "models-cuda.json", record)
        say(*describe_record(record))
        worst = max(worst, 3 if "stof" not in record["us"] else 0)
    return worst


def _sites(arguments: argparse.Namespace, threads: int) -> int:
    from stof.bench.core.results import store
    from stof.bench.cpu.attention import describe_record, measure_point
    from stof.bench.cpu.baselines import CANDIDATES

    candidates = select(CANDIDATES, ("stof", "ort-exported"))
    slower = 0
    for case in cases.site_cases():
        if case.S not in arguments.lengths:
            continue
        record = {**measure_point(case, threads, candidates, arguments.rounds), "grid": "sites"}
        record["key"] = [case.name, case.mask, case.S, threads]
        store(arguments.results / "sites-cpu.json", record)
        say(*describe_record(record))
        own, other = (record["peers"][c.name].get("us") for c in candidates)
        slower += own is None or other is None or own > other
    say(f"{slower} site(s) slower than ONNX Runtime's own nodes" if slower else "no site is slower")
    return 3 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
