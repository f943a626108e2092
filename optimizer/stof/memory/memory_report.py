# SPDX-License-Identifier: Apache-2.0
"""What the report says of memory: the peak of activations before and after, and the tensors that make it up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stof.execution.run_limits import show_bytes
from stof.memory.peak import LiveTensor, PeakEstimate

_MOST_REASONS = 8
_LEAST_SHARE = 0.01  # of the peak, for a tensor to be named


@dataclass(frozen=True)
class MemoryReport:
    """The estimated peak memory, at the lengths in use.

    Attributes:
        sizes: of the inputs' dimensions, by name.
        before: of the original; None: not estimated.
        after: of the result; None: nothing is replaced, or it is not estimated.
        missing: why there is no estimate; empty where there is one.
        limit: bytes that the user allows; 0: any.
    """

    sizes: Mapping[str, int] = field(default_factory=dict)
    before: PeakEstimate | None = None
    after: PeakEstimate | None = None
    missing: str = ""
    limit: int = 0

    @property
    def result(self) -> PeakEstimate | None:
        """The estimate of the model that is written or kept."""
        return self.after or self.before

    @property
    def is_above_limit(self) -> bool:
        """Whether activations and weights take more than the user allows."""
        found = self.result
        return bool(self.limit and found is not None and found.activations + found.weights > self.limit)

    @property
    def headline(self) -> str:
        """One line."""
        found = self.result
        if found is None:
            unchecked = "; --memory-limit was not checked" if self.limit else ""
            return f"memory: not estimated: {self.missing}{unchecked}"
        at = f" at {words}" if (words := self.sizes_words) else ""
        before = f" (before: {show_bytes(self.before.activations)})" if self.after and self.before else ""
        return (
            f"memory: {show_bytes(found.activations)} of activations{at}{before}; weights {show_bytes(found.weights)}"
        )

    @property
    def sizes_words(self) -> str:
        """The sizes of the inputs, by the names of dimensions."""
        return ", ".join(f"{name} {size}" for name, size in self.sizes.items())

    def lines(self) -> list[str]:
        """The headline, the tensors at the peak, and what stays quadratic."""
        return [self.headline, *self.tensor_lines()]

    def tensor_lines(self) -> list[str]:
        """A line for each large tensor alive at the peak, and for each reason why tensors stay quadratic."""
        found = self.result
        if found is None:
            return []
        lines = [f"  at its peak, {found.node}:"] if found.tensors else []
        lines += [f"    {describe_tensor(t)}" for t in large_tensors(found)]
        return lines + [f"  {line}" for line in quadratic_lines(found)]

    def limit_words(self) -> str:
        """Why the model is not written, with the tensors at the peak."""
        found = self.result
        assert found is not None
        tensors = "; ".join([*map(describe_tensor, large_tensors(found)), *quadratic_lines(found)])
        return (
            f"a run takes about {show_bytes(found.activations + found.weights)}, {show_bytes(found.activations)} of "
            f"activations and {show_bytes(found.weights)} of weights, at {self.sizes_words or 'the sizes of the model'}; "
            f"--memory-limit is {show_bytes(self.limit)}, and nothing was written. Alive at the peak: {tensors}"
        )

    def to_json(self) -> dict[str, Any]:
        """Every fact by its key in the report's JSON."""
        return {
            "sizes": dict(self.sizes),
            "before": None if self.before is None else self.before.to_json(),
            "after": None if self.after is None else self.after.to_json(),
            "missing": self.missing,
            "limit": self.limit,
        }


def large_tensors(estimate: PeakEstimate) -> list[LiveTensor]:
    """The tensors at the peak that are worth a line."""
    return [t for t in estimate.tensors if t.bytes >= _LEAST_SHARE * estimate.activations]


def quadratic_lines(estimate: PeakEstimate) -> list[str]:
    """A line for each reason why tensors grow with the square of a length, those of most bytes first."""
    by_reason: dict[str, list[LiveTensor]] = {}
    for tensor in estimate.quadratic:
        by_reason.setdefault(tensor.reason, []).append(tensor)
    lines = []
    for reason, tensors in list(by_reason.items())[:_MOST_REASONS]:
        count = f"{len(tensors)} tensors, the largest " if len(tensors) > 1 else ""
        lines.append(f"quadratic: {count}{describe_tensor(tensors[0])}{f': {reason}' if reason else ''}")
    hidden = len(by_reason) - _MOST_REASONS
    return lines + ([f"quadratic: tensors of {hidden} more sites"] if hidden > 0 else [])


def describe_tensor(tensor: LiveTensor) -> str:
    """A tensor in a few words."""
    return f"{show_bytes(tensor.bytes)} {tensor.shape} of {tensor.node or repr(tensor.name)}"
