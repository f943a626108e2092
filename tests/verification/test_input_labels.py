# SPDX-License-Identifier: Apache-2.0
"""Sizes of inputs in words: every size that ran is named, and no other."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import build
from stof.execution.case import Case, Padding
from stof.verification.input_labels import describe_feeds
from stof.verification.model_inputs import default_inputs

Shape = tuple[int | str | None, ...]


def _value(name: str, shape: Shape | None) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)


def _words(inputs: dict[str, tuple[Shape | None, np.ndarray]]) -> str:
    return describe_feeds(
        [_value(n, shape) for n, (shape, _) in inputs.items()], {n: a for n, (_, a) in inputs.items()}
    )


def _of(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({"ids": (("B", "S"), _of(1, 64)), "mask": (("B", "S"), _of(1, 64))}, "B 1, S 64"),
        ({"ids": ((2, 48), _of(2, 48)), "mask": ((2, 48), _of(2, 48))}, "ids, mask [2, 48]"),
        ({"pixels": (("B", 3, 32, 32), _of(1, 3, 32, 32))}, "B 1, pixels [1, 3, 32, 32]"),
        ({"pixels": (("B", 3, "H", "W"), _of(1, 3, 32, 48))}, "B 1, H 32, W 48"),
        ({"ids": (("B", "S"), _of(1, 1)), "past": (("B", 8, "P", 64), _of(1, 8, 2047, 64))}, "B 1, S 1, P 2047"),
        (
            {f"past.{i}": ((1, 8, 99, 64), _of(1, 8, 99, 64)) for i in range(56)},
            "past.0, past.1 and 54 more [1, 8, 99, 64]",
        ),
        # What a static cache holds is said by numbers.
        ({"cache": ((1, 2, 99, 8), _of(1, 2, 99, 8)), "at": ((1,), np.array([17]))}, "cache [1, 2, 99, 8], at = 17"),
        ({"flag": ((), np.array(True)), "lengths": (("B",), np.array([7], np.int32))}, "B 1, flag = True, lengths = 7"),
        ({"scale": ((), np.array(0.5, np.float32))}, "no inputs"),
        # Names that say nothing: of a fixed size by some exporters, of several sizes by mistake, none at all.
        ({"ids": (("B", "48"), _of(1, 48))}, "B 1, ids [1, 48]"),
        ({"a": (("B", "S"), _of(1, 5)), "b": (("B", "S"), _of(1, 6))}, "B 1, a [1, 5], b [1, 6]"),
        ({"a": ((None, None), _of(3, 5)), "b": (None, _of(2, 2))}, "a [3, 5], b [2, 2]"),
        ({"vector": ((9,), _of(9)), "other": (("N",), _of(4))}, "N 4, vector [9]"),
        ({"ids": (("B", "S"), _of(1, 3)), "speed": ((1,), _of(1))}, "B 1, S 3"),
        ({"empty": (("B", "P"), _of(1, 0))}, "B 1, P 0"),
        ({}, "no inputs"),
    ],
)
def test_sizes_in_words(inputs: dict[str, tuple[Shape | None, np.ndarray]], words: str) -> None:
    assert _words(inputs) == words


def test_an_exporter_that_names_each_length_apart() -> None:
    inputs = {f"past.{i}": (("B", 2, f"past_{i}", 8), _of(1, 2, 30, 8)) for i in range(40)}
    assert _words({"ids": (("B", "S"), _of(1, 4)), **inputs}) == "B 1, S 4, past_0, past_1 and 38 more 30"


def test_a_label_of_many_inputs_is_short() -> None:
    inputs = {f"x{i}": ((1, i + 1), _of(1, i + 1)) for i in range(100)}
    assert _words(inputs).endswith("x5 [1, 6], 94 others")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("narrow/bert.dynamo.sdpa", "batch 2, sequence 53, padded left"),
        ("zoo/qwen3-fixed.dynamo.sdpa", "input_ids, attention_mask [2, 48], padded left"),
        ("zoo/llama-cached.dynamo.sdpa", "batch 2, sequence 53, total 80, past 27, padded left"),
        ("zoo/whisper.dynamo.sdpa", "batch 2, target 53, input_features [2, 16, 100], padded left"),
        ("zoo/vit-features.optimum.sdpa", "batch_size 2, num_channels 3, height 48, width 48, padded left"),
    ],
)
def test_inputs_of_verification_have_the_names_of_the_model(name: str, words: str) -> None:
    """A "length 53" of an image model, or of fixed sizes, was a length that no input has."""
    inputs = default_inputs(build.load_graph(name))
    named = inputs.name_sizes(Case(2, 53, Padding.LEFT))
    assert str(named) == words
    assert named == Case(2, 53, Padding.LEFT)
    assert (
        str(replace(named, batch=1)) == "batch 1, length 53, padded left"
    )  # what was said of other sizes counts no more
    assert str(inputs.name_sizes(Case(2, 53, Padding.LEFT, source="a.npz"))) == "inputs a.npz"
