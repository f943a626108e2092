# SPDX-License-Identifier: Apache-2.0
"""Selectors as StofSparseMLP holds them: in the type of the tokens, or in int8 with a scale for each row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import helper

from stof.errors import UnsupportedError
from stof.sparse_mlp.limits import mlp_limits
from stof.sparse_mlp.predictors.selector import NeuronSelector
from stof.sparse_mlp.site import MlpSite

_RANK_MULTIPLE = 8  # of other predictors: their rows are aligned for kernels that read eight values at a time
_ZERO = 128  # what a byte of a quantized predictor holds for 0
_MOST = 127.0
Arrays = Mapping[str, npt.NDArray[Any]]


def make_stored_arrays(site: MlpSite) -> dict[str, npt.NDArray[Any]]:
    """The constants of a site's selector by the names of the operator's inputs.

    Raises:
        UnsupportedError: when a number does not fit the site's type.
    """
    selector = site.selector
    assert selector is not None
    arrays: dict[str, npt.NDArray[Any]] = {"threshold": selector.threshold}
    if selector.predictor_down is None or selector.predictor_up is None:
        return arrays
    dtype = np.dtype(helper.tensor_dtype_to_np_dtype(site.dtype))
    for name, factor in (("predictor_down", selector.predictor_down), ("predictor_up", selector.predictor_up)):
        if site.quantization is None:
            axis = 0 if name == "predictor_down" else 1
            padding = [(0, 0), (0, 0)]
            padding[axis] = (0, -factor.shape[axis] % _RANK_MULTIPLE)  # with zeros, which change no score
            arrays[name] = np.pad(_as_type(name, factor, dtype), padding)
        else:
            arrays[name], arrays[f"{name}_scales"] = _quantize(name, factor, dtype)
    return arrays


def make_ordered_arrays(site: MlpSite) -> dict[str, npt.NDArray[Any]]:
    """:func:`make_stored_arrays` with the neurons in the site's order, as they are written.

    Raises:
        UnsupportedError: as :func:`make_stored_arrays`.
    """
    arrays = make_stored_arrays(site)
    if site.order is None:
        return arrays
    indices = site.order.indices
    is_by_neuron = {n: n.startswith("predictor_up") or (n == "threshold" and a.size > 1) for n, a in arrays.items()}
    return {n: a[indices] if is_by_neuron[n] else a for n, a in arrays.items()}


def round_selector(site: MlpSite) -> NeuronSelector:
    """The site's selector with the numbers that the operator holds, in fp32.

    Raises:
        UnsupportedError: as :func:`make_stored_arrays`.
    """
    selector = site.selector
    assert selector is not None
    arrays = make_stored_arrays(site)
    if selector.predictor_down is None or selector.predictor_up is None:
        return selector
    down = dequantize_factor(arrays, "predictor_down", selector.rank, selector.predictor_down.shape[1])
    up = dequantize_factor(arrays, "predictor_up", len(selector.predictor_up), selector.rank)
    return replace(selector, predictor_down=down, predictor_up=up)


def dequantize_factor(arrays: Arrays, name: str, rows: int, size: int) -> npt.NDArray[np.float32]:
    """A factor of a predictor in fp32 without padding.

    Args:
        arrays: by the names of the operator's inputs.
        name: of the factor.
        rows: of the factor.
        size: of its rows.
    """
    values, scales = arrays[name][:rows, :size], arrays.get(f"{name}_scales")
    if scales is None:
        return np.ascontiguousarray(values.astype(np.float32))
    centered = values.astype(np.float32) - np.float32(_ZERO)
    return np.ascontiguousarray(centered * scales.astype(np.float32)[:, None])


def _as_type(name: str, values: npt.NDArray[Any], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    with np.errstate(over="ignore"):
        cast = values.astype(dtype)
    if not np.isfinite(cast.astype(np.float32)).all():
        raise UnsupportedError(f"{name} has {float(np.abs(values).max()):.4g}, beyond the range of {dtype.name}")
    return cast


def _quantize(
    name: str, values: npt.NDArray[np.float32], dtype: np.dtype[Any]
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[Any]]:
    """Rows as bytes, padded with zeros, and the scale of each."""
    scales = _as_type(name, np.abs(values).max(1) / _MOST, dtype)
    steps = scales.astype(np.float32)
    scales[steps == 0] = 1  # rows of zeros, or too small for the type
    steps = scales.astype(np.float32)[:, None]
    rounded = np.clip(np.round(values / steps), -_MOST, _MOST) + _ZERO
    unit = mlp_limits().predictor_multiple_of
    padded = np.full((len(values), -(-values.shape[1] // unit) * unit), _ZERO, np.uint8)
    padded[:, : values.shape[1]] = rounded.astype(np.uint8)
    return padded, scales
