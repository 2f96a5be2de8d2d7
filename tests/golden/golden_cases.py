"""What make_golden.py makes: configurations, the keys that must matter in each, and texts."""

from typing import Any

Config = dict[str, Any]


def without(config: Config, *keys: str) -> Config:
    """A copy of `config` that lacks `keys`."""
    return {key: value for key, value in config.items() if key not in keys}


def v5(config: Config) -> Config:
    """`config` with the keys that transformers 5 renamed."""
    return without(config, "torch_dtype") | {"dtype": "bfloat16", "transformers_version": "5.24.0"}


# fmt: off
BASE: Config = {
    "vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "hidden_act": "silu", "max_position_embeddings": 256,
    "rms_norm_eps": 1e-05, "attention_dropout": 0.0, "initializer_range": 0.02, "use_cache": True,
    "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0"}
MOE = {"num_experts_per_tok": 2, "output_router_logits": False, "router_aux_loss_coef": 0.001}
QWEN3_MOE = BASE | MOE | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "head_dim": 16,
    "attention_bias": False, "intermediate_size": 96, "moe_intermediate_size": 32,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}
QWEN3_MOE_HUB = {
    "num_experts": 8, "rope_theta": 1000000.0, "rope_scaling": None, "use_sliding_window": False}
MIXTRAL = BASE | MOE | {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "intermediate_size": 32,
    "num_local_experts": 8, "router_jitter_noise": 0.0, "rope_theta": 1000000.0}
OLMOE = BASE | MOE | {
    "architectures": ["OlmoeForCausalLM"], "model_type": "olmoe", "intermediate_size": 32,
    "num_experts": 8, "num_experts_per_tok": 3, "attention_bias": False, "clip_qkv": None,
    "norm_topk_prob": False, "rope_theta": 10000.0, "rope_scaling": None, "pad_token_id": 1}
LLAMA = BASE | {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "intermediate_size": 96,
    "head_dim": 32, "pretraining_tp": 1, "attention_bias": False, "mlp_bias": False}
GPT_OSS = BASE | MOE | {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "head_dim": 32,
    "intermediate_size": 32, "attention_bias": True, "swiglu_limit": 1.5, "sliding_window": 20,
    "max_position_embeddings": 512}
GROUPED = BASE | {
    "num_hidden_layers": 3, "num_experts_per_tok": 3, "intermediate_size": 96,
    "moe_intermediate_size": 16, "n_routed_experts": 8, "n_shared_experts": 1, "n_group": 4,
    "topk_group": 2, "norm_topk_prob": True, "first_k_dense_replace": 1, "attention_bias": False,
    "routed_scaling_factor": 1.0}
ERNIE = without(BASE, "tie_word_embeddings") | {
    "architectures": ["Ernie4_5_MoeForCausalLM"], "model_type": "ernie4_5_moe",
    "intermediate_size": 96, "moe_intermediate_size": 32, "moe_num_experts": 8, "moe_k": 3,
    "moe_layer_interval": 1, "use_bias": False, "pad_token_id": 0}
MINIMAX = BASE | MOE | {
    "architectures": ["MiniMaxM2ForCausalLM"], "model_type": "minimax_m2", "head_dim": 32,
    "intermediate_size": 32, "num_local_experts": 8, "router_jitter_noise": 0.0}
QWEN2_MOE = BASE | MOE | {
    "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "intermediate_size": 96,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48, "num_experts": 8,
    "decoder_sparse_step": 1, "norm_topk_prob": False}
GRANITE = BASE | MOE | {
    "intermediate_size": 32, "num_local_experts": 8, "num_experts_per_tok": 3,
    "attention_bias": False, "embedding_multiplier": 3.0, "attention_multiplier": 0.2,
    "residual_multiplier": 0.6, "logits_scaling": 0.5}
GRANITE_OTHERS: dict[str, list[Any]] = {
    "embedding_multiplier": [1.0], "attention_multiplier": [0.25], "residual_multiplier": [1.0],
    "logits_scaling": [1.0]}
PHIMOE = BASE | MOE | {
    "architectures": ["PhimoeForCausalLM"], "model_type": "phimoe", "intermediate_size": 32,
    "num_local_experts": 8, "router_jitter_noise": 0.2, "input_jitter_noise": 0.01}
HUNYUAN = BASE | {
    "architectures": ["HunYuanMoEV1ForCausalLM"], "model_type": "hunyuan_v1_moe",
    "intermediate_size": 32, "num_experts": 8, "attention_bias": False, "pad_token_id": 0}
FLEX_OLMO = BASE | MOE | {
    "architectures": ["FlexOlmoForCausalLM"], "model_type": "flex_olmo", "intermediate_size": 32,
    "num_experts": 8, "norm_topk_prob": False, "attention_bias": False, "pad_token_id": 0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
QWEN3_NEXT = BASE | MOE | {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "head_dim": 32,
    "intermediate_size": 48, "moe_intermediate_size": 16, "num_experts": 8,
    "num_experts_per_tok": 3, "shared_expert_intermediate_size": 32, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_value_head_dim": 16, "rms_norm_eps": 1e-06}
QWEN3_5_TEXT = without(v5(QWEN3_NEXT), "intermediate_size") | {
    "architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text",
    "attn_output_gate": True, "mtp_num_hidden_layers": 1, "mamba_ssm_dtype": "float32",
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25,
        "mrope_interleaved": True, "mrope_section": [2, 1, 1]}}
LATENT = BASE | {
    "num_key_value_heads": 4, "intermediate_size": 96,
    "moe_intermediate_size": 32, "n_routed_experts": 8, "num_experts_per_tok": 3,
    "n_shared_experts": 1, "kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16, "v_head_dim": 20, "attention_bias": False}
DEEPSEEK_V2 = LATENT | {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2",
    "first_k_dense_replace": 1, "norm_topk_prob": False}
DEEPSEEK_V3 = LATENT | {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3",
    "first_k_dense_replace": 1, "num_nextn_predict_layers": 1}
GLM4_MOE_LITE = LATENT | {
    "architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite"}
SIGMOID_HUB = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
V5_HEADS = {"head_dim": 16, "qk_head_dim": 40}  # what transformers 5 writes: the rotary part, all
# Old checkpoints name none of these.
NEWER = ("attention_bias", "head_dim", "mlp_bias", "num_key_value_heads")

CASES: dict[str, Config] = {
    "qwen3_moe": QWEN3_MOE | QWEN3_MOE_HUB | {
        "num_hidden_layers": 3, "mlp_only_layers": [1], "num_experts_per_tok": 3,
        "max_window_layers": 3, "sliding_window": 32, "rms_norm_eps": 1e-06},
    "qwen3_moe_v5": v5(QWEN3_MOE) | {
        "num_hidden_layers": 4, "decoder_sparse_step": 2, "intermediate_size": 64,
        "num_local_experts": 8, "norm_topk_prob": False, "tie_word_embeddings": True,
        "use_sliding_window": False, "sliding_window": None,
        "rope_parameters": YARN | {"rope_theta": 50000.0}},
    "qwen3_moe_window": QWEN3_MOE | QWEN3_MOE_HUB | {
        "head_dim": 32, "use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    "mixtral": MIXTRAL | {"sliding_window": None},
    "mixtral_window": MIXTRAL | {"sliding_window": 20, "head_dim": 32, "rope_theta": 10000.0},
    "olmoe": OLMOE | {"clip_qkv": 0.75},
    "olmoe_norm": OLMOE | {"norm_topk_prob": True, "num_experts_per_tok": 2, "rope_theta": 5e5},
    "llama": LLAMA | {
        "attention_bias": True, "mlp_bias": True, "max_position_embeddings": 512,
        "rope_theta": 20000.0, "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64}},
    "llama_linear": without(LLAMA, *NEWER) | {
        "tie_word_embeddings": True, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "llama_yarn": v5(LLAMA) | {"rope_parameters": YARN | {
        "rope_theta": 20000.0, "attention_factor": 1.3, "beta_fast": 4.0, "beta_slow": 0.5,
        "mscale": 1.0, "mscale_all_dim": 0.8, "truncate": False}},
    "llama_yarn_mscale": LLAMA | {"rope_theta": 20000.0, "rope_scaling": YARN | {
        "beta_fast": 4, "mscale": 2.5, "mscale_all_dim": 0.5}},
    "llama_longrope": LLAMA | {"rope_theta": 20000.0, "rope_scaling": {
        "rope_type": "longrope", "original_max_position_embeddings": 64,
        "short_factor": [round(1.0 + 0.05 * i, 2) for i in range(16)],
        "long_factor": [round(1.0 + 0.4 * i, 2) for i in range(16)]}},
    "gpt_oss": without(GPT_OSS, "head_dim") | {
        "head_dim": 64, "num_local_experts": 8, "num_experts_per_tok": 3, "experts_per_token": 3,
        "num_hidden_layers": 2, "initial_context_length": 64, "rope_theta": 150000,
        "rope_scaling": YARN | {
            "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens",
            "lm_head"]}},
    "gpt_oss_v5": v5(GPT_OSS) | {
        "num_local_experts": 4, "intermediate_size": 48, "swiglu_alpha": 1.3,
        "layer_types": ["full_attention", "sliding_attention"],
        "rope_parameters": YARN | {"rope_theta": 20000.0, "beta_fast": 4.0, "beta_slow": 0.5,
                                   "truncate": False}},
    "mistral": without(BASE, "rms_norm_eps") | {
        "architectures": ["MistralForCausalLM"], "model_type": "mistral", "intermediate_size": 96,
        "head_dim": 32, "rope_theta": 1000000.0, "sliding_window": 20},
    "qwen2": BASE | {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "num_hidden_layers": 3,
        "intermediate_size": 96, "rope_theta": 1000000.0, "use_sliding_window": True,
        "max_window_layers": 1, "sliding_window": 16, "rms_norm_eps": 1e-06},
    "qwen2_v5": v5(BASE) | {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "intermediate_size": 96,
        "num_key_value_heads": 1, "tie_word_embeddings": True, "max_window_layers": 0,
        "layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True,
        "sliding_window": 24, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "qwen3": BASE | {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_hidden_layers": 3,
        "intermediate_size": 96, "head_dim": 32, "attention_bias": True, "rope_theta": 1000000.0,
        "rope_scaling": None, "use_sliding_window": True, "max_window_layers": 1,
        "sliding_window": 16, "tie_word_embeddings": True, "rms_norm_eps": 1e-06},
    "deepseek_v2": DEEPSEEK_V2 | {
        "q_lora_rank": None, "n_shared_experts": 2, "topk_method": "greedy", "n_group": 1,
        "topk_group": 1, "scoring_func": "softmax", "routed_scaling_factor": 1.0, "ep_size": 1,
        "aux_loss_alpha": 0.001, "seq_aux": True, "moe_layer_freq": 1, "rope_theta": 10000,
        "rope_scaling": without(YARN, "rope_type") | {
            "type": "yarn", "beta_fast": 32, "beta_slow": 1, "mscale": 0.707,
            "mscale_all_dim": 1.4}},
    "deepseek_v2_v5": v5(DEEPSEEK_V2) | V5_HEADS | {
        "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2,
        "routed_scaling_factor": 2.5, "attention_bias": True, "first_k_dense_replace": 2,
        "num_hidden_layers": 3, "rope_parameters": {"rope_type": "default", "rope_theta": 2e4}},
    "deepseek_v3": DEEPSEEK_V3 | SIGMOID_HUB | {
        "num_experts_per_tok": 4, "n_group": 4, "topk_group": 3, "routed_scaling_factor": 2.5,
        "norm_topk_prob": True, "ep_size": 1, "moe_layer_freq": 1, "rope_theta": 10000,
        "rms_norm_eps": 1e-06,
        "rope_scaling": without(YARN, "rope_type") | {
            "type": "yarn", "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
            "mscale_all_dim": 1.0}},
    "deepseek_v3_v5": v5(DEEPSEEK_V3) | V5_HEADS | {
        "q_lora_rank": None, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.5,
        "norm_topk_prob": False, "rope_interleave": False, "attention_bias": True,
        "tie_word_embeddings": True, "n_shared_experts": 2, "num_hidden_layers": 2,
        "rope_parameters": YARN | {"rope_theta": 2e4, "mscale_all_dim": 0.8}},
    "glm4_moe_lite": GLM4_MOE_LITE | {
        "topk_method": "noaux_tc", "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.8,
        "norm_topk_prob": True, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1,
        "partial_rotary_factor": 1.0, "rope_theta": 1000000, "rope_scaling": None,
        "rms_norm_eps": 0.001},
    "glm4_moe_lite_v5": v5(GLM4_MOE_LITE) | V5_HEADS | {
        "mlp_layer_types": ["sparse", "dense", "sparse"], "num_hidden_layers": 3,
        "moe_intermediate_size": 16, "n_group": 2, "topk_group": 1,
        "routed_scaling_factor": 2.5, "norm_topk_prob": False, "attention_bias": True,
        "rope_interleave": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "glm4_moe": GROUPED | {
        "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "attention_bias": True,
        "head_dim": 32, "use_qk_norm": True, "partial_rotary_factor": 0.5, "rope_theta": 20000.0,
        "num_nextn_predict_layers": 1, "routed_scaling_factor": 2.5},
    "glm4_moe_v5": v5(GROUPED) | {
        "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "n_group": 1,
        "topk_group": 1, "norm_topk_prob": False, "n_shared_experts": 2, "num_hidden_layers": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
                            "partial_rotary_factor": 0.25}},
    "dots1": GROUPED | {
        "architectures": ["Dots1ForCausalLM"], "model_type": "dots1", "attention_bias": True,
        "n_shared_experts": 2, "routed_scaling_factor": 2.5, "scoring_func": "noaux_tc",
        "moe_layer_freq": 1, "rope_theta": 20000.0, "rope_scaling": None, "sliding_window": 20,
        "max_window_layers": 2},
    "dots1_v5": v5(GROUPED) | {
        "architectures": ["Dots1ForCausalLM"], "model_type": "dots1", "num_hidden_layers": 2,
        "norm_topk_prob": False, "n_group": 2, "topk_group": 1, "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e5}},
    "ernie4_5_moe": ERNIE | {
        "num_hidden_layers": 4, "moe_layer_start_index": 1, "moe_layer_end_index": 2,
        "moe_intermediate_size": 16, "intermediate_size": 64,
        "moe_num_shared_experts": 2, "use_rmsnorm": True, "moe_gate": "topk",
        "moe_use_aux_free": True, "moe_capacity": [8, 8, 8], "rope_theta": 20000.0,
        "num_nextn_predict_layers": 1},
    "ernie4_5_moe_v5": v5(ERNIE) | {
        "moe_layer_interval": 2, "moe_layer_start_index": 0, "moe_layer_end_index": 1,
        "moe_num_shared_experts": 1, "tie_word_embeddings": False, "num_hidden_layers": 2,
        "head_dim": 32, "moe_norm_min": 1e-12,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "minimax_m2": MINIMAX | {
        "rotary_dim": 16, "rope_theta": 20000.0, "scoring_func": "sigmoid", "use_mtp": True,
        "use_qk_norm": True, "qk_norm_type": "per_layer", "use_routing_bias": True,
        "attn_type_list": [1, 1], "shared_intermediate_size": 0, "sliding_window": None,
        "layernorm_full_attention_beta": 1.0, "num_mtp_modules": 3},
    "minimax_m2_v5": v5(MINIMAX) | {
        "num_experts_per_tok": 3, "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}},
    "qwen2_moe": QWEN2_MOE | {
        "num_hidden_layers": 3, "mlp_only_layers": [1], "num_experts_per_tok": 3,
        "qkv_bias": True, "use_sliding_window": True, "sliding_window": 20,
        "max_window_layers": 2, "rope_theta": 1000000.0, "rms_norm_eps": 1e-06},
    "qwen2_moe_v5": v5(QWEN2_MOE) | {
        "norm_topk_prob": True, "qkv_bias": False, "mlp_only_layers": [],
        "use_sliding_window": True, "sliding_window": 24, "num_experts_per_tok": 2,
        "layer_types": ["full_attention", "sliding_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "granitemoe": GRANITE | {
        "model_type": "granitemoe", "architectures": ["GraniteMoeForCausalLM"],
        "attention_bias": True, "rope_theta": 20000.0, "rope_scaling": None},
    "granitemoeshared": GRANITE | {
        "model_type": "granitemoeshared", "architectures": ["GraniteMoeSharedForCausalLM"],
        "shared_intermediate_size": 48, "rope_theta": 20000.0, "rope_scaling": None},
    "granitemoeshared_v5": v5(GRANITE) | {
        "model_type": "granitemoeshared", "architectures": ["GraniteMoeSharedForCausalLM"],
        "shared_intermediate_size": 16, "num_key_value_heads": 1, "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "phimoe": PHIMOE | {
        "attention_bias": True, "lm_head_bias": True, "sliding_window": 20, "head_dim": 16,
        "max_position_embeddings": 512, "original_max_position_embeddings": 256,
        "rope_theta": 20000.0, "hidden_dropout": 0.0, "rope_scaling": {
            "type": "longrope", "short_mscale": 1.25, "long_mscale": 1.25,
            "original_max_position_embeddings": 256,
            "short_factor": [round(1.0 + 0.1 * i, 2) for i in range(8)],
            "long_factor": [round(1.0 + 0.1 * i, 2) for i in range(8)]}},
    "phimoe_v5": v5(PHIMOE) | {
        "attention_bias": False, "lm_head_bias": False, "sliding_window": None,
        "num_key_value_heads": 1, "num_local_experts": 4, "router_jitter_noise": 0.05,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "hunyuan_v1_moe": HUNYUAN | {
        "attention_bias": True, "moe_topk": [3, 3], "num_shared_expert": [1, 1], "head_dim": 32,
        "moe_intermediate_size": [32, 32], "use_qk_norm": True, "use_mixed_mlp_moe": True,
        "use_cla": False, "cla_share_factor": 2, "moe_layer_num_skipped": 0, "rope_theta": 10000.0,
        "eod_token_id": 3, "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}},
    "hunyuan_v1_moe_v5": v5(HUNYUAN) | {
        "moe_topk": 2, "eod_token_id": 3, "head_dim": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}},
    "flex_olmo": FLEX_OLMO | {
        "attention_bias": True, "num_experts_per_tok": 3, "rope_theta": 20000.0,
        "rope_scaling": None},
    "flex_olmo_v5": v5(FLEX_OLMO) | {
        "norm_topk_prob": True, "num_key_value_heads": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "qwen3_next": QWEN3_NEXT | {
        "num_hidden_layers": 3, "full_attention_interval": 2, "decoder_sparse_step": 1,
        "mlp_only_layers": [1], "norm_topk_prob": True, "partial_rotary_factor": 0.25,
        "rope_scaling": None, "rope_theta": 10000.0, "use_sliding_window": False},
    "qwen3_next_v5": v5(QWEN3_NEXT) | {
        "layer_types": ["full_attention", "linear_attention"], "attention_bias": True,
        "linear_conv_kernel_dim": 3, "linear_num_key_heads": 3, "linear_num_value_heads": 3,
        "linear_key_head_dim": 12, "norm_topk_prob": False, "tie_word_embeddings": True,
        "rope_parameters": YARN | {"rope_theta": 50000.0, "partial_rotary_factor": 0.5}},
    "qwen3_5_moe": {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe",
        "image_token_id": 124, "video_token_id": 125, "vision_start_token_id": 126,
        "vision_end_token_id": 127, "tie_word_embeddings": False, "transformers_version": "5.24.0",
        "text_config": QWEN3_5_TEXT | {"layer_types": ["full_attention", "linear_attention"]},
        "vision_config": {
            "model_type": "qwen3_5_moe", "depth": 1, "hidden_size": 16, "intermediate_size": 16,
            "num_heads": 2, "out_hidden_size": 64, "num_position_embeddings": 16,
            "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}},
    "qwen3_5_moe_text": QWEN3_5_TEXT | {
        "num_hidden_layers": 2, "full_attention_interval": 2, "num_experts": 4,
        "num_experts_per_tok": 2, "linear_num_value_heads": 6, "attention_bias": True}}

# Keys whose change must move the logits: a list of other values for each. None deletes the key.
OTHERS: dict[str, dict[str, list[Any]]] = {
    "qwen3_moe": {"norm_topk_prob": [False], "num_experts_per_tok": [2, 4], "rope_theta": [1e4],
                  "use_sliding_window": [True]},
    "qwen3_moe_v5": {"norm_topk_prob": [True], "rope_parameters.rope_type": ["default"],
                     "rope_parameters.attention_factor": [1.0], "rope_parameters.factor": [2.0]},
    "qwen3_moe_window": {"use_sliding_window": [False], "sliding_window": [23, 25]},
    "mixtral": {"sliding_window": [32], "rope_theta": [1e4], "rms_norm_eps": [1e-6]},
    "mixtral_window": {"sliding_window": [None, 19, 21], "rope_theta": [1e6]},
    "olmoe": {"clip_qkv": [None, 1.0], "norm_topk_prob": [True], "num_experts_per_tok": [2]},
    "olmoe_norm": {"norm_topk_prob": [False], "rope_theta": [1e4], "rms_norm_eps": [1e-6]},
    "llama": {"attention_bias": [False], "mlp_bias": [False], "rope_theta": [1e4],
              "rms_norm_eps": [1e-6], "rope_scaling": [None],
              **{f"rope_scaling.{key}": values for key, values in (
                  ("factor", [4.0]), ("low_freq_factor", [0.5]), ("high_freq_factor", [8.0]),
                  ("original_max_position_embeddings", [128]))}},
    "llama_linear": {"rope_scaling": [None], "rope_theta": [5e5]},
    "llama_yarn": {f"rope_parameters.{key}": [None] for key in (
        "attention_factor", "beta_fast", "beta_slow", "truncate", "rope_theta")},
    "llama_yarn_mscale": {f"rope_scaling.{key}": [None] for key in (
        "beta_fast", "mscale", "mscale_all_dim")},
    "llama_longrope": {"rope_scaling": [None], "rope_scaling.attention_factor": [1.0],
                       "rope_scaling.long_factor": [[1.0] * 16],
                       "rope_scaling.original_max_position_embeddings": [256]},
    "gpt_oss": {"sliding_window": [19, 21], "swiglu_limit": [1.0, 7.0], "rope_theta": [1e4],
                "rms_norm_eps": [1e-3], "num_experts_per_tok": [2, 4],
                "layer_types": [["full_attention"] * 2, ["full_attention", "sliding_attention"]],
                **{f"rope_scaling.{key}": values for key, values in (
                    ("truncate", [True]), ("factor", [4.0]), ("rope_type", ["default"]))}},
    "gpt_oss_v5": {"layer_types": [None], "swiglu_alpha": [1.702], "swiglu_limit": [7.0],
                   "sliding_window": [19, 21], "rope_parameters.truncate": [True]},
    "mistral": {"sliding_window": [None, 19, 21], "rope_theta": [1e4], "rms_norm_eps": [1e-3]},
    "qwen2": {"use_sliding_window": [False], "max_window_layers": [0, 2, 3],
              "sliding_window": [15, 17], "rope_theta": [1e4]},
    "qwen2_v5": {"sliding_window": [23, 25], "rope_parameters.rope_theta": [1e6],
                 "layer_types": [["full_attention"] * 2, ["full_attention", "sliding_attention"]]},
    "qwen3": {"use_sliding_window": [False], "max_window_layers": [0, 2, 3],
              "sliding_window": [15, 17], "attention_bias": [False], "rope_theta": [1e4]},
    "deepseek_v2": {"rope_theta": [2e4], "num_experts_per_tok": [2], "first_k_dense_replace": [0],
                    **{f"rope_scaling.{key}": values for key, values in (
                        ("factor", [2.0]), ("mscale", [1.4]), ("mscale_all_dim", [0.707, None]))}},
    "deepseek_v2_v5": {"topk_method": ["greedy"], "n_group": [2], "topk_group": [1, 3],
                       "routed_scaling_factor": [1.0], "attention_bias": [False],
                       "rope_parameters.rope_theta": [1e4]},
    "deepseek_v3": {"topk_group": [2, 4], "routed_scaling_factor": [1.0],
                    "norm_topk_prob": [False], "num_experts_per_tok": [3], "rope_theta": [2e4],
                    "rope_interleave": [False], "rope_scaling.mscale_all_dim": [0.5, None]},
    "deepseek_v3_v5": {"rope_interleave": [True], "norm_topk_prob": [True], "n_group": [2],
                       "attention_bias": [False], "rope_parameters.mscale_all_dim": [None]},
    "glm4_moe_lite": {"routed_scaling_factor": [1.0], "norm_topk_prob": [False],
                      "rms_norm_eps": [1e-5], "rope_theta": [1e4], "rope_interleave": [False]},
    "glm4_moe_lite_v5": {"n_group": [1], "topk_group": [2], "norm_topk_prob": [True],
                         "rope_interleave": [False], "attention_bias": [False]},
    "glm4_moe": {"n_group": [2], "topk_group": [3, 4], "routed_scaling_factor": [1.0],
                 "norm_topk_prob": [False], "num_experts_per_tok": [2], "attention_bias": [False],
                 "use_qk_norm": [False], "partial_rotary_factor": [0.25, 1.0],
                 "rope_theta": [1e4]},
    "glm4_moe_v5": {"norm_topk_prob": [True], "num_experts_per_tok": [2, 4],
                    "rope_parameters.partial_rotary_factor": [0.5, None]},
    "dots1": {"n_group": [2], "topk_group": [3, 4], "routed_scaling_factor": [1.0],
              "norm_topk_prob": [False], "num_experts_per_tok": [2], "attention_bias": [False],
              "sliding_window": [None, 19, 21], "max_window_layers": [0, 3],
              "rope_theta": [1e4]},
    "dots1_v5": {"norm_topk_prob": [True], "sliding_window": [23, 25], "topk_group": [2],
                 "layer_types": [["full_attention"] * 2, ["full_attention", "sliding_attention"]],
                 "rope_parameters.rope_theta": [1e4]},
    "ernie4_5_moe": {"moe_k": [2, 4], "rope_theta": [1e4]},
    "ernie4_5_moe_v5": {"moe_k": [2, 4], "rope_parameters.rope_theta": [1e5]},
    "minimax_m2": {"rotary_dim": [8, 32], "num_experts_per_tok": [3], "rope_theta": [1e4],
                   "rms_norm_eps": [1e-3]},
    "minimax_m2_v5": {"num_experts_per_tok": [2, 4],
                      "rope_parameters.partial_rotary_factor": [0.5, None]},
    "qwen2_moe": {"norm_topk_prob": [True], "num_experts_per_tok": [2, 4], "qkv_bias": [False],
                  "use_sliding_window": [False], "max_window_layers": [0, 3],
                  "sliding_window": [19, 21], "rope_theta": [1e4]},
    "qwen2_moe_v5": {"norm_topk_prob": [False], "sliding_window": [23, 25],
                     "layer_types": [["full_attention"] * 2]},
    "granitemoe": GRANITE_OTHERS | {"attention_bias": [False], "num_experts_per_tok": [2]},
    "granitemoeshared": GRANITE_OTHERS | {"shared_intermediate_size": [0]},
    "granitemoeshared_v5": GRANITE_OTHERS,
    "phimoe": {"router_jitter_noise": [0.1], "attention_bias": [False], "lm_head_bias": [False],
               "sliding_window": [None, 19, 21], "rope_scaling.short_mscale": [1.0],
               "rope_scaling.short_factor": [[1.0] * 8]},
    "phimoe_v5": {"router_jitter_noise": [0.1], "rope_parameters.rope_theta": [1e6]},
    "hunyuan_v1_moe": {"moe_topk": [2, 4], "attention_bias": [False],
                       "rope_scaling.alpha": [10.0]},
    "hunyuan_v1_moe_v5": {"moe_topk": [1, 3], "rope_parameters.rope_theta": [1e4]},
    # The norm after flex_olmo's experts undoes what norm_topk_prob does.
    "flex_olmo": {"num_experts_per_tok": [2], "attention_bias": [False], "rope_theta": [1e4]},
    "flex_olmo_v5": {"num_experts_per_tok": [1, 3], "rope_parameters.rope_theta": [1e5]},
    "qwen3_next": {"norm_topk_prob": [False], "num_experts_per_tok": [2, 4], "rope_theta": [1e6],
                   "partial_rotary_factor": [0.5, 1.0], "rms_norm_eps": [1e-3]},
    "qwen3_next_v5": {"norm_topk_prob": [True], "attention_bias": [False],
                      "rope_parameters.partial_rotary_factor": [None, 1.0],
                      "rope_parameters.factor": [2.0]},
    "qwen3_5_moe": {f"text_config.{key}": values for key, values in (
        ("num_experts_per_tok", [2, 4]), ("rope_parameters.partial_rotary_factor", [0.5, 1.0]),
        ("rope_parameters.rope_theta", [1e4]))},
    "qwen3_5_moe_text": {"rope_parameters.partial_rotary_factor": [1.0],
                         "num_experts_per_tok": [1, 3], "rms_norm_eps": [1e-3]}}
# Keys that look as if they mattered and do not.
IGNORED: dict[str, dict[str, list[Any]]] = {
    "qwen3_moe_window": {"max_window_layers": [0, 2]},
    "qwen3_5_moe": {"text_config.rope_parameters.mrope_section": [[4, 0, 0], [1, 1, 2]]},
    "llama_yarn": {"rope_parameters.mscale": [3.0], "rope_parameters.mscale_all_dim": [3.0]}}

# The tokenizer.
SENTENCES = [
    "The router sends every token to a few experts, and the experts answer together.",
    "A mixture of experts is large on disk and small at work.",
    "She sells sea shells by the sea shore; the shells she sells are sea shells, I'm sure.",
    "Numbers such as 3.14159, 2,718 and 1e-5 are split into pieces.",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich."]
CHAT_TEMPLATE = (
    "{%- for message in messages -%}\n"
    "{{ bos_token + message['role'] + '\\n' + message['content'] | trim + eos_token + '\\n' }}\n"
    "{%- endfor -%}\n"
    "{%- if add_generation_prompt -%}{{ bos_token + 'assistant\\n' }}{%- endif -%}")
# fmt: on
