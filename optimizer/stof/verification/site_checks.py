# SPDX-License-Identifier: Apache-2.0
"""The protocol by which verification looks at single nodes of an op."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx

from stof.execution.case import Case
from stof.execution.inputs import InputMaker
from stof.symbolic import Symbolic
from stof.verification.perturb import Noisy
from stof.verification.result import Comparison

Tensors = Mapping[str, np.ndarray]
# Runs a model without graph optimizations, for some of its outputs on some inputs. Gives these outputs, and the inputs as
# the model got them.
Run = Callable[[onnx.ModelProto, Sequence[str], Tensors], Tensors]


class SiteChecks(ABC):
    """The sites of a model that an op replaced, each of which is compared by itself.

    Attributes:
        original: the model as it was read.
        working: its working copy, whose nodes are what sites are made of; the original itself where they are the same.
        symbolic: facts of the working copy.
        sites: the names of the replaced sites, in the order of the graph.
        types: the element types that sites compute in.
        inputs: draws inputs that reach the sites.
        may_carry_nan: whether NaN of queries without a key may spread further in the original than in the result.
    """

    original: onnx.ModelProto
    working: onnx.ModelProto
    symbolic: Symbolic
    sites: tuple[str, ...]
    types: frozenset[int]
    inputs: InputMaker
    may_carry_nan: bool

    @abstractmethod
    def cases(self, tokens: float) -> list[Case]:
        """Sets of inputs, those most likely to expose errors first; long ones have at most so many tokens."""

    @abstractmethod
    def tensors(self) -> list[str]:
        """The tensors of the working copy by which sites are compared."""

    @abstractmethod
    def compare(self, emitted: onnx.ModelProto, captured: Tensors) -> list[Comparison]:
        """Every site's node beside what it replaces. ``captured``: values of :meth:`tensors` and of the model's inputs."""

    @abstractmethod
    def compare_subgraphs(self, emitted: onnx.ModelProto, case: Case, run: Run) -> list[Comparison]:
        """The same for sites in subgraphs, which are run by themselves."""

    @abstractmethod
    def rounding_variants(self, working: onnx.ModelProto, dtype: Callable[[str], int]) -> list[onnx.ModelProto]:
        """Further legal forms of the working copy, where its own rounding at the sites is large."""

    @abstractmethod
    def rounding_errors(self, captured: Tensors) -> dict[str, Noisy]:
        """How far each site's output may be off by rounding, by the output's name."""

    @abstractmethod
    def emit(self, sites: Sequence[str]) -> onnx.ModelProto:
        """The model with some of the sites replaced."""
