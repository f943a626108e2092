# SPDX-License-Identifier: Apache-2.0
"""Small decoders with random weights, as onnxruntime-genai's own builder writes them from transformers' classes.

``python models/genai.py -o DIR [NAME ...]`` writes a model folder ``DIR/NAME`` for each; ``--list`` lists the names.
Needs torch, transformers, onnx_ir and onnxruntime-genai at the versions of tests/genai/requirements.txt.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist
from typing import Any

# By name: the builder's precision, and its extra options.
PRECISIONS: dict[str, tuple[str, tuple[str, ...]]] = {
    "fp32": ("fp32", ()),
    "int4": ("int4", ()),  # activations are rounded to 8 bits in each run
    "int4a32": ("int4", ("accuracy_level=1",)),  # activations stay fp32
    "int8kv": ("fp32", ("kv_cache_quant_scheme=int8_per_channel",)),  # caches of int8
}
# Likewise, of models that do not run on a CPU.
PRECISIONS_OF_GPUS: dict[str, tuple[str, tuple[str, ...]]] = {
    "fp8kv": ("fp16", ("kv_cache_quant_scheme=fp8_per_channel",)),  # caches of fp8
}
VOCABULARY = 512
WINDOW = 64  # of sliding windows: prompts of 300 tokens exceed it
_LOCAL = "sliding_attention"
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    # Large weights: logits differ so much between tokens and contexts that greedy decoding does not fall into one token.
    "initializer_range": 0.15,
}
# The shape of a model of a billion parameters, with few of its layers: for times.
_SIZES_1B = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_hidden_layers": 4,
    "vocab_size": 2000,
    "max_position_embeddings": 32768,
    "initializer_range": 0.03,
}
_NORM_SPREAD = 0.1  # of the weights of norms around 1


@dataclass(frozen=True)
class Decoder:
    """One architecture, by its classes in transformers.

    Attributes:
        config: the class of its configuration.
        settings: arguments of that.
        options: extra options of the builder.
        active: the share of neurons above zero, which the bias of the MLPs' gates gives (``mlp_bias``); None: a half.
    """

    config: str
    settings: dict[str, Any] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    active: float | None = None


DECODERS: dict[str, Decoder] = {
    "llama": Decoder("LlamaConfig", {"head_dim": 32}),
    # An MLP with the square of Relu, and none with a gate.
    "nemotron": Decoder("NemotronConfig", {"head_dim": 32, "hidden_act": "relu2"}),
    "llama-relu": Decoder("LlamaConfig", {"head_dim": 32, "hidden_act": "relu"}),
    "mistral": Decoder("MistralConfig", {"head_dim": 32, "sliding_window": WINDOW, "layer_types": [_LOCAL] * 3}),
    # The window is an attribute alone here; the caches of the other architectures' local layers hold the window only.
    "phi3": Decoder(
        "Phi3Config",
        {"sliding_window": WINDOW, "layer_types": [_LOCAL] * 3, "original_max_position_embeddings": 1024},
        ("window_kv_cache=false",),
    ),
    "gemma3": Decoder(
        "Gemma3TextConfig",
        {
            "head_dim": 64,
            "num_hidden_layers": 4,
            "sliding_window": WINDOW,
            "layer_types": [_LOCAL, _LOCAL, "full_attention", _LOCAL],
            "query_pre_attn_scalar": 64,
            "final_logit_softcapping": 30.0,
            "attn_logit_softcapping": 50.0,
        },
    ),
    "qwen3": Decoder("Qwen3Config", {"head_dim": 32}),
    "gptoss": Decoder(
        "GptOssConfig",
        {
            "head_dim": 32,
            "num_hidden_layers": 4,
            "sliding_window": WINDOW,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "llama-1b": Decoder("LlamaConfig", _SIZES_1B),
    "mistral-1b": Decoder(
        "MistralConfig", {**_SIZES_1B, "sliding_window": 1024, "layer_types": [_LOCAL] * 4},
    ),
    "llama-relu-1b": Decoder("LlamaConfig", {**_SIZES_1B, "hidden_act": "relu", "mlp_bias": True}, active=0.1),
}  # fmt: skip
TESTED = tuple(name for name in DECODERS if not name.endswith("-1b"))


def names() -> list[str]:
    """Every folder that can be made: architecture and precision."""
    return [f"{name}-{precision}" for name in DECODERS for precision in (*PRECISIONS, *PRECISIONS_OF_GPUS)]


def write_tokenizer(folder: Path, size: int) -> None:
    """A tokenizer that knows ``size`` words: the builder copies it, and the runtime looks for it."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, size)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<pad>"
    )
    fast.save_pretrained(folder)


def _write_checkpoint(decoder: Decoder, folder: Path, seed: int) -> None:
    """A checkpoint of random weights. Vectors that are initialized uniformly (norms, sinks, biases) get values of their own."""
    import torch
    import transformers

    settings = {**_SIZES, **_TOKENS, **decoder.settings}
    config = getattr(transformers, decoder.config)(**settings)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed + 1)
    spread = settings["initializer_range"]
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.dim() == 1 and name.endswith("norm.weight"):
                weight.add_(_NORM_SPREAD * noise)
            elif weight.dim() > 1 and ("experts" in name or "router" in name):
                weight.copy_(spread * noise)  # some versions leave them unset
            elif decoder.active is not None and ".mlp." in name and name.endswith("bias"):
                # Tokens are normed, so that the matmul's values are normal.
                deviation = spread * math.sqrt(settings["hidden_size"] * (1 + _NORM_SPREAD**2))
                weight.fill_(NormalDist(0, deviation).inv_cdf(decoder.active) if "gate_proj" in name else 0.0)
            elif weight.dim() == 1 or "bias" in name:
                weight.copy_(0.1 * noise)
            if name.endswith("sinks"):
                weight.copy_(noise)
    model.save_pretrained(folder)
    if decoder.config == "GptOssConfig":
        _add_packed_experts(folder / "model.safetensors", config)
    write_tokenizer(folder, settings["vocab_size"])


def _write_scales(decoder: Decoder, path: Path, seed: int) -> None:
    """Random scales of quantized caches, a file that the builder reads: one for each layer and channel."""
    import numpy as np

    settings = {**_SIZES, **decoder.settings}
    channels = settings["num_key_value_heads"] * settings.get("head_dim", 32)
    rng = np.random.default_rng(seed)
    shape = (settings["num_hidden_layers"], channels)
    scales = {f"{name}_scales": rng.uniform(0.02, 0.06, shape).tolist() for name in "kv"}
    path.write_text(json.dumps({"scales": scales}), encoding="utf-8", newline="\n")


def _add_packed_experts(path: Path, config: Any) -> None:
    """Adds random MXFP4 weights of experts: of gpt-oss, the builder packs int4 from these alone."""
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(path)
    experts, width, inner = config.num_local_experts, config.hidden_size, config.intermediate_size
    generator = torch.Generator().manual_seed(2)
    for layer in range(config.num_hidden_layers):
        for name, rows, columns in (("gate_up_proj", 2 * inner, width), ("down_proj", width, inner)):
            key = f"model.layers.{layer}.mlp.experts.{name}"
            shape = (experts, rows, columns // 32)
            tensors[f"{key}_blocks"] = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
            tensors[f"{key}_scales"] = torch.randint(122, 125, shape, generator=generator, dtype=torch.uint8)
    save_file(tensors, path, metadata={"format": "pt"})


def _flatten_rotary_settings(config: Any) -> None:
    """Gives the builder the rotary settings under their names of transformers 4, where each kind of layer has its own."""
    settings = getattr(config, "rope_parameters", None)
    if isinstance(settings, dict) and "sliding_attention" in settings:
        config.rope_local_base_freq = settings["sliding_attention"]["rope_theta"]
        config.rope_theta = settings["full_attention"]["rope_theta"]
        config.rope_parameters = dict(settings["full_attention"])


def write(name: str, folder: Path, seed: int = 0) -> Path:
    """Writes one model folder, as the builder makes it, for the CPU where it runs there.

    Args:
        name: architecture and precision, ``llama-int4`` for instance.
        folder: the model folder; it is made.
        seed: of the weights, the same in every precision.
    """
    architecture, _, precision = name.rpartition("-")
    if name not in names():
        raise SystemExit(f"no decoder {name!r}; --list shows the names")
    kind, more = (PRECISIONS | PRECISIONS_OF_GPUS)[precision]
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = Path(scratch) / "checkpoint"
        _write_checkpoint(DECODERS[architecture], checkpoint, seed)
        if any(option.startswith("kv_cache_quant_scheme") for option in more):
            scales = Path(scratch) / "scales.json"
            _write_scales(DECODERS[architecture], scales, seed)
            more = (*more, f"kv_cache_scale_file={scales}")
        provider = "cpu" if precision in PRECISIONS else "cuda"
        build(checkpoint, folder, kind, (*DECODERS[architecture].options, *more), provider)
    return folder


def build(
    checkpoint: Path, folder: Path, precision: str = "fp32", options: tuple[str, ...] = (), provider: str = "cpu"
) -> None:
    """Makes a model folder by the builder.

    Args:
        checkpoint: a folder of transformers, with a tokenizer.
        folder: the model folder; it is made.
        precision: the builder's.
        options: extra options of the builder.
        provider: ONNX Runtime's, ``cpu`` or ``cuda``.
    """
    from onnxruntime_genai.models.builder import create_model, parse_extra_options

    with tempfile.TemporaryDirectory() as cache:
        given = ("", str(checkpoint), str(folder), precision, provider, cache)
        parsed = parse_extra_options(*given, list(options))
        _flatten_rotary_settings(parsed["hf_details"]["hf_config"])
        create_model(*given, **parsed)
    config = folder / "genai_config.json"
    if not json.loads(config.read_text(encoding="utf-8"))["search"].get("past_present_share_buffer"):
        print(f"{folder.name}: the builder does not share the buffers of past and present", file=sys.stderr)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="Builds small decoders with random weights by onnxruntime-genai.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all small ones")
    parser.add_argument("-o", "--output", type=Path, metavar="DIR")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--list", action="store_true")
    arguments = parser.parse_args()
    if arguments.list or arguments.output is None:
        print("\n".join(names()))
        return 0
    for name in arguments.names or [f"{n}-{p}" for n in TESTED for p in PRECISIONS]:
        print(write(name, arguments.output / name, arguments.seed), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
