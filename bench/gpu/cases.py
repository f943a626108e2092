# SPDX-License-Identifier: Apache-2.0
"""The points of the GPU grids: masks (three problems), paper (short and medium, D = 64), long (D = 128), decode (one query),
cached (one query that is appended to a KV cache), bits (an element mask in every tile), s2 (masks per KV head), run-time (key
blocks whose scores stand out) and 8-bit (attention that may quantize its operands).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bench.core.case import AttentionCase, named_mask

GRIDS = ("masks", "paper", "long", "decode", "bits", "cached", "s2", "run-time", "8-bit")
MASKS = (
    "dense", "causal", "window-128", "causal-1024", "longformer-128", "bigbird-23", "s2", "dilated-256",
)  # fmt: skip
MASKS_SHAPES = ((1, 16, 4096, 64), (1, 32, 8192, 128), (8, 12, 1024, 64))  # B, H, S, D
# Dense and causal alone: the long case of dense kernels, and short launches.
MASKS_PLAIN = (
    (1, 32, 16384, 128), (1, 16, 8192, 64), (1, 12, 128, 64), (1, 12, 512, 64), (1, 12, 1024, 64),
)  # fmt: skip
# Random blocks of 128, so that all tiles are full or empty: the cost of a full tile beside a dense kernel's.
MASKS_FULL = ("random-10", "random-20")
MASKS_FULL_SHAPES = ((1, 32, 8192, 128), (1, 32, 16384, 128), (1, 16, 8192, 64))
PAPER_MASKS = ("causal", "window", "longformer", "bigbird", "dilated")
PAPER_BATCHES = (1, 8, 16)
PAPER_LENGTHS = (128, 256, 512, 1024, 2048, 4096)
LONG_MASKS = ("window-128", "causal-1024", "longformer", "bigbird", "s2", "random-5", "random-10", "random-20")
LONG_LENGTHS = (4096, 8192, 16384, 32768, 65536)
LONG_GROUPS = ((32, "bfloat16"), (8, "float16"))  # key heads and dtype: half of all combinations
BITS_SHAPES = (
    (1, 16, 4096, 64), (1, 32, 8192, 128), (8, 12, 1024, 64), (1, 12, 512, 64), (1, 12, 2048, 64), (1, 32, 2048, 128),
)  # fmt: skip
DECODE_MASKS = ("dense", "causal-1024", "s2")
DECODE_LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
CACHED_MASKS = ("dense", "causal-1024")
# B, H, G, T, D: caches of 4 MiB to 28 GiB. Windows are timed where T is at least 4096.
CACHED_SHAPES = (
    (1, 32, 8, 1024, 128), (1, 32, 8, 4096, 128), (1, 32, 8, 16384, 128), (1, 32, 8, 65536, 128),
    (1, 32, 8, 131072, 128), (1, 32, 32, 16384, 128), (1, 32, 32, 32768, 64), (1, 32, 8, 8192, 64),
    (1, 8, 1, 8192, 256), (1, 8, 4, 131072, 256),
    (8, 32, 8, 1024, 128), (8, 32, 8, 4096, 128), (8, 32, 8, 16384, 128), (8, 32, 8, 131072, 128),
    (8, 32, 1, 8192, 128), (8, 32, 32, 4096, 128), (8, 12, 12, 2048, 64), (8, 8, 4, 8192, 256),
    (32, 32, 8, 1024, 128), (32, 32, 8, 4096, 128), (32, 32, 8, 32768, 128), (32, 32, 4, 8192, 64),
    (32, 16, 8, 4096, 256),
    (64, 32, 8, 1024, 128), (64, 32, 8, 8192, 128), (64, 16, 1, 16384, 128), (64, 32, 8, 114688, 128),
)  # fmt: skip
_SHORT_CACHE = 4096
S2_MASKS: tuple[str, ...] = ("s2-4", "s2-16", "sinks-1024", "slash-37")
# B, H, G, T, D of a step.
S2_STEPS = (
    (1, 32, 8, 16384, 128), (1, 32, 8, 65536, 128), (1, 32, 8, 131072, 128), (1, 32, 32, 65536, 128),
    (1, 32, 8, 65536, 64), (8, 32, 8, 65536, 128), (32, 32, 8, 16384, 128),
)  # fmt: skip
# B, H, G, S, D, dtype, masks of a prefill.
S2_PREFILLS: tuple[tuple[int, int, int, int, int, str, tuple[str, ...]], ...] = (
    (1, 20, 20, 6144, 96, "float16", ("slash-37",)),
    (1, 32, 8, 8192, 128, "float16", S2_MASKS),
    (1, 32, 8, 32768, 128, "bfloat16", S2_MASKS),
    (4, 16, 16, 32768, 128, "bfloat16", ("s2-4", "s2-16", "s2-4-128", "s2-16-128")),
)


# Of causal prompts, 1 of so many key blocks stands out.
RUN_TIME_MASKS = ("every-10", "every-4", "every-2")
RUN_TIME_LENGTHS = (4096, 16384, 32768, 131072)
# H, G, S, D, masks of a batch of one.
EIGHT_BIT_SHAPES: tuple[tuple[int, int, int, int, tuple[str, ...]], ...] = (
    (32, 32, 8192, 128, ("dense", "causal", "causal-1024")),
    (32, 8, 8192, 128, ("dense", "causal")),
    (32, 32, 32768, 128, ("dense", "causal", "causal-4096")),
    (16, 16, 8192, 64, ("dense", "causal")),
    (16, 16, 32768, 64, ("dense", "causal")),
)


def grid(
    name: str,
    masks: Sequence[str] | None = None,
    lengths: Sequence[int] | None = None,
    batches: Sequence[int] | None = None,
) -> Iterator[AttentionCase]:
    """The points of a grid; each of ``masks``, ``lengths``, ``batches`` keeps only what it lists.

    Raises:
        KeyError: when there is no such grid.
    """

    def kept(values: Sequence[int], chosen: Sequence[int] | None) -> list[int]:
        return [v for v in values if chosen is None or v in chosen]

    def named(values: Sequence[str]) -> list[str]:
        return [v for v in values if masks is None or v in masks]

    match name:
        case "masks":
            plain = (MASKS_PLAIN, MASKS[:2])
            for shapes, kinds in ((MASKS_SHAPES, MASKS), plain, (MASKS_FULL_SHAPES, MASKS_FULL)):
                for B, H, S, D in shapes:
                    for kind in named(kinds) if kept([S], lengths) else []:
                        expression, tables = named_mask(kind, S)
                        yield AttentionCase(name, kind, expression, B, H, H, S, S, D, "float16", tables)
        case "paper":
            for kind in named(PAPER_MASKS):
                for length in kept(PAPER_LENGTHS, lengths):
                    expression, tables = named_mask(kind, length)
                    for batch in kept(PAPER_BATCHES, batches):
                        yield AttentionCase(
                            name, kind, expression, batch, 12, 12, length, length, 64, "float16", tables
                        )
        case "long":
            for length in kept(LONG_LENGTHS, lengths):  # the longest last: a time limit leaves them out
                for kind in named(LONG_MASKS):
                    expression, tables = named_mask(kind, length)
                    for groups, dtype in LONG_GROUPS:
                        yield AttentionCase(name, kind, expression, 1, 32, groups, length, length, 128, dtype, tables)
        case "decode":
            for kind in named(DECODE_MASKS):
                for length in kept(DECODE_LENGTHS, lengths):
                    expression, tables = named_mask(kind, length)
                    yield AttentionCase(name, kind, expression, 1, 32, 8, 1, length, 128, "float16", tables)
        case "cached":
            for B, H, G, length, D in CACHED_SHAPES:
                if not kept([length], lengths) or not kept([B], batches):
                    continue
                for kind in named(CACHED_MASKS):
                    if kind == "dense" or length >= _SHORT_CACHE:
                        expression, tables = named_mask(kind, length)
                        yield AttentionCase(name, kind, expression, B, H, G, 1, length, D, "float16", tables)
        case "s2":
            sized = [(B, H, G, 1, T, D, "float16", S2_MASKS) for B, H, G, T, D in S2_STEPS]
            sized += [(B, H, G, S, S, D, dtype, kinds) for B, H, G, S, D, dtype, kinds in S2_PREFILLS]
            for B, H, G, S, length, D, dtype, masked in sized:
                for kind in named(masked) if kept([length], lengths) and kept([B], batches) else []:
                    expression, tables = named_mask(kind, length, H // G)
                    yield AttentionCase(name, kind, expression, B, H, G, S, length, D, dtype, tables)
        case "run-time":
            for length in kept(RUN_TIME_LENGTHS, lengths):
                for kind in named(RUN_TIME_MASKS):
                    expression, tables = named_mask(kind, length)
                    yield AttentionCase(name, kind, expression, 1, 32, 8, length, length, 128, "bfloat16", tables)
        case "8-bit":
            for H, G, length, D, listed in EIGHT_BIT_SHAPES:
                for kind in named(listed) if kept([length], lengths) else []:
                    expression, tables = named_mask(kind, length)
                    yield AttentionCase(name, kind, expression, 1, H, G, length, length, D, "bfloat16", tables)
        case "bits":
            for B, H, S, D in BITS_SHAPES:
                for kind in named(("bits",)) if kept([S], lengths) else []:
                    expression, tables = named_mask(kind, S)
                    yield AttentionCase(name, kind, expression, B, H, H, S, S, D, "float16", tables)
        case _:
            raise KeyError(name)


def anchor(D: int, dtype: str) -> AttentionCase:
    """The dense problem by which a full tile is timed: S = 8192."""
    H = {64: 16}.get(D, 32)
    return AttentionCase("anchor", "dense", "", 1, H, H, 8192, 8192, D, dtype)
