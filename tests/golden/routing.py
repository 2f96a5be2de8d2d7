"""How far the routers of a transformers model are from choosing other experts."""

import math

import torch
from torch import nn
from transformers import PreTrainedModel

ROUTERS = ("Router", "Gate")  # ends of class names; each returns (logits, weights, ids)


def selection_bias(model: PreTrainedModel, router: str) -> torch.Tensor | None:
    """The bias (experts,) that a router adds to its scores for the choice, or None."""
    block = model.get_submodule(router.rpartition(".")[0])
    for name, tensor in [*block.named_parameters(), *block.named_buffers()]:
        if name.endswith("e_score_correction_bias"):
            return tensor.flatten()
    return None


def router_gap(model: PreTrainedModel, ids: torch.Tensor) -> float:
    """Smallest gap between the last chosen and the first rejected expert, or group of experts,
    by what the routers compare: scores with a bias (those of softmax in units of 1 / experts),
    else logits. inf for a dense model."""
    gaps, config = [math.inf], model.config.get_text_config()

    def watch(bias: torch.Tensor | None) -> object:
        return lambda module, args, output: gaps.append(gap_of(config, output[0], bias))

    routers = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Module) and type(module).__name__.endswith(ROUTERS)
    ]
    hooks = [m.register_forward_hook(watch(selection_bias(model, n))) for n, m in routers]
    model(input_ids=ids[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    return min(gaps)


def gap_of(config: object, logits: torch.Tensor, bias: torch.Tensor | None) -> float:
    """The smallest gap of one layer; logits (tokens, experts)."""
    keys = logits
    if bias is not None:
        is_softmax = config.model_type == "ernie4_5_moe"
        keys = (logits.softmax(-1) if is_softmax else logits.sigmoid()) + bias
        keys *= logits.shape[-1] if is_softmax else 1
    gap = math.inf
    groups = getattr(config, "n_group", None) or 1
    is_v2 = config.model_type == "deepseek_v2"
    if is_v2 and config.topk_method == "greedy":
        groups = 1
    if groups > 1:
        members = keys.unflatten(-1, (groups, -1))
        scores = members.topk(1 if is_v2 else 2).values.sum(-1)
        best = scores.topk(config.topk_group + 1)
        gap = float((best.values[:, -2] - best.values[:, -1]).min())
        is_best = torch.zeros_like(scores, dtype=torch.bool)
        is_best.scatter_(1, best.indices[:, :-1], True)
        keys = members.masked_fill(~is_best[..., None], -math.inf).flatten(1)
    if config.model_type == "phimoe":
        gap = 100 * sparsemixer_gap(logits, config.router_jitter_noise)
    k = config.num_experts_per_tok
    top = keys.topk((k if isinstance(k, int) else k[0]) + 1).values
    return min(gap, float((top[:, -2] - top[:, -1]).min()))


def sparsemixer_gap(logits: torch.Tensor, jitter: float) -> float:
    """How near the relative distance of a logit to the best one comes to 2 jitter, in two rounds;
    the best two must be apart, too, since their order decides the weights."""
    top = logits.topk(2).values
    gap = float((top[:, 0] - top[:, 1]).min())
    for best in (top[:, :1], top[:, 1:]):
        distance = (best - logits) / logits.abs().clamp(min=best)
        gap = min(gap, float((distance - 2 * jitter).abs().min()))
    return gap
