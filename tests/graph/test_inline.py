# SPDX-License-Identifier: Apache-2.0
"""Local functions that contain attention are inlined and replaced; other functions stay."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from fused_attention_nodes import forced, run, same
from onnx import helper, parser

import stof
from stof.errors import ModelError
from stof.graph.index import DOMAIN
from stof.graph.inline import inline
from stof.options import Options

# Functions in functions, attributes with and without defaults, a function called twice.
MODEL = """
<ir_version: 10, opset_import: ["" : 18, "lib" : 1]>
layers (float[B, S, 8] x) => (float[B, S, 8] y) {
    [mask] causal = lib.causal_mask (x)
    [first] a = lib.attention <heads = 2> (x, causal)
    [norm] n = lib.norm (a)
    [second] y = lib.attention <heads = 4, scale = 0.25> (n, causal)
}
<domain: "lib", opset_import: ["" : 18]>
causal_mask (x) => (mask) {
    shape = Shape (x)
    one = Constant <value_int = 1> ()
    zero = Constant <value_int = 0> ()
    first = Constant <value_ints = [0]> ()
    last = Constant <value_ints = [1]> ()
    s = Gather (shape, one)
    r = Range (zero, s, one)
    k = Unsqueeze (r, first)
    q = Unsqueeze (r, last)
    mask = LessOrEqual (k, q)
}
<domain: "lib", opset_import: ["" : 18]>
split <heads> (x) => (h) {
    number = Constant <value_int: int = @heads> ()
    first = Constant <value_ints = [0]> ()
    n = Unsqueeze (number, first)
    two = Constant <value_ints = [0, 0]> ()
    rest = Constant <value_ints = [-1]> ()
    shape = Concat <axis = 0> (two, n, rest)
    r = Reshape (x, shape)
    h = Transpose <perm = [0, 2, 1, 3]> (r)
}
<domain: "lib", opset_import: ["" : 18, "lib" : 1]>
attention <heads, scale: float = 0.5> (x, mask) => (y) {
    h = lib.split <heads: int = @heads> (x)
    factor = Constant <value_float: float = @scale> ()
    kt = Transpose <perm = [0, 1, 3, 2]> (h)
    s1 = MatMul (h, kt)
    s2 = Mul (s1, factor)
    low = Constant <value_float = -1e9> ()
    s3 = Where (mask, s2, low)
    [softmax] weights = Softmax <axis = -1> (s3)
    o = MatMul (weights, h)
    t = Transpose <perm = [0, 2, 1, 3]> (o)
    merged = Constant <value_ints = [0, 0, -1]> ()
    y = Reshape (t, merged)
}
<domain: "lib", opset_import: ["" : 18]>
norm (x) => (y) {
    two = Constant <value_float = 2.0> ()
    t = Tanh (x)
    y = Mul (t, two)
}
"""


def model() -> onnx.ModelProto:
    """Attention by functions, with metadata inside of one."""
    found = parser.parse_model(MODEL)
    attention = next(f for f in found.functions if f.name == "attention")
    softmax = next(n for n in attention.node if n.op_type == "Softmax")
    softmax.metadata_props.add(key="origin", value="a test")
    onnx.checker.check_model(found)
    return found


def test_replaced(tmp_path: Path) -> None:
    """Both calls' sites are replaced, each with its own heads and scale; the function that is no attention stays."""
    original = model()
    report, target = forced(original, tmp_path)
    assert [(s.site, s.replaced, s.mask, s.heads) for s in report.sites] == [
        ("first/softmax", True, "k <= q", "2 heads"),
        ("second/softmax", True, "k <= q", "4 heads"),
    ]
    optimized = onnx.load(target)
    onnx.checker.check_model(optimized)
    assert {(f.domain, f.name) for f in optimized.functions} == {("lib", "norm"), (DOMAIN, "StofAttention")}
    for seed, (batch, length) in enumerate(((2, 9), (1, 30))):
        x = np.random.default_rng(seed).standard_normal((batch, length, 8)).astype(np.float32)
        feeds = {"x": x}
        for library in (True, False):
            same(run(target, feeds, library=library), run(original, feeds))


def test_metadata_and_names() -> None:
    """Inlined nodes keep their metadata; names stay unique."""
    found = inline(model(), {("", "Softmax")})
    softmaxes = [n for n in found.graph.node if n.op_type == "Softmax"]
    assert [[p.value for p in n.metadata_props] for n in softmaxes] == [["a test"], ["a test"]]
    written = [o for n in found.graph.node for o in n.output]
    assert len(written) == len(set(written))
    names = [n.name for n in found.graph.node if n.name]
    assert len(names) == len(set(names))


def test_without_attention() -> None:
    """A model without attention comes out as it went in."""
    plain = model()
    del plain.graph.node[3]
    del plain.graph.node[1]
    plain.graph.node[1].input[0] = "x"
    plain.graph.node[1].output[0] = "y"
    assert inline(plain, {("", "Softmax")}) is plain


def test_other_opset() -> None:
    """A function in whose opset an operator means something else stays."""
    old = model()
    function = next(f for f in old.functions if f.name == "attention")
    function.opset_import[0].version = 11  # Softmax of opset 11 is another one
    assert "attention" in {f.name for f in inline(old, {("", "Softmax")}).functions}


def test_own_function_stays(tmp_path: Path) -> None:
    """An optimized model is copied as it is."""
    _, target = forced(model(), tmp_path)
    again = stof.optimize(target, tmp_path / "again.onnx", Options())
    assert [s.reason for s in again.sites] == ["is StofAttention already"] * 2
    assert (tmp_path / "again.onnx").read_bytes() == target.read_bytes()


def test_growth_is_refused() -> None:
    """Functions that multiply in each other are an error, not a full memory."""
    bad = model()
    inner = "attention"
    for level in range(8):
        function = onnx.FunctionProto(domain="lib", name=f"many{level}")
        function.input.extend(["x", "mask"])
        function.output.append("y")
        function.opset_import.extend([helper.make_opsetid("", 18), helper.make_opsetid("lib", 1)])
        attributes = {"heads": 2} if level == 0 else {}
        for i in range(30):
            last = "y" if i == 29 else f"y{i}"
            function.node.append(helper.make_node(inner, ["x", "mask"], [last], domain="lib", **attributes))
        bad.functions.append(function)
        inner = f"many{level}"
    bad.graph.node[1].op_type = inner
    del bad.graph.node[1].attribute[:]
    with pytest.raises(ModelError, match="more than"):
        inline(bad, {("", "Softmax")})


def test_recursion_is_refused() -> None:
    """Functions that call themselves are an error of the model, not an endless loop."""
    bad = model()
    function = next(f for f in bad.functions if f.name == "attention")
    function.node.append(helper.make_node("attention", ["x", "mask"], ["again"], domain="lib"))
    with pytest.raises(ModelError, match="calls itself"):
        inline(bad, {("", "Softmax")})


def called_in_turn(levels: int) -> onnx.ModelProto:
    """Functions of which each calls the next one, the last one attention."""
    found = model()
    inner = "attention"
    for level in reversed(range(levels - 1)):
        attributes = {"heads": 2} if inner == "attention" else {}
        node = helper.make_node(inner, ["x", "mask"], ["y"], domain="lib", **attributes)
        imports = [helper.make_opsetid("", 18), helper.make_opsetid("lib", 1)]
        found.functions.append(helper.make_function("lib", f"level{level}", ["x", "mask"], ["y"], [node], imports))
        inner = f"level{level}"
    found.graph.node[1].op_type = inner
    del found.graph.node[1].attribute[:]
    return found


def test_a_cycle_is_reported_as_such_and_not_as_depth() -> None:
    """Many levels are no recursion, and a cycle is named as soon as it closes."""
    # Attention calls a function itself: that is the last level.
    assert "Softmax" in {n.op_type for n in inline(called_in_turn(63), {("", "Softmax")}).graph.node}
    with pytest.raises(ModelError, match="deeper than 64 levels, where lib::") as caught:
        inline(called_in_turn(64), {("", "Softmax")})
    assert "calls itself" not in str(caught.value)
    cycle = called_in_turn(3)
    last = next(f for f in cycle.functions if f.name == "attention")
    last.node.append(helper.make_node("level0", ["x", "mask"], ["again"], domain="lib"))
    with pytest.raises(ModelError, match="lib::level0 calls itself by way of 2 others"):
        inline(cycle, {("", "Softmax")})
