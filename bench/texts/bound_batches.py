# SPDX-License-Identifier: Apache-2.0
"""Batches in device memory that a session reads, each by itself or through the static buffers of a captured graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.texts.runtimes import DeviceMemory, Feeds, bind
from bench.texts.text_models import DIMENSIONS

_FIRST_RUNS = 3  # in which a session captures its graph


@dataclass(frozen=True)
class _Bound:
    """A session with the buffers that it reads and writes.

    Attributes:
        session: of the model.
        binding: of the session to the buffers.
        feeds: the inputs by name.
        output: what a run writes.
        unwritten: NaNs of its shape, which stand in it before a run that is checked.
    """

    session: Any
    binding: Any
    feeds: Mapping[str, Any]
    output: Any
    unwritten: Any


def _bind(memory: DeviceMemory, session: Any, feeds: Feeds, output: np.ndarray) -> _Bound:
    placed = {name: memory.place(array) for name, array in feeds.items()}
    written, unwritten = (memory.place(np.full_like(output, np.nan)) for _ in range(2))
    return _Bound(session, bind(memory, session, placed, written), placed, written, unwritten)


class BoundBatches:
    """Batches with inputs and outputs in device memory, one output for each.

    Args:
        memory: where they lie.
        session: of a model that runs batches of any size.
        batches: the inputs of each.
        outputs: the expected shape and type of the output of each.
    """

    def __init__(
        self, memory: DeviceMemory, session: Any, batches: Sequence[Feeds], outputs: Sequence[np.ndarray]
    ) -> None:
        self._memory = memory
        self._bound = [_bind(memory, session, f, o) for f, o in zip(batches, outputs, strict=True)]

    def run(self) -> None:
        """Runs all batches, one behind the other, and waits for them."""
        for bound in self._bound:
            self._memory.run(bound.session, bound.binding)
        self._memory.wait()

    def outputs(self) -> np.ndarray:
        """Runs all batches once; what they give."""
        for bound in self._bound:
            self._memory.copy(bound.unwritten, bound.output)
        self.run()
        return np.concatenate([self._memory.read(bound.output) for bound in self._bound])


class CapturedBatches:
    """Batches that a captured graph runs: one graph for each shape, whose static inputs take a batch at a time.

    A graph is captured with the first batch of its shape, and replayed with all of them.

    Args:
        memory: where they lie.
        path: of the model.
        stof: whether its session has the plugin library.
        batches: the inputs of each.
        outputs: the expected shape and type of the output of each.
    """

    def __init__(
        self,
        memory: DeviceMemory,
        path: Path,
        stof: bool,
        batches: Sequence[Feeds],
        outputs: Sequence[np.ndarray],
    ) -> None:
        self._memory = memory
        self._graphs: dict[tuple[int, ...], _Bound] = {}
        self._batches: list[tuple[_Bound, dict[str, Any]]] = []
        for feeds, output in zip(batches, outputs, strict=True):
            shape = feeds["input_ids"].shape
            if shape not in self._graphs:
                session = memory.session(
                    path, stof=stof, sizes=dict(zip(DIMENSIONS, shape, strict=True)), captures=True
                )
                self._graphs[shape] = _bind(memory, session, feeds, output)
                for _ in range(_FIRST_RUNS):
                    memory.run(session, self._graphs[shape].binding)
                memory.wait()
            self._batches.append((self._graphs[shape], {n: memory.place(a) for n, a in feeds.items()}))

    def run(self) -> None:
        """Copies each batch into the static inputs and replays the graph; waits for all of them."""
        for graph, feeds in self._batches:
            self._queue(graph, feeds)
        self._memory.wait()

    def _queue(self, graph: _Bound, feeds: Mapping[str, Any]) -> None:
        for name, buffer in feeds.items():
            self._memory.copy(buffer, graph.feeds[name])
        self._memory.run(graph.session, graph.binding)

    def outputs(self) -> np.ndarray:
        """Runs all batches once; what they give."""
        found = []
        for graph, feeds in self._batches:
            self._memory.copy(graph.unwritten, graph.output)
            self._queue(graph, feeds)
            found.append(self._memory.read(graph.output))
        return np.concatenate(found)
