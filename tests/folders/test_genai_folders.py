# SPDX-License-Identifier: Apache-2.0
"""Folders of ONNX Runtime GenAI: the library in the model folder, its name in the configuration, whose other bytes stay."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.cached_attention.gqa_models import Shape, model_of
from tests.command.test_cli import refused, snapshot
from tests.folders.test_folders import PLAIN, names, outputs, put

import stof
from stof import cli
from stof.api.genai_config import GENAI_CONFIG, read_genai_config
from stof.errors import ArgumentError
from stof.report import describe_registration
from stof.runtime.library import LIBRARY

NO_VERIFY = stof.Options(verify=False)
MANY = 100_000
# As the builder writes it; numbers, escapes and short arrays that a JSON writer would spell otherwise.
BUILT = """{
    "model": {
        "bos_token_id": 1,
        "context_length": 64,
        "decoder": {
            "session_options": {
                "log_id": "onnxruntime-genai",
                "provider_options": [ { "cuda": {} } ]
            },
            "filename": "model.onnx",
            "sliding_window": { "window_size": 64, "slide_inputs": false, "layers": [0, 2] }
        },
        "type": "ll\\u0061ma"
    },
    "search": { "past_present_share_buffer": true, "length_penalty": 1.0, "top_p": 1e-5 }
}"""


def folder(path: Path, config: str | dict[str, Any], *models: str, plain: tuple[str, ...] = ()) -> Path:
    """A folder with a configuration, models with attention, and models without."""
    for model in models:
        put(path / model)
    for model in plain:
        put(path / model, PLAIN)
    path.mkdir(exist_ok=True)
    (path / GENAI_CONFIG).write_text(config if isinstance(config, str) else json.dumps(config, indent=1))
    return path


def config_of(path: Path) -> dict[str, Any]:
    found = json.loads((path / GENAI_CONFIG).read_text())
    assert isinstance(found, dict)
    return found


def test_the_library_is_named_and_every_other_byte_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = folder(tmp_path / "in", BUILT, "model.onnx"), tmp_path / "out"
    (source / GENAI_CONFIG).chmod(0o640)
    before = snapshot(source)
    assert cli.main([str(source), "-o", str(target), "--no-verify", "--json", str(tmp_path / "report.json")]) == 0
    assert snapshot(source) == before
    first = '"log_id": "onnxruntime-genai"'
    line = f'"custom_ops_library": "{LIBRARY}",\n                '
    assert (target / GENAI_CONFIG).read_text() == BUILT.replace(first, line + first)
    assert (target / GENAI_CONFIG).stat().st_mode & 0o777 == 0o640
    assert names(target) == names(source) | {LIBRARY}
    assert (target / LIBRARY).read_bytes() == stof.library_path().read_bytes()
    lines = capsys.readouterr().out.splitlines()
    assert f"{LIBRARY}: copied; onnxruntime_genai loads it by itself" in lines
    key = "model.decoder.session_options.custom_ops_library"
    assert f"{GENAI_CONFIG}: {key} is set" in lines
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["libraries"], report["registrations"]) == ([LIBRARY], {GENAI_CONFIG: [key]})


def test_explain_lists_caches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = folder(tmp_path / "in", BUILT, "encoder.onnx")
    onnx.save(model_of(Shape(), Shape(other={"causal": 0}), masks=True), source / "model.onnx")
    kept = "cache 1  layer1/node\n  stopped: causal is 0"
    assert cli.main([str(source), "--explain"]) == 0
    out = capsys.readouterr().out
    assert "\nencoder.onnx:\nsite 0  attention_0\n" in out
    assert "\nmodel.onnx:\ncache 0  layer0/node\n  match  4 heads on 2, D = 16" in out
    assert kept in out
    assert cli.main([str(source), "--explain", "cache:*1*"]) == 0
    out = capsys.readouterr().out
    assert f"\nmodel.onnx:\n{kept}" in out
    assert "cache 0" not in out
    assert "\nencoder.onnx:\n" not in out


def test_fp8_caches_need_no_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Kind: --no-verify must not be needed for fp8 caches, for which ONNX Runtime's CPU provider has no kernel."""
    source, target, report = folder(tmp_path / "in", BUILT), tmp_path / "out", tmp_path / "report.json"
    onnx.save(model_of(Shape(cache="float8", dtype="float16"), masks=True), source / "model.onnx")
    assert cli.main([str(source), "-o", str(target), "--json", str(report)]) == 0
    out = capsys.readouterr().out
    (line,) = [line for line in out.splitlines() if line.startswith("model.onnx: ")]
    assert "verified in part" in line
    found = json.loads(report.read_text())["files"]["model.onnx"]
    assert found["verification"]["partial"]["left_out"] == {"com.microsoft::GroupQueryAttention": 1}
    assert [c["site"] for c in found["verification"]["comparisons"]] == ["node"]
    assert [n.op_type for n in onnx.load(target / "model.onnx").graph.node].count("StofCachedAttention") == 1
    assert config_of(target)["model"]["decoder"]["session_options"]["custom_ops_library"] == LIBRARY


def test_without_operators_there_is_no_library(tmp_path: Path) -> None:
    source = folder(tmp_path / "in", BUILT, plain=("model.onnx",))
    report = stof.optimize_folder(source, tmp_path / "out", NO_VERIFY)
    assert names(tmp_path / "out") == names(source)
    assert (tmp_path / "out" / GENAI_CONFIG).read_text() == BUILT
    assert (report.libraries, report.registrations) == ([], {})


@pytest.mark.parametrize(
    ("model", "keys"),
    [
        ({"decoder": {"filename": "a.onnx"}}, ["decoder"]),
        ({"decoder": {"filename": "a.onnx", "session_options": {}}}, ["decoder"]),
        ({"decoder": {"filename": "a.onnx", "session_options": {"custom_ops_library": ""}}}, ["decoder"]),
        ({"decoder": {"filename": "plain.onnx"}, "encoder": {"filename": "a.onnx"}}, ["decoder"]),
        ({"encoder": {"filename": "a.onnx"}}, ["decoder"]),
        ({"decoder": {}, "vision": {"filename": "sub/b.onnx", "session_options": {"log_id": "x"}}}, ["vision"]),
        (
            {
                "decoder": {"filename": "./a.onnx", "session_options": {"log_id": "x"}},
                "embedding": {"filename": "sub/../a.onnx", "session_options": {"log_id": "y"}},
                "speech": {"filename": "plain.onnx", "session_options": {"log_id": "z"}},
            },
            ["decoder", "embedding"],
        ),
        ({"draft": {"filename": "a.onnx"}, "decoder": {"filename": "plain.onnx"}}, ["draft"]),
        (
            {
                "decoder": {
                    "pipeline": [
                        {"first": {"filename": "a.onnx", "session_options": {"log_id": "x"}}},
                        {"second.2": {"filename": "sub/b.onnx", "session_options": {"log_id": "x"}}},
                        {"third": {"filename": "plain.onnx", "session_options": {"log_id": "x"}}},
                    ]
                }
            },
            ["decoder.pipeline[0].first", "decoder.pipeline[1].second.2"],
        ),
        ({"decoder": {"pipeline": {"first": {"filename": "a.onnx"}}}}, ["decoder"]),
    ],
)
def test_sessions_register_the_library_where_their_options_are(
    model: dict[str, Any], keys: list[str], tmp_path: Path
) -> None:
    """Sessions without options take the decoder's, but for a draft model."""
    source = folder(tmp_path / "in", {"model": model, "search": {}}, "a.onnx", "sub/b.onnx", plain=("plain.onnx",))
    report = stof.optimize_folder(source, tmp_path / "out", NO_VERIFY)
    expected = [f"model.{key}.session_options.custom_ops_library" for key in keys]
    assert report.registrations == {GENAI_CONFIG: tuple(expected)}
    found = config_of(tmp_path / "out")
    (again,) = {id(found): read_genai_config(tmp_path / "out" / GENAI_CONFIG)}.values()
    holders = {Path("a.onnx"), Path("sub/b.onnx")}
    assert {s.library for s in again.sessions if s.model in holders} == {LIBRARY}

    def without(value: Any) -> Any:
        if isinstance(value, dict):
            kept = {k: without(v) for k, v in value.items() if k != "custom_ops_library"}
            return {k: v for k, v in kept.items() if v != {}}
        return [without(v) for v in value] if isinstance(value, list) else value

    assert without(found) == without({"model": model, "search": {}})
    assert list(found) == ["model", "search"]


@pytest.mark.parametrize("indent", [None, 2, "\t"])
def test_the_written_configuration_keeps_its_form(indent: int | str | None, tmp_path: Path) -> None:
    data = {"model": {"decoder": {"session_options": {"log_id": "ü"}, "filename": "model.onnx"}}}
    text = json.dumps(data, indent=indent, ensure_ascii=False).replace("\n", "\r\n")
    stof.optimize_folder(folder(tmp_path / "in", text, "model.onnx"), tmp_path / "out", NO_VERIFY)
    data["model"]["decoder"]["session_options"] = {"custom_ops_library": LIBRARY, "log_id": "ü"}
    written = json.dumps(data, indent=indent, ensure_ascii=False).replace("\n", "\r\n")
    expected = written if indent else written.replace(f'"{LIBRARY}", ', f'"{LIBRARY}",')
    assert (tmp_path / "out" / GENAI_CONFIG).read_bytes().decode() == expected


def test_folders_of_configurations_get_a_library_each(tmp_path: Path) -> None:
    source = tmp_path / "in"
    for name in ("cpu", "cuda"):
        folder(source / name, BUILT, "model.onnx")
    put(source / "onnx" / "model.onnx")
    report = stof.optimize_folder(source, tmp_path / "out", NO_VERIFY)
    assert report.libraries == [f"{n}/{LIBRARY}" for n in ("cpu", "cuda", "onnx")]
    assert set(report.registrations) == {f"{n}/{GENAI_CONFIG}" for n in ("cpu", "cuda")}
    text = report.to_text()
    words = describe_registration(str(tmp_path / "out" / "onnx" / LIBRARY))
    assert f"onnx/{LIBRARY}: copied; {words}" in text.splitlines()


def test_a_copied_library_is_one_that_sessions_can_register(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = put(tmp_path / "in" / "model.onnx").parent
    stof.optimize_folder(source, tmp_path / "out", NO_VERIFY)
    expected = outputs(source / "model.onnx")
    monkeypatch.setenv("STOF_LIBRARY", str(tmp_path / "out" / LIBRARY))
    assert abs(outputs(tmp_path / "out" / "model.onnx") - expected).max() < 1e-4


def test_an_optimized_folder_is_optimized_again(tmp_path: Path) -> None:
    """Its library becomes today's; its configuration stays."""
    source = folder(tmp_path / "in", BUILT, "model.onnx")
    stof.optimize_folder(source, tmp_path / "once", NO_VERIFY)
    (tmp_path / "once" / LIBRARY).write_bytes(b"an old one")
    report = stof.optimize_folder(tmp_path / "once", tmp_path / "twice", NO_VERIFY)
    assert names(tmp_path / "twice") == names(tmp_path / "once")
    assert (tmp_path / "twice" / LIBRARY).read_bytes() == stof.library_path().read_bytes()
    assert LIBRARY not in report.others
    once, twice = ((tmp_path / n / GENAI_CONFIG).read_text() for n in ("once", "twice"))
    assert once == twice


def test_sessions_on_a_gpu_are_told_what_is_missing(tmp_path: Path) -> None:
    source = folder(tmp_path / "in", BUILT, "model.onnx")
    where = f"{GENAI_CONFIG}: model.decoder.session_options names the provider cuda"
    for target, is_noted in (("cpu", True), ("cuda", False)):
        options = stof.Options(verify=False, target=target)
        notes = stof.optimize_folder(source, tmp_path / target, options).notes
        assert (f"{where}; --target cuda makes the choices for a GPU" in notes) == is_noted
        lacks = [n for n in notes if n.startswith(f"{where}, and the library has no CUDA kernels, which are ")]
        assert len(lacks) == ("cuda" not in stof.build_info()["backends"])
    text = BUILT.replace('[ { "cuda": {} } ]', '"cuda"')
    assert stof.optimize_folder(folder(tmp_path / "other", text, "model.onnx"), tmp_path / "new", NO_VERIFY).notes == []


def test_files_that_are_not_there_are_noted(tmp_path: Path) -> None:
    model = {"decoder": {"filename": "model.onnx"}, "vision": {"filename": "vision.onnx"}}
    source = folder(tmp_path / "in", {"model": model}, "model.onnx")
    report = stof.optimize_folder(source, tmp_path / "out", NO_VERIFY)
    note = f"{GENAI_CONFIG}: model.vision.filename is 'vision.onnx', which is not in the folder"
    assert report.notes == [note]
    assert f"note: {note}" in report.to_text().splitlines()


def test_a_library_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    source = folder(tmp_path / "in", BUILT, "model.onnx")
    (source / LIBRARY).mkdir()
    (source / LIBRARY / "file").write_text("x")
    with pytest.raises(ArgumentError, match="cannot be written: Is a directory"):
        stof.optimize_folder(source, tmp_path / "out", NO_VERIFY)
    assert {p.name for p in tmp_path.iterdir() if p.name != "own-cache"} == {"in"}


@pytest.mark.parametrize("name", [LIBRARY, GENAI_CONFIG])
def test_weights_are_not_written_over(name: str, tmp_path: Path) -> None:
    """Sessions would read the bytes of what is written as weights: ONNX Runtime checks sizes alone."""
    source = folder(tmp_path / "in", BUILT, "model.onnx")
    put(source / "model.onnx", data="weights")
    weights = (source / "weights").read_bytes()
    (source / "weights").unlink()
    model = onnx.load(source / "model.onnx", load_external_data=False)
    # Behind the configuration's text, spaces are weights, too.
    (source / name).write_bytes(BUILT.encode().ljust(len(weights)) if name == GENAI_CONFIG else weights)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            entry.value = name if entry.key == "location" else entry.value
    onnx.save(model, source / "model.onnx")
    with pytest.raises(ArgumentError, match=re.escape(f"the weights of model.onnx are in {name}, where ")):
        stof.optimize_folder(source, tmp_path / "out", NO_VERIFY)
    assert {p.name for p in tmp_path.iterdir() if p.name != "own-cache"} == {"in"}


def test_a_model_of_a_long_name_is_noted(tmp_path: Path) -> None:
    source = folder(tmp_path / "in", {"model": {"decoder": {"filename": "x" * 300}}}, "model.onnx")
    report = stof.optimize_folder(source, tmp_path / "out", NO_VERIFY)
    assert report.notes == [f"{GENAI_CONFIG}: model.decoder.filename is '{'x' * 300}', which is not in the folder"]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("{", "is no JSON"),
        ('{"model": {}, "model": {}}', "is no JSON: field 'model' twice"),
        ('{"a":' * MANY, "is no JSON"),
        ("\xff", "genai_config.json is no JSON"),
        ("[]", ": the file is an array, expected an object"),
        ({"model": 3}, ": model is a number, expected an object"),
        ({"model": {"decoder": {"filename": 3}}}, ": model.decoder.filename is a number, expected the name"),
        ({"model": {"decoder": {"filename": ""}}}, ": model.decoder.filename is '', expected the name"),
        ({"model": {"decoder": {"filename": "a\0"}}}, ": model.decoder.filename is 'a\\x00', expected the name"),
        (
            {"model": {"decoder": {"filename": "../m.onnx"}}},
            ": model.decoder.filename is '../m.onnx', which is no file",
        ),
        (
            {"model": {"decoder": {"filename": "a/../../m"}}},
            ": model.decoder.filename is 'a/../../m', which is no file",
        ),
        ({"model": {"decoder": {"filename": "/etc/passwd"}}}, "is '/etc/passwd', which is no file in its folder"),
        ({"model": {"decoder": {"filename": "C:\\m.onnx"}}}, "which is no file in its folder"),
        ({"model": {"decoder": {"filename": "."}}}, ": model.decoder.filename is '.', which is no file"),
        ({"model": {"decoder": {"pipeline": [3]}}}, ": model.decoder.pipeline[0] is a number, expected an object"),
        (
            {"model": {"decoder": {"filename": "model.onnx", "session_options": None}}},
            ": model.decoder.session_options is null, expected an object",
        ),
        (
            {"model": {"decoder": [], "encoder": {"filename": "model.onnx"}}},
            ": model.decoder is an array, expected an object",
        ),
        (
            {"model": {"decoder": {"filename": "model.onnx", "session_options": {"custom_ops_library": ["x"]}}}},
            ": model.decoder.session_options.custom_ops_library is an array, expected a string",
        ),
        (
            {"model": {"decoder": {"filename": "model.onnx", "session_options": {"custom_ops_library": "../x.so"}}}},
            ": model.decoder.session_options.custom_ops_library is '../x.so'; model.onnx needs",
        ),
        ('{"model":' + '{"a":' * 200 + "1" + "}" * 201, ": model.a.a.a is nested more than 64 deep"),
    ],
)
def test_configurations_that_are_refused(
    config: str | dict[str, Any], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = folder(tmp_path / "in", config, "model.onnx")
    refused([source, "-o", tmp_path / "out", "--no-verify"], 1, words, tmp_path, capsys)
    assert not (tmp_path / "out").exists()


def test_hostile_keys_reach_no_terminal(tmp_path: Path) -> None:
    source = folder(tmp_path / "in", {"model": {"\x1b[2J": {"filename": 1}}}, "model.onnx")
    with pytest.raises(ArgumentError) as caught:
        stof.optimize_folder(source, tmp_path / "out", NO_VERIFY)
    assert "\x1b" not in str(caught.value)


NAMES = st.sampled_from(
    ["model", "decoder", "draft", "pipeline", "vision", "filename", "session_options", "custom_ops_library", '"é\n']
)
LEAVES = st.none() | st.booleans() | st.integers() | st.sampled_from(["a.onnx", "../a.onnx", "", LIBRARY, "\\ü]}"])
TREES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=5), max_leaves=25
)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(model=st.dictionaries(NAMES, TREES, max_size=5), indent=st.sampled_from([None, 0, 3]))
def test_whatever_a_configuration_holds_is_read_or_refused(
    model: dict[str, Any], indent: int | None, tmp_path: Path
) -> None:
    data = {"model": {**model, "speech": {"filename": "a.onnx"}}, "search": [{}, [], "}"]}
    refusal = ""
    (tmp_path / GENAI_CONFIG).write_text(json.dumps(data, indent=indent, ensure_ascii=False))
    try:
        config = read_genai_config(tmp_path / GENAI_CONFIG)
        text, keys = config.add_library({Path("a.onnx")}, LIBRARY)
    except ArgumentError as error:
        refusal = str(error)
    if refusal:
        assert GENAI_CONFIG in refusal
        return
    (tmp_path / GENAI_CONFIG).write_text(text)
    written = read_genai_config(tmp_path / GENAI_CONFIG)
    assert {s.library for s in written.sessions if s.model == Path("a.onnx")} == {LIBRARY}
    assert [(s.key, s.model, s.options) for s in written.sessions] == [
        (s.key, s.model, s.options) for s in config.sessions
    ]
    assert keys
    assert json.loads(text)["search"] == data["search"]
    assert written.add_library({Path("a.onnx")}, LIBRARY) == (text, keys)


# ---- the runtime itself ----
def test_the_runtime_loads_the_library_by_itself(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime_genai")
    text = BUILT.replace('[ { "cuda": {} } ]', "[]").replace("\\u0061", "a")
    source = folder(tmp_path / "in", text, "model.onnx")
    stof.optimize_folder(source, tmp_path / "out", NO_VERIFY)
    script = "import sys, onnxruntime_genai; onnxruntime_genai.Model(sys.argv[1])"
    run = [sys.executable, "-c", script, str(tmp_path / "out")]  # a library that was loaded once stays in its process
    assert subprocess.run(run, cwd=tmp_path, check=False).returncode == 0
    (tmp_path / "out" / LIBRARY).unlink()
    without = subprocess.run(run, cwd=tmp_path, check=False, capture_output=True, text=True)
    assert without.returncode != 0
    assert LIBRARY in without.stderr
