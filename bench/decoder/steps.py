# SPDX-License-Identifier: Apache-2.0
"""One step of a decoder, a token or a prompt, with everything that it reads and writes at fixed addresses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import TensorProto

from bench.decoder.devices import DecoderDevice
from bench.decoder.graph import ELEMENT, DecoderShape

_LARGEST_SEED = 1 << 16


@dataclass(frozen=True)
class DecoderStep:
    """A step of B sequences of one length.

    Attributes:
        batch: B.
        tokens: S new ones.
        length: keys of a sequence after the step.
        capacity: rows of the caches. A token's attention mask has that many columns, as a captured graph needs it: only
            seqlens_k, on the device, says the length. A prompt's has S.
    """

    batch: int
    tokens: int
    length: int
    capacity: int

    @property
    def is_prompt(self) -> bool:
        """Whether it is a first prompt."""
        return self.tokens == self.length

    def __str__(self) -> str:
        kind = f"prompt of {self.tokens}" if self.is_prompt else f"token {self.length}"
        return f"B{self.batch} {kind}" + (f" in caches of {self.capacity}" if self.capacity != self.length else "")


class Caches:
    """Random keys and values of all layers, in one buffer each, for steps of different shapes: each takes its first part."""

    def __init__(self, device: DecoderDevice, shape: DecoderShape, values: int) -> None:
        self._device = device
        self.buffers = {
            f"{layer}.{kind}": device.normal([values], shape.dtype, _LARGEST_SEED + 2 * layer + number)
            for layer in range(shape.layers)
            for number, kind in enumerate(("key", "value"))
        }

    def addresses(self) -> dict[str, int]:
        """Where each buffer lies, by "<layer>.key" and "<layer>.value"."""
        return {name: self._device.address(buffer) for name, buffer in self.buffers.items()}


class DecoderTensors:
    """The tensors of a step, which all variants share: inputs, caches that are past and present at once, logits."""

    def __init__(self, device: DecoderDevice, shape: DecoderShape, step: DecoderStep, caches: Caches) -> None:
        rng = np.random.default_rng(step.length)
        columns = step.tokens if step.is_prompt else step.capacity
        mask = np.zeros((step.batch, columns), np.int64)
        mask[:, : step.length] = 1
        ids = rng.integers(0, shape.vocabulary, (step.batch, step.tokens))
        self._device = device
        self._given = {"input_ids": device.place(ids), "attention_mask": device.place(mask)}
        self._shapes = {"input_ids": ids.shape, "attention_mask": mask.shape}
        self._caches = caches
        self._cache_shape = shape.cache_shape(step.batch, step.capacity)
        self._element = ELEMENT[shape.dtype]
        self._logits_shape = (step.batch, 1, shape.vocabulary)
        self._logits = device.place(np.full(self._logits_shape, np.nan, shape.dtype))

    def bind(self, session: Any) -> Any:
        """A binding of a session to the tensors."""
        device, binding = self._device, session.io_binding()
        for name, buffer in self._given.items():
            binding.bind_input(name, device.name, 0, TensorProto.INT64, self._shapes[name], device.address(buffer))
        for name, address in self._caches.addresses().items():
            cache = (device.name, 0, self._element, self._cache_shape, address)
            binding.bind_input(f"past_key_values.{name}", *cache)
            binding.bind_output(f"present.{name}", *cache)
        logits = device.address(self._logits)
        binding.bind_output("logits", device.name, 0, self._element, self._logits_shape, logits)
        return binding

    def logits(self) -> np.ndarray:
        """What the last run wrote, fp64 [B, 1, V]."""
        return self._device.read(self._logits).astype(np.float64)

    def cache(self, name: str, rows: int) -> np.ndarray:
        """The first rows of a cache, fp64 [B, G, rows, D]."""
        count = int(np.prod(self._cache_shape))
        values = self._device.read(self._caches.buffers[name][:count]).reshape(self._cache_shape)
        return values[:, :, :rows].astype(np.float64)
