"""Tiny random checkpoints with a tokenizer, for tests of the command line and of converting."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from npmoe.config import ConfigReader
from npmoe.models import qwen3_moe

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 300,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [1],
    "tie_word_embeddings": False,
    "eos_token_id": 257,
    "torch_dtype": "bfloat16",
}
TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)


def make_checkpoint(
    folder: Path, *, tokenizer: bool = True, template: bool = True, **config: Any
) -> Path:
    """A qwen3_moe of one routed and one dense layer that writes lower-case letters when greedy.

    Its tokens are the 256 bytes, <s> and </s>; `config` overrides keys of CONFIG.
    """
    folder.mkdir(parents=True)
    raw = CONFIG | config
    reader = ConfigReader(raw, "fixture")
    read = qwen3_moe.read_config(reader)
    rng = np.random.default_rng(7)
    tensors = {}
    for parameter in qwen3_moe.parameters(read, qwen3_moe.model_spec(read)):
        for group in parameter.sources:
            for name, rows in zip(group, parameter.rows, strict=True):
                shape = (rows, *parameter.shape[2 if parameter.stacked else 1 :])
                w = rng.standard_normal(shape, np.float32) * (0.5 if len(shape) > 1 else 0.1)
                tensors[name] = (w + (len(shape) == 1)).astype(ml_dtypes.bfloat16)
    letters = [byte_tokens()[letter] for letter in "abcdefghijklmnopqrstuvwxyz"]
    head = tensors.get("lm_head.weight")
    if head is not None:
        others = np.setdiff1d(np.arange(len(head)), letters)
        head[others] = 0
    save_file(tensors, folder / "model.safetensors")
    write_json(folder / "config.json", raw)
    if tokenizer:
        _write_tokenizer(folder, template)
    return folder


def write_json(path: Path, value: Any) -> None:
    """`value` as a JSON file."""
    path.write_text(json.dumps(value))


def byte_tokens() -> dict[str, int]:
    """Byte-level alphabet character -> token id."""
    return {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}


def _write_tokenizer(folder: Path, template: bool) -> None:
    tokenizer = Tokenizer(models.BPE(byte_tokens(), []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>"}
    if template:
        config["chat_template"] = TEMPLATE
    write_json(folder / "tokenizer_config.json", config)
