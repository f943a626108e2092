# SPDX-License-Identifier: Apache-2.0
"""The paper's models and ModernBERT by torch.compile (max-autotune) in fp16, with the same masks, as captured graphs.

Layers are transformers' own. Four of them are compiled at a time, once for all groups, since a model's worth of code takes
minutes to compile; what goes before and after them is compiled, too, and the whole model is one captured graph.
Attention is scaled_dot_product_attention with the mask as a bias that is ready: cuDNN's where it takes the problem, else the
memory-efficient kernel. Where transformers makes more of a layer than its exported graph has (a bias of zeros in the cross
attention of T5, its search for infinities in fp16), that is left out. ModernBERT's windows are FlexAttention's, with its
block mask ready; the layers that attend everything have no mask.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.core.candidate import require
from bench.gpu.device_lock import DeviceLock
from stof.files import strict_json, write_text
from stof.terminal import say

GROUP = 4  # layers that are compiled as one
_PERIOD = 3  # the same where every third attends everything
_ALLOWED = 0.02
Run = Callable[[], Any]


def _attention(torch: Any) -> Callable[..., Any]:
    """Transformers' attention function."""
    flex: Any = importlib.import_module("torch.nn.attention.flex_attention")

    def attend(
        module: Any,
        query: Any,
        key: Any,
        value: Any,
        mask: Any,
        scaling: Any = None,
        position_bias: Any = None,
        **_: Any,
    ) -> Any:
        bias = mask if position_bias is None else position_bias  # has the mask added
        if getattr(module, "sees_everything", False):
            bias = None
        if isinstance(bias, flex.BlockMask):
            found = flex.flex_attention(query, key, value, block_mask=bias, scale=scaling)
            return found.transpose(1, 2).contiguous(), None
        found = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scaling)
        return found.transpose(1, 2).contiguous(), None

    return attend


def _first(found: Any) -> Any:
    return found[0] if isinstance(found, tuple) else found


def _groups(layers: Any, size: int = GROUP) -> list[Any]:
    torch: Any = require("torch")
    own = list(layers)
    return [torch.nn.ModuleList(own[i : i + size]) for i in range(0, len(own), size)]


def bert(core: Any, compiled: Callable[[Any], Any], ids: Any, mask: Any) -> Run:
    """BertModel without its pooler."""
    embed = compiled(lambda x: core.embeddings(input_ids=x))

    def some(layers: Any, x: Any, mask: Any) -> Any:
        for layer in layers:
            x = _first(layer(x, mask))
        return x

    return _run_groups(embed, compiled(some), _groups(core.encoder.layer), None, ids, mask)


def vit(core: Any, compiled: Callable[[Any], Any], pixels: Any, mask: Any) -> Run:
    """ViTModel without its pooler."""

    def some(layers: Any, x: Any, mask: Any) -> Any:
        for layer in layers:
            x = _first(layer(x, mask))
        return x

    embed, last = compiled(lambda x: core.embeddings(x)), compiled(lambda x: core.layernorm(x))
    return _run_groups(embed, compiled(some), _groups(core.layers), last, pixels, mask)


def gpt2(core: Any, compiled: Callable[[Any], Any], ids: Any, mask: Any) -> Run:
    """GPT2Model."""
    torch: Any = require("torch")
    embed = compiled(lambda x: core.wte(x) + core.wpe(torch.arange(x.shape[1], device=x.device)))

    def some(layers: Any, x: Any, mask: Any) -> Any:
        for layer in layers:
            x = _first(layer(x, None, mask))
        return x

    return _run_groups(embed, compiled(some), _groups(core.h), compiled(lambda x: core.ln_f(x)), ids, mask)


def llama(core: Any, compiled: Callable[[Any], Any], ids: Any, mask: Any) -> Run:
    """LlamaModel; sines and cosines are made once, in the compiled part before the layers."""
    torch: Any = require("torch")

    def begin(ids: Any) -> tuple[Any, Any, Any]:
        x = core.embed_tokens(ids)
        return (x, *core.rotary_emb(x, torch.arange(ids.shape[1], device=ids.device)[None]))

    def some(layers: Any, x: Any, mask: Any, cos: Any, sin: Any) -> Any:
        for layer in layers:
            x = _first(layer(x, attention_mask=mask, position_embeddings=(cos, sin)))
        return x

    embed, middle, last = compiled(begin), compiled(some), compiled(lambda x: core.norm(x))
    groups = _groups(core.layers)

    def run() -> Any:
        x, cos, sin = embed(ids)
        for group in groups:
            x = middle(group, x, mask, cos, sin)
        return last(x)

    return run


def modernbert(core: Any, compiled: Callable[[Any], Any], ids: Any, mask: Any) -> Run:
    """ModernBertModel without padding; ``mask`` is that of the windows."""
    torch: Any = require("torch")
    masks = {"full_attention": None, "sliding_attention": mask}

    def begin(ids: Any) -> tuple[Any, dict[str, Any]]:
        x = core.embeddings(input_ids=ids)
        places = torch.arange(ids.shape[1], device=ids.device)[None]
        return x, {kind: core.rotary_emb(x, places, kind) for kind in masks}

    def some(layers: Any, x: Any, rotary: dict[str, Any]) -> Any:
        for layer in layers:
            kind = layer.attention_type
            x = _first(layer(x, attention_mask=masks[kind], position_embeddings=rotary[kind]))
        return x

    embed, middle, last = compiled(begin), compiled(some), compiled(lambda x: core.final_norm(x))
    groups = [*_groups(core.layers[:1]), *_groups(core.layers[1:], _PERIOD)]  # the first layer has no norm

    def run() -> Any:
        x, rotary = embed(ids)
        for group in groups:
            x = middle(group, x, rotary)
        return last(x)

    return run


def t5(core: Any, compiled: Callable[[Any], Any], ids: Any, mask: Any) -> Run:
    """T5Model with as many tokens for the decoder; the bias of positions holds the mask, made once for a stack."""
    for layer in core.decoder.block:
        layer.layer[1].EncDecAttention.sees_everything = True

    def begin(stack: Any, ids: Any, mask: Any) -> tuple[Any, Any]:
        length = ids.shape[1]
        bias = stack.block[0].layer[0].SelfAttention.compute_bias(length, length, device=ids.device)
        return stack.embed_tokens(ids), (bias.to(mask.dtype) + mask).contiguous()

    def encode(layers: Any, x: Any, bias: Any) -> Any:
        for layer in layers:
            x = layer.layer[0](x, position_bias=bias)[0]
            x = layer.layer[-1](x)
        return x

    def decode(layers: Any, x: Any, bias: Any, encoded: Any, none: Any) -> Any:
        for layer in layers:
            x = layer.layer[0](x, position_bias=bias)[0]
            x = layer.layer[1](x, key_value_states=encoded, position_bias=none)[0]
            x = layer.layer[-1](x)
        return x

    starts = [compiled(functools.partial(begin, s)) for s in (core.encoder, core.decoder)]
    encoding, decoding = compiled(encode), compiled(decode)
    ends = [compiled(lambda x, s=s: s.final_layer_norm(x)) for s in (core.encoder, core.decoder)]
    encoders, decoders = _groups(core.encoder.block), _groups(core.decoder.block)
    none = mask.new_zeros(1)  # in place of the bias that transformers would make

    def run() -> Any:
        x, bias = starts[0](ids, mask)
        for group in encoders:
            x = encoding(group, x, bias)
        encoded = ends[0](x)
        x, bias = starts[1](ids, mask)
        for group in decoders:
            x = decoding(group, x, bias, encoded, none)
        return ends[1](x)

    return run


def _run_groups(embed: Any, middle: Any, groups: Sequence[Any], last: Any, given: Any, mask: Any) -> Run:
    def run() -> Any:
        x = embed(given)
        for group in groups:
            x = middle(group, x, mask)
        return x if last is None else last(x)

    return run


_MODELS = {
    "ModernBertModel": modernbert,
    "BertModel": bert,
    "ViTModel": vit,
    "GPT2Model": gpt2,
    "LlamaModel": llama,
    "T5Model": t5,
}


def build_model(
    name: str, shape: tuple[int, int], device: str, dtype: Any, models: str, layers: int = 0
) -> tuple[Any, ...]:
    """The model's class name, the model, its input, and its mask as a bias; ``layers`` > 0 keeps that many layers."""
    torch, transformers = require("torch"), require("transformers")
    sys.path.insert(0, models)
    paper, first, bigbird = (importlib.import_module(m) for m in ("paper", "first", "bigbird"))
    what = paper.PAPER[name] if name in paper.PAPER else first.FIRST[name]
    config = getattr(transformers, what.config)(**what.settings)
    for key in ("num_hidden_layers", "num_layers", "num_decoder_layers"):
        if layers and hasattr(config, key):
            setattr(config, key, layers)
    transformers.AttentionInterface.register("stof_bench", _attention(torch))
    config._attn_implementation = "stof_bench"
    torch.manual_seed(0)
    with torch.device(device):
        core = getattr(transformers, what.model)(config).eval().to(dtype)
        batch, length = shape
        if what.inputs == "bigbird-pixels":
            given = torch.randn(batch, config.num_channels, *config.image_size, dtype=dtype)
            length += 1
        else:
            given = torch.randint(0, 1000, (batch, length))
        if what.model == "ModernBertModel":
            return what.model, core, given, _window(config.sliding_window, length, device)
        bigbird.add_weights(core, length)
        allowed = bigbird.mask(core.to(device), length)
        bias = torch.zeros(allowed.shape, dtype=dtype).masked_fill_(~allowed, float("-inf"))
    return what.model, core, given, bias


def _window(reach: int, length: int, device: str) -> Any:
    flex: Any = importlib.import_module("torch.nn.attention.flex_attention")

    def allowed(_b: Any, _h: Any, q: Any, k: Any) -> Any:
        return (q - k).abs() <= reach

    return flex.create_block_mask(allowed, None, None, length, length, device=device)


def measure_point(name: str, shape: tuple[int, int], rounds: int, models: str, lock: DeviceLock) -> dict[str, Any]:
    """Compiles a model, compares it with the same layers uncompiled, and times it."""
    torch: Any = require("torch")
    timing = importlib.import_module("bench.gpu.timing")
    begin = time.monotonic()
    failure: Exception = ValueError("no attention kernel")
    torch.set_grad_enabled(False)
    config = torch._dynamo.config
    config.recompile_limit, config.automatic_dynamic_shapes = 32, False
    lock.around_tuning()
    stream = torch.cuda.Stream()
    attention = importlib.import_module("torch.nn.attention")
    kernels = attention.SDPBackend
    with torch.cuda.stream(stream):
        kind, core, given, bias = build_model(name, shape, "cuda", torch.float16, models)
    plain = _MODELS[kind](core, lambda f: f, given, bias)
    for order in ([kernels.CUDNN_ATTENTION, kernels.EFFICIENT_ATTENTION], [kernels.EFFICIENT_ATTENTION]):
        try:
            with torch.cuda.stream(stream), attention.sdpa_kernel(order, set_priority=True), lock.held():
                expected = plain().float()
                torch.cuda.synchronize()
            break
        except RuntimeError as reason:
            failure = reason
    else:
        raise failure
    with torch.cuda.stream(stream), attention.sdpa_kernel(order, set_priority=True):
        compiler = functools.partial(torch.compile, mode="max-autotune-no-cudagraphs", dynamic=False)
        run = _MODELS[kind](core, compiler, given, bias)
        found = run().float()
        error = float((found - expected).abs().max() / (expected.max() - expected.min()))
        del expected, found
        if not error <= _ALLOWED:
            raise ValueError(f"the compiled model differs by {error:.1e} of the range from the same layers uncompiled")
        compiled = time.monotonic() - begin
        with lock.held():
            torch.cuda.synchronize()
            timed = timing.CapturedLaunches(lambda _: run(), 1, stream)
            timed.capture()
            result = timing.interleave_launches([timed], rounds, 0)[0]
    return {
        "model": name if kind == "ModernBertModel" else f"paper-{name}",  # as the tables name it
        "shape": list(shape),
        "us": round(result.median * 1e6, 1),
        "spread_us": [round(result.best * 1e6, 1), round(result.worst * 1e6, 1)],
        "error": float(f"{error:.1e}"),
        "attention": order[0].name,
        "compile_s": round(compiled, 1),
        "graphs": int(torch._dynamo.utils.counters["stats"]["unique_graphs"]),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """``python -m bench.gpu.torch_compile MODEL BATCH LENGTH``: a point, as a line of JSON in a file of DIR."""
    parser = argparse.ArgumentParser(description="One of the paper's models by torch.compile.")
    parser.add_argument("model")
    parser.add_argument("batch", type=int)
    parser.add_argument("length", type=int)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--models", default="models", help="the folder with paper.py")
    parser.add_argument("--results", type=Path, required=True, metavar="DIR")
    parser.add_argument("--lock", type=Path, metavar="FILE", help="what processes that time in turns share")
    given = parser.parse_args(argv)
    lock = DeviceLock(given.lock or given.results / "device.lock")
    record = measure_point(given.model, (given.batch, given.length), given.rounds, given.models, lock)
    path = given.results / f"compiled-{given.model}-{given.batch}-{given.length}.json"
    write_text("results", path, [strict_json.dumps(record)])
    say(strict_json.dumps(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
