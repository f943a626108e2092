# SPDX-License-Identifier: Apache-2.0
"""Which parts of a region become chains: all of it by the user's word, else what was measured to gain on this device."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stof.attention.decide import cost_cuda
from stof.errors import ArgumentError, UnsupportedError
from stof.fusion.apply import Judge, Verdict, operators
from stof.fusion.decide.predicted import Predicted, sizes_in_use
from stof.fusion.decide.tensorrt import BesideTensorRt
from stof.fusion.emit import Key
from stof.fusion.gemm import PRODUCTS, Forms
from stof.fusion.merge_matmuls import Merges
from stof.fusion.plan_entry import ChainPlan
from stof.fusion.regions import Graph
from stof.fusion.search.cost import Analytical, Machine, Site
from stof.fusion.search.engine import Limits, search
from stof.fusion.search.measure import Timer, shapes_of
from stof.fusion.search.measure_cuda import has_cuda_provider
from stof.fusion.search.space import Scheme, Segment, Setting, decode, encode, longest, replaced
from stof.fusion.translate import Chain
from stof.interrupts import keeping_results, resume
from stof.options import Options
from stof.progress import Progress
from stof.runtime.cuda import device_info
from stof.runtime.library import LibraryError, cpu_gemm_form, gemm_form, has_cpu_gemm, has_gemm
from stof.tuning_cache import Cache, cache_path, device_name, has_cache

LEAST_GAIN = 1.03  # that a chain has to show at every size that was measured
LEAST_GAIN_IN_TURNS = 1.01  # where it took turns with the original, from which it differs by whose products it has
_RANKED = Limits(schemes=256)
_ORIGINAL = "original"
_SEARCHED = "searched"  # beside the measurements of a region: its search's share of the seconds of --tune
_ENDED = 1e9  # the same of a search that ended by itself
_IN_TURNS = "in turns"  # beside them: the original and whole schemes were timed so
# After a scheme: what is by itself in it becomes an operator of the library, too.
_PRODUCTS = "p"
_NORMS = "n"
_CONFIG = re.compile(f"([0-9a-f]+)({_PRODUCTS}?{_NORMS}?)")


def judge_of(options: Options, library: Mapping[str, Any], clock: Callable[[], float] = time.monotonic) -> Judge | None:
    """The judge that options ask for; None where no chain is looked for. ``clock`` gives the seconds that ``--tune`` counts.

    Raises:
        ArgumentError: when ``--tune`` has no cache to use, or no device.
    """
    if options.chains == "off":
        return None
    if options.chains == "on" and not options.tune:
        return take_all
    if options.target == "tensorrt":
        return BesideTensorRt(options, _machine(options))
    cuda = options.target == "cuda"
    otherwise = Predicted(options, _machine(options)) if cuda else None
    if not options.tune and not has_cache():
        return otherwise
    if cuda and options.tune:
        _check_device()
    name = _cuda_name() if cuda else device_name(library)
    if not name:
        return otherwise
    try:
        cache = Cache(cache_path(), name, str(library.get("build_id", "")))
    except ArgumentError:
        if options.tune:
            raise
        return otherwise  # nobody asked for it
    return Measured(options, cache, clock() + options.tune, otherwise, clock=clock)


def forms_of(options: Options, planned: Sequence[ChainPlan] | None = None) -> Forms | None:
    """What the library says of epilogues, where products become parts of templates: by kernels that it has.

    On the CPU only where measurements decide, or did so for the plan.
    """
    if options.chains == "off" or not options.products:
        return None
    if options.target == "cpu":
        measured = options.chains == "auto" or options.tune > 0
        if planned is not None:
            measured = any(not PRODUCTS.isdisjoint(p.operators.split()) for p in planned)
        return cpu_gemm_form if measured and has_cpu_gemm() else None
    return gemm_form if options.target == "cuda" and has_gemm() else None


def merges_of(judge: Judge | None) -> Merges | None:
    """Who decides whether products become one: the analytical model, where chains are chosen by it."""
    predicted = judge.otherwise if isinstance(judge, Measured) else judge
    return predicted.merges if isinstance(predicted, Predicted) else None


def _machine(options: Options) -> Machine:
    """The device that predictions are for: as the options say, else at hand, else the oldest one that kernels run on."""
    try:
        capability = options.capability or device_info().capability
    except LibraryError:
        capability = 0
    device = cost_cuda.device_of(capability)
    return Machine.cuda(device.memory * 1e9, device.products * 1e12)


def _check_device() -> None:
    try:
        device_info()
    except LibraryError as error:
        raise ArgumentError(f"--tune measures on a CUDA device: {error}") from error


def _cuda_name() -> str:
    """What the cache calls the device; empty where chains cannot be measured: no device, or no runtime that uses it."""
    try:
        return f"{device_info().name}, ONNX Runtime" if has_cuda_provider() else ""
    except LibraryError:
        return ""


def take_all(graph: Graph, chain: Chain, key: Key, left: int) -> Verdict:
    """Every region whole, and products by themselves."""
    return Verdict((Site(graph, graph.site(chain.region.places)).region,))


def leave_all(graph: Graph, chain: Chain, key: Key, left: int) -> Verdict:
    """No region: where a plan decides about all of them."""
    return Verdict((), "not in the plan")


@dataclass
class Measured:
    """Decides by measurements: by those of other runs, and by new ones until the deadline."""

    options: Options
    cache: Cache
    deadline: float
    otherwise: Judge | None = None  # decides about what was not measured
    sizes: list[dict[str, int]] = field(default_factory=list)
    own: float = 0.0  # the deadline of the region at hand
    place: tuple[int, int] = (0, 0)  # of the region at hand among those that differ
    progress: Progress = field(default_factory=Progress)
    clock: Callable[[], float] = time.monotonic  # of the deadlines

    def __call__(self, graph: Graph, chain: Chain, key: Key, left: int) -> Verdict:
        """What was measured to be best at every size; each region gets an equal part of the time that is left."""
        if self.otherwise is not None and len(graph.site(chain.region.places)) == 1:
            return self.otherwise(graph, chain, key, left)  # a norm by itself
        self.own = self.clock() + self._left() / max(1, left)
        self.place = (self.place[0] + 1, max(self.place[1], left))
        try:
            self.sizes = self.sizes or sizes_in_use(graph, self.options)
            problems = [self._problem(graph, chain, key, s) for s in self.sizes]
        except (KeyError, UnsupportedError, ValueError) as error:
            return Verdict((), f"nothing can be measured: {error}")
        reason = ""
        if self._left() > 0 and not self._searched(problems):
            try:
                with keeping_results():
                    self._measure(graph, chain, problems)
            except KeyboardInterrupt as interrupt:
                if not resume(interrupt):
                    raise
                self.deadline = 0.0  # the best so far, and no further measurement
            except UnsupportedError as error:
                reason = str(error)
            finally:
                self.progress.close()
        if self.otherwise is not None and not all(_ORIGINAL in self.cache.of(p) for p in problems):
            return self.otherwise(graph, chain, key, left)
        site = Site(graph, graph.site(chain.region.places))
        return self._decided(problems, len(site.places), reason, self.alone(site))

    @property
    def machine(self) -> Machine:
        return self.otherwise.machine if isinstance(self.otherwise, Predicted) else Machine()

    def norms(self, site: Site) -> tuple[Segment, ...]:
        """Norms that may be a chain by themselves: on the CPU the runtime's own are faster."""
        return site.norms() if self.options.target == "cuda" else ()

    def alone(self, site: Site) -> dict[str, tuple[Segment, ...]]:
        """What may become an operator by itself, by what a scheme's configuration ends with."""
        products, norms = site.products(), self.norms(site)
        found: dict[str, tuple[Segment, ...]] = {"": ()}
        if products:
            found[_PRODUCTS] = products
        if norms:
            found |= {end + _NORMS: (*own, *norms) for end, own in found.items()}
        return found

    def _variants(self, site: Site, schemes: Sequence[Scheme]) -> dict[tuple[Segment, ...], tuple[Scheme, str]]:
        """What schemes replace, each once, with how a configuration says it."""
        found: dict[tuple[Segment, ...], tuple[Scheme, str]] = {}
        for end, own in self.alone(site).items():
            for scheme in schemes:
                found.setdefault(replaced(scheme, own), (scheme, end))
        found.pop((), None)  # the original
        return found

    def _left(self) -> float:
        return self.deadline - self.clock()

    def _problem(self, graph: Graph, chain: Chain, key: Key, sizes: Mapping[str, int]) -> dict[str, Any]:
        shapes = shapes_of(graph, chain.inputs, sizes)
        words = operators(graph, graph.site(chain.region.places))
        problem = {"chain": key[0], "types": [*key[1], *key[2]], "operators": words, "shapes": shapes}
        factors = graph.factors(graph.site(chain.region.places))
        return {**problem, "factors": factors} if factors else problem

    def _searched(self, problems: Sequence[Mapping[str, Any]]) -> bool:
        """Whether other runs, which were given no less time, have searched this region."""
        return all(self.cache.of(p).get(_SEARCHED, 0.0) >= self._share() for p in problems)

    def _share(self) -> float:
        """Of a region, if each gets the same: what it gets in fact depends on how long the others take."""
        return self.options.tune / max(1, self.place[1])

    def _measure(self, graph: Graph, chain: Chain, problems: Sequence[Mapping[str, Any]]) -> None:
        """Measures candidates: the original, the whole region, and the schemes that the search finds best."""
        site = Site(graph, graph.site(chain.region.places))
        provider = "CUDA" if self.options.target == "cuda" else "CPU"
        timers = [Timer(graph, s, provider) for s in self.sizes]
        whole = site.whole
        self._time(site, timers, problems, None)
        self._time(site, timers, problems, whole)
        norms = frozenset(self.norms(site))
        analytical = Analytical(site, self.sizes[-1], self.machine, norms)
        ranked = search(site.space(), analytical, [whole], _RANKED, self._over)
        costs = _Costs(site, timers, problems, self)
        found = search(site.space(), costs, [whole, ranked.scheme], _RANKED, self._over)
        # One that no measured segment has a part in, too: noise in one of them may hide the best scheme.
        schemes = list(dict.fromkeys([whole, ranked.scheme, found.scheme, longest(site.space())]))
        if site.products():
            self._time_in_turns(site, timers, problems, schemes)
        else:
            for scheme, end in self._variants(site, schemes).values():
                if not self._over():
                    self._time(site, timers, problems, scheme, end)
        # One that was cut off goes on in a run that is given more time.
        seconds = _ENDED if found.complete else self._share()
        for problem in problems:
            self.cache.put(problem, _SEARCHED, seconds)

    def _over(self) -> bool:
        number, count = self.place
        seconds = max(0.0, self._left())
        self.progress.show(
            f"measuring chains: {number} of {count}, at most {seconds:.0f} s left (Ctrl-C keeps the best so far)"
        )
        return self.clock() >= min(self.own, self.deadline)

    def _time(
        self,
        site: Site,
        timers: Sequence[Timer],
        problems: Sequence[Mapping[str, Any]],
        scheme: Scheme | None,
        end: str = "",
    ) -> None:
        """The whole region as a scheme has it, at every size; None: as it is. ``end``: of the configuration."""
        config = _ORIGINAL if scheme is None else f"{encode(scheme):x}{end}"
        chains = _chains(site, replaced(scheme or (), self.alone(site)[end]))
        graph_outputs = site.graph.outputs(site.places)
        for timer, problem in zip(timers, problems, strict=True):
            if config not in self.cache.of(problem):
                seconds = timer.seconds(site.places, chains, graph_outputs)
                self.cache.put(problem, config, seconds)

    def _time_in_turns(
        self, site: Site, timers: Sequence[Timer], problems: Sequence[Mapping[str, Any]], schemes: Sequence[Scheme]
    ) -> None:
        """The region as it is and by schemes, each with the runtime's products and norms by themselves and the library's.

        The runtime's products are near to what can be reached: differences are small.
        """
        segments: dict[str, tuple[Segment, ...]] = {_ORIGINAL: ()}
        for own, (scheme, end) in self._variants(site, schemes).items():
            segments[f"{encode(scheme):x}{end}"] = own
        parts = [_chains(site, some) for some in segments.values()]
        outputs = site.graph.outputs(site.places)
        for timer, problem in zip(timers, problems, strict=True):
            # Not the region's own share, which its search has used up: few turns tell noise from 1 % no better than none.
            times = timer.in_turns(site.places, parts, outputs, lambda: self._left() <= 0.0)
            for config in [*self.cache.of(problem)]:
                if config not in segments and _CONFIG.fullmatch(config):
                    self.cache.put(problem, config, math.inf)  # timed beside another original
            for config, seconds in zip(segments, times, strict=True):
                self.cache.put(problem, config, seconds)
            self.cache.put(problem, _IN_TURNS, 1.0)

    def _decided(
        self, problems: Sequence[Mapping[str, Any]], count: int, reason: str, alone: Mapping[str, Sequence[Segment]]
    ) -> Verdict:
        known = [self.cache.of(p) for p in problems]
        if not all(_ORIGINAL in k for k in known):
            return Verdict((), reason or "was not measured on this device: --tune SECONDS measures")
        segments = {c: _segments(c, count, alone) for c in known[0] if all(c in k for k in known)}
        gains = {c: [k[_ORIGINAL] / k[c] for k in known] for c, own in segments.items() if own}
        if not gains:
            return Verdict((), reason or "no chain of it was measured on this device: --tune SECONDS measures")
        least = LEAST_GAIN_IN_TURNS if all(_IN_TURNS in k for k in known) else LEAST_GAIN
        best = max(gains, key=lambda c: (min(gains[c]) >= least, math.prod(gains[c]), c))
        gain = math.prod(gains[best]) ** (1 / len(known))
        if min(gains[best]) < least:
            return Verdict((), f"measured {min(gains[best]):.2f}x of the original's speed", gain, True)
        return Verdict(segments[best], "", gain, True)


def _segments(config: str, count: int, alone: Mapping[str, Sequence[Segment]]) -> tuple[Segment, ...]:
    """What a cached configuration replaces; nothing where it is none of a scheme, or of another version's."""
    found = _CONFIG.fullmatch(config)
    if found is None or found[2] not in alone:
        return ()
    try:
        return replaced(decode(int(found[1], 16), count), alone[found[2]])
    except ValueError:
        return ()


def _chains(site: Site, segments: Sequence[Segment]) -> list[Chain]:
    return [c for s in segments if isinstance(c := site.chain(s), Chain)]


@dataclass
class _Costs:
    """Measured costs of segments, by themselves, as shares of what the first one of them took at each size."""

    site: Site
    timers: Sequence[Timer]
    problems: Sequence[Mapping[str, Any]]
    measured: Measured
    first: list[float] = field(default_factory=list)

    def __call__(self, segment: Segment, setting: Setting) -> float:
        """The mean over sizes; inf where a segment cannot be run."""
        ways = [segment[1] - segment[0] > 1 or segment in self.site.products()]
        if segment in self.measured.norms(self.site):
            ways = [False, True]
        return min(self._mean(segment, fused) for fused in ways)

    def _mean(self, segment: Segment, fused: bool) -> float:
        """As one operator of the library, or as the runtime's."""
        chains = _chains(self.site, [segment] if fused else [])
        try:
            found = [self._seconds(segment, t, p, chains) for t, p in zip(self.timers, self.problems, strict=True)]
        except UnsupportedError:
            return math.inf if chains else 0.0
        self.first = self.first or found
        return sum(f / max(b, 1e-9) for f, b in zip(found, self.first, strict=True)) / len(found)

    def _seconds(self, segment: Segment, timer: Timer, problem: Mapping[str, Any], chains: Sequence[Chain]) -> float:
        config = f"operators {segment[0]} to {segment[1]}"
        if chains and segment in self.measured.norms(self.site):
            config += " by themselves as a chain"
        known = self.measured.cache.of(problem)
        if config not in known:
            places = self.site.places[segment[0] : segment[1]]
            known[config] = timer.seconds(places, chains, self.site.graph.outputs(places))
            self.measured.cache.put(problem, config, known[config])
        return known[config]
