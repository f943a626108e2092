# SPDX-License-Identifier: Apache-2.0
"""The comparison of a model with run-time masks with the verified one: what is compared, and what the report says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import skip_models
from onnx import TensorProto, helper
from skip_runs import inputs_options, run, simulate_limits
from test_prompts import decoder

import stof
from stof.errors import VerifyError
from stof.execution.case import Case, Padding
from stof.execution.session_process import release_sessions
from stof.prompt_runs import switched_off
from stof.prompt_runs.limits import prompt_limits
from stof.prompt_runs.switched_off import SwitchedOffCheck, draw_unpadded
from stof.verification.model_inputs import ModelInputs, default_inputs


def small_model(op: str, *, rows: int | str = "S") -> onnx.ModelProto:
    """``x`` [rows, 4] -> ``y``."""
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node(op, ["x"], ["y"])],
        "g",
        [info("x", TensorProto.FLOAT, [rows, 4])],
        [info("y", TensorProto.FLOAT, [rows, 4])],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def feed_of(rows: int) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(rows).standard_normal((rows, 4)).astype(np.float32)}


def check(folder: Path, exact: onnx.ModelProto, changed: onnx.ModelProto, *rows: int) -> str:
    try:
        held = SwitchedOffCheck(exact, changed, "choose-blocks")
        return held.run(map(feed_of, rows), folder / "model.onnx", folder, prompt_limits(0))
    finally:
        release_sessions()


def test_the_first_inputs_that_run_are_compared(tmp_path: Path) -> None:
    same, of_two = small_model("Neg"), small_model("Neg", rows=2)
    assert check(tmp_path, same, same, 5) == ""
    assert check(tmp_path, of_two, same, 5, 2) == ""
    with pytest.raises(VerifyError, match=r"output 'y' is not that of the verified model .* leave choose-blocks out"):
        check(tmp_path, of_two, small_model("Abs"), 5, 2)
    with pytest.raises(VerifyError, match="choose-blocks could not be verified"):
        check(tmp_path, same, of_two, 5)


def test_what_is_not_compared_has_a_reason(tmp_path: Path) -> None:
    same, of_two = small_model("Neg"), small_model("Neg", rows=2)
    assert check(tmp_path, same, same) == "no inputs without padding can be drawn; --inputs FILE may give some"
    assert check(tmp_path, of_two, of_two, 5, 7).startswith("the model without choose-blocks does not run here: ")


def test_padded_inputs_are_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = default_inputs(small_model("Neg"))
    assert [len(feed["x"]) for feed in draw_unpadded(inputs)]
    padded = [Case(1, 5, Padding.RIGHT), Case(1, 7, Padding.LEFT)]
    monkeypatch.setattr(ModelInputs, "select_cases", lambda self, tokens: padded)
    assert len(list(draw_unpadded(inputs))) == 2  # padding changes nothing there
    ids = small_model("Neg")
    for value in (ids.graph.input[0], ids.graph.output[0]):
        value.type.tensor_type.elem_type = TensorProto.INT64
    assert list(draw_unpadded(default_inputs(ids))) == []


@pytest.mark.parametrize("kind", ["thresholds", "pages"])
def test_the_report_says_what_is_not_verified(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Simulated: nothing without padding can be drawn. Whole models are verified anyway."""
    simulate_limits(monkeypatch)
    is_thresholds = kind == "thresholds"
    model = skip_models.encoder(tmp_path / "model.onnx") if is_thresholds else decoder(tmp_path)
    spec = "skip-scores(threshold=0.5)" if is_thresholds else "choose-pages(pages=4)"
    status, _, report = run(tmp_path, model, spec)
    assert status == 0
    assert report["unverified"] == ""
    assert "NOT VERIFIED" not in capsys.readouterr().out

    monkeypatch.setattr(switched_off, "draw_unpadded", lambda inputs: iter(()))
    page = tmp_path / "page.html"
    status, target, report = run(tmp_path, model, spec, "--report", str(page))
    assert status == 0
    assert target.exists()
    assert report["unverified"].startswith("no inputs without padding can be drawn")
    line = f"NOT VERIFIED with STOF_SKIP_SCORES=0: {report['unverified']}"
    assert line in capsys.readouterr().out
    assert line in page.read_text()
    summary = stof.optimize(model, target, sparsify=spec).summary()
    assert "; verified without what --sparsify leaves out at run time" in summary
    capsys.readouterr()
    assert run(tmp_path, model, spec, "--no-verify")[2]["unverified"] == ""
    assert "NOT VERIFIED" not in capsys.readouterr().out


def test_inputs_of_the_user_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simulate_limits(monkeypatch)
    monkeypatch.setattr(switched_off, "draw_unpadded", lambda inputs: iter(()))
    model = skip_models.encoder(tmp_path / "model.onnx")
    status, _, report = run(tmp_path, model, "skip-scores(threshold=0.5)", *inputs_options(tmp_path, 1), "--force")
    assert status == 0
    assert report["unverified"] == ""
