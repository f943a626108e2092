# SPDX-License-Identifier: Apache-2.0
"""Optimizes models with --emit standard, whatever is estimated."""

from __future__ import annotations

from pathlib import Path

import onnx

import stof
from stof.arguments.emissions import STANDARD
from stof.attention.plan_entry import SitePlan
from stof.attention.report import Step
from stof.options import Options
from stof.plan import Plan
from stof.report import Report
from stof.targets import CPU


def force_standard(model: onnx.ModelProto, folder: Path, **options: object) -> tuple[Report, Path]:
    """Writes every site that the operator expresses, with verification; the report and the file."""
    source, target, plan = (folder / n for n in ("model.onnx", "optimized.onnx", "plan.json"))
    onnx.save(model, source)
    found = stof.optimize(source, options=Options(dry_run=True, emit="standard", **options))
    entries = [
        SitePlan(s.site, s.step in (Step.COST, Step.DONE), s.mask, reason=s.reason)
        for s in found.sites
        if s.index is not None
    ]
    Plan({"sites": tuple(entries)}, CPU, STANDARD).save(plan)
    return stof.optimize(source, target, Options(plan=plan, emit="standard", **options)), target
