# SPDX-License-Identifier: Apache-2.0
"""Prompts and the loss on them: KL divergence and agreement against SciPy-free fp64, files, and the command's refusals."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from stof import cli
from stof.errors import ArgumentError
from stof.prompts.files import read_prompts
from stof.prompts.loss import LossMeter, kl_divergence

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cached_attention"))
from gqa_models import Shape, model_of, session

WORDS, H, G, D = 31, 4, 2, 16
SHAPE = Shape(H=H, G=G, D=D, packed=True, rotary=16)


def decoder(
    folder: Path, *, strength: float = 1.0, fixed: int | None = None, logits: str = "logits", last: bool = False,
    shape: Shape = SHAPE, capacity: int | str = "C", grows: bool = False,
) -> Path:  # fmt: skip
    """Tokens, embedding, attention over a cache, logits, as decoders have them.

    ``last``: logits of the last token alone. ``grows``: the total is the rows of the past and the new tokens.
    """
    rng = np.random.default_rng(1)
    model = model_of(shape, masks=True, capacity=capacity)
    graph = model.graph
    width = (H + 2 * G) * D
    tables = {"embedding": rng.standard_normal((WORDS, width)), "head": rng.standard_normal((H * D, WORDS)) * strength}
    graph.initializer.extend(numpy_helper.from_array(a.astype(np.float32), n) for n, a in tables.items())
    angles = np.arange(512)[:, None] * 0.7 / (1 + np.arange(8))
    graph.initializer.extend(
        numpy_helper.from_array(f(angles).astype(np.float32), n) for n, f in (("cos", np.cos), ("sin", np.sin))
    )
    kept = [i for i in graph.input if i.name not in ("query", "cos", "sin")]
    del graph.input[:]
    sizes = ["B", "S" if fixed is None else fixed]
    graph.input.extend([helper.make_tensor_value_info("input_ids", TensorProto.INT64, sizes), *kept])
    graph.node.insert(0, helper.make_node("Gather", ["embedding", "input_ids"], ["query"]))
    if grows:
        place = next(i for i, n in enumerate(graph.node) if "length" in n.output)
        graph.node.pop(place)
        for node in reversed(
            [
                helper.make_node("Shape", ["past_key"], ["rows_of_past"], start=2, end=3),
                helper.make_node("Shape", ["input_ids"], ["new_tokens"], start=1, end=2),
                helper.make_node("Add", ["rows_of_past", "new_tokens"], ["sum_of_rows"]),
                helper.make_node("Squeeze", ["sum_of_rows"], ["length"]),
            ]
        ):
            graph.node.insert(place, node)
    if last:
        numbers = {"first": [-1], "behind": [1 << 31], "axis": [1]}
        graph.initializer.extend(numpy_helper.from_array(np.array(a), n) for n, a in numbers.items())
        graph.node.append(helper.make_node("Slice", ["output", "first", "behind", "axis"], ["rows"]))
    graph.node.append(helper.make_node("MatMul", ["rows" if last else "output", "head"], [logits]))
    presents = list(graph.output)[1:]
    del graph.output[:]
    graph.output.extend(
        [helper.make_tensor_value_info(logits, TensorProto.FLOAT, ["B", 1 if last else sizes[1], WORDS]), *presents]
    )
    onnx.save(model, folder / "model.onnx")
    return folder / "model.onnx"


def put(path: Path, data: Any) -> Path:
    if path.suffix == ".npy":
        np.save(path, data)
    elif path.suffix == ".npz":
        np.savez(path, **data)
    else:
        path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


IDS = np.random.default_rng(2).integers(0, WORDS, (2, 300))


@pytest.mark.parametrize(
    ("name", "data", "expected"),
    [
        ("a.npy", IDS, list(IDS)),
        ("a.npy", IDS[0].astype(np.uint16), [IDS[0]]),
        ("a.npz", {"x": IDS[0], "y": IDS[:, :5]}, [IDS[0], *IDS[:, :5]]),
        ("a.json", IDS[0].tolist(), [IDS[0]]),
        ("a.json", [[3, 4], [5]], [[3, 4], [5]]),
    ],
)
def test_token_ids(name: str, data: Any, expected: list[Any], tmp_path: Path) -> None:
    found = read_prompts(put(tmp_path / name, data), [])
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.npy", IDS * 0.5, r"an array of float64 \[2, 300\]; expected"),
        ("a.npz", {"x": IDS[None]}, r"array 'x' of int64 \[1, 2, 300\]"),
        ("a.json", {"x": 1}, "is no list"),
        ("a.json", [[1, "x"]], "prompt 0 is no list of token ids"),
        ("a.json", [[1], []], "prompt 1 has no token"),
        ("a.json", [], "prompt 0 has no token"),
        ("a.json", [[1, -3]], "prompt 0 has token id -3"),
        ("a.json", "[1", "is no JSON"),
        ("a.csv", "1", "expected .npy or .npz"),
        ("a.npy", np.zeros((0, 3), np.int64), "has 0 prompts"),
    ],
)
def test_faults_of_prompts(name: str, data: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=message):
        read_prompts(put(tmp_path / name, data), [])


def test_text_needs_the_package_and_a_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = put(tmp_path / "a.txt", "some words")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ArgumentError, match="pip install tokenizers, or give ids"):
        read_prompts(path, [])

    class Tokenizer:
        @classmethod
        def from_str(cls, text: str) -> Tokenizer:
            assert text == "{}"
            return cls()

        def encode(self, text: str) -> Any:
            return type("Encoding", (), {"ids": [len(word) for word in text.split()]})

    monkeypatch.setitem(sys.modules, "tokenizers", type("Module", (), {"Tokenizer": Tokenizer}))
    with pytest.raises(ArgumentError, match=r"there is no tokenizer.json beside it or the model"):
        read_prompts(path, [])
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    assert [x.tolist() for x in read_prompts(path, [tmp_path / "model"])] == [[4, 5]]
    assert [x.tolist() for x in read_prompts(put(tmp_path / "b.json", ["a", "b cc"]), [tmp_path / "model"])] == [
        [1],
        [1, 2],
    ]


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x.astype(np.float64) - x.max(-1, keepdims=True))
    return np.asarray(e / e.sum(-1, keepdims=True))


def test_kl_divergence() -> None:
    rng = np.random.default_rng(0)
    one, other = rng.standard_normal((2, 9, 50)).astype(np.float32) * 3
    p, q = softmax(one), softmax(other)
    np.testing.assert_allclose(kl_divergence(one, other), (p * np.log(p / q)).sum(-1), rtol=1e-9)
    assert kl_divergence(one, one).max() == 0
    other[3] = np.nan
    other[4, 2] = -np.inf
    assert np.isinf(kl_divergence(one, other)).tolist() == [i in (3, 4) for i in range(9)]


def test_buckets() -> None:
    rng = np.random.default_rng(0)
    one, other = rng.standard_normal((2, 1500, 7))
    meter = LossMeter()
    meter.add(one, other, np.arange(1500))
    meter.add(one[:10], one[:10], np.arange(10))
    found = meter.loss()
    assert [(b.first, b.end, b.count) for b in found.buckets] == [(0, 256, 266), (256, 1024, 768), (1024, 4096, 476)]
    kl, same = kl_divergence(one, other), one.argmax(-1) == other.argmax(-1)
    assert found.buckets[1].kl == pytest.approx(kl[256:1024].mean())
    assert found.buckets[1].agreement == pytest.approx(same[256:1024].mean())
    assert found.buckets[0].agreement == pytest.approx((same[:256].sum() + 10) / 266)
    assert (found.prompts, found.tokens) == (2, 1510)
    assert found.kl == pytest.approx(kl.sum() / 1510)


def run_prompts(path: Path, folder: Path, *options: str) -> tuple[int, Path, dict[str, Any]]:
    target, report = folder / "out.onnx", folder / "report.json"
    prompts = put(folder / "prompts.npy", IDS)
    words = [str(path), "-o", str(target), "--json", str(report), "--no-verify", "--prompts", str(prompts), *options]
    status = cli.main(words)
    return status, target, json.loads(report.read_text()) if report.exists() else {}


def test_the_loss_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As by running both files by hand."""
    path = decoder(tmp_path, strength=0.1)
    status, target, report = run_prompts(path, tmp_path, "--sparsify", "window=20,sink=2", "--max-kl", "100")
    assert status == 0
    logits = []
    for model, library in ((path, False), (target, True)):
        made = session(onnx.load(model), library=library)
        past = np.zeros((2, G, 300, D), np.float32)
        feeds = {"input_ids": IDS, "attention_mask": np.ones((2, 300), np.int64), "past_key": past, "past_value": past}
        logits.append(made.run(["logits"], feeds)[0])
    p, q = softmax(logits[0]), softmax(logits[1])
    loss = report["sparsify"]["loss"]
    assert loss["kl"] == pytest.approx((p * np.log(p / q)).sum(-1).mean(), rel=1e-3)
    assert loss["agreement"] == pytest.approx((p.argmax(-1) == q.argmax(-1)).mean(), abs=0.01)
    assert loss["kl"] > 1e-3
    assert [b["count"] for b in loss["buckets"]] == [512, 88]
    # Teacher-forced steps compute what the prompt computes at their positions.
    decoded = [*range(248, 256), *range(292, 300)]
    loss = report["sparsify"]["decode_loss"]
    assert loss["kl"] == pytest.approx((p * np.log(p / q))[:, decoded].sum(-1).mean(), rel=1e-3)
    assert loss["agreement"] == (p.argmax(-1) == q.argmax(-1))[:, decoded].mean()
    assert [(b["first"], b["count"]) for b in loss["buckets"]] == [(0, 16), (256, 16)]
    text = capsys.readouterr().out
    assert "OUTPUTS CHANGE: --sparsify puts a pattern on 1 of 1 attentions" in text.splitlines()[0]
    assert "loss on 2 prompts, 600 tokens: KL divergence" in text
    assert "positions 256 to 1023: KL divergence" in text
    assert "loss of decoding on 2 prompts, 32 tokens: KL divergence" in text


def test_a_pattern_that_keeps_all_has_no_loss(tmp_path: Path) -> None:
    status, _, report = run_prompts(decoder(tmp_path), tmp_path, "--sparsify", "window=4096", "--max-kl", "1e-6")
    assert status == 0
    assert report["sparsify"]["loss"]["agreement"] == 1


def test_too_large_a_loss_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = decoder(tmp_path)
    status, target, report = run_prompts(path, tmp_path, "--sparsify", "window=2")
    assert status == 2
    assert not target.exists()
    assert "--sparsify changes outputs too much: KL divergence" in capsys.readouterr().err
    assert report["sparsify"]["loss"]["kl"] > 0.1
    assert report["output"] is None
    assert run_prompts(path, tmp_path, "--sparsify", "window=2", "--force")[0] == 0
    assert target.exists()


def test_too_large_a_loss_in_decoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A result that is right on whole prompts, and wrong in steps of one token."""
    from stof.cached_attention import rewrite

    emit = rewrite.emit_caches

    def faulty(model: onnx.ModelProto, sites: object) -> onnx.ModelProto:
        found = emit(model, sites)  # type: ignore[arg-type]
        for node in found.graph.node:
            for attribute in node.attribute:
                if attribute.name == "mask":
                    attribute.s = b"(" + attribute.s + b") and (S > 1 or k == q)"
        return found

    monkeypatch.setattr(rewrite, "emit_caches", faulty)
    status, target, report = run_prompts(decoder(tmp_path), tmp_path, "--sparsify", "window=4096")
    assert status == 2
    assert not target.exists()
    assert report["sparsify"]["loss"]["kl"] < 1e-5
    assert report["sparsify"]["decode_loss"]["kl"] > 0.1
    assert "in decoding on " in capsys.readouterr().err


@pytest.mark.parametrize(
    "made",
    [
        {"last": True},
        {"capacity": 320},
        {"grows": True},
        {"shape": Shape(H=H, G=G, D=D, packed=True, rotary=16, positions=True)},
    ],
)
def test_decoding_of_other_models(made: dict[str, Any], tmp_path: Path) -> None:
    """Logits of the last token alone, caches of a fixed size, positions as an input."""
    options = ["--sparsify", "window=200", "--max-kl", "100"]
    status, _, report = run_prompts(decoder(tmp_path, strength=0.1, **made), tmp_path, *options)
    assert status == 0
    found = report["sparsify"]
    assert found["loss"]["tokens"] == (2 if "last" in made else 600)
    assert found["decode_loss"]["tokens"] == 32
    # The prompts' last tokens, and the last 8 steps: both are behind the window.
    assert found["loss"]["buckets"][-1]["kl"] == pytest.approx(found["decode_loss"]["buckets"][-1]["kl"], rel=3)
    assert found["decode_loss"]["buckets"][-1]["kl"] > 1e-5


def test_prompts_of_one_token_have_no_steps(tmp_path: Path) -> None:
    target, report, prompts = (tmp_path / n for n in ("out.onnx", "report.json", "p.json"))
    put(prompts, [[3], [4]])
    words = [decoder(tmp_path), "-o", target, "--json", report, "--no-verify", "--prompts", prompts]
    assert cli.main([*map(str, words), "--sparsify", "window=2"]) == 0
    found = json.loads(report.read_text())["sparsify"]
    assert found["loss"]["tokens"] == 2
    assert found["decode_loss"] is None


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ({"logits": "scores"}, "--prompts needs a model with output 'logits'"),
        ({"fixed": 7}, "300 tokens, the model's 'input_ids' is"),
    ],
)
def test_models_that_take_no_prompts(
    made: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, target, _ = run_prompts(decoder(tmp_path, **made), tmp_path, "--sparsify", "window=20")
    assert status == 1
    assert message in capsys.readouterr().err
    assert not target.exists()


@pytest.mark.parametrize("is_table_known", [True, False])
def test_a_token_that_the_model_does_not_know(
    is_table_known: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refused before the model is optimized where the embedding is a table of the graph, else when the model runs."""
    path = decoder(tmp_path)
    if not is_table_known:
        model = onnx.load(path)
        model.graph.node.insert(0, helper.make_node("Identity", ["embedding"], ["copy"]))
        next(n for n in model.graph.node if n.op_type == "Gather").input[0] = "copy"
        onnx.save(model, path)
    prompts = put(tmp_path / "p.json", [[1, 2], [1, 2, WORDS + 5]])
    words = [path, "-o", tmp_path / "out.onnx", "--no-verify", "--sparsify", "window=2", "--prompts", prompts]
    assert cli.main([*map(str, words)]) == 1
    expected = f"a model does not run on prompt 1 of 3 tokens, with ids from 1 to {WORDS + 5}"
    if is_table_known:
        expected = (
            f"p.json: prompt 1 has token id {WORDS + 5}, expected 0 to {WORDS - 1}: the model's embedding 'embedding'"
        )
    assert expected in capsys.readouterr().err
    assert not (tmp_path / "out.onnx").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prompts", "p.npy"], "--prompts is for --sparsify"),
        (["--sparsify", "window=3", "--max-kl", "1"], "--max-kl is for --prompts and --sparse-mlp"),
        (["--sparsify", "window=3", "--force"], "--force is for --prompts and --sparse-mlp"),
        (["--sparsify", ""], "--sparsify is empty"),
        (["--sparsify", "window=3", "--prompts", "absent.npy"], "absent.npy"),
        (["--sparsify", "window=3", "--prompts", "absent.npy", "--max-kl", "-1"], "number from 0 on"),
        (["--sparsify", "absent.npz"], "absent.npz"),
    ],
)
def test_wrong_options(options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([str(decoder(tmp_path)), *options]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("option", ["-o", "--json", "--save-plan"])
@pytest.mark.parametrize("name", ["prompts.npy", "table.npz", "heads/config.json"])
def test_what_is_read_is_not_overwritten(
    option: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = decoder(tmp_path)
    prompts = put(tmp_path / "prompts.npy", IDS)
    table = put(tmp_path / "table.npz", {"blocks": np.ones((1, 2, 2), bool), "block_size": 64})
    (tmp_path / "heads").mkdir()
    put(tmp_path / "heads" / "config.json", {"sink_size": 1, "recent_size": 5})
    (tmp_path / "heads" / "full_attention_heads.tsv").write_text("1 0\n")
    before = (tmp_path / name).read_bytes()
    spec = str(table) if not name.startswith("heads") else str(tmp_path / "heads")
    assert (
        cli.main(
            [str(path), "--no-verify", "--sparsify", spec, "--prompts", str(prompts), option, str(tmp_path / name)]
        )
        == 1
    )
    assert "choose another file" in capsys.readouterr().err
    assert (tmp_path / name).read_bytes() == before


def test_a_plan_is_of_its_patterns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, plan = str(decoder(tmp_path)), str(tmp_path / "plan.json")
    first = [path, "-o", str(tmp_path / "a.onnx"), "--no-verify", "--sparsify", "window=20"]
    assert cli.main([*first, "--save-plan", plan]) == 0
    again = [path, "-o", str(tmp_path / "b.onnx"), "--no-verify", "--plan", plan]
    assert cli.main([*again, "--sparsify", "window=20"]) == 0
    assert (tmp_path / "a.onnx").read_bytes() == (tmp_path / "b.onnx").read_bytes()
    capsys.readouterr()
    for other in ([], ["--sparsify", "window=21"]):
        assert cli.main([*again, *other]) == 1
        assert "the plan has patterns of --sparsify that are not those given" in capsys.readouterr().err
    assert cli.main([str(tmp_path / "a.onnx"), "--sparsify", "window=20"]) == 1
    assert "this one was optimized before" in capsys.readouterr().err


def test_a_model_without_causal_attention_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, ["N"]) for n in "xy")
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", [x], [y])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]), tmp_path / "m.onnx")
    assert cli.main([str(tmp_path / "m.onnx"), "--sparsify", "window=3"]) == 0
    assert "no attention that takes the pattern" in capsys.readouterr().out


def test_the_page_says_that_outputs_change(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    options = ["--sparsify", "window=20", "--max-kl", "100", "--report", str(page)]
    assert run_prompts(decoder(tmp_path), tmp_path, *options)[0] == 0
    text = page.read_text()
    assert "OUTPUTS CHANGE: --sparsify puts a pattern on 1 of 1 attentions" in text
    assert "loss on 2 prompts, 600 tokens" in text


def test_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each model of a folder gets the pattern, and its line has the loss."""
    (tmp_path / "in").mkdir()
    decoder(tmp_path / "in")
    prompts = put(tmp_path / "prompts.json", IDS.tolist())
    words = [str(tmp_path / "in"), "-o", str(tmp_path / "new"), "--sparsify", "window=20", "--prompts", str(prompts)]
    assert cli.main(words) == 2
    assert not (tmp_path / "new").exists()
    assert "--sparsify changes outputs too much" in capsys.readouterr().out
    assert cli.main([*words, "--force"]) == 0
    line = capsys.readouterr().out.splitlines()[0]
    assert "OUTPUTS CHANGE" in line
    assert "verified; loss on 2 prompts, 600 tokens: KL divergence" in line
    assert "; loss of decoding on 2 prompts, 32 tokens: KL divergence" in line
