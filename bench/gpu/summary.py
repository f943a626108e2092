# SPDX-License-Identifier: Apache-2.0
"""What a grid amounts to: geometric means over the best peer at each point, the points that lose, the roofline."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from bench.gpu.cases import anchor
from bench.gpu.problem import LONG_ROWS, TILE
from stof.bench.results import Record

OWN = ("stof", "stof-ort", "stof-choose-blocks", "stof-skip-scores", "stof-causal")
FLEX = "torch-flex"
JIT = ("flash-4", "flash-4-blocks", "cudnn-flex")
_LOSS = 0.97
_LONG_ROOF = 60.0  # µs; above it the goal for the fraction of the roofline is 85 %, below 50 %


def best_peer(record: Record) -> tuple[str, float] | None:
    """(name, µs) of the fastest candidate that is not stof."""
    found = [(row["us"], name) for name, row in record["peers"].items() if name not in OWN and "us" in row]
    return (min(found)[1], min(found)[0]) if found else None


def ratio(record: Record, peer: str | None = None) -> float | None:
    """How many times faster stof is than the best peer, or than one of them; None where either is missing."""
    own = record["peers"].get("stof", {}).get("us")
    if peer is None:
        best = best_peer(record)
        other = best[1] if best else None
    else:
        other = record["peers"].get(peer, {}).get("us")
    return other / own if own and other else None


def over_jit(record: Record) -> float | None:
    """How many times faster stof is than the better of FlashAttention 4 and cuDNN's flex attention."""
    own = record["peers"].get("stof", {}).get("us")
    others = [record["peers"][p]["us"] for p in JIT if "us" in record["peers"].get(p, {})]
    return min(others) / own if own and others else None


def regret(record: Record) -> float | None:
    """By how much the selector's choice is slower than the fastest kernel, timed beside it; 0 is the best one."""
    found = record.get("kernels")
    if not found or not found["each"]:
        return None
    return float(found["chosen_us"] / min(found["chosen_us"], *(k["us"] for k in found["each"])) - 1)


def regrets(records: Sequence[Record]) -> list[list[str]]:
    """A row for each head size and number of kernels that the selector could take: points, mean, most, where that was."""
    found = []
    measured = [r for r in records if regret(r) is not None]
    for (D, count), kept in groups(measured, lambda r: (r["shape"]["D"], len(r["kernels"]["each"]))).items():
        worst = max(kept, key=lambda r: regret(r) or 0.0)
        mean = geomean(1 + (regret(r) or 0.0) for r in kept) or 1.0
        found.append(
            [str(D), str(count), str(len(kept)), f"{mean - 1:.1%}", f"{regret(worst) or 0.0:.1%}", name(worst)]
        )
    return found


def dense_tile_ns(record: Record, records: Sequence[Record]) -> tuple[float, str] | None:
    """What a full tile costs the best dense kernel that is not stof's, and which: as timed in turns with the record's own
    kernel, else in this run at the record's length, else at S = 8192.
    """
    shape = record["shape"]
    if "full_tiles" in record:
        us, peer = min((us, peer) for peer, us in record["full_tiles"]["dense_us"].items())
        return us * 1e3 / (shape["B"] * shape["H"] * math.ceil(shape["S"] / TILE) * math.ceil(shape["T"] / TILE)), peer
    for other in records:
        same = all(other["shape"][n] == shape[n] for n in ("S", "T", "D", "dtype"))
        best = best_peer(other) if same and other["mask_name"] == "dense" else None
        if best is not None:
            return best[1] * 1e3 / float(other["density"]["tiles"]), best[0]
    times = record["machine"]["dense_us"].get(f"D{shape['D']} {shape['dtype']}", {})
    found = min(((us, peer) for peer, us in times.items() if peer not in OWN), default=None)
    case = anchor(shape["D"], shape["dtype"])
    return (found[0] * 1e3 / (case.B * case.H * (case.S // TILE) ** 2), found[1]) if found else None


def full_tile_share(record: Record, records: Sequence[Record]) -> tuple[float, str] | None:
    """The rate on tiles over that of the best dense kernel, and which that is.

    None but for masks of full tiles alone at 8192 keys and more.
    """
    own = record.get("full_tiles", {}).get("stof_us") or record["peers"].get("stof", {}).get("us")
    if own is None or record["shape"]["S"] < LONG_ROWS:
        return None
    density, dense = record["density"], dense_tile_ns(record, records)
    if not density["element"] == density["tile"] < 1:
        return None
    return (dense[0] * density["tiles"] * 1e-3 / own, dense[1]) if dense is not None else None


def full_tiles(records: Sequence[Record]) -> list[list[str]]:
    """A row for each mask of full tiles alone at 8192 keys and more: the rate on tiles over that of the best dense kernel."""
    shares = [(record, full_tile_share(record, records)) for record in records]
    return [
        [name(record), f"{record['density']['tile']:.1%}", f"{share[0]:.1%}", share[1]]
        for record, share in shares
        if share is not None
    ]


def full_tile_ranges(records: Sequence[Record]) -> dict[tuple[str, int], tuple[int, float, float]]:
    """By mask and head size: the points of ``full_tiles``, and the least and largest share of the dense rate."""
    shares: dict[tuple[str, int], list[float]] = {}
    for record in records:
        share = full_tile_share(record, records)
        if share is not None:
            shares.setdefault((record["mask_name"], record["shape"]["D"]), []).append(share[0])
    return {at: (len(found), min(found), max(found)) for at, found in shares.items()}


def bits(records: Sequence[Record]) -> list[list[str]]:
    """A row for each mask that has bits in every tile: the time over that without a mask, by turns."""
    timed = [(r, r["bits"]["stof_us"] / r["bits"]["dense_us"]["stof"] - 1) for r in records if "bits" in r]
    return [[name(record), f"{more:.1%}"] for record, more in timed]


BITS_HEAD = ["bits in every tile", "more than without a mask"]
FULL_HEAD = ["full tiles alone", "density", "of the best dense kernel's rate", "which is"]
REGRET_HEAD = ["D", "kernels", "points", "regret, geometric mean", "at most", "where"]


def geomean(values: Iterable[float]) -> float | None:
    """The geometric mean; None of nothing."""
    logs = [math.log(v) for v in values]
    return math.exp(sum(logs) / len(logs)) if logs else None


def _text(value: float | None) -> str:
    return f"{value:.2f}" if value is not None else "–"


def groups(records: Sequence[Record], key: Callable[[Record], Any]) -> dict[Any, list[Record]]:
    """Records by a key, in the order in which keys come."""
    found: dict[Any, list[Record]] = {}
    for record in records:
        found.setdefault(key(record), []).append(record)
    return found


def length_range(record: Record) -> str:
    """The range of lengths for which a goal is stated."""
    T = record["shape"]["T"]
    return "up to 512" if T <= 512 else "1024 and longer"


def problem(record: Record) -> str:
    """The sizes that a mask is timed at, for grids of a few problems."""
    s = record["shape"]
    return f"B{s['B']} H{s['H']} S{s['S']} D{s['D']}"


def row(records: Sequence[Record], extended: bool = False) -> list[str]:
    """Points, geomean and least ratio over the best peer, geomean over FlexAttention, mean and least roofline fraction.

    ``extended``: geomean and least ratio over the better of FlashAttention 4 and cuDNN's flex attention, too.
    """
    over = [r for r in (ratio(x) for x in records) if r is not None]
    flex = [r for r in (ratio(x, FLEX) for x in records) if r is not None]
    roofs = [x["peers"]["stof"]["roofline"] for x in records if "roofline" in x["peers"].get("stof", {})]
    jit = [r for r in (over_jit(x) for x in records) if r is not None]
    return [
        str(len(over)),
        _text(geomean(over)),
        _text(min(over, default=None)),
        _text(geomean(flex)),
        f"{geomean(roofs) or 0:.0%}" if roofs else "–",
        f"{min(roofs):.0%}" if roofs else "–",
        *([_text(geomean(jit)), _text(min(jit, default=None))] if extended else []),
    ]


JIT_HEAD = ["over FA 4, cuDNN flex", "least of it"]
HEAD = ["points", "over the best peer", "least", "over FlexAttention", "of the roofline", "least of it"]


def losses(records: Sequence[Record]) -> list[str]:
    """Points where a peer is faster, worst first."""
    found = []
    for record in records:
        over, best = ratio(record), best_peer(record)
        if over is not None and best is not None and over < 1:
            text = f"{over:.3f} {name(record)}: {record['peers']['stof']['us']:.1f} µs, {best[0]} {best[1]:.1f} µs"
            if "ratios" in record:
                text += f" (runs: {', '.join(f'{r:.3f}' for r in record['ratios'])})"
            found.append((over, text))
    return [text for _, text in sorted(found)]


WORST_HEAD = ["over the best peer", "point", "stof, µs", "best peer", "µs"]


def worst_points(records: Sequence[Record], count: int) -> list[list[str]]:
    """A row for each of the ``count`` points with the least ratio to their best peer, worst first."""
    found = []
    for record in records:
        over, best = ratio(record), best_peer(record)
        if over is not None and best is not None:
            own = record["peers"]["stof"]["us"]
            label = str(record["peers"][best[0]].get("label", best[0]))
            found.append((over, [f"{over:.3f}", name(record), f"{own:.1f}", label, f"{best[1]:.1f}"]))
    return [row for _, row in sorted(found)[:count]]


def name(record: Record) -> str:
    """Mask and shape in words."""
    s = record["shape"]
    heads = f"H{s['H']}" + (f" G{s['G']}" if s["G"] != s["H"] else "")
    sizes = f"S{s['S']}" if s["S"] == s["T"] else f"S{s['S']} T{s['T']}"
    return f"{record['mask_name']} B{s['B']} {heads} {sizes} D{s['D']} {s['dtype']}"


def summary(records: Sequence[Record]) -> list[str]:
    """The whole in words, a part for every grid."""
    found = []
    for grid, kept in groups(records, lambda r: r["grid"]).items():
        extended = any(over_jit(r) is not None for r in kept)
        found.append(f"{grid} grid ({', '.join([*HEAD, *(JIT_HEAD if extended else [])])})")
        parts = {"all": kept}
        parts |= {f"mask {k}": v for k, v in groups(kept, lambda r: r["mask_name"]).items()}
        if grid == "paper":
            parts |= {f"length {k}": v for k, v in groups(kept, length_range).items()}
        elif grid in ("masks", "bits"):
            parts |= groups(kept, problem)
        else:
            parts |= {f"length {k}": v for k, v in groups(kept, lambda r: r["shape"]["T"]).items()}
        found += [f"  {k:24s}" + "".join(f"{cell:>9s}" for cell in row(v, extended)) for k, v in parts.items()]
        long_roofs = [r for r in kept if r["roof_us"] >= _LONG_ROOF and "roofline" in r["peers"].get("stof", {})]
        short = [r for r in kept if r["roof_us"] < _LONG_ROOF and "roofline" in r["peers"].get("stof", {})]
        for text, goal, chosen in (("of 60 µs and more", 0.85, long_roofs), ("below 60 µs", 0.5, short)):
            met = sum(r["peers"]["stof"]["roofline"] >= goal for r in chosen)
            found.append(f"  roofs {text}: {met} of {len(chosen)} points reach {goal:.0%}")
        lost = losses(kept)
        worse = sum(1 for r in kept if (ratio(r) or 1) < _LOSS)
        found.append(f"  {len(lost)} point(s) below 1.0, {worse} of them below {_LOSS}")
        found += [f"    {text}" for text in lost]
        found += [
            f"  regret, {', '.join(f'{h} {c}' for h, c in zip(REGRET_HEAD, r, strict=True))}" for r in regrets(kept)
        ]
        found += [f"  {', '.join(f'{h} {c}' for h, c in zip(FULL_HEAD, r, strict=True))}" for r in full_tiles(kept)]
        found += [f"  {', '.join(f'{h} {c}' for h, c in zip(BITS_HEAD, r, strict=True))}" for r in bits(kept)]
        wrong = [f"{name(r)}: {r['peers']['stof']['missing']}" for r in kept if "missing" in r["peers"].get("stof", {})]
        found += [f"    stof did not run: {text}" for text in wrong]
    return found


def lines(record: Record) -> list[str]:
    """One point, its candidates by their time, in words."""
    density = record["density"]
    found = [
        f"{record['grid']} {name(record)}: elements {density['element']:.2%}, tiles {density['tile']:.2%}, "
        f"roof {record['roof_us']:.1f} us ({record['bound']}), {record['rotated']} sets"
    ]
    own = record["peers"].get("stof", {}).get("us")
    rows = sorted(record["peers"].items(), key=lambda item: item[1].get("us", math.inf))
    for key, one in rows:
        if "us" not in one:
            found.append(f"  {key:17s} missing: {one.get('missing', '')[:110]}")
            continue
        over = f"{one['us'] / own:6.2f}x" if own else ""
        found.append(
            f"  {key:17s} {one['us']:10.2f} us {over} ({one['best_us']:.1f} to {one['worst_us']:.1f}; plain "
            f"{one['plain_us']:.1f}) {one['useful_tflops']:6.1f} TFLOP/s {one['roofline']:4.0%} of roof, "
            f"error {one['error']:.0e}"
        )
    found += [f"  {key:17s} dense, in turns, missing: {one['dense'][:90]}" for key, one in rows if "dense" in one]
    return found
