# SPDX-License-Identifier: Apache-2.0
"""Ranges of shapes: what ``--min``, ``--opt`` and ``--max`` say, in trtexec's spelling, and the profile that they give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stof.errors import ArgumentError

Shape = tuple[int, ...]


def parse_shapes(text: str, option: str) -> dict[str, Shape]:
    """``input_ids:1x128,attention_mask:1x128`` as shapes by name. Names may hold colons; a scalar is ``x:scalar``.

    Raises:
        ArgumentError: naming the option and what was found.
    """
    shapes: dict[str, Shape] = {}
    for part in text.split(","):
        name, sign, sizes = part.rpartition(":")
        try:
            shape = () if sizes == "scalar" else tuple(int(n) for n in sizes.split("x"))
        except ValueError:
            shape = (-1,)
        if not sign or not name or any(n < 0 for n in shape):
            raise ArgumentError(f"{option} {part!r}: expected NAME:SIZExSIZE.., for example input_ids:1x128")
        if name in shapes:
            raise ArgumentError(f"{option} names {name!r} twice; give it once")
        shapes[name] = shape
    return shapes


def merge_shapes(texts: Sequence[str], option: str) -> dict[str, Shape]:
    """The same of an option that was given several times."""
    shapes: dict[str, Shape] = {}
    for text in texts:
        for name, shape in parse_shapes(text, option).items():
            if name in shapes:
                raise ArgumentError(f"{option} names {name!r} twice; give it once")
            shapes[name] = shape
    return shapes


@dataclass(frozen=True)
class Ranges:
    """Least, usual and greatest shapes by the name of an input."""

    least: Mapping[str, Shape]
    usual: Mapping[str, Shape]
    most: Mapping[str, Shape]

    def of(self, name: str, shape: Shape) -> tuple[Shape, Shape, Shape]:
        """The three shapes of an input with the network's shape ``shape`` (-1: any size).

        One or two of the three stand for those that are not given: ``opt`` alone fixes the shape, ``min`` alone does, too.

        Raises:
            ArgumentError: naming the input, what was found and what was expected.
        """
        stated_shapes = [self.least.get(name), self.usual.get(name), self.most.get(name)]
        if all(s is None for s in stated_shapes):
            example = "x".join(str(1 if i == 0 else 128) if n < 0 else str(n) for i, n in enumerate(shape))
            raise ArgumentError(
                f"input {name!r} has shape {_format_shape(shape)}, and no option says how large it gets: give --min, --opt and "
                f"--max, as in --opt {name}:{example}"
            )
        least, usual, most = stated_shapes
        least = next(s for s in (least, usual, most) if s is not None)
        most = next(s for s in (most, usual, least) if s is not None)
        usual = most if usual is None else usual
        for option, stated in zip(("--min", "--opt", "--max"), stated_shapes, strict=True):
            if stated is not None and (
                len(stated) != len(shape) or any(n not in (-1, m) for n, m in zip(shape, stated, strict=True))
            ):
                raise ArgumentError(
                    f"{option} gives input {name!r} the shape {_format_shape(stated)}; the model has "
                    f"{_format_shape(shape)} (-1: any size)"
                )
        if any(not a <= b <= c for a, b, c in zip(least, usual, most, strict=True)):
            raise ArgumentError(
                f"input {name!r} has --min {_format_shape(least)}, --opt {_format_shape(usual)} and --max "
                f"{_format_shape(most)}, which do not rise"
            )
        return least, usual, most

    def check_names(self, names: Sequence[str]) -> None:
        """Refuses names that no input of the model has.

        Raises:
            ArgumentError: naming the option, the input, and those that there are.
        """
        for option, shapes in (("--min", self.least), ("--opt", self.usual), ("--max", self.most)):
            for name in shapes:
                if name not in names:
                    raise ArgumentError(
                        f"{option} names {name!r}, which is no input of the model; these are: {', '.join(names)}"
                    )


def _format_shape(shape: Shape) -> str:
    return "x".join(str(n) for n in shape) or "scalar"
