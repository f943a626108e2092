# SPDX-License-Identifier: Apache-2.0
"""Files of other formats are named, not called damaged."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import struct
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import parser

from stof.cli import main
from stof.errors import ModelError
from stof.graph.load_save import load

MODEL = parser.parse_model(
    '<ir_version: 9, opset_import: ["": 17]> g (float[B, 4] x) => (float[B, 4] y) { y = Softmax(x) }'
)


def zipped(*names: str) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for name in names:
            archive.writestr(name, b"0" * 40)
    return data.getvalue()


def tarred() -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("model.onnx"))
    return data.getvalue()


def arrays() -> bytes:
    data = io.BytesIO()
    np.savez(data, x=np.ones(3))
    return data.getvalue()


HEADER = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4665\nsize 132735151\n"
FILES: dict[str, tuple[bytes, str]] = {
    "empty.onnx": (b"", "it is empty"),
    "pointer.onnx": (POINTER, "a pointer of Git LFS"),
    "page.onnx": (b"\n<!DOCTYPE html>\n<html><body>404</body></html>", "an HTML page"),
    "m.tflite": (b"\x1c\x00\x00\x00TFL3" + b"\x00" * 40, "a TensorFlow Lite model"),
    "m.safetensors": (struct.pack("<Q", len(HEADER)) + HEADER + b"\x00" * 8, "a safetensors file"),
    "named.onnx": (struct.pack("<Q", len(HEADER)) + HEADER + b"\x00" * 8, "a safetensors file"),
    "m.pt": (zipped("archive/data.pkl", "archive/data/0"), "a checkpoint or program of PyTorch"),
    "m.pt2": (zipped("m/archive_format", "m/models/model.json"), "a checkpoint or program of PyTorch"),
    "old.bin": (pickle.dumps({"w": [1.0]}, protocol=2), "a checkpoint or program of PyTorch"),
    "m.npz": (arrays(), "an archive of NumPy arrays"),
    "m.zip": (zipped("model.onnx"), "an archive; unpack it"),
    "m.onnx.gz": (gzip.compress(MODEL.SerializeToString()), "an archive; unpack it"),
    "m.tar": (tarred(), "an archive; unpack it"),
    "m.engine": (b"ftrt" + b"\x01" * 60, "a TensorRT engine"),
    "m.plan": (b"\xff" * 60, "a TensorRT engine"),
    "m.gguf": (b"GGUF\x03\x00\x00\x00" + b"\x00" * 40, "a GGUF model"),
    "m.xml": (b'<?xml version="1.0"?>\n<net name="m" version="11"></net>', "an OpenVINO model"),
    "m.h5": (b"\x89HDF\r\n\x1a\n" + b"\x00" * 40, "an HDF5 file"),
    "m.mlmodel": (b"\xff\xff\xff\xff", "a Core ML model"),
    "m.onnxtxt": (onnx.printer.to_text(MODEL).encode(), "an ONNX model as text"),
    "m.textproto": (str(MODEL).encode(), "an ONNX model as text"),
}


@pytest.mark.parametrize("name", FILES)
def test_formats_are_named(name: str, tmp_path: Path) -> None:
    """The kind: well-known other formats are told as damage. The message names the format and what to do."""
    data, expected = FILES[name]
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(ModelError) as error:
        load(path)
    assert f"{path} is no ONNX model: it is" in str(error.value)
    assert expected in str(error.value)
    assert "truncated" not in str(error.value)


def test_ort_format(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """ONNX Runtime's own format, as it writes it: status 3."""
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "m.ort")
    options.add_session_config_entry("session.save_model_format", "ORT")
    onnxruntime.InferenceSession(MODEL.SerializeToString(), options, providers=["CPUExecutionProvider"])
    assert main([str(tmp_path / "m.ort")]) == 3
    error = capfd.readouterr().err
    assert "a model in the ORT format of ONNX Runtime; give the .onnx file that it was made from" in error


@pytest.mark.parametrize("data", [b"\x08\x09\x3a", b"no model at all", b"\x00" * 30], ids=["cut", "words", "zeros"])
def test_damage_stays_damage(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(data)
    with pytest.raises(ModelError, match="is no ONNX model, or a truncated one"):
        load(path)


def test_pointers_in_the_place_of_external_data(tmp_path: Path) -> None:
    model = parser.parse_model(
        '<ir_version: 9, opset_import: ["": 17]> g (float[B, 64] x) => (float[B, 64] y) { y = MatMul(x, w) }'
    )
    weight = onnx.numpy_helper.from_array(np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32), "w")
    model.graph.initializer.append(weight)
    path = tmp_path / "m.onnx"
    onnx.save(model, path, save_as_external_data=True, location="m.data", size_threshold=0)
    (tmp_path / "m.data").write_bytes(POINTER)
    with pytest.raises(ModelError, match=r"external data 'm\.data' of constant 'w' is a pointer of Git LFS"):
        load(path)
