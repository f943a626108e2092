# SPDX-License-Identifier: Apache-2.0
"""The settings of one optimization."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict

from stof.arguments.checks import (
    Check,
    check_count,
    check_flag,
    check_names,
    check_number,
    check_pairs,
    check_path,
    check_range,
    check_seconds,
    check_share,
    check_text,
    check_texts,
    one_of,
    or_none,
    refuse,
)
from stof.arguments.emissions import EMISSIONS, STOF, Emission
from stof.arguments.precisions import AS_INPUTS, ATTENTION_PRECISIONS, AUTO, BF16, EightBits, Precision
from stof.errors import ArgumentError
from stof.targets import CPU, CUDA, TARGETS, Target

if TYPE_CHECKING:
    from typing import Self, Unpack

    from stof.execution.given_inputs import InputSource

PathLike: TypeAlias = "str | os.PathLike[str]"
CHAINS = ("on", "off", "auto")
UNPAD = ("on", "off", "auto")
MOST_TOKENS = 1 << 22  # of all sequences, that StofAttention takes
STANDARD_OUTPUT = Path("-")  # in the place of a file for the report as JSON


class OptionArguments(TypedDict, total=False):
    """What :class:`Options` and :func:`stof.optimize` take by name, besides the output; :class:`Options` says what each is."""

    target: str
    emit: str
    capability: int
    allow_tf32: bool
    allow_bf16: bool
    attention_precision: str
    max_error: float | None
    json: PathLike | None
    report: PathLike | None
    time: bool
    dry_run: bool
    explain: str | None
    verify: bool
    verify_budget: float
    verify_memory: int
    memory_limit: int
    inputs: InputSource
    only: Sequence[str]
    skip: Sequence[str]
    shapes: Mapping[str, int | tuple[int, int]]
    masks: Mapping[str, str]
    sparsify: str
    sparse_mlp: str
    prompts: PathLike | None
    max_kl: float
    min_cosine: float
    force: bool
    dequantize_attention: bool
    float_model: PathLike | None
    ignore_empty_rows: bool
    chains: str
    unpad: str
    unpad_capacity: int
    products: bool
    tune: float
    ignore_measurements: bool
    plan: PathLike | None
    save_plan: PathLike | None


@dataclass(frozen=True, kw_only=True)
class Options:
    """The settings of one optimization: what ``stof-optimize`` takes as options.

    Attributes:
        output: the file to write, or the new folder; None: ``<name>.stof.onnx`` beside the input.
        target: "cpu", "cuda" or "tensorrt": what is replaced, and for what choices are tuned. The file stays portable.
        emit: "stof" or "standard": what operators are written. "standard": those of ONNX alone, for runtimes that load no
            library, on target "cpu".
        capability: of the CUDA device that estimates are for, 10 x major + minor; 0: of the one at hand.
        allow_tf32: fp32 attention may compute its matmuls in TF32, on CUDA.
        allow_bf16: attention, and matmuls by constant weights, may compute in bf16 with sums in fp32, on CPUs that have
            instructions for it; sparse MLPs may round their weights to bf16 on all CPUs, and many tokens on those with
            instructions for it; outputs change.
        attention_precision: "fp16", "int8", "fp8" or "auto": the lowest precision of attention on CUDA. "fp16": that of its
            inputs. "int8": scores in int8. "fp8": scores in int8, weights and values in e4m3. "auto": of both the faster one
            whose error on ``inputs`` or ``prompts`` is small. Outputs change.
        max_error: the largest relative RMS error of an operator, against fp64, with which it takes ``allow_bf16``
            (None: 0.01), or of an attention with ``attention_precision`` (None: with "auto" 0.015 in int8, 0.045 in fp8, else
            any).
        json: a file for the report as JSON; "-": standard output.
        report: a file for the report as an HTML page for people.
        time: time the original and the result in ONNX Runtime, once the result is written.
        dry_run: report only, write no model.
        explain: report only, and say how far candidates got: a pattern as in ``only``; "*": all attention.
        verify: run the result against the original before it is written.
        verify_budget: seconds for that.
        verify_memory: bytes for that; 0: half of what is free.
        memory_limit: no model is written whose run is estimated to take more bytes, weights and activations together, at the
            largest sizes in use; 0: any number.
        inputs: what verification runs on before drawn inputs, and thresholds of ``sparsify`` are measured on: a .npz file, a
            folder of ``input_*.pb``, "module:function", arrays by name, a callable that gives some, or several of these.
        only: the sites to replace: names, numbers or patterns; "cache:NAME", "unpad:NAME", "mlp:NAME",
            "chain:NAME" and "gemm:NAME" name others.
        skip: likewise, the sites to leave as they are.
        shapes: ranges of dimensions in use, by name: a size, or (least, most).
        masks: mask expressions that the user states, by site; they are checked.
        sparsify: patterns for dense attention, such as "s2:local=16,stride=8", "skip-scores" and "choose-blocks"; outputs
            change.
        sparse_mlp: calibration prompts and how neurons are selected, such as "prompts.npz,kind=svd,active=0.3"; outputs
            change.
        prompts: token ids or texts on which the loss of ``sparsify``, ``sparse_mlp``, ``allow_bf16`` and
            ``attention_precision`` is measured.
        max_kl: the largest loss, a mean KL divergence in nats, with which a model is written.
        min_cosine: the least cosine of an output with the original's, a mean over ``inputs``, with which a model with
            skip-scores or choose-blocks is written, or one with ``allow_bf16``, ``attention_precision`` or
            ``dequantize_attention``.
        force: write the model beyond both, too.
        dequantize_attention: attention whose scores or weights are rounded to 8 bits computes in float; outputs change, and
            are held to those of ``float_model`` on ``inputs``, or by ``min_cosine`` to the model's own.
        float_model: the model from which the quantized one was made.
        ignore_empty_rows: fully masked rows may give another result than in the original.
        chains: "on", "off" or "auto": whether operators are fused; "auto": where a gain was measured on this device, or is
            estimated.
        unpad: "on", "off" or "auto": whether rows of padding are left out of what computes each token by itself; "auto": where
            no output depends on them, for CUDA only with ``unpad_capacity``; "on": they become 0 in outputs that have rows for
            all positions.
        unpad_capacity: the number of tokens that there is room for in every run, so that no shape depends on padding, as a
            captured CUDA graph needs it; 0: as much as a run has.
        products: matmuls may become StofGemm.
        tune: seconds for measuring kernels (CUDA) and chains instead of estimating.
        ignore_measurements: nothing that earlier runs with ``tune`` measured on this device decides.
        plan: a saved plan to apply instead of choosing.
        save_plan: a file for the choices as JSON.

    Raises:
        ArgumentError: for unknown names, wrong types and values, with what was expected.
    """

    output: Path | None = None
    target: str = CPU.name
    emit: str = STOF.name
    capability: int = 0
    allow_tf32: bool = False
    allow_bf16: bool = False
    attention_precision: str = AS_INPUTS
    max_error: float | None = None
    json: Path | None = None
    report: Path | None = None
    time: bool = False
    dry_run: bool = False
    explain: str | None = None
    verify: bool = True
    verify_budget: float = 45.0
    verify_memory: int = 0
    memory_limit: int = 0
    inputs: InputSource = ()
    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    shapes: dict[str, tuple[int, int]] = field(default_factory=dict)
    masks: dict[str, str] = field(default_factory=dict)
    sparsify: str = ""
    sparse_mlp: str = ""
    prompts: Path | None = None
    max_kl: float = 0.1
    min_cosine: float = 0.999
    force: bool = False
    dequantize_attention: bool = False
    float_model: Path | None = None
    ignore_empty_rows: bool = False
    chains: str = "auto"
    unpad: str = "auto"
    unpad_capacity: int = 0
    products: bool = True
    tune: float = 0.0
    ignore_measurements: bool = False
    plan: Path | None = None
    save_plan: Path | None = None

    if TYPE_CHECKING:
        # Paths may be texts, sequences lists: what is given is wider than what the fields hold.
        def __init__(self, *, output: PathLike | None = None, **arguments: Unpack[OptionArguments]) -> None: ...

    def __new__(cls, *_: object, **arguments: object) -> Self:
        """Refuses unknown names with the closest known one, which Python's own message lacks."""
        check_names("Options", arguments, (f.name for f in fields(cls)))
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Brings each value into the form of its field."""
        for name, check in _CHECKS.items():
            object.__setattr__(self, name, check(name, getattr(self, name)))
        if self.unpad_capacity and self.unpad == "off":
            raise ArgumentError(
                "unpad_capacity is for batches without padding, and unpad is 'off'; leave one of them out"
            )

        if self.float_model is not None and not self.dequantize_attention:
            raise ArgumentError("float_model is for dequantize_attention; give both")
        self._check_dequantized()
        if self.allow_bf16 and self.tuned_for is not CPU:
            raise ArgumentError(
                f"allow_bf16 is for target {CPU.name!r}, not {self.target!r}: its kernels compute in the model's own type, or in "
                "TF32 with allow_tf32 on CUDA; leave it out, or convert the model to bf16"
            )
        self._check_attention_precision()
        if not self.emission.needs_library:
            self._check_standard()

    def _check_attention_precision(self) -> None:
        """Refuses 8 bits on targets without kernels of them, and a choice by errors without anything to measure these on."""
        if self.eight_bits and self.tuned_for is not CUDA:
            raise ArgumentError(
                f"attention_precision is {self.attention_precision!r}, which is for target {CUDA.name!r}, not {self.target!r}: "
                "no other has kernels with 8-bit operands; leave it out"
            )
        measures = bool(self.inputs) or self.prompts is not None
        if self.attention_precision == AUTO and not measures and self.plan is None:
            raise ArgumentError(
                f"attention_precision is {AUTO!r}, which chooses by the errors of attentions on inputs or prompts; give either, "
                "or 'int8' or 'fp8', which need none"
            )

    def _check_dequantized(self) -> None:
        """Refuses other changes beside float attention: one distance would hold both."""
        others = {
            "allow_bf16": self.allow_bf16,
            "attention_precision": bool(self.eight_bits),
            "sparsify": self.sparsify,
            "sparse_mlp": self.sparse_mlp,
        }
        given = [name for name, value in others.items() if value]
        if self.dequantize_attention and given:
            raise ArgumentError(
                f"{given[0]} and dequantize_attention both change outputs, and their losses cannot be separated; give one of them"
            )

    def _check_standard(self) -> None:
        """Refuses what needs stof's operators, in a model that has none."""
        needs = {
            "sparsify": bool(self.sparsify),
            "sparse_mlp": bool(self.sparse_mlp),
            "allow_bf16": self.allow_bf16,
            "attention_precision": bool(self.eight_bits),
            "tune": bool(self.tune),
            "chains 'on'": self.chains == "on",
            "unpad_capacity": bool(self.unpad_capacity),
            f"target {self.target!r}": self.tuned_for is not CPU,
        }
        if given := [name for name, is_given in needs.items() if is_given]:
            raise ArgumentError(
                f"emit is {self.emit!r}, and {given[0]} needs emit {STOF.name!r}, which writes stof's operators; leave one of "
                "them out"
            )

    @property
    def eight_bits(self) -> tuple[EightBits, ...]:
        """The precisions of 8 bits that attention may compute in; empty: none."""
        return ATTENTION_PRECISIONS[self.attention_precision]

    @property
    def precisions(self) -> tuple[Precision, ...]:
        """The precisions below that of its inputs that attention may compute in; empty: none."""
        return (BF16,) if self.allow_bf16 else self.eight_bits

    @property
    def emission(self) -> Emission:
        """What operators are written."""
        return EMISSIONS[self.emit]

    @property
    def tuned_for(self) -> Target:
        """The target that is named."""
        return TARGETS[self.target]


def _check_shapes(name: str, value: object) -> dict[str, tuple[int, int]]:
    return check_pairs(name, value, check_range)


def _check_capacity(name: str, value: object) -> int:
    capacity = check_count(name, value)
    if capacity > MOST_TOKENS:
        raise refuse(name, value, f"at most {MOST_TOKENS} tokens")
    return capacity


def _check_masks(name: str, value: object) -> dict[str, str]:
    return check_pairs(name, value, check_text)


# What gives each field's value; ``inputs`` are checked against the model that they are for.
_CHECKS: dict[str, Check] = {
    **dict.fromkeys(("output", "json", "report", "prompts", "float_model", "plan", "save_plan"), or_none(check_path)),
    **dict.fromkeys(
        (
            *("allow_tf32", "allow_bf16", "time", "dry_run", "verify", "force"),
            *("ignore_empty_rows", "products", "ignore_measurements", "dequantize_attention"),
        ),
        check_flag,
    ),
    **dict.fromkeys(("sparsify", "sparse_mlp"), check_text),
    **dict.fromkeys(("verify_budget", "tune"), check_seconds),
    **dict.fromkeys(("capability", "verify_memory", "memory_limit"), check_count),
    **dict.fromkeys(("only", "skip"), check_texts),
    "target": one_of(*TARGETS, meant={"gpu": "cuda", "trt": "tensorrt"}),
    "emit": one_of(*EMISSIONS),
    "chains": one_of(*CHAINS),
    "unpad": one_of(*UNPAD),
    "unpad_capacity": _check_capacity,
    "explain": or_none(check_text),
    "max_kl": check_number,
    "attention_precision": one_of(*ATTENTION_PRECISIONS, meant={"int8_fp8": "fp8"}),
    "max_error": or_none(check_number),
    "min_cosine": check_share,
    "shapes": _check_shapes,
    "masks": _check_masks,
}


def merge_options(owner: str, options: object, arguments: Mapping[str, Any]) -> Options:
    """The options of a call that takes them whole, by name, or both; those by name count.

    Raises:
        ArgumentError: when ``options`` are of another type, or an argument is wrong.
    """
    check_names(owner, arguments, [f.name for f in fields(Options)])
    if options is None:
        return Options(**arguments)
    if not isinstance(options, Options):
        values = dict(options) if isinstance(options, Mapping) else {}
        call = ", ".join(f"{k}={v!r}" for k, v in values.items()) or "target='cuda'"
        raise ArgumentError(
            f"options is of type {type(options).__name__}, expected stof.Options; options may also be given by name: "
            f"{owner}(model, {call})"
        )
    return replace(options, **arguments) if arguments else options
