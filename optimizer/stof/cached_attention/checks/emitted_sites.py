# SPDX-License-Identifier: Apache-2.0
"""Emitted nodes of sites with the values of their inputs, for checks of both kinds of caches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import numpy as np
import onnx

from stof.cached_attention.node_site import NodeSite
from stof.graph.node_fields import PlainValue, plain_attributes_of
from stof.verification.array_distance import largest_number
from stof.verification.perturb import Noisy

Site = TypeVar("Site", bound=NodeSite)
Step = TypeVar("Step")


@dataclass(frozen=True)
class EmittedSite(Generic[Site]):
    """A site and the node in its place.

    Attributes:
        site: the site.
        node: of the emitted model.
        attributes: of the node.
        values: values of tensors by name: captured ones, and the node's inputs that are initializers.
    """

    site: Site
    node: onnx.NodeProto
    attributes: Mapping[str, PlainValue]
    values: Mapping[str, np.ndarray]

    @property
    def fault_of_mask(self) -> str:
        """What is wrong with the node's mask; empty where it is that of the site."""
        mask, wanted = self.attributes.get("mask"), self.site.mask.text
        return "" if mask == wanted else f"the node's mask is {mask!r}, expected {wanted!r}"


def find_emitted_sites(
    emitted: onnx.ModelProto, sites: Sequence[Site], captured: Mapping[str, np.ndarray]
) -> Iterator[EmittedSite[Site]]:
    """The nodes in place of sites, in the order of the sites."""
    writers = {o: n for n in emitted.graph.node for o in n.output}
    stored = {t.name: t for t in emitted.graph.initializer if t.data_location != onnx.TensorProto.EXTERNAL}
    for site in sites:
        node = writers[site.node.output[0]]
        values = dict(captured)
        for name in node.input:
            if name and name not in values and name in stored:
                values[name] = onnx.numpy_helper.to_array(stored[name])
        yield EmittedSite(site, node, plain_attributes_of(node), values)


def rounding_of_output(site: NodeSite, captured: Mapping[str, np.ndarray]) -> Noisy:
    """The rounding error that the output of a site may have."""
    return Noisy(site.dtype, site.num_heads * site.head_size, size_or_one(captured.get(site.node.output[0])))


def size_or_one(array: np.ndarray | None) -> float:
    """The largest finite number of an array; 1 where it is not known."""
    return 1.0 if array is None else largest_number(array)


def in_type(step: Step, dtype: np.dtype) -> Step:
    """A step (a dataclass of arrays) with floats in the site's own type, where the model ran widened to fp32."""
    changed: dict[str, Any] = {
        name: array.astype(dtype)
        for name, array in vars(step).items()
        if isinstance(array, np.ndarray)
        and array.dtype == np.float32
        and dtype != np.float32
        and not name.endswith("_scale")  # of quantized caches: fp32 in any model
    }
    return replace(step, **changed) if changed else step  # type: ignore[type-var]
