# SPDX-License-Identifier: Apache-2.0
"""The layouts of torch.nn.MultiheadAttention: positions before sequences, and heads in the axis of sequences."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from encoders import FLOAT, HEADS, WIDTH, Graph, check_same, check_unpadded, masks, rows_of, unpadded

SIZE = WIDTH // HEADS
Read = Callable[["Torch", dict[str, str]], str]


class Torch(Graph):
    """Layers as torch.nn.TransformerEncoder exports them."""

    def start(self) -> tuple[str, str]:
        self.ids, self.mask = self.input("input_ids"), self.input("attention_mask")
        return self.embed(self.ids), self.bias(self.mask)

    def sizes(self, *axes: int) -> str:
        return str(self.add("Gather", self.add("Shape", self.ids), self.constant(list(axes))))

    def reshape(self, x: str, *sizes: str | int) -> str:
        parts = [n if isinstance(n, str) else self.constant([n]) for n in sizes]
        return str(self.add("Reshape", x, self.add("Concat", *parts, axis=0)))

    def attention(self, x: str, bias: str) -> dict[str, str]:
        """The tensors on the way, by name."""
        batch, length, both = self.sizes(0), self.sizes(1), self.constant([-1])
        found = {"turned": str(self.add("Transpose", x, perm=[1, 0, 2]))}
        heads = self.add("Mul", batch, self.constant([HEADS]))
        for part in "qkv":
            y = self.dense(found["turned"])
            found[f"{part} by position"] = self.reshape(y, length, heads, SIZE)
            y = str(self.add("Transpose", found[f"{part} by position"], perm=[1, 0, 2]))
            found[f"{part} among heads"] = y
            found[part] = self.reshape(y, batch, HEADS, length, SIZE)
        y = self.add("Transpose", self.attend(found["q"], found["k"], found["v"], bias), perm=[2, 0, 1, 3])
        found["flat"] = str(self.add("Reshape", y, self.add("Concat", both, self.constant([WIDTH]), axis=0)))
        found["projected"] = str(self.add("Gemm", found["flat"], self.weight(WIDTH, WIDTH), self.weight(WIDTH)))
        found["by position"] = self.reshape(found["projected"], length, batch, WIDTH)
        y = self.norm(str(self.add("Add", x, self.add("Transpose", found["by position"], perm=[1, 0, 2]))))
        return {**found, "result": self.feed_forward(y)}

    def end(self, x: str) -> onnx.ModelProto:
        for kind in ("mean", "first", "max"):
            self.output(self.pool(x, kind, self.mask), kind, rank=2)
        return self.model()


def encoder(read: Read | None = None, **sizes: int | str) -> onnx.ModelProto:
    """Two layers; ``read`` gives what stands for the result of the first one."""
    g = Torch(**sizes)
    x, bias = g.start()
    found = g.attention(x, bias)
    x = found["result"] if read is None else read(g, found)
    return g.end(g.attention(x, bias)["result"])


def test_all_layers_run_on_real_tokens() -> None:
    model = encoder()
    result, report = unpadded(model)
    assert [(r.attentions, r.rest) for r in rows_of(report)] == [(2, "")]
    check_unpadded(result, 2)
    check_same(model, result)


@pytest.mark.parametrize("batch", ["batch", 1, 2, 4, 5])
@pytest.mark.parametrize("length", ["sequence", 2, 4, 5, 8])
def test_sizes_like_those_of_heads(batch: int | str, length: int | str) -> None:
    model = encoder(batch=batch, length=length)
    result, _ = unpadded(model)
    b, s = batch if isinstance(batch, int) else 5, length if isinstance(length, int) else 7
    check_same(model, result, {k: m for k, m in masks(b, s).items() if m.shape == (b, s)})


def _sum(g: Torch, x: str) -> str:
    """One number, added to what is read further on."""
    return str(g.add("ReduceSum", g.add("Tanh", x), keepdims=0))


def _reads(name: str) -> Read:
    return lambda g, found: g.norm(str(g.add("Add", found["result"], _sum(g, found[name]))))


def _read_size(g: Torch, found: dict[str, str]) -> str:
    """The shape of a tensor with heads among sequences."""
    shape = g.add("Cast", g.add("Shape", found["q among heads"]), to=FLOAT)
    return g.norm(str(g.add("Add", found["result"], g.add("ReduceSum", shape, keepdims=0))))


def _read_first(g: Torch, found: dict[str, str]) -> str:
    """The first position of a tensor with heads among sequences."""
    first = g.add("Gather", found["k by position"], g.constant(0))
    return g.norm(str(g.add("Add", found["result"], _sum(g, str(first)))))


def _add_rows(g: Torch, found: dict[str, str]) -> str:
    """A vector of each row is added to tokens by position."""
    rows = g.add(
        "Cast",
        g.add("Range", g.constant(0), g.add("Squeeze", g.add("Mul", g.sizes(0), g.sizes(1))), g.constant(1)),
        to=FLOAT,
    )
    y = g.add("Add", found["projected"], g.unsqueeze(str(g.add("Sin", rows)), 1))
    turned = g.add("Transpose", g.reshape(str(y), g.sizes(1), g.sizes(0), WIDTH), perm=[1, 0, 2])
    return g.norm(str(g.add("Add", found["result"], turned)))


def _add_heads(g: Torch, found: dict[str, str]) -> str:
    """A vector of each head of each text, too."""
    count = g.add("Squeeze", g.add("Mul", g.sizes(0), g.constant([HEADS])))
    heads = g.add("Sin", g.add("Cast", g.add("Range", g.constant(0), count, g.constant(1)), to=FLOAT))
    y = g.add("Add", found["v among heads"], g.unsqueeze(str(heads), 1, 2))
    y = g.reshape(str(y), g.sizes(0), HEADS, g.sizes(1), SIZE)
    return g.norm(str(g.add("Add", found["result"], g.merge_heads(y))))


def _take_position_first_for_batch_first(g: Torch, found: dict[str, str]) -> str:
    """Rows of all tokens by position, taken as if they lay by text: other tokens are at each place."""
    y = g.reshape(found["projected"], g.sizes(0), g.sizes(1), WIDTH)
    return g.norm(str(g.add("Add", found["result"], y)))


def _other_heads(g: Torch, found: dict[str, str]) -> str:
    """Heads among texts, divided in another number."""
    y = g.reshape(found["q among heads"], g.sizes(0), g.sizes(1), WIDTH)
    return g.norm(str(g.add("Add", found["result"], y)))


OTHERS: dict[str, Read] = {
    **{
        f"reads {n}": _reads(n)
        for n in ("turned", "q by position", "k among heads", "flat", "projected", "by position")
    },
    "size": _read_size,
    "first": _read_first,
    "rows": _add_rows,
    "heads": _add_heads,
    "taken for batch first": _take_position_first_for_batch_first,
    "other heads": _other_heads,
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("sizes", [{}, {"batch": 5, "length": 5}, {"batch": 4, "length": 2}], ids=str)
def test_what_else_reads_such_tensors(name: str, sizes: dict[str, int]) -> None:
    model = encoder(OTHERS[name], **sizes)
    result, _ = unpadded(model)
    b, s = sizes.get("batch", 5), sizes.get("length", 7)
    check_same(model, result, {k: m for k, m in masks(b, s).items() if m.shape == (b, s)}, rtol=2e-3)


@pytest.mark.parametrize("name", ["q by position", "k among heads", "flat", "projected", "by position"])
def test_outputs_of_such_tensors(name: str) -> None:
    """Those that only unpadded nodes could read have all their rows."""
    g = Torch()
    x, bias = g.start()
    found = g.attention(x, bias)
    g.output(found[name], "tokens", rank=2 if name in ("flat", "projected") else 3)
    model = g.end(found["result"])
    result, report = unpadded(model, "on")
    zero = tuple(n for r in rows_of(report) for n in r.zero_outputs)
    assert zero == (("tokens",) if name == "by position" else ())
    if not zero:
        check_same(model, result)


def test_the_shape_of_heads_among_texts_is_that_of_the_padded_batch() -> None:
    model = encoder(_read_size)
    result, report = unpadded(model)
    assert [r.attentions for r in rows_of(report)] == [2]
    check_unpadded(result, 2)
    check_same(model, result, {"one": np.array([[1, 0, 0], [1, 1, 0]]), "other": np.ones((4, 6), np.int64)})
