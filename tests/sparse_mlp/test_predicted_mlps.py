# SPDX-License-Identifier: Apache-2.0
"""--sparse-mlp on whole models: what is written, how much outputs change, what is refused, and what the report says."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
import pytest
from mlp_models import VOCABULARY, MlpForm, make_mlp_model
from onnx import TensorProto, helper

import stof
from stof import cli
from stof.errors import ArgumentError
from stof.options import Options
from stof.prompts.loss import kl_divergence
from stof.report import Report
from stof.sparse_mlp.predictors.predictor_files import write_npz
from stof.sparse_mlp.predictors.selector import NeuronSelector
from stof.sparse_mlp.report import MlpSection
from stof.sparse_mlp.site import OP

pytestmark = pytest.mark.usefixtures("small_mlps_gain")

Array = npt.NDArray[Any]
GATED = MlpForm("silu", gated=True)
ANY_LOSS = 1e9


@pytest.fixture(name="prompts", scope="module")
def make_prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten prompts of 20 tokens."""
    path = tmp_path_factory.mktemp("prompts") / "p.npz"
    rng = np.random.default_rng(0)
    np.savez(path, *[rng.integers(0, VOCABULARY, 20) for _ in range(10)])
    return path


def put(folder: Path, form: MlpForm = GATED, layers: int = 2, logits: str = "logits") -> Path:
    model = make_mlp_model(form, layers)
    model.graph.node[-1].output[0] = logits
    model.graph.output[0].name = logits
    onnx.save(model, str(folder / "model.onnx"))
    return folder / "model.onnx"


def section(report: Report) -> MlpSection:
    found = report.sections["mlps"]
    assert isinstance(found, MlpSection)
    return found


def logits_of(path: Path, ids: Array, form: MlpForm, library: bool) -> Array:
    options = ort.SessionOptions()
    if library:
        stof.register(options)
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    past = np.zeros((1, 0, form.size), helper.tensor_dtype_to_np_dtype(form.dtype))
    return np.asarray(session.run(["logits"], {"input_ids": ids[None], "past": past})[0][0])


@pytest.mark.usefixtures("dequantized_mlps_gain")
@pytest.mark.parametrize(
    ("form", "fields", "selection"),
    [
        (GATED, "active=0.4", "magnitude"),
        (MlpForm("gelu_erf"), "active=0.4,by_neuron=1", "magnitude"),
        (
            MlpForm("silu", gated=True, bias=False, dtype=TensorProto.FLOAT16),
            "kind=svd,active=0.4,rank=12",
            "predictor",
        ),
        (MlpForm("silu", gated=True, bits=4, size=64), "kind=svd,active=0.4,rank=12", "predictor"),
        (MlpForm("relu", shift=1.0), "kind=svd,rank=16", "predictor"),
        (MlpForm("gelu", gemm=True), "kind=trained,active=0.4,rank=12,seed=3", "predictor"),
    ],
    ids=str,
)
def test_loss_of_what_is_written(form: MlpForm, fields: str, selection: str, prompts: Path, tmp_path: Path) -> None:
    """The report has the loss of the written model on the held-out fifth, as two sessions of one's own have it."""
    source, target = put(tmp_path, form), tmp_path / "out.onnx"
    report = stof.optimize(source, target, Options(sparse_mlp=f"{prompts},{fields}", max_kl=ANY_LOSS))
    assert [r.selection for r in section(report).rows] == [selection] * 2
    assert report.to_text().startswith(
        f"{source}: OUTPUTS CHANGE: --sparse-mlp computes only selected neurons in 2 of 2 MLPs"
    )
    nodes = [n for n in onnx.load(str(target)).graph.node if n.op_type == OP]
    assert [helper.get_attribute_value(a) for n in nodes for a in n.attribute if a.name == "selection"] == [
        selection.encode()
    ] * 2
    held = list(np.load(prompts).values())[4::5]
    pairs = [(logits_of(source, ids, form, False), logits_of(target, ids, form, True)) for ids in held]
    kl = np.concatenate([kl_divergence(a, b) for a, b in pairs])
    agreement = np.concatenate([a.argmax(-1) == b.argmax(-1) for a, b in pairs])
    loss = section(report).loss
    assert loss is not None
    assert (loss.whole.prompts, loss.whole.tokens) == (2, 40)
    assert loss.whole.kl == pytest.approx(kl.mean(), rel=2e-2)
    assert loss.whole.agreement == pytest.approx(agreement.mean())
    assert report.verification is not None
    assert {c.site for c in report.verification.comparisons if c.site} == {r.mlp for r in section(report).rows}
    assert any(
        not c.site and c.comparable for c in report.verification.comparisons
    )  # the dense form equals the original


def test_report_says_how_well_neurons_are_predicted(prompts: Path, tmp_path: Path) -> None:
    options = Options(
        sparse_mlp=f"{prompts},kind=svd,active=0.4,rank=12,layers=0;active=0.4,layers=1", max_kl=ANY_LOSS,
        json=tmp_path / "report.json", report=tmp_path / "report.html",
    )  # fmt: skip
    report = stof.optimize(put(tmp_path, layers=3), tmp_path / "out.onnx", options)
    rows = section(report).rows
    assert [(r.replaced, r.selection) for r in rows] == [(True, "predictor"), (True, "magnitude"), (False, "nonzero")]
    assert rows[2].reason == "--sparse-mlp is for other layers"
    first, second = rows[0].prediction, rows[1].prediction
    assert first is not None
    assert second is not None
    assert (first.kind, first.rank, first.tokens) == ("svd", 12, 40)
    assert (second.precision, second.recall) == (1.0, 1.0)
    assert first.recall is not None
    assert 0.4 < first.recall < 1
    text = report.to_text()
    assert "1 x MLP with silu, neurons by svd, rank 12: gated, 160 neurons" in text
    assert "% of the neurons computed, estimated" in text
    assert f"calibrated on {prompts}; measured on the held-out fifth of {prompts}" in text
    assert "loss on 2 prompts, 40 tokens: KL divergence" in text
    assert "(with every neuron active: the loss says what leaving out neurons changes)" in text
    data = json.loads((tmp_path / "report.json").read_text())
    assert data["sparse_mlp"]["outputs_change"] is True
    assert data["sparse_mlp"]["loss"]["tokens"] == 40
    assert data["mlps"][0]["prediction"]["kind"] == "svd"
    page = (tmp_path / "report.html").read_text()
    assert "OUTPUTS CHANGE" in page
    assert "svd, rank 12" in page


def test_prompts_of_its_own_are_held_out(prompts: Path, tmp_path: Path) -> None:
    held = tmp_path / "held.json"
    held.write_text(json.dumps([[1, 2, 3], [4, 5]]))
    options = Options(sparse_mlp=str(prompts), prompts=held, max_kl=ANY_LOSS)
    report = stof.optimize(put(tmp_path), tmp_path / "out.onnx", options)
    loss = section(report).loss
    assert loss is not None
    assert (loss.source, loss.whole.tokens) == (f"--prompts {held}", 5)


def test_loss_above_the_bound_is_refused(prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = put(tmp_path), tmp_path / "out.onnx"
    arguments = [str(source), "-o", str(target), "-q", "--sparse-mlp", f"{prompts},active=0.3", "--max-kl", "1e-4"]
    assert cli.main(arguments) == 2
    assert not target.exists()
    error = capsys.readouterr().err
    assert "--sparse-mlp changes outputs too much: KL divergence" in error
    assert f"on the held-out fifth of {prompts}, --max-kl allows 0.0001" in error
    assert cli.main([*arguments, "--force"]) == 0
    assert target.exists()


def test_model_without_logits_is_held_to_output_errors(prompts: Path, tmp_path: Path) -> None:
    source = put(tmp_path, MlpForm("gelu", has_cache=False), logits="embedding")
    strict, loose = (Options(sparse_mlp=f"{prompts},active=0.4,max_error={e}") for e in (1e-3, 0.9))
    report = stof.optimize(source, tmp_path / "out.onnx", strict)
    reasons = {r.reason for r in section(report).rows}
    assert all("its output error on held-out prompts is 0." in r and "max_error allows 0.001" in r for r in reasons), (
        reasons
    )
    assert "--sparse-mlp changes nothing" in report.to_text().split("\n")[0]
    report = stof.optimize(source, tmp_path / "out.onnx", loose)
    assert section(report).predicted == 2
    assert section(report).loss is None
    assert "loss: the model has no output 'logits'; output errors on the held-out fifth" in report.to_text()


def test_force_replaces_beyond_max_error(prompts: Path, tmp_path: Path) -> None:
    options = Options(sparse_mlp=f"{prompts},active=0.4,max_error=1e-3", force=True)
    assert section(stof.optimize(put(tmp_path), tmp_path / "out.onnx", options)).predicted == 2


def test_exact_layers_stay_exact(prompts: Path, tmp_path: Path) -> None:
    """Of a model with zeros, a layer without a clause is replaced without a change."""
    source = put(tmp_path, MlpForm("relu", shift=1.0))
    options = Options(sparse_mlp=f"{prompts},kind=svd,layers=0,rank=16", max_kl=ANY_LOSS)
    report = stof.optimize(source, tmp_path / "out.onnx", options)
    assert [(r.replaced, r.selection) for r in section(report).rows] == [(True, "predictor"), (True, "nonzero")]
    assert "in 1 of 2 MLPs, 1 others replaced without a change" in report.to_text().split("\n")[0]


def test_neurons_that_are_all_computed_stay_dense(prompts: Path, tmp_path: Path) -> None:
    report = stof.optimize(put(tmp_path), tmp_path / "out.onnx", Options(sparse_mlp=f"{prompts},active=1"))
    assert {r.reason for r in section(report).rows} == {
        "100 % of its neurons are computed on held-out prompts: 1.00x is estimated for one token by bytes of weights, less than "
        "1.1x"
    }


def test_model_without_mlp(prompts: Path, tmp_path: Path) -> None:
    """Nothing changes, and the report says so: of a folder, some models have none."""
    source = put(tmp_path, layers=0)
    report = stof.optimize(source, tmp_path / "out.onnx", Options(sparse_mlp=str(prompts)))
    assert "--sparse-mlp changes nothing: the model has no MLP" in report.to_text().split("\n")[0]
    assert report.copied


def test_gate_that_takes_no_predictor_stays_dense(prompts: Path, tmp_path: Path) -> None:
    source = put(tmp_path, MlpForm("quick_gelu", gated=True))
    report = stof.optimize(source, tmp_path / "out.onnx", Options(sparse_mlp=f"{prompts},kind=svd"))
    assert all("it takes no predictor" in r.reason for r in section(report).rows)


def test_targets(prompts: Path, tmp_path: Path) -> None:
    source = put(tmp_path)
    for target, reason in (("cuda", "replaced"), ("tensorrt", "StofSparseMLP has no TensorRT plugin")):
        options = Options(sparse_mlp=f"{prompts},active=0.3", target=target, dry_run=True)
        report = stof.optimize(source, tmp_path / "out.onnx", options)
        assert {r.reason for r in section(report).rows} == {reason}


def test_dense_mlps_are_not_explained_without_the_option(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="no activation of the model gives zeros, and --sparse-mlp is not given"):
        stof.optimize(put(tmp_path), tmp_path / "out.onnx", Options(explain="mlp:*"))


def test_selection_plan_and_explanation(prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, plan = put(tmp_path), tmp_path / "plan.json"
    spec = ["--sparse-mlp", f"{prompts},kind=svd,active=0.4,rank=12", "--max-kl", "1e9", "-q"]
    assert (
        cli.main([str(source), "-o", str(tmp_path / "a.onnx"), *spec, "--skip", "mlp:0", "--save-plan", str(plan)]) == 0
    )
    entries = json.loads(plan.read_text())["mlps"]
    assert [e.get("selection") for e in entries] == [None, "predictor"]
    assert cli.main([str(source), "-o", str(tmp_path / "b.onnx"), *spec, "--plan", str(plan)]) == 0
    assert (tmp_path / "a.onnx").read_bytes() == (tmp_path / "b.onnx").read_bytes()
    capsys.readouterr()
    assert cli.main([str(source), *spec, "--explain", "mlp:1"]) == 0
    shown = capsys.readouterr().out
    assert "predict svd, rank 12: precision" in shown
    assert "-> replaced" in shown
    other = ["--sparse-mlp", f"{prompts},active=0.4", "-q"]
    assert cli.main([str(source), "-o", str(tmp_path / "c.onnx"), *other, "--plan", str(plan)]) == 1
    assert "the plan selects neurons of MLP '/layers.1.down/matmul' by predictor, and --sparse-mlp by magnitude" in (
        capsys.readouterr().err
    )
    assert cli.main([str(source), "-o", str(tmp_path / "c.onnx"), "-q", "--plan", str(plan)]) == 1
    assert "by predictor; give the --sparse-mlp that it was saved with" in capsys.readouterr().err


def test_optimized_again_is_refused(prompts: Path, tmp_path: Path) -> None:
    options = Options(sparse_mlp=str(prompts), max_kl=ANY_LOSS)
    stof.optimize(put(tmp_path), tmp_path / "out.onnx", options)
    with pytest.raises(ArgumentError, match="--sparse-mlp is for a dense model"):
        stof.optimize(tmp_path / "out.onnx", tmp_path / "again.onnx", options)


def test_folder_with_a_tokenizer_of_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder as GenAI has it: prompts are texts, which the folder's tokenizer turns into ids."""

    class Tokenizer:
        @classmethod
        def from_str(cls, text: str) -> Tokenizer:
            assert text == "{}"
            return cls()

        def encode(self, text: str) -> Any:
            return type("Encoding", (), {"ids": [int(word) for word in text.split()]})

    monkeypatch.setitem(sys.modules, "tokenizers", type("Module", (), {"Tokenizer": Tokenizer}))
    folder = tmp_path / "in"
    folder.mkdir()
    put(folder)
    (folder / "tokenizer.json").write_text("{}")
    texts = tmp_path / "texts.json"
    texts.write_text(json.dumps([" ".join(str((7 * i + j) % VOCABULARY) for j in range(15)) for i in range(6)]))
    report = stof.optimize_folder(folder, tmp_path / "out", Options(sparse_mlp=f"{texts},active=0.4", max_kl=ANY_LOSS))
    assert "model.onnx: OUTPUTS CHANGE: --sparse-mlp computes only selected neurons in 2 of 2 MLPs" in report.to_text()
    assert "loss on 1 prompt, 15 tokens" in report.to_text()
    assert (tmp_path / "out" / "libstof_ort.so").exists()


def selectors(neurons: int = 160, size: int = 48, layers: int = 2) -> list[NeuronSelector]:
    rng = np.random.default_rng(0)
    return [
        NeuronSelector(
            np.zeros(neurons, np.float32),
            rng.standard_normal((6, size)).astype(np.float32),
            rng.standard_normal((neurons, 6)).astype(np.float32),
        )
        for _ in range(layers)
    ]


def test_predictors_of_a_file(prompts: Path, tmp_path: Path) -> None:
    write_npz(tmp_path / "f.npz", selectors())
    spec = f"predictors={tmp_path / 'f.npz'}"
    report = stof.optimize(put(tmp_path), tmp_path / "out.onnx", Options(sparse_mlp=spec))
    assert [r.selection for r in section(report).rows] == ["predictor"] * 2
    assert "loss: not measured; --prompts FILE measures it" in report.to_text()
    assert section(report).rows[0].density is None
    report = stof.optimize(
        tmp_path / "model.onnx", tmp_path / "out.onnx", Options(sparse_mlp=spec, prompts=prompts, max_kl=ANY_LOSS)
    )
    assert section(report).loss is not None
    assert section(report).rows[0].density == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (selectors(neurons=128), "for MLP '/layers.0.down/matmul' has 128 thresholds, expected 1 or 160"),
        (
            selectors(size=47),
            "has a predictor of 160 neurons from tokens of 47 elements, expected 160 neurons and 48 elements",
        ),
        (selectors(layers=3), "is for 3 layers, and the model has 2 MLPs"),
    ],
    ids=["neurons", "size", "layers"],
)
def test_file_of_another_model(given: list[NeuronSelector], words: str, tmp_path: Path) -> None:
    write_npz(tmp_path / "f.npz", given)
    with pytest.raises(ArgumentError) as raised:
        stof.optimize(put(tmp_path), tmp_path / "out.onnx", Options(sparse_mlp=f"predictors={tmp_path / 'f.npz'}"))
    assert words in str(raised.value)


def save_ids(*prompts: Any) -> Callable[[Path], None]:
    return lambda path: path.write_text(json.dumps(list(prompts)))


@pytest.mark.parametrize(
    ("write", "fields", "words"),
    [
        (save_ids([]), "", "prompt 0 has no token"),
        (save_ids([3]), "", "has prompts of 1 tokens, expected 5 prompts or one of 5 tokens, as a fifth is held out"),
        (save_ids([1, 2, VOCABULARY] * 4), "", f"prompt 0 has token id {VOCABULARY}, expected 0 to {VOCABULARY - 1}"),
        (save_ids([1, -2] * 4), "", "prompt 0 has token id -2"),
        (save_ids([1, 2] * 4), ",layers=2:", "layers=2: selects from 2 layers"),
        (save_ids([1, 2] * 4), ",kind=svd,rank=500", "rank=500 is larger than the gate weight [160, 48]"),
        (save_ids([1, 2] * 4), ",kind=other", "has kind=other, expected one of magnitude, svd, trained"),
        (lambda path: None, "", "does not exist"),
    ],
    ids=["tokens", "one", "vocabulary", "negative", "layers", "rank", "kind", "file"],
)
def test_faults_of_arguments(
    write: Callable[[Path], None], fields: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "calibration.json"
    write(path)
    target = tmp_path / "out.onnx"
    assert cli.main([str(put(tmp_path)), "-q", "-o", str(target), "--sparse-mlp", f"{path}{fields}"]) == 1
    error = capsys.readouterr().err
    assert words in error
    assert "--sparse-mlp" in error or "calibration.json" in error
    assert not target.exists()


def test_held_out_prompts_are_not_the_calibration(prompts: Path, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="--sparse-mlp and --prompts both name"):
        stof.optimize(put(tmp_path), tmp_path / "out.onnx", Options(sparse_mlp=str(prompts), prompts=prompts))


def test_output_does_not_replace_the_prompts(prompts: Path, tmp_path: Path) -> None:
    copy = tmp_path / "p.npz"
    copy.write_bytes(prompts.read_bytes())
    with pytest.raises(ArgumentError, match="calibration prompts"):
        stof.optimize(put(tmp_path), copy, Options(sparse_mlp=str(copy)))


@pytest.mark.usefixtures("dequantized_mlps_gain")
@pytest.mark.parametrize("damage", ["gate.bias", "threshold", "predictor_up"])
@pytest.mark.parametrize("bits", [0, 4])
def test_wrong_nodes_are_found(
    damage: str, bits: int, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node with another gate, threshold or predictor fails at its site, and the model is written without it."""
    from stof.sparse_mlp import rewrite

    right = rewrite.emit_mlps

    def wrong(model, sites, folder):  # type: ignore[no-untyped-def]
        emitted = right(model, sites, folder)
        for tensor in emitted.graph.initializer:
            if tensor.name.endswith(damage):
                values = onnx.numpy_helper.to_array(tensor)
                values = values[::-1] if damage == "predictor_up" else values + np.float32(0.5)
                tensor.CopyFrom(onnx.numpy_helper.from_array(np.ascontiguousarray(values), tensor.name))
        return emitted

    monkeypatch.setattr(rewrite, "emit_mlps", wrong)
    form = MlpForm("silu", gated=True, bits=bits, size=64)
    spec = f"{prompts},kind=svd,active=0.4,rank=12"
    report = stof.optimize(put(tmp_path, form), tmp_path / "out.onnx", Options(sparse_mlp=spec, max_kl=ANY_LOSS))
    assert section(report).replaced == 0
    assert all("differs" in r.reason for r in section(report).rows), [r.reason for r in section(report).rows]
