# SPDX-License-Identifier: Apache-2.0
"""The architectures of the zoo: tiny, with windows of 20 and less, so that lengths of 40 exceed them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from architectures import ALL, EAGER, OPTIMUM, TORCH, Architecture, Forms, only, without

_NARROW = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 40, "max_position_embeddings": 512}
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 4}
_ENCODER = {**_NARROW, **_LAYERS}
_DECODER = {**_ENCODER, **_TOKENS, "num_key_value_heads": 2, "head_dim": 8, "use_cache": False}
_MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 20}
_MODERNBERT = {**_ENCODER, **_TOKENS, "cls_token_id": 1, "sep_token_id": 2, "local_attention": 16}
_TRACED = only(TORCH, "torchscript")
_UNFUSED: Forms = (("optimum", "eager"),)
_FEW = (("dynamo", "sdpa"), ("dynamo", "eager"), ("torchscript", "eager"))
_SOME: Forms = (("torchscript", "eager"), ("dynamo", "sdpa"))
_SOME_EAGER: Forms = (("torchscript", "eager"), ("dynamo", "eager"))
_GPT = {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
_GROUPS = ("q_groups", "k_groups", "v_groups", "post_attention_groups", "intermediate_groups", "output_groups")
_SEQ2SEQ = {
    "vocab_size": 96,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 40,
    "max_position_embeddings": 256,
    "use_cache": False,
    **_TOKENS,
    "decoder_start_token_id": 2,
}
_T5 = {
    "vocab_size": 96,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 40,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "use_cache": False,
    "decoder_start_token_id": 0,
}
_VISION = {"image_size": 48, "patch_size": 8, "hidden_size": 32, "intermediate_size": 40, **_LAYERS}
_SPEECH = {
    "hidden_size": 32,
    "intermediate_size": 40,
    **_LAYERS,
    "conv_dim": (16, 16),
    "conv_stride": (5, 4),
    "conv_kernel": (10, 8),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "feat_extract_norm": "layer",
    "apply_spec_augment": False,
}


def _decoder(config: str, model: str, inputs: str = "text", forms: Forms = ALL, **settings: Any) -> Architecture:
    return Architecture(config, model, {**_DECODER, **settings}, inputs, forms)


ZOO: dict[str, Architecture] = {
    # Decoders: causal, and causal with windows or chunks.
    "llama": _decoder("LlamaConfig", "LlamaModel"),
    "llama-cached": _decoder("LlamaConfig", "LlamaModel", "cached", TORCH, use_cache=True),
    "llama-packed": _decoder("LlamaConfig", "LlamaModel", "packed", without(ALL, "torchscript")),
    "mistral-cached": _decoder("MistralConfig", "MistralModel", "cached", TORCH, sliding_window=20, use_cache=True),
    "mixtral": _decoder(
        "MixtralConfig", "MixtralModel", "text", without(ALL, "torchscript"), sliding_window=20, num_local_experts=2
    ),
    "ministral": _decoder("MinistralConfig", "MinistralModel", **_MIXED),
    "gemma2": _decoder("Gemma2Config", "Gemma2Model", "text", EAGER, **_MIXED, query_pre_attn_scalar=8),
    "gemma3-cached": _decoder("Gemma3TextConfig", "Gemma3TextModel", "cached", TORCH, **(_MIXED | {"use_cache": True})),
    "gpt-oss": _decoder(
        "GptOssConfig",
        "GptOssModel",
        "text",
        without(EAGER, "torchscript"),
        **_MIXED,
        num_local_experts=2,
        num_experts_per_tok=1,
    ),
    "qwen2": _decoder("Qwen2Config", "Qwen2Model", use_sliding_window=True, **_MIXED, max_window_layers=1),
    "qwen3": _decoder("Qwen3Config", "Qwen3Model", use_sliding_window=True, **_MIXED, max_window_layers=1),
    "phi3": _decoder("Phi3Config", "Phi3Model", sliding_window=20),
    "starcoder2": _decoder("Starcoder2Config", "Starcoder2Model", sliding_window=20),
    "cohere2": _decoder("Cohere2Config", "Cohere2Model", "text", without(ALL, "torchscript"), **_MIXED),
    "olmo3": _decoder("Olmo3Config", "Olmo3Model", **_MIXED),
    "exaone4": _decoder("Exaone4Config", "Exaone4Model", **_MIXED),
    "smollm3": _decoder("SmolLM3Config", "SmolLM3Model", use_sliding_window=True, **_MIXED, no_rope_layers=[1, 0]),
    "granite-swa": _decoder("GraniteSWAConfig", "GraniteSWAModel", "text", EAGER, **_MIXED),
    "llama4": _decoder(
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
    "doge": _decoder("DogeConfig", "DogeModel", keep_window_size=20),
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
    "gemma": _decoder("GemmaConfig", "GemmaModel", forms=_TRACED),
    "granite": _decoder("GraniteConfig", "GraniteModel", forms=_TRACED),
    "olmo2": _decoder("Olmo2Config", "Olmo2Model", forms=_TRACED),
    "stablelm": _decoder("StableLmConfig", "StableLmModel", forms=_TRACED),
    "nemotron": _decoder("NemotronConfig", "NemotronModel", forms=_TRACED),
    "phi": _decoder("PhiConfig", "PhiModel", forms=_TRACED),
    "seed-oss": _decoder("SeedOssConfig", "SeedOssModel", forms=_TRACED),
    "arcee": _decoder("ArceeConfig", "ArceeModel", forms=_TRACED),
    "biogpt": Architecture("BioGptConfig", "BioGptModel", {**_ENCODER, "use_cache": False}, forms=_TRACED),
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
    "roberta": Architecture("RobertaConfig", "RobertaModel", {**_ENCODER, "pad_token_id": 1}, forms=_TRACED),
    "electra": Architecture("ElectraConfig", "ElectraModel", {**_ENCODER, "embedding_size": 16}, forms=_TRACED),
    "megatron-bert": Architecture(
        "MegatronBertConfig", "MegatronBertModel", _ENCODER, forms=only(EAGER, "torchscript")
    ),
    "data2vec-text": Architecture(
        "Data2VecTextConfig", "Data2VecTextModel", {**_ENCODER, "pad_token_id": 1}, forms=_TRACED
    ),
    "gpt2": Architecture(
        "GPT2Config",
        "GPT2Model",
        {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, "use_cache": False},
    ),
    "gpt-neox": Architecture("GPTNeoXConfig", "GPTNeoXModel", {**_ENCODER, "use_cache": False}),
    "opt": Architecture(
        "OPTConfig",
        "OPTModel",
        {**_ENCODER, "ffn_dim": 40, "word_embed_proj_dim": 32, "use_cache": False, "pad_token_id": 1},
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
        {**_ENCODER, "alibi": True, "use_cache": False},
        forms=without(ALL, "torchscript"),
    ),
    # In half precision, and of one fixed size, for which exporters store masks as constants.
    "mistral-fp16": replace(_decoder("MistralConfig", "MistralModel", sliding_window=20, forms=_FEW), dtype="float16"),
    "gemma2-bf16": replace(
        _decoder("Gemma2Config", "Gemma2Model", **_MIXED, query_pre_attn_scalar=8, forms=only(EAGER, "dynamo")),
        dtype="bfloat16",
    ),
    "qwen3-fixed": _decoder(
        "Qwen3Config", "Qwen3Model", "fixed", use_sliding_window=True, **_MIXED, max_window_layers=1, forms=TORCH
    ),
    "modernbert-fixed": Architecture("ModernBertConfig", "ModernBertModel", _MODERNBERT, "fixed", TORCH),
    # Encoders.
    "xlm-roberta": Architecture("XLMRobertaConfig", "XLMRobertaModel", {**_ENCODER, "pad_token_id": 1}),
    "distilbert": Architecture(
        "DistilBertConfig",
        "DistilBertModel",
        {"vocab_size": 96, "dim": 32, "hidden_dim": 40, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 256},
    ),
    "eurobert": Architecture("EuroBertConfig", "EuroBertModel", {**_ENCODER, **_TOKENS, "mask_token_id": 3}),
    "mpnet": Architecture("MPNetConfig", "MPNetModel", {**_ENCODER, "pad_token_id": 1}, forms=EAGER),
    "deberta-v2": Architecture(
        "DebertaV2Config",
        "DebertaV2Model",
        {**_ENCODER, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 16},
        forms=EAGER,
    ),
    "longformer": Architecture(
        "LongformerConfig",
        "LongformerModel",
        {**_ENCODER, "attention_window": [8, 8]},
        forms=only(EAGER, "torchscript"),
    ),
    "big-bird": Architecture(
        "BigBirdConfig", "BigBirdModel", {**_ENCODER, "attention_type": "original_full"}, forms=EAGER
    ),
    "modernbert-decoder": Architecture(
        "ModernBertDecoderConfig",
        "ModernBertDecoderModel",
        {
            **_ENCODER,
            **_TOKENS,
            "cls_token_id": 1,
            "sep_token_id": 2,
            "local_attention": 32,
            "layer_types": ["sliding_attention", "full_attention"],
            "use_cache": False,
        },
    ),
    # Encoder-decoders.
    "t5": Architecture("T5Config", "T5Model", _T5, "seq2seq"),
    "mt5": Architecture("MT5Config", "MT5Model", {**_T5, "feed_forward_proj": "gated-gelu"}, "seq2seq"),
    "longt5": Architecture("LongT5Config", "LongT5Model", {**_T5, "local_radius": 7}, "seq2seq", EAGER),
    "bart": Architecture("BartConfig", "BartModel", _SEQ2SEQ, "seq2seq"),
    "marian": Architecture("MarianConfig", "MarianModel", _SEQ2SEQ, "seq2seq"),
    "pegasus": Architecture("PegasusConfig", "PegasusModel", _SEQ2SEQ, "seq2seq"),
    "m2m-100": Architecture("M2M100Config", "M2M100Model", _SEQ2SEQ, "seq2seq"),
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
        {**_SEQ2SEQ, "num_mel_bins": 16, "max_source_positions": 50, "max_target_positions": 128},
        "whisper",
        without(ALL, "torchscript"),
    ),
    # Vision and audio.
    "vit": Architecture("ViTConfig", "ViTModel", _VISION, "pixels"),
    "dinov2": Architecture("Dinov2Config", "Dinov2Model", _VISION, "pixels"),
    "siglip": Architecture("SiglipVisionConfig", "SiglipVisionModel", _VISION, "pixels"),
    "clip": Architecture(
        "CLIPConfig",
        "CLIPModel",
        {"text_config": {**_ENCODER, **_TOKENS}, "vision_config": _VISION, "projection_dim": 16},
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
            **_VISION,
            "image_size": 64,
            "mlp_dim": 40,
            "output_channels": 16,
            "window_size": 5,
            "global_attn_indexes": [1],
            "num_pos_feats": 16,
        },
        "pixels",
    ),
    "wav2vec2": Architecture("Wav2Vec2Config", "Wav2Vec2Model", _SPEECH, "wave"),
    "hubert": Architecture("HubertConfig", "HubertModel", _SPEECH, "wave"),
    "ast": Architecture(
        "ASTConfig", "ASTModel", {**_VISION, "num_mel_bins": 32, "max_length": 64, "patch_size": 8}, "spectrogram"
    ),
    # Masks, biases, groups of heads and cross-attention that none of the above has.
    "t5gemma": Architecture(
        "T5GemmaConfig",
        "T5GemmaModel",
        {"encoder": {**_DECODER, **_MIXED}, "decoder": {**_DECODER, **_MIXED}},
        "seq2seq",
        _SOME_EAGER,
    ),
    "umt5": Architecture("UMT5Config", "UMT5Model", _T5, "seq2seq", only(EAGER, "torchscript")),
    "bigbird-pegasus": Architecture(
        "BigBirdPegasusConfig",
        "BigBirdPegasusModel",
        {**_SEQ2SEQ, "attention_type": "original_full"},
        "seq2seq",
        only(EAGER, "torchscript"),
    ),
    "blenderbot": Architecture("BlenderbotConfig", "BlenderbotModel", _SEQ2SEQ, "seq2seq", _TRACED),
    "longt5-global": Architecture(
        "LongT5Config",
        "LongT5Model",
        {**_T5, "local_radius": 7, "encoder_attention_type": "transient-global", "global_block_size": 4},
        "seq2seq",
        only(EAGER, "torchscript"),
    ),
    "recurrent-gemma": _decoder(
        "RecurrentGemmaConfig",
        "RecurrentGemmaModel",
        forms=only(EAGER, "torchscript"),
        attention_window_size=20,
        block_types=["attention"],
        lru_width=32,
    ),
    "vaultgemma": _decoder(
        "VaultGemmaConfig", "VaultGemmaModel", forms=only(EAGER, "torchscript"), **_MIXED, query_pre_attn_scalar=8
    ),
    "glm4": _decoder("Glm4Config", "Glm4Model", forms=(("dynamo", "sdpa"), ("transformers", "sdpa"))),
    "lfm2": _decoder(
        "Lfm2Config",
        "Lfm2Model",
        forms=_TRACED,
        layer_types=["full_attention", "conv"],
        block_ff_dim=40,
        block_auto_adjust_ff_dim=False,
    ),
    "diffllama": _decoder("DiffLlamaConfig", "DiffLlamaModel", forms=(("dynamo", "sdpa"),)),
    "openai-gpt": Architecture("OpenAIGPTConfig", "OpenAIGPTModel", _GPT, forms=_SOME_EAGER),
    "codegen": Architecture(
        "CodeGenConfig", "CodeGenModel", {**_GPT, "rotary_dim": 4, "use_cache": False}, forms=only(EAGER, "torchscript")
    ),
    "gpt-bigcode": Architecture("GPTBigCodeConfig", "GPTBigCodeModel", {**_GPT, "use_cache": False}, forms=_TRACED),
    "xglm": Architecture(
        "XGLMConfig",
        "XGLMModel",
        {
            "vocab_size": 96,
            "d_model": 32,
            "ffn_dim": 40,
            "num_layers": 2,
            "attention_heads": 4,
            "max_position_embeddings": 256,
            "use_cache": False,
        },
        forms=only(EAGER, "torchscript"),
    ),
    "xlnet": Architecture(
        "XLNetConfig",
        "XLNetModel",
        {"vocab_size": 96, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 40},
        forms=only(EAGER, "torchscript"),
    ),
    "deberta": Architecture(
        "DebertaConfig",
        "DebertaModel",
        {**_ENCODER, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
        forms=only(EAGER, "torchscript"),
    ),
    "roformer": Architecture(
        "RoFormerConfig", "RoFormerModel", {**_ENCODER, "embedding_size": 32}, forms=only(EAGER, "torchscript")
    ),
    "mobilebert": Architecture(
        "MobileBertConfig",
        "MobileBertModel",
        {**_ENCODER, "intra_bottleneck_size": 32, "embedding_size": 32, "true_hidden_size": 32},
        forms=only(EAGER, "torchscript"),
    ),
    "squeezebert": Architecture(
        "SqueezeBertConfig",
        "SqueezeBertModel",
        {**_ENCODER, "embedding_size": 32, **dict.fromkeys(_GROUPS, 1)},
        forms=only(EAGER, "torchscript"),
    ),
    "esm": Architecture(
        "EsmConfig",
        "EsmModel",
        {**_ENCODER, "position_embedding_type": "rotary", "pad_token_id": 1, "mask_token_id": 3},
        forms=_TRACED,
    ),
    "beit": Architecture("BeitConfig", "BeitModel", {**_VISION, "use_relative_position_bias": True}, "pixels", _TRACED),
    "dinov3": Architecture("DINOv3ViTConfig", "DINOv3ViTModel", {**_VISION, "num_register_tokens": 2}, "pixels", _SOME),
    "segformer": Architecture(
        "SegformerConfig",
        "SegformerModel",
        {
            "image_size": 64,
            "num_encoder_blocks": 2,
            "depths": [1, 1],
            "sr_ratios": [4, 2],
            "hidden_sizes": [16, 32],
            "patch_sizes": [7, 3],
            "strides": [4, 2],
            "num_attention_heads": [1, 2],
            "mlp_ratios": [2, 2],
            "decoder_hidden_size": 16,
        },
        "pixels",
        only(EAGER, "torchscript"),
    ),
    "wavlm": Architecture(
        "WavLMConfig",
        "WavLMModel",
        {**_SPEECH, "num_buckets": 32, "max_bucket_distance": 40},
        "wave",
        only(EAGER, "torchscript"),
    ),
    "wav2vec2-conformer": Architecture(
        "Wav2Vec2ConformerConfig",
        "Wav2Vec2ConformerModel",
        {**_SPEECH, "position_embeddings_type": "relative", "conv_depthwise_kernel_size": 3},
        "wave",
        only(EAGER, "torchscript"),
    ),
    "deepseek-v3": _decoder(
        "DeepseekV3Config",
        "DeepseekV3Model",
        forms=only(EAGER, "torchscript"),
        head_dim=4,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
        kv_lora_rank=16,
        q_lora_rank=16,
        first_k_dense_replace=2,
        num_key_value_heads=4,
    ),
    "qwen3-moe": _decoder(
        "Qwen3MoeConfig",
        "Qwen3MoeModel",
        forms=only(EAGER, "torchscript"),
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=16,
    ),
    "gemma3n": _decoder(
        "Gemma3nTextConfig",
        "Gemma3nTextModel",
        forms=only(EAGER, "torchscript"),
        **_MIXED,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=96,
        laurel_rank=4,
        num_kv_shared_layers=0,
        activation_sparsity_pattern=[0.0, 0.0],
    ),
    "layoutlmv3": Architecture(
        "LayoutLMv3Config",
        "LayoutLMv3Model",
        {
            **_ENCODER,
            "visual_embed": False,
            "coordinate_size": 6,
            "shape_size": 4,
            "has_relative_attention_bias": True,
            "rel_pos_bins": 16,
            "has_spatial_attention_bias": True,
            "max_2d_position_embeddings": 128,
            "rel_2d_pos_bins": 16,
        },
        forms=only(EAGER, "torchscript"),
    ),
    "mobilevit": Architecture(
        "MobileViTConfig",
        "MobileViTModel",
        {
            "image_size": 64,
            "hidden_sizes": [16, 16, 16],
            "neck_hidden_sizes": [8, 8, 8, 8, 16, 16, 16],
            "num_attention_heads": 2,
            "expand_ratio": 2.0,
        },
        "pixels",
        only(EAGER, "torchscript"),
    ),
    "swin2sr": Architecture(
        "Swin2SRConfig",
        "Swin2SRModel",
        {"image_size": 16, "patch_size": 1, "embed_dim": 16, "depths": [2], "num_heads": [2], "window_size": 4},
        "pixels",
        only(EAGER, "torchscript"),
    ),
    "sew-d": Architecture(
        "SEWDConfig",
        "SEWDModel",
        {**_SPEECH, "squeeze_factor": 2, "position_buckets": 16, "pos_att_type": ["p2c", "c2p"]},
        "wave",
        only(EAGER, "torchscript"),
    ),
    "helium": _decoder("HeliumConfig", "HeliumModel", forms=(("dynamo", "sdpa"),)),
    # By optimum, as its command line exports them: whole models, with a cache where they generate.
    "bert-features": Architecture("BertConfig", "BertModel", _ENCODER, forms=OPTIMUM),
    "modernbert-features": Architecture("ModernBertConfig", "ModernBertModel", _MODERNBERT, forms=OPTIMUM),
    "vit-features": Architecture("ViTConfig", "ViTModel", _VISION, "pixels", OPTIMUM),
    "mistral-generates": _decoder(
        "MistralConfig", "MistralForCausalLM", "cached", OPTIMUM, sliding_window=20, use_cache=True
    ),
    "gemma3-generates": _decoder(
        "Gemma3TextConfig", "Gemma3ForCausalLM", "cached", OPTIMUM, **(_MIXED | {"use_cache": True})
    ),
    "llama-generates": _decoder("LlamaConfig", "LlamaForCausalLM", "cached", OPTIMUM, use_cache=True),
    "gpt2-generates": Architecture(
        "GPT2Config",
        "GPT2LMHeadModel",
        {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256},
        "cached",
        OPTIMUM,
    ),
    "t5-encodes": Architecture("T5Config", "T5ForConditionalGeneration", _T5, "seq2seq", _UNFUSED),
    "t5-decodes": Architecture("T5Config", "T5ForConditionalGeneration", _T5, "decoder", _UNFUSED),
    "bart-decodes": Architecture("BartConfig", "BartForConditionalGeneration", _SEQ2SEQ, "decoder", OPTIMUM),
    "whisper-decodes": Architecture(
        "WhisperConfig",
        "WhisperForConditionalGeneration",
        {**_SEQ2SEQ, "num_mel_bins": 16, "max_target_positions": 128},  # its features have the usual length
        "whisper",
        OPTIMUM,
    ),
}
