# SPDX-License-Identifier: Apache-2.0
"""MLPs on a CPU: what StofSparseMLP gains over the dense MLP, and why the dense one is faster.

Where weights come from memory, their bytes give the gain. Where a CPU's caches hold them, the call and its rows cost time
beside the bytes. Quantized weights without accuracy_level 4 are dequantized, which is faster only where few neurons are active;
they stay dense only where more were counted. Many tokens together read every weight and save multiplications alone.
"""

from __future__ import annotations

from stof.sparse_mlp.problem import MlpProblem

# Fitted to one thread of a Xeon with AVX-512 VNNI (docs/lab/cpu-experiments.md).
_DENSE_FP32_BYTES_PER_NS = 80.0  # with which ONNX Runtime reads weights in the caches
_DENSE_QUANTIZED_BYTES_PER_NS = 40.0  # likewise; int8 was not timed
_CALL_NS = 1000.0  # of a call, beyond the dense MLP's
_ROW_NS = 10.0  # of a weight's row that the operator reads, beyond its bytes
_LEAST_GAIN_IN_CACHES = 1.05
# An assumption for each MLP alone: larger ones come from memory, where rows and calls hide behind their bytes.
_CACHED_BYTES = 16 << 20
# The largest share of active neurons with which dequantized rows are faster: multiplications take their time, not bytes.
_MOST_ACTIVE_DEQUANTIZED = 0.3
# The largest share of active neurons at which runs of many tokens are faster than the dense MLP, by (has an up matmul, has
# quantized weights) (docs/lab/cpu-experiments.md).
_MOST_ACTIVE_OF_MANY_TOKENS = {(False, False): 0.03, (True, False): 0.07, (False, True): 0.1, (True, True): 0.25}


def estimate_gain_by_bytes(problem: MlpProblem) -> float:
    """The bytes of weights that one token reads in the dense MLP, over the operator's."""
    return 1 / problem.share_read


def estimate_gain_in_caches(problem: MlpProblem) -> float:
    """The dense MLP's time for one token over the operator's, with weights in a CPU's caches."""
    call = _CALL_NS + _ROW_NS * problem.rows_read
    bytes_per_ns = _DENSE_QUANTIZED_BYTES_PER_NS if problem.is_quantized else _DENSE_FP32_BYTES_PER_NS
    dense = problem.dense_bytes / bytes_per_ns
    return dense / (dense * problem.share_read + call)


def estimate_gain_on_cpu(problem: MlpProblem) -> float:
    """The estimate by bytes; where caches hold the weights, the smaller of both."""
    by_bytes = estimate_gain_by_bytes(problem)
    return by_bytes if problem.dense_bytes >= _CACHED_BYTES else min(by_bytes, estimate_gain_in_caches(problem))


def reason_slow_on_cpu(problem: MlpProblem, whom: str = "for one token") -> str:
    """Why a CPU computes tokens faster with the dense MLP; empty where it does not."""
    share = problem.assumed_density
    active = f"{100 * share:.3g} % active neurons" + (
        " (not measured: give --inputs)" if problem.density is None else ""
    )
    is_dequantized = problem.is_quantized and not problem.rounds_tokens
    if problem.density is not None and is_dequantized and share > _MOST_ACTIVE_DEQUANTIZED:
        most = f"{100 * _MOST_ACTIVE_DEQUANTIZED:.0f} %"
        return (
            f"{active}: quantized weights without accuracy_level 4 are dequantized, which is faster only where at most {most} "
            "are active"
        )
    gain = estimate_gain_in_caches(problem)
    if gain >= _LEAST_GAIN_IN_CACHES or problem.dense_bytes >= _CACHED_BYTES:
        return ""
    size = f"{problem.dense_bytes / 2**20:.2f} MiB of weights as ONNX Runtime holds them ({problem.sizes})"
    return (
        f"{size}, {active}: {gain:.2f}x is estimated {whom} by bytes, rows and the call in the caches, less than "
        f"{_LEAST_GAIN_IN_CACHES}x"
    )


def reason_slow_for_many_tokens_on_cpu(problem: MlpProblem) -> str:
    """Why runs of many tokens are faster with the dense MLP; empty where they are not."""
    most = _MOST_ACTIVE_OF_MANY_TOKENS[problem.is_gated, problem.is_quantized]
    gains = f"an MLP of this form gains where at most {100 * most:.0f} % of its neurons are active"
    if problem.density is None:
        return f"{gains}, which was not measured: give --inputs"
    return "" if problem.density <= most else f"{gains}, and {100 * problem.density:.3g} % are on the given inputs"
