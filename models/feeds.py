# SPDX-License-Identifier: Apache-2.0
"""What an architecture is fed with while it is exported: example tensors, and which of their axes are dynamic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from bigbird import mask

B, S, T, P = "batch", "sequence", "target", "past"


@dataclass
class Feed:
    """Example inputs in order, their dynamic axes, the outputs' names, and how the core is called."""

    tensors: dict[str, Any]
    axes: dict[str, dict[int, str]]
    outputs: tuple[str, ...]
    call: Callable[..., Any]  # (core, *tensors) -> tensor or tuple
    output_axes: dict[str, dict[int, str]] = field(default_factory=dict)
    task: str = ""  # what optimum calls it, and the file that is meant


def _ids(torch: Any, rows: int, length: int) -> Any:
    return torch.randint(3, 90, (rows, length))


def _mask(torch: Any, rows: int, length: int) -> Any:
    mask = torch.ones(rows, length, dtype=torch.int64)
    mask[0, :3] = 0
    return mask


def _text(torch: Any, config: Any) -> Feed:
    tensors = {"input_ids": _ids(torch, 2, 20), "attention_mask": _mask(torch, 2, 20)}

    def call(core: Any, input_ids: Any, attention_mask: Any) -> Any:
        return core(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state

    return Feed(tensors, {n: {0: B, 1: S} for n in tensors}, ("last_hidden_state",), call)


def _fixed(torch: Any, config: Any) -> Feed:
    given = _text(torch, config)
    tensors = {"input_ids": _ids(torch, 2, 48), "attention_mask": _mask(torch, 2, 48)}
    return Feed(tensors, {n: {} for n in tensors}, given.outputs, given.call)


def _packed(torch: Any, config: Any) -> Feed:
    """Documents side by side: positions that begin again are what keeps them apart."""
    ids = _ids(torch, 2, 20)
    places = torch.cat([torch.arange(8), torch.arange(12)]).expand(2, 20).contiguous()

    def call(core: Any, input_ids: Any, position_ids: Any) -> Any:
        return core(input_ids=input_ids, position_ids=position_ids, use_cache=False).last_hidden_state

    tensors = {"input_ids": ids, "position_ids": places}
    return Feed(tensors, {n: {0: B, 1: S} for n in tensors}, ("last_hidden_state",), call)


def _cached(torch: Any, config: Any) -> Feed:
    """A later step of generation: past keys and values in, those with the new ones appended out."""
    from transformers import DynamicCache

    layers, heads, size = config.num_hidden_layers, config.num_key_value_heads, config.head_dim
    tensors = {"input_ids": _ids(torch, 2, 5), "attention_mask": _mask(torch, 2, 15)}
    axes: dict[str, dict[int, str]] = {"input_ids": {0: B, 1: S}, "attention_mask": {0: B, 1: "total"}}
    outputs = ["last_hidden_state"]
    output_axes = {}
    for i in range(layers):
        for part in ("key", "value"):
            tensors[f"past.{i}.{part}"] = torch.randn(2, heads, 10, size)
            axes[f"past.{i}.{part}"] = {0: B, 2: P}
            outputs.append(f"present.{i}.{part}")
            output_axes[f"present.{i}.{part}"] = {0: B, 2: "total"}

    def call(core: Any, input_ids: Any, attention_mask: Any, *past: Any) -> Any:
        cache = DynamicCache()
        for i in range(layers):
            cache.update(past[2 * i], past[2 * i + 1], i)
        given = core(input_ids=input_ids, attention_mask=attention_mask, past_key_values=cache, use_cache=True)
        present = [x for layer in given.past_key_values.layers for x in (layer.keys, layer.values)]
        return (given.last_hidden_state, *present)

    return Feed(tensors, axes, tuple(outputs), call, output_axes)


def _seq2seq(torch: Any, config: Any) -> Feed:
    tensors = {
        "input_ids": _ids(torch, 2, 20),
        "attention_mask": _mask(torch, 2, 20),
        "decoder_input_ids": _ids(torch, 2, 14),
        "decoder_attention_mask": torch.ones(2, 14, dtype=torch.int64),
    }

    def call(core: Any, input_ids: Any, attention_mask: Any, decoder_ids: Any, decoder_mask: Any) -> Any:
        return core(
            input_ids=input_ids,
            attention_mask=attention_mask,
            decoder_input_ids=decoder_ids,
            decoder_attention_mask=decoder_mask,
            use_cache=False,
        ).last_hidden_state

    axes = {n: {0: B, 1: T if n.startswith("decoder") else S} for n in tensors}
    return Feed(tensors, axes, ("last_hidden_state",), call, {"last_hidden_state": {0: B, 1: T}})


def _whisper(torch: Any, config: Any) -> Feed:
    frames = 2 * config.max_source_positions
    tensors = {
        "input_features": torch.randn(2, config.num_mel_bins, frames),
        "decoder_input_ids": _ids(torch, 2, 14),
    }

    def call(core: Any, features: Any, decoder_ids: Any) -> Any:
        return core(input_features=features, decoder_input_ids=decoder_ids, use_cache=False).last_hidden_state

    axes = {"input_features": {0: B}, "decoder_input_ids": {0: B, 1: T}}
    return Feed(tensors, axes, ("last_hidden_state",), call, {"last_hidden_state": {0: B, 1: T}})


def _pixels(torch: Any, config: Any) -> Feed:
    tensors = {"pixel_values": torch.randn(2, 3, config.image_size, config.image_size)}

    def call(core: Any, pixel_values: Any) -> Any:
        return core(pixel_values=pixel_values).last_hidden_state

    return Feed(tensors, {"pixel_values": {0: B}}, ("last_hidden_state",), call, {"last_hidden_state": {0: B}})


def _clip(torch: Any, config: Any) -> Feed:
    size = config.vision_config.image_size
    tensors = {
        "input_ids": _ids(torch, 2, 20),
        "attention_mask": _mask(torch, 2, 20).flip(1),
        "pixel_values": torch.randn(3, 3, size, size),
    }

    def call(core: Any, input_ids: Any, attention_mask: Any, pixel_values: Any) -> Any:
        given = core(input_ids=input_ids, attention_mask=attention_mask, pixel_values=pixel_values)
        return (given.text_model_output.last_hidden_state, given.image_embeds)

    axes = {"input_ids": {0: B, 1: S}, "attention_mask": {0: B, 1: S}, "pixel_values": {0: "images"}}
    names = ("text_hidden_state", "image_embeds")
    return Feed(tensors, axes, names, call, {names[0]: {0: B, 1: S}, names[1]: {0: "images"}})


def _wave(torch: Any, config: Any) -> Feed:
    tensors = {"input_values": torch.randn(2, 640)}

    def call(core: Any, input_values: Any) -> Any:
        return core(input_values=input_values).last_hidden_state

    axes = {"input_values": {0: B, 1: "samples"}}
    return Feed(tensors, axes, ("last_hidden_state",), call, {"last_hidden_state": {0: B, 1: "frames"}})


def _spectrogram(torch: Any, config: Any) -> Feed:
    tensors = {"input_values": torch.randn(2, config.max_length, config.num_mel_bins)}

    def call(core: Any, input_values: Any) -> Any:
        return core(input_values=input_values).last_hidden_state

    return Feed(tensors, {"input_values": {0: B}}, ("last_hidden_state",), call, {"last_hidden_state": {0: B}})


def _frames(torch: Any, config: Any) -> Feed:
    """Frames of speech, of which some are padding."""
    size = getattr(config, "num_mel_bins", None) or config.feature_projection_input_dim
    length = 160 if hasattr(config, "num_mel_bins") else 20  # the former are subsampled
    tensors = {"input_features": torch.randn(2, length, size), "attention_mask": _mask(torch, 2, length).flip(1)}

    def call(core: Any, input_features: Any, attention_mask: Any) -> Any:
        return core(input_features=input_features, attention_mask=attention_mask).last_hidden_state

    axes = {n: {0: B, 1: "frames"} for n in tensors}
    return Feed(tensors, axes, ("last_hidden_state",), call, {"last_hidden_state": {0: B, 1: "positions"}})


def _near_frames(torch: Any, config: Any) -> Feed:
    """The layers of a speech encoder, in which a frame attends those that are 128 away at most, as local variants do."""
    tensors = {"hidden_states": torch.randn(2, 20, config.hidden_size), "attention_mask": _mask(torch, 2, 20).flip(1)}

    def call(core: Any, hidden_states: Any, attention_mask: Any) -> Any:
        at = torch.arange(hidden_states.shape[1])
        is_near = (at[:, None] - at[None, :]).abs() <= 128
        allowed = attention_mask.bool()[:, None, None, :] & is_near[None, None]
        if hasattr(core, "encode_positions"):
            positions = core.encode_positions(hidden_states)
            for layer in core.layers:
                hidden_states = layer(hidden_states, attention_mask=allowed, position_embeddings=positions)
            return hidden_states
        positions = core.encoder.embed_positions(hidden_states)
        added = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)
        for layer in core.encoder.layers:
            hidden_states = layer(hidden_states, attention_mask=added, relative_position_embeddings=positions)[0]
        return hidden_states

    return Feed(tensors, {n: {0: B, 1: S} for n in tensors}, ("last_hidden_state",), call)


def _speecht5_encoder(torch: Any, config: Any) -> Feed:
    given = _text(torch, config)

    def call(core: Any, input_ids: Any, attention_mask: Any) -> Any:
        return core.speecht5.encoder(input_values=input_ids, attention_mask=attention_mask).last_hidden_state

    return Feed(given.tensors, given.axes, given.outputs, call)


def _vits_encoder(torch: Any, config: Any) -> Feed:
    given = _text(torch, config)
    tensors = {**given.tensors, "padding_mask": torch.ones(2, 20, 1)}

    def call(core: Any, input_ids: Any, attention_mask: Any, padding_mask: Any) -> Any:
        return core.text_encoder(
            input_ids=input_ids, padding_mask=padding_mask, attention_mask=attention_mask
        ).last_hidden_state

    return Feed(tensors, {n: {0: B, 1: S} for n in tensors}, given.outputs, call)


def _bigbird(torch: Any, config: Any) -> Feed:
    """Tokens of which each attends what the model's own BigBird mask allows."""
    tensors = {"input_ids": _ids(torch, 2, 96)}

    def call(core: Any, input_ids: Any) -> Any:
        return core(input_ids=input_ids, attention_mask=mask(core, input_ids.shape[1])).last_hidden_state

    return Feed(tensors, {"input_ids": {0: B, 1: S}}, ("last_hidden_state",), call)


def _bigbird_seq2seq(torch: Any, config: Any) -> Feed:
    """The mask for tokens among themselves, in encoder and decoder; those of the decoder attend all of the encoder's."""
    tensors = {"input_ids": _ids(torch, 2, 96), "decoder_input_ids": _ids(torch, 2, 96)}

    def call(core: Any, input_ids: Any, decoder_ids: Any) -> Any:
        allowed = mask(core, input_ids.shape[1])
        encoded = core.encoder(input_ids=input_ids, attention_mask=allowed)
        return core(
            encoder_outputs=encoded, decoder_input_ids=decoder_ids, decoder_attention_mask=allowed, use_cache=False
        ).last_hidden_state

    axes = {n: {0: B, 1: S} for n in tensors}
    return Feed(tensors, axes, ("last_hidden_state",), call)


def _bigbird_pixels(torch: Any, config: Any) -> Feed:
    height, wide = config.image_size
    length = height * wide // config.patch_size**2 + 1
    tensors = {"pixel_values": torch.randn(2, config.num_channels, height, wide)}

    def call(core: Any, pixel_values: Any) -> Any:
        return core(pixel_values=pixel_values, attention_mask=mask(core, length)).last_hidden_state

    return Feed(tensors, {"pixel_values": {0: B}}, ("last_hidden_state",), call, {"last_hidden_state": {0: B}})


def _texts(torch: Any, output: str, pool: Callable[..., Any], has_types: bool = True) -> Feed:
    """Padded texts; ``pool`` makes of the core's result and the mask what the graph gives."""
    tensors = {"input_ids": _ids(torch, 2, 20), "attention_mask": _mask(torch, 2, 20).flip(1)}
    if has_types:
        tensors["token_type_ids"] = torch.zeros(2, 20, dtype=torch.int64)

    def call(core: Any, *given: Any) -> Any:
        return pool(core(**dict(zip(tensors, given, strict=True))), given[1])

    return Feed(tensors, {n: {0: B, 1: S} for n in tensors}, (output,), call, {output: {0: B}})


def _texts_mean(torch: Any, config: Any) -> Feed:
    """Embeddings of texts: the mean of the real tokens, normalized."""

    def pool(found: Any, mask: Any) -> Any:
        states = found.last_hidden_state
        weights = mask.unsqueeze(-1).expand(states.size()).to(states.dtype)
        mean = (states * weights).sum(1) / weights.sum(1).clamp(min=1e-9)
        return torch.nn.functional.normalize(mean, p=2, dim=1)

    return _texts(torch, "sentence_embedding", pool)


def _texts_first(torch: Any, config: Any) -> Feed:
    """Embeddings of texts: the first token."""
    return _texts(torch, "sentence_embedding", lambda found, _: found.last_hidden_state[:, 0], has_types=False)


def _texts_pairs(torch: Any, config: Any) -> Feed:
    """A logit for each pair of texts."""
    return _texts(torch, "logits", lambda found, _: found.logits)


# Of exports by optimum, which feeds models itself.
_TASKS = {
    "text": "feature-extraction",
    "pixels": "feature-extraction",
    "cached": "text-generation-with-past",
    "seq2seq": "text2text-generation/encoder_model",
    "decoder": "text2text-generation/decoder_model",
    "whisper": "automatic-speech-recognition/decoder_model",
}

_KINDS: dict[str, Callable[[Any, Any], Feed]] = {
    "text": _text,
    "fixed": _fixed,
    "packed": _packed,
    "cached": _cached,
    "seq2seq": _seq2seq,
    "whisper": _whisper,
    "pixels": _pixels,
    "clip": _clip,
    "wave": _wave,
    "spectrogram": _spectrogram,
    "frames": _frames,
    "near-frames": _near_frames,
    "speecht5-encoder": _speecht5_encoder,
    "vits-encoder": _vits_encoder,
    "bigbird": _bigbird,
    "bigbird-seq2seq": _bigbird_seq2seq,
    "bigbird-pixels": _bigbird_pixels,
    "texts-mean": _texts_mean,
    "texts-first": _texts_first,
    "texts-pairs": _texts_pairs,
}


def feed(kind: str, torch: Any, config: Any, dtype: str) -> Feed:
    """The example inputs of a kind for a configuration; floating ones in its type."""
    found = _KINDS[kind](torch, config)
    for name, tensor in found.tensors.items():
        if tensor.is_floating_point():
            found.tensors[name] = tensor.to(getattr(torch, dtype))
    return found


def feed_by_task(kind: str) -> Feed:
    """The same for an exporter that makes the inputs itself."""
    return Feed({}, {}, (), lambda core: core, task=_TASKS[kind])
