# SPDX-License-Identifier: Apache-2.0
"""Recognizes files of other formats by their first bytes, for messages about what was given in the place of an ONNX model."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from pathlib import Path

HEAD_BYTES = 4096  # of a file that are looked at
_EXPORT = "export the model to ONNX first (torch.onnx.export, or optimum-cli export onnx)"
_ORIGINAL = "give the .onnx file that it was made from"
_UNPACK = "unpack it and give the .onnx file inside"
_DOWNLOAD = "download the file itself"


@dataclass(frozen=True)
class FileFormat:
    """A format that people hold for an ONNX model.

    Attributes:
        name: with its article.
        advice: what to do.
    """

    name: str
    advice: str


_ORT = FileFormat("a model in the ORT format of ONNX Runtime", _ORIGINAL)
_TORCH = FileFormat("a checkpoint or program of PyTorch", _EXPORT)
_ENGINE = FileFormat("a TensorRT engine", _ORIGINAL)
_CORE_ML = FileFormat("a Core ML model", _ORIGINAL)
_ARCHIVE = FileFormat("an archive", _UNPACK)
_TENSORFLOW = FileFormat("a TensorFlow graph", "convert it to ONNX first (tf2onnx)")
_LITE = FileFormat("a TensorFlow Lite model", "convert it to ONNX first (tf2onnx)")
_KERAS = FileFormat("an HDF5 file, as Keras writes it", "convert it to ONNX first (tf2onnx)")
_LFS = FileFormat("a pointer of Git LFS, not the file", f"{_DOWNLOAD}: git lfs pull")
_HTML = FileFormat("an HTML page, as a server sends it in the place of a file", _DOWNLOAD)
_OPENVINO = FileFormat("an OpenVINO model", _ORIGINAL)
_GGUF = FileFormat("a GGUF model", _EXPORT)
_SAFETENSORS = FileFormat("a safetensors file: weights without a graph", _EXPORT)
_TEXT = FileFormat("an ONNX model as text", "convert it: onnx.save(onnx.load(path, format='textproto'), 'model.onnx')")
_ONNX_TEXT = FileFormat(
    "an ONNX model as text", "convert it: onnx.save(onnx.load(path, format='onnxtxt'), 'model.onnx')"
)
_ONNX_JSON = FileFormat("an ONNX model as JSON", "convert it: onnx.save(onnx.load(path, format='json'), 'model.onnx')")
_ARRAYS = FileFormat("an archive of NumPy arrays", "give the .onnx file; arrays go to --inputs")

_LFS_BEGIN = b"version https://git-lfs"
# What a file begins with, behind so many bytes.
_SIGNATURES: tuple[tuple[int, bytes, FileFormat], ...] = (
    (4, b"ORTM", _ORT),
    (4, b"TFL3", _LITE),
    (0, _LFS_BEGIN, _LFS),
    (0, b"GGUF", _GGUF),
    (0, b"\x89HDF\r\n\x1a\n", _KERAS),
    (0, b"ftrt", _ENGINE),
    (0, b"ptrt", _ENGINE),
    (0, b"\x1f\x8b", _ARCHIVE),  # gzip
    (0, b"\xfd7zXZ\x00", _ARCHIVE),
    (0, b"\x28\xb5\x2f\xfd", _ARCHIVE),  # zstd
    (0, b"BZh", _ARCHIVE),
    (0, b"7z\xbc\xaf\x27\x1c", _ARCHIVE),
    (257, b"ustar", _ARCHIVE),
    (0, b"\x93NUMPY", _ARRAYS),
)
# What text begins with, behind blanks.
_TEXTS: tuple[tuple[str, FileFormat], ...] = (
    (r"<!doctype html|<html", _HTML),
    (r"<\?xml|<net\b", _OPENVINO),
    (r"<\s*ir_version\b", _ONNX_TEXT),
    (r"ir_version\s*:", _TEXT),
    (r'\{\s*"(irVersion|producerName|graph|opsetImport)"', _ONNX_JSON),
)
# Formats whose bytes do not tell them.
_SUFFIXES = {
    ".ort": _ORT,
    ".tflite": _LITE,
    ".mlmodel": _CORE_ML,
    ".engine": _ENGINE,
    ".plan": _ENGINE,
    ".trt": _ENGINE,
    ".pb": _TENSORFLOW,
    ".pt": _TORCH,
    ".pth": _TORCH,
    ".pt2": _TORCH,
    ".ckpt": _TORCH,
    ".safetensors": _SAFETENSORS,
    ".gguf": _GGUF,
    ".h5": _KERAS,
    ".keras": _KERAS,
}


def recognize_format(path: Path, head: bytes, size: int) -> FileFormat | None:
    """The format of a file that is no ONNX model; None where it cannot be told.

    Args:
        path: the file, for its suffix.
        head: its first bytes, HEAD_BYTES at most.
        size: its bytes.
    """
    for offset, signature, file_format in _SIGNATURES:
        if head[offset : offset + len(signature)] == signature:
            return file_format
    if head[:4] == b"PK\x03\x04":
        return _recognize_zip(path, head)
    if _begins_like_safetensors(head, size):
        return _SAFETENSORS
    if len(head) > 1 and head[0] == 0x80 and 2 <= head[1] <= 5:  # a pickle
        return _TORCH
    text = head.decode("utf-8", "replace").lstrip("\ufeff \t\r\n")
    for pattern, file_format in _TEXTS:
        if re.match(pattern, text, re.IGNORECASE):
            return file_format
    return _SUFFIXES.get(path.suffix.lower())


def describe_format(path: Path, head: bytes, size: int) -> str:
    """What a file is that is no ONNX model, and what to do; empty where it cannot be told."""
    if size == 0:
        return "is no ONNX model: it is empty; download or export it again"
    file_format = recognize_format(path, head, size)
    return "" if file_format is None else f"is no ONNX model: it is {file_format.name}; {file_format.advice}"


def is_lfs_pointer(head: bytes) -> bool:
    """Whether a file is a pointer of Git LFS."""
    return head.startswith(_LFS_BEGIN)


def _recognize_zip(path: Path, head: bytes) -> FileFormat:
    """What a zip archive holds, by the name of its first file."""
    length = int.from_bytes(head[26:28], "little")
    first = head[30 : 30 + length]
    if first.endswith(b".npy"):
        return _ARRAYS
    inside = first.rsplit(b"/", 1)[-1]
    is_torch = inside in (b"data.pkl", b"archive_format", b"version", b"byteorder", b".format_version")
    if is_torch or path.suffix.lower() in (".pt", ".pth", ".pt2", ".ckpt", ".bin"):
        return _TORCH
    return _KERAS if path.suffix.lower() == ".keras" else _ARCHIVE


def _begins_like_safetensors(head: bytes, size: int) -> bool:
    """A length of 8 bytes that the file has room for, and JSON behind it."""
    if len(head) < 10:
        return False
    (length,) = struct.unpack("<Q", head[:8])
    return 2 <= length <= size - 8 and head[8:10] in (b'{"', b"{}", b"{ ")
