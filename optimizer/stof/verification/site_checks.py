# SPDX-License-Identifier: Apache-2.0
"""The protocol by which verification looks at single nodes of an op."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx

from stof.execution.case import Case
from stof.symbolic import Symbolic
from stof.verification.model_inputs import ModelInputs
from stof.verification.perturb import Noisy
from stof.verification.result import Comparison

Tensors = Mapping[str, np.ndarray]
# Runs a model without graph optimizations, for some of its outputs on some inputs. Gives these outputs, and the inputs as
# the model got them.
Run = Callable[[onnx.ModelProto, Sequence[str], Tensors], Tensors]


class SiteChecks(ABC):
    """The sites of a model that an op replaced, each of which is compared by itself.

    Attributes:
        working: the model that sites were found in: the original, its working copy, or the model before this op.
        symbolic: facts of that model.
        sites: the names of the replaced sites, in the order of the graph.
        types: the element types that sites compute in.
    """

    working: onnx.ModelProto
    symbolic: Symbolic
    sites: tuple[str, ...]
    types: frozenset[int]

    @abstractmethod
    def tensors(self) -> list[str]:
        """The tensors of ``working`` by which sites are compared."""

    @abstractmethod
    def outputs(self) -> Mapping[str, Sequence[str]]:
        """The tensors of ``working`` that the replaced nodes of each site compute, by the site."""

    @abstractmethod
    def compare(self, emitted: onnx.ModelProto, captured: Tensors) -> Iterable[Comparison]:
        """Every site's node beside what it replaces, one after the other: the caller may stop where no time is left.

        Args:
            emitted: the model with the nodes.
            captured: values of :meth:`tensors` and of the model's inputs.
        """

    @abstractmethod
    def emit(self, sites: Sequence[str]) -> onnx.ModelProto:
        """The model with some of the sites replaced."""

    def model_inputs(self) -> ModelInputs | None:
        """Inputs of the whole model that reach the sites; None where any inputs do."""
        return None

    def compare_by_run(self, emitted: onnx.ModelProto, captured: Tensors, run: Run) -> Iterable[Comparison]:
        """As :meth:`compare`, for nodes that the runtime itself computes."""
        return []

    def compare_subgraphs(self, emitted: onnx.ModelProto, case: Case, run: Run) -> Iterable[Comparison]:
        """As :meth:`compare`, for sites in subgraphs, which are run by themselves."""
        return []

    def cores(self) -> list[Sequence[str]]:
        """For each site of the main graph the nodes that it replaces, by their first outputs in ``working``."""
        return []

    def rounding_variants(self, working: onnx.ModelProto, dtype: Callable[[str], int]) -> list[onnx.ModelProto]:
        """Further legal forms of the original's working copy, where its own rounding at the sites is large."""
        return []

    def rounding_errors(self, captured: Tensors) -> dict[str, Noisy]:
        """How far each site's output may be off by rounding, by the output's name in the original's working copy."""
        return {}


@dataclass(frozen=True)
class EmittedSites:
    """The site checks of one op, by its key, and the model in which its nodes are looked at."""

    op: str
    checks: SiteChecks
    emitted: onnx.ModelProto
