# SPDX-License-Identifier: Apache-2.0
"""Scores whose query and key axes are split and merged again between product and softmax.

Image encoders add decomposed relative positions this way: scores [B*H, N, N] are viewed as [B*H, h, w, h, w], one bias by rows
and one by columns is added, and they are viewed as [B*H, N, N] again. Pooled attention has another grid for the keys.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from attention_forms import feeds, model, only_site, reason, rewrite, run
from onnx import TensorProto, helper, numpy_helper

import stof

D, H = 8, 4
Array = np.ndarray


def softmax_times(scores: Array, values: Array) -> Array:
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    product: Array = (weights / weights.sum(-1, keepdims=True)) @ values
    return product


class Scores:
    """Nodes between product and softmax, and what they compute in fp64. Masks are inputs of the graph or constants."""

    def __init__(self, batch: int, queries: int, keys: int, *, merged: bool, seed: int, half: bool = False) -> None:
        self.rng = np.random.default_rng(seed)
        self.type = TensorProto.FLOAT16 if half else TensorProto.FLOAT
        self.dtype = np.float16 if half else np.float32
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []
        self.feeds: dict[str, Array] = {}
        lead = [batch * H] if merged else [batch, H]
        q, k, v = (self.given(n, [*lead, rows, D]) for n, rows in (("q", queries), ("k", keys), ("v", keys)))
        self.whole = [*lead, queries, keys]
        rank = len(lead) + 2
        kt = self.node("Transpose", [k], perm=[*range(rank - 2), rank - 1, rank - 2])
        self.name = self.node("MatMul", [q, kt])
        self.values = v
        self.exact = self.feeds[q].astype(float) @ self.feeds[k].astype(float).swapaxes(-1, -2)

    def given(self, name: str, shape: list[int], declared: list[int | str] | None = None) -> str:
        self.inputs.append(helper.make_tensor_value_info(name, self.type, declared or shape))
        self.feeds[name] = self.rng.standard_normal(shape).astype(self.dtype)
        return name

    def constant(self, array: Array) -> str:
        self.constants.append(numpy_helper.from_array(array, f"c{len(self.constants)}"))
        return f"c{len(self.constants) - 1}"

    def node(self, op: str, inputs: list[str], **attributes: object) -> str:
        out = f"t{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [out], **attributes))
        return out

    def view(self, shape: list[int]) -> None:
        self.name = self.node("Reshape", [self.name, self.constant(np.array(shape, np.int64))])
        self.exact = self.exact.reshape(shape)

    def permute(self, perm: list[int]) -> None:
        self.name = self.node("Transpose", [self.name], perm=perm)
        self.exact = self.exact.transpose(perm)

    def scale(self, factor: float) -> None:
        self.name = self.node("Mul", [self.name, self.constant(np.array(factor, self.dtype))])
        self.exact = self.exact * float(self.dtype(factor))

    def add(self, shape: list[int], *, subtract: bool = False, first: bool = False) -> None:
        bias = self.given(f"bias{len(self.inputs)}", shape)
        pair = [bias, self.name] if first and not subtract else [self.name, bias]
        self.name = self.node("Sub" if subtract else "Add", pair)
        self.exact = self.exact + (-1 if subtract else 1) * self.feeds[bias].astype(float)

    def forbid(self, shape: list[int]) -> None:
        """A Where by a constant condition, which leaves the first key of each row."""
        keep = self.rng.random(shape) < 0.7
        if shape[-1] > 1:
            keep[..., 0] = True
        else:
            keep[:] = True
            keep.reshape(-1)[1:] = self.rng.random(keep.size - 1) < 0.7 if keep.shape[-2] > 1 else True
        fill = self.constant(np.array(-np.inf, self.dtype))
        self.name = self.node("Where", [self.constant(keep), self.name, fill])
        self.exact = np.where(keep, self.exact, -np.inf)

    def model(self) -> tuple[onnx.ModelProto, Array]:
        self.view(self.whole)
        weights = self.node("Softmax", [self.name], axis=-1)
        out = self.node("MatMul", [weights, self.values])
        result = helper.make_tensor_value_info(out, self.type, [*self.whole[:-1], D])
        graph = helper.make_graph(self.nodes, "grid", self.inputs, [result], self.constants)
        opsets = [helper.make_opsetid("", 18)]
        wanted = softmax_times(self.exact, self.feeds[self.values].astype(float))
        return helper.make_model(graph, opset_imports=opsets, ir_version=9), wanted


def check(scores: Scores, tolerance: float = 1e-5) -> None:
    graph, wanted = scores.model()
    optimized, _ = rewrite(graph)
    assert not any(n.op_type == "Softmax" for n in optimized.graph.node)
    for library in (False, True):
        (found,) = run(optimized, scores.feeds, library=library)
        assert np.abs(found - wanted).max() < tolerance


GRIDS = {
    "square": ((4, 4), (4, 4)),
    "wide": ((3, 5), (3, 5)),
    "pooled keys": ((4, 6), (2, 3)),
    "a row": ((1, 6), (2, 5)),
}


@pytest.mark.parametrize("grids", GRIDS)
@pytest.mark.parametrize("merged", [True, False])
@pytest.mark.parametrize("half", [False, True])
def test_biases_by_rows_and_columns(grids: str, merged: bool, half: bool) -> None:
    (h, w), (kh, kw) = GRIDS[grids]
    scores = Scores(2, h * w, kh * kw, merged=merged, seed=1, half=half)
    lead = scores.whole[:-2]
    scores.scale(D**-0.5)
    scores.view([*lead, h, w, kh, kw])
    scores.add([*lead, h, w, kh, 1])
    scores.add([*lead, h, w, 1, kw], first=True)
    check(scores, 5e-3 if half else 1e-5)


TERMS = {
    "by rows of keys alone": [1, 1, 4, 1],
    "by columns of keys alone": [1, 1, 1, 6],
    "by columns of both": [1, 5, 1, 6],
    "by rows of queries": [3, 1, 1, 6],
    "everything": [3, 5, 4, 6],
}


@pytest.mark.parametrize("term", TERMS)
@pytest.mark.parametrize("lead", ["heads", "merged", "no", "batch"])
def test_one_bias_of_a_grid(term: str, lead: str) -> None:
    scores = Scores(2, 15, 24, merged=lead == "merged", seed=2)
    own = {"heads": [1, H], "merged": [2 * H], "no": [1], "batch": [2, 1]}[lead]
    scores.view([*scores.whole[:-2], 3, 5, 4, 6])
    scores.add([*own, *TERMS[term]])
    check(scores)


@pytest.mark.parametrize("merged", [True, False])
def test_masks_before_within_and_after_the_view(merged: bool) -> None:
    """Where beside Add, two views of different factors, and masks of the merged scores on both sides."""
    scores = Scores(2, 12, 24, merged=merged, seed=3)
    lead = scores.whole[:-2]
    scores.add([1] * len(lead) + [12, 24])
    scores.view([*lead, 3, 4, 4, 6])
    scores.forbid([3, 1, 4, 6])
    scores.add([3, 1, 4, 1], subtract=True)
    scores.view([*lead, 12, 24])
    scores.forbid([12, 24])
    scores.view([*lead, 2, 6, 3, 2, 4])
    scores.add([2, 1, 3, 1, 4])
    check(scores)


def test_batch_and_heads_are_split_and_merged_beside_the_grid() -> None:
    scores = Scores(6, 15, 12, merged=True, seed=4)
    scores.view([2, 3, H, 3, 5, 3, 4])
    scores.add([1, 3, 1, 3, 1, 3, 1])
    scores.view([6, H, 15, 12])
    scores.add([6, 1, 1, 12])
    scores.view([6 * H, 15, 3, 4])
    scores.add([6 * H, 1, 3, 1])
    check(scores)


def test_axes_of_size_one_come_and_go() -> None:
    """The same by Unsqueeze, Squeeze and Flatten, as the view of a single row of queries."""
    scores = Scores(2, 5, 12, merged=True, seed=5)
    one = scores.constant(np.array([2], np.int64))
    scores.name, scores.exact = scores.node("Unsqueeze", [scores.name, one]), scores.exact[:, :, None]
    scores.add([2 * H, 1, 1, 12])
    scores.name, scores.exact = scores.node("Flatten", [scores.name], axis=2), scores.exact.reshape(-1, 12)
    scores.view([2 * H, 5, 1, 3, 4])
    scores.add([1, 5, 1, 3, 1])
    scores.name, scores.exact = scores.node("Squeeze", [scores.name, one]), scores.exact[:, :, 0]
    check(scores)


@pytest.mark.parametrize("seed", range(40))
def test_random_views(seed: int) -> None:
    """Random factors of all axes, permuted, with random masks, one view after the other."""
    rng = np.random.default_rng(seed)

    def factors(size: int) -> list[int]:
        found = []
        while size > 1 and rng.random() < 0.7:
            part = int(rng.choice([n for n in range(2, size + 1) if size % n == 0]))
            found.append(part)
            size //= part
        return [*found, size]

    merged, batch = bool(rng.integers(2)), int(rng.integers(1, 4))
    scores = Scores(batch, int(rng.choice([1, 6, 12, 15])), int(rng.choice([6, 8, 12, 30])), merged=merged, seed=seed)
    for _ in range(int(rng.integers(1, 4))):
        parts = [factors(batch), factors(H)] if rng.random() < 0.5 else [scores.whole[:-2]]
        keys = factors(scores.whole[-1])
        shape = [*(n for part in parts for n in part), *factors(scores.whole[-2]), *keys]
        if len(shape) > 7:
            continue
        scores.view(shape)
        perm = [int(i) for i in rng.permutation(len(shape))] if rng.random() < 0.4 else list(range(len(shape)))
        scores.permute(perm)
        for _ in range(int(rng.integers(1, 3))):
            own = [size if rng.random() < 0.6 else 1 for size in scores.exact.shape]
            if perm == sorted(perm) and rng.random() < 0.4:
                scores.forbid([*own[:-1], keys[-1]])
            else:
                scores.add(own, subtract=bool(rng.integers(2)), first=bool(rng.integers(2)))
        scores.permute([int(i) for i in np.argsort(perm)])
    check(scores)


def test_a_grid_of_computed_sizes() -> None:
    """Sizes from Shape: the image [B, h, w, C] gives the grid, and the number of queries is h * w."""
    body = """
        sizes = Shape (image)
        zero = Constant <value = int64[1] {0}> ()
        one = Constant <value = int64[1] {1}> ()
        two = Constant <value = int64[1] {2}> ()
        three = Constant <value = int64[1] {3}> ()
        grid = Slice (sizes, one, three, zero)
        rows = Constant <value = int64[3] {0, -1, 32}> ()
        x = Reshape (image, rows)
        split = Constant <value = int64[4] {0, 0, 4, 8}> ()
        x4 = Reshape (x, split)
        q = Transpose <perm = [0, 2, 1, 3]> (x4)
        kt = Transpose <perm = [0, 2, 3, 1]> (x4)
        s1 = MatMul (q, kt)
        lead = Constant <value = int64[2] {0, 4}> ()
        wide = Concat <axis = 0> (lead, grid, grid)
        s6 = Reshape (s1, wide)
        high = Unsqueeze (by_row, five)
        low = Unsqueeze (by_column, four)
        four = Constant <value = int64[1] {4}> ()
        five = Constant <value = int64[1] {5}> ()
        s7 = Add (s6, high)
        s8 = Add (s7, low)
        height = Slice (sizes, one, two, zero)
        width = Slice (sizes, two, three, zero)
        count = Mul (height, width)
        flat = Concat <axis = 0> (lead, count, count)
        s9 = Reshape (s8, flat)
        p = Softmax <axis = -1> (s9)
        o = MatMul (p, q)
        o4 = Transpose <perm = [0, 2, 1, 3]> (o)
        out = Reshape (o4, sizes)
        """
    inputs = "float[B,h,w,32] image, float[B,4,h,w,h] by_row, float[B,4,h,w,w] by_column"
    lines = body.strip().splitlines()
    constants = [line for line in lines if "Constant" in line]
    graph = model(inputs, "float[a,b,c,d] out", "\n".join([*constants, *(n for n in lines if n not in constants)]), 17)
    graph.opset_import[0].version = 17
    (term, other) = only_site(graph).terms
    assert term.view is not None
    assert other.view is not None
    optimized, _ = rewrite(graph)
    for seed, sizes in enumerate(({"B": 2, "h": 3, "w": 5}, {"B": 1, "h": 6, "w": 2}, {"B": 3, "h": 1, "w": 4})):
        given = feeds(graph, sizes, seed)
        x = given["image"].astype(float).reshape(sizes["B"], -1, 4, 8).transpose(0, 2, 1, 3)
        s = (x @ x.swapaxes(2, 3)).reshape(sizes["B"], 4, *(sizes[n] for n in "hwhw"))
        s = s + given["by_row"][..., None] + given["by_column"][..., None, :]
        wanted = softmax_times(s.reshape(*x.shape[:3], x.shape[2]), x)
        wanted = wanted.transpose(0, 2, 1, 3).reshape(given["image"].shape)
        for library in (False, True):
            assert np.abs(run(optimized, given, library=library)[0] - wanted).max() < 1e-5


def test_the_whole_command(tmp_path: Path) -> None:
    scores = Scores(2, 15, 24, merged=True, seed=6)
    scores.view([2 * H, 3, 5, 4, 6])
    scores.add([2 * H, 3, 5, 4, 1])
    scores.forbid([3, 1, 4, 1])
    graph, _ = scores.model()
    onnx.save(graph, tmp_path / "m.onnx")
    report = stof.optimize(tmp_path / "m.onnx", tmp_path / "o.onnx")
    assert [s.replaced for s in report.sites] == [True], report.sites[0].reason
    assert report.verification is not None
    # The bias that the file's nodes make is compared with fp64 as well, not the outputs alone.
    assert [c.ok for c in report.verification.comparisons if c.site] == [True]


def test_keys_that_do_not_come_back_are_no_attention() -> None:
    """The softmax runs over the columns of a grid, not over keys; or queries and keys have changed places."""
    for shape, perm in (([2 * H, 15 * 4, 6], [0, 1, 2]), ([2 * H, 15, 24], [0, 2, 1])):
        scores = Scores(2, 24, 24, merged=True, seed=7)
        scores.whole = [2 * H, 24, 24]
        if perm == [0, 1, 2]:
            scores.view([2 * H, 24 * 4, 6])
            weights = scores.node("Softmax", [scores.name], axis=-1)
            back = scores.node("Reshape", [weights, scores.constant(np.array([2 * H, 24, 24], np.int64))])
        else:
            scores.permute(perm)
            back = scores.node("Softmax", [scores.name], axis=-1)
        out = scores.node("MatMul", [back, scores.values])
        result = helper.make_tensor_value_info(out, TensorProto.FLOAT, [2 * H, 24, D])
        graph = helper.make_graph(scores.nodes, "g", scores.inputs, [result], scores.constants)
        found = reason(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9))
        assert "was found before the softmax; the walk met the" in found, shape


def test_a_mask_that_widens_a_view_is_refused() -> None:
    """A size of 1 of the scores is broadcast by the mask: what follows is no longer the scores of queries and keys."""
    scores = Scores(2, 6, 8, merged=True, seed=8)
    scores.view([2 * H, 6, 1, 8])
    scores.add([1, 1, 5, 8])
    scores.view([2 * H, 30, 8])
    weights = scores.node("Softmax", [scores.name], axis=-1)
    out = scores.node("MatMul", [weights, scores.values])
    result = helper.make_tensor_value_info(out, TensorProto.FLOAT, [2 * H, 30, D])
    graph = helper.make_graph(scores.nodes, "g", scores.inputs, [result], scores.constants)
    found = reason(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9))
    assert "the walk met the Reshape" in found
