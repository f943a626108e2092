# SPDX-License-Identifier: Apache-2.0
"""MLPs on a GPU: why the dense one is faster."""

from __future__ import annotations

from stof.sparse_mlp.problem import MlpProblem

# Above, the kernels for one token are no faster than a dense GEMV (docs/lab/cuda-experiments.md).
_MOST_ACTIVE = 0.4


def reason_slow_on_cuda(problem: MlpProblem) -> str:
    """Why a GPU computes one token, or a few, faster with the dense MLP; empty where it does not."""
    if problem.density is not None and problem.density <= _MOST_ACTIVE:
        return ""
    most = f"{100 * _MOST_ACTIVE:.0f} %"
    if problem.density is None:
        return f"a GPU gains where at most {most} of the neurons are active, which was not measured: give --inputs"
    return f"{100 * problem.density:.0f} % of its neurons are computed: a GPU gains where at most {most} are"


def reason_slow_for_many_tokens_on_cuda() -> str:
    """Why runs of many tokens are faster with the dense MLP."""
    return "for which a GPU computes all neurons"
