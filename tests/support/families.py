"""A tiny model of any family with a causal head in transformers."""

from __future__ import annotations

from typing import Any

from tests.support.vary import model_seed

VOCABULARY = 320
# Of each config, those that it knows. Names mean about the same in all families.
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "is_decoder": True,
    "sliding_window": 8,
    # experts
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "expert_ffn_hidden_size": 24,
    "ffn_hidden_size": 48,
    "n_group": 1,
    "topk_group": 1,
    # low-rank attention
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    # decoders of models that have an encoder, too
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    # states
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    # pictures
    "image_size": 28,
    "patch_size": 14,
    "depth": 1,
    "num_heads": 4,
    "out_hidden_size": 32,
    "embed_dim": 32,
}
_MIXED = {"layer_types": ["linear_attention", "full_attention"]}
_LOW_RANK = {"num_key_value_heads": 4, "v_head_dim": 8}
_LOW_RANK_FAMILIES = ["axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa"]
_LOW_RANK_FAMILIES += ["longcat_flash", "minicpm3", "sarvam_mla", "youtu"]
# Those that cannot be made small, or that are no left-to-right models of text.
UNFIT = {
    "blt": "reads bytes in patches, by a second model of 90 million weights",
    "cpmant": "attends to 32 tokens of its own before the text, which transformers' forward pass does not pad",
    "dots3_note": "its part for pictures has as many layers as a list inside its config; the text is dots3_note_text",
    "gemma3n": "its part for pictures needs timm; the text is gemma3n_text",
    "gemma4_assistant": "drafts tokens from the states of another model",
    "gemma4_unified_assistant": "drafts tokens from the states of another model",
    "musicgen": "AutoModelForCausalLM cannot make it from its config",
    "musicgen_melody": "AutoModelForCausalLM cannot make it from its config",
    "prophetnet": "transformers' forward pass takes no prompt of more than one token with a cache",
    "xlnet": "reads in both directions without a mask that only its `generate` makes",
}
_PLAIN_ROPE = {"rope_type": "default", "rope_theta": 1e4}
# What a family wants beyond that. None: leave the config's own value.
CHANGES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(_LOW_RANK_FAMILIES, _LOW_RANK),
    "bailing_hybrid": _MIXED | _LOW_RANK,
    "bamba": {"attn_layer_indices": [1]},
    "codegen": {"rotary_dim": 4},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _PLAIN_ROPE}},
    "dbrx": {
        "d_model": 32,
        "n_heads": 4,
        "num_key_value_heads": None,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4},
    },
    "dory": {"num_hidden_layers": 3, "n_input_layers": 1, "n_output_layers": 1, "n_recurrent_loops": 1},
    "dots1": {"n_shared_experts": 1},
    "falcon": {"head_dim": None},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": {
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 8,
        "intermediate_size": [48, 48],
        "num_kv_shared_layers": 0,
        "layer_types": ["sliding_attention", "full_attention"],
        "activation_sparsity_pattern": [0.0, 0.0],
        "laurel_rank": 4,
    },
    "gemma4_text": {
        "global_head_dim": 8,
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "num_experts": None,
        "moe_intermediate_size": None,
    },
    "gemma4_unified_text": {
        "global_head_dim": 8,
        "num_experts": None,
        "moe_intermediate_size": None,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    "gptj": {"rotary_dim": 4},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "inkling2_loop_text": {"unpadded_vocab_size": VOCABULARY},
    "inkling2_text": {"unpadded_vocab_size": VOCABULARY},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "mamba_dt_rank": 4,
    },
    "kimi_linear": _MIXED | _LOW_RANK,
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "lfm3": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 4, "head_dim": 16, "state_size": 4, "n_groups": 1, "expand": 2},
    "moshi": {"sliding_window": None},
    "qwen3_5_moe_text": _MIXED,
    "qwen3_5_text": _MIXED,
    "qwen3_next": _MIXED,
    "qwen4_exp_text": _MIXED
    | {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 64,
        "indexer_compress_ratio": 4,
        "hc_lowrank": 8,
    },
    "recurrent_gemma": {
        "num_hidden_layers": 3,
        "lru_width": 32,
        "block_types": ["recurrent", "recurrent", "attention"],
        "attention_window_size": 8,
    },
    "reformer": {
        "attention_head_size": 8,
        "axial_pos_embds": False,
        "attn_layers": ["local", "local"],
        "feed_forward_size": 48,
        "local_attn_chunk_length": 8,
    },
    "xlm": {"causal": True},
    "xlstm": {"v_head_dim": None, "head_dim": None, "num_heads": 4, "hidden_size": 64, "qk_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["mamba", "mamba", "hybrid", "hybrid"]},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
}


def small_config(known: Any, **changes: Any) -> Any:
    """A small config of the same class, and small ones of its parts."""
    kind = type(known)
    sizes = {name: value for name, value in SIZES.items() if _has(known, name)} | CHANGES.get(known.model_type, {})
    for name in kind.sub_configs:
        part = getattr(known, name, None)
        if hasattr(part, "model_type") and name not in sizes:
            sizes[name] = small_config(part)
    other_names = [name for name, own in kind.attribute_map.items() if own in changes]
    small = {name: value for name, value in sizes.items() if value is not None and name not in other_names}
    return kind(**(small | changes))


def _has(config: Any, name: str) -> bool:
    try:
        return hasattr(config, name)
    except RuntimeError:  # a value of each layer
        return False


def tiny_family(kind: str) -> Any:
    """A model of a family by its `model_type`: two layers, random weights of which all matter, in evaluation mode."""
    import torch
    import transformers as tf

    config = small_config(tf.CONFIG_MAPPING[kind]())
    with torch.device("meta"):
        weights = sum(p.numel() for p in tf.AutoModelForCausalLM.from_config(config).parameters())
    assert weights < 4e7, f"{kind}: {weights} weights"
    torch.manual_seed(model_seed(0))
    model = tf.AutoModelForCausalLM.from_config(config).float().eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in filter(lambda p: p.requires_grad, model.parameters()):
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    # Settings of the family's own, forced tokens say, are not what `evaluate` generates with.
    model.generation_config = tf.GenerationConfig(bos_token_id=0, eos_token_id=1, pad_token_id=2)
    return model
