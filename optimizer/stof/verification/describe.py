# SPDX-License-Identifier: Apache-2.0
"""What the report says of a verification: what was compared, how far it differs, and what was not compared."""

from __future__ import annotations

from collections.abc import Sequence

from stof.verification.result import Comparison, PartialVerification, Verification

_MAX_LINES = 4


def describe_verification(v: Verification, forms: Sequence[str]) -> list[str]:
    """The lines of a report.

    Args:
        v: the verification.
        forms: in which form outputs were compared that options change.
    """
    sites = [c for c in v.comparisons if c.site and c.comparable]
    outputs = [c for c in v.comparisons if not c.site and c.comparable]
    others = [c for c in v.comparisons if not c.site and not c.comparable]
    alone = [c for c in v.comparisons if c.site and not c.comparable]
    lines = [] if v.partial is None else describe_partial(v.partial)
    if sites:
        worst = max(sites, key=lambda c: c.difference / c.budget if c.budget else 0.0)
        uncompared = f"; no time was left for {v.sites_left} more" if v.sites_left else ""
        lines.append(
            f"verified: {len(sites)} sites against fp64, worst error {worst.difference:.2e} of {worst.budget:.2e} allowed; "
            f"{describe_coverage(sites)}{uncompared}"
        )
    if outputs:
        worst = max(outputs, key=lambda c: c.difference / c.budget if c.budget else 0.0)
        lines.append(
            f"verified: {len(outputs)} outputs against the original, worst difference {worst.difference:.2e} of "
            f"{worst.budget:.2e} allowed ({v.seconds:.1f} s{_describe_end(v)}); {describe_coverage(outputs)}"
        )
        lines += [f"          ({form})" for form in forms]
        lines += _undefined_lines(outputs)
    if alone:
        lines.append(f"compared by the model's outputs alone: {len(alone)} sites; {alone[0].detail}")
    if others:
        worst = max(others, key=lambda c: c.budget)
        lines.append(
            f"not comparable at the model's outputs: {len(others)} outputs, in which the original's own runs differ by as "
            f"much as the numbers vary ({worst.what}: {worst.detail or f'up to {worst.budget / 4:.2e}'})"
        )
    lines += [f"          ({words})" for words in describe_padding(v)]
    lines += v.describe_decisions()
    lines += _skipped_lines(v)
    if v.unread:
        lines.append(f"          ({describe_unread(v)})")
    if v.reduced_inputs:
        lines.append(f"          ({describe_reduced_inputs(v)})")
    lines += [f"          ({words})" for words in describe_how_run(v)]
    return lines


def describe_how_run(v: Verification) -> list[str]:
    """In which form models ran, where not as they are; a sentence each."""
    sentences = []
    if v.quantized:
        sentences.append(
            "dynamically quantized: compared beside the spread of the original's own runs; an argmax or a length that is "
            "decided by rounding may flip"
        )
    if v.sliced:
        sentences.append("to fit the memory, the original's attention ran on slices of its queries")
    if v.expanded:
        sentences.append(
            "ONNX Runtime does not run fused attention nodes of the original: it ran with them expanded to standard nodes"
        )
    if v.widened:
        what = "both" if v.partial is None else "what runs here"
        sentences.append(f"half precision: {what} ran widened to fp32, the operator of each site in its own type")
    return sentences


def describe_padding(v: Verification) -> list[str]:
    """What is known of the padding that is left out; a sentence each."""
    shares = [share for share in v.padding_shares if share is not None]
    if not any(shares):
        return []
    words = f"padding was {min(shares):.0%} to {max(shares):.0%} of the rows of inputs"
    return [words, *_describe_longer_padding(v)]


def _describe_longer_padding(v: Verification) -> list[str]:
    """How far padding moves the outputs of a dynamically quantized original, and how far those without padding are from it."""
    if v.padding_not_measured:
        scales = "scales of dynamic quantization are of real tokens alone"
        return [f"{scales}; how far padding moves outputs was not measured: {v.padding_not_measured}"]
    if not v.padding_moves:
        return []
    worst = max(v.padding_moves, key=lambda m: m.apart / max(m.largest, 1e-30))
    longer = f"padding from {worst.length} to {worst.longer} positions"
    how = longer if worst.longer > worst.length else "other tokens as padding"
    return [
        f"scales of dynamic quantization are of real tokens alone. With {how} the original's {worst.output!r} moves by up to "
        f"{worst.moved:.2e}; without padding it is {worst.apart:.2e} from the original's ({worst.case}; numbers up to "
        f"{worst.largest:.2e})"
    ]


def _describe_end(v: Verification) -> str:
    """What ended a verification early: a limit."""
    if v.complete:
        return ""
    by_memory = any(s.reason.startswith("memory") for s in v.skipped)
    by_time = v.sites_left or any(not s.reason.startswith("memory") for s in v.skipped)
    names = [name for name, holds in (("budget", by_time or not by_memory), ("memory", by_memory)) if holds]
    return f", cut short by the {' and the '.join(names)}"


def _skipped_lines(v: Verification) -> list[str]:
    """Which inputs were not run, and why."""
    if not v.skipped:
        return []
    ran = f"{len(v.cases)} of {len(v.cases) + len(v.skipped)} sets of inputs were compared"
    words = "; ".join(f"{s.case} ({s.reason})" for s in v.skipped[:_MAX_LINES])
    more = "; ..." if len(v.skipped) > _MAX_LINES else ""
    return [f"          {ran}; not {words}{more}"]


def describe_partial(partial: PartialVerification) -> list[str]:
    """What was verified, and what was not, of a result whose original does not run here; a sentence each."""
    how = "it ran here" if partial.ran else "as they follow from its graph: it does not run here, either"
    return [
        f"verified in part: the original does not run here, and no output was compared with it. {partial.reason}",
        f"verified: types and shapes of {partial.shapes} tensors of the optimized model ({how})",
    ]


def describe_unread(v: Verification) -> str:
    """Which outputs were not compared for their types."""
    names = [f"{name!r} of {kind}" for name, kind in list(v.unread.items())[:_MAX_LINES]]
    more = f" and {len(v.unread) - _MAX_LINES} more" if len(v.unread) > _MAX_LINES else ""
    return f"outputs of types of which ONNX Runtime gives no arrays were not compared: {', '.join(names)}{more}"


def describe_reduced_inputs(v: Verification) -> str:
    """Which inputs had other numbers than usual ones, since those make runs too long."""
    factors: dict[float, list[str]] = {}
    for name, factor in v.reduced_inputs.items():
        factors.setdefault(factor, []).append(repr(name))
    words = [
        f"{', '.join(names)} are {f'1/{1 / factor:g} as large' if factor < 1 else f'{factor:g} times as large'}"
        for factor, names in factors.items()
    ]
    return f"numbers of {' and '.join(words)} as usual ones, on which a run of the original takes too long"


def describe_coverage(comparisons: Sequence[Comparison]) -> str:
    """Which elements were compared, and why others were not."""
    coverages = [c.coverage for c in comparisons]
    elements, compared = sum(c.elements for c in coverages), sum(c.compared for c in coverages)
    rows = [(c.sampled_rows, c.all_rows) for c in coverages if c.all_rows]
    elements -= sum(c.left_out for c in coverages)
    sampled = f" of {sum(n for n, _ in rows)} of {sum(m for _, m in rows)} rows of large sites" if rows else ""
    if compared == elements:
        return f"every element{sampled} was compared"
    reasons = {
        "NaN or infinite in both": sum(c.nonfinite for c in coverages),
        "NaN in the original alone": sum(c.undefined for c in coverages),
        "in rows without a key": sum(c.ignored for c in coverages),
        "of padded queries, which alone differ": sum(c.padded for c in coverages),
        "in rows without a token": sum(c.unused for c in coverages),
    }
    words = " and ".join(f"{number} are {reason}" for reason, number in reasons.items() if number)
    return f"of {elements} elements{sampled} {compared} were compared, {words}"


def _undefined_lines(outputs: Sequence[Comparison]) -> list[str]:
    """Where elements are NaN in the original alone."""
    undefined = [c for c in outputs if c.coverage.undefined]
    lines = []
    for c in undefined[:_MAX_LINES]:
        rows = c.coverage.rows
        where = (
            f" in batch row{'s' if len(rows) > 1 else ''} {', '.join(str(r) for r in rows[:_MAX_LINES])}"
            if rows
            else ""
        )
        more = " ..." if len(rows) > _MAX_LINES else ""
        lines.append(f"          {c.what}: {c.coverage.undefined} are NaN in the original alone{where}{more}")
    if len(undefined) > _MAX_LINES:
        lines.append(f"          and {len(undefined) - _MAX_LINES} more outputs")
    return lines
