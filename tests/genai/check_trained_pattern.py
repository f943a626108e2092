# SPDX-License-Identifier: Apache-2.0
"""A pattern from training to ONNX Runtime GenAI: train, build a folder, put the pattern on it, compare next tokens.

``python tests/genai/check_trained_pattern.py [--folder DIR] [--steps N]``: status 1 unless the next tokens of the folder that
``stof-optimize --sparsify`` wrote agree with those of the masked PyTorch model at 99 % of the positions, and those of a
folder with another pattern do not. Runs in an environment with tests/genai/requirements.txt.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from generation import generate

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "models"), str(ROOT / "optimizer")]
import genai  # noqa: E402
import stof.torch  # noqa: E402

# The same pattern twice: as --sparsify takes it, and as the mask of training. 2 query heads share a key head.
SPECIFICATION = "s2:local=1,stride=2,block=16"
MASK = "k <= q and (q // 16 == k // 16 or (k // 16 + h // 2) % 2 == 0)"
OTHER_SPECIFICATION = "s2:local=1,stride=4,block=16"
# The builder takes a layer with as many outputs as the vocabulary has words for the last one: no other size is 48.
VOCABULARY, PERIOD, LENGTH = 48, 40, 120
AGREEMENT = 0.99
_CONFIG = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def attend(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, scaling: float, **_: Any
) -> tuple[Any, None]:
    """Attention of transformers' models, with the pattern: [B, S, H, D]."""
    del module, attention_mask
    return stof.torch.attention(query, key, value, MASK, scale=scaling).transpose(1, 2).contiguous(), None


def make_model() -> Any:
    """A Llama-shaped model of which every attention has the pattern."""
    transformers.AttentionInterface.register("stof", attend)
    transformers.AttentionMaskInterface.register("stof", lambda *_, **__: None)
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_CONFIG, attn_implementation="stof"))


def draw(count: int, generator: torch.Generator) -> torch.Tensor:
    """Sequences [count, LENGTH] that repeat their first PERIOD tokens, which are random."""
    start = torch.randint(3, VOCABULARY, (count, PERIOD), generator=generator)
    return start.repeat(1, LENGTH // PERIOD)


def train(model: Any, steps: int) -> float:
    """Trains the model; the share of tokens that it predicts where they follow from earlier ones."""
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 8e-3, total_steps=steps)
    for step in range(steps):
        tokens = draw(16, generator)
        logits = model(tokens, use_cache=False).logits[:, PERIOD - 1 : -1]
        loss = torch.nn.functional.cross_entropy(logits.reshape(-1, VOCABULARY), tokens[:, PERIOD:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    tokens = draw(16, generator)
    found = next_tokens(model, tokens)[:, PERIOD - 1 : -1]
    return float((found == tokens[:, PERIOD:].numpy()).mean())


def next_tokens(model: Any, tokens: torch.Tensor) -> np.ndarray:
    """The most probable token after each position, [B, S]."""
    with torch.no_grad():
        found: np.ndarray = model(tokens, use_cache=False).logits.argmax(-1).numpy()
    return found


def sparsify(source: Path, target: Path, specification: str) -> None:
    """Puts a pattern on a folder.

    Raises:
        SystemExit: where stof-optimize refuses.
    """
    shutil.rmtree(target, ignore_errors=True)
    command = [sys.executable, "-m", "stof.cli", str(source), "-o", str(target), "--sparsify", specification]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "optimizer")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    print("\n".join(done.stdout.splitlines()[:3]), flush=True)
    if done.returncode:
        raise SystemExit(f"stof-optimize {specification}: status {done.returncode}: {done.stderr[-1000:]}")


def agreement(model: Any, folder: Path, tokens: torch.Tensor) -> float:
    """The share of next tokens on which a folder and the model agree, with the tokens forced, after a prompt of 1.5 periods."""
    prompt = PERIOD * 3 // 2
    expected = next_tokens(model, tokens)[:, prompt - 1 : -1]
    prompts = [row[:prompt] for row in tokens.numpy()]
    found = generate(folder, prompts, LENGTH - prompt, forced=tokens[:, prompt:].numpy())
    assert found.logits is not None
    return float((expected == found.logits.argmax(-1).T).mean())


def greedy_agreement(model: Any, folder: Path, tokens: torch.Tensor) -> float:
    """The share of tokens of greedy decoding on which they agree."""
    count = PERIOD // 2
    rows = tokens[:, :PERIOD]
    found = generate(folder, list(rows.numpy()), count).tokens
    for _ in range(count):
        rows = torch.cat([rows, torch.from_numpy(next_tokens(model, rows)[:, -1:])], 1)
    return float((found == rows[:, PERIOD:].numpy()).mean())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="keeps the model folders")
    parser.add_argument("--steps", type=int, default=300)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the tensors are small
    model = make_model()
    learned = train(model, arguments.steps)
    print(f"accuracy of the PyTorch model {learned:.3f}")
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        model.save_pretrained(folder / "checkpoint")
        genai.write_tokenizer(folder / "checkpoint", VOCABULARY)
        genai.build(folder / "checkpoint", folder / "dense")
        sparsify(folder / "dense", folder / "sparse", SPECIFICATION)
        sparsify(folder / "dense", folder / "other", OTHER_SPECIFICATION)
        tokens = draw(8, torch.Generator().manual_seed(3))
        found = {
            "next tokens": agreement(model, folder / "sparse", tokens),
            "greedy tokens": greedy_agreement(model, folder / "sparse", tokens),
        }
        other = agreement(model, folder / "other", tokens)
    for name, share in found.items():
        print(f"{name}: agreement {share:.4f}, {AGREEMENT} wanted")
    print(f"next tokens with another pattern: agreement {other:.4f}, less than {AGREEMENT} wanted")
    return int(learned < 0.9 or min(found.values()) < AGREEMENT or other >= AGREEMENT)


if __name__ == "__main__":
    sys.exit(main())
