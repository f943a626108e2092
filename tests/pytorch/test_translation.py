# SPDX-License-Identifier: Apache-2.0
"""stof.torch.attention exported to ONNX: it runs in ONNX Runtime as it is, and stof-optimize writes StofAttention for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from torch_oracle import attention_fp64, pairs

import stof
import stof.torch
from stof.attention.function_body import OP
from stof.options import Options

# Arguments of each attention of the model, one after the other.
CALLS: tuple[dict[str, Any], ...] = (
    {"mask": "k <= q and (q // 8 - k // 8 < 2 or (k // 8 + h) % 3 == 2)"},
    {"mask": "k < q and q != 5", "softcap": 1.5, "scale": 0.3},
    {"mask": "k <= q and table0[h, q // 16, k // 16]"},
    {"mask": "k <= q and table0[h] <= k", "empty_rows": "mean"},
    {"mask": "k <= q and pad[b, k]"},
    {"mask": "k < q", "empty_rows": "all"},
    {"mask": "abs(q - k) <= 7", "empty_rows": "nan"},
    {"mask": ""},
)
WITHOUT_SITE = 5  # no operator of the optimizer gives what ``all`` does to fully masked rows
TABLES = {
    2: torch.randint(0, 2, (4, 4, 4), generator=torch.Generator().manual_seed(1)).bool(),
    3: torch.tensor([0, 3, 1, 5], dtype=torch.int32),
}
TOLERANCE = 1e-5
# PyTorch's exporter warns of its own.
pytestmark = pytest.mark.filterwarnings("ignore")


class Model(torch.nn.Module):
    """Calls of attention on the same tensors; results one by one, and the LSE of the second."""

    def __init__(self) -> None:
        super().__init__()
        for i, table in TABLES.items():
            self.register_buffer(f"table{i}", table)

    def forward(self, q: Any, k: Any, v: Any, real: Any) -> tuple[Any, ...]:
        found = []
        for i, call in enumerate(CALLS):
            tables = {"table0": getattr(self, f"table{i}")} if i in TABLES else None
            pad = real if "pad" in call["mask"] else None
            given = stof.torch.attention(q, k, v, tables=tables, pad=pad, return_lse=i == 1, **call)
            found += given if i == 1 else [given]
        return tuple(found)


def draw(B: int, S: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(S)
    real = torch.rand(B, S, generator=generator) < 0.7
    shapes = {"q": (B, 4, S, 8), "k": (B, 2, S, 8), "v": (B, 2, S, 16)}
    return {**{n: torch.randn(s, generator=generator) for n, s in shapes.items()}, "real": real}


def oracle(given: dict[str, Any]) -> list[Any]:
    B, _, S, _ = given["q"].shape
    found = []
    for i, call in enumerate(CALLS):
        named = {"table0": TABLES[i]} if i in TABLES else {}
        allowed = pairs(call["mask"], B, 4, S, S, pad=given["real"], **named)
        how = {name: value for name, value in call.items() if name != "mask"}
        output, lse = attention_fp64(given["q"], given["k"], given["v"], allowed, **how)
        found += [output, lse] if i == 1 else [output]
    return [t.numpy() for t in found]


def run(model: onnx.ModelProto, given: dict[str, Any], *, library: bool) -> list[np.ndarray]:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    if library:
        stof.register(options)
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    feeds = {n: t.numpy() for n, t in given.items()}
    found: list[np.ndarray] = session.run(None, {i.name: feeds[i.name] for i in session.get_inputs()})
    return found


@pytest.fixture(scope="module")
def exported() -> onnx.ModelProto:
    axes = {0: "batch", 2: torch.export.Dim("length", min=2, max=64)}
    program = torch.onnx.export(
        Model(),
        tuple(draw(2, 40).values()),
        dynamo=True,
        custom_translation_table=stof.torch.translation_table(),
        dynamic_shapes=(axes, axes, axes, {0: "batch", 1: axes[2]}),
        input_names=["q", "k", "v", "real"],
        verbose=False,
    )
    found: onnx.ModelProto = program.model_proto
    return found


def test_the_exported_model_is_standard_and_right(exported: onnx.ModelProto) -> None:
    assert {node.domain for node in exported.graph.node} == {""}
    assert not exported.functions
    onnx.checker.check_model(exported)
    for B, S in ((2, 40), (3, 61), (1, 2)):
        given = draw(B, S)
        for found, wanted in zip(run(exported, given, library=False), oracle(given), strict=True):
            assert found.shape == wanted.shape
            np.testing.assert_allclose(found, wanted, atol=TOLERANCE, rtol=0)


def test_the_optimizer_finds_each_mask_again(exported: onnx.ModelProto) -> None:
    optimized = stof.optimize(exported, options=Options())
    calls = [node for node in optimized.graph.node if node.op_type == OP]
    masks = [next(a.s.decode() for a in node.attribute if a.name == "mask") for node in calls]
    assert masks == [
        "k <= q and ((k // 8 + h) % 3 == 2 or q // 8 <= k // 8 + 1)",
        "k <= q - 1 and q != 5",
        "k <= q and table0[h, q // 16, k // 16]",
        "k <= q and table0[h] <= k",
        "k <= q and pad[b, k]",
        "abs(q - k) <= 7",
        "",
    ]
    rows = [next(a.s.decode() for a in node.attribute if a.name == "empty_rows") for node in calls]
    assert rows[:6] == ["zero", "zero", "zero", "mean", "zero", "nan"]
    given = draw(3, 61)
    for library in (False, True):
        for found, wanted in zip(run(optimized, given, library=library), oracle(given), strict=True):
            np.testing.assert_allclose(found, wanted, atol=TOLERANCE, rtol=0)


def test_numbers_of_heads_have_to_be_fixed() -> None:
    class Heads(torch.nn.Module):
        def forward(self, q: Any, k: Any, v: Any) -> Any:
            return stof.torch.attention(q, k, v, "k <= q")

    q = torch.randn(2, 4, 5, 8)
    axes = {1: torch.export.Dim("heads", min=2, max=8)}
    with pytest.raises(Exception, match="is dynamic") as caught:
        torch.onnx.export(
            Heads(), (q, q, q), dynamo=True, custom_translation_table=stof.torch.translation_table(),
            dynamic_shapes=(axes, axes, axes), verbose=False,
        )  # fmt: skip
    del caught
