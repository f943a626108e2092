# SPDX-License-Identifier: Apache-2.0
"""Masks that hold other numbers than 0 and 1: right for all of them, or the report says what is taken for granted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import stof

_TEXT = """<ir_version: 9, opset_import: ["" : 18]>
g (float[B, 4, S, 8] q, float[B, 4, S, 8] k, float[B, 4, S, 8] v, %s[B, S] mask) => (float[B, 4, S, 8] y) {
    nothing = Constant <value = float {0.0}> ()
    least = Constant <value = float {-3.4028234663852886e38}> ()
    soft = Constant <value = float {-1e9}> ()
    onef = Constant <value = float {1.0}> ()
    half = Constant <value = float {0.5}> ()
    one = Constant <value = %s {1}> ()
    zero = Constant <value = %s {0}> ()
    axes12 = Constant <value = int64[2] {1, 2}> ()
    axes13 = Constant <value = int64[2] {1, 3}> ()
    kt = Transpose <perm = [0, 1, 3, 2]> (k)
    s1 = MatMul (q, kt)
    m4 = Unsqueeze (mask, axes12)
    mq = Unsqueeze (mask, axes13)
    mf = Cast <to = 1> (m4)
    %s
    s2 = Add (s1, added)
    p = Softmax (s2)
    y = MatMul (p, v)
}"""
_WHERE = "\nadded = Where (b, nothing, least)"
EXACT = {
    "cast": "b = Cast <to = 9> (m4)" + _WHERE,
    "not equal to 0": "b0 = Equal (m4, zero)\nb = Not (b0)" + _WHERE,
    "equal to 1": "b = Equal (m4, one)" + _WHERE,
    "positive": "b = Greater (m4, zero)" + _WHERE,
    "more than a half": "b = Greater (mf, half)" + _WHERE,
    "product": "pairs = Mul (m4, mq)\nb = Cast <to = 9> (pairs)" + _WHERE,
    "absolute": "a = Abs (m4)\nb = Cast <to = 9> (a)" + _WHERE,
    "sign": "a = Sign (m4)\nb = Cast <to = 9> (a)" + _WHERE,
    "at most 1": "a = Min (m4, one)\nb = Cast <to = 9> (a)" + _WHERE,
    "documents": "b0 = Equal (m4, mq)\nb1 = Cast <to = 9> (m4)\nb = And (b0, b1)" + _WHERE,
}
COMPUTED = {
    "(1 - m) * -1e9": "n = Sub (onef, mf)\nadded = Mul (n, soft)",
    "(1 - m) as condition": "n = Sub (onef, mf)\nb = Cast <to = 9> (n)\nadded = Where (b, least, nothing)",
    "1 - m in integers": "n = Sub (one, m4)\nnf = Cast <to = 1> (n)\nadded = Mul (nf, least)",
    "log": "added = Log (mf)",
}


def model(kind: str, body: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(_TEXT % (kind, kind, kind, body))


def outputs(path: Path, feeds: dict[str, np.ndarray]) -> np.ndarray:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    stof.register(options)
    return np.asarray(ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"]).run(None, feeds)[0])


def feeds(kind: str, values: list[float]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    found = {n: rng.standard_normal((2, 4, 19, 8)).astype(np.float32) for n in "qkv"}
    mask = rng.choice(values, (2, 19))
    mask[:, 0] = 1
    mask[1, 7:] = 0
    return {**found, "mask": mask.astype(kind.replace("float", "float32"))}


@pytest.mark.parametrize("kind", ["int64", "int32"])
@pytest.mark.parametrize("form", EXACT)
def test_what_is_exact_for_every_number(form: str, kind: str, tmp_path: Path) -> None:
    path, written = tmp_path / "model.onnx", tmp_path / "out.onnx"
    onnx.save(model(kind, EXACT[form]), str(path))
    (site,) = stof.optimize(path, written).sites
    assert site.replaced
    assert site.mask
    assert not any("0 and 1" in n for n in site.notes)
    for values in ([0, 1], [0, 1, 2], [-1, 0, 1], [-5, 0, 1, 1000]):
        given = feeds(kind, values)
        np.testing.assert_allclose(outputs(written, given), outputs(path, given), atol=5e-6, rtol=0)


@pytest.mark.parametrize("kind", ["int64", "int32"])
@pytest.mark.parametrize("form", COMPUTED)
def test_what_is_computed_with_is_said_to_be_0_and_1(form: str, kind: str, tmp_path: Path) -> None:
    path, written = tmp_path / "model.onnx", tmp_path / "out.onnx"
    onnx.save(model(kind, COMPUTED[form]), str(path))
    (site,) = stof.optimize(path, written).sites
    assert site.mask == "pad[b, k]"
    assert "mask is taken to hold 0 and 1 only: the graph computes with it" in site.notes
    given = feeds(kind, [0, 1])
    np.testing.assert_allclose(outputs(written, given), outputs(path, given), atol=5e-6, rtol=0)


@pytest.mark.parametrize("form", ["cast", "(1 - m) * -1e9", "(1 - m) as condition", "more than a half"])
def test_floats_are_exact_for_every_number(form: str, tmp_path: Path) -> None:
    path, written = tmp_path / "model.onnx", tmp_path / "out.onnx"
    onnx.save(model("float", {**EXACT, **COMPUTED}[form]), str(path))
    (site,) = stof.optimize(path, written).sites
    assert site.replaced
    for values in ([0, 1], [0, 0.5, 1], [-1, 0, 1, 1.5]):
        given = feeds("float", values)
        wanted, found = outputs(path, given), outputs(written, given)
        # -1e9 keeps no digit of a score that it is added to, whatever adds it.
        np.testing.assert_allclose(found, wanted, atol=5e-6 if "1e9" not in form else 2e-2, rtol=0)


@pytest.mark.parametrize("form", ["positive", "equal to 1", "documents"])
@pytest.mark.parametrize("kind", ["uint8", "int16"])
def test_types_that_the_operator_does_not_take_stay_in_the_graph(form: str, kind: str, tmp_path: Path) -> None:
    path, written = tmp_path / "model.onnx", tmp_path / "out.onnx"
    numbers = {"uint8": "int32", "int16": "int32"}[kind]
    body = EXACT[form].replace("m4", "wide4").replace("mq", "wideq")
    casts = f"wide4 = Cast <to = {6 if numbers == 'int32' else 7}> (m4)\nwideq = Cast <to = 6> (mq)\n"
    onnx.save(onnx.parser.parse_model(_TEXT % (kind, numbers, numbers, casts + body)), str(path))
    (site,) = stof.optimize(path, written).sites
    assert site.replaced
    assert any("int32 or int64 only; cast it before" in n for n in site.notes)
    given = feeds(kind, [0, 1, 2])
    np.testing.assert_allclose(outputs(written, given), outputs(path, given), atol=5e-6, rtol=0)


@pytest.mark.parametrize("names", ["B, S", "N, M"])
def test_padding_of_another_size_broadcasts_or_is_refused(names: str, tmp_path: Path) -> None:
    path, written = tmp_path / "model.onnx", tmp_path / "out.onnx"
    text = _TEXT % ("int64", "int64", "int64", EXACT["cast"])
    onnx.save(onnx.parser.parse_model(text.replace("int64[B, S] mask", f"int64[{names}] mask")), str(path))
    (site,) = stof.optimize(path, written).sites
    assert site.mask == "pad[b, k]"
    given = feeds("int64", [0, 1])
    row = {**given, "mask": given["mask"][1:]}  # one for the whole batch
    np.testing.assert_allclose(outputs(written, row), outputs(path, row), atol=5e-6, rtol=0)
    # Names are no checks: the runtime takes this, and one number stands for all keys. The operator does not guess.
    short = {**given, "mask": np.ones((2, 1), np.int64)}
    assert outputs(path, short).shape == (2, 4, 19, 8)
    with pytest.raises(Exception, match=r"pad has shape \[2, 1\], expected \[2, 19\]"):
        outputs(written, short)
