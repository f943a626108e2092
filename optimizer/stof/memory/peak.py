# SPDX-License-Identifier: Apache-2.0
"""The peak of activations of a whole graph at some lengths: how much it is, and which tensors make it up."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import onnx

from stof.graph.external_data import all_tensors
from stof.graph.index import all_nodes, describe, producers
from stof.memory.graph_run import Moment
from stof.memory.quadratic import find_quadratic
from stof.memory.run_estimate import MemoryEstimate, weight_bytes
from stof.symbolic import Symbolic

_MOST_TENSORS = 8


@dataclass(frozen=True)
class LiveTensor:
    """One tensor that is alive at the peak.

    Attributes:
        name: its name in the graph.
        shape: by the names of dimensions, ``[batch, 12, sequence, sequence]``.
        bytes: at the lengths of the estimate.
        node: the node that writes it, in words.
        reason: why it is there, as far as the report knows; empty else.
    """

    name: str
    shape: str
    bytes: int
    node: str
    reason: str = ""


@dataclass(frozen=True)
class PeakEstimate:
    """How much memory one run takes.

    Attributes:
        activations: bytes by which the process grows in the run.
        weights: bytes of the model's stored tensors.
        node: the node at which most is alive, in words.
        tensors: the largest ones alive there, the largest first.
        quadratic: tensors whose size grows with the square of a length, the largest first.
    """

    activations: int
    weights: int
    node: str = ""
    tensors: tuple[LiveTensor, ...] = ()
    quadratic: tuple[LiveTensor, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The numbers and tensors by their keys in the report's JSON."""
        return asdict(self)


def estimate_peak(
    model: onnx.ModelProto,
    symbolic: Symbolic,
    sizes: Mapping[str, int],
    batch_names: Collection[str] = (),
    *,
    is_widened: bool = True,
) -> PeakEstimate:
    """Estimates the peak of one run in a session with default options, without running anything.

    Args:
        model: the model; functions have kernels, or were inlined.
        symbolic: facts of its tensors.
        sizes: of its dimensions, by name.
        batch_names: dimensions that are no lengths.
        is_widened: half-precision tensors are computed as fp32, as ONNX Runtime's CPU provider does.

    Raises:
        UnknownSizeError: naming a tensor whose size does not follow from ``sizes``.
    """
    estimate = MemoryEstimate(model, symbolic, is_optimized=True, is_strict=True, is_widened=is_widened)
    tensors = estimate.tensor_sizes(sizes)
    writers = producers(all_nodes(model.graph.node))

    def live(name: str) -> LiveTensor:
        node = describe(writers[name]) if name in writers else ""
        return LiveTensor(name, tensors.text(name), tensors.bytes(name), node)

    highest: Moment | None = None
    for moment in estimate.moments(tensors):
        if highest is None or moment.bytes > highest.bytes:
            highest = moment
    weights = sum(weight_bytes(t, is_widened=False) for t in all_tensors(model))
    if highest is None:
        return PeakEstimate(0, weights)
    largest = sorted(highest.buffers, key=lambda n: -highest.buffers[n])[:_MOST_TENSORS]
    quadratic = [live(n) for n in find_quadratic(model.graph, symbolic, sizes.keys() - set(batch_names))]
    return PeakEstimate(
        estimate.touched(tensors),
        weights,
        describe(highest.node.proto),
        tuple(live(n) for n in largest if highest.buffers[n]),
        tuple(sorted(quadratic, key=lambda t: -t.bytes)),
    )
