# SPDX-License-Identifier: Apache-2.0
"""What a graph is exported from: a class of transformers, a configuration, inputs, and the exporters that take it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Forms = tuple[tuple[str, str], ...]  # (exporter, attention implementation)
TORCH: Forms = (("dynamo", "eager"), ("dynamo", "sdpa"), ("torchscript", "eager"), ("torchscript", "sdpa"))
ALL: Forms = (*TORCH, ("transformers", "sdpa"))
# Classes without an sdpa implementation.
EAGER: Forms = (("dynamo", "eager"), ("torchscript", "eager"), ("transformers", "eager"))
OPTIMUM: Forms = (("optimum", "sdpa"),)


def without(forms: Forms, *exporters: str) -> Forms:
    """The forms that other exporters write: some fail, each on operators of its own."""
    return tuple(f for f in forms if f[0] not in exporters)


def only(forms: Forms, *exporters: str) -> Forms:
    """The forms that these exporters write."""
    return tuple(f for f in forms if f[0] in exporters)


@dataclass(frozen=True)
class Architecture:
    """A model class, its configuration, what it is fed with (feeds.py), how it is exported, in which type."""

    config: str
    model: str
    settings: dict[str, Any] = field(default_factory=dict)
    inputs: str = "text"
    forms: Forms = ALL
    dtype: str = "float32"
