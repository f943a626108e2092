# SPDX-License-Identifier: Apache-2.0
"""External data of every kind of tensor is found, checked and copied; hostile locations and file names are refused."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

import stof
from stof import cli
from stof.errors import ModelError
from stof.graph import external_data
from stof.graph.external_data import external_files
from stof.graph.load_save import load, save

ATTENTION = """
    at2 = Constant <value = int64 {2}> ()
    zero = Constant <value = int64 {0}> ()
    one = Constant <value = int64 {1}> ()
    shape = Shape (q)
    s = Gather (shape, at2)
    columns = Range (zero, s, one)
    last = Constant <value = int64[1] {1}> ()
    rows = Unsqueeze (columns, last)
    distance = Sub (rows, columns)
    far = Abs (distance)
    w = Less (far, width)
    kt = Transpose <perm = [0, 1, 3, 2]> (k)
    s1 = MatMul (q, kt)
    low = Constant <value = float {-inf}> ()
    s2 = Where (w, s1, low)
    p = Softmax (s2)
    out = MatMul (p, v)"""
WIDTH = "width = Constant <value = int64 {5}> ()"


def placed(name: str, shape: tuple[int, ...], kind: int = TensorProto.FLOAT, **entries: object) -> TensorProto:
    """A tensor whose data lies in ``<name>.bin``, unless told otherwise."""
    tensor = TensorProto(name=name, data_type=kind, dims=shape, data_location=TensorProto.EXTERNAL)
    for key, value in ({"location": f"{name}.bin"} | entries).items():
        tensor.external_data.add(key=key, value=str(value))
    return tensor


def windowed(*constants: TensorProto, width: str = WIDTH, projected: bool = True) -> onnx.ModelProto:
    """Windowed attention, of which a weight may take the output."""
    result = "out" if not projected else "y"
    model = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 18]>
        g (float[1,4,S,8] q, float[1,4,S,8] k, float[1,4,S,8] v) => (float[a,b,c,d] {result}) {{
            {width}{ATTENTION}
            {"y = MatMul (out, weight)" if projected else ""}
        }}"""
    )
    model.graph.initializer.extend(constants)
    return model


def weighted(folder: Path, model: onnx.ModelProto | None = None, **entries: object) -> Path:
    """The model with its weight of 2 KB in a file."""
    folder.mkdir(exist_ok=True)
    path = folder / "m.onnx"
    path.write_bytes((model or windowed(placed("weight", (8, 64), **entries))).SerializeToString())
    (folder / "weight.bin").write_bytes(np.random.default_rng(0).standard_normal((8, 64)).astype(np.float32).tobytes())
    return path


def results(path: Path | bytes) -> list[np.ndarray]:
    options = ort.SessionOptions()
    stof.register(options)
    session = ort.InferenceSession(path if isinstance(path, bytes) else str(path), options, ["CPUExecutionProvider"])
    feeds = {n: np.random.default_rng(1).standard_normal((1, 4, 40, 8)).astype(np.float32) for n in "qkv"}
    found: list[np.ndarray] = session.run(None, feeds)
    return found


def sparse(values: TensorProto, indices: TensorProto, *dims: int) -> onnx.SparseTensorProto:
    return onnx.SparseTensorProto(values=values, indices=indices, dims=dims)


def everywhere() -> tuple[onnx.ModelProto, set[str]]:
    """A model with external tensors in every place that a model has for tensors, and their names."""
    found: set[str] = set()

    def new() -> TensorProto:
        found.add(f"t{len(found)}")
        return placed(f"t{len(found) - 1}", (2,), length=8)

    def nodes() -> list[onnx.NodeProto]:
        dense = helper.make_node("Constant", [], [f"dense{len(found)}"], value=new())
        values = helper.make_node("Constant", [], [f"values{len(found)}"], sparse_value=sparse(new(), new(), 8))
        other = helper.make_node("Other", [], [f"other{len(found)}"], domain="own", a=[new(), new()])
        other.attribute.append(onnx.AttributeProto(name="b", type=onnx.AttributeProto.SPARSE_TENSORS))
        other.attribute[-1].sparse_tensors.append(sparse(new(), new(), 8))
        other.attribute.append(onnx.AttributeProto(name="untyped", t=new()))
        return [dense, values, other]

    def graph(*more: onnx.NodeProto) -> onnx.GraphProto:
        return helper.make_graph([*nodes(), *more], "g", [], [], [new()], sparse_initializer=[sparse(new(), new(), 8)])

    branching = helper.make_node("If", ["yes"], ["chosen"], then_branch=graph(), else_branch=graph())
    listed = helper.make_node("Several", [], ["several"], domain="own", graphs=[graph(), graph()])
    model = helper.make_model(graph(branching, listed), ir_version=9, opset_imports=[helper.make_opsetid("", 18)])
    model.opset_import.append(helper.make_opsetid("own", 1))
    model.graph.input.append(helper.make_tensor_value_info("yes", TensorProto.BOOL, []))
    function = helper.make_function("own", "f", [], ["chosen"], [*nodes(), branching], list(model.opset_import))
    function.attribute_proto.append(onnx.AttributeProto(name="default", type=onnx.AttributeProto.TENSOR, t=new()))
    model.functions.append(function)
    training = model.training_info.add()
    training.initialization.CopyFrom(graph())
    training.algorithm.CopyFrom(graph())
    return model, found


def test_external_data_is_found_wherever_a_tensor_may_be(tmp_path: Path) -> None:
    model, names = everywhere()
    assert len(names) > 80
    assert external_files(model) == {f"{n}.bin" for n in names}
    path = tmp_path / "m.onnx"
    path.write_bytes(model.SerializeToString())
    for name in names:
        (tmp_path / f"{name}.bin").write_bytes(bytes(8))
    load(path)
    for name in names:
        file = tmp_path / f"{name}.bin"
        file.write_bytes(bytes(7))
        with pytest.raises(ModelError, match=f"{name}.bin' has 7 bytes, but constant '{name}' ends at 8"):
            load(path)
        file.write_bytes(bytes(8))


@pytest.mark.parametrize(
    ("location", "words"),
    [
        ("", "outside its folder"),
        (".", "outside its folder"),
        ("../w.bin", "outside its folder"),
        ("/dev/zero", "outside its folder"),
        ("none.bin", "is missing; put it beside the model"),
        ("m.onnx/x", "is missing"),
        ("pipe", "cannot be read: a device or a pipe"),
        ("zero", "cannot be read: a device or a pipe"),
        ("folder", "cannot be read: Is a directory"),
        ("cycle", "symbolic links"),
        ("a\0b", "null byte"),
        ("a" * 5000, "(5000 characters) of constant 'weight' cannot be read: File name too long"),
    ],
)
def test_places_where_no_data_can_be(
    location: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = weighted(tmp_path, location=location)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "cycle").symlink_to("cycle")
    (tmp_path / "zero").symlink_to("/dev/zero")
    assert cli.main([str(path)]) == 3
    message = capsys.readouterr().err
    assert words in message
    assert message.count("\n") == 1
    assert len(message) < 600


def test_a_location_that_is_no_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = weighted(tmp_path, location="XXXX")
    path.write_bytes(path.read_bytes().replace(b"XXXX", b"\xff\xfeXX"))
    assert cli.main([str(path)]) == 3
    assert (
        "graph.initializer[0].external_data[0].value is '\\xff\\xfeXX', which is not UTF-8 text"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"offset": -1}, "its offset or length is malformed"),
        ({"offset": "1_0"}, "its offset or length is malformed"),
        ({"length": "9" * 5000}, "its offset or length is malformed"),
        ({"offset": 4}, "has 2048 bytes, but constant 'weight' ends at 2052"),
        ({"length": 2049}, "has 2048 bytes, but constant 'weight' ends at 2049"),
        ({"length": 2047}, "of shape [8, 64] needs 2048 bytes, but its external data has length 2047"),
    ],
)
def test_data_that_is_not_where_it_should_be(
    entries: dict[str, object], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([str(weighted(tmp_path, **entries))]) == 3
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("model", ["/dev/zero", "pipe", "large"])
def test_what_is_no_model_is_not_read(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "large").open("wb") as file:
        file.truncate(1 << 40)
    assert cli.main([str(tmp_path / model)]) == (3 if model == "large" else 1)
    words = f"has {1 << 40} bytes, expected an .onnx file" if model == "large" else "a device or a pipe"
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("where", ["function", "graph", "branch"])
@pytest.mark.parametrize("read", [True, False])
def test_constants_are_read_beside_the_model_only(
    where: str, read: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another file of the same name lies in the working directory. ``read``: or the constant is too large to be read."""
    model = windowed(width="", projected=False)
    width = helper.make_node("Constant", [], ["width"], value=placed("width", (), TensorProto.INT64))
    if where == "graph":
        model.graph.node.insert(0, width)
    elif where == "branch":
        outputs = [helper.make_tensor_value_info("width", TensorProto.INT64, [])]
        branch = helper.make_graph([width], "b", [], outputs)
        yes = helper.make_node("Constant", [], ["yes"], value=numpy_helper.from_array(np.array(True)))
        choice = helper.make_node("If", ["yes"], ["width"], then_branch=branch, else_branch=branch)
        model.graph.node.insert(0, choice)
        model.graph.node.insert(0, yes)
    else:
        opsets = [helper.make_opsetid("", 18)]
        model.functions.append(
            helper.make_function("own", "f", ["q", "k", "v"], ["out"], [width, *model.graph.node], opsets)
        )
        del model.graph.node[:]
        model.graph.node.append(helper.make_node("f", ["q", "k", "v"], ["out"], domain="own"))
        model.opset_import.append(helper.make_opsetid("own", 1))
    for folder, number in (("in", 7), ("work", 3)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "width.bin").write_bytes(np.int64(number).tobytes())
    (tmp_path / "in" / "m.onnx").write_bytes(model.SerializeToString())
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    if not read:
        monkeypatch.setattr(external_data, "_LARGEST_TABLE", 4)
    report = stof.optimize(tmp_path / "in" / "m.onnx", tmp_path / "out" / "m.onnx")
    assert [s.mask for s in report.sites] == ["abs(q - k) <= 6" if read else ""]
    if read:
        assert report.replaced == 1
        assert [p.name for p in (tmp_path / "out").iterdir()] == ["m.onnx"]


@pytest.mark.parametrize("kind", [TensorProto.FLOAT, TensorProto.FLOAT16])
def test_sparse_weights_are_brought_along(kind: int, tmp_path: Path) -> None:
    """One as an initializer, and one in a function. Half precision is compared as a copy in fp32."""
    dtype = helper.tensor_dtype_to_np_dtype(kind)
    folder, model = tmp_path / "in", windowed(projected=False)
    folder.mkdir()
    shape = (600, 8)
    for name, array in (
        ("values", np.linspace(-1, 1, 600).astype(dtype)),
        ("places", np.arange(0, 4800, 8)),
        ("more", np.linspace(1, 2, 600).astype(dtype)),
        ("where", np.arange(3, 4800, 8)),
    ):
        (folder / f"{name}.bin").write_bytes(array.tobytes())
    values, places = placed("values", (600,), kind), placed("places", (600,), TensorProto.INT64)
    more, where = placed("more", (600,), kind), placed("where", (600,), TensorProto.INT64)
    model.graph.sparse_initializer.append(sparse(values, places, *shape))
    constant = helper.make_node("Constant", [], ["c"], sparse_value=sparse(more, where, *shape))
    nodes = [constant, helper.make_node("ReduceSum", ["c"], ["sum"], keepdims=0)]
    nodes.append(helper.make_node("Add", ["x", "sum"], ["z"]))
    opsets = [helper.make_opsetid("", 18)]
    model.functions.append(helper.make_function("own", "more", ["x"], ["z"], nodes, opsets))
    model.opset_import.append(helper.make_opsetid("own", 1))
    model.graph.node.append(helper.make_node("ReduceSum", ["values"], ["total"], keepdims=0))
    model.graph.node.append(helper.make_node("Cast", ["out"], ["cast"], to=kind))
    model.graph.node.append(helper.make_node("Add", ["cast", "total"], ["added"]))
    model.graph.node.append(helper.make_node("more", ["added"], ["y"], domain="own"))
    del model.graph.output[:]
    model.graph.output.append(helper.make_tensor_value_info("y", kind, None))
    (folder / "m.onnx").write_bytes(model.SerializeToString())
    (tmp_path / "out").mkdir()
    target = tmp_path / "out" / "m.onnx"
    report = stof.optimize(folder / "m.onnx", target)
    assert report.replaced == 1
    assert report.verification is not None
    assert not report.verification.failures
    files = {p.name: p.read_bytes() for p in target.parent.iterdir() if p != target}
    assert (
        files.keys() == external_files(onnx.load(str(target), load_external_data=False)) >= {"values.bin", "more.bin"}
    )
    assert files == {n: (folder / n).read_bytes() for n in files}
    (found,), (wanted,) = results(target), results(folder / "m.onnx")
    np.testing.assert_allclose(found.astype(np.float64), wanted.astype(np.float64), rtol=2e-3, atol=2e-5)


@pytest.mark.parametrize("option", ["-o", "--json", "--save-plan"])
@pytest.mark.parametrize("place", ["out/weight.bin", "linked/weight.bin", "out/../out/weight.bin"])
def test_no_output_takes_the_place_of_data_that_comes_along(
    option: str, place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = weighted(tmp_path / "in")
    monkeypatch.chdir(tmp_path)
    Path("out").mkdir()
    Path("linked").symlink_to("out")
    outputs = [option, place] if option == "-o" else ["-o", "out/m.onnx", option, place]
    assert cli.main([str(path), *outputs]) == 1
    assert "is where external data 'weight.bin' is copied, which the output needs" in capsys.readouterr().err
    assert list(Path("out").iterdir()) == []
    # Without a model nothing is copied.
    if option != "-o":
        assert cli.main([str(path), *outputs, "--dry-run"]) == 0


def test_files_of_the_user_beside_the_output_stay(tmp_path: Path) -> None:
    path = weighted(tmp_path / "in")
    out = tmp_path / "out"
    out.mkdir()
    for name in (".weight.bin.part", ".m.onnx.part", "m.onnx.part", ".stof-mine"):
        (out / name).write_text("mine")
    stof.optimize(path, out / "m.onnx")
    names = {p.name: p for p in out.iterdir()}
    assert names.keys() == {".weight.bin.part", ".m.onnx.part", "m.onnx.part", ".stof-mine", "m.onnx", "weight.bin"}
    assert {n for n, p in names.items() if p.read_bytes() == b"mine"} == names.keys() - {"m.onnx", "weight.bin"}


@pytest.mark.parametrize("link", ["weight.bin", "sub"])
def test_data_is_not_written_through_links(link: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Runtimes would not read it there, and the folder may be anybody's."""
    location = "sub/weight.bin" if link == "sub" else "weight.bin"
    path = weighted(tmp_path / "in", location=location)
    (tmp_path / "in" / "sub").mkdir()
    shutil.copy(tmp_path / "in" / "weight.bin", tmp_path / "in" / "sub")
    for folder in ("out", "other"):
        (tmp_path / folder).mkdir()
    (tmp_path / "out" / link).symlink_to(tmp_path / "other" / ("" if link == "sub" else link))
    assert cli.main([str(path), "-o", str(tmp_path / "out" / "m.onnx")]) == 1
    assert "leads to another folder by a link" in capsys.readouterr().err
    assert list((tmp_path / "other").iterdir()) == []


def test_data_that_lies_there_already_is_used(tmp_path: Path) -> None:
    path = weighted(tmp_path / "in")
    for i, copy in enumerate((shutil.copy, os.link)):
        out = tmp_path / f"out{i}"
        out.mkdir()
        copy(path.parent / "weight.bin", out / "weight.bin")
        before = (out / "weight.bin").stat()
        stof.optimize(path, out / "m.onnx")
        after = (out / "weight.bin").stat()
        assert (before.st_ino, before.st_mtime_ns, before.st_size) == (after.st_ino, after.st_mtime_ns, after.st_size)
        np.testing.assert_allclose(results(out / "m.onnx")[0], results(path)[0], atol=1e-5)


def test_data_that_was_cut_off_during_the_run_is_no_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The output would lie beside its input and share the data."""
    path = weighted(tmp_path / "in")

    def truncated(model: onnx.ModelProto, target: Path, source: Path) -> None:
        os.truncate(path.parent / "weight.bin", 100)
        save(model, target, source)

    monkeypatch.setattr("stof.pipeline.save", truncated)
    with pytest.raises(ModelError, match="has 100 bytes, but constant 'weight' ends at 2048"):
        stof.optimize(path)
    assert {p.name for p in path.parent.iterdir()} == {"m.onnx", "weight.bin"}


@pytest.mark.parametrize("beside", [True, False])
def test_names_that_are_no_utf_8(beside: bool, tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"in\xff")
    source = weighted(folder).rename(folder / os.fsdecode(b"m\xfe.onnx"))
    target = (folder if beside else tmp_path / os.fsdecode(b"out\xff")) / os.fsdecode(b"o\xfd.onnx")
    target.parent.mkdir(exist_ok=True)
    report = stof.optimize(source, target, stof.Options(json=folder / os.fsdecode(b"r\xfc.json")))
    assert report.replaced == 1
    assert report.verification is not None
    assert not report.verification.failures
    assert (target.parent / "weight.bin").stat().st_size == 2048
    names = set(os.listdir(os.fsencode(folder)))  # noqa: PTH208 (bytes)
    assert names == {b"m\xfe.onnx", b"weight.bin", b"r\xfc.json", *([b"o\xfd.onnx"] if beside else [])}
    plain = tmp_path / "plain"
    shutil.copytree(target.parent, plain)
    renamed = next(p for p in plain.iterdir() if os.fsencode(p.name) == b"o\xfd.onnx").rename(plain / "o.onnx")
    np.testing.assert_allclose(results(renamed)[0], results(weighted(tmp_path / "again"))[0], atol=1e-5)


@pytest.mark.parametrize("step", ["make_working_copy", "find_sites", "decide_chains", "Verifier.run", "save"])
def test_a_disk_that_fills_up_at_any_step(
    step: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where temporary files lie that are no business of the output's folder."""
    places = {
        "make_working_copy": "stof.attention.rewrite.make_working_copy",
        "find_sites": "stof.attention.subgraphs.find_sites",
        "decide_chains": "stof.fusion.rewrite.decide_chains",
        "Verifier.run": "stof.verification.verifier.Verifier.run",
    }

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/tmp/x")

    path = weighted(tmp_path / "in")
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(places.get(step, f"stof.pipeline.{step}"), full)
    assert cli.main([str(path), "-o", str(tmp_path / "out" / "m.onnx"), "--chains", "on"]) == 1
    message = capsys.readouterr().err
    assert "No space left on device" in message
    assert message.count("\n") == 1
    assert list((tmp_path / "out").iterdir()) == []
