# SPDX-License-Identifier: Apache-2.0
"""Kinds of tensors: stof.torch.attention computes with each, or names the argument and what to do.

The kind: a tensor that the operator does not implement answers with a number (a table on meta gave memory that nobody wrote),
or with an error of PyTorch's internals.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor
from torch_oracle import attention_fp64, pairs

import stof.torch
from stof.errors import ArgumentError, UnsupportedError

MASK = "k <= q and (k + h) % 3 != 1"
SHAPES = ((2, 4, 7, 8), (2, 2, 9, 8), (2, 2, 9, 6))


def draw(dtype: Any = torch.float32) -> list[Any]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randn(s, generator=generator).to(dtype) for s in SHAPES]


def compare(found: Any, given: list[Any]) -> None:
    expected = attention_fp64(*given, pairs(MASK, 2, 4, 7, 9))[0]
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)


class Unknown(torch.Tensor):
    """A subclass that knows no operator."""

    @staticmethod
    def __new__(cls, tensor: Any) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, tensor.shape, dtype=tensor.dtype)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return NotImplemented


class Plain(torch.Tensor):
    """A subclass that changes nothing."""


class DTensor(Plain):
    """As PyTorch's is called, which needs processes."""


def nested(tensor: Any, layout: Any) -> Any:
    return torch.nested.nested_tensor(list(tensor.unbind()), layout=layout)


WRONG: dict[str, tuple[str, Callable[[Any], Any], type[Exception], str]] = {
    "complex": ("q", lambda t: t.to(torch.complex64), ArgumentError, "q has type torch.complex64, expected fp32, fp16"),
    "integers": ("q", lambda t: t.int(), ArgumentError, "q has type torch.int32, expected fp32"),
    "fp8": ("q", lambda t: t.to(torch.float8_e4m3fn), ArgumentError, "q has type torch.float8_e4m3fn, expected fp32"),
    "quantized": (
        "q",
        lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8),
        ArgumentError,
        "q has type torch.qint8, expected fp32",
    ),
    "sparse": ("k", torch.Tensor.to_sparse, ArgumentError, r"k has layout torch.sparse_coo, .*k.to_dense\(\)"),
    "compressed": ("v", torch.Tensor.to_sparse_csr, ArgumentError, r"v has layout torch.sparse_csr, .*v.to_dense\(\)"),
    "of oneDNN": ("q", torch.Tensor.to_mkldnn, ArgumentError, r"q has layout torch._mkldnn, .*q.to_dense\(\)"),
    "nested": ("q", lambda t: nested(t, torch.strided), ArgumentError, "q is a nested tensor, .*give segment_q and"),
    "jagged": ("k", lambda t: nested(t, torch.jagged), ArgumentError, "k is a nested tensor, .*give segment_q and"),
    "of a mesh": ("v", lambda t: t.as_subclass(DTensor), ArgumentError, r"v is a DTensor, .*v.to_local\(\)"),
    "of a subclass": (
        "q",
        Unknown,
        UnsupportedError,
        "q is a Unknown, whose __torch_dispatch__ does not run stof::attention",
    ),
    "an array": ("q", torch.Tensor.numpy, ArgumentError, "q is a ndarray, expected a tensor"),
    "a list": ("k", torch.Tensor.tolist, ArgumentError, "k is a list, expected a tensor"),
    "None": ("v", lambda t: None, ArgumentError, "v is a NoneType, expected a tensor"),
    "on meta": ("v", lambda t: t.to("meta"), ArgumentError, "v is on meta, expected that of q, cpu"),
}


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.filterwarnings("ignore")
def test_kinds_that_are_refused_by_name(kind: str) -> None:
    name, change, error, message = WRONG[kind]
    given = dict(zip("qkv", draw(), strict=True))
    given[name] = change(given[name][0, 0] if kind == "compressed" else given[name])
    with pytest.raises(error, match=message):
        stof.torch.attention(**given, mask=MASK)


OPERANDS: dict[str, tuple[dict[str, Any], str]] = {
    "table on meta": (
        {"tables": {"table0": torch.ones(9, dtype=torch.int32, device="meta")}},
        "table0 is on meta, where it has no content, expected a table on the CPU",
    ),
    "table as a list": ({"tables": {"table0": [1] * 9}}, "table0 is a list, expected a tensor"),
    "table of objects": ({"tables": {"table0": np.array([None] * 9)}}, "table0 is an array of object, expected bool"),
    "table of floats": ({"tables": {"table0": np.ones(9)}}, "table0 has type torch.float64, expected one of bool"),
    "sparse table": ({"tables": {"table0": torch.ones(9).int().to_sparse()}}, "table0 has layout torch.sparse_coo"),
    "sparse pad": ({"pad": torch.ones(2, 9).to_sparse()}, r"pad has layout torch.sparse_coo, .*pad.to_dense\(\)"),
    "complex pad": ({"pad": torch.ones(2, 9).cfloat()}, "pad has type torch.complex64, expected one of bool"),
    "array as pad": ({"pad": np.ones((2, 9), bool)}, "pad is a ndarray, expected a tensor"),
    "lengths as a list": ({"lengths": [3, 4]}, "lengths is a list, expected a tensor"),
    "scale as a tensor": (
        {"scale": torch.tensor(0.3, requires_grad=True)},
        "scale is a tensor, expected a number, which has no derivative: .*multiply q by it",
    ),
    "softcap as a tensor": ({"softcap": torch.tensor(3.0)}, "softcap is a tensor, expected a number, which has no"),
    "scale as a text": ({"scale": "a"}, "scale is 'a', expected a number"),
    "softcap of None": ({"softcap": None}, "softcap is None, expected a number"),
}


@pytest.mark.parametrize("kind", OPERANDS)
def test_other_arguments_that_are_refused_by_name(kind: str) -> None:
    arguments, message = OPERANDS[kind]
    with pytest.raises(ArgumentError, match=message):
        stof.torch.attention(*draw(), "table0[k] > 0" if "tables" in arguments else "", **arguments)


def test_the_derivative_of_a_scale_is_that_of_the_query() -> None:
    q, k, v = draw(torch.float64)
    scale = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    (found,) = torch.autograd.grad(stof.torch.attention(q * scale, k, v, MASK, scale=1.0).sum(), scale)
    (expected,) = torch.autograd.grad(attention_fp64(q * scale, k, v, pairs(MASK, 2, 4, 7, 9), 1.0)[0].sum(), scale)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def test_plain_subclasses_and_parameters() -> None:
    given = draw()
    found = stof.torch.attention(given[0].as_subclass(Plain), *given[1:], MASK)
    assert type(found) is Plain
    compare(found.as_subclass(torch.Tensor), given)
    compare(stof.torch.attention(*(torch.nn.Parameter(t) for t in given), MASK), given)


def test_subclasses_that_run_each_operator() -> None:
    given = draw()
    found = stof.torch.attention(*(TwoTensor(t, 2 * t) for t in given), MASK)
    assert type(found) is TwoTensor
    compare(found.a, given)
    compare(found.b, [2 * t for t in given])


def test_negated_conjugated_and_zero_tensors() -> None:
    q, k, v = draw()
    negative = torch.complex(q, -q).conj().imag
    assert negative.is_neg()
    compare(stof.torch.attention(negative, k, v, MASK), [q, k, v])
    zeros = torch._efficientzerotensor(q.shape)
    compare(stof.torch.attention(zeros, k, v, MASK), [torch.zeros_like(q), k, v])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_views_of_any_strides_and_their_gradients(dtype: Any) -> None:
    base_q, base_k, base_v = (
        torch.randn(s, generator=torch.Generator().manual_seed(i), dtype=dtype, requires_grad=True)
        for i, s in enumerate(((2, 1, 7, 8), (1, 2, 1, 8), (6, 9, 2, 2)))
    )

    def views() -> list[Any]:  # strides of 0 in the heads, the batch and the keys; no order of axes; a step of 2
        return [base_q.expand(-1, 4, -1, -1), base_k.expand(2, -1, 9, -1)[..., ::1], base_v.permute(3, 2, 1, 0)]

    given = views()
    assert given[0].stride(1) == 0
    assert given[1].stride(0) == given[1].stride(2) == 0
    found = stof.torch.attention(*given, MASK)
    compare(found.detach(), [t.detach() for t in given])
    grads = torch.autograd.grad(found.sin().sum(), (base_q, base_k, base_v))
    expected = attention_fp64(*views(), pairs(MASK, 2, 4, 7, 9))[0]
    wanted = torch.autograd.grad(expected.sin().sum(), (base_q, base_k, base_v))
    for one, other in zip(grads, wanted, strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=0, atol=3e-5)
    stepped = [torch.cat([t, t], -2)[..., ::2, :][..., : t.shape[-2], :] for t in draw()]
    compare(stof.torch.attention(*stepped, MASK), stepped)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # PyTorch's forward mode loads torch.jit
def test_shapes_without_content(dtype: Any) -> None:
    expected = {"output": (2, 4, 7, 6), "lse": (2, 4, 7)}
    lse_dtype = torch.float64 if dtype == torch.float64 else torch.float32

    def check(given: list[Any]) -> None:
        output, lse = stof.torch.attention(*given, MASK, return_lse=True)
        assert (output.shape, lse.shape) == (expected["output"], expected["lse"])
        assert (output.dtype, lse.dtype) == (dtype, lse_dtype)
        leaves = [t.requires_grad_() for t in given]
        first = torch.autograd.grad(stof.torch.attention(*leaves, MASK).sum(), leaves, create_graph=True)
        second = torch.autograd.grad(sum(t.sum() for t in first), leaves)
        assert [t.shape for t in first] == [t.shape for t in second] == [t.shape for t in given]
        tangent = torch.func.jvp(lambda *t: stof.torch.attention(*t, MASK), tuple(given), tuple(given))[1]
        assert (tangent.shape, tangent.dtype) == (expected["output"], dtype)

    check([t.to("meta") for t in draw(dtype)])
    with FakeTensorMode():
        check([torch.empty(s, dtype=dtype) for s in SHAPES])


def test_inference_mode() -> None:
    given = draw()
    with torch.inference_mode():
        compare(stof.torch.attention(*given, MASK), given)
        kept = given[1] * 1
    compare(stof.torch.attention(given[0], kept, given[2], MASK), given)
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):  # as PyTorch's operators
        stof.torch.attention(given[0].requires_grad_(), kept, given[2], MASK)


def test_tensors_that_change_before_the_backward_pass_are_an_error() -> None:
    q, k, v = (t.requires_grad_() for t in draw())
    key = k * 1
    output = stof.torch.attention(q, key, v, MASK)
    with torch.no_grad():
        key.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoints_and_the_search_for_anomalies(use_reentrant: bool) -> None:
    given = [t.requires_grad_() for t in draw(torch.float64)]

    def run(q: Any, k: Any, v: Any) -> Any:
        return stof.torch.attention(q.sin(), k, v, MASK)

    expected = torch.autograd.grad(run(*given).cos().sum(), given)
    with torch.autograd.set_detect_anomaly(True, check_nan=True):
        output = torch.utils.checkpoint.checkpoint(run, *given, use_reentrant=use_reentrant)
        output.cos().sum().backward()
    for leaf, wanted in zip(given, expected, strict=True):
        torch.testing.assert_close(leaf.grad, wanted, rtol=0, atol=1e-12)


class Layer(torch.nn.Module):
    """A layer that keeps its mask."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(32, 32)
        self.mask = stof.torch.MaskWithTables("table0[q // 4, k // 4]", {"table0": torch.rand(2, 2) < 0.6})

    def forward(self, x: Any) -> Any:
        x = self.linear(x).unflatten(-1, (4, 8)).transpose(1, 2)
        return stof.torch.attention(x, x, x, self.mask)


def test_copies_and_files_of_models() -> None:
    torch.manual_seed(5)
    layer = Layer()
    x = torch.randn(2, 7, 32)
    expected = layer(x)
    assert torch.equal(copy.deepcopy(layer)(x), expected)
    assert torch.equal(pickle.loads(pickle.dumps(layer))(x), expected)


@pytest.mark.filterwarnings("ignore")
def test_traces() -> None:
    given = draw()
    traced = torch.jit.trace(lambda *t: stof.torch.attention(*t, MASK), tuple(given))
    others = [2 * t for t in given]
    compare(traced(*others), others)
    graph = torch.fx.experimental.proxy_tensor.make_fx(lambda *t: stof.torch.attention(*t, MASK))(*given)
    compare(graph(*others), others)
    with pytest.raises(ArgumentError, match="q is a Proxy, expected a tensor"):
        torch.fx.symbolic_trace(lambda q: stof.torch.attention(q, *given[1:], MASK))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_another_default_device_and_dtype(dtype: Any) -> None:
    given = draw(dtype)
    expected = stof.torch.attention(
        *given, f"{MASK} and min(S, T) > 3 and table0[k]", tables={"table0": np.ones(9, bool)}
    )
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            found = stof.torch.attention(
                *given, f"{MASK} and min(S, T) > 3 and table0[k]", tables={"table0": np.ones(9, bool)}
            )
    finally:
        torch.set_default_dtype(torch.float32)
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected)
