# SPDX-License-Identifier: Apache-2.0
"""The architectures of the zoo: those whose masks are usual, and the first that have windows, chunks, biases and groups."""

from __future__ import annotations

from dataclasses import replace

from architectures import ALL, EAGER, TORCH, Architecture, only, without
from zoo_more import MORE
from zoo_sizes import ENCODER, FEW, MIXED, MODERNBERT, SEQ2SEQ, SPEECH, T5, TOKENS, TRACED, VISION, decoder

ZOO: dict[str, Architecture] = {
    # Decoders: causal, and causal with windows or chunks.
    "llama": decoder("LlamaConfig", "LlamaModel"),
    "llama-cached": decoder("LlamaConfig", "LlamaModel", "cached", TORCH, use_cache=True),
    "llama-packed": decoder("LlamaConfig", "LlamaModel", "packed", without(ALL, "torchscript")),
    "mistral-cached": decoder("MistralConfig", "MistralModel", "cached", TORCH, sliding_window=20, use_cache=True),
    "mixtral": decoder(
        "MixtralConfig", "MixtralModel", "text", without(ALL, "torchscript"), sliding_window=20, num_local_experts=2
    ),
    "ministral": decoder("MinistralConfig", "MinistralModel", **MIXED),
    "gemma2": decoder("Gemma2Config", "Gemma2Model", "text", EAGER, **MIXED, query_pre_attn_scalar=8),
    "gemma3-cached": decoder("Gemma3TextConfig", "Gemma3TextModel", "cached", TORCH, **(MIXED | {"use_cache": True})),
    "gpt-oss": decoder(
        "GptOssConfig",
        "GptOssModel",
        "text",
        without(EAGER, "torchscript"),
        **MIXED,
        num_local_experts=2,
        num_experts_per_tok=1,
    ),
    "qwen2": decoder("Qwen2Config", "Qwen2Model", use_sliding_window=True, **MIXED, max_window_layers=1),
    "qwen3": decoder("Qwen3Config", "Qwen3Model", use_sliding_window=True, **MIXED, max_window_layers=1),
    "phi3": decoder("Phi3Config", "Phi3Model", sliding_window=20),
    "starcoder2": decoder("Starcoder2Config", "Starcoder2Model", sliding_window=20),
    "cohere2": decoder("Cohere2Config", "Cohere2Model", "text", without(ALL, "torchscript"), **MIXED),
    "olmo3": decoder("Olmo3Config", "Olmo3Model", **MIXED),
    "exaone4": decoder("Exaone4Config", "Exaone4Model", **MIXED),
    "smollm3": decoder("SmolLM3Config", "SmolLM3Model", use_sliding_window=True, **MIXED, no_rope_layers=[1, 0]),
    "granite-swa": decoder("GraniteSWAConfig", "GraniteSWAModel", "text", EAGER, **MIXED),
    "llama4": decoder(
        "Llama4TextConfig",
        "Llama4TextModel",
        "text",
        without(ALL, "torchscript"),
        attention_chunk_size=16,
        intermediate_size_mlp=40,
        num_local_experts=2,
        layer_types=["chunked_attention", "full_attention"],
        no_rope_layers=[0, 0],
    ),
    "doge": decoder("DogeConfig", "DogeModel", keep_window_size=20),
    "gpt-neo": Architecture(
        "GPTNeoConfig",
        "GPTNeoModel",
        {
            "vocab_size": 96,
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "intermediate_size": 40,
            "max_position_embeddings": 256,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 20,
            "use_cache": False,
        },
        forms=EAGER,
    ),
    # The tracer alone from here on: their masks are those of others, their projections, norms and rotations are not.
    "gemma": decoder("GemmaConfig", "GemmaModel", forms=TRACED),
    "granite": decoder("GraniteConfig", "GraniteModel", forms=TRACED),
    "olmo2": decoder("Olmo2Config", "Olmo2Model", forms=TRACED),
    "stablelm": decoder("StableLmConfig", "StableLmModel", forms=TRACED),
    "nemotron": decoder("NemotronConfig", "NemotronModel", forms=TRACED),
    "phi": decoder("PhiConfig", "PhiModel", forms=TRACED),
    "seed-oss": decoder("SeedOssConfig", "SeedOssModel", forms=TRACED),
    "arcee": decoder("ArceeConfig", "ArceeModel", forms=TRACED),
    "biogpt": Architecture("BioGptConfig", "BioGptModel", {**ENCODER, "use_cache": False}, forms=TRACED),
    "gptj": Architecture(
        "GPTJConfig",
        "GPTJModel",
        {
            "vocab_size": 96,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 256,
            "rotary_dim": 4,
            "use_cache": False,
        },
        forms=only(EAGER, "torchscript"),
    ),
    "roberta": Architecture("RobertaConfig", "RobertaModel", {**ENCODER, "pad_token_id": 1}, forms=TRACED),
    "electra": Architecture("ElectraConfig", "ElectraModel", {**ENCODER, "embedding_size": 16}, forms=TRACED),
    "megatron-bert": Architecture("MegatronBertConfig", "MegatronBertModel", ENCODER, forms=only(EAGER, "torchscript")),
    "data2vec-text": Architecture(
        "Data2VecTextConfig", "Data2VecTextModel", {**ENCODER, "pad_token_id": 1}, forms=TRACED
    ),
    "gpt2": Architecture(
        "GPT2Config",
        "GPT2Model",
        {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, "use_cache": False},
    ),
    "gpt-neox": Architecture("GPTNeoXConfig", "GPTNeoXModel", {**ENCODER, "use_cache": False}),
    "opt": Architecture(
        "OPTConfig",
        "OPTModel",
        {**ENCODER, "ffn_dim": 40, "word_embed_proj_dim": 32, "use_cache": False, "pad_token_id": 1},
    ),
    "bloom": Architecture(
        "BloomConfig",
        "BloomModel",
        {"vocab_size": 96, "hidden_size": 32, "n_layer": 2, "n_head": 4, "use_cache": False},
        forms=EAGER,
    ),
    "mpt": Architecture(
        "MptConfig",
        "MptModel",
        {"vocab_size": 96, "d_model": 32, "n_layers": 2, "n_heads": 4, "use_cache": False},
        forms=EAGER,
    ),
    "falcon-alibi": Architecture(
        "FalconConfig",
        "FalconModel",
        {**ENCODER, "alibi": True, "use_cache": False},
        forms=without(ALL, "torchscript"),
    ),
    # In half precision, and of one fixed size, for which exporters store masks as constants.
    "mistral-fp16": replace(decoder("MistralConfig", "MistralModel", sliding_window=20, forms=FEW), dtype="float16"),
    "gemma2-bf16": replace(
        decoder("Gemma2Config", "Gemma2Model", **MIXED, query_pre_attn_scalar=8, forms=only(EAGER, "dynamo")),
        dtype="bfloat16",
    ),
    "qwen3-fixed": decoder(
        "Qwen3Config", "Qwen3Model", "fixed", use_sliding_window=True, **MIXED, max_window_layers=1, forms=TORCH
    ),
    "modernbert-fixed": Architecture("ModernBertConfig", "ModernBertModel", MODERNBERT, "fixed", TORCH),
    # Encoders.
    "xlm-roberta": Architecture("XLMRobertaConfig", "XLMRobertaModel", {**ENCODER, "pad_token_id": 1}),
    "distilbert": Architecture(
        "DistilBertConfig",
        "DistilBertModel",
        {"vocab_size": 96, "dim": 32, "hidden_dim": 40, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 256},
    ),
    "eurobert": Architecture("EuroBertConfig", "EuroBertModel", {**ENCODER, **TOKENS, "mask_token_id": 3}),
    "mpnet": Architecture("MPNetConfig", "MPNetModel", {**ENCODER, "pad_token_id": 1}, forms=EAGER),
    "deberta-v2": Architecture(
        "DebertaV2Config",
        "DebertaV2Model",
        {**ENCODER, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 16},
        forms=EAGER,
    ),
    "longformer": Architecture(
        "LongformerConfig",
        "LongformerModel",
        {**ENCODER, "attention_window": [8, 8]},
        forms=only(EAGER, "torchscript"),
    ),
    "big-bird": Architecture(
        "BigBirdConfig", "BigBirdModel", {**ENCODER, "attention_type": "original_full"}, forms=EAGER
    ),
    "modernbert-decoder": Architecture(
        "ModernBertDecoderConfig",
        "ModernBertDecoderModel",
        {
            **ENCODER,
            **TOKENS,
            "cls_token_id": 1,
            "sep_token_id": 2,
            "local_attention": 32,
            "layer_types": ["sliding_attention", "full_attention"],
            "use_cache": False,
        },
    ),
    # Encoder-decoders.
    "t5": Architecture("T5Config", "T5Model", T5, "seq2seq"),
    "mt5": Architecture("MT5Config", "MT5Model", {**T5, "feed_forward_proj": "gated-gelu"}, "seq2seq"),
    "longt5": Architecture("LongT5Config", "LongT5Model", {**T5, "local_radius": 7}, "seq2seq", EAGER),
    "bart": Architecture("BartConfig", "BartModel", SEQ2SEQ, "seq2seq"),
    "marian": Architecture("MarianConfig", "MarianModel", SEQ2SEQ, "seq2seq"),
    "pegasus": Architecture("PegasusConfig", "PegasusModel", SEQ2SEQ, "seq2seq"),
    "m2m-100": Architecture("M2M100Config", "M2M100Model", SEQ2SEQ, "seq2seq"),
    "prophetnet": Architecture(
        "ProphetNetConfig",
        "ProphetNetModel",
        {
            "vocab_size": 96,
            "hidden_size": 32,
            "encoder_ffn_dim": 40,
            "decoder_ffn_dim": 40,
            "num_encoder_layers": 1,
            "num_decoder_layers": 1,
            "num_encoder_attention_heads": 4,
            "num_decoder_attention_heads": 4,
            "max_position_embeddings": 256,
            "use_cache": False,
        },
        "seq2seq",
        without(EAGER, "dynamo"),
    ),
    "whisper": Architecture(
        "WhisperConfig",
        "WhisperModel",
        {**SEQ2SEQ, "num_mel_bins": 16, "max_source_positions": 50, "max_target_positions": 128},
        "whisper",
        without(ALL, "torchscript"),
    ),
    # Vision and audio.
    "vit": Architecture("ViTConfig", "ViTModel", VISION, "pixels"),
    "dinov2": Architecture("Dinov2Config", "Dinov2Model", VISION, "pixels"),
    "siglip": Architecture("SiglipVisionConfig", "SiglipVisionModel", VISION, "pixels"),
    "clip": Architecture(
        "CLIPConfig",
        "CLIPModel",
        {"text_config": {**ENCODER, **TOKENS}, "vision_config": VISION, "projection_dim": 16},
        "clip",
    ),
    "swin": Architecture(
        "SwinConfig",
        "SwinModel",
        {"image_size": 64, "patch_size": 4, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4},
        "pixels",
    ),
    "swinv2": Architecture(
        "Swinv2Config",
        "Swinv2Model",
        {"image_size": 64, "patch_size": 4, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4},
        "pixels",
        without(EAGER, "transformers"),
    ),
    "sam": Architecture(
        "SamVisionConfig",
        "SamVisionModel",
        {
            **VISION,
            "image_size": 64,
            "mlp_dim": 40,
            "output_channels": 16,
            "window_size": 5,
            "global_attn_indexes": [1],
            "num_pos_feats": 16,
        },
        "pixels",
    ),
    "wav2vec2": Architecture("Wav2Vec2Config", "Wav2Vec2Model", SPEECH, "wave"),
    "hubert": Architecture("HubertConfig", "HubertModel", SPEECH, "wave"),
    "ast": Architecture(
        "ASTConfig", "ASTModel", {**VISION, "num_mel_bins": 32, "max_length": 64, "patch_size": 8}, "spectrogram"
    ),
    **MORE,
}
