# SPDX-License-Identifier: Apache-2.0
"""How many tokens the runs of an MLP have: what inputs, --shape and fixed sizes state decides, then the KV cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from mlp_models import VOCABULARY, MlpForm, make_mlp_model

import stof
from stof.options import Options
from stof.sparse_mlp.report import MlpReport
from stof.sparse_mlp.run_tokens import RunTokens

pytestmark = pytest.mark.usefixtures("small_mlps_gain")

RARELY, OFTEN = 2.0, 0.0  # shifts of the first bias: about 3 % and 50 % of the neurons are active


def rows_of(
    folder: Path, form: MlpForm, *, tokens: tuple[int, ...] = (), fixed: dict[str, int] | None = None, **options: Any
) -> list[MlpReport]:
    """The rows of a model, whose given inputs have runs of ``tokens``, and whose sizes are ``fixed`` by name."""
    model = make_mlp_model(form)
    for value in (*model.graph.input, *model.graph.output):
        for d in value.type.tensor_type.shape.dim:
            if d.dim_param in (fixed or {}):
                d.dim_value = (fixed or {})[d.dim_param]
    onnx.save(model, str(folder / "model.onnx"))
    rng, files = np.random.default_rng(0), []
    for i, count in enumerate(tokens):
        files.append(str(folder / f"inputs{i}.npz"))
        feed = {"input_ids": rng.integers(0, VOCABULARY, (1, count))}
        if form.has_cache:
            feed["past"] = rng.standard_normal((1, 3, form.size)).astype(np.float32)
        np.savez(files[-1], **feed)
    report = stof.optimize(
        folder / "model.onnx", folder / "out.onnx", Options(inputs=tuple(files), dry_run=True, **options)
    )
    return list(report.sections["mlps"].rows)  # type: ignore[arg-type]


@pytest.mark.parametrize("gated", [False, True])
def test_given_runs_of_one_token_decide_without_a_cache(gated: bool, tmp_path: Path) -> None:
    """An MLP of a model without a cache stayed as "its runs have many tokens", though --inputs gave runs of one token."""
    form = MlpForm(has_cache=False, gated=gated, shift=1.0)
    (row,) = rows_of(tmp_path, form, tokens=(1,) * 12)
    assert row.density is not None
    assert row.density > 0.1  # more than what many tokens gain with
    assert row.replaced, row.reason
    assert row.predicted_gain == pytest.approx(
        2 / (1 + row.density) if not gated else 3 / (1 + 2 * row.density), rel=0.01
    )


def test_the_longest_given_run_decides_without_a_cache(tmp_path: Path) -> None:
    (row,) = rows_of(tmp_path, MlpForm(has_cache=False, shift=1.0), tokens=(1, 1, 64))
    assert row.reason.startswith(
        "the model has no KV cache, so its runs have many tokens: an MLP of this form gains where"
    )


def test_a_few_tokens_share_the_neurons_that_they_need(tmp_path: Path) -> None:
    (few,) = rows_of(tmp_path, MlpForm(has_cache=False, shift=RARELY), tokens=(4, 4, 4))
    assert few.replaced, few.reason
    assert few.predicted_gain is None  # no token's
    (row,) = rows_of(tmp_path, MlpForm(has_cache=False, shift=OFTEN), tokens=(4, 4, 4))
    assert not row.replaced
    assert row.reason.startswith("its runs have 4 tokens by the given inputs, which need 9")
    assert "x is estimated for them together by bytes of weights, less than 1.1x" in row.reason


@pytest.mark.parametrize(
    ("has_cache", "shapes", "replaced", "reason"),
    [
        (False, {"S": (1, 1), "B": (1, 1)}, True, ""),
        (False, {"S": (1, 512), "B": (1, 1)}, False, "its runs have 512 tokens by --shape: an MLP of this form gains"),
        (False, {"S": (1, 64)}, False, "the model has no KV cache, so its runs have many tokens"),  # of any batch size
        (False, {"B": (1, 1)}, False, "the model has no KV cache, so its runs have many tokens"),
        (True, {"S": (128, 512)}, False, "its runs have 128 tokens by --shape: an MLP of this form gains"),
        (True, {"S": (64, 64), "P": (1, 9)}, False, "its runs have 64 tokens by --shape"),
        (True, {"S": (1, 512)}, True, ""),
        (True, {"S": (1, 1), "B": (8, 8)}, False, "its runs have 8 tokens by --shape, which need 9"),
        (True, {"P": (64, 64)}, True, ""),  # says nothing about tokens
    ],
    ids=str,
)
def test_stated_sizes_decide(
    has_cache: bool, shapes: dict[str, tuple[int, int]], replaced: bool, reason: str, tmp_path: Path
) -> None:
    """Both ways: an encoder that runs one token, and a decoder that is stated to run many."""
    tokens = (1, 1) if has_cache else (32,)
    (row,) = rows_of(tmp_path, MlpForm(has_cache=has_cache, shift=0.5), tokens=tokens, shapes=shapes)
    assert row.replaced == replaced, row.reason
    assert row.reason.startswith(reason)


@pytest.mark.parametrize(
    ("has_cache", "fixed", "replaced"),
    [(False, {"B": 1, "S": 1}, True), (False, {"B": 1, "S": 64}, False), (True, {"B": 1, "S": 64, "P": 8}, False)],
)
def test_fixed_sizes_decide(has_cache: bool, fixed: dict[str, int], replaced: bool, tmp_path: Path) -> None:
    (row,) = rows_of(tmp_path, MlpForm(has_cache=has_cache), fixed=fixed)
    assert row.replaced == replaced
    assert replaced or "its runs have 64 tokens by the model's fixed sizes" in row.reason


def test_prompts_given_to_a_decoder_count_neurons(tmp_path: Path) -> None:
    """They do not say that the decoder runs nothing else."""
    (row,) = rows_of(tmp_path, MlpForm(shift=0.5), tokens=(64,))
    assert row.replaced, row.reason
    assert row.predicted_gain is not None


def test_a_gpu_takes_the_same_statements(tmp_path: Path) -> None:
    (one,) = rows_of(tmp_path, MlpForm(has_cache=False, shift=RARELY), tokens=(1,) * 8, target="cuda")
    assert one.replaced, one.reason
    shapes = {"S": (32, 64)}
    (many,) = rows_of(tmp_path, MlpForm(shift=RARELY), tokens=(8,), target="cuda", shapes=shapes)
    assert many.reason == "its runs have 32 tokens by --shape, for which a GPU computes all neurons"


@pytest.mark.parametrize(("count", "share"), [(1, 0.1), (4, 0.3439), (16, 0.8147)])
def test_neurons_that_tokens_need_together(count: int, share: float) -> None:
    tokens = RunTokens(count, "--shape")
    assert not tokens.is_many
    assert tokens.share_active(0.1) == pytest.approx(share, abs=1e-4)
    assert RunTokens(17, "").is_many
    assert RunTokens(0, "").is_many
