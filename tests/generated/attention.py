# SPDX-License-Identifier: Apache-2.0
"""The graph around a drawn mask, from the model's inputs to its output."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field, replace

import numpy as np
import onnx
from onnx import TensorProto, helper

from .builder import Tensor
from .expr import K, Mask, Q, make
from .forms import Form
from .operands import FP16, FP32, D, Operands
from .styles import Renderer, Style

LOWEST = {FP32: -3.4028234663852886e38, FP16: -65504.0}


@dataclass(frozen=True)
class Case:
    """A model and what is known of it. ``terms`` are the mask's tensors in the graph, ``kinds`` how each applies."""

    model: onnx.ModelProto
    form: Form
    heads: int
    terms: list[tuple[str, str]]
    fill: float
    inputs: dict[str, list[str | int]] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)


def build(
    rng: random.Random, mask: Mask, style: Style, form: Form, *, opset: int, heads: int, sizes: dict[str, int],
    fill: float, pad_kind: str, plain: bool = False,
) -> Case:  # fmt: skip
    """The model of a case. ``sizes`` are the numbers of fixed shapes."""
    return _Maker(rng, mask, style, form, opset, heads, sizes, fill, pad_kind, plain).build()


class _Maker(Operands):
    # ---- scores ----

    def number(self, value: float, dtype: int | None = None) -> str:
        wide = np.float16 if (dtype or self.dtype) == FP16 else np.float32
        return self.b.constant(value, wide)

    def scores(self, q: str, k: str) -> str:
        b, form = self.b, self.form
        scale = self.rng.choice([1 / math.sqrt(D), 0.35, 0.8])
        if form.scale == "split":
            q, k = (b.op("Mul", x, self.number(math.sqrt(scale))) for x in (q, k))
        elif form.scale == "query":
            q = b.op("Mul", q, self.number(scale))
        k = self._repeated(k)
        kt = self._transposed(k)
        if form.scale == "key":
            kt = b.op("Mul", kt, self.number(scale))
        if form.three:
            q = b.op("Reshape", q, b.op("Concat", b.constant([-1]), b.dim("S"), b.constant([D]), axis=0))
            kt = b.op("Reshape", kt, b.op("Concat", b.constant([-1, D]), b.dim("T"), axis=0))
        x = b.op("MatMul", q, kt)
        if form.scale == "div":
            x = b.op("Div", x, self.number(1 / scale))
        elif form.scale == "mul":
            x = b.op("Mul", x, self.number(scale))
        if form.softcap:
            x = b.op("Mul", b.op("Tanh", b.op("Div", x, self.number(3.0))), self.number(3.0))
        self.later = scale if form.scale == "after" else 1.0
        return x

    def _repeated(self, x: str) -> str:
        """Key or value heads, each as often as query heads share it."""
        b = self.b
        if self.groups in (self.heads, 1):
            return x
        repeat = self.heads // self.groups
        wide = b.op("Unsqueeze", x, b.constant([2]))
        head, tail = (
            b.op("Concat", b.dim("B"), b.constant([self.groups, repeat]), axis=0),
            b.op("Concat", b.dim("T"), b.constant([D]), axis=0),
        )
        wide = b.op("Expand", wide, b.op("Concat", head, tail, axis=0))
        return b.op(
            "Reshape", wide, b.op("Concat", b.dim("B"), b.constant([self.heads]), b.dim("T"), b.constant([D]), axis=0)
        )

    def _transposed(self, k: str) -> str:
        b = self.b
        if self.form.key == "at once":
            source = next((n for n in b.nodes if n.output[0] == k and n.op_type == "Transpose"), None)
            if source is not None:  # [B, T, H, D] -> [B, H, D, T]
                return b.op("Transpose", source.input[0], perm=[0, 2, 3, 1])
        if self.form.key == "3-D":
            heads = self.groups if self.groups == 1 else self.heads
            flat = b.op("Reshape", k, b.op("Concat", b.constant([-1]), b.dim("T"), b.constant([D]), axis=0))
            turned = b.op("Transpose", flat, perm=[0, 2, 1])
            shape = b.op("Concat", b.dim("B"), b.constant([heads, D]), b.dim("T"), axis=0)
            return b.op("Reshape", turned, shape)
        return b.op("Transpose", k, perm=[0, 1, 3, 2])

    # ---- masks ----

    def masked(self, x: str, renderer: Renderer) -> str:
        b, form = self.b, self.form
        if form.bias:
            bias = self.bias(renderer)
            x = b.op("Add", x, self._three(Tensor(bias, "f", 4, frozenset("hqk"))) if form.three else bias)
        if form.widened:
            x = b.op("Cast", x, to=FP32)
        if form.apply in ("keep", "drop"):
            allowed = renderer.allowed()
            if form.apply == "drop":
                allowed = b.join("Not", "b", allowed)
            name = self._three(allowed) if form.three else allowed.name
            fill = self.number(self.fill, FP32 if form.widened else None)
            self.terms.append((allowed.name, form.apply))
            x = b.op("Where", name, x, fill) if form.apply == "keep" else b.op("Where", name, fill, x)
            self.allowed = allowed if form.apply == "keep" else b.join("Not", "b", allowed)
        elif form.apply == "multiply":
            x = self._multiplied(x, renderer.allowed())
        else:
            for t in renderer.additive(self.fill):
                x = self._added(x, t)
            if form.guard in ("row", "pairs"):
                self.allowed = renderer.allowed()
        if form.scale == "after":
            x = b.op("Mul", x, self.number(self.later))
        return x

    def bias(self, renderer: Renderer) -> str:
        """A tensor [1 or none, H, S, T] that is added besides the mask."""
        b = self.b
        if self.form.bias == "input":
            return self.feed("bias", self.dtype, 1, self.heads, "S", "T")
        d = renderer.indices.integer(make("sub", K, Q))
        slopes = b.constant((0.5 ** np.arange(1, self.heads + 1)).reshape(-1, 1, 1), np.float32)
        if b.chance(0.5):
            d = b.join("Neg", d.kind, b.join("Abs", d.kind, d))
        bias = b.op("Mul", b.cast(d, "f").name, slopes)
        return bias if self.dtype == FP32 else b.op("Cast", bias, to=FP16)

    def _added(self, x: str, t: Tensor) -> str:
        b, form = self.b, self.form
        if self.dtype == FP16 and not form.widened:
            t = replace(t, name=b.op("Cast", t.name, to=FP16))
        if form.apply == "sub":
            t = replace(t, name=b.op("Neg", t.name))
        self.terms.append((t.name, "sub" if form.apply == "sub" else "add"))
        name = self._three(t) if form.three else t.name
        if form.apply == "sub":
            return b.op("Sub", x, name)
        x = b.op("Add", name, x) if form.apply == "left" else b.op("Add", x, name)
        if form.apply == "guarded":
            lowest = LOWEST[FP16 if self.dtype == FP16 and not form.widened else FP32]
            x = b.op("Max", x, self.number(lowest, FP32 if form.widened else None))
        return x

    def _multiplied(self, x: str, allowed: Tensor) -> str:
        """``x * m + log(m)`` or ``x * m + (1 - m) * fill`` with m the mask as 0 and 1."""
        b, narrow = self.b, self.dtype == FP16 and not self.form.widened
        self.terms.append((allowed.name, "keep"))
        self.allowed = allowed
        m = replace(allowed, name=b.op("Cast", allowed.name, to=FP16 if narrow else FP32), kind="f")
        name = self._three(m) if self.form.three else m.name
        product = b.op("Mul", *b.choice([(x, name), (name, x)]))
        if math.isinf(self.fill):
            added = b.op("Log", name)
        else:
            number = self.number(self.fill, None if narrow else FP32)
            added = b.op("Mul", b.op("Sub", self.number(1.0, None if narrow else FP32), name), number)
        return b.op("Add", *b.choice([(product, added), (added, product)]))

    def _three(self, t: Tensor) -> str:
        """A mask for scores [B*H, S, T]."""
        b = self.b
        if not t.axes & {"b", "h"} and t.rank <= 3:
            return t.name
        whole = Tensor("", t.kind, 4, frozenset("bhqk"))
        spread = b.op("Expand", t.name, b.shape(b.letters(whole)))
        return b.op("Reshape", spread, b.op("Concat", b.constant([-1]), b.dim("S"), b.dim("T"), axis=0))

    # ---- the rest ----

    def weights(self, x: str) -> str:
        b, form = self.b, self.form
        if form.shifted:
            if b.opset >= 18:
                top = b.op("ReduceMax", x, b.constant([-1]), keepdims=1)
            else:
                top = b.op("ReduceMax", x, axes=[-1], keepdims=1)
            x = b.op("Sub", x, top)
        if form.sink:
            column = self.sink(x)
            x = b.op("Concat", x, column, axis=-1)
        if form.written and not form.sink:
            p = self.written_out(x)
        else:
            p = b.op("Softmax", x, axis=self.rng.choice([-1, 2 if form.three else 3]))
        if form.sink:
            end = b.constant([-1]) if b.chance(0.5) else b.dim("T")
            p = b.op("Slice", p, b.constant([0]), end, b.constant([-1]))
        if form.guard == "nan":
            p = b.op("Where", b.op("IsNaN", p), self.number(0.0, FP32 if form.widened else None), p)
        if form.guard == "pairs":
            p = b.op("Where", self.allowed.name, p, self.number(0.0, FP32 if form.widened else None))
        if form.widened:
            p = b.op("Cast", p, to=FP16)
        return p

    def written_out(self, x: str) -> str:
        """A softmax by its parts."""
        b = self.b

        def reduced(op: str, tensor: str) -> str:
            if b.opset >= (13 if op == "ReduceSum" else 18):
                return b.op(op, tensor, b.constant([-1]), keepdims=1)
            return b.op(op, tensor, axes=[-1], keepdims=1)

        e = b.op("Exp", b.op("Sub", x, reduced("ReduceMax", x)))
        total = reduced("ReduceSum", e)
        return b.op("Mul", e, b.op("Reciprocal", total)) if b.chance(0.3) else b.op("Div", e, total)

    def sink(self, x: str) -> str:
        """One logit of each head, for every row."""
        b = self.b
        dtype = FP32 if self.form.widened else self.dtype
        logits = self.number(0.3 * np.arange(1, self.heads + 1).reshape(1, -1, 1, 1), dtype)
        return b.op(
            "Expand", logits, b.op("Concat", b.dim("B"), b.constant([self.heads]), b.dim("S"), b.constant([1]), axis=0)
        )

    def multi_head(self, renderer: Renderer) -> str:
        """All of it as one MultiHeadAttention of domain com.microsoft, whose operands are the inputs [B, length, H*D]."""
        b = self.b
        mask = b.lift_rank(self.float_mask(renderer), 4)
        whole = replace(mask, axes=mask.axes | {"q", "k"})
        name = b.op("Expand", mask.name, b.shape(b.letters(whole)))
        scale = {"scale": 0.35} if b.chance(0.5) else {}
        heads = {"num_heads": self.heads, "domain": "com.microsoft"}
        return b.op("MultiHeadAttention", "q", "k", "v", "", "", name, **heads, **scale)

    def float_mask(self, renderer: Renderer) -> Tensor:
        """The whole mask as one float tensor, which is noted as a term."""
        b = self.b
        parts = renderer.additive(self.fill)
        total = parts[0]
        for part in parts[1:]:
            total = b.join("Add", "f", total, part)
        self.terms.append((total.name, "add"))
        return total

    def node_output(self, q: str, k: str, v: str, renderer: Renderer) -> str:
        """All of it as one node."""
        b, form = self.b, self.form
        if form.node == "bool":
            allowed = renderer.allowed()
            self.terms.append((allowed.name, "keep"))
            mask = b.bigger(allowed)
            mask = b.lift_rank(mask, 2) if mask.rank < 2 else mask
        else:
            mask = b.bigger(self.float_mask(renderer))
        if not mask.axes >= {"k"} or mask.rank < 2:
            whole = Tensor("", mask.kind, max(mask.rank, 2), mask.axes | {"q", "k"})
            mask = replace(whole, name=b.op("Expand", mask.name, b.shape(b.letters(whole))))
        scale = {"scale": 0.35} if b.chance(0.5) else {}
        softcap = {"softcap": 3.0} if form.softcap else {}
        return b.op("Attention", q, k, v, mask.name, **scale, **softcap)

    def output(self, p: str, v: str) -> str:
        b, form = self.b, self.form
        v = self._repeated(v)
        if form.three:
            v = b.op("Reshape", v, b.op("Concat", b.constant([-1]), b.dim("T"), b.constant([D]), axis=0))
        o = b.op("MatMul", p, v)
        if form.guard == "row":
            o = self._row_guard(o)
        if form.three:
            o = b.op(
                "Reshape", o, b.op("Concat", b.dim("B"), b.constant([self.heads]), b.dim("S"), b.constant([D]), axis=0)
            )
        return self._merged(o)

    def _merged(self, o: str) -> str:
        """The result [B, H, S, D] in the model's layout."""
        b, form = self.b, self.form
        if form.layout == "bhsd":
            return o
        o = b.op("Transpose", o, perm=[0, 2, 1, 3])
        return o if form.layout == "bshd" else b.op("Reshape", o, b.constant([0, 0, self.heads * D]))

    def _row_guard(self, o: str) -> str:
        """Rows without a key give 0."""
        b = self.b
        whole = Tensor("", "b", 4, self.allowed.axes | {"q", "k"})
        grown = b.op("Expand", self.allowed.name, b.shape(b.letters(whole)))
        ints = b.op("Cast", grown, to=TensorProto.INT32)
        if b.opset >= 18:
            some = b.op("ReduceMax", ints, b.constant([-1]), keepdims=1)
        else:
            some = b.op("ReduceMax", ints, axes=[-1], keepdims=1)
        none = b.op("Not", b.op("Cast", some, to=TensorProto.BOOL))
        return b.op("Where", none, self.number(0.0), o)

    def build(self) -> Case:
        b, form = self.b, self.form
        for letter in "BSTP":
            if form.fixed and letter != "B":
                b.sizes[letter] = self.numbers[letter]
        b.sizes["H"] = self.heads
        if form.lengths != "past":
            b.sizes["P"] = 0
        inputs = self.mask_inputs()
        q, k, v = self.operands()
        # Masks are written before or after the scores, as exporters do.
        early = b.choice([False, True])
        renderer = Renderer(b, self.style, self.mask, inputs)
        if form.node == "multi":
            return self._case(self.multi_head(renderer))
        if form.node:
            return self._case(self._merged(self.node_output(q, k, v, renderer)))
        if early:
            place = len(b.nodes)
            x = self.scores(q, k)
            made = b.nodes[place:]
            del b.nodes[place:]
            end = len(b.nodes)
            x = self.masked(x, renderer)
            mask_nodes = b.nodes[end:]
            b.nodes[end:] = _ordered(made, mask_nodes)
        else:
            x = self.masked(self.scores(q, k), renderer)
        out = self.output(self.weights(x), v)
        return self._case(out)

    def _case(self, out: str) -> Case:
        infos = [helper.make_tensor_value_info(n, t, dims) for n, (t, dims) in self.inputs.items()]
        outputs = [helper.make_tensor_value_info(n, t, None) for n, t in [(out, self.dtype), *self.outputs]]
        graph = helper.make_graph(self.b.nodes, "generated", infos, outputs, self.b.initializers)
        opsets = [helper.make_opsetid("", self.b.opset), helper.make_opsetid("com.microsoft", 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
        dims = {n: d for n, (_, d) in self.inputs.items()}
        return Case(model, self.form, self.heads, self.terms, self.fill, dims, self.numbers)


def _ordered(scores: list[onnx.NodeProto], mask: list[onnx.NodeProto]) -> list[onnx.NodeProto]:
    """The mask's nodes first, as far as they need no scores; every node behind those that it reads."""
    waiting = {o for n in scores for o in n.output}
    first, last = [], []
    for node in mask:
        late = any(i in waiting for i in node.input)
        (last if late else first).append(node)
        if late:
            waiting.update(node.output)
    return [*first, *scores, *last]
