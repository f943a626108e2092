# SPDX-License-Identifier: Apache-2.0
"""Inputs of which known keys decide, so that what a run-time mask leaves out changes no digit that is compared."""

from __future__ import annotations

import math

import numpy as np

BLOCK = 128  # keys, of choose-blocks
GAP = 24.0  # nats by which the scores of keys that decide are above those of others
# stof's thresholds, by the attribute of its operator.
SKIP_SCORES = {"skip_threshold": 0.1}
CHOOSE_BLOCKS = {"block_threshold": 2.0**-12}


def lift(head_size: int, gap: float = GAP) -> float:
    """What channel 0 of queries, and of the keys that decide, has to be; 0 in other keys.

    Args:
        head_size: of the queries and keys.
        gap: how far the scores of other keys shall be below, in nats.
    """
    return float(np.float32(math.sqrt(gap * math.sqrt(head_size))))
