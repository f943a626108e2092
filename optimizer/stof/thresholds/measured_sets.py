# SPDX-License-Identifier: Apache-2.0
"""What thresholds are calibrated and measured on: ``--prompts`` or ``--inputs``, of which a part is held out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import onnx

from stof.errors import ArgumentError
from stof.execution.given_inputs import GivenFeed
from stof.execution.inputs import InputMaker
from stof.prompt_runs.feeds import make_prompt_feed
from stof.prompts.files import PromptSet
from stof.prompts.loss import LOGITS, has_logits
from stof.thresholds.cosines import CosineMeter
from stof.thresholds.runs import KlMeter, Meter

LEAST_KEYS = 1024  # below which a row group has few key tiles, of which hardly one is skipped
_MOST_SETS = 8  # that thresholds are calibrated on
_FLOATS = frozenset(
    {onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16, onnx.TensorProto.DOUBLE}
)


@dataclass(frozen=True, eq=False)
class MeasuredSets:
    """Sets of inputs, and how outputs on them are compared.

    Attributes:
        source: where they come from: "--prompts held_out.npz".
        kind: "prompt" or "set", in the singular.
        count: how many there are.
        lengths: keys of each; empty: not known, since the model has no input of integers [B, S] with any S.
        outputs: those that are compared.
        prompts: token ids of each, of ``--prompts``; empty: they are sets of ``inputs``.
        inputs: arrays by name, of ``--inputs``.
    """

    source: str
    kind: str
    count: int
    lengths: tuple[int, ...]
    outputs: tuple[str, ...]
    prompts: tuple[np.ndarray, ...] = ()
    inputs: tuple[Mapping[str, np.ndarray], ...] = ()

    def split(self) -> tuple[list[int], list[int]]:
        """The sets that calibrate, at most 8, and those held out: alternately, the longest first. A single one is both."""
        every = sorted(range(self.count), key=lambda i: -self.lengths[i]) if self.lengths else list(range(self.count))
        return every[::2][:_MOST_SETS], every[1::2] or every

    def feeds(self, maker: InputMaker, some: Sequence[int]) -> list[Callable[[], Mapping[str, np.ndarray]]]:
        """Functions that give some of the sets."""
        if self.prompts:
            return [partial(make_prompt_feed, maker, self.prompts[i]) for i in some]
        return [partial(dict, self.inputs[i]) for i in some]

    def prompt_set(self, some: Sequence[int]) -> PromptSet:
        """Some of the prompts."""
        return PromptSet(self.describe(some), tuple(self.prompts[i] for i in some))

    def new_meter(self) -> Meter:
        """Compares outputs on them."""
        return KlMeter() if self.prompts else CosineMeter(self.outputs)

    def describe(self, some: Sequence[int]) -> str:
        """Some of the sets, for people."""
        count = "" if len(some) == self.count else f"{len(some)} of "
        return f"{count}{self.count} {self.kind}{'' if self.count == 1 else 's'} of {self.source}"


def find_sets(model: onnx.ModelProto, prompts: PromptSet | None, given: Sequence[GivenFeed]) -> MeasuredSets | None:
    """The prompts, for a model with logits; else the sets of ``--inputs``; None where there are neither.

    Raises:
        ArgumentError: for prompts of a model without logits, where there are no inputs; for inputs of a model without an
            output to compare.
    """
    if prompts is not None and (has_logits(model) or not given):
        if not has_logits(model):
            raise ArgumentError(
                f"{prompts.source} needs a model with output {LOGITS!r}, which this one has not; --inputs FILE measures "
                "the loss by the cosine of any outputs"
            )
        lengths = tuple(len(ids) for ids in prompts.prompts)
        return MeasuredSets(prompts.source, "prompt", len(prompts.prompts), lengths, (LOGITS,), prompts=prompts.prompts)
    if not given:
        return None
    outputs = tuple(o.name for o in model.graph.output if o.type.tensor_type.elem_type in _FLOATS)
    if not outputs:
        raise ArgumentError("the loss is measured on outputs of floating-point numbers, of which the model has none")
    labels = list(dict.fromkeys(feed.label for feed in given))
    lengths = tuple(n for feed in given if (n := _keys_of(model, feed)) is not None)
    inputs = tuple(feed.arrays for feed in given)
    known = lengths if len(lengths) == len(given) else ()
    return MeasuredSets(_name_inputs(labels), "set", len(given), known, outputs, inputs=inputs)


def _name_inputs(labels: Sequence[str]) -> str:
    return f"--inputs {labels[0]}" + (f" and {len(labels) - 1} more" if labels[1:] else "")


def _keys_of(model: onnx.ModelProto, feed: GivenFeed) -> int | None:
    """The longest sequence of a set: that of integers [B, S] where the model takes any S."""
    lengths = []
    for value in model.graph.input:
        array, dims = feed.arrays.get(value.name), value.type.tensor_type.shape.dim
        if array is not None and array.ndim == 2 and array.dtype.kind in "iu" and not dims[1].HasField("dim_value"):
            lengths.append(int(array.shape[1]))
    return max(lengths, default=None)
