# SPDX-License-Identifier: Apache-2.0
"""Whether queries find the one key that matters among many with 8-bit operands: 16,384 keys, and 131,072 with STOF_TEST_ALL=1."""

from __future__ import annotations

import os

import numpy as np
import pytest

from stof.attention.checks.eight_bit_model import FULL_PRECISION, SCORES_ALONE, KeyValueHead, Scheme

ALL = os.environ.get("STOF_TEST_ALL", "0") == "1"
KEYS = 131072 if ALL else 16384
QUERIES, BLOCK, WORDS, SIZE = 256, 64, 16, 64


def found_words(heads: list[KeyValueHead], query: np.ndarray, words: np.ndarray) -> list[np.ndarray]:
    """The word of each query by the output of each head: that with the largest product."""
    found: list[list[np.ndarray]] = [[] for _ in heads]
    for first in range(0, len(query), BLOCK):
        for own, head in zip(found, heads, strict=True):
            own.append((head.attend(query[first : first + BLOCK]) @ words.T).argmax(1))
    return [np.concatenate(own) for own in found]


@pytest.mark.parametrize("has_offset", [False, True])
def test_needles_are_found(has_offset: bool) -> None:
    """Each value is one of 16 words. A query is near its own key, whose weight is a few percent: any kernel misses some."""
    rng = np.random.default_rng(11)
    key = rng.standard_normal((KEYS, SIZE))
    words = rng.standard_normal((WORDS, SIZE))
    of_key = rng.integers(0, WORDS, KEYS)
    needles = rng.choice(KEYS, QUERIES, replace=False)
    # Scores of a needle are strength * sqrt(D) on average, and the strength is the deviation of the others' scores. With this
    # one a needle has as much weight as all others.
    even = np.sqrt(SIZE) - np.sqrt(SIZE - 2 * np.log(KEYS))
    strength = even * rng.uniform(0.6, 1.1, (QUERIES, 1))
    query = strength * key[needles]
    if has_offset:
        key[:, :4] += 30
    wanted = of_key[needles]
    heads = [KeyValueHead.of(key, words[of_key], scheme) for scheme in (FULL_PRECISION, SCORES_ALONE, Scheme())]
    exact, int8, int8_fp8 = (100 * float((x == wanted).mean()) for x in found_words(heads, query, words))
    print(f"{KEYS} keys: exact {exact:.1f} %, int8 {int8:.1f} %, int8_fp8 {int8_fp8:.1f} %")
    assert 50 < exact < 99.5
    assert int8 >= exact - 2
    assert int8_fp8 >= exact - 2
