# SPDX-License-Identifier: Apache-2.0
"""What ONNX Runtime's messages about a failed run say: the node, a number that is out of a range, sizes that differ."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

FEWER_ROWS = "has_fewer_rows_than_tokens"  # in the name of a node that fails where there is no room for all tokens
_NODE = re.compile(r"while running (\w+) node\. Name:'([^']*)'")
_NUMBER = r"(-?\d{1,18})"
_VALUES = re.compile(
    rf"(?:idx ?= ?|indices? ?= ?|index ?= ?|Actual value is |sequence length: |value ?=? ?|k argument \[){_NUMBER}"
)
_RANGE = re.compile(rf"\[\s*{_NUMBER}\s*,\s*{_NUMBER}\s*([\])])")
_LENGTH = re.compile(rf"seq_length ?= ?{_NUMBER}|axis dim value \[{_NUMBER}\]")
_REFUSES_VALUE = re.compile(
    r"out of (?:data )?(?:bounds?|range)|must be (?:with)?in|invalid ind|sequence_lens|sequence length|axis dim value"
    r"|exceeds [^.]*range",
    re.IGNORECASE,
)
_LACKS_MEMORY = re.compile(r"allocate memory|bad.?alloc|too little memory|storage size overflow", re.IGNORECASE)
# What is said of a node for which the provider has no kernel, or ONNX Runtime no operator.
_LACKS_KERNEL = (
    re.compile(r"Could not find an implementation for (?P<op>\w+)\(\d+\) node with name '(?P<node>[^']*)'"),
    re.compile(r"Failed to find kernel for (?:[\w.]+\.)?(?P<op>\w+)\(\d+\) \(node:'(?P<node>[^']*)'"),
    re.compile(r"Fatal error: [\w.]*:(?P<op>\w+)\(-?\d+\) is not a registered function/op"),
    re.compile(r"No Op registered for (?P<op>\w+) with domain_version"),
)
_SHAPES = re.compile(r"\{([\d,]*)\}[^{}]*\{([\d,]*)\}")
_PAIRS = re.compile(rf"(?:other than 1\. |dimensions of |Got: ?){_NUMBER} ?(?:by|and|Expected:?) ?{_NUMBER}")


@dataclass(frozen=True)
class RunFailure:
    """One message, as far as it is understood.

    Attributes:
        op: the operator of the node that failed; empty where none is named.
        node: its name, which may be empty.
        value: the number that is out of range.
        low: the least number that is allowed.
        high: the largest one.
        unequal: pairs of sizes that should be equal.
        counts: pairs of numbers of elements that should be equal: those that there are, and those of a Reshape.
        is_of_values: whether the message is about numbers that an input holds.
        is_of_memory: whether a tensor is too large for the memory.
        lacks_kernel: whether nothing here computes the node, whatever its inputs hold.
        is_of_capacity: whether a model of fixed capacity has no room for so many tokens: other inputs may have fewer.
    """

    op: str = ""
    node: str = ""
    value: int | None = None
    low: int | None = None
    high: int | None = None
    unequal: tuple[tuple[int, int], ...] = ()
    counts: tuple[tuple[int, int], ...] = ()
    is_of_values: bool = False
    is_of_memory: bool = False
    lacks_kernel: bool = False
    is_of_capacity: bool = False

    @property
    def is_of_inputs(self) -> bool:
        """Whether other inputs may run: a node refused its operands, or the model its inputs."""
        return not self.lacks_kernel and bool(self.op or self.unequal or self.is_of_values)


def parse_failure(message: str) -> RunFailure:
    """What a message says; what it does not say, or says in words that are not known, is left out."""
    for pattern in _LACKS_KERNEL:
        if (refusal := pattern.search(message)) is not None:
            named = refusal.groupdict()
            return RunFailure(op=named["op"], node=named.get("node", ""), lacks_kernel=True)
    node = _NODE.search(message)
    words = message[node.end() :] if node else message
    value, ends, length = _VALUES.search(words), _RANGE.search(words), _LENGTH.search(words)
    low, high = (int(ends[1]), int(ends[2]) - (ends[3] == ")")) if ends else (None, None)
    if length:
        low, high = 1, int(length[1] or length[2])
    return RunFailure(
        op=node[1] if node else "",
        node=node[2] if node else "",
        value=int(value[1]) if value else None,
        low=low,
        high=high,
        unequal=_find_unequal_sizes(words),
        counts=_find_unequal_counts(words) if node and node[1] == "Reshape" else (),
        is_of_values=_REFUSES_VALUE.search(words) is not None,
        is_of_memory=_LACKS_MEMORY.search(message) is not None,
        is_of_capacity=node is not None and node[2].endswith(FEWER_ROWS),
    )


def _find_unequal_counts(words: str) -> tuple[tuple[int, int], ...]:
    """The numbers of elements of two shapes without unknown sizes."""
    pairs = []
    for text in _SHAPES.findall(words):
        shapes = [[int(d) for d in one.split(",") if d] for one in text]
        pairs.append((math.prod(shapes[0]), math.prod(shapes[1])))
    return tuple(pair for pair in pairs if pair[0] != pair[1])


def _find_unequal_sizes(words: str) -> tuple[tuple[int, int], ...]:
    pairs = [(int(one), int(other)) for one, other in _PAIRS.findall(words)]
    for one, other in _SHAPES.findall(words):
        left, right = ([int(d) for d in text.split(",") if d] for text in (one, other))
        # Shapes broadcast from their ends.
        pairs += [(a, b) for a, b in zip(left[::-1], right[::-1], strict=False) if a != b and 1 not in (a, b)]
    return tuple(dict.fromkeys(pairs))
