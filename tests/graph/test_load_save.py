# SPDX-License-Identifier: Apache-2.0
"""Loading refuses broken files with a reason; saving writes a whole file or none."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from attention_forms import PLAIN, model
from onnx import TensorProto, helper, numpy_helper

from stof.errors import ArgumentError, ModelError
from stof.graph.index import GraphIndex
from stof.graph.load_save import load, save

BODY = "%kt\ns1 = MatMul (q, kt)\np = Softmax (s1)\nout = MatMul (p, v)"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A model with external data in a folder of its own."""
    graph = model("float[B,S,32] x", "float[B,S,32] out", "out = MatMul (x, w)")
    w = np.random.default_rng(0).standard_normal((32, 32)).astype(np.float32)
    graph.graph.initializer.append(numpy_helper.from_array(w, "w"))
    folder = tmp_path / "in"
    folder.mkdir()
    path = folder / "model.onnx"
    onnx.save(graph, str(path), save_as_external_data=True, location="model.onnx.data", size_threshold=0)
    return path


def written(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "bad.onnx"
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    "data", [b"", b"PK\x03\x04 no model", b"\x00" * 64, b'{"a": 1}', np.random.default_rng(1).bytes(512)]
)
def test_no_onnx_file(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(ModelError, match=r"bad\.onnx is no ONNX model"):
        load(written(tmp_path, data))


def test_every_truncation_is_reported(tmp_path: Path) -> None:
    graph = model(PLAIN, "float[a,b,c,d] out", BODY)
    del graph.opset_import[1]
    data = graph.SerializeToString()
    for end in range(0, len(data) - 1, 3):
        with pytest.raises(ModelError):
            load(written(tmp_path, data[:end]))
    assert load(written(tmp_path, data)) == graph


def test_no_file_and_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="does not exist"):
        load(tmp_path / "none.onnx")
    with pytest.raises(ArgumentError, match="is a folder"):
        load(tmp_path)


@pytest.mark.parametrize("opset", [1, 6, 27])
def test_opsets_out_of_range(tmp_path: Path, opset: int) -> None:
    graph = model(PLAIN, "float[a,b,c,d] out", BODY)
    graph.opset_import[0].version = opset
    with pytest.raises(ModelError, match=f"has opset {opset}, expected 7 to 26"):
        load(written(tmp_path, graph.SerializeToString()))


def test_domains_and_edges(tmp_path: Path) -> None:
    good = model(PLAIN, "float[a,b,c,d] out", BODY)

    def changed(index: int, **fields: object) -> Path:
        graph = onnx.ModelProto()
        graph.CopyFrom(good)
        node = graph.graph.node[index]
        for name, value in fields.items():
            if isinstance(value, list):
                del getattr(node, name)[:]
                getattr(node, name).extend(value)
            else:
                setattr(node, name, value)
        return written(tmp_path, graph.SerializeToString())

    with pytest.raises(ModelError, match=r"is of domain 'org\.other', which the model does not import"):
        load(changed(1, domain="org.other", name="mine"))
    with pytest.raises(ModelError, match="MatMul node 'mine' reads 'nothing', which nothing writes"):
        load(changed(1, input=["q", "nothing"], name="mine"))
    with pytest.raises(ModelError, match="writes 'p', which is written already"):
        load(changed(3, output=["p"]))
    with pytest.raises(ModelError, match="output 'out' is written by no node"):
        load(changed(3, output=["other"]))
    with pytest.raises(ModelError, match="cycle"):
        load(changed(0, input=["out"]))
    empty = onnx.ModelProto()
    empty.CopyFrom(good)
    del empty.graph.node[:]
    with pytest.raises(ModelError, match="without nodes"):
        load(written(tmp_path, empty.SerializeToString()))
    only_ml = onnx.ModelProto()
    only_ml.CopyFrom(good)
    only_ml.opset_import[0].domain = "ai.onnx.ml"
    with pytest.raises(ModelError, match="no opset of the standard domain"):
        load(written(tmp_path, only_ml.SerializeToString()))


def test_nodes_and_constants_that_contradict_themselves(tmp_path: Path) -> None:
    good = model(PLAIN, "float[a,b,c,d] out", BODY)

    def refused(words: str, change: Callable[[onnx.GraphProto], object]) -> None:
        graph = onnx.ModelProto()
        graph.CopyFrom(good)
        change(graph.graph)
        with pytest.raises(ModelError, match=words):
            load(written(tmp_path, graph.SerializeToString()))

    refused("has 1 inputs, but MatMul of opset 18 has 2", lambda g: g.node[1].input.pop())
    refused("has 2 outputs, but Softmax of opset 18 has 1", lambda g: g.node[2].output.append("more"))
    refused("has no attribute 'to', which Cast needs", lambda g: g.node.append(helper.make_node("Cast", ["q"], ["c"])))
    weight = numpy_helper.from_array(np.zeros((2, 3), np.float32), "w")
    weight.dims[0] = 4
    refused(r"'w' of shape \[4, 3\] holds 6 elements, expected 12", lambda g: g.initializer.append(weight))
    half = helper.make_tensor("w", TensorProto.FLOAT16, [3], [1.0, 2.0, 3.0])
    half.dims[0] = -1
    refused(r"'w' has shape \[-1\]", lambda g: g.initializer.append(half))
    half.dims[0] = 3
    good.graph.initializer.append(half)
    assert load(written(tmp_path, good.SerializeToString())) == good


def test_nodes_out_of_order_are_sorted(tmp_path: Path) -> None:
    good = model(PLAIN, "float[a,b,c,d] out", BODY)
    mixed = onnx.ModelProto()
    mixed.CopyFrom(good)
    del mixed.graph.node[:]
    mixed.graph.node.extend([good.graph.node[i] for i in (3, 0, 2, 1)])
    assert load(written(tmp_path, mixed.SerializeToString())) == good


def test_external_data_is_not_read_but_checked(source: Path) -> None:
    loaded = load(source)
    assert loaded.graph.initializer[0].data_location == TensorProto.EXTERNAL
    assert not loaded.graph.initializer[0].raw_data
    data = source.with_name("model.onnx.data")
    whole = data.read_bytes()
    data.write_bytes(whole[:-1])
    with pytest.raises(ModelError, match=r"has 4095 bytes, but constant 'w' ends at 4096; the file is truncated"):
        load(source)
    data.unlink()
    with pytest.raises(ModelError, match=r"'model.onnx.data' of constant 'w' is missing"):
        load(source)


@pytest.mark.parametrize(("key", "value"), [("offset", "-8"), ("length", "-1"), ("offset", "eight")])
def test_external_data_of_no_place_is_refused(key: str, value: str, source: Path) -> None:
    loaded = onnx.load(str(source), load_external_data=False)
    data = loaded.graph.initializer[0].external_data
    for entry in [e for e in data if e.key == key]:
        data.remove(entry)
    data.add(key=key, value=value)
    source.write_bytes(loaded.SerializeToString())
    with pytest.raises(ModelError, match="constant 'w' cannot be found: its offset or length is malformed"):
        load(source)


def test_external_data_elsewhere_is_refused(source: Path) -> None:
    loaded = onnx.load(str(source), load_external_data=False)
    for location in ("../model.onnx.data", "/etc/passwd", ""):
        for entry in loaded.graph.initializer[0].external_data:
            if entry.key == "location":
                entry.value = location
        source.write_bytes(loaded.SerializeToString())
        with pytest.raises(ModelError, match="outside its folder"):
            load(source)


def test_save_beside_the_input_keeps_the_data_where_it_is(source: Path) -> None:
    loaded = load(source)
    target = source.with_name("model.stof.onnx")
    save(loaded, target, source)
    assert sorted(p.name for p in source.parent.iterdir()) == ["model.onnx", "model.onnx.data", "model.stof.onnx"]
    assert target.stat().st_size < 1000
    assert onnx.load(str(target)) == onnx.load(str(source))


def test_save_into_another_folder_brings_the_data(source: Path, tmp_path: Path) -> None:
    other = tmp_path / "out"
    other.mkdir()
    save(load(source), other / "m.onnx", source)
    assert sorted(p.name for p in other.iterdir()) == ["m.onnx", "model.onnx.data"]
    assert onnx.load(str(other / "m.onnx")) == onnx.load(str(source))
    save(load(source), other / "m.onnx", source)  # the same data lies there already
    data = other / "model.onnx.data"
    stale = bytearray(data.read_bytes())
    stale[5] ^= 1
    data.write_bytes(bytes(stale))
    with pytest.raises(ArgumentError, match="exists and differs"):
        save(load(source), other / "m2.onnx", source)
    assert not (other / "m2.onnx").exists()
    assert data.read_bytes() == bytes(stale)


def test_save_never_loses_anything(source: Path, tmp_path: Path) -> None:
    loaded = load(source)
    before = source.read_bytes()
    with pytest.raises(ArgumentError, match="is the input"):
        save(loaded, source, source)
    link = source.with_name("link.onnx")
    link.symlink_to(source)
    with pytest.raises(ArgumentError, match="is the input"):
        save(loaded, link, source)
    with pytest.raises(ArgumentError, match="is a folder"):
        save(loaded, tmp_path, source)
    with pytest.raises(ArgumentError, match="does not exist"):
        save(loaded, tmp_path / "none" / "m.onnx", source)
    assert source.read_bytes() == before


def test_a_failing_write_leaves_nothing(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "out"
    other.mkdir()
    old = other / "m.onnx"
    old.write_bytes(b"before")
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(ArgumentError, match=r"external data .* cannot be copied to .*: No space left on device"):
        save(load(source), old, source)
    assert [p.name for p in other.iterdir()] == ["m.onnx"]
    assert old.read_bytes() == b"before"


def test_index_knows_subgraphs() -> None:
    inner = helper.make_graph(
        [helper.make_node("Neg", ["outer"], ["n"])], "g", [], [helper.make_tensor_value_info("n", 1, None)]
    )
    direct = helper.make_graph([], "h", [], [helper.make_tensor_value_info("given", 1, None)])
    node = helper.make_node("If", ["c"], ["y"], then_branch=inner, else_branch=direct)
    index = GraphIndex(helper.make_graph([node], "top", [], []))
    assert {"outer", "given"} <= index.captured
    assert index.producer("y") is not None
    assert [n.op_type for n in index.consumers("c")] == ["If"]
