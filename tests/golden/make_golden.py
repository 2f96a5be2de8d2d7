"""Write the golden fixtures: tiny checkpoints with logits computed by transformers.

Usage: python make_golden.py [OUT_DIR [CASE ...]]     (default: the folder of this file, all cases)
Needs torch 2.13.0, transformers 5.24.0, safetensors and tokenizers, which the tests do not need.

Each case folder holds config.json, bf16 weights, and golden.npz:

    input_ids  int32   [200]         the prompt
    logits     float32 [200, vocab]  eager attention, in float32, of exactly these weights
    generated  int32   [16]          greedy continuation
    margin     float32 [16]          top-1 minus top-2 logit of each greedy step

llama_longrope adds input_ids_short [50] and logits_short [50, vocab].
gpt_oss has MXFP4 experts, packed here by hand and read back by transformers for the logits.
"""

import copy
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from golden_cases import CASES, CHAT_TEMPLATE, IGNORED, OTHERS, SENTENCES, Config
from routing import router_gap
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import logging

PROMPT, SHORT, STEPS = 200, 50, 16
MIN_ROUTER_GAP = 1e-3  # k-th minus (k+1)-th router logit or score, over tokens and MoE layers
MIN_MARGIN = 0.05  # top-1 minus top-2 logit, over the greedy steps
MIN_EFFECT = 0.02  # largest change of a logit when a feature is off
E2M1 = [*(0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0), *(-0.0, -0.5, -1, -1.5, -2, -3, -4, -6)]
RESERVED = 3  # ids below are special (unk, bos, eos) and appear nowhere


def changed(config: Config, path: str, value: Any) -> Config:
    """A copy of `config` with the dotted `path` set to `value`, or deleted where that is None."""
    config = copy.deepcopy(config)
    *parents, key = path.split(".")
    inner = config
    for parent in parents:
        inner = inner[parent]
    inner.pop(key, None)
    if value is not None:
        inner[key] = value
    return config


def build(config: Config, folder: Path | None = None) -> PreTrainedModel:
    """The float32 model of `config`, with the weights of `folder` where one is given."""
    hf_config = CONFIG_MAPPING[config["model_type"]].from_dict(copy.deepcopy(config))
    if "quantization_config" in config:
        hf_config.quantization_config["dequantize"] = True
    how = {"dtype": torch.float32, "attn_implementation": "eager"}
    if folder is None:
        return AutoModelForCausalLM.from_config(hf_config, **how).eval()
    how["experts_implementation"] = "eager"
    return AutoModelForCausalLM.from_pretrained(folder, config=hf_config, **how).eval()


def fill(model: PreTrainedModel, generator: torch.Generator) -> None:
    """Random weights, rounded to bf16, that make attention and routers far from uniform."""
    embedding_std = 0.3 if model.config.tie_word_embeddings else 0.05
    embedding_std = 1.0 if model.config.model_type == "flex_olmo" else embedding_std
    for name, weight in tensors(model):
        if name.endswith("norm.weight"):
            weight.data.uniform_(0.5, 1.5, generator=generator)
        elif "embed_tokens" in name:
            weight.data.normal_(0.0, embedding_std, generator=generator)
        elif name.endswith("e_score_correction_bias"):
            weight.data.normal_(0.0, 0.1, generator=generator)
        elif name.endswith("bias"):
            weight.data.normal_(0.0, 0.3, generator=generator)
        elif name.endswith("sinks"):
            weight.data.normal_(1.0, 1.0, generator=generator)
        else:
            routers = ("mlp.gate.weight", "router.weight", "gate.wg.weight", "lm_head.weight")
            gain = 2.0 if name.endswith(routers) else 1.5
            is_columns = model.config.model_type == "gpt_oss" and weight.dim() == 3
            std = gain / math.sqrt(weight.shape[-2 if is_columns else -1])
            weight.data.normal_(0.0, std, generator=generator)
        weight.data.copy_(weight.data.bfloat16())
        if is_mxfp4(model, name):
            experts, columns, width = weight.shape
            size = (experts, columns // 32, 1, width)
            spread = 2.0 ** torch.randint(-1, 2, size, generator=generator)
            rows = (weight.data.unflatten(1, (-1, 32)) * spread).flatten(1, 2).transpose(1, 2)
            weight.data.copy_(from_mxfp4(*to_mxfp4(rows)).transpose(1, 2))


def tensors(model: PreTrainedModel) -> list[tuple[str, torch.Tensor]]:
    """Every parameter, and the selection biases, which some families keep as buffers."""
    buffers = [(n, b) for n, b in model.named_buffers() if n.endswith("e_score_correction_bias")]
    return [*model.named_parameters(), *buffers]


def is_mxfp4(model: PreTrainedModel, name: str) -> bool:
    """Whether a parameter is stored as MXFP4 blocks and scales."""
    return hasattr(model.config, "quantization_config") and name.endswith(
        ("experts.gate_up_proj", "experts.down_proj")
    )


def to_mxfp4(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """rows (E, N, K) -> blocks (E, N, K / 32, 16) and scales (E, N, K / 32), both uint8."""
    groups = rows.unflatten(-1, (-1, 32))
    scales = torch.ceil(torch.log2(groups.abs().amax(-1) / 6)).clamp(-127, 127)
    distance = (groups / 2.0 ** scales[..., None])[..., None] - torch.tensor(E2M1)
    codes = distance.abs().argmin(-1).to(torch.uint8)
    return codes[..., 0::2] | codes[..., 1::2] << 4, (scales + 127).to(torch.uint8)


def from_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The inverse of `to_mxfp4`."""
    codes = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2).long()
    return (torch.tensor(E2M1)[codes] * 2.0 ** (scales.float() - 127)[..., None]).flatten(-2)


def logits_of(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Logits (tokens, vocab) of one sequence of ids (tokens,)."""
    return model(input_ids=ids[None], use_cache=False).logits[0]


def greedy(model: PreTrainedModel, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Greedy continuation ids and margins, both (STEPS,)."""
    margins = []
    for _ in range(STEPS):
        top = logits_of(model, ids)[-1].topk(2)
        margins.append(top.values[0] - top.values[1])
        ids = torch.cat([ids, top.indices[:1]])
    return ids[-STEPS:], torch.stack(margins)


def decisive(model: PreTrainedModel, ids: torch.Tensor) -> bool:
    """Whether rounding differences can flip neither a routing nor a greedy choice."""
    if router_gap(model, ids) <= MIN_ROUTER_GAP:
        return False
    generated, margin = greedy(model, ids)
    varied = len(set(generated.tolist())) >= STEPS // 2 and int(generated.min()) >= RESERVED
    gap = router_gap(model, torch.cat([ids, generated]))
    return varied and float(margin.min()) > MIN_MARGIN and gap > MIN_ROUTER_GAP


def save(model: PreTrainedModel, config: Config, folder: Path) -> None:
    """Write bf16 weights under their hub names, and `config` as config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    size = "150KB" if folder.name == "qwen3_moe_v5" else "1GB"
    if "quantization_config" in config:
        save_file(mxfp4_tensors(model), folder / "model.safetensors", {"format": "pt"})
    else:
        copy.deepcopy(model).bfloat16().save_pretrained(folder, max_shard_size=size)
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def mxfp4_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The tensors of the hub's gpt_oss files."""
    tensors = {}
    for name, weight in model.named_parameters():
        if is_mxfp4(model, name):
            blocks, scales = to_mxfp4(weight.data.transpose(1, 2))
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        else:
            tensors[name] = weight.data.bfloat16().contiguous()
    return tensors


def effect(model: PreTrainedModel, ids: torch.Tensor, want: torch.Tensor) -> float:
    """Largest absolute change of a logit against `want`."""
    return float((logits_of(model, ids) - want).abs().max())


def check_features(name: str, folder: Path, ids: torch.Tensor, want: torch.Tensor) -> None:
    """Assert that each config key in OTHERS, each tensor and each expert moves the logits."""
    config = CASES[name]
    effects: dict[str, float] = {}
    for path, values in OTHERS[name].items():
        for value in values:
            other = build(changed(config, path, value), folder)
            effects[f"{path}={str(value)[:8]}"] = effect(other, ids, want)
    for path, values in IGNORED.get(name, {}).items():
        for value in values:
            assert effect(build(changed(config, path, value), folder), ids, want) == 0.0, path
    model = build(config, folder)
    for norm in ("q_norm", "k_norm"):
        if hasattr(model.model.layers[0].self_attn, norm):
            unnormed = copy.deepcopy(model)
            for layer in unnormed.model.layers:
                setattr(layer.self_attn, norm, torch.nn.Identity())
            effects[f"without {norm}"] = effect(unnormed, ids, want)
    for tensor, weight in tensors(model):
        parts = weight.data if weight.dim() == 3 else [weight.data]
        for index, part in enumerate(parts):
            kept = part.clone()
            part.fill_(1.0 if tensor.endswith("norm.weight") else 0.0)
            effects[f"{tensor}[{index}]"] = effect(model, ids, want)
            part.copy_(kept)
    weakest = sorted(effects, key=effects.__getitem__)[:4]
    print("    weakest:", ", ".join(f"{key} {effects[key]:.3f}" for key in weakest))
    assert effects[weakest[0]] > MIN_EFFECT, f"{name}: {weakest[0]} hardly matters"


def make_case(name: str, folder: Path) -> None:
    """Find the first decisive seed, save its checkpoint and golden.npz, and check both."""
    config = CASES[name]
    for seed in range(1000):
        generator = torch.Generator().manual_seed(seed)
        model = build(config)
        fill(model, generator)
        ids = torch.randint(RESERVED, config["vocab_size"], (PROMPT,), generator=generator)
        if decisive(model, ids):
            break
    else:
        raise RuntimeError(f"{name}: no decisive seed")

    save(model, config, folder)
    loaded = build(config, folder)
    logits = logits_of(loaded, ids)
    assert torch.isfinite(logits).all()
    assert (logits - logits_of(model, ids)).abs().max() < 1e-4
    generated, margin = greedy(loaded, ids)
    arrays = {"input_ids": ids.int(), "logits": logits}
    arrays |= {"generated": generated.int(), "margin": margin}
    if name == "llama_longrope":
        arrays["input_ids_short"] = ids[:SHORT].int()
        arrays["logits_short"] = logits_of(loaded, ids[:SHORT])
    saved: Config = {key: tensor.numpy() for key, tensor in arrays.items()}
    np.savez_compressed(folder / "golden.npz", **saved)
    gap = router_gap(loaded, torch.cat([ids, generated]))
    noise = float((logits_of(copy.deepcopy(loaded).double(), ids) - logits).abs().max())
    size = sum(path.stat().st_size for path in folder.iterdir())
    assert size < 500_000
    print(
        f"{name}: seed {seed}, {loaded.num_parameters()} parameters, {size / 1000:.0f} kB, "
        f"router gap {gap:.4f}, margin {float(margin.min()):.3f}, "
        f"logit std {float(logits.std()):.2f}, float32 noise {noise:.1e}",
        flush=True,
    )
    check_features(name, folder, ids, logits)


def make_tokenizer(folder: Path) -> None:
    """Train a byte-level BPE of 300 tokens; expected ids and a rendered chat go to golden.json."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[AddedToken("<s>", special=True), AddedToken("</s>", special=True)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    assert tokenizer.get_vocab_size() == 300
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "add_prefix_space": False,
        "bos_token": "<s>",
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": "</s>",
        "model_max_length": 256,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    loaded = PreTrainedTokenizerFast.from_pretrained(folder)
    texts = [*SENTENCES, "", " two  spaces\n\tand a tab ", "<s>naïve 東京 🙂</s>"]
    messages = [{"role": "user", "content": " Which experts? "}]
    golden = {
        "encoded": [{"text": text, "ids": loaded.encode(text)} for text in texts],
        "messages": messages,
        "chat": loaded.apply_chat_template(messages, tokenize=False, add_generation_prompt=True),
    }
    assert all(loaded.decode(case["ids"]) == case["text"] for case in golden["encoded"])
    (folder / "golden.json").write_text(json.dumps(golden, indent=2) + "\n")


def main() -> None:
    """Make the cases named on the command line, or all of them and the tokenizer."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    for name in sys.argv[2:] or [*CASES, "tokenizer"]:
        if name == "tokenizer":
            make_tokenizer(out / name)
        else:
            make_case(name, out / name)


if __name__ == "__main__":
    main()
