# SPDX-License-Identifier: Apache-2.0
"""Target ``tensorrt``: which sites it takes, and how it writes them."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, parser

import stof
from stof import cli
from stof.attention.decide.cost_tensorrt import reason_to_leave, refusals
from stof.attention.describe.site_problem import SiteProblem
from stof.attention.tensorrt_constants import constants_attribute
from stof.graph.index import all_nodes
from stof.graph.names import name_nodes
from stof.mask.expression import MaskExpression
from stof.mask.site import AttentionSite, Layout, LiftedMask, MaskTerm, Operand, RuntimeOperand, TermKind
from stof.options import Options

HALF, FULL = TensorProto.FLOAT16, TensorProto.FLOAT


def lifted(text: str, *arguments: Any, **named: Any) -> LiftedMask:
    return LiftedMask(MaskExpression.parse(text), *arguments, **named)


PAD = (RuntimeOperand("pad", "mask"),)
BIAS = (MaskTerm(TermKind.ADD, "bias"),)


def site(**settings: Any) -> AttentionSite:
    """A site in fp16, D = 64."""
    q, k, v = (Operand(n, Layout.BHSD) for n in "qkv")
    usual = {"head_size": 64, "value_head_size": 64, "dtype": HALF, "num_heads": 4, "kv_num_heads": 4, "scale": 0.125}
    return AttentionSite("a", 0, "softmax", q, k, v, "out", Layout.BHSD, **{**usual, **settings})


def refused(mask: LiftedMask = LiftedMask(), **settings: Any) -> list[str]:  # noqa: B008 (frozen)
    return refusals(SiteProblem.of(site(**settings), mask))


@pytest.mark.parametrize(
    ("settings", "mask", "density", "left"),
    [
        ({}, lifted(""), 1.0, "dense,"),
        ({}, lifted("pad[b, k]", PAD), 1.0, "dense with a mask"),
        ({}, lifted("pad[b, k]", PAD, bias=BIAS), 1.0, "dense with a mask"),
        ({"kv_num_heads": 2}, lifted(""), 1.0, "dense,"),
        ({}, lifted("k <= q"), 0.5, "causal,"),
        ({"dtype": TensorProto.BFLOAT16}, lifted("k <= q"), 0.5, "causal,"),
        ({}, lifted("abs(q - k) <= 4096"), 1.0, "dense with a mask"),  # at the lengths in use it forbids nothing
        ({}, lifted("k <= q and pad[b, k]", PAD), 0.5, ""),
        ({}, lifted("k <= q", bias=BIAS), 0.5, ""),
        ({}, lifted("abs(q - k) <= 64"), 0.1, ""),
        ({}, lifted("table0[q, k]", tables=(("table0", "bool", (4, 4), b"\1" * 16),)), 1.0, ""),
        ({}, lifted("segment_q[b, q] == segment_k[b, k]", (RuntimeOperand("segment_q", "ids"),)), 1.0, ""),
        ({"softcap": 50.0}, lifted(""), 1.0, ""),
        ({"sink": "logits"}, lifted("k <= q"), 0.5, ""),
        ({"dtype": FULL}, lifted(""), 1.0, ""),
    ],
)
def test_what_tensorrt_fuses_is_left(settings: dict[str, Any], mask: LiftedMask, density: float, left: str) -> None:
    reason = reason_to_leave(SiteProblem.of(site(**settings), mask), density)
    assert (left in reason) if left else not reason, reason
    assert not left or "D = 64" in reason


def test_what_no_kernel_takes() -> None:
    assert refused(mask=lifted("pad[b, k]", PAD)) == []
    assert "multiples of 8 up to 256" in refused(head_size=20)[0]
    assert "multiples of 8 up to 256" in refused(value_head_size=264)[0]
    assert refused(head_size=256, value_head_size=136) == []
    assert refused(dtype=FULL, head_size=20) == []
    assert "at most 256" in refused(dtype=FULL, head_size=257)[0]
    double = refused(dtype=TensorProto.DOUBLE)[0]
    assert "element type DOUBLE, expected FLOAT or FLOAT16 or BFLOAT16" in double
    documents = (RuntimeOperand("segment_q", "ids"), RuntimeOperand("segment_k", "ids"))
    assert refused(mask=lifted("segment_q[b, q] == segment_k[b, k]", documents)) == []
    assert refused(mask=lifted("k <= q and (k < 3 or pad[b, k]) and k < lengths[b]", PAD)) == []
    other = lifted("segment_q[b, q] == 1", (RuntimeOperand("depths", "ids"),))
    assert "the mask reads depths at run time" in refused(mask=other)[0]
    wide = lifted("table0[q, k]", tables=(("table0", "int64", (1 << 12, 1 << 12), b""),))
    assert "table0 of the mask has 134217728 bytes" in refused(mask=wide)[0]
    packed = lifted("table0[q, k]", tables=(("table0", "bool", (1 << 12, 1 << 12), b""),))
    assert refused(mask=packed) == []


def test_constants_of_several_tables() -> None:
    tables = (("table0", "bool", (2, 5), bytes([1, 0, 0, 1, 0, 1, 0, 1, 0, 1])), ("table1", "uint8", (1,), b"\7"))
    mask = lifted("table0[q, k] or table1[q] == 1", tables=tables)
    # The first entry is the one of docs/guide/tensorrt.md.
    assert constants_attribute(mask, ("pad", "table0", "table1")) == {"constants": "4 bool 2x5 qQI=;5 uint8 1 Bw=="}
    assert constants_attribute(lifted("k <= q"), ("pad",)) == {}


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int32", "int64"])
@pytest.mark.parametrize("shape", [(1,), (3, 5), (2, 3, 7)])
def test_constants_hold_the_table(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.random.default_rng(3).integers(0, 2, shape).astype(dtype)
    if dtype in ("int32", "int64"):
        array = array * -70000
    mask = lifted("table0[q]", tables=(("table0", dtype, shape, array.tobytes()),))
    place, kind, sizes, data = constants_attribute(mask, ("pad", "unused", "table0"))["constants"].split(" ")
    assert place == "5"
    raw = np.frombuffer(base64.b64decode(data, validate=True), np.uint8)
    if dtype == "bool":
        found = np.array([raw[i // 8] >> i % 8 & 1 for i in range(array.size)], bool)
    else:
        found = raw.view(np.dtype(dtype).newbyteorder("<"))
    assert (kind, tuple(int(n) for n in sizes.split("x"))) == (dtype, shape)
    assert np.array_equal(found.reshape(shape), array)


def test_nodes_get_names_of_their_own() -> None:
    model = parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 18]> g (float[2] x, bool c) => (float[2] y, float[2] z) {
          a = Neg(x)
          b = Neg(a)
          y = If(c) <then_branch: graph = t () => (float[2] u) {u = Abs(b)},
            else_branch: graph = e () => (float[2] w) {w = Exp(b)}>
          z = Abs(a)
        }"""
    )
    for node, name in zip(model.graph.node, ("same", "same", "", "Abs_u"), strict=True):
        node.name = name
    name_nodes(model)
    names = [n.name for n in all_nodes(model.graph.node)]
    assert names[:2] == ["same", "same_1"]
    assert len(set(names)) == len(names) == 6
    assert "" not in names
    assert "Abs_u" in names
    onnx.checker.check_model(model, full_check=True)


@pytest.mark.parametrize("kind", ["bool", "uint8", "int32", "int64", "float"])
def test_padding_reaches_the_plugin_in_a_type_it_takes(kind: str, tmp_path: Path) -> None:
    """And means what it meant: 0.5 is a key, too."""
    fill = "m" if kind == "bool" else f"Cast <to: int = {TensorProto.BOOL}> (m)"
    text = f"""<ir_version: 8, opset_import: ["" : 18]>
      g (float16[B, 4, S, 16] q, float16[B, 4, S, 16] k, float16[B, 4, S, 16] v, {kind}[B, S] m) => (float16[B, 4, S, 16] y) {{
        kt = Transpose <perm: ints = [0, 1, 3, 2]> (k)
        qk = MatMul (q, kt)
        n = Shape (m)
        one = Constant <value: tensor = int64 {{1}}> ()
        zero = Constant <value: tensor = int64 {{0}}> ()
        length = Gather (n, one)
        at = Range (zero, length, one)
        column = Unsqueeze (at, zeros)
        row = Unsqueeze (at, ones)
        apart = Sub (column, row)
        far = Abs (apart)
        limit = Constant <value: tensor = int64 {{7}}> ()
        near = LessOrEqual (far, limit)
        mb = {fill if kind != "bool" else "Identity (m)"}
        pad = Unsqueeze (mb, middle)
        both = And (near, pad)
        fill = Constant <value: tensor = float {{-10000.0}}> ()
        minus = Cast <to: int = 10> (fill)
        masked = Where (both, qk, minus)
        w = Softmax <axis: int = -1> (masked)
        y = MatMul (w, v)
      }}"""
    text = text.replace("zeros", "first").replace("ones)", "second)")
    model = parser.parse_model(text)
    for name, axes in (("first", [0]), ("second", [1]), ("middle", [1, 2])):
        model.graph.initializer.append(helper.make_tensor(name, TensorProto.INT64, [len(axes)], axes))
    path, written = tmp_path / "model.onnx", tmp_path / "out.onnx"
    onnx.save(model, str(path))
    report = stof.optimize(path, written, Options(target="tensorrt", verify_budget=1))
    assert sum(s.replaced for s in report.sites) == 1, report.to_text()
    found = onnx.load(str(written))
    (call,) = [n for n in found.graph.node if n.op_type == "StofAttention"]
    types = {v.name: v.type.tensor_type.elem_type for v in (*found.graph.input, *found.graph.value_info)}
    wanted = {"int64": TensorProto.INT64, "float": TensorProto.FLOAT}.get(kind, TensorProto.INT32)
    assert types[call.input[3]] == wanted
    rng = np.random.default_rng(0)
    feed = {n: rng.standard_normal((2, 4, 33, 16)).astype(np.float16) for n in "qkv"}
    pad = np.ones((2, 33), helper.tensor_dtype_to_np_dtype(types["m"]))
    pad[0, :9] = pad[1, 20:] = 0
    if kind == "float":
        pad = pad * np.asarray(0.5, pad.dtype)
    sessions = (ort.InferenceSession(str(p), _options(), providers=["CPUExecutionProvider"]) for p in (path, written))
    a, b = (s.run(None, {**feed, "m": pad})[0] for s in sessions)
    assert np.abs(a.astype(np.float32) - b).max() < 4e-3


def _options() -> ort.SessionOptions:
    options = ort.SessionOptions()
    stof.register(options)
    return options


def test_a_file_for_the_parser(tmp_path: Path) -> None:
    path, written = tmp_path / "model.onnx", tmp_path / "out.onnx"
    onnx.save(models.models()["bigbird"], str(path))
    report = stof.optimize(path, written, Options(target="tensorrt", ignore_empty_rows=True, verify_budget=2))
    assert sum(s.replaced for s in report.sites) == 2
    assert all(s.kernel == "TensorRT plugin" and s.predicted_gain is None for s in report.sites)
    model = onnx.load(str(written))
    nodes = list(all_nodes(model.graph.node))
    assert len({n.name for n in nodes}) == len(nodes)
    for call in (n for n in nodes if n.domain == "stof"):
        attributes = {a.name: helper.get_attribute_value(a) for a in call.attribute}
        assert attributes["plugin_namespace"] == b"stof"
        assert attributes["plugin_version"] == b"1"
        assert attributes["constants"].startswith(b"4 bool ")
        assert attributes["operands"] == b"pad table0"
        assert all(call.input)
        assert all(abs(v) < 1 << 31 for v in attributes.values() if isinstance(v, int))


def test_target_cpu_writes_none_of_it(tmp_path: Path) -> None:
    path, written = tmp_path / "model.onnx", tmp_path / "out.onnx"
    onnx.save(models.models()["bigbird"], str(path))
    stof.optimize(path, written, Options(ignore_empty_rows=True, verify_budget=2))
    calls = [n for n in onnx.load(str(written)).graph.node if n.domain == "stof"]
    assert calls
    assert not [a.name for n in calls for a in n.attribute if a.name == "constants"]


def test_command_and_plan(narrow: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    path = narrow("mistral.dynamo.sdpa")
    onnx.save(models.half(onnx.load(str(path))), str(path))
    plan, output = path.with_name("plan.json"), path.with_name("out.onnx")
    arguments = [str(path), "-o", str(output), "--verify-budget", "1"]
    assert cli.main([*arguments, "--target", "tensorrt", "--save-plan", str(plan)]) == 0
    out = capsys.readouterr().out
    assert "kernel TensorRT plugin" in out
    gains = [line for line in out.splitlines() if "estimated" in line and not line.startswith("memory")]
    assert gains
    assert all("of TensorRT's own kernels' speed" in line for line in gains)
    assert '"target": "tensorrt"' in plan.read_text()
    first = output.read_bytes()
    assert cli.main([*arguments, "--plan", str(plan)]) == 1
    assert "the plan is for target tensorrt, not cpu; use --target tensorrt" in capsys.readouterr().err
    assert cli.main([*arguments, "--target", "tensorrt", "--plan", str(plan)]) == 0
    assert output.read_bytes() == first


def test_a_plan_takes_what_the_target_leaves(tmp_path: Path) -> None:
    path, written = tmp_path / "model.onnx", tmp_path / "out.onnx"
    onnx.save(models.half(models.bert()), str(path))
    options = Options(target="tensorrt", verify_budget=1, save_plan=tmp_path / "plan.json")
    report = stof.optimize(path, written, options)
    assert sum(s.replaced for s in report.sites) == 0
    assert written.read_bytes() == path.read_bytes()
    assert "TensorRT fuses it by itself" in report.to_text()
