# SPDX-License-Identifier: Apache-2.0
"""stof.torch.attention under torch.compile, torch.export and the checks of torch.library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import func
from torch.nn.attention.flex_attention import create_block_mask
from torch_oracle import attention_fp64, pairs

import stof.torch
from stof.errors import ArgumentError

MASK = "k <= q and (q - k < 4 or (k // 4 + h) % 3 == 2)"


def draw(S: int = 9, B: int = 2) -> list[Any]:
    generator = torch.Generator().manual_seed(S)
    return [torch.randn(s, generator=generator) for s in ((B, 4, S, 8), (B, 2, S, 8), (B, 2, S, 8))]


class Model(torch.nn.Module):
    """Attention with a table that is a buffer of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer(
            "blocks", torch.randint(0, 2, (4, 8, 8), generator=torch.Generator().manual_seed(1)).bool()
        )

    def forward(self, q: Any, k: Any, v: Any) -> Any:
        return stof.torch.attention(q, k, v, f"{MASK} or table0[h, q // 4, k // 4]", tables={"table0": self.blocks})


def test_compiled_whole_with_dynamic_lengths_and_gradients() -> None:
    def run(q: Any, k: Any, v: Any) -> Any:
        return stof.torch.attention(q, k, v, MASK, softcap=2.0, return_lse=True)

    # Without code generation, which a C++ compiler would do for minutes: the graph and its gradients are what is tested.
    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend="aot_eager")
    for S in (9, 14):
        given = [t.requires_grad_() for t in draw(S)]
        output, lse = compiled(*given)
        expected, expected_lse = attention_fp64(*given, pairs(MASK, 2, 4, S, S), softcap=2.0)
        torch.testing.assert_close(output.double(), expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=1e-5)
        found = torch.autograd.grad(output.square().sum() + lse.sum(), given)
        wanted = torch.autograd.grad(expected.square().sum() + expected_lse.sum(), given)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-4)


TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "grad": lambda run: func.grad(lambda *t: run(*t).sin().sum(), (0, 1, 2)),
    "jvp": lambda run: lambda *t: func.jvp(run, t, tuple(x.cos() for x in t)),
    "forward over reverse": lambda run: (
        lambda *t: func.jvp(func.grad(lambda *u: run(*u).sin().sum(), (0, 1, 2)), t, tuple(x.cos() for x in t))
    ),
    "gradients of samples": lambda run: (
        lambda *t: func.vmap(func.grad(lambda *u: run(*(x[None] for x in u)).sin().sum(), (0, 1, 2)))(*t)
    ),
    "checkpoint": lambda run: lambda *t: torch.utils.checkpoint.checkpoint(run, *t, use_reentrant=False),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # PyTorch's forward mode loads torch.jit
def test_transforms_within_a_compiled_function(name: str, dynamic: bool) -> None:
    def ours(q: Any, k: Any, v: Any) -> Any:
        return stof.torch.attention(q, k, v, "k <= q", softcap=2.0)

    def dense(q: Any, k: Any, v: Any) -> Any:
        return attention_fp64(q, k, v, torch.ones(9, 9, dtype=torch.bool).tril(), softcap=2.0)[0]

    compiled = torch.compile(TRANSFORMS[name](ours), fullgraph=True, dynamic=dynamic, backend="aot_eager")
    found = torch.utils._pytree.tree_leaves(compiled(*draw()))
    expected = torch.utils._pytree.tree_leaves(TRANSFORMS[name](dense)(*(t.double() for t in draw())))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=0, atol=3e-5)


@pytest.mark.filterwarnings("ignore")  # PyTorch reads .grad of what it traces
def test_the_backward_pass_is_compiled_by_itself() -> None:
    given = [t.requires_grad_() for t in draw()]
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        stof.torch.attention(*given, MASK).sin().sum().backward()
    wanted = torch.autograd.grad(attention_fp64(*given, pairs(MASK, 2, 4, 9, 9))[0].sin().sum(), given)
    for leaf, other in zip(given, wanted, strict=True):
        torch.testing.assert_close(leaf.grad, other, rtol=0, atol=1e-5)


def test_third_derivatives_are_refused_when_compiled() -> None:
    _, k, v = draw()

    def run(q: Any) -> Any:
        return stof.torch.attention(q, k, v, "k <= q").sum()

    def third(q: Any) -> Any:
        return func.grad(lambda q: func.grad(lambda q: func.grad(run)(q).sum())(q).sum())(q)

    with pytest.raises(Exception, match=r"stof.torch.attention has first and second derivatives"):
        torch.compile(third, backend="aot_eager")(draw()[0])


def test_a_block_mask_is_translated_outside_of_a_compiled_function() -> None:
    def run(q: Any, k: Any, v: Any) -> Any:
        return stof.torch.attention(q, k, v, block_mask)

    block_mask = create_block_mask(lambda b, h, q, k: (k <= q) & (q - k < 5), None, None, 9, 9, device="cpu")
    given = draw()
    with pytest.raises(Exception, match=r"call stof.torch.from_block_mask\(block_mask\) before"):
        torch.compile(run, fullgraph=True, backend="eager")(*given)
    mask = stof.torch.from_block_mask(block_mask)
    expected = stof.torch.attention(*given, mask)
    for one in (block_mask, mask):  # a translation that is known is taken
        compiled = torch.compile(
            lambda q, k, v, m=one: stof.torch.attention(q, k, v, m), fullgraph=True, backend="eager"
        )
        torch.testing.assert_close(compiled(*given), expected)


def test_exported_with_dynamic_batch_and_length() -> None:
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length", max=32)
    dims = [{0: batch, 2: length}] * 3
    program = torch.export.export(Model(), tuple(draw()), dynamic_shapes=tuple(dims))
    assert any(node.target == torch.ops.stof.attention.default for node in program.graph.nodes)
    given = draw(13, 3)
    torch.testing.assert_close(program.module()(*given), Model()(*given))


class Transformed(torch.nn.Module):
    """Attention within a transform."""

    def __init__(self, transform: Callable[[Any], Any]) -> None:
        super().__init__()
        self.transform = transform

    def forward(self, q: Any, k: Any, v: Any) -> Any:
        return self.transform(lambda q: stof.torch.attention(q, k, v, MASK))(q)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # PyTorch's forward mode loads torch.jit
def test_exported_transforms() -> None:
    transforms: tuple[Callable[[Any], Any], ...] = (
        lambda run: lambda q: func.jvp(run, (q,), (q.cos(),))[1],
        lambda run: lambda q: func.vmap(lambda scale: run(scale * q))(torch.arange(1.0, 4.0, dtype=q.dtype)),
    )
    for transform in transforms:
        program = torch.export.export(Transformed(transform), tuple(draw()))
        given = [0.5 * t for t in draw()]
        found = program.module()(*given)
        q, k, v = (t.double() for t in given)
        expected = transform(lambda q, k=k, v=v: attention_fp64(q, k, v, pairs(MASK, 2, 4, 9, 9))[0])(q)
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_reverse_mode_that_cannot_be_exported_is_refused_by_name() -> None:
    """PyTorch's own operators are refused, too; this one gave a tensor without content."""
    module = Transformed(lambda run: func.grad(lambda q: run(q).sum()))
    with pytest.raises(Exception, match=r"torch.export cannot write reverse mode of torch.func"):
        torch.export.export(module, tuple(draw()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_checks_of_the_library_of_operators(dtype: Any) -> None:
    q, k, v = (t.to(dtype).requires_grad_() for t in draw(5))
    table = torch.ones(4, 2, 2, dtype=torch.bool)
    rest = ([table], "k <= q and table0[h, q // 4, k // 4]", "table0", 0.3, 1.0, "zero", False)
    upper, upper_lse = (t.detach().requires_grad_() for t in stof.torch.attention(q, k, v, return_lse=True))
    moved, moved_2 = ([t.detach().cos().requires_grad_() for t in (q, k, v)] for _ in range(2))
    operators = torch.ops.stof
    torch.library.opcheck(operators.attention.default, (q, k, v, *rest))
    torch.library.opcheck(operators.attention_backward.default, (q, k, v, upper, upper_lse, *rest))
    torch.library.opcheck(operators.attention_tangent.default, (q, k, v, *moved, *rest))
    without_gradients = ("test_schema", "test_faketensor")  # the derivatives of these are refused
    for operator, tensors in (
        (operators.attention_backward_derivative.default, (q, k, v, upper, upper_lse, *moved)),
        (operators.attention_tangent_derivative.default, (q, k, v, *moved, *moved_2)),
    ):
        torch.library.opcheck(operator, (*tensors, *rest), test_utils=without_gradients)


def test_fake_tensors_are_checked_like_real_ones() -> None:
    with torch.device("meta"):
        q, k, v = torch.empty(2, 4, 9, 8), torch.empty(2, 2, 11, 8), torch.empty(2, 2, 11, 6)
    output, lse = stof.torch.attention(q, k, v, MASK, return_lse=True)
    assert (output.shape, lse.shape, lse.dtype) == ((2, 4, 9, 6), (2, 4, 9), torch.float32)
    with pytest.raises(ArgumentError, match="k has shape"):
        stof.torch.attention(q, k[..., :4], v, MASK)
