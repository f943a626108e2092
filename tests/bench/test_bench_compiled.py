# SPDX-License-Identifier: Apache-2.0
"""The paper's models as torch.compile gets them compute what transformers computes with the same mask."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

import bigbird
import build
from bench.core.case import named_mask
from bench.gpu import torch_compile as compiled

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
MODELS = str(Path(bigbird.__file__).parent)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.parametrize("name", ["bert-base", "gpt2", "llama", "t5-base", "vit-base-128", "modernbert-base"])
def test_the_layers_are_those_of_the_model(name: str) -> None:
    torch.set_grad_enabled(False)
    # Of ModernBERT, the first and the fourth layer attend everything, and the others less than that from 65 tokens on.
    layers, length = (4, 256) if name == "modernbert-base" else (2, 128)
    kind, core, given, bias = compiled.build_model(name, (2, length), "cpu", torch.float32, MODELS, layers=layers)
    found = compiled._MODELS[kind](core, lambda f: f, given, bias)()
    core.set_attn_implementation("sdpa")
    if kind == "T5Model":
        encoded = core.encoder(input_ids=given, attention_mask=bias)
        expected = core(
            encoder_outputs=encoded, decoder_input_ids=given, decoder_attention_mask=bias, use_cache=False
        ).last_hidden_state
    else:
        named = {"pixel_values" if kind == "ViTModel" else "input_ids": given}
        windows = kind == "ModernBertModel"  # which it makes itself
        expected = core(**named, **({} if windows else {"attention_mask": bias})).last_hidden_state
    assert float(expected.abs().max()) > 1
    np.testing.assert_allclose(found.numpy(), expected.numpy(), rtol=1e-4, atol=1e-4)
    sys.path.remove(MODELS) if sys.path.count(MODELS) > 1 else None


@pytest.mark.parametrize("length", [128, 129, 512])
def test_the_mask_is_that_of_the_paper_grid(length: int) -> None:
    text, tables = named_mask("bigbird", length)
    side = bigbird.width(length)
    assert text == f"abs(q - k) <= {side} or q < {side} or k < {side} or table0[q // 64, k // 64]"
    np.testing.assert_array_equal(bigbird.blocks(length), tables["table0"])
    core = torch.nn.Module()
    bigbird.add_weights(core, length)
    q, k = np.mgrid[:length, :length]
    allowed = (abs(q - k) <= side) | (q < side) | (k < side) | tables["table0"][q // 64, k // 64]
    np.testing.assert_array_equal(bigbird.mask(core, length)[0, 0].numpy(), allowed)


def test_a_graph_gets_the_mask_of_another_length() -> None:
    model = build.load_graph("paper/bert-base.dynamo.sdpa")
    assert bigbird.set_length(model, 512)
    arrays = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer if t.data_location == 0}
    assert int(arrays["core.bigbird_width"]) == 23
    assert any(a.shape == (8, 8) and np.array_equal(a, bigbird.blocks(512)) for a in arrays.values())
    assert not bigbird.set_length(build.load_graph("narrow/bert.dynamo.sdpa"), 512)
