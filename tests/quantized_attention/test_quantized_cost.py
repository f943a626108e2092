# SPDX-License-Identifier: Apache-2.0
"""Estimates of quantized attention by instruction set: what the kernels were timed at, and where a site stays as it is."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
from quantized_models import quantized_attention

from stof.attention.decide.quantized import estimate_gain
from stof.attention.describe.site_problem import WEIGHT_BY_RANGE, SiteProblem
from stof.mask.expression import MaskExpression
from stof.mask.site import AttentionSite, Layout, LiftedMask, Operand

SETS = ("avx2", "avx_vnni", "avx512", "avx512_vnni", "avx512_vbmi", "amx_int8")


def problem(size: int, *, by_range: bool = False) -> SiteProblem:
    operand = Operand("x", Layout.BHSD)
    site = AttentionSite("s", 0, "softmax", operand, operand, operand, "y", Layout.BHSD, 2, 2, size, size, 0.125, 1)
    made = SiteProblem.of(site, LiftedMask(MaskExpression.parse("True")))
    roles = ("weight", *((WEIGHT_BY_RANGE,) if by_range else ()))
    return replace(made, roundings=roles)


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("size", [16, 64, 256])
@pytest.mark.parametrize("by_range", [False, True])
def test_dense_attention_gains_by_every_set_with_vectors(isa: str, size: int, by_range: bool) -> None:
    gain = estimate_gain(problem(size, by_range=by_range), 1.0, isa)
    assert 1.0 < gain < 5.0
    assert estimate_gain(problem(size, by_range=by_range), 0.25, isa) == pytest.approx(4 * gain)


@pytest.mark.parametrize("size", [16, 64, 256])
def test_vbmi_gains_more_than_vnni(size: int) -> None:
    """At one speed of the runtime, which wide vectors gain more on."""
    gains = [estimate_gain(problem(size), 1.0, isa) for isa in ("avx512_vnni", "avx512_vbmi")]
    assert gains[0] < gains[1] == estimate_gain(problem(size), 1.0, "amx_bf16")


@pytest.mark.parametrize("size", [16, 64, 256])
def test_tile_registers_gain_more_than_vnni(size: int) -> None:
    assert estimate_gain(problem(size), 1.0, "amx_int8") > estimate_gain(problem(size), 1.0, "avx512_vnni")


def test_without_vectors_it_stays(tmp_path: Path) -> None:
    """The estimate is that of the set that the library runs, which the report names."""
    onnx.save(quantized_attention(), tmp_path / "model.onnx")
    program = (
        "import sys, stof\nfrom stof.options import Options\n"
        "report = stof.optimize(sys.argv[1] + '/model.onnx', sys.argv[1] + '/written.onnx', Options(dry_run=True))\n"
        "from stof.runtime.quantized_attention_kernel import cpu_quantized_attention_kernel\n"
        "print([(s.replaced, s.reason, s.kernel) for s in report.sites], cpu_quantized_attention_kernel())"
    )

    def under(isa: str) -> str:
        environment = {**os.environ, "STOF_CPU_ISA": isa, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-c", program, str(tmp_path)]
        return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout

    portable = under("portable")
    assert "(False, 'a loss is estimated at S = " in portable
    assert portable.endswith("] portable\n")
    best = under("")
    kernel = best.split()[-1]
    assert "(True, " in best
    assert f"'cpu block-wise {kernel}'" in best
    # The least set that has these kernels: those of avx512_bf16 and amx_bf16 are of a set before.
    assert kernel in (*SETS, "amx_int8", "neon", "neon_dotprod")
