# SPDX-License-Identifier: Apache-2.0
"""The check by execution: the subgraph that makes a mask is cut out, run at concrete sizes, and compared with the
lifted expression element by element. Edges through Shape carry no data: they are fed.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import onnx
from onnx import TensorProto, helper

from stof.errors import GuardError, UnsupportedError
from stof.graph import GraphIndex
from stof.inputs import Case, Counts, InputMaker, Padding, evaluate
from stof.mask.distance import spread
from stof.mask.lift import LOWEST, forbids_softly
from stof.mask.signature import Signatures
from stof.runtime import LibraryError, Mask
from stof.site import AttentionSite, LiftedMask, MaskTerm, TermKind
from stof.symbolic import Int, Symbolic
from stof.symbolic.facts import dtype_kind
from stof.widen import widen

_LONGEST = 1200
_LARGEST = 4200  # windows up to here are run once above their length, at batch 1: [S, S] of int64 is 140 MB then
_SHORT = (3, 5, 10, 13)
_STORED = 40  # a length that shows what a stored mask looks like
_ENOUGH = 3  # lengths that a mask must be compared at
_VECTOR_TYPES = frozenset({TensorProto.BOOL, TensorProto.UINT8, TensorProto.INT32, TensorProto.INT64})


class _DoesNotRun(UnsupportedError):
    """The subgraph that makes a mask cannot be run at a length."""


def lengths(expression: str) -> list[int]:
    """Lengths that show a mask: below, at and above its constants, odd ones among them."""
    numbers = [int(n) for n in re.findall(r"\d+", expression) if 0 < int(n) <= _LONGEST]
    most = max(numbers, default=16)
    return sorted({2, 7, most, most + 1, min(_LONGEST, most + most // 2 + 3)})


def read_by(
    masks: Iterable[tuple[AttentionSite, LiftedMask]],
) -> tuple[frozenset[str], dict[str, Int], frozenset[str], frozenset[str], frozenset[str]]:
    """The tensors that masks read, for :class:`InputMaker`: as padding, numbers of keys, segments, padding that is true, and
    those of which they look up tables.
    """
    masks = list(masks)
    read = [(o, site.dims[3]) for site, m in masks for o in m.operands]
    forbidding = {o.tensor for _, m in masks for o in m.operands if o.role == "pad" and "not pad[" in m.expression}
    pads = frozenset(o.tensor for o, _ in read if o.role == "pad")
    limits = {o.tensor: keys for o, keys in read if o.role == "lengths"}
    segments = frozenset(o.tensor for o, _ in read) - pads - frozenset(limits)
    looking = {o.tensor for _, m in masks for o in m.operands if re.search(rf"table\d+\[[^]]*{o.role}\[", m.expression)}
    return pads, limits, segments, frozenset(forbidding), frozenset(looking)


def uneven(site: AttentionSite, length: int) -> list[Case]:
    """Cases of cross-attention with more and with fewer queries than keys; none where one length gives the other."""
    rows, columns = (d.atom for d in site.dims[2:])
    if rows is None or columns is None or rows == columns or {rows.kind, columns.kind} != {"size"}:
        return []
    name = str(rows.args[0])
    return [Case(2, length, Padding.RIGHT, ((name, n),)) for n in (2 * length + 5, max(1, length // 2))]


def without_past(site: AttentionSite, length: int) -> list[Case]:
    """A case of no past, where the keys are those of the queries and of a past of a size of its own."""
    rows, columns = site.dims[2:]
    names = {str(a.args[0]) for a in (columns - rows).atoms() if a.kind == "size"}
    names -= {str(a.args[0]) for a in rows.atoms() if a.kind == "size"}
    return [Case(2, length, Padding.LEFT, tuple((n, 0) for n in sorted(names)))] if site.query_offset and names else []


def counted(mask: LiftedMask, batch: int, lengths: Iterable[int]) -> list[Case]:
    """Cases of numbers of keys beyond 1 to all, and of flags that are off; none where the mask reads no such input."""
    if not any(o.role == "lengths" for o in mask.operands):
        return []
    kinds = (Counts.NONE, Counts.NEGATIVE, Counts.BEYOND)
    sides = (Padding.LEFT, Padding.RIGHT)
    return [Case(batch, n, side, counts=kind) for n in lengths for kind in kinds for side in sides]


def tables_of(mask: LiftedMask) -> dict[str, np.ndarray]:
    """The tables of a lifted mask as arrays."""
    return {n: np.frombuffer(data, np.dtype(t)).reshape(shape) for n, t, shape, data in mask.tables}


class MaskChecker:
    """Checks the masks of one model. Results are kept per distinct (terms, expression)."""

    def __init__(self, model: onnx.ModelProto, symbolic: Symbolic) -> None:
        self.model = model
        self.symbolic = symbolic
        self.index = GraphIndex(model.graph)
        self.places = {o: i for i, n in enumerate(model.graph.node) for o in n.output if o}
        self.initializers = {t.name: t for t in model.graph.initializer}
        self.signatures = Signatures(self.index, symbolic)
        self.passed: set[tuple[object, ...]] = set()
        self.rows: set[tuple[object, ...]] = set()  # masks of which rows without a key were compared
        self.relatives: dict[tuple[object, ...], LiftedMask] = {}  # masks, their biases as tables where they can be
        self.assumed: dict[tuple[object, ...], list[str]] = {}  # inputs of which a mask takes 0 and 1 for granted
        self.seen: set[int] = set()  # lengths at which masks were compared

    def key(self, site: AttentionSite, mask: LiftedMask) -> tuple[object, ...]:
        """Equal for sites of the same sizes with the same mask, made of tensors that are computed alike."""
        known = [(t, self.symbolic.value(t.tensor) is not None) for t in site.terms]
        return (
            # What has no value may depend on the whole network before it.
            tuple(
                (
                    t.kind,
                    t.fill,
                    t.scale,
                    t.merged,
                    t.windows,
                    t.groups,
                    self.signatures.of(t.tensor) if own else t.tensor,
                )
                for t, own in known
            ),
            tuple(t in mask.bias for t in site.terms),
            None if mask.relative is None else replace(mask.relative, terms=()),
            mask.expression,
            mask.tables,
            tuple((o.role, o.view, self.signatures.of(o.tensor)) for o in mask.operands),
            None if site.row_guard is None else self.signatures.of(site.row_guard),
            mask.empty_rows,
            site.dims,
            site.query_offset,
            site.nan_guard,
            site.zeroed,
            site.pair_guard,
            site.floored,
            site.sink is not None,
        )

    def check(self, site: AttentionSite, mask: LiftedMask, *, stated: bool = False) -> None:
        """Compares at several sizes.

        Terms that stay a bias may forbid pairs themselves: a lifted mask may leave those to them or forbid them too, a
        stated one must forbid them.

        Raises:
            UnsupportedError: naming the first element at which graph and expression differ.
        """
        # A bias that cannot be evaluated may depend on the whole network before it; it was lifted as one that allows all.
        terms = [t for t in site.terms if stated or t not in mask.bias or self.symbolic.value(t.tensor) is not None]
        key = (*self.key(site, mask), len(terms), stated)
        if (not terms and site.row_guard is None) or key in self.passed:
            return
        # The graph's own numbers count too: a stated mask may leave out a window.
        numbers = {int(n) for n in re.findall(r"\d+", mask.expression)} | self._numbers(site)
        if mask.relative is not None:
            numbers.add(mask.relative.size // 2 + 1)
        chosen = lengths(" ".join(map(str, numbers)))
        batch = 2 if site.row_guard is None else 3  # the third row is padded to one key, which shows the guard at work
        cases = [
            Case(batch, length, (Padding.NONE, Padding.LEFT, Padding.RIGHT)[number % 3])
            for number, length in enumerate(chosen)
        ]
        if mask.operands:  # with a row that is all padding
            cases.append(Case(4, chosen[1], Padding.RIGHT))
        cases += [Case(1, n + 2, Padding.NONE) for n in sorted(numbers) if _LONGEST < n <= _LARGEST]
        # A mask that is cut out of a stored table runs up to the table's length; short ones take the place of longer ones.
        # One that is put together from pieces runs from the length of the pieces on.
        short = [Case(2, length, Padding.RIGHT) for length in _SHORT if length not in chosen]
        compared, limit = 0, _LARGEST + 3
        failure: _DoesNotRun | None = None
        known: set[tuple[object, ...]] = set()
        inputs = {i.name for i in self.model.graph.input} - set(self.initializers)
        of_shapes = not mask.operands and not self._behind(site) & inputs

        def compare(case: Case, seed: int) -> None:
            # Padding may show in a guard of rows, which is not among the masks.
            padding = None if site.row_guard is None else case.padding
            own = (*sorted(self._sizes(case).items()), padding) if of_shapes else ()
            if own and own in known:
                return  # where sizes are numbers, what reads no input is the same again
            self._compare(site, mask, terms, case, seed, stated)
            known.add(own)

        for number, case in enumerate([*cases, *short]):
            if case.length >= limit or (number >= len(cases) and compared >= _ENOUGH):
                continue
            try:
                compare(case, number)
                compared += 1
            except _DoesNotRun as error:
                # Beyond a stored mask nothing runs; below the size of a block, longer inputs may.
                failure, limit = error, case.length if compared else limit
        if failure is not None and compared < _ENOUGH:
            raise failure
        middle = chosen[len(chosen) // 2]
        for case in [*uneven(site, middle), *without_past(site, middle), *counted(mask, 3, (middle,))]:
            # Names that differ may be equal in every valid run, and what else reads numbers of keys may take no others.
            with contextlib.suppress(_DoesNotRun):
                compare(case, 0)
        self.passed.add(key)

    def assumes(self, site: AttentionSite, mask: LiftedMask) -> list[str]:
        """The whole-number inputs behind a site's padding that the graph computes with, so that 0 and 1 alone are padding.

        Found by running the mask on others. Empty where it does what the lifted mask says for these, too.
        """
        key = self.key(site, mask)
        if key not in self.assumed:
            read = InputMaker(self.model, self.symbolic, *read_by([(site, mask)]), index=self.index).pads
            found = sorted(n for n in read if dtype_kind(self.symbolic.dtype(n)) == "i")
            terms = [t for t in site.terms if t not in mask.bias]
            try:
                if found and terms:
                    for number, case in enumerate([Case(2, 29, Padding.NONE), Case(3, 11, Padding.NONE)]):
                        self._compare(site, mask, terms, case, number, stated=False, numbers=frozenset(found))
                        self._multiply(site, mask, case, number, frozenset(found))
                found = []
            except UnsupportedError:
                pass
            self.assumed[key] = found
        return self.assumed[key]

    def _multiply(self, site: AttentionSite, mask: LiftedMask, case: Case, seed: int, numbers: frozenset[str]) -> None:
        """Runs what weights are multiplied with after the softmax on inputs that hold more than 0 and 1.

        Raises:
            UnsupportedError: when it is more than 0 and 1 then.
        """
        guard = site.pair_guard
        if guard is None or guard.fill is not None:
            return
        feeds, sizes = self._draw(site, mask, case, seed)
        (value,) = self._run([guard.tensor], _with_numbers(feeds, numbers, seed), sizes)
        if not np.isin(value, (0, 1)).all():
            raise UnsupportedError(f"{guard.tensor!r} multiplies the attention weights by more than 0 and 1")

    def vectors(self, site: AttentionSite) -> list[str]:
        """The model inputs of rank 2, integer or boolean, on whose data the mask tensors of a site depend."""
        inputs = {i.name for i in self.model.graph.input} - set(self.initializers)
        found = []
        for name in self._behind(site):
            shape = self.symbolic.shape(name) if name in inputs else None
            if shape is not None and len(shape) == 2 and self.symbolic.dtype(name) in _VECTOR_TYPES:
                found.append(name)
        return sorted(found)

    def _float_vectors(self, site: AttentionSite) -> frozenset[str]:
        """Float inputs of rank 2 behind a site's masks: padding, too, and only 0 and 1 show what a mask makes of it."""
        inputs = {i.name for i in self.model.graph.input} - set(self.initializers)
        return frozenset(
            name
            for name in self._behind(site) & inputs
            if (shape := self.symbolic.shape(name)) is not None
            and len(shape) == 2
            and self.symbolic.dtype(name) in LOWEST
        )

    def _numbers(self, site: AttentionSite) -> set[int]:
        """Whole numbers among the constants behind a site's masks."""
        found: set[int] = set()
        for name in self._behind(site):
            array = self.symbolic.constant(name)
            if array is not None and array.size == 1 and array.dtype.kind in "iuf":
                value = float(array.reshape(-1)[0])
                if 0 < abs(value) <= _LARGEST and value == int(value):
                    found.add(abs(int(value)))
            elif array is not None and array.ndim > 1 and array.shape[-1] > 1:
                found.add(min(int(array.shape[-1]), _STORED))  # its windows are no numbers of the graph
        return found

    def _behind(self, site: AttentionSite) -> set[str]:
        """The tensors on whose data the mask tensors of a site depend."""
        seen: set[str] = set()
        pending = [t.tensor for t in site.terms]
        while pending:
            name = pending.pop()
            if name in seen:
                continue
            seen.add(name)
            node = self.index.producer(name)
            if node is not None and node.op_type != "Shape":
                pending.extend(n for n in node.input if n)
        return seen

    def fills(self, site: AttentionSite, mask: LiftedMask) -> list[float]:
        """The values of forbidden entries, of terms that could not be lifted: found by running them once.

        Raises:
            UnsupportedError: when a mask tensor cannot be run.
        """
        chosen = [t for t in site.terms if t.kind is not TermKind.ADD and not t.zeroes]
        found = [-math.inf if t.fill is None else t.fill for t in chosen]
        added = [t for t in site.terms if t.kind is TermKind.ADD]
        if not added:
            return found
        feeds, sizes = self._draw(site, mask, Case(2, lengths(mask.expression)[-1], Padding.LEFT), seed=0)
        for term, value in zip(added, self._values(site, added, feeds, sizes), strict=True):
            kept = _kept(term, value, self.symbolic.dtype(term.tensor))
            found += np.unique(value.astype(np.float64)[~kept] * term.scale).tolist()
        return found

    def added(
        self, site: AttentionSite, mask: LiftedMask, terms: Sequence[MaskTerm], case: Case, seed: int = 0
    ) -> tuple[np.ndarray, np.ndarray, int]:
        """What additive terms add to the scores, fp64 [B, H, S, T], the pairs that the mask allows, and the past length P.

        Raises:
            UnsupportedError: when the terms cannot be run at these sizes.
        """
        feeds, sizes = self._draw(site, mask, case, seed)
        B, H, S, T = _dims(site, sizes)
        total = np.zeros((B, H, S, T))
        feeds = self._with_computed(mask, feeds, sizes)
        allowed, past = self._allowed(site, mask, feeds, (B, H, S, T))
        for term, value in zip(terms, self._values(site, terms, feeds, sizes), strict=True):
            if not _broadcasts(value, total.shape):
                raise _DoesNotRun(f"{term.tensor!r} has shape {value.shape} at {case}, of {total.shape}")
            total += np.broadcast_to(value.astype(np.float64) * term.scale, total.shape)
        return total, allowed, past

    def terms(
        self, site: AttentionSite, mask: LiftedMask, terms: Sequence[MaskTerm], case: Case, seed: int
    ) -> tuple[list[np.ndarray], np.ndarray]:
        """Mask tensors of a site, and the pairs [B, H, S, T] that the lifted mask allows.

        Raises:
            UnsupportedError: when they cannot be run at these sizes.
        """
        feeds, sizes = self._draw(site, mask, case, seed)
        B, H, S, T = _dims(site, sizes)
        allowed, _ = self._allowed(site, mask, self._with_computed(mask, feeds, sizes), (B, H, S, T))
        return self._values(site, terms, feeds, sizes), allowed

    def _allowed(
        self, site: AttentionSite, mask: LiftedMask, feeds: Mapping[str, np.ndarray], shape: tuple[int, int, int, int]
    ) -> tuple[np.ndarray, int]:
        P = shape[3] - shape[2] if site.query_offset else 0
        runtime = {}
        for operand in mask.operands:
            array = operand.laid(feeds[operand.tensor])
            if operand.role == "pad" and array.shape not in ((1, shape[3]), (shape[0], shape[3])):
                raise UnsupportedError(
                    f"the mask reads {operand.tensor!r} as padding of shape {list(array.shape)}, where the operator takes "
                    f"[{shape[0]}, {shape[3]}], one number for each key"
                )
            runtime[operand.role] = (array != 0) if operand.role == "pad" else array.astype(np.int64)
        try:
            return Mask(mask.expression or "True", tables_of(mask)).evaluate(*shape, P, runtime), P
        except LibraryError as error:
            sizes = ", ".join(f"{name} = {n}" for name, n in zip("BHST", shape, strict=True))
            raise UnsupportedError(f"mask {mask.expression!r} cannot be evaluated at {sizes}: {error}") from error

    def _with_computed(
        self, mask: LiftedMask, feeds: dict[str, np.ndarray], sizes: dict[str, int]
    ) -> dict[str, np.ndarray]:
        """The inputs and the operands that the graph computes from them."""
        names = list(dict.fromkeys(o.tensor for o in mask.operands if o.tensor not in feeds))
        return {**feeds, **dict(zip(names, self._run(names, feeds, sizes), strict=True))} if names else feeds

    def _sizes(self, case: Case) -> dict[str, int]:
        try:
            return InputMaker(self.model, self.symbolic, frozenset(), index=self.index).sizes(case)
        except ValueError as error:
            raise UnsupportedError(f"no inputs can be made to check the mask: {error}") from error

    def _draw(
        self, site: AttentionSite, mask: LiftedMask, case: Case, seed: int
    ) -> tuple[dict[str, np.ndarray], dict[str, int]]:
        pads, limits, segments, forbidding, looking = read_by([(site, mask)])
        pads |= self._float_vectors(site)
        maker = InputMaker(self.model, self.symbolic, pads, limits, segments, forbidding, looking, index=self.index)
        try:
            return maker.draw(case, np.random.default_rng(seed)), maker.sizes(case)
        except (ValueError, MemoryError) as error:
            raise UnsupportedError(f"no inputs can be made to check the mask: {error}") from error

    def _compare(
        self,
        site: AttentionSite,
        mask: LiftedMask,
        terms: list[MaskTerm],
        case: Case,
        seed: int,
        stated: bool,
        numbers: frozenset[str] = frozenset(),
    ) -> None:
        self.seen.add(case.length)
        feeds, sizes = self._draw(site, mask, case, seed)
        feeds = _with_numbers(feeds, numbers, seed)
        if not terms:
            raise GuardError(f"{site.row_guard!r} zeroes rows by a mask that depends on more than shapes and inputs")
        scores = _dims(site, sizes)
        values = self._values(site, terms, feeds, sizes)
        for term, value in zip(terms, values, strict=True):
            if not _broadcasts(value, scores):
                raise _DoesNotRun(f"mask tensor {term.tensor!r} has shape {value.shape} at {case}, of {scores}")
        shape = _, _, S, T = scores if site.row_guard or mask.relative else _differing(mask, values, scores)
        wanted = np.ones(shape, bool)
        left = np.ones(shape, bool)  # by terms that stay a bias
        nulled = np.zeros(shape, bool)  # by multiplied masks
        reached = np.ones(shape, bool)  # where no bias is -inf
        for term, value in zip(terms, values, strict=True):
            kept = _kept(term, value, self.symbolic.dtype(term.tensor))
            if term in mask.bias and not stated:
                left &= kept
                # A selection becomes a bias of -inf.
                added = term.kind is TermKind.ADD
                reached &= ~np.isneginf(value.astype(np.float64) * term.scale) if added else kept
                continue
            if term not in mask.bias and not (mask.relative is not None and term in mask.relative.terms):
                _check_no_bias(term, value, kept, case)
            if term.zeroes:
                nulled |= ~kept
            else:
                wanted &= kept
        if (nulled & wanted & left).any():
            raise UnsupportedError(
                f"a mask that scores are multiplied with leaves zeros that nothing forbids at {case}"
            )
        found, P = self._allowed(site, mask, self._with_computed(mask, feeds, sizes), shape)
        if mask.relative is not None:
            total, _, _ = self.added(site, mask, mask.relative.terms, case, seed)
            table = np.broadcast_to(spread(mask.relative, S, T, P), total.shape)
            if not np.allclose(total[found], table[found], rtol=1e-6, atol=0.0):
                raise UnsupportedError(f"the bias is no function of the distance of key and query at {case}")
        if site.row_guard is not None:
            (zeroed,) = self._run([site.row_guard], feeds, sizes)
            # What the operator takes for empty: a bias counts where it is -inf, not where it is merely low.
            empty = ~(found & reached).any(axis=-1, keepdims=True)
            if not np.array_equal(np.broadcast_to(zeroed.astype(bool), empty.shape), empty):
                raise GuardError(f"{site.row_guard!r} zeroes other rows than those without a key, at {case}")
        wrong = (found & ~wanted) | (~found & wanted & left)
        if wrong.any():
            where = tuple(int(i) for i in np.argwhere(wrong)[0])
            raise UnsupportedError(
                f"mask {mask.expression!r} differs from the graph at {case}, scores of {list(scores)}: (b, h, q, k) = {where} is "
                f"{'allowed' if wanted[where] else 'forbidden'} there"
            )

    def _values(
        self, site: AttentionSite, terms: Sequence[MaskTerm], feeds: dict[str, np.ndarray], sizes: dict[str, int]
    ) -> list[np.ndarray]:
        """The tensors of terms as they broadcast to [B, H, S, T]."""
        batch = _dims(site, sizes)[0]
        found = self._run([t.tensor for t in terms], feeds, sizes)
        try:
            return [t.spread(a, batch) for t, a in zip(terms, found, strict=True)]
        except ValueError as error:
            raise _DoesNotRun(f"a mask does not broadcast to the scores: {error}") from error

    def _run(self, tensors: list[str], feeds: dict[str, np.ndarray], sizes: dict[str, int]) -> list[np.ndarray]:
        nodes, given, used = self._cut(tensors, feeds, sizes)
        names = list(dict.fromkeys(tensors))
        inputs = [
            helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
            for n, a in given.items()
        ]
        outputs = [helper.make_tensor_value_info(n, self.symbolic.dtype(n) or TensorProto.FLOAT, None) for n in names]
        graph = helper.make_graph(nodes, "mask", inputs, outputs, [self.initializers[n] for n in used])
        model = helper.make_model(graph, opset_imports=self.model.opset_import, ir_version=self.model.ir_version)
        # The CPU provider has few bfloat16 kernels, and every bfloat16 number is one of fp32.
        model = widen(model, kinds={int(TensorProto.BFLOAT16)})
        given = {n: a.astype(np.float32) if a.dtype.name == "bfloat16" else a for n, a in given.items()}
        try:
            results = _execute(model, names, given)
        except Exception as error:  # whatever the runtime raises: the mask cannot be confirmed
            raise _DoesNotRun(f"the subgraph of mask {names[0]!r} does not run: {error}") from error
        by_name = dict(zip(names, results, strict=True))
        return [by_name[n] for n in tensors]

    def _cut(
        self, tensors: list[str], feeds: dict[str, np.ndarray], sizes: dict[str, int]
    ) -> tuple[list[onnx.NodeProto], dict[str, np.ndarray], list[str]]:
        needed: set[str] = set()
        given: dict[str, np.ndarray] = {}
        used: list[str] = []
        pending = list(tensors)
        while pending:
            name = pending.pop()
            if not name or name in needed:
                continue
            needed.add(name)
            node = self.index.producer(name)
            if node is None:
                if name in feeds:
                    given[name] = feeds[name]
                elif name in self.initializers:
                    used.append(name)
                else:
                    raise UnsupportedError(f"the mask depends on {name!r}, which is neither input nor initializer")
            elif node.op_type == "Shape":
                value = self.symbolic.value(name)
                elements = None if value is None else value.elements()
                if elements is None:
                    raise UnsupportedError(f"the shape of {node.input[0]!r}, on which the mask depends, is unknown")
                given[name] = np.array([evaluate(e, sizes) for e in elements if isinstance(e, Int)], np.int64)
            else:
                pending.extend(node.input)
        places = sorted({self.places[n] for n in needed if n in self.places})
        nodes = [self.model.graph.node[i] for i in places]
        return [n for n in nodes if n.op_type != "Shape"], given, used


def _with_numbers(feeds: dict[str, np.ndarray], numbers: frozenset[str], seed: int) -> dict[str, np.ndarray]:
    """Inputs, some of which hold numbers beside 0 and 1."""
    drawn = dict(feeds)
    for name in numbers & set(feeds):
        low = -2 if feeds[name].dtype.kind == "i" else 0
        drawn[name] = np.random.default_rng(seed).integers(low, 4, feeds[name].shape).astype(feeds[name].dtype)
    return drawn


def _dims(site: AttentionSite, sizes: Mapping[str, int]) -> tuple[int, int, int, int]:
    """The sizes of a site's scores.

    Raises:
        _DoesNotRun: when one of them is negative, as strides and slices of short inputs can make it.
    """
    B, H, S, T = (evaluate(d, sizes) for d in site.dims)
    if min(B, H, S, T) < 0:
        raise _DoesNotRun(f"scores of shape [{B}, {H}, {S}, {T}]")
    return B, H, S, T


def _differing(
    mask: LiftedMask, values: Sequence[np.ndarray], scores: tuple[int, int, int, int]
) -> tuple[int, int, int, int]:
    """The shape of scores with 1 for batches, and for heads, that all have the same mask: what is large may be compared once."""
    read = set(re.findall(r"\w+", mask.expression))
    shapes = [(1, 1, 1, 1)[: 4 - v.ndim] + v.shape for v in values]
    batches = mask.operands or "b" in read or any(s[0] != 1 for s in shapes)
    heads = "h" in read or any(s[1] != 1 for s in shapes)
    B, H, S, T = scores
    return B if batches else min(B, 1), H if heads else min(H, 1), S, T


def _broadcasts(value: np.ndarray, target: tuple[int, ...]) -> bool:
    try:
        return np.broadcast_shapes(value.shape, target) == target
    except ValueError:
        return False


def _execute(model: onnx.ModelProto, names: list[str], feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    try:
        import onnxruntime as ort
    except ImportError:  # with --no-verify it need not be installed
        from onnx.reference import ReferenceEvaluator

        found: list[np.ndarray] = ReferenceEvaluator(model).run(names, feeds)  # type: ignore[assignment]
        return found
    options = ort.SessionOptions()
    options.log_severity_level = 4  # a stored mask is expected to fail beyond its length
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    results: list[np.ndarray] = session.run(names, feeds)
    return results


def _check_no_bias(term: MaskTerm, value: np.ndarray, kept: np.ndarray, case: Case) -> None:
    """What neither forbids nor is 0 would be lost with the tensor."""
    if term.kind is TermKind.ADD and (added := kept & _is_not_zero(value)).any():
        entry = value[added][0]
        raise UnsupportedError(
            f"mask tensor {term.tensor!r} adds {entry} at {case}, expected 0 or a value that forbids"
        )


def _kept(term: MaskTerm, value: np.ndarray, dtype: int) -> np.ndarray:
    if term.kind is TermKind.KEEP:
        return value.astype(bool)
    if term.kind is TermKind.DROP:
        return ~value.astype(bool)
    if (ends := _both(value)) is not None:
        allowed: np.ndarray = _allowed_by(term, ends[0], dtype)[ends[1].view(np.uint8)]
        return allowed
    return _allowed_by(term, value, dtype)


def _both(value: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """The two numbers of a tensor that holds no others, as most masks do, and where the second one is."""
    if not value.size:
        return None
    bits = value.view(f"u{value.dtype.itemsize}")
    ends = np.array([bits.min(), bits.max()])
    second = bits == ends[1]
    return (ends.view(value.dtype), second) if (second | (bits == ends[0])).all() else None


def _is_not_zero(value: np.ndarray) -> np.ndarray:
    # NumPy compares numbers in half precision ten times as slowly as their bits, of which the first is the sign.
    found: np.ndarray = (value.view(np.uint16) << 1 if value.dtype == np.float16 else value) != 0
    return found


def _allowed_by(term: MaskTerm, value: np.ndarray, dtype: int) -> np.ndarray:
    """Where numbers that are added leave a pair allowed."""
    scaled = value.astype(np.float64) * term.scale
    limit = -LOWEST.get(dtype, LOWEST[TensorProto.FLOAT]) / 2
    others = value[_is_not_zero(value)]
    soft = bool(others.size) and forbids_softly([float(others.min()), float(others.max())], term.scale)
    kept: np.ndarray = ~((scaled <= limit) | (soft & (scaled < 0)))
    return kept
