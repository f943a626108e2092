# SPDX-License-Identifier: Apache-2.0
"""What --sparse-mlp says, read once: the specification and its prompts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from stof.op_rewrite import Job
from stof.sparse_mlp.calibration.prompt_sets import CalibrationPrompts, read_calibration_prompts
from stof.sparse_mlp.calibration.spec import MlpSpec, parse_mlp_spec


@dataclass(frozen=True, eq=False)
class MlpSettings:
    """The settings of one optimization.

    Attributes:
        spec: how neurons are predicted.
        prompts: that it names.
    """

    spec: MlpSpec
    prompts: CalibrationPrompts

    @classmethod
    def read(cls, job: Job) -> MlpSettings:
        """The settings of a job with --sparse-mlp.

        Raises:
            ArgumentError: for a wrong specification, or a file that cannot be read.
        """
        spec = parse_mlp_spec(job.options.sparse_mlp)
        return cls(spec, read_calibration_prompts(job, spec))

    @property
    def files(self) -> Mapping[str, Path]:
        """The files that the specification names, by what they are."""
        return self.spec.files
