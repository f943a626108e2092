# SPDX-License-Identifier: Apache-2.0
"""The command line: bad inputs give a message and an exit code and leave every file alone; options do what they say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest
from onnx import numpy_helper

import stof
from stof import cli
from stof.attention.subgraphs import emit_scopes

WINDOW = """
    at2 = Constant <value = int64 {2}> ()
    zero = Constant <value = int64 {0}> ()
    one = Constant <value = int64 {1}> ()
    five = Constant <value = int64 {5}> ()
    shape = Shape (q)
    s = Gather (shape, at2)
    columns = Range (zero, s, one)
    last = Constant <value = int64[1] {1}> ()
    rows = Unsqueeze (columns, last)
    distance = Sub (rows, columns)
    far = Abs (distance)
    w = Less (far, five)"""
ATTENTION = """
    kt = Transpose <perm = [0, 1, 3, 2]> (k)
    s1 = MatMul (q, kt)
    low = Constant <value = float {-inf}> ()
    s2 = Where (w, s1, low)
    p = Softmax (s2)
    out = MatMul (p, v)"""
# Columns by a way that no rule knows: the square root of their squares.
OPAQUE = WINDOW.replace(
    "columns = Range (zero, s, one)",
    """plain = Range (zero, s, one)
    squares = Mul (plain, plain)
    reals = Cast <to = 1> (squares)
    roots = Sqrt (reals)
    columns = Cast <to = 7> (roots)""",
)


def text(body: str, size: str = "S", more: str = "", opset: int = 18) -> onnx.ModelProto:
    shape = f"float[1,4,{size},8]"
    return onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": {opset}]>\n'
        f"g ({shape} q, {shape} k, {shape} v{more}) => (float[a,b,c,d] out) {{{body}\n}}"
    )


@pytest.fixture
def put(tmp_path: Path) -> Callable[[onnx.ModelProto], Path]:
    """Writes a model into a fresh folder."""

    def write(model: onnx.ModelProto) -> Path:
        path = tmp_path / "model.onnx"
        onnx.save(model, str(path))
        return path

    return write


def snapshot(folder: Path) -> dict[Path, bytes]:
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def refused(arguments: list[str | Path], code: int, words: str, folder: Path, capsys: Any) -> None:
    """The command ends with a code and a message that holds the words, and every file is as it was."""
    before = snapshot(folder)
    assert cli.main([str(a) for a in arguments]) == code
    captured = capsys.readouterr()
    assert words in captured.err, captured.err
    assert "Traceback" not in captured.err
    assert captured.err.startswith("stof-optimize: ")
    assert snapshot(folder) == before


def attention(path: Path) -> onnx.NodeProto:
    (node,) = (n for n in onnx.load(str(path)).graph.node if n.op_type == "StofAttention")
    return node


def external(model: onnx.ModelProto, folder: Path) -> Path:
    weight = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(weight, "weight"))
    model.graph.node.append(onnx.helper.make_node("MatMul", ["out", "weight"], ["projected"]))
    model.graph.output[0].name = "projected"
    path = folder / "model.onnx"
    onnx.save(model, str(path), save_as_external_data=True, location="model.onnx.data", size_threshold=0)
    return path


def test_external_data_missing_or_short(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = external(text(WINDOW + ATTENTION), tmp_path)
    data = tmp_path / "model.onnx.data"
    data.write_bytes(data.read_bytes()[:-1])
    refused([path], 3, "the file is truncated", tmp_path, capsys)
    data.unlink()
    refused([path], 3, "external data 'model.onnx.data' of constant 'weight' is missing", tmp_path, capsys)


@pytest.mark.parametrize("opset", [6, 27])
def test_unknown_opset(opset: int, put: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    path = put(text(WINDOW + ATTENTION, opset=opset))
    refused([path], 3, f"has opset {opset}, expected 7 to 26", path.parent, capsys)


def test_custom_domains(put: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    model = text(WINDOW + ATTENTION)
    model.graph.node.append(onnx.helper.make_node("Mine", ["out"], ["own"], "mine", domain="org.other"))
    model.graph.output[0].name = "own"
    refused(
        [put(model)], 3, "'mine' is of domain 'org.other', which the model does not import", put(model).parent, capsys
    )
    model.opset_import.append(onnx.helper.make_opsetid("org.other", 1))
    path = put(model)
    for options, words in (([], "verified in part: the original does not run here"), (["--no-verify"], "not verified")):
        assert cli.main([str(path), *options]) == 0
        assert words in capsys.readouterr().out
        nodes = onnx.load(str(path.with_name("model.stof.onnx"))).graph.node
        assert [n.op_type for n in nodes] == ["StofAttention", "Mine"]


@pytest.mark.parametrize("size", ["0", "1", "5"])
def test_fixed_lengths_down_to_nothing(size: str, put: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    path = put(text(WINDOW + ATTENTION, size))
    assert cli.main([str(path)]) == 0
    out = capsys.readouterr().out
    target = path.with_name("model.stof.onnx")
    if size == "0":
        assert "its scores have the fixed shape" in out
        assert not target.exists()
        return
    options = ort.SessionOptions()
    stof.register(options)
    given = {n: np.random.default_rng(0).standard_normal((1, 4, int(size), 8)).astype(np.float32) for n in "qkv"}
    wanted, found = (ort.InferenceSession(str(p), options).run(None, given)[0] for p in (path, target))
    assert wanted.shape == found.shape == (1, 4, int(size), 8)
    np.testing.assert_allclose(found, wanted, atol=2e-6)


def test_a_graph_without_attention(put: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    path = put(text("kt = Add (q, k)\nout = Add (kt, v)"))
    before = snapshot(path.parent)
    assert cli.main([str(path), "--json", str(path.parent / "report.json")]) == 0
    assert "nothing to do: the graph has no Softmax node" in capsys.readouterr().out
    assert json.loads((path.parent / "report.json").read_text())["sites"] == []
    assert set(snapshot(path.parent)) == {*before, path.parent / "report.json"}


@pytest.mark.parametrize(
    "nodes",
    [
        "l = LogSoftmax (s2)",
        "end = Constant <value = int64[1] {-1}> ()\n e = ReduceLogSumExp (s2, end)\n l = Sub (s2, e)",
    ],
    ids=["LogSoftmax", "ReduceLogSumExp"],
)
def test_a_softmax_in_other_operators_is_not_denied(
    nodes: str, put: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = put(text(WINDOW + ATTENTION.replace("p = Softmax (s2)", f"{nodes}\n p = Exp (l)")))
    before = snapshot(path.parent)
    assert cli.main([str(path)]) == 0
    out = capsys.readouterr().out
    assert "no Softmax node, no exponentials divided by their sum and no fused attention node, by which" in out
    assert "no attention" not in out
    assert snapshot(path.parent) == before


def test_a_mask_that_cannot_be_lifted_is_told(put: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    """A finite number that is written over scores, before another mask, can be no bias."""
    twice = ATTENTION.replace(
        "s2 = Where (w, s1, low)",
        """some = Constant <value = float {-20000.0}> ()
    s0 = Where (w, s1, some)
    early = Less (columns, five)
    s2 = Where (early, s0, low)""",
    )
    path = put(text(OPAQUE + twice))
    before = snapshot(path.parent)
    assert cli.main([str(path), "--explain"]) == 0
    out = capsys.readouterr().out
    assert "'w'" in out
    assert "lift   stopped: " in out
    assert "--mask SITE=EXPR" in out
    assert cli.main([str(path)]) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert snapshot(path.parent) == before


def test_a_mask_that_no_expression_says_stays_a_bias_and_can_be_stated(
    put: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = put(text(OPAQUE + ATTENTION))
    before = snapshot(path.parent)
    assert cli.main([str(path), "--explain"]) == 0
    out = capsys.readouterr().out
    assert "w stays a bias" in out
    assert "Sqrt" in out
    assert "####" not in out, "no picture of a mask that no expression says"
    assert snapshot(path.parent) == before
    refused([path, "--mask", "0=abs(q - k) < 4"], 2, "is not the graph's", path.parent, capsys)
    refused([path, "--mask", "0=abs(q - k) < 5 and pad[b, k]"], 1, "reads pad, but", path.parent, capsys)
    assert cli.main([str(path), "--mask", "0=abs(q - k) < 5"]) == 0
    assert "abs(q - k) < 5" in capsys.readouterr().out
    node = attention(path.with_name("model.stof.onnx"))
    values = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    assert values["mask"] == b"abs(q - k) < 5"
    assert values["empty_rows"] == b"nan"


def test_a_stated_mask_finds_its_padding_and_fill(put: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    added = """
    axes = Constant <value = int64[2] {1, 2}> ()
    am4 = Unsqueeze (am, axes)
    yes = Cast <to = 9> (am4)
    both = And (yes, w)
    nothing = Constant <value = float {0.0}> ()
    least = Constant <value = float {-3.4028234663852886e38}> ()
    added = Where (both, nothing, least)"""
    sum_of_both = ATTENTION.replace("s2 = Where (w, s1, low)", "s2 = Add (s1, added)")
    path = put(text(OPAQUE + added + sum_of_both, more=", int64[1,S] am"))
    assert cli.main([str(path), "--mask", "0=abs(q - k) <= 4 and pad[b, k]"]) == 0
    capsys.readouterr()
    node = attention(path.with_name("model.stof.onnx"))
    values = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    assert (values["operands"], values["empty_rows"]) == (b"pad", b"mean")
    assert list(node.input) == ["q", "k", "v", "am"]
    refused([path, "--mask", "0=abs(q - k) <= 4"], 2, "is not the graph's", path.parent, capsys)
    biased = added.replace("{0.0}", "{0.5}")
    path = put(text(OPAQUE + biased + sum_of_both, more=", int64[1,S] am"))
    assert cli.main([str(path), "--mask", "0=abs(q - k) <= 4 and pad[b, k]"]) == 0
    assert "note: added stays a bias" in capsys.readouterr().out
    assert list(attention(path.with_name("model.stof.onnx")).input) == ["q", "k", "v", "am", "added"]


def test_outputs_that_cannot_be_written(put: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    path = put(text(WINDOW + ATTENTION))
    folder = path.parent
    for option, name in (("-o", "output"), ("--json", "report"), ("--save-plan", "saved plan")):
        refused([path, option, folder / "none" / "x"], 1, f"of the {name} does not exist", folder, capsys)
        refused([path, option, folder], 1, f"the {name} {folder} is a folder", folder, capsys)
        # Nobody, root included, can make a file there.
        refused([path, option, "/proc/x"], 1, f"the {name} /proc/x cannot be written", folder, capsys)


def test_no_output_replaces_what_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = external(text(WINDOW + ATTENTION), tmp_path)
    data = tmp_path / "model.onnx.data"
    (tmp_path / "link.onnx").symlink_to(path)
    (tmp_path / "hard.onnx").hardlink_to(path)
    plan = tmp_path / "plan.json"
    assert cli.main([str(path), "--dry-run", "--save-plan", str(plan)]) == 0
    capsys.readouterr()
    for option in ("-o", "--json", "--save-plan"):
        for name in ("model.onnx", "link.onnx", "hard.onnx"):
            refused([path, option, tmp_path / name], 1, "is the input", tmp_path, capsys)
        refused([path, option, data], 1, "is the external data 'model.onnx.data'", tmp_path, capsys)
        refused([path, "--plan", plan, option, plan], 1, "is the plan", tmp_path, capsys)
    refused([path, "--json", "x", "-o", "x"], 1, "the output x is the report too", tmp_path, capsys)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--only", "nothing"], "--only 'nothing' names no site of the model; its sites are 0 'attention_0'"),
        (["--skip", "7"], "--skip '7' names no site"),
        (["--explain", "nothing"], "--explain 'nothing' names no site"),
        (["--mask", "nothing=k <= q"], "--mask 'nothing' names no attention site"),
        (["--mask", "0"], "expected NAME=VALUE"),
        (["--mask", "0=k <= q", "--mask", "0=q <= k"], "names '0' twice"),
        (["--mask", "0=k <="], "is refused: mask expression"),
        (["--shape", "length=4"], "--shape 'length' is no symbolic dimension of the model's inputs; these are: S"),
        (["--shape", "S=8..4"], "expected 0 < N <= M"),
        (["--shape", "S=many"], "expected a number or N..M"),
        (["--verify-budget", "-1"], "invalid number of seconds value: '-1'"),
        (["--verify-budget", "nan"], "invalid number of seconds value: 'nan'"),
        (["--verif", "3"], "unrecognized arguments"),
        (["--target", "tensorrt", "--tune", "5"], "--tune has nothing to measure for target tensorrt"),
        (["--tune", "-5"], "invalid number of seconds value: '-5'"),
        (["--sparse-mlp", "folder"], "--sparse-mlp folder: expected .npy or .npz"),
        (["--target", "rocm"], "invalid choice: 'rocm'"),
        (["--plan", "none.json"], "the plan none.json does not exist"),
    ],
)
def test_wrong_arguments(
    arguments: list[str], words: str, put: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = put(text(WINDOW + ATTENTION))
    refused([path, *arguments], 1, words, path.parent, capsys)


def test_no_model_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 1
    assert "no model given" in capsys.readouterr().err
    assert cli.main(["--explain"]) == 1
    assert "no model given" in capsys.readouterr().err


@pytest.mark.parametrize("name", [".", "/", ".."])
def test_a_folder_is_no_model(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([name]) == 1
    assert f"{name} is a folder, expected an .onnx file" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith(f"stof {stof.__version__}, backends cpu, CPU ")


def test_without_onnxruntime(
    put: Callable[..., Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = put(text(WINDOW + ATTENTION))
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    refused([path], 1, "verification needs onnxruntime, which is not installed", path.parent, capsys)
    assert cli.main([str(path), "--no-verify"]) == 0
    assert "written: " in capsys.readouterr().out


def test_explain_and_selection(narrow: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    path = narrow("modernbert.dynamo.sdpa")
    before = snapshot(path.parent)
    assert cli.main(["--explain", str(path)]) == 0  # the model's name where SITE may stand
    out = capsys.readouterr().out
    assert all(f"\nsite {i}  node_Softmax" in out for i in range(4))
    assert "dry run: no file was written" in out
    assert cli.main([str(path), "--explain", "2"]) == 0
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if line.startswith("site ")] == ["site 2  node_Softmax_411"]
    for words in ("match  4 heads, D = 16", "lift   abs(q - k) <= 16 and pad[b, k]", "check  ", "cost   "):
        assert f"\n  {words}" in out
    assert snapshot(path.parent) == before
    report = stof.optimize(path, options=stof.Options(dry_run=True, only=("node_Softmax_[24]*", "3"), skip=("0",)))
    assert [(s.replaced, s.reason) for s in report.sites] == [
        (False, "left out by --skip"),
        (False, "not among --only"),
        (True, "replaced"),
        (True, "replaced"),
    ]


def test_the_report_says_what_was_done(narrow: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    path = narrow("bert.dynamo.sdpa")
    target = path.with_name("report.json")
    assert cli.main([str(path), "--json", str(target), "--skip", "1"]) == 0
    capsys.readouterr()
    data = json.loads(target.read_text())
    assert [(s["index"], s["replaced"], s["step"]) for s in data["sites"]] == [(0, True, "done"), (1, False, "choice")]
    assert data["sites"][0]["mask"] == "pad[b, k]"
    assert data["output"] == str(path.with_name("model.stof.onnx"))
    assert data["nodes_after"] < data["nodes_before"]
    assert data["verification"]["ok"] is True
    assert all(c["ok"] for c in data["verification"]["comparisons"])
    assert {"load", "match", "lift", "emit", "verify", "write"} <= set(data["seconds"])


def test_a_failed_verification_is_reported(
    narrow: Callable[[str], Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = narrow("bert.dynamo.sdpa")
    target = path.with_name("report.json")

    def faulty(*arguments: Any) -> onnx.ModelProto:
        model = emit_scopes(*arguments)
        node = next(n for n in model.graph.node if n.op_type == "StofAttention")
        scale = next(a for a in node.attribute if a.name == "scale")
        scale.f *= 1.5
        return model

    monkeypatch.setattr("stof.attention.rewrite.emit_scopes", faulty)
    assert cli.main([str(path), "--json", str(target)]) == 2
    assert "verification failed at site" in capsys.readouterr().err
    data = json.loads(target.read_text())
    assert data["output"] is None
    assert data["verification"]["ok"] is False
    assert [c["ok"] for c in data["verification"]["comparisons"]][:2] == [False, True]
    assert set(snapshot(path.parent)) == {path, target}


def test_shapes_decide_where_a_loss_counts(put: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    from stof.attention.decide import cost_cpu as cost
    from stof.attention.decide.cost_cpu import GainEstimate

    asked: list[int] = []

    def estimate_gain(problem: Any, length: int, isa: str) -> GainEstimate:
        assert isa
        asked.append(length)
        return GainEstimate(length, 1.0, 0.5 if length < 100 else 2.0)

    monkeypatch.setattr(cost, "estimate_gain", estimate_gain)

    def replaced(model: onnx.ModelProto, **shapes: tuple[int, int]) -> tuple[int, list[int]]:
        asked.clear()
        report = stof.optimize(put(model), options=stof.Options(dry_run=True, shapes=shapes))
        return report.replaced, sorted(set(asked))

    open_model = text(WINDOW + ATTENTION, more=", float[N] other")
    assert replaced(open_model) == (1, [128, 2048, 2080, 8192])
    assert replaced(open_model, S=(64, 512)) == (0, [64, 144, 512])
    assert replaced(open_model, N=(1, 4)) == (1, [128, 2048, 2080, 8192])
    assert replaced(text(WINDOW + ATTENTION, "300")) == (1, [300])
    assert replaced(text(WINDOW + ATTENTION, "30")) == (0, [30])


def test_a_node_without_outputs_is_told(tmp_path: Path) -> None:
    broken = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 18]> g (float[4] x) => (float[4] y) { y = Softmax (x) }'
    )
    del broken.graph.node[0].output[:]
    onnx.save(broken, tmp_path / "model.onnx")
    with pytest.raises(stof.errors.ModelError, match="a nameless Softmax node has 0 outputs"):
        stof.optimize(tmp_path / "model.onnx")


@pytest.mark.parametrize("options", [[], ["--no-verify"], ["--chains", "on"]])
@pytest.mark.parametrize("others", [False, True])
def test_attention_that_no_output_needs_stays(
    others: bool, options: list[str], put: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    model = text(WINDOW + ATTENTION)
    del model.graph.output[:]
    if others:
        model.graph.node.append(onnx.helper.make_node("Neg", ["q"], ["less"]))
        model.graph.node.append(onnx.helper.make_node("Neg", ["out"], ["unread"]))
        model.graph.output.append(onnx.helper.make_tensor_value_info("less", onnx.TensorProto.FLOAT, None))
    path = put(model)
    before = snapshot(path.parent)
    assert cli.main([str(path), *options]) == 0
    assert "kept  attention_0: no output of the graph depends on its result 'out'" in capsys.readouterr().out
    assert snapshot(path.parent) == before


def test_what_a_run_may_not_need_is_not_imported_before_it() -> None:
    """Imports are a third of a run that decides from what was measured before."""
    heavy = ["onnxruntime", "onnx.reference", "stof.verification.verifier", "sympy", "scipy", "torch"]
    script = f"import stof.cli, stof.pipeline, sys; print([m for m in {heavy} if m in sys.modules])"
    env = {**os.environ, "PYTHONPATH": str(Path(stof.__file__).parents[1])}
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=env)
    assert found.stdout.strip() == "[]"


def test_plain_errors_of_other_code_are_no_fault_of_the_model(
    put: Callable[[onnx.ModelProto], Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = put(text(WINDOW + ATTENTION))

    def wrong(*_: object) -> None:
        raise RuntimeError("dictionary changed size during iteration")

    monkeypatch.setattr("stof.attention.checks.site_checks.compare_site", wrong)
    assert cli.main([str(path)]) == 3
    error = capsys.readouterr().err
    assert "internal error: RuntimeError: dictionary changed size during iteration" in error
    assert "ONNX Runtime's CPU provider" not in error
    assert error.count("\n") == 1
    monkeypatch.setenv("STOF_TRACEBACK", "1")
    assert cli.main([str(path)]) == 3
    assert "Traceback (most recent call last)" in capsys.readouterr().err
