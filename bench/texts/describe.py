# SPDX-License-Identifier: Apache-2.0
"""A record of padded texts as text."""

from __future__ import annotations

from typing import Any

from bench.texts.problem import is_absent
from stof.bench.results import Record

_MB = 1e6
_RATIOS = (("ratio", "stof"), ("ratio_sorted", "stof sorted"), ("ratio_captured", "stof captured"))


def describe_record(record: Record) -> list[str]:
    """The point, a line for each candidate, and what stof gains."""
    padding = record["padded_over_real"]
    found = [
        f"{record['model']} {record['precision']}, {record['lengths']}; {record['batches']} batches of {record['rows']}, "
        f"padded/real {padding['arrival']:.2f}, sorted {padding['sorted']:.2f}; {_describe_machine(record['machine'])}"
    ]
    found += [_describe_row(record, name, row) for name, row in record["peers"].items()]
    if "share_of_padded_over_real" in record:
        found.append(f"  unpadding gains {record['share_of_padded_over_real']:.0%} of padded/real")
    if "share_of_padded_over_capacity" in record:
        capacity = record["capacity"]
        found.append(
            f"  captured, unpadding gains {record['share_of_padded_over_capacity']:.0%} of padded/capacity "
            f"({capacity['padded_over_capacity']:.2f} at {capacity['tokens']:,} tokens)"
        )
    for kind, facts in record["files"].items():
        if "fused" in facts and not {"Attention", "MultiHeadAttention"} & facts["fused"].keys():
            found.append(f"  the {kind} optimizer fuses no attention of this model")
        if reasons := facts.get("padded_because"):
            found.append(f"  padding stays: {'; '.join(reasons)}")
    return found


def _describe_machine(machine: dict[str, Any]) -> str:
    if "threads" not in machine:
        return str(machine["device"])
    return (
        f"{machine['threads']} thread(s), FMA {machine['fma_gflops']:.0f} GFLOP/s, read {machine['read_gbps']:.1f} GB/s"
    )


def _describe_row(record: Record, name: str, row: dict[str, Any]) -> str:
    if "us" not in row:
        absent = "absent" if is_absent(name, row) else "missing"
        return f"  {row['label']:36s} {absent}: {row['missing']}"
    text = f"  {row['label']:36s} {row['useful_tokens_per_second']:10,.0f} tokens/s  error {row['error']:.0e}"
    if "kernel_share" in row:
        text += f"  kernels {row['kernel_share']:.0%} of the time"
    elif "kernels_missing" in row:
        text += f"  kernels not profiled: {row['kernels_missing']}"
    for field, label in _RATIOS:
        if name in record.get(field, {}):
            text += f"  {label} {record[field][name]:.2f}x"
    memory = record.get("memory", {}).get(name, {})
    if "peak" in memory:
        text += f"  peak {memory['peak'] / _MB:,.0f} MB, {memory['above'] / _MB:,.0f} of them for the run"
    return text
