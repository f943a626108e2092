# SPDX-License-Identifier: Apache-2.0
"""Graphs of the zoo on real tokens alone: coverage, and outputs beside the original's on ragged batches.

By default one graph of each architecture, of changing exporters; all with STOF_TEST_ALL=1.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

import stof
from stof.options import Options

sys.path.insert(0, str(Path(__file__).resolve().parent))
import unpadded_table
import zoo_inputs
from ragged_batches import LENGTH, architecture, compare, counting, ragged_mask

ALL = os.environ.get("STOF_TEST_ALL", "0") == "1"
# Of models that read a text from both sides: those that people embed, rerank and tag with.
ENCODERS = frozenset(
    """bert-features big-bird bert distilbert roberta xlm-roberta electra esm eurobert modernbert modernbert-features
    modernbert-fixed mpnet mobilebert megatron-bert data2vec-text t5-encodes t5 umt5 mt5 bart marian m2m-100 pegasus blenderbot
    embeddinggemma clip roformer squeezebert layoutlmv3 deberta deberta-v2 longt5 longt5-global t5gemma xlnet
    prophetnet""".split()  # noqa: SIM905
)


def chosen() -> list[str]:
    by_architecture: dict[str, list[str]] = {}
    for name, rows in unpadded_table.read_rows().items():
        if any(r.unpadded for r in rows):
            by_architecture.setdefault(architecture(name), []).append(name)
    if ALL:
        return [n for forms in by_architecture.values() for n in forms]
    return [forms[i % len(forms)] for i, forms in enumerate(by_architecture.values())]


def test_most_encoders_run_on_real_tokens_from_the_first_layer_to_the_last() -> None:
    rows = unpadded_table.read_rows()
    first = {n: r[0] for n, r in rows.items() if architecture(n) in ENCODERS}
    whole = [n for n, r in first.items() if r.unpadded + r.keys_only == r.attentions]
    assert len({architecture(n) for n in whole}) >= 12
    assert len({n.rsplit(".", 2)[1] for n in whole}) >= 4  # exporters
    assert len(whole) >= 0.9 * len(first), sorted(first.keys() - set(whole))
    assert all(r.reason for found in rows.values() for r in found if r.unpadded + r.keys_only < r.attentions)


@pytest.mark.parametrize("name", chosen())
def test_outputs_are_the_originals_on_ragged_batches(name: str, tmp_path: Path) -> None:
    model = zoo_inputs.filled(name)
    path, written = tmp_path / "model.onnx", tmp_path / "out.onnx"
    onnx.save(model, str(path))
    report = stof.optimize(path, written, Options(unpad="on", verify=False))
    rows = report.rows("unpadding")
    found = [
        unpadded_table.UnpaddedRow(
            r.batch, r.of_attentions, r.attentions, r.keys_only, r.rest if r.replaced else r.reason
        )
        for r in rows
    ]
    assert found == unpadded_table.read_rows()[name]
    zero = {o: r.batch for r in rows for o in r.zero_outputs}
    inputs = {i.name for i in model.graph.input}
    before, after = zoo_inputs.runnable(model), zoo_inputs.runnable(onnx.load(str(written)))
    plain, legal = zoo_inputs.session(before, optimized=False), zoo_inputs.session(before)
    optimized = zoo_inputs.session(after, library=str(stof.library_path()))
    dtype = zoo_inputs.build.manifest()[name].get("dtype", "float32")
    for side in ("left", "right"):
        feed = zoo_inputs.feeds(name, before, 6, LENGTH, side, seed=7)
        masks = [r.batch for r in rows if r.batch in inputs] or ["attention_mask"]
        if feed[masks[0]].shape != (6, LENGTH):
            pytest.skip("a batch or length of a fixed size")
        rng = np.random.default_rng(5)
        feed |= {m: ragged_mask(side, rng).astype(feed[m].dtype) for m in masks if feed[m].shape == (6, LENGTH)}
        outputs = [s.run(None, feed) for s in (plain, legal, optimized)]
        for output, *found_values in zip(plain.get_outputs(), *outputs, strict=True):
            gone = ~counting(feed[zero[output.name]]) if output.name in zero else None
            compare(*found_values, gone, dtype, f"{output.name}, padded on the {side}")
