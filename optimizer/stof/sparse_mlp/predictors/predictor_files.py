# SPDX-License-Identifier: Apache-2.0
"""Predictor files: the selectors of a model's MLPs, as stof writes them (.npz), as PowerInfer and as TEAL do.

The formats: docs/reference/predictor-format.md.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import onnx

from stof.errors import ArgumentError, UnsupportedError
from stof.files import temporary_file
from stof.files.archives import read_arrays
from stof.graph.external_data import map_array
from stof.graph.index import GraphIndex, is_standard
from stof.sparse_mlp.predictors.layer_paths import MOST_LAYERS
from stof.sparse_mlp.predictors.powerinfer import read_powerinfer, with_normalized_inputs
from stof.sparse_mlp.predictors.selector import NeuronSelector
from stof.sparse_mlp.predictors.teal import TealLayer, read_teal
from stof.sparse_mlp.site import MlpSite

_WHAT = "predictor file"
_VERSION = 1
_MOST_BYTES = 1 << 33
_NAME = re.compile(r"(\d{1,4})\.(threshold|predictor_down|predictor_up|predictor_relu)")
# Normalizations whose second input multiplies the normalized values. The skip one has it as its third.
_NORMS = {"RMSNormalization": 1, "SimplifiedLayerNormalization": 1, "SkipSimplifiedLayerNormalization": 2}


class PredictorFile(Protocol):
    """The selectors of a file."""

    @property
    def layers(self) -> int:
        """How many layers they are for."""

    def selector_of(self, layer: int, site: MlpSite) -> NeuronSelector:
        """That of an MLP.

        Raises:
            UnsupportedError: when the file has none that the operator can use there.
        """


def read_predictor_file(
    kind: str, path: Path, model: onnx.ModelProto, folder: Path, active_share: float
) -> PredictorFile:
    """A predictor file of any format.

    Args:
        kind: ``predictors`` (an .npz of stof), ``powerinfer`` or ``teal``.
        path: the file, or the folder of files.
        model: whose MLPs it is for.
        folder: of the model's external data.
        active_share: of the neurons, for histograms.

    Raises:
        ArgumentError: for a file that cannot be read.
    """
    if kind == "teal":
        return _Teal(path, read_teal(path), active_share)
    if kind == "powerinfer":
        return _PowerInfer(path, read_powerinfer(path), model, folder)
    return _Npz(read_npz(path))


def write_npz(path: Path, selectors: Sequence[NeuronSelector]) -> None:
    """Writes the selectors of a model to an .npz, in the order of its MLPs, whole or not at all.

    Raises:
        ArgumentError: naming the file, when it cannot be written; for none, or more than 1000 selectors.
    """
    if not 1 <= len(selectors) <= MOST_LAYERS:
        raise ArgumentError(f"{len(selectors)} selectors, expected 1 to {MOST_LAYERS}")
    arrays: dict[str, np.ndarray] = {"version": np.array(_VERSION, np.int64)}
    for i, selector in enumerate(selectors):
        arrays[f"{i}.threshold"] = selector.threshold
        if selector.predictor_down is not None and selector.predictor_up is not None:
            arrays[f"{i}.predictor_down"] = selector.predictor_down
            arrays[f"{i}.predictor_up"] = selector.predictor_up
            if selector.predictor_activation == "relu":
                arrays[f"{i}.predictor_relu"] = np.array(1, np.int64)
    try:
        with temporary_file(path.parent) as new:
            held = io.BytesIO()
            np.savez(held, **arrays)  # type: ignore[arg-type]
            new.write(held.getbuffer())
            new.replace(path)
    except OSError as error:
        raise ArgumentError(f"the {_WHAT} {path} cannot be written: {error.strerror or error}") from error


def read_npz(path: Path) -> list[NeuronSelector]:
    """The selectors of an .npz, in the order of the MLPs.

    Raises:
        ArgumentError: naming the file and the array, when it is damaged, or an array is missing, unknown, or of another
            type or shape.
    """
    arrays = read_arrays(_WHAT, path, _MOST_BYTES)
    version = arrays.pop("version", None)
    if version is None or version.shape or version.dtype.kind not in "iu" or int(version) != _VERSION:
        stated_version = "no version" if version is None else f"version {version.dtype} {list(version.shape)}"
        stated_version = (
            f"version {int(version)}"
            if version is not None and not version.shape and version.dtype.kind in "iu"
            else stated_version
        )
        raise ArgumentError(f"the {_WHAT} {path} has {stated_version}, expected {_VERSION}; write it again")
    layers: dict[int, dict[str, np.ndarray]] = {}
    for name, array in arrays.items():
        match = _NAME.fullmatch(name)
        if match is None or str(int(match[1])) != match[1]:
            raise ArgumentError(f"the {_WHAT} {path} has an array {name!r}, expected names such as 0.threshold")
        layers.setdefault(int(match[1]), {})[match[2]] = array
    if sorted(layers) != list(range(len(layers))) or not layers:
        raise ArgumentError(
            f"the {_WHAT} {path} has {len(layers)} selectors, expected numbers from 0 on, without a gap"
        )
    return [_selector(path, i, layers[i]) for i in range(len(layers))]


def _selector(path: Path, index: int, arrays: dict[str, np.ndarray]) -> NeuronSelector:
    relu = arrays.get("predictor_relu")
    if "threshold" not in arrays:
        raise ArgumentError(f"the {_WHAT} {path} has no array {index}.threshold")
    if relu is not None and (relu.shape or relu.dtype.kind not in "iu" or int(relu) != 1):
        raise ArgumentError(
            f"{index}.predictor_relu of the {_WHAT} {path} is {relu.dtype} {list(relu.shape)}, expected 1"
        )
    try:
        return NeuronSelector(
            arrays["threshold"],
            arrays.get("predictor_down"),
            arrays.get("predictor_up"),
            "none" if relu is None else "relu",
        )
    except ArgumentError as error:
        raise ArgumentError(f"selector {index} of the {_WHAT} {path}: {error}") from None


@dataclass(frozen=True)
class _Npz:
    selectors: Sequence[NeuronSelector]

    @property
    def layers(self) -> int:
        return len(self.selectors)

    def selector_of(self, layer: int, site: MlpSite) -> NeuronSelector:
        return self.selectors[layer]


@dataclass(frozen=True)
class _Teal:
    file: Path
    histograms: Sequence[TealLayer]
    active_share: float

    @property
    def layers(self) -> int:
        return len(self.histograms)

    def selector_of(self, layer: int, site: MlpSite) -> NeuronSelector:
        histograms = self.histograms[layer]
        if site.up is None:
            return histograms.hidden.selector(self.active_share)
        if histograms.gate is None:
            raise UnsupportedError(
                f"{self.file} has no histogram h1.5 of its activated gate, whose magnitudes the operator compares"
            )
        return histograms.gate.selector(self.active_share)


@dataclass(frozen=True)
class _PowerInfer:
    """Predictors of gated MLPs read the token in front of the normalization, others behind it."""

    file: Path
    selectors: Sequence[NeuronSelector]
    model: onnx.ModelProto
    folder: Path

    @property
    def layers(self) -> int:
        return len(self.selectors)

    def selector_of(self, layer: int, site: MlpSite) -> NeuronSelector:
        selector = self.selectors[layer]
        if site.up is None:
            return selector
        weight = _norm_weight(self.model, self.folder, site.gate_input)
        if weight is None:
            raise UnsupportedError(
                f"{self.file} predicts from tokens in front of an RMS normalization, and {site.gate_input!r} is not the "
                "result of one with a constant weight"
            )
        try:
            return with_normalized_inputs(selector, weight)
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
