"""How attention shares a context between warps: the macros of cuda_src/attention.cu, its memory."""

from dataclasses import dataclass

CHUNK_TOKENS, TEAM_ELEMENTS, MOST_HEADS = 16, 32, 8
ATTENTION_BYTES, TEAM_BYTES, MORE_BYTES, ATTENTION_STATIC_BYTES = 132_000, 13_000, 2_048, 6_000
"""Tokens that a warp of attention takes at a time, elements of a head that each warp of a team
mixes, most query heads of a block; shared memory for chunks, and at most that of fixed arrays,
for each team, for each of its scales a value beyond four, and besides."""


def head_groups(num_heads: int, num_kv_heads: int) -> int:
    """Groups of at most 8 query heads that read a key and value head together: all that share one,
    or an equal part of them."""
    shared = num_heads // num_kv_heads
    parts = next(n for n in range(1, shared + 1) if shared % n == 0 and shared // n <= MOST_HEADS)
    return num_kv_heads * parts


@dataclass(frozen=True)
class AttentionSplit:
    """How attention shares a context between warps: the macros of cuda_src/attention.cu.

    warps: of a block. stages: chunks of 16 tokens in a warp's ring. shared: dynamic shared memory
    of a block in bytes. least: tokens that a block takes at least. beside: blocks that fit on a
    multiprocessor together, 1 or 2.
    """

    warps: int
    stages: int
    shared: int
    least: int
    beside: int

    @classmethod
    def fit(
        cls, head_dim: int, token_bytes: int, value_groups: int, shared_bytes: int
    ) -> "AttentionSplit":
        """For heads of this size, whose key and value take `token_bytes` a token in the cache, the
        value with so many scales, on a GPU whose blocks can have `shared_bytes`."""
        stage = -(-CHUNK_TOKENS * token_bytes // 128) * 128
        team = head_dim // TEAM_ELEMENTS

        def fixed(warps: int) -> int:
            each = TEAM_BYTES + MORE_BYTES * max(0, value_groups - 4)
            return ATTENTION_STATIC_BYTES + warps // team * each

        warps, stages = next(
            (w, s)
            for w in (8, 4, 2)
            for s in (3, 2)
            if w * s * stage <= min(ATTENTION_BYTES, shared_bytes - fixed(w)) or (w, s) == (team, 2)
        )
        shared = warps * stages * stage
        two = 2 * (shared + fixed(warps)) <= shared_bytes
        return cls(warps, stages, shared, warps * CHUNK_TOKENS, 1 + two)

    def macros(self) -> dict[str, int]:
        """What the kernel must know of this."""
        return {"WARPS": self.warps, "STAGES": self.stages, "LEAST": self.least}
