# SPDX-License-Identifier: Apache-2.0
"""Target ``tensorrt``: which sites TensorRT computes well by itself, and which ones the plugin's kernels take.

TensorRT fuses attention in half precision that is dense, causal, or has a mask or a bias as a tensor, up to head size 256. It
has nothing for windows, caps and sinks, skips no tile of a mask, and fuses no fp32 (docs of IAttention, TensorRT 11; builds
with TensorRT for RTX 1.7). A plugin stands apart from what TensorRT fuses around it, so attention that it fuses is left.
"""

from __future__ import annotations

import math

import numpy as np
from onnx import TensorProto

from stof.attention.describe.site_problem import SiteProblem
from stof.attention.limits import limits_of, operand_roles
from stof.mask.expression import CAUSAL

_HALVES = frozenset({TensorProto.FLOAT16, TensorProto.BFLOAT16})
_TABLE = 1 << 26  # bytes of a table in an attribute
_FULL = 0.999  # from this share of tiles on nothing is skipped


def reason_to_leave(problem: SiteProblem, density: float) -> str:
    """Why an attention is better left to TensorRT; empty when it is not.

    ``density`` is the share of tiles that the mask's static part keeps at the longest length in use.
    """
    if problem.dtype not in _HALVES or problem.softcap > 0 or problem.has_sink:
        return ""
    window = problem.mask.window()
    read = set(problem.operands)
    if read <= {"pad"} and (window == (-1, -1) or (density >= _FULL and not problem.tables)):
        kind = "dense" if problem.mask.allows_all else "dense with a mask as a tensor"
    elif problem.mask == CAUSAL and not problem.has_bias and not problem.has_relative_bias:
        kind = "causal"
    else:
        return ""
    what = f"{kind}, half precision, D = {problem.head_size}"
    return f"TensorRT fuses it by itself ({what}); --target cpu has it replaced all the same"


def refusals(problem: SiteProblem) -> list[str]:
    """The reasons against running a problem on the plugin's kernels; empty when there are none."""
    types = limits_of("tensorrt")
    if problem.dtype not in types:
        type_name = TensorProto.DataType.Name(problem.dtype)
        wanted = " or ".join(TensorProto.DataType.Name(t) for t in types)
        return [f"element type {type_name}, expected {wanted} on a GPU: convert the model before it is optimized"]
    reasons = [f"no kernel on a GPU takes {role}" for role, *_ in problem.relative_terms[:1]]
    sizes, limits = (problem.head_size, problem.value_head_size), types[problem.dtype]
    unit, largest = limits.head_size_multiple_of, limits.largest_head_size
    if max(sizes) > largest or any(n % unit for n in sizes):
        expected = f"multiples of {unit} up to {largest}" if unit > 1 else f"at most {largest}"
        reasons.append(f"head size {sizes[0]} / {sizes[1]}, expected {expected} on a GPU")
    if others := sorted(set(problem.operands) - operand_roles()):
        reasons.append(f"the mask reads {', '.join(others)} at run time, which the plugin's kernels do not")
    for name, kind, shape, _ in problem.tables:
        dtype = np.dtype(kind)
        size = math.prod(shape) * dtype.itemsize // (8 if dtype == np.bool_ else 1)
        if size > _TABLE:
            reasons.append(f"{name} of the mask has {size} bytes, and the plugin takes {_TABLE} as an attribute")
    return reasons
