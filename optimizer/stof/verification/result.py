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
    equal_infinite: int = 0  # of nonfinite: the same infinity in both

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
    flips: bool = False  # shapes or whole numbers differ, which a rounding may decide
    shapes: str = ""  # both, where they differ
    relative_rms: float | None = None  # of the result of a site: its root mean square error over that of fp64

    def message(self) -> str:
        """The comparison in a message about its failure."""
        return f"{self.what} differs by {self.difference:.3e}, allowed {self.budget:.3e}{self.detail and '; '}{self.detail}"


@dataclass(frozen=True)
class DecidedDifference:
    """A node that makes whole numbers of floats, and decides otherwise in the optimized model.

    Attributes:
        case: the inputs.
        node: its operator and name.
        changed: how many of its elements differ.
        elements: how many there are.
        before: a float before an element that differs, in the original and in the optimized model: the farthest apart.
        difference: the largest one of the floats before it.
        spread: the largest one between runs of the original.
        budget: the largest one that is allowed, to the nearest of these runs.
        runs: how many of these there were.
        explained: whether the original decides the same by such floats, and these differ by what its runs allow.
        comparable: whether runs of the original differ by less than such floats vary.
        outputs: how whole outputs differ after it: their shapes.
    """

    case: str
    node: str
    changed: int
    elements: int
    before: tuple[float, float]
    difference: float
    spread: float
    budget: float
    runs: int
    explained: bool
    comparable: bool
    outputs: tuple[str, ...] = ()

    def to_text(self) -> str:
        """What decides, and the numbers that show whether it may."""
        original, optimized = self.before
        outputs = "".join(f"{words}: " for words in ("; ".join(self.outputs),) if words)
        return (
            f"{outputs}{self.node} decides {self.changed} of {self.elements} elements otherwise: a float before it is "
            f"{optimized:.7g}, the original's {original:.7g}; such floats differ by up to {self.difference:.2e}, between "
            f"{self.runs} runs of the original by up to {self.spread:.2e}"
        )


@dataclass(frozen=True)
class PaddingMove:
    """An output of a model that quantizes dynamically, and how far padding moves it: scales are of all rows, or of real ones.

    Attributes:
        case: the inputs.
        output: its name.
        length: positions of a text with its padding.
        longer: positions with the longer padding.
        moved: how far the original's output moves at most where its padding is that long.
        apart: how far the output without padding is from the original's.
        largest: the largest number of the original's output.
    """

    case: str
    output: str
    length: int
    longer: int
    moved: float
    apart: float
    largest: float


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
        message: what ONNX Runtime says of the original; empty where the other attributes give the reason.
    """

    left_out: dict[str, int]
    inputs: dict[str, str]
    shapes: int
    ran: bool
    message: str = ""

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
        return "; ".join(words) or f"ONNX Runtime says: {self.message}"


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
    decisions: list[DecidedDifference] = field(default_factory=list)  # that the optimized model takes otherwise
    # Where padding is left out of what is quantized dynamically: how far it moves outputs, or why that was not measured.
    padding_moves: list[PaddingMove] = field(default_factory=list)
    padding_not_measured: str = ""
    # Of each of ``cases`` the share of rows that are padding, which is left out; None: not known, or not left out.
    padding_shares: list[float | None] = field(default_factory=list)
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

    def describe_decisions(self) -> list[str]:
        """The decisions that differ, for a report: a summary, and one of which outputs have other shapes, where there is one."""
        if not self.decisions:
            return []
        ranked = sorted(self.decisions, key=lambda d: (d.explained, not d.outputs, -d.changed))
        same = "all" if all(d.explained for d in ranked) else "not all"
        cases = len({d.case for d in ranked})
        return [
            f"decided by rounding: {len(ranked)} decisions in {cases} cases are not the original's, {same} by floats that differ "
            "as in the original's own runs; outputs were compared with the original's decisions",
            f"          {ranked[0].case}: {ranked[0].to_text()}",
        ]

    def faulty_sites(self) -> list[str]:
        """The sites at fault, by name."""
        return list(dict.fromkeys(c.site for c in self.failures if c.site))
