# SPDX-License-Identifier: Apache-2.0
"""Masks as long as the largest of the lengths, and padding behind memory tokens that every query attends."""

from __future__ import annotations

import numpy as np
import pytest
from attention_forms import PLAIN, model, rewrite, run

from stof.mask.site import NoteReason

HEAD = """
    zero = Constant <value = int64 {0}> ()
    one = Constant <value = int64 {1}> ()
    zeros = Constant <value = int64[1] {0}> ()
    ones = Constant <value = int64[1] {1}> ()
    middle = Constant <value = int64[2] {1, 2}> ()
    inf = Constant <value = float {-inf}> ()
    nothing = Constant <value = float {0.0}> ()
"""
CORE = "%kt\ns1 = MatMul (q, kt)\n"
WHERE = CORE + "s2 = Where (w, s1, inf)\np = Softmax (s2)\nout = MatMul (p, v)"
ADD = CORE + "s2 = Add (s1, added)\np = Softmax (s2)\nout = MatMul (p, v)"
LONGEST = """
    longest = ReduceMax <keepdims = 0> (lengths)
    places = Range (zero, longest, one)
    each = Unsqueeze (lengths, ones)
"""

# name: (inputs, body, expression)
OF_LENGTHS = {
    "where": (
        "int64[B] lengths",
        LONGEST + "near = Less (places, each)\nw = Unsqueeze (near, middle)\n" + WHERE,
        "k + 1 <= lengths[b]",
    ),
    "added": (
        "int64[B] lengths",
        LONGEST
        + "far = GreaterOrEqual (places, each)\nw = Unsqueeze (far, middle)\nadded = Where (w, inf, nothing)\n"
        + ADD,
        "k + 1 <= lengths[b]",
    ),
    "int32 lengths, expanded positions": (
        "int32[B] short",
        "lengths = Cast <to = 7> (short)\n"
        + LONGEST
        + "batch = Shape (short)\nwide = Unsqueeze (longest, zeros)\nsize = Concat <axis = 0> (batch, wide)\n"
        "row = Unsqueeze (places, zeros)\nall = Expand (row, size)\nnear = Less (all, each)\nw = Unsqueeze (near, middle)\n"
        + WHERE,
        "k + 1 <= lengths[b]",
    ),
    "with a causal mask": (
        "int64[B] lengths",
        LONGEST + "near = Less (places, each)\nw0 = Unsqueeze (near, middle)\nrows = Unsqueeze (places, ones)\n"
        "causal = LessOrEqual (places, rows)\nw = And (w0, causal)\n" + WHERE,
        "k <= q and k + 1 <= lengths[b]",
    ),
}


@pytest.mark.parametrize("name", OF_LENGTHS)
def test_a_mask_as_long_as_the_largest_length_is_lifted(name: str) -> None:
    inputs, body, expression = OF_LENGTHS[name]
    graph = model(f"{PLAIN}, {inputs}", "float[a,b,c,d] out", HEAD + body)
    result, (made,) = rewrite(graph)
    assert made.mask.expression.text == expression
    assert [n.reason for n in made.mask.notes] == [NoteReason.LONGEST_IS_ALL]
    rng = np.random.default_rng(1)
    numbers = graph.graph.input[3]
    dtype = np.int32 if numbers.name == "short" else np.int64
    for given in ([17, 1, 9], [3, 17, 17]):
        feed = {n: rng.standard_normal((3, 4, 17, 8)).astype(np.float32) for n in "qkv"}
        feed[numbers.name] = np.array(given, dtype)
        for library in (False, True):
            np.testing.assert_allclose(run(result, feed, library=library)[0], run(graph, feed)[0], atol=2e-6)


MEMORY = """
    size_k = Shape (k0)
    batch = Slice (size_k, zeros, ones)
    rest = Constant <value = int64[3] {4, 3, 8}> ()
    size = Concat <axis = 0> (batch, rest)
    single = Constant <value = int64[4] {1, 4, 3, 8}> ()
    token = ConstantOfShape <value = float[1] {0.3}> (single)
    tokens = Expand (token, size)
    k = Concat <axis = 2> (tokens, k0)
    v = Concat <axis = 2> (tokens, v0)
    three = Constant <value = int64[1] {3}> ()
    places = Concat <axis = 0> (batch, three)
"""
JOINED = MEMORY + "always = ConstantOfShape <value = int64[1] {1}> (places)\nfull = Concat <axis = 1> (always, mask)\n"
OWN = "float[B,4,S,8] q, float[B,4,S,8] k0, float[B,4,S,8] v0"
AS_MASK = "w0 = Cast <to = 9> (full)\nw = Unsqueeze (w0, middle)\n" + WHERE

# name: (inputs, body)
OF_MEMORY = {
    "ones before integers": (f"{OWN}, int64[B,S] mask", JOINED + AS_MASK),
    "ones before booleans": (
        f"{OWN}, bool[B,S] mask",
        MEMORY
        + "always = ConstantOfShape <value = bool[1] {1}> (places)\nfull = Concat <axis = 1> (always, mask)\n"
        + AS_MASK,
    ),
    "padded with ones": (
        f"{OWN}, int64[B,S] mask",
        MEMORY + "pads = Constant <value = int64[4] {0, 3, 0, 0}> ()\nfull = Pad (mask, pads, one)\n" + AS_MASK,
    ),
    "added as (1 - mask) * -10000": (
        f"{OWN}, int64[B,S] mask",
        JOINED + "f = Cast <to = 1> (full)\nf4 = Unsqueeze (f, middle)\nunit = Constant <value = float {1.0}> ()\n"
        "many = Constant <value = float {-10000.0}> ()\nrest4 = Sub (unit, f4)\nadded = Mul (rest4, many)\n" + ADD,
    ),
    "tokens of any number": (
        f"{OWN}, float[B,4,M,8] tokens, int64[B,S] mask",
        """size_k = Shape (tokens)
        batch = Slice (size_k, zeros, ones)
        two = Constant <value = int64[1] {2}> ()
        three = Constant <value = int64[1] {3}> ()
        count = Slice (size_k, two, three)
        places = Concat <axis = 0> (batch, count)
        k = Concat <axis = 2> (tokens, k0)
        v = Concat <axis = 2> (tokens, v0)
        always = ConstantOfShape <value = int64[1] {1}> (places)
        full = Concat <axis = 1> (always, mask)
        """
        + AS_MASK,
    ),
}


@pytest.mark.parametrize("name", OF_MEMORY)
def test_padding_behind_memory_tokens_is_read_with_them(name: str) -> None:
    inputs, body = OF_MEMORY[name]
    graph = model(inputs, "float[a,b,c,d] out", HEAD + body)
    result, (made,) = rewrite(graph)
    assert made.mask.expression.text == "pad[b, k]"
    assert [o.tensor for o in made.mask.operands] == ["full"]
    rng = np.random.default_rng(2)
    feed = {n: rng.standard_normal((3, 4, 11, 8)).astype(np.float32) for n in ("q", "k0", "v0")}
    if any(i.name == "tokens" for i in graph.graph.input):
        feed["tokens"] = rng.standard_normal((3, 4, 2, 8)).astype(np.float32)
    mask = rng.random((3, 11)) < 0.6
    mask[1] = False  # only the tokens are left
    feed["mask"] = mask if "bool" in inputs else mask.astype(np.int64)
    for library in (False, True):
        np.testing.assert_allclose(run(result, feed, library=library)[0], run(graph, feed)[0], atol=2e-6)


def test_other_numbers_in_such_padding_are_told() -> None:
    from stof.mask.check.checker import MaskChecker
    from stof.symbolic import Symbolic

    inputs, body = OF_MEMORY["added as (1 - mask) * -10000"]
    graph = model(inputs, "float[a,b,c,d] out", HEAD + body)
    _, (made,) = rewrite(graph)
    assert MaskChecker(graph, Symbolic(graph)).find_binary_inputs(made.site, made.mask) == ["mask"]
