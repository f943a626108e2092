# SPDX-License-Identifier: Apache-2.0
"""The kernels that a target has for attention: which sites they take, how fast they are, and which one runs a site."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from onnx import TensorProto

from stof.attention.decide import cost_cpu, cost_cuda, cost_tensorrt, quantized
from stof.attention.decide.cost_cpu import GainEstimate
from stof.attention.decide.tune import Tuner
from stof.attention.describe.site_problem import SiteProblem
from stof.errors import ArgumentError
from stof.options import Options
from stof.runtime.cuda import device_info
from stof.runtime.library import LibraryError
from stof.runtime.quantized_attention_kernel import cpu_quantized_attention_kernel
from stof.targets import CPU, CUDA, TENSORRT, Target
from stof.tuning_cache import EarlierMeasurements


@dataclass(frozen=True)
class Use:
    """How a site is used: its largest batch, its lengths, and the hint that a plan has for it (None: no plan)."""

    batch: int
    lengths: tuple[int, ...]
    planned: str | None = None


class AttentionKernels:
    """Those of the CPU, and what other targets' have in common with them."""

    def __init__(self, options: Options, isa: str, started: float | None = None) -> None:
        self.options = options
        self.isa = isa
        self.started = started  # when the run began, in seconds since 1970; None: now

    @property
    def tuned_seconds(self) -> float:
        """The seconds of ``--tune`` that measurements of sites took."""
        return 0.0

    @property
    def earlier_measurements(self) -> EarlierMeasurements | None:
        """The measurements of earlier runs that decided about sites; None: none did."""
        return None

    def refusals(self, problem: SiteProblem) -> list[str]:
        """The reasons against running a problem on the kernels; empty when there are none."""
        if problem.roundings:
            return quantized.refusals(problem, self.options.target)
        return cost_cpu.refusals(problem)

    def estimate_gain(self, problem: SiteProblem, length: int) -> GainEstimate:
        """The estimated gain over the runtime's own nodes at S = T = ``length``."""
        return cost_cpu.estimate_gain(problem, length, self.isa_of(problem))

    def isa_of(self, problem: SiteProblem) -> str:
        """The instruction set whose kernels run a problem; of attention in fp32 the best one of the machine."""
        return (cpu_quantized_attention_kernel() if problem.roundings else "") or self.isa

    def reason_to_leave(self, problem: SiteProblem, estimates: Sequence[GainEstimate]) -> str:
        """Why an attention is better left as it is, from the estimates at the lengths in use; empty when it is not."""
        worst = min(estimates, key=lambda e: e.gain)
        return f"a loss is estimated at S = {worst.length}: {worst.gain:.2f}x" if worst.gain < 1.0 else ""

    def kernel(self, problem: SiteProblem, use: Use) -> tuple[str, str]:
        """What runs a problem, for people, and the operator's hint ``kernel``."""
        return f"cpu block-wise {self.isa_of(problem)}".rstrip(), ""


class CudaAttentionKernels(AttentionKernels):
    """Those of CUDA, on the device at hand or, where there is none, on the oldest one that they run on."""

    @cached_property
    def device(self) -> cost_cuda.DeviceRates:
        try:
            return cost_cuda.device_of(device_info().capability)
        except LibraryError:
            return cost_cuda.device_of(0)

    @cached_property
    def tuner(self) -> Tuner:
        # Chains are measured after sites, in the time that these leave: at least half of it.
        seconds = self.options.tune if self.options.chains == "off" else self.options.tune / 2
        return Tuner(seconds, options=self.options, started=self.started)

    @property
    def earlier_measurements(self) -> EarlierMeasurements | None:
        return self.tuner.cache.earlier if "tuner" in self.__dict__ else None

    @property
    def tuned_seconds(self) -> float:
        return self.tuner.spent if "tuner" in self.__dict__ else 0.0

    def refusals(self, problem: SiteProblem) -> list[str]:
        return super().refusals(problem) + cost_cuda.refusals(problem)

    def estimate_gain(self, problem: SiteProblem, length: int) -> GainEstimate:
        return cost_cuda.estimate_gain(problem, length, self.device)

    def kernel(self, problem: SiteProblem, use: Use) -> tuple[str, str]:
        if use.planned:
            return f"cuda {use.planned}, planned", use.planned
        if not self.options.tune or use.planned is not None:
            rounded = self.options.allow_tf32 and problem.dtype == TensorProto.FLOAT
            return f"cuda block-wise {self.device.name}{' tf32' if rounded else ''}", ""
        tuned = self.tuner.tune(problem, use.batch, use.lengths)
        measured = "measured" if tuned.whole else "measured in part"
        if not any(tuned.microseconds.values()):
            measured = "no choice" if tuned.whole else "not measured"
        return f"cuda {tuned.kernel or 'block-wise'} {self.device.name}, {measured}", tuned.kernel


class TensorRtAttentionKernels(AttentionKernels):
    """Those of the TensorRT plugin."""

    def refusals(self, problem: SiteProblem) -> list[str]:
        return super().refusals(problem) + cost_tensorrt.refusals(problem)

    def reason_to_leave(self, problem: SiteProblem, estimates: Sequence[GainEstimate]) -> str:
        return cost_tensorrt.reason_to_leave(problem, estimates[-1].tile_density)

    def kernel(self, problem: SiteProblem, use: Use) -> tuple[str, str]:
        return "TensorRT plugin", ""


_KERNELS: Mapping[Target, type[AttentionKernels]] = {
    CPU: AttentionKernels,
    CUDA: CudaAttentionKernels,
    TENSORRT: TensorRtAttentionKernels,
}


def kernels_for(options: Options, isa: str, started: float | None = None) -> AttentionKernels:
    """The kernels of the target that the options name; ``started``: when the run began, in seconds since 1970."""
    return _KERNELS[options.tuned_for](options, isa, started)


def check_tune(options: Options) -> None:
    """Refuses ``--tune`` for a target that measures by itself.

    Raises:
        ArgumentError: naming the target.
    """
    if options.tune and not options.tuned_for.times_chains:
        raise ArgumentError(f"--tune has nothing to measure for target {options.target}, which measures by itself")
