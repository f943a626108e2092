# SPDX-License-Identifier: Apache-2.0
"""An analytical estimate for attention on a CUDA device: the target ``cuda``.

Times are microseconds at batch 1. Rates of the kernels are measured on an H100 (docs/design/attention-cuda.md) and, for
devices that were not at hand, that share of their rated figures which the H100 reaches with the kernel for compute
capability 8.0.
"""

from __future__ import annotations

from dataclasses import dataclass

from stof.attention.decide.cost_cpu import GainEstimate, tile_density
from stof.attention.describe.site_problem import SiteProblem
from stof.attention.limits import limits_of, relative_roles_on, type_names
from stof.mask.relative_roles import RELATIVE_BIAS_FACTOR
from stof.targets import CUDA

_TILE = (128, 64)  # query rows × keys of most kernels
_FLOAT = 1


@dataclass(frozen=True)
class DeviceRates:
    """A kind of device: rates in TFLOP/s that attention reaches, memory in GB/s.

    ``flash`` is what the runtime's own fused attention reaches without a mask in fp16 and bf16, ``biased`` with one.
    """

    name: str
    capability: int
    half: float
    wide: float  # heads of more than 128 elements
    single: float
    flash: float
    biased: float
    runtime_single: float
    memory: float
    products: float  # GEMMs of the runtime in fp16 and bf16


# compute capability -> device. 9.0: measured. Others by their rated tensor and memory rates (A100 SXM 312 TFLOP/s,
# 2039 GB/s; L4 and RTX 40: 121 and 300 GB/s, which is the least of that family; H100: 989 and 3350).
DEVICES = (
    DeviceRates(
        "sm_80", 80, half=190, wide=150, single=60, flash=200, biased=120, runtime_single=12, memory=1600, products=220
    ),
    DeviceRates(
        "sm_86", 86, half=90, wide=60, single=28, flash=95, biased=60, runtime_single=10, memory=500, products=70
    ),
    DeviceRates(
        "sm_89", 89, half=75, wide=50, single=25, flash=80, biased=50, runtime_single=10, memory=250, products=65
    ),
    DeviceRates(
        "sm_90", 90, half=490, wide=230, single=110, flash=300, biased=230, runtime_single=30, memory=2600, products=620
    ),
)
_LAUNCH = 2.5  # microseconds of a kernel in a captured graph, with the gap before it
_OWN = 4.5  # of ours, for a few tiles
# Rows of few tiles reach this share of the rate: measured 240 to 440 of 490 TFLOP/s for windows, global tokens, S2.
_FEW, _SHORT = 0.3, 0.6
_RELATIVE = 0.5  # of the rate: the kernel for 8.0 where there is one for 9.0; not measured
# Passes over the scores of an attention of single nodes: written, scaled, masked (read and written), softmax, read.
_PASSES = 7.0
_NODES = 6


def device_of(capability: int) -> DeviceRates:
    """The newest known kind that is no newer than a device; the oldest one for none (0)."""
    devices = [d for d in DEVICES if d.capability <= capability]
    return devices[-1] if devices else DEVICES[0]


def estimate_gain(problem: SiteProblem, length: int, device: DeviceRates) -> GainEstimate:
    """The estimated gain over the runtime's nodes, or its fused node, at S = T = ``length``."""
    density = tile_density(problem, length, _TILE)
    flops = 2.0 * problem.num_heads * length * length * (problem.head_size + problem.value_head_size)
    is_16_bit = problem.dtype != _FLOAT
    rate = device.single if not is_16_bit else device.half if problem.head_size <= 128 else device.wide
    rate *= _SHORT if density < _FEW else 1.0
    # Terms have kernels for compute capability 8.0, at its share of a device's rate. A product costs what query times key does,
    # and its rows and the order of its results as much again.
    products = len(problem.relative_terms)
    if is_16_bit and products:
        rate *= _RELATIVE
    own = flops + 4.0 * products * problem.num_heads * length * length * problem.head_size
    operator_time = _OWN + max(density, 1e-6) * own / rate * 1e-6
    masked = not problem.mask.allows_all or problem.has_bias
    if problem.replaces_fused_node:
        dense = device.runtime_single if not is_16_bit else device.biased if masked else device.flash
        return GainEstimate(length, density, (_LAUNCH + flops / dense * 1e-6) / operator_time)
    scores = problem.num_heads * length * length * (2 if is_16_bit else 4)
    # The runtime multiplies about twice as many rows as there are keys, and moves the result to pairs.
    runtime_time = (_NODES * _LAUNCH + _PASSES * scores / device.memory * 1e-3) * (1 + products)
    flops += 4.0 * products * problem.num_heads * length * length * problem.head_size
    # Products with so small an inner size run at a rate below that of fused attention.
    runtime_time += flops / (device.biased if is_16_bit else device.runtime_single) * 1e-6
    return GainEstimate(length, density, runtime_time / operator_time)


def refusals(problem: SiteProblem) -> list[str]:
    """The reasons, beyond those of every target, against running a problem on the CUDA kernels."""
    types = limits_of("cuda")
    if problem.dtype not in types:
        return []  # refused on every target
    limits, sizes = types[problem.dtype], (problem.head_size, problem.value_head_size)
    unit, largest = limits.head_size_multiple_of, limits.largest_head_size
    roles = {role for role, *_ in problem.relative_terms} | (
        {RELATIVE_BIAS_FACTOR} if problem.has_relative_factor else set()
    )
    reasons = [f"no kernel on CUDA takes {role}" for role in sorted(roles - relative_roles_on(CUDA))]
    if any(size % unit for size in sizes):
        same = type_names((t for t in types if types[t].head_size_multiple_of == unit), "and")
        reasons.append(f"head size {sizes[0]} / {sizes[1]}, expected multiples of {unit} in {same} on CUDA")
    if max(sizes) > largest:
        reasons.append(f"head size {sizes[0]} / {sizes[1]}, expected at most {largest} on CUDA")
    return reasons
