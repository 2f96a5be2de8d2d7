"""The one list of shapes: op tests check these, and the kernel bench times the ones it names."""

from dataclasses import dataclass

from npmoe.config import KV_FORMATS, WEIGHT_FORMATS

FOUR_BIT = ("int4", "int4_asym", "fp4", "mxfp4", "nvfp4")
KV_PAIRS = (
    *((name, name) for name in KV_FORMATS),
    *[("int8", "fp4"), ("fp32", "int4_asym"), ("mxfp4", "bf16"), ("nvfp4", "fp4")],
)
"""Formats of K and V that are tried together: each with itself, and mixed pairs."""


@dataclass(frozen=True)
class LinearCase:
    """y `[num_tokens, rows]` = x `[num_tokens, columns]` W^T; num_experts 0 is a plain matrix."""

    name: str
    num_tokens: int
    rows: int
    columns: int
    num_experts: int = 0


LINEAR = (
    LinearCase("one_token", 1, 64, 64),
    LinearCase("ragged_rows", 3, 70, 96),
    LinearCase("fewer_rows_than_a_tile", 2, 7, 32),
    LinearCase("eight_tokens", 8, 192, 160),
    LinearCase("many_tokens", 9, 130, 64),
    LinearCase("prefill", 33, 65, 128),
    LinearCase("no_tokens", 0, 64, 32),
    LinearCase("experts", 4, 96, 64, num_experts=3),
    LinearCase("experts_many_tokens", 20, 66, 32, num_experts=2),
)


@dataclass(frozen=True)
class AttentionCase:
    """Sequence s has `cached[s]` tokens in its pages already and `new[s]` queries."""

    name: str
    cached: tuple[int, ...]
    new: tuple[int, ...]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    page_size: int = 16
    window: int | None = None
    sinks: bool = False


ATTENTION = (
    AttentionCase("first_token", (0,), (1,)),
    AttentionCase("decode", (40,), (1,)),
    AttentionCase("decode_three", (0, 17, 31), (1, 1, 1)),
    AttentionCase("few_queries", (5,), (8,)),
    AttentionCase("prefill", (0,), (37,)),
    AttentionCase("ragged", (3, 20, 0), (12, 1, 2)),
    AttentionCase("full_page", (15,), (1,)),
    AttentionCase("window", (30, 2), (3, 20), window=7),
    AttentionCase("window_of_one", (9,), (2,), window=1),
    AttentionCase("sinks", (30, 2, 9), (3, 20, 1), sinks=True),
    AttentionCase("sinks_window", (40, 3), (1, 12), num_heads=6, window=7, sinks=True),
    AttentionCase("one_head_each", (10,), (4,), num_heads=3, num_kv_heads=3),
    AttentionCase("wide_ratio", (10,), (9,), num_heads=8, num_kv_heads=1, head_dim=64),
    AttentionCase("small_pages", (13,), (2,), page_size=4),
)


@dataclass(frozen=True)
class ExpertsCase:
    """num_tokens tokens of `hidden`, each to top_k of num_experts experts of `width`."""

    name: str
    num_tokens: int
    hidden: int
    width: int
    num_experts: int
    top_k: int
    biases: bool = False


EXPERTS = (
    ExpertsCase("decode", 1, 64, 32, 8, 2),
    ExpertsCase("few", 5, 64, 96, 4, 3),
    ExpertsCase("many", 24, 64, 32, 3, 2),
    ExpertsCase("one_expert", 4, 32, 64, 1, 1),
    ExpertsCase("all_experts", 3, 32, 32, 4, 4),
    ExpertsCase("biases", 5, 64, 96, 4, 3, biases=True),
)

__all__ = ["ATTENTION", "EXPERTS", "FOUR_BIT", "KV_FORMATS", "KV_PAIRS", "LINEAR", "WEIGHT_FORMATS"]
__all__ += ["AttentionCase", "ExpertsCase", "LinearCase"]
