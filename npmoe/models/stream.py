"""How the weight kernels stream their weights: the macros of cuda_src/gemv.cuh and its memory."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from npmoe.errors import UnsupportedModel
from npmoe.formats.fragments import COLUMNS, RECORD_BYTES, RECORDS, ROWS
from npmoe.formats.quant_tensor import CODES_PER_BYTE
from npmoe.runtime.nvrtc import named_codes

W_CODES = named_codes({name: record.code for name, record in RECORDS.items()})

CHUNK_BYTES, NARROW_CHUNK_BYTES = 40_000, 26_000
RING_BYTES, NARROW_EXPERT_RING_BYTES = 114_000, 174_000
SLICE_BYTES, WINDOW_FROM = 512, 6
MANY_WARPS, STATIC_BYTES = (16, 12, 20), 256
"""Largest chunk, the same of 4-bit codes; ring, and that of both projections of 4-bit experts;
activations of a token's slice, and from how many slices a warp they pass through a window; warps
of a block that multiplies 4-bit codes; room for a kernel's own arrays."""


@dataclass(frozen=True)
class Stream:
    """Macros and launch of one kernel.

    parts: chunks a row tile. stages: chunks in the ring. resident: the ring holds all chunks of a
    block. batch: tiles between two reductions. buffers: 2 where one batch is finished while the
    next is multiplied. paired: tiles are multiplied two by two, so that what one waits for, the
    other hides, and activations are read half as often. rolling: slices of a warp's window through
    which activations pass where a block reads them only once, or 0. bulk: copies into shared memory
    by hardware. warps: of a block that multiply. shared: its dynamic shared memory in bytes.
    """

    parts: int
    stages: int
    resident: bool
    batch: int
    buffers: int
    paired: bool
    rolling: int
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
        blocks: int,
        bulk: bool,
        shared_bytes: int,
        counted: bool = True,
        staged: int = 0,
    ) -> "Stream":
        """For `tiles` row tiles of `stacked` runs of `slices` records, shared by `blocks` blocks.

        form: the weight format. tokens: activations side by side. shared_bytes: shared memory that
        a block of this GPU can have. counted: there are so many tiles, and not at most, where the
        ring goes round whatever it holds. staged: activations of which each tile picks some, or 0
        where it takes all.
        Raises UnsupportedModel where activations and ring do not fit it.
        """
        gpu = blocks, bulk, shared_bytes
        work = _Work.of(form, slices, stacked, tokens, tiles, *gpu, counted, staged or tokens)
        for parts in work.parts(form, slices):
            each = slices // parts
            for warps in _warps(work.narrow, slices * stacked):
                found = work.stream(parts, stacked * parts, each, each * RECORD_BYTES[form], warps)
                if found is not None:
                    return found
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
            "BUFFERS": self.buffers,
            "PAIRED": int(self.paired),
            "ROLLING": self.rolling,
            "BULK": int(self.bulk),
            "WARPS": self.warps,
        }


@dataclass(frozen=True)
class _Work:
    """What a block has to do: `own` row tiles of `slices` slices, or, unless counted, at most so
    many. narrow: 4-bit codes, few tokens. staged: tokens whose activations it holds. pairs_fit:
    tiles can be taken two by two, for at most an eighth more in the busiest block."""

    narrow: bool
    slices: int
    tokens: int
    own: int
    pairs_fit: bool
    bulk: bool
    shared_bytes: int
    counted: bool
    staged: int

    @classmethod
    def of(
        cls,
        form: str,
        slices: int,
        stacked: int,
        tokens: int,
        tiles: int,
        blocks: int,
        bulk: bool,
        shared_bytes: int,
        counted: bool = True,
        staged: int = 1,
    ) -> "_Work":
        """Arguments as of Stream.fit."""
        # 4 bits are bound by instructions and want many warps; more tokens need more registers.
        narrow = form in CODES_PER_BYTE and tokens <= 4
        own = -(-tiles // blocks)  # of the block that has most
        own_in_pairs = 2 * -(-tiles // (2 * blocks))
        pairs_fit = tiles % 2 == 0 and own > 1 and 8 * own_in_pairs <= 9 * own
        sizes = slices * stacked, tokens, own, pairs_fit, bulk, shared_bytes
        return cls(narrow, *sizes, counted, staged)

    def stream(
        self, parts: int, chunks: int, each: int, chunk_bytes: int, warps: int
    ) -> Stream | None:
        """With this many warps and `chunks` chunks of `each` records a tile, if that fits."""
        batch = self._batch(warps)
        buffers, once = self._buffers(batch), self._once(warps)
        window = _window(once, each, warps)
        place = chunk_bytes + 16  # two barriers with every chunk
        total = max(self.own * chunks, 1 if self.counted else 2)
        least = min(total, 2) * place if self.bulk else 0
        while batch > 1 and self._shared(warps, batch, buffers, window) + least > self._room:
            batch //= 2
        if self.narrow and not self.counted:  # a ring for pairs of tiles is worth more
            while (
                batch > 2 and self._shared(warps, batch, buffers, window) + 4 * place > self._room
            ):
                batch //= 2
        if once and batch < self.own:
            return None  # a window passes once
        shared = self._shared(warps, batch, buffers, window)
        left = self._room - shared
        if not self.bulk:
            if left < 0:
                return None
            return Stream(
                parts=parts,
                stages=2,
                resident=False,
                batch=batch,
                buffers=1,
                paired=False,
                rolling=0,
                bulk=False,
                warps=warps,
                shared=shared,
            )
        stages = min(total, left // place, max(2, RING_BYTES // place))
        streams = stages < total or once or not self.counted
        if streams and (stages < 2 or each < warps):  # fewer records would leave warps without work
            return None
        if not self.counted and stages < 3 and each % 2 == 0 and each >= 2 * warps:
            return None  # chunks of half the size keep a ring of two full
        two_by_two = once or (streams and self.narrow and stages >= 4 and batch % 2 == 0)
        shared += stages * place
        # More than half, with the kilobyte that CUDA keeps of each block: two blocks of a kernel on
        # one multiprocessor would leave another one idle.
        return Stream(
            parts=parts,
            stages=stages,
            resident=self.counted and stages == total,
            batch=batch,
            buffers=buffers,
            paired=self.pairs_fit and two_by_two,
            rolling=window,
            bulk=True,
            warps=warps,
            shared=max(shared, self.shared_bytes // 2) if streams else shared,
        )

    def share(self, form: str, stacked: int, warps: int) -> "_Pass":
        """A part of a kernel whose ring goes round, and is large enough for pairs."""
        slices = self.slices // stacked
        parts = next(self.parts(form, slices))
        batch, once, each = self._batch(warps), self._once(warps), slices // parts
        window, buffers = _window(once, each, warps), self._buffers(batch)
        paired = self.pairs_fit and (once or (self.narrow and batch % 2 == 0))
        return _Pass(
            parts=parts,
            chunks=parts * stacked,
            chunk_bytes=each * RECORD_BYTES[form],
            batch=batch,
            buffers=buffers,
            paired=paired,
            rolling=window,
            shared=self._shared(warps, batch, buffers, window),
        )

    def parts(self, form: str, slices: int) -> Iterator[int]:
        """Numbers of chunks, from the lowest, in which a run of `slices` records may come."""
        largest = NARROW_CHUNK_BYTES if self.narrow else CHUNK_BYTES
        for parts in range(1, slices + 1):
            each = slices // parts
            if slices % parts == 0 and (each * RECORD_BYTES[form] <= largest or each == 1):
                yield parts

    def _buffers(self, batch: int) -> int:
        return 2 if self.bulk and batch < self.own else 1

    def _batch(self, warps: int) -> int:
        return min(self.own, max(2, warps // 2))  # a thread finishes one row

    def _once(self, warps: int) -> bool:
        """Whether activations pass through a window."""
        once = (
            self.bulk and self.counted and self.staged == 1 and self.slices >= WINDOW_FROM * warps
        )
        return once and (self.own == 1 or (self.own == 2 and self.pairs_fit))

    @property
    def _room(self) -> int:
        return self.shared_bytes - STATIC_BYTES

    def _shared(self, warps: int, batch: int, buffers: int, window: int) -> int:
        """Bytes beside the ring: activations, their squares, and sums."""
        staged = (window * warps if window else self.slices) * self.staged * SLICE_BYTES
        return staged + warps * 4 * (self.staged + self.tokens * ROWS * batch * buffers)


def _warps(narrow: bool, slices: int) -> list[int]:
    """Numbers of warps that may share the slices of a tile, the best first."""

    def busy(warps: int) -> float:  # the part of them that has something to do
        return slices / (-(-slices // warps) * warps)

    many = sorted(MANY_WARPS, key=busy, reverse=True) if narrow else []
    return [*many, 8, 4, 2, 1]


def _window(once: bool, each: int, warps: int) -> int:
    # A second slice in the window costs registers; uneven shares of a chunk leave none.
    return (2 if each % warps == 0 else 1) if once else 0


@dataclass(frozen=True)
class _Pass:
    """One projection in a kernel that runs two: as of Stream, and chunks a row tile, the bytes of
    a chunk, and those of shared memory beside the ring."""

    parts: int
    chunks: int
    chunk_bytes: int
    batch: int
    buffers: int
    paired: bool
    rolling: int
    shared: int

    def macros(self, prefix: str) -> dict[str, int]:
        names = ("parts", "batch", "buffers", "paired", "rolling")
        return {prefix + name.upper(): int(getattr(self, name)) for name in names}


@dataclass(frozen=True)
class ExpertStream:
    """Macros and launch of the kernel that runs both projections of one token's experts, and the
    next layer's q, k and v where these follow.

    up, down, qkv: their shares of the work. warps, stages, shared: as of Stream.
    """

    up: _Pass
    down: _Pass
    qkv: _Pass | None
    warps: int
    stages: int
    shared: int

    @classmethod
    def fit(
        cls,
        form: str,
        hidden: int,
        width: int,
        top_k: int,
        blocks: int,
        shared_bytes: int,
        qkv_rows: int = 0,
    ) -> "ExpertStream | None":
        """For experts of `width` (padded) on activations of `hidden` columns, and then so many rows
        of q, k and v; None where those and a ring do not fit the shared memory that a block of this
        GPU can have."""
        narrow = form in CODES_PER_BYTE
        warps = _warps(narrow, hidden // COLUMNS)[0]
        tiles, gpu = top_k * 2 * width // ROWS, (blocks, True, shared_bytes)
        up = _Work.of(form, hidden // COLUMNS, 1, 1, tiles, *gpu)
        down = _Work.of(form, width // COLUMNS, top_k, 1, hidden // ROWS, *gpu)
        passes = [up.share(form, 1, warps), down.share(form, top_k, warps)]
        works = [up, down]
        if qkv_rows:
            works.append(_Work.of(form, hidden // COLUMNS, 1, 1, qkv_rows // ROWS, *gpu))
            passes.append(works[2].share(form, 1, warps))
        place = max(p.chunk_bytes for p in passes) + 16  # two barriers with every chunk
        work = max(p.shared for p in passes)
        total = sum(w.own * p.chunks for w, p in zip(works, passes, strict=True))
        ring = NARROW_EXPERT_RING_BYTES if narrow else RING_BYTES
        least = 4 if any(p.paired for p in passes) else 3  # so that copies go on meanwhile
        stages = max(ring // place, least)
        stages = min(total, (shared_bytes - STATIC_BYTES - work) // place, stages)
        if stages < min(total, least):
            return None
        shared = max(work + stages * place, shared_bytes // 2)  # one block a multiprocessor
        qkv = passes[2] if qkv_rows else None
        return cls(passes[0], passes[1], qkv, warps, stages, shared)

    @property
    def threads(self) -> int:
        """Of a block: one more warp keeps the ring full."""
        return 32 * (self.warps + 1)

    def macros(self) -> dict[str, int]:
        """What the kernel must know of this."""
        common = {"STAGES": self.stages, "RESIDENT": 0, "BULK": 1, "WARPS": self.warps}
        both = self.up.macros("") | self.down.macros("DOWN_")
        return common | both | (self.qkv.macros("QKV_") if self.qkv else {})


MAX_BLOCKS_EACH, BLOCK_BYTES = 3, 1024
"""Most blocks of grouped experts on a multiprocessor; shared memory that CUDA keeps of each."""


@dataclass(frozen=True)
class GroupedStream:
    """Macros and launch of a kernel that runs one projection of the experts of several tokens.

    columns: activations side by side. blocks_each: blocks of a multiprocessor.
    """

    stream: Stream
    columns: int
    blocks_each: int

    @classmethod
    def fit(
        cls,
        form: str,
        slices: int,
        columns: int,
        tiles: int,
        num_pairs: int,
        num_experts: int,
        blocks: int,
        bulk: bool,
        shared_bytes: int,
        staged: int = 0,
    ) -> "GroupedStream":
        """For experts of `tiles` row tiles of `slices` records, on `blocks` multiprocessors.

        num_pairs: choices of experts. columns: of them, those for which an expert is read once; or
        fewer where no more fit, so that some experts are read again. staged: as of Stream.fit; if
        not 0, there is one block a multiprocessor, or else several where a tile is too short for
        many warps. Others: as of Stream.fit.
        Raises UnsupportedModel where activations and ring do not fit.
        """
        arrays = 4 * (4 * num_pairs + 2)  # of the kernels: groups and combine weights
        most = min(num_experts, num_pairs) * tiles

        def stream(columns: int, each: int) -> Stream | None:
            room = (shared_bytes + BLOCK_BYTES) // each - BLOCK_BYTES - arrays
            work = form, slices, 1, columns, most, blocks * each, bulk
            try:
                found = Stream.fit(*work, room, counted=False, staged=staged)
            except UnsupportedModel:
                if (columns, each) == (1, 1):
                    raise
                return None
            # With all the room, so that no multiprocessor takes one block more than others.
            return found if each == 1 else replace(found, shared=room - STATIC_BYTES)

        for fewer in range(columns, 0, -1):
            found = stream(fewer, 1)
            if found is None:
                continue
            wanted = 16 if form in CODES_PER_BYTE and fewer <= 4 else 8
            for each in range(MAX_BLOCKS_EACH if bulk and not staged else 1, 1, -1):
                smaller = stream(fewer, each) if each * found.warps <= wanted else None
                if smaller is not None and smaller.warps == found.warps:
                    return cls(smaller, fewer, each)
            return cls(found, fewer, 1)
        raise AssertionError("the last raises")

    def macros(self) -> dict[str, int]:
        """What the kernel must know of this."""
        each = {"COLUMNS": self.columns, "BLOCKS_EACH": self.blocks_each}
        return self.stream.macros() | each
