# SPDX-License-Identifier: Apache-2.0
"""Where the tokens of a padded batch lie in a tensor, and what a rule says of a node that computes each token by itself."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import onnx

from stof.symbolic import Symbolic
from stof.symbolic.tensor import Shape


@dataclass(frozen=True)
class TokenAxes:
    """The axes of a tensor along which its tokens lie.

    Attributes:
        batch: the axis of sequences; None: the tensor is the same for all of them, or both axes are merged.
        position: the axis of positions; None: the tensor is the same at all of them.
        merged: ``position`` is one axis of batch times positions.
        heads_per_sequence: the axis of sequences is one of batch times so many heads, as torch.nn.MultiheadAttention has it.
        is_position_major: the merged axis is positions times batch, not batch times positions.
    """

    batch: int | None
    position: int | None
    merged: bool = False
    heads_per_sequence: int = 1
    is_position_major: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether each token has elements of its own."""
        return self.merged or (self.batch is not None and self.position is not None)

    @property
    def stays_inside(self) -> bool:
        """Whether only nodes of a region read and write the tensor: it is neither gathered nor scattered."""
        return self.is_position_major or self.heads_per_sequence > 1

    @property
    def axes(self) -> frozenset[int]:
        """All of them."""
        return frozenset(a for a in (self.batch, self.position) if a is not None)

    def moved(self, places: Mapping[int, int]) -> TokenAxes | None:
        """The axes where each goes to a new place; None where one has none."""
        if any(a not in places for a in self.axes):
            return None
        return replace(
            self,
            batch=None if self.batch is None else places[self.batch],
            position=None if self.position is None else places[self.position],
        )

    def in_front(self, rank: int) -> list[int]:
        """The permutation of so many axes that brings them to the front."""
        own = [a for a in (self.batch, self.position) if a is not None]
        return own + [a for a in range(rank) if a not in own]

    def shifted(self, by: int) -> TokenAxes:
        """The axes with ``by`` more axes before them."""
        return replace(
            self,
            batch=None if self.batch is None else self.batch + by,
            position=None if self.position is None else self.position + by,
        )


@dataclass(frozen=True)
class RowWise:
    """What a rule says of a node that computes the result of each token from that token alone.

    Attributes:
        outputs: the axes of the tokens in each result; None: it has none.
        inputs: those in each input, by its index: it is gathered where no unpadded node writes it. Other inputs are the same for
            all tokens.
        shape: the index of an input that holds the shape of the result, and that shape for unpadded tokens; -1: their number.
        ignored: indices of inputs of which the rows of padding do not reach the result, whatever they hold.
    """

    outputs: tuple[TokenAxes | None, ...]
    inputs: Mapping[int, TokenAxes]
    shape: tuple[int, tuple[int, ...]] | None = None
    ignored: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Context:
    """A node with what is known of its inputs.

    Attributes:
        node: the node.
        tokens: the axes of the tokens, by tensor, as far as they are known.
        zero: tensors that are 0 (or false) in all rows of padding.
        true: conditions that hold in all rows of padding.
        symbolic: shapes and constants.
        opset: of the standard domain.
    """

    node: onnx.NodeProto
    tokens: Mapping[str, TokenAxes]
    zero: Collection[str]
    true: Collection[str]
    symbolic: Symbolic
    opset: int

    def axes_of(self, i: int) -> TokenAxes | None:
        """The axes of the tokens in an input; None: it has none."""
        return self.tokens.get(self.node.input[i]) if i < len(self.node.input) else None

    def has(self, i: int) -> bool:
        """Whether the node has an input."""
        return i < len(self.node.input) and bool(self.node.input[i])

    def shape(self, i: int) -> Shape | None:
        """The shape of an input."""
        return self.symbolic.shape(self.node.input[i]) if self.has(i) else None

    def output_shape(self, i: int = 0) -> Shape | None:
        """The shape of a result."""
        return self.symbolic.shape(self.node.output[i])

    def ints(self, i: int) -> list[int] | None:
        """The numbers of a constant input."""
        array = self.symbolic.constant(self.node.input[i]) if self.has(i) else None
        return None if array is None else [int(x) for x in array.reshape(-1)]

    def attribute(self, name: str) -> onnx.AttributeProto | None:
        """An attribute, where the node has it."""
        return next((a for a in self.node.attribute if a.name == name), None)

    def number(self, name: str, default: int) -> int:
        """An integer attribute."""
        found = self.attribute(name)
        return default if found is None else int(found.i)

    def numbers(self, name: str, i: int) -> list[int] | None:
        """Numbers that are an attribute, or in later versions the constant input ``i``; None where they are neither."""
        found = self.attribute(name)
        return list(found.ints) if found is not None else self.ints(i)
