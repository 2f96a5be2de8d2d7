"""The experts of 2 to 8 tokens on the GPU, grouped by expert: each expert's weights are read once.

Numba kernels choose experts and group the pairs; then grouped_gate_up, grouped_down and combine of
cuda_src/experts.cu.
"""

from npmoe.dtypes import Array
from npmoe.formats.fragments import COLUMNS, ROWS
from npmoe.formats.quant_tensor import QuantTensor
from npmoe.models.specs import ExpertSpec
from npmoe.models.stream import W_CODES, GroupedStream
from npmoe.ops.experts import PLAIN, SwiGLU
from npmoe.ops.group import group_by_expert, group_workspace
from npmoe.ops.route import top_k
from npmoe.runtime import nvtx
from npmoe.runtime.device import cupy
from npmoe.runtime.launch import launch
from npmoe.runtime.nvrtc import kernel

COMBINE_THREADS, COMBINED_ROWS = 128, 512
"""Of a block of combine, and the rows that it adds up."""


class GroupedExperts:
    """Buffers and launches for one number of tokens; the layers of a step share them."""

    def __init__(
        self,
        num_tokens: int,
        hidden_size: int,
        width: int,
        mlp: ExpertSpec,
        blocks: int,
        bulk: bool,
        shared_bytes: int,
        pairs_at_once: int,
        macros: dict[str, int],
    ) -> None:
        """width: of an expert, padded. blocks: the multiprocessors that run them. bulk,
        shared_bytes: as of Stream.fit. pairs_at_once: that one reading of an expert's weights
        serves, or fewer where their activations do not fit shared memory. macros: of the kernels,
        beside those of their sizes."""
        xp = cupy()
        self.num_tokens, self.hidden_size, self.width = num_tokens, hidden_size, width
        self.mlp, self.router, self.blocks, self.bulk = mlp, mlp.router, blocks, bulk
        self.macros = macros
        self.shared_bytes, self.pairs_at_once = shared_bytes, min(pairs_at_once, num_tokens)
        experts, each = self.router.num_experts, self.router.top_k
        self.topk_weights = xp.zeros((num_tokens, each), xp.float32)
        self.topk_ids = xp.zeros((num_tokens, each), xp.int32)
        self.expert_counts = xp.zeros(experts, xp.int32)
        self.expert_offsets = xp.zeros(experts + 1, xp.int32)
        self.sorted_pair_ids = xp.zeros(num_tokens * each, xp.int32)
        self.workspace = xp.zeros(group_workspace(num_tokens * each, experts), xp.int32)
        self.hidden = xp.zeros((num_tokens, each, width), xp.float32)
        self.pair_out = xp.zeros((num_tokens, each, hidden_size), xp.float32)

    def enqueue(
        self,
        x: Array,
        router_logits: Array,
        norm: Array,
        eps: float,
        gate_up: QuantTensor,
        gate_up_bias: Array | None,
        down: QuantTensor,
        down_bias: Array | None,
    ) -> None:
        """x `[T, H]` += the experts of its norm that router_logits `[T, E]` choose."""
        with nvtx.annotate("top_k"):
            chosen = self.topk_weights, self.topk_ids
            top_k(router_logits, self.router.top_k, self.router.renormalize, out=chosen)
        groups = self.expert_counts, self.expert_offsets, self.sorted_pair_ids
        with nvtx.annotate("group_by_expert"):
            group_by_expert(self.topk_ids, self.router.num_experts, groups, self.workspace)
        sizes = self.hidden_size, 2 * self.width
        stream = self._stream(gate_up.format, *sizes, staged=self.num_tokens)
        launch(
            kernel("experts", "grouped_gate_up", **self._macros(gate_up.format, stream)),
            (self.blocks,),
            stream.stream.threads,
            self.hidden,
            gate_up.codes,
            gate_up_bias,
            self.topk_weights,
            *groups,
            x,
            norm,
            eps,
            *activation_arguments(self.mlp.activation),
            shared=stream.stream.shared,
        )
        stream = self._stream(down.format, self.width, self.hidden_size)
        macros = self._macros(down.format, stream)
        launch(
            kernel("experts", "grouped_down", **macros),
            (self.blocks * stream.blocks_each,),
            stream.stream.threads,
            self.pair_out,
            down.codes,
            *groups,
            self.hidden,
            shared=stream.stream.shared,
        )
        launch(
            kernel("experts", "combine", **macros),
            (-(-self.hidden_size // COMBINED_ROWS), self.num_tokens),
            COMBINE_THREADS,
            x,
            self.pair_out,
            down_bias,
            self.topk_weights,
            self.topk_ids,
        )

    def _stream(self, form: str, columns: int, rows: int, staged: int = 0) -> GroupedStream:
        """For experts of so many rows and columns. staged: as of GroupedStream.fit."""
        return GroupedStream.fit(
            form,
            columns // COLUMNS,
            self.pairs_at_once,
            rows // ROWS,
            self.topk_ids.size,
            self.router.num_experts,
            self.blocks,
            self.bulk,
            self.shared_bytes,
            staged,
        )

    def _macros(self, form: str, stream: GroupedStream) -> dict[str, int]:
        return {
            "HIDDEN": self.hidden_size,
            "WIDTH": self.width,
            "EXPERTS": self.router.num_experts,
            "TOP_K": self.router.top_k,
            "TOKENS": self.num_tokens,
            "W_FORMAT": W_CODES[form],
            **stream.macros(),
            **expert_macros(self.mlp),
            **self.macros,
        }


def expert_macros(mlp: ExpertSpec) -> dict[str, int]:
    """Macros of cuda_src/experts.cu that biases and the activation ask for."""
    macros = {"BIASED": mlp.bias, "CLAMPED": mlp.activation != PLAIN}
    return {name: 1 for name, wanted in macros.items() if wanted}


def activation_arguments(kind: SwiGLU) -> tuple[float, float, float]:
    """alpha, limit and offset, as those kernels take them."""
    return kind.alpha, kind.limit, kind.offset
