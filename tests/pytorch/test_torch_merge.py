# SPDX-License-Identifier: Apache-2.0
"""Sequence-parallel attention: partial results over parts of the keys merge to the whole."""

from __future__ import annotations

from typing import Any

import onnx
import onnxruntime as ort
import pytest
import torch
from torch import func
from torch_oracle import attention_fp64, pairs

import stof.torch
from stof.errors import ArgumentError

MASK = "k <= q and (q - k < 4 or (k // 4 + h) % 3 == 2) and q != 6"
PARTS = ((0, 3), (3, 3), (3, 23))  # unequal, one without keys


def partial(q: Any, k: Any, v: Any, start: int, end: int, empty_rows: str = "zero") -> tuple[Any, Any]:
    """Attention over the keys start ... end - 1: the mask's key positions move by the start."""
    text = MASK.replace("k", f"(k + {start})")
    found: tuple[Any, Any] = stof.torch.attention(
        q, k[:, :, start:end], v[:, :, start:end], text, empty_rows=empty_rows, return_lse=True
    )
    return found


def draw(dtype: Any) -> tuple[Any, Any, Any]:
    generator = torch.Generator().manual_seed(5)
    shapes = ((2, 4, 19, 16), (2, 2, 23, 16), (2, 2, 23, 16))
    return tuple(torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes)  # type: ignore[return-value]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("empty_rows", ["zero", "nan"])
def test_three_unequal_parts_give_the_whole(dtype: Any, empty_rows: str) -> None:
    q, k, v = draw(dtype)
    parts = [partial(q, k, v, start, end, empty_rows) for start, end in PARTS]
    output, lse = stof.torch.merge(*zip(*parts, strict=True))
    expected, expected_lse = attention_fp64(q, k, v, pairs(MASK, 2, 4, 19, 23))
    assert output.dtype == dtype
    assert lse.dtype == parts[0][1].dtype
    tolerance = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float64: 1e-12}[dtype]
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=tolerance)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=tolerance)
    assert torch.isneginf(lse[:, :, 6]).all()
    assert not output[:, :, 6].any()


def test_gradients_pass_through_the_merge() -> None:
    q, k, v = (t.requires_grad_() for t in draw(torch.float64))
    parts = [partial(q, k, v, start, end) for start, end in PARTS]
    output, _ = stof.torch.merge(*zip(*parts, strict=True))
    upper = torch.randn(output.shape, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    found = torch.autograd.grad((output * upper).sum(), (q, k, v))
    expected, _ = attention_fp64(q, k, v, pairs(MASK, 2, 4, 19, 23))
    wanted = torch.autograd.grad((expected * upper).sum(), (q, k, v))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)


def joined(output: Any, lse: Any) -> Any:
    return torch.cat([output, lse.masked_fill(torch.isneginf(lse), 0).unsqueeze(-1)], -1)


@pytest.mark.parametrize("mode", ["tangents", "second derivatives", "maps"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # PyTorch's forward mode loads torch.jit
def test_modes_pass_through_the_merge(mode: str) -> None:
    given = draw(torch.float64)
    along = tuple(t.cos() for t in given)

    def parts(q: Any, k: Any, v: Any) -> Any:
        found = [partial(q, k, v, start, end) for start, end in PARTS]
        return joined(*stof.torch.merge(*zip(*found, strict=True)))

    def whole(q: Any, k: Any, v: Any) -> Any:
        return joined(*attention_fp64(q, k, v, pairs(MASK, 2, 4, 19, 23)))

    def apply(run: Any) -> Any:
        if mode == "tangents":
            return func.jvp(run, given, along)
        if mode == "maps":
            return func.vmap(run, (0, None, None))(torch.stack([given[0], 2 * given[0]]), *given[1:])
        return func.jvp(func.grad(lambda *t: run(*t).sin().sum(), (0, 1, 2)), given, along)

    torch.testing.assert_close(apply(parts), apply(whole), rtol=0, atol=1e-10)


def test_one_part_is_itself() -> None:
    q, k, v = draw(torch.float32)
    output, lse = partial(q, k, v, 0, 23)
    merged, total = stof.torch.merge([output], [lse])
    torch.testing.assert_close(merged, output)
    torch.testing.assert_close(total, lse)


@pytest.mark.parametrize(
    ("outputs", "lses", "message"),
    [
        ([], [], "0 outputs and 0 LSEs"),
        ([torch.zeros(1, 2, 3, 4)], [], "1 outputs and 0 LSEs"),
        ([torch.zeros(1, 2, 3, 4)], [torch.zeros(1, 2, 4)], r"lse 0 has shape \[1, 2, 4\], expected \[1, 2, 3\]"),
        ([torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 5)], [torch.zeros(1, 2, 3)] * 2, "output 1 is torch.float32"),
        ([[1.0]], [torch.zeros(1, 2, 3)], "output 0 is a list, expected a tensor"),
        ([torch.zeros(1, 2, 3, 4)], [torch.zeros(1, 2, 3).to_sparse()], "lse 0 has layout torch.sparse_coo"),
        (
            [torch.zeros(1, 2, 3, 4).cfloat()],
            [torch.zeros(1, 2, 3)],
            "output 0 has type torch.complex64, expected fp32",
        ),
        ([torch.zeros(1, 2, 3, 4)], [torch.zeros(1, 2, 3).int()], "lse 0 has type torch.int32, expected fp32"),
        ([torch.zeros(1, 2, 3, 4)], [torch.zeros(1, 2, 3, device="meta")], "output 0 is on cpu and lse 0 on meta"),
    ],
)
def test_wrong_parts(outputs: list[Any], lses: list[Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        stof.torch.merge(outputs, lses)


# The nodes of docs/guide/pytorch.md: lses [P, B, H, S] and outputs [P, B, H, S, D], of P parts.
MERGE = """
<ir_version: 10, opset_import: ["" : 18]>
merge (float[P,B,H,S] lses, float[P,B,H,S,D] outputs) => (float[B,H,S,D] output, float[B,H,S] lse) {
  axis0 = Constant <value = int64[1] {0}> ()
  last = Constant <value = int64[1] {-1}> ()
  lowest = Constant <value = float {-3.4028235e38}> ()
  minus = Constant <value = float {-inf}> ()
  least = Constant <value = float {1e-37}> ()
  nothing = Constant <value = float {0.0}> ()
  largest = ReduceMax <keepdims = 0> (lses, axis0)
  m = Max (largest, lowest)
  distance = Sub (lses, m)
  w = Exp (distance)
  wide = Unsqueeze (w, last)
  none = Equal (lses, minus)
  nones = Unsqueeze (none, last)
  parts = Where (nones, nothing, outputs)
  weighted = Mul (wide, parts)
  sum = ReduceSum <keepdims = 0> (weighted, axis0)
  total = ReduceSum <keepdims = 0> (w, axis0)
  some = Max (total, least)
  wide_total = Unsqueeze (some, last)
  output = Div (sum, wide_total)
  logarithm = Log (total)
  lse = Add (m, logarithm)
}
"""


def test_the_merge_in_standard_operators_is_the_same() -> None:
    q, k, v = draw(torch.float32)
    parts = [partial(q, k, v, start, end, "nan") for start, end in PARTS]
    outputs, lses = (torch.stack(found) for found in zip(*parts, strict=True))
    assert outputs.isnan().any()
    session = ort.InferenceSession(
        onnx.parser.parse_model(MERGE).SerializeToString(), providers=["CPUExecutionProvider"]
    )
    output, lse = session.run(None, {"lses": lses.numpy(), "outputs": outputs.numpy()})
    expected, expected_lse = stof.torch.merge(list(outputs), list(lses))
    torch.testing.assert_close(torch.from_numpy(output), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(torch.from_numpy(lse), expected_lse, rtol=0, atol=1e-6)
