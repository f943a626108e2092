# SPDX-License-Identifier: Apache-2.0
"""The settings of one optimization."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stof.execution.given_inputs import InputSource


@dataclass(frozen=True)
class Options:
    """What ``stof-optimize`` takes; ``docs`` of each option are in ``cli.py``."""

    output: Path | None = None
    target: str = "cpu"  # or "cuda", "tensorrt": what is replaced, and how it is written
    capability: int = 0  # of the CUDA device that estimates are for, 10 x major + minor; 0: the one at hand
    allow_tf32: bool = False
    json: Path | None = None
    report: Path | None = None  # an HTML page for people
    time: bool = False  # whether the original and the result are timed in ONNX Runtime, once it is written
    dry_run: bool = False
    explain: str | None = (
        None  # report only, and say how far candidates got: a pattern as in ``only``; "*": all attention
    )
    verify: bool = True
    verify_budget: float = 45.0  # seconds
    verify_memory: int = 0  # bytes for verification; 0: half of what is free
    inputs: InputSource = ()  # what verification runs on before drawn inputs: paths, "module:function"; see given_inputs.py
    only: tuple[str, ...] = ()  # names, numbers or patterns of sites; of chains behind "chain:"
    skip: tuple[str, ...] = ()  # likewise
    shapes: dict[str, tuple[int, int]] = field(default_factory=dict)  # dimension name -> least, most
    masks: dict[str, str] = field(default_factory=dict)  # site -> expression stated by the user
    sparsify: str = ""  # patterns for dense attentions: stof.sparsify.spec has the form; outputs change
    sparse_mlp: str = ""  # which neurons to leave out: stof.sparse_mlp.calibration.spec has the form; outputs change
    prompts: Path | None = None  # token ids or texts on which the loss of ``sparsify`` and ``sparse_mlp`` is measured
    max_kl: float = 0.1  # the largest loss with which a model is written
    force: bool = False  # a model is written beyond it, too
    ignore_empty_rows: bool = False
    chains: str = "auto"  # "on", "off", or "auto": where a gain was measured on this device, or is estimated
    products: bool = True  # whether matmuls may become StofGemm
    tune: float = 0.0  # seconds for measuring: kernels on CUDA, chains
    ignore_measurements: bool = False  # nothing that earlier runs measured decides
    plan: Path | None = None
    save_plan: Path | None = None
