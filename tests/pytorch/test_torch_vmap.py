# SPDX-License-Identifier: Apache-2.0
"""stof.torch.attention under torch.func.vmap, over tensors and over operands of the mask, against a loop of dense attention.

The kind: a transform that the operator does not implement answers with a number, or with an error of PyTorch's internals.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import func
from torch_oracle import attention_fp64, pairs

import stof.torch
from stof.errors import UnsupportedError

N, B, H, G, S, T, D, DV = 3, 2, 4, 2, 7, 9, 8, 6
SHAPES = ((B, H, S, D), (B, G, T, D), (B, G, T, DV))
GENERATOR = torch.Generator().manual_seed(7)
OPERANDS = {
    "pad": torch.rand(N, B, T, generator=GENERATOR) < 0.7,
    "segment_q": torch.randint(0, 3, (N, B, S), generator=GENERATOR),
    "segment_k": torch.randint(0, 3, (N, B, T), generator=GENERATOR),
    "lengths": torch.randint(1, T + 1, (N, B), generator=GENERATOR),
    "table0": torch.randint(0, 2, (N, B, S, T), generator=GENERATOR),
}


def draw(*shapes: tuple[int, ...], dtype: Any = torch.float32, seed: int = 3) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]


def run(text: str, q: Any, k: Any, v: Any, operands: dict[str, Any], empty_rows: str = "zero") -> Any:
    tables = {name: t for name, t in operands.items() if name.startswith("table")}
    vectors = {name: t for name, t in operands.items() if name not in tables}
    return stof.torch.attention(q, k, v, text, tables=tables, empty_rows=empty_rows, **vectors)


def expected(text: str, tensors: list[Any], axes: tuple[Any, ...], operands: dict[str, Any], mapped: set[str]) -> Any:
    """Dense attention for each index in turn."""
    results = []
    for n in range(N):
        q, k, v = (t if axis is None else t.select(axis, n) for t, axis in zip(tensors, axes, strict=True))
        named = {name: t[n] if name in mapped else t for name, t in operands.items()}
        results.append(attention_fp64(q, k, v, pairs(text, q.shape[0], H, S, T, **named))[0])
    return torch.stack(results)


def check(text: str, axes: tuple[Any, ...], operands: dict[str, Any], mapped: set[str], batch: int = B) -> None:
    shapes = [(batch, *shape[1:]) for shape in SHAPES]
    tensors = [
        t if axis is None else t.movedim(0, axis)
        for t, axis in zip(
            draw(*(s if axis is None else (N, *s) for s, axis in zip(shapes, axes, strict=True))), axes, strict=True
        )
    ]
    named_axes = {name: 0 if name in mapped else None for name in operands}
    mapped_run = func.vmap(
        lambda q, k, v, operands: run(text, q, k, v, operands), in_dims=(*axes, named_axes if operands else None)
    )
    found = mapped_run(*tensors, operands)
    torch.testing.assert_close(found.double(), expected(text, tensors, axes, operands, mapped), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "axes", [(0, 0, 0), (1, 4, 2), (0, None, None), (None, 0, None), (None, None, 3), (4, 0, None)]
)
@pytest.mark.parametrize("text", ["", "k <= q and (k + h) % 3 != 1", "k + b <= q", "k <= q or b == 1"])
def test_over_tensors(text: str, axes: tuple[Any, ...]) -> None:
    check(text, axes, {}, set())


MASKS = {
    "pad": "pad[b, k] and k <= q + 1",
    "segments": "segment_q[b, q] == segment_k[b, k] or k == b",
    "lengths": "k < lengths[b]",
    "table": "table0[b, q, k] == 1 or b == 1 and k < 2",
    "all": "pad[b, k] and segment_q[b, q] <= segment_k[b, k] and k < lengths[b] + b and table0[b, q, k] == 1",
}
READ = {
    "pad": ["pad"],
    "segments": ["segment_q", "segment_k"],
    "lengths": ["lengths"],
    "table": ["table0"],
    "all": list(OPERANDS),
}


@pytest.mark.parametrize("axes", [(0, 0, 0), (0, None, None), (None, None, None)])
@pytest.mark.parametrize("shared", ["batch", "one"])
@pytest.mark.parametrize("name", MASKS)
def test_over_operands_of_the_mask(name: str, shared: str, axes: tuple[Any, ...]) -> None:
    operands = {role: OPERANDS[role] if shared == "batch" else OPERANDS[role][:, :1] for role in READ[name]}
    check(MASKS[name], axes, operands, set(operands))
    first, *others = operands  # some of them alone
    check(MASKS[name], axes, {first: operands[first], **{o: operands[o][1] for o in others}}, {first})


@pytest.mark.parametrize("batch", [1, B])
@pytest.mark.parametrize("name", MASKS)
def test_operands_that_are_not_mapped(name: str, batch: int) -> None:
    operands = {role: OPERANDS[role][0, :batch] for role in READ[name]}
    check(MASKS[name], (0, None, 0), operands, set(), batch)
    check(MASKS[name], (0, None, 0), {role: t[:1] for role, t in operands.items()}, set(), batch)


def test_a_vector_of_the_first_batch_serves_all() -> None:
    check("k < lengths[0]", (0, 0, 0), {"lengths": OPERANDS["lengths"]}, {"lengths"})


def test_nested_maps_and_output_axes() -> None:
    q, k, v = draw((2, N, B, H, S, D), (N, B, G, T, D), (B, G, T, DV))
    inner = func.vmap(lambda q, k: stof.torch.attention(q, k, v, "k <= q + b"), (0, 0), out_dims=1)
    found = func.vmap(inner, (0, None), out_dims=3)(q, k)
    for m in range(2):
        for n in range(N):
            one = attention_fp64(q[m, n], k[n], v, pairs("k <= q + b", B, H, S, T))[0]
            torch.testing.assert_close(found[:, n, :, m].double(), one, rtol=0, atol=1e-5)


@pytest.mark.parametrize("empty_rows", ["zero", "nan", "mean", "all"])
def test_fully_masked_rows(empty_rows: str) -> None:
    tensors = draw(*((N, *s) for s in SHAPES))
    found = func.vmap(lambda q, k, v: run("k < q", q, k, v, {}, empty_rows))(*tensors)
    for n in range(N):
        one = attention_fp64(*(t[n] for t in tensors), pairs("k < q", B, H, S, T), empty_rows=empty_rows)[0]
        torch.testing.assert_close(found[n].double(), one, rtol=0, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_gradients_of_each_sample(dtype: Any) -> None:
    samples, weight = draw((N, S, H * D), (H * D, H * D), dtype=dtype)
    weight = weight / (H * D) ** 0.5

    def loss(weight: Any, sample: Any, attend: Any) -> Any:
        x = (sample @ weight).unflatten(-1, (H, D)).transpose(0, 1)[None]
        return attend(x, x, x).square().sum()

    def ours(q: Any, k: Any, v: Any) -> Any:
        return stof.torch.attention(q, k, v, "k <= q and (b == 0 or k > 3)")

    def dense(q: Any, k: Any, v: Any) -> Any:
        return attention_fp64(q, k, v, pairs("k <= q", 1, H, S, S))[0]

    found = func.vmap(func.grad(lambda w, s: loss(w, s, ours)), in_dims=(None, 0))(weight, samples)
    for n in range(N):
        one = func.grad(lambda w, n=n: loss(w, samples[n].double(), dense))(weight.double())
        scale = float(one.abs().max())
        torch.testing.assert_close(
            found[n].double(), one, rtol=0, atol=scale * (1e-12 if dtype == torch.float64 else 1e-5)
        )


def test_models_of_an_ensemble() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(H * D, H * D)
            self.register_buffer("allowed", torch.rand(H, S, S, generator=GENERATOR) < 0.5)

        def forward(self, x: Any) -> Any:
            x = self.linear(x).unflatten(-1, (H, D)).transpose(1, 2)
            return stof.torch.attention(x, x, x, "k == q or table0[h, q, k]", tables={"table0": self.allowed})

    models = [Model() for _ in range(N)]
    assert not torch.equal(models[0].allowed, models[1].allowed)
    (x,) = draw((B, S, H * D))
    parameters, buffers = func.stack_module_state(models)
    found = func.vmap(lambda p, b: func.functional_call(models[0], (p, b), (x,)))(parameters, buffers)
    torch.testing.assert_close(found, torch.stack([model(x) for model in models]), rtol=0, atol=1e-5)


def test_a_map_over_nothing() -> None:
    tensors = [t[:0] for t in draw(*((N, *s) for s in SHAPES))]
    assert func.vmap(lambda *t: run("k <= q + b", *t, {}))(*tensors).shape == (0, B, H, S, DV)


def test_arrays_stay_tables() -> None:
    table = np.random.default_rng(0).integers(0, 2, (S, T))
    tensors = draw(*((N, *s) for s in SHAPES))
    found = func.vmap(
        lambda q, k, v: stof.torch.attention(q, k, v, "table0[q, k] == 1", tables={"table0": table}, empty_rows="mean")
    )(*tensors)
    allowed = torch.from_numpy(table).bool()
    for n in range(N):
        one = attention_fp64(*(t[n] for t in tensors), allowed, empty_rows="mean")[0]
        torch.testing.assert_close(found[n].double(), one, rtol=0, atol=1e-5)


def test_the_older_maps_of_autograd_do_not_nest_and_say_so() -> None:
    from torch._vmap_internals import _vmap  # what is_grads_batched and vectorize use

    q, k, v = draw((N, *SHAPES[0]), (2, *SHAPES[1]), SHAPES[2])
    found = _vmap(lambda one: stof.torch.attention(one, k[0], v, "k <= q + b"))(q)
    one = attention_fp64(q[1], k[0], v, pairs("k <= q + b", B, H, S, T))[0]
    torch.testing.assert_close(found[1].double(), one, rtol=0, atol=1e-5)
    with pytest.raises(UnsupportedError, match=r"one inside the other; use torch.func"):
        _vmap(lambda one: _vmap(lambda other: stof.torch.attention(one, other, v))(k))(q)
