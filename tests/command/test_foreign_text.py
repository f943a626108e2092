# SPDX-License-Identifier: Apache-2.0
"""Names in models that are made to hurt, and damaged models: the command prints text, and one line for what is wrong."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from tests.command.test_cli import ATTENTION, WINDOW, text

from stof import cli
from stof.graph.index import all_nodes

HOSTILE = "\x1b[31m\nwritten: fake\r\x07\u202e\u2028\x9b"
ESCAPED = r"\x1b[31m\nwritten: fake\r\x07\u202e\u2028\x9b"
Ended = Callable[..., tuple[int, list[str], list[str]]]


def renamed(suffix: str) -> onnx.ModelProto:
    """Attention of which every name ends in a suffix: nodes, tensors, dimensions, the graph."""
    model = text(WINDOW + ATTENTION)
    graph = model.graph
    graph.name += suffix
    model.producer_name = suffix
    model.metadata_props.add(key=f"origin{suffix}", value=suffix)
    for number, node in enumerate(graph.node):
        node.name = f"{node.op_type}{number}{suffix}"
        node.doc_string = suffix
        for field in (node.input, node.output):
            for i, name in enumerate(field):
                field[i] = name + suffix
    for value in (*graph.input, *graph.output):
        value.name += suffix
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.dim_param += suffix
    return model


@pytest.fixture
def ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Ended:
    """Runs the command on a model: its status, and the lines of standard output and standard error, which are text."""

    def run(model: onnx.ModelProto | bytes, *arguments: str) -> tuple[int, list[str], list[str]]:
        path = tmp_path / "model.onnx"
        path.write_bytes(model if isinstance(model, bytes) else model.SerializeToString())
        status = cli.main([str(path), "--json", str(tmp_path / "report.json"), *arguments])
        captured = capsys.readouterr()
        out, err = captured.out.splitlines(), captured.err.splitlines()
        assert all(line.isprintable() for line in (*out, *err)), (out, err)
        assert "Traceback" not in captured.err
        assert (status == 0) == (err == [])
        return status, out, err

    return run


def test_names_of_a_model_are_text_in_everything_that_is_printed(ended: Ended, tmp_path: Path) -> None:
    status, out, _ = ended(renamed(HOSTILE), "--save-plan", str(tmp_path / "plan.json"))
    assert status == 0
    assert out[0].endswith("1 softmax, 1 attention sites replaced")
    # Lines about memory name nodes and dimensions; none of them begins as the line about the file does.
    named = [line for line in out if "written: " in line and ESCAPED in line]
    assert all(line.startswith(("memory: ", "  at its peak, ", "    ")) for line in named)
    assert sum("written: " in line for line in out if line not in named) == 1
    optimized = onnx.load(str(tmp_path / "model.stof.onnx"))
    assert [i.name for i in optimized.graph.input] == [f"{n}{HOSTILE}" for n in "qkv"]
    for file in ("report.json", "plan.json"):
        words = (tmp_path / file).read_text()
        assert words.isascii()
        assert words.replace("\n", "").isprintable()
    (site,) = json.loads((tmp_path / "report.json").read_text())["sites"]
    # What options name a site by stays as it is.
    status, out, _ = ended(renamed(HOSTILE), "--explain", "--skip", site["site"])
    assert status == 0
    assert any(ESCAPED in line for line in out)
    assert any("left out by --skip" in line for line in out)
    assert ended(renamed(HOSTILE), "--dry-run", "--plan", str(tmp_path / "plan.json"))[0] == 0


def test_an_error_quotes_the_names_of_a_model_as_text(ended: Ended) -> None:
    model = renamed(HOSTILE)
    model.graph.node[-1].input[0] = f"none{HOSTILE}"
    status, _, (line,) = ended(model)
    assert status == 3
    assert f"none{ESCAPED}" in line
    long = renamed("n" * 100_000)
    long.graph.node[-1].input[0] = "none"
    status, _, (line,) = ended(long)
    assert status == 3
    assert len(line) < 4000


def foreign_operator(name: str) -> onnx.ModelProto:
    """Attention beside an operator that ONNX Runtime does not have."""
    model = text(WINDOW + ATTENTION)
    model.opset_import.append(helper.make_opsetid("other", 1))
    model.graph.node.append(helper.make_node("Unknown", ["out"], ["more"], name, domain="other"))
    model.graph.output.append(helper.make_tensor_value_info("more", TensorProto.FLOAT, None))
    return model


def test_what_onnx_runtime_says_of_other_nodes_is_text(ended: Ended, tmp_path: Path) -> None:
    """Its messages quote names as they are."""
    status, out, _ = ended(foreign_operator(f"theirs{HOSTILE}"))
    assert status == 0
    (line,) = (line for line in out if line.startswith("verified in part"))
    assert "ONNX Runtime says: " in line
    assert "other" in line
    assert "Unknown" in line
    words = (tmp_path / "report.json").read_text()
    assert words.isascii()
    assert words.replace("\n", "").isprintable()


PLACEHOLDER = "XXXXXXXX"
NO_UTF8 = b"\xff\xfe\x80XXXXX"


def with_placeholder(place: str) -> onnx.ModelProto:
    """A model with a name that stands in one place only."""
    model = text(WINDOW + ATTENTION)
    graph, node = model.graph, model.graph.node[-1]
    function = helper.make_function(
        "lib", "double", ["x"], ["y"], [helper.make_node("Add", ["x", "x"], ["y"])], [helper.make_opsetid("", 18)]
    )
    model.functions.append(function)
    model.opset_import.append(helper.make_opsetid("lib", 1))
    match place:
        case "node.name":
            node.name = PLACEHOLDER
        case "node.op_type":
            node.op_type = PLACEHOLDER
        case "node.domain":
            node.domain = PLACEHOLDER
        case "node.input":
            node.input[1] = PLACEHOLDER
        case "attribute.name":
            node.attribute.append(helper.make_attribute(PLACEHOLDER, 1))
        case "attribute.strings":  # bytes by their type, and allowed
            node.attribute.append(helper.make_attribute("words", [PLACEHOLDER]))
        case "initializer.name":
            graph.initializer.append(helper.make_tensor(PLACEHOLDER, TensorProto.FLOAT, [1], [0.0]))
        case "dim_param":
            graph.input[0].type.tensor_type.shape.dim[2].dim_param = PLACEHOLDER
        case "graph.name":
            graph.name = PLACEHOLDER
        case "metadata":
            model.metadata_props.add(key="origin", value=PLACEHOLDER)
        case "doc_string":
            graph.doc_string = PLACEHOLDER
        case "producer_name":
            model.producer_name = PLACEHOLDER
        case "opset domain":
            model.opset_import.append(helper.make_opsetid(PLACEHOLDER, 1))
        case "function":
            model.functions[0].node[0].name = PLACEHOLDER
        case "external":
            tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[2], data_location=TensorProto.EXTERNAL)
            tensor.external_data.add(key="location", value=PLACEHOLDER)
            graph.initializer.append(tensor)
    return model


@pytest.mark.parametrize(
    ("place", "field"),
    [
        ("node.name", "graph.node[17].name"),
        ("node.op_type", "graph.node[17].op_type"),
        ("node.domain", "graph.node[17].domain"),
        ("node.input", "graph.node[17].input[1]"),
        ("attribute.name", "graph.node[17].attribute[0].name"),
        ("initializer.name", "graph.initializer[0].name"),
        ("dim_param", "graph.input[0].type.tensor_type.shape.dim[2].dim_param"),
        ("graph.name", "graph.name"),
        ("metadata", "metadata_props[0].value"),
        ("doc_string", "graph.doc_string"),
        ("producer_name", "producer_name"),
        ("opset domain", "opset_import[2].domain"),
        ("function", "functions[0].node[0].name"),
        ("external", "graph.initializer[0].external_data[0].value"),
    ],
)
def test_a_name_that_is_not_utf8_is_refused_by_its_place(place: str, field: str, ended: Ended) -> None:
    model = with_placeholder(place)
    assert model.graph.node[17] == model.graph.node[-1]
    status, _, (line,) = ended(model.SerializeToString().replace(PLACEHOLDER.encode(), NO_UTF8))
    assert status == 3
    assert f"{field} is '\\xff\\xfe\\x80XXXXX', which is not UTF-8 text" in line


def test_strings_that_may_be_any_bytes_stay(ended: Ended, tmp_path: Path) -> None:
    """Attributes of text are bytes by their type: those of operators that stof does not read are none of its business."""
    model = with_placeholder("attribute.strings").SerializeToString().replace(PLACEHOLDER.encode(), NO_UTF8)
    assert ended(model, "--no-verify")[0] == 0
    optimized = onnx.load(str(tmp_path / "model.stof.onnx"))
    # The node with the attribute was part of the attention.
    assert "StofAttention" in {n.op_type for n in all_nodes(optimized.graph.node)}


def damaged(data: bytes, seed: int) -> bytes:
    """One or two bytes changed, or a few taken away or put in, which most often breaks the lengths around them."""
    rng = np.random.default_rng(seed)
    found = bytearray(data)
    for _ in range(int(rng.integers(1, 3))):
        at = int(rng.integers(len(found)))
        match int(rng.integers(8)):
            case 0:
                del found[at : at + int(rng.integers(1, 4))]
            case 1:
                found[at:at] = rng.bytes(int(rng.integers(1, 4)))
            case 2 | 3 | 4:
                found[at] = int(rng.integers(256))
            case _:
                found[at] ^= 1 << int(rng.integers(8))
    return bytes(found)


def test_damaged_models_end_with_a_status_and_one_line(ended: Ended) -> None:
    """600 of them; that a model is damaged is never an error of the command itself. (Without ONNX Runtime.)"""
    models = [renamed("").SerializeToString(), foreign_operator("theirs").SerializeToString()]
    statuses: Counter[int] = Counter()
    for seed in range(600):
        status, out, err = ended(damaged(models[seed % 2], seed), "--no-verify")
        assert status in (0, 3), f"seed {seed}: {err}"
        assert len(err) == (status != 0), f"seed {seed}: {err}"
        assert not any("internal error" in line for line in err), f"seed {seed}: {err}"
        assert out or err, f"seed {seed}"
        statuses[status] += 1
    # Both ends are met: damage in a name or a comment leaves a model that can be read.
    assert min(statuses[0], statuses[3]) > 50, statuses
