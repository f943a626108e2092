# SPDX-License-Identifier: Apache-2.0
"""The operator in regions of ``torch.autocast``: query, key and value get the region's type, as in PyTorch's own attention."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

_KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}


def register_autocast(library: Any, operator: Any) -> None:
    """Registers the casts of an operator of query, key, value and others, for the CPU and CUDA.

    ``torch.library.register_autocast`` takes one type for ever; here the region says which.
    """
    for device_type, key in _KEYS.items():
        library.impl(operator._schema.name.split("::")[1], partial(_run, operator, device_type), key)


def run_without_autocast(run: Any, device_type: str, arguments: Sequence[Any]) -> Any:
    """Runs a function of tensors whose types stay: a region of autocast would round its matmuls."""
    if device_type not in _KEYS or not torch.is_autocast_enabled(device_type):
        return run(*arguments)
    with torch.autocast(device_type, enabled=False):
        return run(*arguments)


def _run(operator: Any, device_type: str, query: Any, key: Any, value: Any, *rest: Any) -> Any:
    dtype = torch.get_autocast_dtype(device_type)
    inputs = [_cast(t, device_type, dtype) for t in (query, key, value)]
    return run_without_autocast(operator, device_type, (*inputs, *rest))


def _cast(tensor: Any, device_type: str, dtype: Any) -> Any:
    """A tensor of the region's type; fp64, and what is no floating-point tensor of the device, stays."""
    is_cast = tensor.is_floating_point() and tensor.dtype != torch.float64 and tensor.device.type == device_type
    return tensor.to(dtype) if is_cast else tensor
