# SPDX-License-Identifier: Apache-2.0
"""Decides by measurements on this device, and says which decider the options ask for."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stof.attention.decide import cost_cuda
from stof.errors import ArgumentError, UnsupportedError
from stof.fusion.decide.decision import ChainDecider, ChainDecision
from stof.fusion.decide.estimated import EstimatedDecider, sizes_in_use
from stof.fusion.decide.measured_config import (
    COMPLETE,
    INTERLEAVED,
    ORIGINAL,
    SEARCHED,
    ChainConfig,
    LoneOperators,
    SegmentConfig,
    read_config,
)
from stof.fusion.decide.tensorrt import TensorRtDecider
from stof.fusion.emit import ChainSignature
from stof.fusion.fusion_graph import FusionGraph
from stof.fusion.gemm import MATMUL_OPS
from stof.fusion.plan_entry import ChainPlan
from stof.fusion.policy import EpilogueForms, MergeDecider
from stof.fusion.search.cost import AnalyticalCost, MachineModel, SegmentedRegion
from stof.fusion.search.engine import SearchLimits, search
from stof.fusion.search.measure import TimeOverError, Timer, evaluate_shapes
from stof.fusion.search.measure_cuda import has_cuda_provider
from stof.fusion.search.space import FusionScheme, Segment, Setting, longest_scheme
from stof.fusion.translate import FusedChain
from stof.interrupts import keeping_results, resume
from stof.options import Options
from stof.progress import Progress
from stof.runtime.bf16_kernel import cpu_bf16_gemm_kernel
from stof.runtime.cuda import device_info
from stof.runtime.library import LibraryError, cpu_gemm_form, gemm_form, has_cpu_gemm, has_gemm
from stof.tuning_cache import Cache, EarlierMeasurements, device_name, has_cache, open_cache

LEAST_GAIN = 1.03  # of a chain, at every size that was measured
LEAST_GAIN_INTERLEAVED = 1.01  # the same where chain and original ran in turns, as with matmuls, whose gains are small
_GRACE = 2.0  # seconds after the deadline in which a measurement may end that has begun
_RANKED = SearchLimits(schemes=256)


def make_chain_decider(
    options: Options,
    library: Mapping[str, Any],
    clock: Callable[[], float] = time.monotonic,
    spent: float = 0.0,
    started: float | None = None,
) -> ChainDecider | None:
    """The decider that options ask for; None where no chain is looked for.

    Args:
        options: the user's.
        library: ``build_info()``.
        clock: gives the seconds of ``--tune``.
        spent: seconds of ``--tune`` that other measurements took.
        started: when the run began, in seconds since 1970; None: now.

    Raises:
        ArgumentError: when ``--tune`` has no cache to use, or no device.
    """
    if options.chains == "off":
        return None
    if options.chains == "on" and not options.tune:
        return take_all
    if not options.tuned_for.times_chains:
        return TensorRtDecider(options, _machine(options))
    cuda = options.tuned_for.uses_cuda_provider
    otherwise = EstimatedDecider(options, _machine(options)) if cuda else None
    if not options.tune and (options.ignore_measurements or not has_cache()):
        return otherwise
    if cuda and options.tune:
        _check_device()
    name = _cuda_name() if cuda else device_name(library)
    if not name:
        return otherwise
    try:
        cache = open_cache(options, name, library, started)
    except ArgumentError:
        if options.tune:
            raise
        return otherwise  # a cache was not asked for
    return MeasuredDecider(options, cache, clock() + max(0.0, options.tune - spent), otherwise, clock=clock)


def find_epilogue_forms(options: Options, planned: Sequence[ChainPlan] | None = None) -> EpilogueForms | None:
    """The library's kernels for epilogues; None where matmuls are not fused.

    On the CPU they are fused only where measurements decide, or did so for the plan. With ``--allow-bf16`` they are left to
    it where there is a kernel: measurements of fp32 do not say which matmuls gain by bf16.
    """
    if options.chains == "off" or not options.products:
        return None
    if options.tuned_for.has_cpu_gemm:
        measured = options.chains == "auto" or options.tune > 0
        if planned is None and options.allow_bf16 and cpu_bf16_gemm_kernel():
            return None
        if planned is not None:
            measured = any(not MATMUL_OPS.isdisjoint(p.op_types) for p in planned)
        return cpu_gemm_form if measured and has_cpu_gemm() else None
    return gemm_form if options.tuned_for.has_cuda_gemm and has_gemm() else None


def find_merge_decider(decider: ChainDecider | None) -> MergeDecider | None:
    """The decider about merged matmuls: the cost model, where chains are chosen by it."""
    estimated = decider.otherwise if isinstance(decider, MeasuredDecider) else decider
    return estimated.should_merge if isinstance(estimated, EstimatedDecider) else None


def _machine(options: Options) -> MachineModel:
    """The device that estimates are for: by the options, else this machine's, else the oldest supported one."""
    try:
        capability = options.capability or device_info().capability
    except LibraryError:
        capability = 0
    device = cost_cuda.device_of(capability)
    return MachineModel.cuda(device.memory * 1e9, device.products * 1e12)


def _check_device() -> None:
    try:
        device_info()
    except LibraryError as error:
        raise ArgumentError(f"--tune measures on a CUDA device: {error}") from error


def _cuda_name() -> str:
    """The device's name in the cache; empty where nothing can be measured, without a device or a runtime for it."""
    try:
        return f"{device_info().name}, ONNX Runtime" if has_cuda_provider() else ""
    except LibraryError:
        return ""


def take_all(graph: FusionGraph, chain: FusedChain, key: ChainSignature, undecided: int) -> ChainDecision:
    """Takes every region whole; matmuls stay alone."""
    return ChainDecision((SegmentedRegion.of_chain(graph, chain).epilogue,))


def refuse_all(graph: FusionGraph, chain: FusedChain, key: ChainSignature, undecided: int) -> ChainDecision:
    """Takes no region: a plan decides about all of them."""
    return ChainDecision((), "not in the plan")


@dataclass
class MeasuredDecider:
    """Decides by measurements: those in the cache, and new ones until the deadline."""

    options: Options
    cache: Cache
    deadline: float
    otherwise: ChainDecider | None = None  # decides where nothing was measured
    sizes: list[dict[str, int]] = field(default_factory=list)
    region_deadline: float = 0.0  # of the current region
    region_number: tuple[int, int] = (0, 0)  # of the current region, and how many different ones there are
    progress: Progress = field(default_factory=Progress)
    clock: Callable[[], float] = time.monotonic  # of the deadlines
    asked: set[ChainSignature] = field(default_factory=set)  # the regions that were to be measured
    left_out: set[ChainSignature] = field(
        default_factory=set
    )  # those for which the time was over before their search ended

    def __call__(self, graph: FusionGraph, chain: FusedChain, key: ChainSignature, undecided: int) -> ChainDecision:
        """Takes what was measured to be best at every size; each region gets an equal part of the time left."""
        if self.otherwise is not None and len(graph.with_leading_matmuls(chain.region.node_indices)) == 1:
            return self.otherwise(graph, chain, key, undecided)  # a norm alone
        self.region_deadline = self.clock() + self._seconds_left() / max(1, undecided)
        self.region_number = (self.region_number[0] + 1, max(self.region_number[1], undecided))
        try:
            self.sizes = self.sizes or sizes_in_use(graph, self.options)
            problems = [self._problem(graph, chain, key, s) for s in self.sizes]
        except (KeyError, UnsupportedError, ValueError) as error:
            return ChainDecision((), f"nothing can be measured: {error}")
        reason = ""
        if self._seconds_left() > 0 and not self._is_searched(problems):
            try:
                with keeping_results():
                    self._measure(graph, chain, problems)
            except KeyboardInterrupt as interrupt:
                if not resume(interrupt):
                    raise
                self.deadline = 0.0  # the best so far, and no further measurement
            except TimeOverError:
                pass  # what was measured decides, as where the time is over before a region's turn
            except UnsupportedError as error:
                reason = str(error)
            finally:
                self.progress.close()
        self._count(key, problems, reason)
        if self.otherwise is not None and not all(ORIGINAL in self.cache.of(p) for p in problems):
            return self.otherwise(graph, chain, key, undecided)
        region = SegmentedRegion.of_chain(graph, chain)
        return self._decide(problems, len(region.node_indices), reason, self.lone_operators(region))

    def _count(self, key: ChainSignature, problems: Sequence[Mapping[str, Any]], reason: str) -> None:
        """Counts a region by whether the time sufficed to measure it."""
        if self.options.tune and not reason:
            self.asked.add(key)
            if all(SEARCHED in self.cache.of(p) for p in problems):
                self.left_out.discard(key)
            else:
                self.left_out.add(key)

    @property
    def machine(self) -> MachineModel:
        return self.otherwise.machine if isinstance(self.otherwise, EstimatedDecider) else MachineModel()

    def norms(self, region: SegmentedRegion) -> tuple[Segment, ...]:
        """Norms that may be a chain alone: on the CPU the runtime's own are faster."""
        return region.norms() if self.options.tuned_for.fuses_lone_norms else ()

    def lone_operators(self, region: SegmentedRegion) -> LoneOperators:
        """Operators that may become operators of the library by themselves."""
        return LoneOperators(region.matmuls(), self.norms(region))

    def _configs(
        self, region: SegmentedRegion, schemes: Sequence[FusionScheme]
    ) -> dict[ChainConfig, tuple[Segment, ...]]:
        """The configurations of schemes with the segments that they fuse; one for each different set of segments."""
        lone = self.lone_operators(region)
        by_scheme = [lone.configs(scheme) for scheme in schemes]
        configs: dict[tuple[Segment, ...], ChainConfig] = {}
        for same_choice in zip(*by_scheme, strict=True):
            for config in same_choice:
                configs.setdefault(config.segments(len(region.node_indices), lone), config)
        configs.pop((), None)  # the original
        return {config: segments for segments, config in configs.items()}

    def _seconds_left(self) -> float:
        return self.deadline - self.clock()

    def _problem(
        self, graph: FusionGraph, chain: FusedChain, key: ChainSignature, sizes: Mapping[str, int]
    ) -> dict[str, Any]:
        shapes = evaluate_shapes(graph, chain.inputs, sizes)
        words = graph.operator_names(graph.with_leading_matmuls(chain.region.node_indices))
        problem = {"chain": key[0].text, "types": [*key[1], *key[2]], "operators": words, "shapes": shapes}
        weights = graph.weight_shapes(graph.with_leading_matmuls(chain.region.node_indices))
        return {**problem, "factors": weights} if weights else problem

    def _is_searched(self, problems: Sequence[Mapping[str, Any]]) -> bool:
        """Whether an earlier run with no less time has searched this region."""
        return all(self.cache.of(p).get(SEARCHED, 0.0) >= self._share() for p in problems)

    def _share(self) -> float:
        """Seconds of --tune a region, in equal parts. The others may leave it more or less."""
        return self.options.tune / max(1, self.region_number[1])

    def _measure(self, graph: FusionGraph, chain: FusedChain, problems: Sequence[Mapping[str, Any]]) -> None:
        """Times the original, the whole region as a chain, and the best schemes of the searches."""
        region = SegmentedRegion.of_chain(graph, chain)
        provider = "CUDA" if self.options.tuned_for.uses_cuda_provider else "CPU"
        seconds_left = max(0.0, self._seconds_left()) + _GRACE
        timers = [Timer(graph, s, provider, seconds_left=seconds_left) for s in self.sizes]
        whole = region.whole_scheme
        self._time(region, timers, problems, None)
        self._time(region, timers, problems, ChainConfig.of_scheme(whole))
        norms = frozenset(self.norms(region))
        analytical = AnalyticalCost(region, self.sizes[-1], self.machine, norms)
        ranked = search(region.space(), analytical, [whole], _RANKED, self._is_over)
        costs = _MeasuredCost(region, timers, problems, self)
        result = search(region.space(), costs, [whole, ranked.scheme], _RANKED, self._is_over)
        # Also the longest segments, which no measurement chose: noise in one of them may hide the best scheme.
        schemes = list(dict.fromkeys([whole, ranked.scheme, result.scheme, longest_scheme(region.space())]))
        if region.matmuls():
            self._time_interleaved(region, timers, problems, schemes)
        else:
            for config in self._configs(region, schemes):
                if not self._is_over():
                    self._time(region, timers, problems, config)
        # A search that was cut off goes on in a run with more time.
        seconds = COMPLETE if result.complete else self._share()
        for problem in problems:
            self.cache.put(problem, SEARCHED, seconds)

    def _is_over(self) -> bool:
        number, count = self.region_number
        seconds = max(0.0, self._seconds_left())
        self.progress.show(
            f"measuring chains: {number} of {count}, at most {seconds:.0f} s left (Ctrl-C keeps the best so far)"
        )
        return self.clock() >= min(self.region_deadline, self.deadline)

    def _time(
        self,
        region: SegmentedRegion,
        timers: Sequence[Timer],
        problems: Sequence[Mapping[str, Any]],
        config: ChainConfig | None,
    ) -> None:
        """Times the region at every size: by a configuration, or as it is (None)."""
        key = ORIGINAL if config is None else config.key
        count, lone = len(region.node_indices), self.lone_operators(region)
        chains = _chains_of(region, () if config is None else config.segments(count, lone))
        graph_outputs = region.graph.outputs(region.node_indices)
        for timer, problem in zip(timers, problems, strict=True):
            if key not in self.cache.of(problem):
                seconds = timer.seconds(region.node_indices, chains, graph_outputs)
                self.cache.put(problem, key, seconds)

    def _time_interleaved(
        self,
        region: SegmentedRegion,
        timers: Sequence[Timer],
        problems: Sequence[Mapping[str, Any]],
        schemes: Sequence[FusionScheme],
    ) -> None:
        """Times the region as it is and by schemes, each with matmuls and norms of the runtime and of the library.

        All run in turns: the runtime's matmuls are near the peak, so that differences are small.
        """
        segments: dict[str, tuple[Segment, ...]] = {ORIGINAL: ()}
        segments |= {config.key: fused for config, fused in self._configs(region, schemes).items()}
        candidates = [_chains_of(region, fused) for fused in segments.values()]
        outputs = region.graph.outputs(region.node_indices)
        for timer, problem in zip(timers, problems, strict=True):
            # The whole deadline, not the region's, which its search has used up: few turns do not tell 1 % from noise.
            times = timer.measure_interleaved(
                region.node_indices, candidates, outputs, lambda: self._seconds_left() <= 0.0
            )
            for key in [*self.cache.of(problem)]:
                if key not in segments and read_config(key):
                    self.cache.put(problem, key, math.inf)  # was timed beside another run of the original
            for key, seconds in zip(segments, times, strict=True):
                self.cache.put(problem, key, seconds)
            self.cache.put(problem, INTERLEAVED, 1.0)

    def _decide(
        self,
        problems: Sequence[Mapping[str, Any]],
        count: int,
        reason: str,
        lone: LoneOperators,
    ) -> ChainDecision:
        """The best measured configuration of a region of ``count`` operators."""
        measured = [self.cache.of(p) for p in problems]  # seconds by key, at each size
        if not all(ORIGINAL in seconds for seconds in measured):
            return ChainDecision((), reason or self._describe_unmeasured())
        configs = {key: read_config(key) for key in measured[0] if all(key in seconds for seconds in measured)}
        segments = {key: config.segments(count, lone) for key, config in configs.items() if config is not None}
        gains = {k: [seconds[ORIGINAL] / seconds[k] for seconds in measured] for k, fused in segments.items() if fused}
        if not gains:
            return ChainDecision((), reason or f"no chain of it {self._describe_unmeasured()}")
        least = LEAST_GAIN_INTERLEAVED if all(INTERLEAVED in seconds for seconds in measured) else LEAST_GAIN
        best = max(gains, key=lambda k: (min(gains[k]) >= least, math.prod(gains[k]), k))
        gain = math.prod(gains[best]) ** (1 / len(measured))
        self.cache.note_decision(problems, (ORIGINAL, *gains))
        if min(gains[best]) < least:
            return ChainDecision((), f"measured {min(gains[best]):.2f}x of the original's speed", gain, True)
        return ChainDecision(segments[best], "", gain, True)

    def _describe_unmeasured(self) -> str:
        if self.options.tune:
            return f"was not measured: the {self.options.tune:g} s of --tune were over"
        return "was not measured on this device: --tune SECONDS measures"


def find_earlier_measurements(decider: ChainDecider) -> EarlierMeasurements | None:
    """The measurements of earlier runs that have decided; None where there are none."""
    return decider.cache.earlier if isinstance(decider, MeasuredDecider) else None


def has_decided_nothing(decider: ChainDecider) -> bool:
    """Whether a cache that nobody asked for has no measurement of the model: then the run is as one without a cache."""
    return (
        isinstance(decider, MeasuredDecider)
        and decider.otherwise is None
        and not decider.options.tune
        and decider.cache.earlier is None
    )


def describe_left_out(decider: ChainDecider) -> str:
    """Which regions --tune left out for want of time, for the report; empty where none, or where nothing was to be measured."""
    if not isinstance(decider, MeasuredDecider) or not decider.left_out:
        return ""
    left_out, asked, seconds = len(decider.left_out), len(decider.asked), decider.options.tune
    return f"the {seconds:g} s of --tune were over: {left_out} of {asked} different regions were not measured, or not fully"


def _chains_of(region: SegmentedRegion, segments: Sequence[Segment]) -> list[FusedChain]:
    return [c for s in segments if isinstance(c := region.chain(s), FusedChain)]


@dataclass
class _MeasuredCost:
    """Measured costs of single segments, over the time of the first one at each size."""

    region: SegmentedRegion
    timers: Sequence[Timer]
    problems: Sequence[Mapping[str, Any]]
    measured: MeasuredDecider
    first: list[float] = field(default_factory=list)

    def __call__(self, segment: Segment, setting: Setting) -> float:
        """The mean over sizes; inf where a segment cannot run."""
        ways = [segment[1] - segment[0] > 1 or segment in self.region.matmuls()]
        if segment in self.measured.norms(self.region):
            ways = [False, True]
        return min(self._mean(segment, fused) for fused in ways)

    def _mean(self, segment: Segment, fused: bool) -> float:
        """The mean cost as one chain, or by the runtime's operators."""
        chains = _chains_of(self.region, [segment] if fused else [])
        try:
            seconds = [self._seconds(segment, t, p, chains) for t, p in zip(self.timers, self.problems, strict=True)]
        except UnsupportedError:
            return math.inf if chains else 0.0
        self.first = self.first or seconds
        return sum(f / max(b, 1e-9) for f, b in zip(seconds, self.first, strict=True)) / len(seconds)

    def _seconds(
        self, segment: Segment, timer: Timer, problem: Mapping[str, Any], chains: Sequence[FusedChain]
    ) -> float:
        key = SegmentConfig(segment, bool(chains) and segment in self.measured.norms(self.region)).key
        measured = self.measured.cache.of(problem)
        if key not in measured:
            node_indices = self.region.node_indices[segment[0] : segment[1]]
            measured[key] = timer.seconds(node_indices, chains, self.region.graph.outputs(node_indices))
            self.measured.cache.put(problem, key, measured[key])
        return measured[key]
