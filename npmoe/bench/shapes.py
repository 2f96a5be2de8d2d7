"""Named shapes as config.json spells them, and small copies of a shape that NumPy can check."""

from typing import Any

from npmoe.formats.fragments import COLUMNS

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 40960,
    },
    "seed-67b": {
        "model_type": "qwen3_moe",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 2560,
        "moe_intermediate_size": 2560,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131072,
    },
    "mixtral-8x7b": {
        "model_type": "mixtral",
        "vocab_size": 32000,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 32768,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss",
        "vocab_size": 201088,
        "hidden_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 2880,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "rope_theta": 150000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "quantization_config": {"quant_method": "mxfp4"},
    },
    "olmoe-1b-7b": {
        "model_type": "olmoe",
        "vocab_size": 50304,
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "intermediate_size": 1024,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "rope_theta": 10000,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
    },
}
"""config.json of each shape; seed-67b is qwen3_moe with sizes of its own, 67 billion parameters."""

SMALL_HIDDEN, SMALL_WIDTH, SMALL_VOCAB, SMALL_LAYERS, SMALL_POSITIONS = 256, 128, 512, 2, 1024
SMALL_WINDOW = 24
"""Less than the tokens that are compared: a window of 128 would hide nothing from them."""
_LISTS_BY_LAYER = ("layer_types", "mlp_only_layers")


def small_copy(raw: dict[str, Any]) -> dict[str, Any]:
    """The config of two layers with the same family, experts, experts a token, head size and query
    heads a KV head, and narrow everywhere else; widths fill their last 128 columns as far as the
    shape's do."""
    heads = raw["num_attention_heads"]
    kv_heads = raw.get("num_key_value_heads") or heads
    head_dim = raw.get("head_dim") or raw["hidden_size"] // heads
    few = 2 if heads // kv_heads * head_dim % 128 else 1  # kernels take 128 columns at a time
    copy = {k: v for k, v in raw.items() if k not in _LISTS_BY_LAYER}
    width = SMALL_WIDTH + (raw.get("moe_intermediate_size") or raw["intermediate_size"]) % COLUMNS
    copy |= {
        "hidden_size": SMALL_HIDDEN + raw["hidden_size"] % COLUMNS,
        "num_hidden_layers": SMALL_LAYERS,
        "num_attention_heads": few * heads // kv_heads,
        "num_key_value_heads": few,
        "head_dim": head_dim,
        "vocab_size": SMALL_VOCAB,
        "max_position_embeddings": SMALL_POSITIONS,
        "intermediate_size": width,
        "tie_word_embeddings": False,
    }
    if raw.get("sliding_window"):
        copy["sliding_window"] = min(raw["sliding_window"], SMALL_WINDOW)
    if "moe_intermediate_size" in raw:
        copy["moe_intermediate_size"] = width
    return copy
