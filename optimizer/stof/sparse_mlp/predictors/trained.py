# SPDX-License-Identifier: Apache-2.0
"""A low-rank predictor that is trained: logistic regression of active neurons on tokens."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from stof.errors import ArgumentError
from stof.sparse_mlp.predictors.fit_tokens import check_rank, check_tokens, choose_held_out_tokens
from stof.sparse_mlp.predictors.order_statistics import row_blocks
from stof.sparse_mlp.predictors.selection_target import check_target, fit_margin_threshold
from stof.sparse_mlp.predictors.selector import Flags, Floats, NeuronSelector

_HELD_OUT = 10  # one token in so many selects the best epoch
_BATCH = 128  # tokens of a step
_RATE, _DECAY = 3e-3, 0.01  # of Adam
_BETA1, _BETA2, _EPSILON = 0.9, 0.99, 1e-8
_PATIENCE = 4  # epochs without a better one that end the training
_MOST_WEIGHT = 100.0


@dataclass
class _Parameters:
    """Logits are (tokens · downᵀ) · upᵀ + bias."""

    down: Floats
    up: Floats
    bias: Floats

    def arrays(self) -> tuple[Floats, Floats, Floats]:
        return self.down, self.up, self.bias

    def copy(self) -> _Parameters:
        return _Parameters(*(a.copy() for a in self.arrays()))


@dataclass(frozen=True)
class _Validation:
    """Measures parameters on held-out tokens, at the threshold of logits that reaches the share or the recall."""

    tokens: Floats
    active: Flags
    active_share: float | None
    recall: float | None

    def threshold_and_f1(self, parameters: _Parameters) -> tuple[float, float]:
        low = self.tokens @ parameters.down.T

        def margins() -> Iterator[tuple[Floats, Flags]]:
            for rows in row_blocks(len(parameters.up), len(low)):
                logits = np.asarray(low @ parameters.up[rows].T + parameters.bias[rows], np.float32)
                yield logits, self.active[:, rows]

        has_target = self.active_share is not None or self.recall is not None
        level = fit_margin_threshold(margins, self.active_share, self.recall) if has_target else 0.0
        both = marked = 0
        for logits, active in margins():
            selected = logits > level
            both += int(np.count_nonzero(selected & active))
            marked += int(np.count_nonzero(selected)) + int(np.count_nonzero(active))
        return level, 2 * both / marked if marked else 1.0


def train_selector(
    inputs: Floats,
    active: Flags,
    rank: int,
    seed: int = 0,
    epochs: int = 20,
    seconds: float = 120.0,
    start: NeuronSelector | None = None,
    positive_weight: float | None = None,
    active_share: float | None = None,
    recall: float | None = None,
) -> NeuronSelector:
    """Predicts active neurons by a low-rank logistic regression, trained by Adam with decoupled weight decay.

    The epoch with the best F1 on a held-out tenth of the tokens is taken; it may be the start. The same seed gives the
    same selector, unless ``seconds`` end the training.

    Args:
        inputs: fp32 [T, K], calibration tokens.
        active: bool [T, F], the neurons that should be selected.
        rank: R, at most F and K.
        seed: of the order of the tokens.
        epochs: passes over the tokens, at most; 0: the start is kept.
        seconds: no step begins later.
        start: a predictor of this rank, as ``fit_svd_selector`` gives one; None: a reduced-rank regression on the tokens.
        positive_weight: how often the loss counts an active neuron. More selects more neurons. None: as if a third were
            active.
        active_share: the share of neurons to select.
        recall: the share of active neurons to select; with neither, those that the regression says.

    Raises:
        ArgumentError: for arrays of other types or shapes, values that are not finite, no token, or a wrong number.
    """
    check_tokens(inputs, active)
    size, neurons = inputs.shape[1], active.shape[1]
    check_rank(rank, neurons, size)
    check_target(active_share, recall)
    _check_limits(epochs, seconds, positive_weight)
    deadline = time.monotonic() + seconds
    is_held_out = choose_held_out_tokens(len(inputs), _HELD_OUT)
    fitted = np.flatnonzero(~is_held_out)
    seen = np.flatnonzero(is_held_out) if is_held_out.any() else fitted
    mean = inputs[fitted].mean(0, dtype=np.float64).astype(np.float32)
    spread = float(np.sqrt(np.square(inputs[fitted] - mean, dtype=np.float64).mean()))
    scale = np.float32(spread if spread > 1e-20 else 1.0)
    tokens = (inputs - mean) / scale
    weight = _balance_weight(active[fitted]) if positive_weight is None else positive_weight

    if start is None:
        parameters = _regression(tokens[fitted], active[fitted], rank, seed)
    else:
        parameters = _parameters_of(start, mean, scale, rank, neurons, size)
    if epochs:
        _normalize(parameters, tokens[fitted], active[fitted], weight)
    validation = _Validation(tokens[seen], active[seen], active_share, recall)
    parameters, level = _train(parameters, tokens[fitted], active[fitted], validation, weight, seed, epochs, deadline)
    down = parameters.down / scale
    limit = float(np.finfo(np.float32).max)
    threshold = np.clip(level - parameters.bias.astype(np.float64) + parameters.up @ (down @ mean), -limit, limit)
    return NeuronSelector(threshold.astype(np.float32), down, parameters.up)


def _check_limits(epochs: int, seconds: float, positive_weight: float | None) -> None:
    if epochs < 0 or not seconds >= 0:
        raise ArgumentError(f"epochs are {epochs} and seconds {seconds}, expected 0 or more")
    if positive_weight is not None and not 0 < positive_weight <= _MOST_WEIGHT:
        raise ArgumentError(f"positive_weight is {positive_weight}, expected more than 0, up to {_MOST_WEIGHT:.0f}")


def _balance_weight(active: Flags) -> float:
    """The weight with which active neurons count as a third of all; 1 where they are more."""
    share = np.count_nonzero(active) / active.size
    return float(np.clip((1 - share) / (2 * share), 1.0, _MOST_WEIGHT)) if share else 1.0


def _regression(tokens: Floats, active: Flags, rank: int, seed: int) -> _Parameters:
    """A reduced-rank least-squares regression of the flags, by two rounds of randomized subspace iteration."""
    neurons = active.shape[1]
    share = active.mean(0, dtype=np.float64).astype(np.float32)
    basis = np.random.default_rng(seed).standard_normal((neurons, rank), np.float32)
    up, down = basis, np.empty((rank, tokens.shape[1]), np.float32)
    for _ in range(2):
        mixed = np.zeros((len(tokens), rank), np.float32)
        for rows in row_blocks(neurons, len(tokens)):
            mixed += (active[:, rows] - share[rows]) @ up[rows]
        down = np.linalg.qr(tokens.T @ mixed)[0].T.astype(np.float32)
        low = tokens @ down.T
        gram = (low.T @ low).astype(np.float64)
        gram[np.diag_indices(rank)] += 1e-2 * np.trace(gram) / rank + 1e-30
        crossed = np.empty((neurons, rank), np.float32)
        for rows in row_blocks(neurons, len(tokens)):
            crossed[rows] = (active[:, rows] - share[rows]).T @ low
        up = np.linalg.solve(gram, crossed.T.astype(np.float64)).T.astype(np.float32)
    # Least squares gives the share; logits vary more where it is near 0 or 1.
    odds = np.clip(share, 0.5 / len(tokens), 1 - 0.5 / len(tokens))
    return _Parameters(down, up / (odds * (1 - odds))[:, None], np.log(odds / (1 - odds)))


def _parameters_of(
    start: NeuronSelector, mean: Floats, scale: np.float32, rank: int, neurons: int, size: int
) -> _Parameters:
    down, up = start.predictor_down, start.predictor_up
    if down is None or up is None or start.predictor_activation != "none":
        raise ArgumentError("start is no linear predictor; give one, or leave it out")
    if down.shape != (rank, size) or up.shape != (neurons, rank):
        raise ArgumentError(
            f"start has predictor_down {list(down.shape)} and predictor_up {list(up.shape)}, expected {[rank, size]} and "
            f"{[neurons, rank]}"
        )
    bias = np.broadcast_to(up @ (down @ mean) - start.threshold, (neurons,)).astype(np.float32)
    return _Parameters(down * scale, up.copy(), bias)


def _normalize(parameters: _Parameters, tokens: Floats, active: Flags, weight: float) -> None:
    """Scales hidden values to variance 1 each; scales and shifts logits so that their loss on some tokens is smallest."""
    some = slice(None, None, max(1, len(tokens) // 256))
    deviation = (tokens[some] @ parameters.down.T).std(0)
    deviation = np.maximum(deviation, 1e-6 * deviation.max(initial=1e-24) + 1e-30)
    parameters.down /= deviation[:, None]
    parameters.up *= deviation
    neurons = np.arange(0, len(parameters.up), max(1, len(parameters.up) // 1024))
    logits = tokens[some] @ parameters.down.T @ parameters.up[neurons].T + parameters.bias[neurons]
    flags = active[some][:, neurons]
    typical = max(float(np.abs(logits).mean()), 1e-30)
    candidates = [(f / typical, s) for f in 2.0 ** np.arange(-2, 5) for s in np.arange(-3, 3.5, 0.5)]
    factor, shift = min(candidates, key=lambda c: _loss(np.asarray(logits * c[0] + c[1], np.float32), flags, weight))
    parameters.up *= np.float32(factor)
    parameters.bias *= np.float32(factor)
    parameters.bias += np.float32(shift)


def _loss(logits: Floats, active: Flags, weight: float) -> float:
    """Binary cross-entropy, the active ones counted ``weight`` times."""
    of_active, of_idle = np.logaddexp(0, -logits), np.logaddexp(0, logits)
    return float(np.where(active, weight * of_active, of_idle).mean(dtype=np.float64))


def _train(
    parameters: _Parameters,
    tokens: Floats,
    active: Flags,
    validation: _Validation,
    weight: float,
    seed: int,
    epochs: int,
    deadline: float,
) -> tuple[_Parameters, float]:
    """The parameters of the best epoch, and the threshold of their logits."""
    rng = np.random.default_rng(seed)
    first, second = ([np.zeros_like(a) for a in parameters.arrays()] for _ in range(2))
    level, best_f1 = validation.threshold_and_f1(parameters)
    best, last_better = parameters.copy(), -1
    steps, total = 0, max(1, epochs * -(-len(tokens) // _BATCH))
    for epoch in range(epochs):
        order = rng.permutation(len(tokens))
        for begin in range(0, len(order), _BATCH):
            if time.monotonic() >= deadline:
                break
            batch = order[begin : begin + _BATCH]
            steps += 1
            rate = _RATE * min(steps / (0.1 * total), 1.0) * 0.5 * (1 + np.cos(np.pi * steps / total))
            _step(parameters, first, second, tokens[batch], active[batch], weight, steps, float(rate))
        own_threshold, f1 = validation.threshold_and_f1(parameters)
        if f1 > best_f1:
            best, level, best_f1, last_better = parameters.copy(), own_threshold, f1, epoch
        if epoch - last_better >= _PATIENCE or time.monotonic() >= deadline:
            break
    return best, level


def _step(
    parameters: _Parameters,
    first: list[Floats],
    second: list[Floats],
    tokens: Floats,
    active: Flags,
    weight: float,
    step: int,
    rate: float,
) -> None:
    """One step of Adam; the loss of a token is the sum over its neurons."""
    low = tokens @ parameters.down.T
    logits = low @ parameters.up.T + parameters.bias
    share = 1 / (1 + np.exp(-np.clip(logits, -30, 30)))
    errors = np.where(active, np.float32(weight) * (share - 1), share) / np.float32(len(tokens))
    gradients = ((errors @ parameters.up).T @ tokens, errors.T @ low, errors.sum(0))
    corrections = 1 - _BETA1**step, 1 - _BETA2**step
    for i, (values, gradient) in enumerate(zip(parameters.arrays(), gradients, strict=True)):
        first[i] *= np.float32(_BETA1)
        first[i] += np.float32(1 - _BETA1) * gradient
        second[i] *= np.float32(_BETA2)
        second[i] += np.float32(1 - _BETA2) * np.square(gradient)
        if i < 2:  # the bias does not decay: rare neurons have a large one
            values *= np.float32(1 - rate * _DECAY)
        root = np.sqrt(second[i] / np.float32(corrections[1])) + np.float32(_EPSILON)
        values -= np.float32(rate / corrections[0]) * first[i] / root
