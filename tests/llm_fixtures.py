"""Tiny checkpoints for tests of the whole runtime: golden ones, and one with a tokenizer."""

import json
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from safetensors.numpy import save_file

import npmoe
import npmoe.llm
from npmoe.engine.runner import Runner
from npmoe.models.cache import ModelCache
from npmoe.models.layers import CausalLM
from tests.engine.self_decoding import SelfDecoding

GOLDEN = Path(__file__).parent / "golden"
MOE = GOLDEN / "qwen3_moe"
LONGROPE = GOLDEN / "llama_longrope"
EOS = 1  # "</s>" of the golden tokenizer


def load(path: Path, **options: Any) -> npmoe.LLM:
    """An LLM on the CPU that says nothing; exact cache unless asked otherwise."""
    options = {"device": "cpu", "kv_cache": "fp32", "progress": False, "page_size": 4} | options
    return npmoe.LLM(path, **options)


def load_self_decoding(path: Path, late: bool, **options: Any) -> npmoe.LLM:
    """The same, with a model that decodes by itself; late: a step runs when it is waited for."""

    def runner(model: CausalLM, cache: ModelCache, page_size: int) -> Runner:
        return Runner(SelfDecoding(model, cache.layers, page_size, late), cache, page_size)

    with patch.object(npmoe.llm, "Runner", runner):
        return load(path, **options)


def write_text_model(folder: Path, **generation_config: Any) -> Path:
    """A random qwen3_moe with the golden tokenizer (300 tokens), float32, 128 positions."""
    config = {
        "model_type": "qwen3_moe",
        "vocab_size": 300,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "intermediate_size": 32,
        "moe_intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "hidden_act": "silu",
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "eos_token_id": EOS,
    }
    hidden, width, heads, kv_heads, head_dim = 32, 32, 2, 1, 32
    shapes = {"model.embed_tokens.weight": (300, hidden), "lm_head.weight": (300, hidden)}
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        shapes |= {
            f"{prefix}self_attn.q_proj.weight": (heads * head_dim, hidden),
            f"{prefix}self_attn.k_proj.weight": (kv_heads * head_dim, hidden),
            f"{prefix}self_attn.v_proj.weight": (kv_heads * head_dim, hidden),
            f"{prefix}self_attn.o_proj.weight": (hidden, heads * head_dim),
            f"{prefix}mlp.gate.weight": (4, hidden),
        }
        for expert in range(4):
            for name, shape in (("gate", (width, hidden)), ("up", (width, hidden))):
                shapes[f"{prefix}mlp.experts.{expert}.{name}_proj.weight"] = shape
            shapes[f"{prefix}mlp.experts.{expert}.down_proj.weight"] = (hidden, width)
    rng = np.random.default_rng(0)
    tensors = {
        n: (rng.standard_normal(s) / np.sqrt(s[1])).astype(np.float32) for n, s in shapes.items()
    }
    tensors["model.norm.weight"] = np.ones(hidden, np.float32)
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = np.ones(hidden, np.float32)
        for name in ("q_norm", "k_norm"):
            tensors[f"{prefix}self_attn.{name}.weight"] = np.ones(head_dim, np.float32)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps(generation_config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(GOLDEN / "tokenizer" / name, folder)
    return folder
