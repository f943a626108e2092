# SPDX-License-Identifier: Apache-2.0
"""Buffers on a GPU at addresses that do not change: torch tensors, with a stream on which work is queued."""

from __future__ import annotations

from typing import Any

import numpy as np

from bench.core.candidate import Unavailable, require


class TorchBuffers:
    """Memory of the current CUDA device.

    Attributes:
        name: of the device, as ONNX Runtime has it.
        torch: the module.
        stream: where work is queued.

    Raises:
        Unavailable: without torch, or without a GPU.
    """

    name = "cuda"

    def __init__(self) -> None:
        self.torch: Any = require("torch")
        if not self.torch.cuda.is_available():
            raise Unavailable("torch finds no CUDA device")
        self.torch.set_grad_enabled(False)
        self.stream = self.torch.cuda.Stream()

    def place(self, array: np.ndarray) -> Any:
        """A buffer with these values."""
        found = self.torch.from_numpy(np.ascontiguousarray(array)).cuda()
        self.torch.cuda.synchronize()
        return found

    def read(self, buffer: Any) -> np.ndarray:
        """The values of a buffer, once everything that is queued is done."""
        self.torch.cuda.synchronize()
        found: np.ndarray = buffer.cpu().numpy()
        return found

    def address(self, buffer: Any) -> int:
        """Where a buffer lies."""
        return int(buffer.data_ptr())
