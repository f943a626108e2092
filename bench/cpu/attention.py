# SPDX-License-Identifier: Apache-2.0
"""The record of a point of the CPU's attention grids as text."""

from __future__ import annotations

from stof.bench.results import Record


def describe_record(record: Record) -> list[str]:
    """The record as text."""
    machine, density = record["machine"], record["density"]
    found = [
        f"{record['key'][1]}, mask {record['mask']} (elements {density['element']:.1%}, tiles {density['tile']:.1%}), "
        f"{machine['threads']} thread(s); FMA {machine['fma_gflops']:.0f} GFLOP/s, read {machine['read_gbps']:.1f} GB/s"
    ]
    own = record["peers"].get("stof", {}).get("us")
    for row in record["peers"].values():
        if "missing" in row:
            found.append(f"  {row['label']:42s} missing: {row['missing']}")
            continue
        ratio = f"{row['us'] / own:8.2f}x" if own else ""
        found.append(
            f"  {row['label']:42s} {row['us']:12.1f} us  {row['useful_gflops']:7.1f} GFLOP/s  "
            f"{row['roofline']:5.0%} of roof {ratio}  error {row['error']:.0e}"
        )
    return found
