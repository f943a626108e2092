# SPDX-License-Identifier: Apache-2.0
"""Every mode of differentiation of stof.torch.attention gives what dense attention in fp64 gives, or raises by name.

The kind: a mode that the operator does not implement answers with a number. ``torch.func.jvp`` gave a tangent of zeros.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import func
from torch.autograd import forward_ad
from torch_oracle import attention_fp64, pairs

import stof.torch
import stof.torch.dense
from stof.errors import UnsupportedError

MASK = "k < q and k != 3 and (h > 0 or q != 4)"  # rows 0 are empty, and row 4 of the first head
SHAPES = ((2, 4, 6, 4), (2, 2, 5, 4), (2, 2, 5, 3))
ALLOWED = pairs(MASK, 2, 4, 6, 5)
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 1.5, "scale": 0.7},
    "mean": {"empty_rows": "mean", "softcap": 1.2},
    "all": {"empty_rows": "all"},
}
Function = Callable[[Any, Any, Any], Any]
Transform = Callable[[Function, list[Any], list[Any]], Any]


def draw(dtype: Any = torch.float64, seed: int = 1, shapes: Any = SHAPES) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]


def ours(settings: dict[str, Any]) -> Function:
    def run(q: Any, k: Any, v: Any) -> Any:
        output, lse = stof.torch.attention(q, k, v, MASK, return_lse=True, **settings)
        return torch.cat([output, lse.masked_fill(torch.isneginf(lse), 0).unsqueeze(-1)], -1)

    return run


def dense(settings: dict[str, Any]) -> Function:
    def run(q: Any, k: Any, v: Any) -> Any:
        output, lse = attention_fp64(q, k, v, ALLOWED, **settings)
        return torch.cat([output, lse.masked_fill(torch.isneginf(lse), 0).unsqueeze(-1)], -1)

    return run


def scalar(run: Function) -> Function:
    """A function of which the second derivatives use those of attention."""
    return lambda q, k, v: run(q, k, v).sin().sum()


def along(run: Function, tangents: list[Any]) -> Function:
    return lambda q, k, v: func.jvp(run, (q, k, v), tuple(tangents))[1]


def by_dual_numbers(run: Function, given: list[Any], tangents: list[Any]) -> Any:
    with forward_ad.dual_level(), torch.no_grad():
        duals = [forward_ad.make_dual(*pair) for pair in zip(given, tangents, strict=True)]
        return forward_ad.unpack_dual(run(*duals)).tangent


def backward_of_dual_numbers(run: Function, given: list[Any], tangents: list[Any]) -> Any:
    leaves = [t.clone().requires_grad_() for t in given]
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(*pair) for pair in zip(leaves, tangents, strict=True)]
        tangent = forward_ad.unpack_dual(run(*duals)).tangent
        return torch.autograd.grad(tangent.sin().sum(), leaves)


def backward_of_backward(run: Function, given: list[Any], tangents: list[Any]) -> Any:
    leaves = [t.clone().requires_grad_() for t in given]
    grads = torch.autograd.grad(scalar(run)(*leaves), leaves, create_graph=True)
    products = [(g * t).sum() for g, t in zip(grads, tangents, strict=True)]
    return torch.autograd.grad(sum(products), leaves)


def product_with_hessian(run: Function, given: list[Any], tangents: list[Any]) -> Any:
    return func.jvp(func.grad(scalar(run), argnums=(0, 1, 2)), tuple(given), tuple(tangents))


TRANSFORMS: dict[str, Transform] = {
    "grad": lambda run, given, _: func.grad(scalar(run), argnums=(0, 1, 2))(*given),
    "vjp": lambda run, given, _: func.vjp(run, *given)[1](run(*given).cos()),
    "jacrev": lambda run, given, _: func.jacrev(run, (0, 1, 2))(*given),
    "jvp": lambda run, given, tangents: func.jvp(run, tuple(given), tuple(tangents)),
    "jvp of the keys": lambda run, given, tangents: func.jvp(
        lambda k: run(given[0], k, given[2]), (given[1],), (tangents[1],)
    ),
    "jacfwd": lambda run, given, _: func.jacfwd(run, (0, 1, 2))(*given),
    "dual numbers": by_dual_numbers,
    "linearize": lambda run, given, tangents: func.linearize(run, *given)[1](*tangents),
    "functionalize": lambda run, given, _: func.functionalize(func.grad(scalar(run)))(*given),
    "forward over reverse": product_with_hessian,
    "hessian": lambda run, given, _: func.hessian(scalar(run), (0, 1, 2))(*given),
    "reverse over reverse": lambda run, given, _: func.jacrev(func.grad(scalar(run)))(*given),
    "reverse over forward": lambda run, given, tangents: func.grad(scalar(along(run, tangents)), (0, 1, 2))(*given),
    "forward over forward": lambda run, given, tangents: func.jvp(
        along(run, tangents), tuple(given), (tangents[0], 2 * tangents[1], tangents[2].cos())
    ),
    "backward of dual numbers": backward_of_dual_numbers,
    "backward of backward": backward_of_backward,
    "functional.jvp": lambda run, given, tangents: torch.autograd.functional.jvp(run, tuple(given), tuple(tangents)),
    "functional.hessian": lambda run, given, _: torch.autograd.functional.hessian(
        scalar(run), tuple(given), vectorize=True
    ),
    "vectorized jacobian": lambda run, given, _: torch.autograd.functional.jacobian(run, tuple(given), vectorize=True),
    "forward jacobian": lambda run, given, _: torch.autograd.functional.jacobian(
        run, tuple(given), vectorize=True, strategy="forward-mode"
    ),
}


# torch's own dense attention has no gradient of the tangent of dual numbers.
EXPECTED = {"backward of dual numbers": "reverse over forward"}


def compare(found: Any, expected: Any, tolerance: float) -> None:
    one, other = (torch.utils._pytree.tree_leaves(t) for t in (found, expected))
    assert len(one) == len(other)
    for left, right in zip(one, other, strict=True):
        assert right.abs().max() > 1e-3  # a number of zeros would compare with anything small
        torch.testing.assert_close(
            left.double(), right, rtol=0, atol=tolerance * max(1.0, float(right.detach().abs().max()))
        )


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.filterwarnings("ignore")
def test_modes_give_what_dense_attention_gives(setting: str, name: str) -> None:
    given, tangents = draw(), draw(seed=2)
    found = TRANSFORMS[name](ours(SETTINGS[setting]), given, tangents)
    compare(found, TRANSFORMS[EXPECTED.get(name, name)](dense(SETTINGS[setting]), given, tangents), 1e-11)


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.filterwarnings("ignore")
def test_modes_of_the_kernel(dtype: Any, name: str) -> None:
    given, tangents = draw(dtype), draw(dtype, seed=2)
    found = TRANSFORMS[name](ours(SETTINGS["softcap"]), given, tangents)
    wide = [[t.double() for t in tensors] for tensors in (given, tangents)]
    expected = TRANSFORMS[EXPECTED.get(name, name)](dense(SETTINGS["softcap"]), *wide)
    compare(found, expected, {torch.float32: 3e-5, torch.bfloat16: 0.1}[dtype])


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # PyTorch's forward mode loads torch.jit
def test_finite_differences(setting: str) -> None:
    given = [t.requires_grad_() for t in draw(shapes=((1, 2, 4, 3), (1, 1, 5, 3), (1, 1, 5, 2)))]
    run = ours(SETTINGS[setting])
    assert torch.autograd.gradcheck(
        run, given, check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True
    )
    assert torch.autograd.gradgradcheck(run, given, check_fwd_over_rev=True, check_rev_over_rev=True)


@pytest.mark.parametrize(
    "needed", [(True, False, False), (False, True, False), (False, False, True), (False, True, True)]
)
def test_gradients_of_some_of_the_tensors(needed: tuple[bool, ...]) -> None:
    results = []
    for make in (ours, dense):
        given = [t.requires_grad_(n) for t, n in zip(draw(), needed, strict=True)]
        leaves = [t for t in given if t.requires_grad]
        first = torch.autograd.grad(scalar(make({}))(*given), leaves, create_graph=True)
        second = torch.autograd.grad(sum(t.sin().sum() for t in first), leaves)
        results.append([*first, *second])
    if needed == (False, False, True):
        results = [r[:1] for r in results]
    compare(*results, 1e-11)


def test_rows_of_nan_have_tangents_of_nan_and_reach_no_gradient_of_queries() -> None:
    given, tangents = draw(torch.float32), draw(torch.float32, seed=2)
    run = ours({"empty_rows": "nan"})
    tangent = func.jvp(run, tuple(given), tuple(tangents))[1]
    expected = func.jvp(dense({}), *(tuple(t.double() for t in tensors) for tensors in (given, tangents)))[1]
    empty = ~ALLOWED.any(-1)
    assert tangent[empty][..., :-1].isnan().all()
    torch.testing.assert_close(tangent[~empty].double(), expected[~empty], rtol=0, atol=1e-5)
    query, _, value = func.grad(scalar(run), (0, 1, 2))(*given)
    assert not query.isnan().any()
    assert value.isnan().all()


@pytest.mark.parametrize("name", ["reverse", "forward", "tangents"])
def test_third_derivatives_are_refused_by_name(name: str) -> None:
    q, k, v = draw(shapes=((1, 1, 2, 1),) * 3)

    def run(q: Any) -> Any:
        return stof.torch.attention(q, k, v, "k <= q").sin().sum()

    third = {
        "reverse": lambda: func.jacrev(func.hessian(run))(q),
        "forward": lambda: func.jacfwd(func.hessian(run))(q),
        "tangents": lambda: func.jacfwd(func.jacfwd(func.jacfwd(run)))(q),
    }
    with pytest.raises(UnsupportedError, match=r"stof.torch.attention has first and second derivatives, and a third"):
        third[name]()


@pytest.mark.parametrize("chunk_bytes", [1, 6000])
@pytest.mark.parametrize("name", ["jvp", "grad", "hessian", "forward over forward"])
def test_chunks_of_rows_add_up(name: str, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stof.torch.dense, "CHUNK_BYTES", chunk_bytes)
    given, tangents = draw(), draw(seed=2)
    found = TRANSFORMS[name](ours(SETTINGS["softcap"]), given, tangents)
    compare(found, TRANSFORMS[EXPECTED.get(name, name)](dense(SETTINGS["softcap"]), given, tangents), 1e-11)


@pytest.mark.parametrize(
    "name", ["jvp", "grad", "forward over reverse", "backward of backward", "forward over forward"]
)
def test_memory_is_linear_in_the_length(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No mode keeps the scores: those of a chunk are dropped before those of the chunk after the next are made."""
    monkeypatch.setattr(stof.torch.dense, "CHUNK_BYTES", 1 << 18)
    made: list[Any] = []
    make = stof.torch.dense.DenseAttention._chunk

    def watched(self: Any, rows: slice) -> Any:
        assert sum(weights() is not None for weights in made) <= 1
        chunk = make(self, rows)
        assert chunk.weights.numel() * 4 <= 1 << 18
        made.append(weakref.ref(chunk.weights))
        return chunk

    monkeypatch.setattr(stof.torch.dense.DenseAttention, "_chunk", watched)
    given, tangents = (draw(torch.float32, seed, ((1, 2, 300, 4),) * 3) for seed in (1, 2))
    TRANSFORMS[name](lambda q, k, v: stof.torch.attention(q, k, v, "k <= q"), given, tangents)
    assert len(made) > 4
