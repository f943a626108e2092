# SPDX-License-Identifier: Apache-2.0
"""The reasons for which an MLP stays dense: the target has no operator for it, its outputs differ too much, or it is slower."""

from __future__ import annotations

from dataclasses import replace

from stof.op_rewrite import Job
from stof.prompts.loss import has_logits
from stof.runtime.library import op_limits
from stof.sparse_mlp.activations import ACTIVATIONS
from stof.sparse_mlp.decide.cpu import (
    estimate_gain_by_bytes,
    estimate_gain_on_cpu,
    reason_slow_for_many_tokens_on_cpu,
    reason_slow_on_cpu,
)
from stof.sparse_mlp.decide.cuda import reason_slow_for_many_tokens_on_cuda, reason_slow_on_cuda
from stof.sparse_mlp.problem import MlpProblem
from stof.sparse_mlp.run_tokens import RunTokens
from stof.sparse_mlp.site import OP
from stof.targets import Target

_LEAST_GAIN_BY_BYTES = 1.1  # below, a call costs as much as it saves
_MOST_ERROR = 0.2  # relative output error of an MLP, in models without logits, whose loss cannot be measured
# The neurons that a density is of.
ON_INPUTS = "active on the given inputs"
ON_PROMPTS = "computed on held-out prompts"


def estimate_gain(problem: MlpProblem, target: Target) -> float:
    """The dense MLP's time for one token over the operator's."""
    return estimate_gain_by_bytes(problem) if target.uses_gpu else estimate_gain_on_cpu(problem)


def reason_no_operator(job: Job, activation: str = "") -> str:
    """Why no node can be written, or none with an activation; empty where it can."""
    if (limits := op_limits().get(OP)) is None:
        return f"the plugin library has no {OP}; install one of this version"
    if not limits["targets"][job.target.name]["types"]:
        what = "TensorRT plugin" if job.target.keeps_plugins else f"kernels for --target {job.target.name}"
        return f"{OP} has no {what}"
    if activation and activation not in limits.get("activations", ACTIVATIONS):
        return f"{OP} of the plugin library has no {activation}; install one of this version"
    return ""


def reason_inexact(job: Job, error: float | None, max_error: float | None) -> str:
    """Why the output error of an MLP keeps it dense; empty where it does not.

    Args:
        job: the optimization.
        error: on held-out prompts; None: not measured.
        max_error: that the user allows; None: the default of the model's kind.
    """
    most = max_error
    if most is None and not has_logits(job.model):
        most = _MOST_ERROR
    if most is None or error is None or error <= most or job.options.force:
        return ""
    return (
        f"its output error on held-out prompts is {error:.3g}, max_error allows {most:g}; compute more neurons, raise max_error "
        "or use --force"
    )


def reason_slow(target: Target, problem: MlpProblem, tokens: RunTokens) -> str:
    """Why the dense MLP is faster for the tokens of a run, where neurons are left out for their zeros; empty where it is not."""
    if tokens.is_many:
        return _reason_slow_for_many_tokens(target, problem, tokens)
    if tokens.count > 1:
        return _reason_slow_for_few_tokens(target, problem, tokens)
    return reason_slow_for_one_token(target, problem, ON_INPUTS)


def reason_slow_for_one_token(target: Target, problem: MlpProblem, what: str, whom: str = "for one token") -> str:
    """Why the dense MLP is faster for a token, or for a few together; empty where it is not.

    Args:
        target: what runs the model.
        problem: the MLP.
        what: the neurons that its density is of.
        whom: the tokens.
    """
    gain = estimate_gain_by_bytes(problem)
    if gain >= _LEAST_GAIN_BY_BYTES:
        return reason_slow_on_cuda(problem) if target.uses_gpu else reason_slow_on_cpu(problem, whom)
    active = "" if problem.density is None else f"{100 * problem.density:.0f} % of its neurons are {what}: "
    return f"{active}{gain:.2f}x is estimated {whom} by bytes of weights, less than {_LEAST_GAIN_BY_BYTES}x"


def _reason_slow_for_many_tokens(target: Target, problem: MlpProblem, tokens: RunTokens) -> str:
    why = f"{tokens.source}, so its runs have many tokens"
    if tokens.count:
        why = f"its runs have {tokens.count} tokens by {tokens.source}"
    if target.uses_gpu:
        return f"{why}, {reason_slow_for_many_tokens_on_cuda()}"
    reason = reason_slow_for_many_tokens_on_cpu(problem)
    return reason and f"{why}: {reason}"


def _reason_slow_for_few_tokens(target: Target, problem: MlpProblem, tokens: RunTokens) -> str:
    """A few tokens read the weights of all neurons that one of them needs."""
    each = problem.assumed_density
    share = tokens.share_active(each)
    together = replace(problem, density=share)
    reason = reason_slow_for_one_token(target, together, "active for one of them", "for them together")
    if not reason:
        return ""
    measured = "not measured: give --inputs" if problem.density is None else "on the given inputs"
    return (
        f"its runs have {tokens.count} tokens by {tokens.source}, which need {100 * share:.3g} % of its neurons together where "
        f"each needs {100 * each:.3g} % ({measured}): {reason}"
    )
