# SPDX-License-Identifier: Apache-2.0
"""Predictors and activation statistics of PowerInfer (arXiv 2312.12456), from the files of its predictor repositories."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from stof.errors import ArgumentError
from stof.files import read_text
from stof.sparse_mlp.predictors.layer_paths import layer_paths
from stof.sparse_mlp.predictors.selector import Floats, NeuronSelector
from stof.sparse_mlp.predictors.torch_archives import Tensor, read_tensors

_WHAT = "PowerInfer predictor"
_MOST_CONFIG = 1 << 20


def read_powerinfer(folder: Path) -> list[NeuronSelector]:
    """The predictors of a folder with ``model_0.pt``, ``model_1.pt`` and so on, one for each layer.

    ``fc1.weight`` [R, K] and ``fc2.weight`` [F, R] have a ReLU between them, which is ``predictor_activation``. A neuron is
    selected where its score reaches ``sparse_threshold`` of ``config.json``, or 0 without one.

    PowerInfer gives the predictor of a Llama the values in front of the normalization, and that of a Falcon the normalized
    ones. ``with_normalized_inputs`` changes the former into the latter.

    Raises:
        ArgumentError: naming the file and the tensor, when one is missing, damaged, or of another shape or type.
    """
    threshold = np.nextafter(np.float32(_threshold(folder)), np.float32(-np.inf))
    if abs(threshold) < np.finfo(np.float32).tiny:
        threshold = -np.finfo(np.float32).tiny  # CPUs may take smaller numbers for 0
    selectors = []
    for path in _layer_files(folder, "model"):
        tensors = read_tensors(_WHAT, path)
        if set(tensors) != {"fc1.weight", "fc2.weight"}:
            raise ArgumentError(
                f"the {_WHAT} {path} has the tensors {', '.join(sorted(tensors)) or 'none'}, expected fc1.weight and fc2.weight"
            )
        down, up = (_as_fp32(path, name, tensors[name], 2) for name in ("fc1.weight", "fc2.weight"))
        try:
            selectors.append(NeuronSelector(np.array([threshold], np.float32), down, up, "relu"))
        except ArgumentError as error:
            raise ArgumentError(f"the {_WHAT} {path}: {error}") from None
    return selectors


def read_powerinfer_statistics(folder: Path) -> list[Floats]:
    """How often each neuron was active, fp32 [F] for each layer, from ``activation_0.pt`` and so on.

    Raises:
        ArgumentError: as for ``read_powerinfer``, and for counts below 0.
    """
    activity = []
    for path in _layer_files(folder, "activation"):
        tensors = read_tensors("activation statistics", path)
        if set(tensors) != {""}:
            raise ArgumentError(f"the activation statistics {path} are a dictionary, expected one tensor")
        counts = _as_fp32(path, "the tensor", tensors[""], 1)
        if not np.isfinite(counts).all() or (counts < 0).any():
            raise ArgumentError(f"the activation statistics {path} have values that are no counts")
        activity.append(counts)
    return activity


def with_normalized_inputs(selector: NeuronSelector, norm_weight: Floats) -> NeuronSelector:
    """The predictor for inputs that an RMS normalization has divided by their size and multiplied by ``norm_weight`` [K].

    A ReLU passes factors above 0 on. So the size of a token changes no sign of a score, and the weight moves into
    ``predictor_down``. This needs a threshold of 0.

    Raises:
        ArgumentError: without a predictor, for a weight of another shape or with a 0, or another threshold.
    """
    down = selector.predictor_down
    if (
        down is None
        or norm_weight.shape != down.shape[1:]
        or not np.isfinite(norm_weight).all()
        or not norm_weight.all()
    ):
        raise ArgumentError(
            f"the weight of the normalization is {list(norm_weight.shape)}, expected one value other than 0 for each column "
            "of predictor_down"
        )
    if np.abs(selector.threshold).max() > np.finfo(np.float32).tiny:
        raise ArgumentError(
            "the threshold is not 0, so scores depend on the size of a token, which normalization removes"
        )
    scaled = np.asarray(down / norm_weight, np.float32)
    return NeuronSelector(selector.threshold, scaled, selector.predictor_up, selector.predictor_activation)


def _layer_files(folder: Path, stem: str) -> list[Path]:
    if not folder.is_dir():
        raise ArgumentError(f"{folder} is no folder; name the one with {stem}_0.pt, {stem}_1.pt ...")
    return layer_paths(folder, "files", f"{stem}_", ".pt")


def _threshold(folder: Path) -> float:
    path = folder / "config.json"
    if not path.exists():
        return 0.0
    text = read_text("configuration", path, _MOST_CONFIG)
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"the configuration {path} is no JSON: {error}") from None
    threshold = config.get("sparse_threshold", 0.0) if isinstance(config, dict) else None
    if (
        isinstance(threshold, bool)
        or not isinstance(threshold, int | float)
        or not abs(threshold) < float(np.finfo(np.float32).max)
    ):
        raise ArgumentError(f"the configuration {path} has no number as its sparse_threshold")
    return float(threshold)


def _as_fp32(path: Path, name: str, tensor: Tensor, rank: int) -> Floats:
    if tensor.ndim != rank or not tensor.size or tensor.dtype.kind not in ("f" if rank == 2 else "fiu"):
        raise ArgumentError(
            f"{name} of {path} is {tensor.dtype} {list(tensor.shape)}, expected {'floats' if rank == 2 else 'numbers'} of rank "
            f"{rank}, not empty"
        )
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(tensor, np.float32)
