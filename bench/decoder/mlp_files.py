# SPDX-License-Identifier: Apache-2.0
"""The files of a decoder with sparse MLPs: as it is, and as stof-optimize writes it with dense, exact and predicted MLPs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from bench.decoder.graph import WEIGHTS, Decoder
from bench.decoder.measure_decoder import reason
from bench.decoder.mlp_models import MlpDecoderVariant
from stof.files import write_bytes
from stof.targets import TARGETS

_PROMPTS, _TOKENS = 8, 64  # of --sparse-mlp, and tokens of each
_INPUTS = 2  # prompts of --inputs


class MlpFiles:
    """The files of variants: all read one file of weights; rewritten weights lie in further ones.

    Attributes:
        folder: where they are.
        paths: of the models, by variant.
        missing: why others do not exist, or have dense MLPs.
        active: the mean share of neurons that a variant computes, where it was measured.
    """

    def __init__(self, decoder: Decoder, folder: Path, target: str, active: float) -> None:
        """Writes the decoder as it is, and token ids for ``--inputs`` and ``--sparse-mlp``.

        Args:
            decoder: its weights are in the folder.
            folder: for all files.
            target: "cpu" or "cuda", as of stof-optimize.
            active: the share of neurons that predictors select.
        """
        self.folder = folder
        self.paths: dict[str, Path] = {}
        self.missing: dict[str, str] = {}
        self.active: dict[str, float] = {}
        self._target, self._share = target, active
        self._original = folder / "original.onnx"
        write_bytes("model", self._original, decoder.model.SerializeToString())
        shape = decoder.shape
        # Without zeros no MLP is looked for, and --skip may not name one.
        self._has_zeros = shape.mlp.activation in ("relu", "relu2") or shape.mlp.has_top_k
        ids = np.random.default_rng(0).integers(0, shape.vocabulary, (_PROMPTS, _TOKENS))
        self._prompts = folder / "prompts.json"
        self._prompts.write_text(json.dumps(ids.tolist()))
        self._inputs = folder / "inputs.npz"
        empty = np.zeros(shape.cache_shape(_INPUTS, 0), shape.dtype)
        names = [f"past_key_values.{i}.{kind}" for i in range(shape.layers) for kind in ("key", "value")]
        feeds: dict[str, Any] = dict.fromkeys(names, empty)
        feeds |= {"input_ids": ids[:_INPUTS], "attention_mask": np.ones((_INPUTS, _TOKENS), np.int64)}
        np.savez(self._inputs, **feeds)

    def write(self, variant: MlpDecoderVariant) -> None:
        """Writes the file of a variant, or notes why there is none."""
        if not variant.optimized:
            self.paths[variant.name] = self._original
            return
        from stof.options import Options
        from stof.pipeline import optimize

        options = Options(
            verify=False, target=self._target, capability=90 if TARGETS[self._target].uses_gpu else 0, force=True,
            skip=("mlp:*",) if variant.dense and self._has_zeros else (),
            inputs=() if variant.dense or variant.predicted else (str(self._inputs),),
            sparse_mlp=f"{self._prompts},kind=svd,active={self._share}" if variant.predicted else "",
        )  # fmt: skip
        path = self.folder / f"{variant.name}.onnx"
        try:
            report = optimize(self._original, path, options)
        except Exception as failure:  # the other variants are measured without it
            self.missing[variant.name] = reason(failure)
            return
        rows = [r for section in report.sections.values() for r in getattr(section, "rows", ()) if hasattr(r, "mlp")]
        replaced = [row for row in rows if row.replaced]
        if not variant.dense and len(replaced) != len(rows):
            kept = next(row.reason for row in rows if not row.replaced)
            self.missing[variant.name] = f"{len(replaced)} of {len(rows)} MLPs are replaced; {kept}"
        if not path.is_file() or (not variant.dense and not replaced):
            self.missing.setdefault(variant.name, "no MLP is replaced")
            path.unlink(missing_ok=True)
            return
        self.paths[variant.name] = path
        shares = [row.density for row in replaced if row.density is not None]
        if shares:
            self.active[variant.name] = round(float(np.mean(shares)), 4)

    @property
    def weights(self) -> list[Path]:
        """The files of weights of all variants."""
        return [*sorted(self.folder.glob("*.data")), self.folder / WEIGHTS]
