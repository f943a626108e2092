# SPDX-License-Identifier: Apache-2.0
"""The command ``stof-trt``. Exit 0: done; 1 arguments, TensorRT or a library missing; 2 outputs differ; 3 model."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from stof.errors import ArgumentError
from stof.files import remove_temporaries
from stof.interrupts import end_by_signals, report_interrupt
from stof.tensorrt.describe_installation import describe_installation
from stof.tensorrt.module import MODULES, plugin_path
from stof.tensorrt.shapes import merge_shapes
from stof.terminal import Parser, VersionAction, run_command, say


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="stof-trt",
        allow_abbrev=False,
        description="Builds, runs and inspects TensorRT engines of models that stof-optimize wrote.",
        epilog="exit status: 0 done, 1 wrong arguments or TensorRT missing, 2 outputs differ, 3 model not supported",
    )
    parser.add_argument(
        "--plugin-path", action="store_true", help="print the plugin library, for trtexec --dynamicPlugins"
    )
    parser.add_argument("--version", action=VersionAction, describe=describe_installation)
    commands = parser.add_subparsers(dest="command", parser_class=Parser, metavar="COMMAND")
    _build(commands.add_parser("build", allow_abbrev=False, help="ONNX -> engine"))
    _run(commands.add_parser("run", allow_abbrev=False, help="time an engine, and check it against ONNX Runtime"))
    _inspect(commands.add_parser("inspect", allow_abbrev=False, help="list an engine's layers"))
    _selftest(commands.add_parser("selftest", allow_abbrev=False, help="build and run the plugin on this machine"))
    _triton(commands.add_parser("triton-repo", allow_abbrev=False, help="write a model repository for Triton"))
    return parser


def _add_common_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tensorrt", choices=MODULES, help="which Python module; default: the first one installed")
    parser.add_argument("--verbose", action="store_true", help="show what TensorRT says")


def _add_build_options(parser: argparse.ArgumentParser) -> None:
    _add_common_options(parser)
    parser.add_argument(
        "--capability",
        type=int,
        action="append",
        default=[],
        metavar="N",
        help="TensorRT for RTX: 86, 89, ..; repeatable",
    )


def _add_embedded_plugins(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--embedded-plugins", action="store_true", help="run the library inside of the engine, a file that you trust"
    )


def _build(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, help="the ONNX file")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="default: <name>.plan beside the model")
    for option, words in (("min", "least"), ("opt", "usual"), ("max", "greatest")):
        parser.add_argument(
            f"--{option}", action="append", default=[], metavar="NAME:1x128,..", help=f"{words} shapes of inputs"
        )
    parser.add_argument("--embed-plugins", action="store_true", help="put the plugin library into the engine")
    parser.add_argument("--no-plugins", action="store_true", help="compute stof's operators by standard ONNX, slowly")
    parser.add_argument("--version-compatible", action="store_true", help="for later versions of TensorRT, too")
    parser.add_argument(
        "--hardware-compatible",
        choices=("none", "ampere+", "same"),
        default="none",
        help="for other GPUs: all from Ampere on, or those of the same compute capability",
    )
    parser.add_argument("--timing-cache", type=Path, metavar="FILE", help="read if it exists, and written")
    parser.add_argument("--workspace", type=int, default=0, metavar="MIB", help="limit of scratch memory")
    parser.add_argument("--optimization-level", type=int, choices=range(6), help="TensorRT's builder level")
    _add_build_options(parser)


def _run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("engine", type=Path)
    parser.add_argument("--onnx", type=Path, metavar="MODEL", help="compare with it in ONNX Runtime")
    parser.add_argument(
        "--shape", action="append", default=[], metavar="NAME:1x128,..", help="default: the profile's opt"
    )
    parser.add_argument("--inputs", type=Path, metavar="FILE.npz", help="inputs by name; default: random ones")
    parser.add_argument("--seconds", type=float, default=2.0, help="time to measure for (2)")
    parser.add_argument("--tolerance", type=float, metavar="X", help="of the largest output value")
    parser.add_argument("--seed", type=int, default=0)
    _add_embedded_plugins(parser)
    _add_common_options(parser)


def _inspect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("engine", type=Path)
    parser.add_argument("--json", action="store_true", help="as JSON")
    _add_embedded_plugins(parser)
    _add_common_options(parser)


def _selftest(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--build-only", action="store_true", help="do not run the engines, for machines without a GPU")
    _add_build_options(parser)


def _triton(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="the model repository")
    parser.add_argument("--name", required=True, help="the model's name there")
    parser.add_argument("--onnx", type=Path, metavar="MODEL", help="for the onnxruntime backend")
    parser.add_argument("--engine", type=Path, metavar="FILE", help="for the tensorrt backend, instead")
    parser.add_argument("--served-at", metavar="PATH", help="where the server sees the folder, as in a container")
    parser.add_argument(
        "--tensorrt-major",
        type=int,
        default=10,
        metavar="N",
        help="--engine: the server's TensorRT, 10 (default) or 11",
    )
    parser.add_argument("--cpu", action="store_true", help="onnxruntime backend: an instance on the CPU")


def _do_build(a: argparse.Namespace) -> int:
    from stof.tensorrt.build import BuildOptions, build_engine

    report = build_engine(
        a.model,
        a.output or a.model.with_suffix(".plan"),
        BuildOptions(
            least=merge_shapes(a.min, "--min"),
            usual=merge_shapes(a.opt, "--opt"),
            most=merge_shapes(a.max, "--max"),
            plugins=not a.no_plugins,
            embed_plugins=a.embed_plugins,
            version_compatible=a.version_compatible,
            hardware_compatible=a.hardware_compatible,
            capabilities=tuple(a.capability),
            timing_cache=a.timing_cache,
            workspace=a.workspace,
            optimization_level=a.optimization_level,
            module=a.tensorrt,
            verbose=a.verbose,
        ),
    )
    say(*report.to_text().split("\n"))
    return 0


def _do_run(a: argparse.Namespace) -> int:
    from stof.tensorrt.run import RunOptions, run_engine

    options = RunOptions(
        onnx=a.onnx,
        shapes=merge_shapes(a.shape, "--shape"),
        inputs=a.inputs,
        seconds=a.seconds,
        tolerance=a.tolerance,
        seed=a.seed,
        module=a.tensorrt,
        embedded=a.embedded_plugins,
        verbose=a.verbose,
    )
    report = run_engine(a.engine, options)
    say(*report.to_text().split("\n"))
    return 0 if report.ok else 2


def _do_inspect(a: argparse.Namespace) -> int:
    from stof.tensorrt.inspect import inspect_engine

    contents = inspect_engine(a.engine, a.tensorrt, a.verbose, a.embedded_plugins)
    say(*(contents.to_json() if a.json else contents.to_text()).split("\n"))
    return 0


def _do_selftest(a: argparse.Namespace) -> int:
    from stof.tensorrt.selftest import selftest

    return selftest(a.tensorrt, tuple(a.capability), run=not a.build_only, verbose=a.verbose)


def _do_triton(a: argparse.Namespace) -> int:
    from stof.tensorrt.triton import write_repository

    words = write_repository(
        a.folder,
        a.name,
        onnx_model=a.onnx,
        engine=a.engine,
        served_at=a.served_at,
        cpu=a.cpu,
        major=a.tensorrt_major,
    )
    say(*words.split("\n"))
    return 0


_COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "build": _do_build,
    "run": _do_run,
    "inspect": _do_inspect,
    "selftest": _do_selftest,
    "triton-repo": _do_triton,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status.

    Args:
        argv: its arguments; None: those of the process, which ends afterwards.
    """
    try:
        with end_by_signals("stof-trt", remove_temporaries, last=argv is None):
            return run_command("stof-trt", lambda: _run_one(_parser().parse_args(argv)))
    except KeyboardInterrupt as interrupt:
        return report_interrupt("stof-trt", interrupt)


def _run_one(arguments: argparse.Namespace) -> int:
    if arguments.plugin_path:
        say(str(plugin_path()))
        return 0
    if arguments.command is None:
        raise ArgumentError(f"no command given, expected one of {', '.join(_COMMANDS)} (see stof-trt --help)")
    return _COMMANDS[arguments.command](arguments)


if __name__ == "__main__":
    sys.exit(main())
