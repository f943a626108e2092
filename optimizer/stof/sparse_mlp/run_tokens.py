# SPDX-License-Identifier: Apache-2.0
"""How many tokens a run gives an MLP together: they share the weights that they read."""

from __future__ import annotations

import math
from dataclasses import dataclass

from stof.options import Options
from stof.sparse_mlp.density import NeuronCounts
from stof.sparse_mlp.site import MlpSite
from stof.symbolic import Symbolic
from stof.symbolic.algebra.sizes import evaluate_or_none, size_names

_MOST_FEW = 16  # tokens that CUDA's kernels for few tokens take, and that exact mode on the CPU is timed with


@dataclass(frozen=True)
class RunTokens:
    """The tokens of a run.

    Attributes:
        count: the number that decides; 0: not known, many.
        source: what states it, for people.
    """

    count: int
    source: str

    @property
    def is_many(self) -> bool:
        """Whether a run reads the weights of nearly all neurons, whatever a token needs."""
        return not 1 <= self.count <= _MOST_FEW

    def share_active(self, density: float) -> float:
        """The share of neurons that at least one token of a run needs, where tokens choose theirs independently."""
        return float(1 - (1 - density) ** self.count)


def tokens_of_runs(
    options: Options, symbolic: Symbolic, site: MlpSite, counts: NeuronCounts | None, has_cache: bool
) -> RunTokens:
    """The tokens of the runs that decide: stated by the model's fixed sizes or --shape, else as the model is used.

    With a KV cache the shortest runs decide, as decoding takes most of them. Given inputs may be prompts, in which neurons are
    counted. Without a cache the longest runs decide.

    Args:
        options: the user's, with ``shapes``.
        symbolic: of the model.
        site: the MLP.
        counts: of its neurons in runs on given inputs; None: there are none.
        has_cache: whether the model decodes token by token.
    """
    stated = _read_stated_tokens(options, symbolic, site, least=has_cache)
    if stated is not None:
        return stated
    if has_cache:
        return RunTokens(1, "the model has a KV cache")
    if counts is not None and counts.most_tokens <= _MOST_FEW:
        return RunTokens(counts.most_tokens, "the given inputs")
    return RunTokens(0, "the model has no KV cache")


def _read_stated_tokens(options: Options, symbolic: Symbolic, site: MlpSite, *, least: bool) -> RunTokens | None:
    """The fixed number of tokens, or the least or most by --shape; None where neither states it.

    A dimension that --shape leaves out has size 1 at least, and any size at most.
    """
    shape = symbolic.shape(site.gate or site.tokens_input)
    if not shape:
        return None
    names = set().union(*(size_names(d) for d in shape[:-1]))
    stated = names & options.shapes.keys()
    if names and (not stated or (not least and stated < names)):
        return None
    sizes = {n: options.shapes.get(n, (1, 1))[0 if least else 1] for n in names}
    counts = [evaluate_or_none(d, sizes) for d in shape[:-1]]
    if any(n is None for n in counts):  # a size that values decide
        return None
    return RunTokens(max(1, math.prod(n or 0 for n in counts)), "--shape" if names else "the model's fixed sizes")
