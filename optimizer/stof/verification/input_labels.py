# SPDX-License-Identifier: Apache-2.0
"""The sizes of a model's inputs in words: what was run, by the names that the model gives its dimensions and inputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import onnx

_MOST_NAMES = 6  # dimensions by themselves; of more, those of one size are said together
_MOST_GROUPS = 6
_SHOWN = 2  # names of a group


def describe_feeds(graph_inputs: Iterable[onnx.ValueInfoProto], feeds: Mapping[str, np.ndarray]) -> str:
    """The sizes of inputs by name, as :func:`describe_sizes` has it, and the values of single integers and flags.

    Args:
        graph_inputs: the model's.
        feeds: the arrays by name; inputs that are not among them do not count.
    """
    single = {n: a for n, a in feeds.items() if a.ndim <= 1 and a.size == 1 and a.dtype.kind in "iub"}
    values = {name: str(array.reshape(-1)[0]) for name, array in single.items()}
    return describe_sizes(graph_inputs, {name: array.shape for name, array in feeds.items()}, values)


def describe_sizes(
    graph_inputs: Iterable[onnx.ValueInfoProto],
    shapes_by_name: Mapping[str, Sequence[int]],
    values_by_name: Mapping[str, str] | None = None,
) -> str:
    """The sizes of inputs by name: "batch_size 1, sequence_length 512", or "pixel_values [1, 3, 224, 224]".

    Named dimensions come first, then the shapes of inputs whose lengths have no name, then the values of single integers and
    flags, which say how long a past is for instance.

    Args:
        graph_inputs: the model's.
        shapes_by_name: the shape of each; inputs that are not among them do not count.
        values_by_name: the values of single integers and flags, as far as they are known.
    """
    inputs = [value for value in graph_inputs if value.name in shapes_by_name]
    value_texts = values_by_name or {}
    sizes = _sizes_by_name(inputs, shapes_by_name)
    shapes: dict[str, list[str]] = {}
    values: dict[str, list[str]] = {}
    for value in inputs:
        shape = shapes_by_name[value.name]
        if value.name in value_texts:
            values.setdefault(f"= {value_texts[value.name]}", []).append(value.name)
        elif _has_unnamed_length(value, shape, sizes):
            shapes.setdefault(str(list(shape)), []).append(value.name)
    named = [([name], str(size)) for name, size in sizes.items()]
    if len(named) > _MOST_NAMES:
        named = [([n for n in sizes if sizes[n] == size], str(size)) for size in dict.fromkeys(sizes.values())]
    groups = (
        named,
        [(names, said) for said, names in shapes.items()],
        [(names, said) for said, names in values.items()],
    )
    return ", ".join(words for group in groups for words in _describe_groups(group)) or "no inputs"


def _dim_names(value: onnx.ValueInfoProto, rank: int) -> list[str]:
    """The name of each dimension; empty for sizes that are fixed, or named by a number as some exporters do."""
    dims = [d.dim_param for d in value.type.tensor_type.shape.dim]
    return ["" if name.isdigit() else name for name in dims] if len(dims) == rank else [""] * rank


def _sizes_by_name(
    inputs: Sequence[onnx.ValueInfoProto], shapes_by_name: Mapping[str, Sequence[int]]
) -> dict[str, int]:
    """The size of each named dimension, in the order of inputs; without names that stand for several sizes."""
    sizes_by_name: dict[str, set[int]] = {}
    for value in inputs:
        shape = shapes_by_name[value.name]
        for name, size in zip(_dim_names(value, len(shape)), shape, strict=True):
            if name:
                sizes_by_name.setdefault(name, set()).add(size)
    return {name: next(iter(sizes)) for name, sizes in sizes_by_name.items() if len(sizes) == 1}


def _has_unnamed_length(value: onnx.ValueInfoProto, shape: Sequence[int], sizes: Mapping[str, int]) -> bool:
    """Whether names do not say how long an input is: a batch in front says nothing about it. A single number has no length."""
    names = _dim_names(value, len(shape))
    if len(shape) > 1:
        return not any(name in sizes for name in names[1:])
    return list(shape) not in ([], [1]) and names[0] not in sizes


def _describe_groups(groups: Sequence[tuple[Sequence[str], str]]) -> list[str]:
    """Each group of names with what is said of it; of many names the first ones, of many groups the first ones."""
    words = []
    for names, said in groups[:_MOST_GROUPS]:
        more = len(names) - _SHOWN
        listed = ", ".join(names) if more <= 1 else f"{', '.join(names[:_SHOWN])} and {more} more"
        words.append(f"{listed} {said}")
    remaining = sum(len(names) for names, _ in groups[_MOST_GROUPS:])
    return [*words, f"{remaining} others"] if remaining else words
