# SPDX-License-Identifier: Apache-2.0
"""Schemes, their encoding and the moves between them."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stof.fusion.search.space import SchemeSpace, compete, decode, encode, expand, longest_scheme, seize, unfused_scheme


@given(st.integers(1, 14).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, 2 ** (n - 1) - 1))))
def test_bits_and_segments(drawn: tuple[int, int]) -> None:
    count, half = drawn
    scheme = decode(half << 1, count)
    assert encode(scheme) == half << 1
    assert [s for s, _ in scheme] == [0, *(e for _, e in scheme[:-1])]
    assert scheme[-1][1] == count


def test_the_encoding_of_stofs_example() -> None:
    """Segments 0 · 1 · 2-6 · 7 · 8-9 · 10-11 · 12 · 13-14 are bits 0 1 00000 1 00 11 0 11."""
    word = "010000010011011"
    scheme = decode(sum(1 << i for i, c in enumerate(word) if c == "1"), len(word))
    assert scheme == ((0, 1), (1, 2), (2, 7), (7, 8), (8, 10), (10, 12), (12, 13), (13, 15))


@pytest.mark.parametrize(("bits", "count"), [(1, 3), (8, 3), (0, 0)])
def test_bits_that_encode_nothing(bits: int, count: int) -> None:
    with pytest.raises(ValueError, match="encodes no scheme"):
        decode(bits, count)


def test_longest_segments_first() -> None:
    """A matmul takes two of three operators, and the third is left alone; the limit of compute-bound operators holds."""
    assert longest_scheme(SchemeSpace("CMMM", lambda s: s[0] > 0 or s[1] <= 3)) == ((0, 3), (3, 4))
    assert longest_scheme(SchemeSpace("MMMM", lambda _: True)) == ((0, 4),)
    assert longest_scheme(SchemeSpace("CMCMCM", lambda _: True)) == ((0, 4), (4, 6))
    assert longest_scheme(SchemeSpace("CMM", lambda _: False)) == unfused_scheme(3)


def test_every_scheme_once() -> None:
    space = SchemeSpace("MMMMM", lambda _: True)
    schemes = list(space.schemes())
    assert len(schemes) == len(set(schemes)) == space.count() == 16
    assert {encode(s) for s in schemes} == {b << 1 for b in range(16)}


def test_at_most_two_compute_bound_operators() -> None:
    space = SchemeSpace("CMCMC", lambda _: True)
    assert space.is_valid((0, 4))
    assert not space.is_valid((0, 5))
    assert all(sum("CMCMC"[a:b].count("C") for a, b in [s]) <= 2 for scheme in space.schemes() for s in scheme)


def test_moves() -> None:
    space = SchemeSpace("CMMMC", lambda _: True)
    start = ((0, 1), (1, 4), (4, 5))
    assert set(seize(space, start)) == {((0, 2), (2, 4), (4, 5)), ((0, 1), (1, 3), (3, 5))}
    assert set(expand(space, start)) == {((0, 4), (4, 5)), ((0, 1), (1, 5)), ((0, 5),)}
    wanted = ((0, 2), (2, 3), (3, 5))
    assert set(compete(space, wanted)) == {((0, 3), (3, 5)), ((0, 2), (2, 5))}
    two = SchemeSpace("CCMC", lambda _: True)
    assert set(compete(two, ((0, 2), (2, 3), (3, 4)))) == {((0, 2), (2, 4))}  # the one with a single one gets it


def test_every_scheme_is_reached_from_the_unfused_one() -> None:
    """Even where only long segments are available."""
    space = SchemeSpace("MMMMMM", lambda s: s[1] - s[0] in (3, 6))
    seen = {unfused_scheme(6)}
    pending = list(seen)
    while pending:
        for other in expand(space, pending.pop()):
            if other not in seen:
                seen.add(other)
                pending.append(other)
    assert seen == set(space.schemes())


def test_settings() -> None:
    space = SchemeSpace("MM", lambda _: True, lambda _: ((1, 2), (3, 4, 5)))
    assert space.settings_of((0, 1)) == [()]
    assert space.settings_of((0, 2)) == list(itertools.product((1, 2), (3, 4, 5)))
