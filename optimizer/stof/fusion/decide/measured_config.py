# SPDX-License-Identifier: Apache-2.0
"""What is measured of a region, and the keys by which the tuning cache stores it.

The keys are those of every version that has measured: what is stored is read back, and older versions read it, too.
"""

from __future__ import annotations

from dataclasses import dataclass

from stof.fusion.search.space import FusionScheme, Segment, decode, encode, fused_segments

ORIGINAL = "original"  # the region as it is
# Entries beside the measurements of a region: the seconds of --tune that its search had ...
SEARCHED = "searched"
COMPLETE = 1e9  # ... or this, where the search ended by itself
INTERLEAVED = "in turns"  # the original and whole schemes were timed in turns
_MATMULS_SUFFIX, _NORMS_SUFFIX = "p", "n"
_HEX_DIGITS = frozenset("0123456789abcdef")


@dataclass(frozen=True)
class LoneOperators:
    """Operators of a region that may become operators of the library by themselves."""

    matmuls: tuple[Segment, ...] = ()
    norms: tuple[Segment, ...] = ()

    def configs(self, scheme: FusionScheme) -> list[ChainConfig]:
        """The configurations of a scheme: matmuls and norms that are alone in it stay with the runtime, or do not."""
        matmuls, norms = ([False, True] if some else [False] for some in (self.matmuls, self.norms))
        return [ChainConfig.of_scheme(scheme, m, n) for n in norms for m in matmuls]


@dataclass(frozen=True)
class ChainConfig:
    """One way to compute a region.

    Attributes:
        bits: the scheme as ``encode`` writes it.
        fuses_matmuls: whether matmuls that are alone in the scheme become operators of the library.
        fuses_norms: the same of norms.
    """

    bits: int
    fuses_matmuls: bool = False
    fuses_norms: bool = False

    @staticmethod
    def of_scheme(scheme: FusionScheme, fuses_matmuls: bool = False, fuses_norms: bool = False) -> ChainConfig:
        """A scheme, by default with all lone operators left to the runtime."""
        return ChainConfig(encode(scheme), fuses_matmuls, fuses_norms)

    @property
    def key(self) -> str:
        """The key in the tuning cache; :func:`read_config` reads it back."""
        matmuls = _MATMULS_SUFFIX if self.fuses_matmuls else ""
        norms = _NORMS_SUFFIX if self.fuses_norms else ""
        return f"{self.bits:x}{matmuls}{norms}"

    def segments(self, count: int, lone: LoneOperators) -> tuple[Segment, ...]:
        """The segments that become operators of the library.

        There is none where a region of ``count`` operators has no such scheme, or no operators that this fuses alone.
        """
        if (self.fuses_matmuls and not lone.matmuls) or (self.fuses_norms and not lone.norms):
            return ()
        try:
            scheme = decode(self.bits, count)
        except ValueError:
            return ()
        matmuls = lone.matmuls if self.fuses_matmuls else ()
        norms = lone.norms if self.fuses_norms else ()
        return fused_segments(scheme, (*matmuls, *norms))


def read_config(key: str) -> ChainConfig | None:
    """The configuration that a stored key names; None for the original, notes and what other versions may write."""
    digits = key.removesuffix(_NORMS_SUFFIX)
    fuses_norms = digits != key
    without_suffixes = digits.removesuffix(_MATMULS_SUFFIX)
    if not without_suffixes or not _HEX_DIGITS.issuperset(without_suffixes):
        return None
    return ChainConfig(int(without_suffixes, 16), without_suffixes != digits, fuses_norms)


@dataclass(frozen=True)
class SegmentConfig:
    """One segment of a region, measured for the search.

    Attributes:
        segment: the operators.
        is_lone_norm: whether it is a norm that a chain computes by itself.
    """

    segment: Segment
    is_lone_norm: bool = False

    @property
    def key(self) -> str:
        """The key in the tuning cache."""
        start, end = self.segment
        return f"operators {start} to {end}" + (" by themselves as a chain" if self.is_lone_norm else "")
