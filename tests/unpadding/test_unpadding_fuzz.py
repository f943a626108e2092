# SPDX-License-Identifier: Apache-2.0
"""Random chains of operators between embeddings and pooling: without padding, outputs are what they were."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import onnx
from encoders import (
    BOOL,
    FLOAT,
    HEADS,
    LONGEST,
    POOLINGS,
    WIDTH,
    WORDS,
    Graph,
    check_same,
    feeds_for,
    rows_of,
    session,
    unpadded,
)
from hypothesis import given, settings
from hypothesis import strategies as st

_EXAMPLES = 600 if os.environ.get("STOF_TEST_ALL") else 40
_SIZE = WIDTH // HEADS

# Layouts of tensors: their dimensions by letter; f is batch times positions, n the width, h and d heads and their width.
LAYOUTS = ("bsn", "fn", "sbn", "bns", "bhsd", "bshd", "nbs", "fhd")
Draw = Callable[[st.SearchStrategy], object]


class Chain:
    """A graph that grows by random operators; all its tensors hold small numbers."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw
        batch = draw(st.sampled_from(["batch", "batch", 3, 1]))
        length = draw(st.sampled_from(["sequence", "sequence", 5, 3]))
        self.g = Graph(opset=draw(st.sampled_from([13, 17, 18, 20])), batch=batch, length=length)
        g = self.g
        self.ids, self.mask = g.input("input_ids"), g.input("attention_mask")
        self.mask_bias = g.bias(self.mask)
        self.seen: dict[str, list[str]] = {layout: [] for layout in LAYOUTS}
        self.x = self.note(g.embed(self.ids, draw(st.sampled_from(["table", "cumsum", ""])), self.mask), "bsn")
        self.layout = "bsn"

    def note(self, x: str, layout: str) -> str:
        self.seen[layout].append(x)
        return x

    def sizes(self, letters: str) -> str:
        """A shape: sizes of the batch are read from the ids."""
        g, shape = self.g, self.g.add("Shape", self.ids)
        number = {"n": WIDTH, "h": HEADS, "d": _SIZE, "1": 1}
        parts = []
        for letter in letters:
            if letter in number:
                parts.append(g.constant([number[letter]]))
            elif letter == "f":
                one, other = (g.add("Gather", shape, g.constant([i])) for i in (0, 1))
                parts.append(g.add("Mul", one, other))
            else:
                parts.append(g.add("Gather", shape, g.constant(["bs".index(letter)])))
        return str(g.add("Concat", *parts, axis=0))

    def change_layout(self, x: str, old: str, new: str) -> str:
        """Another layout, by way of [B, S, N]."""
        g = self.g
        if old == new:
            return x
        if old in ("fn", "fhd"):
            x = g.add("Reshape", x, self.sizes("bsn"))
        elif old in ("bhsd", "bshd"):
            x = g.add("Transpose", x, perm=[0, 2, 1, 3]) if old == "bhsd" else x
            x = g.add("Reshape", x, g.constant([0, 0, WIDTH]) if self.draw(st.booleans()) else self.sizes("bsn"))
        elif old != "bsn":
            x = g.add("Transpose", x, perm=[old.index(c) for c in "bsn"])
        if new in ("fn", "fhd"):
            kind = self.draw(st.integers(0, 1))
            shape = {"fn": [-1, WIDTH], "fhd": [-1, HEADS, _SIZE]}[new]
            x = g.add("Reshape", x, g.constant(shape) if kind else self.sizes(new))
        elif new in ("bhsd", "bshd"):
            x = g.add("Reshape", x, g.constant([0, 0, HEADS, -1]) if self.draw(st.booleans()) else self.sizes("bshd"))
            x = g.add("Transpose", x, perm=[0, 2, 1, 3]) if new == "bhsd" else x
        elif new != "bsn":
            x = g.add("Transpose", x, perm=["bsn".index(c) for c in new])
        return str(x)

    # ---- steps ----
    def step(self) -> None:
        steps = [self.elementwise, self.add_another, self.dense, self.norm, self.swap_parts, self.vector, self.hide]
        steps += [self.attend, self.move, self.move, self.gate, self.mix]
        self.draw(st.sampled_from(steps))()
        self.note(self.x, self.layout)

    def move(self) -> None:
        new = self.draw(st.sampled_from(LAYOUTS))
        self.x, self.layout = self.change_layout(self.x, self.layout, new), new

    def elementwise(self) -> None:
        ops = ["Tanh", "Sigmoid", "Relu", "Erf", "Abs", "Neg", "Softsign", "Identity", "LeakyRelu"]
        self.x = self.g.add(self.draw(st.sampled_from(ops)), self.x)

    def add_another(self) -> None:
        """With a tensor from before, in one of the orders of the inputs."""
        layout = self.draw(st.sampled_from([n for n, names in self.seen.items() if names]))
        other = self.change_layout(self.draw(st.sampled_from(self.seen[layout])), layout, self.layout)
        pair = (self.x, other) if self.draw(st.booleans()) else (other, self.x)
        self.x = self.g.add("Tanh", self.g.add(self.draw(st.sampled_from(["Add", "Sub", "Mul", "Max", "Min"])), *pair))

    def dense(self) -> None:
        g, last = self.g, self.layout[-1]
        if last == "s":
            product = g.add("MatMul", g.weight(WIDTH, WIDTH), self.x) if self.layout == "bns" else self.x
            self.x = g.add("Tanh", product)
            return
        width = WIDTH if last == "n" else _SIZE
        if self.layout == "fn" and self.draw(st.booleans()):
            self.x = g.add("Tanh", g.add("Gemm", self.x, g.weight(width, width), g.weight(width), transB=1))
        else:
            self.x = g.add("Tanh", g.dense(self.x, width, width))

    def norm(self) -> None:
        g, axis = self.g, self.draw(st.sampled_from([a for a, c in enumerate(self.layout) if c in "nhd"]))
        kind = self.draw(st.sampled_from(["softmax", "mean", "max"]))
        if kind == "softmax":
            self.x = g.add("Softmax", self.x, axis=self.draw(st.sampled_from([axis, axis - len(self.layout)])))
        else:
            op = "ReduceMean" if kind == "mean" else "ReduceMax"
            self.x = g.add("Sub", self.x, g.reduce(op, self.x, axis, 1))

    def swap_parts(self) -> None:
        """Slices of each token that change places."""
        g, axis = self.g, self.draw(st.sampled_from([a for a, c in enumerate(self.layout) if c in "nhd"]))
        size = {"n": WIDTH, "h": HEADS, "d": _SIZE}[self.layout[axis]]
        half = size // 2
        if self.draw(st.booleans()):
            one = g.add("Slice", self.x, g.constant([0]), g.constant([half]), g.constant([axis]))
            other = g.add("Slice", self.x, g.constant([half]), g.constant([2**62]), g.constant([axis]))
        else:
            attributes = {"num_outputs": 2} if g.opset >= 18 else {}
            one, other = g.add("Split", self.x, outputs=2, axis=axis, **attributes)
        self.x = g.add("Concat", g.add("Neg", other), one, axis=axis)

    def vector(self) -> None:
        """A constant or a vector of each text or position, from the graph's inputs."""
        g = self.g
        letters = self.draw(st.sampled_from(["1", "n", "s", "b"]))
        if letters == "1":
            self.x = g.add("Mul", self.x, g.constant(0.7, np.float32))
            return
        if letters == "n":
            shape = [{"n": WIDTH, "h": HEADS, "d": _SIZE}.get(c, 1) for c in self.layout]
            self.x = g.add("Tanh", g.add("Add", self.x, g.weight(*shape)))
            return
        if "f" in self.layout:
            return
        table = g.weight(WORDS + LONGEST, 1)
        size = g.add("Gather", g.add("Shape", self.ids), g.constant("bs".index(letters)))
        at = g.add("Range", g.constant(0), size, g.constant(1))
        values = g.add("Gather", table, at)
        shape = [-1 if c == letters else 1 for c in self.layout]
        while shape[0] == 1 and self.draw(st.booleans()):
            del shape[0]
        self.x = g.add("Tanh", g.add("Add", self.x, g.add("Reshape", values, g.constant(shape))))

    def hide(self) -> None:
        """Zeros or ones at padding."""
        g = self.g
        real = g.add("Cast", self.mask, to=FLOAT)
        if "f" in self.layout:
            shape = self.sizes("f" + "1" * (len(self.layout) - 1))
        else:
            turned = self.layout.index("s") < self.layout.index("b")
            real = g.add("Transpose", real, perm=[1, 0]) if turned else real
            shape = self.sizes("".join(c if c in "bs" else "1" for c in self.layout))
        real = g.add("Reshape", real, shape)
        if self.draw(st.booleans()):
            self.x = g.add("Mul", self.x, real)
        else:
            self.x = g.add("Where", g.add("Cast", real, to=BOOL), self.x, g.constant(-0.5, np.float32))

    def gate(self) -> None:
        g = self.g
        condition = g.add("Greater", self.x, g.constant(0.1, np.float32))
        self.x = g.add("Where", condition, self.x, g.add("Mul", self.x, g.constant(0.5, np.float32)))

    def attend(self) -> None:
        g = self.g
        x = self.change_layout(self.x, self.layout, "bsn")
        self.x, self.layout = g.self_attention(g.norm(x), self.mask_bias), "bsn"

    def mix(self) -> None:
        """What is not row-wise, once in a while."""
        if not self.draw(st.sampled_from([False, False, True])):
            return
        g, kind = self.g, self.draw(st.sampled_from(["first", "sum", "shape", "softmax"]))
        axis = self.layout.index("f" if "f" in self.layout else "s")
        if kind == "first":
            one = g.add("Slice", self.x, g.constant([0]), g.constant([1]), g.constant([axis]))
            self.x = g.add("Tanh", g.add("Add", self.x, one))
        elif kind == "sum":
            self.x = g.add("Tanh", g.add("CumSum", self.x, g.constant(axis)))
        elif kind == "softmax":
            self.x = g.add("Softmax", self.x, axis=axis)
        else:
            size = g.add("Gather", g.add("Shape", self.x), g.constant(axis))
            self.x = g.add("Div", self.x, g.add("Cast", size, to=FLOAT))


@st.composite
def chains(draw: st.DrawFn) -> tuple[onnx.ModelProto, tuple[str, ...]]:
    """A model, and its outputs with a row for each token."""
    c = Chain(draw)
    for _ in range(draw(st.integers(0, 6))):
        c.step()
    c.attend()
    for _ in range(draw(st.integers(0, 6))):
        c.step()
    x = c.g.add("Tanh", c.change_layout(c.x, c.layout, "bsn"))
    kinds = draw(st.lists(st.sampled_from([p for p in POOLINGS if p != "middle"]), min_size=1, max_size=2, unique=True))
    for i, kind in enumerate(kinds):
        c.g.output(c.g.pool(x, kind, c.mask), f"pooled{i}")
    return c.g.model(), tuple(kinds)


@st.composite
def batches(draw: st.DrawFn, batch: int, length: int) -> np.ndarray:
    kind = draw(st.sampled_from(["any", "right", "left", "both"]))
    rows = []
    for _ in range(batch):
        begin, end = sorted(draw(st.integers(0, length)) for _ in range(2))
        columns = np.arange(length)
        if kind == "any":
            rows.append([draw(st.integers(0, 1)) for _ in range(length)])
        else:
            begin, end = (0, end) if kind == "right" else (begin, length) if kind == "left" else (begin, end)
            rows.append(list((begin <= columns) & (columns < end)))
    return np.array(rows, np.int64).reshape(batch, length)


@st.composite
def chains_with_outputs(draw: st.DrawFn) -> tuple[onnx.ModelProto, dict[str, str]]:
    """A model, and its outputs that have a row for each token, with their layouts."""
    c, found = Chain(draw), {}
    c.attend()
    for i in range(draw(st.integers(1, 2))):
        for _ in range(draw(st.integers(0, 4))):
            c.step()
        name = f"tokens{i}"
        c.g.output(c.x, name, rank=len(c.layout))
        found[name] = c.layout
        if draw(st.booleans()):
            c.x = name  # what is an output is read further on, too
    x = c.change_layout(c.x, c.layout, "bsn")
    c.g.output(c.g.pool(x, draw(st.sampled_from(["mean", "first", "last", "max"])), c.mask), "pooled")
    return c.g.model(), found


def rows_of_tokens(y: np.ndarray, layout: str, batch: int, length: int) -> np.ndarray:
    """[B, S, the rest]."""
    if layout[0] == "f":
        return y.reshape(batch, length, -1)
    order = [layout.index("b"), layout.index("s"), *(a for a, c in enumerate(layout) if c not in "bs")]
    return y.transpose(order).reshape(batch, length, -1)


@given(st.data())
@settings(max_examples=_EXAMPLES // 2, print_blob=True)
def test_random_chains_with_outputs_of_tokens(data: st.DataObject) -> None:
    """What --unpad on writes: rows of padding are 0, but for texts without a real token."""
    model, layouts = data.draw(chains_with_outputs())
    dims = model.graph.input[0].type.tensor_type.shape.dim
    batch = dims[0].dim_value or data.draw(st.integers(1, 4))
    length = dims[1].dim_value or data.draw(st.integers(2, 6))
    result, report = unpadded(model, "on")
    zero = {n for r in rows_of(report) for n in r.zero_outputs}
    mask = data.draw(batches(batch, length))
    feeds, names = feeds_for(model, mask), [o.name for o in model.graph.output]
    oracle = session(model, False).run(None, feeds)
    for with_library in (True, False):
        for name, one, other in zip(names, oracle, session(result, with_library).run(None, feeds), strict=True):
            assert one.shape == other.shape
            if name not in zero:
                np.testing.assert_allclose(other, one, rtol=2e-3, atol=2e-4, err_msg=name)
                continue
            one, other = (rows_of_tokens(y, layouts[name], batch, length) for y in (one, other))
            for b, row in enumerate(mask):
                real = (row != 0) | (not row.any())
                np.testing.assert_allclose(other[b, real], one[b, real], rtol=2e-3, atol=2e-4)
                assert not other[b, ~real].any()


@given(st.data())
@settings(max_examples=_EXAMPLES, print_blob=True)
def test_random_chains(data: st.DataObject) -> None:
    model, _ = data.draw(chains())
    dims = model.graph.input[0].type.tensor_type.shape.dim
    batch = dims[0].dim_value or data.draw(st.integers(1, 4))
    length = dims[1].dim_value or data.draw(st.integers(1, 6))
    result, _ = unpadded(model, data.draw(st.sampled_from(["auto", "auto", "auto", "on"])))
    found = {f"mask {i}": data.draw(batches(batch, length)) for i in range(2)}
    check_same(model, result, found, rtol=2e-3)
