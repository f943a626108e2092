# SPDX-License-Identifier: Apache-2.0
"""Whether a chain is worth it: by the user's word, or by what was measured on this device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stof.chains.apply import Judge
from stof.chains.emit import Key
from stof.chains.region import Chain
from stof.options import Options


def judge_of(options: Options, library: Mapping[str, Any]) -> Judge | None:
    """The judge that options ask for; None where no chain is looked for."""
    if options.chains == "on":
        return _always
    return None


def _always(chain: Chain, key: Key) -> tuple[str, float | None]:
    return "", None
