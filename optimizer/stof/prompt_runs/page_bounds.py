# SPDX-License-Identifier: Apache-2.0
"""Runs of a decoder whose attentions choose pages: it has inputs and outputs for bounds besides those of the original."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import onnx

from stof.cached_attention.site import INPUT_INDEX, OP, OP_INPUTS, OP_OUTPUTS, PAST_BOUNDS, PRESENT_BOUNDS
from stof.execution.session_process import session_environment
from stof.graph.index import DOMAIN
from stof.graph.node_fields import input_of

Feed = Mapping[str, np.ndarray]
_PAST, _PRESENT = OP_INPUTS.index(PAST_BOUNDS), OP_OUTPUTS.index(PRESENT_BOUNDS)


@dataclass(frozen=True)
class BoundsOfLayer:
    """The bounds of one attention: the model's input, its output, and the input with the cache of keys."""

    past: str
    present: str
    past_key: str


def find_bounds(model: onnx.ModelProto) -> tuple[BoundsOfLayer, ...]:
    """The bounds that a model reads and writes, in the order of the graph."""
    return tuple(
        BoundsOfLayer(bounds, node.output[_PRESENT], input_of(node, INPUT_INDEX["past_key"]))
        for node in model.graph.node
        if node.domain == DOMAIN and node.op_type == OP and (bounds := input_of(node, _PAST))
    )


@contextmanager
def choosing_environment(bounds: Sequence[BoundsOfLayer]) -> Iterator[None]:
    """Sessions that are made meanwhile choose pages, whatever this process's environment says."""
    if not bounds:
        yield
        return
    with session_environment(STOF_SKIP_SCORES="1"):
        yield


class RunsModel(Protocol):
    """A session."""

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names."""

    def run(self, outputs: Sequence[str] | None, feeds: Feed) -> list[Any]:
        """The outputs of these names, by default all."""


class BoundsSession:
    """A session whose runs need no bounds: it keeps those of the run before, as its caches' owner would.

    Args:
        session: of a model.
        bounds: that the model reads and writes; empty: none.
    """

    def __init__(self, session: RunsModel, bounds: Sequence[BoundsOfLayer] = ()) -> None:
        self._session = session
        self._bounds = tuple(bounds)
        self._kept: dict[str, np.ndarray] = {}

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names."""
        return self._session.outputs

    def run(self, outputs: Sequence[str], feeds: Feed, *, is_next: bool = False) -> list[Any]:
        """The outputs of these names.

        Args:
            outputs: names.
            feeds: the inputs by name, without bounds.
            is_next: the caches are those that the run before gave; else bounds are not known.
        """
        if not self._bounds:
            return self._session.run(list(outputs), feeds)
        given = dict(self._kept) if is_next else empty_bounds(self._bounds, feeds)
        found = self._session.run([*outputs, *(x.present for x in self._bounds)], {**feeds, **given})
        self._kept = dict(zip((x.past for x in self._bounds), found[len(outputs) :], strict=True))
        return found[: len(outputs)]


def empty_bounds(bounds: Sequence[BoundsOfLayer], feed: Feed) -> dict[str, np.ndarray]:
    """Bounds that are not known: 0 pages [B, G, 0, 2, D] beside the caches of a feed."""
    shapes = {x.past: feed[x.past_key] for x in bounds}
    return {n: np.zeros((*a.shape[:2], 0, 2, a.shape[3]), a.dtype) for n, a in shapes.items()}
