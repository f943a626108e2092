# SPDX-License-Identifier: Apache-2.0
"""Activation histograms of TEAL (arXiv 2408.14690), and the thresholds that they give."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from stof.errors import ArgumentError
from stof.sparse_mlp.predictors.layer_paths import layer_paths
from stof.sparse_mlp.predictors.selection_target import check_share
from stof.sparse_mlp.predictors.selector import Floats, NeuronSelector
from stof.sparse_mlp.predictors.torch_archives import Tensor, read_tensors

_WHAT = "TEAL histogram"
_MOST_BINS = 1 << 20
_BISECTIONS = 60


@dataclass(frozen=True, eq=False)
class ActivationHistogram:
    """How often activations had which values.

    Attributes:
        centers: fp64 [B], the middles of the bins, ascending.
        counts: fp64 [B], how many values each bin has.
    """

    centers: np.ndarray
    counts: np.ndarray

    def share_above(self, threshold: float) -> float:
        """The share of values whose magnitude is above a threshold; linear inside a bin."""
        if threshold < 0:
            return 1.0
        edges = self._edges()
        below = np.append(0.0, np.cumsum(self.counts)) / self.counts.sum()
        upper = np.interp(threshold, edges, below, left=0.0, right=1.0)
        lower = np.interp(-threshold, edges, below, left=0.0, right=1.0)
        return float(1 - (upper - lower))

    def _edges(self) -> np.ndarray:
        """The limits of the bins, [B + 1]. The two outer bins are wide, the others have one width."""
        c = self.centers
        edges = np.empty(c.size + 1)
        edges[1:-1] = (c[:-1] + c[1:]) / 2
        if c.size >= 4:
            edges[1], edges[-2] = (3 * c[1] - c[2]) / 2, (3 * c[-2] - c[-3]) / 2
        edges[0], edges[-1] = 2 * c[0] - edges[1], 2 * c[-1] - edges[-2]
        return np.maximum.accumulate(edges)

    def threshold(self, active_share: float) -> float:
        """The smallest threshold above which this share of the magnitudes lies, or less.

        Raises:
            ArgumentError: for a share that is none.
        """
        check_share("active_share", active_share)
        if active_share == 1:
            return -1.0
        low, high = 0.0, float(np.abs(self._edges()).max())
        if self.share_above(low) <= active_share:
            return low
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            low, high = (low, middle) if self.share_above(middle) <= active_share else (middle, high)
        return high

    def selector(self, active_share: float) -> NeuronSelector:
        """A selector with one threshold for the layer."""
        return NeuronSelector(np.array([self.threshold(active_share)], np.float32))


@dataclass(frozen=True)
class TealLayer:
    """The histograms of an MLP.

    Attributes:
        inputs: of the tokens that gate and up multiply (``h1``).
        gate: of activated gate values (``h1.5``), which StofSparseMLP compares; None where the file has none.
        hidden: of what the last matmul multiplies (``h2``): activated gate values times up values. In an MLP without an up
            weight, these are the activated values that StofSparseMLP compares.
    """

    inputs: ActivationHistogram
    gate: ActivationHistogram | None
    hidden: ActivationHistogram


def read_teal(folder: Path) -> list[TealLayer]:
    """The histograms of MLPs from ``layer-0/mlp/histograms.pt`` and so on, as TEAL's ``grab_acts.py`` writes them.

    Args:
        folder: ``histograms`` of a model, or the folder that holds it.

    Raises:
        ArgumentError: naming the file and the tensor, when one is missing, damaged, or of another shape or type.
    """
    inner = folder / "histograms"
    base = inner if inner.is_dir() else folder
    if not base.is_dir():
        raise ArgumentError(f"{folder} is no folder; name the one with layer-0/mlp/histograms.pt")
    return [_read_layer(layer / "mlp" / "histograms.pt") for layer in layer_paths(base, "folders", "layer-")]


def _read_layer(path: Path) -> TealLayer:
    tensors = read_tensors(_WHAT, path)
    gate = _histogram(path, tensors, "h1.5") if "h1.5" in tensors else None
    return TealLayer(_histogram(path, tensors, "h1"), gate, _histogram(path, tensors, "h2"))


def _histogram(path: Path, tensors: dict[str, Tensor], name: str) -> ActivationHistogram:
    columns: list[Floats] = []
    for key in (f"{name}_centers", name):
        tensor = tensors.get(key)
        if tensor is None:
            raise ArgumentError(
                f"the {_WHAT} {path} has the tensors {', '.join(sorted(tensors)) or 'none'}, expected {key}"
            )
        if tensor.ndim != 1 or not 2 <= tensor.size <= _MOST_BINS or tensor.dtype.kind not in "fiu":
            raise ArgumentError(
                f"{key} of the {_WHAT} {path} is {tensor.dtype} {list(tensor.shape)}, expected 2 to {_MOST_BINS} numbers"
            )
        if not (np.abs(tensor.astype(np.float64)) <= np.finfo(np.float32).max).all():
            raise ArgumentError(f"{key} of the {_WHAT} {path} has values that are not finite in fp32")
        columns.append(tensor.astype(np.float64))
    centers, counts = columns
    if centers.size != counts.size:
        raise ArgumentError(f"{name} of the {_WHAT} {path} has {counts.size} counts for {centers.size} bins")
    if (np.diff(centers) < 0).any():
        raise ArgumentError(f"{name}_centers of the {_WHAT} {path} are not ascending")
    if (counts < 0).any() or not counts.sum() > 0:
        raise ArgumentError(f"{name} of the {_WHAT} {path} has counts below 0, or none above it")
    return ActivationHistogram(centers, counts)
