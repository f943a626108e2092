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
    padded: int = 0  # of queries that are padding, where only these differ
    unused: int = 0  # in rows of a KV cache without a key, and at its sites of padded queries
    left_out: int = 0  # in rows of a large site that are not sampled
    sampled_rows: int = 0  # of a large site: how many rows were compared, of
    all_rows: int = 0  # so many; 0: every row

    @property
    def elements(self) -> int:
        """All of them."""
        return (
            self.compared + self.nonfinite + self.ignored + self.undefined + self.padded + self.unused + self.left_out
        )


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
    comparable: bool = True  # False: runs of the original differ so much that the comparison says nothing

    def message(self) -> str:
        """The comparison in a message about its failure."""
        return f"{self.what} differs by {self.difference:.3e}, allowed {self.budget:.3e}{self.detail and '; '}{self.detail}"


@dataclass(frozen=True)
class SkippedCase:
    """Inputs that were not run, and why: ``memory``, ``time``, or what the runtime said."""

    case: str
    reason: str


@dataclass(frozen=True)
class PartialVerification:
    """What was verified of a result whose original does not run here: sites by themselves, types and shapes.

    Attributes:
        left_out: the operators of the original's nodes that nothing here computes, each with how many there are.
        inputs: inputs of types that cannot be handed to ONNX Runtime, each with its type.
        shapes: how many tensors have the type and the shape of the original's.
        ran: whether the optimized model ran for that; else they follow from its graph.
    """

    left_out: dict[str, int]
    inputs: dict[str, str]
    shapes: int
    ran: bool

    @property
    def reason(self) -> str:
        """Why the original does not run here."""
        words = []
        if self.left_out:
            nodes = ", ".join(f"{count} {name}" for name, count in self.left_out.items())
            words.append(f"ONNX Runtime's CPU provider has no kernel for nodes of it ({nodes})")
        if self.inputs:
            name, kind = next(iter(self.inputs.items()))
            words.append(f"ONNX Runtime's Python interface takes no arrays of {kind}, which {name!r} has")
        return "; ".join(words)


@dataclass
class Verification:
    """All comparisons of a run, with the time that they took."""

    comparisons: list[Comparison] = field(default_factory=list)
    seconds: float = 0.0
    run_seconds: float = 0.0  # that the original takes for the first inputs, without graph optimizations
    complete: bool = True
    widened: bool = False  # a half-precision model, compared as its fp32 twin
    expanded: bool = False  # the runtime refuses the original's fused nodes: it was compared with them expanded
    quantized: bool = False  # the original quantizes dynamically: roundings become steps
    sliced: bool = False  # for less memory, attention of the original ran on slices of its queries
    memory: int = 0  # bytes that the processes might hold together
    cases: list[str] = field(default_factory=list)  # inputs whose outputs were compared
    skipped: list[SkippedCase] = field(default_factory=list)
    sites_left: int = 0  # how many sites no time was left for
    # Inputs whose numbers were drawn smaller, or larger, by a factor: runs on usual ones take too long.
    reduced_inputs: dict[str, float] = field(default_factory=dict)
    unread: dict[str, str] = field(
        default_factory=dict
    )  # outputs of which ONNX Runtime gives no arrays, with their types
    partial: PartialVerification | None = None  # the original does not run here; None: it does
    noise_left_out: bool = False  # outputs differ, and no time was left for runs that tell rounding from faults
    # Without a faulty site: a smallest set found of sites whose replacement together makes outputs differ, and whether that
    # set suffices (False: the search ended before, and others have to be replaced as well).
    suspects: tuple[str, ...] = ()
    suspects_suffice: bool = True

    @property
    def failures(self) -> list[Comparison]:
        """The comparisons that do not hold."""
        return [c for c in self.comparisons if not c.ok]

    @property
    def has_evidence(self) -> bool:
        """Whether something was compared that could have differed: a site, or an output."""
        return any(c.comparable for c in self.comparisons)

    def faulty_sites(self) -> list[str]:
        """The sites at fault, by name."""
        return list(dict.fromkeys(c.site for c in self.failures if c.site))
