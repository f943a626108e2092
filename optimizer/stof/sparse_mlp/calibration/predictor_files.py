# SPDX-License-Identifier: Apache-2.0
"""Selectors of a model's MLPs from the files that people hold: PowerInfer's predictors, TEAL's histograms, our own .npz."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import onnx

from stof.errors import ArgumentError, UnsupportedError
from stof.graph.external_data import map_array
from stof.graph.index import GraphIndex, is_standard
from stof.sparse_mlp.calibration.spec import DEFAULT_ACTIVE, OPTION, MlpClause
from stof.sparse_mlp.predictors.powerinfer import read_powerinfer, with_normalized_inputs
from stof.sparse_mlp.predictors.selector import NeuronSelector
from stof.sparse_mlp.predictors.selector_files import read_selectors
from stof.sparse_mlp.predictors.teal import TealLayer, read_teal
from stof.sparse_mlp.site import MlpSite

# Normalizations whose second input multiplies the normalized values. The skip one has it as its third.
_NORMS = {"RMSNormalization": 1, "SimplifiedLayerNormalization": 1, "SkipSimplifiedLayerNormalization": 2}


class SelectorFile(Protocol):
    """The selectors of a file."""

    def selector_of(self, layer: int, site: MlpSite) -> NeuronSelector:
        """That of an MLP.

        Raises:
            UnsupportedError: when the file has none that the operator can use there.
        """


def read_selector_file(clause: MlpClause, model: onnx.ModelProto, folder: Path, count: int) -> SelectorFile:
    """The file of a clause.

    Args:
        clause: names it.
        model: whose MLPs it is for.
        folder: of the model's external data.
        count: of the model's MLPs.

    Raises:
        ArgumentError: for a file that cannot be read, or one of a model with another number of MLPs.
    """
    assert clause.file is not None
    held: Sequence[object]
    found: SelectorFile
    if clause.kind == "teal":
        layers = read_teal(clause.file)
        share = DEFAULT_ACTIVE if clause.active is None else clause.active
        held, found = layers, _Teal(clause.file, layers, share)
    elif clause.kind == "powerinfer":
        selectors = read_powerinfer(clause.file)
        held, found = selectors, _PowerInfer(clause.file, selectors, model, folder)
    else:
        selectors = read_selectors(clause.file)
        held, found = selectors, _Selectors(selectors)
    if len(held) != count:
        raise ArgumentError(
            f"{OPTION}: {clause.file} is for {len(held)} layers, and the model has {count} MLPs; give the file of this model"
        )
    return found


@dataclass(frozen=True)
class _Selectors:
    selectors: Sequence[NeuronSelector]

    def selector_of(self, layer: int, site: MlpSite) -> NeuronSelector:
        return self.selectors[layer]


@dataclass(frozen=True)
class _Teal:
    file: Path
    layers: Sequence[TealLayer]
    share: float

    def selector_of(self, layer: int, site: MlpSite) -> NeuronSelector:
        found = self.layers[layer]
        if site.up is None:
            return found.hidden.selector(self.share)
        if found.gate is None:
            raise UnsupportedError(
                f"{self.file} has no histogram h1.5 of its activated gate, whose magnitudes the operator compares"
            )
        return found.gate.selector(self.share)


@dataclass(frozen=True)
class _PowerInfer:
    """Predictors of gated MLPs read the token in front of the normalization, others behind it."""

    file: Path
    selectors: Sequence[NeuronSelector]
    model: onnx.ModelProto
    folder: Path

    def selector_of(self, layer: int, site: MlpSite) -> NeuronSelector:
        found = self.selectors[layer]
        if site.up is None:
            return found
        weight = _norm_weight(self.model, self.folder, site.gate_input)
        if weight is None:
            raise UnsupportedError(
                f"{self.file} predicts from tokens in front of an RMS normalization, and {site.gate_input!r} is not the "
                "result of one with a constant weight"
            )
        try:
            return with_normalized_inputs(found, weight)
        except ArgumentError as error:
            raise UnsupportedError(f"{self.file}: {error}") from error


def _norm_weight(model: onnx.ModelProto, folder: Path, tensor: str) -> np.ndarray | None:
    """The weight [K] of the RMS normalization that gives a tensor; None where there is none."""
    index = GraphIndex(model.graph)
    node = index.producer(tensor)
    while node is not None and node.op_type in ("Cast", "Identity") and is_standard(node):
        node = index.producer(node.input[0])
    if node is None:
        return None
    names = list(node.input) if node.op_type == "Mul" else list(node.input[_NORMS.get(node.op_type, 9) :][:1])
    for name in names:
        stored = index.initializers.get(name)
        if stored is not None and len(stored.dims) == 1 and name not in index.inputs:
            return np.asarray(map_array(stored, folder)).astype(np.float32)
    return None
