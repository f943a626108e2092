# SPDX-License-Identifier: Apache-2.0
"""Emissions: the operators that a written model may have. Options, plans and reports name one; ``stof.ops`` has its ops."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Emission:
    """Which operators are written. There is one instance for each.

    Attributes:
        name: in ``--emit``, in plans and in reports.
        needs_library: the written model holds operators of domain ``stof``, which the plugin library runs.
    """

    name: str
    needs_library: bool


STOF = Emission(name="stof", needs_library=True)
STANDARD = Emission(name="standard", needs_library=False)
EMISSIONS: Mapping[str, Emission] = {e.name: e for e in (STOF, STANDARD)}
