# SPDX-License-Identifier: Apache-2.0
"""What verification found: comparisons, and what each of them covered."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Coverage:
    """How many elements a comparison held against numbers, and what became of the others."""

    compared: int
    nonfinite: int = 0  # NaN or infinite in both
    ignored: int = 0  # of rows without a key that may differ
    undefined: int = 0  # NaN in the original alone
    rows: tuple[int, ...] = ()  # of the batch, in which those are

    @property
    def elements(self) -> int:
        """All of them."""
        return self.compared + self.nonfinite + self.ignored + self.undefined


@dataclass(frozen=True)
class Comparison:
    """One comparison: what, the largest difference, the budget, whether it holds, and what was compared."""

    what: str
    difference: float
    budget: float
    ok: bool
    site: str = ""
    detail: str = ""
    coverage: Coverage = Coverage(0)

    def message(self) -> str:
        """The comparison in a message about its failure."""
        return f"{self.what} differs by {self.difference:.3e}, allowed {self.budget:.3e}{self.detail and '; '}{self.detail}"


@dataclass
class Verification:
    """All comparisons of a run, with the time that they took."""

    comparisons: list[Comparison] = field(default_factory=list)
    seconds: float = 0.0
    complete: bool = True
    widened: bool = False  # a half-precision model, compared as its fp32 twin
    expanded: bool = False  # the runtime refuses the original's fused nodes: it was compared with them expanded
    # Without a faulty site: a smallest set found of sites whose replacement together makes outputs differ, and whether that
    # set suffices (False: the search ended before, and others have to be replaced as well).
    suspects: tuple[str, ...] = ()
    suspects_suffice: bool = True

    @property
    def failures(self) -> list[Comparison]:
        """The comparisons that do not hold."""
        return [c for c in self.comparisons if not c.ok]

    def faulty_sites(self) -> list[str]:
        """The sites at fault, by name."""
        return list(dict.fromkeys(c.site for c in self.failures if c.site))
