# SPDX-License-Identifier: Apache-2.0
"""Narrows what inputs are drawn from after ONNX Runtime has refused some."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping

import numpy as np
import onnx

from stof.errors import UnsupportedError
from stof.execution.case import Case
from stof.execution.input_uses import InputUse, find_inputs_behind
from stof.execution.inputs import InputMaker
from stof.execution.run_failure import RunFailure, parse_failure
from stof.graph.index import GraphIndex, node_tensors
from stof.symbolic.algebra.sizes import evaluate

_INDEXED = (InputUse.SLOT, InputUse.INDEX)


class InputNarrower:
    """Changes how an :class:`InputMaker` draws, going by failed runs.

    Args:
        maker: draws the inputs.
        most: how often it may change.
    """

    def __init__(self, maker: InputMaker, most: int = 8) -> None:
        self._maker = maker
        self._left = most
        self._numbers_tried: dict[str, int] = {}
        self._last_message = ""

    def narrow(self, model: onnx.ModelProto, message: str, case: Case, feed: Mapping[str, np.ndarray]) -> bool:
        """Changes what is drawn, and says whether anything was changed.

        Args:
            model: the one that did not run.
            message: ONNX Runtime's.
            case: the sizes of the inputs.
            feed: the inputs.
        """
        failure = parse_failure(message)
        if self._left <= 0 or failure.is_of_capacity:  # no number is wrong, and other batches may have fewer tokens
            return False
        self._left -= 1
        index = GraphIndex(model.graph)
        nodes = self._find_nodes(model.graph, failure, self._maker.sizes(case))
        names = self._find_integers(index, nodes, feed)
        # The same number again: it does not come from these inputs.
        is_repeated, self._last_message = message == self._last_message, message
        return (
            self._maker.dimensions.fit_slices(case)
            or (failure.is_of_values and not is_repeated and self._narrow_ranges(failure, names, feed))
            or self._narrow_sizes(failure, case)
            or self._try_numbers(names or self._find_integers(index, model.graph.node, feed), case)
        )

    def _find_integers(
        self, index: GraphIndex, nodes: Iterable[onnx.NodeProto], feed: Mapping[str, np.ndarray]
    ) -> list[str]:
        """The integer inputs behind nodes whose numbers are free: masks and numbers of keys are not."""
        maker = self._maker
        masks = maker.pads | set(maker.switches) | maker.counts
        candidates = {n for n, x in feed.items() if x.dtype.kind in "iu" and x.size and n not in masks}
        tensors = frozenset(t for node in nodes for t in node_tensors(node))
        return sorted(find_inputs_behind(index, tensors, candidates))

    def _find_nodes(
        self, graph: onnx.GraphProto, failure: RunFailure, sizes: Mapping[str, int]
    ) -> list[onnx.NodeProto]:
        """The nodes that a failure may be of; subgraphs count as their node."""
        named = [n for n in graph.node if failure.node and n.name == failure.node]
        alike = named or [n for n in graph.node if n.op_type == failure.op]
        if failure.low is None or failure.high is None or failure.low != -failure.high - 1:
            return alike
        # Of nodes without a name, those whose table has as many rows as the message says.
        return [n for n in alike if failure.high + 1 in self._table_sizes(n, sizes)] or alike

    def _table_sizes(self, node: onnx.NodeProto, sizes: Mapping[str, int]) -> set[int]:
        table_sizes = set()
        for dim in self._maker.symbolic.shape(node.input[0]) or ():
            with contextlib.suppress(UnsupportedError, ZeroDivisionError):
                table_sizes.add(evaluate(dim, sizes))
        return table_sizes

    def _narrow_ranges(self, failure: RunFailure, names: list[str], feed: Mapping[str, np.ndarray]) -> bool:
        """Shrinks the ranges of the inputs that hold the number at fault, or lead to it."""
        holders = [n for n in names if failure.value is not None and failure.value in feed[n]]
        changed = False
        for name in holders or names:
            uses = [b.use for b in self._maker.uses.bounds(name)]
            if not holders and uses and not any(use in _INDEXED or use is InputUse.LENGTH for use in uses):
                continue
            narrowed = _shrink(failure, feed[name], holds_value=bool(holders))
            if narrowed is not None and narrowed != self._maker.narrowed.get(name):
                self._maker.narrowed[name] = narrowed
                self._maker.numbers.pop(name, None)
                changed = True
        return changed

    def _narrow_sizes(self, failure: RunFailure, case: Case) -> bool:
        """Makes dimensions as large as what they have to agree with, or small enough for a table of positions."""
        dimensions = self._maker.dimensions
        sizes = self._maker.sizes(case)
        free = {n: size for n, size in sizes.items() if n not in dimensions.batch_names and n not in dict(case.other)}
        for one, other in failure.unequal:
            for actual, wanted in sorted([(one, other), (other, one)], reverse=True):
                names = [n for n, size in free.items() if size == actual]
                if names and actual > wanted:  # shorter cases stay as they are
                    dimensions.most |= dict.fromkeys(names, wanted)
                elif names:
                    dimensions.fixed |= dict.fromkeys(names, wanted)
                if names:
                    return True
        if self._narrow_rows(failure, case):
            return True
        if failure.high is not None and failure.value is not None and failure.value > failure.high >= 0:
            names = [n for n, size in free.items() if size > failure.high + 1]
            dimensions.most |= dict.fromkeys(names, failure.high + 1)
            return bool(names)
        return False

    def _narrow_rows(self, failure: RunFailure, case: Case) -> bool:
        """Makes a batch as large as a size that was stored for it: an exporter has written the rows of its sample."""
        dimensions = self._maker.dimensions
        names = [n for n in sorted(dimensions.batch_names) if n not in dict(case.other)]
        sizes = self._maker.sizes(case)
        rows = {sizes[n] for n in names if n in sizes}
        if len(rows) != 1:
            return False
        (drawn,) = rows
        wanted = [other for pair in failure.unequal for one, other in (pair, pair[::-1]) if one == drawn]
        wanted += [drawn * after // before for before, after in failure.counts if before and not drawn * after % before]
        stored = next((n for n in wanted if n >= 1 and n != drawn), None)
        dimensions.fixed |= {} if stored is None else dict.fromkeys(names, stored)
        return stored is not None

    def _try_numbers(self, names: list[str], case: Case) -> bool:
        """Other numbers for inputs of which the graph says nothing: none, one, as many as positions or rows."""
        numbers = list(dict.fromkeys((0, 1, case.length, case.batch)))
        changed = False
        for name in names:
            index = self._numbers_tried.get(name, 0)
            if index < len(numbers) and not any(b.use in _INDEXED for b in self._maker.uses.bounds(name)):
                self._numbers_tried[name] = index + 1
                self._maker.numbers[name] = numbers[index]
                changed = True
        return changed


def _shrink(failure: RunFailure, values: np.ndarray, holds_value: bool) -> tuple[int, int] | None:
    """The range that is left of an input's values."""
    least, most = int(values.min()), int(values.max())
    value, low, high = failure.value, failure.low, failure.high
    if value is not None and high is not None and value > high:
        # Beside another number the excess is the same in both; what is multiplied is not that simple.
        excess = value - high
        ends = least, high if holds_value else most - excess if most - excess >= least else most // 2
    elif value is not None and low is not None and value < low:
        ends = (low if holds_value else least + low - value), most
    elif high is not None and most > high:
        ends = least, high
    elif value is not None and holds_value and value > 0:
        ends = least, value - 1 if value == least else max(least, value // 2)
    elif most > least or most > 0:
        ends = min(least, most // 2), most // 2
    else:
        return None
    return max(0, min(ends)), max(0, ends[1])
