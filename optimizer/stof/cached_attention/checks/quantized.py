# SPDX-License-Identifier: Apache-2.0
"""Quantized keys and values in NumPy: what a cache of int8 or fp8 (e4m3fn) holds, and how far two caches are apart."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import TensorProto, helper

_FP8 = np.dtype(helper.tensor_dtype_to_np_dtype(TensorProto.FLOAT8E4M3FN))
_FP8_LARGEST = 448.0


def is_quantized(array: np.ndarray | None) -> bool:
    """Whether an array is a quantized cache."""
    return array is not None and array.dtype in (np.dtype(np.int8), _FP8)


def scale_of(scale: np.ndarray, groups: int) -> np.ndarray:
    """A scale of one element, or of one a channel, as [G or 1, 1, D or 1]."""
    return scale.reshape(1, 1, 1) if scale.size == 1 else scale.reshape(groups, 1, -1)


def quantize(x: np.ndarray, scale: np.ndarray, stored: np.dtype[Any]) -> np.ndarray:
    """What a cache holds of keys or values [G, rows, D]: the product with 1/scale, rounded to nearest even, saturated.

    Args:
        x: keys behind their rotary embedding, or values.
        scale: from :func:`scale_of`; 0 counts as 1.
        stored: int8 or float8_e4m3fn. NaN becomes 127 in int8 and stays NaN in fp8.
    """
    with np.errstate(all="ignore"):
        inverse = np.where(scale == 0, x.dtype.type(1), x.dtype.type(1) / scale.astype(x.dtype))
        product = x * inverse
        if stored == np.int8:
            product = np.where(np.isnan(product), 127, np.clip(np.rint(product), -128, 127))
            return np.asarray(product.astype(np.int8))
        return np.asarray(np.clip(product, -_FP8_LARGEST, _FP8_LARGEST).astype(np.float32).astype(stored))


def dequantize(stored: np.ndarray, scale: np.ndarray, dtype: type[np.floating[Any]]) -> np.ndarray:
    """The keys or values [G, rows, D] that a cache holds."""
    return np.asarray(stored.astype(np.float32).astype(dtype) * scale.astype(dtype))


def count_steps(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """How many representable numbers lie between the elements of two quantized arrays; NaN equals NaN alone."""
    return np.asarray(np.abs(_ordinals(one) - _ordinals(other)))


def _ordinals(array: np.ndarray) -> np.ndarray:
    if array.dtype == np.int8:
        return array.astype(np.int32)
    bits = array.view(np.uint8).astype(np.int32)
    magnitude = bits & 0x7F
    signed = np.where(bits >= 0x80, -magnitude, magnitude)
    return np.asarray(np.where(magnitude == 0x7F, 1 << 20, signed))
