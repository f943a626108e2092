# SPDX-License-Identifier: Apache-2.0
"""What kernels that run over padded copies of packed sequences leave padded."""

from __future__ import annotations

from onnx import helper

from stof.symbolic.algebra.terms import integer
from stof.unpadding.pad_masks import PadMask
from stof.unpadding.padded_copies import find_uncopied
from stof.unpadding.region import UnpaddedRegion


def test_what_padded_copies_do_not_compute_stays_padded_on_cuda() -> None:
    padded = {"mask": "pad[b, k]", "empty_rows": "all", "operands": "pad bias"}
    region = UnpaddedRegion(PadMask("mask"), (integer(1), integer(1)), "ids", {}, frozenset({1}), frozenset({2}))
    for changed, reason in (
        ({}, "has a bias"),
        ({"operands": "pad"}, ""),
        ({"mask": "abs(q - k) <= 8 and pad[b, k]"}, "has a bias"),
        ({"mask": "abs(q - k) <= 8 and pad[b, k]", "empty_rows": "mean"}, ""),
        ({"mask": "abs(q - k) <= 8 and pad[b, k]", "operands": "pad"}, ""),
    ):
        other = helper.make_node("Identity", ["x"], ["y"])
        nodes = [helper.make_node("StofAttention", [], ["z"], f"site{i}", **(padded | changed)) for i in range(2)]
        for order in ([other, *nodes], [other, *reversed(nodes)]):
            found = find_uncopied(helper.make_graph(order, "g", [], []), region)
            assert reason in found
            assert bool(found) == bool(reason)
            assert not found or "'site0'" in found or "'site1'" in found
