"""The demonstration model: Qwen3-MoE, its 4-bit experts, and its Hugging Face checkpoint.

Shapes: B sequences, S positions, T = B*S, H hidden, E experts, I expert width, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

EPS = 1e-6
SMALLEST = 2.0**-14  # least normal float16; a group with a smaller scale is all zeros


@dataclass
class Shape:
    """The model's dimensions; every contraction is over a multiple of 32."""

    vocab_size: int = 6144
    hidden_size: int = 384
    num_hidden_layers: int = 8
    num_attention_heads: int = 6
    num_key_value_heads: int = 2
    head_dim: int = 64
    num_experts: int = 12
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 192
    rope_theta: float = 10000.0
    max_position_embeddings: int = 2048


class Norm(nn.Module):
    """RMSNorm in float32 over the last dimension."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS))


class Attention(nn.Module):
    """Grouped-query attention with per-head RMSNorm before the rotary embedding."""

    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.shape, self.dropout = shape, dropout
        hidden, dim = shape.hidden_size, shape.head_dim
        self.q_proj = nn.Linear(hidden, shape.num_attention_heads * dim, bias=False)
        self.k_proj = nn.Linear(hidden, shape.num_key_value_heads * dim, bias=False)
        self.v_proj = nn.Linear(hidden, shape.num_key_value_heads * dim, bias=False)
        self.o_proj = nn.Linear(shape.num_attention_heads * dim, hidden, bias=False)
        self.q_norm, self.k_norm = Norm(dim), Norm(dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [B, S, H], cos and sin [S, head_dim] -> [B, S, H]."""
        batch, length, _ = x.shape

        def heads(y: Tensor) -> Tensor:
            return y.view(batch, length, -1, self.shape.head_dim)

        def rotate(y: Tensor) -> Tensor:
            a, b = y.chunk(2, dim=-1)
            return (y * cos + torch.cat((-b, a), -1) * sin).transpose(1, 2)

        v = heads(self.v_proj(x)).transpose(1, 2)
        q = rotate(self.q_norm(heads(self.q_proj(x)))).to(v.dtype)
        k = rotate(self.k_norm(heads(self.k_proj(x)))).to(v.dtype)
        group = self.shape.num_attention_heads // self.shape.num_key_value_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        drop = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=drop, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(batch, length, -1))


class Experts(nn.Module):
    """Top-k SwiGLU experts, computed densely: one wide FFN whose units are masked by the router."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        experts, hidden, width = shape.num_experts, shape.hidden_size, shape.moe_intermediate_size
        self.top_k = shape.num_experts_per_tok
        self.gate = nn.Linear(hidden, experts, bias=False)
        self.gate_proj = nn.Parameter(torch.empty(experts, width, hidden))
        self.up_proj = nn.Parameter(torch.empty(experts, width, hidden))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, width))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, S, H] -> output [B, S, H], balance loss [], share of the assignments [E]."""
        with torch.autocast(x.device.type, enabled=False):
            probs = F.linear(x.float(), self.gate.weight.float()).softmax(-1)  # [B, S, E]
        rest = probs.detach()
        for _ in range(self.top_k - 1):
            rest = rest.masked_fill(rest == rest.amax(-1, keepdim=True), -1.0)
        chosen = (probs >= rest.amax(-1, keepdim=True)).float()
        weights = probs * chosen
        weights = weights / weights.sum(-1, keepdim=True)
        experts, width, hidden = self.gate_proj.shape
        gate = F.linear(x, self.gate_proj.view(-1, hidden))
        up = F.linear(x, self.up_proj.view(-1, hidden))
        inner = (F.silu(gate) * up).unflatten(-1, (experts, width))
        inner = (inner * weights.unsqueeze(-1).to(inner.dtype)).flatten(-2)
        down = self.down_proj.permute(1, 0, 2).reshape(hidden, -1)
        load = chosen.mean((0, 1)) / self.top_k
        return F.linear(inner, down), experts * (load * probs.mean((0, 1))).sum(), load


class Layer(nn.Module):
    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.input_layernorm = Norm(shape.hidden_size)
        self.self_attn = Attention(shape, dropout)
        self.post_attention_layernorm = Norm(shape.hidden_size)
        self.mlp = Experts(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, S, H] -> the same shape, and the experts' balance loss and load."""
        y = self.self_attn(self.input_layernorm(x), cos, sin)
        x = x + F.dropout(y, self.dropout, self.training)
        y, balance, load = self.mlp(self.post_attention_layernorm(x))
        return x + F.dropout(y, self.dropout, self.training), balance, load


class Model(nn.Module):
    """Qwen3MoeForCausalLM with tied embeddings; parameters carry the Hugging Face names."""

    def __init__(self, shape: Shape, dropout: float = 0.0) -> None:
        super().__init__()
        self.shape, self.dropout = shape, dropout
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape, dropout) for _ in range(shape.num_hidden_layers))
        self.norm = Norm(shape.hidden_size)
        for name, p in self.named_parameters():
            if p.ndim > 1:
                out = name.endswith(("o_proj.weight", "down_proj"))
                scale = 1.0 if not out else (2 * shape.num_hidden_layers) ** -0.5
                nn.init.normal_(p, std=0.02 if "embed" in name else scale * p.shape[-1] ** -0.5)
        dim = shape.head_dim
        freq = shape.rope_theta ** -(torch.arange(0, dim, 2).float() / dim)
        angle = torch.outer(torch.arange(shape.max_position_embeddings).float(), freq)
        angle = torch.cat((angle, angle), -1)
        self.register_buffer("cos", angle.cos()[:, None], persistent=False)  # [S, 1, head_dim]
        self.register_buffer("sin", angle.sin()[:, None], persistent=False)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """tokens [B, S] -> final hidden states [B, S, H], balance loss [], load [layers, E]."""
        length = tokens.shape[1]
        x = F.dropout(self.embed_tokens(tokens), self.dropout, self.training)
        balances, loads = [], []
        for layer in self.layers:
            x, balance, load = layer(x, self.cos[:length], self.sin[:length])
            balances.append(balance)
            loads.append(load)
        return self.norm(x), torch.stack(balances).mean(), torch.stack(loads)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [..., H] -> float32 [..., V]."""
        return F.linear(hidden, self.embed_tokens.weight).float()

    def experts(self) -> list[Tensor]:
        """The expert weights: [E, out, in] each."""
        return [p for name, p in self.named_parameters() if name.endswith("_proj")]


def fp4(groups: Tensor) -> Tensor:
    """Round to E2M1 (0, .5, 1, 1.5, 2, 3, 4, 6, signed) times a scale per group; groups [N, 32].

    The scale is amax/6 or amax/4, whichever has the lower squared error. It is kept to 6
    significant bits, so that each value (1 or 3, times 2^k, times the scale) is exact in bfloat16
    and quantising the exported checkpoint again, with float16 scales, gives the same values.
    """
    amax = groups.abs().amax(-1, keepdim=True)
    found = []
    for top in (6.0, 4.0):
        mantissa, exponent = torch.frexp(amax / top)
        scale = torch.ldexp((mantissa * 64).round() / 64, exponent)
        scale = torch.where(scale < SMALLEST, 0.0, scale)
        x = (groups / torch.where(scale > 0, scale, 1.0)).clamp(-6, 6)
        step = torch.where(x.abs() < 2, 0.5, torch.where(x.abs() < 4, 1.0, 2.0))
        value = (x / step).round() * step * scale
        found.append((value, (value - groups).pow(2).sum(-1, keepdim=True)))
    (first, error), (second, other) = found
    return torch.where(other < error, second, first)


@contextmanager
def rounded_experts(model: Model, on: bool = True) -> Iterator[None]:
    """Within the context the experts hold their fp4 values; gradients taken there pass through."""
    if not on:
        yield
        return
    params = [p.detach() for p in model.experts()]
    kept = torch.cat([p.flatten() for p in params])
    sizes = [p.numel() for p in params]
    for values in (fp4(kept.view(-1, 32)).flatten(), kept):
        parts = values.split(sizes)
        torch._foreach_copy_(params, [w.view_as(p) for p, w in zip(params, parts, strict=True)])
        if values is not kept:
            yield


def export(model: Model, folder: Path, quant: bool, shard_bytes: int = 14_000_000) -> None:
    """Write the model as bfloat16 shards with an index, and its config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    with rounded_experts(model, quant):
        for name, p in model.named_parameters():
            p = p.detach().to("cpu", torch.bfloat16, copy=True)
            if name.endswith("_proj"):
                stem, kind = f"model.{name}".rsplit(".", 1)
                tensors |= {f"{stem}.experts.{e}.{kind}.weight": w.clone() for e, w in enumerate(p)}
            else:
                tensors[f"model.{name}"] = p
    shards: list[dict[str, Tensor]] = [{}]
    for name, w in tensors.items():
        if sum(v.nbytes for v in shards[-1].values()) + w.nbytes > shard_bytes:
            shards.append({})
        shards[-1][name] = w
    index = {}
    for i, shard in enumerate(shards, 1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, {"format": "pt"})
        index |= dict.fromkeys(shard, file)
    total = sum(w.nbytes for w in tensors.values())
    dump(
        folder / "model.safetensors.index.json",
        {"metadata": {"total_size": total}, "weight_map": index},
    )
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        **asdict(model.shape),
        "intermediate_size": model.shape.moe_intermediate_size * model.shape.num_experts_per_tok,
        "hidden_act": "silu",
        "rms_norm_eps": EPS,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "router_aux_loss_coef": 0.01,
        "rope_scaling": None,
        "use_sliding_window": False,
        "sliding_window": None,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "use_cache": True,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
        "torch_dtype": "bfloat16",
    }
    dump(folder / "config.json", config)


def load(folder: Path) -> Model:
    """Read a checkpoint written by `export`, as float32."""
    config = json.loads((folder / "config.json").read_text())
    model = Model(Shape(**{k: config[k] for k in asdict(Shape())}))
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    state = {}
    for name, _ in model.named_parameters():
        if name.endswith("_proj"):
            stem, kind = f"model.{name}".rsplit(".", 1)
            rows = [f"{stem}.experts.{e}.{kind}.weight" for e in range(model.shape.num_experts)]
            state[name] = torch.stack([tensors[row] for row in rows]).float()
        else:
            state[name] = tensors[f"model.{name}"].float()
    model.load_state_dict(state)
    return model


def dump(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
