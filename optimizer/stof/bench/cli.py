# SPDX-License-Identifier: Apache-2.0
"""``stof-bench model FILE``, and for each command that runs from a clone of the repository the line that says so."""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from stof.bench import measure
from stof.errors import ArgumentError
from stof.system.processor import usable_cores
from stof.tensorrt.describe_installation import describe_installation
from stof.terminal import Parser, VersionAction, complain, run_command

# What `python -m bench` has besides `model`; these options of `model` are of graphs under models/.
CLONE_COMMANDS = (
    *("attention", "decode", "sparse-mlp", "run-time-masks", "bf16-attention", "quantized", "sites", "texts"),
    *("decoder", "decoder-mlp", "decode-genai", "search", "merge", "table", "plot"),
)
CLONE_OPTIONS = ("--prepared", "--prepare", "--lock")
NOT_MEASURED = ("memory", "openvino", "quotient")  # what --without may name; the last two are timed from a clone alone


def main(argv: Sequence[str] | None = None) -> int:
    """The command; 0 when everything asked for was measured."""
    words = list(sys.argv[1:] if argv is None else argv)
    return end_command("stof-bench", lambda: _run(words))


def end_command(name: str, run: Callable[[], int]) -> int:
    """Runs a command of a benchmark; its exit status, 130 where it was interrupted."""
    try:
        return run_command(name, run)
    except KeyboardInterrupt:
        complain(f"{name}: interrupted")
        return 130


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """The options of ``model``, here and in a clone."""
    parser.add_argument(
        "--lengths", nargs="+", type=int, default=None, metavar="S",
        help="of dimensions that are lengths (default: up to three that run fast enough; on a GPU 4096)",
    )  # fmt: skip
    parser.add_argument("--batch", type=int, default=None, help="of dimensions that count rows of a batch (1)")
    parser.add_argument(
        "--shape", action="append", default=[], metavar="NAME=N[..M]", help="on a CPU: range of a dimension in use"
    )
    parser.add_argument(
        "--inputs", nargs="+", default=[], metavar="FILE", help="on a CPU: your inputs, as stof-optimize takes them"
    )
    parser.add_argument("--optimized", type=Path, help="the optimized file (default: made when it is not there)")
    parser.add_argument("--without", nargs="+", default=[], choices=NOT_MEASURED, help="leave these figures out")
    parser.add_argument("--ablation", action="store_true", help="on a CPU: attention alone and chains alone, too")
    parser.add_argument("--allow-bf16", action="store_true", help="on a CPU: with stof-optimize --allow-bf16, too")
    parser.add_argument("--tune", type=float, default=0.0, metavar="SECONDS", help="on a CPU: measure chains first")
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default="cpu", help="cuda: from a clone, graphs of models/"
    )
    threads = min(2, usable_cores())
    parser.add_argument(
        "--threads", nargs="+", type=int, default=[threads], help="one measurement for each (2; 1 on a single core)"
    )
    parser.add_argument("--rounds", type=int, default=None, help=f"default: {measure.ROUNDS}")


def run_with_threads(
    arguments: argparse.Namespace, work: Callable[[argparse.Namespace, int], int], name: str = "stof-bench"
) -> int:
    """Runs ``work`` once for each number of ``--threads``, each time in a process that is pinned to as many CPUs.

    Args:
        arguments: of the command; has ``threads``.
        work: a function of a module, which another process imports.
        name: the command's, in messages.
    """
    if len(arguments.threads) == 1:
        with measure.pinned(arguments.threads[0]):
            return work(arguments, arguments.threads[0])
    worst = 0
    for threads in arguments.threads:  # a process for each count, since a process is pinned once
        pinned = argparse.Namespace(**{**vars(arguments), "threads": [threads]})
        process = multiprocessing.get_context("spawn").Process(target=_child, args=(pinned, work, name))
        process.start()
        process.join()
        worst = max(worst, process.exitcode or 0)
    return worst


def _child(arguments: argparse.Namespace, work: Callable[[argparse.Namespace, int], int], name: str) -> None:
    sys.exit(run_command(name, lambda: with_errors_reported(lambda: run_with_threads(arguments, work))))


def with_errors_reported(run: Callable[[], int]) -> int:
    """Runs something whose errors of values are errors of what the user asked for.

    Raises:
        ArgumentError: for them.
    """
    try:
        return run()
    except (ValueError, KeyError) as error:
        raise ArgumentError(error) from error


def _parser() -> Parser:
    parser = Parser(
        prog="stof-bench", description="Times a model before and after stof-optimize (docs/guide/benchmarks.md)."
    )
    parser.add_argument("--version", action=VersionAction, describe=describe_installation)
    commands = parser.add_subparsers(dest="command", required=True)
    model = commands.add_parser("model", help="a whole model before and after stof-optimize")
    model.add_argument("model", type=Path, help="an .onnx file")
    add_model_options(model)
    model.add_argument("--results", type=Path, default=None, metavar="DIR", help="store the times there, as JSON")
    return parser


def _run(words: Sequence[str]) -> int:
    _refuse_commands_of_a_clone(words)
    arguments = _parser().parse_args(words)
    if arguments.device == "cuda":
        raise ArgumentError(_describe_clone("model --device cuda", "model NAME --device cuda"))
    arguments.rounds = arguments.rounds or measure.ROUNDS
    return with_errors_reported(lambda: run_with_threads(arguments, _time_model))


def _time_model(arguments: argparse.Namespace, threads: int) -> int:
    from stof.bench.model import run

    return run(arguments, threads)


def _refuse_commands_of_a_clone(words: Sequence[str]) -> None:
    """Refuses what the installed package does not hold.

    Raises:
        ArgumentError: with where it runs.
    """
    command = words[0] if words else ""
    if command in CLONE_COMMANDS:
        raise ArgumentError(_describe_clone(command, f"{command} ..."))
    options = [w.partition("=")[0] for w in words if w.partition("=")[0] in CLONE_OPTIONS]
    if command == "model" and options:
        raise ArgumentError(_describe_clone(f"model {options[0]}", f"model NAME {options[0]} ..."))


def _describe_clone(what: str, how: str) -> str:
    return f"{what} runs from a clone of the repository: python -m bench {how}, in its folder"


if __name__ == "__main__":
    sys.exit(main())
