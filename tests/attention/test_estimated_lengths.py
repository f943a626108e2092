# SPDX-License-Identifier: Apache-2.0
"""Estimates for masks that read lengths: a prompt of S = T tokens fills an empty cache, whatever the lengths count."""

from __future__ import annotations

import pytest

from stof.attention.decide.cost_cpu import tile_density
from stof.attention.describe.site_problem import SiteProblem
from stof.mask.expression import MaskExpression
from stof.mask.site import AttentionSite, Layout, LiftedMask, Operand, RuntimeOperand

LENGTH = 4096
# mask: one of the same pairs in a prompt
ALIKE = {
    "S + k <= lengths[b] + q": "k <= q",  # keys after the step
    "k <= lengths[b] + q": "k <= q",  # before it
    "k <= lengths[b] + q and pad[b, k]": "k <= q",
    "S + k <= lengths[b] + q and lengths[b] + q <= S + k + 99": "k <= q and q - k <= 99",
    "k + 1 <= lengths[b]": "",
    "k + 1 <= lengths[b] + S": "",
    "k <= q and k + 1 <= lengths[b]": "k <= q",
}


def problem(text: str) -> SiteProblem:
    expression = MaskExpression.parse(text) if text else MaskExpression.parse("True")
    roles = sorted(expression.reads & {"lengths", "pad"})
    operand = Operand("x", Layout.BHSD)
    site = AttentionSite("s", 0, "softmax", operand, operand, operand, "y", Layout.BHSD, 2, 2, 64, 64, 0.125, 1)
    return SiteProblem.of(site, LiftedMask(expression, tuple(RuntimeOperand(r, r) for r in roles)))


@pytest.mark.parametrize("text", ALIKE)
def test_a_prompt(text: str) -> None:
    wanted = tile_density(problem(ALIKE[text]), LENGTH)
    assert tile_density(problem(text), LENGTH) == pytest.approx(wanted)


def test_lengths_that_allow_nothing() -> None:
    """Nothing is known then: all tiles count."""
    assert tile_density(problem("lengths[b] == 3 and k < q"), LENGTH) == 1.0
