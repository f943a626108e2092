# SPDX-License-Identifier: Apache-2.0
"""Running the optimized model against the original before the file is written.

Site level: query, key, value and the mask tensors are captured in the original where they enter the site, the site is
computed in fp64, and the emitted op's error is held against that of the original's own nodes. Model level: the difference of
outputs is held against the difference between two legal runs of the original.

NaN in the original alone is no fault where queries without a key cause it: docs/guide/options.md, "NaN".

Half-precision models are compared as their fp32 twins, where a difference of the graphs is not lost in rounding; the op of
a site runs in the site's own type on rounded inputs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import onnx
from onnx import helper

from stof.attention.emit import Rewrite
from stof.attention.function_body import OP
from stof.attention.subgraphs import Scope, graph_at
from stof.errors import VerifyError
from stof.execution.inputs import Case, Counts, InputMaker, Padding
from stof.execution.ort_sessions import Sessions, VerifiedSession
from stof.execution.session_process import RuntimeFailure
from stof.execution.upcast import BF16, HALF, Twins, holds
from stof.mask.check.run_masks import tensors_by_role
from stof.mask.expression import MaskExpression
from stof.site import EmptyRows, Layout, TermKind
from stof.verification.compare import (
    Comparison,
    attributes_of,
    compare_outputs,
    compare_site,
    rounded,
    undefined_everywhere,
)
from stof.verification.fp64_reference import in_double
from stof.verification.perturb import Noisy, perturbed

_LONGEST = 700
# Instead of 1e-6 for half-precision models, which run widened: fp16 scores stand beside 1024 there (see widen.py).
_WIDENED_FLOORS = {int(onnx.TensorProto.FLOAT16): 2e-4, int(onnx.TensorProto.BFLOAT16): 1e-5}
_WITHOUT_KEYS = 4  # rows of a batch, of which the last one is all padding
_FLOPS = 3e10  # a second, of two cores
_ROUNDINGS = 3  # runs that show what rounding does to a model
_MOST_SUSPECTS = 4  # sites that are searched for when only together they make outputs differ


@dataclass
class Verification:
    """All comparisons of a run, with the time that they took."""

    comparisons: list[Comparison] = field(default_factory=list)
    seconds: float = 0.0
    complete: bool = True
    widened: bool = False  # a half-precision model, compared as its fp32 twin
    expanded: bool = False  # the runtime refuses the original's fused nodes: it was compared with them expanded
    # Without a faulty site: a smallest set found of sites whose replacement together makes outputs differ, and whether that
    # set suffices (False: the search ended before, and others have to be replaced as well).
    suspects: tuple[str, ...] = ()
    suspects_suffice: bool = True

    @property
    def failures(self) -> list[Comparison]:
        """The comparisons that do not hold."""
        return [c for c in self.comparisons if not c.ok]

    def faulty_sites(self) -> list[str]:
        """The sites at fault, by name."""
        return list(dict.fromkeys(c.site for c in self.failures if c.site))


def cases(expressions: Sequence[MaskExpression], tokens: float = np.inf, last: int = 2) -> list[Case]:
    """Sets of inputs: lengths below and above every window, odd ones, batch 2 with padding on either side.

    The first and the last always run, others as far as time allows; long ones of batch 2 become batch 1 where they have more
    than so many ``tokens``. The last case has ``last`` rows.
    """
    numbers = [n for e in expressions for n in e.literals]
    # Inputs that are longer than a stored table do not run.
    default = 0 if any(e.tables for e in expressions) else 16
    most = max([n for n in numbers if n <= _LONGEST - 60], default=default)
    above = most + 37 if (most + 37) % 2 else most + 38
    batch = 2 if 2 * above <= tokens else 1
    return [
        Case(batch, above, Padding.LEFT),
        Case(batch, above + 6, Padding.RIGHT),
        Case(1, max(3, most // 2), Padding.NONE),
        Case(1, above + 11, Padding.NONE),
        Case(last, 9, Padding.RIGHT),
    ]


def _affordable(model: onnx.ModelProto, seconds: float) -> float:
    """How many tokens a model can be given in a third of the time, one of three runs of each case, at a slow machine's rate."""
    weights = sum(int(np.prod(t.dims, dtype=np.int64)) for t in model.graph.initializer)
    return seconds / 3 * _FLOPS / (2 * max(1, weights))


def suspects(rewrites: Sequence[Rewrite], fails: Callable[[Sequence[Rewrite]], bool]) -> tuple[list[Rewrite], bool]:
    """A smallest failing set of rewrites by repeated bisection, when all of them together fail.

    Takes about log2(n) runs for each rewrite of the set. The set cannot lose one of its rewrites and still fail, as long as
    a set fails that holds a failing one.

    Args:
        rewrites: all of them, in the order of the graph.
        fails: whether the model in which these are replaced is wrong.

    Returns:
        The set in the order of the graph, and whether it fails by itself: the search ends at a few rewrites.
    """
    needed: list[Rewrite] = []
    rest = list(rewrites)
    while len(needed) < _MOST_SUSPECTS:
        # With `needed`, all of `rest` fails, and none of it does not: search the first number that fails.
        low, high = 0, len(rest)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if fails([*rest[:middle], *needed]) else (middle, high)
        needed.insert(0, rest[high - 1])
        rest = rest[: high - 1]
        if not rest or fails(needed):
            return needed, True
    return needed, False


class Verifier:
    """Compares an original model with its optimized form.

    Args:
        scopes: the main graph, with the original and its working copy, and subgraphs with sites.
        rewrites: what was replaced.
        budget: seconds after which no further case is begun; sessions.py has what a single run may take.
        ignore_empty_rows: rows without a key may differ.
    """

    def __init__(
        self,
        scopes: Sequence[Scope],
        rewrites: Sequence[Rewrite],
        budget: float,
        *,
        ignore_empty_rows: bool = False,
    ) -> None:
        self.ignore_empty_rows = ignore_empty_rows
        self.scopes = scopes
        self.model = model = scopes[0].prepared.original
        self.working = scopes[0].prepared.model
        self.symbolic = scopes[0].symbolic
        self.rewrites = rewrites
        self.budget = budget
        self.deadline = time.monotonic() + budget
        added = frozenset(t.tensor for r in rewrites for t in r.mask.by_data if t.kind is TermKind.ADD)
        read = tensors_by_role((r.site, r.mask) for r in rewrites)
        fused = scopes[0].prepared.base.graph
        self.maker = InputMaker(self.working, self.symbolic, *read, added=added, fused=fused)
        # A mask of -10000 takes digits from the scores of a row that is all padding, which the operator leaves them.
        soft = any(r.mask.empty_rows is EmptyRows.ALL for r in rewrites)
        last = 2 if soft else _WITHOUT_KEYS
        self.cases = cases([r.mask.expression for r in rewrites], _affordable(model, budget), last)
        if self.maker.counts and not soft and not ignore_empty_rows:
            *others, short = self.cases
            unusual = [Case(3, short.length, Padding.LEFT, counts=c) for c in (Counts.NEGATIVE, Counts.BEYOND)]
            self.cases = [*others, *unusual, replace(short, counts=Counts.NONE)]
        # NaN of queries without a key spreads further in the original. A case without such queries compares what it hides.
        self.undefined = any(r.mask.operands or r.mask.by_data for r in rewrites)
        if self.undefined and any(r.mask.empty_rows is EmptyRows.NAN for r in rewrites):
            self.cases.insert(-1, Case(2, self.cases[-1].length, Padding.LEAST))
        if ignore_empty_rows:
            # Padding is what makes rows without keys; what follows from them is not to be compared.
            self.cases = [Case(c.batch, c.length, Padding.NONE) for c in self.cases]

    def run(
        self,
        original: Path,
        emitted: onnx.ModelProto,
        scratch: Path,
        emit: Callable[[Sequence[Rewrite]], onnx.ModelProto],
        attention: onnx.ModelProto | None = None,
    ) -> Verification:
        """Every comparison; stops early, and says so, when the budget is spent.

        Args:
            original: the file that the model was read from.
            emitted: the optimized model, without external data.
            scratch: a folder to write into, on a disk with room for the model.
            emit: makes the optimized model of some of the rewrites, to find the one at fault.
            attention: the model before chains were replaced, in which sites are looked at.
        """
        start = time.monotonic()
        attention = attention or emitted
        result = Verification()
        sessions = Sessions(original.parent.resolve(), scratch, self.budget)
        feeds = self._draw(self.cases)
        before: onnx.ModelProto | Path = original
        reference = self.model
        after, twin, floor = emitted, _same, 1e-6
        halves = holds(self.model, HALF if not self.rewrites else BF16)
        if any(r.site.dtype in HALF for r in self.rewrites) or halves:
            result.widened = True
            result.comparisons.extend(self._as_it_is(sessions, original, emitted, feeds[-1]))
            twin = Twins(sessions.weights, scratch, self._half_constants()).of
            floor = max([_WIDENED_FLOORS.get(r.site.dtype, 1e-5) for r in self.rewrites], default=1e-5)
            before = reference = twin(self.model)
            after = twin(emitted)
            feeds = [_widened(f) for f in feeds]
        probed = reference if self.working is self.model else twin(self.working)
        if probed is not reference and not _runs(sessions, reference, feeds[0]):
            single = [Case(1, c.length, c.padding) for c in self.cases]
            alone = [_widened(f) if result.widened else f for f in self._draw(single)]
            if _runs(sessions, reference, alone[0]):  # some fused nodes take a past with one row only
                self.cases, feeds = single, alone
            elif _runs(sessions, probed, feeds[0]):
                result.expanded = True
                before = reference = probed
        ran, plain, captured = self._reference(sessions, reference, probed, feeds, result)
        feeds = [feeds[i] for i in ran]
        result.comparisons.extend(self._sites(self.scopes[0], attention, captured))
        for scope in self.scopes[1:]:
            if scope.rewrites(self.rewrites):
                result.comparisons.extend(self._inside(sessions, scope, attention, twin, result.widened))
        try:
            session = sessions.make(before, optimized=True, library=False)
        except RuntimeFailure:
            if before is not original:
                raise
            # Runtimes refuse files whose axes and sizes are external data; in the model that was loaded, they are not.
            session = sessions.make(self.model, optimized=True, library=False)
        legal = [[session.run(None, f)] for f in feeds]
        del session
        # With fused nodes expanded, what a run shows is how far rounding takes the expanded graph from itself: that the
        # expansion is not what the nodes compute is no reason to allow more.
        expanded: list[list[list[np.ndarray]]] = [[] for _ in feeds]

        def run_also(others: Sequence[onnx.ModelProto]) -> None:
            if others and probed is not reference and not expanded[0]:
                others = [probed, *others]
            for other in others:
                session = sessions.make(other, optimized=False, library=False)
                for found, feed in zip(legal if probed is reference else expanded, feeds, strict=True):
                    found.append(session.run(None, feed))
                del session

        run_also(self._exact(probed, result.widened))
        names = [o.name for o in self.model.graph.output]

        def compare(session: VerifiedSession, i: int) -> list[Comparison]:
            own = zip(*expanded[i], strict=True) if expanded[i] else [()] * len(names)
            tensors = zip(names, plain[i], zip(*legal[i], strict=True), session.run(None, feeds[i]), own, strict=True)
            case = self.cases[ran[i]]
            undefined = self.undefined and case.padding in (Padding.LEFT, Padding.RIGHT)
            return [compare_outputs(case, floor, *t, undefined=undefined) for t in tensors]

        def compare_all() -> tuple[list[Comparison], int | None]:
            session = sessions.make(after, optimized=True, library=True)
            by_case = [compare(session, i) for i in range(len(plain))]
            wrong = next((i for i, comparisons in enumerate(by_case) if not all(c.ok for c in comparisons)), None)
            return [c for comparisons in by_case for c in comparisons] + undefined_everywhere(by_case, names), wrong

        compared, wrong = compare_all()
        if wrong is not None and self.rewrites and not result.faulty_sites():
            # Runs of a graph in which nothing can be fused agree to the last bit, and say nothing of rounding; those of a
            # quantized one do not show its steps.
            run_also(self._perturbed(probed, captured, result.widened))
            compared, wrong = compare_all()
        result.comparisons.extend(compared)
        if wrong is not None and self.rewrites and not result.faulty_sites():

            def fails(some: Sequence[Rewrite]) -> bool:
                session = sessions.make(twin(emit(some)), optimized=True, library=True)
                return not all(c.ok for c in compare(session, wrong))

            found, result.suspects_suffice = suspects(self.rewrites, fails)
            result.suspects = tuple(r.site.name for r in found)
        result.seconds = time.monotonic() - start
        return result

    def _exact(self, probed: onnx.ModelProto, widened: bool) -> list[onnx.ModelProto]:
        """A further legal run where terms of masks absorb scores, and one with graph optimizations does not show it."""
        soft = [r.site for r in self.scopes[0].rewrites(self.rewrites) if _absorbs(r)]
        exact = in_double(probed, [s.nodes for s in soft], partial(self._type, widened)) if soft else None
        return [exact] if exact else []

    def _perturbed(
        self, probed: onnx.ModelProto, captured: Mapping[str, np.ndarray], widened: bool
    ) -> list[onnx.ModelProto]:
        """Runs whose sites are off by what the operator and the nodes that it replaces may differ by."""
        single = int(onnx.TensorProto.FLOAT)
        outputs = {}
        for site in (r.site for r in self.rewrites):
            channels = site.value_head_size * (site.num_heads if site.output_layout is Layout.BSN else 1)
            known = captured.get(site.output)
            largest = 1.0 if known is None else float(np.abs(known[np.isfinite(known)]).max(initial=0.0))
            outputs[site.output] = Noisy(single if widened else site.dtype, channels, largest)
        return [perturbed(probed, outputs, seed) for seed in range(_ROUNDINGS)]

    def _type(self, widened: bool, tensor: str) -> int:
        dtype = self.symbolic.dtype(tensor)
        return int(onnx.TensorProto.FLOAT) if widened and dtype in HALF else dtype

    def _half_constants(self) -> dict[str, np.ndarray]:
        found = {}
        for node in self.working.graph.node:
            for name in node.output:
                array = self.symbolic.constant(name) if self.symbolic.dtype(name) in HALF else None
                if array is not None and array.size <= 16:
                    found[name] = array
        return found

    def _draw(self, cases_: Sequence[Case]) -> list[dict[str, np.ndarray]]:
        return [self.maker.draw(c, np.random.default_rng(i)) for i, c in enumerate(cases_)]

    @staticmethod
    def _as_it_is(
        sessions: Sessions, original: Path, emitted: onnx.ModelProto, feed: Mapping[str, np.ndarray]
    ) -> list[Comparison]:
        """Whether a model that is compared widened runs in its own types where the original does, without comparing."""
        try:
            first = sessions.make(original, optimized=True, library=False).run(None, feed)
        except RuntimeFailure:  # the CPU provider lacks a kernel; nothing can be told then
            return []
        what = "the optimized model in its own types"
        try:
            second = sessions.make(emitted, optimized=True, library=True).run(None, feed)
        except RuntimeFailure as error:
            return [Comparison(what, np.inf, 0.0, False, detail=f"does not run: {error}")]
        same = all((a.dtype, a.shape) == (b.dtype, b.shape) for a, b in zip(first, second, strict=True))
        return [] if same else [Comparison(what, np.inf, 0.0, False, detail="outputs of other types or shapes")]

    def _reference(
        self,
        sessions: Sessions,
        reference: onnx.ModelProto,
        probed: onnx.ModelProto,
        feeds: list[dict[str, np.ndarray]],
        result: Verification,
    ) -> tuple[list[int], list[list[np.ndarray]], dict[str, np.ndarray]]:
        """Which cases ran, the original's outputs without graph optimizations, the first case's tensors at every site."""
        wanted = self._site_tensors(self.scopes[0])
        outputs = [o.name for o in self.model.graph.output]
        model = onnx.ModelProto()
        model.CopyFrom(probed)
        declared = set(outputs)
        for name in wanted:
            dtype = self.symbolic.dtype(name)
            if name not in declared and dtype:
                if result.widened and dtype in HALF:
                    dtype = int(onnx.TensorProto.FLOAT)
                model.graph.output.append(helper.make_tensor_value_info(name, dtype, None))
        session = sessions.make(model, optimized=False, library=False)
        del model
        names = list(session.outputs)
        captured: dict[str, np.ndarray] = {}
        ran, plain = [], []
        if probed is not reference:  # sites inside fused nodes are seen in the working copy alone
            everything = dict(zip(names, session.run(names, feeds[0]), strict=True))
            captured = {**feeds[0], **{n: everything[n] for n in wanted if n in everything}}
            session = sessions.make(reference, optimized=False, library=False)
        pace = 0.0  # seconds for a token
        failure: RuntimeFailure | None = None
        for i, (case, feed) in enumerate(zip(self.cases, feeds, strict=True)):
            tokens = case.batch * case.length
            # Each case runs three times: here, with graph optimizations, and optimized.
            always = i in (0, len(feeds) - 1) or case.padding is Padding.LEAST
            if not always and time.monotonic() + 3 * pace * tokens > self.deadline:
                result.complete = False
                continue
            start = time.monotonic()
            first = not captured and probed is reference
            try:
                everything = dict(zip(names, session.run(names, feed), strict=True)) if first else {}
                found = [everything[n] for n in outputs] if first else self._run(session, outputs, feeds, i)
            except RuntimeFailure as error:  # a stored mask ends somewhere, one that is put together begins somewhere
                failure = failure or error
                continue
            if first:
                captured = {**feed, **{n: everything[n] for n in wanted if n in everything}}
            plain.append(found)
            pace = (time.monotonic() - start) / tokens if first else pace or (time.monotonic() - start) / tokens
            # What is left of the budget also pays for the two other runs of what ran already.
            self.deadline -= 2 * (time.monotonic() - start)
            ran.append(i)
        if failure is not None and not ran:
            raise failure
        return ran, plain, captured

    def _run(
        self, session: VerifiedSession, outputs: list[str], feeds: list[dict[str, np.ndarray]], i: int
    ) -> list[np.ndarray]:
        """The outputs of a case; where the original does not run without any key, of one with keys in its place."""
        found: list[np.ndarray]
        try:
            found = session.run(outputs, feeds[i])
        except RuntimeFailure:
            case = self.cases[i]
            if case.batch != _WITHOUT_KEYS:
                raise
            self.cases[i] = replace(case, batch=2, counts=Counts.USUAL)
            narrow = {n: x.astype(feeds[i][n].dtype) for n, x in self._draw([self.cases[i]])[0].items()}
            feeds[i] = narrow
            found = session.run(outputs, narrow)
        return found

    def _inside(
        self,
        sessions: Sessions,
        scope: Scope,
        emitted: onnx.ModelProto,
        twin: Callable[[onnx.ModelProto], onnx.ModelProto],
        widened: bool,
    ) -> list[Comparison]:
        """The sites of a subgraph, which is run by itself: whether an input leads into it or not."""
        some = scope.rewrites(self.rewrites)
        model = onnx.ModelProto()
        model.CopyFrom(scope.prepared.model)
        del model.graph.output[:]
        wanted = self._site_tensors(scope)
        for name in wanted:
            model.graph.output.append(helper.make_tensor_value_info(name, scope.symbolic.dtype(name), None))
        try:
            maker = InputMaker(scope.prepared.model, scope.symbolic, *tensors_by_role((r.site, r.mask) for r in some))
            feeds = maker.draw(self.cases[0], np.random.default_rng(0))
            feeds = _widened(feeds) if widened else feeds
            found = sessions.make(twin(model), optimized=False, library=False).run(wanted, feeds)
        except VerifyError:
            raise
        except Exception as error:  # whatever the runtime raises, and inputs that cannot be drawn
            detail = f"the {scope.words} cannot be run by itself: {error}"
            return [Comparison(f"site {r.site.name!r}", np.inf, 0.0, False, r.site.name, detail) for r in some]
        return self._sites(scope, emitted, {**feeds, **dict(zip(wanted, found, strict=True))})

    def _site_tensors(self, scope: Scope) -> list[str]:
        found: list[str] = []
        initializers = {t.name for t in scope.prepared.base.graph.initializer}
        given = {i.name for i in scope.prepared.base.graph.input} - initializers
        # Initializers among these are asked of the runtime, too: their data may be in another file.
        heads: list[str] = []
        for rewrite in scope.rewrites(self.rewrites):
            site = rewrite.site
            heads += [site.query.tensor, site.key.tensor, site.value.tensor]
            found += [site.output]
            found += [t.tensor for t in site.terms] + ([site.sink] if site.sink else [])
            found += [site.query_factor[1]] if site.query_factor is not None else []
            found += [o.tensor for o in rewrite.mask.operands]
        drawn = [n for n in found if n not in initializers]
        return [n for n in dict.fromkeys([*heads, *drawn]) if n not in given]

    def _sites(self, scope: Scope, emitted: onnx.ModelProto, captured: Mapping[str, np.ndarray]) -> list[Comparison]:
        graph = graph_at(emitted, scope.path)
        rewrites = scope.rewrites(self.rewrites)
        writers = {o: n for n in graph.node for o in n.output}
        read = {x.tensor for r in rewrites for x in r.site.terms} | {r.site.sink for r in rewrites}
        read |= {r.site.query_factor[1] for r in rewrites if r.site.query_factor is not None}
        constants = {
            t.name: onnx.numpy_helper.to_array(t)
            for t in graph.initializer
            if t.name.startswith("stof_") and t.data_location != onnx.TensorProto.EXTERNAL
        }
        constants.update(
            {
                t.name: onnx.numpy_helper.to_array(t)
                for t in scope.prepared.base.graph.initializer
                if t.name in read and t.data_location != onnx.TensorProto.EXTERNAL
            }
        )
        known = {**constants, **captured}
        found = []
        for rewrite in rewrites:
            site = rewrite.site
            node = writers[site.output]
            while node.op_type != OP:  # the layout was converted
                node = writers[node.input[0]]
            mask = attributes_of(node).get("mask", "")
            if mask != rewrite.mask.expression.text:
                # Windows longer than any input that is tried show nowhere else.
                detail = f"the node's mask is {mask!r}"
                found.append(Comparison(f"site {site.name!r}", np.inf, 0.0, False, site.name, detail))
                continue
            if site.sink is not None and site.sink in known:  # the emitted graph may reshape it
                place = str(attributes_of(node)["operands"]).split().index("sink")
                known[node.input[3 + place]] = known[site.sink].reshape(-1)
            roles = str(attributes_of(node)["operands"]).split()
            for operand in rewrite.mask.operands:  # likewise
                place = node.input[3 + roles.index(operand.role)]
                if place not in known and operand.tensor in known:
                    laid = operand.laid(known[operand.tensor])
                    known[place] = laid if operand.role == "pad" else laid.astype(np.int64)
            if not all(n in known for n in node.input[3:]):
                continue  # a bias that the emitted graph adds up itself; the outputs tell
            tensors = (site.query.tensor, site.key.tensor, site.value.tensor)
            own = {n: rounded(x, site.dtype) if n in {*tensors, site.output} else x for n, x in known.items()}
            inputs = [*tensors, *node.input[3:]]
            found.append(compare_site(site, node, inputs, own, known[site.output], self.ignore_empty_rows))
        return found


def _absorbs(rewrite: Rewrite) -> bool:
    """Whether large finite numbers may take digits from the scores of a whole row: the mask's own, or a caller's."""
    return rewrite.mask.empty_rows is EmptyRows.ALL or any(t.kind is TermKind.ADD for t in rewrite.mask.by_data)


def _same(model: onnx.ModelProto) -> onnx.ModelProto:
    return model


def _runs(sessions: Sessions, model: onnx.ModelProto, feed: Mapping[str, np.ndarray]) -> bool:
    """Whether the runtime has every node of a model."""
    try:
        sessions.make(model, optimized=False, library=False).run(None, feed)
    except RuntimeFailure:
        return False
    return True


def _widened(feed: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Inputs of a model's fp32 twin."""
    return {n: x.astype(np.float32) if x.dtype.name in ("float16", "bfloat16") else x for n, x in feed.items()}
