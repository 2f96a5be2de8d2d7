"""How the weight kernels stream their weights: the macros of cuda_src/gemv.cuh and its memory."""

from dataclasses import dataclass

from npmoe.errors import UnsupportedModel
from npmoe.formats.fragments import COLUMNS, RECORD_BYTES, ROWS
from npmoe.formats.quant_tensor import CODES_PER_BYTE

CHUNK_BYTES, PAIRED_CHUNK_BYTES = 40_000, 24_000
RING_BYTES = 114_000
MAX_BATCH = 16
STATIC_BYTES = 256
"""Largest chunk, the same where tiles go in pairs, and ring; most tiles between two reductions;
room for a kernel's own arrays."""


@dataclass(frozen=True)
class Stream:
    """Macros and launch of one kernel.

    parts: chunks a row tile. stages: chunks in the ring. resident: the ring holds all chunks of a
    block. batch: tiles between two reductions. paired: tiles are multiplied two by two, so that
    activations are read half as often. bulk: copies into shared memory by hardware.
    warps: of a block that multiply. shared: dynamic shared memory of a block in bytes.
    """

    parts: int
    stages: int
    resident: bool
    batch: int
    paired: bool
    bulk: bool
    warps: int
    shared: int

    @classmethod
    def fit(
        cls,
        form: str,
        slices: int,
        stacked: int,
        tokens: int,
        tiles: int,
        bulk: bool,
        shared_bytes: int,
    ) -> "Stream":
        """For row tiles of `stacked` runs of `slices` records, at most `tiles` of them a block.

        form: the weight format. tokens: activations side by side. shared_bytes: shared memory that
        a block of this GPU can have.
        Raises UnsupportedModel where activations and ring do not fit it.
        """
        # 4 bits are bound by instructions and want many warps; more tokens need more registers.
        narrow = form in CODES_PER_BYTE and tokens <= 4
        choices = (16, 8, 4, 2, 1) if narrow else (8, 4, 2, 1)
        largest = PAIRED_CHUNK_BYTES if narrow else CHUNK_BYTES
        staged = slices * stacked * tokens * 2 * 16 * 16
        for parts in range(1, slices + 1):
            each = slices // parts
            chunk = each * RECORD_BYTES[form]
            if slices % parts or (chunk > largest and each > 1):
                continue
            place, total = chunk + 16, tiles * stacked * parts  # two barriers with every chunk
            for warps in choices:
                batch = min(tiles, MAX_BATCH, max(2, warps // 2))  # a thread finishes one row
                while True:
                    shared = staged + warps * tokens * 4 * (1 + ROWS * batch)
                    room = shared_bytes - STATIC_BYTES - shared
                    if batch == 1 or room >= (min(total, 2) * place if bulk else 0):
                        break
                    batch //= 2
                if not bulk:
                    if room >= 0:
                        return cls(parts, 2, False, batch, False, False, warps, shared)
                    continue
                stages = min(total, room // place, max(2, RING_BYTES // place))
                if stages == total or (stages >= 2 and each >= warps):
                    shared += stages * place
                    resident = stages == total
                    paired = narrow and not resident and tiles > 1
                    paired &= stages >= 4 and (batch % 2 == 0 or batch == tiles)
                    return cls(parts, stages, resident, batch, paired, True, warps, shared)
        raise UnsupportedModel(
            f"{slices * stacked * COLUMNS} columns x {tokens} tokens do not fit the "
            f"{shared_bytes:,} bytes of this GPU's shared memory; use device='cpu'"
        )

    @property
    def threads(self) -> int:
        """Of a block: where the ring goes round, one more warp keeps it full."""
        return 32 * (self.warps + (self.bulk and not self.resident))

    def macros(self) -> dict[str, int]:
        """What the kernel must know of this."""
        return {
            "PARTS": self.parts,
            "STAGES": self.stages,
            "RESIDENT": int(self.resident),
            "BATCH": self.batch,
            "PAIRED": int(self.paired),
            "BULK": int(self.bulk),
            "WARPS": self.warps,
        }


CHUNK_TOKENS = 16
ATTENTION_BYTES = 112_000
ATTENTION_STATIC_BYTES = 12_000
"""Tokens that a warp of attention takes at a time; shared memory of two blocks; of fixed arrays."""


@dataclass(frozen=True)
class AttentionSplit:
    """How attention shares a context between warps: the macros of cuda_src/attention.cu.

    warps: of a block. stages: chunks of 16 tokens in a warp's ring. shared: dynamic shared memory
    of a block in bytes. least: tokens that a block takes at least.
    """

    warps: int
    stages: int
    shared: int
    least: int

    @classmethod
    def fit(
        cls, head_dim: int, key: str, value: str, shared_bytes: int, long: bool = False
    ) -> "AttentionSplit":
        """For heads of this size and formats, on a GPU whose blocks can have `shared_bytes`.

        long: for contexts in which attention takes so long that as many warps as possible count for
        more than room for the kernels before and after it.
        """
        stage = 0
        for name in (key, value):
            stage += CHUNK_TOKENS * (
                head_dim // 2 + head_dim // 16 if name == "fp4" else 2 * head_dim
            )
            stage += CHUNK_TOKENS * 16  # rows on different banks
        room = shared_bytes - ATTENTION_STATIC_BYTES
        room = room if long else min(ATTENTION_BYTES, room)
        choices = (16, 8, 4, 2) if long else (8, 4, 2)
        warps, stages = next(
            (w, s) for w in choices for s in (3, 2) if w * s * stage <= room or (w, s) == (2, 2)
        )
        return cls(warps, stages, warps * stages * stage, warps * CHUNK_TOKENS)

    def macros(self) -> dict[str, int]:
        """What the kernel must know of this."""
        return {"WARPS": self.warps, "STAGES": self.stages, "LEAST": self.least}
