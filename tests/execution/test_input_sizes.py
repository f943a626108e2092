# SPDX-License-Identifier: Apache-2.0
"""Sizes of inputs go by the lengths of the scores that come of them, and rows by what they cost."""

from __future__ import annotations

import numpy as np
import pytest
from test_input_uses import parse, with_tables

from stof.execution.case import Case, Padding
from stof.execution.inputs import InputMaker
from stof.symbolic import Symbolic
from stof.verification.model_inputs import ModelInputs

# From pixels to scores of one head, with [1, S, 4] in x.
_ATTEND = "t = Transpose <perm = [0, 2, 1]> (x) s = MatMul (x, t) y = Softmax <axis = -1> (s)"
_IMAGES = {
    "each pixel": ("", 1, 1),
    "patches of 4 by 4": ("<float[4, 4, 4, 4] w> { c = Conv <strides = [4, 4]> (image, w)", 4, 16),
    "patches of 16 by 16": ("<float[4, 4, 16, 16] w> { c = Conv <strides = [16, 16]> (image, w)", 16, 256),
}


def image_model(name: str) -> InputMaker:
    conv = _IMAGES[name][0]
    head, _, body = conv.partition(" {") if conv else ("", "", " c = Identity (image)")
    constants = "int64[3] flat = {1, 4, -1}"
    constants = f"{head[:-1]}, {constants}>" if head else f"<{constants}>"
    model = with_tables(
        parse(
            f"(float[1, 4, H, W] image) => (float y) {constants} {{ {body} f = Reshape (c, flat)"
            f" x = Transpose <perm = [0, 2, 1]> (f) {_ATTEND} }}"
        )
    )
    return InputMaker(model, Symbolic(model), frozenset())


@pytest.mark.parametrize("length", [9, 53, 128])
@pytest.mark.parametrize("name", _IMAGES)
def test_images_have_as_many_patches_as_the_case_has_tokens(name: str, length: int) -> None:
    side = _IMAGES[name][1]
    maker = image_model(name)
    sizes = maker.sizes(Case(1, length, Padding.NONE))
    patches = (sizes["H"] // side) * (sizes["W"] // side)
    assert length <= patches <= length + 2 * length**0.5 + 1
    assert maker.draw(Case(1, length, Padding.NONE), np.random.default_rng(0))["image"].shape[2:] == (
        sizes["H"],
        sizes["W"],
    )


@pytest.mark.parametrize("factor", [2, 8])
def test_frames_are_as_many_as_the_case_has_tokens(factor: int) -> None:
    model = with_tables(
        parse(
            f"(float[1, 4, N] audio) => (float y) <float[4, 4, {factor}] w> {{ c = Conv <strides = [{factor}]> (audio, w)"
            f" x = Transpose <perm = [0, 2, 1]> (c) {_ATTEND} }}"
        )
    )
    sizes = InputMaker(model, Symbolic(model), frozenset()).sizes(Case(1, 53, Padding.NONE))
    assert sizes["N"] // factor == 53


def test_the_first_of_many_stages_is_not_far_longer() -> None:
    # Each pixel attends; so do patches of 32 by 32, which alone would ask for 256 by 256 pixels.
    model = with_tables(
        parse(
            f"""(float[1, 4, H, W] image) => (float y, float z) <int64[3] flat = {{1, 4, -1}}, float[4, 4, 32, 32] w> {{
        f = Reshape (image, flat) x = Transpose <perm = [0, 2, 1]> (f) {_ATTEND}
        c = Conv <strides = [32, 32]> (image, w) g = Reshape (c, flat) u = Transpose <perm = [0, 2, 1]> (g)
        v = Transpose <perm = [0, 2, 1]> (u) r = MatMul (u, v) z = Softmax <axis = -1> (r) }}"""
        )
    )
    sizes = InputMaker(model, Symbolic(model), frozenset()).sizes(Case(1, 53, Padding.NONE))
    assert sizes["H"] * sizes["W"] <= 4096
    assert sizes["H"] >= 32


@pytest.mark.parametrize("words", [600, 7000])
def test_the_words_of_a_classifier_are_no_length(words: int) -> None:
    model = with_tables(
        parse(
            f"""(float[B, 4, N] audio) => (float y, float z) <float[4, 4, 8] w, float[4, {words}] v> {{
            c = Conv <strides = [8]> (audio, w) x = Transpose <perm = [0, 2, 1]> (c) {_ATTEND}
            logits = MatMul (x, v) z = Softmax <axis = -1> (logits) }}"""
        )
    )
    assert InputMaker(model, Symbolic(model), frozenset()).sizes(Case(2, 53, Padding.NONE)) == {"B": 2, "N": 8 * 53}


def test_plain_lengths_stay_those_of_the_case() -> None:
    model = with_tables(parse(f"(float[B, S, 4] x) => (float y) {{ {_ATTEND} }}"))
    maker = InputMaker(model, Symbolic(model), frozenset())
    assert maker.sizes(Case(3, 53, Padding.NONE)) == {"B": 3, "S": 53}


def inputs_of(
    graph: str, cases: list[Case], shapes: dict[str, tuple[int, int]] | None = None, **scores: list[tuple[int, ...]]
) -> ModelInputs:
    model = with_tables(parse(graph))
    symbolic = Symbolic(model)
    return ModelInputs(model, symbolic, InputMaker(model, symbolic, frozenset()), lambda _: cases, shapes=shapes or {})


@pytest.mark.parametrize(("length", "rows"), [(64, 4), (1500, 4), (2500, 2)])
def test_many_rows_only_where_scores_are_small(length: int, rows: int) -> None:
    # The length at the scores is fixed: the case's own says nothing about the costs.
    inputs = inputs_of(f"(float[B, {length}, 4] x) => (float y) {{ {_ATTEND} }}", [Case(4, 9, Padding.RIGHT)])
    (case,) = inputs.select_cases(1e9)
    assert case.batch == rows
    assert case.padding is Padding.RIGHT


@pytest.mark.parametrize(("tokens", "rows"), [(1e6, 4), (1300, 2), (700, 1)])
def test_no_more_rows_than_tokens_allow(tokens: float, rows: int) -> None:
    inputs = inputs_of(f"(float[B, 600, 4] x) => (float y) {{ {_ATTEND} }}", [Case(4, 9, Padding.RIGHT)])
    assert [c.batch for c in inputs.select_cases(tokens)] == [rows]


def test_padding_of_every_second_row_keeps_two_rows() -> None:
    inputs = inputs_of(f"(float[B, 600, 4] x) => (float y) {{ {_ATTEND} }}", [Case(2, 9, Padding.LEAST)])
    assert [c.batch for c in inputs.select_cases(10)] == [2]


_USUAL = [Case(2, 53, Padding.LEFT), Case(1, 9, Padding.NONE)]


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        ({"S": (20, 20)}, [(2, 20), (1, 20)]),
        ({"S": (10, 30)}, [(2, 30), (1, 10)]),
        ({"S": (5, 100)}, [(2, 53), (1, 9)]),
        ({"B": (1, 1)}, [(1, 53), (1, 9)]),
        ({"B": (2, 8), "S": (40, 400)}, [(2, 53), (2, 40)]),
        ({"other": (3, 3)}, [(2, 53), (1, 9)]),
    ],
)
def test_sizes_stay_in_the_ranges_in_use(shapes: dict[str, tuple[int, int]], expected: list[tuple[int, int]]) -> None:
    inputs = inputs_of(f"(float[B, S, 4] x) => (float y) {{ {_ATTEND} }}", list(_USUAL), shapes)
    cases = inputs.select_cases(1e6)
    assert [feed["x"].shape[:2] for feed in inputs.draw(cases)] == expected
    for case, (_, length) in zip(cases, expected, strict=True):
        # The report names what differs from the case.
        assert (f"S {length}" in str(case)) == (length != case.length)


def test_one_side_in_use_decides_the_other() -> None:
    maker = image_model("patches of 16 by 16")
    inputs = ModelInputs(
        maker.model, maker.symbolic, maker, lambda _: [Case(1, 53, Padding.NONE)], shapes={"H": (320, 640)}
    )
    (case,) = inputs.select_cases(1e6)
    sizes = maker.sizes(case)
    assert sizes["H"] == 320
    assert (sizes["H"] // 16) * (sizes["W"] // 16) <= 53 + 20


@pytest.mark.parametrize(("added", "count"), [("", 2), (", int64[B, 8] ids", 4), (", bool[B, 8] keep", 4)])
def test_padding_counts_only_where_inputs_have_some(added: str, count: int) -> None:
    paddings = [Case(2, n, p) for n, p in ((53, Padding.LEFT), (9, Padding.RIGHT), (70, Padding.NONE))]
    cases = [*paddings, Case(1, 9, Padding.NONE)]
    graph = f"(float[B, 8, 4] x{added}) => (float y) {{ {_ATTEND} }}"
    assert len(inputs_of(graph, cases).select_cases(1e6)) == count


def test_equal_cases_run_once() -> None:
    inputs = inputs_of(
        f"(float[B, S, 4] x) => (float y) {{ {_ATTEND} }}",
        [Case(1, 53, Padding.NONE), Case(1, 53, Padding.NONE)],
        {"S": (20, 20)},
    )
    assert len(inputs.select_cases(1e6)) == 1
