# SPDX-License-Identifier: Apache-2.0
"""The command ``stof-optimize``. Exit 0: written, copied, or nothing to do; 1 arguments; 2 verification; 3 model."""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stof.arguments.checks import refuse
from stof.arguments.emissions import EMISSIONS, STOF
from stof.arguments.precisions import AS_INPUTS, ATTENTION_PRECISIONS
from stof.arguments.threshold_kinds import KINDS
from stof.errors import ArgumentError
from stof.execution.run_limits import parse_bytes
from stof.files import is_hub_id, remove_temporaries
from stof.interrupts import end_by_signals, report_interrupt
from stof.options import CHAINS, STANDARD_OUTPUT, UNPAD, Options
from stof.progress import step_log
from stof.selection import EVERY_ATTENTION
from stof.targets import CPU, TARGETS
from stof.tensorrt.describe_installation import describe_installation
from stof.terminal import (
    OutputError,
    Parser,
    VersionAction,
    complain,
    read_pairs,
    read_shapes,
    run_command,
    say,
)

if TYPE_CHECKING:
    from stof.folder_report import FolderReport
    from stof.report import Report

_GARBAGE = 50_000  # new objects before the next look for what cannot be reached
_BY_PROVIDER = {target.provider: target for target in TARGETS.values()}


_EPILOG = """example: stof-optimize model.onnx -o fast.onnx --shape sequence=128..4096 --report report.html
exit status: 0 written, copied or nothing to do, 1 wrong arguments, 2 verification failed, 3 model not supported
what each option does, with examples: docs/guide/options.md in stof's source folder"""


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="stof-optimize",
        allow_abbrev=False,
        description="Writes an equivalent ONNX model in which masked attention skips the blocks that the mask forbids.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.hint = "name the output with -o"
    parser.add_argument(
        "model", type=Path, nargs="?", help="the ONNX file, or a folder of models or of a checkpoint; never modified"
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="PATH",
        help="default: <name>.stof.onnx beside the input; for a folder: the new one",
    )
    _add_precisions(_add_choices(parser))
    _add_measurements(parser)
    _add_verification(parser)
    _add_changes(parser)
    _add_reports(parser)
    return parser


def _add_target(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--target", choices=tuple(TARGETS), help="what choices are tuned for (cpu)")
    group.add_argument("--provider", choices=tuple(_BY_PROVIDER), help="the same, by ONNX Runtime's execution provider")
    group.add_argument(
        "--emit",
        choices=tuple(EMISSIONS),
        default=STOF.name,
        help="standard: ai.onnx::Attention where it gains, for runtimes that load no library (stof)",
    )


def _add_choices(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    group = parser.add_argument_group("what is replaced, and for which device")
    _add_target(group)
    group.add_argument(
        "--shape", action="append", default=[], metavar="NAME=N[..M]", help="range of a dimension in use"
    )
    group.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="SITE",
        help="site name, pattern or number; cache:NAME, unpad:NAME, mlp:NAME, chain:NAME, gemm:NAME name others; repeatable",
    )
    group.add_argument(
        "--skip", action="append", default=[], metavar="SITE", help="likewise, to leave sites as they are"
    )
    group.add_argument(
        "--mask", action="append", default=[], metavar="SITE=EXPR", help="state a site's mask; it is checked"
    )
    group.add_argument(
        "--empty-rows", choices=("exact", "ignore"), default="exact", help="rows in which no key is allowed"
    )
    group.add_argument(
        "--chains",
        choices=CHAINS,
        default="auto",
        help="fuse operators around attention; auto: those that a measurement on this device found faster",
    )
    group.add_argument(
        "--products",
        choices=("on", "off"),
        default="on",
        help="whether StofGemm may take a matmul with its epilogue (CUDA; the CPU where --tune found a gain, or by --allow-bf16)",
    )
    group.add_argument(
        "--unpad",
        choices=UNPAD,
        default="auto",
        help="leave padding out of the whole encoder; auto: where no output depends on it; on: its rows become 0 in outputs",
    )
    group.add_argument(
        "--unpad-capacity",
        type=int,
        default=0,
        metavar="TOKENS",
        help="room for so many tokens in every run, so that a CUDA graph can be captured; more are an error, on CUDA NaN",
    )
    group.add_argument(
        "--memory-limit",
        type=_bytes_of("--memory-limit"),
        default=0,
        metavar="BYTES",
        help="write no model whose run is estimated to take more, 4G for instance, at the largest sizes in use",
    )
    return group


def _add_precisions(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--allow-tf32", action="store_true", help="compute fp32 attention's matmuls in TF32, on CUDA")
    group.add_argument(
        "--allow-bf16",
        action="store_true",
        help="let attention and matmuls by constants compute in bf16, on CPUs with instructions for it, and round weights "
        "and many tokens of sparse MLPs; OUTPUTS CHANGE slightly",
    )
    group.add_argument(
        "--attention-precision",
        choices=tuple(ATTENTION_PRECISIONS),
        default=AS_INPUTS,
        help="lowest precision of attention on CUDA; OUTPUTS CHANGE: int8: scores; fp8 (compute capability 9.0): "
        "scores in int8, weights and values in e4m3 (attribute int8_fp8); auto: the faster one whose error on --inputs or "
        "--prompts is small; fp16, the default: that of its inputs",
    )


def _add_measurements(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("measuring and plans")
    group.add_argument(
        "--tune", type=_seconds, metavar="SECONDS", help="measure, for so long, instead of estimating: kernels, chains"
    )
    group.add_argument(
        "--ignore-measurements",
        action="store_true",
        help="decide without what earlier runs with --tune measured on this device",
    )
    group.add_argument(
        "--time",
        action="store_true",
        help="time the original and the result at a few lengths, and padded texts, for 20 seconds",
    )
    group.add_argument("--plan", type=Path, metavar="FILE", help="apply a saved plan instead of choosing")
    group.add_argument("--save-plan", type=Path, metavar="FILE", help="save the choices as JSON, with --dry-run too")


def _add_verification(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("verification")
    group.add_argument(
        "--inputs",
        action="append",
        default=[],
        metavar="FILE",
        help="inputs to verify on: .npz, folder of input_*.pb, or module:function; repeatable",
    )
    group.add_argument(
        "--verify-budget", type=_seconds, default=45.0, metavar="SECONDS", help="time for verification (45)"
    )
    group.add_argument(
        "--verify-memory",
        type=_bytes_of("--verify-memory"),
        default=0,
        metavar="BYTES",
        help="memory for verification, 2G for instance (half of what is free)",
    )
    group.add_argument("--no-verify", action="store_true", help="write without running the model")


def _add_changes(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what changes outputs")
    group.add_argument(
        "--sparsify",
        metavar="SPEC",
        help="put a sparse pattern on dense attention; OUTPUTS CHANGE: s2:local=16,stride=8, window=4096,sink=128, triangle, "
        'radial(tokens=1560) for videos, mask="...", or a pattern file; skip-scores, choose-blocks: leave out keys '
        "of negligible weight, in any attention, after or before their scores are computed; choose-pages(pages=64): steps of "
        "decoders attend the best pages of a cache",
    )
    group.add_argument(
        "--sparse-mlp",
        metavar="SPEC",
        help="compute only selected neurons of MLPs; OUTPUTS CHANGE: calibration prompts and how to select, "
        "prompts.npz,kind=svd,active=0.3 for instance",
    )
    group.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="measure by how much --sparsify, --sparse-mlp, --allow-bf16 and --attention-precision change next tokens: token ids "
        "or texts",
    )
    group.add_argument(
        "--max-error",
        type=_divergence,
        metavar="X",
        help="largest relative RMS error of an operator, against fp64, with which it takes --allow-bf16 (0.01), or of an "
        "attention with --attention-precision (auto: 0.015 in int8, 0.045 in fp8)",
    )
    group.add_argument(
        "--max-kl",
        type=_divergence,
        metavar="X",
        help="largest mean KL divergence on --prompts to write a model with (0.1)",
    )
    group.add_argument(
        "--min-cosine",
        type=_share,
        metavar="X",
        help="least mean cosine of outputs on --inputs to write a model with skip-scores, choose-blocks, --allow-bf16, "
        "--attention-precision or --dequantize-attention (0.999)",
    )
    group.add_argument(
        "--dequantize-attention",
        action="store_true",
        help="compute attention in float whose scores or weights are rounded to 8 bits; OUTPUTS CHANGE; they are "
        "compared on --inputs with those of --float-model, else of the quantized model",
    )
    group.add_argument(
        "--float-model", type=Path, metavar="FILE", help="the model that was quantized, for --dequantize-attention"
    )
    group.add_argument(
        "--force",
        action="store_true",
        help="write the model beyond --max-kl and --min-cosine, too, and take --allow-bf16, or int8 and fp8 with --max-error, "
        "where the error is not known (not with auto)",
    )


def _add_reports(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("reports")
    group.add_argument("--dry-run", action="store_true", help="report only, write no model")
    group.add_argument(
        "--explain",
        nargs="?",
        const=EVERY_ATTENTION,
        metavar="SITE",
        help="say how far each site, or attention over a KV cache, got; write no model",
    )
    group.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON; -: to standard output")
    group.add_argument("--report", type=Path, metavar="FILE", help="write the report as an HTML page for people")
    group.add_argument("-q", "--quiet", action="store_true", help="no progress lines on standard error")
    group.add_argument("--version", action=VersionAction, describe=describe_installation)


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise ValueError
    return value


def _divergence(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise ValueError
    return value


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise ValueError
    return value


_share.__name__ = "number from 0 to 1"
_divergence.__name__ = "number from 0 on"
_seconds.__name__ = "number of seconds"  # argparse names the type in its message


def _bytes_of(option: str) -> Callable[[str], int]:
    """Reads the value of an option that is a number of bytes."""

    def read(text: str) -> int:
        try:
            return parse_bytes(text)
        except ValueError:
            raise refuse(option, text, "a number of bytes above 0: 4G, 512M or 1000000000") from None

    return read


def _target(arguments: argparse.Namespace) -> str:
    """The target that --target and --provider name."""
    named = None if arguments.target is None else TARGETS[arguments.target]
    by_provider = None if arguments.provider is None else _BY_PROVIDER[arguments.provider]
    if named is not None and by_provider is not None and by_provider is not named:
        raise ArgumentError(
            f"--target {named.name} and --provider {arguments.provider} disagree: the provider is target {by_provider.name}; "
            "give one"
        )
    return (named or by_provider or CPU).name


def _run(arguments: argparse.Namespace) -> int:
    if (
        arguments.model is None
        and arguments.explain not in (None, EVERY_ATTENTION)
        and Path(arguments.explain).exists()
    ):
        # `--explain model.onnx`: the optional SITE has taken the model's place.
        arguments.model, arguments.explain = Path(arguments.explain), EVERY_ATTENTION
    if arguments.model is None:
        raise ArgumentError("no model given (see stof-optimize --help)")
    _check_changes(arguments)
    options = Options(
        sparsify=arguments.sparsify or "",
        sparse_mlp=arguments.sparse_mlp or "",
        prompts=arguments.prompts,
        max_kl=0.1 if arguments.max_kl is None else arguments.max_kl,
        min_cosine=0.999 if arguments.min_cosine is None else arguments.min_cosine,
        force=arguments.force,
        dequantize_attention=arguments.dequantize_attention,
        float_model=arguments.float_model,
        output=arguments.output,
        target=_target(arguments),
        emit=arguments.emit,
        allow_tf32=arguments.allow_tf32,
        allow_bf16=arguments.allow_bf16,
        attention_precision=arguments.attention_precision,
        max_error=arguments.max_error,
        json=arguments.json,
        report=arguments.report,
        time=arguments.time,
        dry_run=arguments.dry_run,
        explain=arguments.explain,
        verify=not arguments.no_verify,
        verify_budget=arguments.verify_budget,
        verify_memory=arguments.verify_memory,
        memory_limit=arguments.memory_limit,
        inputs=tuple(arguments.inputs),
        only=tuple(arguments.only),
        skip=tuple(arguments.skip),
        shapes=read_shapes(arguments.shape),
        masks=read_pairs(arguments.mask, "--mask"),
        ignore_empty_rows=arguments.empty_rows == "ignore",
        chains=arguments.chains,
        products=arguments.products == "on",
        unpad=arguments.unpad,
        unpad_capacity=arguments.unpad_capacity,
        tune=arguments.tune or 0.0,
        ignore_measurements=arguments.ignore_measurements,
        plan=arguments.plan,
        save_plan=arguments.save_plan,
    )
    from stof.pipeline import optimize

    if arguments.model.is_dir() or (arguments.output is not None and is_hub_id(arguments.model)):
        return _run_folder(arguments, options)

    with step_log("stof-optimize", quiet=arguments.quiet):
        report = optimize(arguments.model, options=options)
    _say_report(report, arguments.explain, (report.output, options.json, options.report, options.save_plan))
    return 0


def _check_changes(arguments: argparse.Namespace) -> None:
    """Refuses empty options that change outputs, and options about the loss without such a change."""
    if arguments.sparsify == "":
        raise ArgumentError("--sparsify is empty; expected a pattern such as s2:local=16,stride=8")
    if arguments.sparse_mlp == "":
        raise ArgumentError("--sparse-mlp is empty; expected a file of calibration prompts, prompts.npz for instance")
    reduces = arguments.allow_bf16 or arguments.attention_precision != AS_INPUTS
    reducing = "--allow-bf16" if arguments.allow_bf16 else "--attention-precision"
    if arguments.prompts is not None and not (arguments.sparsify or arguments.sparse_mlp or reduces):
        raise ArgumentError(
            "--prompts is for --sparsify, --sparse-mlp, --allow-bf16 and --attention-precision, of which none is given"
        )
    if arguments.max_error is not None and not reduces:
        raise ArgumentError("--max-error is for --allow-bf16 and --attention-precision, of which none is given")
    if arguments.dequantize_attention and (arguments.sparsify or arguments.sparse_mlp or reduces):
        option = reducing if reduces else "--sparsify" if arguments.sparsify else "--sparse-mlp"
        raise ArgumentError(
            f"{option} and --dequantize-attention both change outputs, and their losses cannot be separated; give one of them"
        )
    if arguments.prompts is not None and arguments.inputs and arguments.min_cosine is not None and reduces:
        raise ArgumentError(
            f"--min-cosine is for --inputs, and --prompts decide with {reducing}; leave one of them out"
        )
    measured = arguments.prompts or arguments.sparse_mlp
    has_thresholds = any(kind.clause in (arguments.sparsify or "") for kind in KINDS)
    changes_core = has_thresholds or reduces or arguments.dequantize_attention
    on_inputs = bool(arguments.inputs) and changes_core  # which measure the loss of these
    if arguments.float_model is not None and not arguments.dequantize_attention:
        raise ArgumentError("--float-model is for --dequantize-attention; give both")
    if arguments.min_cosine is not None and not on_inputs:
        raise ArgumentError(
            "--min-cosine is for --inputs with --sparsify skip-scores or choose-blocks, --allow-bf16, "
            "--attention-precision or --dequantize-attention; give both"
        )
    for option, is_given in (("--max-kl", arguments.max_kl is not None), ("--force", arguments.force)):
        is_forced = option == "--force" and (on_inputs or reduces or arguments.dequantize_attention)
        if is_given and measured is None and not is_forced:
            raise ArgumentError(f"{option} is for --prompts and --sparse-mlp, of which none is given")


def _say_report(report: Report | FolderReport, explain: str | None, outputs: Sequence[str | Path | None]) -> None:
    """Prints a report. Where it cannot be printed, what was written is said instead."""
    lines = report.to_text().split("\n")
    if explain is not None:
        lines += ["", *report.explain(explain).split("\n")]
    if STANDARD_OUTPUT in outputs:  # which has the JSON alone
        for line in lines:
            complain(line)
        return
    try:
        say(*lines)
    except OutputError as error:
        written = [str(f) for f in outputs if f is not None]
        if not written:
            raise
        complain(f"stof-optimize: {error}; written: {', '.join(written)}")


def _run_folder(arguments: argparse.Namespace, options: Options) -> int:
    from stof.api.folder import optimize_folder

    with step_log("stof-optimize", quiet=arguments.quiet):
        report = optimize_folder(arguments.model, options=options)
    _say_report(report, arguments.explain, (report.output, options.json, options.report))
    if report.failures:
        complain(f"stof-optimize: {report.failure}")
    return report.exit_code


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status.

    Args:
        argv: its arguments; None: those of the process, which ends afterwards.
    """
    # Graphs are many small objects and few of them are garbage: to look for it often takes as long as some of the steps.
    before = gc.get_threshold()
    gc.set_threshold(_GARBAGE)
    try:
        with end_by_signals("stof-optimize", remove_temporaries, last=argv is None):
            return run_command("stof-optimize", lambda: _run(_parser().parse_args(argv)))
    except KeyboardInterrupt as interrupt:
        return report_interrupt("stof-optimize", interrupt)
    finally:
        gc.set_threshold(*before)


if __name__ == "__main__":
    sys.exit(main())
