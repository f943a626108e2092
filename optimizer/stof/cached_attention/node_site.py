# SPDX-License-Identifier: Apache-2.0
"""What sites over contiguous and over paged caches have in common: a node of the runtime's, and the facts about it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import onnx

from stof.graph.node_fields import attributes_of
from stof.mask.expression import MaskExpression, causal_window
from stof.sparsify.sparsity import DeclaredPattern

MICROSOFT = "com.microsoft"


@dataclass(frozen=True, kw_only=True)
class NodeSite(ABC):
    """An attention node over a KV cache that can be replaced.

    Attributes:
        name: for options, plans and reports.
        node: the node.
        num_heads: H.
        kv_num_heads: G.
        head_size: D.
        dtype: ONNX element type T of query, and of caches that are not quantized.
        window: W, the keys that a query attends to at most; 0: all before it.
        rotary_size: R, the elements of a head that are rotated; 0: none, or not known before the run.
        declared: the pattern that --sparsify puts on it, with the tensors of its tables; None: none.
    """

    name: str
    node: onnx.NodeProto
    num_heads: int
    kv_num_heads: int
    head_size: int
    dtype: int
    window: int
    rotary_size: int
    declared: DeclaredPattern | None = None

    @abstractmethod
    def input(self, name: str) -> str:
        """The tensor of an input by its name in the operator's schema; empty where it is absent."""

    @property
    @abstractmethod
    def read_inputs(self) -> list[str]:
        """The tensors of the operator's inputs, in order; empty where one is absent or the node does not read it."""

    @property
    def cache_dtype(self) -> int:
        """The ONNX element type of the caches."""
        return self.dtype

    @cached_property
    def attributes(self) -> dict[str, Any]:
        """The node's attributes by name; strings as bytes."""
        return attributes_of(self.node)

    @property
    def is_packed(self) -> bool:
        """Whether query, key and value lie in one tensor."""
        return not self.input("key")

    @property
    def does_rotary(self) -> bool:
        """Whether new queries and keys are rotated."""
        return bool(self.attributes.get("do_rotary", 0))

    @property
    def is_interleaved(self) -> bool:
        """Whether the rotary embedding pairs neighbouring elements, not the two halves of a head."""
        return bool(self.attributes.get("rotary_interleaved", 0))

    @property
    def scale(self) -> float:
        """The factor of the scores; 0: 1/sqrt(D)."""
        return float(self.attributes.get("scale", 0.0))

    @property
    def softcap(self) -> float:
        """The soft limit of the scores; 0: none."""
        return float(self.attributes.get("softcap", 0.0))

    @property
    def norm_epsilon(self) -> float:
        """What the RMS norms of queries and keys add to the mean square."""
        return float(self.attributes.get("qk_norm_epsilon", 1e-6))

    @property
    def mask(self) -> MaskExpression:
        """Which positions of keys a position attends."""
        return causal_window(self.window) if self.declared is None else self.declared.pattern.mask

    @property
    def table_inputs(self) -> list[str]:
        """The tensors of the tables of a declared pattern, in the order of ``table0``."""
        tables = {} if self.declared is None else self.declared.tables
        return [tables[name] for name in sorted(tables)]

    @property
    def mask_tables(self) -> Mapping[str, np.ndarray]:
        """The tables that the mask reads, by name."""
        return {} if self.declared is None else self.declared.pattern.tables

    @property
    def reach(self) -> int:
        """Keys beyond which the mask shows what it forbids: the window, or those of a declared pattern; 0: none."""
        return self.window if self.declared is None else self.declared.pattern.reach

    @property
    def heads(self) -> str:
        """The head counts for people."""
        return f"{self.num_heads} heads" + (f" on {self.kv_num_heads}" if self.kv_num_heads != self.num_heads else "")

    @property
    def features(self) -> tuple[str, ...]:
        """What the node does besides attention, for people."""
        rotary = f"rotary of {self.rotary_size}" if self.rotary_size else "rotary"
        features = {
            "packed QKV": self.is_packed,
            "q/k norm": bool(self.input("q_norm_weight")),
            rotary + (", interleaved" if self.is_interleaved else ""): self.does_rotary,
            "sinks": bool(self.input("head_sink")),
            f"softcap {self.softcap:g}": bool(self.softcap),
        }
        return tuple(name for name, holds in features.items() if holds)

    @property
    def operator_attributes(self) -> dict[str, int | float | str]:
        """The attributes that the node has as one of stof's operators, but for ``mask_id``."""
        return {
            "num_heads": self.num_heads,
            "kv_num_heads": self.kv_num_heads,
            "mask": self.mask.text,
            "scale": self.scale,
            "softcap": self.softcap,
            "do_rotary": int(self.does_rotary),
            "rotary_interleaved": int(self.is_interleaved),
            "qk_norm_epsilon": self.norm_epsilon,
        }
